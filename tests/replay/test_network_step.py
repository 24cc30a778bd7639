"""A replayed step leaves the gradients an eager one leaves: who adopts them, keeps them, moves them or hooks on them.

Every fault is shown with the protection off first, so that a test which cannot fail would be seen.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.gradients import ReusedGradients
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.golden import digests
from detgraph.trainer.parts.network import OTHER_SHAPE, TOO_EARLY, GraphedNetworkStep
from emulator import EmulatingRecorder
from probe import Probe
from protection_off import no_backward_checks, no_gradient_moves
from steps import Fit, make_batch, twin

# The probe: one weight, derivatives chosen by hand ---------------------------------------------------------------


def probe(shared_pool: bool) -> tuple[GraphedNetworkStep, nn.Parameter]:
    """Return a network step that has recorded the probe, and its weight without a gradient."""
    options = CaptureOptions(capture_network=True)
    model, shape = Probe(), (1, 1, 1, 1)
    step = GraphedNetworkStep(model, EmulatingRecorder(shared_pool), shape, options, CaptureReport(options))
    step(torch.ones(shape))["boxes"].sum().backward()
    step.after_backward()
    assert step.recorded
    weight = model.model[0].weight
    weight.grad = None
    return step, weight


@pytest.mark.parametrize("shared_pool", [False, True])
@pytest.mark.parametrize("protected, expected", [(False, 6.0), (True, 4.0)])
def test_two_micro_batches(shared_pool, protected, expected, monkeypatch):
    """Derivatives 1 and 3 add up to 4; the second replay onto the adopted gradient makes them 3 + 3."""
    if not protected:
        no_gradient_moves(monkeypatch)
    step, weight = probe(shared_pool)
    for derivative in (1.0, 3.0):
        (derivative * step(torch.ones(1, 1, 1, 1))["boxes"].sum()).backward()
        step.after_backward()
    assert weight.grad.item() == expected
    assert step.report.replayed == 2


@pytest.mark.parametrize(
    "protected, shared_pool, survives", [(False, True, False), (False, False, True), (True, True, True)]
)
def test_a_gradient_lives_through_the_next_forward(protected, shared_pool, survives, monkeypatch):
    """In a shared pool the forward already writes over it, so moving gradients before the backward is too late."""
    if not protected:
        no_gradient_moves(monkeypatch)
    step, weight = probe(shared_pool)
    step(torch.ones(1, 1, 1, 1))["boxes"].sum().backward()
    step(torch.ones(1, 1, 1, 1))
    assert (weight.grad.item() == 1.0) == survives


# Misuses of a replayed backward ----------------------------------------------------------------------------------


def loss_of(fit: Fit, seed: int) -> torch.Tensor:
    batch = make_batch(seed)
    return fit.model.loss(batch, fit.network_step(batch["img"]))[0].sum()


def weight_gradient(fit: Fit) -> torch.Tensor:
    return fit.layer("0.conv").weight.grad.clone()


def older_forward(fit: Fit) -> torch.Tensor:
    older, _ = loss_of(fit, 50), loss_of(fit, 51)
    older.backward()
    return weight_gradient(fit)


def replaced_recording(fit: Fit) -> torch.Tensor:
    """Backward of a forward whose recording was retired and made anew meanwhile."""
    older = loss_of(fit, 50)
    fit.layer("0.bn").eps *= 2
    fit.run(1)
    assert not fit.capture or fit.report.recordings == 2
    older.backward()
    return weight_gradient(fit)


def retained(fit: Fit) -> torch.Tensor:
    loss = loss_of(fit, 50)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return weight_gradient(fit)


def create_graph(fit: Fit) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss_of(fit, 50), [fit.layer("0.conv").weight], create_graph=True)
    return gradient if gradient.requires_grad else torch.zeros(())


MISUSES = [
    (older_forward, "memory was reused"),
    (replaced_recording, "memory was reused"),
    (retained, "second backward"),
    (create_graph, "gradients of gradients"),
]


@pytest.mark.parametrize("misuse, message", MISUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_misuse_raises_instead_of_reading_reused_memory(misuse, message, monkeypatch):
    replaying = Fit(True, accumulate=9).run(3)
    with pytest.raises(RuntimeError, match=message):
        misuse(replaying)
    if misuse in (retained, replaced_recording):
        return  # refused, but not wrong: the same work on the same memory again; tapes that are gone
    no_backward_checks(monkeypatch)
    eager = Fit(False, accumulate=9).run(3)
    try:
        expected = misuse(eager)
    except RuntimeError:  # eager autograd sees that a buffer was written since: no result is right
        return
    assert not torch.equal(expected, misuse(Fit(True, accumulate=9).run(3)))


# What people do with gradients -----------------------------------------------------------------------------------


class Keeper(torch.optim.Optimizer):
    """Momentum whose buffer is the first gradient itself, as a careless optimizer has it."""

    def __init__(self, parameters) -> None:
        super().__init__(list(parameters), {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            buffer = self.state[p].get("momentum")
            if buffer is None:
                buffer = self.state[p]["momentum"] = p.grad
            else:
                buffer.mul_(0.9).add_(p.grad)
            p.sub_(buffer, alpha=1e-3)


def keep_zeros(fit: Fit) -> None:
    fit.zero_grad = lambda: fit.optimizer.zero_grad(set_to_none=False)


def skip(fit: Fit) -> None:
    fit.zero_grad = lambda: None if fit.number % 3 else fit.optimizer.zero_grad()


def move(fit: Fit) -> None:
    """The gradient of one parameter lives on as that of another of the same shape."""
    one, other = fit.layer("9.cv2.0.0.bn").weight, fit.layer("9.cv2.0.1.bn").weight

    def zero_grad() -> None:
        gradient = one.grad
        fit.optimizer.zero_grad()
        other.grad = gradient

    fit.zero_grad = zero_grad


def custom_optimizer(fit: Fit) -> None:
    fit.optimizer = Keeper(fit.model.parameters())


def move_out_of_the_model(fit: Fit) -> None:
    stranger = nn.Parameter(torch.zeros_like(fit.layer("0.conv").weight))

    def zero_grad() -> None:
        stranger.grad = fit.layer("0.conv").weight.grad
        fit.optimizer.zero_grad()
        fit.note(fit.memory.get("kept") is not None and fit.memory["kept"].sum().item())
        fit.memory["kept"] = stranger.grad

    fit.zero_grad = zero_grad


def keep_in_a_hook(fit: Fit) -> None:
    def hook(parameter) -> None:
        kept = fit.memory.setdefault("kept", [])
        fit.note(*(gradient.sum().item() for gradient in kept))
        if (fit.number + 1) % fit.accumulate == 0:  # earlier in a window, eager adds to what was kept
            kept.append(parameter.grad)

    fit.layer("0.conv").weight.register_post_accumulate_grad_hook(hook)


HABITS = [keep_zeros, skip, move, custom_optimizer, move_out_of_the_model, keep_in_a_hook]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_habits(habit, accumulate, monkeypatch):
    """The habit begins where gradients are the recording's already; the eager step's are nobody else's."""
    twin({3: habit}, steps=8, accumulate=accumulate).assert_same()
    no_gradient_moves(monkeypatch)
    assert twin({3: habit}, steps=8, accumulate=accumulate).differences


def test_a_step_without_accumulation_copies_no_gradient():
    fit = Fit(True).run(5)
    assert fit.network_step.recording.gradients.own == []


def test_a_window_copies_into_one_set_of_its_own(monkeypatch):
    """The first window that goes on moves its gradients one by one; those after it begin in the second set."""
    moved = []
    adopters = ReusedGradients._adopters
    monkeypatch.setattr(ReusedGradients, "_adopters", lambda *args: moved.append(adopters(*args)) or moved[-1])
    fit = Fit(True, accumulate=4).run(10)
    gradients = fit.network_step.recording.gradients
    first = [own.data_ptr() for own in gradients.own]
    fit.run(12)
    assert [own.data_ptr() for own in gradients.own] == first
    assert list(map(len, moved)) == [len(first)] == [len(list(fit.model.parameters()))]


def test_the_second_set_is_not_given_out_again_while_somebody_keeps_it(monkeypatch):
    def keep(fit: Fit) -> None:
        fit.memory["kept"] = [p.grad for p in fit.model.parameters()]

    def look(fit: Fit) -> None:
        fit.note(digests.digest(fit.memory["kept"]))

    events = {11: keep, 12: look, 14: look, 16: look}
    twin(events, steps=18, accumulate=4).assert_same()
    monkeypatch.setattr(ReusedGradients, "_own_is_free", lambda self: not self._own_are_out)
    assert twin(events, steps=18, accumulate=4).differences


def test_windows_of_one_step_stop_copying():
    """Accumulation that ends, as after an out-of-memory with a smaller nbs: the second set is not used any more."""
    fit = Fit(True, accumulate=4).run(10)
    gradients = fit.network_step.recording.gradients
    assert gradients.accumulates and gradients.own
    fit.accumulate = 1
    fit.run(6)
    assert not gradients.accumulates


def test_gradients_alive_at_the_end_are_the_fits_own():
    def hold(fit: Fit) -> None:
        fit.accumulate = 9

    eager, replaying = (Fit(capture).run(3, {2: hold}) for capture in (False, True))
    gradients = replaying.network_step.recording.gradients.static
    static = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    adopted = [p for p in replaying.model.parameters() if p.grad.untyped_storage().data_ptr() in static]
    assert len(adopted) == len(gradients)
    replaying.end()
    for gradient in gradients:
        gradient.fill_(float("nan"))
    assert eager.end().trace.end["live gradients"] == digests.gradients(replaying.model)


def test_gradients_alive_at_a_retirement_keep_their_values():
    def flip(fit: Fit) -> None:
        fit.layer("3.bn").train(not fit.layer("3.bn").training)

    pair = twin({4: flip, 7: flip}, steps=12, accumulate=3)
    pair.assert_same(replayed=9)
    assert len(pair.reasons) == 2


def test_parameter_hooks_fire_once_a_step_and_do_not_retire():
    def register(fit: Fit) -> None:
        weight = fit.layer("0.conv").weight
        weight.register_hook(lambda gradient: fit.note("hook", gradient.sum().item()))
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda p: fit.note("accumulated", p.grad.sum().item()))

    pair = twin({0: register}, steps=7)
    pair.assert_same(replayed=6)
    assert pair.reasons == [] and len(pair.replaying.trace.notes) == 14
    twin({3: register}, steps=7, accumulate=2).assert_same(replayed=6)


# The rest of the contract ----------------------------------------------------------------------------------------


def test_nan_in_the_input_replays_like_eager():
    def poison(fit: Fit) -> None:
        fit.batch["img"][0, 0, 0, 0] = float("nan")

    twin({3: poison}).assert_same(replayed=6)


def test_records_at_the_step_that_is_asked_for():
    pair = twin(steps=7, options={"record_at_step": 3})
    pair.assert_same(replayed=3)
    assert pair.report.eager[TOO_EARLY] == 3


def test_max_recordings(warned):
    def change(fit: Fit) -> None:
        fit.layer("3.bn").momentum *= 0.9

    pair = twin({2: change, 4: change, 6: change}, steps=9, options={"max_recordings": 2})
    pair.assert_same(replayed=2)
    assert pair.report.recordings == 2 and len(pair.reasons) == 2
    assert "momentum of model.3.bn" in pair.report.blocked and pair.report.eager[pair.report.blocked] == 5
    assert len(warned) == 1


def test_a_tail_keeps_the_recording():
    def tail(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (1, 3, 64, 64))

    pair = twin({2: tail, 4: tail}, accumulate=2)
    pair.assert_same(replayed=4)
    assert pair.report.eager[OTHER_SHAPE] == 2 and pair.reasons == []


def test_nothing_holds_a_dropped_recording():
    """A loss that somebody keeps holds its node of autograd, and that what is left of the recording: nothing else."""
    fit = Fit(True, accumulate=3).run(4)
    recording = fit.network_step.recording
    parts = [recording.view, recording.signature, recording.gradients, recording.memory, *recording._tapes, fit.model]
    alive, left = [weakref.ref(part) for part in parts], weakref.ref(recording)
    loss = fit.loss
    fit.end()
    del recording, parts, fit
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive) and left() is not None
    gc.disable()
    try:
        del loss
        assert left() is None, "only the garbage collector would free it"
    finally:
        gc.enable()
