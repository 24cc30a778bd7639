"""Making a recording: proven before it counts, without a trace where it fails, watched where that is asked for."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref

import pytest
import torch
from torch import nn

from detgraph.trainer.capture.recording import Recording
from detgraph.trainer.capture.state import NetworkState
from detgraph.trainer.golden import digests
from detgraph.trainer.parts.network import RECORDING, GraphedNetworkStep
from emulator import EmulatingRecorder
from recorders import FailingRecorder, LyingRecorder
from steps import Fit, Wrapped, differences, make_batch, twin, wrap


class Buffers:
    """Finds a buffer of the model that is being prepared, whatever the tape returns."""

    def __init__(self, path: str) -> None:
        self.path, self.model = path, None

    def prepare(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, result: object) -> torch.Tensor:
        return self.model.get_buffer(self.path)


BUFFER = Buffers("model.3.bn.running_var")
LIES = [
    ("output 1", 0, lambda outputs: outputs[1]),
    ("gradient of model.0.conv.weight", 1, lambda gradients: gradients[0]),
    ("buffer model.3.bn.running_var", 0, BUFFER),
]


@pytest.mark.parametrize("name, tape, find", LIES, ids=[lie[0] for lie in LIES])
def test_a_wrong_recording_is_never_used(name, tape, find, warned):
    lying = {"recorder": lambda: LyingRecorder(tape, find), "prepare": BUFFER.prepare}
    unchecked = twin(options={"self_check": False}, **lying)
    assert unchecked.differences and unchecked.report.replayed == 6 and not warned

    pair = twin(**lying)
    pair.assert_same(replayed=0)
    assert f"self-check: {name} of the replay is off by" in pair.report.blocked
    assert pair.report.recordings == 0 and not pair.replaying.network_step.recorded
    assert len(warned) == 1 and name in warned[0]


@pytest.mark.parametrize("name, tape, find", LIES, ids=[lie[0] for lie in LIES])
def test_verify_notices_the_step_at_which_a_replay_goes_wrong(name, tape, find, warned):
    """The self-check and two replays are right; the third, at step 3, is not."""
    lying = {"recorder": lambda: LyingRecorder(tape, find, since=4), "prepare": BUFFER.prepare}
    blind = twin(**lying)
    assert blind.differences and blind.report.replayed == 6 and not warned

    pair = twin(options={"capture_network": "verify"}, **lying)
    assert pair.report.replayed == 3 and pair.report.recordings == 1
    assert [r["step"] for r in pair.report.retirements] == [4] and name in pair.reasons[0]
    assert name in pair.report.blocked and pair.report.eager == {RECORDING: 1, pair.report.blocked: 3}
    assert len(warned) == 1
    up_to_there = [fit.trace.before(3) for fit in (pair.eager, pair.replaying)]
    assert differences(*up_to_there) == []


def test_verify_says_it_once_when_no_recording_is_left(warned):
    lying = {"recorder": lambda: LyingRecorder(*LIES[0][1:], since=3)}
    pair = twin(options={"capture_network": "verify", "max_recordings": 1}, **lying)
    assert "output 1" in pair.report.blocked and "recordings were retired" not in pair.report.blocked
    assert len(warned) == 1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_verify_changes_nothing_in_a_sound_fit(accumulate):
    twin(options={"capture_network": "verify"}, accumulate=accumulate).assert_same(replayed=6)


class Noisy(Wrapped):
    """Adds noise that no generator of the process accounts for."""

    def forward(self, x):
        return self.inner(x) + 1e-3 * torch.tensor(list(os.urandom(8))).view(1, 8, 1, 1)


def add_noise(model: nn.Module) -> None:
    model.model[8] = Noisy(model.model[8])


def test_a_network_that_does_not_reproduce_itself_is_kept_and_reported():
    fit = Fit(True, prepare=add_noise).run(4)
    assert fit.report.replayed == 3 and fit.report.blocked is None
    assert "output 0" in fit.report.unverifiable and "gradient of model.0.conv.weight" in fit.report.unverifiable
    assert "buffer model.0.bn.running_mean" not in fit.report.unverifiable  # above the noise


def test_what_is_reproducible_beside_the_noise_is_still_proven():
    recorder = lambda: LyingRecorder(0, BUFFER)  # noqa: E731
    fit = Fit(True, recorder=recorder, prepare=lambda model: (add_noise(model), BUFFER.prepare(model))).run(4)
    assert fit.report.replayed == 0 and "buffer model.3.bn.running_var" in fit.report.blocked


def test_verify_does_not_blame_the_noise():
    fit = Fit(True, prepare=add_noise, options={"capture_network": "verify"}).run(4)
    assert fit.report.replayed == 3 and fit.report.blocked is None


# Failures ---------------------------------------------------------------------------------------------------------


ERRORS = [
    RuntimeError("CUDA error: operation failed due to a previous error during capture"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError("out of memory"),
    ValueError("a block that looked at its call count"),
]


@pytest.mark.parametrize("capture", [1, 2])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_capture_leaves_no_trace(error, capture, warned):
    before = torch.is_autocast_cache_enabled()
    amp = torch.bfloat16 if capture == 2 else None
    pair = twin(steps=4, accumulate=2, amp=amp, recorder=lambda: FailingRecorder(error, capture))
    pair.assert_same(replayed=0)
    assert pair.report.blocked == f"recording failed: {error}"
    assert pair.report.eager == {RECORDING: 1, pair.report.blocked: 3}
    assert len(warned) == 1 and str(error) in warned[0]
    assert torch.is_autocast_cache_enabled() == before
    assert_ordinary(pair.replaying)


class Reads(Wrapped):
    """Asks the device for a value in the middle of the forward, as a block that clips by a norm may."""

    def forward(self, x):
        x = self.inner(x)
        return x * (1.0 if x.abs().max().item() < 1e9 else 0.5)


def test_a_capture_that_becomes_invalid_poisons_nothing(warned):
    """What comes next draws random numbers (dropout, here): without healing an error, long after its cause."""
    pair = twin(prepare=wrap(Reads))
    pair.assert_same(replayed=0)
    assert pair.report.blocked.startswith("recording failed: operation not permitted when stream is capturing")
    assert len(warned) == 1

    left = Fit(True, prepare=wrap(Reads), recorder=lambda: EmulatingRecorder(heals=False))
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        left.run(2)
    left.recorder.poison.__exit__(None, None, None)


def test_without_the_restore_a_failed_capture_shows(monkeypatch):
    monkeypatch.setattr(NetworkState, "restore", lambda self: None)
    pair = twin(steps=4, recorder=lambda: FailingRecorder(RuntimeError("no"), 2))
    assert any(text.startswith("buffers[0]") for text in pair.differences)


def assert_ordinary(fit: Fit) -> None:
    """The model has nothing of the capture in it: no attribute, hook, alias or foreign gradient."""
    pristine = Fit(False)
    for (name, module), (_, other) in zip(fit.model.named_modules(), pristine.model.named_modules(), strict=True):
        assert vars(module).keys() == vars(other).keys(), name
        assert not module._forward_hooks and not module._backward_hooks
    assert all(type(p) is nn.Parameter and not p._backward_hooks for p in fit.model.parameters())


def test_an_interrupt_in_the_capture_leaves_as_such_and_without_a_trace():
    eager = Fit(False, accumulate=9).run(1)
    fit = Fit(True, accumulate=9, recorder=lambda: FailingRecorder(KeyboardInterrupt(), 2))
    with pytest.raises(KeyboardInterrupt):
        fit.run(1)
    assert digests.gradients(fit.model) == digests.gradients(eager.model)
    assert digests.digest(dict(fit.model.named_buffers())) == digests.digest(dict(eager.model.named_buffers()))
    assert digests.generators() == eager.trace.generators[0]
    assert not fit.network_step.recorded and fit.report.blocked is None
    assert_ordinary(fit)
    fit.end()


def test_the_next_fit_of_the_process_records_again():
    failed = Fit(True, recorder=lambda: FailingRecorder(RuntimeError("no"), 1)).run(3).end()
    assert failed.report.recordings == 0
    options, report = failed.report.options, type(failed.report)(failed.report.options)
    again = GraphedNetworkStep(failed.model, EmulatingRecorder(), failed.shape, options, report)
    for seed in range(3):
        batch = make_batch(seed)
        failed.model.loss(batch, again(batch["img"]))[0].sum().backward()
        again.after_backward()
    assert report.replayed == 2


def test_a_failed_recording_is_not_kept(monkeypatch):
    made = []
    release = Recording.release

    def observed(recording: Recording) -> None:
        made.append(weakref.ref(recording))
        release(recording)

    monkeypatch.setattr(Recording, "release", observed)
    gc.disable()
    try:
        fit = Fit(True, recorder=lambda: FailingRecorder(RuntimeError("no"), 2)).run(1)
        assert fit.report.blocked and made and all(recording() is None for recording in made)
    finally:
        gc.enable()


def test_an_error_between_forward_and_backward_costs_one_step():
    """The first time while the step is being observed, the second time after a replayed forward."""

    def fail(fit: Fit) -> None:
        fit.before_backward = fail_once(fit)

    def fail_once(fit: Fit):
        def raise_once() -> None:
            fit.before_backward = lambda: None
            raise RuntimeError("injected")

        return raise_once

    pair = twin({0: fail, 4: fail}, steps=8, accumulate=3, accept=RuntimeError)
    pair.assert_same(replayed=6)
    assert len(pair.replaying.trace.errors) == 2 and pair.reasons == []


def test_dropping_twice_and_without_a_recording_is_allowed():
    fit = Fit(True)
    fit.network_step.drop()
    fit.run(2)
    for _ in range(2):
        fit.network_step.drop()
    with contextlib.closing(fit.cleanup):
        fit.run(2)
    assert fit.report.recordings == 2


@pytest.mark.parametrize("broken", [False, True], ids=["device answers", "device does not answer"])
def test_dropping_gives_the_memory_back_to_the_device(broken):
    """What follows a fit's last step allocates elsewhere: what stayed in the cache would be reserved beside it."""

    class Recorder(EmulatingRecorder):
        settled: list = []

        def settle(self, recent: bool = False) -> None:
            self.settled.append(fit.network_step.recorded)
            if broken and len(self.settled) > before:
                raise RuntimeError("an earlier error of the device")

    Recorder.settled, before = [], 10
    fit = Fit(True, recorder=Recorder)
    fit.run(3)
    before = len(Recorder.settled)
    fit.network_step.drop()
    assert Recorder.settled[before:] == [False]
    fit.end()
    assert len(Recorder.settled) == before + 1
