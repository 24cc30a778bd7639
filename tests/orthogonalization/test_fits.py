"""Whole fits that ask for the orthogonalization, who may have it, and what the fit says of it."""

from __future__ import annotations

import inspect
import json
import logging
from types import SimpleNamespace

import pytest
import torch
import yaml
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.optim import MuSGD, muon
from ultralytics.utils import LOGGER

from arm import Log
from detgraph.cfg import CaptureOptions
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.fit.eligibility import orthogonalization_for
from detgraph.trainer.golden import digests
from emulator import EmulatingRecorder
from steps import TINY, make_model

STOCK = muon.muon_update
FIT = {
    "imgsz": 64, "batch": 2, "nbs": 2, "epochs": 1, "optimizer": "MuSGD", "seed": 0, "workers": 0, "plots": False,
    "pretrained": False, "device": "cpu", "warmup_epochs": 0, "val": False, "close_mosaic": 0,
}  # fmt: skip


class Replaying(LightningDetectionTrainer):
    """Our trainer where replay is possible on a CPU."""

    recorder = EmulatingRecorder()


@pytest.fixture
def args(tmp_path, make_dataset) -> dict:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    data = make_dataset(tmp_path / "data", 8, 2)
    return {**FIT, "model": str(tmp_path / "tiny.yaml"), "data": str(data), "project": str(tmp_path), "name": "fit"}


@pytest.fixture
def heard():
    log = Log()
    LOGGER.addHandler(log)
    yield log.lines
    LOGGER.removeHandler(log)


def test_each_capture_alone_and_both(args, heard, tmp_path) -> None:
    """The bytes of upstream's loop, counts that do not mix, and no trace afterwards."""
    stock = DetectionTrainer(overrides=args)
    stock.train()
    found = {}
    for name, keys in {
        "network": {"capture_network": True},
        "orthogonalization": {"capture_orthogonalization": True},
        "both": {"capture_network": True, "capture_orthogonalization": True},
    }.items():
        heard.clear()
        trainer = Replaying(overrides={**args, **keys, "name": name})
        trainer.train()
        assert digests.fit_digests(trainer) == digests.fit_digests(stock), name
        assert muon.muon_update is STOCK and not trainer.orthogonalization.recorded
        assert "capture_" not in (trainer.save_dir / "args.yaml").read_text().replace(str(tmp_path), "")
        written = json.loads((trainer.save_dir / "capture.json").read_text())
        assert written["options"] == CaptureOptions(**keys).to_dict() and written["schema"] == 1
        found[name] = [(part["replayed"], part["eager"]) for part in (written, written["orthogonalization"])]
        summary = [line for line in heard if line.startswith("capture_")]
        assert [line.partition(":")[0] for line in summary] == list(keys)
        assert any("Replayed" in line for line in heard) == ("capture_network" in keys)
    recorded = (3, {"step that was recorded": 1})
    off = [(0, {f"capture_{what}=False": 4}) for what in ("network", "orthogonalization")]
    assert found == {
        "network": [recorded, off[1]],
        "orthogonalization": [off[0], recorded],
        "both": [recorded, recorded],
    }


def test_an_error_takes_the_patch_back(args) -> None:
    seen = []

    def fail(trainer) -> None:
        seen.append((muon.muon_update is STOCK, trainer.orthogonalization.recorded))
        if len(seen) == 3:
            raise ValueError("injected")

    trainer = Replaying(overrides={**args, "capture_orthogonalization": True})
    trainer.add_callback("on_train_batch_end", fail)
    with pytest.raises(ValueError, match="injected"):
        trainer.train()
    assert seen == [(False, True)] * 3 and muon.muon_update is STOCK and not trainer.orthogonalization.recorded


def test_the_warning_names_the_key_and_what_is_eager(args, heard) -> None:
    """Once: a fit that starts anew with a smaller batch says it no second time."""
    both = {"capture_network": True, "capture_orthogonalization": True}
    trainer = LightningDetectionTrainer(overrides={**args, **both})
    trainer.capture_report = CaptureReport(trainer.capture)
    for key in ("capture_orthogonalization", "capture_network"):
        for _ in range(2):
            trainer._say_not_in_force("it rains", key)
    said = [line.partition("capture_")[2] for line in heard if "WARNING" in line]
    assert said == [
        "orthogonalization=True is not in force: it rains. The optimizer steps eagerly, with the same result.",
        "network=True is not in force: it rains. The fit trains eagerly, with the same result.",
    ]
    assert trainer.capture_report.blocked == trainer.capture_report.orthogonalization.blocked == "it rains"


class OwnLoop(Replaying):
    def _do_train(self) -> None: ...


def test_upstreams_loop_blocks_both(args, heard) -> None:
    trainer = OwnLoop(overrides={**args, "capture_network": True, "capture_orthogonalization": True})
    trainer.train()
    (warning,) = [line for line in heard if "WARNING" in line]
    assert "capture_network=True capture_orthogonalization=True is not in force: OwnLoop trains with" in warning
    report = trainer.capture_report
    assert report.blocked == report.orthogonalization.blocked == "OwnLoop trains with a loop of its own"


# Who may have it ------------------------------------------------------------------------------------------------------


def asking(optimizer, recorder=None, device: str = "cpu", **options) -> SimpleNamespace:
    capture = CaptureOptions(**{"capture_orthogonalization": True, **options})
    device = torch.device(device)
    return SimpleNamespace(
        capture=capture, capture_report=CaptureReport(capture), optimizer=optimizer, recorder=recorder, device=device,
        model=None,
    )  # fmt: skip


def built(name: str, iterations: float = 1e5) -> torch.optim.Optimizer:
    model = make_model()
    owner = SimpleNamespace(args=model.args, data={"nc": 2})
    level = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        return BaseTrainer.build_optimizer(owner, model, name, iterations=iterations)
    finally:
        LOGGER.setLevel(level)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSProp"])
def test_other_optimizers_are_told_the_way_out(name) -> None:
    _, blocker = orthogonalization_for(asking(built(name), EmulatingRecorder()))
    assert blocker == (
        f"the optimizer is {type(built(name)).__name__}, and only MuSGD orthogonalizes "
        "(optimizer=auto picks it for fits of more than 10000 optimizer steps): train with optimizer=MuSGD"
    )


def test_the_rule_that_the_way_out_names_is_upstreams() -> None:
    picked = [type(built("auto", iterations)).__name__ for iterations in (10000, 10001)]
    assert picked == ["AdamW", "MuSGD"]
    assert "iterations=iterations" in inspect.getsource(BaseTrainer._build_train_pipeline)


def test_a_subclass_of_musgd_may_have_another_step() -> None:
    class Mine(MuSGD): ...

    _, blocker = orthogonalization_for(asking(Mine([torch.zeros(2, 2)]), EmulatingRecorder()))
    assert blocker.startswith("the optimizer is") and "Mine" in blocker
    holder, blocker = orthogonalization_for(asking(built("MuSGD"), EmulatingRecorder()))
    assert blocker is None and holder.key == "capture_orthogonalization"
    assert orthogonalization_for(asking(built("MuSGD")))[1] == "replay needs a CUDA device, this fit runs on 'cpu'"
    holder, blocker = orthogonalization_for(asking(built("MuSGD"), device="cuda"))
    assert blocker is None and type(holder.recorder).__name__ == "CudaRecorder"


def test_drift_is_a_reason(monkeypatch) -> None:
    def muon_update(grad, momentum, beta=0.95, nesterov=True):
        return STOCK(grad, momentum, beta, nesterov)

    monkeypatch.setattr(muon, "muon_update", muon_update)
    holder, blocker = orthogonalization_for(asking(built("MuSGD"), EmulatingRecorder()))
    assert "patch 'replay_orthogonalization' does not fit ultralytics.optim.muon:muon_update: its source" in blocker
    with holder.in_force(), holder.step(None):
        assert muon.muon_update is muon_update
    assert holder.report.eager == {blocker: 1}


def test_what_was_not_asked_for_is_counted_so(args) -> None:
    holder, blocker = orthogonalization_for(
        asking(built("MuSGD"), EmulatingRecorder(), capture_orthogonalization=False)
    )
    assert blocker is None
    with holder.in_force(), holder.step(None):
        assert muon.muon_update is STOCK
    assert holder.report.eager == {"capture_orthogonalization=False": 1}
