"""The `yolo` command line through upstream's entry point: which trainer is reached, upstream's commands, and ours."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import ultralytics.cfg
from ultralytics.engine.model import Model
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.utils import YAML

from detgraph import patches
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.cli import COMMANDS, main
from detgraph.trainer.fit.asked import ambient_options

from .conftest import OFF, ON, VERIFY, Stop, read

pytestmark = pytest.mark.usefixtures("stock_upstream")


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
    assert "route_train: does not fit" in out and "drift:  its signature" in out and "loop: fits" in out


def test_yolo_patches_prints_the_loop_like_a_patch(capsys, monkeypatch):
    monkeypatch.setattr(BaseTrainer, "_do_train", lambda self: None)
    with pytest.raises(SystemExit) as end:
        main(["patches"])
    series, loop = capsys.readouterr().out.split("\nloop: ")
    assert end.value.code == 1 and "does not fit" not in series and loop.startswith("does not fit\n  target: ")
    assert "BaseTrainer._do_train\n" in loop and "  drift:  the training loop of ultralytics" in loop


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
