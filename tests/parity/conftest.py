"""Data sets, network and arms that all parity tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from arms import Arm
from steps import TINY

# Most cases are about the loop: they train a network that costs little, in a file because upstream takes no other form.
SMALL = Path(os.environ["YOLO_CONFIG_DIR"]) / "small.yaml"
SMALL.write_text(yaml.safe_dump(TINY))


@pytest.fixture(scope="session")
def small_data(tmp_path_factory, make_dataset) -> dict[str, str]:
    """Return data sets of 64 px pictures by name: odd and even numbers of batches, a tail of one, background only."""
    folder = tmp_path_factory.mktemp("data")
    made = {
        "six": make_dataset(folder / "six", 6, 4),
        "eight": make_dataset(folder / "eight", 8, 4),
        "seven": make_dataset(folder / "seven", 7, 4),
        "nine": make_dataset(folder / "nine", 9, 4),
        "background": make_dataset(folder / "background", 6, 4, empty=range(1, 6)),
    }
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="session")
def stock_arm() -> Arm:
    return Arm("stock")


@pytest.fixture(scope="session")
def our_arm() -> Arm:
    return Arm("ours")


@pytest.fixture(scope="session")
def emulated_arm() -> Arm:
    return Arm("emulated")


BASE = {
    "model": str(SMALL),
    "imgsz": 64,
    "batch": 2,
    "epochs": 2,
    "optimizer": "SGD",
    "seed": 0,
    "deterministic": True,
    "workers": 0,
    "plots": False,
    "warmup_epochs": 0,
    "nbs": 2,
    "pretrained": False,
    "device": "cpu",
    "close_mosaic": 0,
}
