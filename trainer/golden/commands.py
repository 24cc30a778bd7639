"""`yolo golden`: record what a fit computes, and say whether two fits are the same.

Nothing of this is imported, and no fit pays for it, unless the command is given.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from detgraph.trainer.output import tell, unwritable

from . import file as golden_file
from . import runs as golden_runs
from .compare import DIFFERENT, Comparison, Tolerance, compare
from .file import FILE_NAME, GoldenError

SAME_STATUS, DIFFERENT_STATUS, ERROR_STATUS = 0, 1, 2

RECORD_HELP = f"""Train with upstream's arguments, and ours, and write down what every step computes: losses as exact
numbers, digests of weights, buffers, images, gradients, optimizer and EMA. The golden is {FILE_NAME} in the run folder.
Recording changes no bit of the fit and slows it down. Exit status: 0, or 2 if there was no fit to record or it broke;
one that broke is recorded as far as it came."""

COMPARE_HELP = f"""Say whether two fits are the same. If not, say at which step and in which tensor they part first,
and by how much. A and B are goldens or run folders; run folders that do not both hold {FILE_NAME} are compared by
results.csv and checkpoints (pickles: only of runs you trust). Steps, epochs and optimizer steps count from 0; a step is
one micro-batch. Exit status: 0 the same (or within the tolerance), 1 different, 2 error."""


def main(words: Sequence[str]) -> int:
    """Run `yolo golden WORDS` and return its exit status."""
    args, rest = _parser().parse_known_args(list(words))
    try:
        if args.command == "record":
            return record(rest, args.out, args.detail, args.stock)
        if rest:
            raise GoldenError(f"unknown argument '{rest[0]}': see yolo golden compare --help.")
        if args.same_environment and args.tolerance:
            raise GoldenError("--tolerance is for goldens of unlike environments: leave it or --same-environment out.")
        comparison = compare_paths(args.a, args.b, args.tolerance, args.checkpoints, args.same_environment)
    except GoldenError as e:
        return _fail(str(e), getattr(args, "json", False))
    except Exception as e:  # a script reads status 1 as "different"
        if args.command == "record":
            raise
        return _fail(f"{type(e).__name__}: {e}", args.json)
    tell(json.dumps(comparison.to_dict(), indent=1) if args.json else comparison.table())
    return DIFFERENT_STATUS if comparison.verdict == DIFFERENT else SAME_STATUS


def record(words: Sequence[str], out: Path | None, detail: str, stock: bool) -> int:
    """Train by the command line ``words`` and record the fit.

    Args:
        words: What follows `yolo` on upstream's command line; `train` may be left out.
        out: Where to write the golden besides the run folder.
        detail: "FIRST:LAST", the steps whose tensors are recorded one by one.
        stock: Train by upstream's own trainer, in a process that cannot import this package.

    Raises:
        GoldenError: if the words do not train one fit in one process, or ``out`` cannot be written: before any work.
            If no fit was seen, or it broke, which leaves a golden of what it computed: afterwards.
    """
    from . import record as golden_record
    from . import stock as stock_fit

    words = _training_words(words, stock)
    if out and (reason := unwritable(out, folders=True)):
        raise GoldenError(f"--out {out} cannot be written ({reason}): give a file.")
    if stock:
        script = Path(stock_fit.__file__)
        command = [sys.executable, str(script), str(out or ""), detail, *words]
        status = subprocess.run(command).returncode
        if status == stock_fit.NOT_WRITTEN:  # it has said so
            return ERROR_STATUS
        if status not in (0, stock_fit.NOT_SEEN):
            raise GoldenError(f"the stock fit ended with status {status}; what it said is above.")
        seen = status == 0
    else:
        from detgraph.trainer.command_line import run

        records = []
        try:
            with golden_record.recording(out, golden_record.parse_detail(detail)) as records:
                run(words)
        except GoldenError:
            raise
        except Exception as e:  # what it says, as training does; the status is ours
            traceback.print_exc()
            raise GoldenError(f"the fit ended with {type(e).__name__}; what it said is above.") from e
        finally:
            for line in golden_record.told(records):
                tell(line)
        seen = bool(records)
    if not seen:
        raise GoldenError("no fit was seen: it trained in child processes, or not at all.")
    return SAME_STATUS


def compare_paths(
    a: Path, b: Path, tolerance: Tolerance | None = None, checkpoints: bool = False, same_environment: bool = False
) -> Comparison:
    """Compare two goldens or run folders.

    Args:
        tolerance: What goldens of unlike environments may differ by.
        checkpoints: Whether to open the last checkpoints of run folders whose goldens part, too.
        same_environment: Whether to refuse goldens whose environments give no reason to expect the same bits.

    Raises:
        GoldenError: if one of them cannot be read, they have nothing in common, a run folder's golden is of another fit
            than its results, or the environments are unlike (or unknown) and have to be the same.
    """
    for path in (a, b):
        if not path.exists():
            raise GoldenError(f"{path} does not exist: give a golden ({FILE_NAME}) or a run folder.")
    folders = a.is_dir() and b.is_dir()
    goldens = [path / FILE_NAME if path.is_dir() else path for path in (a, b)]
    if folders and not same_environment and not all(path.is_file() for path in goldens):
        return golden_runs.compare_runs(a, b)
    for path in goldens:
        if not path.exists():
            raise GoldenError(f"{path.parent} has no {FILE_NAME}: record one, or compare it with another run folder.")
    contents = [golden_file.read(path) for path in goldens]
    for path, content in zip((a, b), contents, strict=True):
        if path.is_dir() and content["fit"].get("results", found := golden_file.results_digest(path)) != found:
            raise GoldenError(
                f"{path}/results.csv is not of the fit that {FILE_NAME} was recorded of: another fit has trained there "
                f"since, or went on. Record it again, or delete {path / FILE_NAME} to compare the folder's other files."
            )
    unlike = golden_file.environment_differences(*(content["environment"] for content in contents))
    if same_environment and unlike:
        raise GoldenError(
            f"environments differ in {'; '.join(unlike)}: record {a} again in today's environment, or leave "
            "--same-environment out."
        )
    comparison = compare(*contents, tolerance)
    if comparison.partings and folders and checkpoints:
        try:
            comparison.checkpoint = golden_runs.last_checkpoints(a, b)
        except GoldenError as e:  # no reason to lose the answer
            comparison.notes.append(str(e))
    return comparison


def _training_words(words: Sequence[str], stock: bool) -> list[str]:
    """Return the words of one training in one process.

    Raises:
        GoldenError: for anything else, as far as the words show it.
    """
    from ultralytics.cfg import MODES, TASKS, smart_value
    from ultralytics.utils.torch_utils import parse_device

    from detgraph.cfg import COMMAND_LINE_KEYS

    bare = [word.removeprefix("--") for word in words]
    modes = [word.removeprefix("mode=") for word in bare if word in MODES or word.startswith("mode=")]
    if any(mode != "train" for mode in modes):
        raise GoldenError(f"'{modes[0]}' is no training: write yolo golden record model=... data=...")
    if not words:
        raise GoldenError("nothing to train: write yolo golden record model=... data=...")
    for word in words:
        if word.startswith("--") and "=" not in word and word[2:] not in {*MODES, *TASKS, *COMMAND_LINE_KEYS}:
            raise GoldenError(f"unknown option '{word}': see yolo golden record --help.")
    pairs = {key.strip(): value.strip() for key, equals, value in (word.partition("=") for word in bare) if equals}
    if stock and (ours := {word.partition("=")[0].strip() for word in bare} & set(COMMAND_LINE_KEYS)):
        raise GoldenError(f"{min(ours)} has no meaning for upstream's own loop: leave it out, or --stock.")
    if isinstance(data := smart_value(pairs.get("data", "")), (list, tuple)):
        raise GoldenError(f"several data sets train in child processes: record one at a time, as in data={data[0]}")
    if len(devices := parse_device(pairs.get("device", "")).split(",")) > 1:
        raise GoldenError(f"several GPUs train in child processes: record on one, as in device={devices[0]}")
    return list(words) if modes else ["train", *words]


def _fail(message: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"verdict": "error", "message": message}))
    print(f"yolo golden: error: {message}", file=sys.stderr)
    return ERROR_STATUS


def _tolerance(text: str) -> Tolerance:
    relative, _, steps = text.partition(":")
    try:
        found = Tolerance(float(relative), int(steps))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not RELATIVE:STEPS, as in 1e-3:3") from None
    if not (0 <= found.relative < math.inf) or found.steps < 1:
        raise argparse.ArgumentTypeError(f"'{text}' needs a finite RELATIVE of 0 or more and STEPS of 1 or more")
    return found


def _detail(text: str) -> str:
    from .record import parse_detail

    try:
        parse_detail(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{e}, as in 0:100") from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="yolo golden", description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="record | compare")
    rec = commands.add_parser(
        "record",
        help="train, and write down what every step computes",
        usage="yolo golden record [--stock] [--out FILE] [--detail FIRST:LAST] model=... data=... [key=value ...]",
        description=RECORD_HELP,
        allow_abbrev=False,
    )
    rec.add_argument("--stock", action="store_true", help="train by upstream alone: a process without detgraph")
    rec.add_argument("--out", type=Path, metavar="FILE", help="write the golden here as well (.gz: compressed)")
    rec.add_argument(
        "--detail",
        type=_detail,
        default="0:100",
        metavar="FIRST:LAST",
        help="steps whose tensors are kept one by one, 40 kB a step of YOLO26n; default 0:100, 0:0 for none",
    )
    com = commands.add_parser(
        "compare", help="say whether two fits are the same", description=COMPARE_HELP, allow_abbrev=False
    )
    com.add_argument("a", type=Path, metavar="A", help="golden or run folder")
    com.add_argument("b", type=Path, metavar="B", help="golden or run folder")
    com.add_argument("--json", action="store_true", help="print the comparison as JSON")
    com.add_argument(
        "--same-environment", action="store_true", help="refuse goldens of unlike environments: an error, status 2"
    )
    com.add_argument(
        "--checkpoints", action="store_true", help="where goldens part, open the last.pt of both run folders, too"
    )
    com.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="RELATIVE:STEPS",
        help="for goldens of unlike environments: also accept losses of the first STEPS steps within RELATIVE",
    )
    return parser
