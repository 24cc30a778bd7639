"""Mutation of the signature: each guard is the only one that sees some change, and the fit needs it to.

The names come from a real signature, so a new guard without a perturbation is red, and so is a guard that is gone.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from detgraph.trainer.capture.signature import Signature
from detgraph.trainer.golden import digests
from perturb_network import PERTURBATIONS, remove_guard
from steps import Fit, Twin, make_batch, make_model, run, twin

GUARDS = Signature(make_model(), make_batch(0)["img"]).guards
NAMES = list(dict.fromkeys([*GUARDS, *PERTURBATIONS]))
STEP, STEPS = 2, 5


@pytest.mark.parametrize("name", NAMES)
def test_every_guard_has_a_perturbation_and_is_there(name):
    assert name in PERTURBATIONS, f"no test for guard {name!r}"
    assert name in GUARDS, f"guard {name!r} is gone"


@pytest.mark.parametrize("name", [name for name in GUARDS if name in PERTURBATIONS])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_only_this_guard_sees_it(name):
    perturbation = PERTURBATIONS[name]
    fit = Fit(True, **perturbation.settings).run(2)
    fit.batch = make_batch(2)
    signature = fit.network_step.recording.signature
    with fit.cleanup:
        with fit.forward_context():
            assert signature.change(fit.batch["img"]) is None
        perturbation.event(fit)
        with fit.forward_context():
            change = signature.change(fit.batch["img"])
            assert change is not None and perturbation.says in change
            assert change.startswith(name) or not name.startswith(("input", "cudnn"))
            remove_guard([signature], name)
            assert signature.change(fit.batch["img"]) is None


@cache
def fit_with(name: str, capture: bool, guarded: bool = True) -> Fit:
    """Run a fit with the perturbation of a guard before one step, and the guard removed before it or not."""
    perturbation = PERTURBATIONS[name]

    def perturb(fit: Fit) -> None:
        perturbation.event(fit)
        if not guarded:
            remove_guard([fit.network_step.recording.signature], name)

    def look(fit: Fit) -> None:
        image = fit.memory.pop("image", None)
        fit.note(None if image is None else digests.digest(image.grad))

    events = {STEP: perturb, STEP + 1: look}
    return run(capture, events, STEPS, (RuntimeError, TypeError), **perturbation.settings)


def perturbed(name: str, guarded: bool) -> Twin:
    return Twin(fit_with(name, capture=False), fit_with(name, capture=True, guarded=guarded))


SHOWN = [name for name in GUARDS if name in PERTURBATIONS and PERTURBATIONS[name].effect != "state"]


@pytest.mark.parametrize("name", SHOWN)
def test_without_the_guard_the_fit_goes_wrong(name):
    unguarded = perturbed(name, guarded=False)
    assert all(retirement["step"] > STEP for retirement in unguarded.report.retirements)
    assert unguarded.report.replayed >= STEP and unguarded.differences
    raised = [len(fit.trace.errors) > 0 for fit in (unguarded.eager, unguarded.replaying)]
    if PERTURBATIONS[name].effect == "outcome":
        assert raised == [True, False]
    else:
        assert not raised[0]


@pytest.mark.parametrize("name", SHOWN)
def test_with_the_guard_it_retires_and_stays_right(name):
    pair = perturbed(name, guarded=True)
    pair.assert_same()
    assert pair.report.retirements[0]["step"] == STEP and PERTURBATIONS[name].says in pair.reasons[0]


INVISIBLE = [name for name in GUARDS if name in PERTURBATIONS and PERTURBATIONS[name].effect == "state"]


@pytest.mark.parametrize("name", [name for name in INVISIBLE if not name.startswith("input")])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_change_that_a_cpu_cannot_show_retires_too(name):
    pair = perturbed(name, guarded=True)
    pair.assert_same()
    assert pair.report.retirements[0]["step"] == STEP and PERTURBATIONS[name].says in pair.reasons[0]


def test_updates_in_place_do_not_retire_and_are_picked_up():
    def double(fit: Fit) -> None:
        with torch.no_grad():
            fit.layer("3.conv").weight.mul_(2)
            fit.layer("3.bn").running_mean.fill_(0.5)
        state = {name: 0.75 * value for name, value in fit.layer("2").state_dict().items()}
        fit.layer("2").load_state_dict(state)

    pair = twin({STEP: double}, STEPS)
    pair.assert_same(replayed=STEPS - 1)
    assert pair.reasons == []
