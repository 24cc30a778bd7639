"""Every stage of the gate, red on a fault planted in a copy of the tree: a stage that cannot fail checks nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gate
from helpers import ROOT

pytestmark = pytest.mark.slow

ROOMS = ("cfg", "models", "trainer", "patches")
# stage -> file, text that is there, text that takes its place, and what narrows the stage to the tests concerned
FAULTS = {
    "lint": ("trainer/capture/report.py", "import json\n", "import json\nimport os\n", []),
    "format": ("trainer/capture/report.py", "SCHEMA = REPORT", "SCHEMA  =  REPORT", []),
    "drift": ("trainer/fit/upstream.py", "d8f45dcfe548", "d8f45dcfe549", []),
    "docs dead link": ("README.md", "(docs/design.md)", "(docs/desing.md)", []),
    "docs broken command": ("README.md", "make demo", "make dmeo", []),
    "docs broken key": ("README.md", "capture_network=True", "capture_netwrok=True", []),
    "unit": ("cfg/capture.yaml", 'bf16: "2.9"', 'bf16: "2.8"', ["-k", "options"]),
    "mutation": ("trainer/capture/gradients.py", "if adopters:", "if False:", ["-k", "probe or accumul", "-x"]),
    "parity": ("trainer/fit/loop.py", ">= t.accumulate", "> t.accumulate", ["-k", "same_bytes and musgd", "-x"]),
    "goldens": ("tests/goldens/cpu_fp32_adamw.json", '"losses": ["0x1.', '"losses": ["0x1.f', ["-k", "adamw", "-x"]),
    "compat": ("trainer/cli.py", 'mode == "train"', 'mode == "val"', ["-k", "test_cli", "-x"]),
    "wheel": ("setup.cfg", "detgraph.patches = series\n", "", ["-x"]),
    "accelerator": ("README.md", "make demo", "make demo", ["-x"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the tree, and a folder beside it through which its packages are imported."""
    folder = tmp_path_factory.mktemp("planted")
    ignore = shutil.ignore_patterns(".git", ".venv", ".carry", "runs", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder / "tree", ignore=ignore)
    (folder / "site" / "detgraph").mkdir(parents=True)
    for room in ROOMS:
        (folder / "site" / "detgraph" / room).symlink_to(folder / "tree" / room)
    return folder / "tree"


@pytest.mark.parametrize("name", FAULTS)
def test_stage_is_red_on_a_planted_fault(name: str, tree: Path) -> None:
    file, there, planted, narrow = FAULTS[name]
    environment_of_tests = Path(sys.executable).parent.parent
    stage = next(s for s in gate.stages(environment_of_tests, accelerator=True) if s.name == name.split()[0])
    command = [*stage.command, *narrow]
    environment = {**os.environ, "PYTHONPATH": str(tree.parent / "site"), "DETGRAPH_DATA": str(tree / "none")}
    if name == "accelerator":  # its fault is a machine without CUDA
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DETGRAPH_REQUIRE_GPU": "1"}
    path = tree / file
    sound = path.read_text()
    assert there in sound, f"{file} has no {there!r} to plant a fault in"
    path.write_text(sound.replace(there, planted))
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(sound)
    assert done.returncode != 0, f"{' '.join(command)} did not notice:\n{done.stdout[-2000:]}"
    if Path(command[0]).name == "pytest":  # red because a test was, not because none could run
        assert re.search(r"\d+ (failed|errors?)\b", done.stdout), done.stdout[-2000:] + done.stderr[-500:]
