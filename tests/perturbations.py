"""What a parity case does to a fit besides its arguments: the same in every arm, without knowing which arm it is.

Each function takes the case's arguments and a `Perturb`; it may add callbacks, replace something of torch or upstream
for the length of the fit, or touch the trainer. No detgraph, no lightning in here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Perturb:
    """Callbacks and clean-ups of one case."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable]] = {}
        self.stack = contextlib.ExitStack()
        self.on_trainer: list[Callable] = []

    def on(self, event: str, function: Callable) -> None:
        self.callbacks.setdefault(event, []).append(function)

    def replace(self, owner: object, name: str, value: object) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self.stack.callback(setattr, owner, name, original)

    def attach(self, trainer) -> None:
        for function in self.on_trainer:
            function(trainer)


@contextlib.contextmanager
def active(wanted: list) -> Iterator[Perturb]:
    perturb = Perturb()
    with perturb.stack:
        for name, arguments in wanted:
            globals()[name](perturb, **arguments)
        yield perturb


def workers(perturb: Perturb, count: int) -> None:
    """Loader workers on a CPU, where upstream sets none."""
    perturb.on("on_pretrain_routine_start", lambda trainer: setattr(trainer.args, "workers", count))


def scaler(perturb: Perturb, scale: float) -> None:
    """A gradient scaler on the CPU; a scale beyond the range of floats overflows until it has halved enough."""
    import torch

    def install(trainer):
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)

    perturb.on("on_pretrain_routine_end", install)


def fused_adamw(perturb: Perturb) -> None:
    """The fused optimizer that upstream uses on CUDA only."""
    import torch

    def install(trainer):
        keep = ("params", "lr", "betas", "weight_decay", "eps", "param_group")
        groups = [{k: v for k, v in g.items() if k in keep} for g in trainer.optimizer.param_groups]
        trainer.optimizer = torch.optim.AdamW(groups, fused=True)
        trainer._setup_scheduler()
        trainer.scheduler.last_epoch = trainer.start_epoch - 1

    perturb.on("on_pretrain_routine_end", install)


def nan_loss(perturb: Perturb, epochs: list[int]) -> None:
    """The loss of the last batch of an epoch reads as NaN, once for each time the epoch is named."""
    left = list(epochs)

    def poison(trainer):
        if trainer.epoch in left:
            left.remove(trainer.epoch)
            trainer.loss = trainer.loss.detach() * float("nan")

    perturb.on("on_train_epoch_end", poison)


def nan_weight(perturb: Perturb, epoch: int) -> None:
    """One weight turns NaN at the first batch of an epoch, once: outputs, gradients and buffers follow."""
    state = {"done": False}

    def poison(trainer):
        if trainer.epoch == epoch and not state["done"]:
            state["done"] = True
            trainer.model.model[2].cv1.conv.weight.data.view(-1)[0] = float("nan")

    perturb.on("on_train_batch_start", poison)


def smaller_batches(perturb: Perturb, epoch: int) -> None:
    """From an epoch on, another loader of the same pictures, with more and smaller batches."""

    def replace(trainer):
        if trainer.epoch == epoch:
            trainer.train_loader = trainer.get_dataloader(trainer.data["train"], batch_size=1, rank=-1, mode="train")

    perturb.on("on_train_epoch_start", replace)


def plain_loader(perturb: Perturb) -> None:
    """Training batches come from torch's own loader, which draws a seed each time it is iterated."""
    import torch
    from ultralytics.models.yolo.detect import DetectionTrainer

    original = DetectionTrainer.get_dataloader

    def get_dataloader(self, dataset_path, batch_size=16, rank=0, mode="train"):
        loader = original(self, dataset_path, batch_size, rank, mode)
        if mode != "train":
            return loader
        data = loader.dataset
        return torch.utils.data.DataLoader(data, batch_size, shuffle=True, collate_fn=data.collate_fn)

    perturb.replace(DetectionTrainer, "get_dataloader", get_dataloader)


def half_bright_loss(perturb: Perturb) -> None:
    """The model's loss is replaced on its class by one that sees darker pictures."""
    from ultralytics.nn.tasks import DetectionModel

    original = DetectionModel.loss

    def loss(self, batch, preds=None):
        if preds is None:
            batch = {**batch, "img": batch["img"] * 0.5}
        return original(self, batch, preds)

    perturb.replace(DetectionModel, "loss", loss)


def set_at_start(perturb: Perturb, name: str, value: int) -> None:
    """A callback sets an attribute of the trainer, or of its arguments, when the training starts."""

    def settle(trainer):
        setattr(trainer.args if hasattr(trainer.args, name) else trainer, name, value)

    perturb.on("on_train_start", settle)


def out_of_memory(perturb: Perturb, call: int) -> None:
    """The n-th loss runs out of memory as it is scaled, after the network's forward and before any backward."""
    from torch.amp import GradScaler

    original, count = GradScaler.scale, {"n": 0}

    def scale(self, outputs):
        count["n"] += 1
        if count["n"] == call:
            raise RuntimeError("CUDA out of memory. Injected by a test.")
        return original(self, outputs)

    perturb.replace(GradScaler, "scale", scale)


def clock(perturb: Perturb, seconds: float) -> None:
    """Time stands still but for so many seconds a batch: `time=` becomes a function of the steps."""
    state = {"now": time.time()}
    perturb.on("on_train_batch_start", lambda trainer: state.update(now=state["now"] + seconds))
    perturb.replace(time, "time", lambda: state["now"])


def no_improvement(perturb: Perturb) -> None:
    """The best fitness is already there, so patience runs out."""

    def settle(trainer):
        trainer.stopper.best_fitness, trainer.stopper.best_epoch = 1.0, 1

    perturb.on("on_train_start", settle)


def stop_at(perturb: Perturb, batch: int) -> None:
    """Somebody sets ``trainer.stop`` in a batch."""
    state = {"n": 0}

    def count(trainer):
        state["n"] += 1
        if state["n"] == batch:
            trainer.stop = True

    perturb.on("on_train_batch_end", count)


def raise_at(perturb: Perturb, event: str, number: int, error: str) -> None:
    """A callback raises at the n-th time of an event."""
    import builtins

    state = {"n": 0}

    def count(trainer):
        state["n"] += 1
        if state["n"] == number:
            raise getattr(builtins, error)("injected")

    perturb.on(event, count)
