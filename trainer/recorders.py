"""Recording on CUDA: one side stream, and CUDA graphs that share one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


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


class CudaRecorder:
    """Captures on a side stream, in the error mode that concerns only the capturing thread.

    In the default mode a pinned allocation by a loader's or a plotting thread would invalidate the capture and fail
    in that thread, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Run the body on a side stream; it starts after the current stream's work and ends before what follows."""
        self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)
            self._pool = None

    def capture(self, run: Callable[[], T]) -> tuple[T, CudaTape]:
        """Capture ``run``; a failed capture leaves no graph behind, and the first error is the one that is raised."""
        graph = torch.cuda.CUDAGraph()
        collect = gc.isenabled()
        gc.disable()  # a collection would destroy graphs or events of others in the middle of the capture
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:
                    pass  # the capture is invalid, as the error on its way says
                raise
            graph.capture_end()
        except BaseException:
            graph.reset()
            raise
        finally:
            if collect:
                gc.enable()
        return result, CudaTape(graph)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
