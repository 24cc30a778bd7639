"""Upstream's loop, one Lightning hook at a time. Imported when a fit starts, since it needs Lightning."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from ultralytics.engine import trainer as engine
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import unwrap_model

from detgraph.trainer.capture.lending import tensor_attributes

from .eligibility import split_blocker
from .loggers import EpochScalars, log
from .under_lightning import LoopError, NoOptimizer, restore_signals, unwarned

if TYPE_CHECKING:
    from .trainer import EpochBatches, LightningDetectionTrainer, LoopState


def guarded(hook: Callable) -> Callable:
    """Keep a ``StopIteration`` out of Lightning's loop, which would take it for the end of the epoch."""

    @functools.wraps(hook)
    def run(self, *args, **kwargs):
        try:
            return hook(self, *args, **kwargs)
        except StopIteration as error:
            raise LoopError("StopIteration in a hook") from error

    return run


class RecordingEnds(pl.Callback):
    """Drops the recordings whenever a Lightning fit ends, in whatever way; none is alive when one starts."""

    def __init__(self, upstream: LightningDetectionTrainer) -> None:
        self.upstream = upstream

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        holders = self.upstream.network_step, self.upstream.orthogonalization
        assert not any(holder.recorded for holder in holders), "a recording outlived its fit"

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.upstream.drop_recordings()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.upstream.drop_recordings()


class DetectionModule(pl.LightningModule):
    """The fit of an upstream trainer as a Lightning module without weights of its own.

    The trainer is held as a plain attribute: Lightning sees no parameter, so it moves, counts and switches nothing.
    Every batch is one ``optimizer_step`` of Lightning's; whether upstream steps is upstream's accumulation window.
    """

    def __init__(self, upstream: LightningDetectionTrainer, state: LoopState, batches: EpochBatches) -> None:
        super().__init__()
        self.upstream = upstream
        self.state = state
        self.batches = batches
        self.batch: dict | None = None
        self.stopped_early = False
        self.timed_out = False
        self.signal_handlers: dict = {}
        self.scalars = EpochScalars(upstream)
        self.anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a plain attribute: torch would look for weights in it, at each of Lightning's some forty a batch."""
        object.__setattr__(self, name, value)

    # Lightning's own duties, each left to upstream --------------------------------------------------------------

    def configure_optimizers(self) -> NoOptimizer:
        return NoOptimizer()

    def transfer_batch_to_device(self, batch: dict, device: torch.device, dataloader_idx: int) -> dict:
        return batch

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: object) -> None:
        """Upstream clears gradients inside its own optimizer step."""

    def on_train_start(self) -> None:
        restore_signals(self.signal_handlers)  # Lightning has just installed its own
        torch.set_anomaly_enabled(*self.anomaly)  # and switched this off

    # One epoch --------------------------------------------------------------------------------------------------

    @guarded
    def on_train_epoch_start(self) -> None:
        t, state = self.upstream, self.state
        t.epoch = state.epoch
        t.run_callbacks("on_train_epoch_start")
        with unwarned():  # the order of scheduler and optimizer step is upstream's
            t.scheduler.step()
        t._model_train()
        first = enumerate(t.train_loader)  # as upstream does, twice an epoch: a loader may draw its seed at each
        if not state.mosaic_closed and state.epoch >= t.epochs - t.args.close_mosaic:
            state.mosaic_closed = True
            t._close_dataloader_mosaic()
            t.train_loader.reset()  # persistent workers hold a copy of the data set
        if t.loss_names:
            LOGGER.info(t.progress_string())
        self.batches.begin()
        del first
        t.tloss = None
        self.stopped_early = self.timed_out = False
        self.scalars.begin()

    @guarded
    def on_train_batch_start(self, batch: dict, batch_idx: int) -> None:
        t, state = self.upstream, self.state
        t.run_callbacks("on_train_batch_start")
        ni = batch_idx + state.batches * state.epoch
        if state.warmup and ni <= state.warmup:
            self._warm_up(ni)

    def _warm_up(self, ni: int) -> None:
        """Ramp accumulation, learning rates and momentum linearly over the warm-up, as upstream defines it."""
        t, ramp = self.upstream, [0, self.state.warmup]
        t.accumulate = max(1, int(np.interp(ni, ramp, [1, self.state.accumulate]).round()))
        for group in t.optimizer.param_groups:
            start = t.args.warmup_bias_lr if group.get("param_group") == "bias" else 0.0
            group["lr"] = float(np.interp(ni, ramp, [start, group["initial_lr"] * t.lf(self.state.epoch)]))
            if "momentum" in group:
                group["momentum"] = float(np.interp(ni, ramp, [t.args.warmup_momentum, t.args.momentum]))

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        t = self.upstream
        if t.network_step.model is not t.model:
            t.follow_model()
        with engine.autocast(torch.bfloat16 if t.args.amp == "bf16" else t.amp, device=t.device.type):
            batch = self.batch = t.preprocess_batch(batch)
            if blocker := split_blocker(t.model):
                loss, t.loss_items = t.network_step.whole(batch, blocker)
            else:
                predictions = t.network_step(batch["img"])
                loss, t.loss_items = unwrap_model(t.model).loss(batch, predictions)
            t.loss = loss.sum()
            if not t.loss_names:
                t.loss_names = tuple(t.loss_items)
                LOGGER.info(t.progress_string())
                t.metrics.update(dict.fromkeys(t.label_loss_items(prefix="val"), 0.0))
            t.tloss = (
                t.loss_items
                if t.tloss is None
                else {k: (t.tloss[k] * batch_idx + v) / (batch_idx + 1) for k, v in t.loss_items.items()}
            )
        return t.loss

    def backward(self, loss: Tensor) -> None:
        self.upstream.scaler.scale(loss).backward()
        self.upstream.network_step.after_backward()

    @guarded
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: object, closure: Callable) -> None:
        t, state = self.upstream, self.state
        try:
            closure()
        except RuntimeError as error:
            request = t.batch_too_large(error)
            if request is None:
                raise
            self.batch = None
            raise request from None
        state.micro_batches += 1
        ni = batch_idx + state.batches * state.epoch
        if ni - state.last_opt_step >= t.accumulate:
            with t.orthogonalization.step(t.optimizer):
                t.optimizer_step()
            state.last_opt_step = ni
            if t.args.time:
                t.stop = (time.time() - t.train_time_start) > t.args.time * 3600
                self.timed_out = t.stop

    @guarded
    def on_train_batch_end(self, outputs: object, batch: dict, batch_idx: int) -> None:
        t = self.upstream
        if not self.timed_out:  # upstream leaves the epoch at once when its time is up
            self._show_progress(batch_idx)
            t.run_callbacks("on_train_batch_end")
        if t.stop:
            self.stopped_early = self.trainer.should_stop = True

    def _show_progress(self, batch_idx: int) -> None:
        t, batch = self.upstream, self.batch
        columns = [f"{t.epoch + 1}/{t.epochs}", f"{t._get_memory():.3g}G"]
        numbers = [*t.tloss.values(), batch.get("cls", batch["img"]).shape[0], batch["img"].shape[-1]]
        line = "".join(f"{column:>11}" for column in columns) + "".join(f"{float(number):11.4g}" for number in numbers)
        if t.capture.network:
            line += f"{t.capture_report.share():>11.0%}"
        self.batches.bar.set_description(line)
        ni = batch_idx + self.state.batches * self.state.epoch
        if t.args.plots and ni in t.plot_idx:
            t.plot_training_samples(batch, ni)

    @guarded
    def on_train_epoch_end(self) -> None:
        t, state = self.upstream, self.state
        self.batches.finish(early=self.stopped_early)
        scalars = self.scalars.end()
        if not self.stopped_early:
            t._oom_retries = 0
        criterion = unwrap_model(t.model).criterion
        if hasattr(criterion, "update"):
            criterion.update()
        t.lr = {f"lr/pg{i}": group["lr"] for i, group in enumerate(t.optimizer.param_groups)}
        t.run_callbacks("on_train_epoch_end")
        log(t, scalars)
        t.ema.update_attr(t.model, include=["yaml", "nc", "args", "names", "stride", "class_weights"])

        final_epoch = state.epoch + 1 >= t.epochs
        if t.args.val or final_epoch or t.stopper.possible_stop or t.stop:
            self._clear_memory()
            with self._validation_memory(final_epoch):
                t.metrics, t.fitness = t.validate()
        if t._handle_nan_recovery(state.epoch):  # the same epoch again
            state.last_opt_step = -1
            t.optimizer.zero_grad()
            self.trainer.should_stop = False
            return
        t.nan_recovery_attempts = 0
        self._save(final_epoch)
        self._measure_epoch()
        t.run_callbacks("on_fit_epoch_end")
        self._clear_memory()
        self.trainer.should_stop = bool(t.stop)
        if not t.stop:
            state.epoch += 1

    def _validation_memory(self, final_epoch: bool) -> AbstractContextManager[None]:
        """Return the context that validation runs in, so that it does not reserve memory beside an idle recording.

        Threads that draw pictures read what they draw on a stream of their own, and later: nothing is lent then. The
        last validation needs no recording at all; should the epoch be repeated, another one is made.
        """
        t = self.upstream
        plots = getattr(getattr(t.validator, "args", None), "plots", True)  # somebody else's validator may have threads
        if final_epoch and not t.args.time:
            t.drop_recordings()
        elif not (plots and t.stopper.possible_stop):
            return t.network_step.lend("validation", self._survivors_of_validation)
        return nullcontext()

    def _survivors_of_validation(self) -> Iterator[Tensor]:
        """Yield what upstream's validation leaves on the device: anchors and objective of the EMA, its summed loss."""
        yield from tensor_attributes(self.upstream.ema.ema)
        loss = getattr(self.upstream.validator, "loss", None)
        yield from (value for value in (loss.values() if isinstance(loss, dict) else ()) if isinstance(value, Tensor))

    def _save(self, final_epoch: bool) -> None:
        t = self.upstream
        t.save_metrics(metrics={**t.label_loss_items(t.tloss), **t.metrics, **t.lr})
        t.stop |= t.stopper(self.state.epoch + 1, t.fitness) or final_epoch
        if t.args.time:
            t.stop |= (time.time() - t.train_time_start) > t.args.time * 3600
        if (t.args.save or final_epoch) and t.save_model():
            t.run_callbacks("on_model_save")

    def _measure_epoch(self) -> None:
        """Keep upstream's epoch times; with ``time=``, move the end to where the mean epoch puts it."""
        t, state, now = self.upstream, self.state, time.time()
        t.epoch_time = now - t.epoch_time_start
        t.epoch_time_start = now
        if t.args.time:
            mean = (now - t.train_time_start) / (state.epoch - t.start_epoch + 1)
            t.epochs = t.args.epochs = math.ceil(t.args.time * 3600 / mean)
            state.warmup = t._get_warmup_iterations(state.batches)
            t._setup_scheduler()
            t.scheduler.last_epoch = t.epoch
            t.stop |= state.epoch >= t.epochs

    def _clear_memory(self) -> None:
        self.upstream._clear_memory(None if self.upstream.device.type == "mps" else 0.5)
