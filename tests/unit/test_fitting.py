"""What a fit does to the process for Lightning's sake, where several fits run at a time: nothing stays of it."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest

from detgraph.trainer.fit import under_lightning as fitting
from detgraph.trainer.fit.under_lightning import QUIET_LOGGERS, neutral_environment, quiet_lightning, unwarned


def state() -> tuple:
    return [logging.getLogger(name).level for name in QUIET_LOGGERS], list(warnings.filters)


@pytest.fixture(autouse=True)
def as_found():
    """Let every test find the same, and leave it so."""
    levels, filters = state()
    yield
    for name, level in zip(QUIET_LOGGERS, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    warnings.filters[:] = filters
    warnings._filters_mutated() if hasattr(warnings, "_filters_mutated") else None


def silent() -> bool:
    return all(logging.getLogger(name).level == logging.CRITICAL for name in QUIET_LOGGERS)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_overlapping_fits_leave_levels_and_filters_as_they_were(first_out):
    before = state()
    fits = [quiet_lightning(), quiet_lightning()]
    for fit in fits:
        fit.__enter__()
    fits[first_out].__exit__(None, None, None)
    assert silent(), "the other fit is still running"
    fits[1 - first_out].__exit__(None, None, None)
    assert state() == before


def test_what_the_program_sets_in_a_fit_stays():
    """In upstream's loop a callback's filters and levels are there after the fit, and so they are here."""
    logger = logging.getLogger(QUIET_LOGGERS[0])
    before = state()
    with quiet_lightning():
        warnings.filterwarnings("error", category=BytesWarning)
        logger.setLevel(logging.DEBUG)
    assert [one for one in warnings.filters if one not in before[1]] == [("error", None, BytesWarning, None, 0)]
    assert logger.level == logging.DEBUG


def test_lightning_is_silent_inside_and_nobody_else():
    with pytest.warns(UserWarning) as heard, quiet_lightning():
        warnings.warn_explicit("of Lightning", UserWarning, "x.py", 1, module="lightning.pytorch.trainer")
        warnings.warn_explicit("of the program", UserWarning, "x.py", 1, module="mine")
    assert [str(one.message) for one in heard] == ["of the program"]
    with pytest.warns(UserWarning, match="later"):
        warnings.warn_explicit("later", UserWarning, "x.py", 1, module="lightning.pytorch.trainer")


def in_threads(run, number: int = 4, times: int = 200) -> None:
    errors: list[BaseException] = []

    def repeat() -> None:
        try:
            for _ in range(times):
                run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_fits_in_threads_leave_nothing():
    def fit() -> None:
        with quiet_lightning():
            assert silent()
            with unwarned():
                warnings.warn("of a scheduler", UserWarning, stacklevel=1)

    before = state()
    in_threads(fit)
    assert state() == before


def test_each_of_several_trainers_is_built_without_the_variables(monkeypatch):
    """One that ends its building would bring them back for another."""
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "1")
    inside, outside, seen = threading.Event(), threading.Event(), []

    def build() -> None:
        with neutral_environment():
            inside.set()
            outside.wait(5)
            seen.append("PL_TRAINER_MAX_STEPS" in os.environ)

    other = threading.Thread(target=build)
    with neutral_environment():
        other.start()
        inside.wait(0.2)  # it may wait for us, or come in
        seen.append("PL_TRAINER_MAX_STEPS" in os.environ)
    outside.set()
    other.join()
    assert seen == [False, False]
    assert os.environ["PL_TRAINER_MAX_STEPS"] == "1"


def test_a_fit_within_a_fit(monkeypatch):
    """As when a callback trains another model."""
    before = state()
    with neutral_environment(), quiet_lightning(), neutral_environment(), quiet_lightning():
        assert silent()
    assert state() == before
    assert fitting.quiet.depth == 0
