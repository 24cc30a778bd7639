"""Mutation of what guards a recording of the objective: each guard is the only one that sees some change.

Perturbations of the process are the network's. That a fit needs the two guards of the objective itself is shown in
`test_objective_part`.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from ultralytics.utils.loss import v8DetectionLoss

from detgraph.trainer.capture.guards import Guards, process_guards
from perturb_network import PERTURBATIONS, Perturbation
from steps import Event, Fit

ON = {"capture_objective": True}
OWN = ("objective", "numbers of the objective")


def set_to(path: str, value: object) -> Event:
    """Give an attribute of the objective another value."""

    def event(fit: Fit) -> None:
        *owners, name = path.split(".")
        owner = fit.model.criterion
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)

    return event


def other_criterion(fit: Fit) -> None:
    fit.model.criterion = fit.model.init_criterion()


def moved(fit: Fit) -> None:
    """The same numbers elsewhere: a recording reads the old place."""
    fit.model.criterion.one2many.stride = fit.model.criterion.one2many.stride.clone()


def patched(fit: Fit) -> None:
    fit.cleanup.callback(setattr, v8DetectionLoss, "bbox_decode", v8DetectionLoss.bbox_decode)
    v8DetectionLoss.bbox_decode = lambda self, points, boxes: boxes


OBJECTIVE = {
    "another": Perturbation(other_criterion, "the objective was replaced"),
    "none": Perturbation(lambda fit: setattr(fit.model, "criterion", None), "the objective was replaced"),
    "a method": Perturbation(patched, "objective: v8DetectionLoss.bbox_decode() was replaced on its class"),
}
NUMBERS = {
    name: Perturbation(set_to(path, value), f"objective's {path}: {words}")
    for name, path, value, words in (
        ("a gain", "one2many.hyp.cls", 2.0, "(0.5,) -> (2.0,)"),
        ("classes", "one2one.nc", 3, "(2,) -> (3,)"),
        ("classes of the assigner", "one2many.assigner.num_classes", 3, "(2,) -> (3,)"),
        ("best places", "one2one.assigner.topk2", 3, "(1,) -> (3,)"),
        ("an exponent", "one2one.assigner.beta", 2.0, "(6.0,) -> (2.0,)"),
        ("class weights", "one2one.class_weights", torch.ones(1, 1, 2), "(None,) -> ("),
        ("a reduction", "one2many.bce.reduction", "sum", "('none',) -> ('sum',)"),
    )
}
STRIDE = "objective's one2one.assigner.stride.1: (8.0,) -> (16.0,)"
NUMBERS["a list"] = Perturbation(set_to("one2one.assigner.stride", [4.0, 16.0]), STRIDE)
NUMBERS["a place"] = Perturbation(moved, "objective's one2many.stride: (")
NUMBERS["one more"] = Perturbation(set_to("one2many.mine", 1), "objective's one2many.mine is new or gone")
OF_THE_PROCESS = [guard.name for guard in process_guards("cpu")]


@pytest.fixture(scope="module")
def fits() -> dict[bool, Fit]:
    """Return fits with a living recording of the objective: in FP32, and under autocast."""
    return {amp is not None: Fit(True, options=ON, amp=amp).run(2) for amp in (None, torch.bfloat16)}


def bake(fit: Fit, without: str = "") -> Guards:
    """Bake what the recording's guards read now, but for one of them."""
    guards = [guard for guard, _, _ in fit.objective.recording.program.guards._checks if guard.name != without]
    with fit.forward_context():
        return Guards(guards)


def change(guards: Guards, fit: Fit) -> str | None:
    """Return what the guards say of a step that comes now."""
    with fit.forward_context():
        return guards.change()


def test_every_guard_has_a_perturbation_and_is_there(fits):
    assert fits[False].objective.recording.program.guards.guards == [*OF_THE_PROCESS, *OWN]
    assert set(OF_THE_PROCESS) <= PERTURBATIONS.keys()


@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_only_this_guard_of_the_process_sees_it(name, fits):
    perturbation = PERTURBATIONS[name]
    fit = fits[bool(perturbation.settings.get("amp"))]
    guards, others = bake(fit), bake(fit, without=name)
    assert change(guards, fit) is None
    try:
        perturbation.event(fit)
        assert perturbation.says in change(guards, fit) and change(others, fit) is None
    finally:
        fit.cleanup.close()
        fit.context, fit.amp = nullcontext, torch.bfloat16 if fit is fits[True] else None


@pytest.mark.parametrize("guard, name", [(OWN[0], n) for n in OBJECTIVE] + [(OWN[1], n) for n in NUMBERS])
def test_only_this_guard_of_the_objective_sees_it(guard, name, fits):
    fit, perturbation = fits[False], {**OBJECTIVE, **NUMBERS}[name]
    criterion = fit.model.criterion
    parts = [part for head in (criterion.one2many, criterion.one2one) for part in (head, head.assigner, head.bce)]
    before = [(part, dict(vars(part))) for part in (fit.model, fit.model.args, *parts)]
    guards, others = bake(fit), bake(fit, without=guard)
    try:
        perturbation.event(fit)
        assert change(guards, fit).startswith(perturbation.says) and change(others, fit) is None
    finally:
        fit.cleanup.close()
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
    assert change(guards, fit) is None
