"""`yolo why` with real fits on a CPU: through the command line, with a replay, and what it leaves behind."""

import json
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from ultralytics.data import YOLODataset
from ultralytics.engine.model import Model
from ultralytics.optim import muon
from ultralytics.utils import LOGGER

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.cli import main
from detgraph.trainer.why import clock as why_clock
from detgraph.trainer.why import command as why
from detgraph.trainer.why import measure as why_measure
from detgraph.trainer.why import words as why_words
from detgraph.trainer.why.report import PHASES, Look
from emulator import EmulatingRecorder
from schemas import complaints

FIT = ["model=yolo26n.yaml", "imgsz=64", "batch=2", "nbs=4", "device=cpu"]


@pytest.fixture
def data(tmp_path, make_dataset, monkeypatch):
    """Five pictures, so a pass is two full batches and a tail; the current folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return f"data={make_dataset(tmp_path / 'data', 5, 2)}"


@pytest.fixture
def left(tmp_path):
    """Return what was added to or taken from the test's folder, as a function."""

    def files():
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "config" not in path.parts}

    before = None

    def changed():
        nonlocal before
        if before is None:
            before = files()
        return before ^ files()

    return changed


class OnCuda:
    """A trainer as it would be on CUDA, for the plan of its sections."""

    device = torch.device("cuda")

    def __init__(self, trainer):
        self.trainer = trainer

    def __getattr__(self, name):
        return getattr(self.trainer, name)


def test_as_a_process(data, left):
    left()
    words = ["why", *FIT, data, "optimizer=SGD", "--json", "-", "seconds=1", "project=mine", "capture_network=verify"]
    command = [sys.executable, "-m", "detgraph.trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not left()
    found = json.loads(done.stdout)  # and nothing else
    assert not complaints(found, "why")
    look = Look.from_dict(found)
    assert look.words == ["train", *FIT, data, "optimizer=SGD", "project=mine"]
    assert (look.fit["batch"], look.fit["images"], look.fit["accumulate"]) == (2, 5, 2)
    eager, replay, objective, both = look.arms
    assert [arm.name for arm in look.arms] == ["eager", "replay", "objective", "all"]
    assert not objective.ran
    assert len(eager.steps_ms) >= 3 and len(eager.steps_ms) % 2 == 0 and eager.steps > 5
    names = [phase.name for phase in eager.phases]
    assert {"data wait", "preprocess", "forward", "objective", "backward", "optimizer", "ema", "loop"} == set(names)
    assert names == [name for name in PHASES if name in names]
    assert sum(phase.ms for phase in eager.phases) == pytest.approx(eager.step_ms, rel=0.5)
    counts = {phase.name: phase.operations for phase in eager.phases}
    assert min(counts[name] for name in ("forward", "objective", "backward", "optimizer")) > 100
    assert counts["data wait"] == 0 and {phase.launches for phase in eager.phases} == {None}
    assert not replay.ran and "needs a CUDA device" in replay.blocked and not both.ran
    assert found["gpu"] is None and found["verdict"]["bound"] in ("cpu", "data")
    assert found["verdict"]["command"].endswith("capture_network=False")  # asked for, and impossible here
    assert "Ultralytics" not in done.stderr and "Epoch" not in done.stderr  # no banner, no progress


def test_replay_is_measured_and_everything_given_back(data, left, monkeypatch, capsys):
    """As on CUDA: a replay, sections of their own for phases and profile, with operators in the place of kernels."""
    plan = why_measure.plan
    monkeypatch.setattr(why_measure, "plan", lambda trainer, *args, **more: plan(OnCuda(trainer), *args, **more))
    profile_plan = why_measure.profile_plan
    monkeypatch.setattr(why_measure, "profile_plan", lambda trainer: profile_plan(OnCuda(trainer)))
    monkeypatch.setattr(why_clock, "DEVICE_EVENTS", ("cpu_op",))
    monkeypatch.setattr(LightningDetectionTrainer, "recorder", EmulatingRecorder())
    train, update, level = Model.train, muon.muon_update, LOGGER.level
    left()
    main(["why", *FIT, data, "optimizer=MuSGD", "seconds=1", "json=x.json", "--picture", "x.png"])
    assert left() == {"here/x.json", "here/x.png"}
    assert (Model.train, muon.muon_update, LOGGER.level) == (train, update, level)
    out, err = capsys.readouterr()
    assert err.splitlines()[-2:] == ["yolo why: wrote x.json", "yolo why: wrote x.png"]
    assert "  orthogonalization" in out and "launches" in out and "To train: yolo train" in out
    with open("x.json") as file:
        look = Look.from_dict(json.load(file))
    eager, replay, objective, both = look.arms
    assert [arm.name for arm in look.arms] == ["eager", "replay", "objective", "all"]
    assert objective.ran and objective.blocked is None and objective.note is None
    assert both.ran and both.note is None and both.replayed >= len(both.steps_ms) / 2
    assert eager.replayed == 0 and replay.ran and replay.blocked is None and replay.note is None
    assert replay.replayed >= len(replay.steps_ms) / 2 and replay.recording_seconds > 0
    assert both.recording_seconds > 0 and look.fit["steps"] > 0
    work = {phase.name: phase.launches for phase in eager.phases}
    assert all(work[name] > 0 for name in ("forward", "objective", "backward", "optimizer", "orthogonalization", "ema"))
    assert look.busy_ms > 0 and all(phase.launches is not None for arm in look.arms for phase in arm.phases)
    assert "orthogonalization" in {phase.name for phase in replay.phases} - {phase.name for phase in both.phases}


def run_out_of_memory(trainer, batch):
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("protected", [False, True])
def test_out_of_memory_is_told_and_leaves_nothing(data, left, monkeypatch, capsys, protected):
    if not protected:
        monkeypatch.setattr(why.LookTrainer, "_leave_nothing", lambda trainer, begun: None)
    monkeypatch.setattr(why.LookTrainer, "preprocess_batch", run_out_of_memory)
    left()
    assert why_words.main([*FIT, data]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    smaller = [word.replace("batch=2", "batch=1") for word in FIT]
    assert said.startswith("yolo why: error: batch=2 does not fit") and said.endswith(
        " ".join(["yolo why", *smaller, data])
    )
    assert left() == (set() if protected else {"data/labels/train.cache", "data/labels/val.cache"})


def spoil(path, checked):
    """Make a picture that upstream's check finds, or one that passes it (`checked`) and cannot be decoded."""
    content = path.read_bytes()
    if not checked:
        path.write_bytes(content[: len(content) // 2])
        return

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    path.write_bytes(content[: content.index(b"IDAT") - 4] + chunk(b"IDAT", bytes(500)) + chunk(b"IEND", b""))


@pytest.mark.parametrize("cached", [False, True])
def test_faults_in_the_data_are_told(data, tmp_path, capsys, cached):
    """Which pictures and labels upstream leaves out, and why; also where it has them from a cache."""
    pictures, labels = (tmp_path / "data" / kind / "train" for kind in ("images", "labels"))
    spoil(pictures / "0001.png", checked=False)
    (labels / "0002.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    if cached:
        YOLODataset(str(pictures), data={"names": {0: "a", 1: "b"}, "channels": 3}, imgsz=64)
    level, handlers = LOGGER.level, [(handler, handler.level) for handler in LOGGER.handlers]
    assert why_words.main([*FIT, data, "optimizer=SGD", "seconds=1", "json=x.json"]) == 0
    assert (level, handlers) == (LOGGER.level, [(handler, handler.level) for handler in LOGGER.handlers])
    out, err = capsys.readouterr()
    with open("x.json") as file:
        first, second = json.load(file)["fit"]["faults"]
    assert f"{pictures / '0001.png'}: ignoring corrupt" in first and "Label class 7" in second
    assert f"yolo why: {first}\nyolo why: {second}\n" in err and "3 images, 2 faults in pictures or labels" in out
    assert (labels.parent / "train.cache").exists() == cached


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_cannot_be_read_is_told(data, tmp_path, capsys, workers):
    spoil(tmp_path / "data" / "images" / "train" / "0003.png", checked=True)
    assert why_words.main([*FIT, data, "optimizer=SGD", "seconds=1", f"workers={workers}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("yolo why: error: a batch cannot be loaded, as in training: ") and "0003.png." in said


def test_no_colours_where_nobody_sees_them(data):
    """Neither upstream's own, in its warnings and errors, nor any of ours."""
    for words in ([*FIT, data, "optimizer=SGD", "seconds=1", "close_mosaic=1", "box='x'"], ["modle=x"]):
        command = [sys.executable, "-m", "detgraph.trainer", "why", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "\x1b" not in done.stdout + done.stderr and "yolo why: error: " in done.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("no fit to look at",)),
        (["modle=x"], ("'modle'", "model")),
        (["--detail", "5:2", "model=yolo26n.yaml"], ("no option '--detail'", "yolo why --help")),
        (["--secnods=5", "model=yolo26n.yaml"], ("no option '--secnods'", "Did you mean seconds?")),
        (["capture_netwrok=True"], ("Did you mean capture_network",)),
        (["val", "model=yolo26n.pt"], ("mode 'val'", "Leave 'val' out")),
        (["mode=export"], ("mode 'export'",)),
        (["checks"], ("does not train",)),
        (["imgsz=[64", "32"], ("cannot read",)),
        (["capture_network=True", "compile=True"], ("compile=True", "compile=False")),
        (["model=missing.yaml"], ("missing.yaml",)),
        (["cfg=missing.yaml"], ("missing.yaml",)),
        (["model=yolo26n.yaml", "data=missing.yaml"], ("missing.yaml",)),
        (["model=yolo26n.yaml", "DATA", "device=cpu", "imgsz=abc"], ("imgsz",)),
        (["model=yolo26n.yaml", "DATA", "batch=many"], ("batch=many",)),
        (["model=yolo26n.yaml", "resume=True"], ("resume",)),
        (["model=yolo26n.yaml", "data=['a.yaml', 'b.yaml']"], ("data=a.yaml",)),
        (["model=yolo26n.yaml", "device=0,1", "batch=8"], ("several GPUs", "yolo why", "device=0 batch=4")),
        (["model=yolo26n-seg.yaml"], ("task 'segment'", "yolo why model=yolo26n.yaml")),
        (["segment", "train", "model=yolo26n-seg.yaml"], ("task 'segment'", "yolo why model=yolo26n.yaml")),
        (["model=yolo26n.yaml", "DATA", "device=cpu", "optimizer=Foo"], ("optimizer", "'Foo'")),
        (
            ["model=yolo26n.yaml", "DATA", "device=cpu", "amp=bf16", "imgsz=64"],
            ("a step of this fit fails", "bfloat16"),
        ),
        (["model=yolov8s-world.yaml"], ("YOLOWorld", "a trainer of its own")),
    ],
)
def test_errors_come_before_any_work(data, left, capsys, words, parts):
    train = Model.train
    left()
    with pytest.raises(SystemExit) as end:
        main(["why", *(data if word == "DATA" else word for word in words)])
    out, err = capsys.readouterr()
    said = err.splitlines()[-1]
    assert end.value.code == 2 and out == "" and said.startswith("yolo why: error: ")
    for part in parts:
        assert part in said
    assert not left() and Model.train is train
