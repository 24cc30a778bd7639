"""The model call of a training step: eager, or replayed where that is proven to be the same.

`EagerNetworkStep` calls the network. `GraphedNetworkStep` records it during one eager step and replays it from the
next on. Neither is an ``nn.Module`` and neither changes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from ultralytics.utils.torch_utils import unwrap_model

from detgraph.cfg import CaptureOptions
from detgraph.models import UnsupportedNetwork, objective_blocker

from . import proof, torch_private
from .gradients import ReusedGradients
from .holder import RecordingHolder
from .lending import Loan
from .observed import Observed, autocast_remains
from .recording import Recorder, Recording, Replay, parameter_aliases
from .report import CaptureReport
from .signature import Signature, recording_obstacle
from .state import NetworkState

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
        self.signature: Signature | None = None
        self._observed: Observed | None = None
        self._before: NetworkState | None = None  # only with verify: the state before the present replay,
        self._replayed: proof.Results = {}  # and what it left
        self._serial = 0
        self._awaiting_backward = False
        self.gradients: ReusedGradients | None = None
        self.survivors: Callable[[], Iterable[Tensor | None]] = tuple
        self._tail = ExitStack()  # open while a tail works in the recording's memory
        self._loan: tuple[str, Loan, Callable[[], Iterable[Tensor | None]]] | None = None  # one that is not settled yet
        self._lends = True
        self._fresh = False  # recorded, and not replayed yet

    def __call__(self, images: Tensor) -> dict:
        self._tail.close()
        self._settle()
        self._observed = self._before = None
        reason = self._why_eager(images)
        if reason is None:
            return self._replay(images)
        self.report.eager[reason] += 1
        if reason == RECORDING:
            return self._observe(images)
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
            change = self.signature.change(images) or self._kept_gradient()
            if change is None:
                return None
            self._retire(change)
        if self.blocked:
            return self.blocked
        if self.report.steps < self.options.record_at_step:
            return TOO_EARLY
        return recording_obstacle(self.network.model, images) or objective_blocker(self.network) or RECORDING

    # Replay -----------------------------------------------------------------------------------------------------

    def _replay(self, images: Tensor) -> dict:
        recording = self.recording
        if self._fresh:  # what the recorded step left in the cache is of no use to steps that replay
            self._fresh = False
            self.recorder.settle(recent=True)
        if self.options.verify:
            self._before = NetworkState.take(self.network, images.device)
        recording.input.copy_(images)
        self._serial += 1
        self._awaiting_backward = True
        self.report.replayed += 1
        return recording.view.restore(Replay.apply(self, self._serial, *recording.parameters))

    def replay_backward(self, serial: int, incoming: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Replay the backward of forward number ``serial``; returns one gradient per parameter of the recording."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a replayed network has no gradients of gradients (create_graph=True); "
                "train with capture_network=False to differentiate twice"
            )
        recording = self.recording
        if recording is None or serial != self._serial:
            raise RuntimeError(
                f"backward of replayed forward {serial}, but its memory was reused (the latest is {self._serial}); "
                "run backward before the next forward, or train with capture_network=False"
            )
        if not self._awaiting_backward:
            raise RuntimeError(
                f"second backward of replayed forward {serial} (retain_graph=True); "
                "run one backward a forward, or train with capture_network=False"
            )
        self._awaiting_backward = False
        if tuple(gradient is not None for gradient in incoming) != recording.used:
            raise RuntimeError(
                "the objective uses other outputs of the network than when it was recorded; "
                "train with capture_network=False"
            )
        with torch.no_grad():
            torch_private.foreach_copy(recording.output_gradients, [g for g in incoming if g is not None])
        recording.backward()
        if self._before is not None:
            self._replayed = self._replayed_results(recording)  # hooks may change in place what is handed out
        return self.gradients.hand_out()

    def _kept_gradient(self) -> str | None:
        """Make room for the next replay; return what is kept of the last gradients where it would be overwritten."""
        parameter = self.gradients.vacate(self.network.parameters())
        if parameter is None:
            return None
        names = (name for name, p in self.network.named_parameters() if p is parameter)
        return f"an earlier gradient of {next(names, 'a parameter that left the network')} is still in use"

    # Lending ----------------------------------------------------------------------------------------------------

    @contextmanager
    def lend(self, what: str, survivors: Callable[[], Iterable[Tensor | None]] = tuple) -> Iterator[None]:
        self._settle()
        if self.recording is None or not self._lends:
            yield
            return
        try:
            with self.recording.memory.lend() as loan:
                yield
        except BaseException:
            self._release()  # whatever was interrupted may still live in the recording's memory
            raise
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
        """Run the step eagerly through the view and note what a recording of it needs."""
        observed = Observed.begin(self.network, images)
        try:
            outputs = observed.view(images)
        except UnsupportedNetwork as error:
            self._block(str(error))
            observed.before.restore()
            return self.model(images)
        if obstacle := observed.left_on_the_host(images):
            self._block(obstacle)
        else:
            observed.listen(outputs)
            self._observed = observed
        return observed.view.restore(outputs)

    def after_backward(self) -> None:
        self._tail.close()
        observed, self._observed = self._observed, None
        if observed is not None and observed.complete():
            if autocast_remains(observed.images.device):
                self._block("autocast is on during the backward pass")
            else:
                self._record(observed)
        elif self._before is not None and self.recording is not None and not self._awaiting_backward:
            self._verify(self._before)

    def _record(self, observed: Observed) -> None:
        """Record the observed step and adopt the recording if it proves right; the fit's state stays as it is."""
        after = NetworkState.take(self.network, observed.images.device)
        recording = Recording(self.recorder, observed.view, observed.images, tuple(observed.incoming), observed.mode)
        observed.incoming.clear()
        expected: proof.Results = {}

        def record() -> set[str]:
            """Return what two eager passes, which are the warm-up of the recorder's stream, differ in."""
            with self.recorder.session() as memory, parameter_aliases(self.network) as aliases:
                expected.update(self._eager_results(recording, observed.before, aliases))
                control = self._eager_results(recording, observed.before, aliases)
                memory.measure()
                self.recorder.settle(recent=True)
                observed.before.restore()
                recording.capture(memory, aliases)
            return set(proof.differences(expected, control))

        def check(unverifiable: set[str]) -> str | None:
            observed.before.restore()
            recording.forward()
            recording.backward()
            wrong = proof.verdict(expected, self._replayed_results(recording), unverifiable)
            own = {f"gradient of {name}": parameter.grad for name, parameter in observed.alone.items()}
            own = {name: None if gradient is None else gradient.cpu() for name, gradient in own.items()}
            return wrong or proof.verdict(expected, own, unverifiable, "the step itself")

        try:
            adopted = self._make(recording, record, check)
        finally:
            after.restore()
        if adopted:
            self.recording, self.signature = recording, observed.signature
            self.gradients = ReusedGradients(recording.parameters, recording.gradients)
            self._fresh = True

    def _eager_results(self, recording: Recording, before: NetworkState, aliases: dict) -> proof.Results:
        before.restore()
        result = recording.eager(aliases)
        return proof.results(self.network, result.outputs, result.gradients)

    def _replayed_results(self, recording: Recording) -> proof.Results:
        return proof.results(self.network, recording.outputs, recording.gradients)

    def _verify(self, before: NetworkState) -> None:
        """Compare the replay that has just run with an eager pass of the same input and incoming gradients."""
        started = time.perf_counter()
        self._before = None
        recording = self.recording
        after = NetworkState.take(self.network, recording.input.device)
        replayed, self._replayed = self._replayed, {}
        try:
            with self.recorder.session(), parameter_aliases(self.network) as aliases:
                expected = self._eager_results(recording, before, aliases)
            wrong = proof.verdict(expected, replayed, self.report.unverifiable)
        finally:
            after.restore()
        self.report.seconds["checking"] += time.perf_counter() - started
        if wrong:
            self.report.retire(wrong)
            self._release()
            self._block(wrong)

    # Ends -------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        self._tail.close()
        self._observed = self._before = None
        if self._loan is not None:
            _, loan, survivors = self._loan
            try:
                loan.settle(survivors())  # what stayed would keep its part of the memory
            except RuntimeError:
                pass  # a device that does not answer has said so already: that error is on its way
        super().drop()

    def _release(self) -> None:
        self._loan = None
        if self.recording is not None:
            self._serial += 1  # a backward of the last forward has nothing to replay any more
            self.gradients.release(self.network.parameters())
        self.signature = self.gradients = None
        super()._release()
