"""A recorder for machines without CUDA, used by tests only.

It records the operations that a pass dispatches, below autograd and autocast, and replays them on the very tensors
they used: so it keeps every aliasing rule of a CUDA graph. Addresses are baked in (of buffers, too: a tensor that
moves to other storage is not followed), with Python attributes, modes, scalars and ``requires_grad``; hooks of modules
and torch's dispatch and function modes do not see a replay; outputs and gradients are overwritten by the next
replay, and gradients already by the next forward, since a pool reuses what a backward frees for what it returns;
what was allocated in lent memory and outlived the loan is overwritten by the next replay;
recording runs the network for real and so moves buffers and generators. What would wait for the device
(reading a value on the host) cannot be recorded. It models no streams, memory pools or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from detgraph.trainer.capture.lending import Memory

T = TypeVar("T")
HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::unique_dim"}
DRAWS = {"dropout", "rand", "randn", "randint", "uniform", "normal", "bernoulli", "rand_like", "randn_like"}


class Leaving:
    """A storage that is to leave emulated memory. The place that it gives up stays the memory's, as a pool's does.

    The allocator of the CPU would hand out the same place again at once: moved or not, nobody could tell.
    """

    def __init__(self, storage: torch.UntypedStorage, kept: list[torch.UntypedStorage]) -> None:
        self._storage, self._kept, self._place = storage, kept, storage.data_ptr()

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def resize_(self, size: int) -> None:
        self._storage.resize_(size)
        while self._storage.nbytes() and self._storage.data_ptr() == self._place:
            self._storage.resize_(0)
            self._kept.append(torch.UntypedStorage(size))
            self._storage.resize_(size)


class EmulatedMemory(Memory, TorchDispatchMode):
    """Knows the storages that were allocated while it was lent; a replay writes over those that still live in it.

    Who lives in it is told by the address alone: a storage has left when it lies elsewhere.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._tenants: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kept: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in inputs:
                self._tenants[storage._cdata] = StorageWeakRef(storage), storage.data_ptr()
        return result

    lends = True

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def measure(self) -> None:
        """Nothing is reserved here."""

    def routed(self) -> EmulatedMemory:
        return self  # as a dispatch mode

    def in_use(self) -> set[int]:
        living = {key: place for key, place in self._tenants.items() if not place[0].expired()}
        self._tenants = {key: place for key, place in living.items() if self._storage(key).data_ptr() == place[1]}
        return set(self._tenants)

    @staticmethod
    def _storage(key: int) -> torch.UntypedStorage:
        return torch.UntypedStorage._new_with_weak_ptr(key)

    def key(self, storage: torch.UntypedStorage) -> int:
        return storage._cdata

    def move_out(self, storage: torch.UntypedStorage) -> None:
        if storage.resizable():
            super().move_out(Leaving(storage, self._kept))
        else:  # a digest has let NumPy look at it, which no storage on a GPU knows: it cannot move, and counts as gone
            del self._tenants[storage._cdata]

    def overwrite(self) -> None:
        for key in self.in_use():
            self._storage(key).fill_(255)


class PoisonedGenerator(TorchFunctionMode):
    """What a device's random generator is after a capture that became invalid: the next number drawn is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "").strip("_") in DRAWS:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly. (emulated)")
        return func(*args, **(kwargs or {}))


class EmulatedTape(TorchDispatchMode):
    """The operations of one pass; ``replay`` runs them again on the same tensors, results written in place."""

    def __init__(self, memory: EmulatedMemory, replayed: Callable[[], None]) -> None:
        super().__init__()
        self.memory = memory
        self.replayed = replayed
        self.calls: list[tuple] = []
        self.later_results: list[Tensor] = []
        self.released = False
        self.valid = True
        self._places: dict[int, tuple[Tensor, Tensor]] = {}

    def _place(self, tensor: Tensor) -> Tensor:
        """Return an alias of the memory that ``tensor`` has now; whatever happens to the tensor, it stays there."""
        known = self._places.get(id(tensor))
        if known is None or known[1].data_ptr() != tensor.data_ptr():
            known = self._places[id(tensor)] = (tensor, tensor.detach())
        return known[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in HOST_READS:
            self.valid = False
            raise RuntimeError(f"operation not permitted when stream is capturing (emulated): {func._schema.name}")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [leaf.untyped_storage().data_ptr() not in inputs for leaf in leaves]
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if any(fresh) or mutates:  # a pure view needs no replay: its tensor still looks at the same memory
            args, kwargs, leaves = tree_map_only(Tensor, self._place, (args, kwargs, leaves))
            self.calls.append((func, args, kwargs, leaves, fresh))
        return result

    def replay(self) -> None:
        assert not self.released, "replay after release"
        self.replayed()
        below = torch._C._AutoDispatchBelowAutograd()
        try:
            with (
                torch.no_grad(),
                torch.autocast("cpu", enabled=False),
                torch._C._DisableTorchDispatch(),
                torch._C.DisableTorchFunction(),
            ):
                self.memory.overwrite()
                for tensor in self.later_results:
                    tensor.fill_(float("nan"))
                for func, args, kwargs, leaves, fresh in self.calls:
                    result = func(*args, **kwargs)
                    again = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                    for old, new, is_fresh in zip(leaves, again, fresh, strict=True):
                        if is_fresh:
                            old.copy_(new)
        finally:
            del below

    def release(self) -> None:
        self.calls = []
        self.later_results = []
        self._places = {}
        self.released = True


class EmulatingRecorder:
    """Stands in for the CUDA recorder; ``recorded`` counts captures, ``replays`` the replays of all their tapes.

    ``fail_with`` makes the next capture raise.

    With ``shared_pool`` off, the tapes of a recording do not reuse each other's memory, and the gradients of a backward
    live until the next backward. A capture that has become invalid poisons the generator, as torch does on CUDA, until
    it is abandoned in the way that heals it; with ``heals`` off, it is not.
    """

    def __init__(self, shared_pool: bool = True, heals: bool = True) -> None:
        self.shared_pool = shared_pool
        self.heals = heals
        self.poison: PoisonedGenerator | None = None
        self.recorded = self.replays = 0
        self.fail_with: BaseException | None = None
        self._tapes: list[EmulatedTape] = []

    @contextmanager
    def session(self) -> Iterator[EmulatedMemory]:
        self._tapes, self._memory = [], EmulatedMemory()
        yield self._memory

    def capture(self, run: Callable[[], T]) -> tuple[T, EmulatedTape]:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        tape = EmulatedTape(self._memory, self._count)
        try:
            with tape:
                result = run()
        except BaseException:
            if not tape.valid and not self.heals and self.poison is None:
                self.poison = PoisonedGenerator()
                self.poison.__enter__()
            raise
        for earlier in self._tapes if self.shared_pool else ():
            earlier.later_results += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._tapes.append(tape)
        self.recorded += 1
        return result, tape

    def _count(self) -> None:
        self.replays += 1

    def settle(self, recent: bool = False) -> None:
        """Nothing to wait for."""
