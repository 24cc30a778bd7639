"""Upstream's loggers show what replay brings, and nobody else sees it: real loggers, in processes of their own."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from detgraph.cfg import REPORT_NAME
from helpers import import_path, put_font

from .conftest import FIT

HERE = Path(__file__).resolve().parent
BOTH = {"capture_network": True, "capture_orthogonalization": True}
OURS = ("replayed_network", "replayed_orthogonalization", "step_ms")
NO_LOGGER = dict.fromkeys(("clearml", "comet", "dvc", "mlflow", "raytune", "tensorboard", "wandb"), False)
NOT_FOR_CHILDREN = ("PYTEST_CURRENT_TEST", "GITHUB_ACTIONS")  # upstream has no loggers where these are set


@pytest.fixture
def logged(tiny, tmp_path):
    """Return a function that runs `logged.py` in a folder of its own and returns what it found."""

    def run(kind: str, logger: str, keys: dict, **environment: str) -> dict:
        folder = tmp_path / f"{kind}{len(list(tmp_path.iterdir()))}"
        put_font(folder / "config")
        args = {**FIT, "data": tiny["some"], "project": "runs", "name": "fit"}
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_FOR_CHILDREN}
        more = {"YOLO_CONFIG_DIR": str(folder / "config"), "PYTHONPATH": import_path(HERE.parent), **environment}
        words = [kind, *map(json.dumps, (args, {**NO_LOGGER, logger: True}, keys))]
        done = subprocess.run(
            [sys.executable, HERE / "logged.py", *words],
            cwd=folder, env={**inherited, **more}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        return {**json.loads(line.removeprefix("FOUND ")), "cwd": folder}

    return run


def scalars(found: dict) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars in a run folder's TensorBoard files: name -> (step, value) in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(found["folder"], size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def results(found: dict) -> list[dict]:
    """Return the rows of `results.csv` without the seconds."""
    with open(Path(found["folder"]) / "results.csv") as file:
        return [{key: value for key, value in row.items() if key != "time"} for row in csv.DictReader(file)]


def files(found: dict) -> set[str]:
    """Return a run folder's files; those of TensorBoard are named after time, machine and process."""
    return {path.name.partition(".tfevents")[0] for path in Path(found["folder"]).rglob("*")}


def test_tensorboard_shows_replay_and_all_that_it_showed(logged) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (it is in the dev extra)")
    stock = logged("stock", "tensorboard", {})
    off = logged("replaying", "tensorboard", {})
    replaying = logged("replaying", "tensorboard", BOTH)
    before, shown = scalars(stock), scalars(replaying)
    assert len(before) > 10 and before.keys() >= {"train/box_loss", "lr/pg0", "metrics/mAP50-95(B)"}
    assert scalars(off) == before
    assert {name: shown[name] for name in before} == before
    assert shown.keys() - before.keys() == {
        "train/replayed_network",
        "train/replayed_orthogonalization",
        "train/step_ms",
    }
    assert shown["train/replayed_network"] == [(1, 0.5), (2, 1.0)]  # the first of four steps was recorded
    assert replaying["report"]["replayed"] == 3
    assert [step for step, ms in shown["train/step_ms"] if ms > 0] == [1, 2]
    for found in (off, replaying):
        assert found["seen"] == stock["seen"] and results(found) == results(stock)
    assert files(off) == files(stock) and files(replaying) == files(stock) | {REPORT_NAME}


def test_mlflow_shows_the_same(logged) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install mlflow-skinny)")
    environment = {"MLFLOW_TRACKING_URI": "file:./mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    found = logged("replaying", "mlflow", {"capture_network": True}, **environment)
    metrics = {path.name: path.read_text().split() for path in found["cwd"].glob("mlruns/*/*/metrics/train/*")}
    assert metrics["replayed_network"][1::3] == ["0.5", "1.0"] and "box_loss" in metrics
    assert len(metrics["step_ms"]) == len(metrics["box_loss"])


def test_wandb_shows_the_same(logged) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed (pip install wandb)")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    found = logged("replaying", "wandb", {"capture_network": True}, **environment)
    (record,) = Path(found["folder"]).glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()  # protocol buffers, of which names and numbers can be read
    # Upstream's callback runs the model after the first epoch, so in the second it is recorded anew.
    assert found["report"]["recordings"] == 2
    assert set(re.findall(rb"train/replayed_network\x82\x01.([\d.]+)", content, re.S)) == {b"0.5"}
    assert content.count(b"train/step_ms") == content.count(b"train/box_loss") > 0
