"""Upstream's trainer under Lightning's loop, with the network replayed. Nothing heavy is imported until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fit.trainer import LightningDetectionTrainer
    from .model import YOLO

__all__ = ["YOLO", "LightningDetectionTrainer"]


def __getattr__(name: str) -> object:
    if name == "LightningDetectionTrainer":
        from .fit.trainer import LightningDetectionTrainer

        return LightningDetectionTrainer
    if name == "YOLO":
        from .model import YOLO

        return YOLO
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
