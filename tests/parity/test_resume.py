"""A fit that was interrupted goes on the same whichever loop began it and whichever loop ends it.

Upstream's loop and ours interrupt a fit; copies of what they leave are resumed by upstream's loop in a process that
knows neither us nor Lightning, by ours eagerly, and by ours replaying. All must end with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ultralytics.models.yolo.detect import DetectionTrainer

from arms import Arm, differences, fits
from detgraph.cfg import CaptureOptionError
from detgraph.trainer import LightningDetectionTrainer
from emulator import EmulatingRecorder

from .conftest import BASE

LONG = {**BASE, "epochs": 3}  # two of them are left to resume
AT_EPOCH = ("raise_at", {"event": "on_train_epoch_start", "number": 2, "error": "KeyboardInterrupt"})
IN_EPOCH = ("raise_at", {"event": "on_train_batch_end", "number": 6, "error": "KeyboardInterrupt"})


@dataclass
class Case:
    """Arguments over the base, and what interrupts the fit in its second epoch."""

    name: str
    args: dict = field(default_factory=dict)
    interrupt: tuple = AT_EPOCH
    data: str = "eight"


CASES = [
    Case("musgd", {"batch": 4, "optimizer": "MuSGD"}),
    Case("in_epoch", {"optimizer": "AdamW", "lr0": 0.001, "nbs": 8, "warmup_epochs": 2.0}, IN_EPOCH),
    Case("close_mosaic", {"close_mosaic": 3, "optimizer": "auto", "batch": 4, "epochs": 4}, data="seven"),
]


@pytest.fixture(scope="module")
def interrupt(small_data, tmp_path_factory):
    """Return a function that lets arms run a case into its interrupt, side by side, and returns the run folders."""

    def run(case: Case, *arms: Arm) -> list[Path]:
        projects = [tmp_path_factory.mktemp(case.name) for _ in arms]
        args = {**LONG, "data": small_data[case.data], "name": "cut", **case.args}
        requests = [(arm, {**args, "project": str(folder)}) for arm, folder in zip(arms, projects, strict=True)]
        for fit, project in zip(fits(requests, [case.interrupt]), projects, strict=True):
            assert fit["error"].startswith("KeyboardInterrupt"), fit["error"]
            assert [f for f in fit["files"] if f.startswith("weights")] == ["weights/best.pt", "weights/last.pt"]
            assert Path(fit["folder"]) == project / "cut"
        return [project / "cut" for project in projects]

    return run


def resume(cut: Path, case: Case, *arms: Arm) -> list[dict]:
    """Resume copies of the run folder `cut`, one an arm; each lies in its arm's folder, as the arm's other fits do."""
    requests = []
    for arm in arms:
        copy = arm.folder / f"resumed-{cut.parent.name}"
        shutil.copytree(cut, copy)
        args = {"resume": str(copy / "weights" / "last.pt"), "save_dir": str(copy), "project": str(cut.parent)}
        requests.append((arm, {**args, "name": "cut", **case.args}))
    return fits(requests)


def same(case: Case, stock: dict, ours: dict, emulated: dict) -> None:
    """Assert that three resumed fits ran the epochs that were left, by their own loops, to the same bytes."""
    epochs = case.args.get("epochs", LONG["epochs"])
    assert stock["error"] is None
    assert stock["type"].startswith("ultralytics.") and "micro_batches" not in stock
    assert stock["events"].count("on_train_epoch_start") == epochs - 1
    assert any("Resuming training" in line for line in stock["log"])
    assert not differences(stock, ours)
    assert not differences(stock, emulated)
    for fit in (ours, emulated):
        assert fit["micro_batches"] == len(stock["images"]) > 0
    assert emulated["report"]["replayed"] > 0
    musgd = case.args.get("optimizer", LONG["optimizer"]) == "MuSGD"
    assert (emulated["report"]["orthogonalization"]["replayed"] > 0) == musgd


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_upstream_began_it(case, interrupt, stock_arm, our_arm, emulated_arm) -> None:
    (cut,) = interrupt(case, stock_arm)
    assert not (cut / "capture.json").exists()
    same(case, *resume(cut, case, stock_arm, our_arm, emulated_arm))


def test_either_began_it(interrupt, stock_arm, our_arm, emulated_arm) -> None:
    """Our loop, interrupted while it replays, leaves a run of upstream's: the same as upstream's own."""
    case = CASES[0]
    cuts = interrupt(case, stock_arm, emulated_arm)
    assert not (cuts[0] / "capture.json").exists()
    assert json.loads((cuts[1] / "capture.json").read_text())["replayed"] > 0
    upstreams, ours = (resume(cut, case, stock_arm, our_arm, emulated_arm) for cut in cuts)
    same(case, *upstreams)
    same(case, *ours)
    assert upstreams[0]["digests"] == ours[0]["digests"]


# Options of the earlier fit -------------------------------------------------------------------------------------------


class Replaying(LightningDetectionTrainer):
    """Our trainer where replay is possible on a CPU."""

    recorder = EmulatingRecorder()


def cut_fit(small_data, project: Path, trainer: type = Replaying, **more) -> Path:
    """Interrupt a fit in its second epoch and return its run folder."""

    def stop(trainer):
        if trainer.epoch == 1:
            raise KeyboardInterrupt

    args = {**BASE, "data": small_data["eight"], "project": str(project), "name": "cut", "epochs": 2, "batch": 4}
    args.update(more)
    fit = trainer(overrides=args)
    fit.add_callback("on_train_epoch_start", stop)
    with pytest.raises(KeyboardInterrupt):
        fit.train()
    return fit.save_dir


def continued(cut: Path, **args) -> Replaying:
    """Resume the run folder and return the trainer."""
    fit = Replaying(overrides={"resume": str(cut / "weights" / "last.pt"), **args})
    fit.train()
    return fit


def test_the_options_of_a_fit_are_remembered(small_data, tmp_path) -> None:
    """Asked for once, the capture is in force after a resume; said otherwise, it is not; and that is kept as well."""
    given = {"capture_network": True, "capture_orthogonalization": True, "self_check": False, "max_recordings": 2}
    cut = cut_fit(small_data, tmp_path, capture_options=given, optimizer="MuSGD")
    shutil.copytree(cut, tmp_path / "other")

    again = continued(cut)
    assert again.capture.enabled and (again.capture.self_check, again.capture.max_recordings) == (False, 2)
    assert again.capture_report.replayed > 0 and again.capture_report.orthogonalization.replayed > 0
    assert "capture" not in (cut / "args.yaml").read_text()
    kept = json.loads((cut / "capture.json").read_text())
    assert kept["replayed"] == again.capture_report.replayed and kept["options"] == again.capture.to_dict()

    off = {"capture_network": False, "capture_orthogonalization": False}
    without = continued(tmp_path / "other", **off, save_dir=str(tmp_path / "other"))
    assert not without.capture.enabled and without.capture_report.replayed == 0
    kept = json.loads((tmp_path / "other" / "capture.json").read_text())
    assert kept["options"]["capture_network"] is False and kept["replayed"] == 0


def test_a_fit_that_did_not_ask_stays_eager(small_data, tmp_path) -> None:
    cut = cut_fit(small_data, tmp_path, trainer=DetectionTrainer)
    shutil.copytree(cut, tmp_path / "other")
    again = continued(cut)
    assert again.capture_report.replayed == 0 and not (cut / "capture.json").exists()
    asked = continued(tmp_path / "other", capture_network="verify", save_dir=str(tmp_path / "other"))
    assert asked.capture.verify and asked.capture_report.replayed > 0


def test_resume_refuses_what_it_cannot_know(small_data, tmp_path) -> None:
    """A report that cannot be read, and a capture that contradicts what the earlier fit remembers."""
    cut = cut_fit(small_data, tmp_path, capture_network=True)
    file = cut / "capture.json"
    content = file.read_text()
    before = sorted(tmp_path.rglob("*"))
    file.write_text(content[:40])
    with pytest.raises(CaptureOptionError, match="capture_network=True or capture_network=False"):
        continued(cut)
    assert sorted(tmp_path.rglob("*")) == before
    assert continued(cut, capture_network=True).capture_report.replayed > 0


def test_a_finished_fit_ends_as_upstreams_does(small_data, tmp_path) -> None:
    args = {**BASE, "data": small_data["eight"], "project": str(tmp_path), "epochs": 1}
    fit = Replaying(overrides={**args, "capture_network": True})
    fit.train()
    said = []
    for trainer in (DetectionTrainer, Replaying):
        with pytest.raises(AssertionError) as error:
            trainer(overrides={"resume": str(fit.last)}).train()
        said.append(str(error.value))
    assert said[0] == said[1] and "nothing to resume" in said[0]
