"""Mutation of the orthogonalization's signature: each guard is the only one that sees some change, and it is needed.

The names come from a real recording, so a new guard without a perturbation is red, and so is a guard that is gone.
"""

from __future__ import annotations

from functools import cache

import pytest

from detgraph.trainer.capture.guards import Guards
from optimizer_steps import Fit, Twin
from perturb_network import remove_guard
from perturb_orthogonalization import PERTURBATIONS

STEP, STEPS = 2, 5


def signatures(fit: Fit) -> list[Guards]:
    recording = fit.holder.recording
    return [recording.around, *(call.signature for call in recording.calls)]


def guards() -> list[str]:
    fit = Fit(True)
    with fit.cleanup:
        return list(dict.fromkeys(name for signature in signatures(fit.run(1)) for name in signature.guards))


GUARDS = guards()


def change(fit: Fit) -> str | None:
    """Return what the recording would say of the step that is coming."""
    with fit.context():
        for number, group in enumerate(fit.muon_groups):
            grads = [parameter.grad for parameter in group["params"]]
            momentums = [fit.optimizer.state[parameter]["momentum_buffer"] for parameter in group["params"]]
            if found := fit.holder.recording.change(number, grads, momentums):
                return found
    return None


def started(name: str, capture: bool) -> Fit:
    settings = dict(PERTURBATIONS[name].settings)
    before = settings.pop("before", None)
    fit = Fit(capture, **settings)
    if before is not None:
        before(fit)
    return fit


@cache
def fit_with(name: str, capture: bool, guarded: bool = True) -> Fit:
    """Run a fit with the perturbation of a guard before one step, and the guard removed before it or not."""
    perturbation = PERTURBATIONS[name]

    def perturb(fit: Fit) -> None:
        if not guarded:
            remove_guard(signatures(fit), name)
        perturbation.event(fit)

    fit = started(name, capture)
    with fit.cleanup:
        return fit.run(STEPS, {STEP: perturb}, (RuntimeError, TypeError, NotImplementedError)).end()


def perturbed(name: str, guarded: bool) -> Twin:
    return Twin(fit_with(name, capture=False), fit_with(name, capture=True, guarded=guarded))


@pytest.mark.parametrize("name", list(dict.fromkeys([*GUARDS, *PERTURBATIONS])))
def test_every_guard_has_a_perturbation_and_is_there(name):
    assert name in PERTURBATIONS, f"no test for guard {name!r}"
    assert name in GUARDS, f"guard {name!r} is gone"


@pytest.mark.parametrize("name", [name for name in GUARDS if name in PERTURBATIONS])
def test_only_this_guard_sees_it(name):
    fit = started(name, True)
    with fit.cleanup:
        fit.run(2).draw()
        assert change(fit) is None
        PERTURBATIONS[name].event(fit)
        found = change(fit)
        assert found is not None and found.startswith(name) and PERTURBATIONS[name].says in found
        remove_guard(signatures(fit), name)
        assert change(fit) is None


SHOWN = [name for name in GUARDS if name in PERTURBATIONS and PERTURBATIONS[name].effect != "state"]


@pytest.mark.parametrize("name", SHOWN)
def test_without_the_guard_the_fit_goes_wrong(name):
    unguarded = perturbed(name, guarded=False)
    assert unguarded.report.replayed >= STEP - 1 and unguarded.reasons == [] and unguarded.differences
    raised = [any(step["error"] for step in fit.trace) for fit in (unguarded.eager, unguarded.replaying)]
    assert raised == [False, PERTURBATIONS[name].effect == "outcome"]


@pytest.mark.parametrize("name", [name for name in GUARDS if name in PERTURBATIONS and name != "momentum device"])
def test_with_the_guard_it_retires_and_stays_right(name):
    pair = perturbed(name, guarded=True)
    pair.assert_same()
    assert pair.report.retirements[0]["step"] == STEP and PERTURBATIONS[name].says in pair.reasons[0]
