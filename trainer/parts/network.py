"""The model call of a training step: eager, or replayed where that is proven to be the same.

`NetworkStep` decides for every step; what is recorded is in `network_program`. Neither is an ``nn.Module`` and neither
changes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import unwrap_model

from detgraph.cfg import CaptureOptions
from detgraph.models import UnsupportedNetwork, objective_blocker
from detgraph.trainer.capture import proof, torch_private
from detgraph.trainer.capture.holder import Eager, Observe, Plan, Replay
from detgraph.trainer.capture.memory import StepMemory
from detgraph.trainer.capture.passes import autocast_remains
from detgraph.trainer.capture.reasons import OTHER_SHAPE, RECORDING, TAIL, TOO_EARLY
from detgraph.trainer.capture.recording import Recorder, Recording
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.capture.signature import recording_obstacle
from detgraph.trainer.capture.state import NetworkState

from .eligibility import nominal_shape, nominal_share
from .network_program import KEY, NetworkProgram
from .part import Part


def build(trainer: Any, recorder: Recorder | None, blocked: str | None) -> NetworkStep:
    """Return the part of one fit; with a recorder, say what of the fit it will leave out."""
    options, report = trainer.capture, trainer.capture_report
    if blocked is not None:
        return NetworkStep(trainer.model, None, None, options, report, blocked)
    shape = nominal_shape(trainer)
    if (share := nominal_share(trainer)) < 0.9:
        LOGGER.warning(
            f"{KEY}: only batches of {shape[3]}x{shape[2]} are replayed, about {share:.0%} of the full ones; "
            "the others train eagerly. A fixed size (multi_scale=0, rect=False) replays all of them."
        )
    for lack in torch_private.reduced(trainer.device.type):
        LOGGER.warning(f"{KEY}: {lack}")
    step = NetworkStep(trainer.model, recorder, shape, options, report)
    step.survivors = lambda: [trainer.loss, *(trainer.loss_items or {}).values(), *(trainer.tloss or {}).values()]
    return step


class NetworkStep(Part):
    """Calls the network of a training step; records it once, where it may, and replays it from then on.

    The first full batch that may be recorded runs eagerly and is an ordinary step of the fit; between its backward
    and the optimizer step the same work is recorded on a side stream and must reproduce the eager results bit for
    bit. From the next full batch on, predictions are views of reused memory, valid until the next call.

    Args:
        model: the training model, a plain detection model.
        recorder: makes recordings on the model's device.
        shape: the (batch, channels, height, width) to record; batches of another shape run eagerly.
        options: whether to check, how often to record, from which step on.
        report: counts every step.
        blocked: why every step is eager, if it is; then neither recorder nor shape are needed.

    Attributes:
        memory: what the recording works in, to be lent between steps.
        survivors: returns what of a step outlives it besides gradients, see `StepMemory.lend`.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder | None,
        shape: tuple[int, ...] | None,
        options: CaptureOptions,
        report: CaptureReport,
        blocked: str | None = None,
    ) -> None:
        super().__init__(KEY, model, recorder, options, report, blocked)
        self.network = unwrap_model(model)
        self.shape = shape
        self.recorder = recorder
        self.memory = StepMemory(self.holder, report.lent)
        self.survivors: Callable[[], Iterable[Tensor | None]] = tuple
        self._observed: NetworkProgram | None = None
        self._before: NetworkState | None = None  # only with verify: the state before the present replay
        self._fresh = False  # recorded, and not replayed yet
        self._moved = 0  # observed steps that a replay would not do again

    def __call__(self, images: Tensor) -> dict:
        """Return the training predictions for ``images`` of shape (batch, channels, height, width)."""
        self.memory.end_step()
        self._observed = self._before = None
        plan = None
        with self.holder.attempting("replay"):
            self.memory.settle()
            plan = self._plan(images)
            if isinstance(plan, Replay):
                self._make_ready(plan.recording)
        if self.holder.blocked is not None:
            plan = Eager(self.holder.blocked)
        if isinstance(plan, Replay):
            self.report.replayed += 1
            recording = plan.recording
            return recording.program.view.restore(recording.forward(images))
        if isinstance(plan, Observe):
            return self._observe(images)
        self.report.eager[plan.reason] += 1
        if self._is_tail(images):
            self.memory.lend_to_step(TAIL, self._survivors_of_step)
        return self.model(images)

    def is_full(self, images: Tensor) -> bool:
        """Whether a batch has the shape that is recorded."""
        return tuple(images.shape) == self.shape

    def whole(self, batch: dict, reason: str) -> tuple[Tensor, dict]:
        """Call model and objective in one, as upstream does; returns the loss and its items."""
        self._observed = self._before = None
        self.report.eager[reason] += 1
        return self.model(batch)

    def after_backward(self) -> None:
        self.memory.end_step()
        observed, self._observed = self._observed, None
        if observed is not None:
            with self.holder.attempting():
                if observed.complete():
                    self._record(observed)
        elif self._before is not None and self.recording is not None and not self.recording.awaiting_backward:
            with self.holder.attempting("verification"):
                self._verify(self._before)

    def drop(self) -> None:
        try:
            self._observed = self._before = None
            self.memory.close()
        finally:
            super().drop()

    # Before a step ----------------------------------------------------------------------------------------------

    def _plan(self, images: Tensor) -> Plan:
        if self.holder.blocked is None and tuple(images.shape) != self.shape:
            return Eager(OTHER_SHAPE)
        return self.holder.plan(
            None,
            lambda recording: recording.program.change(images),
            lambda: self._obstacle(images),
        )

    def _obstacle(self, images: Tensor) -> str | None:
        if self.report.steps < self.options.record_at_step:
            return TOO_EARLY
        return recording_obstacle(self.network.model, images) or objective_blocker(self.network)

    def _make_ready(self, recording: Recording) -> None:
        """Do what comes before a replay: the first one of a recording, and one that is to be checked."""
        if self._fresh:  # what the recorded step left in the cache is of no use to steps that replay
            self._fresh = False
            self.recorder.settle(recent=True)
        if self.options.verify:
            self._before = recording.program.state()

    def _is_tail(self, images: Tensor) -> bool:
        """Whether an eager step has room in the recording's memory, and comes once an epoch: a loan is slow."""
        return self.recorded and images.shape[1:] == self.shape[1:] and len(images) < self.shape[0]

    def _survivors_of_step(self) -> list[Tensor | None]:
        return [*(parameter.grad for parameter in self.network.parameters()), *self.survivors()]

    # Recording --------------------------------------------------------------------------------------------------

    def _observe(self, images: Tensor) -> dict:
        """Run the step eagerly and note what a recording of it needs; count it."""
        reason = observed = None
        with self.holder.attempting():
            observed = NetworkProgram(self.network, images)
            if obstacle := observed.signature.reach.obstacle:
                self.holder.block(obstacle)
        if self.blocked:
            self.report.eager[self.blocked] += 1
            return self.model(images)
        predictions = self.network.predict(images)
        with self.holder.attempting():
            reason = observed.moved_by_forward(images) or observed.drawn_on_the_host()
            if reason is None:
                predictions = self._listen(observed, predictions)
            else:
                self._not_repeatable(reason)
        self.report.eager[self.blocked or reason or RECORDING] += 1
        return predictions

    def _listen(self, observed: NetworkProgram, predictions: object) -> object:
        """Wait for the backward; return the predictions in the layout that a recording hands over."""
        try:
            outputs = observed.view.flatten(predictions)
        except UnsupportedNetwork as error:
            self.holder.block(str(error))
            return predictions
        observed.listen(outputs)
        self._observed = observed
        return observed.view.restore(outputs)

    def _not_repeatable(self, reason: str) -> None:
        """Give up on a network that does more than compute; once it may, as one that builds a cache at first does."""
        self._moved += 1
        if self._moved > 1:
            self.holder.block(reason)

    def _record(self, observed: NetworkProgram) -> None:
        """Record the observed step and adopt the recording if it proves right; the fit's state stays as it is."""
        if autocast_remains(observed.input.device):
            return self.holder.block("autocast is on during the backward pass")
        if reason := observed.moved_by_backward() or observed.drawn_on_the_host():
            return self._not_repeatable(reason)
        recording = self.holder.record(observed)
        if recording is not None:
            recording.observing = self.options.verify
            self._fresh = True

    def _verify(self, before: NetworkState) -> None:
        """Compare the replay that has just run with an eager pass of the same input and incoming gradients."""
        started = time.perf_counter()
        self._before = None
        recording, program = self.recording, self.recording.program
        with program.state().put_back():
            with recording.memory.on_stream(), program.running():
                before.restore()
                expected = recording.eager()
            wrong = proof.verdict(expected, recording.observed, self.report.unverifiable)
        self.report.seconds["checking"] += time.perf_counter() - started
        if wrong:
            self.holder.refute(wrong)
