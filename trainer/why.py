"""`yolo why`: a short look at a fit before it is run: where a step's time goes, what bounds it, what replay brings.

Nothing of this is imported, and no fit pays for it, unless the command is given.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from ultralytics.cfg import MODES
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import DEFAULT_CFG, LOGGER
from ultralytics.utils.torch_utils import parse_device

from detgraph.cfg import COMMAND_LINE_KEYS, CaptureOptionError
from detgraph.patches import PatchDriftError, route_train
from detgraph.patches.registry import Patch

from .cli import _run_upstream, merged_words, read_command_line
from .eligibility import loop_blocker
from .loop import BatchTooLarge, LightningDetectionTrainer
from .output import tell, unwritable, write_whole
from .report import environment
from .why_report import Look, command
from .why_show import draw, table

ERROR_STATUS = 2
FLAGS = ("json", "picture", "seconds")

HELP = """Look at a fit for about a minute before it is run. It is set up as training would set it up, by the same
arguments, and some of its steps are measured; nothing is validated or kept. Exit status: 0, or 2 if there is no such
fit to look at."""


class LookError(ValueError):
    """There is nothing to look at: training would refuse the request as well, or not run it by our loop."""


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

    Raises:
        LookError: from the constructor, for what upstream refuses there; from ``train``, for a fit that is not ours.
        Looked: from ``train``, with the result.
    """

    words: Sequence[str] = ()
    seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except (SyntaxError, ValueError, TypeError, OSError, RuntimeError) as e:  # keys, values, device, data set
            raise LookError(_told(e)) from e

    def run_callbacks(self, event: str) -> None:
        """Loggers and other integrations would open a run of their own."""

    def train(self) -> None:
        if blocker := loop_blocker(self):
            raise LookError(f"{blocker}, and yolo why looks at ours. Give one CUDA device, or device=cpu.")
        super().train()

    def _do_train(self) -> None:
        from .why_measure import look

        begun = time.time()
        try:
            self._set_up()
            fit = self._describe()
            arms = look(self, self.seconds, _tell)
        except BatchTooLarge:
            smaller = {"batch": max(self.batch_size // 2, 1)}
            raise LookError(
                f"batch={self.batch_size} does not fit into the device's memory; training would go on with half of it. "
                f"Look at that: {command(self.words, smaller, 'why')}"
            ) from None
        except RuntimeError as e:  # such as amp=bf16 on a CPU
            raise LookError(f"a step of this fit fails, as it would in training: {_told(e)}") from e
        finally:
            self._leave_nothing(begun)
        raise Looked(Look(list(self.words), fit, environment(), arms))

    def _set_up(self) -> None:
        try:
            self._setup_train()
        except (ValueError, TypeError, OSError, RuntimeError) as e:  # checked late: sizes, optimizer, pictures
            raise LookError(_told(e)) from e

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


def main(words: Sequence[str]) -> int:
    """Run `yolo why WORDS` and return its exit status."""
    flagged = [f"--{word}" if word.partition("=")[0] in FLAGS else word for word in words]
    args, rest = _parser().parse_known_args(flagged)
    try:
        look = look_at(rest, args.seconds)
    except (LookError, CaptureOptionError, PatchDriftError) as e:
        print(f"yolo why: error: {e}", file=sys.stderr)
        return ERROR_STATUS
    content = json.dumps(look.to_dict(), indent=1)
    tell(content if args.json == "-" else table(look))
    try:
        if args.json and args.json != "-":
            write_whole(Path(args.json), f"{content}\n".encode())
        if args.picture:
            draw(look, args.picture)
    except OSError as e:
        print(f"yolo why: error: {_told(e)}", file=sys.stderr)
        return ERROR_STATUS
    return 0


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
        raise LookError(f"upstream cannot read '{shlex.join(words)}': {_told(e)}") from e
    kept = [word for word in merged if word.removeprefix("--").partition("=")[0].strip() not in COMMAND_LINE_KEYS]
    with ExitStack() as stack:
        stack.enter_context(quiet())
        options, theirs, trains = read_command_line(words, stack)
        if not trains:
            raise LookError(f"'{shlex.join(words)}' does not train. Write yolo why model=... data=...")
        model, arguments = _handed_over(theirs)
        _refuse(model, arguments, kept)
        _tell("setting the fit up as training would")
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
    if not words:
        raise LookError("there is no fit to look at. Write yolo why model=... data=...")
    return list(words) if modes else ["train", *words]


def _handed_over(words: list[str]) -> tuple[Any, dict]:
    """Let upstream's entry point read its words; returns the model and the arguments that it would train it with."""
    handed: list[tuple[Any, dict]] = []
    stop = Patch(
        name="why",
        target=route_train.patch.target,
        what="upstream's command line ends where training would start",
        signature=route_train.patch.signature,
        fingerprints=route_train.patch.fingerprints,
        replacement=lambda original: lambda model, trainer=None, /, **arguments: handed.append((model, arguments)),
    )
    stop.apply()
    try:
        _run_upstream(words, None)
    except (SyntaxError, ValueError, TypeError, OSError) as e:
        raise LookError(_told(e)) from e
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
        raise LookError(_told(e)) from e
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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep upstream's banner and progress bars silent; its warnings and errors go to stderr."""
    level, handlers = LOGGER.level, [h for h in LOGGER.handlers if type(h) is logging.StreamHandler]
    streams = [handler.setStream(sys.stderr) for handler in handlers]
    LOGGER.setLevel(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # two steps are one cycle
            yield
    finally:
        LOGGER.setLevel(level)
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:  # it was stderr already
                handler.setStream(stream)


def _tell(text: str) -> None:
    print(f"yolo why: {text}", file=sys.stderr, flush=True)


def _told(error: BaseException) -> str:
    """Return an error of upstream's in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="yolo why",
        usage="yolo why [--seconds N] [--json FILE] [--picture FILE] model=... data=... [key=value ...]",
        description=HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="time for the steps; default 60")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write everything here as JSON; - is stdout, alone")
    parser.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw phases and step times (.png, .pdf, .svg)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no time to look for: give seconds, more than 0")
    return seconds


def _file(text: str) -> str:
    if text != "-" and (reason := unwritable(Path(text))):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written ({reason}): give a file in a folder that exists")
    return text


def _picture(text: str) -> Path:
    path = Path(_file(text))
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"'{text}' is no picture: let it end in .png, .pdf or .svg")
    return path
