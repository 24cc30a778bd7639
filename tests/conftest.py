"""What every test may count on: no network, no user settings, no display, two cores, and answers that can be read.

Those are whether a GPU was there that was promised, and by which rule goldens were judged.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

import helpers
import torch_range

# Upstream reads these once, at import; child processes inherit them. So they are set before any test module is loaded.
os.environ["YOLO_OFFLINE"] = "true"
os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp(prefix="detgraph-config-")
os.environ["MPLBACKEND"] = "Agg"
os.environ["PYTHONPATH"] = helpers.import_path()
runpy.run_path(str(helpers.STARTUP))  # this process has started already
atexit.register(shutil.rmtree, os.environ["YOLO_CONFIG_DIR"], ignore_errors=True)
helpers.put_font(Path(os.environ["YOLO_CONFIG_DIR"]))


def pytest_report_header() -> str:
    """Say which torch is tested, and which are allowed."""
    return f"torch {version('torch')} (allowed: {torch_range.allowed()})"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `gpu` test, with the reason, where CUDA is missing; fail it where DETGRAPH_REQUIRE_GPU=1 promised one."""
    if item.get_closest_marker("gpu") and (reason := helpers.missing_gpu()):
        if os.environ.get("DETGRAPH_REQUIRE_GPU") == "1":
            pytest.fail(f"DETGRAPH_REQUIRE_GPU=1, but {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of the real data sets (DETGRAPH_DATA, by default beside the repository) or skip."""
    root = Path(os.environ.get("DETGRAPH_DATA") or helpers.ROOT.parent / "shared" / "data").resolve()
    if not root.is_dir():
        pytest.skip(f"no data sets at {root}: set DETGRAPH_DATA to their folder")
    return root


@pytest.fixture(scope="session")
def make_dataset():
    """Return `helpers.make_dataset`, which child processes import without pytest."""
    return helpers.make_dataset


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say by which rule which goldens were judged; the tests noted it in their reports, which workers hand over."""
    judged: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for rule, name in (value for key, value in report.user_properties if key == helpers.JUDGED):
                    judged.setdefault(rule, []).append(name)
    for rule, names in judged.items():
        terminalreporter.write_line(f"goldens judged by: {rule} ({', '.join(names)})")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where a GPU was promised, say collected = passed, and fail when some test did anything else."""
    worker = hasattr(session.config, "workerinput")  # of xdist: it knows only of its own tests, and has no terminal
    if worker or os.environ.get("DETGRAPH_REQUIRE_GPU") != "1":
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed = len(reporter.stats.get("passed", []))
    print(f"\naccelerator: {session.testscollected} collected, {passed} passed")
    if passed != session.testscollected and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
