"""Recording on CUDA: one side stream, and CUDA graphs that share one memory pool."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from . import torch_private
from .lending import Memory

T = TypeVar("T")
_snapshot_of_pool = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters


class CudaTape:
    """One CUDA graph. Replays are ordered after earlier work of the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


class CudaMemory(Memory):
    """A pool of graphs on ``device``. Its blocks belong to the stream that was captured: only there they are found.

    A capture takes what it is expected to need in large blocks in one piece first, and then everything out of that:
    what is free afterwards is in one piece, too, and of use to work with larger tensors than the recorded ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._expected = 0

    @property
    def lends(self) -> bool:
        return torch_private.can_lend()

    def measure(self) -> None:
        ours = (s for s in torch.cuda.memory_snapshot() if s["stream"] == self.stream.cuda_stream)
        self._expected = sum(s["total_size"] for s in ours if s["segment_type"] == "large")

    def take_in_one_piece(self) -> None:
        """Inside a capture: take and free what is expected. No kernel is recorded."""
        if self._expected:
            torch.UntypedStorage(self._expected, device=self.device)
        self._expected = 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    @contextmanager
    def routed(self) -> Iterator[None]:
        assert self.lends
        index = _index(self.device)
        with warnings.catch_warnings(), self.on_stream():
            # The last loss keeps gradient nodes alive, of the other stream: autograd synchronizes, and says so.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            torch_private.begin_allocate_to_pool(index, self.pool)
            try:
                yield
            finally:
                torch_private.end_allocate_to_pool(index, self.pool)
                torch_private.release_pool(index, self.pool)
                clear_workspaces()  # cuBLAS keeps one for each stream, and took it from the pool
                torch.cuda.synchronize(self.device)  # nothing reads any more what was freed, on whatever stream

    def in_use(self) -> set[int]:
        segments = torch.cuda.memory_snapshot(self.pool) if _snapshot_of_pool else torch.cuda.memory_snapshot()
        blocks = (b for s in segments if tuple(s["segment_pool_id"]) == tuple(self.pool) for b in s["blocks"])
        return {block["address"] for block in blocks if block["state"] == "active_allocated"}

    def key(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()


class CudaRecorder:
    """Captures on a side stream, in the error mode that concerns only the capturing thread.

    In the default mode a pinned allocation by a loader's or a plotting thread would invalidate the capture and fail
    in that thread, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: CudaMemory | None = None

    @contextmanager
    def session(self) -> Iterator[CudaMemory]:
        """Run the body on a side stream; it starts after the current stream's work and ends before what follows."""
        self._memory = memory = CudaMemory(self.device)
        try:
            with memory.on_stream():
                yield memory
                clear_workspaces()  # what cuBLAS took for this stream; in the pool, nobody else gets its place
        finally:
            self._memory = None

    def capture(self, run: Callable[[], T]) -> tuple[T, CudaTape]:
        """Capture ``run``; a failed capture leaves nothing behind, and the first error is the one that is raised."""
        graph = torch.cuda.CUDAGraph()
        collect = gc.isenabled()
        gc.disable()  # a collection would destroy graphs or events of others in the middle of the capture
        try:
            graph.capture_begin(pool=self._memory.pool, capture_error_mode="thread_local")
            self._memory.take_in_one_piece()
            result = run()
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            graph.reset()
            raise
        finally:
            if collect:
                gc.enable()
        return result, CudaTape(graph)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed, whether torch has ended it or not.

        What a capture may not do (reading a value on the host, a copy from pageable memory) makes it invalid, and then
        torch stops at CUDA's error: allocations still go to the graph's pool, which keeps its blocks for good, and the
        device's generator still counts for the graph, so that the next random number of the process is an error.
        """
        with suppress(RuntimeError):
            graph.capture_end()
            return
        with suppress(RuntimeError):  # not if it had come so far
            if torch_private.can_lend():
                torch_private.end_allocate_to_pool(_index(self.device), self._memory.pool)
                torch_private.release_pool(_index(self.device), self._memory.pool)
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            another = torch.cuda.CUDAGraph()  # a whole capture, of nothing, hands the generator back
            another.capture_begin(capture_error_mode="thread_local")
            another.capture_end()
            another.reset()

    def settle(self, recent: bool = False) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect(1 if recent else 2)
        clear_workspaces()
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def clear_workspaces() -> None:
    """Give the workspaces back that cuBLAS holds, 64 MiB for each stream on Hopper; it takes new ones at need."""
    torch_private.clear_cublas_workspaces()
