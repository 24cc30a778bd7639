"""Whatever goes wrong in what an eager fit does without, the fit goes on eagerly; an interrupt leaves nothing behind.

Errors and interrupts are put into our own functions and lines, one after the other, by the interpreter's own hooks.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from detgraph.trainer.capture import (
    contents,
    gradients,
    guards,
    holder,
    lending,
    memory,
    passes,
    proof,
    reach,
    recording,
    signature,
)
from detgraph.trainer.capture import state as states
from detgraph.trainer.parts import network, network_program
from emulator import EmulatingRecorder
from probe import SHAPE, ProbeFit

PARTS = {
    Path(m.__file__) for m in (contents, gradients, guards, lending, network_program, proof, reach, signature, states)
}
HOLDING = {Path(m.__file__) for m in (holder, memory, network, network_program, passes, recording, gradients)}
STEPS = 6
# These put back what has been moved: where they fail, no fit can go on, and they say so.
NO_WAY_ON = {"restore", "put_back", "fill", "refill", "refill_bytes", "fill_cells", "write"}
# These run in autograd's own backward or at the end, and neither takes memory nor asks the device.
PLAIN = {"load", "load_backward", "hand_out", "_own_is_free", "_have_own", "_count", "release", "_adopters"}


def called(frame) -> str | None:
    code = frame.f_code
    return f"{Path(code.co_filename).stem}.{code.co_name}" if Path(code.co_filename) in PARTS else None


def calls(mode: str | bool) -> list[tuple[str, int]]:
    """Return name and number of the calls to our parts in an undisturbed fit: the first and the last of each name."""
    counts: dict[str, int] = {}

    def note(frame, event, argument) -> None:
        if event == "call" and (name := called(frame)):
            counts[name] = counts.get(name, 0) + 1

    ProbeFit(mode).run(STEPS)  # some run once a process
    fit = ProbeFit(mode)
    sys.setprofile(note)
    try:
        fit.run(STEPS)
    finally:
        sys.setprofile(None)
    assert fit.report.replayed == STEPS - 1
    names = [name for name in counts if name.partition(".")[2] not in NO_WAY_ON | PLAIN and "<" not in name]
    return [(name, number) for name in names for number in sorted({1, counts[name]})]


@contextmanager
def failing(name: str, number: int) -> Iterator[list[str]]:
    """Raise what torch raises where memory is out, in the ``number``-th call of ``name``."""
    left, raised = [number], []

    def fail(frame, event, argument) -> None:
        if event == "call" and called(frame) == name:
            left[0] -= 1
            if left[0] == 0:
                raised.append(name)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    sys.setprofile(fail)
    try:
        yield raised
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("mode", [True, "verify"])
def test_an_error_anywhere_costs_the_recording_and_no_more(mode, warned):
    """Out of memory is the worst of them: upstream's loop would halve the batch for it, or end."""
    eager = ProbeFit(False)
    eager.step.holder.blocked = "eager twin"
    expected = eager.run(STEPS).seen
    trials = calls(mode)
    assert len({name for name, _ in trials}) > 40
    for name, number in trials:
        fit = ProbeFit(mode)
        with failing(name, number) as raised:
            fit.run(STEPS)
        assert raised and fit.seen == expected, (name, number)
        assert fit.report.steps == STEPS and all(fit.report.eager), (name, number)
        fit.step.drop()
    assert any("failed: CUDA out of memory" in text for text in warned)


def test_without_the_one_place_errors_leave_the_step(monkeypatch):
    @contextmanager
    def plainly(self, what: str = "") -> Iterator[None]:
        yield

    monkeypatch.setattr(holder.Holder, "attempting", plainly)
    left = 0
    for name, number in calls("verify"):
        try:
            with failing(name, number):
                ProbeFit("verify").run(STEPS)
        except torch.OutOfMemoryError:
            left += 1
    assert left > 40


# Interrupts --------------------------------------------------------------------------------------------------------


ENTERED = {"try:", "finally:"}  # lines of no instruction at which the interpreter looks for signals


class Watched(EmulatingRecorder):
    """Remembers the tapes that it has made; one that is gone has given its memory back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref] = []

    def capture(self, run: Callable):
        result, tape = super().capture(run)
        self._tapes.clear()  # a tape has no other friend than its recording
        self.made.append(weakref.ref(tape))
        return result, tape


def interrupted_at(number: int) -> tuple[ProbeFit, str | None]:
    """Run a fit and interrupt it at the ``number``-th line of what holds recordings; return it, and the line."""
    where: list[str] = []
    left = [number]

    def lines(frame, event, argument):
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() not in ENTERED:
            left[0] -= 1
            if left[0] == 0:
                where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return lines

    def trace(frame, event, argument):
        return lines if Path(frame.f_code.co_filename) in HOLDING else None

    fit = ProbeFit("verify", Watched())
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fit.run(3)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return fit, where[0] if where else None


def test_an_interrupt_at_any_line_leaves_an_ordinary_network_and_no_recording():
    number, lines = 1, set()
    while True:
        fit, where = interrupted_at(number)
        if where is None:
            break
        lines.add(where)
        fit.step.drop()
        alive = [tape for ref in fit.recorder.made if (tape := ref()) is not None]
        assert not fit.step.recorded and all(tape.released for tape in alive), where
        del alive
        parameters = [p for module in fit.model.modules() for p in module._parameters.values()]
        assert all(type(p) is nn.Parameter for p in parameters), where
        fit.step.model(torch.ones(SHAPE))["boxes"].sum().backward()
        number += 1
    assert len(lines) > 150
