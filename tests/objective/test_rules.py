"""Every rule that makes fixed sizes exact, switched off: other bytes, or an error. Switched on: upstream's bytes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from detgraph.models import counted, fixed_sizes
from detgraph.models.counted import CapacityExceeded, Counted, Gather, Sum, UnknownOperation
from detgraph.models.fixed_sizes import Constants, FixedSizes
from detgraph.models.recordable_objective import RecordableObjective
from detgraph.models.targets import Targets
from scenes import BOXES, KINDS, Kind, Recording, Scene, Setting, different

PLACES = [5000, 900, 5000, 900]
CROWDED = [Scene((8, 7, 6), lie=(("alike", "usual"), ("usual",), BOXES)[seed % 3], seed=seed) for seed in range(24)]
FEW = [Scene((1, 0, 2), lie=("tiny", "usual"), outputs=("usual", "alike")[seed % 2], seed=seed) for seed in range(40)]
SCENES = [Scene((2, 0, 3), seed=1), *CROWDED, *FEW]
E2E, DFL = KINDS[0], KINDS[2]


def faults(kind: Kind, scenes: list[Scene] = SCENES, places: list[int] = PLACES, boxes: int = 8) -> list[str]:
    """Record an objective and replay it for each scene, an epoch each; return what was wrong with the first that was.

    Raises:
        CapacityExceeded: a scene did not fit.
    """
    try:
        setting = Setting(kind)
        recording = Recording(setting, places[: 4 if kind.end2end else 2], boxes)
        for at, scene in enumerate(scenes):
            expected = [tensor if tensor is None else tensor.clone() for tensor in setting.eager(scene)]
            if found := different(expected, recording.replay(scene)):
                return [f"scene {at}: result {which}" for which in found]
            if kind.end2end:
                setting.criterion.update()
    except CapacityExceeded:
        raise
    except RuntimeError as error:
        return [str(error)]
    return []


@contextmanager
def nothing_borrowed(self, preprocess):
    yield


def gradients_of_all_rows(ctx, gradient):
    return gradient.new_zeros(ctx.shape).index_put_(ctx.rows.targets, gradient, accumulate=True), None


def written_with_all_rows(self, target, index, value):
    target[self._tag(value).rows.targets] = value


def written_to_places_read(self, target, index, value):
    rows = self._tag(value).rows
    target[rows.places] = rows.only_valid(value)


def summed_with_zeros(self, rows):
    self._between(self._tag(rows).rows, lambda number: None)  # the counts are still read
    return Sum.apply(rows, self._tag(rows).rows.only_valid(rows.detach()).sum())


def filled_by_the_host(self, like, size, value, **kwargs):
    return like.new_full(size, value, **kwargs)


def all_rows_valid(self, targets, batch_size, scale_tensor, preprocess=Targets.preprocess):
    self._number.fill_(self.rows)
    return preprocess(self, targets, batch_size, scale_tensor)


def numbers_as_they_are(self, criterion, restore, start=RecordableObjective.__init__):
    start(self, criterion, restore)
    self._changing = {}


RULES = {
    "rows beyond get no gradient": (Gather, "backward", staticmethod(gradients_of_all_rows), DFL),
    "rows beyond are written as zeros": (FixedSizes, "_write", written_with_all_rows, E2E),
    "rows beyond are written to places of their own": (FixedSizes, "_write", written_to_places_read, E2E),
    "sums are over the rows that there are": (FixedSizes, "_sum", summed_with_zeros, E2E),
    "powers are of the rows that there are": (fixed_sizes, "POWERS", set(), E2E),
    "a fill does not read on the host": (FixedSizes, "_filled", filled_by_the_host, E2E),
    "ground truths have fixed places": (RecordableObjective, "_borrowed", nothing_borrowed, E2E),
    "what an earlier batch left is not seen": (Targets, "preprocess", all_rows_valid, E2E),
    "numbers that change by epoch are tensors": (RecordableObjective, "__init__", numbers_as_they_are, E2E),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_off(rule, monkeypatch):
    owner, name, fault, kind = RULES[rule]
    monkeypatch.setattr(owner, name, fault)
    assert faults(kind)


@pytest.mark.parametrize("kind", [E2E, DFL], ids=str)
def test_all_rules_on(kind):
    assert not faults(kind)


CAPACITIES = {
    "places": dict(places=[5000, 60, 5000, 900]),
    "places of the second head": dict(places=[5000, 900, 5000, 3]),
    "candidates": dict(places=[300, 900, 5000, 900]),
    "boxes": dict(boxes=5),
}


@pytest.mark.parametrize("case", CAPACITIES)
def test_a_capacity_unchecked(case, monkeypatch):
    """Without the comparison there are other bytes; with it, a replay ends before any."""
    with pytest.raises(CapacityExceeded):
        faults(E2E, **CAPACITIES[case])

    def unchecked(watched, numbers):
        for (*_, rows), number in zip(watched, numbers, strict=False):
            if rows is not None:
                rows.number = min(number, rows.capacity)

    monkeypatch.setattr(fixed_sizes, "_compare", unchecked)
    assert faults(E2E, **CAPACITIES[case])


def test_rows_beyond_repeat_the_first(monkeypatch):
    """Else they could be infinite, of places that nobody looks at, which torch's search for anomalies would find."""
    setting, scene = Setting(E2E), Scene((3, 0, 0), seed=4)

    def backward(run) -> None:
        with torch.no_grad():
            setting.outputs[0][-1, -1], setting.outputs[2][-1, -1] = float("inf"), float("inf")
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            setting.results(*run())

    def fixed() -> tuple[Tensor, dict]:
        targets = Targets(3, 24, 8, torch.device("cpu"))
        targets.load(scene.batch())
        return setting.objective.run(setting.outputs, targets, PLACES)

    setting.put(scene)
    backward(lambda: setting.criterion(setting.view.restore(tuple(setting.outputs)), scene.batch()))
    backward(fixed)

    def last_instead(self, *args, start=Counted.__init__):
        start(self, *args)
        pairs = zip(self.places, self.shape, strict=True)
        self.places = tuple(torch.where(self.valid, places, size - 1) for places, size in pairs)

    monkeypatch.setattr(Counted, "__init__", last_instead)
    with pytest.raises(RuntimeError, match="returned nan"):
        backward(fixed)


class HostData(TorchDispatchMode):
    """Counts what is made of host data."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func._schema.name == "aten::lift_fresh"
        return func(*args, **(kwargs or {}))


def test_host_data_is_made_once(monkeypatch):
    """A graph cannot hold its way to the device."""
    setting = Setting(E2E)
    targets = Targets(3, 24, 8, torch.device("cpu"))

    def made() -> int:
        with HostData() as data:
            setting.objective.run(setting.outputs, targets, PLACES)
        return data.made

    assert made() == 0
    monkeypatch.setattr(FixedSizes, "_constant", lambda self, key, make: make())
    assert made() == 6  # for each head the picture's size, its turned sides, the smallest side of a box


def test_long_rows_are_summed_as_many_as_there_are():
    """A GPU sums long rows in another order when there are few."""
    pieces = {}
    for width in (counted.SHORT_ROW, counted.SHORT_ROW + 1):
        ran = pieces[width] = []
        mask, wide = torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2, width)
        with FixedSizes(torch.device("cpu"), Constants(), [6], lambda piece, ran=ran: ran.append(piece())):
            total = wide[mask.nonzero(as_tuple=True)].sum(-1, keepdim=True).sum()
        assert total == 6 * width
    assert [len(ran) for ran in pieces.values()] == [1, 2]


def test_a_cut_finds_the_modes_of_its_caller():
    """So it can end a recording that is a mode of torch, and begin another."""
    mask, seen = torch.ones(3, dtype=torch.bool), []
    with FixedSizes(torch.device("cpu"), Constants(), [3], lambda piece: seen.append(depth())):
        mask.float()[mask.nonzero(as_tuple=True)].sum()
    assert seen == [depth()] == [(0, 0)]


def depth() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def test_an_unknown_operation_of_the_objective(monkeypatch):
    """An objective that was changed is refused, and is left as it was."""
    setting = Setting(E2E)
    forward = type(setting.criterion.one2many.assigner).iou_calculation
    changed = type(setting.criterion.one2many.assigner)
    monkeypatch.setattr(changed, "iou_calculation", lambda self, *args: forward(self, *args).sort().values)
    with pytest.raises(UnknownOperation, match="sort"):
        setting.learn(SCENES[0])
    assert "preprocess" not in vars(setting.criterion.one2many) and isinstance(setting.criterion.o2m, float)
