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

from . import torch_private
from .lending import Memory

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
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


@dataclass
class Pass:
    """Results of one forward and backward: outputs, and gradients per parameter (None where none arrives)."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


class Recording:
    """The recorded forward and backward of ``view`` for one input form.

    Attributes:
        input: the static input; ``copy_`` into it before ``forward``. Broadcasts like any ``copy_``: the caller
            guarantees the shape.
        outputs: static outputs, one per tensor of the view, without autograd history.
        used: which outputs the objective sends gradients for; the others have none in the recorded backward either.
        output_gradients: static incoming gradients of the used outputs, in the objective's layout.
        parameters: the trainable parameters, and ``gradients``: their static gradients in the same order.
        memory: where all of it lies, but for input and incoming gradients; None before ``capture``.
    """

    def __init__(
        self, recorder: Recorder, view: NetworkView, images: Tensor, incoming: tuple[Tensor | None, ...], mode: Autocast
    ) -> None:
        self.view = view
        self.mode = mode
        self.input = images.detach().clone(memory_format=torch.preserve_format)
        self.used = tuple(gradient is not None for gradient in incoming)
        self.output_gradients = tuple(_like(gradient) for gradient in incoming if gradient is not None)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()
        self.memory: Memory | None = None
        self._recorder = recorder
        self._tapes: list[Tape] = []

    def eager(self, aliases: dict[nn.Parameter, Tensor]) -> Pass:
        """Run forward and backward once, eagerly, on the static input and incoming gradients. Moves buffers and RNG."""
        outputs = self._run_forward()
        gradients = self._run_backward(outputs, aliases)
        return Pass(tuple(output.detach() for output in outputs), gradients)

    def capture(self, memory: Memory, aliases: dict[nn.Parameter, Tensor]) -> None:
        """Record in a session's memory. On an error nothing recorded is left; what the pass moved is not restored."""
        try:
            outputs, tape = self._recorder.capture(self._run_forward)
            self._tapes.append(tape)
            self.gradients, tape = self._recorder.capture(lambda: self._run_backward(outputs, aliases))
            self._tapes.append(tape)
        except BaseException:
            self.release()
            raise
        self.outputs = tuple(output.detach() for output in outputs)
        self.parameters = tuple(aliases)
        self.memory = memory

    def _run_forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self.mode.forward():
            return self.view(self.input)

    def _run_backward(self, outputs: tuple[Tensor, ...], aliases: dict) -> tuple[Tensor | None, ...]:
        used = [output for output, used in zip(outputs, self.used, strict=True) if used]
        with self.mode.backward():
            return torch.autograd.grad(used, list(aliases.values()), self.output_gradients, allow_unused=True)

    def forward(self) -> None:
        self._tapes[0].replay()

    def backward(self) -> None:
        self._tapes[1].replay()

    def release(self) -> None:
        """Give the memory back. Views that left the recording must not be read afterwards."""
        tapes, self._tapes = self._tapes, []
        self.memory = None
        self.outputs = self.gradients = self.output_gradients = ()
        for tape in tapes:
            tape.release()


def _like(gradient: Tensor) -> Tensor:
    """Return a buffer with the values and, where it is dense, the layout of ``gradient``."""
    return gradient.detach().clone(memory_format=torch.preserve_format)


class Replay(torch.autograd.Function):
    """The recorded network as one node: images and parameters in, outputs out, gradients adopted by autograd.

    Raises ``RuntimeError`` from backward for what reused memory cannot give: the backward of a forward that is not
    the latest, a second backward of the same forward, and gradients of gradients.
    """

    @staticmethod
    def forward(ctx, holder, serial: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        recording = holder.recording
        recording.forward()
        ctx.holder, ctx.serial = holder, serial
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in recording.outputs)
        ctx.mark_non_differentiable(*(o for o, used in zip(outputs, recording.used, strict=True) if not used))
        return outputs

    @staticmethod
    def backward(ctx, *incoming: Tensor | None):
        return (None, None, *ctx.holder.replay_backward(ctx.serial, incoming))
