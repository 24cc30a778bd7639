"""One arm of a comparison: a process that runs fits on request, by one loop only, and answers with digests.

`python tests/arm.py stock` cannot import detgraph or lightning and insists on upstream's own trainer class;
`ours` and `emulated` run `LightningDetectionTrainer`, eagerly or replaying through the emulating recorder, network and
orthogonalization; with `draws-on-import` as a second word, importing Lightning moves the generators. A request
is a line of JSON on standard input: {"args": upstream's arguments, "perturb": [[name, arguments], ...], "out": file};
the answer is written to the file. Every arm applies perturbations and observes at the same places.
"""

from __future__ import annotations

import gc
import importlib.abc
import json
import logging
import re
import runpy
import sys
import traceback
from pathlib import Path

import perturbations
from helpers import ROOT, pool_bytes

runpy.run_path(str(ROOT / "trainer" / "golden" / "by_path.py"))
from by_path.golden.stock import Banned  # noqa: E402
from by_path.golden.watch import around, losses  # noqa: E402
from by_path.output import write_whole  # noqa: E402


class DrawsOnImport(importlib.abc.MetaPathFinder):
    """Draws from every generator when Lightning is imported, as optional packages that it finds may do."""

    def find_spec(self, name, path=None, target=None):
        if name == "lightning":
            import random

            import numpy
            import torch

            random.random(), numpy.random.rand(), torch.rand(1)
        return None


class Log(logging.Handler):
    """Collects what upstream's logger says during one fit."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def normalised(lines: list[str], folder: str) -> list[str]:
    """Take out what differs between any two runs: the arm's folder, durations, the shared data set's label cache."""
    lines = [line for line in lines if not re.search("New cache created|Fast image access|Slow image access", line)]
    text = "\n".join(line.rstrip() for line in lines).replace(folder, "ARM")
    text = re.sub(r"[\d.]+(ms|s| hours)\b", r"TIME\1", text)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return text.split("\n")


class Observer:
    """Watches one trainer from outside, the same way in every arm, without subclassing it."""

    def __init__(self, trainer, digests) -> None:
        self.trainer, self.digests = trainer, digests
        self.events: list[str] = []
        self.losses: list[list[str]] = []
        self.gradients: list[str] = []
        self.images: list[str] = []
        self.modules: set[str] | None = None  # that were imported when the clock of the fit had just started
        around(
            trainer,
            preprocess_batch=self._preprocess_batch,
            optimizer_step=self._optimizer_step,
            run_callbacks=self._run_callbacks,
        )

    def _preprocess_batch(self, prepare, batch):
        batch = prepare(batch)
        self.images.append(self.digests.digest(batch["img"]))
        return batch

    def _optimizer_step(self, update):
        self.gradients.append(self.digests.gradients(self.trainer.model))
        update()

    def _run_callbacks(self, run, event):
        self.events.append(event)
        if event == "on_train_start":
            self.modules = set(sys.modules)
        if event == "on_train_batch_end":
            self.losses.append(list(losses(self.trainer).values()))
        run(event)

    def result(self) -> dict:
        trainer, digests = self.trainer, self.digests
        result = {
            "type": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            "events": self.events,
            "losses": self.losses,
            "gradients": self.gradients,
            "images": self.images,
            "batch_size": trainer.batch_size,
            "epochs": trainer.epochs,
            "folder": str(trainer.save_dir),
            "files": sorted(str(p.relative_to(trainer.save_dir)) for p in trainer.save_dir.rglob("*") if p.is_file()),
        }
        if self.modules is not None:
            result["imported"] = sorted({name.partition(".")[0] for name in set(sys.modules) - self.modules})
        if trainer.optimizer is not None and trainer.ema is not None:
            result["digests"] = digests.fit_digests(trainer)
        if trainer.csv.exists():
            rows = [row.split(",") for row in trainer.csv.read_text().splitlines()]
            result["csv"] = [row[:1] + row[2:] for row in rows]  # the second column is time
        if getattr(trainer, "loop_state", None) is not None:
            result["micro_batches"] = trainer.loop_state.micro_batches
        if getattr(trainer, "capture_report", None) is not None:
            result["report"] = trainer.capture_report.to_dict()
        if getattr(trainer, "recorder", None) is not None:
            result["replays"] = trainer.recorder.replays
        return result


def run(kind: str, request: dict, digests) -> dict:
    from ultralytics.utils import LOGGER

    log = Log()
    LOGGER.addHandler(log)
    observer, error = None, None
    try:
        with perturbations.active(request.get("perturb", [])) as perturb:
            trainer = make_trainer(kind, request["args"], perturb.callbacks)
            observer = Observer(trainer, digests)
            perturb.attach(trainer)
            trainer.train()
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        if request.get("show_errors"):
            traceback.print_exc()
    finally:
        LOGGER.removeHandler(log)
    result = observer.result() if observer else {}
    return {**result, "log": normalised(log.lines, str(Path.cwd())), "error": error}


def make_trainer(kind: str, args: dict, callbacks: dict):
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.utils.callbacks import get_default_callbacks

    events = get_default_callbacks()
    for event, functions in callbacks.items():
        events[event] = events[event] + functions
    if kind == "stock":
        trainer = DetectionTrainer(overrides=dict(args), _callbacks=events)
        assert type(trainer) is DetectionTrainer
        return trainer
    from detgraph.trainer import LightningDetectionTrainer

    if kind == "emulated":
        from emulator import EmulatingRecorder

        args = {"capture_network": True, "capture_orthogonalization": True, **args}
    trainer = LightningDetectionTrainer(overrides=dict(args), _callbacks=events)
    trainer.recorder = EmulatingRecorder() if kind == "emulated" else None
    return trainer


def main() -> None:
    kind = sys.argv[1]
    if kind == "stock":
        sys.meta_path.insert(0, Banned())
    if "draws-on-import" in sys.argv:
        sys.meta_path.insert(0, DrawsOnImport())
    import torch
    from by_path.golden import digests

    torch.set_num_threads(1)
    for count, line in enumerate(sys.stdin):
        if count == 1:  # the first fit imported what all use: to look for garbage in it takes half a second a fit
            gc.collect()
            gc.freeze()
        request = json.loads(line)
        result = run(kind, request, digests)
        if torch.cuda.is_available():
            result["pools"] = pool_bytes()  # the trainer is gone
        write_whole(Path(request["out"]), json.dumps(result).encode())
        print("done", flush=True, file=sys.__stderr__)


if __name__ == "__main__":
    main()
