"""Takes one protection of the replay away for the length of a test, so that the fault it keeps off can be seen.

Each function takes pytest's ``monkeypatch``. None of them is a stand-in for what is under test.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch

from detgraph.trainer.capture import recording
from detgraph.trainer.capture.gradients import ReusedGradients
from detgraph.trainer.capture.recording import Recording
from detgraph.trainer.capture.signature import Signature
from detgraph.trainer.capture.state import NetworkState
from detgraph.trainer.parts import network
from detgraph.trainer.parts.network import GraphedNetworkStep


def no_gradient_moves(monkeypatch) -> None:
    """Let replays overwrite whatever lives in the recorder's gradients."""
    monkeypatch.setattr(ReusedGradients, "vacate", lambda self, parameters: None)
    hand_out_static(monkeypatch)


def hand_out_static(monkeypatch) -> None:
    """Let autograd adopt the recorder's gradients in every window."""
    static = ReusedGradients.hand_out

    def hand_out(self):
        self.accumulates = False
        return static(self)

    monkeypatch.setattr(ReusedGradients, "hand_out", hand_out)


def no_signature(monkeypatch) -> None:
    """Replay whatever has changed."""
    monkeypatch.setattr(Signature, "change", lambda self, images: None)
    no_gradient_moves(monkeypatch)


def no_obstacles(monkeypatch) -> None:
    """Record whatever is in the way."""
    monkeypatch.setattr(network, "recording_obstacle", lambda *args: None)


def no_shape_check(monkeypatch) -> None:
    """Take every batch for one of the nominal shape."""

    class AnyShape(tuple):
        __hash__ = None

        def __eq__(self, other) -> bool:
            return True

        def __ne__(self, other) -> bool:
            return False

    make = GraphedNetworkStep.__init__

    def blind(self, *args):
        make(self, *args)
        self.shape = AnyShape(self.shape)

    monkeypatch.setattr(GraphedNetworkStep, "__init__", blind)


def no_backward_checks(monkeypatch) -> None:
    """Take every replayed backward for the first one of the latest forward."""
    checked = Recording.replay_backward

    def replay_backward(self, serial, incoming):
        self.awaiting_backward = True
        with torch.no_grad():
            return checked(self, self.serial, incoming)

    monkeypatch.setattr(Recording, "replay_backward", replay_backward)


def no_restore(which: str):
    """Do not put back the state ``before`` the observed step, or that ``after`` its backward."""

    def mutate(monkeypatch) -> None:
        take, restore = NetworkState.take.__func__, NetworkState.restore
        taken: list[NetworkState] = []  # before, after, before, ... of one recording after the other

        def noting(cls, module, device, more=()):
            taken.append(take(cls, module, device, more))
            return taken[-1]

        def restoring(state) -> None:
            number = next(i for i, other in enumerate(taken) if other is state)
            if ("before", "after")[number % 2] != which:
                restore(state)

        monkeypatch.setattr(NetworkState, "take", classmethod(noting))
        monkeypatch.setattr(NetworkState, "restore", restoring)

    return mutate


def no_restores(monkeypatch) -> None:
    monkeypatch.setattr(NetworkState, "restore", lambda self: None)


def no_aliases(monkeypatch) -> None:
    """Record over the parameters themselves, with their hooks."""

    @contextmanager
    def parameters(model):
        yield {p: p for p in model.parameters() if p.requires_grad}

    monkeypatch.setattr(network, "parameter_aliases", parameters)


def no_weight_cache(monkeypatch) -> None:
    """Record with autocast's weight cache off, whether the fit has it on or not."""

    def forward(self):
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)

    monkeypatch.setattr(recording.Autocast, "forward", forward)


def foreign_weight_cache(monkeypatch) -> None:
    """Record with whatever casts of the parameters the region around the step has cached."""

    def forward(self):
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    monkeypatch.setattr(recording.Autocast, "forward", forward)
    no_aliases(monkeypatch)


def no_autocast(monkeypatch) -> None:
    """Record the forward outside autocast."""
    monkeypatch.setattr(recording.Autocast, "forward", lambda self: torch.autocast(self.device_type, enabled=False))


def backward_under_autocast(monkeypatch) -> None:
    """Record the backward in the forward's autocast region."""

    def backward(self):
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    monkeypatch.setattr(recording.Autocast, "backward", backward)


def no_drop(monkeypatch) -> None:
    monkeypatch.setattr(GraphedNetworkStep, "drop", lambda self: None)


def no_copies_at_release(monkeypatch) -> None:
    """Give a recording up without moving live gradients out of it."""

    monkeypatch.setattr(ReusedGradients, "release", lambda self, parameters: None)
