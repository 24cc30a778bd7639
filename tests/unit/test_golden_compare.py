"""How goldens are compared: every recorded number counts, tolerance and environments by their rules. No fit runs."""

from __future__ import annotations

import copy

import pytest

from detgraph.trainer.golden import file as golden_file
from detgraph.trainer.golden.compare import DIFFERENT, SAME, WITHIN, Tolerance, compare

from ..goldens import goldens


@pytest.fixture(scope="module")
def base() -> dict:
    """Return a stored golden, of eight steps."""
    return golden_file.read(goldens.HERE / "cpu_fp32_musgd.json")


def test_every_part_is_named(base) -> None:
    """Changing one recorded number of any part, at any step, makes the comparison name the part and the step."""
    for number in (0, 3, 7):
        for part in golden_file.PARTS:
            other = copy.deepcopy(base)
            value = other["steps"][number][part]
            if part == "losses":
                value[2] = (float.fromhex(value[2]) + 1e-7).hex()
            elif part == "schedule":
                value[1][0] = "0x1.0p-3"
            elif part == "scaler":
                other["steps"][number][part] = ["0x1.0p+10", 1]
            else:
                other["steps"][number][part] = "0" * 16
            found = compare(base, other)
            assert found.verdict == DIFFERENT and len(found.partings) == 1
            assert (found.first.part, found.first.step) == (part, number)
    for part in base["final"]:
        found = compare(base, {**base, "final": {**base["final"], part: "0"}})
        assert (found.verdict, found.first.part, found.first.step) == (DIFFERENT, f"final {part}", None)


def test_names_in_losses_and_schedule(base) -> None:
    other = copy.deepcopy(base)
    other["steps"][2]["losses"][1] = (2 * float.fromhex(other["steps"][2]["losses"][1])).hex()
    assert compare(base, other).first.name == base["loss_names"][1] == "box_loss"
    other = copy.deepcopy(base)
    other["steps"][2]["schedule"][3][1] = "0x1.0p-1"
    assert compare(base, other).first.name == "group 3 momentum"
    other = copy.deepcopy(base)
    del other["steps"][2]["gradients"]
    assert compare(base, other).first.how == "B has none at this step"


def test_tolerance_is_for_losses_of_the_first_steps(base) -> None:
    tolerance = Tolerance(1e-3, 3)
    assert compare(base, base, tolerance).verdict == SAME
    for step, factor, verdict in (
        (1, 1.0009, WITHIN),
        (1, 1.002, DIFFERENT),
        (5, 2.0, WITHIN),
        (1, float("nan"), DIFFERENT),
    ):
        other = copy.deepcopy(base)
        losses = other["steps"][step]["losses"]
        losses[0] = (float.fromhex(losses[0]) * factor).hex()
        assert compare(base, other, tolerance).verdict == verdict, (step, factor)
    short = {**base, "steps": base["steps"][:2]}
    assert compare(base, short, tolerance).verdict == DIFFERENT


def test_environment_rule(base) -> None:
    environment = base["environment"]
    patch = ".".join([*environment["python"].split(".")[:2], "99"])
    same = {**environment, "python": patch, "detgraph": "9", "lightning": "9"}
    assert golden_file.environment_differences(environment, same) == []
    for key in golden_file.EXACT_KEYS:
        assert key in environment
        assert len(golden_file.environment_differences(environment, {**environment, key: "9.9"})) == 1
    note = compare(base, {**base, "environment": {**environment, "torch": "2.0.0"}}).notes
    assert note == [f"environments differ in torch: {environment['torch']} and 2.0.0"]
