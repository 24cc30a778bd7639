"""The `yolo` script: a few commands of ours, and upstream's command line with our keys."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from detgraph.cfg import CaptureOptionError

from .command_line import COMMANDS, refusals, run


def main(argv: Sequence[str] | None = None) -> None:
    """Run one `yolo` command line.

    Args:
        argv: The words after the program's name, or None for those of `sys.argv`.

    Raises:
        SystemExit: With status 2 and one message on stderr, if the request cannot be honoured; before any work, for all
            that the command line itself shows. With a command's own status, if that is not 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        return run(words)
    with refusals():
        if status := _imported(COMMANDS[words[0]])(words[1:]):
            raise SystemExit(status)


def show_patches(words: list[str]) -> int:
    """Print the patch series and whether our loop follows the installed upstream's. Returns 1 on any drift, else 0."""
    if words:
        raise CaptureOptionError(f"'{words[0]}' has no meaning for yolo patches, which takes no words: leave it out.")
    from detgraph.patches import status

    from .fit.upstream import loop_status

    lines = [*status(), loop_status()]
    for line in lines:
        state = "applied" if line.applied else "does not fit" if line.drift else "fits"
        print(f"{line.name}: {state}\n  target: {line.target}\n  what:   {line.what}")
        if line.drift:
            print(f"  drift:  {line.drift}")
    return int(any(line.drift for line in lines))


def _imported(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)
