"""Putting the step of a fit together: each part in force, or eager with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from detgraph.trainer.capture.recorders import CudaRecorder
from detgraph.trainer.parts import PARTS, Part, PartSpec

from .step import TrainingStep

if TYPE_CHECKING:
    from .trainer import LightningDetectionTrainer

Refused = Callable[[str, str], None]
"""Told the key that was asked for, and why it is not in force."""


def assemble(trainer: LightningDetectionTrainer, refused: Refused) -> TrainingStep:
    """Return the step of the fit that ``trainer`` has set up, with all parts of the table."""
    return TrainingStep(trainer, {line.name: build_part(trainer, line, refused) for line in PARTS})


def build_part(trainer: LightningDetectionTrainer, line: PartSpec, refused: Refused) -> Part:
    """Return one part of the step of ``trainer``'s fit."""
    if line.key not in trainer.capture.asked:
        return line.build(trainer, None, f"{line.key}=False")
    if blocker := _device_blocker(trainer) or line.blocker(trainer):
        refused(line.key, blocker)
        return line.build(trainer, None, blocker)
    return line.build(trainer, trainer.recorder or CudaRecorder(trainer.device), None)


def _device_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why nothing can be recorded on the fit's device."""
    if trainer.recorder is None and trainer.device.type != "cuda":
        return f"replay needs a CUDA device, this fit runs on '{trainer.device.type}'"
    return None
