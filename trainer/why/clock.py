"""The clock of a look: what a step spends its time in, by phases, and what of that the device works.

Phases are marked by wrappers on instances, which are taken back. Host times come from the clock, the device's from the
profiler's trace of a few steps.
"""

from __future__ import annotations

import functools
import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.profiler import profile, record_function
from ultralytics.optim import muon

from detgraph.trainer.capture import torch_private
from detgraph.trainer.fit.trainer import LightningDetectionTrainer
from detgraph.trainer.parts.network import EagerNetworkStep

from .report import DATA, EMA, FORWARD, LOOP, OPTIMIZER, ORTHOGONALIZATION, PREPROCESS, WHOLE

DEVICE_EVENTS, LAUNCH_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
LABEL = "why:"

Times = dict[str, float]  # milliseconds by phase


class Clock:
    """Times of nested phases, each without those inside it, so that the phases of a step add up to the step.

    With ``synchronized``, ``synchronize`` waits for the device between phases. With ``labelled``, the phases are in the
    profiler's trace, one after another without gaps. What is in no phase is the loop's.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self.synchronized = self.labelled = False
        self._stack = [LOOP]
        self._label: record_function | None = None
        self.start_step()

    @property
    def now(self) -> str:
        """The phase that the step is in."""
        return self._stack[-1]

    def start_step(self) -> None:
        """Start a step, with the device idle and no operation counted."""
        self.synchronize()
        self.operations: Counter[str] = Counter()
        self._ms, self._host_ms = Counter(), Counter()
        self._last = time.perf_counter()
        self._relabel()

    def take_step(self) -> tuple[Times, Times]:
        """End the step, start the next; returns the times until the device had finished, and until all was issued."""
        self._charge()
        taken = dict(self._ms), dict(self._host_ms)
        self._ms, self._host_ms = Counter(), Counter()
        return taken

    def _charge(self) -> None:
        """Give the time since the last change of phase to the phase that it was spent in."""
        issued = time.perf_counter()
        if self.synchronized:
            self.synchronize()
        now, name = time.perf_counter(), self.now
        self._ms[name] += 1e3 * (now - self._last)
        self._host_ms[name] += 1e3 * (issued - self._last)
        self._last = now

    def _relabel(self) -> None:
        """End the label of the last phase in the trace, and begin that of the present one."""
        if self._label is not None:
            self._label.__exit__(None, None, None)
        self._label = record_function(LABEL + self.now).__enter__() if self.labelled else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        self._relabel()
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()
            self._relabel()

    def timed(self, name: str, function: Callable) -> Callable:
        """Return ``function`` as the phase ``name``."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run


class Operations(torch_private.DispatchMode):
    """Counts what torch is handed to compute, in the phase that the clock is in; backward passes on the CPU included.

    On a GPU each is a launch or a few. What gives a GPU no work does not count: views, bare allocations, and what the
    loader does on the host.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch_private.computes(func) and self.clock.now != DATA:
            self.clock.operations[self.clock.now] += 1
        return func(*args, **(kwargs or {}))


class TimedNetworkStep:
    """A network step whose calls are phases; everything else is the network step's own."""

    def __init__(self, step: EagerNetworkStep, clock: Clock) -> None:
        self._step = step
        self._forward, self.whole = clock.timed(FORWARD, step.__call__), clock.timed(WHOLE, step.whole)

    def __call__(self, images: Tensor) -> dict:
        return self._forward(images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@contextmanager
def watched(trainer: LightningDetectionTrainer, clock: Clock, orthogonalization: bool) -> Iterator[None]:
    """Make what a step calls phases of ``clock``, for the time of the context."""
    places = [(trainer, "preprocess_batch", PREPROCESS), (trainer, "optimizer_step", OPTIMIZER)]
    places.append((trainer.ema, "update", EMA))
    if orthogonalization:  # MuSGD looks the function up in its module at every step
        places.append((muon, "muon_update", ORTHOGONALIZATION))
    with ExitStack() as stack:
        for owner, name, phase in places:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, clock.timed(phase, getattr(owner, name)))
        yield


def device_work(profiled: profile) -> dict[str, tuple[int, float]]:
    """Return what the labelled phases of a finished profile had the device do; see `work_by_phase`."""
    with TemporaryDirectory(prefix="detgraph-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return work_by_phase(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def work_by_phase(events: list[dict]) -> dict[str, tuple[int, float]]:
    """Return phase -> (number of launches, milliseconds the device worked) from the events of a trace.

    A launch is what the host issues at once: a kernel, a copy, a fill, or a recorded graph of many. It belongs to the
    phase in which the host issued it, from whatever thread: a backward pass issues from another one.
    """
    labels = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(LABEL))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(LABEL)
    )
    begins = [begin for begin, _, _ in labels]
    issued = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in LAUNCH_EVENTS and "args" in e}
    work: dict[str, tuple[int, float]] = {}
    graphs: set[int] = set()  # the launches seen: all of a graph's kernels have one
    for e in events:
        if e.get("cat") not in DEVICE_EVENTS:
            continue
        correlation = e.get("args", {}).get("correlation")
        at = issued.get(correlation, e["ts"])
        place = bisect_right(begins, at) - 1
        if place < 0 or at > labels[-1][1]:
            continue  # before or after the labelled steps
        name = labels[place][2]
        launches, ms = work.get(name, (0, 0.0))
        new = correlation is None or correlation not in graphs
        graphs.add(correlation)
        work[name] = launches + new, ms + e["dur"] / 1e3
    return work
