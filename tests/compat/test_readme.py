"""The README's examples train on a machine without a GPU, on other data and with fewer pixels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from detgraph.cfg import REPORT_NAME
from pages import blocks, commands, read

README = read("README.md")
TRAINING = next(words for words in commands(README) if words[:2] == ["yolo", "train"])
PROGRAMS = blocks(README, "python")
SMALLER = {"imgsz": 64, "epochs": 1, "optimizer": "SGD", "plots": False}


def smaller_words(words: list[str], changes: dict) -> list[str]:
    own = [word for word in words[1:] if not word.startswith("data=")]
    return [*own, *(f"{key}={value}" for key, value in changes.items())]


def smaller_program(program: str, changes: dict) -> str:
    assert program.count('data="coco8.yaml"') == 1
    return program.replace('data="coco8.yaml"', ", ".join(f"{key}={value!r}" for key, value in changes.items()))


@pytest.mark.parametrize("example", range(1 + len(PROGRAMS)))
def test_an_example_trains_without_a_gpu(tiny, tmp_path, example) -> None:
    changes = {**SMALLER, "data": tiny["some"], "project": str(tmp_path)}
    if example == 0:
        command = ["-m", "detgraph.trainer", *smaller_words(TRAINING, changes)]
    else:
        command = ["-c", smaller_program(PROGRAMS[example - 1], changes)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert "capture_network=True is not in force: replay needs a CUDA device" in said
    assert [path.name for path in tmp_path.rglob(REPORT_NAME)] and list(tmp_path.rglob("best.pt"))
