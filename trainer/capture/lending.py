"""Memory of a recording, used by eager work between two replays.

Between replays, what a recording keeps for activations lies idle, while eager work beside it (validation, a smaller
last batch) would reserve as much again. So that work may allocate there, on one condition: nothing of it may stay,
since the next replay writes to the same addresses. What is still alive before that replay is moved out, and whoever
lends asks the allocator, not the code that ran, whether something is left.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Memory(ABC):
    """The memory of one recording. A recorder's session makes it, its tapes work in it."""

    @contextmanager
    def lend(self) -> Iterator[Loan]:
        """Run the body with its allocations in this memory; the loan has to be settled before a tape replays.

        After an exception it cannot be: the recording must go.
        """
        loan = Loan(self, self.in_use())
        with self.routed():
            yield loan

    @property
    @abstractmethod
    def lends(self) -> bool:
        """Whether ``routed`` does what it says; where torch cannot, it leaves allocations where they are."""

    @abstractmethod
    def on_stream(self) -> AbstractContextManager[None]:
        """Run the body where the recorded work was made, ordered after earlier and before later work.

        Its allocations are its own, in a cache that the next body of the kind finds again.
        """

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


@dataclass
class Loan:
    """What eager work has allocated in ``memory``, where ``before`` was in use when it began."""

    memory: Memory
    before: set[int]

    def settle(self, survivors: Iterable[Tensor | None]) -> int:
        """Move what is still alive to memory of its own; return how many storages could not be moved.

        What is moved keeps its identity, its aliases and its values. ``survivors`` are the tensors that are known to
        stay; others are looked for among all tensors of the process, which takes longer.
        """
        left = self._left()
        if left:
            left = self._move(survivors, left)
        if left:
            left = self._move(all_tensors(), left)
        if left:
            gc.collect()  # in a cycle, they count as alive
            left = self._move(all_tensors(), left)
        return len(left)

    def _left(self) -> set[int]:
        return self.memory.in_use() - self.before

    def _move(self, tensors: Iterable[Tensor | None], left: set[int]) -> set[int]:
        """Move those of ``tensors`` whose storage is in ``left``; return what is left after that."""
        for tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                continue
            try:
                storage = tensor.untyped_storage()
                key = self.memory.key(storage)
            except (RuntimeError, ValueError, NotImplementedError):
                continue  # a parameter without values yet, a wrapper: nothing of it is here, or the allocator will say
            if key in left:
                self.memory.move_out(storage)
        return self._left()


def all_tensors() -> Iterator[Tensor]:
    """Yield every tensor of the process that has a Python object."""
    return (found for found in gc.get_objects() if issubclass(type(found), Tensor))


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules keep as plain attributes, neither parameters nor buffers.

    An objective that a model keeps is no module: its attributes, and those of its parts, are among them.
    """
    objective = vars(module).get("criterion")
    parts = [objective, *getattr(objective, "__dict__", {}).values()]
    for part in (*module.modules(), *parts):
        yield from (value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Tensor))
