"""Stored goldens: today's fits, eager and replayed, against what was recorded.

Where the environment is the golden's, every number has to be the same; elsewhere losses have to be within the golden's
tolerance, and the proof is the exact comparison of the two fits of this run. A summary line says which rule applied.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from detgraph.trainer.golden import file as golden_file
from detgraph.trainer.golden.compare import SAME, compare
from helpers import JUDGED

from . import goldens

CPU = [case for case in goldens.CASES if case.device == "cpu"]
CUDA = [case for case in goldens.CASES if case.device != "cpu"]
STORED = sorted(goldens.HERE.glob("*.json"))


@pytest.fixture(scope="session")
def cpu_fits(tmp_path_factory):
    """Return the fits of two processes side by side, each with every second case: a fit keeps one core busy."""
    with ThreadPoolExecutor() as pool:
        halves = [pool.submit(goldens.record_cases, CPU[i::2], tmp_path_factory.mktemp("goldens")) for i in range(2)]
        return {**halves[0].result(), **halves[1].result()}


@pytest.fixture(scope="session")
def cuda_fits(tmp_path_factory):
    recorded = [case for case in CUDA if case.path.exists()]
    return goldens.record_cases(recorded, tmp_path_factory.mktemp("goldens"))


def check(case, fits: dict, note) -> None:
    """Judge both modes of a case, and note for the closing lines (conftest.py) which rule applied."""
    stored = golden_file.read(case.path)
    for mode in goldens.MODES:
        rule, wrong = goldens.judge(stored, fits[case.name, mode])
        note(JUDGED, (rule, f"{case.name} {mode}"))
        assert not wrong, f"{case.name} {mode}, judged by {rule}:\n{wrong}"
    eager, replay = (fits[case.name, mode] for mode in goldens.MODES)
    within = compare(eager, replay)
    assert within.verdict == SAME, within.table()
    assert eager["fit"]["replayed"] == 0 and replay["fit"]["replayed"] >= 0.9 * (len(replay["steps"]) - 1)


@pytest.mark.parametrize("case", CPU, ids=lambda case: case.name)
def test_golden(case, cpu_fits, record_property) -> None:
    check(case, cpu_fits, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA, ids=lambda case: case.name)
def test_cuda_golden(case, request, record_property) -> None:
    if not case.path.exists():
        pytest.skip(f"no {case.path.name} yet: record it on an H200 (make goldens DEVICE=0)")
    check(case, request.getfixturevalue("cuda_fits"), record_property)


def test_files_and_cases_agree() -> None:
    assert {case.path for case in CPU} <= set(STORED) <= {case.path for case in goldens.CASES}
    for path in STORED:
        stored = golden_file.read(path)
        case = next(case for case in goldens.CASES if case.path == path)
        assert path.stat().st_size < 150_000 and stored["tolerance"] == case.tolerance
        assert {k: stored["arguments"][k] for k in case.args} == case.args


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_any_flipped_bit_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    rng = random.Random(path.name)
    for place in rng.sample(range(len(data)), 100):
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        (tmp_path / "flipped.json").write_bytes(flipped)
        with pytest.raises(golden_file.GoldenError):
            golden_file.read(tmp_path / "flipped.json")


def test_a_flipped_bit_under_a_good_seal_fails(cpu_fits, tmp_path: Path) -> None:
    """Somebody who seals the file again still cannot change a number of it: the fit says otherwise."""
    case = CPU[0]
    fit = cpu_fits[case.name, "eager"]
    stored = golden_file.read(case.path)
    stored = stored if goldens.judge(stored, fit)[0] == "exact" else fit  # the exact rule, in any environment
    golden_file.write(stored, tmp_path / "golden.json")
    assert goldens.judge(golden_file.read(tmp_path / "golden.json"), fit) == ("exact", None)
    for part in ("losses", "parameters", "gradients", "schedule", "ema"):
        changed = json.loads(json.dumps(stored))
        step = changed["steps"][4]
        text = json.dumps(step[part])
        digit = max(i for i, c in enumerate(text) if c in "0123456789abcdef" and "p" not in text[max(0, i - 2) : i + 1])
        step[part] = json.loads(text[:digit] + f"{int(text[digit], 16) ^ 1:x}" + text[digit + 1 :])
        golden_file.write(changed, tmp_path / "golden.json")
        rule, wrong = goldens.judge(golden_file.read(tmp_path / "golden.json"), fit)
        assert rule == "exact" and f"at step 4 (epoch 1, optimizer step 4): {part}" in wrong, (part, wrong)


def test_other_environment_means_tolerance(cpu_fits) -> None:
    fit = cpu_fits[CPU[0].name, "eager"]
    other = json.loads(json.dumps(fit))
    other["environment"]["processor"] = "another"
    losses = other["steps"][1]["losses"]

    losses[0] = (float.fromhex(losses[0]) * (1 + 0.9 * fit["tolerance"]["relative"])).hex()
    rule, wrong = goldens.judge(other, fit)
    assert rule.startswith("relative") and "processor: another and" in rule and wrong is None
    losses[0] = (float.fromhex(losses[0]) * (1 + 1.1 * fit["tolerance"]["relative"])).hex()
    rule, wrong = goldens.judge(other, fit)
    assert rule.startswith("relative") and "beyond the tolerance at step 1: loss" in wrong
