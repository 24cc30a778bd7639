"""Steps of MuSGD in process, without a network's passes: two fits of one seed, one of upstream's alone, one replaying.

A `Fit` has a model for its parameters and takes upstream's own `optimizer_step` over gradients that are drawn. Learning
rates and momentum are others at every step. An event is a function of the fit that runs between drawing the gradients
and the step; the same events go to both fits of a `Twin`, whose traces are then compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from ultralytics.engine.trainer import BaseTrainer

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.report import CaptureReport, RecordingCounts
from detgraph.trainer.parts.orthogonalization import GraphedOrthogonalization
from emulator import EmulatingRecorder
from steps import Twin, build_optimizer, make_model, snapshot

Event = Callable[["Fit"], None]


class Fit:
    """One model and optimizer, and what every step left of them.

    Args:
        capture: whether the orthogonalization may be replayed; otherwise upstream's code runs and nothing of ours.
        model: name for `steps.make_model`.
        options: of the capture.
        recorder: by default a fresh emulating one.
        prepare: changes the model before the optimizer is built.
        scale: initial scale of a gradient scaler, or None for none.
    """

    def __init__(
        self,
        capture: bool,
        model: str = "tiny",
        options: dict | None = None,
        recorder: Callable[[], EmulatingRecorder] = EmulatingRecorder,
        prepare: Callable[[nn.Module], None] | None = None,
        scale: float | None = None,
    ) -> None:
        self.model = make_model(model)
        if prepare is not None:
            prepare(self.model)
        self.rebuild_optimizer()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=bool(scale))
        self.report, self.holder = RecordingCounts(), None
        self.cleanup = ExitStack()  # what events undo at the end
        if capture:
            options = CaptureOptions(capture_orthogonalization=True, **{"max_recordings": 100, **(options or {})})
            self.report = CaptureReport(options).orthogonalization
            self.holder = GraphedOrthogonalization(self.model, recorder(), options, self.report)
            self.cleanup.enter_context(self.holder.in_force())
        self.number = 0
        self.context: Callable[[], AbstractContextManager] = nullcontext  # around the optimizer step
        self.memory: dict = {}  # for events
        self.trace: list[dict] = []

    def rebuild_optimizer(self) -> None:
        """Make upstream's MuSGD anew for the parameters that the model has now."""
        self.optimizer = build_optimizer(self.model, "MuSGD")

    @property
    def muon_groups(self) -> list[dict]:
        return [group for group in self.optimizer.param_groups if group["use_muon"] and group["params"]]

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def buffer(self, name: str) -> Tensor:
        """Return the momentum buffer whose orthogonalization the parameter ``name`` is updated with."""
        return self.optimizer.state[self.parameter(name)]["momentum_buffer"]

    def run(self, steps: int, events: Mapping[int, Event] | None = None, accept: type | tuple = ()) -> Fit:
        """Take ``steps`` more steps with the events that are numbered for them; ``accept``ed errors are traced."""
        for _ in range(steps):
            self.draw()
            error = None
            try:
                if event := (events or {}).get(self.number):
                    event(self)
                self.step()
            except accept as caught:
                error = type(caught).__name__
                self.optimizer.zero_grad()
            self.trace.append({**self.state(), "error": error})
            self.number += 1
        return self

    def draw(self) -> None:
        """Draw gradients for every parameter that wants one, in the parameter's layout."""
        generator = torch.Generator().manual_seed(self.number)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros(()))  # creates its state, as the first backward of a fit does
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * (scale * 1e-2)
                parameter.grad = torch.empty_like(parameter).copy_(drawn)

    def step(self) -> None:
        """Set the schedule and take upstream's optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.number)
            group["momentum"] = 0.8 + 0.015 * (self.number % 10)
        owner = SimpleNamespace(
            scaler=self.scaler, optimizer=self.optimizer, device=torch.device("cpu"), model=self.model, ema=None
        )
        with self.context(), self.holder.step(self.optimizer) if self.holder else nullcontext():
            BaseTrainer.optimizer_step(owner)

    def state(self) -> dict:
        """Return the bytes of parameters and optimizer state by name."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {
            f"{key} of {names.get(parameter, 'nobody')}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        return {**snapshot([*self.model.named_parameters(), *state.items()]), "scale": scale}

    def end(self) -> Fit:
        """End the fit as the loop does, and undo what events did to the process."""
        if self.holder is not None:
            self.holder.drop()
        self.cleanup.close()
        return self

    def differences(self, other: Fit) -> list[str]:
        """Return where this fit and another part first: the step, and the names that differ."""
        for number, (a, b) in enumerate(zip(self.trace, other.trace, strict=True)):
            if names := [name for name in {**a, **b} if a.get(name) != b.get(name)]:
                return [f"step {number}: {name}" for name in names]
        return []


def run(capture: bool, events: Mapping[int, Event] | None = None, steps: int = 6, accept=(), **settings) -> Fit:
    """Run one fit to its end; ``settings`` are those of `Fit`."""
    fit = Fit(capture, **settings)
    with fit.cleanup:
        return fit.run(steps, events, accept).end()


def twin(*args, **kwargs) -> Twin:
    """Run the same fit by upstream alone and replaying; compare with ``assert_same``."""
    return Twin(run(False, *args, **kwargs), run(True, *args, **kwargs))
