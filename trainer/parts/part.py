"""What every part of a training step has: a holder of its recordings, and its places in the step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.holder import Holder
from detgraph.trainer.capture.recording import Recorder, Recording
from detgraph.trainer.capture.report import RecordingCounts


class Part:
    """One part of a fit's steps, replayed where it may be and eager for a reason where not.

    Attributes:
        holder: its recordings, and whether there may be another.
        model: the training model of the fit that it was built for.
        options: what the fit was asked for.
        report: counts its steps.
    """

    def __init__(
        self,
        key: str,
        model: torch.nn.Module,
        recorder: Recorder | None,
        options: CaptureOptions,
        report: RecordingCounts,
        blocked: str | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.report = report
        self.holder = Holder(key, recorder, options, report, blocked)

    @property
    def recorded(self) -> bool:
        """Whether a recording is alive."""
        return self.holder.recorded

    @property
    def blocked(self) -> str | None:
        """Why the rest of the fit is eager, or None."""
        return self.holder.blocked

    @property
    def recording(self) -> Recording | None:
        """The latest living recording."""
        return next(reversed(self.holder.recordings.values()), None)

    def in_force(self) -> AbstractContextManager:
        """Return the context that a fit's steps run in."""
        return nullcontext()

    def after_backward(self) -> None:
        """Called between the backward pass and whatever uses the gradients."""

    def update(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager:
        """Return the context that the optimizer's step runs in; it takes one step at most."""
        return nullcontext()

    def drop(self) -> None:
        """Give up the recordings, if any, and everything that belongs to them. May be called again."""
        self.holder.drop()
