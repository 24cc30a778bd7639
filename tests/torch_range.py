"""The tests of replay against the oldest and the newest torch that detgraph allows, each in an environment of its own.

An environment is some gigabytes: torch comes with its CUDA libraries, used or not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/replay", "tests/orthogonalization", "tests/unit/test_private_names.py", "tests/unit/test_options.py")


def allowed() -> str:
    """Return the range of torch that the installed detgraph asks for, such as ``<2.15,>=2.8``."""
    (found,) = (r for r in requires("detgraph") if re.match(r"torch\b", r))
    return found.removeprefix("torch").strip()


def ends() -> list[str]:
    """Return how pip is asked for the first and the last release of the range."""
    oldest = re.search(r">=([\d.]+)", allowed())[1]
    return [f"=={oldest}.0" if oldest.count(".") == 1 else f"=={oldest}", allowed()]


def run(*words: str | Path, **more) -> int:
    print("+", *words, flush=True)
    return subprocess.run([str(word) for word in words], cwd=ROOT, **more).returncode


def examine(wanted: str, folder: Path, tests: list[str]) -> tuple[str, str]:
    """Return the torch that was found for ``wanted``, and what the tests said in an environment with it."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet")
    if run(*pip, f"torch{wanted}", "-e", f"{ROOT}[dev]"):
        return wanted, "not installed"
    found = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    status = run(folder / "bin" / "pytest", "-q", "-m", "not slow and not gpu", *tests, env=environment)
    return found, "FAIL" if status else "pass"


def main() -> int:
    """Examine the releases and print a line for each; returns 1 if a test failed with one."""
    parser = argparse.ArgumentParser(description="Tests of replay against releases of torch.")
    parser.add_argument("versions", nargs="*", help="releases, by default the first and the last that detgraph allows")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "torch-range", help="environments")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests")
    args = parser.parse_args()
    wanted = [f"=={version}" for version in args.versions] or ends()
    folders = [args.folder.resolve() / re.sub(r"[^\w.]+", "_", one).strip("_") for one in wanted]
    rows = [examine(one, folder, args.tests) for one, folder in zip(wanted, folders, strict=True)]
    print(f"== torch, allowed {allowed()}")
    print("\n".join(f"{found:<20} {result}" for found, result in rows))
    return int(any(result != "pass" for _, result in rows))


if __name__ == "__main__":
    sys.exit(main())
