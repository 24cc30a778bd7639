"""Running a fit under Lightning without letting Lightning, or the environment, steer it.

Upstream's trainer has set everything up by the time a fit starts: the device, the weights on it, the precision, the
data. Lightning contributes its loop and nothing else. Lightning is imported here, by the first fit that our loop runs,
because the import takes seconds: most of them for torchmetrics, which imports matplotlib, scipy and transformers where
they are installed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from .state import Generators

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Variables of these families would change what a Trainer is (defaults, cluster, ranks).
HOSTILE_PREFIXES = ("PL_", "SLURM_", "LSB_", "TORCHELASTIC_", "KUBERNETES_", "XRT_")
HOSTILE_NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Once its older package is imported, too, Lightning speaks under that one's name.
QUIET_LOGGERS = (
    "lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero",
    "pytorch_lightning", "pytorch_lightning.utilities.rank_zero",
)  # fmt: skip


class LoopError(Exception):
    """Carries an exception that Lightning would misread out of the fit, as its cause.

    It would end an epoch for a ``StopIteration``, and turn a ``KeyboardInterrupt`` into an exit, with a call that only
    the main thread may make.
    """


def _import_lightning() -> None:
    """Import Lightning and take back what that does to the process.

    The import replaces the formatter of warnings, adds filters, sets a variable that changes how torch looks for GPUs,
    and gives its loggers a level: one that the program had given them stays. It also imports whatever optional
    packages are there, and what those draw from the generators would change the fit, which is seeded by now.

    One of them, torch._dynamo, imports tabulate as the process exits, if it is installed. tabulate evaluates text, and
    then Python forgets that an interrupt ended the program: a shell would see status 1 and go on with its loop.
    Imported here, it does no harm.
    """
    generators = Generators.take()
    variables, format_warning = set(os.environ), warnings.formatwarning
    levels = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch  # noqa: F401

        with suppress(ImportError):
            import tabulate  # noqa: F401
    generators.restore()
    warnings.formatwarning = format_warning
    for name in set(os.environ) - variables:
        del os.environ[name]
    for name, level in levels.items():
        if level != logging.NOTSET:
            logging.getLogger(name).setLevel(level)


_import_lightning()  # before `module.py` does, which is imported next


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning silent inside; filters of warnings and log levels are afterwards as before."""
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def neutral_environment() -> Iterator[None]:
    """Hide the variables that would steer a trainer while it is built; a fit itself runs in the user's environment."""
    hidden = {k: os.environ.pop(k) for k in list(os.environ) if k.startswith(HOSTILE_PREFIXES) or k in HOSTILE_NAMES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def build_trainer(device: torch.device, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Return a Lightning trainer that runs batches on ``device`` and nothing else; build it inside the two contexts."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class UpstreamDevice(Accelerator):
        """The device that upstream has already chosen and prepared."""

        def setup_device(self, device: torch.device) -> None: ...

        def setup(self, trainer: pl.Trainer) -> None: ...

        def teardown(self) -> None: ...

        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [device])
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "upstream")

    class InPlaceStrategy(SingleDeviceStrategy):
        """Leaves model and optimizer where upstream put them, at the start and at the end."""

        def model_to_device(self) -> None: ...

        def teardown(self) -> None:
            self.optimizers = []  # the base class would move them, and the cuBLAS workspaces, off the device

    return pl.Trainer(
        strategy=InPlaceStrategy(device=device, accelerator=UpstreamDevice()),
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=-1,  # upstream's counter decides: a repeated epoch does not advance it, `time=` moves the end
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_autolog_hparams=False,
        use_distributed_sampler=False,
        inference_mode=False,
    )


@contextmanager
def own_signals() -> Iterator[dict]:
    """Give every signal handler back at the end; yields the handlers as they were (empty outside the main thread)."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield handlers
    finally:
        restore_signals(handlers)


def restore_signals(handlers: dict) -> None:
    """Install ``handlers`` again where they differ from the present ones."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def follow_length(trainer: pl.Trainer, batches: Sized) -> None:
    """Let the epoch that starts run to the present end of ``batches``; call it before the epoch's first batch.

    Lightning takes the number of batches once, as the fit starts, and would cut the epochs of a longer loader that
    somebody has put in place since. Its option to ask anew does so before an epoch's callbacks have run.
    """
    if trainer.num_training_batches != len(batches):
        loop = trainer.fit_loop
        loop.max_batches = len(batches)
        loop._combined_loader.limits = [len(batches)]
        iter(loop._data_fetcher)


def fit(module: pl.LightningModule, batches: Iterable, device: torch.device, callbacks: list) -> pl.Trainer:
    """Run ``module`` over ``batches``, epoch after epoch, until it stops itself; return the Lightning trainer.

    ``batches`` is sized and iterated anew each epoch. Exceptions from any hook leave unchanged, those that a
    ``LoopError`` carries with the cause and the context that they had.
    Signal handlers, warning formatter, log levels and environment are afterwards as before.
    """
    with neutral_environment(), quiet_lightning():
        trainer = build_trainer(device, callbacks)
    trainer.fit_loop.run = carrying(trainer.fit_loop.run)
    carried: BaseException | None = None
    with quiet_lightning(), own_signals() as handlers:
        module.signal_handlers = handlers
        try:
            trainer.fit(module, train_dataloaders=batches)
        except LoopError as error:
            carried = error.__cause__
    if carried is not None:  # raised outside of the handler, which would become its context
        raise carried
    return trainer


def carrying(run: Callable[[], None]) -> Callable[[], None]:
    """Return ``run`` with interrupts and exits carried out of it by a ``LoopError``."""

    def carried() -> None:
        try:
            run()
        except (KeyboardInterrupt, SystemExit) as error:
            raise LoopError("an end of the program, asked for in the loop") from error

    return carried
