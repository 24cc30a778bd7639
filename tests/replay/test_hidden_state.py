"""State that a network keeps beside its buffers: moved by replays as by eager steps, or the fit stays eager.

Each fault is shown first, with nobody looking for such state.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from detgraph.trainer.capture.reach import Reach
from steps import Fit, Wrapped, twin, wrap

UNCHECKED = {"self_check": False}
CALLS = 0


class Statistics(Wrapped):
    """Counts and averages in tensors that hang in a dictionary."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = {"calls": torch.zeros(1), "mean": torch.ones(1)}

    def forward(self, x):
        x = self.inner(x)
        with torch.no_grad():
            self.kept["calls"].add_(1)
            self.kept["mean"].mul_(0.9).add_(0.1 * x.abs().mean())
        return x / (0.1 + self.kept["mean"])

    def look(self) -> object:
        return [tensor.item() for tensor in self.kept.values()]


class HiddenNorm(Wrapped):
    """Keeps a BatchNorm where modules do not look, and weights of it that nobody trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = [nn.BatchNorm2d(16).requires_grad_(False)]

    def forward(self, x):
        x = self.inner(x)
        return x + 0.1 * self.kept[0](x)

    def look(self) -> object:
        return self.kept[0].num_batches_tracked.item(), self.kept[0].running_mean.tolist()


class Probe(Wrapped):
    """Averages in an object of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = SimpleNamespace(deep=(SimpleNamespace(mean=torch.zeros(1)),))

    def forward(self, x):
        x = self.inner(x)
        self.kept.deep[0].mean.add_(x.detach().mean())
        return x

    def look(self) -> object:
        return self.kept.deep[0].mean.item()


@pytest.mark.parametrize("kind", [Statistics, HiddenNorm, Probe], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", [True, "verify"])
def test_tensors_that_hang_anywhere_are_moved_as_by_eager_steps(kind, mode, monkeypatch):
    def look(fit: Fit) -> None:
        fit.note(fit.layer("3").look())

    arguments = {"events": {step: look for step in range(7)}, "prepare": wrap(kind)}
    twin(**arguments, options={"capture_network": mode}).assert_same(replayed=6)
    monkeypatch.setattr(Reach, "_visit_tensor", lambda *args: None)
    assert twin(**arguments).differences


class CountsInDict(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = {"calls": 0}

    def forward(self, x):
        self.kept["calls"] += 1
        return self.inner(x) * (1 + 0.01 * self.kept["calls"])


class CountsInClosure(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x):
        return self.inner(x) * (1 + 0.01 * self.count())


class CountsInClass(Wrapped):
    calls = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        CountsInClass.calls = 0

    def forward(self, x):
        CountsInClass.calls += 1
        return self.inner(x) * (1 + 0.01 * CountsInClass.calls)


class CountsInGlobal(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        global CALLS
        CALLS = 0

    def forward(self, x):
        global CALLS
        CALLS += 1
        return self.inner(x) * (1 + 0.01 * CALLS)


class CountsInArray(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = np.zeros(1)

    def forward(self, x):
        self.kept += 1
        return self.inner(x) * (1 + 0.01 * float(self.kept[0]))


class LogsGradients(Wrapped):
    """Fills a list from a hook on an activation: only a backward shows it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.log = deque(maxlen=100)

    def forward(self, x):
        x = self.inner(x)
        x.register_hook(lambda gradient: self.log.append(len(self.log)))
        return x


class Steep(torch.autograd.Function):
    """A backward in Python that counts its calls and computes with the count."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Steep.calls += 1
        return gradient * (1 + 0.01 * Steep.calls)


class CountsBackwards(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        Steep.calls = 0

    def forward(self, x):
        return Steep.apply(self.inner(x))


MOVED = {
    CountsInDict: "the network changes as it runs: model.3.kept changed: 1 -> 2",
    CountsInClosure: "the network changes as it runs: model.3.count changed: 1 -> 2",
    CountsInClass: "the network changes as it runs: CountsInClass.calls changed: 1 -> 2",
    CountsInGlobal: "the network changes as it runs: global CALLS changed: 1 -> 2",
    CountsInArray: "the network changes as it runs: model.3.kept changed: b'",
    LogsGradients: "the network changes as its backward runs: model.3.log changed: 1 entries -> 2",
    CountsBackwards: "the network changes as its backward runs: Steep.calls changed: 1 -> 2",
}


@pytest.mark.parametrize("kind", MOVED, ids=lambda kind: kind.__name__)
def test_what_a_step_moves_otherwise_keeps_the_fit_eager(kind, monkeypatch, warned):
    def look(fit: Fit) -> None:
        fit.note(list(getattr(fit.layer("3"), "log", ())))

    arguments = {"events": {6: look}, "prepare": wrap(kind)}
    pair = twin(**arguments)
    pair.assert_same(replayed=0)
    assert pair.report.blocked.startswith(MOVED[kind]), pair.report.blocked
    assert len(warned) == 1 and MOVED[kind] in warned[0]
    monkeypatch.setattr(Reach, "_visit", lambda *args: [])
    assert twin(**arguments, options=UNCHECKED).differences


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
