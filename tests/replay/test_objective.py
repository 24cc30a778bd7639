"""An objective that is not what upstream shipped: the network stays eager, with the reason, from that step on.

Each change is made before the first step and in mid-fit, and the fit must have the bytes of its eager twin. Many of
them would part the two; all of them might.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from ultralytics.utils import loss as losses
from ultralytics.utils import metrics, tal
from ultralytics.utils.loss import BboxLoss, DFLoss, E2ELoss, v8DetectionLoss
from ultralytics.utils.tal import TaskAlignedAssigner

from detgraph.models import objective_blocker
from detgraph.trainer.parts.network import RECORDING
from steps import Fit, make_model, twin

STEP, STEPS = 3, 6


def replace(owner: object, name: str, value: object) -> Callable[[Fit], None]:
    """Return an event that puts ``value`` in the place of an attribute until the fit ends."""

    def event(fit: Fit) -> None:
        there = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        fit.cleanup.callback(lambda: setattr(owner, name, before) if there else delattr(owner, name))

    return event


def on_instance(change: Callable[[E2ELoss], None]) -> Callable[[Fit], None]:
    """Return an event that changes the model's objective, which is there before the first step, too."""

    def event(fit: Fit) -> None:
        if fit.model.criterion is None:
            fit.model.criterion = fit.model.init_criterion()
        change(fit.model.criterion)

    return event


original = v8DetectionLoss.loss


def with_features(self, preds, batch):
    loss, items = original(self, preds, batch)
    return loss + 0.01 * preds["feats"][0].float().square().mean(), items


def with_boxes(self, preds, batch):
    loss, items = original(self, preds, batch)
    return loss + 0.1 * preds["boxes"].square().mean(), items


@functools.wraps(original)
def wrapped(self, preds, batch):
    return with_features(self, preds, batch)


class ReadsFeatures(v8DetectionLoss):
    loss = with_features


class MoreTargets(TaskAlignedAssigner):
    def forward(self, *args, **kwargs):
        self.topk = 3
        return super().forward(*args, **kwargs)


class Focal(nn.BCEWithLogitsLoss):
    def forward(self, input, target):
        return super().forward(input, target) * 0.5


def halved_iou(*args, **kwargs):
    return metrics.bbox_iou(*args, **kwargs) * 0.5


def shifted_anchors(feats, strides, offset):
    points, strides = tal.make_anchors(feats, strides, offset)
    return points + feats[0].float().mean() * 0, strides


def other_code(fit: Fit) -> None:
    """The function stays, what it runs does not."""

    def loss(self, preds, batch):
        batch_size = preds["boxes"].shape[0]
        loss, loss_detach = self.get_assigned_targets_and_loss(preds, batch)[1:]
        return loss * batch_size + preds["feats"][0].float().square().mean(), loss_detach

    before = original.__code__
    fit.cleanup.callback(setattr, original, "__code__", before)
    original.__code__ = loss.__code__


def hooked(criterion: E2ELoss) -> None:
    criterion.one2many.bbox_loss.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))


shipped_forward = TaskAlignedAssigner.forward
CHANGES = {
    "a method on its class": (replace(v8DetectionLoss, "loss", with_features), "v8DetectionLoss.loss()"),
    "layout of the head": (replace(v8DetectionLoss, "loss", with_boxes), "v8DetectionLoss.loss()"),
    "a wrapper with its name": (replace(v8DetectionLoss, "loss", wrapped), "v8DetectionLoss.loss()"),
    "a partial": (replace(BboxLoss, "forward", functools.partialmethod(BboxLoss.forward)), "BboxLoss.forward()"),
    "an own function within no_grad": (
        replace(TaskAlignedAssigner, "forward", torch.no_grad()(lambda self, *a: shipped_forward(self, *a))),
        "TaskAlignedAssigner.forward()",
    ),
    "another function of upstream's": (
        replace(v8DetectionLoss, "loss", losses.v8OBBLoss.loss),
        "v8DetectionLoss.loss()",
    ),
    "a method that was not there": (
        replace(TaskAlignedAssigner, "__call__", lambda self, *args: nn.Module.__call__(self, *args)),
        "TaskAlignedAssigner.__call__()",
    ),
    "a property": (replace(E2ELoss, "o2x", property(lambda self: 1)), "E2ELoss.o2x()"),
    "code": (other_code, "v8DetectionLoss.loss()"),
    "a function of the module": (replace(losses, "bbox_iou", halved_iou), "bbox_iou was replaced in"),
    "a partial in the module": (
        replace(losses, "bbox_iou", functools.partial(metrics.bbox_iou, eps=1e-6)),
        "bbox_iou was replaced in ultralytics.utils.loss",
    ),
    "a function that gets the features": (replace(losses, "make_anchors", shifted_anchors), "make_anchors"),
    "a function two calls away": (
        replace(tal, "bbox_iou", halved_iou),
        "bbox_iou was replaced in ultralytics.utils.tal",
    ),
    "a module": (replace(losses, "F", types.ModuleType("mine")), "F was replaced in ultralytics.utils.loss"),
    "a method of an instance": (
        on_instance(lambda c: setattr(c.one2many, "loss", with_features.__get__(c.one2many))),
        "one2many.loss() was replaced on the instance",
    ),
    "a method of a part": (
        on_instance(lambda c: setattr(c.one2one.assigner, "get_targets", c.one2many.assigner.get_targets)),
        "one2one.assigner.get_targets() was replaced on the instance",
    ),
    "a branch": (on_instance(lambda c: setattr(c.one2many, "__class__", ReadsFeatures)), "one2many is of class"),
    "an assigner": (
        on_instance(lambda c: setattr(c.one2many, "assigner", MoreTargets(topk=10, num_classes=2, stride=[4, 8]))),
        "one2many.assigner is of class MoreTargets, not TaskAlignedAssigner",
    ),
    "the classification": (
        on_instance(lambda c: setattr(c.one2one, "bce", Focal(reduction="none"))),
        "one2one.bce is of class Focal",
    ),
    "a part of a part": (
        on_instance(lambda c: setattr(c.one2one.bbox_loss, "dfl_loss", nn.Identity())),
        "one2one.bbox_loss.dfl_loss is of class Identity, not DFLoss",
    ),
    "a hook": (on_instance(hooked), "a hook is registered on one2many.bbox_loss"),
}  # fmt: skip
ONLY_JUDGED = {"another function of upstream's", "a module", "a part of a part"}  # the objective would raise with them


@pytest.mark.parametrize("when", [0, STEP])
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ONLY_JUDGED])
def test_a_changed_objective_keeps_the_network_eager(name, when):
    change, words = CHANGES[name]
    pair = twin({when: change}, STEPS)
    assert not pair.differences, pair.differences
    assert pair.report.replayed == max(0, when - 1)
    (reason,) = pair.report.eager.keys() - {RECORDING}
    assert reason.startswith("objective: ") and words in reason
    assert pair.report.eager[reason] == STEPS - when
    assert pair.reasons == ([reason] if when else [])


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_judged_by_what_is_there_now(name):
    """What was undone is upstream's again, and may be recorded."""
    change, words = CHANGES[name]
    fit = Fit(capture=False)
    assert objective_blocker(fit.model) is None
    with fit.cleanup:
        change(fit)
        assert words in objective_blocker(fit.model)
    fit.model.criterion = None
    assert objective_blocker(fit.model) is None


def test_nothing_is_kept_of_what_was_put_there():
    """It may be a closure over the fit."""
    fit = Fit(capture=False)

    class Loss(functools.partial):
        pass

    mine = Loss(original)
    kept = weakref.ref(mine)
    with fit.cleanup:
        replace(v8DetectionLoss, "loss", mine)(fit)
        assert "v8DetectionLoss.loss()" in objective_blocker(fit.model)
    del mine
    gc.collect()
    assert kept() is None


def test_values_that_it_holds_may_change():
    def gain(fit: Fit) -> None:
        fit.model.criterion.o2m = 0.3
        fit.model.criterion.one2many.class_weights = torch.tensor([[[1.0, 2.0]]])
        fit.model.criterion.one2one.hyp.box = 3.0
        fit.model.criterion.one2one.assigner.topk = 5
        fit.model.criterion.mine = "a note"

    twin({STEP: gain}, STEPS).assert_same(replayed=STEPS - 1)


def test_an_objective_that_would_be_built_differently_is_seen_before_the_first_step():
    """Its default argument says what the branches are; nothing is built yet that could be looked at."""
    fit = Fit(capture=False)
    with fit.cleanup:
        E2ELoss.__init__.__defaults__ = (ReadsFeatures,)
        fit.cleanup.callback(setattr, E2ELoss.__init__, "__defaults__", (v8DetectionLoss,))
        assert "one2many is of class ReadsFeatures" in objective_blocker(fit.model)


def test_a_one_headed_model_has_the_same_contract():
    model = make_model("yolo11n.yaml")
    assert objective_blocker(model) is None
    model.criterion = model.init_criterion()
    assert type(model.criterion) is v8DetectionLoss and type(model.criterion.bbox_loss.dfl_loss) is DFLoss
    model.criterion.bbox_loss.dfl_loss.extra = 1
    assert objective_blocker(model) is None
    model.criterion.bbox_loss.dfl_loss.forward = None
    assert "bbox_loss.dfl_loss.forward() was replaced on the instance" in objective_blocker(model)
