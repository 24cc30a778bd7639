"""What a recording of the network bakes in, taken when it is made and compared before every replay.

A recording re-issues kernels on addresses: what Python would have decided since is not asked again. So the signature
covers the input's form, the state of autograd, autocast and the numeric flags (`guards`), and each module, parameter
and buffer: identity, address, layout, precision, modes, scalar attributes, hooks. Values are not part of it: updates in
place (optimizer steps, ``copy_``, ``load_state_dict``) are picked up by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter

import torch
from torch import Tensor, nn

from . import torch_private
from .contents import difference
from .guards import Guard, Guards, first_difference, from_to, process_guards, process_obstacle
from .reach import INTERNAL, Reach
from .torch_private import CONTAINERS, MODULE_HOOKS

SCALARS = (bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device, torch.Size)

# State under which nothing may be recorded: the name in the context, and the value that allows a recording.
RECORDABLE = {
    "grad mode": True,
    "inference mode": False,
    "anomaly mode": False,
    "saved-tensor hooks": False,
    "dispatch modes": 0,
    "function modes": 0,
    "global module hooks": 0,
}


def recording_obstacle(root: nn.Module, images: Tensor) -> str | None:
    """Return what keeps the network from being recorded right now, or None: hooks and modes run Python each step.

    A recording sends no gradient to its input, so an input that wants one cannot be recorded either.
    """
    if images.requires_grad:
        return "input requires_grad: True"
    if obstacle := process_obstacle(images.device.type, RECORDABLE):
        return obstacle
    modules = [(path or type(module).__name__, module) for path, module in root.named_modules()]
    for path, module in modules:
        for name in MODULE_HOOKS:
            if getattr(module, name):
                return f"{name.strip('_').replace('_', ' ')} on module '{path}'"
    hooked = [name for name, parameter in root.named_parameters() if has_hooks(parameter)]
    if len(hooked) > 1:
        return f"hooks on {len(hooked)} parameters: {', '.join(hooked[:3])}"
    return None


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether Python sees the parameter's gradient on its way.

    A replay hands all gradients over at once, so hooks of several parameters run in another order than in an eager
    backward: what they share, a running norm or a random generator, meets them in that order.
    """
    return torch_private.parameter_hooked(parameter)


class Signature(Guards):
    """What one recording of ``root``, modules that compute on ``images``, bakes in.

    ``change(images)`` returns None while a replay would do what the modules would do, else a sentence: what changed,
    from what, to what, on which module or tensor. It holds the objects that it identifies, so that an identity
    cannot be taken over by a new object at the same address. ``more`` are guards of what calls ``root``. ``reach`` is
    what the modules keep elsewhere, as it was then.
    """

    def __init__(self, root: nn.Module, images: Tensor, more: Sequence[Guard] = ()) -> None:
        paths = {module: f"model.{path}" if path else "model" for path, module in root.named_modules()}
        self._modules = list(paths)
        self._paths = list(paths.values())
        self._images: Tensor | None = images
        self.reach = Reach(root, device=images.device)
        super().__init__([
            *self._input_guards(),
            *process_guards(images.device.type),
            *more,
            *self._module_guards(),
            *self._tensor_guards(),
        ])  # fmt: skip
        self._images = None

    def change(self, images: Tensor) -> str | None:
        """Compare with the present; ``images`` is the input of the step that is to be replayed."""
        self._images = images
        try:
            return super().change()
        finally:
            self._images = None

    # Readers ----------------------------------------------------------------------------------------------------

    def _input_guards(self) -> list[Guard]:
        def guard(name: str, read: Callable[[Tensor], object]) -> Guard:
            return Guard(f"input {name}", lambda: read(self._images), from_to(f"input {name}"))

        return [
            guard("shape", attrgetter("shape")),
            guard("dtype", attrgetter("dtype")),
            guard("device", attrgetter("device")),
            guard("strides", Tensor.stride),
            guard("requires_grad", attrgetter("requires_grad")),
        ]

    def _module_guards(self) -> list[Guard]:
        modules, paths = self._modules, self._paths
        own = [module.__dict__ for module in modules]
        containers = [getattr(module, name) for module in modules for name in CONTAINERS]
        hooks = [getattr(module, name) for module in modules for name in MODULE_HOOKS]
        scalars, others = [], []
        for attributes, path in zip(own, paths, strict=True):
            public = [key for key in attributes if key not in INTERNAL]
            names = [key for key in public if isinstance(attributes[key], SCALARS)]
            scalars.append((attributes, itemgetter(*names), path, names))
            others += [(attributes, key, path) for key in public if key not in names]
        self._held = [attributes[key] for attributes, key, _ in others]
        self._held += list(chain.from_iterable(map(dict.values, containers)))
        readers = [(attributes, read) for attributes, read, _, _ in scalars]
        kept = self.reach

        def attribute(baked: list, now: list) -> str:
            i = first_difference(baked, now)
            _, _, path, names = scalars[i]
            pairs = [(baked[i], now[i])] if len(names) == 1 else list(zip(baked[i], now[i], strict=True))
            j = next(j for j, (a, b) in enumerate(pairs) if a != b)
            return f"attribute {names[j]} of {path}: {pairs[j][0]!r} -> {pairs[j][1]!r}"

        filled = [container for container in containers if container]
        empty = [container for container in containers if not container]
        end = object()
        held = [*chain.from_iterable(map(dict.values, filled)), end]

        def elements() -> bool:
            """Whether each container holds the objects it held: compared one by one, nothing is built."""
            return not any(empty) and all(map(is_, chain(chain.from_iterable(map(dict.values, filled)), (end,)), held))

        def element(baked: bool, now: bool) -> str:
            for (container, size), kind in zip(sizes, kinds * len(modules), strict=True):
                if len(container) != size:
                    return f"number of {kind} of {owner[id(container)]}: {size} -> {len(container)}"
            before = iter(held)
            for container, kind in zip(containers, kinds * len(modules), strict=True):
                for name, value in container.items():
                    if value is not next(before):
                        return f"{kind[:-1]} {name} of {owner[id(container)]} was replaced"
            return "a parameter, buffer or module was replaced"

        dictionaries, present = itemgetter(*CONTAINERS, *MODULE_HOOKS), attrgetter("__dict__")
        placed = list(map(dictionaries, own))

        def in_place() -> bool:
            """Whether the modules still look into the dictionaries that the guards of their contents read."""
            try:
                return list(map(dictionaries, map(present, modules))) == placed  # by identity first
            except RuntimeError:  # another one, with other tensors
                return False

        def moved(baked: bool, now: bool) -> str:
            there = zip(paths, placed, map(dictionaries, map(present, modules)), strict=True)
            path = next(path for path, old, new in there if not all(map(is_, old, new)))
            return f"dictionaries of {path} were replaced"

        kinds = [name.strip("_") for name in CONTAINERS]
        sizes = [(container, len(container)) for container in containers]
        owner = {id(c): path for path, i in zip(paths, range(len(paths)), strict=True) for c in containers[3 * i :][:3]}

        def number(baked: list, now: list) -> str:
            i = first_difference(baked, now)
            new = [key for key in own[i] if key not in (scalars[i][3] + [k for a, k, _ in others if a is own[i]])]
            new = [key for key in new if key not in INTERNAL]
            return f"attributes of {paths[i]}: {baked[i]} -> {now[i]}" + (f" (new: {', '.join(new)})" if new else "")

        def hook(baked: bool, now: bool) -> str:
            i = next(i for i, registered in enumerate(hooks) if registered)
            return f"a hook ({MODULE_HOOKS[i % 4].strip('_')}) was registered on {paths[i // 4]}"

        def other(baked: list, now: list) -> str:
            _, key, path = others[first_difference(baked, now)]
            return f"attribute {key} of {path} was replaced"

        def kind_of(baked: list, now: list) -> str:
            i = first_difference(baked, now)
            return f"class of {paths[i]}: {baked[i].__name__} -> {now[i].__name__}"

        def content(baked: list, now: list) -> str:
            i = first_difference(baked, now)
            return f"{kept.paths[i]} {difference(baked[i], now[i])}"

        parameters = [p for m in modules for p in torch_private.own_parameters(m).values() if p is not None]

        def several_hooked() -> bool:
            return sum(map(has_hooks, parameters)) > 1

        return [
            Guard("module classes", lambda: list(map(type, modules)), kind_of),
            Guard("dictionaries", in_place, moved),
            Guard("contents of attributes", kept.reader(), content),
            Guard("module attributes", lambda: [read(attributes) for attributes, read in readers], attribute),
            Guard("set of module attributes", lambda: list(map(len, own)), number),
            Guard("object attributes", lambda: [id(attributes[key]) for attributes, key, _ in others], other),
            Guard("modules, parameters and buffers", elements, element),
            Guard("module hooks", lambda: any(hooks), hook),
            Guard("parameter hooks", several_hooked, lambda baked, now: "hooks were registered on several parameters"),
        ]

    def _tensor_guards(self) -> list[Guard]:
        named: dict[str, Tensor] = {}
        for module, path in zip(self._modules, self._paths, strict=True):
            held = torch_private.own_tensors(module)
            named |= {f"{path}.{name}": tensor for name, tensor in held if tensor is not None}
        named |= self.reach.tensors
        names, tensors = list(named), list(named.values())
        shaped = [(name, tensor) for name, tensor in named.items() if tensor.ndim > 1]
        shaped_names, shaped_tensors = [n for n, _ in shaped], [t for _, t in shaped]

        def guard(what: str, names: list[str], tensors: list[Tensor], read: Callable) -> Guard:
            def explain(baked: list, now: list) -> str:
                i = first_difference(baked, now)
                values = "" if what == "address" else f": {baked[i]} -> {now[i]}"
                return f"{what} of tensor {names[i]} changed{values}"

            return Guard(f"tensor {what}", lambda: list(map(read, tensors)), explain)

        return [
            guard("address", names, tensors, Tensor.data_ptr),
            guard("dtype", names, tensors, attrgetter("dtype")),
            guard("requires_grad", names, tensors, attrgetter("requires_grad")),
            guard("size", names, tensors, Tensor.numel),
            guard("strides", shaped_names, shaped_tensors, Tensor.stride),
        ]
