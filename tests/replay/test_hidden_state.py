"""State that a network keeps beside its buffers: moved by replays as by eager steps, or the fit stays eager.

Each fault is shown first, with nobody looking for such state. What nobody can follow is in test_obstacles.py.
"""

from __future__ import annotations

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
