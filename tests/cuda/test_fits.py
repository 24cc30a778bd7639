"""Whole fits on a GPU: upstream's loop, ours eagerly, ours replaying; and what a fit leaves on the device."""

from __future__ import annotations

import gc
import weakref

import pytest

from arms import Arm, differences
from helpers import pool_bytes

pytestmark = pytest.mark.gpu

BASE = {
    "model": "yolo26n.yaml",
    "imgsz": 64,
    "batch": 4,
    "epochs": 3,
    "optimizer": "MuSGD",
    "seed": 0,
    "workers": 0,
    "plots": False,
    "warmup_epochs": 0,
    "pretrained": False,
    "device": 0,
    "close_mosaic": 0,
}
CASES = {
    "fp32": {"amp": False, "nbs": 4},
    "fp16_accumulate": {"amp": "fp16", "nbs": 16, "optimizer": "SGD"},
    "bf16_accumulate_tail": {"amp": "bf16", "nbs": 16},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory, make_dataset) -> str:
    return str(make_dataset(tmp_path_factory.mktemp("data") / "eighteen", 18, 4))


@pytest.fixture(scope="module")
def cuda_arms(data: str):
    """Arms whose first fit is over: what upstream imports during it may draw from the generators."""
    kinds = {"stock": "stock", "eager": "ours", "replay": "ours"}  # each counts its fits, and the log tells the count
    arms = {name: Arm(kind, cuda=True) for name, kind in kinds.items()}
    first = {name: arm.start({**BASE, "amp": False, "nbs": 4, "epochs": 1, "data": data}) for name, arm in arms.items()}
    for name, arm in arms.items():
        arm.finish(first[name])
    yield arms
    for arm in arms.values():
        arm.close()


@pytest.mark.parametrize("name", CASES)
def test_three_loops_leave_the_same_bytes(name: str, data: str, cuda_arms) -> None:
    args = {**BASE, **CASES[name], "data": data}
    requests = {"stock": args, "eager": args, "replay": {**args, "capture_network": True}}
    started = {name: cuda_arms[name].start(request) for name, request in requests.items()}
    stock, eager, replay = (cuda_arms[name].finish(out) for name, out in started.items())
    assert stock["error"] is None and replay["error"] is None, replay["error"]
    assert not differences(stock, eager)
    assert not differences(stock, replay)
    report = replay["report"]
    assert report["blocked"] is None and report["unverifiable"] == [] and report["recordings"] == 1
    assert report["eager"]["batch of another shape"] == 3  # a tail of two images an epoch
    assert report["replayed"] == 11
    assert report["lent"] == {"validation": 2, "smaller batch": 3}
    assert report["memory_bytes"]["peak_reserved"] >= report["memory_bytes"]["peak_allocated"] > 0
    assert eager["pools"] == replay["pools"] == 0


@pytest.mark.parametrize(
    "network, objective", [(False, False), (True, False), (True, True)], ids=["orthogonalization", "both", "all"]
)
def test_the_orthogonalization_leaves_the_same_bytes(network: bool, objective: bool, data: str, cuda_arms) -> None:
    args = {**BASE, "amp": "bf16", "nbs": 4, "data": data}
    stock = cuda_arms["stock"].start(args)
    asked = {"capture_network": network, "capture_objective": objective, "capture_orthogonalization": True}
    replay = cuda_arms["replay"].fit({**args, **asked})
    stock = cuda_arms["stock"].finish(stock)
    assert stock["error"] is None and replay["error"] is None, replay["error"]
    assert not differences(stock, replay)
    report, steps = replay["report"], replay["report"]["orthogonalization"]
    assert report["replayed"] == (11 if network else 0)
    losses = report["objective"]
    assert losses["blocked"] is None and losses["retirements"] == [] and (losses["replayed"] > 5) == objective
    assert steps["blocked"] is None and steps["unverifiable"] == [] and steps["recordings"] == 1
    assert steps["replayed"] == 14 and steps["eager"] == {"step that was recorded": 1}


def test_nothing_of_a_recording_outlives_its_fit(data: str, tmp_path) -> None:
    """Validation inside the fit, an error at its end: recording and pool are gone, a next fit records again."""
    import torch

    from detgraph.trainer import LightningDetectionTrainer

    seen = {}

    def look(trainer) -> None:
        if trainer.epoch == 1:
            seen["network"] = weakref.ref(trainer.step.network.recording)
            seen["orthogonalization"] = weakref.ref(trainer.step.parts["orthogonalization"].recording)
            seen["pools"] = pool_bytes()
            raise ValueError("injected")

    args = {**BASE, "data": data, "amp": "bf16", "nbs": 4, "project": str(tmp_path)}
    args |= {"capture_network": True, "capture_orthogonalization": True}
    trainer = LightningDetectionTrainer(overrides=args)
    trainer.add_callback("on_train_epoch_end", look)
    with pytest.raises(ValueError, match="injected"):
        trainer.train()
    assert seen["network"]() is None and seen["orthogonalization"]() is None
    assert torch.is_autocast_cache_enabled() and gc.isenabled()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert seen["pools"] > 0 == pool_bytes()  # with the trainer alive
    left = torch.cuda.memory_allocated()
    del trainer
    again = LightningDetectionTrainer(overrides=args)
    again.train()
    assert again.capture_report.recordings == 1 and again.capture_report.replayed == 11
    assert again.capture_report.orthogonalization.recordings == 1
    assert pool_bytes() == 0
    del again
    assert pool_bytes() == 0 and torch.cuda.memory_allocated() <= left  # one trainer's weights less, if nothing stayed
