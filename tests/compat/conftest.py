"""What the compatibility tests share: tiny data, the arguments of a fit that takes seconds, and what upstream says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ultralytics.engine.model import Model
from ultralytics.utils import LOGGER, callbacks

from arm import Log
from detgraph import patches
from detgraph.trainer import LightningDetectionTrainer
from emulator import EmulatingRecorder

FIT = {
    "model": "yolo26n.yaml",
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
