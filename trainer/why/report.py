"""What a look at a fit found, what bounds the fit, and what to do about it.

Plain data and pure functions: nothing here touches a device. `why_measure` fills it in, `why_show` shows it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .words import SCHEMA

GIVEN_UP = "the rest trained eagerly"  # how the note of an arm begins that lost its recording for good

# Phases of a step in the order they happen. All are disjoint, so they add up to the step; ORTHOGONALIZATION is the part
# of the optimizer that MuSGD's Newton-Schulz iterations take.
DATA, PREPROCESS, FORWARD, OBJECTIVE, BACKWARD = "data wait", "preprocess", "forward", "objective", "backward"
OPTIMIZER, ORTHOGONALIZATION, EMA, LOOP = "optimizer", "orthogonalization", "ema", "loop"
WHOLE = "forward and objective"  # of a model that must be called whole
PHASES = (DATA, PREPROCESS, FORWARD, WHOLE, OBJECTIVE, BACKWARD, OPTIMIZER, ORTHOGONALIZATION, EMA, LOOP)
UPDATE_PHASES = (OPTIMIZER, ORTHOGONALIZATION, EMA)  # once in a window of accumulation, not once a step

# Thresholds, as shares of a step. A GPU that works nine tenths of it leaves one tenth to win by helping the host.
GPU_BOUND = 0.9
# One that works half of it waits for as long as it works: from there on the host, not the GPU, sets the pace.
HOST_BOUND = 0.5
# A fifth of the step spent waiting for a batch is more than the loader's own hand-over (a queue, a copy) takes.
DATA_BOUND = 0.2
# Two looks at one fit differ by a few per cent on a machine that does other things as well.
WORTHWHILE = 0.05
MOST_FAULTS = 5  # in the data that are told one by one; all of them are in the JSON file
# A GPU cannot work longer than a step takes. The profiled steps are others than the timed ones: a little is no sign.
SHARED = 1.1


@dataclass
class Phase:
    """One part of a step, in milliseconds a step, without the parts that are phases of their own.

    ``ms`` runs until the device had finished, ``host_ms`` until the host had issued the work (the same on a CPU).
    ``gpu_ms`` is what the GPU worked, and ``launches`` counts kernels, copies, fills and graphs; None without a GPU.
    ``operations`` counts what torch was handed to compute; None with a GPU, where it is not measured.
    """

    name: str
    ms: float
    host_ms: float
    gpu_ms: float | None = None
    launches: float | None = None
    operations: float | None = None


@dataclass
class Arm:
    """One way to run the fit: ``capture`` are our keys that make it, ``blocked`` is why it could not run.

    ``steps_ms`` are the measured steps, free of synchronisation of ours. A window is as many steps as bring an update
    of the weights and a batch from every worker; ``step_ms`` is the time of a step, and ``wait_ms`` the time of it
    spent waiting for a batch: means over a window, median over windows. ``memory_bytes`` holds ``peak_allocated`` and
    ``peak_reserved``, and is empty on a CPU. Of all ``steps`` that the arm ran, ``replayed`` were replayed.
    ``recording_seconds`` is what recording and checking took, once. ``note`` is what became of a recording later on.
    """

    name: str
    capture: dict = field(default_factory=dict)
    blocked: str | None = None
    step_ms: float = 0.0
    wait_ms: float = 0.0
    steps_ms: list[float] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    memory_bytes: dict = field(default_factory=dict)
    steps: int = 0
    replayed: int = 0
    recording_seconds: float = 0.0
    note: str | None = None

    @property
    def ran(self) -> bool:
        return bool(self.steps_ms)

    @property
    def busy_ms(self) -> float | None:
        """Milliseconds a step that the GPU works; None where there is no GPU or no profile."""
        times = [phase.gpu_ms for phase in self.phases if phase.gpu_ms is not None]
        return sum(times) if times else None

    @property
    def launches(self) -> float | None:
        """Launches a step; None where not counted."""
        counts = [phase.launches for phase in self.phases if phase.launches is not None]
        return sum(counts) if counts else None


@dataclass
class Look:
    """All that was measured of one fit. ``arms[0]`` is the eager fit; ``fit`` says what was set up."""

    words: list[str]
    fit: dict
    environment: dict
    arms: list[Arm]

    @property
    def eager(self) -> Arm:
        return self.arms[0]

    @property
    def busy_ms(self) -> float | None:
        """Milliseconds a step that the GPU works in the eager fit; None where there is no GPU or no profile."""
        return self.eager.busy_ms

    @property
    def launches(self) -> float | None:
        """Launches a step of the eager fit; None where not counted."""
        return self.eager.launches

    def to_dict(self) -> dict:
        """Return everything as plain data, with the verdict (schema in docs/why.md)."""
        advice = advise(self)
        measured = asdict(self)
        busy, step = self.busy_ms, self.eager.step_ms
        gpu = None if busy is None else {"busy_ms": busy, "busy_share": busy / step, "launches": self.launches}
        verdict = {"bound": advice.bound, "sentences": advice.sentences, "command": advice.command}
        return {"schema": SCHEMA, **measured, "gpu": gpu, "verdict": verdict}

    @classmethod
    def from_dict(cls, data: Mapping) -> Look:
        """Rebuild a look from ``to_dict``.

        Raises:
            ValueError: if the schema is another.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')} is not {SCHEMA}: this file is of another version.")
        arms = [Arm(**{**arm, "phases": [Phase(**phase) for phase in arm["phases"]]}) for arm in data["arms"]]
        return cls(data["words"], data["fit"], data["environment"], arms)


@dataclass
class Advice:
    """The answer: what bounds the fit, the reasons in sentences, and the command line to use."""

    bound: str
    sentences: list[str]
    command: str


def bound_by(step_ms: float, wait_ms: float, busy_ms: float | None) -> str:
    """Return what sets the pace of a step: 'gpu', 'data', 'host', 'mixed', or 'cpu' where there is no GPU to wait for.

    Args:
        step_ms: Length of a step.
        wait_ms: How long of it the host waits for the next batch.
        busy_ms: How long of it the GPU works, or None without a GPU.

    Waiting for data counts only as far as the GPU idles meanwhile: the smaller of the two shares is the most that a
    faster loader could win. A step is data-bound if that is much, and at least half of all that the GPU idles.
    """
    wait = wait_ms / step_ms
    if busy_ms is None:
        return "data" if wait >= DATA_BOUND else "cpu"
    busy = busy_ms / step_ms
    if busy >= GPU_BOUND:
        return "gpu"
    idle = 1 - busy
    lost = min(wait, idle)
    if lost >= DATA_BOUND and lost >= idle / 2:
        return "data"
    if busy <= HOST_BOUND and lost < DATA_BOUND:
        return "host"
    return "mixed"


def best_arm(look: Look) -> Arm:
    """Return the arm to use: the fastest, or the eager one where none wins more than two looks may differ by."""
    fastest = min(lasting(look), key=lambda arm: steps_of_fit_ms(look, arm), default=look.eager)
    return fastest if saved_share(look, fastest) >= WORTHWHILE else look.eager


def lasting(look: Look) -> list[Arm]:
    """Return the arms besides the eager one that ran and were not given up on the way."""
    return [arm for arm in look.arms[1:] if arm.ran and not (arm.note or "").startswith(GIVEN_UP)]


def steps_of_fit_ms(look: Look, arm: Arm) -> float:
    """Return the milliseconds that all steps of the fit take in an arm, its recording included.

    Where the number of steps is not known (``time=``), those of one step.
    """
    steps = look.fit.get("steps")
    return steps * arm.step_ms + 1e3 * arm.recording_seconds if steps else arm.step_ms


def saved_share(look: Look, arm: Arm) -> float:
    """Return the share that the arm saves of the time of all eager steps; negative where it takes longer."""
    return 1 - steps_of_fit_ms(look, arm) / steps_of_fit_ms(look, look.eager)


def advise(look: Look) -> Advice:
    """Say what bounds the fit, what replay brings as measured, and which command to use."""
    eager = look.eager
    bound = bound_by(eager.step_ms, eager.wait_ms, look.busy_ms)
    changes = data_changes(look.fit) if eager.wait_ms >= DATA_BOUND * eager.step_ms and bound != "gpu" else {}
    sentences = [_bound_sentence(look, bound)]
    if any(arm.ran and (arm.busy_ms or 0) > SHARED * arm.step_ms for arm in look.arms):
        sentences.append(
            "In the profile the GPU worked longer than a step takes: something else uses it, too, and these figures "
            "measure both. Look again when it is free."
        )
    if changes:
        sentences.append(f"Try {' '.join(f'{k}={v}' for k, v in changes.items())} and look again.")
    elif bound == "data":
        sentences.append("Lighter augmentation, smaller files or a faster disk would shorten the wait.")
    if look.busy_ms is None:
        sentences.append(_without_gpu(eager))
    sentences += [_arm_sentence(look, arm) for arm in look.arms[1:]]
    best = best_arm(look)
    faster = [arm.name for arm in lasting(look) if arm.step_ms < best.step_ms]
    if best is not look.eager and faster:  # by the step, but not by the fit
        sentences.append(f"In the {look.fit['steps']:,} steps of this fit, {best.name} is done before {faster[0]}.")
    return Advice(bound, sentences, command(look.words, {**changes, **_off(look), **best.capture}))


def data_changes(fit: Mapping) -> dict:
    """Return the arguments that may bring the batches sooner: images kept in memory, and a worker for every core."""
    changes: dict = {}
    if not fit["cache"]:
        changes["cache"] = "ram"
    if fit["device"] != "cpu" and fit["workers"] == fit["workers_asked"] < fit["cores"]:
        changes["workers"] = fit["cores"]
    return changes


def command(words: Sequence[str], changes: Mapping, of: str = "train") -> str:
    """Return a command line: the user's words, with ``changes`` in the place of what they say about the same.

    Args:
        words: The words of a training, `train` among them.
        changes: Arguments by key; None takes a key out.
        of: `train`, or `why` for another look.
    """
    changes, kept = dict(changes), []
    for word in words:
        key = word.removeprefix("--").partition("=")[0].strip()
        if key in changes and changes[key] is not None:
            kept.append(f"{key}={changes[key]}")
            changes[key] = None  # said once
        elif key not in {*changes, "mode", "train"}:
            kept.append(word)
    return shlex.join(["yolo", of, *kept, *(f"{key}={value}" for key, value in changes.items() if value is not None)])


def shortened(faults: Sequence[str]) -> list[str]:
    """Return what is told of faults in the data: the first ones, and how many more there are."""
    more = len(faults) - MOST_FAULTS
    return [*faults[:MOST_FAULTS], *([f"and {more:,} more faults in pictures or labels"] if more > 0 else [])]


def _off(look: Look) -> dict:
    """Return our keys of every arm, switched off where the user's words or files ask for them, else left out."""
    keys = {key for arm in look.arms for key in arm.capture}
    return {key: False if look.fit["asked"].get(key) else None for key in sorted(keys)}


def _bound_sentence(look: Look, bound: str) -> str:
    eager, busy = look.eager, look.busy_ms
    wait = f"a step waits {eager.wait_ms:.1f} of {eager.step_ms:.1f} ms for its batch"
    if busy is None:
        told = {"data": f"Data-bound: {wait}.", "cpu": f"Bound by computing on the CPU: {wait}."}
        return told[bound]
    works = f"the GPU works {busy:.1f} of {eager.step_ms:.1f} ms ({busy / eager.step_ms:.0%})"
    return {
        "gpu": f"GPU-bound: {works}, so there is next to nothing to win by helping the host.",
        "data": f"Data-bound: {wait}, and the GPU idles meanwhile ({works}).",
        "host": f"Host-bound: {works} and waits for the host, which makes {look.launches:,.0f} launches a step.",
        "mixed": f"Mixed: {works}, and {wait}.",
    }[bound]


def _without_gpu(eager: Arm) -> str:
    """Return what a look without a GPU says of one."""
    text = "This is no verdict on a GPU: whether it would wait for the host shows only in a look on that GPU."
    counts = {phase.name: phase.operations for phase in eager.phases if phase.operations is not None}
    told = [f"{counts[name]:,.0f} in {name}" for name in (FORWARD, WHOLE, OBJECTIVE, BACKWARD) if name in counts]
    if told:  # not the optimizer's, which on a GPU takes all weights at once
        text += (
            f" A step issues operations, each a launch or a few there: {', '.join(told)}. Replay issues those of the "
            "network with two calls."
        )
    return text


def _arm_sentence(look: Look, arm: Arm) -> str:
    eager = look.eager
    name = arm.name[:1].upper() + arm.name[1:]
    if not arm.ran:
        return f"{name} was not measured: {arm.blocked}."
    saved_ms = eager.step_ms - arm.step_ms
    text = f"{name} takes the step from {eager.step_ms:.1f} to {arm.step_ms:.1f} ms ({-saved_ms / eager.step_ms:+.0%})"
    key = "peak_reserved"
    if key in arm.memory_bytes and key in eager.memory_bytes:
        text += f" and reserved memory by {(arm.memory_bytes[key] - eager.memory_bytes[key]) / 2**20:+,.0f} MiB"
    steps, recording = look.fit.get("steps"), f"{arm.recording_seconds:.1f} s that recording takes"
    share = saved_share(look, arm)
    if saved_ms < WORTHWHILE * eager.step_ms:
        text += ": it does not pay"
    elif share < WORTHWHILE:
        change = f"{abs(share):.1%} {'shorter' if share > 0 else 'longer'}"
        text += f": it does not pay, as all {steps:,} steps are {change} with the {recording}"
    elif arm.recording_seconds >= 0.05 and not arm.note:
        earned = math.ceil(1e3 * arm.recording_seconds / saved_ms)
        text += f"; {earned:,} step{'s' * (earned > 1)} earn back the {recording}"
    if arm.note:
        text += f"; {arm.note}"
    return text + "."
