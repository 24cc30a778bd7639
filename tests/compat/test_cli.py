"""The `yolo` command line as it is read: our keys in every spelling, and errors before any work.

What then happens to a line is in test_cli_commands.py.
"""

from contextlib import ExitStack

import pytest
import ultralytics.cfg
from ultralytics.engine.model import Model
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import YAML

from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer.cli import main
from detgraph.trainer.command_line import read_command_line

from .conftest import OFF, ON, STOCK_TRAIN, VERIFY, Stop, read, refused

pytestmark = pytest.mark.usefixtures("stock_upstream")


# Taking our keys out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        "capture_network=True",
        "capture_network=true",
        "--capture_network=True",
        "capture_network = True",
        "capture_network= True",
        "capture_network =True",
        "--capture_network = TRUE",
        "capture_network=True,",
        "capture_network",
        "--capture_network",
        "--capture_network,",
        "--capture_network True",
        "capture_network true,",
        "capture_network capture_network=True",
        "capture_network=False capture_network=True",
    ],
)
@pytest.mark.parametrize("line", ["{} train epochs=1", "train {} epochs=1", "train epochs=1 {}"])
def test_every_spelling_is_taken_out(spelling, line):
    assert read(line.format(spelling)) == (ON, ["train", "epochs=1"], True)


@pytest.mark.parametrize(("value", "options"), [("verify", VERIFY), ("'verify'", VERIFY), ("False", OFF)])
def test_values(value, options):
    assert read(f"train capture_network={value}")[0] == options
    if value.isalpha():
        assert read(f"train --capture_network {value} epochs=1") == (options, ["train", "epochs=1"], True)


def test_both_keys_are_taken_out():
    both = CaptureOptions(capture_network=True, capture_orthogonalization=True)
    line = "train capture_network=True epochs=1 --capture_orthogonalization = true"
    assert read(line) == (both, ["train", "epochs=1"], True)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "train epochs = 1 imgsz=[640, 320] --lr0=0.1, data=",
        "detect train resume model=last.pt",
        "predict imgsz=[640",
        "settings capture_dir=x",
        "login capture_netwrok=1",
        "solutions count show=True",
        "help",
        "= x",
    ],
)
def test_a_line_without_our_keys_goes_on_word_for_word(line):
    options, words, _ = read(line)
    assert options is None and words == line.split()


def test_which_lines_train():
    for line in ("train", "epochs=1", "mode=train", "detect train capture_network=False"):
        assert read(line)[2]
    for line in ("", "val", "mode=predict", "task=track", "settings", "-h", "--version", "copy-cfg"):
        assert not read(line)[2]


def test_a_gap_does_not_join_its_neighbours():
    """Upstream joins a word that ends in '=' to the next one; taking ours out must not feed it another."""
    _, words, _ = read("project= capture_network=True train")
    assert words == ["train", "project="]
    assert ultralytics.cfg.merge_equals_args(words) == words


def test_only_our_key_is_still_a_training():
    assert read("capture_network=True") == (ON, ["mode=train"], True)


def test_keys_in_a_yaml_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 7\ncapture_network: verify\n")
    with ExitStack() as stack:
        options, words, trains = read_command_line(["train", "cfg=mine.yaml"], stack)
        (copy,) = [word.removeprefix("cfg=") for word in words if word != "train"]
        assert (options, trains, YAML.load(copy)) == (VERIFY, True, {"epochs": 7})
    for line in ("train cfg=mine.yaml capture_network=False", "train capture_network=False cfg=mine.yaml"):
        assert read(line)[0] == OFF
    file.write_text("epochs: 7\n")
    assert read("train cfg=mine.yaml") == (None, ["train", "cfg=mine.yaml"], True)
    assert read("train cfg=missing.yaml") == (None, ["train", "cfg=missing.yaml"], True)
    assert read("train cfg=None capture_network=True")[1] == ["train", "cfg=None"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("capture_network: 1", "train", "capture_network=1"),
        ("capture_network: null", "train", "capture_network=None"),
        ("capture_netwrok: true", "train", "Did you mean capture_network"),
        ("capture_options: {}", "train", "Python only"),
        ("compile: true", "train capture_network=True", "compile=True"),
        ("capture_network: true", "train compile", "compile=True"),
        ("{capture_network: true, mode: val}", "epochs=1", "mode 'val'"),
    ],
)
def test_a_yaml_file_is_checked_like_the_line(tmp_path, text, line, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(CaptureOptionError, match=message):
        read(f"{line} cfg=mine.yaml")


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("capture_network=maybe", ("capture_network=maybe", "capture_network=True", "capture_network=verify")),
        ("capture_network=1", ("capture_network=1 ", "capture_network=False")),
        ("capture_network=None", ("capture_network=None",)),
        ("capture_network=", ("has no value", "capture_network=True")),
        ("cuda_graph=True", ("'cuda_graph'", "Did you mean capture_network=")),
        ("cuda_graphs", ("'cuda_graphs'", "Did you mean capture_network=")),
        ("capture_netwrok=True", ("'capture_netwrok'", "Did you mean capture_network=")),
        ("capture-network=True", ("'capture-network'", "Did you mean capture_network=")),
        ("-capture_network=True", ("'-capture_network'", "Did you mean capture_network=")),
        ("capture_netwrok", ("'capture_netwrok'", "Did you mean capture_network=")),
        ("record_at_step=3", ("'record_at_step'", "CaptureOptions(")),
        ("capture_options={}", ("'capture_options'", "Python only")),
        ("capture_network=True compile=True", ("capture_network=True", "compile=True", "compile=False")),
        ("compile=max-autotune-no-cudagraphs capture_network=verify", ("compile=max-autotune-no-cudagraphs",)),
        ("compile capture_network=True", ("compile=True", "capture_network=False to compile")),
    ],
)
def test_refusals_come_before_any_work(capsys, tmp_path, data, built, words, parts):
    message = refused(capsys, "train", "model=yolo26n.yaml", data, f"project={tmp_path / 'runs'}", *words.split())
    for part in parts:
        assert part in message
    assert not built and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("val", "mode 'val'"),
        ("mode=predict", "mode 'predict'"),
        ("detect export model=x.pt", "mode 'export'"),
        ("task=track", "mode 'track'"),
        ("benchmark", "mode 'benchmark'"),
        ("checks", "command 'checks'"),
        ("settings reset", "command 'settings'"),
        ("--help", "command 'help'"),
    ],
)
@pytest.mark.parametrize("value", ["True", "False"])
def test_the_key_belongs_to_training_only(capsys, line, named, value):
    for words in ([*line.split(), f"capture_network={value}"], [f"capture_network={value}", *line.split()]):
        message = refused(capsys, *words)
        assert named in message and f"capture_network={value}" in message and "Leave capture_network " in message


@pytest.mark.parametrize("key", ["capture_network", "capture_orthogonalization"])
def test_a_refusal_names_what_was_written_and_nothing_else(capsys, key):
    other = ({"capture_network", "capture_orthogonalization"} - {key}).pop()
    assert other not in refused(capsys, "predict", f"{key}=False")


def test_drift_is_an_error_only_when_the_capture_is_asked_for(capsys, data, built, logged, tmp_path):
    def train(self, trainer=None, **kwargs):
        return STOCK_TRAIN(self, trainer, **kwargs)

    Model.train = train
    line = ("train", "model=yolo26n.yaml", data, "device=cpu", f"project={tmp_path / 'runs'}")
    assert "Model.train" in refused(capsys, *line, "capture_network=True")
    assert not built and not (tmp_path / "runs").exists()
    for words in (line, (*line, "capture_network=False")):
        logged.clear()
        with pytest.raises(Stop):
            main(words)
        assert type(built.pop()[0]) is DetectionTrainer
        assert len([text for text in logged if "does not fit" in text]) == 1
