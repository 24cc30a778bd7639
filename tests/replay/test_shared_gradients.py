"""Weights that get one gradient tensor between them: each has its own storage in a recording, as eager gives it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from detgraph.trainer.capture import recording
from steps import Wrapped, twin, wrap


class Sum(Wrapped):
    """Scales by the sum of two weights, as a residual or a low-rank change to a weight does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.base = nn.Parameter(torch.full((1, 16, 1, 1), 0.5))
        self.delta = nn.Parameter(torch.full((1, 16, 1, 1), 0.5))

    def forward(self, x):
        return self.inner(x) * (self.base + self.delta)


class Joined(Wrapped):
    """Scales by two weights that are put together: their gradients are two views of one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.first = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.second = nn.Parameter(torch.ones(1, 8, 1, 1))

    def forward(self, x):
        return self.inner(x) * torch.cat([self.first, self.second], 1)


@pytest.mark.parametrize("kind, faulty", [(Sum, True), (Joined, False)], ids=["sum", "joined"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_weight_has_a_gradient_of_its_own(kind, faulty, accumulate, monkeypatch):
    """Clipping in place, in every step here, would scale what they share twice."""
    settings = {"prepare": wrap(kind), "accumulate": accumulate}
    twin(**settings).assert_same(replayed=6)
    twin(**settings, options={"capture_network": "verify"}).assert_same(replayed=6)
    monkeypatch.setattr(recording, "_apart", lambda gradients, incoming: gradients)
    assert bool(twin(**settings).differences) == (faulty and accumulate == 1)


def test_a_gradient_is_not_the_incoming_one_itself():
    """A hook that changes in place what a weight gets would change what a later check starts from."""
    both = torch.zeros(3)
    apart = recording._apart((both, None, both, both[1:], torch.zeros(0)), (both,))
    assert apart[1] is None and len({t.untyped_storage().data_ptr() for t in (*apart[:1], *apart[2:4], both)}) == 4
