"""The rows of table A that need a whole fit: upstream's trainer, its data, and our loop in this process."""

from __future__ import annotations

import json
import weakref
from copy import deepcopy

import pytest
import torch
import yaml
from ultralytics.models.yolo.detect import DetectionTrainer

import perturbations
import protection_off as off
from arm import Log, Observer
from detgraph.cfg import CaptureOptionError
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture.reasons import OTHER_SHAPE, RECORDING
from detgraph.trainer.golden import digests
from emulator import EmulatingRecorder
from recorders import refusing
from steps import TINY

ARGS = {
    "imgsz": 64, "batch": 2, "epochs": 2, "optimizer": "MuSGD", "seed": 0,
    "deterministic": True, "workers": 0, "plots": False, "warmup_epochs": 0, "nbs": 2, "pretrained": False,
    "device": "cpu", "close_mosaic": 0, "val": False, "save": False,
}  # fmt: skip


TRAINERS = (DetectionTrainer, LightningDetectionTrainer)


@pytest.fixture(scope="module")
def data(tmp_path_factory, make_dataset) -> dict[int, str]:
    """Return data sets by their number of training pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    return {count: str(make_dataset(folder / str(count), count, 2)) for count in (6, 8)}


class Result:
    """One fit: its trainer, what the observer saw, what the logger said, and the error that ended it."""

    def __init__(self, trainer, observer: Observer, log: Log, error: BaseException | None) -> None:
        self.trainer, self.observer, self.log, self.error = trainer, observer, log.lines, error
        self.report = getattr(trainer, "capture_report", None)
        self.digests = digests.fit_digests(trainer) if trainer.optimizer is not None else {}

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.log if "WARNING" in line and "capture_network" in line]

    @property
    def summaries(self) -> list[str]:
        return [line for line in self.log if line.startswith("capture_network:") and "steps replayed" in line]

    def stored(self) -> dict:
        return json.loads((self.trainer.save_dir / "capture.json").read_text())

    def assert_same(self, other: Result) -> None:
        for part in ("losses", "gradients", "images"):
            assert getattr(self.observer, part) == getattr(other.observer, part), part
        assert self.digests == other.digests


@pytest.fixture
def fit(data, tmp_path, monkeypatch):
    """Return a function that runs a fit; replaying unless told otherwise, and never raising an upstream error."""
    model = tmp_path / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")

    def run(
        trainer=LightningDetectionTrainer, capture=True, recorder=EmulatingRecorder, pictures=6, perturb=(), **args
    ):
        from ultralytics.utils import LOGGER

        args = {**ARGS, "model": str(model), "data": data[pictures], "project": str(tmp_path / "runs"), **args}
        log, error = Log(), None
        LOGGER.addHandler(log)
        try:
            with perturbations.active(perturb) as active:
                if issubclass(trainer, LightningDetectionTrainer):
                    args["capture_network"] = capture
                trainer = trainer(overrides=args)
                trainer.recorder = recorder() if recorder else None
                for event, functions in active.callbacks.items():
                    for function in functions:
                        trainer.add_callback(event, function)
                observer = Observer(trainer, digests)
                try:
                    trainer.train()
                except (RuntimeError, ValueError) as caught:
                    error = caught.with_traceback(None)
        finally:
            LOGGER.removeHandler(log)
        return Result(trainer, observer, log, error)

    return run


# A05a, A06: it is in force, or one says why not -------------------------------------------------------------------


class Brighter(LightningDetectionTrainer):
    def preprocess_batch(self, batch):
        batch = super().preprocess_batch(batch)
        batch["img"] = batch["img"] * 0.5 + 0.25
        return batch


class OwnLoop(LightningDetectionTrainer):
    def _do_train(self):
        return DetectionTrainer._do_train(self)


def test_a05_a_subclass_with_its_own_batches_replays(fit):
    eager, replaying = fit(Brighter, capture=False), fit(Brighter)
    replaying.assert_same(eager)
    assert replaying.report.replayed == 5 and replaying.warnings == []


def test_a05_a_subclass_with_its_own_loop_is_told(fit):
    result = fit(OwnLoop)
    assert result.error is None and len(result.observer.losses) == 6
    assert len(result.warnings) == 1 and "OwnLoop" in result.warnings[0]
    assert "OwnLoop" in result.stored()["blocked"]


class Exchanges:
    """Puts a copy of the model in its place after the third step, as pruning does, with an optimizer of its own."""

    def optimizer_step(self):
        super().optimizer_step()
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            self.model = deepcopy(self.model)
            self.optimizer = self.build_optimizer(self.model, "MuSGD", lr=0.01, decay=5e-4)
            self._setup_scheduler()


class StockThatExchanges(Exchanges, DetectionTrainer):
    pass


class OursThatExchanges(Exchanges, LightningDetectionTrainer):
    pass


def test_a_model_put_in_the_fits_place_is_the_one_that_trains(fit):
    stock, eager, replaying = fit(StockThatExchanges), fit(OursThatExchanges, capture=False), fit(OursThatExchanges)
    eager.assert_same(stock)
    replaying.assert_same(stock)
    assert replaying.report.recordings == 2 and replaying.report.replayed == 4
    assert [one["reason"] for one in replaying.report.retirements] == ["trainer.model was replaced"]

    all_parts = fit(OursThatExchanges, capture_objective=True)
    all_parts.assert_same(stock)
    objective = all_parts.report.objective
    assert [one["reason"] for one in objective.retirements] == ["trainer.model was replaced"]
    assert objective.blocked is None and objective.replayed > 0


CASES = {
    "good": ({}, 0, 5),
    "cpu": ({"recorder": None}, 1, 0),
    "failing recorder": ({"recorder": lambda: refusing(RuntimeError("this device records nothing"))}, 1, 0),
    "another size each step": ({"multi_scale": 0.5, "imgsz": 96}, 1, None),
}
REASONS = {
    "cpu": "replay needs a CUDA device",
    "failing recorder": "recording failed: this device records nothing",
    "another size each step": OTHER_SHAPE,
    "good": RECORDING,
}


@pytest.mark.parametrize("case", CASES)
def test_a06_one_summary_and_one_reason(case, fit):
    args, warnings, replayed = CASES[case]
    result = fit(**args)
    assert len(result.summaries) == 1 and len(result.warnings) == warnings, result.log
    report = result.stored()
    assert report["steps"] == 6 == report["replayed"] + sum(report["eager"].values())
    assert any(reason.startswith(REASONS[case]) for reason in report["eager"]), report["eager"]
    assert f"{report['replayed']} of 6 steps replayed" in result.summaries[0]
    if replayed is not None:
        assert report["replayed"] == replayed
    if case == "good":  # a step later it is all replays
        assert report["recordings"] == 1 and f"1 ({RECORDING})" in result.summaries[0]


def test_a06_a_contradiction_is_refused_before_any_work(fit, tmp_path):
    with pytest.raises(CaptureOptionError, match="compile"):
        fit(compile=True)
    assert not (tmp_path / "runs").exists()


def test_a06_the_warning_is_what_tells(fit, monkeypatch):
    """Protection off: without it a fit that asked in vain looks like one that did not ask."""
    monkeypatch.setattr(LightningDetectionTrainer, "_say_not_in_force", lambda self, blocker, key=None: None)
    assert fit(recorder=None).warnings == []


# A11, A13: hooks on the model, and upstream's own refusal ---------------------------------------------------------


class Counting:
    """A hook that notes what the model was called with in training. Importable, since checkpoints keep hooks."""

    def __init__(self) -> None:
        self.calls: list = []

    def __call__(self, module, args, output) -> None:
        if module.training:
            self.calls.append(sorted(args[0]) if isinstance(args[0], dict) else tuple(args[0].shape))

    def __reduce__(self):
        return Counting, ()


def test_a11_hooks_on_the_model_itself_see_what_upstream_shows_them(fit):
    hooks = []

    def hooked(trainer: type) -> type:
        class Hooked(trainer):
            def set_model_attributes(self):
                super().set_model_attributes()
                hooks.append(Counting())
                self.model.register_forward_hook(hooks[-1])

        return Hooked

    stock, ours = fit(hooked(DetectionTrainer)), fit(hooked(LightningDetectionTrainer))
    assert ours.error is None
    ours.assert_same(stock)
    assert hooks[0].calls == hooks[1].calls and len(hooks[0].calls) >= 6
    assert ours.report.eager == {"a hook is registered on the model itself": 6} and len(ours.warnings) == 1


def test_a13_upstreams_own_refusal_stays(fit):
    stock, ours = (fit(trainer, model="yolo26n.yaml", imgsz=32, batch=1) for trainer in TRAINERS)
    assert isinstance(stock.error, ValueError) and str(ours.error) == str(stock.error)


# A14: out of memory in the first epoch ----------------------------------------------------------------------------

OUT_OF_MEMORY = {"pictures": 8, "batch": 4, "perturb": [["out_of_memory", {"call": 2}]]}


class Watching(LightningDetectionTrainer):
    """Notes, when upstream builds the smaller loader, whether anything of the old recording is left."""

    def _build_train_pipeline(self):
        if getattr(self, "loop_state", None) is not None and self.capture.enabled:
            self.left = self.watched() is not None
        super()._build_train_pipeline()

    def optimizer_step(self):
        super().optimizer_step()
        recording = self.step.network.recording
        if recording is not None and not hasattr(self, "watched"):
            self.watched = weakref.ref(recording)


def test_a14_the_old_recording_is_gone_before_the_smaller_loader_is_built(fit, monkeypatch):
    eager, replaying = fit(Watching, capture=False, **OUT_OF_MEMORY), fit(Watching, **OUT_OF_MEMORY)
    replaying.assert_same(eager)
    assert replaying.trainer.left is False and replaying.trainer.batch_size == 2
    assert replaying.report.recordings == 2 and replaying.report.replayed == 8

    off.no_drop(monkeypatch)
    assert fit(Watching, **OUT_OF_MEMORY).trainer.left


def no_memory() -> EmulatingRecorder:
    return refusing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))


def test_a14_no_memory_for_the_recording_means_an_eager_fit_of_the_same_batch(fit):
    eager, replaying = fit(capture=False, batch=4), fit(recorder=no_memory, batch=4)
    replaying.assert_same(eager)
    assert replaying.trainer.batch_size == 4 and len(replaying.warnings) == 1
    assert "out of memory" in replaying.report.blocked


# A17: recovery from NaN -------------------------------------------------------------------------------------------

NAN = {
    "loss": {"perturb": [["nan_loss", {"epochs": [1]}]]},
    "weight": {"perturb": [["nan_weight", {"epoch": 1}]]},
}


@pytest.mark.parametrize("kind", NAN)
def test_a17_a_redone_epoch_starts_without_nan(kind, fit):
    args = {"save": True, **NAN[kind]}
    eager, replaying = fit(capture=False, **args), fit(**args)
    replaying.assert_same(eager)
    assert eager.error is None and replaying.error is None
    told = [[line for line in result.log if "recover" in line.lower()] for result in (eager, replaying)]
    assert told[0] and told[0] == told[1]
    assert len(replaying.observer.losses) == 9 and replaying.report.replayed >= 6
    assert all(torch.isfinite(parameter).all() for parameter in replaying.trainer.model.parameters())
