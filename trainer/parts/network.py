"""The model call of a training step: eager, or replayed where that is proven to be the same.

`EagerNetworkStep` calls the network. `GraphedNetworkStep` records it during one eager step and replays it from the
next on. Neither is an ``nn.Module`` and neither changes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn
from ultralytics.utils.torch_utils import unwrap_model

from detgraph.cfg import CaptureOptions
from detgraph.models import UnsupportedNetwork, objective_blocker
from detgraph.trainer.capture import proof
from detgraph.trainer.capture.holder import RecordingHolder
from detgraph.trainer.capture.lending import Loan
from detgraph.trainer.capture.recording import Recorder, Recording, parameter_aliases
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.capture.signature import recording_obstacle
from detgraph.trainer.capture.state import NetworkState

from .observed import Observed, autocast_remains

RECORDING = "step that was recorded"
OTHER_SHAPE = "batch of another shape"
TAIL = "smaller batch"
TOO_EARLY = "before the step that may be recorded"


class EagerNetworkStep:
    """Calls the network as it is; every step counts as eager for ``reason``."""

    def __init__(self, model: nn.Module, report: CaptureReport, reason: str) -> None:
        self.model = model
        self.report = report
        self.reason = reason

    @property
    def recorded(self) -> bool:
        """Whether a recording is alive."""
        return False

    def __call__(self, images: Tensor) -> dict:
        """Return the training predictions for ``images`` of shape (batch, channels, height, width)."""
        self.report.eager[self.reason] += 1
        return self.model(images)

    def whole(self, batch: dict, reason: str) -> tuple[Tensor, dict]:
        """Call model and objective in one, as upstream does; returns the loss and its items."""
        self.report.eager[reason] += 1
        return self.model(batch)

    def after_backward(self) -> None:
        """Called between the backward pass and whatever uses the gradients."""

    def lend(self, what: str, survivors: Callable[[], Iterable[Tensor | None]] = tuple) -> AbstractContextManager[None]:
        """Let eager work between two steps allocate in a live recording's memory; ``what`` it is, for the report.

        ``survivors`` returns the tensors that are known to outlive it (see ``Loan.settle``); it is called before the
        next replay, and what is gone by then need not move.
        """
        return nullcontext()

    def drop(self) -> None:
        """Give up the recording, if any, and everything that belongs to it. May be called again."""


class GraphedNetworkStep(RecordingHolder, EagerNetworkStep):
    """Records the network's forward and backward once, proves the recording, and replays it.

    The first full batch that may be recorded runs eagerly and is an ordinary step of the fit; between its backward
    and the optimizer step the same work is recorded on a side stream and must reproduce the eager results bit for
    bit. From the next full batch on, predictions are views of reused memory, valid until the next call.

    Args:
        model: the training model, a plain detection model.
        recorder: makes recordings on the model's device.
        shape: the (batch, channels, height, width) to record; batches of another shape run eagerly.
        options: whether to check, how often to record, from which step on.
        report: counts every step.

    Attributes:
        survivors: returns what of a step outlives it besides gradients, see `lend`.
    """

    key = "capture_network"
    recording: Recording | None

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        shape: tuple[int, ...],
        options: CaptureOptions,
        report: CaptureReport,
    ) -> None:
        EagerNetworkStep.__init__(self, model, report, "")
        RecordingHolder.__init__(self, recorder, options, report)
        self.network = unwrap_model(model)
        self.shape = shape
        self.survivors: Callable[[], Iterable[Tensor | None]] = tuple
        self._observed: Observed | None = None
        self._before: NetworkState | None = None  # only with verify: the state before the present replay
        self._tail = ExitStack()  # open while a tail works in the recording's memory
        self._loan: tuple[str, Loan, Callable[[], Iterable[Tensor | None]]] | None = None  # one that is not settled yet
        self._lends = True
        self._fresh = False  # recorded, and not replayed yet
        self._moved = 0  # observed steps that a replay would not do again

    def __call__(self, images: Tensor) -> dict:
        self._tail.close()
        self._observed = self._before = None
        reason = None
        with self.attempting("replay"):
            self._settle()
            reason = self._why_eager(images)
            if reason is None:
                self._make_ready()
        reason = self.blocked or reason
        if reason is None:
            self.report.replayed += 1
            return self.recording.replay(images)
        if reason == RECORDING:
            return self._observe(images)
        self.report.eager[reason] += 1
        self._lend_to_step(images)
        return self.model(images)

    def whole(self, batch: dict, reason: str) -> tuple[Tensor, dict]:
        self._observed = self._before = None
        return super().whole(batch, reason)

    def _why_eager(self, images: Tensor) -> str | None:
        """Return why this step does not replay, retiring the recording where something it baked in has changed."""
        if self.blocked:
            return self.blocked
        if tuple(images.shape) != self.shape:
            return OTHER_SHAPE
        if self.recording is not None:
            change = self.recording.signature.change(images) or self._kept_gradient()
            if change is None:
                return None
            self._retire(change)
        if self.blocked:
            return self.blocked
        if self.report.steps < self.options.record_at_step:
            return TOO_EARLY
        return recording_obstacle(self.network.model, images) or objective_blocker(self.network) or RECORDING

    def _make_ready(self) -> None:
        """Do what comes before a replay: the first one of a recording, and one that is to be checked."""
        if self._fresh:  # what the recorded step left in the cache is of no use to steps that replay
            self._fresh = False
            self.recorder.settle(recent=True)
        if self.options.verify:
            self._before = self._state()

    def _kept_gradient(self) -> str | None:
        """Make room for the next replay; return what is kept of the last gradients where it would be overwritten."""
        parameter = self.recording.gradients.vacate(self.network.parameters())
        if parameter is None:
            return None
        names = (name for name, p in self.network.named_parameters() if p is parameter)
        return f"an earlier gradient of {next(names, 'a parameter that left the network')} is still in use"

    # Lending ----------------------------------------------------------------------------------------------------

    @contextmanager
    def lend(self, what: str, survivors: Callable[[], Iterable[Tensor | None]] = tuple) -> Iterator[None]:
        loan, routed = None, ExitStack()
        with self.attempting("lending the recording's memory"):
            self._settle()
            if self.recording is not None and self._lends and self.recording.memory.lends:
                loan = routed.enter_context(self.recording.memory.lend())
        try:
            with routed:
                yield
        except BaseException:
            if loan is not None:
                self._release()  # whatever was interrupted may still live in the recording's memory
            raise
        if loan is not None:
            self.report.lent[what] += 1
            self._loan = what, loan, survivors

    def _settle(self) -> None:
        """Before the recording's memory is used again: move out what the last loan has left there."""
        if self._loan is None:
            return
        (what, loan, survivors), self._loan = self._loan, None
        left = loan.settle(survivors())
        if left:
            self._lends = False
            self._retire(f"{what} left {left} tensors in the recording's memory")

    def _lend_to_step(self, images: Tensor) -> None:
        """Let this eager step have the recording's memory, from here to the end of its backward, if it is a tail.

        A tail is smaller than what was recorded, so it finds its room, and comes once an epoch: a loan is too slow for
        every step.
        """
        tail = images.shape[1:] == self.shape[1:] and len(images) < self.shape[0]
        if tail and self.recording is not None:
            self._tail.enter_context(self.lend(TAIL, self._survivors_of_step))

    def _survivors_of_step(self) -> list[Tensor | None]:
        return [*(parameter.grad for parameter in self.network.parameters()), *self.survivors()]

    # Recording --------------------------------------------------------------------------------------------------

    def _observe(self, images: Tensor) -> dict:
        """Run the step eagerly and note what a recording of it needs; count it."""
        reason = observed = None
        with self.attempting():
            observed = Observed.begin(self.network, images)
            if obstacle := observed.signature.reach.obstacle:
                self._block(obstacle)
        if self.blocked:
            self.report.eager[self.blocked] += 1
            return self.model(images)
        predictions = self.network.predict(images)
        with self.attempting():
            reason = observed.moved_by_forward(images) or observed.drawn_on_the_host()
            if reason is None:
                predictions = self._listen(observed, predictions)
            else:
                self._not_repeatable(reason)
        self.report.eager[self.blocked or reason or RECORDING] += 1
        return predictions

    def _listen(self, observed: Observed, predictions: object) -> object:
        """Wait for the backward; return the predictions in the layout that a recording hands over."""
        try:
            outputs = observed.view.flatten(predictions)
        except UnsupportedNetwork as error:
            self._block(str(error))
            return predictions
        observed.listen(outputs)
        self._observed = observed
        return observed.view.restore(outputs)

    def _not_repeatable(self, reason: str) -> None:
        """Give up on a network that does more than compute; once it may, as one that builds a cache at first does."""
        self._moved += 1
        if self._moved > 1:
            self._block(reason)

    def after_backward(self) -> None:
        self._tail.close()
        observed, self._observed = self._observed, None
        if observed is not None:
            with self.attempting():
                if observed.complete():
                    self._record(observed)
        elif self._before is not None and self.recording is not None and not self.recording.awaiting_backward:
            with self.attempting("verification"):
                self._verify(self._before)

    def _state(self) -> NetworkState:
        """Return a copy of all that an extra pass would move."""
        recording = self.recording
        return NetworkState.take(self.network, recording.input.device, recording.signature.reach.tensors.values())

    def _record(self, observed: Observed) -> None:
        """Record the observed step and adopt the recording if it proves right; the fit's state stays as it is."""
        if autocast_remains(observed.images.device):
            return self._block("autocast is on during the backward pass")
        if reason := observed.moved_by_backward() or observed.drawn_on_the_host():
            return self._not_repeatable(reason)
        recording = Recording(
            self.recorder,
            observed.view,
            observed.images,
            tuple(observed.incoming),
            observed.mode,
            observed.signature,
        )
        observed.incoming.clear()
        reach = observed.signature.reach
        expected: proof.Results = {}

        def eager_pass(aliases: dict) -> proof.Results:
            observed.before.restore()
            return recording.eager(aliases)

        def record() -> set[str]:
            """Return what two eager passes, which are the warm-up of the recorder's stream, differ in."""
            with self.recorder.session() as memory, parameter_aliases(self.network) as aliases:
                expected.update(eager_pass(aliases))
                control = eager_pass(aliases)
                memory.measure()
                self.recorder.settle(recent=True)
                observed.before.restore()
                recording.capture(memory, aliases)
            if moved := reach.change():  # by the extra passes, and not by the step
                raise RuntimeError(f"the network changes as it is recorded: {moved}")
            return set(proof.differences(expected, control))

        def check(unverifiable: set[str]) -> str | None:
            observed.before.restore()
            wrong = proof.verdict(expected, recording.rehearse(), unverifiable)
            own = {f"gradient of {name}": parameter.grad for name, parameter in observed.alone.items()}
            own = {name: None if gradient is None else gradient.cpu() for name, gradient in own.items()}
            return wrong or proof.verdict(observed.accumulated(expected), own, unverifiable, "the step itself")

        try:
            with observed.state().put_back():
                self._make(recording, record, check)
        finally:
            reach.restore()
        if self.recording is not None:
            recording.observing = self.options.verify
            self._fresh = True

    def _verify(self, before: NetworkState) -> None:
        """Compare the replay that has just run with an eager pass of the same input and incoming gradients."""
        started = time.perf_counter()
        self._before = None
        recording = self.recording
        with self._state().put_back():
            with recording.memory.on_stream(), parameter_aliases(self.network) as aliases:
                before.restore()
                expected = recording.eager(aliases)
            wrong = proof.verdict(expected, recording.observed, self.report.unverifiable)
        self.report.seconds["checking"] += time.perf_counter() - started
        if wrong:
            self.report.retire(wrong)
            self._release()
            self._block(wrong)

    # Ends -------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        try:
            self._tail.close()
            self._observed = self._before = None
            if self._loan is not None:
                _, loan, survivors = self._loan
                loan.settle(survivors())  # what stayed would keep its part of the memory
        except RuntimeError:
            pass  # a device that does not answer has said so already: that error is on its way
        finally:
            super().drop()

    def _release(self) -> None:
        self._loan = None
        super()._release()
