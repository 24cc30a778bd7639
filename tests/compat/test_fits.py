"""Ways to train that lead around or through our loop: several data sets, tuning, other tasks, workers, subclasses."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import ultralytics
import ultralytics.engine.trainer
import yaml
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import callbacks

from detgraph.trainer import YOLO, LightningDetectionTrainer
from detgraph.trainer.golden.digests import fit_digests

from .conftest import Replaying, warned, weights


def fitted(trainer_class: type, args: dict, **more) -> DetectionTrainer:
    """Train and return the trainer."""
    trainer = trainer_class(overrides={**args, **more})
    trainer.train()
    return trainer


# Around our loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ours", "patched"])
def test_tune(way, fit_args, heard, request) -> None:
    """One iteration: its child runs upstream's command line, with no key it does not know; said once if asked for."""
    args = {**fit_args, "epochs": 1, "val": False, "iterations": 1}
    del args["name"]
    if way == "ours":
        YOLO(args["model"]).tune(capture_network=True, **args)
    else:
        request.getfixturevalue("patched")
        ultralytics.YOLO(args["model"]).tune(**args)
    assert len(warned(heard)) == (way == "ours")
    runs = Path(args["project"])
    (result,) = [json.loads(line) for line in next(runs.glob("tune*/tune_results.ndjson")).read_text().splitlines()]
    assert result["datasets"]["some"], "the one training failed"
    assert list(runs.rglob("best.pt")) and not list(runs.rglob("capture.json"))


def test_several_data_sets(tiny, fit_args, heard) -> None:
    """Each is a fit of our trainer's own, and each learns what upstream's trainer would have learnt from it."""
    args = {**fit_args, "data": [tiny["some"], tiny["other"]], "name": None, "epochs": 1}
    trained, found = [], {}
    for kind in ("stock", "ours"):
        model = (ultralytics.YOLO if kind == "stock" else YOLO)(args["model"])
        model.add_callback("on_train_start", lambda trainer: trained.append(type(trainer)))
        more = {"trainer": DetectionTrainer} if kind == "stock" else {"capture_network": True}
        metrics = model.train(**{**args, "project": f"{args['project']}/{kind}"}, **more)
        assert all(metrics.values()), "a data set failed"
        found[kind] = metrics, [weights(run.last) for run in model.trainer.trainers]
    assert found["stock"] == found["ours"] and list(found["ours"][0]) == ["some", "other"]
    assert trained == [DetectionTrainer] * 2 + [LightningDetectionTrainer] * 2
    for run in model.trainer.trainers:
        report = json.loads((run.save_dir / "capture.json").read_text())
        assert report["replayed"] == 0 < report["steps"] and "CUDA" in report["blocked"]
    assert len(warned(heard)) == 2


def polygons(data: str, folder: Path) -> str:
    """Write a copy of a detection data set whose boxes are polygons and return the path of its yaml."""
    source = Path(data).parent
    for file in sorted(source.glob("labels/*/*.txt")):
        rows = []
        for row in file.read_text().splitlines():
            cls, x, y, w, h = map(float, row.split())
            corners = [(x - w / 2, y - h / 2), (x + w / 2, y - h / 2), (x + w / 2, y + h / 2), (x - w / 2, y + h / 2)]
            rows.append(f"{cls:.0f} " + " ".join(f"{a:.6f} {b:.6f}" for a, b in corners))
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(rows))
    shutil.copytree(source / "images", folder / "images")
    (folder / "data.yaml").write_text(yaml.safe_dump({**yaml.safe_load(Path(data).read_text()), "path": str(folder)}))
    return str(folder / "data.yaml")


def test_another_task_is_upstreams(tiny, fit_args, tmp_path, heard) -> None:
    """A segmenter trains as upstream trains it, after one warning; what it leaves is resumed by upstream."""

    def stop(trainer):
        if trainer.epoch == 1:
            raise KeyboardInterrupt

    args = {**fit_args, "model": "yolo26n-seg.yaml", "data": polygons(tiny["some"], tmp_path / "polygons")}
    model = YOLO("yolo26n-seg.yaml")
    model.add_callback("on_train_epoch_start", stop)
    with pytest.raises(KeyboardInterrupt):
        model.train(capture_network=True, **args)
    (warning,) = warned(heard)
    assert "'segment'" in warning
    trainer = model.trainer
    assert type(trainer).__module__.startswith("ultralytics.") and "capture" not in vars(trainer.args)
    assert not (trainer.save_dir / "capture.json").exists()

    stock = ultralytics.YOLO(trainer.last)
    stock.train(resume=True)
    assert (stock.trainer.start_epoch, stock.trainer.epoch) == (1, 1) and stock.trainer.best.exists()


# Several processes ----------------------------------------------------------------------------------------------------

WORKER_REPORT = """
    import json
    from detgraph.trainer.fit.eligibility import loop_blocker
    found = {"type": type(trainer).__name__, "capture": trainer.capture.enabled, "blocker": loop_blocker(trainer)}
    found["args"] = sorted(vars(trainer.args))
    print("FOUND " + json.dumps(found))
"""


@pytest.mark.skipif(not importlib.util.find_spec("cloudpickle"), reason="upstream's workers need cloudpickle")
@pytest.mark.parametrize("subclass", [False, True])
def test_a_worker_can_be_built_from_our_trainer(subclass, fit_args) -> None:
    """The script upstream starts once per GPU: it loads, knows every key, and would run upstream's own loop."""
    from ultralytics.utils.dist import generate_ddp_file

    trainer_class = with_overrides(LightningDetectionTrainer) if subclass else LightningDetectionTrainer
    trainer = trainer_class(overrides={**fit_args, "capture_network": True})
    stock = DetectionTrainer(overrides=fit_args)
    script = Path(generate_ddp_file(trainer))
    body = script.read_text()
    try:
        assert body.rstrip().endswith("trainer.train()")
        script.write_text(body.replace("    trainer.train()\n", WORKER_REPORT))
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    finally:
        script.unlink()
        script.with_suffix(".pt").unlink()
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["type"] == trainer_class.__name__ and not found["capture"]
    assert "several GPUs" in found["blocker"] and found["args"] == sorted(vars(stock.args))


def test_several_gpus_say_once_that_nothing_is_replayed(fit_args, heard, monkeypatch) -> None:
    """The processes of a distributed fit run upstream's loop; the one that was asked for the capture has to say so."""
    launched = []
    command = [sys.executable, "-c", "pass"]
    monkeypatch.setattr(
        ultralytics.engine.trainer, "generate_ddp_command", lambda trainer: (launched.append(trainer) or command, None)
    )
    for asked in (True, False):
        heard.clear()
        trainer = LightningDetectionTrainer(overrides={**fit_args, "capture_network": asked})
        trainer.ddp, trainer.world_size = True, 2
        trainer.train()
        assert launched.pop() is trainer
        assert len(warned(heard)) == asked
        assert not asked or "several GPUs" in warned(heard)[0]


# Through our loop -----------------------------------------------------------------------------------------------------


def test_patched_upstream_trains_by_our_loop(patched, fit_args, heard) -> None:
    """A script that keeps `from ultralytics import YOLO`: same result, twice with one object, callbacks as ever."""

    def note(events, event, trainer):
        events.append((event, getattr(trainer, "epoch", None)))

    results = {}
    for kind in ("ours", "stock"):
        model, events = ultralytics.YOLO(fit_args["model"]), []
        for event in callbacks.default_callbacks:
            model.add_callback(event, partial(note, events, event))
        more = {"trainer": DetectionTrainer} if kind == "stock" else {"capture_network": True}
        metrics = [model.train(**{**fit_args, "epochs": 1}, **more).results_dict for _ in range(2)]
        expected = DetectionTrainer if kind == "stock" else LightningDetectionTrainer
        assert type(model.trainer) is expected
        results[kind] = metrics, events, weights(model.trainer.best), weights(model.trainer.last)
    assert results["stock"] == results["ours"]
    assert ("on_fit_epoch_end", 1) in events and ("teardown", 0) in events  # the final evaluation counts as one more
    assert len(warned(heard)) == 2


def with_overrides(base: type) -> type:
    """Return a subclass as users write them, on upstream's trainer or on ours: data, step and bookkeeping changed."""

    class Mine(base):
        steps = 0

        def preprocess_batch(self, batch):
            batch = super().preprocess_batch(batch)
            batch["img"] = (batch["img"] * 0.5 + 0.25).clamp(0, 1)
            return batch

        def optimizer_step(self):
            self.steps += 1
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.ema.update(self.model)

        def build_optimizer(self, model, *args, **kwargs):
            return torch.optim.SGD([{"params": list(model.parameters()), "param_group": "weight"}], lr=0.02)

        def label_loss_items(self, loss_items=None, prefix="train"):
            return super().label_loss_items(loss_items, f"my_{prefix}")

        def validate(self):
            metrics, fitness = super().validate()
            return metrics, fitness + self.steps

    return Mine


def test_a_subclass_keeps_its_overrides(fit_args) -> None:
    stock = fitted(with_overrides(DetectionTrainer), fit_args)
    plain = fitted(DetectionTrainer, fit_args)
    ours = fitted(with_overrides(Replaying), fit_args, capture_network=True)
    assert ours.capture_report.replayed > 0 and ours.capture_report.blocked is None
    assert ours.steps == stock.steps > 0
    digests = fit_digests(stock)
    assert digests == fit_digests(ours)
    assert digests["parameters"] != fit_digests(plain)["parameters"], "the overrides change nothing"
    assert "my_train/box_loss" in ours.csv.read_text()
    tables = [[row.split(",")[2:] for row in fit.csv.read_text().splitlines()] for fit in (stock, ours)]
    assert tables[0] == tables[1]


def test_a_subclass_with_a_loop_of_its_own_is_told_so(fit_args, heard) -> None:
    """It keeps its loop. Asked for the capture, which that loop knows nothing about, it says so once."""

    class OwnLoop(LightningDetectionTrainer):
        def _do_train(self):
            self._setup_train()
            self.ran = True

    trainer = fitted(OwnLoop, fit_args)
    assert trainer.ran and not warned(heard)
    trainer = fitted(OwnLoop, fit_args, capture_network=True)
    assert trainer.ran
    (warning,) = warned(heard)
    assert "a loop of its own" in warning


@pytest.mark.parametrize("kind", ["patched", "ours"])
def test_several_data_sets_and_no_trainer_train_what_stock_trains(kind, tiny, fit_args, heard, request) -> None:
    """Upstream hands a half-precision copy of the weights to processes of its own; what a fit learns depends on it."""
    args = {**fit_args, "data": [tiny["some"], tiny["other"]], "name": None, "epochs": 1, "val": False}
    del args["pretrained"]
    found = {}
    for run in ("stock", kind):
        if run == "patched":
            request.getfixturevalue("patched")
        torch.manual_seed(0)
        model = (YOLO if run == "ours" else ultralytics.YOLO)(args["model"])
        more = {} if run == "stock" else {"capture_network": True}
        model.train(**{**args, "project": f"{args['project']}/{run}"}, **more)
        found[run] = [weights(one.last) for one in model.trainer.trainers]
    assert len(found["stock"]) == 2 and found["stock"] == found[kind]
    assert len(warned(heard)) == 1 and "data=" in warned(heard)[0]
