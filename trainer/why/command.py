"""`yolo why`: a short look at a fit before it is run: where a step's time goes, what bounds it, what replay brings.

Nothing of this is imported, and no fit pays for it, unless the command is given. Its words are in `why_words`.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TextIO

import torch
from ultralytics.cfg import MODES, TASKS
from ultralytics.data.utils import IMG_FORMATS
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import DEFAULT_CFG, DEFAULT_CFG_DICT, LOGGER
from ultralytics.utils.torch_utils import parse_device

from detgraph.cfg import COMMAND_LINE_KEYS
from detgraph.patches import route_train
from detgraph.patches.registry import Patch
from detgraph.trainer.capture.report import environment
from detgraph.trainer.command_line import merged_words, read_command_line, run_upstream
from detgraph.trainer.fit.eligibility import loop_blocker
from detgraph.trainer.fit.trainer import BatchTooLarge, LightningDetectionTrainer

from .report import Look, command, shortened
from .words import FLAGS, LookError, one_line, plain, say

OF_A_PICTURE = re.compile(rf"((train|val): )?.+\.({'|'.join(IMG_FORMATS)}): ", re.IGNORECASE)


class Looked(Exception):
    """Ends upstream's training call once the look is over: what would follow wants a checkpoint."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look


class LookTrainer(LightningDetectionTrainer):
    """Sets a fit up as upstream does, and looks at it where it would train it.

    Attributes:
        words: what the user asked for, to be told in messages.
        seconds: how long to look, about.
        faults: what upstream says of pictures and labels that it leaves out or changes, a line each.

    Raises:
        LookError: from the constructor, for what upstream refuses there; from ``train``, for a fit that is not ours.
        Looked: from ``train``, with the result.
    """

    words: Sequence[str] = ()
    seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.faults: list[str] = []
        try:
            super().__init__(*args, **kwargs)
        except (SyntaxError, ValueError, TypeError, OSError, RuntimeError) as e:  # keys, values, device, data set
            raise LookError(one_line(e)) from e

    def run_callbacks(self, event: str) -> None:
        """Loggers and other integrations would open a run of their own."""

    def build_dataset(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream does, and keep what it says of single pictures: left out, or changed."""
        with overheard() as lines:
            dataset = super().build_dataset(*args, **kwargs)
        self.faults += [line for line in lines if OF_A_PICTURE.match(line)]
        return dataset

    def train(self) -> None:
        if blocker := loop_blocker(self):
            raise LookError(f"{blocker}, and yolo why looks at ours. Give one CUDA device, or device=cpu.")
        super().train()

    def _do_train(self) -> None:
        from .measure import look

        begun = time.time()
        try:
            self._set_up()
            fit = self._describe()
            for line in shortened(self.faults):
                say(line)
            arms = look(self, self.seconds, say)
        except BatchTooLarge:
            smaller = {"batch": max(self.batch_size // 2, 1)}
            raise LookError(
                f"batch={self.batch_size} does not fit into the device's memory; training would go on with half of it. "
                f"Look at that: {command(self.words, smaller, 'why')}"
            ) from None
        except RuntimeError as e:  # such as amp=bf16 on a CPU
            raise LookError(f"a step of this fit fails, as it would in training: {one_line(e)}") from e
        finally:
            self._leave_nothing(begun)
        raise Looked(Look(list(self.words), fit, environment(), arms))

    def _set_up(self) -> None:
        try:
            self._setup_train()
        except (ValueError, TypeError, OSError, RuntimeError) as e:  # checked late: sizes, optimizer, pictures
            raise LookError(one_line(e)) from e

    def _describe(self) -> dict:
        """Return what was set up, where that is more than the words say."""
        args, loader = self.args, self.train_loader
        precision = "bf16" if args.amp == "bf16" else "fp16" if self.amp else "fp32"
        return {
            "model": Path(str(args.model)).name,
            "data": str(args.data),
            "device": str(self.device),
            "batch": loader.batch_size,
            "imgsz": args.imgsz,
            "precision": precision,
            "optimizer": type(self.optimizer).__name__,
            "accumulate": self.accumulate,
            "images": len(loader.dataset),
            "faults": self.faults,
            "steps": None if args.time else args.epochs * len(loader),  # patience may end the fit before
            "cache": args.cache,
            "workers": loader.num_workers,
            "workers_asked": args.workers,
            "cores": os.cpu_count(),
        }

    def _leave_nothing(self, begun: float) -> None:
        """Shut the loaders' workers down, and delete the caches of labels that upstream has written beside the data."""
        for loader in (getattr(self, "train_loader", None), getattr(self, "test_loader", None)):
            if loader is None:
                continue
            loader.close()
            cache = Path(loader.dataset.label_files[0]).parent.with_suffix(".cache")
            if cache.is_file() and cache.stat().st_mtime >= begun:
                cache.unlink()


def look_at(words: Sequence[str], seconds: float) -> Look:
    """Set up the fit that `yolo train WORDS` would run, measure it for about ``seconds``, and leave nothing behind.

    Raises:
        LookError: before any work, if the words do not train, or train what our loop does not run.
        CaptureOptionError: for our keys, as in training.
    """
    words = _training_words(words)
    try:
        merged = merged_words(words)
    except (SyntaxError, IndexError) as e:
        raise LookError(f"upstream cannot read '{shlex.join(words)}': {one_line(e)}") from e
    kept = [word for word in merged if word.removeprefix("--").partition("=")[0].strip() not in COMMAND_LINE_KEYS]
    with ExitStack() as stack:
        stack.enter_context(quiet())
        options, theirs, trains = read_command_line(words, stack)
        if not trains:
            raise LookError(f"'{shlex.join(words)}' does not train. Write yolo why model=... data=...")
        model, arguments = _handed_over(theirs)
        _refuse(model, arguments, kept)
        say("setting the fit up as training would")
        folder = stack.enter_context(TemporaryDirectory(prefix="detgraph-"))
        trainer = type("LookTrainer", (LookTrainer,), {"words": kept, "seconds": seconds})
        arguments = {**arguments, "save_dir": str(Path(folder) / "fit"), "plots": False, "verbose": False}
        try:
            route_train.unpatched_train()(model, trainer=trainer, **arguments)
        except Looked as looked:
            look = looked.look
    asked = options.to_dict() if options else {}
    look.fit["asked"] = {key: asked[key] for key in COMMAND_LINE_KEYS if asked.get(key)}
    return look


def _training_words(words: Sequence[str]) -> list[str]:
    bare = [word.removeprefix("--") for word in words]
    modes = [word.removeprefix("mode=") for word in bare if word in MODES or word.startswith("mode=")]
    if other := [mode for mode in modes if mode != "train"]:
        raise LookError(f"mode '{other[0]}' does not train, and yolo why looks at training. Leave '{other[0]}' out.")
    known = {*DEFAULT_CFG_DICT, *COMMAND_LINE_KEYS, *MODES, *TASKS}
    for word in words:  # upstream would take an option for a misspelt key of its own
        key = word.removeprefix("--").partition("=")[0].strip()
        if word.startswith("--") and key not in known:
            meant = get_close_matches(key, [*FLAGS, *known], 1, 0.8)
            hint = f"Did you mean {meant[0]}?" if meant else "See yolo why --help."
            raise LookError(f"there is no option '--{key}'. {hint}")
    if not words:
        raise LookError("there is no fit to look at. Write yolo why model=... data=...")
    return list(words) if modes else ["train", *words]


def _handed_over(words: list[str]) -> tuple[Any, dict]:
    """Let upstream's entry point read its words; returns the model and the arguments that it would train it with."""
    handed: list[tuple[Any, dict]] = []
    stop = Patch(
        name="why",
        known=route_train.patch.known,
        what="upstream's command line ends where training would start",
        replacement=lambda original: lambda model, trainer=None, /, **arguments: handed.append((model, arguments)),
    )
    stop.apply()
    try:
        run_upstream(words, None)
    except (SyntaxError, ValueError, TypeError, OSError) as e:
        raise LookError(one_line(e)) from e
    finally:
        stop.revert()
    return handed[0]


def _refuse(model: Any, arguments: dict, words: Sequence[str]) -> None:
    """Refuse, before anything is set up, what our loop would not run.

    Raises:
        LookError: saying why, and what to look at instead.
    """
    data, batch = arguments.get("data"), arguments.get("batch") or DEFAULT_CFG.batch
    if arguments.get("resume"):
        raise LookError("resume continues a fit, and yolo why sets a new one up. Look at cfg=RUN_FOLDER/args.yaml.")
    if isinstance(data, (list, tuple)):
        raise LookError(f"several data sets train one after another. Look at one: data={data[0]}")
    try:
        model._check_is_pytorch_model()
    except TypeError as e:
        raise LookError(one_line(e)) from e
    devices = parse_device(arguments.get("device", "")).split(",")
    cpu = torch.device("cpu")  # which device it is can only be said once it is chosen; our trainer looks again
    request = SimpleNamespace(world_size=len(devices), device=cpu, args=SimpleNamespace(task=model.task))
    blocker = loop_blocker(request)
    if blocker and len(devices) > 1:
        alone = {"device": devices[0], "batch": batch // len(devices) if batch > 1 else batch}
        raise LookError(f"{blocker}. Look at one GPU's part of it: {command(words, alone, 'why')}")
    plain = re.sub(r"-(seg|sem|pose|obb|cls|depth)\b", "", str(arguments["model"]))
    detector = {"task": None, model.task: None, "model": plain}
    if blocker and model.task != "detect":
        raise LookError(f"{blocker}. Look at a detector of its size: {command(words, detector, 'why')}")
    if blocker:
        raise LookError(f"{blocker}.")
    if model._smart_load("trainer") is not DetectionTrainer:
        raise LookError(
            f"{type(model).__name__} trains its models with a trainer of its own, in upstream's own loop. "
            "Look at one of upstream's plain detectors, such as model=yolo26n.yaml."
        )


class Uncoloured:
    """A text stream that passes on what is written to it without the codes that colour a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep upstream's banner and progress bars silent; its warnings and errors go to stderr."""
    level, handlers = LOGGER.level, [h for h in LOGGER.handlers if type(h) is logging.StreamHandler]
    stderr = sys.stderr if sys.stderr.isatty() else Uncoloured(sys.stderr)
    streams = [handler.setStream(stderr) for handler in handlers]
    LOGGER.setLevel(logging.WARNING)
    try:
        with redirect_stdout(stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # two steps are one cycle
            yield
    finally:
        LOGGER.setLevel(level)
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:  # it was stderr already
                handler.setStream(stream)


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Collect the lines that upstream's logger tells at level INFO, and show none of them, nor a progress bar."""
    lines: list[str] = []
    ear = logging.Handler(logging.INFO)
    ear.emit = lambda record: lines.extend(plain(record.getMessage()).splitlines())
    ear.addFilter(lambda record: record.levelno == logging.INFO)
    level, levels = LOGGER.level, [(handler, handler.level) for handler in LOGGER.handlers]
    for handler, _ in levels:
        handler.setLevel(max(handler.level, level))
    LOGGER.addHandler(ear)
    LOGGER.setLevel(logging.INFO)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield lines
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(ear)
        for handler, before in levels:
            handler.setLevel(before)
