"""What goes between host and device in an objective: host data is put on the device once, and all else is refused.

A recording cannot hold a copy from memory of the host, nor wait for the device: its replay would not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .counted import UnknownOperation
from .torch_private import TorchDispatchMode, tree_leaves, version_of

MAY_BE_DYNAMIC = {"aten::index", "aten::_unsafe_index"}  # only with a mask, which is looked for
INDEXING = MAY_BE_DYNAMIC | {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
READS = {"aten::is_nonzero", "aten::nonzero_static", "aten::histc"}
READ_ON_HOST = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.cpu}  # beside what dispatches
MASKS = (torch.bool, torch.uint8)
REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class Constants:
    """Host data that the objective has put on the device, in the order of its requests, each with what asked for it."""

    def __init__(self) -> None:
        self._made: list[tuple[object, Tensor, int]] = []

    def get(self, at: int, key: object, make: Callable[[], Tensor] | None) -> Tensor:
        """Return the tensor of the request number ``at``; made by ``make``, where there is one, when it is new."""
        if at == len(self._made) and make:
            tensor = make()
            self._made.append((key, tensor, version_of(tensor)))
        known, tensor, _ = self._made[at] if at < len(self._made) else (None, None, 0)
        if known != key:
            raise UnknownOperation(f"host data differs from what was learned: {key} where {known} was")
        return tensor

    def check(self) -> None:
        """Raise ``UnknownOperation`` if one was written to: the next pass would not find what was made."""
        for key, tensor, version in self._made:
            if version_of(tensor) != version:
                raise UnknownOperation(f"host data is written to on the device: {key}")


class Refusing(TorchDispatchMode):
    """Refuses what no recording can hold, wherever in an operation it happens."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in READS or name not in MAY_BE_DYNAMIC and any(tag in func.tags for tag in REFUSED):
            raise UnknownOperation(f"{name} depends on the data, on the host or on a random generator")
        if name in INDEXING and any(getattr(leaf, "dtype", None) in MASKS for leaf in tree_leaves(args[1])):
            raise UnknownOperation(f"{name} with a mask")
        result = func(*args, **(kwargs or {}))
        tensors += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != self._device for tensor in tensors):
            raise UnknownOperation(f"{name} between host and device")
        return result
