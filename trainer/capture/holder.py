"""The life of a recording inside a fit, whatever was recorded: made, adopted, retired, dropped, given up for good.

A holder owns at most one live recording. What is recorded, when, and what a replay bakes in is a subclass's matter;
how often one may be made anew, what happens when making one fails, and how all of it is counted is not.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from ultralytics.utils import LOGGER

from detgraph.cfg import CaptureOptions

from . import proof
from .recording import Recorder
from .report import RecordingCounts
from .state import DeviceLost, first_line


class Releasable(Protocol):
    """A recording, as far as its life is concerned: ``release`` gives its memory back and may be called again."""

    def release(self) -> None: ...


class RecordingHolder:
    """Owns one recording at a time and decides whether there may be another.

    Args:
        recorder: makes recordings on the device of the fit.
        options: how many recordings a fit may make, and whether each is proven before it counts.
        report: where recordings, retirements and what blocks further ones are counted.

    Attributes:
        key: our key that asked for it, as messages name it.
        recording: the live recording, or None.
        blocked: why the rest of the fit is eager, or None while a recording may be made.
    """

    key: str

    def __init__(self, recorder: Recorder, options: CaptureOptions, report: RecordingCounts) -> None:
        self.recorder = recorder
        self.options = options
        self.report = report
        self.recording: Releasable | None = None
        self.blocked: str | None = None

    @property
    def recorded(self) -> bool:
        """Whether a recording is alive."""
        return self.recording is not None

    def drop(self) -> None:
        """Give up the recording, if any, and everything that belongs to it. May be called again.

        What comes next allocates elsewhere, so the memory goes back to the device and not into the cache.
        """
        if self.recording is not None:
            self._release()
            try:
                self.recorder.settle(recent=True)  # a recording is part of no cycle
            except RuntimeError:
                pass  # a device that does not answer has said so already: that error is on its way

    def _release(self) -> None:
        """Give the memory of the live recording back, if there is one."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.release()

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
        """Release the recording, give its memory back, and stay eager."""
        self._release()
        traceback.clear_frames(error.__traceback__)  # they hold what the failed pass has allocated
        try:
            self.recorder.settle()
        except RuntimeError as broken:
            raise DeviceLost(error) from broken
        self._block(reason)

    def _make(
        self, recording: Releasable, record: Callable[[], set[str]], check: Callable[[set[str]], str | None]
    ) -> None:
        """Make ``recording``, prove it and adopt it; stay eager where it does not prove right.

        ``record`` makes it and returns the names of results that eager passes do not reproduce either; ``check`` takes
        them and says what the replay gets wrong, or None. A recording that is not adopted is released, whatever they
        raise.
        """
        wrong: str | None = "not proven"
        try:
            wrong = self._prove(record, check)
        finally:
            if wrong is not None:
                recording.release()
        if wrong is not None:
            self._block(wrong)
            return
        self.recording = recording
        self.report.recordings += 1

    def _prove(self, record: Callable[[], set[str]], check: Callable[[set[str]], str | None]) -> str | None:
        """Record and, where that is asked for, check; return what the replay gets wrong, or None.

        Where the fit asks for deterministic kernels, nothing may be left that cannot be checked: two eager passes that
        differ then have seen some state that a recording would not put back.
        """
        started = time.perf_counter()
        self.recorder.settle()  # the eager step's memory goes back before the same again is taken on another stream
        unverifiable = record()
        recorded = time.perf_counter()
        self.report.seconds["recording"] += recorded - started
        if not self.options.self_check:
            return None
        wrong = None
        if unverifiable and torch.are_deterministic_algorithms_enabled():
            wrong = proof.not_reproduced(unverifiable)
        wrong = wrong or check(unverifiable)
        if wrong is None:
            self.report.unverifiable += sorted(unverifiable - set(self.report.unverifiable))
            if self.options.verify and unverifiable:
                LOGGER.warning(f"{self.key}=verify: {proof.left_out(unverifiable)}")
        self.report.seconds["checking"] += time.perf_counter() - recorded
        return wrong

    def _retire(self, reason: str) -> None:
        """Give up the recording; another may be made, up to the allowed number of recordings."""
        self.report.retire(reason)
        self._release()
        if self.report.recordings >= self.options.max_recordings:
            self._block(f"{self.report.recordings} recordings were retired, the last because of {reason}")

    def _block(self, reason: str) -> None:
        """Stay eager for the rest of the fit, and say so once."""
        self.blocked = reason
        self.report.block(reason)
        LOGGER.warning(f"{self.key}: the rest of the fit trains eagerly: {reason}")
