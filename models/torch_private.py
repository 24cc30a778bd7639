"""The names of torch that are used here and that torch does not promise. All are in every release that is allowed."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ADDED_KEYWORDS = ("_stacklevel",)  # which functions of torch pass on beside those of their caller

__all__ = ["ADDED_KEYWORDS", "TorchDispatchMode", "tree_leaves", "version_of"]


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each write to a tensor or to a view of it."""
    return tensor._version
