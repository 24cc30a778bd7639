"""Memory of a recording, used by eager work between two replays.

Between replays, what a recording keeps for activations lies idle, while eager work beside it (validation, a smaller
last batch) would reserve as much again. So that work may allocate there, on one condition: nothing of it may stay,
since the next replay writes to the same addresses. What outlives the work is moved out, and whoever lends asks the
allocator, not the code that ran, whether something is left.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Loan:
    """How a loan ended: ``left`` is the number of storages that could not be moved out; the recording is unusable."""

    left: int = 0


class Memory(ABC):
    """The memory of one recording. A recorder's session makes it, its tapes work in it."""

    @contextmanager
    def lend(self, survivors: Callable[[], Iterable[Tensor | None]]) -> Iterator[Loan]:
        """Run the body with its allocations in this memory; no tape may replay before it has ended.

        What the body leaves alive keeps its identity, its aliases and its values, and moves to memory of its own.
        ``survivors`` returns, after the body, the tensors that are known to stay; others are looked for among all
        tensors of the process, which takes longer. After an exception nothing is moved: the recording must go.
        """
        before = self.in_use()
        loan = Loan()
        with self.routed():
            yield loan
        left = self.in_use() - before
        if left:
            left = self._move(survivors(), left, before)
        if left:
            left = self._move(all_tensors(), left, before)
        if left:
            gc.collect()  # in a cycle, they count as alive
            left = self._move(all_tensors(), left, before)
        loan.left = len(left)

    def _move(self, tensors: Iterable[Tensor | None], left: set[int], before: set[int]) -> set[int]:
        """Move those of ``tensors`` whose storage is in ``left`` out of this memory; return what is still in it."""
        for tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if self.key(storage) in left:
                self.move_out(storage)
        return self.in_use() - before

    @abstractmethod
    def measure(self) -> None:
        """Note what the session's eager passes have reserved by now: the capture will need about as much."""

    @abstractmethod
    def routed(self) -> AbstractContextManager[None]:
        """Run the body with its allocations in this memory, ordered after earlier and before later work."""

    @abstractmethod
    def in_use(self) -> set[int]:
        """Return a key for each storage that now lives in this memory."""

    @abstractmethod
    def key(self, storage: torch.UntypedStorage) -> int:
        """Return the key of ``storage``, wherever it lives."""

    def move_out(self, storage: torch.UntypedStorage) -> None:
        """Give ``storage`` another place, with its content; the tensors over it follow. Runs outside of ``routed``."""
        values = storage.clone()
        storage.resize_(0)
        storage.resize_(values.nbytes())
        storage.copy_(values)


def all_tensors() -> Iterator[Tensor]:
    """Yield every tensor of the process that has a Python object."""
    return (found for found in gc.get_objects() if issubclass(type(found), Tensor))


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules keep as plain attributes, neither parameters nor buffers."""
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))
