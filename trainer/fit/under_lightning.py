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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from detgraph.trainer.capture.state import Generators

from . import lightning_private

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


_import_lightning()  # before `loop.py` does, which is imported next


class Quiet:
    """Lightning's silence while any fit of this process runs; log levels and filters of warnings are the process's.

    The first fit begins it and the last one ends it, in whatever order they overlap. Only what was put there is taken
    away again: what the program itself sets in between stays, as it does with upstream's loop.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while the process's state is another, where that takes no time
        self.depth = 0
        self._levels: dict[str, int] = {}
        self._filter: tuple | None = None

    def begin(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth == 1:
                self._levels = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
                for name in QUIET_LOGGERS:
                    logging.getLogger(name).setLevel(logging.CRITICAL)
                warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning\.")
                self._filter = warnings.filters[0]

    def end(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                for name, level in self._levels.items():
                    if logging.getLogger(name).level == logging.CRITICAL:
                        logging.getLogger(name).setLevel(level)
                with suppress(ValueError):  # the program may have reset them all
                    warnings.filters.remove(self._filter)


quiet = Quiet()


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning silent inside."""
    quiet.begin()
    try:
        yield
    finally:
        quiet.end()


@contextmanager
def unwarned() -> Iterator[None]:
    """Ignore every warning inside, one thread at a time: two that overlap would leave their filter behind."""
    with quiet.lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def neutral_environment() -> Iterator[None]:
    """Hide the variables that would steer a trainer while it is built; a fit itself runs in the user's environment.

    One thread at a time: another's end would bring them back.
    """
    with quiet.lock:
        named = [name for name in os.environ if name.startswith(HOSTILE_PREFIXES) or name in HOSTILE_NAMES]
        hidden = {name: os.environ.pop(name) for name in named}
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


class NoOptimizer:
    """What Lightning is given to hold and to look into, instead of the fit's optimizer, which upstream steps.

    Lightning wants what torch's optimizers have, puts a class of its own around it, and moves its state. Upstream asks
    for much less, and leaves the state where it is.
    """

    def __init__(self) -> None:
        self.param_groups, self.defaults, self.state = [], {}, {}

    def step(self, closure: Callable | None = None) -> None:
        raise AssertionError("the module steps the fit's own optimizer")

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None: ...


def lightning_blocker(device: torch.device) -> str | None:
    """Return why the installed Lightning cannot run a fit on ``device``, or None: tried, before a fit is set up."""
    try:
        with neutral_environment(), quiet_lightning():
            found = lightning_private.missing(build_trainer(device, []))
    except (ImportError, AttributeError, TypeError) as error:  # a class, a method or an argument that is gone
        found = f"its Trainer cannot be built: {error}"
    if found is None:
        return None
    return f"Lightning {version('lightning')} does not fit, so upstream's own loop runs: {found}"


def fit(module: pl.LightningModule, batches: Iterable, device: torch.device, callbacks: list) -> pl.Trainer:
    """Run ``module`` over ``batches``, epoch after epoch, until it stops itself; return the Lightning trainer.

    ``batches`` is iterated anew each epoch, and an epoch ends when it does. Lightning cuts it at its length, and
    fetches ahead if it has none, so the length has to be more than there will ever be. Exceptions from any hook leave
    unchanged, those that a ``LoopError`` carries with the cause and the context that they had.
    Signal handlers, warning formatter, log levels and environment are afterwards as before, or as the program set them.
    """
    with neutral_environment(), quiet_lightning():
        trainer = build_trainer(device, callbacks)
    lightning_private.wrap_run(trainer, carrying)
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
