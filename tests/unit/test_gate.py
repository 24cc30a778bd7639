"""The gate: stages in order, red ends it, and the table tells. And what conftest.py promises to every session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gate
from helpers import JUDGED, ROOT, STARTUP


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
    files = [file for file in (ROOT / "tests").glob("*/test_*.py") if file != Path(__file__)]
    marked = [file.relative_to(ROOT) for file in files if "mark.gpu" in file.read_text()]
    assert marked and all({str(file), str(file.parent)} & set(last.command) for file in marked)


def test_make_help_lists_every_target():
    out = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = {line.split()[0] for line in out.splitlines()}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert listed == set(phony.removeprefix(".PHONY:").split())


# What conftest.py promises: in one process, and on the workers of the accelerator stage -------------------------------

HOW = pytest.mark.parametrize("how", [(), gate.BESIDE], ids=["one process", "workers"])
PASSES = "def test_it(record_property):\n    record_property({!r}, ({!r}, {!r}))"
SKIPS = "def test_it():\n    pytest.skip('not today')"
GPU = "@pytest.mark.gpu\ndef test_it():\n    pass"


def session(folder: Path, *how: str, required: str = "1", **files: str) -> tuple[int, list[str]]:
    """Run `files`, each of one test, under our conftest.py in a session of its own; return exit status and output."""
    for name, body in files.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "conftest"]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DETGRAPH_REQUIRE_GPU": required, "PYTHONPATH": path}
    done = subprocess.run([*command, *how, folder], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_gpu_tests_skip_with_a_reason(tmp_path):
    code, out = session(tmp_path, required="0", gpu=GPU)
    assert code == 0 and "1 skipped" in out[-1] and any("no CUDA device (torch" in line for line in out), out
    assert not any(line.startswith("accelerator:") for line in out)


@HOW
def test_gpu_tests_fail_with_a_reason_where_a_gpu_was_promised(tmp_path, how):
    code, out = session(tmp_path, *how, gpu=GPU)
    assert code == 1 and "1 error" in out[-1] and any("but no CUDA device (torch" in line for line in out), out
    assert out.count("accelerator: 1 collected, 0 passed") == 1


@pytest.mark.parametrize("tests, status", [({"skips": SKIPS}, 1), ({}, 5)], ids=["one skips", "none"])
@HOW
def test_a_session_that_did_less_than_was_promised_is_red(tmp_path, how, tests, status):
    tests = tests and {"passes": PASSES.format("", "", ""), **tests}
    code, out = session(tmp_path, *how, **tests)
    said = f"accelerator: {len(tests)} collected, {int('passes' in tests)} passed"
    assert (code, out.count(said)) == (status, 1), out


@HOW
def test_all_pass_and_the_rules_that_judged_goldens_are_told_once(tmp_path, how):
    rules = {"one": "exact", "two": "exact", "three": "loose"}
    code, out = session(tmp_path, *how, **{name: PASSES.format(JUDGED, rule, name) for name, rule in rules.items()})
    assert (code, out.count("accelerator: 3 collected, 3 passed")) == (0, 1), out
    exact, loose = sorted(line for line in out if line.startswith("goldens judged by: "))
    assert loose == "goldens judged by: loose (three)"
    assert exact in ("goldens judged by: exact (one, two)", "goldens judged by: exact (two, one)")


def test_every_process_of_the_tests_has_two_cores():
    code = "import os, sitecustomize; print(os.cpu_count(), sitecustomize.__file__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split(maxsplit=1) == ["2", f"{STARTUP}\n"] and os.cpu_count() == 2
