"""Fixtures of the folders that train step by step in process. A folder's conftest imports those that it wants."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from ultralytics.utils import LOGGER


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
