"""The check that our loop still follows the installed upstream's, and the log lines taken out of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER, checks, downloads

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.fit import upstream


def test_no_fit_of_the_tests_asks_the_network_for_a_font(monkeypatch) -> None:
    def asked(url, check=True):
        raise AssertionError(f"asked the network for {url}")

    monkeypatch.setattr(downloads, "is_url", asked)
    assert checks.check_font("Arial.ttf") == Path(os.environ["YOLO_CONFIG_DIR"]) / "Ultralytics" / "Arial.ttf"


def test_the_installed_loop_is_known() -> None:
    assert upstream.loop_drift() is None


def test_another_loop_is_drift_and_upstream_runs_its_own(monkeypatch, make_dataset, tmp_path, caplog) -> None:
    seen = []

    def _do_train(self):
        seen.append(type(self))

    monkeypatch.setattr(BaseTrainer, "_do_train", _do_train)
    drift = upstream.loop_drift()
    assert "8.4.183 to 8.4.190" in drift and "install one of these" in drift

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    LOGGER.addHandler(handler)
    try:
        data = make_dataset(tmp_path / "data", 4, 2)
        args = {"model": "yolo26n.yaml", "data": str(data), "device": "cpu", "project": str(tmp_path / "runs")}
        trainer = LightningDetectionTrainer(overrides={**args, "capture_network": True})
        trainer.train()
    finally:
        LOGGER.removeHandler(handler)
    assert seen == [LightningDetectionTrainer]
    assert len([line for line in records if "is not in force" in line and "8.4.183" in line]) == 1
    assert trainer.capture_report.blocked == drift


def test_a_loop_without_source_is_drift(monkeypatch) -> None:
    """As in a frozen application, which has no .py files."""
    names = {}
    exec("def _do_train(self): pass", names)
    monkeypatch.setattr(BaseTrainer, "_do_train", names["_do_train"])
    assert "cannot be read" in upstream.loop_drift()


def test_a_loop_of_the_detection_trainers_own_is_drift(monkeypatch) -> None:
    monkeypatch.setattr(DetectionTrainer, "_do_train", lambda self: None, raising=False)
    assert "a training loop of its own" in upstream.loop_drift()


@pytest.mark.parametrize("marker", [upstream.LOG_START, upstream.LOG_OUT_OF_MEMORY, upstream.LOG_COMPLETED])
def test_upstreams_log_lines_are_found_once(marker: str) -> None:
    assert upstream._log_statement(marker) is not None


def test_a_lost_log_line_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="0 log lines"):
        upstream._log_statement("a line that upstream never had")
