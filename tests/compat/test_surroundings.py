"""A fit leaves the process as upstream's leaves it, and what surrounds it steers it no more than upstream's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ultralytics.models.yolo.detect import DetectionTrainer

from arms import Arm, differences
from detgraph.trainer.golden.digests import fit_digests

from .conftest import FIT, Replaying

HERE = Path(__file__).resolve().parent


# What a fit leaves behind ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed(tiny, tmp_path_factory) -> dict[str, dict]:
    """Return what the script `surroundings.py` saw of upstream's trainer and of ours."""
    found = {}
    for kind in ("stock", "ours"):
        folder = tmp_path_factory.mktemp(kind)
        args = json.dumps({**FIT, "epochs": 1, "data": tiny["some"], "project": str(folder)})
        done = subprocess.run(
            [sys.executable, HERE / "surroundings.py", kind, args],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        found[kind] = {**json.loads(line.removeprefix("FOUND ")), "stderr": done.stderr}
    assert found["ours"]["lightning"] and not found["stock"]["lightning"]
    return found


@pytest.mark.parametrize("ending", ["ValueError", "KeyboardInterrupt", "SystemExit", "end"])
def test_a_fit_leaves_the_process_as_it_was(observed, ending) -> None:
    """However it ends. Upstream itself takes determinism back; nothing else may differ from before."""
    stock, ours = (observed[kind][ending] for kind in ("stock", "ours"))
    assert ours["ended"] == stock["ended"] == ("end" if ending == "end" else f"{ending}(3,)")
    for name, (before, after) in ours["changed"].items():
        assert stock["changed"].get(name, ("", before))[1] == after, f"{name}: {before} -> {after}"


def test_inside_a_fit_the_process_is_the_users(observed) -> None:
    """Handlers are called as they would be, and callbacks see everything as the program set it."""
    for ending in ("ValueError", "KeyboardInterrupt", "SystemExit", "end"):
        stock, ours = (observed[kind][ending] for kind in ("stock", "ours"))
        more = set(ours["inside"]) - set(stock["inside"])
        assert {name for name in more if not name.startswith(("logger lightning", "logger pytorch_lightning"))} <= {
            "warnings"
        }  # both to keep it quiet
        assert ours["called"] == stock["called"] == ["SIGTERM", "SIGUSR1"] * 2


def test_nothing_of_lightning_is_said(observed) -> None:
    heard = {kind: found["stderr"].splitlines() for kind, found in observed.items()}
    assert heard["stock"] == heard["ours"]
    assert [line for line in heard["ours"] if line == "MINE UserWarning heard inside a fit"]


# What surrounds a fit -------------------------------------------------------------------------------------------------

HOSTILE = {
    "PL_TRAINER_MAX_EPOCHS": "1",
    "PL_TRAINER_MAX_STEPS": "1",
    "PL_TRAINER_PRECISION": "16-mixed",
    "PL_TRAINER_ACCUMULATE_GRAD_BATCHES": "7",
    "PL_TRAINER_GRADIENT_CLIP_VAL": "0.001",
    "PL_TRAINER_LIMIT_TRAIN_BATCHES": "1",
    "PL_TRAINER_OVERFIT_BATCHES": "1",
    "PL_TRAINER_DETERMINISTIC": "1",
    "PL_TRAINER_ACCELERATOR": "tpu",
    "PL_TRAINER_DEVICES": "4",
    "PL_TRAINER_NUM_NODES": "2",
    "PL_TRAINER_DEFAULT_ROOT_DIR": "/nowhere",
    "PL_GLOBAL_SEED": "5",
    "PL_SEED_WORKERS": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "a[1-2]",
    "LSB_JOBID": "3",
    "TORCHELASTIC_RUN_ID": "x",
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
}
FAST_RUN = {"PL_TRAINER_FAST_DEV_RUN": "1"}


@pytest.fixture(scope="module")
def plain(tiny) -> dict:
    return fit_in({}, tiny)


def fit_in(environment: dict[str, str], tiny) -> dict:
    """Fit, replaying, in a process with these variables beside the usual ones."""
    before = dict(os.environ)
    os.environ.update(environment)
    arm = Arm("emulated")
    try:
        return arm.fit({**FIT, "data": tiny["some"], "nbs": 8})
    finally:
        arm.close()
        for name in environment:
            os.environ.pop(name)
        os.environ.update(before)


@pytest.mark.parametrize("environment", [HOSTILE, FAST_RUN], ids=["cluster", "fast_dev_run"])
def test_the_environment_does_not_steer_a_fit(environment, tiny, plain) -> None:
    hostile = fit_in(environment, tiny)
    assert plain["error"] is None and not differences(plain, hostile)
    assert hostile["report"]["replayed"] == plain["report"]["replayed"] > 0


def test_a_fit_in_a_thread(fit_args) -> None:
    """Where no signal handler may be installed. Loader threads and servers of users train like this."""
    found = {}

    def train(name, trainer_class, args):
        trainer = trainer_class(overrides=args)
        trainer.train()
        found[name] = fit_digests(trainer), threading.current_thread() is threading.main_thread()

    train("main", DetectionTrainer, fit_args)
    thread = threading.Thread(target=train, args=("thread", Replaying, {**fit_args, "capture_network": True}))
    thread.start()
    thread.join()
    assert found["main"] == (found["thread"][0], True) and not found["thread"][1]
