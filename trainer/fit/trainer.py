"""Upstream's detection trainer with its loop run by Lightning.

Everything around the loop is upstream's and stays untouched: set-up, every optimizer step, validation, checkpoints,
the ends. What is here is what comes before, between and after epochs. An epoch is in `loop`, a step in `step`.
"""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path

from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import DEFAULT_CFG, LOGGER, RANK

from detgraph.cfg import (
    COMMAND_LINE_KEYS,
    REPORT_NAME,
    CaptureOptions,
    as_words,
    check_contradictions,
    remembered_options,
    split_options,
)
from detgraph.trainer.capture.report import CaptureReport, is_report
from detgraph.trainer.parts import spec

from .asked import chosen_options
from .assemble import assemble, build_part
from .eligibility import loop_blocker
from .epoch import EpochBatches, LoopState
from .step import TrainingStep
from .upstream import LOG_COMPLETED, LOG_OUT_OF_MEMORY, LOG_START, log_as_upstream

MAX_OUT_OF_MEMORY_RETRIES = 3
MEMORY_ERRORS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR", "unable to find an engine")


class BatchTooLarge(Exception):
    """Leaves a Lightning fit when the device ran out of memory and upstream's rule allows a smaller batch."""

    def __init__(self, out_of_memory: bool) -> None:
        super().__init__()
        self.out_of_memory = out_of_memory


class LightningDetectionTrainer(DetectionTrainer):
    """``DetectionTrainer`` whose loop runs under Lightning, with parts of a step replayed where that is asked for.

    Takes upstream's arguments, and ours among the overrides: our keys (as on the command line) or
    ``capture_options`` (a ``CaptureOptions``). Ours are taken out before upstream sees them, so ``args.yaml`` and
    checkpoints stay stock. Subclasses may override whatever upstream's trainer allows; one that overrides
    ``_do_train`` keeps its own loop.

    Attributes:
        capture: the options in force.
        capture_report: what the fit replayed and why not (docs/report.md); None before the fit has started.
        recorder: an object with the recorder protocol to use instead of the device's own (tests).

    Raises:
        CaptureOptionError: a bad value or a contradiction, before a run folder exists.
    """

    recorder = None

    def __init__(self, cfg=DEFAULT_CFG, overrides: dict | None = None, _callbacks: dict | None = None) -> None:
        ours, overrides = split_options(overrides or {}, known=vars(DEFAULT_CFG))
        given = chosen_options(ours, cfg)
        check_contradictions(given, overrides)
        super().__init__(cfg, overrides, _callbacks)
        if given is None and self.resume and RANK == -1:  # the processes of a distributed fit are not told
            given = remembered_options(Path(self.args.resume).parent.parent)
        self.capture = given or CaptureOptions()
        check_contradictions(self.capture, vars(self.args))
        self.capture_report: CaptureReport | None = None
        self.step: TrainingStep | None = None
        self._told_unwritten = False

    def train(self) -> None:
        """Train as upstream does, and say so where our loop has no part in it: other processes, a subclass's loop."""
        if self.ddp:
            self.capture_report = CaptureReport(self.capture)
            self._say_not_in_force(loop_blocker(self))
        super().train()
        if self.ddp:
            self._close_report()
        elif self.capture_report is None and self.capture.enabled:
            self.capture_report = CaptureReport(self.capture)
            self._say_not_in_force(f"{type(self).__qualname__} trains with a loop of its own")
            self._close_report()

    def _do_train(self) -> None:
        """Run the fit: our loop, or upstream's own with one warning where ours may not stand in for it."""
        self.capture_report = CaptureReport(self.capture)
        self._write_report()  # a fit that is killed remembers its options
        if blocker := loop_blocker(self) or self._lightning_blocker():
            self._say_not_in_force(blocker)
            try:
                return super()._do_train()
            finally:
                self._close_report()
        from . import loop  # noqa: F401  it needs Lightning, and is imported before the clock starts, as that is

        self._setup_train()
        self._run_loop(self._begin())
        return None

    def _lightning_blocker(self) -> str | None:
        """Return why the installed Lightning cannot run our loop, or None.

        Imports it, which takes seconds, and `results.csv` and `time=` must not count them: before the clock starts.
        """
        try:
            from .under_lightning import lightning_blocker
        except ImportError as error:
            return f"Lightning cannot be imported ({error}), so upstream's own loop runs"
        return lightning_blocker(self.device)

    def _begin(self) -> LoopState:
        """What upstream does between set-up and the first epoch."""
        batches = len(self.train_loader)
        warmup, accumulate = self._get_warmup_iterations(batches), self.accumulate
        self.epoch_time = None
        self.epoch_time_start = self.train_time_start = time.time()
        self.run_callbacks("on_train_start")
        log_as_upstream(LOG_START, self)
        if self.args.close_mosaic:  # plot the first batches without mosaic, too
            first = (self.epochs - self.args.close_mosaic) * batches
            self.plot_idx.extend(range(first, first + 3))
        state = LoopState(  # the callback may have set another epoch or close_mosaic; the rest upstream reads before it
            epoch=self.start_epoch,
            batches=batches,
            warmup=warmup,
            accumulate=accumulate,
            mosaic_closed=not self.args.close_mosaic,
        )
        self.optimizer.zero_grad()
        self._oom_retries = 0
        return state

    def _run_loop(self, state: LoopState) -> None:
        """Run Lightning fits until upstream's end, each after the first with a smaller batch; then upstream's ends."""
        from .loop import DetectionModule, RecordingEnds
        from .under_lightning import fit

        self.loop_state = state
        if self.capture.enabled:
            self.capture_report.start(self.device)
        try:
            while True:
                self.step = assemble(self, self._refused)
                batches = EpochBatches(self)
                try:
                    with self.step.in_force():
                        fit(DetectionModule(self, state, batches), batches, self.device, [RecordingEnds(self)])
                    break
                except BatchTooLarge as error:
                    out_of_memory = error.out_of_memory
                finally:
                    batches.finish(early=True)  # after an error, the bar ends before the message and not after it
                self._shrink_batch(state, out_of_memory)
        except KeyboardInterrupt as interrupt:
            self._say_how_to_resume(interrupt)
            raise
        finally:
            try:
                self.drop_recordings()
            finally:
                self._close_report()
        seconds = time.time() - self.train_time_start
        log_as_upstream(LOG_COMPLETED, self, epoch=state.epoch, seconds=seconds)
        self.final_eval()
        if self.args.plots:
            self.plot_metrics()
        self.run_callbacks("on_train_end")
        self._clear_memory()
        for loader in (self.train_loader, self.test_loader):
            if hasattr(loader, "close"):
                loader.close()

    def follow_model(self) -> None:
        """Go on with the model that somebody has put in the place of the fit's: a pruned one, a copy."""
        for name in ("network", "objective"):
            part = self.step.parts[name]
            if part.recorded:
                part.holder.report.retire("trainer.model was replaced")
            part.drop()
            self.step.parts[name] = build_part(self, spec(name), self._refused)

    def drop_recordings(self) -> None:
        """Give up what is recorded, if anything. May be called again."""
        if self.step is not None:
            self.step.drop()

    def batch_too_large(self, error: RuntimeError) -> BatchTooLarge | None:
        """Return the request for a smaller batch that upstream's rule allows for ``error``, or None to re-raise it."""
        text = str(error)
        out_of_memory = "out of memory" in text.lower()
        if not out_of_memory and not any(known in text for known in MEMORY_ERRORS):
            return None
        if self.loop_state.epoch > self.start_epoch or self._oom_retries >= MAX_OUT_OF_MEMORY_RETRIES:
            return None
        return BatchTooLarge(out_of_memory)

    def _shrink_batch(self, state: LoopState, out_of_memory: bool) -> None:
        """Halve the batch and rebuild the loaders as upstream does; optimizer state is kept."""
        self._oom_retries += 1
        old_batch = self.batch_size
        self.args.batch = self.batch_size = max(self.batch_size // 2, 1)
        error = f"{self.device.type.upper()} out of memory" if out_of_memory else "CUDA backend memory error"
        log_as_upstream(LOG_OUT_OF_MEMORY, self, error=error, old_batch=old_batch)
        self.loss = self.loss_items = self.tloss = None
        if hasattr(self.train_loader, "close"):
            self.train_loader.close()
        self._clear_memory()
        self._build_train_pipeline()
        self.validator.dataloader = self.test_loader
        self.scheduler.last_epoch = self.start_epoch - 1
        self.optimizer.zero_grad()
        state.batches = len(self.train_loader)
        state.warmup = self._get_warmup_iterations(state.batches)
        state.accumulate = self.accumulate
        state.mosaic_closed = not self.args.close_mosaic  # the rebuilt loader has it open again
        state.last_opt_step = -1

    def progress_string(self) -> str:
        """Upstream's header, with our column when the network's capture was asked for and this loop runs."""
        ours = f"{'Replayed':>11}" if self.step is not None and self.capture.network else ""
        return super().progress_string() + ours

    def _refused(self, key: str, blocker: str) -> None:
        self._say_not_in_force(blocker, key)

    def _say_not_in_force(self, blocker: str, key: str | None = None) -> None:
        """Note and say why what ``key`` asks for is not done; without a key, why nothing that was asked for is."""
        keys = [key] if key else COMMAND_LINE_KEYS
        known = {self.capture_report.counts(name).blocked for name in keys}
        for name in keys:
            self.capture_report.counts(name).block(blocker)
        asked = {name: value for name, value in self.capture.asked.items() if name in keys}
        if asked and known != {blocker}:  # a smaller batch starts anew, and would say it again
            what = "fit trains" if "capture_network" in asked else "optimizer steps"
            LOGGER.warning(f"{as_words(asked)} is not in force: {blocker}. The {what} eagerly, with the same result.")

    def _say_how_to_resume(self, interrupt: KeyboardInterrupt) -> None:
        """Name the command that goes on from this fit's last checkpoint, if it has written one: below the traceback."""
        if not (self.last.is_file() and (self.resume or self.last.stat().st_mtime >= self.train_time_start)):
            return
        text = f"To go on from here: {shlex.join(['yolo', 'train', 'resume', f'model={self.last}'])}"
        if hasattr(interrupt, "add_note"):
            interrupt.add_note(text)
        else:  # Python 3.10
            LOGGER.warning(text)

    def _close_report(self) -> None:
        """Log the summary and write the report; a fit that did not ask for the capture leaves neither."""
        with suppress(RuntimeError):  # of a device that answers no more: the error that says so is on its way
            self.capture_report.stop()
        if self.capture.enabled:
            for line in self.capture_report.summary():
                LOGGER.info(line)
        self._write_report()

    def _write_report(self) -> None:
        """Write ``capture.json``, which a resumed fit takes its options from.

        A resumed fit that was told to leave the capture out replaces the file, too: it would answer for it later.
        Whatever keeps it from being written is one warning, and ends no fit.
        """
        file = self.save_dir / REPORT_NAME
        try:
            if RANK in {-1, 0} and self.save_dir.exists() and (self.capture.enabled or is_report(file)):
                self.capture_report.write(file)
        except Exception as error:
            if not self._told_unwritten:
                self._told_unwritten = True
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                LOGGER.warning(
                    f"{file} was not written: {why}. The fit is as good without it: its summary is in the log, and to "
                    "resume it, give capture_network=True or False again."
                )
