"""The memory that a step's recordings work in, lent to eager work between two replays.

One for each fit. Its holder's recording keeps activations there, which is most of what a step needs; who lends it
settles the loan before the next replay, whatever replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from .holder import Holder
from .lending import Loan

Survivors = Callable[[], Iterable[Tensor | None]]


class StepMemory:
    """Lends the memory of ``holder``'s recording, and takes it back.

    Args:
        holder: whose recording's memory it is; an error in lending makes its part eager.
        lent: counts what it was lent to.
    """

    def __init__(self, holder: Holder, lent: Counter) -> None:
        self.holder = holder
        self.lent = lent
        holder.on_release = self._forget
        self._step = ExitStack()  # open while an eager step works in the memory
        self._loan: tuple[str, Loan, Survivors] | None = None  # one that is not settled yet
        self._lends = True

    @contextmanager
    def lend(self, what: str, survivors: Survivors = tuple) -> Iterator[None]:
        """Let eager work between two steps allocate in a live recording's memory; ``what`` it is, for the report.

        ``survivors`` returns the tensors that are known to outlive it (see ``Loan.settle``); it is called before the
        next replay, and what is gone by then need not move. Without a living recording the body just runs.
        """
        loan, routed = None, ExitStack()
        with self.holder.attempting("lending the recording's memory"):
            self.settle()
            memory = next((recording.memory for recording in self.holder.recordings.values()), None)
            if memory is not None and self._lends and memory.lends:
                loan = routed.enter_context(memory.lend())
        try:
            with routed:
                yield
        except BaseException:
            if loan is not None:
                self.holder.release()  # whatever was interrupted may still live in the recording's memory
            raise
        if loan is not None:
            self.lent[what] += 1
            self._loan = what, loan, survivors

    def lend_to_step(self, what: str, survivors: Survivors) -> None:
        """Let the eager step that begins have the memory until `end_step`, the end of its backward."""
        self._step.enter_context(self.lend(what, survivors))

    def end_step(self) -> None:
        """End what `lend_to_step` began, if it did."""
        self._step.close()

    def settle(self) -> None:
        """Before the memory is used again: move out what the last loan has left there.

        Raises:
            Exception: what moving raises; to be called inside the holder's `attempting`.
        """
        if self._loan is None:
            return
        (what, loan, survivors), self._loan = self._loan, None
        left = loan.settle(survivors())
        if left:
            self._lends = False
            self.holder.retire(f"{what} left {left} tensors in the recording's memory")

    def close(self) -> None:
        """At the end of a fit: end what is lent; what stayed would keep its part of the memory."""
        try:
            self._step.close()
            if self._loan is not None:
                _, loan, survivors = self._loan
                loan.settle(survivors())
        except RuntimeError:
            pass  # a device that does not answer has said so already: that error is on its way

    def _forget(self) -> None:
        self._loan = None
