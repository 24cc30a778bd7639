"""Mutation of the holder: take one protection away, and a check that the whole program passes fails.

A check is a function that runs fits and says what is wrong; without the mutation it must say nothing.
"""

from __future__ import annotations

import pytest
import torch

import protection_off as off
from detgraph.trainer.golden import digests
from detgraph.trainer.parts import network
from perturb_network import use_a_weight_twice
from recorders import refusing
from steps import Event, Fit, make_batch, twin


def tail(fit: Fit) -> None:
    fit.batch = make_batch(fit.number, (1, 3, 64, 64))


def hooks(fit: Fit) -> None:
    weight = fit.layer("0.conv").weight
    weight.register_hook(lambda gradient: fit.note("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: fit.note("accumulated"))


def flip(fit: Fit) -> None:
    fit.layer("3.bn").train(not fit.layer("3.bn").training)


# Checks -----------------------------------------------------------------------------------------------------------


def same_bytes(events: dict[int, Event] | None = None, **settings):
    def check() -> list[str]:
        pair = twin(events, **settings)
        assert pair.report.replayed > 0
        return pair.differences

    return check


def same_bytes_after_a_failure() -> list[str]:
    pair = twin(recorder=lambda: refusing(RuntimeError("no")))
    assert pair.report.replayed == 0
    return pair.differences


def everything_verifiable() -> list[str]:
    return Fit(True).run(2).report.unverifiable


def tail_keeps_the_recording() -> list[str]:
    pair = twin({3: tail})
    return pair.differences + pair.reasons


def old_forward_refused() -> list[str]:
    fit = Fit(True).run(2)
    losses = []
    for seed in (50, 51):
        batch = make_batch(seed)
        losses.append(fit.model.loss(batch, fit.network_step(batch["img"]))[0].sum())
    try:
        losses[0].backward()
    except RuntimeError as error:
        return [] if "memory was reused" in str(error) else [str(error)]
    return ["the backward of an older forward went through"]


def nothing_outlives_the_fit() -> list[str]:
    return ["a recording is alive"] if Fit(True).run(2).end().network_step.recorded else []


def gradients_of_the_recording_are_not_live_after_the_end() -> list[str]:
    def hold(fit: Fit) -> None:
        fit.accumulate = 9

    fit = Fit(True).run(3, {2: hold})
    static = {gradient.untyped_storage().data_ptr() for gradient in fit.network_step.recording.gradients.static}
    fit.end()
    shared = [n for n, p in fit.model.named_parameters() if p.grad.untyped_storage().data_ptr() in static]
    return [f"gradient of {name} holds the recording's memory" for name in shared]


# What is taken away, and the check that notices -------------------------------------------------------------------

BF16 = {"amp": torch.bfloat16}
UNCHECKED = {"options": {"self_check": False}}  # which would notice, too


def autocast_around_the_first_step(fit: Fit) -> None:
    fit.around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_no_more(fit: Fit) -> None:
    fit.around = Fit(False).around


def same_bytes_in_a_region() -> list[str]:
    """Recorded in a region that the backward pass runs in as well, which is refused as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "autocast_remains", lambda device: False)
        return same_bytes(AROUND, **BF16, **UNCHECKED)()


AROUND = {0: autocast_around_the_first_step, 1: autocast_no_more}
PROTECTIONS = {
    "gradients move out of the way": (off.no_gradient_moves, same_bytes(accumulate=2)),
    "buffers and generators restored after recording": (off.no_restore("after"), same_bytes_after_a_failure),
    "buffers and generators restored before each pass": (off.no_restore("before"), everything_verifiable),
    "shape check": (off.no_shape_check, tail_keeps_the_recording),
    "serial check": (off.no_backward_checks, old_forward_refused),
    "aliases hide hooks": (off.no_aliases, same_bytes({0: hooks})),
    "weight cache as in the fit": (off.no_weight_cache, same_bytes(prepare=use_a_weight_twice, **BF16, **UNCHECKED)),
    "weight cache of its own": (off.foreign_weight_cache, same_bytes_in_a_region),
    "autocast as in the fit": (off.no_autocast, same_bytes(**BF16, **UNCHECKED)),
    "drop at the end": (off.no_drop, nothing_outlives_the_fit),
    "live gradients leave at the end": (
        off.no_copies_at_release,
        gradients_of_the_recording_are_not_live_after_the_end,
    ),
    "signature": (off.no_signature, same_bytes({3: flip, 5: flip})),
}


@pytest.mark.parametrize("name", PROTECTIONS)
def test_protection(name, monkeypatch):
    mutate, check = PROTECTIONS[name]
    assert check() == []
    mutate(monkeypatch)
    assert check() != [], f"nothing notices that there is no {name!r}"


def test_an_objective_that_ignores_another_output_is_refused():
    fit = Fit(True).run(2)
    predictions = fit.network_step(make_batch(50)["img"])
    with pytest.raises(RuntimeError, match="other outputs of the network"):
        predictions["one2many"]["boxes"].sum().backward()


def test_outputs_that_the_objective_ignores_carry_no_gradient():
    """Recorded with an objective of one branch, the other branch's outputs are constants and its weights stay."""

    fits = []
    for capture in (False, True):
        fit = Fit(capture)
        step = fit.network_step
        for seed in range(3):
            predictions = step(make_batch(seed)["img"])
            predictions["one2many"]["boxes"].permute(0, 2, 1).contiguous().square().sum().backward()
            step.after_backward()
        fits.append(fit)
    eager, replaying = (dict(fit.model.named_parameters()) for fit in fits)
    for name in eager:
        a, b = eager[name].grad, replaying[name].grad
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name
    assert fits[1].report.replayed == 2 and replaying["model.9.one2one_cv2.0.2.bias"].grad is None


def test_an_input_that_wants_a_gradient_gets_one_at_every_step():
    """Also when the very first batch did, so that it is no change."""

    def want(fit: Fit) -> None:
        if "image" in fit.memory:
            fit.note(digests.digest(fit.memory["image"].grad))
        fit.memory["image"] = fit.batch["img"].requires_grad_()

    for first in (0, 2):
        pair = twin({step: want for step in range(first, 6)})
        assert not pair.differences, pair.differences
        assert pair.report.eager["input requires_grad: True"] == 6 - first


class Damped(type(Fit(False).layer("4"))):
    """A block with a private scalar, as custom blocks have them."""

    def forward(self, x):
        return super().forward(x) * self._damping


def damp(model) -> None:
    model.model[4].__class__, model.model[4]._damping = Damped, 1.0


def test_private_attributes_of_modules_are_baked_in_too():
    pair = twin({3: lambda fit: setattr(fit.layer("4"), "_damping", 0.5)}, prepare=damp)
    pair.assert_same(replayed=5)
    assert "_damping of model.4: 1.0 -> 0.5" in pair.reasons[0]


def test_a_second_backward_of_the_observed_step_fails_like_autograds_own():
    fit = Fit(True)
    batch = make_batch(0)
    loss = fit.model.loss(batch, fit.network_step(batch["img"]))[0].sum()
    loss.backward(retain_graph=True)
    fit.network_step.after_backward()
    with pytest.raises(RuntimeError):
        loss.backward()
