"""The words of `yolo why`, and what it prints and writes. Nothing heavy is imported before a fit is looked at."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from detgraph.cfg import CaptureOptionError
from detgraph.patches import PatchDriftError
from detgraph.trainer.output import tell, unwritable, write_whole

SCHEMA = 1
ERROR_STATUS = 2
FLAGS = ("json", "picture", "seconds")

HELP = """Look at a fit for about a minute before it is run. It is set up as training would set it up, by the same
arguments, and some of its steps are measured; nothing is validated or kept. Exit status: 0, or 2 if there is no such
fit to look at."""


class LookError(ValueError):
    """There is nothing to look at: training would refuse the request as well, or not run it by our loop."""


class Parser(argparse.ArgumentParser):
    """Raises ``LookError`` where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        raise LookError(f"{message}. See yolo why --help.")


def main(words: Sequence[str]) -> int:
    """Run `yolo why WORDS` and return its exit status."""
    flagged = [f"--{word}" if word.partition("=")[0] in FLAGS else word for word in words]
    try:
        args, rest = parser().parse_known_args(flagged)
        from .command import look_at

        look = look_at(rest, args.seconds)
    except (LookError, CaptureOptionError, PatchDriftError) as e:
        if asks_for_json(flagged):
            tell(json.dumps({"schema": SCHEMA, "error": one_line(e)}))
        return fail(e)
    from .show import draw, table

    content = json.dumps(look.to_dict(), indent=1)
    tell(content if args.json == "-" else table(look))
    try:
        if args.json and args.json != "-":
            write_whole(Path(args.json), f"{content}\n".encode())
            say(f"wrote {args.json}")
        if args.picture:
            draw(look, args.picture)
            say(f"wrote {args.picture}")
    except OSError as e:
        return fail(e)
    return 0


def say(text: str) -> None:
    """Tell how far we are, beside what a script may read."""
    print(f"yolo why: {text}", file=sys.stderr, flush=True)


def fail(error: BaseException) -> int:
    """Say what is wrong and return the exit status of that."""
    say(f"error: {one_line(error)}")
    return ERROR_STATUS


def one_line(error: BaseException) -> str:
    """Return an error, ours or upstream's, in one line and without colours; of a loader's worker, what it raised."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.rstrip().rpartition("\n")[2]
    return plain(" ".join(text.split())) or type(error).__name__


def plain(text: str) -> str:
    """Return ``text`` without the codes that colour a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether standard output is to hold JSON and nothing else, also of words that cannot be parsed."""
    return "--json=-" in words or ("--json", "-") in zip(words, words[1:], strict=False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of our own words; what it does not know is the training's."""
    found = Parser(
        prog="yolo why",
        usage="yolo why [--seconds N] [--json FILE] [--picture FILE] model=... data=... [key=value ...]",
        description=HELP,
        allow_abbrev=False,
    )
    found.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="time for the steps; default 60")
    found.add_argument("--json", type=_file, metavar="FILE", help="write everything here as JSON; - is stdout, alone")
    found.add_argument("--picture", type=_picture, metavar="FILE", help="draw phases and step times (.png, .pdf, .svg)")
    return found


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
