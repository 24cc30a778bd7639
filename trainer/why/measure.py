"""Measuring a fit's own steps: the arms, one fit each, and the sections of a fit that are measured differently.

Steps run as in a fit: our Lightning module, upstream's loader, every hook. Imported when a look starts, since it needs
Lightning.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from detgraph.cfg import CaptureOptionError, CaptureOptions, check_contradictions
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.fit.eligibility import network_step_for, orthogonalization_for
from detgraph.trainer.fit.loop import DetectionModule, RecordingEnds, guarded
from detgraph.trainer.fit.trainer import BatchTooLarge, EpochBatches, LightningDetectionTrainer, LoopState
from detgraph.trainer.fit.under_lightning import fit
from detgraph.trainer.parts.network import EagerNetworkStep
from detgraph.trainer.parts.orthogonalization import EagerOrthogonalization

from .clock import Clock, Operations, TimedNetworkStep, Times, device_work, watched
from .report import BACKWARD, DATA, GIVEN_UP, OBJECTIVE, PHASES, UPDATE_PHASES, Arm, Phase
from .words import LookError, one_line

# Name and our keys of each way to run the fit. The first is the fit as it is, and the one that is looked into.
ARMS: tuple[tuple[str, dict], ...] = (
    ("eager", {}),
    ("replay", {"capture_network": True}),
    ("both", {"capture_network": True, "capture_orthogonalization": True}),
)

WARM_UP_STEPS = 3  # allocations, choice of algorithms, the first update's optimizer state, a recording
LEAST_STEPS, MOST_STEPS = 3, 400
DIGITS = 4  # of a millisecond
PROFILED_STEPS = 2  # a trace keeps every operator and launch: more steps take long to write and to read
WARM_UP_SHARE, STEPS_SHARE, PHASES_SHARE = 0.25, 0.4, 0.25  # of an arm's seconds; the rest is for profiles


class EndlessBatches(EpochBatches):
    """The loader's batches, pass after pass, as one epoch that does not end; waiting for a batch is a phase.

    A small data set would otherwise end an epoch every few steps, and the turn of an epoch is no part of a step.
    """

    def __init__(self, trainer: LightningDetectionTrainer, clock: Clock) -> None:
        super().__init__(trainer)
        self.clock = clock

    def __len__(self) -> int:
        return 1_000_000_000

    def _run(self) -> Iterator[dict]:
        while True:
            with closing(super()._run()) as batches:
                while True:
                    try:
                        with self.clock.phase(DATA):
                            batch = next(batches, None)
                    except Exception as e:  # whatever a data set raises: a picture that cannot be read, a label
                        raise LookError(
                            f"a batch cannot be loaded, as in training: {one_line(e)}. Mend or remove what it names."
                        ) from e
                    if batch is None:
                        break
                    yield batch
            self.begin()


@dataclass
class Section:
    """Steps in a row that are measured in one way: ``least`` to ``most`` steps, in whole windows, for ``seconds``.

    The weights are updated every ``accumulate`` steps, and ``window`` is a multiple of that. ``ready`` may end the
    section sooner: it is asked with the number of steps done.
    """

    seconds: float
    accumulate: int = 1
    window: int = 1
    least: int = LEAST_STEPS
    most: int = MOST_STEPS
    synchronized: bool = False
    profiler: profile | None = None
    operations: Counter | None = None  # of all steps by phase, where they are to be counted
    ready: Callable[[int], bool] = lambda done: False
    steps: list[tuple[Times, Times]] = field(default_factory=list)
    started: float = 0.0

    def over(self) -> bool:
        done = len(self.steps)
        if done < self.least or done % self.window:
            return False
        return done >= self.most or time.perf_counter() - self.started >= self.seconds or self.ready(done)

    def median(self, measure: Callable[[Times, Times], float]) -> float:
        """Return ``measure`` of a step's times: its mean over a window, and the median over the windows."""
        values = [measure(*step) for step in self.steps]
        windows = range(0, len(values), self.window)
        return round(median(sum(values[i : i + self.window]) / self.window for i in windows), DIGITS)


class LookModule(DetectionModule):
    """The module of a fit that runs the steps of its sections and stops: no validation, no checkpoint, one epoch."""

    def __init__(
        self, upstream: LightningDetectionTrainer, state: LoopState, clock: Clock, sections: list[Section]
    ) -> None:
        super().__init__(upstream, state, EndlessBatches(upstream, clock))
        self.clock = clock
        self.sections = list(sections)

    @guarded
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._begin()

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        with self.clock.phase(OBJECTIVE):  # what is neither preprocessing nor network
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor) -> None:
        with self.clock.phase(BACKWARD):
            super().backward(loss)

    @guarded
    def on_train_batch_end(self, outputs: object, batch: dict, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        section = self.sections[0]
        section.steps.append(self.clock.take_step())
        if section.over():
            self._end()
            if self.sections:
                self._begin()
            else:
                self.stopped_early = self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        self.batches.finish(early=True)

    def _begin(self) -> None:
        section, clock = self.sections[0], self.clock
        self.upstream.accumulate = section.accumulate
        if section.profiler is not None:
            section.profiler.start()
        clock.synchronized, clock.labelled = section.synchronized, section.profiler is not None
        clock.start_step()
        section.started = time.perf_counter()

    def _end(self) -> None:
        section, clock = self.sections.pop(0), self.clock
        if section.operations is not None:
            section.operations.update(clock.operations)
        clock.synchronized = clock.labelled = False
        clock.start_step()
        if section.profiler is not None:
            section.profiler.stop()


def look(trainer: LightningDetectionTrainer, seconds: float, tell: Callable[[str], None]) -> list[Arm]:
    """Measure every arm of a fit that upstream has set up, within about ``seconds``; nothing may train afterwards.

    Raises:
        BatchTooLarge: if the eager fit does not fit into the device's memory.
    """
    state = trainer.loop_state = trainer._begin()
    state.warmup = 0  # learning rates and accumulation as after the warm-up, which is most of a fit
    trainer.args.time = None
    arms = [_arm(trainer, name, keys) for name, keys in ARMS]
    share = seconds / sum(holders is not None for _, _, holders in arms)
    for arm, report, holders in arms:
        if holders is None:
            continue
        tell(f"measuring {arm.name}, about {share:.0f} s")
        trainer.capture, trainer.capture_report = report.options, report
        try:
            _measure(trainer, state, arm, holders, share)
        except BatchTooLarge:
            if arm is arms[0][0]:
                raise
            arm.blocked = "the device ran out of memory"
    # A profiler that has run may slow down what comes after it, so every arm is profiled in a fit of its own, at last.
    for arm, _, _ in arms:
        if arm.ran:
            tell(f"profiling {arm.name}")
            _, _, holders = _arm(trainer, arm.name, arm.capture)
            sections = profile_plan(trainer)
            with suppress(BatchTooLarge):  # then what the device does is not known
                _run(trainer, state, holders, sections)
                arm.phases = with_work(arm.phases, sections["profile"], state.accumulate)
    return [arm for arm, _, _ in arms]


Holders = tuple[EagerNetworkStep, EagerOrthogonalization]


def _arm(trainer: LightningDetectionTrainer, name: str, keys: dict) -> tuple[Arm, CaptureReport, Holders | None]:
    """Return an arm, its report, and what its recordings are held by, which is None where the arm cannot run."""
    options = CaptureOptions(**keys)
    arm, report = Arm(name, keys), CaptureReport(options)
    trainer.capture, trainer.capture_report = options, report
    try:
        check_contradictions(options, vars(trainer.args))
        (step, blocked), (orthogonalization, also_blocked) = network_step_for(trainer), orthogonalization_for(trainer)
        arm.blocked = blocked or also_blocked
    except CaptureOptionError as error:
        arm.blocked = str(error).rstrip(".")
    return arm, report, None if arm.blocked else (step, orthogonalization)


def _run(trainer: LightningDetectionTrainer, state: LoopState, holders: Holders, sections: dict[str, Section]) -> None:
    """Run one fit, its sections one after another; recordings are gone afterwards, and peaks of memory taken."""
    step, orthogonalization = holders
    cuda, report = trainer.device.type == "cuda", trainer.capture_report
    clock = Clock((lambda: torch.cuda.synchronize(trainer.device)) if cuda else lambda: None)
    trainer.network_step, trainer.orthogonalization = TimedNetworkStep(step, clock), orthogonalization
    trainer.optimizer.zero_grad()
    trainer._clear_memory()
    state.last_opt_step = -1
    report.start(trainer.device)
    patched = report.options.capture_orthogonalization  # the function is ours then, and no wrapper may come before it
    counts = any(section.operations is not None for section in sections.values())
    counting = Operations(clock) if counts else nullcontext()
    with watched(trainer, clock, orthogonalization=not patched), orthogonalization.in_force(), counting:
        module = LookModule(trainer, state, clock, list(sections.values()))
        try:
            fit(module, module.batches, trainer.device, [RecordingEnds(trainer)])
        finally:
            trainer.drop_recordings()
    report.stop()


def _measure(trainer: LightningDetectionTrainer, state: LoopState, arm: Arm, holders: Holders, seconds: float) -> None:
    """Run one arm as one fit and note what came out."""
    report, sections = trainer.capture_report, plan(trainer, state.accumulate, holders[0], seconds)
    _run(trainer, state, holders, sections)
    steps = sections["steps"]
    arm.steps_ms = [round(sum(ms.values()), DIGITS) for ms, _ in steps.steps]
    arm.step_ms = steps.median(lambda ms, host_ms: sum(ms.values()))
    arm.wait_ms = steps.median(lambda ms, host_ms: ms.get(DATA, 0.0))
    arm.phases = phases(steps, sections.get("phases", steps))
    arm.memory_bytes = dict(report.memory)
    arm.steps, arm.replayed = report.steps, report.replayed
    arm.recording_seconds, arm.note = recordings(report)


def recordings(report: CaptureReport) -> tuple[float, str | None]:
    """Return the seconds that the recordings that were asked for took, and what became of one later, if anything."""
    captures = [report.counts(key) for key in report.options.asked]
    notes = (
        f"{GIVEN_UP}: {counts.blocked}"
        if counts.blocked
        else f"{len(counts.retirements)} recordings were retired, the last: {counts.retirements[-1]['reason']}"
        for counts in captures
        if counts.blocked or counts.retirements
    )
    return round(sum(sum(counts.seconds.values()) for counts in captures), DIGITS), next(notes, None)


def plan(
    trainer: LightningDetectionTrainer, accumulate: int, step: EagerNetworkStep, seconds: float
) -> dict[str, Section]:
    """Return the sections of an arm by name, in order.

    On a CPU the host does the work itself, so the steps tell the phases as well. On CUDA the phases are measured in
    steps of their own, with the device synchronized in between.
    """
    loader = trainer.train_loader
    prefetched = loader.num_workers * (loader.prefetch_factor or 0)  # batches that were ready before they were needed

    def ready(done: int) -> bool:
        recording = step.recorded or trainer.capture_report.blocked or not trainer.capture.enabled
        return bool(recording) and done >= prefetched

    window = accumulate * -(-max(loader.num_workers, 1) // accumulate)
    whole = {"accumulate": accumulate, "window": window}
    sections = {"warm-up": Section(WARM_UP_SHARE * seconds, least=WARM_UP_STEPS, ready=ready)}
    if trainer.device.type != "cuda":
        return {**sections, "steps": Section((1 - WARM_UP_SHARE) * seconds, **whole)}
    sections["steps"] = Section(STEPS_SHARE * seconds, **whole)
    sections["phases"] = Section(PHASES_SHARE * seconds, **whole, synchronized=True)
    return sections


def profile_plan(trainer: LightningDetectionTrainer) -> dict[str, Section]:
    """Return the sections that tell what the device does in a step; on a CPU, what torch is handed there."""
    if trainer.device.type != "cuda":
        return {"profile": Section(0, operations=Counter(), most=PROFILED_STEPS, least=PROFILED_STEPS)}
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}  # recordings outlive no teardown
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    return {
        "warm-up": Section(0, least=WARM_UP_STEPS),
        "profile": Section(0, profiler=profiler, most=PROFILED_STEPS, least=PROFILED_STEPS),
    }


def phases(steps: Section, phased: Section) -> list[Phase]:
    """Return the phases of a step in order; what only some steps do is spread over all.

    Waiting for data is taken from ``steps``: where the host waits for the device between phases, the loader catches up.
    """
    found = []
    for name in PHASES:
        source = steps if name == DATA else phased
        ms = source.median(lambda ms, host_ms, name=name: ms.get(name, 0.0))
        host_ms = source.median(lambda ms, host_ms, name=name: host_ms.get(name, 0.0))
        if ms:
            found.append(Phase(name, ms, host_ms))
    return found


def with_work(measured: list[Phase], profiled: Section, accumulate: int) -> list[Phase]:
    """Return the phases with what profiled steps had the device do; these update the weights every time."""
    if profiled.operations is not None:
        work = {name: {"operations": count} for name, count in profiled.operations.items()}
        nothing = {"operations": 0}
    else:
        done = device_work(profiled.profiler)
        work = {name: {"launches": launches, "gpu_ms": ms} for name, (launches, ms) in done.items()}
        nothing = {"launches": 0, "gpu_ms": 0.0}
    by_name = {phase.name: phase for phase in measured}
    found = []
    for name in PHASES:
        steps = len(profiled.steps) * (accumulate if name in UPDATE_PHASES else 1)
        a_step = {key: round(total / steps, DIGITS) for key, total in work.get(name, nothing).items()}
        if name in by_name or name in work:
            found.append(replace(by_name.get(name, Phase(name, 0.0, 0.0)), **a_step))
    return found
