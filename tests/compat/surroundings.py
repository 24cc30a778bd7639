"""What a process is like around fits: a script that takes stock before, inside and after them.

`python tests/compat/surroundings.py stock|ours ARGS.json` runs one fit per ending with upstream's trainer or ours, in a
process whose hooks, handlers, filters and levels a user has set, and prints what each fit changed. Lightning is first
imported by the first fit.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings

ENDINGS = ("ValueError", "KeyboardInterrupt", "SystemExit", "end")
called: list[str] = []  # names of the user's handlers, as they were called


def package(instance: object) -> str:
    """Return the name of the package that an object's class comes from."""
    return type(instance).__module__.partition(".")[0]


def snapshot(loggers: list[str]) -> dict[str, str]:
    """Return the state of this process that belongs to the user, as text by name."""
    import cv2
    import numpy as np
    import torch

    state = {
        "warnings": [warnings.filters, warnings.formatwarning, warnings.showwarning],
        "logging": [logging.root.manager.disable, logging.raiseExceptions, logging.getLoggerClass()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks, gc.get_freeze_count()],
        "hooks": [sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.gettrace()],
        "interpreter": [sys.stdout, sys.stderr, sys.path, sys.getrecursionlimit(), sys.getswitchinterval()],
        # Two that Lightning imports where they are installed find modules of their own from then on.
        "importers": [[f for f in sys.meta_path if package(f) not in ("six", "transformers")], sys.path_hooks],
        "folder": os.getcwd(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "numpy": [np.geterr(), np.get_printoptions()],
        "cv2": cv2.getNumThreads(),
        "torch.deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
        ],
        "torch.backends": [
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_float32_matmul_precision(),
        ],
        "torch.modes": [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
        ],
        "torch.threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch.multiprocessing": [
            torch.multiprocessing.get_start_method(allow_none=True),
            torch.multiprocessing.get_sharing_strategy(),
        ],
    }
    for number in signal.valid_signals():
        state[f"signal {number}"] = signal.getsignal(number)
    state.update((f"environment {name}", value) for name, value in os.environ.items())
    for name in loggers:
        logger = logging.getLogger(name)
        state[f"logger {name}"] = logger.level
        if not name.startswith("lightning"):  # its import gives its loggers a handler of their own
            state[f"logger {name}"] = [logger.level, logger.handlers, logger.filters, logger.propagate, logger.disabled]
    return {name: repr(value) for name, value in state.items()}


def be_a_user() -> None:
    """Set what a program may have set for itself."""

    def handler(number, frame):
        called.append(signal.Signals(number).name)

    def format_warning(message, category, *_):
        return f"MINE {category.__name__} {message}\n"

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, handler)
    warnings.formatwarning = format_warning
    warnings.filterwarnings("always", category=UserWarning, module="__main__")
    sys.excepthook = lambda *exception: sys.__excepthook__(*exception)
    gc.set_threshold(650, 9, 9)
    os.environ.update(PL_MINE="1", SLURM_JOB_NAME="mine")
    for name in ("", "PIL", "matplotlib", "torch", "lightning", "lightning.pytorch", "py.warnings"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mine").addHandler(logging.NullHandler())
    multiprocessing.get_start_method()  # asking settles it, and upstream asks if there is no cache of the labels yet


def fit(kind: str, args: dict, ending: str) -> dict:
    """Run one fit and return what it changed, what was different inside, and how it ended."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    from detgraph.trainer import LightningDetectionTrainer

    seen = {}

    def look(trainer):
        warnings.warn("heard inside a fit", UserWarning, stacklevel=1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        seen.update(snapshot(loggers))

    def leave(trainer):
        if ending != "end":
            raise {"ValueError": ValueError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[ending](
                3
            )

    called.clear()
    loggers = ["root", *sorted(logging.root.manager.loggerDict)]
    ours = {"capture_network": True} if kind == "ours" else {}
    trainer = (LightningDetectionTrainer if kind == "ours" else DetectionTrainer)(overrides={**args, **ours})
    trainer.add_callback("on_train_batch_start", look)
    trainer.add_callback("on_fit_epoch_end", leave)
    before, ended = snapshot(loggers), "end"
    try:
        trainer.train()
    except BaseException as error:
        ended = f"{type(error).__name__}{error.args}"
    after = snapshot(loggers)
    return {"ended": ended, "changed": changes(before, after), "inside": changes(before, seen), "called": list(called)}


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple]:
    """Return the values before and after by the names of those that differ."""
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    be_a_user()
    kind, args = sys.argv[1], json.loads(sys.argv[2])
    found = {ending: fit(kind, args, ending) for ending in ENDINGS}
    found["lightning"] = "lightning.pytorch" in sys.modules
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
