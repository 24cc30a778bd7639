"""Making a recording of the orthogonalization: proven before it counts, no trace of a failure, nobody else's calls."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest
import torch
from ultralytics.optim import MuSGD, muon

from detgraph import patches
from detgraph.patches import PatchDriftError
from detgraph.patches.replay_orthogonalization import installed, patch, replacing
from detgraph.trainer.parts.network import RECORDING
from detgraph.trainer.parts.orthogonalization import NOT_IN_PLACE, GraphedOrthogonalization, Step
from detgraph.trainer.parts.updates import Call, OrthogonalizationRecording
from optimizer_steps import Fit, Twin, run, twin
from recorders import FailingRecorder, LyingRecorder

STOCK = muon.muon_update
SECOND = "model.3.conv.weight"


def lying() -> LyingRecorder:
    """Return a recorder whose second tape leaves one element of its last tensor off by a hundredth."""
    return LyingRecorder(1, lambda updates: updates[-1], lie=lambda first: first.mul_(1.01))


# Proof ----------------------------------------------------------------------------------------------------------------


def test_a_wrong_recording_is_never_used(warned):
    unchecked = twin(recorder=lying, options={"self_check": False})
    assert unchecked.differences and unchecked.report.replayed == 5 and not warned

    pair = twin(recorder=lying)
    pair.assert_same(replayed=0)
    name = [name for name, p in pair.eager.model.named_parameters() if p is pair.eager.muon_groups[-1]["params"][-1]][0]
    assert f"self-check: update of {name} of the replay is off by" in pair.report.blocked
    assert pair.report.recordings == 0 and not pair.replaying.holder.recorded and len(warned) == 1


def test_updates_that_lie_otherwise_in_memory_are_refused(monkeypatch):
    def other_layout(recording: OrthogonalizationRecording) -> dict:
        results = replay(recording)
        return {name: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for name, t in results.items()}

    replay = OrthogonalizationRecording.replay
    monkeypatch.setattr(OrthogonalizationRecording, "replay", other_layout)
    pair = twin()
    pair.assert_same(replayed=0)
    assert "self-check: strides of update of model." in pair.report.blocked


def noisy(fit: Fit) -> None:
    """Let the iteration add what no seed accounts for, to matrices of 72 columns."""
    stock, noise = muon.zeropower_via_newtonschulz5, iter(range(1, 10**6))

    def iteration(matrices: torch.Tensor) -> torch.Tensor:
        result = stock(matrices)
        return result * (1 + next(noise) / 64) if matrices.shape[-1] == 72 else result

    muon.zeropower_via_newtonschulz5 = iteration
    fit.cleanup.callback(setattr, muon, stock.__name__, stock)


def test_a_function_that_does_not_reproduce_itself_is_kept_and_reported():
    fit = run(True, {0: noisy}, steps=3)
    assert fit.report.replayed == 2 and fit.report.blocked is None
    assert f"update of {SECOND}" in fit.report.unverifiable
    assert all("cv3" not in name for name in fit.report.unverifiable)  # 9 columns and less: above the noise


def test_what_is_reproducible_beside_the_noise_is_still_proven():
    fit = run(True, {0: noisy}, steps=3, recorder=lying)
    assert fit.report.replayed == 0 and "self-check: update of model.9.one2one_cv2" in fit.report.blocked


BAKED = {
    "momentum": lambda call, grads, momentums, beta, nesterov: Call.load(call, grads, momentums, 0.8, nesterov),
    "Nesterov": lambda call, grads, momentums, beta, nesterov: Call.load(call, grads, momentums, beta, True),
    "gradients": lambda call, grads, momentums, beta, nesterov: Call.load(call, call.zeros, momentums, beta, nesterov),
}


@pytest.mark.parametrize("name", BAKED)
def test_what_is_loaded_must_be_the_present_steps(name):
    """If a replay took the momentum of the recorded step, its Nesterov, or no gradients, the bytes would show it."""

    def bake(fit: Fit) -> None:
        for group in fit.optimizer.param_groups:
            group["nesterov"] = name != "Nesterov"
        if fit.holder is not None:
            for call in fit.holder.recording.calls:
                call.load = functools.partial(BAKED[name], call)

    assert twin({1: bake}).differences


# Failures -------------------------------------------------------------------------------------------------------------

ERRORS = [RuntimeError("CUDA error: operation not permitted"), torch.OutOfMemoryError("CUDA out of memory.")]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_capture_leaves_no_trace(error, number, warned, monkeypatch):
    released = []
    monkeypatch.setattr(
        OrthogonalizationRecording, "release", lambda self: released.append(weakref.ref(self)) or release(self)
    )
    gc.disable()
    try:
        pair = twin(recorder=lambda: FailingRecorder(error, number))
    finally:
        gc.enable()
    pair.assert_same(replayed=0)
    assert pair.report.blocked == f"recording failed: {error}" and len(warned) == 1
    assert pair.report.eager == {RECORDING: 1, pair.report.blocked: 5}
    assert released and all(recording() is None for recording in released)


release = OrthogonalizationRecording.release


def test_out_of_memory_while_a_step_is_seen_costs_the_recording_and_not_the_step(monkeypatch, warned):
    """The momentum has moved by then: an error that left the optimizer's step would leave half a step behind."""

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Call, "load", no_memory)
    pair = twin()
    pair.assert_same(replayed=0)
    assert pair.report.blocked == "recording failed: CUDA out of memory." and len(warned) == 1


def test_an_interrupt_in_the_capture_leaves_as_such():
    fit = Fit(True, recorder=lambda: FailingRecorder(KeyboardInterrupt(), 2))
    with fit.cleanup, pytest.raises(KeyboardInterrupt):
        fit.run(1)
    assert not fit.holder.recorded and fit.report.blocked is None
    assert fit.state() == {name: value for name, value in run(False, steps=1).trace[0].items() if name != "error"}


def test_a_device_that_does_not_answer_is_an_error():
    class Broken(FailingRecorder):
        def settle(self, recent: bool = False) -> None:
            if self.recorded:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fit = Fit(True, recorder=lambda: Broken(ERRORS[0], 2))
    with fit.cleanup, pytest.raises(RuntimeError, match="does not answer.*start again without the capture"):
        fit.run(1)


# Modes ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_in_inference_mode():
    """Memory that was made there could not be written to anywhere else."""

    fit = Fit(True)
    with fit.cleanup:
        fit.draw()
        with torch.inference_mode(), fit.holder.step(fit.optimizer):
            fit.optimizer.step()
        assert fit.report.eager == {"inference mode: True": 1} and not fit.holder.recorded


def test_a_recording_is_made_in_the_state_of_its_step_or_not_at_all():
    """Autocast around the optimizer's step only, and gone when the step is over and the recording would be made."""

    def around(fit: Fit) -> None:
        step = fit.optimizer.step

        def under_autocast(*args, **kwargs):
            with torch.autocast("cpu", dtype=torch.float16):
                return step(*args, **kwargs)

        fit.optimizer.step = under_autocast

    pair = twin({0: around}, steps=3)
    pair.assert_same(replayed=0)
    assert pair.report.eager == {"autocast: True -> False": 3} and pair.report.blocked is None


# Everybody else's calls -----------------------------------------------------------------------------------------------


def other_optimizer() -> tuple[list, MuSGD]:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(8, 1, 3, 3)) for _ in range(4)]
    optimizer = MuSGD([{"params": parameters, "use_muon": True, "lr": 0.1, "momentum": 0.9}])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters, optimizer


def expected_of_the_other() -> list:
    parameters, optimizer = other_optimizer()
    optimizer.step()
    return parameters


@pytest.fixture
def replaying():
    fit = Fit(True)
    with fit.cleanup:
        fit.run(2)
        fit.draw()
        yield fit


def test_another_optimizer_in_the_same_step_is_upstreams(replaying, monkeypatch):
    def both() -> list:
        parameters, optimizer = other_optimizer()
        with replaying.holder.step(replaying.optimizer):
            optimizer.step()
            single = muon.muon_update(parameters[0].grad, torch.zeros_like(parameters[0]))
            assert torch.equal(single, STOCK(parameters[0].grad, torch.zeros_like(parameters[0])))
            replaying.optimizer.step()
        return parameters

    assert all(map(torch.equal, both(), expected_of_the_other()))
    assert replaying.report.replayed == 2 and replaying.report.retirements == []
    monkeypatch.setattr(Step, "owns", lambda self, momentums: True)  # what the check keeps off
    both()
    assert replaying.report.retirements


def test_another_thread_is_upstreams(replaying):
    """While a step of ours is under way, a thread steps an optimizer of its own."""
    found = []

    def step() -> None:
        found.append(replacing.get())
        parameters, optimizer = other_optimizer()
        optimizer.step()
        found.extend(parameters)

    with replaying.holder.step(replaying.optimizer):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        replaying.optimizer.step()
    assert found[0] is None and all(map(torch.equal, found[1:], expected_of_the_other()))
    assert replaying.report.replayed == 2


def test_outside_a_step_it_is_upstreams(replaying):
    replaying.optimizer.step()
    assert replaying.report.steps == 2 and replacing.get() is None
    with pytest.raises(ValueError), replaying.holder.step(replaying.optimizer):
        raise ValueError
    assert replacing.get() is None and replaying.report.steps == 2


# The patch ------------------------------------------------------------------------------------------------------------


def test_the_patch_is_there_for_the_fits_that_ask_and_no_longer():
    patches.apply()
    assert muon.muon_update is STOCK
    patches.revert()
    with installed():
        assert patch.applied and muon.muon_update is not STOCK
        with installed():
            pass
        assert patch.applied
    assert muon.muon_update is STOCK
    with pytest.raises(ValueError), installed():
        raise ValueError
    assert muon.muon_update is STOCK


def test_drift_is_refused_before_anything_is_changed(monkeypatch):
    def muon_update(grad, momentum, beta=0.95, nesterov=True):
        return grad

    monkeypatch.setattr(muon, "muon_update", muon_update)
    with pytest.raises(PatchDriftError, match="source has changed"), installed():
        raise AssertionError
    assert muon.muon_update is muon_update


@pytest.fixture
def upstreams_again():
    yield
    muon.muon_update = STOCK
    patch.revert()


def test_somebody_elses_later_replacement_is_left_alone(upstreams_again, caplog):
    """It may call ours, and ours is upstream's outside of a step."""
    fit = Fit(True)
    with fit.cleanup:
        fit.run(2)
        ours = muon.muon_update

        def theirs(*arguments, **more):
            return [update * 2 for update in ours(*arguments, **more)]

        muon.muon_update = theirs
        fit.run(1)
        assert fit.report.replayed == 2
        muon.muon_update = STOCK
        fit.run(1)
        assert fit.report.eager[NOT_IN_PLACE] == 1
        muon.muon_update = theirs
    assert muon.muon_update is theirs and "was replaced after it" in caplog.text


def test_it_holds_no_gradient_of_the_step():
    """The network's recording retires when somebody keeps a gradient, and must not for us."""
    fit = Fit(True)
    with fit.cleanup:
        for _ in range(3):
            fit.draw()
            gradients = [weakref.ref(p.grad) for p in fit.model.parameters()]
            fit.step()
            assert not [gradient for gradient in gradients if gradient() is not None]


def test_dropping_gives_the_memory_back_and_may_be_repeated():
    fit = Fit(True).run(2)
    with fit.cleanup:
        held = [weakref.ref(tensor) for call in fit.holder.recording.calls for tensor in [*call.updates, *call.zeros]]
        for _ in range(2):
            fit.holder.drop()
        assert held and not [tensor for tensor in held if tensor() is not None]
        fit.run(2)
    assert fit.report.recordings == 2 and isinstance(fit.holder, GraphedOrthogonalization)
    assert Twin(run(False, steps=4), fit).differences == []
