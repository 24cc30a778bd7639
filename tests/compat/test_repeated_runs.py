"""`cfg=RUN/args.yaml` repeats a run with the capture that it had; its capture.json remembers which."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from ultralytics.utils import DEFAULT_CFG_DICT, LOGGER, YAML

from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer import YOLO, LightningDetectionTrainer
from detgraph.trainer.cli import main
from detgraph.trainer.command_line import read_command_line
from detgraph.trainer.routing import route

REMEMBERED = CaptureOptions(capture_network=True, capture_orthogonalization=True, max_recordings=2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with upstream's args.yaml and a report; the current folder is the one that it is in."""
    folder = tmp_path / "run"
    folder.mkdir()
    YAML.save(folder / "args.yaml", {**DEFAULT_CFG_DICT, "mode": "train", "epochs": 7})
    (folder / "capture.json").write_text(json.dumps({"schema": 1, "options": REMEMBERED.to_dict()}))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def logged(monkeypatch):
    said = []
    monkeypatch.setattr(LOGGER, "info", lambda text, *_, **__: said.append(str(text)))
    return said


def read(line):
    with ExitStack() as stack:
        return read_command_line(line.split(), stack)


def routed(**kwargs):
    """Return what upstream's train would have been given by a call in Python."""
    return route(YOLO("yolo26n.yaml"), lambda model, **rest: rest, None, kwargs)


def test_a_command_line_has_the_runs_capture(run, logged):
    assert read("train cfg=run/args.yaml epochs=1") == (REMEMBERED, ["train", "cfg=run/args.yaml", "epochs=1"], True)
    (said,) = logged
    assert said.startswith("capture_network=True capture_orthogonalization=True, as run/capture.json has it")


@pytest.mark.parametrize("line", ["train {} cfg=run/args.yaml", "train cfg=run/args.yaml {}"])
def test_words_on_the_command_line_win(run, logged, line):
    options, words, _ = read(line.format("capture_network=verify"))
    assert options == replace(REMEMBERED, capture_network="verify") and "capture" not in " ".join(words)
    assert logged.pop().startswith("capture_orthogonalization=True, as run/capture.json")
    assert not read(line.format("capture_network=False capture_orthogonalization=False"))[0].enabled and not logged


def test_only_a_training_by_a_runs_args_is_a_repetition(run, logged):
    assert read("val cfg=run/args.yaml") == (None, ["val", "cfg=run/args.yaml"], False)
    (run / "args.yaml").rename(run / "mine.yaml")
    assert read("train cfg=run/mine.yaml")[0] is None
    (run / "mine.yaml").rename(run / "args.yaml")
    (run / "capture.json").unlink()
    assert read("train cfg=run/args.yaml")[0] is None and not logged


@pytest.mark.parametrize("text", ["", '{"frames": 3}', '{"schema": 2, "options": {"capture_network": true}}'])
def test_a_report_that_cannot_be_used_is_refused(run, capsys, text):
    (run / "capture.json").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", f"cfg={run}/args.yaml"])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    assert f"{run}/capture.json cannot be used" in err and "capture_network=True or" in err
    assert not read("train cfg=run/args.yaml capture_network=False")[0].enabled  # the way out
    with pytest.raises(CaptureOptionError, match="cannot be used"):
        routed(cfg="run/args.yaml")
    assert routed(cfg="run/args.yaml", capture_network=True)["capture_options"].network


def test_in_python(run, logged):
    assert routed(cfg="run/args.yaml")["capture_options"] == REMEMBERED
    assert logged.pop().startswith("capture_network=True capture_orthogonalization=True, as run/capture.json")
    assert routed(cfg=run / "args.yaml", capture_network=False)["capture_options"] == replace(
        REMEMBERED, capture_network=False
    )
    assert routed(cfg="run/args.yaml", capture_options={})["capture_options"] == CaptureOptions()
    assert "capture_options" not in routed(epochs=1)


def test_by_the_trainer_itself(run, make_dataset, tmp_path):
    data = str(make_dataset(tmp_path / "data", 2, 2))
    trainer = LightningDetectionTrainer("run/args.yaml", {"data": data, "device": "cpu", "model": "yolo26n.yaml"})
    assert trainer.capture == REMEMBERED and trainer.args.epochs == 7
