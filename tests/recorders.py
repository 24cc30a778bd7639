"""Recorders that go wrong in one way, on top of the emulator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from emulator import EmulatedTape, EmulatingRecorder


def next_number(first: Tensor) -> None:
    """Move a number by one unit in the last place."""
    first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))


class LyingRecorder(EmulatingRecorder):
    """From its ``since``-th replay on, one of a recording's tapes leaves the first number of one tensor wrong.

    The self-check is the first replay of a recording. ``find`` picks the tensor from a tape's result; ``lie`` bends it.
    Recordings before number ``first`` of the fit, counted from 0, are honest: that of the network is number 0.
    """

    def __init__(
        self,
        tape: int,
        find: Callable[[object], Tensor],
        since: int = 1,
        lie: Callable[[Tensor], None] = next_number,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.tape, self.find, self.since, self.lie, self.first = tape, find, since, lie, first
        self.sessions = 0

    def session(self):
        self.sessions += 1
        return super().session()

    def capture(self, run):
        number = len(self._tapes)
        result, tape = super().capture(run)
        if number == self.tape and self.sessions > self.first:
            self._bend(tape, self.find(result))
        return result, tape

    def _bend(self, tape: EmulatedTape, victim: Tensor) -> None:
        honest, count = tape.replay, 0

        def replay() -> None:
            nonlocal count
            honest()
            count += 1
            if count >= self.since:
                with torch.no_grad():
                    self.lie(victim.detach().view(-1)[:1])

        tape.replay = replay


class FailingRecorder(EmulatingRecorder):
    """Raises once, in its ``number``-th capture, after the work has run."""

    def __init__(self, error: BaseException, number: int) -> None:
        super().__init__()
        self.error, self.number, self.count = error, number, 0

    def capture(self, run):
        self.count += 1
        if self.count != self.number:
            return super().capture(run)

        def run_and_fail() -> None:
            run()
            raise type(self.error)(*self.error.args)  # a fresh one: its traceback holds what it passed

        return super().capture(run_and_fail)


def refusing(error: BaseException) -> EmulatingRecorder:
    """Return a recorder whose first capture raises before anything has run."""
    recorder = EmulatingRecorder()
    recorder.fail_with = error
    return recorder
