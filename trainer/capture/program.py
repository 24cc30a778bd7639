"""A part of a training step in plain torch: what can be recorded, and what making a recording of it needs to know.

A program is made from one eager step of the fit, which it has seen. It knows nothing of recorders: its segments are
functions that read static inputs and return static results, and run eagerly as well as while they are recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from .proof import Results

Cut = Callable[[Callable[[], None]], None]
"""Called inside a segment: ends what is recorded, has a short piece of work run eagerly there, at every replay, and
goes on recording. A piece may wait for the device, and may raise: the replay then ends there."""


class Program(ABC):
    """One part of a step, as a recording of it is made, proven, guarded and replayed.

    Making a recording runs all segments several times, in order. All that this moves besides the static results is the
    program's footprint: ``kept`` puts it back as the step has left it, ``rewind`` as the step has found it.

    Attributes:
        part: what it computes, as messages name it: "network".
        key: our key that asks for it, as messages name it.
        cut: see `Cut`; set by whoever records. Outside of a recording the piece just runs.
    """

    part: str
    key: str

    @staticmethod
    def cut(piece: Callable[[], None]) -> None:
        piece()

    # Making a recording -----------------------------------------------------------------------------------------

    @abstractmethod
    def segments(self) -> Sequence[Callable[[], Sequence[Tensor | None]]]:
        """Return what is recorded, in the order in which it replays; each returns the tensors that it leaves."""

    @abstractmethod
    def running(self) -> AbstractContextManager:
        """Return the context that segments run in, eagerly or recorded."""

    @abstractmethod
    def kept(self) -> AbstractContextManager:
        """Return the context at whose end, whatever happens in it, the footprint is as it was at its start."""

    def rewind(self) -> None:
        """Put the footprint back to where it was before the step that was seen."""
        return None

    @abstractmethod
    def captured(self, results: Sequence[Sequence[Tensor | None]]) -> None:
        """Take what the recorded segments have returned: static results from now on, written by every replay."""

    def moved(self) -> str | None:
        """Return what running has moved besides results and footprint, so that replays would miss it, or None."""
        return None

    # Proving it -------------------------------------------------------------------------------------------------

    @abstractmethod
    def results(self, of: Sequence[Sequence[Tensor | None]] | None = None) -> Results:
        """Return copies, on the host, of what segments have returned, and of what else a pass leaves, by name.

        Without ``of``: of what the latest replay has left.
        """

    @abstractmethod
    def own(self, expected: Results) -> tuple[Results, Results]:
        """Return what the fit's own step should have left if ``expected`` is what it computed, and what it has left.

        By the names of results, as far as they can be told.
        """

    def objection(self) -> str | None:
        """Return what else than values a replay would get wrong, in words, or None."""
        return None

    def adopted(self) -> None:
        """Let go of what only making a recording, and proving it, has needed."""
        return None

    # Replaying it -----------------------------------------------------------------------------------------------

    @abstractmethod
    def change(self, *live: object) -> str | None:
        """Return what that was recorded has changed since, so that a replay on ``live`` would be wrong, or None."""

    @abstractmethod
    def load(self, segment: int, *live: object) -> None:
        """Copy a step's inputs of one segment to where the recorded work reads them."""

    @abstractmethod
    def release(self) -> None:
        """Let go of all that is known of the fit. May be called again."""


class Differentiable(Program):
    """A program of two segments, forward and backward, that autograd meets as one node.

    Attributes:
        leaves: the tensors that get gradients, the inputs of the node; what a step brings by `load` counts.
        outputs: static outputs, without autograd history; empty before `captured`.
        used: which outputs something sends gradients for; the others have none in the recorded backward either.
    """

    leaves: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    used: tuple[bool, ...] = ()

    @abstractmethod
    def load_backward(self, incoming: Sequence[Tensor]) -> None:
        """Copy the gradients of the used outputs to where the recorded backward reads them."""

    @abstractmethod
    def hand_out(self) -> list[Tensor | None]:
        """Return, after a replayed backward, one gradient per leaf for autograd to adopt."""
