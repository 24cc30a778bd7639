"""Where upstream's loop stands, and the batches of an epoch as Lightning wants them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ultralytics.engine import trainer as engine  # names of its own that a program may replace, such as TQDM
from ultralytics.models.yolo.detect import DetectionTrainer

ENDLESS = 2**62  # batches; a number that floats have, too


@dataclass
class LoopState:
    """Where upstream's loop stands; lives as long as the fit, across Lightning trainers.

    ``batches`` per epoch; ``warmup`` in batches; ``accumulate`` is the nominal count that warm-up ramps up to;
    ``micro_batches`` counts the batches that Lightning ran.
    """

    epoch: int
    batches: int
    warmup: int
    accumulate: int
    mosaic_closed: bool
    last_opt_step: int = -1
    micro_batches: int = 0


class EpochBatches:
    """Upstream's train loader under its progress bar, as the sized iterable that Lightning wants.

    An epoch ends when the loader does, as upstream's ``for`` loop does: its length, which upstream asks for once, says
    nothing. Without any length Lightning would fetch a batch ahead, before the step that comes first.

    ``begin`` iterates the loader and shows the bar; Lightning may have begun to iterate before, which touches neither.
    ``finish`` ends the epoch the way a ``for`` loop would: run out after the last batch, closed after an early stop.
    """

    def __init__(self, trainer: DetectionTrainer) -> None:
        self.trainer = trainer
        self.bar: engine.TQDM | None = None
        self._epoch: Iterator | None = None

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator:
        self._epoch = self._run()
        return self._epoch

    def begin(self) -> None:
        self.bar = engine.TQDM(enumerate(self.trainer.train_loader), total=self.trainer.loop_state.batches)

    def _run(self) -> Iterator:
        for _, batch in self.bar:
            yield batch

    def finish(self, early: bool) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        if not early:
            next(epoch, None)
        epoch.close()
