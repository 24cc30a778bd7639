"""The gate: stages in order, each a command; stops at the first red and closes with a table.

Runs under any Python 3.10, without the virtual environment that its first stage makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Stage(NamedTuple):
    """One step of the gate; `result` is what the table says of it and `seconds` what it took."""

    name: str
    command: list[str]
    result: str = "not run"
    seconds: float = 0.0


def stages(venv: Path) -> list[Stage]:
    """Return the gate's stages for the virtual environment at `venv`; the wheel's test is one of the tests."""
    tool = (ROOT / venv / "bin").joinpath
    return [
        Stage("install", ["make", "venv", f"VENV={venv}", f"PYTHON={sys.executable}"]),
        Stage("lint", [str(tool("ruff")), "check", "."]),
        Stage("format", [str(tool("ruff")), "format", "--check", "."]),
        Stage("tests", [str(tool("pytest")), "-m", "not slow"]),
    ]


def run(plan: list[Stage]) -> list[Stage]:
    """Run `plan` in order, output unfiltered, and return it with results; what follows a failure is not run."""
    done: list[Stage] = []
    for stage in plan:
        if any(earlier.result == "FAIL" for earlier in done):
            done.append(stage)
            continue
        print(f"== {stage.name}: {' '.join(stage.command)}", flush=True)
        start = time.monotonic()
        try:
            code = subprocess.run(stage.command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        except OSError as error:
            print(error, flush=True)
            code = 127
        done.append(stage._replace(result="FAIL" if code else "pass", seconds=time.monotonic() - start))
    return done


def table(done: list[Stage]) -> str:
    """Return the closing table: a line a stage, and one for all of them."""
    width = max(len(stage.name) for stage in done)
    lines = [f"{stage.name:<{width}}  {stage.seconds:8.1f} s  {stage.result}" for stage in done]
    total = sum(stage.seconds for stage in done)
    verdict = "pass" if all(stage.result == "pass" for stage in done) else "FAIL"
    return "\n".join([*lines, f"{'gate':<{width}}  {total:8.1f} s  {verdict}"])


def main(argv: list[str] | None = None) -> int:
    """Run the gate and return its exit status: 0 when every stage passed, otherwise 1."""
    parser = argparse.ArgumentParser(description="Run the gate.")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="virtual environment, made if missing")
    done = run(stages(parser.parse_args(argv).venv))
    print(f"== summary\n{table(done)}", flush=True)
    return int(any(stage.result != "pass" for stage in done))


if __name__ == "__main__":
    sys.exit(main())
