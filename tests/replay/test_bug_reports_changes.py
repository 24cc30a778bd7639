"""Rows A10 and A11 of the public bug reports: tensors that move, and hooks that must go on firing."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from ultralytics.nn.tasks import DetectionModel

import protection_off as off
from steps import Fit, twin

PRECISIONS = pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
YOLO26 = {"model": "yolo26n.yaml"}


# A10: moved tensors -----------------------------------------------------------------------------------------------


def assign(fit: Fit) -> None:
    state = {name: value.clone() for name, value in fit.layer("3").state_dict().items()}
    fit.layer("3").load_state_dict(state, assign=True)
    fit.rebuild_optimizer()


def move(fit: Fit) -> None:
    fit.layer("3.conv").weight.data = fit.layer("3.conv").weight.data.clone()


def change_layout_and_back(fit: Fit) -> None:
    fit.model.to(memory_format=torch.channels_last)
    fit.model.to(memory_format=torch.contiguous_format)


def change_type_and_back(fit: Fit) -> None:
    fit.model.double().float()


def swap(fit: Fit) -> None:
    owner = fit.layer("3.conv")
    owner.weight.grad = None
    torch.utils.swap_tensors(owner.weight, nn.Parameter(owner.weight.detach().clone()))


def replace_parameter(fit: Fit) -> None:
    fit.layer("3.conv").weight = nn.Parameter(fit.layer("3.conv").weight.detach().clone())
    fit.rebuild_optimizer()


def replace_module(fit: Fit) -> None:
    fit.model.model[3] = deepcopy(fit.model.model[3])
    fit.rebuild_optimizer()


def replace_network(fit: Fit) -> None:
    fit.model.model = deepcopy(fit.model.model)
    fit.rebuild_optimizer()


def rebind_buffer(fit: Fit) -> None:
    fit.layer("3.bn").running_mean = fit.layer("3.bn").running_mean.clone()


MOVES = [
    assign, move, change_layout_and_back, change_type_and_back, swap, replace_parameter, replace_module,
    replace_network, rebind_buffer,
]  # fmt: skip


@pytest.mark.parametrize("event", MOVES, ids=lambda event: event.__name__)
def test_a10_moved_tensors_retire_the_recording(event, monkeypatch):
    pair = twin({3: event})
    pair.assert_same(replayed=5)
    assert [retirement["step"] for retirement in pair.report.retirements] == [3]
    off.no_signature(monkeypatch)
    assert twin({3: event}).differences


def test_a10_updates_in_place_are_picked_up_by_the_recording():
    def load(fit: Fit) -> None:
        fit.model.load_state_dict({name: value.clone() * 0.5 for name, value in fit.model.state_dict().items()})
        with torch.no_grad():
            fit.layer("3.conv").weight.copy_(torch.ones(()))

    pair = twin({3: load})
    pair.assert_same(replayed=6)
    assert pair.reasons == []


# A11: hooks -------------------------------------------------------------------------------------------------------


def on_module(name: str):
    def register(fit: Fit, note) -> object:
        return getattr(fit.layer("3"), name)(note)

    return register


HOOKS = {
    "forward": on_module("register_forward_hook"),
    "pre_forward": on_module("register_forward_pre_hook"),
    "backward": on_module("register_full_backward_hook"),
    "global": lambda fit, note: register_module_forward_hook(
        lambda module, args, output: note() if module is fit.layer("3") else None
    ),
    "parameter": lambda fit, note: fit.layer("3.conv").weight.register_hook(note),
    "accumulated": lambda fit, note: fit.layer("3.conv").weight.register_post_accumulate_grad_hook(note),
}


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("kind", HOOKS)
def test_a11_hooks_fire_as_often_as_in_eager(kind, step, monkeypatch):
    def register(fit: Fit) -> None:
        def note(*args) -> None:
            fit.note(kind)

        fit.memory["handle"] = HOOKS[kind](fit, note)
        fit.cleanup.callback(fit.memory["handle"].remove)

    def remove(fit: Fit) -> None:
        fit.memory["handle"].remove()

    events = {step: register, step + 7: remove}
    pair = twin(events, steps=step + 9)
    pair.assert_same()
    assert len(pair.replaying.trace.notes) == 7
    replays_while_hooked = kind in {"parameter", "accumulated"}
    assert pair.report.replayed == (step + 8 if replays_while_hooked else max(step - 1, 0) + 1)
    off.no_signature(monkeypatch)
    off.no_obstacles(monkeypatch)
    off.no_aliases(monkeypatch)
    wrong = twin(events, steps=step + 9)
    never_at_risk = kind == "accumulated" or (kind == "parameter" and step > 0)  # recording would fire the other
    assert (len(wrong.replaying.trace.notes) == 7) == never_at_risk


class OtherModel(DetectionModel):
    """Stands for a model class with a training step of its own, as upstream's distillation has it."""


def test_a11_a_model_with_a_step_of_its_own_stays_whole():
    pair = twin(prepare=lambda model: setattr(model, "__class__", OtherModel))
    assert not pair.differences
    assert pair.report.replayed == 0
    assert pair.report.eager == {"model class OtherModel is not upstream's DetectionModel": 7}
