"""The life of one part's recordings inside a fit: planned, made, adopted, retired, dropped, given up for good.

What is recorded, and when, is the part's matter; whether a step replays, how often a recording may be made anew, what
happens when making one fails, and how all of it is counted, is decided here, for every part alike.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from detgraph.cfg import CaptureOptions

from . import proof
from .program import Program
from .recording import Recorder, Recording
from .report import RecordingCounts
from .state import DeviceLost, first_line

LOGGER = logging.getLogger("ultralytics")  # users read our lines among those


@dataclass(frozen=True)
class Eager:
    """The step is eager, for ``reason``."""

    reason: str


@dataclass(frozen=True)
class Observe:
    """The step is eager, and a recording is to be made from it."""


@dataclass(frozen=True)
class Replay:
    """The step replays ``recording``."""

    recording: Recording


Plan = Eager | Observe | Replay


class Holder:
    """Owns the recordings of one part, by what they were made for (a shape), and decides whether there may be another.

    Args:
        key: our key that asked for it, as messages name it.
        recorder: makes recordings on the device of the fit; None where none is ever made.
        options: how many recordings a fit may lose, and whether each is proven before it counts.
        report: where recordings, retirements and what blocks further ones are counted.
        blocked: why the part is eager from the start, if it is.

    Attributes:
        recordings: the living ones.
        blocked: why the rest of the fit is eager, or None while a recording may be made.
        on_release: called before a recording is released: what was lent of its memory counts no more.
    """

    def __init__(
        self,
        key: str,
        recorder: Recorder | None,
        options: CaptureOptions,
        report: RecordingCounts,
        blocked: str | None = None,
    ) -> None:
        assert recorder is not None or blocked is not None
        self.key = key
        self.recorder = recorder
        self.options = options
        self.report = report
        self.recordings: dict[Hashable, Recording] = {}
        self.blocked = blocked
        self.on_release: Callable[[], None] = lambda: None

    @property
    def recorded(self) -> bool:
        """Whether a recording is alive."""
        return bool(self.recordings)

    # Before a step ----------------------------------------------------------------------------------------------

    def plan(
        self, kind: Hashable, change: Callable[[Recording], str | None], obstacle: Callable[[], str | None]
    ) -> Plan:
        """Return what a step of ``kind`` does; a recording that something baked in has left behind is retired first.

        Args:
            kind: what a recording is made for.
            change: says what a recording of this kind has wrong by now, or None.
            obstacle: says why none can be made from this step, or None; asked only where there is none.
        """
        if self.blocked is not None:
            return Eager(self.blocked)
        if (recording := self.recordings.get(kind)) is not None:
            if (changed := change(recording)) is None:
                return Replay(recording)
            self.retire(changed, kind)
        if self.blocked is not None:
            return Eager(self.blocked)
        reason = obstacle()
        return Observe() if reason is None else Eager(reason)

    @contextmanager
    def attempting(self, what: str = "recording") -> Iterator[None]:
        """Run the body, which an eager fit does without: an error in it makes the rest of the fit eager, and no more.

        Raises:
            DeviceLost: if the device does not answer any more. An interrupt leaves as it is.
        """
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            self._give_up(f"{what} failed: {first_line(error)}", error)

    def _give_up(self, reason: str, error: Exception) -> None:
        """Release the recordings, give their memory back, and stay eager."""
        self.release()
        traceback.clear_frames(error.__traceback__)  # they hold what the failed pass has allocated
        try:
            self.recorder.settle()
        except RuntimeError as broken:
            raise DeviceLost(error) from broken
        self.block(reason)

    # Making one -------------------------------------------------------------------------------------------------

    def record(self, program: Program, kind: Hashable = None) -> Recording | None:
        """Record ``program``, prove the recording and adopt it for ``kind``; return it, or None where it was not.

        The fit's state is afterwards as before. A recording that is not adopted is released, whatever happens.

        Raises:
            Exception: what making it raises; to be called inside `attempting`.
        """
        recording = Recording(self.recorder, program)
        with program.kept():
            wrong: str | None = "not proven"
            try:
                wrong = self._prove(recording, program)
            finally:
                if wrong is not None:
                    recording.release()
            if wrong is not None:
                self.block(wrong)
                return None
            program.adopted()
            self.recordings[kind] = recording
            self.report.recordings += 1
        return recording

    def _prove(self, recording: Recording, program: Program) -> str | None:
        """Record and, where that is asked for, check; return what the replay gets wrong, or None.

        Two eager passes are the warm-up of the recorder's stream. The first is what a replay has to reproduce; what the
        second does not cannot be checked. Where the fit asks for deterministic kernels, nothing may be left that
        cannot: two eager passes that differ then have seen some state that a recording would not put back.
        """
        started = time.perf_counter()
        self.recorder.settle()  # the eager step's memory goes back before the same again is taken on another stream
        with self.recorder.session() as memory, program.running():
            program.rewind()
            expected = recording.eager()
            program.rewind()
            control = recording.eager()
            memory.measure()
            self.recorder.settle(recent=True)
            program.rewind()
            recording.capture(memory)
        if moved := program.moved():  # by the extra passes, and not by the step
            raise RuntimeError(f"the {program.part} changes as it is recorded: {moved}")
        unverifiable = set(proof.differences(expected, control))
        recorded = time.perf_counter()
        self.report.seconds["recording"] += recorded - started
        if not self.options.self_check:
            return None
        wrong = None
        if unverifiable and torch.are_deterministic_algorithms_enabled():
            wrong = proof.not_reproduced(unverifiable)
        if wrong is None:
            program.rewind()
            wrong = proof.verdict(expected, recording.rehearse(), unverifiable) or program.objection()
        if wrong is None:
            wrong = proof.verdict(*program.own(expected), unverifiable, "the step itself")
        if wrong is None:
            self.report.unverifiable += sorted(unverifiable - set(self.report.unverifiable))
            if self.options.asked.get(self.key) == "verify" and unverifiable:
                LOGGER.warning(f"{self.key}=verify: {proof.left_out(unverifiable)}")
        self.report.seconds["checking"] += time.perf_counter() - recorded
        return wrong

    # Giving them up ---------------------------------------------------------------------------------------------

    def retire(self, reason: str, *kinds: Hashable) -> None:
        """Give the recordings of ``kinds`` up, or all; others may be made, until the allowed number has been lost."""
        self.report.retire(reason)
        self.release(*kinds)
        if (lost := len(self.report.retirements)) >= self.options.max_recordings:
            self.block(f"{lost} recordings were retired, the last because of {reason}")

    def refute(self, wrong: str) -> None:
        """Give the recordings up for good: a replay has been found wrong."""
        self.report.retire(wrong)
        self.release()
        self.block(wrong)

    def block(self, reason: str) -> None:
        """Stay eager for the rest of the fit, and say so once."""
        self.blocked = reason
        self.report.block(reason)
        LOGGER.warning(f"{self.key}: the rest of the fit trains eagerly: {reason}")

    def release(self, *kinds: Hashable) -> None:
        """Give the memory of the living recordings of ``kinds`` back, or of all."""
        self.on_release()
        for kind in kinds or [*self.recordings]:
            if (recording := self.recordings.pop(kind, None)) is not None:
                recording.release()

    def drop(self) -> None:
        """Give up the recordings, if any, and everything that belongs to them. May be called again.

        What comes next allocates elsewhere, so the memory goes back to the device and not into the cache.
        """
        if self.recordings:
            self.release()
            try:
                self.recorder.settle(recent=True)  # a recording is part of no cycle
            except RuntimeError:
                pass  # a device that does not answer has said so already: that error is on its way
