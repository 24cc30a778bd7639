"""Eager work in a recording's memory: what outlives it moves out, and what cannot move costs the recording."""

from __future__ import annotations

import gc

import pytest
import torch

from detgraph.trainer.capture.lending import Loan, Memory, tensor_attributes
from emulator import EmulatedMemory
from steps import Fit, make_batch, make_model, twin


def stay(monkeypatch) -> None:
    """Leave where it is whatever outlives a loan, and do not notice."""
    monkeypatch.setattr(Loan, "_move", lambda self, tensors, left: set())


def validate(fit: Fit) -> None:
    """What validation does between two steps: the EMA in evaluation, which builds anchors once and keeps them."""
    with fit.network_step.lend("validation", lambda: tensor_attributes(fit.ema.ema)), torch.inference_mode():
        predictions = fit.ema.ema.eval()(make_batch(99)["img"])[0]
        fit.note(predictions.double().sum().item())


def test_anchors_of_validation_survive_replays(monkeypatch):
    """The second validation reads the first one's anchors, which lay where the replays in between have written."""
    pair = twin({2: validate, 5: validate}, steps=7, ema=True)
    pair.assert_same(replayed=6)
    assert pair.report.lent == {"validation": 2} and not pair.reasons
    stay(monkeypatch)
    assert twin({2: validate, 5: validate}, steps=7, ema=True).differences


def test_what_nobody_named_is_found_and_moved(monkeypatch):
    def keep(fit: Fit) -> None:
        with fit.network_step.lend("validation"):
            base = torch.arange(6.0)
            fit.memory["kept"] = (base, base[2:], {"deep": [torch.ones(3)]})

    def look(fit: Fit) -> None:
        base, view, nested = fit.memory["kept"]
        base += 1
        fit.note(base.tolist(), view.tolist(), nested["deep"][0].tolist())

    twin({2: keep, 4: look, 5: look}).assert_same(replayed=6)
    stay(monkeypatch)
    assert twin({2: keep, 4: look, 5: look}).differences


def test_moving_keeps_identity_aliases_and_values():
    memory = EmulatedMemory()
    with memory.routed():
        base = torch.arange(6.0)
        view, address = base[2:], base.data_ptr()
    assert len(memory.in_use()) == 1
    memory.move_out(base.untyped_storage())
    assert base.data_ptr() != address and memory.in_use() == set()
    memory.overwrite()
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    base[3] = 9.0
    assert view.tolist() == [2, 9, 4, 5] and view.data_ptr() == base.data_ptr() + 8


def test_a_move_that_does_not_move_is_noticed(monkeypatch):
    """Of the emulator: what stays where it was is still in use, is written over, and costs the recording."""
    monkeypatch.setattr(Memory, "move_out", lambda self, storage: None)
    memory = EmulatedMemory()
    with memory.routed():
        kept = torch.ones(3)
    memory.move_out(kept.untyped_storage())
    assert len(memory.in_use()) == 1
    memory.overwrite()
    assert kept.tolist() != [1, 1, 1]
    pair = twin({2: validate, 5: validate}, steps=7, ema=True)
    assert pair.reasons[0].startswith("validation left ")


def test_what_cannot_be_found_costs_the_recording(monkeypatch):
    """On a GPU that is a tensor which only C++ holds. The recording goes before its replay writes over it."""

    def keep(fit: Fit) -> None:
        with fit.network_step.lend("validation"):
            fit.memory["kept"] = torch.arange(6.0)

    def look(fit: Fit) -> None:
        fit.note(fit.memory["kept"].tolist())

    monkeypatch.setattr(gc, "get_objects", list)
    pair = twin({2: keep, 3: validate, 5: look}, steps=7, ema=True)
    pair.assert_same()
    assert pair.report.recordings == 2 and pair.report.lent == {"validation": 1}
    assert pair.reasons == ["validation left 1 tensors in the recording's memory"]


@pytest.mark.parametrize("where", ["in_use", "routed"])
def test_a_loan_that_cannot_be_made_costs_the_recording_and_no_more(where, monkeypatch, warned):
    def fail(fit: Fit) -> None:
        if fit.capture:
            monkeypatch.setattr(EmulatedMemory, where, broken)
        validate(fit)
        monkeypatch.undo()

    def broken(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pair = twin({3: fail}, steps=6, ema=True)
    pair.assert_same(replayed=2)
    assert pair.report.blocked == "lending the recording's memory failed: CUDA out of memory."
    assert pair.report.lent == {} and len(warned) == 1


def test_a_loan_that_cannot_be_settled_costs_the_recording_and_no_more(monkeypatch, warned):
    def lend(fit: Fit) -> None:
        with fit.network_step.lend("validation"):
            fit.memory["kept"] = torch.arange(6.0)
        monkeypatch.setattr(Loan, "settle", broken)

    def look(fit: Fit) -> None:
        fit.note(fit.memory["kept"].tolist())

    def broken(self, survivors):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pair = twin({2: lend, 5: look}, steps=6)
    pair.assert_same(replayed=1)
    assert pair.report.blocked == "replay failed: CUDA out of memory." and len(warned) == 1


def test_what_was_not_routed_is_not_counted_as_lent(monkeypatch):
    """Where torch cannot route a stream's allocations, validation runs beside the recording, and the report says so."""
    monkeypatch.setattr(EmulatedMemory, "lends", False)
    pair = twin({2: validate, 5: validate}, steps=7, ema=True)
    pair.assert_same(replayed=6)
    assert pair.report.lent == {}


def test_an_error_inside_gives_the_recording_up():
    def fail(fit: Fit) -> None:
        with fit.network_step.lend("validation"):
            fit.memory["half"] = torch.ones(3)
            raise ValueError("injected")

    pair = twin({3: fail}, steps=7, accept=ValueError)
    pair.assert_same()
    assert pair.report.recordings == 2 and pair.report.lent == {}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_tail_works_in_the_recordings_memory(accumulate, monkeypatch):
    """Its gradients are adopted there, and have to live on, until the optimizer or the end of the window."""

    def tail(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (1, *fit.shape[1:]))

    events = {3: tail, 6: tail}  # the first of a window: its gradients are adopted as they are
    pair = twin(events, steps=10, accumulate=accumulate)
    pair.assert_same(replayed=7)
    assert pair.report.lent == {"smaller batch": 2} and not pair.reasons
    stay(monkeypatch)
    assert accumulate == 1 or twin(events, steps=10, accumulate=accumulate).differences


def test_gradients_that_are_gone_before_the_next_replay_do_not_move(monkeypatch):
    """One after another they take as long as a step; with an optimizer step in every batch, none lives that long."""
    moved = []
    move_out = EmulatedMemory.move_out
    monkeypatch.setattr(EmulatedMemory, "move_out", lambda self, storage: (moved.append(1), move_out(self, storage)))

    def tail(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (1, *fit.shape[1:]))

    twin({2: tail}, steps=6).assert_same(replayed=4)
    alone, moved[:] = len(moved), []
    twin({2: tail}, steps=6, accumulate=2).assert_same(replayed=4)
    assert alone < 10 < 50 < len(moved)


def test_the_objective_that_an_average_keeps_is_among_its_attributes():
    model = make_model("tiny")
    model.criterion = model.init_criterion()
    parts = [model.criterion, *vars(model.criterion).values()]
    values = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    kept = [value for value in values if isinstance(value, torch.Tensor)]
    found = {id(tensor) for tensor in tensor_attributes(model)}
    assert kept and found >= {id(tensor) for tensor in kept}


@pytest.mark.parametrize("shape", [(3, 3, 64, 64), (1, 3, 96, 96)], ids=["larger", "other size"])
def test_other_shapes_work_in_memory_of_their_own(shape):
    def other(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, shape)

    pair = twin({4: other}, steps=7)
    pair.assert_same(replayed=5)
    assert pair.report.lent == {}


def test_a_tail_that_fails_returns_the_loan():
    def fail(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (1, *fit.shape[1:]))

        def fault() -> None:
            raise ValueError("injected")

        fit.before_backward = fault

    def heal(fit: Fit) -> None:
        fit.before_backward = lambda: None

    pair = twin({4: fail, 5: heal}, steps=8, accept=ValueError)
    pair.assert_same()
    assert not torch._C._len_torch_dispatch_stack()
