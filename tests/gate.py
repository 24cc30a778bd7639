"""The gate: stages in order, each a command; stops at the first red and closes with a table.

Runs under any Python 3.10, without the virtual environment that its first stage makes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))
# Tests of these stages are independent; those of one file share fits, which a worker makes once.
WORKERS = ("-n", str(min(CORES, 8)), "--dist", "loadfile")
# A worker of parity runs three fits side by side and waits for the slowest, so that it keeps two cores busy, and one
# core busier beside another worker.
ARMS = ("-n", str(min(max(CORES // 2, 2), 8)))
# A GPU has time for both files: each mostly waits for a process to start or for its one core.
BESIDE = ("-n", "2", "--dist", "loadfile")


class Stage(NamedTuple):
    """One step of the gate; `result` is what the table says of it and `seconds` what it took."""

    name: str
    command: list[str]
    result: str = "not run"
    seconds: float = 0.0


def stages(venv: Path | None, accelerator: bool = False) -> list[Stage]:
    """Return the gate's stages for the virtual environment at `venv`, or for the running interpreter's without one.

    `accelerator` adds the tests that need a GPU and turns their skipping into failing.
    """
    if venv is None:
        install = []
        tool = {name: shutil.which(name) or name for name in ("python3", "pytest", "ruff")}
    else:
        install = [Stage("install", ["make", "venv", f"VENV={venv}", f"PYTHON={sys.executable}"])]
        tool = {name: str(ROOT / venv / "bin" / name) for name in ("python3", "pytest", "ruff")}

    def test(name: str, *arguments: str, marked: str = "not slow and not gpu") -> Stage:
        return Stage(name, [tool["pytest"], "-m", marked, *arguments])  # python -m pytest would import our folders, too

    plan = [
        *install,
        Stage("lint", [tool["ruff"], "check", "."]),
        Stage("format", [tool["ruff"], "format", "--check", "."]),
        Stage("drift", [tool["python3"], "-m", "detgraph.trainer", "patches"]),
        test("docs", "tests/docs"),
        test("unit", "tests/unit", *WORKERS),
        test("mutation", "tests/replay", "tests/orthogonalization", "tests/objective", *WORKERS),
        test("parity", "tests/parity", *ARMS),
        test("goldens", "tests/goldens"),
        test("compat", "tests/compat", *WORKERS),
        test("wheel", "tests/wheel"),
    ]
    if accelerator:
        folders = ("tests/cuda", "tests/goldens", "tests/objective", "tests/replay/test_recorder_contract.py")
        plan.append(test("accelerator", *folders, *BESIDE, marked="gpu"))
    return plan


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
            # What does not need a GPU must come out the same where there is one, so it does not see it.
            more = {"DETGRAPH_REQUIRE_GPU": "1"} if stage.name == "accelerator" else {"CUDA_VISIBLE_DEVICES": ""}
            # Workers fill the cores, not the threads of each.
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **more}
            code = subprocess.run(stage.command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environment).returncode
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
    parser.add_argument("--active", action="store_true", help="use the running interpreter's environment instead")
    parser.add_argument("--accelerator", action="store_true", help="add the tests that need a GPU, none may skip")
    args = parser.parse_args(argv)
    done = run(stages(None if args.active else args.venv, args.accelerator))
    print(f"== summary\n{table(done)}", flush=True)
    return int(any(stage.result != "pass" for stage in done))


if __name__ == "__main__":
    sys.exit(main())
