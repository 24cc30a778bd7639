"""One recording of a network's forward and backward, and the autograd node that replays it.

A recorder supplies two primitives, the rest is here and the same for every recorder:

* ``session()``: a context in which warm-up and capture run (on CUDA a side stream); yields the memory that what is
  captured in it works in;
* ``capture(run)``: call ``run`` once and return its result with a tape whose ``replay()`` does the same work again,
  on the same addresses, without any Python.

Memory of a recording is reused by every replay: input, outputs, incoming gradients and parameter gradients each have
one place. What leaves the recording is a view of that place, valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from detgraph.models import NetworkView

from . import proof, torch_private
from .gradients import ReusedGradients
from .lending import Memory
from .signature import Signature

T = TypeVar("T")


class Tape(Protocol):
    """Recorded work. ``replay`` issues it on the current stream; ``release`` gives its memory back."""

    def replay(self) -> None: ...

    def release(self) -> None: ...


class Recorder(Protocol):
    """How work is recorded on a device; one object may make any number of recordings, one after another."""

    def session(self) -> AbstractContextManager[Memory]: ...

    def capture(self, run: Callable[[], T]) -> tuple[T, Tape]: ...

    def settle(self, recent: bool = False) -> None:
        """Wait for the device and give unused memory back, so that the recording need not live beside it.

        Memory in garbage is unused, too. ``recent``: only look for garbage from since the last look, which takes no
        time; a look at everything takes some hundred milliseconds of a slow host.
        """


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward, to be entered again elsewhere, with a weight cache of its own.

    A cached cast made outside a recording would be missing from it, one made inside would leak out of it: the cache
    is empty when the forward starts and when it has ended. Whether there is one is part of the state, because a
    weight that is used twice sums its gradients before the cast with it and after the cast without.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    @contextmanager
    def forward(self) -> Iterator[None]:
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache):
                yield
        finally:
            torch.clear_autocast_cache()

    def backward(self) -> AbstractContextManager:
        """Backward passes run outside autocast, as the training loop's do."""
        return torch.autocast(self.device_type, enabled=False, cache_enabled=False)


@contextmanager
def parameter_aliases(model: nn.Module) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Put fresh leaf tensors over the same storage in place of the trainable parameters; yields parameter -> alias.

    A pass over the aliases leaves the parameters' hooks, accumulated gradients and gradient nodes alone; the latter
    may belong to the stream of an earlier, still living graph. A tied parameter has one alias.
    """
    aliases: dict[nn.Parameter, Tensor] = {}
    replaced: list[tuple[dict, str, nn.Parameter]] = []

    def put_back() -> None:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter

    try:
        for module in model.modules():
            for name, parameter in torch_private.own_parameters(module).items():
                if parameter is not None and parameter.requires_grad:
                    if parameter not in aliases:
                        aliases[parameter] = parameter.detach().requires_grad_()
                    replaced.append((torch_private.own_parameters(module), name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = aliases[parameter]
        yield aliases
    finally:
        try:
            put_back()
        except BaseException:  # an interrupt in the middle of it
            put_back()
            raise


class Recording:
    """The recorded forward and backward of ``view`` for one input form, as one node of autograd.

    ``replay`` runs the forward; the backward runs when autograd comes by, once, and only for the latest forward. What
    a recording knows of the fit goes with ``release``: a loss that somebody keeps holds its node, and through it the
    recording, for as long.

    Attributes:
        view: the network; None once released, as is ``signature``.
        signature: what was baked in, see `Signature`; compared by whoever decides to replay.
        input: the static input; ``replay`` copies into it, which broadcasts: the caller guarantees the shape.
        outputs: static outputs, one per tensor of the view, without autograd history.
        used: which outputs the objective sends gradients for; the others have none in the recorded backward either.
        output_gradients: static incoming gradients of the used outputs, in the objective's layout.
        parameters: the trainable parameters, and ``gradients``: what they get, in the same order.
        memory: where all of it lies, but for input and incoming gradients; None before ``capture``.
        observing: whether each replayed backward leaves a copy of all results in ``observed``, before hooks see them.
    """

    def __init__(
        self,
        recorder: Recorder,
        view: NetworkView,
        images: Tensor,
        incoming: tuple[Tensor | None, ...],
        mode: Autocast,
        signature: Signature,
    ) -> None:
        self.view: NetworkView | None = view
        self.signature: Signature | None = signature
        self.mode = mode
        self.input = images.detach().clone(memory_format=torch.preserve_format)
        self.used = tuple(gradient is not None for gradient in incoming)
        self.output_gradients = tuple(_like(gradient) for gradient in incoming if gradient is not None)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.gradients: ReusedGradients | None = None
        self.memory: Memory | None = None
        self.observing = False
        self.observed: proof.Results = {}
        self.serial = 0
        self.awaiting_backward = False
        self._recorder = recorder
        self._tapes: list[Tape] = []

    # Making it --------------------------------------------------------------------------------------------------

    def eager(self, aliases: dict[nn.Parameter, Tensor]) -> proof.Results:
        """Run forward and backward once, eagerly, on the static input and incoming gradients. Moves buffers and RNG."""
        outputs = self._run_forward()
        gradients = self._run_backward(outputs, aliases)
        return self._results(outputs, gradients)

    def capture(self, memory: Memory, aliases: dict[nn.Parameter, Tensor]) -> None:
        """Record in a session's memory. On an error nothing recorded is left; what the pass moved is not restored."""
        try:
            outputs, tape = self._recorder.capture(self._run_forward)
            self._tapes.append(tape)
            gradients, tape = self._recorder.capture(
                lambda: _apart(self._run_backward(outputs, aliases), self.output_gradients)
            )
            self._tapes.append(tape)
            self.outputs = tuple(output.detach() for output in outputs)
            self.parameters = tuple(aliases)
            self.gradients = ReusedGradients(self.parameters, gradients)
            self.memory = memory
        except BaseException:
            self.release()
            raise

    def rehearse(self) -> proof.Results:
        """Replay forward and backward once, on what the static input and incoming gradients hold now."""
        for tape in self._tapes:
            tape.replay()
        return self.results()

    def results(self) -> proof.Results:
        """Return copies of what the latest replay has left."""
        return self._results(self.outputs, self.gradients.all)

    def _results(self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> proof.Results:
        return proof.results(self.view.model, outputs, gradients, self.signature.reach.tensors)

    def _run_forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self.mode.forward():
            return self.view(self.input)

    def _run_backward(self, outputs: tuple[Tensor, ...], aliases: dict) -> tuple[Tensor | None, ...]:
        used = [output for output, used in zip(outputs, self.used, strict=True) if used]
        with self.mode.backward():
            return torch.autograd.grad(used, list(aliases.values()), self.output_gradients, allow_unused=True)

    # Replaying --------------------------------------------------------------------------------------------------

    def replay(self, images: Tensor) -> dict:
        """Replay the forward on ``images``; return the predictions, views of memory that the next replay reuses."""
        self.input.copy_(images)
        self.serial += 1
        self.awaiting_backward = True
        return self.view.restore(Replay.apply(self, *self.parameters))

    def replay_backward(self, serial: int, incoming: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Replay the backward of forward number ``serial``; return one gradient per parameter.

        Raises:
            RuntimeError: for what reused memory cannot give: the backward of a forward that is not the latest, a second
                backward of the same forward, other outputs than were recorded, and gradients of gradients.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a replayed network has no gradients of gradients (create_graph=True); "
                "train with capture_network=False to differentiate twice"
            )
        if serial != self.serial:
            raise RuntimeError(
                f"backward of replayed forward {serial}, but its memory was reused (the latest is {self.serial}); "
                "run backward before the next forward, or train with capture_network=False"
            )
        if not self.awaiting_backward:
            raise RuntimeError(
                f"second backward of replayed forward {serial} (retain_graph=True); "
                "run one backward a forward, or train with capture_network=False"
            )
        self.awaiting_backward = False
        if tuple(gradient is not None for gradient in incoming) != self.used:
            raise RuntimeError(
                "the objective uses other outputs of the network than when it was recorded; "
                "train with capture_network=False"
            )
        with torch.no_grad():
            torch_private.foreach_copy(self.output_gradients, [g for g in incoming if g is not None])
        self._tapes[1].replay()
        if self.observing:
            self.observed = self.results()
        return self.gradients.hand_out()

    def release(self) -> None:
        """Give the memory back, with all that is known of the fit. Views that left it must not be read afterwards.

        Live gradients that lie in it get storage of their own first. May be called again.
        """
        tapes, self._tapes = self._tapes, []
        gradients, view = self.gradients, self.view
        self.serial += 1  # a backward of the last forward has nothing to replay any more
        self.memory = self.view = self.signature = self.gradients = self._recorder = None
        self.input = None
        self.outputs = self.output_gradients = self.parameters = ()
        self.observed = {}
        try:
            if gradients is not None:
                gradients.release(view.model.parameters())
        except RuntimeError:
            pass  # no room for copies: a gradient in use keeps its part of the memory, which nobody writes to any more
        finally:
            for tape in tapes:
                tape.release()


def _like(gradient: Tensor) -> Tensor:
    """Return a buffer with the values and, where it is dense, the layout of ``gradient``."""
    return gradient.detach().clone(memory_format=torch.preserve_format)


def _apart(gradients: tuple[Tensor | None, ...], incoming: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Give every gradient storage of its own, inside the recording: none that another one or ``incoming`` has.

    A sum of two weights sends both one tensor, which an eager backward copies for one of them. A replay hands out what
    it has: adopted twice, the tensor would be clipped twice in place.
    """
    taken = {gradient.untyped_storage().data_ptr() for gradient in incoming}
    apart = []
    for gradient in gradients:
        if gradient is not None and gradient.untyped_storage().data_ptr() in taken:
            gradient = gradient.clone(memory_format=torch.preserve_format)
        if gradient is not None and gradient.numel():
            taken.add(gradient.untyped_storage().data_ptr())
        apart.append(gradient)
    return tuple(apart)


class Replay(torch.autograd.Function):
    """The recorded network as one node: parameters in, outputs out, gradients adopted by autograd."""

    @staticmethod
    def forward(ctx, recording: Recording, *parameters: Tensor) -> tuple[Tensor, ...]:
        recording._tapes[0].replay()
        ctx.recording, ctx.serial = recording, recording.serial
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in recording.outputs)
        ctx.mark_non_differentiable(*(o for o, used in zip(outputs, recording.used, strict=True) if not used))
        return outputs

    @staticmethod
    def backward(ctx, *incoming: Tensor | None):
        return (None, *ctx.recording.replay_backward(ctx.serial, incoming))
