"""Replayed steps of MuSGD leave the bytes of upstream's: parameters and optimizer state after every step."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from detgraph.trainer.golden import digests
from detgraph.trainer.parts.network import RECORDING
from detgraph.trainer.parts.orthogonalization import NOTHING_TO_DO, RETIRED
from detgraph.trainer.parts.updates import Call
from optimizer_steps import Event, Fit, Twin, run, twin

FIRST = "model.9.cv3.0.0.0.conv.weight"  # in the group with the higher rate, which steps first
SECOND = "model.3.conv.weight"
GROUPS = (20, 25)  # parameters in the two


def channels_last(model) -> None:
    model.to(memory_format=torch.channels_last)


def freeze(*parts: str):
    def prepare(model) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))

    return prepare


def no_gradient(*names: str) -> Event:
    def event(fit: Fit) -> None:
        for name in names:
            fit.parameter(name).grad = None

    return event


def nesterov(fit: Fit) -> None:
    for group in fit.optimizer.param_groups:
        group["nesterov"] = not group["nesterov"]


def overflow(fit: Fit) -> None:
    fit.parameter(SECOND).grad.view(-1)[3] = float("inf")


def reload(fit: Fit) -> None:
    """What a resume and a recovery from NaN do: every state tensor is replaced."""
    before = fit.buffer(FIRST)
    fit.optimizer.load_state_dict(deepcopy(fit.optimizer.state_dict()))
    assert fit.buffer(FIRST) is not before


CASES = {
    "plain": {},
    "channels_last": {"prepare": channels_last},
    "channels_last_scaler": {"prepare": channels_last, "scale": 1024.0},
    "frozen_backbone": {"prepare": freeze("model.0.", "model.1.", "model.2.", "model.3.")},
    "only_one_group": {"prepare": freeze("cv3")},
    "nesterov_toggles": {"events": {2: nesterov, 3: nesterov, 4: nesterov}},
    "no_nesterov_from_the_start": {"events": {0: nesterov}},
    "state_reloaded": {"events": {3: reload}},
    "scaler": {"scale": 1024.0},
    "double": {"prepare": lambda model: model.double()},
}


@pytest.mark.parametrize("name", CASES)
def test_same_bytes_and_one_recording(name):
    pair = twin(**CASES[name])
    pair.assert_same(replayed=5)
    assert pair.report.recordings == 1 and pair.reasons == [] and pair.report.eager == {RECORDING: 1}


def test_steps_that_the_scaler_skips_keep_the_recording():
    pair = twin({1: overflow, 4: overflow}, scale=1024.0)
    assert [step["scale"] for step in pair.eager.trace] == [1024.0, 512.0, 512.0, 512.0, 256.0, 256.0]
    pair.assert_same(replayed=3)
    assert pair.report.eager == {RECORDING: 1, NOTHING_TO_DO: 2} and pair.reasons == []


def test_a_fit_whose_first_steps_are_skipped_records_the_first_that_is_not():
    pair = twin({0: overflow, 1: overflow}, scale=1024.0)
    pair.assert_same(replayed=3)
    assert pair.report.eager == {NOTHING_TO_DO: 2, RECORDING: 1}


# Values that are no numbers, and zeros with a sign --------------------------------------------------------------------


def bits(pattern: int) -> float | torch.Tensor:
    return torch.tensor(pattern - (1 << 32) if pattern >> 31 else pattern, dtype=torch.int32).view(torch.float32)


ODD = {
    "infinities": [float("inf"), float("-inf")],
    "NaN": [float("nan")],
    "NaN with sign and payload": [bits(0xFFC12345), bits(0x7FC00001)],
    "denormals": [1e-42, -1e-42],
    "largest": [3.4e38, -3.4e38],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("where", ["gradient", "momentum"])
def test_odd_values(name, where):
    """Written into a few elements of both groups, in a step that replays."""

    def event(fit: Fit) -> None:
        for path in (FIRST, SECOND):
            flat = (fit.parameter(path).grad if where == "gradient" else fit.buffer(path)).view(-1)
            for i, value in enumerate(ODD[name]):
                flat[3 * i] = value

    def unclipped(fit: Fit) -> None:  # clipping by a norm that is not finite would make every gradient NaN first
        fit.optimizer.step()
        fit.optimizer.zero_grad()

    def fits(capture: bool) -> Fit:
        fit = Fit(capture)
        with fit.cleanup:
            fit.run(2)
            fit.draw()
            event(fit)
            for group in fit.optimizer.param_groups:
                group["lr"] = 1e-3
            if fit.holder is None:
                unclipped(fit)
            else:
                with fit.holder.step(fit.optimizer):
                    unclipped(fit)
            fit.trace.append(fit.state())
        return fit

    pair = Twin(fits(False), fits(True))
    pair.assert_same(replayed=2)


def test_zeros_with_a_sign():
    """A whole matrix and single elements of -0 reach the orthogonalization as such, and leave it as upstream's do."""
    seen = []

    def negative_zeros(fit: Fit) -> None:
        for tensor in (fit.parameter(SECOND).grad, fit.buffer(SECOND)):
            tensor.fill_(-0.0)
        for tensor in (fit.parameter(FIRST).grad, fit.buffer(FIRST)):
            tensor.view(-1)[::2] = -0.0
        if fit.holder is not None:
            for call in fit.holder.recording.calls:
                call.load = lambda *arguments, call=call: (Call.load(call, *arguments), note(call))

    def note(call: Call) -> None:
        seen.append(sum(int((update.signbit() & (update == 0)).sum()) for update in call.updates))

    pair = twin({3: negative_zeros}, steps=4)
    pair.assert_same(replayed=3)
    assert seen == [36, 16 * 8 * 9]


# Other calls than those that were recorded ----------------------------------------------------------------------------


def test_gradients_that_turn_none_and_come_back():
    """In the second group: the first has replayed by then, so the recording is made in the next step."""
    pair = twin({2: no_gradient(SECOND), 3: no_gradient(SECOND)}, steps=7)
    pair.assert_same(replayed=2)
    changed = f"gradients in muon group 1: {GROUPS[1]} -> {GROUPS[1] - 1} (without {SECOND})"
    back = f"gradients in muon group 1: {GROUPS[1] - 1} -> {GROUPS[1]} (with {SECOND})"
    assert pair.reasons == [changed, back] and [r["step"] for r in pair.report.retirements] == [2, 4]
    assert pair.report.eager == {RECORDING: 3, RETIRED: 2}


def test_a_change_in_the_first_call_is_recorded_at_once():
    pair = twin({2: no_gradient(FIRST)}, steps=6)
    pair.assert_same(replayed=3)
    assert [r["step"] for r in pair.report.retirements] == [2, 3] and pair.report.eager == {RECORDING: 3}


def test_another_parameter_of_the_same_form_may_take_the_place():
    """A recording bakes in forms, not parameters: nothing has to be recorded anew."""
    one, other = "model.9.cv2.1.0.conv.weight", "model.9.cv2.1.1.conv.weight"
    pair = twin({0: no_gradient(one), 1: no_gradient(other), 2: no_gradient(one)}, steps=3)
    assert pair.differences == [] and pair.report.recordings == 1 and pair.report.replayed == 2


def test_a_group_less_and_a_group_more():
    second = [name for name, p in Fit(False).model.named_parameters() if p.ndim == 4 and "cv3" not in name]
    pair = twin({2: no_gradient(*second), 3: no_gradient(*second)}, steps=6)
    pair.assert_same(replayed=2)  # the group that was left in step 2 replayed as it should
    assert pair.reasons == ["number of muon groups: 2 -> 1", "number of muon groups: 1 -> 2"]
    assert [r["step"] for r in pair.report.retirements] == [3, 4]
    assert pair.report.eager == {RECORDING: 3, RETIRED: 1}


def test_recordings_are_bounded(warned):
    events = {step: no_gradient(FIRST) for step in range(1, 20, 2)}
    pair = twin(events, steps=12, options={"max_recordings": 3})
    assert pair.differences == [] and pair.report.recordings == 3
    assert "3 recordings were retired, the last because of gradients in muon group 0" in pair.report.blocked
    assert len(warned) == 1 and "capture_orthogonalization: the rest of the fit trains eagerly" in warned[0]
    assert pair.report.eager[pair.report.blocked] == pair.report.steps - 3 - pair.report.replayed


def test_an_error_in_a_step_costs_that_step():
    """Once in the step that was to be recorded from, once in a replayed one, after the optimizer has stepped."""

    def fail(fit: Fit) -> None:
        zero_grad = fit.optimizer.zero_grad

        def raising(*args, **kwargs) -> None:
            fit.optimizer.zero_grad = zero_grad
            raise ValueError("injected")

        fit.optimizer.zero_grad = raising

    pair = twin({0: fail, 3: fail}, accept=ValueError)
    pair.assert_same(replayed=3)
    assert [step["error"] for step in pair.eager.trace] == ["ValueError", None, None, "ValueError", None, None]
    assert pair.report.eager == {RECORDING: 1} and pair.report.recordings == 1


# The state is upstream's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("began", [False, True], ids=["stock began", "replay began"])
def test_state_dicts_are_interchangeable(began):
    """Fits of four steps, cut in the middle: what either leaves, either goes on from."""
    whole = run(False, steps=4)
    first = run(began, steps=2)
    assert first.report.replayed == int(began)
    for goes_on in (False, True):
        fit = Fit(goes_on)
        with fit.cleanup:
            fit.model.load_state_dict(first.model.state_dict())
            fit.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
            fit.number = 2
            fit.run(2).end()
        assert fit.trace == whole.trace[2:] and fit.report.replayed == int(goes_on)
    state = first.optimizer.state_dict()
    assert digests.digest(state["state"]) == digests.digest(run(False, steps=2).optimizer.state_dict()["state"])
    assert {key for entry in state["state"].values() for key in entry} == {"momentum_buffer", "momentum_buffer_SGD"}


# What it costs --------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operations(fit: Fit) -> Counter:
    """Return what one more optimizer step dispatches; a tape issues its work without dispatching any."""
    fit.draw()
    if fit.holder is not None:
        around = fit.holder.recording.around
        place = around.guards.index("dispatch modes")  # the counter is one
        del around._checks[place]
        for call in fit.holder.recording.calls:
            call.tape.replay = lambda: None
    counter = Counting()
    fit.context = lambda: counter
    fit.step()
    return counter.operations


@pytest.mark.parametrize("model", ["tiny", "yolo26n.yaml"])
def test_a_replayed_call_dispatches_five_operations(model):
    """Of each of the two calls: two for the momentum, three to load what is orthogonalized."""
    stock, replaying = Fit(False, model).run(1), Fit(True, model).run(2)
    with replaying.cleanup:
        before, after = operations(stock), operations(replaying)
        ours = {name: count for name, count in (after - before).items()}
    print(f"\n{model}: {before.total()} operations, with the orthogonalization replayed {after.total()}")
    assert before["aten::baddbmm"] > 0 and after["aten::baddbmm"] == 0
    assert ours == {"aten::_foreach_copy_": 2, "aten::_foreach_mul_": 2}
    assert after.total() < before.total() / 10
