"""An objective with fixed sizes, and a recording of it: upstream's bytes, whatever the batch and the predictions."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detgraph.models.counted import CapacityExceeded, UnknownOperation
from detgraph.models.targets import BOXES as MOST
from detgraph.models.targets import ROWS, Targets
from scenes import BOXES, IMAGES, KINDS, OUTPUTS, Kind, Recording, Scene, Setting, different

SCENES = st.builds(
    Scene,
    boxes=st.one_of(
        st.just((0, 0, 0)), st.just((0, 1, 0)), st.tuples(*[st.integers(0, 8)] * IMAGES), st.just((8, 8, 8))
    ),
    lie=st.lists(st.sampled_from(BOXES), min_size=1, max_size=4).map(tuple),
    outputs=st.sampled_from(OUTPUTS),
    seed=st.integers(0, 9999),
)
LARGEST = [8 * IMAGES * 320, IMAGES * 320] * 2  # all places of each mask
CROWDED = Scene((8, 8, 8), seed=5)
ids = pytest.mark.parametrize("kind", KINDS, ids=str)


def examples(number: int):
    return settings(
        max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@cache
def setting(kind: Kind) -> Setting:
    return Setting(kind)


@cache
def recording(kind: Kind) -> Recording:
    return Recording(setting(kind), LARGEST[: 4 if kind.end2end else 2])


def eager(kind: Kind, scene: Scene) -> list[torch.Tensor]:
    return [None if tensor is None else tensor.clone() for tensor in setting(kind).eager(scene)]


@ids
@examples(12)
@given(scene=SCENES, more=st.sampled_from((0, 1, 40)))
def test_fixed_sizes(kind, scene, more):
    counts = setting(kind).learn(scene)
    assert counts.boxes == max(scene.boxes)
    found = setting(kind).fixed(scene, [max(n + more, 1) for n in counts.places], max(counts.boxes + more, 1))
    assert not different(eager(kind, scene), found)


@ids
@examples(12)
@given(scene=SCENES)
def test_replay(kind, scene):
    assert not different(eager(kind, scene), recording(kind).replay(scene))


@pytest.mark.parametrize("at", range(4))
def test_one_place_too_few(at):
    kind, places = KINDS[0], [*setting(KINDS[0]).learn(CROWDED).places]
    assert not different(eager(kind, CROWDED), setting(kind).fixed(CROWDED, places))
    places[at] -= 1
    with pytest.raises(
        CapacityExceeded, match=f"{places[at] + 1} places of mask {at + 1}, but places for {places[at]}"
    ):
        setting(kind).fixed(CROWDED, places)


def test_one_box_too_many():
    with pytest.raises(CapacityExceeded, match=f"8 {MOST}, but places for 7") as raised:
        setting(KINDS[0]).fixed(CROWDED, LARGEST, boxes=7)
    assert raised.value.needed == {MOST: 8}


def test_one_row_too_many():
    with pytest.raises(CapacityExceeded, match=f"24 {ROWS}, but places for 23"):
        setting(KINDS[0]).fixed(CROWDED, LARGEST, rows=23)


def test_a_batch_too_large_spoils_no_later_replay():
    small = Recording(setting(KINDS[0]), [300, 100, 300, 30])
    few = Scene((1, 0, 2), seed=1)
    for scene in (few, few):
        with pytest.raises(CapacityExceeded):
            small.replay(CROWDED)
        assert not different(eager(KINDS[0], scene), small.replay(scene))


def test_weights_of_the_heads_change():
    moving = Setting(KINDS[0])
    recorded = Recording(moving, LARGEST)
    for epoch in range(7):
        scene = Scene((3, 2, 1), seed=epoch)
        expected = [tensor if tensor is None else tensor.clone() for tensor in moving.eager(scene)]
        assert not different(expected, recorded.replay(scene)), epoch
        moving.criterion.update()


@examples(40)
@given(scene=SCENES, scale=st.sampled_from((torch.float32, torch.bfloat16)))
def test_targets(scene, scale):
    """Padded as upstream pads them, and zeros behind."""
    criterion, batch = setting(KINDS[0]).criterion.one2many, scene.batch()
    rows = torch.cat((batch["batch_idx"].view(-1, 1), batch["cls"], batch["bboxes"]), 1)
    sides = torch.tensor([64, 96, 64, 96], dtype=scale)
    expected = criterion.preprocess(rows, IMAGES, sides)
    targets = Targets(IMAGES, 30, 9, torch.device("cpu"))
    for before in (CROWDED, scene):  # what an earlier batch has left is not seen
        targets.load(before.batch())
    found = targets.preprocess(rows[:0], IMAGES, sides)
    most = expected.shape[1]
    assert targets.most == most == max(scene.boxes)
    assert not different([expected], [found[:, :most].contiguous()]) and not found[:, most:].any()


def test_targets_out_of_order():
    """Upstream makes something else of them; the first read of counts says so."""
    scrambled = CROWDED.batch()
    scrambled["batch_idx"] = scrambled["batch_idx"].flip(0)
    replayed = recording(KINDS[0])
    replayed.setting.put(CROWDED)
    replayed.targets.load(scrambled)
    with pytest.raises(UnknownOperation, match="order"):
        for part in replayed.parts:
            part()


def test_targets_of_another_type():
    batch = CROWDED.batch()
    batch["bboxes"] = batch["bboxes"].double()
    with pytest.raises(TypeError, match="float64"):
        Targets(IMAGES, 30, 9, torch.device("cpu")).load(batch)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_the_objective_is_left_as_it_was(kind):
    own = Setting(kind)
    own.eager(CROWDED)

    def everything() -> list[tuple]:
        heads = [own.criterion.one2many, own.criterion.one2one] if kind.end2end else [own.criterion]
        parts = [own.criterion, *heads, *(head.assigner for head in heads), *(head.bbox_loss for head in heads)]
        return [(id(part), [(name, id(value)) for name, value in vars(part).items()]) for part in parts]

    before = everything()
    places = own.learn(CROWDED).places
    own.fixed(CROWDED, places)
    with pytest.raises(CapacityExceeded):
        own.fixed(CROWDED, [1] * len(places))
    own.objective._restore = lambda outputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        own.fixed(CROWDED, places)
    assert everything() == before


def test_what_is_guarded():
    """Numbers and places of tensors that a recording has baked in; not what it follows, or does not read."""
    own = Setting(KINDS[2])
    before = own.objective.guarded()
    assert own.objective.guarded() == before
    own.criterion.class_weights.mul_(2)
    own.criterion.hyp.lr0 = 0.5
    own.learn(CROWDED)
    assert own.objective.guarded() == before
    for part, name, value in (
        (own.criterion.hyp, "box", 1.5),
        (own.criterion.assigner, "topk", 9),
        (own.criterion.assigner, "beta", 5.0),
        (own.criterion.assigner, "stride", [4, 16]),
        (own.criterion, "class_weights", own.criterion.class_weights.clone()),
        (own.criterion.bbox_loss.dfl_loss, "reg_max", 15),
    ):
        kept = getattr(part, name)
        setattr(part, name, value)
        assert own.objective.guarded() != before, name
        setattr(part, name, kept)
    assert own.objective.guarded() == before
