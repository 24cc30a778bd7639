"""Training steps in process, without upstream's data loading: two fits of one seed, one eager, one replaying.

A `Fit` runs what `DetectionModule` runs for a batch, in its order: network step, objective, backward, the network
step's check, and at the end of an accumulation window clip, optimizer, ``zero_grad`` and EMA. An event is a function
of the fit that runs before a step; the same events go to both fits of a `Twin`, whose traces are then compared.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from ultralytics.cfg import get_cfg
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import ModelEMA

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.capture.state import as_bytes
from detgraph.trainer.fit.step import TrainingStep
from detgraph.trainer.golden import digests
from detgraph.trainer.parts.network import NetworkStep
from detgraph.trainer.parts.objective import Objective
from emulator import EmulatingRecorder

# Two levels, an end-to-end head, dropout (draws random numbers) and attention-free blocks: 11 ms a step on one core.
TINY = {
    "nc": 2,
    "end2end": True,
    "reg_max": 1,
    "scales": {"n": [1.0, 1.0, 64]},
    "scale": "n",
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "C3k2", [8, False, 0.5]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "SPPF", [16, 5]],
        [-1, 1, "nn.Dropout", [0.1]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "C3k2", [8, False, 0.5]],
        [[8, 5], 1, "Detect", ["nc"]],
    ],
}
SHAPE = (2, 3, 64, 64)
STEPWISE = ("losses", "gradients", "parameters", "buffers", "generators")  # parts of a trace with an entry a step
Event = Callable[["Fit"], None]


class Wrapped(nn.Module):
    """A layer of the network with something around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.i, self.f, self.type, self.np = inner.i, inner.f, inner.type, inner.np


@cache
def _pristine(name: str) -> DetectionModel:
    torch.manual_seed(0)
    return DetectionModel(deepcopy(TINY) if name == "tiny" else name, nc=2, verbose=False)


def make_model(name: str = "tiny") -> DetectionModel:
    """Return a fresh training model, always with the same weights: ``tiny`` or a yaml of upstream's."""
    model = deepcopy(_pristine(name))
    model.args = get_cfg(overrides={"epochs": 10})
    model.criterion = None  # upstream's trainer leaves it unset until the first step
    return model.train()


def make_batch(seed: int, shape: tuple[int, ...] = SHAPE, labels: int = 2) -> dict[str, Tensor]:
    """Return a batch of noise with ``labels`` random boxes a picture; the same arguments give the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    count = shape[0] * labels
    size = 0.2 + 0.4 * torch.rand(count, 2, generator=generator)
    centre = size / 2 + (1 - size) * torch.rand(count, 2, generator=generator)
    return {
        "img": torch.rand(shape, generator=generator),
        "cls": torch.randint(2, (count, 1), generator=generator).float(),
        "bboxes": torch.cat((centre, size), 1),
        "batch_idx": torch.arange(shape[0]).repeat_interleave(labels).float(),
    }


def build_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return upstream's optimizer of this name for the parameters that the model has now."""
    owner = SimpleNamespace(args=model.args, data={"nc": 2})
    level = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        return BaseTrainer.build_optimizer(owner, model, name, lr=0.01, decay=5e-4)
    finally:
        LOGGER.setLevel(level)


def snapshot(tensors: Iterator[tuple[str, Tensor | None]]) -> dict[str, tuple | None]:
    """Return dtype, shape and raw bytes (or their hash) by name, None for a missing tensor. Fast, for CPU tensors."""
    found: dict[str, tuple | None] = {}
    for name, tensor in tensors:
        if tensor is None:
            found[name] = None
            continue
        raw = as_bytes(tensor).clone().numpy().tobytes()  # of a copy: see EmulatedMemory.move_out
        found[name] = (tensor.dtype, tensor.shape, raw if len(raw) < 4096 else hashlib.sha256(raw).digest())
    return found


def wrap(kind: Callable[[nn.Module], Wrapped]) -> Callable[[nn.Module], None]:
    """Return what prepares a model by putting ``kind`` around one layer."""

    def prepare(model: nn.Module) -> None:
        model.model[3] = kind(model.model[3])

    return prepare


@dataclass
class Trace:
    """What a fit did, step by step: parts that two fits of one seed must share, byte by byte."""

    losses: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    parameters: list = field(default_factory=list)
    buffers: list = field(default_factory=list)
    generators: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    end: dict = field(default_factory=dict)

    def before(self, step: int) -> Trace:
        """Return what the trace says of the steps before ``step``; a note and an error have their step in front."""
        parts = {name: getattr(self, name)[:step] for name in STEPWISE}
        named = {name: [entry for entry in getattr(self, name) if entry[0] < step] for name in ("errors", "notes")}
        return Trace(**parts, **named)


class Fit:
    """One model, optimizer and network step, and the trace of what they did.

    Args:
        capture: whether the network may be replayed.
        model: name for `make_model`.
        shape: the nominal (batch, channels, height, width).
        accumulate: micro-batches per optimizer step.
        amp: autocast to this dtype from the start; events may change ``fit.amp``.
        options: of the capture.
        recorder: by default a fresh emulating one.
        prepare: changes the model before the optimizer is built.
        optimizer: name of one of upstream's.
        ema: whether to keep upstream's moving average of the weights.
        scale: initial scale of a gradient scaler, or None for none.
    """

    def __init__(
        self,
        capture: bool,
        model: str = "tiny",
        shape: tuple[int, ...] = SHAPE,
        accumulate: int = 1,
        amp: torch.dtype | None = None,
        options: dict | None = None,
        recorder: Callable[[], EmulatingRecorder] = EmulatingRecorder,
        prepare: Callable[[nn.Module], None] | None = None,
        optimizer: str = "SGD",
        ema: bool = False,
        scale: float | None = None,
    ) -> None:
        random.seed(0), np.random.seed(0)
        self.capture, self.shape, self.accumulate, self.amp = capture, shape, accumulate, amp
        self.model = make_model(model)
        if prepare is not None:
            prepare(self.model)
        self.optimizer_name = optimizer
        self.rebuild_optimizer()
        self.ema = ModelEMA(self.model) if ema else None
        options = CaptureOptions(**{"capture_network": True, "max_recordings": 100, **(options or {})})
        self.report = CaptureReport(options)
        self.recorder = recorder() if capture else None
        blocked = None if capture else "eager twin"
        self.network_step = NetworkStep(self.model, self.recorder, shape, options, self.report, blocked)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=bool(scale))
        asked = capture and options.capture_objective is not False
        blocked = None if asked else "not asked for"
        counts = self.report.counts("capture_objective")
        self.objective = Objective(self.model, self.recorder, options, counts, blocked)
        self.training_step = TrainingStep(self, {"network": self.network_step, "objective": self.objective})
        self.trace = Trace()
        self.number = 0
        self.batch: dict | None = None  # of the present step; an event may replace or change it
        self.context: Callable[[], AbstractContextManager] = nullcontext  # around network step and objective
        self.around: Callable[[], AbstractContextManager] = nullcontext  # around the whole step
        self.before_backward: Callable[[], None] = lambda: None
        self.zero_grad: Callable[[], None] = lambda: self.optimizer.zero_grad()
        self.memory: dict = {}  # for events
        self.cleanup = ExitStack()  # what events undo at the end
        torch.manual_seed(0)

    def rebuild_optimizer(self) -> None:
        """Make upstream's optimizer anew for the parameters that the model has now."""
        self.optimizer = build_optimizer(self.model, self.optimizer_name)

    def layer(self, path: str) -> nn.Module:
        """Return the submodule at ``path`` below the network, e.g. ``0.conv``."""
        return self.model.model.get_submodule(path)

    def note(self, *values: object) -> None:
        """Put values into the trace: what an event observed and both fits must observe alike."""
        self.trace.notes.append((self.number, *values))

    def run(self, steps: int, events: Mapping[int, Event] | None = None, accept: type | tuple = ()) -> Fit:
        """Run ``steps`` more steps with events before those they are numbered for; ``accept``ed errors are traced."""
        for _ in range(steps):
            self.batch = make_batch(self.number, self.shape)
            try:
                if event := (events or {}).get(self.number):
                    event(self)
                with self.around():
                    self.step()
            except accept as error:
                self.trace.errors.append((self.number, type(error).__name__, str(error)))
            self._observe()
            self.number += 1
        return self

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """What network step and objective run in: the context that events may set, and autocast."""
        with self.context(), torch.autocast("cpu", dtype=self.amp or torch.bfloat16, enabled=self.amp is not None):
            yield

    def step(self) -> None:
        """Run one micro-batch."""
        batch = self.batch
        with self.forward_context():
            loss, items = self.training_step.forward(batch)
            self.loss = loss.sum()
        self.trace.losses.append(digests.digest(self.loss, items))
        self.before_backward()
        self.training_step.backward(self.loss)
        self.trace.gradients.append(snapshot((n, p.grad) for n, p in self.model.named_parameters()))
        if (self.number + 1) % self.accumulate == 0:
            self.training_step.update()

    def optimizer_step(self) -> None:
        """What upstream's ``optimizer_step`` does."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad()
        if self.ema is not None:
            self.ema.update(self.model)

    def _observe(self) -> None:
        self.trace.parameters.append(snapshot(self.model.named_parameters()))
        self.trace.buffers.append(snapshot(self.model.named_buffers()))
        self.trace.generators.append(digests.generators())

    def end(self) -> Fit:
        """End the fit as the loop does, undo what events did to the process, and digest what stays."""
        self.cleanup.close()
        self.training_step.drop()
        self.trace.end = {
            "optimizer": digests.digest(*(self.optimizer.state.get(p) for p in self.model.parameters())),
            "ema": digests.digest(dict(self.ema.ema.state_dict()), self.ema.updates) if self.ema else None,
            "live gradients": digests.gradients(self.model),
        }
        return self

    def differences(self, other: Fit) -> list[str]:
        """Return where this fit and another part, earliest step first."""
        return differences(self.trace, other.trace)


def differences(a: Trace, b: Trace) -> list[str]:
    """Return where two traces differ, earliest step first: part, step and, for tensors, names."""
    found: list[tuple[int, str]] = []
    for part in (*STEPWISE, "errors", "notes"):
        one, two = getattr(a, part), getattr(b, part)
        if len(one) != len(two):
            found.append((min(len(one), len(two)), f"number of {part}: {len(one)}, {len(two)}"))
        for step, (x, y) in enumerate(zip(one, two, strict=False)):
            if x != y:
                found.append((step, f"{part}[{step}]: {_first(x, y)}"))
                break
    found += [(10**6, f"{name} at the end") for name in a.end if a.end[name] != b.end.get(name)]
    return [text for _, text in sorted(found, key=lambda item: item[0])]


def _first(x: object, y: object) -> str:
    if isinstance(x, dict):
        names = [name for name in {**x, **y} if x.get(name) != y.get(name)]
        return f"{len(names)} tensors, first {names[0]}"
    return f"{x!r} != {y!r}"


@dataclass
class Twin:
    """The fit that does not replay and the one that does after the same steps: two of any one class of fits."""

    eager: Fit
    replaying: Fit

    @property
    def differences(self) -> list[str]:
        return self.eager.differences(self.replaying)

    @property
    def report(self) -> CaptureReport:
        return self.replaying.report

    @property
    def reasons(self) -> list[str]:
        """Why recordings were retired, in order."""
        return [retirement["reason"] for retirement in self.report.retirements]

    def assert_same(self, replayed: int | None = None) -> None:
        """Insist on equal bytes, and on the number of replays (by default at least one)."""
        assert not self.differences, self.differences
        assert self.report.replayed == replayed if replayed is not None else self.report.replayed > 0, self.report
        assert self.report.unverifiable == []


def run(
    capture: bool,
    events: Mapping[int, Event] | None = None,
    steps: int = 7,
    accept: type | tuple = (),
    **settings,
) -> Fit:
    """Run one fit to its end; ``settings`` are those of `Fit`."""
    fit = Fit(capture, **settings)
    with fit.cleanup:
        return fit.run(steps, events, accept).end()


def twin(*args, **kwargs) -> Twin:
    """Run the same fit eagerly and replaying, as `run` does; compare with ``assert_same``."""
    return Twin(run(False, *args, **kwargs), run(True, *args, **kwargs))
