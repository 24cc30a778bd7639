"""Networks that do more than compute: what a replay would not do again keeps the fit eager, with its reason.

Each fault is shown first, with the protection off.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from detgraph.trainer.capture import reach, torch_private
from detgraph.trainer.capture.state import NetworkState
from detgraph.trainer.parts import network, observed
from perturb_network import attribute
from steps import Fit, Wrapped, twin, wrap

UNCHECKED = {"self_check": False}


class Drops(Wrapped):
    """Decides by Python's generator, as layers that mix or drop at random do."""

    def forward(self, x):
        return self.inner(x) * (0.5 if random.random() < 0.5 else 1.0)


class Mixes(Wrapped):
    """Draws a factor from NumPy's generator."""

    def forward(self, x):
        return self.inner(x) * float(np.random.beta(2.0, 2.0))


class Draws(Wrapped):
    """Draws a factor from a generator of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.dice = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.inner(x) * torch.rand((), generator=self.dice)


class Counts(Wrapped):
    """Counts its calls and computes with the count."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


class Rebinds(Wrapped):
    """Keeps a running mean by assignment: another tensor at every call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        x = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


class Remembers(Wrapped):
    """Keeps a running mean in a tensor that is no buffer, updated in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.mean = torch.zeros(())

    def forward(self, x):
        x = self.inner(x)
        return x - self.mean.mul_(0.9).add_(0.1 * x.detach().mean())


class Borrows(Wrapped):
    """Uses a weight that it does not own, held where modules do not look."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.borrowed = [inner.conv.weight]

    def forward(self, x):
        return self.inner(x) * (1 + self.borrowed[0].mean())


REASONS = {
    Drops: "the network draws random numbers on the host",
    Mixes: "the network draws random numbers on the host",
    Counts: "the network changes as it runs: attribute calls of model.3: 1 -> 2",
    Rebinds: "the network changes as it runs: buffer mean of model.3 was replaced",
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_what_a_forward_does_on_the_host_keeps_the_fit_eager(kind, monkeypatch):
    pair = twin(prepare=wrap(kind))
    pair.assert_same(replayed=0)
    assert pair.report.blocked.startswith(REASONS[kind])
    for look in ("drawn_on_the_host", "moved_by_forward", "moved_by_backward"):
        monkeypatch.setattr(observed.Observed, look, lambda *args: None)
    assert twin(prepare=wrap(kind), options=UNCHECKED).differences


def test_a_generator_of_a_layers_own_keeps_the_fit_eager(monkeypatch):
    pair = twin(prepare=wrap(Draws))
    pair.assert_same(replayed=0)
    assert pair.report.eager == {"random generator 'model.3.dice'": 7}
    monkeypatch.setattr(reach.Reach, "_obstruct", lambda *args: None)
    assert twin(prepare=wrap(Draws), options=UNCHECKED).differences


def test_a_tensor_that_is_no_buffer_is_put_back_like_one(monkeypatch):
    twin(prepare=wrap(Remembers)).assert_same(replayed=6)

    take = NetworkState.take.__func__

    def buffers_only(cls, module, device, more=()):
        state, number = take(cls, module, device), len(list(module.buffers()))
        return cls(state.buffers[:number], state.saved[:number], state.generators)

    monkeypatch.setattr(NetworkState, "take", classmethod(buffers_only))
    assert twin(prepare=wrap(Remembers)).differences


@pytest.mark.parametrize("kind", ["expanded", "inference"])
def test_a_buffer_that_nobody_can_write_to_is_no_obstacle(kind):
    def prepare(model: nn.Module) -> None:
        with torch.inference_mode(kind == "inference"):
            ones = torch.ones(1, dtype=torch.int64)
        model.model[3].register_buffer("marks", ones.expand(4) if kind == "expanded" else ones)

    twin(prepare=prepare).assert_same(replayed=6)


def test_the_recording_has_to_have_the_gradients_of_the_step_it_was_made_from():
    """Not only those of another pass under the same conditions, which may be wrong in the same way."""
    pair = twin(prepare=wrap(Borrows))
    pair.assert_same(replayed=0)
    assert "gradient of model.3.inner.conv.weight of the step itself is off by" in pair.report.blocked
    assert twin(prepare=wrap(Borrows), options=UNCHECKED).differences


def test_gradients_of_earlier_steps_and_hooks_are_not_taken_for_the_steps_own():
    def halve(model: nn.Module) -> None:
        model.model[3].conv.weight.register_hook(lambda gradient: 0.5 * gradient)

    twin(accumulate=3, steps=8, options={"record_at_step": 1}).assert_same(replayed=6)
    twin(prepare=halve).assert_same(replayed=6)


def test_hooks_of_several_parameters_keep_their_order(monkeypatch):
    """What they share, they would meet in another order: a replay hands all gradients over at once."""

    def noise(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))

    pair = twin(prepare=noise)
    pair.assert_same(replayed=0)
    assert next(iter(pair.report.eager)).startswith("hooks on ")
    monkeypatch.setattr(network, "recording_obstacle", lambda *args: None)
    monkeypatch.setattr(observed, "has_hooks", lambda parameter: True)
    assert twin(prepare=noise).differences


def test_verify_compares_what_the_replay_left_and_not_what_a_hook_made_of_it(monkeypatch):
    def clamp(model: nn.Module) -> None:
        model.model[3].conv.weight.register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))

    options = {"capture_network": "verify"}
    twin(prepare=clamp, options=options).assert_same(replayed=6)
    monkeypatch.setattr(network.GraphedNetworkStep, "_verify", late(network.GraphedNetworkStep._verify))
    assert (
        "gradient of model.3.conv.weight of the replay is off by" in twin(prepare=clamp, options=options).report.blocked
    )


def late(verify: Callable) -> Callable:
    """Look at the replay's results when the backward pass, hooks included, is over."""

    def look(self, before) -> None:
        self.recording.observed = self.recording.results()
        verify(self, before)

    return look


def test_an_autocast_region_around_the_backward_pass_keeps_the_fit_eager():
    pair = twin({0: lambda fit: setattr(fit, "around", lambda: torch.autocast("cpu", dtype=torch.bfloat16))})
    pair.assert_same(replayed=0)
    assert pair.report.blocked == "autocast is on during the backward pass"


# What the signature reads ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch_private.fp32_precision is None, reason="this torch has one flag for all operations")
def test_fp32_precision_may_be_set_by_operation():
    """Torch then refuses to tell the older flags; the change retires, and the fit goes on."""
    pair = twin({3: attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32")})
    pair.assert_same(replayed=5)
    assert pair.reasons[0].startswith("fp32 precision: ") and "-> tf32" in pair.reasons[0]


class Scales(Wrapped):
    """Multiplies by an attribute."""

    scale = 1.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.scale = 1.0

    def forward(self, x):
        return self.inner(x) * torch.as_tensor(self.scale).mean()


def test_what_cannot_be_compared_has_changed():
    """A number that became a vector: whether the two differ has no single answer."""
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool([(1.0,)] != [(torch.ones(2),)])
    pair = twin({3: lambda fit: setattr(fit.layer("3"), "scale", torch.tensor([0.5, 0.6]))}, prepare=wrap(Scales))
    pair.assert_same(replayed=5)
    assert pair.reasons[0].startswith("module attributes: ")


def test_a_reason_is_one_line_that_a_log_can_bear():
    def text(fit: Fit) -> None:
        fit.layer("3").scale = "1\n" * 999

    pair = twin({3: text, 4: reset}, prepare=wrap(Scales), accept=(TypeError, ValueError))
    assert "\n" not in pair.reasons[0] and len(pair.reasons[0]) <= 400


def reset(fit: Fit) -> None:
    fit.layer("3").scale = 1.0
