"""docs/ci/golden.yml does what it says: its commands, run as they stand there, where only a wheel is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from detgraph.trainer.golden import file as golden_file
from helpers import ROOT

from .conftest import environment

JOB = yaml.safe_load((ROOT / "docs" / "ci" / "golden.yml").read_text(encoding="utf-8"))["jobs"]["golden"]
COMMANDS = {step["name"]: step["run"] for step in JOB["steps"] if "run" in step}


@pytest.fixture
def step(wheel, tmp_path):
    """Return a function that runs a step of the job in a checkout of a company's, by a shell that stops at errors."""
    python = environment(tmp_path / "venv")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    # pip is the running environment's, told to install into the fresh one, without a network.
    pip = {
        "PIP_PYTHON": str(python),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_IGNORE_INSTALLED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}

    def run(name: str, **more: str) -> tuple[int, str]:
        env = {**inherited, "PATH": path, **pip, **JOB["env"], "DETGRAPH": str(wheel), **more}
        command = ["bash", "-e", "-c", COMMANDS[name]]
        done = subprocess.run(command, cwd=checkout, env=env, text=True, capture_output=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    run.checkout = checkout
    return run


def test_the_commands_find_a_fit_that_changed(step):
    assert list(COMMANDS) == ["Install", "Data", "Record", "Compare"]
    for name in ("Install", "Data", "Record"):
        status, said = step(name)
        assert status == 0, said
    status, said = step("Compare")
    assert status == 2 and "goldens/fit.json.gz does not exist" in said  # the first run

    (artifact,) = [s["with"]["path"] for s in JOB["steps"] if s.get("name") == "Keep"]
    (step.checkout / "goldens").mkdir()
    shutil.copy(step.checkout / artifact, step.checkout / "goldens" / "fit.json.gz")
    status, said = step("Record")
    assert status == 0, said
    status, said = step("Compare")
    assert status == 0 and said.startswith("same: "), said

    changed = shlex.join(word if word != "seed=0" else "seed=1" for word in shlex.split(JOB["env"]["FIT"]))
    status, said = step("Record", FIT=changed)
    assert status == 0, said
    status, said = step("Compare")
    assert status == 1 and said.startswith("different: ") and "part at step 0" in said, said

    stored = golden_file.read(step.checkout / "goldens" / "fit.json.gz")
    stored["environment"]["torch"] = "2.0.0"  # as on the runner of another year
    golden_file.write(stored, step.checkout / "goldens" / "fit.json.gz")
    status, said = step("Compare")
    assert status == 2 and "environments differ in torch: 2.0.0 and" in said, said
