"""The shipped schemas of reports and goldens; those of real fits are checked where these are run."""

import json
from importlib.resources import files

import pytest

from detgraph.cfg import REPORT_SCHEMA, CaptureOptions, remembered_options
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.golden import file as golden_file
from detgraph.trainer.why import report as why_report
from helpers import ROOT
from schemas import complaints

NUMBERS = {"capture": REPORT_SCHEMA, "golden": golden_file.SCHEMA, "why": why_report.SCHEMA}


@pytest.fixture
def report():
    """A report with all that a fit may tell."""
    report = CaptureReport(CaptureOptions(capture_network="verify", capture_orthogonalization=True))
    report.eager["batch of another shape"] += 2
    report.replayed, report.recordings = 7, 2
    report.seconds.update(recording=0.5, checking=0.25)
    report.retire("trainer.model was replaced")
    report.block("so it is")
    report.unverifiable.append("model.0.conv.weight")
    report.memory.update(peak_allocated=1, peak_reserved=2)
    report.lent["validation"] += 1
    report.orthogonalization.replayed = 3
    return report


def test_a_report_is_as_its_schema_says(report, tmp_path):
    report.write(tmp_path / "capture.json")
    content = json.loads((tmp_path / "capture.json").read_text())
    assert not complaints(content, "capture")
    assert not complaints(CaptureReport(CaptureOptions()).to_dict(), "capture")
    assert remembered_options(tmp_path) == report.options


@pytest.mark.parametrize("name", NUMBERS)
def test_a_schema_is_of_the_version_that_is_written(name):
    schema = json.loads((files("detgraph.cfg") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["schema"] == {"const": NUMBERS[name]}


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "goldens").glob("*.json")), ids=lambda path: path.stem)
def test_the_repositorys_goldens_are_as_their_schema_says(path):
    assert not complaints(golden_file.read(path), "golden")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.update(schema=2), "$.schema: 1 was expected"),
        (lambda content: content.pop("steps"), "'steps' is a required property"),
        (lambda content: content["options"].update(capture_network="maybe"), "$.options.capture_network"),
        (lambda content: content["eager"].update(reason=-1), "$.eager.reason"),
        (lambda content: content["orthogonalization"].update(later=1), "'later' was unexpected"),
    ],
)
def test_what_is_not_as_a_schema_says_is_found(report, change, said):
    content = report.to_dict()
    change(content)
    (found,) = complaints(content, "capture")
    assert said in found
