"""What of a network nobody can follow, what others change between steps, and what is left to the self-check.

Each fault is shown first, with nobody looking for such state.
"""

from __future__ import annotations

import itertools
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from detgraph.trainer.capture.reach import Reach
from steps import Fit, Wrapped, twin, wrap

UNCHECKED = {"self_check": False}


class Draws(Wrapped):
    def __init__(self, inner: nn.Module, dice) -> None:
        super().__init__(inner)
        self.kept = {"dice": dice}

    def forward(self, x):
        return self.inner(x) * (0.5 if self.kept["dice"].random() < 0.4 else 1.0)


class Iterates(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.factors = itertools.cycle([1.0, 0.5, 0.25])

    def forward(self, x):
        return self.inner(x) * next(self.factors)


class Borrowed(Wrapped):
    """Trains a weight that no module owns: a recording would leave its gradient out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = [torch.ones(1, requires_grad=True)]

    def forward(self, x):
        return self.inner(x) * self.kept[0]


OBSTACLES = {
    "random generator 'model.3.kept['dice']'": [
        lambda inner: Draws(inner, random.Random(5)),
        lambda inner: Draws(inner, np.random.default_rng(12)),
        lambda inner: Draws(inner, np.random.RandomState(4)),
    ],
    "iterator 'model.3.factors'": [Iterates],
    "weight 'model.3.kept[0]' that is no parameter of a module": [Borrowed],
}


@pytest.mark.parametrize("says, kind", [(says, kind) for says, kinds in OBSTACLES.items() for kind in kinds])
def test_what_nobody_can_follow_keeps_the_fit_eager(says, kind, monkeypatch):
    def gradient(fit: Fit) -> None:
        if kind is Borrowed:
            fit.note(fit.layer("3").kept[0].grad.tolist())

    arguments = {"events": {step: gradient for step in range(1, 7)}, "prepare": wrap(kind)}
    pair = twin(**arguments)
    pair.assert_same(replayed=0)
    assert pair.report.blocked == says and pair.report.eager == {says: 7}
    monkeypatch.setattr(Reach, "_obstruct", lambda *args: None)
    assert twin(**arguments, options=UNCHECKED).differences


class Gated(Wrapped):
    """Asks a dictionary that a callback may change."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = {"deep": [SimpleNamespace(gate=1.0)]}

    def forward(self, x):
        return self.inner(x) * self.kept["deep"][0].gate


def close(fit: Fit) -> None:
    fit.layer("3").kept["deep"][0].gate = 0.5


def test_what_somebody_changes_between_steps_retires_the_recording(monkeypatch):
    pair = twin({3: close}, prepare=wrap(Gated))
    pair.assert_same(replayed=5)
    assert pair.reasons == ["model.3.kept['deep'][0] changed: 1.0 -> 0.5"]
    monkeypatch.setattr(Reach, "_visit", lambda *args: [])
    assert twin({3: close}, prepare=wrap(Gated)).differences


class CountsCopies(Wrapped):
    """Remembers each weight object that it has seen: the extra passes of a recording bring others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.seen = {}

    def forward(self, x):
        self.seen.setdefault(id(self.inner.conv.weight), self.inner.conv.weight)
        return self.inner(x) * len(self.seen)


def test_what_only_the_recording_moves_is_put_back(monkeypatch):
    pair = twin(prepare=wrap(CountsCopies))
    pair.assert_same(replayed=0)
    assert pair.report.blocked.startswith("recording failed: the network changes as it is recorded: model.3.seen")
    monkeypatch.setattr(Reach, "restore", lambda self: None)
    assert twin(prepare=wrap(CountsCopies)).differences


class Lazy(Wrapped):
    """Builds a constant at its first call."""

    position = None

    def forward(self, x):
        if self.position is None:
            self.position = torch.linspace(0, 1, x.shape[-1])
        return self.inner(x + self.position)


def test_a_cache_that_is_built_at_the_first_step_costs_one_step():
    pair = twin(prepare=wrap(Lazy))
    pair.assert_same(replayed=5)
    first = "the network changes as it runs: attributes of model.3"
    assert [reason.startswith(first) for reason in pair.report.eager] == [True, False]


# The self-check --------------------------------------------------------------------------------------------------


class Noisy(Wrapped):
    """Depends on what the look for state does not reach, as an extension in C may."""

    def forward(self, x):
        return self.inner(x) + 1e-3 * torch.tensor(list(os.urandom(8))).view(1, 8, 1, 1)


def add_noise(model: nn.Module) -> None:
    model.model[8] = Noisy(model.model[8])


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", [True, "verify"])
def test_where_two_eager_passes_differ_nothing_is_recorded(mode, deterministic, warned):
    """With deterministic kernels, they differ for state that was not put back."""
    fit = Fit(True, prepare=add_noise, options={"capture_network": mode}).run(4)
    assert fit.report.replayed == 0 and fit.report.recordings == 0 and fit.report.unverifiable == []
    assert fit.report.blocked.startswith("self-check: two eager passes of one step differ in ")
    assert "register_buffer" in fit.report.blocked and len(warned) == 1 and fit.report.blocked in warned[0]


def test_without_deterministic_kernels_it_is_told(warned):
    fit = Fit(True, prepare=add_noise).run(4)
    count = len(fit.report.unverifiable)
    assert fit.report.replayed == 3 and count > 9 and warned == []
    assert f"; {count} results could not be checked" in fit.report.line()
    assert fit.report.to_dict()["unverifiable"] == fit.report.unverifiable
    verified = Fit(True, prepare=add_noise, options={"capture_network": "verify"}).run(4)
    assert verified.report.replayed == 3
    assert len(warned) == 1 and "capture_network=verify: " in warned[0]
    assert f" {len(verified.report.unverifiable)} results are left out" in warned[0]


def test_the_look_itself_finds_nothing_in_an_ordinary_network():
    reach = Reach(Fit(False).model.model)
    assert reach.obstacle is None and list(reach.tensors) == ["model.9.stride"] and reach.change() is None
