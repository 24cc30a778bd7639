"""Gradients that a recording writes again at every replay, and how they get along with ``.grad``.

Autograd adopts what a backward returns as ``.grad`` where that is None, and adds to it where it is not. A replay
writes to the same storage every time: what was adopted must have left it by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from . import torch_private


class ReusedGradients:
    """The static gradients of one recording, one per parameter or None, and a second set for what has to outlive them.

    How many tensors use a storage is torch's own count, so every user shows: ``.grad``, a hook's list, a view.
    Where the last window of accumulation was longer than one backward, the next one is handed the second set at its
    first backward; a window of one step pays no copy.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        self.all = tuple(gradients)
        self.parameters = [parameter for parameter, _ in pairs]
        self.static = [gradient for _, gradient in pairs]
        self.own: list[Tensor] = []
        self.accumulates = False
        self._own_are_out = False
        self._storages = list(map(torch_private.storage_key, self.static))
        self._own_storages: list[int] = []
        self._own_unused: list[int] = []
        self._unused = self._count(self._storages)

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before the storage goes: give the live gradients of ``parameters`` that are in it storage of their own."""
        for parameter in self._adopters(parameters):
            parameter.grad = parameter.grad.clone()

    def vacate(self, parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
        """Before a replayed forward: move the live gradients of ``parameters`` that are in this storage out of it.

        Already the forward may write to it: memory that a recorded backward frees as it goes holds activations first
        and gradients later. Returns a parameter whose last gradient is in use elsewhere and cannot be moved, or None.
        """
        if self._own_are_out:  # handed out at the last backward: still there if the window goes on
            self.accumulates = not self._own_is_free()
            self._own_are_out = False
        if self._count(self._storages) == self._unused:
            return None
        adopters = self._adopters(parameters)
        if adopters:
            self.accumulates = True
            for parameter, own in zip(adopters, self._copies([p.grad for p in adopters]), strict=True):
                parameter.grad = own
        now = self._count(self._storages)
        return next((p for p, a, b in zip(self.parameters, self._unused, now, strict=True) if b > a), None)

    def hand_out(self) -> list[Tensor | None]:
        """After a replayed backward: return a fresh alias per gradient, for autograd to adopt or to add.

        Where a window is to go on, a gradient that would be adopted is an alias of the second set instead; where there
        is no room for one, it leaves before the next forward, as in the first window.
        """
        wanted = self.accumulates and all(p.grad is None for p in self.parameters)
        if not wanted or not self._have_own():
            return [None if gradient is None else gradient.detach() for gradient in self.all]
        with torch.no_grad():
            torch_private.foreach_copy(self.own, self.static)
        self._own_are_out = True
        handed = iter([own.detach() for own in self.own])
        return [None if gradient is None else next(handed) for gradient in self.all]

    def _have_own(self) -> bool:
        """Return whether there is a second set that nobody uses, after making one where that is needed."""
        if not self.own or not self._own_is_free():  # none yet, or somebody kept some
            try:
                own = [torch.empty_like(gradient) for gradient in self.static]
            except RuntimeError:
                return False
            self.own, self._own_storages = own, list(map(torch_private.storage_key, own))
            self._own_unused = self._count(self._own_storages)
        return True

    def _own_is_free(self) -> bool:
        return self._count(self._own_storages) == self._own_unused

    def _adopters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        static = set(map(_address, self.static))
        return [p for p in parameters if p.grad is not None and _address(p.grad) in static]

    @staticmethod
    def _copies(gradients: list[Tensor]) -> list[Tensor]:
        copies = [torch.empty_like(gradient) for gradient in gradients]
        with torch.no_grad():
            torch_private.foreach_copy(copies, gradients)
        return copies

    @staticmethod
    def _count(storages: list[int]) -> list[int]:
        return list(map(torch_private.storage_use_count, storages))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
