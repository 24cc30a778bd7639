"""What a fit that replayed leaves on disk is upstream's: the same files, opened where only ultralytics is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import pickletools
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from ultralytics.cfg import get_cfg
from ultralytics.models.yolo.detect import DetectionTrainer

from detgraph.trainer.golden.digests import digest

from .conftest import FIT, Replaying

ROOT_OF_TESTS = Path(__file__).resolve().parent.parent
FILES = ("best.pt", "last.pt", "in_fit.pt", "epoch0.pt")
MODELS = ("model", "ema")
BUILTIN = ("builtins", "__builtin__", "copyreg", "_codecs")
OWN_KEYS = (
    "capture_network",
    "capture_orthogonalization",
    "capture_options",
    "record_at_step",
    "max_recordings",
    "self_check",
)


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory) -> dict[str, Path]:
    """Return the run folders of the same fit by upstream and by ours replaying; `in_fit.pt` is `last.pt` on the way."""

    def keep(trainer):
        shutil.copy(trainer.last, trainer.wdir / "in_fit.pt")

    folder = tmp_path_factory.mktemp("runs")
    found = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for kind, trainer_class in (("stock", DetectionTrainer), ("ours", Replaying)):
        args = {**FIT, "optimizer": "MuSGD", "data": tiny["some"], "project": str(folder), "name": kind}
        args.update(model="yolo26n.yaml", save_period=1, nbs=4)  # the network whose checkpoints are most in use
        ours = {"capture_network": "verify", "capture_orthogonalization": True} if kind == "ours" else {}
        trainer = trainer_class(overrides={**args, **ours})
        trainer.add_callback("on_model_save", keep)
        trainer.train()
        found[kind] = trainer.save_dir
    assert trainer.capture_report.replayed > 0 and trainer.capture_report.orthogonalization.replayed > 0
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """Return the environment of a process where neither detgraph nor Lightning can be imported, nor a GPU seen."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT_OF_TESTS)!r})\nfrom arm import Banned\n"
        "sys.meta_path.insert(0, Banned())\ndel sys.path[0]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    for package in ("detgraph", "lightning", "pytorch_lightning"):
        command = [sys.executable, "-c", f"import {package}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "is banned" in done.stderr
    return environment


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=False)


def pickle_globals(path: Path) -> set[str]:
    """Return the names that opening a checkpoint imports, without opening it."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return set(_globals(archive.read(name)))


def _globals(data: bytes) -> Iterator[str]:
    strings = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "GLOBAL":
            yield argument
        elif operation.name == "STACK_GLOBAL":  # its two strings were pushed last
            yield " ".join(strings[-2:])
        elif "UNICODE" in operation.name:
            strings.append(argument)


# Form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_is_a_stock_one(runs, file) -> None:
    """Same imports, same keys, same tensors; of what differs between two stock runs, the date and the run's name."""
    paths = [runs[kind] / "weights" / file for kind in ("stock", "ours")]
    names = [pickle_globals(path) for path in paths]
    assert names[0] == names[1]
    assert {name.split()[0].partition(".")[0] for name in names[1]} <= {"torch", "ultralytics", "collections", *BUILTIN}
    sizes = [path.stat().st_size for path in paths]
    assert abs(sizes[1] / sizes[0] - 1) < 0.01

    stock, ours = map(load, paths)
    assert list(stock) == list(ours)
    differing = {key for key in stock if key not in MODELS and _value(stock[key]) != _value(ours[key])}
    assert differing <= {"date", "train_args"}
    for key in MODELS:
        assert (stock[key] is None) == (ours[key] is None)
        if stock[key] is not None:
            states = [checkpoint[key].state_dict() for checkpoint in (stock, ours)]
            assert list(states[0]) == list(states[1]) and digest(states[0]) == digest(states[1])
            for module, other in zip(stock[key].modules(), ours[key].modules(), strict=True):
                assert type(module) is type(other) and set(vars(module)) == set(vars(other))


def _value(entry: object) -> object:
    """Return something that can be compared: without durations, and tensors as digests."""
    if isinstance(entry, dict):
        return {key: _value(value) for key, value in entry.items() if key != "time"}
    if isinstance(entry, (list, tuple)):
        return [_value(value) for value in entry]
    return digest(entry) if isinstance(entry, torch.Tensor) else entry


def test_the_pickle_walker_sees_a_foreign_class(tmp_path) -> None:
    torch.save({"model": Path("x"), "other": Replaying}, tmp_path / "x.pt")
    assert any("Replaying" in name for name in pickle_globals(tmp_path / "x.pt"))
    assert any("PosixPath" in name for name in pickle_globals(tmp_path / "x.pt"))


@pytest.mark.parametrize("file", FILES)
def test_arguments_in_a_checkpoint_are_upstreams(runs, file) -> None:
    stock, ours = (load(runs[kind] / "weights" / file) for kind in ("stock", "ours"))
    for args in (ours["train_args"], vars_of(ours["ema"] or ours["model"])):
        assert not set(args) & set(OWN_KEYS)
    assert set(ours["train_args"]) == set(stock["train_args"])
    get_cfg(overrides=ours["train_args"])  # stock resume does this, and refuses a key it does not know


def vars_of(model) -> dict:
    return model.args if isinstance(model.args, dict) else vars(model.args)


def test_the_other_files_are_stock(runs) -> None:
    """`args.yaml` equals upstream's but for the place; there is one file more than upstream's."""
    args = {kind: yaml.safe_load((folder / "args.yaml").read_text()) for kind, folder in runs.items()}
    assert list(args["stock"]) == list(args["ours"])
    assert {key for key in args["stock"] if args["stock"][key] != args["ours"][key]} == {"name", "save_dir"}
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in runs.values()]
    assert files[1] - files[0] == {"capture.json"} and files[0] <= files[1]
    for folder in runs.values():
        assert "capture" not in (folder / "results.csv").read_text()


# Use ------------------------------------------------------------------------------------------------------------------

USE = """
import json, sys
import torch
from ultralytics import YOLO

image, data, project, formats, *files = sys.argv[1:]
torch.set_num_threads(1)

def boxes(model):
    (result,) = model.predict(image, imgsz=64, conf=0.0, save=False, verbose=False, device="cpu")
    return result.boxes.data.flatten().tolist()

for file in files:
    torch.load(file, weights_only=False)
    model = YOLO(file)
    found = {"boxes": boxes(model)}
    results = model.val(data=data, imgsz=64, batch=4, plots=False, project=project, device="cpu", verbose=False)
    found["metrics"] = results.results_dict
    for form in formats.split(","):
        found[form] = boxes(YOLO(model.export(format=form, imgsz=64, device="cpu"), task="detect"))
    print("FOUND " + json.dumps(found))
assert not [name for name in sys.modules if name.partition(".")[0] in ("detgraph", "lightning")]
"""


def test_use_without_us(runs, bare, tiny, tmp_path) -> None:
    """Open, predict, validate and export where we are not installed: as upstream's own checkpoints do."""
    formats = ["torchscript"] + ["onnx"] * all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    image = sorted(Path(tiny["some"]).parent.glob("images/val/*"))[0]
    found = {}
    for kind, folder in runs.items():
        shutil.copytree(folder / "weights", tmp_path / kind)
        files = [tmp_path / kind / file for file in ("best.pt", "in_fit.pt")]
        command = [sys.executable, "-c", USE, image, tiny["some"], tmp_path / "val", ",".join(formats), *files]
        done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[kind] = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found["stock"] == found["ours"] and len(found["ours"]) == 2
    for answers in found["ours"]:
        assert answers["boxes"] and all(answers[form] for form in formats)


def test_the_stock_command_line_resumes_ours(tiny, tmp_path, bare) -> None:
    """`yolo train resume model=last.pt`, upstream's own, after a fit of ours was interrupted while it replayed."""

    def stop(trainer):
        if trainer.epoch == 1:
            raise KeyboardInterrupt

    args = {**FIT, "data": tiny["some"], "project": str(tmp_path), "name": "cut", "capture_network": True}
    trainer = Replaying(overrides=args)
    trainer.add_callback("on_train_epoch_start", stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.capture_report.replayed > 0

    command = [sys.executable, "-m", "ultralytics.cfg.__init__", "train", "resume", f"model={trainer.last}"]
    done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Resuming training" in done.stdout and "1 epochs completed" in done.stdout
    assert load(trainer.best)["epoch"] == -1 and len(trainer.csv.read_text().splitlines()) == 3
