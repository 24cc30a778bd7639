"""The wheel, as a user gets it: it holds what the tree holds, and works where neither tree nor editable install is.

The wheel is built from a copy of the tree, so that no build folder of an earlier state can fill it up, and installed
into a fresh environment that borrows the running one's dependencies. Everything runs offline.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
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


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the tree."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=IGNORED)


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    """Build the wheel from the copy, and from a second one of it: what the build leaves behind is not the tree."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(tree, work / "tree")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", work / "dist", work / "tree", cwd=work)
    (built,) = (work / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Return the interpreter of a fresh environment with the wheel in it and nothing else of ours."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    interpreter = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    # A .pth line adds a folder behind the environment's own, without running that folder's .pth files: the dependencies
    # are found, the finder of an editable detgraph is not. It comes last, lest pip take that one for installed here.
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return interpreter


def test_contents_are_the_trees(tree, wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(tree).as_posix() for f in FOLDERS for path in (tree / f).rglob("*") if path.is_file()}
    assert packed == {f"detgraph/{name}" for name in files}
    assert {Path(n).suffix or Path(n).name for n in packed} <= {".py", ".yaml", "series"}


def test_every_package_of_the_tree_is_listed(tree):
    setup = configparser.ConfigParser()
    setup.read(tree / "setup.cfg")
    packages = {init.parent.relative_to(tree).parts for f in FOLDERS for init in (tree / f).rglob("__init__.py")}
    assert set(setup["options"]["packages"].split()) == {".".join(("detgraph", *parts)) for parts in packages}
    mapped = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    assert mapped == {f"detgraph.{folder}": folder for folder in FOLDERS}


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert re.search(r"^License(-Expression)?: AGPL-3\.0-or-later$", metadata, re.M)
    assert re.search(r"^Requires-Dist: ultralytics", metadata, re.M)


def test_every_module_imports_from_the_wheel(python, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if n.startswith("detgraph/") and n.endswith(".py")]
    modules = sorted({n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in files})
    modules = [m for m in modules if not m.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    file = importlib.import_module(name).__file__\n"
        "    assert file.startswith(sys.prefix), file"
    )
    run(python, "-c", code, *modules, cwd=tmp_path)


def test_folder_names_are_not_top_level_modules(python, tmp_path):
    code = "import importlib.util, sys; assert not [n for n in sys.argv[1:] if importlib.util.find_spec(n)]"
    run(python, "-c", code, *FOLDERS, cwd=tmp_path)


def test_data_files_are_found(python, tmp_path):
    run(python, "-m", "detgraph.cfg.demo", "demo", cwd=tmp_path)
    code = (
        "from importlib.resources import files; import detgraph.cfg, detgraph.patches\n"
        "assert (files('detgraph.cfg') / 'recipes' / 'demo.yaml').is_file()\n"
        "assert (files('detgraph.patches') / 'series').is_file()"
    )
    run(python, "-c", code, cwd=tmp_path)


SCRIPTS = [("yolo", "version"), ("detgraph", "patches"), ("python", "-m", "detgraph.trainer", "version")]


@pytest.mark.parametrize("command", SCRIPTS, ids=" ".join)
def test_scripts_run(python, tmp_path, command):
    assert run(python.parent / command[0], *command[1:], cwd=tmp_path).strip()
