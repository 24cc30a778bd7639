"""The objective of a training step: eager, or target assignment and loss replayed where that is proven to be the same.

`Objective` decides for every step; what is recorded is in `objective_program`.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn
from ultralytics.utils.torch_utils import unwrap_model

from detgraph.cfg import CaptureOptions
from detgraph.models import NetworkView, UnsupportedNetwork, objective_blocker
from detgraph.models.counted import CapacityExceeded
from detgraph.trainer.capture import proof
from detgraph.trainer.capture.guards import process_obstacle
from detgraph.trainer.capture.holder import Eager, Observe, Plan, Replay
from detgraph.trainer.capture.passes import autocast_remains
from detgraph.trainer.capture.reasons import OTHER_SHAPE, OVER_CAPACITY, RECORDING, TOO_EARLY
from detgraph.trainer.capture.recording import Recorder
from detgraph.trainer.capture.report import RecordingCounts
from detgraph.trainer.capture.signature import RECORDABLE

from .objective_program import KEY, Capacities, ObjectiveProgram
from .part import Part

MOST_GROWTHS = 16  # recordings made anew for larger batches; each at least doubles a capacity


def build(trainer: Any, recorder: Recorder | None, blocked: str | None) -> Objective:
    """Return the part of one fit."""
    report = trainer.capture_report.counts(KEY)
    return Objective(trainer.model, recorder, trainer.capture, report, blocked)


class Objective(Part):
    """Computes loss and loss items of a training step; records that once, where it may, and replays it from then on.

    The first step whose predictions have the shape of a full batch and whose objective exists runs eagerly, and is an
    ordinary step of the fit; after its backward the same work is recorded and must reproduce loss, items and the
    gradients of all predictions bit for bit. A batch that needs more room than there is runs eagerly, too, from the
    predictions that are there already, and is what a larger recording is made from.

    Args:
        model: the training model, a plain detection model.
        recorder: makes recordings on the model's device.
        options: whether to check, from which step on.
        report: counts every step.
        blocked: why every step is eager, if it is.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder | None,
        options: CaptureOptions,
        report: RecordingCounts,
        blocked: str | None = None,
    ) -> None:
        super().__init__(KEY, model, recorder, options, report, blocked)
        self.verifies = options.asked.get(KEY) == "verify"
        self._view: NetworkView | None = None
        self._capacities = Capacities()
        self._growths = 0
        self._observed: ObjectiveProgram | None = None
        self._batch: dict | None = None  # only with verify: the batch of the present replay

    def __call__(self, predictions: object, batch: dict, full: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, an entry for each of its parts, and the loss items, as upstream's model does.

        ``full``: whether the batch has the size that recordings are made for.
        """
        self._observed = self._batch = None
        network = unwrap_model(self.model)
        plan, outputs, reason = Eager(self.blocked or OTHER_SHAPE), (), RECORDING
        if self.blocked is None:
            with self.holder.attempting("replay"):
                plan, outputs = self._plan(network, predictions, full)
                if isinstance(plan, Replay):
                    try:
                        return self._replay(plan, outputs, batch)
                    except CapacityExceeded as error:
                        self._outgrown(error)
                        plan, reason = Observe(), OVER_CAPACITY  # there is no obstacle where a replay was allowed
        if isinstance(plan, Observe) and self.blocked is None:
            return self._observe(network, outputs, batch, reason)
        self.report.eager[self.blocked or plan.reason] += 1
        return network.loss(batch, predictions)

    def whole(self, reason: str) -> None:
        """Count a step in which the model was called whole."""
        self._observed = self._batch = None
        self.report.eager[self.blocked or reason] += 1

    def _plan(self, network: nn.Module, predictions: object, full: bool) -> tuple[Plan, tuple[Tensor, ...]]:
        """Return what the step does, and the predictions in the layout that a recording takes them in."""
        if not full:
            return Eager(OTHER_SHAPE), ()
        if getattr(network, "criterion", None) is None or self.report.steps < self.options.record_at_step:
            return Eager(TOO_EARLY), ()
        if self._view is None:
            self._view = NetworkView(network)
        try:
            outputs = self._view.flatten(predictions)
        except UnsupportedNetwork as error:
            self.holder.block(str(error))
            return Eager(str(error)), ()
        device = outputs[0].device.type
        plan = self.holder.plan(
            None,
            lambda recording: recording.program.change(outputs),
            lambda: process_obstacle(device, RECORDABLE) or objective_blocker(network),
        )
        return plan, outputs

    def _replay(self, plan: Replay, outputs: tuple[Tensor, ...], batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
        recording, program = plan.recording, plan.recording.program
        loss, items = (tensor.clone() for tensor in recording.forward(outputs, batch))
        program.leaves = ()
        self.report.replayed += 1
        if self.verifies:
            self._batch = batch
        return loss, dict(zip(program.names, items.detach().unbind(), strict=True))

    def _outgrown(self, error: CapacityExceeded) -> None:
        """Give the recording up for a larger one; what the step has is good, and goes on eagerly.

        It is observed: which sizes its batch needs in all, only an eager pass can tell.
        """
        self._capacities.raise_to(error.needed)
        self.holder.release()
        self._growths += 1
        if self._growths > MOST_GROWTHS:
            self.holder.block(f"batches outgrew {self._growths} recordings, the last: {error}")

    def _observe(
        self, network: nn.Module, outputs: tuple[Tensor, ...], batch: dict, reason: str
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the step eagerly and note what a recording of it needs; count it."""
        observed = None
        with self.holder.attempting():
            observed = ObjectiveProgram(network, outputs, self._view.restore, batch, self._capacities)
        loss, items = network.loss(batch, self._view.restore(outputs))
        if observed is not None:
            with self.holder.attempting():
                observed.see(loss, items, outputs)
                self._observed = observed
        self.report.eager[self.blocked or reason] += 1
        return loss, items

    def after_backward(self) -> None:
        observed, self._observed = self._observed, None
        batch, self._batch = self._batch, None
        if observed is not None:
            with self.holder.attempting():
                if observed.complete():
                    self._record(observed)
        elif batch is not None and (recording := self.recording) and not recording.awaiting_backward:
            with self.holder.attempting("verification"):
                self._verify(recording.program, recording.observed, batch)

    def _record(self, observed: ObjectiveProgram) -> None:
        if autocast_remains(observed.predictions[0].device):
            return self.holder.block("autocast is on during the backward pass")
        recording = self.holder.record(observed)
        if recording is not None:
            recording.observing = self.verifies

    def _verify(self, program: ObjectiveProgram, replayed: proof.Results, batch: dict) -> None:
        """Compare the replay that has just run with upstream's objective on the same predictions and ground truths."""
        started = time.perf_counter()
        wrong = proof.verdict(program.upstreams(batch), replayed, self.report.unverifiable)
        self.report.seconds["checking"] += time.perf_counter() - started
        if wrong:
            self.holder.refute(wrong)

    def drop(self) -> None:
        self._observed = self._batch = None
        super().drop()
