"""The life of a recording inside a fit, whatever was recorded: made, adopted, retired, dropped, given up for good.

A holder owns at most one live recording. What is recorded, when, and what a replay bakes in is a subclass's matter;
how often one may be made anew, what happens when making one fails, and how all of it is counted is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ultralytics.utils import LOGGER

from detgraph.cfg import CaptureOptions

from .recording import Recorder
from .report import RecordingCounts


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

    def _make(
        self, recording: Releasable, record: Callable[[], set[str]], check: Callable[[set[str]], str | None]
    ) -> bool:
        """Make ``recording`` and prove it; return whether it may be adopted.

        ``record`` makes it and returns the names of results that eager passes do not reproduce either; ``check`` takes
        them and says what the replay gets wrong, or None.

        Whatever goes wrong, the same work without a recorder is the fit's own eager step: so an error that either of
        them raises makes the rest of the fit eager, too. Only an interrupt, or a device that does not answer any more,
        leaves as an exception. A recording that may not be adopted is released.
        """
        problem: str | None = "interrupted"
        try:
            problem = self._prove(record, check)
        except Exception as error:
            recording.release()
            problem = self._failed(error)
        finally:
            if problem is not None:
                recording.release()
        if problem is not None:
            self._block(problem)
            return False
        self.report.recordings += 1
        return True

    def _prove(self, record: Callable[[], set[str]], check: Callable[[set[str]], str | None]) -> str | None:
        """Record and, where that is asked for, check; return what the replay gets wrong, or None."""
        started = time.perf_counter()
        self.recorder.settle()  # the eager step's memory goes back before the same again is taken on another stream
        unverifiable = record()
        recorded = time.perf_counter()
        self.report.seconds["recording"] += recorded - started
        if not self.options.self_check:
            return None
        wrong = check(unverifiable)
        if wrong is None:
            self.report.unverifiable += sorted(unverifiable - set(self.report.unverifiable))
        self.report.seconds["checking"] += time.perf_counter() - recorded
        return wrong

    def _failed(self, error: Exception) -> str:
        """Give the memory of a failed recording back and return why the rest of the fit is eager.

        Raises:
            RuntimeError: if the device does not answer any more.
        """
        what = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            self.recorder.settle()
        except RuntimeError as broken:
            raise RuntimeError(
                f"the device does not answer after a failed recording ({what}). Nothing that this process holds on it "
                f"can be used: start again, with {self.key}=False or resume from last.pt"
            ) from broken
        return f"recording failed: {what}"

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
