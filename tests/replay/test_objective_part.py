"""The objective replayed in a fit: equal bytes whatever happens to it, and a reason for every step that is eager.

What is never replayed here is tested elsewhere: the objective by itself in tests/objective, how recordings of it are
made in `test_objective_recording`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from ultralytics.utils.loss import v8DetectionLoss

from detgraph.models import fixed_sizes
from detgraph.models.recordable_objective import RecordableObjective
from detgraph.models.targets import Targets
from detgraph.trainer.capture.reasons import OTHER_SHAPE, OVER_CAPACITY, RECORDING, TOO_EARLY
from detgraph.trainer.capture.recording import Recording
from detgraph.trainer.parts import objective
from perturb_network import remove_guard
from steps import Event, Fit, Twin, make_batch, twin

ON = {"capture_objective": True}
STEPS = 6
FIRST = {TOO_EARLY: 1, RECORDING: 1}  # upstream builds the objective in the first step; the second is recorded


def both(events: dict[int, Event] | None = None, steps: int = STEPS, options: dict | None = None, **settings) -> Twin:
    return twin(events, steps, options={**ON, **(options or {})}, **settings)


def assert_same(pair: Twin, eager: dict[str, int], retired: str = "") -> None:
    """Insist on equal bytes, on every eager step of the objective, and on why a recording was retired, if one was."""
    report = pair.report.objective
    assert not pair.differences, pair.differences
    assert dict(report.eager) == eager and report.replayed == pair.report.steps - sum(eager.values()) > 0
    assert report.unverifiable == []
    assert [retirement["reason"] for retirement in report.retirements] == ([retired] if retired else [])


# Bytes ----------------------------------------------------------------------------------------------------------------


SETTINGS = {
    "FP32": {},
    "BF16": {"amp": torch.bfloat16},
    "accumulate": {"accumulate": 3},
    "accumulate in BF16": {"accumulate": 2, "amp": torch.bfloat16, "ema": True},
    "FP16 with a scaler": {"amp": torch.float16, "scale": 1024.0, "ema": True, "optimizer": "AdamW"},
    "a scaler that overflows": {"scale": 2.0**126},
    "verified": {"options": {"capture_network": "verify", "capture_objective": "verify"}},
    "yolo26n": {"model": "yolo26n.yaml", "steps": 4},
    "yolo11n": {"model": "yolo11n.yaml", "steps": 4, "amp": torch.bfloat16},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_same_bytes(name):
    assert_same(both(**SETTINGS[name]), FIRST)


# What comes with a batch ----------------------------------------------------------------------------------------------


def labels(number: int) -> Event:
    return lambda fit: setattr(fit, "batch", make_batch(fit.number, fit.shape, labels=number))


def tail(fit: Fit) -> None:
    fit.batch = make_batch(fit.number, (1, 3, 64, 64))


def empty_image(fit: Fit) -> None:
    """The first picture has no box, the second five."""
    fit.batch = make_batch(fit.number, labels=5)
    for name in ("batch_idx", "cls", "bboxes"):
        fit.batch[name] = fit.batch[name][5:]


def test_batches_and_images_without_a_box():
    """Also as the batch that is recorded: nothing of its sizes can be learned from it but their number."""
    assert_same(both({1: labels(0), 3: labels(0), 4: empty_image}), {**FIRST, OVER_CAPACITY: 1})
    assert_same(both({0: labels(0), 1: empty_image, 3: labels(0)}), FIRST)


def test_a_partial_batch_is_eager_and_keeps_the_recording():
    assert_same(both({2: tail, 4: tail}), {**FIRST, OTHER_SHAPE: 2})


GROWN = {**FIRST, OVER_CAPACITY: 1}


def test_a_crowded_batch_is_eager_and_makes_room():
    """From the predictions that are there: the network's step is a replay. As large a batch replays from then on."""
    pair = both({3: labels(30), 4: labels(30), 5: labels(25)}, accumulate=2, ema=True)
    assert_same(pair, GROWN)
    assert pair.report.objective.recordings == 2 and pair.report.replayed == STEPS - 1


@pytest.mark.parametrize("unchecked", ["places", "ground truths"])
def test_a_crowded_batch_unchecked(unchecked, monkeypatch):
    """What a capacity keeps off: other bytes, or an error in the middle of a fit."""

    def compare(watched, numbers):
        for (*_, rows), number in zip(watched, numbers, strict=False):
            if rows is not None:
                rows.number = min(number, rows.capacity)

    def load(self, batch, checked=Targets.load):
        checked(self, {name: batch[name][: self.rows] for name in ("batch_idx", "cls", "bboxes")})

    events = {1: labels(1), 2: labels(4 if unchecked == "places" else 30)}  # four boxes an image fit, not their places
    assert_same(both(events, steps=4), GROWN)
    monkeypatch.setattr(fixed_sizes, "_compare", compare)
    if unchecked == "ground truths":
        monkeypatch.setattr(Targets, "load", load)
    pair = both(events, steps=4)
    assert dict(pair.report.objective.eager) == FIRST and pair.differences[0].startswith("losses[2]")


def test_room_is_made_a_bounded_number_of_times(monkeypatch, warned):
    monkeypatch.setattr(objective, "MOST_GROWTHS", 1)
    pair = both({3: labels(30), 5: labels(120)}, steps=8)
    blocked = pair.report.objective.blocked
    assert blocked.startswith("batches outgrew 2 recordings, the last: 240 ground truths, but places for ")
    assert_same(pair, {**GROWN, blocked: 3})
    assert len(warned) == 1 and blocked in warned[0]


def mixed_up(fit: Fit) -> None:
    """Three boxes in the first picture, one in each other; the third picture's comes before the second's."""
    fit.batch = make_batch(fit.number, fit.shape, labels=2)
    fit.batch["batch_idx"] = torch.tensor([0.0, 0, 0, 2, 1, 3, 3, 3])


def test_boxes_out_of_order_are_eager(warned):
    """Upstream trains with some orders: where an early box takes another one's place. None is replayed."""
    pair = both({3: mixed_up}, shape=(4, 3, 64, 64))
    blocked = "replay failed: boxes in one image: not in order"
    assert_same(pair, {**FIRST, blocked: 3})
    assert pair.report.objective.blocked == blocked and len(warned) == 1
    recorded = both({1: mixed_up}, steps=3, shape=(4, 3, 64, 64))
    assert not recorded.differences and recorded.report.objective.blocked.endswith("boxes in one image: not in order")


def test_an_error_of_upstreams_is_upstreams():
    """It has no use for ground truths in double precision; what it says does not depend on whether it is replayed."""

    def double(fit: Fit) -> None:
        fit.batch["bboxes"] = fit.batch["bboxes"].double()

    pair = both({3: double}, accept=RuntimeError)
    assert not pair.differences and len(pair.replaying.trace.errors) == 1
    assert pair.report.objective.blocked == "replay failed: ground truths are torch.float64, not torch.float32"


# What happens to the objective ----------------------------------------------------------------------------------------


def update(fit: Fit) -> None:
    fit.model.criterion.update()


def test_an_epoch_moves_the_weights_of_the_heads():
    assert_same(both({2: update, 4: update, 5: update}), FIRST)


def test_an_epoch_unseen(monkeypatch):
    def once(self, refresh=RecordableObjective.refresh):
        if not self._written:
            refresh(self)

    monkeypatch.setattr(RecordableObjective, "refresh", once)
    assert both({4: update}).differences[0].startswith("losses[4]")


def gain(fit: Fit) -> None:
    fit.model.criterion.one2many.hyp.box = 3.0


def other_criterion(fit: Fit) -> None:
    fit.model.criterion = fit.model.init_criterion()
    fit.model.criterion.one2many.hyp = copy.copy(fit.model.args)
    gain(fit)


def no_criterion(fit: Fit) -> None:
    """Upstream builds another one in the next step, from the arguments of then."""
    fit.model.criterion = None
    fit.model.args = copy.copy(fit.model.args)
    fit.model.args.box = 3.0


def patched(fit: Fit) -> None:
    shipped = v8DetectionLoss.bbox_decode
    fit.cleanup.callback(setattr, v8DetectionLoss, "bbox_decode", shipped)
    v8DetectionLoss.bbox_decode = lambda self, points, boxes: shipped(self, points, boxes) * 1.01


def class_weights(fit: Fit) -> None:
    for head in (fit.model.criterion.one2many, fit.model.criterion.one2one):
        head.class_weights = torch.tensor([[[1.0, 2.0]]])


def hooked(fit: Fit) -> None:
    fit.model.criterion.one2one.bbox_loss.register_forward_hook(lambda module, args, out: (out[0] * 2, out[1]))


NUMBERS, REPLACED = "numbers of the objective", "the objective was replaced"
PATCHED = "objective: v8DetectionLoss.bbox_decode() was replaced on its class"
HOOKED = "objective: a hook is registered on one2one.bbox_loss"
CHANGES = {  # what is done before a step, the guard that sees it, its words, and why steps are eager then
    "a gain": (gain, NUMBERS, "objective's one2many.hyp.box: (7.5,) -> (3.0,)", {RECORDING: 2}),
    "class weights": (class_weights, NUMBERS, "objective's one2many.class_weights: (None,) -> ", {RECORDING: 2}),
    "another criterion": (other_criterion, "objective", REPLACED, {RECORDING: 2}),
    "no criterion": (no_criterion, "objective", REPLACED, {RECORDING: 2, TOO_EARLY: 2}),
    "a class": (patched, "objective", PATCHED, {PATCHED: STEPS - 3}),
    "a hook": (hooked, "objective", HOOKED, {HOOKED: STEPS - 3}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_objective_retires(name):
    event, _, words, eager = CHANGES[name]
    pair = both({3: event})
    (retired,) = [retirement["reason"] for retirement in pair.report.objective.retirements]
    assert retired.startswith(words)
    assert_same(pair, {**FIRST, **eager}, retired)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "a hook"])  # with it, the model is called whole
def test_a_change_without_its_guard(name):
    event, guard, _, _ = CHANGES[name]
    step = 4 if name == "no criterion" else 3

    def unguarded(fit: Fit) -> None:
        if fit.objective.recorded:
            remove_guard([fit.objective.recording.program.guards], guard)
        event(fit)

    pair = both({3: unguarded}, steps=step + 1)
    assert pair.report.objective.replayed == 2 and pair.differences[0].startswith(f"losses[{step}]")


def test_recordings_are_lost_a_bounded_number_of_times(warned):
    def gain_of_the_step(fit: Fit) -> None:
        fit.model.args.cls = float(fit.number)

    pair = both({3: gain_of_the_step, 5: gain_of_the_step}, steps=8, options={"max_recordings": 2})
    report = pair.report.objective
    last = "objective's one2many.hyp.cls: (3.0,) -> (5.0,)"
    assert report.blocked == f"2 recordings were retired, the last because of {last}"
    assert not pair.differences and dict(report.eager) == {**FIRST, RECORDING: 2, report.blocked: 3}
    assert pair.report.replayed == 7 and len(warned) == 1  # the network's goes on


# What happens to the fit ----------------------------------------------------------------------------------------------


def one_kind_of_nan(model: torch.nn.Module) -> None:
    """On a CPU a sum of NaNs has the bits of either."""

    def replace(parameter: torch.nn.Parameter) -> None:
        parameter.grad.masked_fill_(parameter.grad.isnan(), float("nan"))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(replace)


def not_a_number(fit: Fit) -> None:
    with torch.no_grad():
        fit.layer("0.conv").weight.fill_(float("nan"))


def hooks(fit: Fit) -> None:
    """On a weight, and on the loss, whose gradient they change."""
    weight = fit.layer("9.cv2.0.2").weight
    weight.register_hook(lambda gradient: fit.note(gradient.sum().item()))
    fit.before_backward = lambda: fit.loss.register_hook(lambda gradient: gradient * 1.5)


def failing_between(fit: Fit) -> None:
    """An error between forward and backward, once."""

    def fail() -> None:
        fit.before_backward = lambda: None
        raise RuntimeError("injected")

    fit.before_backward = fail


EVENTS = {
    "hooks": {0: hooks, 3: hooks},
    "an error before the backward": {3: failing_between},
}


@pytest.mark.parametrize("name", EVENTS)
def test_what_happens_to_the_fit(name):
    assert_same(both(EVENTS[name], accept=RuntimeError, accumulate=2), FIRST)


def test_weights_that_are_no_numbers():
    """Upstream's recovery comes at the end of the epoch: until then all goes on."""
    assert_same(both({3: not_a_number}, prepare=one_kind_of_nan), FIRST)


def test_an_error_before_the_backward_of_the_step_to_be_recorded_costs_that_step():
    assert_same(both({1: failing_between}, accept=RuntimeError), {**FIRST, RECORDING: 2})


# What leaves a step ---------------------------------------------------------------------------------------------------


class Uncopied:
    """A tensor of the recording's memory, as it would be without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.clone = lambda: tensor


def kept_and_copied(fit: Fit) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what a caller that holds loss and items of three replayed steps has, with what they were at first."""
    kept = []
    fit.run(2)
    for number in range(3):
        with fit.forward_context():
            loss, items = fit.training_step.forward(make_batch(number))
        kept += [(tensor, tensor.detach().clone()) for tensor in (loss, *items.values())]
        fit.training_step.backward(loss.sum())
    assert fit.report.objective.replayed == 3
    fit.end()
    return kept


def test_loss_and_items_that_a_caller_keeps_stay_as_they_are(monkeypatch):
    assert all(torch.equal(tensor, before) for tensor, before in kept_and_copied(Fit(True, options=ON)))

    def forward(self, *live, copied=Recording.forward):
        outputs = copied(self, *live)
        return tuple(map(Uncopied, outputs)) if self.program.part == "objective" else outputs

    monkeypatch.setattr(Recording, "forward", forward)
    assert not all(torch.equal(tensor, before) for tensor, before in kept_and_copied(Fit(True, options=ON)))
