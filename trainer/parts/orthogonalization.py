"""The orthogonalization in MuSGD's step: eager, or replayed where that is proven to be the same.

`MuSGD.step` calls upstream's ``muon_update`` once for each group that has gradients to orthogonalize. During the
optimizer steps of a fit that asked for it, a patch sends those calls here. Learning rates, weight decay, the scaler and
all that `MuSGD.step` does itself stay upstream's, and so does the optimizer's state.

The function moves the momentum, a few operations over all tensors at once, and then orthogonalizes what comes of it, in
hundreds of small ones. The first part stays eager, on the optimizer's own buffers: momentum, gradients, Nesterov or not
may be others at every step. The second part is recorded, a segment for each call.

It is a recording of upstream's own function, called so that its first part does nothing: with a momentum of 1, without
Nesterov, and with gradients of zeros. ``x * 1 + 0 * 0`` is ``x`` but for the sign of a zero, and that the function
loses next, where it adds every matrix to zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.optim import MuSGD

from detgraph.cfg import CaptureOptions
from detgraph.patches import replay_orthogonalization
from detgraph.trainer.capture import torch_private
from detgraph.trainer.capture.guards import Guard, Guards, first_difference, from_to, process_guards, process_obstacle
from detgraph.trainer.capture.program import Program
from detgraph.trainer.capture.proof import Results
from detgraph.trainer.capture.reasons import NOT_IN_PLACE, NOTHING_TO_DO, RECORDING, RETIRED
from detgraph.trainer.capture.recording import Recorder
from detgraph.trainer.capture.report import RecordingCounts

from .part import Part

KEY = "capture_orthogonalization"
RECORDABLE = {"inference mode": False, "dispatch modes": 0, "function modes": 0}
BAKED_PROCESS_STATE = (
    "autocast",
    "autocast dtype",
    "deterministic algorithms",
    "deterministic warn-only",
    "fill_uninitialized_memory",
    "fp32 precision",
    "fp16 reduced-precision reduction",
    "bf16 reduced-precision reduction",
    "kernel choice",
    "dispatch modes",
    "function modes",
)

Tensors = list[Tensor]
Update = Callable[..., Tensors]


def surroundings(function: Update, device_type: str) -> Guards:
    """Return what a recording bakes in beside the arguments: the process, and what ``function`` calls by name."""
    iteration = "zeropower_via_newtonschulz5"
    called = Guard(iteration, lambda: function.__globals__[iteration], from_to(iteration))
    return Guards([*process_guards(device_type, BAKED_PROCESS_STATE), called])


class CallSignature(Guards):
    """What a recording bakes in of one call of ``muon_update``: the form of its arguments, by position.

    No tensor is identified: momentum buffers may be replaced, and another parameter of the same form may take a place.
    """

    def __init__(self, number: int, grads: Tensors, momentums: Tensors, names: Callable[[Tensors], list[str]]) -> None:
        self._grads, self._momentums = grads, momentums
        self.names = names(grads)

        def guard(name: str, read: Callable[[], list]) -> Guard:
            def explain(baked: list, now: list) -> str:
                if len(baked) != len(now):
                    others = names(self._grads)
                    gone = [f"without {name}" for name in self.names if name not in others]
                    new = [f"with {name}" for name in others if name not in self.names]
                    which = ", ".join([*gone[:3], *new[:3]])
                    return f"gradients in muon group {number}: {len(baked)} -> {len(now)} ({which})"
                i = first_difference(baked, now)
                return f"{name} of {self.names[i]}: {baked[i]} -> {now[i]}"

            return Guard(name, read, explain)

        super().__init__([
            guard("gradient shape", lambda: list(map(attrgetter("shape"), self._grads))),
            guard("gradient dtype", lambda: list(map(attrgetter("dtype"), self._grads))),
            guard("momentum strides", lambda: list(map(Tensor.stride, self._momentums))),
            guard("momentum dtype", lambda: list(map(attrgetter("dtype"), self._momentums))),
            guard("momentum device", lambda: list(map(attrgetter("device"), self._momentums))),
        ])  # fmt: skip
        self._grads, self._momentums = [], []

    def change(self, grads: Tensors, momentums: Tensors) -> str | None:
        """Compare with the arguments of the call that is to be replayed."""
        self._grads, self._momentums = grads, momentums
        try:
            return super().change()
        finally:
            self._grads, self._momentums = [], []


class Call:
    """One call of ``muon_update``, seen in an eager step.

    Attributes:
        function: upstream's.
        signature: the form of its arguments.
        updates: what is orthogonalized, in memory of its own with the layout of the momentum buffers.
        zeros: the gradients that the recorded function gets, in the same layout.
        results: what the function returned: in the step that was seen, and once recorded, in each replay.
    """

    def __init__(self, function: Update, signature: CallSignature, results: Tensors, *arguments) -> None:
        grads, momentums, *_ = arguments
        self.function = function
        self.signature = signature
        self.updates = [torch.empty_like(momentum) for momentum in momentums]
        pairs = zip(self.updates, grads, strict=True)
        self.zeros = [torch.zeros_like(update, dtype=grad.dtype) for update, grad in pairs]
        self.results = results
        self.load(*arguments)

    def load(self, grads: Tensors, momentums: Tensors, beta: float, nesterov: bool) -> None:
        """Set ``updates`` from a momentum that has moved: upstream's operations in upstream's order, in place."""
        torch_private.foreach_copy(self.updates, momentums)
        if nesterov:
            torch_private.foreach_mul(self.updates, beta)
            torch_private.foreach_add(self.updates, grads, alpha=1 - beta)

    def orthogonalize(self) -> Tensors:
        """Run upstream's function over ``updates``, which keep their values."""
        return self.function(self.zeros, self.updates, beta=1.0, nesterov=False)

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"update of {name}": tensor for name, tensor in zip(self.signature.names, tensors, strict=True)}


class OrthogonalizationProgram(Program):
    """The calls of one optimizer step that was seen, in order, and what surrounded them. It moves nothing."""

    part, key = "orthogonalization", KEY

    def __init__(self, calls: list[Call], around: Guards) -> None:
        self.calls = calls
        self.around = around
        self._own = self._collected([call.results for call in calls])

    def segments(self) -> Sequence[Callable[[], Tensors]]:
        return [call.orthogonalize for call in self.calls]

    def running(self) -> AbstractContextManager:
        return torch.no_grad()

    def kept(self) -> AbstractContextManager:
        return nullcontext()

    def captured(self, results: Sequence[Tensors]) -> None:
        for call, tensors in zip(self.calls, results, strict=True):
            call.results = tensors

    def _collected(self, results: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        pairs = zip(self.calls, results, strict=True)
        return {name: tensor for call, tensors in pairs for name, tensor in call.named(tensors).items()}

    def results(self, of: Sequence[Tensors] | None = None) -> Results:
        found = self._collected([call.results for call in self.calls] if of is None else of)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}

    def own(self, expected: Results) -> tuple[Results, Results]:
        return expected, {name: tensor.detach().cpu() for name, tensor in self._own.items()}

    def objection(self) -> str | None:
        """Return the first update whose replay lies otherwise in memory: what reads it might then run other kernels."""
        for name, replayed in self._collected([call.results for call in self.calls]).items():
            if (before := self._own[name].stride()) != replayed.stride():
                return f"self-check: strides of {name}: {before} -> {replayed.stride()}"
        return None

    def adopted(self) -> None:
        self._own = {}

    def change(self, number: int, grads: Tensors, momentums: Tensors) -> str | None:
        """Return why call ``number`` of a step may not be replayed, or None."""
        if number >= len(self.calls):
            return f"number of muon groups: {len(self.calls)} -> {number + 1}"
        return self.around.change() or self.calls[number].signature.change(grads, momentums)

    def load(self, segment: int, grads: Tensors, momentums: Tensors, beta: float, nesterov: bool) -> None:
        """Move the momentum in place, as upstream does, and give its recorded part what comes of that."""
        torch_private.foreach_mul(momentums, beta)
        torch_private.foreach_add(momentums, grads, alpha=1 - beta)
        self.calls[segment].load(grads, momentums, beta, nesterov)

    def release(self) -> None:
        for call in self.calls:
            call.results = []
        self.calls, self._own = [], {}


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


def blocker(trainer: Any) -> str | None:
    """Return why the optimizer steps of a fit, set up by upstream's ``trainer``, stay eager from the start."""
    if lack := torch_private.missing():
        return lack
    if type(trainer.optimizer) is not MuSGD:
        return (
            f"the optimizer is {type(trainer.optimizer).__qualname__}, and only MuSGD orthogonalizes "
            "(optimizer=auto picks it for fits of more than 10000 optimizer steps): train with optimizer=MuSGD"
        )
    if drift := replay_orthogonalization.patch.drift():
        return f"patch 'replay_orthogonalization' does not fit {replay_orthogonalization.patch.known.target}: {drift}"
    return None


def build(trainer: Any, recorder: Recorder | None, blocked: str | None) -> Orthogonalization:
    """Return the part of one fit."""
    report = trainer.capture_report.counts(KEY)
    return Orthogonalization(trainer.model, recorder, trainer.capture, report, blocked)


class Orthogonalization(Part):
    """Records the orthogonalization of one optimizer step, where it may, and replays it from then on.

    The first step that orthogonalizes is an ordinary step of the fit; when it is over, its calls are recorded and must
    reproduce the updates that it was made with bit for bit. From the next step on, the updates are reused memory,
    which `MuSGD.step` reads at once and nobody else sees.

    Args:
        model: the training model, for the names of its parameters.
        recorder: makes recordings on the model's device.
        options: whether to check, and how often to record.
        report: counts every step.
        blocked: why every step is eager, if it is; then upstream's code runs and nothing of ours, and no recorder is
            needed.
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
        self.asked = blocked is None
        self._step: Step | None = None

    def in_force(self) -> AbstractContextManager:
        """Return the context in which ``muon_update`` asks us: a fit that did not ask for it leaves upstream alone.

        Raises:
            PatchDriftError: on entry, if the patch does not fit the installed upstream.
        """
        return replay_orthogonalization.installed() if self.asked else nullcontext()

    @contextmanager
    def update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Run the body, in which ``optimizer`` takes one step at most; then record that step if it is the one to be."""
        if not self.asked:
            yield
            self.report.eager[self.blocked] += 1
            return
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
        if (recording := self.recording) is not None:
            change = recording.program.change(number, grad, momentum)
            if change is None:
                recording.play(number, *arguments)
                return list(recording.program.calls[number].results)
            self.holder.retire(change)
        if number == 0:
            step.around = surroundings(function, momentum[0].device.type)
            step.reason = self.blocked or process_obstacle(momentum[0].device.type, RECORDABLE)
        elif step.reason is None:
            step.reason = step.around.change() if step.seen else RETIRED
        expected = function(*arguments)
        if step.reason is None:
            with self.holder.attempting():  # the fit's own step goes on with what it has
                signature = CallSignature(number, grad, momentum, self._names)
                step.seen.append(Call(function, signature, expected, *arguments))
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
            with self.holder.attempting():
                self.holder.record(OrthogonalizationProgram(step.seen, step.around))
        else:
            self.report.replayed += 1
            if self.recording is not None and step.calls < (recorded := len(self.recording.program.calls)):
                self.holder.retire(f"number of muon groups: {recorded} -> {step.calls}")
