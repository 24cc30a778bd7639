"""Fixtures of several folders or files. A conftest, or a file of tests, imports those that it wants."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from ultralytics.utils import LOGGER

from helpers import ROOT


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and the folder one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Return the list that our warnings are appended to while the test runs."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "capture_" in record.getMessage():
                lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """Put the measuring scripts' folder on the path, as running one of them does."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def script(name: str) -> ModuleType:
    """Return a measuring script; only where the fixture ``scripts`` is in force."""
    return importlib.import_module(name)
