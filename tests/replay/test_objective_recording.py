"""Recordings of the objective: proven before they count, without a trace where they fail, and gone with their fit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from detgraph.trainer.capture.reasons import RECORDING, TOO_EARLY
from detgraph.trainer.capture.recording import Recording
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.golden import digests
from detgraph.trainer.parts.objective import Objective
from detgraph.trainer.parts.objective_program import ObjectiveProgram
from emulator import EmulatingRecorder
from recorders import FailingRecorder, LyingRecorder
from steps import Fit, Twin, differences, make_batch, twin

ON = {"capture_objective": True}
FIRST = {TOO_EARLY: 1, RECORDING: 1}
STEPS = 6


def both(steps: int = STEPS, options: dict | None = None, **settings) -> Twin:
    return twin(None, steps, options={**ON, **(options or {})}, **settings)


# Proof ----------------------------------------------------------------------------------------------------------------


LIES = {  # name of the result, which tape, where in what it returns
    "loss": (0, lambda forward: forward[0]),
    "cls_loss": (0, lambda forward: forward[1][1:2]),
    "gradient of output 3": (1, lambda gradients: gradients[3]),
}


def lying(name: str, since: int = 1) -> Callable[[], LyingRecorder]:
    """Return a recorder whose recordings of the network are honest, and whose second one, the objective's, is not."""
    tape, find = LIES[name]
    return lambda: LyingRecorder(tape, find, since, lie=lambda first: first.add_(0.5), first=1)


@pytest.mark.parametrize("name", LIES)
def test_a_wrong_recording_is_never_used(name, warned):
    unchecked = both(options={"self_check": False}, recorder=lying(name), steps=4)
    assert unchecked.differences and dict(unchecked.report.objective.eager) == FIRST and not warned

    pair = both(recorder=lying(name), steps=4)
    pair.assert_same(replayed=3)  # the network's goes on
    report = pair.report.objective
    assert report.blocked.startswith(f"self-check: {name} of the replay is off by 0.5")
    assert report.recordings == report.replayed == 0 and not pair.replaying.objective.recorded
    assert dict(report.eager) == {**FIRST, report.blocked: 2}
    assert len(warned) == 1 and f"capture_objective: the rest of the fit trains eagerly: {report.blocked}" in warned[0]


@pytest.mark.parametrize("name", ["cls_loss", "gradient of output 3"])
def test_verify_notices_the_step_at_which_a_replay_goes_wrong(name, warned):
    """The self-check and one replay are right; the second, at step 3, is not."""
    blind = both(recorder=lying(name, since=3), steps=4)
    assert blind.differences and blind.report.objective.replayed == 2 and not warned

    pair = both(recorder=lying(name, since=3), options={"capture_objective": "verify"})
    report = pair.report.objective
    assert report.replayed == 2 and report.recordings == 1 and pair.report.replayed == STEPS - 1
    assert [(r["step"], r["reason"]) for r in report.retirements] == [(4, report.blocked)]
    assert report.blocked.startswith(f"self-check: {name} of the replay is off by 0.5")
    assert dict(report.eager) == {**FIRST, report.blocked: 2} and len(warned) == 1
    assert differences(*(fit.trace.before(3) for fit in (pair.eager, pair.replaying))) == []


# Failures -------------------------------------------------------------------------------------------------------------


def criterion_state(fit: Fit) -> list[dict]:
    """Return what is in the objective's dictionaries, tensors by identity."""
    criterion = fit.model.criterion
    parts = criterion, criterion.one2many, criterion.one2one, criterion.one2many.assigner
    return [{name: id(v) if hasattr(v, "__dict__") else v for name, v in vars(part).items()} for part in parts]


def test_a_failed_capture_leaves_no_trace(warned):
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    pair = both(4, recorder=lambda: FailingRecorder(error, 4), amp=torch.bfloat16, accumulate=2)
    pair.assert_same(replayed=3)
    report = pair.report.objective
    assert report.blocked == f"recording failed: {error}"
    assert dict(report.eager) == {**FIRST, report.blocked: 2} and report.recordings == 0 and len(warned) == 1


@pytest.mark.parametrize("capture", [3, 4])
def test_an_interrupt_in_the_capture_leaves_as_such_and_without_a_trace(capture):
    eager = Fit(False, accumulate=9).run(2)
    fit = Fit(True, accumulate=9, options=ON, recorder=lambda: FailingRecorder(KeyboardInterrupt(), capture)).run(1)
    before = criterion_state(fit)
    with pytest.raises(KeyboardInterrupt):
        fit.run(1)
    assert criterion_state(fit) == before
    assert digests.gradients(fit.model) == digests.gradients(eager.model)
    assert digests.digest(dict(fit.model.named_buffers())) == digests.digest(dict(eager.model.named_buffers()))
    assert digests.generators() == eager.trace.generators[1]
    assert not fit.objective.recorded and fit.report.objective.blocked is None and fit.network_step.recorded
    fit.end()


# The end --------------------------------------------------------------------------------------------------------------


def test_the_next_fit_of_the_model_records_again():
    def fits(capture: bool) -> Fit:
        """Run a fit and, over the same model, another."""
        fit = Fit(capture, options=ON).run(3).end()
        report = CaptureReport(fit.report.options)
        fit.memory["counts"] = counts = report.counts("capture_objective")
        blocked = None if capture else "eager twin"
        fit.objective = Objective(fit.model, EmulatingRecorder(), report.options, counts, blocked)
        fit.training_step.parts["objective"] = fit.objective
        return fit.run(3).end()

    pair = Twin(fits(False), fits(True))
    assert pair.differences == []
    counts = pair.replaying.memory["counts"]
    assert counts.replayed == 2 and dict(counts.eager) == {RECORDING: 1}  # the objective has been there before


def test_dropping_twice_and_without_a_recording_is_allowed():
    fit = Fit(True, options=ON)
    fit.objective.drop()
    fit.run(3)
    for _ in range(2):
        fit.objective.drop()
    assert not fit.objective.recorded and fit.network_step.recorded
    fit.run(2).end()
    assert fit.report.objective.recordings == 2 and fit.report.objective.replayed == 2


def test_dropping_between_forward_and_backward_refuses_the_backward():
    """Its memory is gone."""
    fit = Fit(True, options=ON).run(3)
    loss, _ = fit.training_step.forward(make_batch(3))
    fit.objective.drop()
    with pytest.raises(RuntimeError, match="its memory was reused"):
        loss.sum().backward()
    fit.end()


def losses_kept(steps: int) -> tuple[list, list[weakref.ref]]:
    """Return the losses of a fit that has ended, and references to what is large in it."""
    fit, kept = Fit(True, options=ON, ema=True), []
    for _ in range(steps):
        fit.run(1)
        kept.append(fit.loss)
    fit.end()
    refs = [weakref.ref(part) for part in (fit.model, fit.optimizer, fit.ema, fit.model.criterion, fit.objective)]
    return kept, refs


def alive(refs: list[weakref.ref]) -> list[str]:
    gc.collect()
    return [type(part).__name__ for ref in refs if (part := ref()) is not None]


@pytest.mark.parametrize("steps", [2, 4], ids=["recorded", "replayed"])
def test_a_loss_that_somebody_keeps_keeps_no_fit(steps, monkeypatch):
    kept, refs = losses_kept(steps)
    assert len(kept) == steps and alive(refs) == []
    if steps == 2:
        return  # nothing of the recording is in these losses
    release = Recording.release

    def half(self) -> None:
        program = self.program
        objective = program.objective if isinstance(program, ObjectiveProgram) else None
        release(self)
        if objective is not None:
            self.program, program.objective = program, objective

    monkeypatch.setattr(Recording, "release", half)
    kept, refs = losses_kept(steps)
    assert "E2ELoss" in alive(refs)


def predictions_alive(monkeypatch) -> list[str]:
    """Return what is left of the predictions of a replayed step when the step is over and its loss is kept."""
    refs, load = [], ObjectiveProgram.load

    def noting(self, segment, outputs, batch):
        refs.extend(map(weakref.ref, outputs))
        load(self, segment, outputs, batch)

    fit = Fit(True, options=ON).run(2)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectiveProgram, "load", noting)
        fit.run(1)
    kept, left = fit.loss, alive(refs)
    assert kept.grad_fn and fit.report.objective.replayed == 1 and refs
    fit.end()
    return left


class Keeping:
    """Takes an attribute's values, and never nothing."""

    def __set__(self, program, tensors):
        self.tensors = tensors or self.tensors

    def __get__(self, program, owner=None):
        return self.tensors

    tensors: tuple = ()


def test_predictions_go_with_their_step(monkeypatch):
    """They are views of the network's memory, which is lent: what is kept would be moved out of it, or block it."""
    assert predictions_alive(monkeypatch) == []
    monkeypatch.setattr(ObjectiveProgram, "leaves", Keeping())
    assert predictions_alive(monkeypatch) != []
