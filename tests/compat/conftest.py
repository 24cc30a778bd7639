"""What the compatibility tests share: tiny data, the arguments of a fit that takes seconds, and what upstream says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from ultralytics.engine.model import Model
from ultralytics.utils import LOGGER, callbacks

from arm import Log
from detgraph import patches
from detgraph.cfg import CaptureOptions
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.cli import main
from detgraph.trainer.command_line import read_command_line
from detgraph.trainer.fit.asked import ambient_options
from emulator import EmulatingRecorder
from steps import TINY

# Most cases are about the loop: they train a network that costs little, in a file because upstream takes no other form.
SMALL = Path(os.environ["YOLO_CONFIG_DIR"]) / "yolo26tiny.yaml"
SMALL.write_text(yaml.safe_dump(TINY))
FIT = {
    "model": str(SMALL),
    "imgsz": 64,
    "batch": 4,
    "epochs": 2,
    "optimizer": "SGD",
    "seed": 0,
    "plots": False,
    "pretrained": False,
    "device": "cpu",
}


class Replaying(LightningDetectionTrainer):
    """Our trainer where replay is possible on a CPU. Importable, so that worker processes can load it."""

    recorder = EmulatingRecorder()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, make_dataset) -> dict[str, str]:
    """Return two data sets of 64 px pictures by name, of two batches each; the second has other classes."""
    folder = tmp_path_factory.mktemp("tiny")
    made = {
        "some": make_dataset(folder / "some", 8, 4),
        "other": make_dataset(folder / "other", 7, 4, classes=3),
    }
    return {name: str(path) for name, path in made.items()}


@pytest.fixture
def fit_args(tiny, tmp_path) -> dict:
    """Return the arguments of a tiny fit into the test's own folder."""
    return {**FIT, "data": tiny["some"], "project": str(tmp_path / "runs"), "name": "fit"}


@pytest.fixture(autouse=True)
def alike() -> Iterator[None]:
    """Let every test find the same process: sums in one order, so that fits can be compared bit by bit, and upstream's
    default callbacks under both their names (a fit with `amp=True` leaves a copy under the one)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    callbacks.default_callbacks = callbacks.base.default_callbacks
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Collect what upstream's logger says, line by line."""
    log = Log()
    LOGGER.addHandler(log)
    yield log.lines
    LOGGER.removeHandler(log)


@pytest.fixture
def patched() -> Iterator[None]:
    """Apply the patches for one test."""
    stock = Model.train
    patches.apply()
    yield
    patches.revert()
    assert Model.train is stock


def warned(lines: list[str]) -> list[str]:
    """Return the warnings about the capture among log lines."""
    return [line for line in lines if "WARNING" in line and "capture_network" in line]


def weights(path: Path | str) -> dict:
    """Return the model of a checkpoint as digests by name; a resumable checkpoint has it as EMA."""
    from detgraph.trainer.golden.digests import named

    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    model = checkpoint["ema"] if checkpoint["model"] is None else checkpoint["model"]
    return named(model.state_dict().items())


# The command line -----------------------------------------------------------------------------------------------------

STOCK_TRAIN = Model.train
ON, OFF, VERIFY = (CaptureOptions(capture_network=value) for value in (True, False, "verify"))


class Stop(Exception):
    """Ends a real training right after its trainer was built."""


@pytest.fixture
def stock_upstream(tmp_path, monkeypatch):
    """Run in an empty folder, with upstream as it is installed, and leave it so."""
    monkeypatch.chdir(tmp_path)
    yield
    Model.train = STOCK_TRAIN
    patches.revert()


@pytest.fixture
def data(tmp_path):
    """Return the word that names a data set without a picture."""
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": ["a"]})
    )
    return "data=tiny.yaml"


@pytest.fixture
def logged(monkeypatch):
    """Return what upstream's logger is told, as it is told."""
    said = []
    for level in ("info", "warning"):
        monkeypatch.setattr(LOGGER, level, lambda text, *_, **__: said.append(str(text)))
    return said


@pytest.fixture
def built(monkeypatch):
    """Trainers that upstream built, with the ambient options at that moment; each is stopped at once."""
    found = []

    def stop(trainer):
        found.append((trainer, ambient_options.get()))
        raise Stop

    monkeypatch.setitem(callbacks.default_callbacks, "on_pretrain_routine_start", [stop])
    return found


def read(line):
    """Return what a command line is read as."""
    with ExitStack() as stack:
        return read_command_line(line.split(), stack)


def refused(capsys, *words):
    """Run a command line that must be refused and return its one message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert err.startswith("yolo: error: ") and err.count("\n") == 1 and out == ""
    return err
