"""The gate: stages in order, red ends it, and the table tells. And what conftest promises about GPU tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gate
from helpers import ROOT


def stage(name, code):
    return gate.Stage(name, [sys.executable, "-c", f"raise SystemExit({code})"])


def test_all_green():
    done = gate.run([stage("one", 0), stage("two", 0)])
    assert [s.result for s in done] == ["pass", "pass"]
    assert all(s.seconds > 0 for s in done)
    assert gate.table(done).splitlines()[-1].endswith("pass")


def test_first_red_is_the_last_to_run(tmp_path):
    witness = tmp_path / "ran"
    late = gate.Stage("late", ["touch", str(witness)])
    done = gate.run([stage("one", 0), stage("two", 5), late])
    assert [s.result for s in done] == ["pass", "FAIL", "not run"]
    assert not witness.exists()
    assert [line.split()[-1] for line in gate.table(done).splitlines()] == ["pass", "FAIL", "run", "FAIL"]


def test_missing_command_is_red():
    assert gate.run([gate.Stage("lost", ["detgraph-no-such-command"])])[0].result == "FAIL"


@pytest.mark.parametrize("code", [0, 1])
def test_exit_status_and_table(monkeypatch, capfd, code):
    monkeypatch.setattr(gate, "stages", lambda venv, accelerator: [stage("only", code)])
    assert gate.main([]) == code
    out = capfd.readouterr().out
    assert "== only" in out and "== summary" in out


@pytest.mark.parametrize("venv", [Path(".venv"), Path("/elsewhere/venv")])
def test_stages_use_the_named_environment(venv):
    install, *rest = gate.stages(venv)
    assert f"VENV={venv}" in install.command
    assert all(Path(s.command[0]).parent == ROOT / venv / "bin" for s in rest)


def test_stages_cover_every_test_folder_and_the_accelerator():
    named = {word for s in gate.stages(None) for word in s.command if word.startswith("tests/")}
    folders = {f"tests/{p.parent.name}" for p in (ROOT / "tests").glob("*/test_*.py")}
    assert named == folders - {"tests/cuda"}
    *_, last = gate.stages(None, accelerator=True)
    assert last.name == "accelerator" and {"gpu", "tests/cuda", "tests/goldens"} <= set(last.command)


def test_make_help_lists_every_target():
    out = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = {line.split()[0] for line in out.splitlines()}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert listed == set(phony.removeprefix(".PHONY:").split())


@pytest.mark.parametrize("required, said", [("0", "1 skipped"), ("1", "1 error")])
def test_gpu_tests_skip_or_fail_with_a_reason(tmp_path, required, said):
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
        "-p",
        "conftest",
        test,
    ]
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "DETGRAPH_REQUIRE_GPU": required,
        "PYTHONPATH": str(ROOT / "tests"),
    }
    out = subprocess.run([*command, test], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert said in out.splitlines()[-1] and "no CUDA device (torch" in out, out
