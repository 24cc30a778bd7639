"""One timed fit in a fresh process: `python benchmarks/fit.py KIND OUT.json key=value ...`.

KIND is `upstream` (its own trainer; neither detgraph nor Lightning is imported) or `ours`; the rest are training
arguments, for `ours` also the capture's. The fit's clock runs from upstream's on_train_start to its on_train_end,
device synchronized at both: set-up of recordings, compilation, validation, checkpoints and the final validation are
inside, imports and model construction are not. Digests are taken after the clock has stopped.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sittings import capture_keys, write_record


class Clock:
    """Measures one fit through upstream's callbacks; losses are kept on the device until it is over.

    A step's time runs from the end of the step before it, or the start of its epoch, to its own end, in ms of the
    host: waiting for data is inside, and so is the device's work, since the progress line reads the losses.
    """

    def __init__(self) -> None:
        self.started = self.ended = self._step = self._validation = 0.0
        self.losses: list = []
        self.step_ms: list[float] = []
        self.validations: list[float] = []
        self.allocated = self.reserved = self.batch = 0
        self.epochs: list[tuple[int, int]] = []

    def callbacks(self) -> dict:
        return {
            "on_train_start": self.start,
            "on_train_epoch_start": self.epoch_starts,
            "on_train_batch_end": self.step,
            "on_train_epoch_end": self.epoch_ends,
            "on_val_start": self.validation_starts,
            "on_val_end": self.validation_ends,
            "on_train_end": self.end,
        }

    def start(self, trainer) -> None:
        if trainer.args.compile and not hasattr(trainer.model, "_orig_mod"):
            raise RuntimeError(
                f"compile={trainer.args.compile} is not in force: upstream goes on uncompiled, see above"
            )
        self.batch = trainer.batch_size
        synchronize(trainer.device, reset_peaks=True)
        self.started = time.perf_counter()

    def epoch_starts(self, trainer) -> None:
        self._step = time.perf_counter()

    def step(self, trainer) -> None:
        before, self._step = self._step, time.perf_counter()
        self.step_ms.append(round(1e3 * (self._step - before), 2))
        self.losses.append([trainer.loss.detach(), *trainer.loss_items.values()])

    def epoch_ends(self, trainer) -> None:
        import torch

        if trainer.device.type == "cuda":
            self.epochs.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    def validation_starts(self, validator) -> None:
        self._validation = time.perf_counter()

    def validation_ends(self, validator) -> None:
        self.validations.append(time.perf_counter() - self._validation)

    def end(self, trainer) -> None:
        self.allocated, self.reserved = synchronize(trainer.device)
        self.ended = time.perf_counter()
        if trainer.batch_size != self.batch:
            raise RuntimeError(f"out of memory: upstream made the batch {trainer.batch_size} instead of {self.batch}")


def synchronize(device, reset_peaks: bool = False) -> tuple[int, int]:
    """Wait for the device; return its peaks of allocated and reserved bytes, 0 without CUDA."""
    import torch

    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    if reset_peaks:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return peaks


def make_trainer(kind: str, args: dict, callbacks: dict):
    """Return the trainer of a kind of arm; whatever it imports is imported here, outside the clock."""
    if kind == "upstream":
        from ultralytics.models.yolo.detect import DetectionTrainer

        return DetectionTrainer(overrides=args, _callbacks=callbacks)
    import lightning.pytorch  # noqa: F401

    import detgraph.trainer.fit.loop  # noqa: F401
    from detgraph.trainer import LightningDetectionTrainer

    options = {key: args.pop(key) for key in capture_keys() & set(args)}
    return LightningDetectionTrainer(overrides={**args, "capture_options": options}, _callbacks=callbacks)


def main() -> None:
    kind, out, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    from by_path.golden.digests import digest, fit_digests
    from ultralytics.cfg import parse_key_value_pair
    from ultralytics.utils.callbacks import get_default_callbacks
    from ultralytics.utils.torch_utils import unwrap_model

    clock, callbacks = Clock(), get_default_callbacks()
    for event, function in clock.callbacks().items():
        callbacks[event] = [*callbacks[event], function]
    trainer = make_trainer(kind, dict(parse_key_value_pair(word) for word in words), callbacks)
    began = time.perf_counter()
    trainer.train()
    total = time.perf_counter() - began
    if kind == "upstream" and (ours := {"detgraph", "lightning"} & set(sys.modules)):
        raise RuntimeError(f"an upstream fit in a process that has imported {', '.join(sorted(ours))}")
    trainer.model = unwrap_model(trainer.model)  # torch.compile puts a prefix before every name
    report = getattr(trainer, "capture_report", None)
    write_record(
        out,
        {
            "kind": kind,
            "words": words,
            "fit_seconds": round(clock.ended - clock.started, 4),
            "train_seconds": round(total, 4),
            "validation_seconds": round(sum(clock.validations), 4),
            "validation_ms": [round(1e3 * seconds, 1) for seconds in clock.validations],
            "steps": len(clock.step_ms),
            "step_ms": clock.step_ms,
            "peak_allocated": clock.allocated,
            "peak_reserved": clock.reserved,
            "epoch_memory": clock.epochs,
            "digests": {
                "losses": digest([[float(x) for x in row] for row in clock.losses]),
                **fit_digests(trainer),
            },
            "report": report.to_dict() if report else None,
            "best": str(trainer.best),
        },
    )


if __name__ == "__main__":
    main()
