"""The `yolo` command line: our keys in every spelling, errors before any work, and upstream's line left alone."""

import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version

import pytest
import ultralytics.cfg
import yaml
from ultralytics.engine.model import Model
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER, YAML, callbacks

from detgraph import patches
from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.cli import COMMANDS, main
from detgraph.trainer.command_line import read_command_line
from detgraph.trainer.fit.asked import ambient_options

STOCK_TRAIN = Model.train
ON, OFF, VERIFY = (CaptureOptions(capture_network=value) for value in (True, False, "verify"))


class Stop(Exception):
    """Ends a real training right after its trainer was built."""


@pytest.fixture(autouse=True)
def stock_upstream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    Model.train = STOCK_TRAIN
    patches.revert()


@pytest.fixture
def data(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": ["a"]})
    )
    return "data=tiny.yaml"


@pytest.fixture
def logged(monkeypatch):
    said = []
    for level in ("info", "warning"):
        monkeypatch.setattr(LOGGER, level, lambda text, *_, **__: said.append(str(text)))
    return said


@pytest.fixture
def built(monkeypatch):
    """Trainers that upstream built, with the ambient options at that moment; each is stopped at once."""
    found = []

    def stop(trainer):
        found.append((trainer, ambient_options.get()))
        raise Stop

    monkeypatch.setitem(callbacks.default_callbacks, "on_pretrain_routine_start", [stop])
    return found


def read(line):
    with ExitStack() as stack:
        return read_command_line(line.split(), stack)


def refused(capsys, *words):
    """Run a command line that must be refused and return its one message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert err.startswith("yolo: error: ") and err.count("\n") == 1 and out == ""
    return err


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


# Through upstream's entry point ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options"), [((), None), (("capture_network=verify",), VERIFY), (("capture_network=False",), OFF)]
)
def test_training_reaches_our_trainer(data, built, tmp_path, words, options):
    argv = list(ultralytics.cfg.ARGV)
    with pytest.raises(Stop):
        main(["train", "model=yolo26n.yaml", data, "device=cpu", f"project={tmp_path / 'runs'}", *words])
    ((trainer, ambient),) = built
    assert type(trainer) is LightningDetectionTrainer and ambient == options
    assert "capture" not in (trainer.save_dir / "args.yaml").read_text()
    assert ultralytics.cfg.ARGV == argv and ambient_options.get() is None


def test_upstreams_errors_stay_upstreams():
    with pytest.raises(SyntaxError, match="epoch"):
        main(["train", "epoch=3"])
    with pytest.raises(FileNotFoundError, match="missing"):
        main(["train", "cfg=missing.yaml", "capture_network=True"])


def test_upstreams_commands_run_and_need_no_patch(logged):
    Model.train = lambda self: None
    main(["version"])
    assert logged == [ultralytics.__version__]


def test_upstream_is_told_that_it_runs_as_a_command_line(built, data, monkeypatch):
    """Its `predict` saves pictures when the program's name ends in yolo, whatever ours is called."""
    seen = []
    monkeypatch.setattr(ultralytics.cfg, "entrypoint", lambda: seen.append(list(ultralytics.utils.ARGV)))
    for program, expected in (("/bin/yolo", "/bin/yolo"), ("/bin/detgraph", "yolo"), ("trainer/__main__.py", "yolo")):
        monkeypatch.setattr(sys, "argv", [program, "predict", "source=x"])
        main()
        assert seen.pop() == [expected, "predict", "source=x"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cfg capture_network=True", "capture_network"),
        ("patches capture_network=True", "has no meaning for yolo patches"),
        ("gloden compare a b", "Did you mean yolo golden?"),
        ("wyh model=yolo26n.yaml", "Did you mean yolo why?"),
    ],
)
def test_commands_refuse_what_is_not_theirs(capsys, line, said):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and said in err


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_help_names_our_commands_after_upstreams(capsys, logged, words):
    main(words)
    out = capsys.readouterr().out
    assert any("yolo solutions help" in text for text in logged)
    assert not [command for command in COMMANDS if f"yolo {command}" not in out]


def test_yolo_cfg_prints_both_lists(capsys, logged):
    main(["cfg"])
    assert any("epochs" in text for text in logged)
    out = capsys.readouterr().out
    assert "capture_network: False" in out and "record_at_step: 0" in out
    assert "capture_orthogonalization: False" in out


@pytest.mark.parametrize("word", ["version", "--version", "-v"])
def test_both_versions_are_told(capsys, logged, word):
    main([word])
    assert logged[-1] == ultralytics.__version__
    assert capsys.readouterr().out == f"detgraph {version('detgraph')} on ultralytics {ultralytics.__version__}\n"


def test_the_copied_list_of_arguments_has_our_keys(capsys, tmp_path):
    """Switched off by a '#', so that the copy serves every mode; without it, the copy is a cfg= file that asks."""
    main(["copy-cfg"])
    file = tmp_path / "default_copy.yaml"
    text = file.read_text()
    assert YAML.load(file) == ultralytics.utils.DEFAULT_CFG_DICT and "take the '# ' away" in capsys.readouterr().out
    assert read("val cfg=default_copy.yaml")[0] is None
    assert "\n# capture_network: False # replay" in text and "\n# capture_orthogonalization: False" in text
    file.write_text(text.replace("# capture_network: False", "capture_network: True"))
    assert read("train cfg=default_copy.yaml")[0] == ON


def test_yolo_patches_prints_the_series(capsys):
    main(["patches"])
    out = capsys.readouterr().out
    assert "route_train: fits" in out and "replay_orthogonalization: fits" in out
    patches.apply()
    main(["patches"])
    assert "route_train: applied" in capsys.readouterr().out
    patches.revert()
    Model.train = lambda self: None
    with pytest.raises(SystemExit) as end:
        main(["patches"])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "route_train: does not fit" in out and "drift:  its signature" in out


def test_as_a_process(tmp_path):
    """One real process: exit status, one line on stderr, no traceback, and no run folder."""
    words = ["train", "model=yolo26n.yaml", "data=missing.yaml", "compile=True", "--capture_network", "=", "true,"]
    done = subprocess.run(
        [sys.executable, "-m", "detgraph.trainer", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("yolo: error: capture_network=True and compile=True") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_imports_no_lightning(tmp_path):
    code = "import sys; from detgraph.trainer.cli import main; main(['version']); sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
