"""Every private name of torch that is used here, looked up once, when this module is imported.

torch promises none of them. What they are needed for differs:

* **Needed.** The exactness of a replay rests on it: modes, hooks, and who else uses a gradient's memory, have no public
  name. Where one is gone, `missing` says so, nothing is recorded, and the network is called as upstream calls it.
* **Useful.** Without one, something rare is not noticed, or memory not shared: `reduced` says what, and a fit that
  asked for a recording tells it.

A needed function that is gone raises `MissingName` when it is called; nobody does who has asked `missing` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

TESTED = "2.8 to 2.14"  # releases of torch: those that the package's requirements allow
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = ("_parameters", "_buffers", "_modules")


class MissingName(RuntimeError):
    """A private name of torch that is needed was called, and this torch does not have it."""


_missing: list[str] = []  # "torch.NAME, by which ..." in the order of this file
_reduced: list[tuple[str, bool]] = []  # the same of what is only useful, and whether it concerns CUDA devices alone


def _needed(path: str, purpose: str) -> Callable:
    """Return what ``path`` below torch names; where it is gone, note that and return what raises when it is called."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        _missing.append(f"torch.{path}, by which detgraph tells {purpose}")

        def gone(*args: object) -> None:
            raise MissingName(missing())

        return gone


def _useful(path: str, without: str, since: str = "0", cuda: bool = True) -> Callable | None:
    """Return what ``path`` below torch names, or None. It is missed only from the release on that brought it."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        if torch.__version__ >= since:
            _reduced.append((f"torch.{path}: {without}", cuda))
        return None


def missing() -> str | None:
    """Return why this torch can replay nothing, or None: the first needed name that it does not have."""
    if not _missing:
        return None
    return f"torch {torch.__version__} has no {_missing[0]} (tested with torch {TESTED})"


def reduced(device_type: str) -> list[str]:
    """Return, a sentence for each useful name that is gone, what recordings on such a device have to do without."""
    return [f"torch {torch.__version__} has no {text}" for text, cuda in _reduced if device_type == "cuda" or not cuda]


# Memory ---------------------------------------------------------------------------------------------------------------

storage_use_count = _needed("_C._storage_Use_Count", "who else uses a gradient's memory")
_needed("UntypedStorage._cdata", "one gradient's memory from another's")


def storage_key(tensor: Tensor) -> int:
    """Return what ``storage_use_count`` knows the storage of ``tensor`` by."""
    return tensor.untyped_storage()._cdata


_ONLY_MEMORY = "a fit reserves more memory"
_clear_workspaces = _useful("_C._cuda_clearCublasWorkspaces", _ONLY_MEMORY)
begin_allocate_to_pool = _useful("_C._cuda_beginAllocateCurrentStreamToPool", _ONLY_MEMORY)
end_allocate_to_pool = _useful("_C._cuda_endAllocateToPool", _ONLY_MEMORY)
release_pool = _useful("_C._cuda_releasePool", _ONLY_MEMORY)


def clear_cublas_workspaces() -> None:
    """Give the workspaces back that cuBLAS holds, if torch can; it takes new ones at need."""
    if _clear_workspaces is not None:
        _clear_workspaces()


def can_lend() -> bool:
    """Return whether eager work can be sent to a recording's memory; cuBLAS, too, has to leave it again."""
    return None not in (begin_allocate_to_pool, end_allocate_to_pool, release_pool, _clear_workspaces)


# Many tensors at once -------------------------------------------------------------------------------------------------

foreach_copy = _needed("_foreach_copy_", "many tensors' new values at once")
foreach_mul = _needed("_foreach_mul_", "many tensors' new values at once")
foreach_add = _needed("_foreach_add_", "many tensors' new values at once")

# Operations -----------------------------------------------------------------------------------------------------------


def _base(path: str, purpose: str) -> type:
    """Return a class to derive from; where it is gone, one that raises when it is made."""
    found = _needed(path, purpose)
    return found if isinstance(found, type) else type("Gone", (), {"__init__": found})


DispatchMode = _base("utils._python_dispatch.TorchDispatchMode", "what torch is handed to compute")


def computes(operation: object) -> bool:
    """Return whether an operation that a dispatch mode sees gives a device work: no view, no bare allocation."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return not view and not any(word in operation._schema.name for word in ("empty", "_unsafe_view"))


# Modes and hooks ------------------------------------------------------------------------------------------------------

dispatch_modes = _needed("_C._len_torch_dispatch_stack", "whether a dispatch mode is on")
function_modes = _needed("_C._len_torch_function_stack", "whether a function mode is on")
_saved_tensors_hooks = _needed("_C._autograd._top_saved_tensors_default_hooks", "whether saved tensors are packed")
for _name in MODULE_HOOKS:
    _needed(f"nn.modules.module._global{_name}", "whether every module is hooked")
for _name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
    _needed(f"Tensor.{_name}", "whether a parameter is hooked")
for _name in (*MODULE_HOOKS, *CONTAINERS):
    if _name not in vars(nn.Module()):
        _missing.append(f"torch.nn.Module().{_name}, by which detgraph tells what a module holds")


def saved_tensors_hooked() -> bool:
    """Return whether what autograd saves goes through hooks."""
    return _saved_tensors_hooks(False) is not None


def global_module_hooks() -> int:
    """Return how many hooks see every module of the process."""
    return sum(len(getattr(nn.modules.module, f"_global{name}")) for name in MODULE_HOOKS)


def module_hooked(module: nn.Module) -> bool:
    """Return whether a hook sees the calls of ``module``, or the backward pass through it."""
    return any(getattr(module, name) for name in MODULE_HOOKS)


def parameter_hooked(parameter: Tensor) -> bool:
    """Return whether Python sees the parameter's gradient on its way, or when it has arrived."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that ``module`` itself holds, not its parts: the dictionary that it looks them up in."""
    return module._parameters


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and tensor of the parameters and buffers that ``module`` itself holds."""
    return chain(module._parameters.items(), module._buffers.items())


# Flags ----------------------------------------------------------------------------------------------------------------

fp32_precision = _useful(
    "_C._get_fp32_precision_getter", "FP32's precision may change by operation without being noticed", "2.9", cuda=False
)
attention_order = _useful(
    "_C._get_sdp_priority_order", "the order of attention kernels may change without being noticed", "2.6", cuda=False
)
