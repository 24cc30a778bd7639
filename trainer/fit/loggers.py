"""What replay brings, as scalars of an epoch, in the loggers that upstream shows losses and learning rates in.

Nobody but a logger gets them: `trainer.metrics`, `trainer.lr`, `results.csv` and all callbacks find what upstream's own
loop leaves.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import LightningDetectionTrainer

EVENT = "on_train_epoch_end"
# Upstream's integrations that do nothing at this event but log `lr` and the losses: called once more with other
# numbers, they add these and repeat nothing.
LOGGERS = tuple(f"ultralytics.utils.callbacks.{name}" for name in ("tensorboard", "wb", "mlflow"))


class EpochScalars:
    """Takes the scalars of one epoch after another; a fit that did not ask for a capture has none.

    ``train/replayed_network`` and ``train/replayed_orthogonalization``, where asked for, are replayed steps as a
    fraction of the epoch's. ``train/step_ms`` is the epoch's time for steps and for loading their batches, in
    milliseconds a step; validation is no part of it.
    """

    def __init__(self, trainer: LightningDetectionTrainer) -> None:
        self.trainer = trainer

    def begin(self) -> None:
        """Start an epoch: what comes before is none of its steps."""
        counts = {key: self.trainer.capture_report.counts(key) for key in self.trainer.capture.asked}
        self._before = {key: (part.replayed, part.steps) for key, part in counts.items()}
        self._batches = self.trainer.loop_state.micro_batches
        self._began = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Return the scalars of the epoch by name."""
        ms = 1e3 * (time.perf_counter() - self._began)
        batches = self.trainer.loop_state.micro_batches - self._batches
        if not self._before or not batches:
            return {}
        scalars = {"train/step_ms": ms / batches}
        for key, (replayed, steps) in self._before.items():
            counts = self.trainer.capture_report.counts(key)
            if counts.steps > steps:
                share = (counts.replayed - replayed) / (counts.steps - steps)
                scalars[key.replace("capture", "train/replayed")] = share
        return scalars


class _Epoch:
    """Stands in for the trainer before a logger: scalars of ours for its ``lr``, no losses, the rest is the trainer."""

    def __init__(self, trainer: LightningDetectionTrainer, scalars: dict[str, float]) -> None:
        vars(self).update(wrapped=trainer, lr=scalars)

    def label_loss_items(self, *args: Any, **kwargs: Any) -> dict:
        return {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)


def log(trainer: LightningDetectionTrainer, scalars: dict[str, float]) -> None:
    """Hand the scalars of the epoch to the loggers that are active in this fit, by upstream's own callbacks."""
    if scalars:
        for callback in trainer.callbacks[EVENT]:
            if getattr(callback, "__module__", None) in LOGGERS:
                callback(_Epoch(trainer, scalars))
