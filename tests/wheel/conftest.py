"""What the tests of the package share: the wheel, built once, and environments that have nothing else of ours.

The wheel is built from a copy of the tree, so that no build folder of an earlier state can fill it up, and installed
into a fresh environment that borrows the running one's dependencies. Everything runs offline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from helpers import ROOT

FOLDERS = ("cfg", "models", "trainer", "patches")
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` outside the tree's influence and return its output; a failure shows all of it."""
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the tree."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=IGNORED)


@pytest.fixture(scope="session")
def wheel(tree, tmp_path_factory) -> Path:
    """Build the wheel from the copy, and from a second one of it: what the build leaves behind is not the tree."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(tree, work / "tree")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", work / "dist", work / "tree", cwd=work)
    (built,) = (work / "dist").iterdir()
    return built


def environment(home: Path, *what: str | Path) -> Path:
    """Install `what` into a fresh environment at `home`, which borrows the dependencies; returns its interpreter."""
    venv.create(home, symlinks=True, with_pip=False)
    interpreter = home / "bin" / "python"
    # A .pth line adds a folder behind the environment's own, without running that folder's .pth files: the dependencies
    # are found, the finder of an editable detgraph is not.
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check", "install", "--no-deps"]
    if "-e" in what:  # builds in the environment itself, so it has to find setuptools before
        (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
        pip += ["--no-build-isolation", "--ignore-installed"]
    if what:
        run(*pip, "--no-index", *what, cwd=home)
    # For a wheel it comes last, lest pip take an editable detgraph for installed here.
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return interpreter


@pytest.fixture(scope="session")
def python(wheel, tmp_path_factory) -> Path:
    """Return the interpreter of a fresh environment with the wheel in it and nothing else of ours."""
    return environment(tmp_path_factory.mktemp("installed") / "venv", wheel)
