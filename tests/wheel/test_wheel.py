"""The wheel, as a user gets it: it holds what the tree holds, and works where neither tree nor editable install is."""

from __future__ import annotations

import configparser
import email
import hashlib
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers import ROOT

from .conftest import FOLDERS, environment, run

# SHA-256 of the text as the FSF publishes it.
AGPL = "0d96a4ff68ad6d4b6f1f30f713b18d5184912ba8dd389f86aa7710db079abcb0"


def test_contents_are_the_trees(tree, wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(tree).as_posix() for f in FOLDERS for path in (tree / f).rglob("*") if path.is_file()}
    assert packed == {f"detgraph/{name.removeprefix('trainer/namespace/')}" for name in files}
    assert {Path(n).suffix or Path(n).name for n in packed} <= {".py", ".yaml", ".json", ".typed", "series"}
    assert {f"detgraph/{folder}/py.typed" for folder in FOLDERS} <= packed


def test_every_package_of_the_tree_is_listed(tree):
    setup = configparser.ConfigParser()
    setup.read(tree / "setup.cfg")
    packages = {init.parent.relative_to(tree).parts for f in FOLDERS for init in (tree / f).rglob("__init__.py")}
    named = {".".join(("detgraph", *parts)) for parts in packages}
    assert set(setup["options"]["packages"].split()) == {"detgraph", *named}
    mapped = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    assert mapped == {"detgraph": "trainer/namespace", **{f"detgraph.{folder}": folder for folder in FOLDERS}}
    assert set(setup.sections()) == {"options", "options.package_data"}  # all else is in pyproject.toml


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {n.partition("/")[0] for n in archive.namelist() if ".dist-info/" in n}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        licence = archive.read(f"{folder}/licenses/LICENSE")
    assert (metadata["Name"], metadata["License-Expression"]) == ("detgraph", "AGPL-3.0-or-later")
    assert metadata["License-File"] == "LICENSE" and licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Author"] and metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"
    required = {re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == {"torch", "torchvision", "lightning", "ultralytics", "pyyaml"}
    assert not metadata.get_all("Project-URL") and not metadata["Home-page"]  # there is none, and none is invented


def test_the_licence_is_the_published_text():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == AGPL


def test_sdist_has_licence_and_data(tree, tmp_path):
    """What a wheel is built from elsewhere: it must not lack what the wheel has."""
    shutil.copytree(tree, tmp_path / "tree")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path / "dist", cwd=tmp_path / "tree")
    (built,) = (tmp_path / "dist").iterdir()
    with tarfile.open(built) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(tree).as_posix() for f in FOLDERS for path in (tree / f).rglob("*") if path.is_file()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", *files} <= packed


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


SCRIPTS = [
    ("yolo", "version"),
    ("detgraph", "patches"),
    ("python", "-m", "detgraph.trainer", "version"),
    ("python", "-m", "detgraph", "version"),
]


@pytest.mark.parametrize("command", SCRIPTS, ids=" ".join)
def test_scripts_run(python, tmp_path, command):
    assert run(python.parent / command[0], *command[1:], cwd=tmp_path).strip()


def test_an_editable_install_is_the_same_namespace(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "tree")
    python = environment(tmp_path / "venv", "-e", tmp_path / "tree")
    assert "detgraph 0." in run(python, "-m", "detgraph", "version", cwd=tmp_path)
    code = (
        "import sys, detgraph, detgraph.cfg, importlib.util as util\n"
        "assert detgraph.cfg.__file__.startswith(sys.argv[1]) and getattr(detgraph, '__file__', None) is None\n"
        "assert not [n for n in ('detgraph.cli', 'detgraph.network', *sys.argv[2:]) if util.find_spec(n)]"
    )
    run(python, "-c", code, tmp_path / "tree", *FOLDERS, cwd=tmp_path)
