"""capture.json beside a fit: writing it never ends one, and no file of somebody else's is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture import report
from emulator import EmulatingRecorder
from steps import TINY

from .conftest import warned

FOREIGN = {
    "no json": b"what I captured\n",
    "no text": b"\xff\xfe\x00",
    "another schema": b'{"schema": "camera-1", "options": {"lens": 3}}',
    "a list": b"[1, 2]",
    "nothing": b"",
    "deep": b"[" * 100_000,
}


@pytest.fixture
def fit(tmp_path, make_dataset, monkeypatch):
    """Return a function that runs a fit of one epoch into one folder and returns its trainer and the events it saw."""
    model = tmp_path / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY))
    data = make_dataset(tmp_path / "pictures", 4, 2)
    monkeypatch.setenv("TQDM_DISABLE", "1")

    def run(capture: bool | None = True, at_start=None):
        args = {
            "model": str(model), "data": str(data), "imgsz": 64, "batch": 2, "epochs": 1, "optimizer": "SGD",
            "workers": 0, "plots": False, "nbs": 2, "pretrained": False, "device": "cpu", "val": False,
            "project": str(tmp_path / "runs"), "name": "fit", "exist_ok": True,
        }  # fmt: skip
        asked = {} if capture is None else {"capture_network": capture}
        trainer = LightningDetectionTrainer(overrides={**args, **asked})
        trainer.recorder = EmulatingRecorder()
        if at_start is not None:
            trainer.add_callback("on_train_start", at_start)
        ended = []
        trainer.add_callback("on_train_end", lambda t: ended.append(True))
        trainer.train()
        assert ended and trainer.best.exists()
        assert trainer.capture_report.steps == 2
        return trainer

    return run


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "runs" / "fit" / "capture.json"
    path.parent.mkdir(parents=True)
    return path


def test_a_report_replaces_the_earlier_one(fit, file, heard):
    for capture in (True, False, None):
        fit(capture)
        options = json.loads(file.read_text())["options"]
        assert options["capture_network"] is bool(capture)
    assert not warned(heard)


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("capture", [True, False, None])
def test_a_file_of_somebody_elses_is_kept(capture, content, fit, file, heard):
    file.write_bytes(content)
    trainer = fit(capture)
    assert file.read_bytes() == content
    assert len(warned(heard)) == bool(capture)
    if capture:
        assert trainer.capture_report.replayed == 1
        assert str(file) in warned(heard)[0] and "kept" in warned(heard)[0]


@pytest.mark.parametrize("capture", [True, None])
def test_a_folder_of_that_name(capture, fit, file, heard):
    (file / "mine").mkdir(parents=True)
    fit(capture)
    assert [path.name for path in file.iterdir()] == ["mine"] and not list(file.parent.glob("*.part"))
    assert len(warned(heard)) == bool(capture)


def test_a_link_is_somebody_elses(fit, file, tmp_path, heard):
    file.symlink_to(tmp_path / "nowhere" / "capture.json")
    fit()
    assert file.is_symlink() and len(warned(heard)) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("CUDA error: unspecified")])
def test_what_cannot_be_written_is_said_once(error, fit, file, heard, monkeypatch):
    """A full disk, a device that does not answer: neither ends the fit, and the summary line still closes it."""

    def broken(*args):
        raise error

    monkeypatch.setattr(report, "write_whole" if isinstance(error, OSError) else "environment", broken)
    fit()
    (warning,) = warned(heard)
    assert str(error.args[-1]) in warning and str(file) in warning and not file.exists()
    assert any("1 of 2 steps replayed" in line for line in heard)


def test_what_cannot_be_written_hides_no_error(fit, file, monkeypatch):
    """The report is written on the way out of a fit that failed, too."""

    def dead(self):
        raise RuntimeError("CUDA error: unspecified launch failure")

    def fails(trainer):
        monkeypatch.setattr(report.CaptureReport, "stop", dead)
        trainer.add_callback("on_train_batch_end", lambda t: (_ for _ in ()).throw(ValueError("the fit's own error")))

    with pytest.raises(ValueError, match="the fit's own error"):
        fit(at_start=fails)


def test_a_folder_that_goes_away_in_the_fit(fit, file, heard):
    """Somebody tidies up while the fit runs; upstream makes the folders that it needs, or not."""

    def at_start(trainer):
        file.unlink()
        file.mkdir()

    fit(at_start=at_start)
    assert len(warned(heard)) == 1 and file.is_dir()


def test_an_interrupt_while_the_report_is_written_is_an_interrupt(fit, file, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit()
