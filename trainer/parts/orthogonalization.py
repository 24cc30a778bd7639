"""The orthogonalization in MuSGD's step: eager, or replayed where that is proven to be the same.

`MuSGD.step` calls upstream's ``muon_update`` once for each group that has gradients to orthogonalize. During the
optimizer steps of a fit that asked for it, a patch sends those calls here. Learning rates, weight decay, the scaler and
all that `MuSGD.step` does itself stay upstream's, and so does the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from detgraph.cfg import CaptureOptions
from detgraph.patches import replay_orthogonalization
from detgraph.trainer.capture import proof
from detgraph.trainer.capture.guards import Guards, process_obstacle
from detgraph.trainer.capture.holder import RecordingHolder
from detgraph.trainer.capture.recording import Recorder
from detgraph.trainer.capture.report import RecordingCounts

from .network import RECORDING
from .updates import Call, CallSignature, OrthogonalizationRecording, Tensors, Update, surroundings

NOTHING_TO_DO = "step without orthogonalization"
RETIRED = "step in which the recording was retired"
NOT_IN_PLACE = "muon_update was replaced by somebody else"
RECORDABLE = {"inference mode": False, "dispatch modes": 0, "function modes": 0}


class EagerOrthogonalization:
    """Leaves the optimizer's step as it is; every step counts as eager for ``reason``."""

    def __init__(self, report: RecordingCounts, reason: str) -> None:
        self.report = report
        self.reason = reason

    @property
    def recorded(self) -> bool:
        """Whether a recording is alive."""
        return False

    def in_force(self) -> AbstractContextManager:
        """Return the context that a fit runs in."""
        return nullcontext()

    @contextmanager
    def step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Run the body, in which ``optimizer`` takes one step at most."""
        yield
        self.report.eager[self.reason] += 1

    def drop(self) -> None:
        """Give up the recording, if any, and everything that belongs to it. May be called again."""


@dataclass
class Step:
    """One step of the optimizer, as far as it has come.

    Attributes:
        calls: how many calls of ``muon_update`` it has made.
        reason: why it is eager, or None while it replays or is being recorded from.
        seen: the calls that a recording is to be made from, and ``around``: the state that they were made in.
    """

    optimizer: torch.optim.Optimizer
    calls: int = 0
    reason: str | None = None
    seen: list[Call] = field(default_factory=list)
    around: Guards | None = None

    def owns(self, momentums: Tensors) -> bool:
        """Whether the call is the optimizer's, and not that of another one that steps in the same place."""
        states = getattr(self.optimizer, "state", {})
        return any(state.get("momentum_buffer") is momentums[0] for state in states.values())


class GraphedOrthogonalization(RecordingHolder):
    """Records the orthogonalization of one optimizer step, proves the recording, and replays it.

    The first step that orthogonalizes is an ordinary step of the fit; when it is over, its calls are recorded and must
    reproduce the updates that it was made with bit for bit. From the next step on, the updates are reused memory,
    which `MuSGD.step` reads at once and nobody else sees.

    Args:
        model: the training model, for the names of its parameters.
        recorder: makes recordings on the model's device.
        options: whether to check, and how often to record.
        report: counts every step.
    """

    key = "capture_orthogonalization"
    recording: OrthogonalizationRecording | None

    def __init__(self, model: nn.Module, recorder: Recorder, options: CaptureOptions, report: RecordingCounts) -> None:
        super().__init__(recorder, options, report)
        self.model = model
        self._step: Step | None = None

    def in_force(self) -> AbstractContextManager:
        """Return the context in which ``muon_update`` asks us.

        Raises:
            PatchDriftError: on entry, if the patch does not fit the installed upstream.
        """
        return replay_orthogonalization.installed()

    @contextmanager
    def step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Run the body, in which ``optimizer`` takes one step at most; then record that step if it is the one to be."""
        step = self._step = Step(optimizer)
        token = replay_orthogonalization.replacing.set(self._update)
        try:
            yield
        finally:
            replay_orthogonalization.replacing.reset(token)
            self._step = None
        self._count(step)

    def _update(self, function: Update, grad, momentum, beta: float, nesterov: bool) -> Tensor | Tensors:
        """Stand in for one call of ``function``, upstream's ``muon_update``."""
        step, arguments = self._step, (grad, momentum, beta, nesterov)
        if isinstance(grad, Tensor) or not step.owns(momentum):
            return function(*arguments)
        number, step.calls = step.calls, step.calls + 1
        if self.recording is not None:
            change = self.recording.change(number, grad, momentum)
            if change is None:
                return self.recording.calls[number].replay(*arguments)
            self._retire(change)
        if number == 0:
            step.around = surroundings(function, momentum[0].device.type)
            step.reason = self.blocked or process_obstacle(momentum[0].device.type, RECORDABLE)
        elif step.reason is None:
            step.reason = step.around.change() if step.seen else RETIRED
        expected = function(*arguments)
        if step.reason is None:
            with self.attempting():  # the fit's own step goes on with what it has
                signature = CallSignature(number, grad, momentum, self._names)
                step.seen.append(Call.seen(function, signature, expected, *arguments))
            step.reason = self.blocked
        return expected

    def _names(self, grads: Tensors) -> list[str]:
        """Return the names of the parameters that these are the gradients of."""
        names = {id(p.grad): name for name, p in self.model.named_parameters() if p.grad is not None}
        return [names.get(id(grad), f"gradient {i} of no parameter") for i, grad in enumerate(grads)]

    def _count(self, step: Step) -> None:
        """Count a step that is over, and record it or retire what it has shown to be out of date."""
        if step.seen and step.reason is None:
            step.reason = step.around.change()  # the recording would be made in another state than the step was
        if not step.calls:
            in_place = replay_orthogonalization.patch.applied
            self.report.eager[self.blocked or (NOTHING_TO_DO if in_place else NOT_IN_PLACE)] += 1
        elif step.reason is not None:
            self.report.eager[step.reason] += 1
        elif step.seen:
            self.report.eager[RECORDING] += 1
            self._record(OrthogonalizationRecording(self.recorder, step.seen, step.around))
        else:
            self.report.replayed += 1
            if self.recording is not None and step.calls < (recorded := len(self.recording.calls)):
                self._retire(f"number of muon groups: {recorded} -> {step.calls}")

    def _record(self, recording: OrthogonalizationRecording) -> None:
        """Make the recording, and adopt it if it proves right."""

        def record() -> set[str]:
            """Return what two eager passes, which are the warm-up of the recorder's stream, differ in.

            Their memory, workspaces of libraries among it, is given back before the capture, which takes its own.
            """
            with torch.no_grad(), self.recorder.session():
                unverifiable = set(proof.differences(recording.eager(), recording.eager()))
                self.recorder.settle(recent=True)
                recording.capture()
            return unverifiable

        def check(unverifiable: set[str]) -> str | None:
            """Compare a replay with the updates that the fit itself was made with."""
            expected, replayed = recording.expected(), recording.replay()
            return proof.verdict(expected, replayed, unverifiable) or _other_layout(expected, replayed)

        with self.attempting():
            self._make(recording, record, check)
        for call in recording.calls:
            call.expected = []


def _other_layout(expected: proof.Results, replayed: proof.Results) -> str | None:
    """Return the first update whose replay lies otherwise in memory: what reads it might then run other kernels."""
    for name, tensor in expected.items():
        if tensor.stride() != replayed[name].stride():
            return f"self-check: strides of {name}: {tensor.stride()} -> {replayed[name].stride()}"
    return None
