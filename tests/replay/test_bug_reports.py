"""One test for each public bug report that can show itself without a GPU, by its row in table A of the collection.

Each fault is shown with the protection off. A10 and A11 are in test_bug_reports_changes.py; A05a, A06, A14 and A17 need
whole fits: test_bug_reports_fits.py.
A08 (pin-memory threads), A09 (old autograd nodes on another stream) and A12 (what is gained) need CUDA, and are covered
by benchmarks/cuda_bug_reports.py; A15 and A16 (checkpoints, arguments) by tests/compat.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from ultralytics.nn.tasks import DetectionModel

import protection_off as off
from detgraph.trainer.capture import passes
from detgraph.trainer.capture.reasons import OTHER_SHAPE, RECORDING
from detgraph.trainer.capture.recording import Recording
from detgraph.trainer.parts import network, network_program
from steps import SHAPE, Fit, Wrapped, make_batch, twin

PRECISIONS = pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
YOLO26 = {"model": "yolo26n.yaml", "ema": True}


# A01: several backward passes per optimizer step ------------------------------------------------------------------


@PRECISIONS
def test_a01_gradients_accumulate_over_replays(amp, monkeypatch):
    """No live gradient is in the recorder's memory when a replay starts."""
    replay = Recording.forward
    static_at_start = []

    def noting(self, images) -> dict:
        static = {g.untyped_storage().data_ptr() for g in self.program.gradients.static}
        live = {p.grad.untyped_storage().data_ptr() for p in self.program.leaves if p.grad is not None}
        static_at_start.append(len(static & live))
        return replay(self, images)

    monkeypatch.setattr(Recording, "forward", noting)
    twin(steps=7, accumulate=3, amp=amp, **YOLO26).assert_same(replayed=6)
    assert set(static_at_start) == {0}

    static_at_start.clear()
    off.no_gradient_moves(monkeypatch)
    wrong = twin(accumulate=3, amp=amp)
    assert "gradients" in wrong.differences[0] and max(static_at_start) > 0


# A02, A03: autocast -----------------------------------------------------------------------------------------------


def test_a02_replays_see_new_weights_under_autocast(monkeypatch):
    """Recorded inside an autocast region whose cache holds the weights' casts, if nothing keeps it out.

    Such a region is refused as a whole, since the backward pass runs in it as well; what is in it must not leak anyway.
    """

    def enter(fit: Fit) -> None:
        fit.around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)

    def leave(fit: Fit) -> None:
        fit.around = Fit(False).around

    def double(fit: Fit) -> None:
        with torch.no_grad():
            fit.layer("0.conv").weight.mul_(2)

    events = {0: enter, 1: leave, 4: double}
    twin(events, amp=torch.bfloat16).assert_same(replayed=0)
    monkeypatch.setattr(network, "autocast_remains", lambda device: False)
    pair = twin(events, amp=torch.bfloat16)
    pair.assert_same(replayed=6)
    without = twin({0: enter, 1: leave}, amp=torch.bfloat16)
    assert pair.replaying.trace.losses[4] != without.replaying.trace.losses[4]
    assert pair.replaying.trace.losses[:4] == without.replaying.trace.losses[:4]

    monkeypatch.setattr(network_program, "parameter_aliases", contextmanager(own_parameters))
    monkeypatch.setattr(
        passes.Autocast, "forward", lambda self: torch.autocast("cpu", dtype=self.dtype, enabled=self.enabled)
    )
    off = twin(events, amp=torch.bfloat16)
    assert off.report.replayed == 6 and off.differences


def own_parameters(model):
    yield {p: p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "error", [None, RuntimeError("no"), KeyboardInterrupt()], ids=["success", "error", "interrupt"]
)
@pytest.mark.parametrize("cache", [True, False])
def test_a02_the_cache_flag_is_put_back(error, cache):
    before = torch.is_autocast_cache_enabled()
    fit = Fit(True, amp=torch.bfloat16)
    fit.recorder.fail_with = error
    torch.set_autocast_cache_enabled(cache)
    try:
        fit.run(1)
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    finally:
        found = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(before)
    assert found == cache and fit.network_step.recorded == (error is None)


class Attention(Wrapped):
    """A block that scales by a Python float before a matrix product, in full precision inside autocast."""

    def forward(self, x):
        x = self.inner(x)
        flat = x.flatten(2)
        with torch.autocast("cpu", enabled=False):
            flat = flat.float()
            weights = ((flat.transpose(1, 2) * 0.125) @ flat).softmax(-1)
            return x + (flat @ weights).view_as(x)


def attend(model: nn.Module) -> None:
    model.model[4] = Attention(model.model[4])


def test_a03_backward_is_recorded_outside_autocast(monkeypatch):
    twin(steps=2, amp=torch.bfloat16, shape=(2, 3, 128, 128), **YOLO26).assert_same(replayed=1)
    twin(steps=4, amp=torch.bfloat16, prepare=attend).assert_same(replayed=3)

    off.backward_under_autocast(monkeypatch)
    wrong = twin(steps=4, amp=torch.bfloat16, prepare=attend, options={"self_check": False})
    assert wrong.report.replayed == 3 and wrong.differences[0].startswith("gradients[1]")
    checked = twin(steps=4, amp=torch.bfloat16, prepare=attend)
    checked.assert_same(replayed=0)
    assert "of the step itself is off by" in checked.report.blocked


# A04: buffers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2])
def test_a04_recording_leaves_buffers_and_generators_alone(step, monkeypatch):
    def addresses(fit: Fit) -> list[int]:
        return [buffer.data_ptr() for buffer in fit.model.buffers()]

    options = {"record_at_step": step}
    fit = Fit(True, options=options, **YOLO26).run(step)
    before = addresses(fit)
    fit.run(1)
    assert fit.network_step.recorded and addresses(fit) == before
    twin(steps=step + 2, options=options).assert_same(replayed=1)

    off.no_restores(monkeypatch)
    wrong = twin(steps=step + 1, options=options)
    batches = [fit.layer("0.bn").num_batches_tracked.item() for fit in (wrong.eager, wrong.replaying)]
    assert batches[1] - batches[0] == 4  # two eager passes, the capture, the check


# A05b: recording again --------------------------------------------------------------------------------------------


def test_a05_records_again_as_often_as_it_was_retired():
    """Nothing rebinds ``forward``, so there is no dead recording for a later one to warm up on."""

    def flip(fit: Fit) -> None:
        fit.layer("3.bn").train(not fit.layer("3.bn").training)

    pair = twin({2 * i: flip for i in range(1, 6)}, steps=13)
    pair.assert_same(replayed=13 - 6)
    assert pair.report.recordings == 6 and len(pair.reasons) == 5
    model = pair.replaying.model
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.forward.__func__ is DetectionModel.forward


# A07: several sizes -----------------------------------------------------------------------------------------------


def test_a07_only_the_nominal_size_is_recorded(monkeypatch):
    def other_size(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (2, 3, 96, 96))

    events = {step: other_size for step in range(1, 7, 2)}
    pair = twin(events, accumulate=2)
    pair.assert_same(replayed=3)
    assert pair.report.eager == {RECORDING: 1, OTHER_SHAPE: 3} and pair.reasons == []
    assert pair.replaying.recorder.recorded == 2  # one forward, one backward

    off.no_shape_check(monkeypatch)
    assert twin(events).replaying.recorder.recorded == 2 * 7


# A13: the last batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_a13_the_last_batch_of_an_epoch_runs_eagerly(size, monkeypatch):
    def tail(fit: Fit) -> None:
        fit.batch = make_batch(fit.number, (size, *SHAPE[1:]))

    settings = {"shape": (4, *SHAPE[1:]), "accumulate": 2}
    pair = twin({2: tail, 5: tail, 8: tail}, steps=9, **settings)
    pair.assert_same(replayed=5)
    assert pair.report.eager == {RECORDING: 1, OTHER_SHAPE: 3} and pair.report.recordings == 1

    off.no_signature(monkeypatch)

    def blind_tail(fit: Fit) -> None:
        fit.network_step.shape = (size, *SHAPE[1:])
        tail(fit)

    def again(fit: Fit) -> None:
        fit.network_step.shape = settings["shape"]

    wrong = twin({2: blind_tail, 3: again}, steps=4, accept=(RuntimeError, IndexError), **settings)
    assert wrong.differences  # one picture is broadcast over four; three do not fit


# A18: frozen layers -----------------------------------------------------------------------------------------------


def freeze(*layers: int):
    """What upstream's ``freeze=`` and its ``_model_train`` do: no gradients, and statistics stand still."""

    def prepare(model: nn.Module) -> None:
        for i in layers:
            model.model[i].requires_grad_(False)
            for module in model.model[i].modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    return prepare


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (0, 3), ()], ids=str)
def test_a18_frozen_statistics_stay_and_modes_of_inner_modules_count(layers, monkeypatch):
    def evaluate(fit: Fit) -> None:
        fit.layer("8.cv1.bn").eval()

    def train(fit: Fit) -> None:
        fit.layer("8.cv1.bn").train()

    events = {2: evaluate, 4: train}
    pair = twin(events, prepare=freeze(*layers))
    pair.assert_same(replayed=4)
    assert len(pair.reasons) == 2 and "training of model.8.cv1.bn: True -> False" in pair.reasons[0]
    pristine = dict(Fit(False).model.named_buffers())
    model = pair.replaying.model
    for name, buffer in model.named_buffers():
        if int(name.split(".")[1]) in layers:
            assert torch.equal(buffer, pristine[name]), name
    for name, gradients in ((n, [g[n] for g in pair.replaying.trace.gradients]) for n, _ in model.named_parameters()):
        assert (set(gradients) == {None}) == (int(name.split(".")[1]) in layers), name

    off.no_signature(monkeypatch)
    wrong = twin(events, prepare=freeze(*layers))
    counts = [fit.layer("8.cv1.bn").num_batches_tracked.item() for fit in (wrong.eager, wrong.replaying)]
    assert counts[1] - counts[0] == 2
