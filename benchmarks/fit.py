"""One timed fit in a fresh process: `python benchmarks/fit.py ARM OUT.json key=value ...`.

ARM is `upstream` (its own trainer; neither detgraph nor Lightning is imported) or `ours`; the rest are training
arguments, among them `capture_network` for `ours`. The fit's clock runs from upstream's on_train_start to its
on_train_end, device synchronized at both: set-up of recordings, validation, checkpoints and the final validation are
inside, imports and model construction are not. Digests are taken after the clock has stopped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load_digests():
    """Load the digest functions by path: the upstream arm must not import the package."""
    spec = importlib.util.spec_from_file_location("fit_digests", HERE.parent / "trainer" / "digests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """Measures one fit through upstream's callbacks; losses are kept on the device until it is over."""

    def __init__(self) -> None:
        self.started = self.ended = 0.0
        self.losses: list = []
        self.steps: list[float] = []
        self.allocated = self.reserved = 0
        self.epochs: list[tuple[int, int]] = []

    def callbacks(self) -> dict:
        return {
            "on_train_start": [self.start],
            "on_train_batch_end": [self.step],
            "on_train_epoch_end": [self.epoch],
            "on_train_end": [self.end],
        }

    def start(self, trainer) -> None:
        synchronize(trainer.device, reset_peaks=True)
        self.started = time.perf_counter()

    def step(self, trainer) -> None:
        self.steps.append(time.perf_counter())
        self.losses.append([trainer.loss.detach(), *trainer.loss_items.values()])

    def epoch(self, trainer) -> None:
        import torch

        if trainer.device.type == "cuda":
            self.epochs.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    def end(self, trainer) -> None:
        self.allocated, self.reserved = synchronize(trainer.device)
        self.ended = time.perf_counter()


def synchronize(device, reset_peaks: bool = False) -> tuple[int, int]:
    import torch

    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    if reset_peaks:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return peaks


def main() -> None:
    arm, out, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    from ultralytics.cfg import parse_key_value_pair
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.utils.callbacks import get_default_callbacks

    args = dict(parse_key_value_pair(word) for word in words)
    if arm == "upstream":
        make = DetectionTrainer
    else:
        import lightning.pytorch  # noqa: F401 imports are outside the clock

        import detgraph.trainer.module  # noqa: F401
        from detgraph.trainer import LightningDetectionTrainer as make

    clock, callbacks = Clock(), get_default_callbacks()
    for event, functions in clock.callbacks().items():
        callbacks[event] = callbacks[event] + functions
    trainer = make(overrides=args, _callbacks=callbacks)
    began = time.perf_counter()
    trainer.train()
    total = time.perf_counter() - began
    d = load_digests()
    gaps = sorted(1e3 * (b - a) for a, b in zip(clock.steps, clock.steps[1:], strict=False))
    report = getattr(trainer, "capture_report", None)
    result = {
        "arm": arm,
        "words": words,
        "fit_seconds": clock.ended - clock.started,
        "train_seconds": total,
        "steps": len(clock.steps),
        "step_ms": {q: gaps[min(int(q / 100 * len(gaps)), len(gaps) - 1)] for q in (5, 25, 50, 75, 95)} if gaps else {},
        "peak_allocated": clock.allocated,
        "peak_reserved": clock.reserved,
        "epoch_memory": clock.epochs,
        "digests": {"losses": d.digest([[float(x) for x in row] for row in clock.losses]), **d.fit_digests(trainer)},
        "report": report.to_dict() if report else None,
        "upstream_only": "detgraph" not in sys.modules and "lightning" not in sys.modules,
    }
    out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
