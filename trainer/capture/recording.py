"""One recording of a program: its tapes, and the autograd node that replays a differentiable one.

Memory of a recording is reused by every replay: each input and each result has one place. What leaves the recording is
a view of that place, valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .lending import Memory
from .program import Differentiable, Program
from .proof import Results

T = TypeVar("T")


class Tape(Protocol):
    """Recorded work. ``replay`` issues it on the current stream; ``release`` gives its memory back."""

    def replay(self) -> None: ...

    def release(self) -> None: ...


class Recorder(Protocol):
    """How work is recorded on a device; one object makes all recordings of a fit, one after another.

    * ``session()``: a context in which warm-up and capture run (on CUDA a side stream); yields the memory that what is
      captured in it works in;
    * ``capture(run)``: call ``run`` once and return its result with a tape whose ``replay()`` does the same work again,
      on the same addresses, without any Python;
    * ``cut(piece)``: inside ``run``, see `program.Cut`.
    """

    def session(self) -> AbstractContextManager[Memory]: ...

    def capture(self, run: Callable[[], T]) -> tuple[T, Tape]: ...

    def cut(self, piece: Callable[[], None]) -> None: ...

    def settle(self, recent: bool = False) -> None:
        """Wait for the device and give unused memory back, so that the recording need not live beside it.

        Memory in garbage is unused, too. ``recent``: only look for garbage from since the last look, which takes no
        time; a look at everything takes some hundred milliseconds of a slow host.
        """


class Recording:
    """The recorded segments of a program, to be replayed in their order.

    What a recording knows of the fit goes with ``release``: a loss that somebody keeps holds its node, and through it
    the recording, for as long.

    Attributes:
        program: what was recorded; None once released.
        memory: where results and all in between lie; None before ``capture``.
        observing: whether each complete replay leaves a copy of all results in ``observed``, before hooks see them.
    """

    def __init__(self, recorder: Recorder, program: Program) -> None:
        self.program: Program | None = program
        self.memory: Memory | None = None
        self.observing = False
        self.observed: Results = {}
        self.serial = 0
        self.awaiting_backward = False
        self._recorder: Recorder | None = recorder
        self._tapes: list[Tape] = []
        self._part, self._key = program.part, program.key  # messages name them after the release, too

    # Making it --------------------------------------------------------------------------------------------------

    def eager(self) -> Results:
        """Run all segments once, eagerly, on what the static inputs hold now; the footprint moves."""
        return self.program.results([segment() for segment in self.program.segments()])

    def capture(self, memory: Memory) -> None:
        """Record in a session's memory. On an error nothing recorded is left; what the pass moved is not restored."""
        results, recorder = [], self._recorder
        try:
            self.program.cut = recorder.cut
            for segment in self.program.segments():
                result, tape = recorder.capture(segment)
                self._tapes.append(tape)
                results.append(result)
            self.program.captured(results)
            self.memory = memory
        except BaseException:
            self.release()
            raise

    def rehearse(self) -> Results:
        """Replay all segments once, on what the static inputs hold now."""
        for tape in self._tapes:
            tape.replay()
        return self.program.results()

    # Replaying --------------------------------------------------------------------------------------------------

    def play(self, segment: int, *live: object) -> None:
        """Replay one segment on ``live``; the caller sees to it that all replay in their order."""
        self.program.load(segment, *live)
        self._tapes[segment].replay()

    def forward(self, *live: object) -> tuple[Tensor, ...]:
        """Replay the forward of a differentiable program on ``live``; return its outputs, with a backward to come."""
        self.program.load(0, *live)
        self.serial += 1
        self.awaiting_backward = True
        return Replay.apply(self, *self.program.leaves)

    def backward(self, serial: int, incoming: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Replay the backward of forward number ``serial``; return one gradient per leaf.

        Raises:
            RuntimeError: for what reused memory cannot give: the backward of a forward that is not the latest, a second
                backward of the same forward, other outputs than were recorded, and gradients of gradients.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a replayed {self._part} has no gradients of gradients (create_graph=True); "
                f"train with {self._key}=False to differentiate twice"
            )
        if serial != self.serial:
            raise RuntimeError(
                f"backward of replayed forward {serial}, but its memory was reused (the latest is {self.serial}); "
                f"run backward before the next forward, or train with {self._key}=False"
            )
        if not self.awaiting_backward:
            raise RuntimeError(
                f"second backward of replayed forward {serial} (retain_graph=True); "
                f"run one backward a forward, or train with {self._key}=False"
            )
        self.awaiting_backward = False
        program = self.program
        if tuple(gradient is not None for gradient in incoming) != program.used:
            raise RuntimeError(
                f"the objective uses other outputs of the {self._part} than when it was recorded; "
                f"train with {self._key}=False"
            )
        program.load_backward([gradient for gradient in incoming if gradient is not None])
        self._tapes[1].replay()
        if self.observing:
            self.observed = program.results()
        return program.hand_out()

    def release(self) -> None:
        """Give the memory back, with all that is known of the fit. Views that left it must not be read afterwards.

        May be called again.
        """
        tapes, self._tapes = self._tapes, []
        program, self.program = self.program, None
        self.serial += 1  # a backward of the last forward has nothing to replay any more
        self.memory = self._recorder = None
        self.observed = {}
        try:
            if program is not None:
                program.release()
        finally:
            for tape in tapes:
                tape.release()


class Replay(torch.autograd.Function):
    """A recorded program as one node: leaves in, outputs out, gradients adopted by autograd."""

    @staticmethod
    def forward(ctx, recording: Recording, *leaves: Tensor) -> tuple[Tensor, ...]:
        recording._tapes[0].replay()
        ctx.recording, ctx.serial = recording, recording.serial
        ctx.set_materialize_grads(False)
        program: Differentiable = recording.program
        outputs = tuple(output.detach() for output in program.outputs)
        ctx.mark_non_differentiable(*(o for o, used in zip(outputs, program.used, strict=True) if not used))
        return outputs

    @staticmethod
    def backward(ctx, *incoming: Tensor | None):
        return (None, *ctx.recording.backward(ctx.serial, incoming))
