"""What a callback puts in the place of a part of the trainer trains here as it does in upstream's loop.

The loop asks a loader, an optimizer, a scheduler and so on for nothing that upstream does not ask for. Each stand-in
below has exactly what upstream's loop uses of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import yaml
from ultralytics.models.yolo.detect import DetectionTrainer

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.golden.digests import fit_digests
from detgraph.trainer.parts.network import OTHER_SHAPE
from emulator import EmulatingRecorder
from steps import TINY

ARGS = {
    "imgsz": 64, "batch": 2, "epochs": 2, "optimizer": "SGD", "seed": 0, "workers": 0, "plots": False, "nbs": 2,
    "warmup_epochs": 1, "pretrained": False, "device": "cpu", "close_mosaic": 1,
}  # fmt: skip


class Bare:
    """Hands out the attributes that are named, and has no other."""

    def __init__(self, inner: object, *names: str) -> None:
        for name in names:
            setattr(self, name, getattr(inner, name))


class BareLoader(Bare):
    """A loader that was put in place after upstream has asked for its length: data set, workers, iteration, reset."""

    def __init__(self, inner) -> None:
        super().__init__(inner, "dataset", "num_workers", "reset")
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class SizedLoader(BareLoader):
    def __len__(self) -> int:
        return len(self.inner)


class Misjudging(BareLoader):
    """Yields more than it says, as one that pads does."""

    def __len__(self) -> int:
        return len(self.inner) - 1


class Generating(BareLoader):
    """Yields from a generator, whose batches end without notice: one less than there were."""

    def __iter__(self):
        batches = list(self.inner)
        yield from batches[:-1]


class Single(BareLoader):
    """Yields batches of one picture, which nobody can know before."""

    def __iter__(self):
        for batch in self.inner:
            first = batch["batch_idx"] == 0
            yield {
                name: value[:1] if name in ("img", "im_file", "ori_shape", "resized_shape") else value[first]
                for name, value in batch.items()
                if name in ("img", "cls", "bboxes", "batch_idx", "im_file", "ori_shape", "resized_shape")
            }


class BareOptimizer(Bare):
    """An optimizer without ``defaults``, ``state`` or a base class, that averages as schedule-free ones do."""

    def __init__(self, inner) -> None:
        super().__init__(inner, "param_groups", "state_dict", "load_state_dict")
        self.inner = inner
        self.steps = 0

    def step(self, *args, **kwargs):
        self.steps += 1
        return self.inner.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        self.inner.zero_grad(*args, **kwargs)


class Elsewhere(BareOptimizer):
    """Keeps its state in an unusual place; whoever moves it finds an object that is no tensor."""

    class State(dict):
        def items(self):
            raise AssertionError("somebody looked into the optimizer's state")

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.defaults, self.state = {}, self.State()


class BareScheduler(Bare):
    """No ``optimizer``, no ``state_dict`` beyond what a checkpoint takes."""

    def __init__(self, inner) -> None:
        self.inner = inner

    last_epoch = property(lambda self: self.inner.last_epoch)
    state_dict = property(lambda self: self.inner.state_dict)

    def step(self):
        self.inner.step()


class BareScaler:
    """A scaler that scales by a constant."""

    def scale(self, loss):
        return loss * 8.0

    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(8.0)

    def step(self, optimizer):
        optimizer.step()

    def update(self): ...

    def state_dict(self):
        return {}


class BareEMA(Bare):
    def __init__(self, inner) -> None:
        super().__init__(inner, "ema", "update", "update_attr")
        self.inner = inner

    updates = property(lambda self: self.inner.updates)
    enabled = property(lambda self: self.inner.enabled)


class BareValidator(Bare):
    """Called with the trainer; upstream puts an argument there after the loop, and reads none before."""

    def __init__(self, inner) -> None:
        super().__init__(inner, "metrics")
        self.inner = inner
        self.args = SimpleNamespace()

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class LossesAsNumbers(BareValidator):
    loss = {"box_loss": 1.0, "note": "none"}


PARTS: dict[str, tuple[str, Callable[[object], object]]] = {
    "loader without length": ("train_loader", BareLoader),
    "loader without batch size": ("train_loader", SizedLoader),
    "loader that yields more than it says": ("train_loader", Misjudging),
    "loader that ends without notice": ("train_loader", Generating),
    "loader of other batches": ("train_loader", Single),
    "optimizer without defaults": ("optimizer", BareOptimizer),
    "optimizer with a state of its own": ("optimizer", Elsewhere),
    "scheduler": ("scheduler", BareScheduler),
    "scaler": ("scaler", lambda inner: BareScaler()),
    "ema": ("ema", BareEMA),
    "validator": ("validator", BareValidator),
    "validator with other losses": ("validator", LossesAsNumbers),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory, make_dataset) -> str:
    return str(make_dataset(tmp_path_factory.mktemp("pictures"), 6, 2))


@pytest.fixture
def fit(data, tmp_path, monkeypatch):
    """Return a function that runs a fit with replaced parts: of upstream's loop, of ours, or replaying."""
    model = tmp_path / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY))
    monkeypatch.setenv("TQDM_DISABLE", "1")

    def run(kind: str, replace: Callable[[DetectionTrainer], None], event: str = "on_train_start", **args):
        args = {**ARGS, "model": str(model), "data": data, "project": str(tmp_path / kind), **args}
        stock = kind == "stock"
        trainer = (DetectionTrainer if stock else LightningDetectionTrainer)(
            overrides=args if stock else {**args, "capture_network": kind == "replay"}
        )
        trainer.recorder = EmulatingRecorder()
        trainer.add_callback(event, replace)
        losses: list[str] = []
        trainer.add_callback("on_train_batch_end", lambda t: losses.append(float(t.loss.detach()).hex()))
        trainer.train()
        optimizer = trainer.optimizer
        trainer.optimizer = getattr(optimizer, "inner", optimizer)  # for the digests, which look into its state
        trainer.scheduler = getattr(trainer.scheduler, "inner", trainer.scheduler)
        return trainer, losses, fit_digests(trainer)

    return run


@pytest.mark.parametrize("event", ["on_train_start", "on_train_epoch_end"])
@pytest.mark.parametrize("part", PARTS)
def test_a_replaced_part_trains_as_in_upstreams_loop(part, event, fit):
    name, make = PARTS[part]

    def replace(trainer):
        if event == "on_train_start" or trainer.epoch == 0:
            setattr(trainer, name, make(getattr(trainer, name)))

    found = {kind: fit(kind, replace, event) for kind in ("stock", "eager", "replay")}
    assert found["stock"][1] and all(found["stock"][1:] == found[kind][1:] for kind in ("eager", "replay"))
    trainer, losses, _ = found["replay"]
    report = trainer.capture_report
    assert report.steps == len(losses) == report.replayed + report.eager.total()
    if part == "loader of other batches":
        assert report.eager[OTHER_SHAPE] == (6 if event == "on_train_start" else 3)
    else:
        assert report.replayed == len(losses) - 1 and report.blocked is None


def test_all_of_them_at_once(fit):
    def replace(trainer):
        for part in ("loader without length", "optimizer without defaults", "scheduler", "scaler", "ema", "validator"):
            name, make = PARTS[part]
            setattr(trainer, name, make(getattr(trainer, name)))

    found = {kind: fit(kind, replace, nbs=4) for kind in ("stock", "replay")}
    assert found["stock"][1:] == found["replay"][1:]
    assert found["replay"][0].capture_report.replayed == 5


def test_lightning_gets_no_optimizer_of_the_fit(fit, monkeypatch):
    """It would move its state, wrap it in a class of its own, and keep it."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    seen = []
    wrap = LightningOptimizer.__init__
    monkeypatch.setattr(
        LightningOptimizer, "__init__", lambda self, optimizer: (seen.append(optimizer), wrap(self, optimizer))[1]
    )
    trainer, _, _ = fit("eager", lambda trainer: None)
    assert seen and not any(optimizer is trainer.optimizer or optimizer.param_groups for optimizer in seen)


@pytest.mark.parametrize("batch_size", [None, 0, "two", True])
def test_a_batch_size_that_says_nothing_is_the_one_that_was_asked_for(batch_size, fit):
    def replace(trainer):
        loader = SizedLoader(trainer.train_loader)
        loader.batch_size = batch_size
        trainer.train_loader = loader

    assert fit("replay", replace)[0].capture_report.replayed == 5


def test_a_data_set_that_knows_nothing(fit):
    """Upstream asks it for its length, once, for a line of the log."""

    class Pictures:
        rect = True

        def __len__(self) -> int:
            return 6

    def replace(trainer):
        loader = SizedLoader(trainer.train_loader)
        loader.dataset = Pictures()
        trainer.train_loader = loader

    found = {kind: fit(kind, replace, close_mosaic=0) for kind in ("stock", "replay")}
    assert found["stock"][1:] == found["replay"][1:]
    assert found["replay"][0].capture_report.replayed == 5
