"""Upstream's objective as a function of static tensors, which can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .fixed_sizes import Constants, FixedSizes, Piece, places_of
from .targets import BOXES, Targets

PARTS = ("one2many", "one2one", "assigner", "bbox_loss", "dfl_loss", "bce")
GAINS = ("box", "cls", "dfl")  # what the objective reads of ``hyp``
CHANGING = ("o2m", "o2o")  # Python numbers that change from epoch to epoch, and scale what is recorded
# Of the objective's schedule, or left behind by its last pass.
NOT_READ = {*CHANGING, "updates", "total", "o2m_copy", "final_o2m", "hyp", "bs", "n_max_boxes"}


@dataclass(frozen=True)
class Counts:
    """The data-dependent sizes of one batch, or their capacities: boxes in one image, and places of each mask."""

    boxes: int
    places: tuple[int, ...]

    def joined(self, other: Counts) -> Counts:
        """Return the larger of each two."""
        return Counts(max(self.boxes, other.boxes), tuple(map(max, self.places, other.places)))

    def raised(self, needed: dict[str, int]) -> Counts:
        """Return these capacities, those that are in a `CapacityExceeded`'s ``needed`` no smaller than there."""
        places = (max(number, needed.get(places_of(at), 0)) for at, number in enumerate(self.places))
        return Counts(max(self.boxes, needed.get(BOXES, 0)), tuple(places))


class RecordableObjective:
    """An objective of upstream, `E2ELoss` or `v8DetectionLoss`, for tensors that stay where they are.

    ``restore`` makes the dictionary of predictions, as the objective reads it, of the tensors that the network hands
    over (`NetworkView.restore`). The objective itself is left as it was after each call, whatever happens.

    Call `learn` with a batch or more, choose capacities, have `run` recorded; then, for each batch, load the targets,
    call `refresh` and replay. A recording keeps this object. All of that is for one shape of predictions: what has
    been put on the device in `learn` belongs to it.

    Loss, items and gradients have the bytes of upstream's. On a CPU a NaN may be another of the many NaNs.
    """

    def __init__(self, criterion: object, restore: Callable[[tuple[Tensor, ...]], dict]) -> None:
        self.criterion = criterion
        self._restore = restore
        self._heads = [criterion.one2many, criterion.one2one] if hasattr(criterion, "one2many") else [criterion]
        self._device = torch.device(self._heads[0].device)
        self._constants = Constants()
        self._changing = {name: torch.zeros((), device=self._device) for name in CHANGING if hasattr(criterion, name)}
        self._written: dict[str, float] = {}
        self.refresh()

    def learn(self, outputs: Sequence[Tensor], batch: dict[str, Tensor]) -> Counts:
        """Run the objective once, as it is, and return the sizes that it met. Reads them from the device.

        Raises:
            UnknownOperation: it does something that cannot be recorded.
        """
        mode, boxes = FixedSizes(self._device, self._constants), []

        def preprocess(head: object, *args, **kwargs) -> Tensor:
            with mode.as_is():
                padded = type(head).preprocess(head, *args, **kwargs)
                boxes.append(padded.shape[1])
                # Without a box the objective takes a short cut; what it does otherwise is what is to be learned.
                return padded if boxes[-1] else padded.new_zeros(padded.shape[0], 1, padded.shape[2])

        with self._borrowed(preprocess):
            self._call(mode, outputs, batch)
        return Counts(max(boxes), tuple(mode.counts))

    def run(
        self,
        outputs: Sequence[Tensor],
        targets: Targets,
        places: Sequence[int],
        cut: Callable[[Piece], None] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and items of the loaded targets as upstream does, with capacities for the places of each mask.

        ``cut`` is what `FixedSizes` calls to have a piece run between two recordings.

        Raises:
            CapacityExceeded: from a piece; sizes are the targets' boxes and the places of each mask.
            UnknownOperation: the objective does something that cannot be recorded.
        """
        mode = FixedSizes(self._device, self._constants, places, cut)

        def preprocess(head: object, *args, **kwargs) -> Tensor:
            padded = targets.preprocess(*args, **kwargs)
            if head is self._heads[0]:
                mode.watch(BOXES, targets.most, targets.boxes)
            return padded

        with self._borrowed(preprocess):
            return self._call(mode, outputs, targets.empty_batch())

    def refresh(self) -> None:
        """Write the objective's present numbers that change by epoch to where a recording reads them."""
        for name, tensor in self._changing.items():
            if self._written.get(name) != (value := getattr(self.criterion, name)):
                self._written[name] = value
                tensor.fill_(value)

    def guarded(self) -> tuple:
        """Return everything else that a recording has baked in: numbers by value, and tensors by their place."""
        found = []
        for path, part in _parts(self.criterion):
            held = dict(vars(part))
            if isinstance(part, nn.Module):
                held |= {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}
            for name, value in sorted(held.items()):
                if name not in NOT_READ and name not in PARTS and not name.startswith("_"):
                    found += _baked(f"{path}{name}", value)
            found += [(f"{path}hyp.{name}", getattr(part.hyp, name)) for name in GAINS if hasattr(part, "hyp")]
        return tuple(found)

    def _call(self, mode: FixedSizes, outputs: Sequence[Tensor], batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
        predictions = self._restore(tuple(outputs))
        with mode:
            return self.criterion(predictions, batch)

    @contextmanager
    def _borrowed(self, preprocess: Callable[..., Tensor]) -> Iterator[None]:
        """Put ``preprocess(head, ...)`` and the changing numbers' tensors in place, and all as it was afterwards."""
        before = [(part, dict(vars(part))) for _, part in _parts(self.criterion)]
        try:
            for head in self._heads:
                head.preprocess = preprocess.__get__(head)
            for name, tensor in self._changing.items():
                setattr(self.criterion, name, tensor)
            yield
        finally:
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)


def _parts(part: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield an objective and what it is made of, each with how to get there."""
    yield path, part
    for name in PARTS:
        if (inner := getattr(part, name, None)) is not None:
            yield from _parts(inner, f"{path}{name}.")


def _baked(path: str, value: object) -> list[tuple]:
    """Return what to compare: a tensor's place, the contents of collections, and any other value itself."""
    if isinstance(value, Tensor):
        place = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
        return [(path, *place)]
    if isinstance(value, nn.Module):
        return [(path, id(value))]
    if isinstance(value, dict):
        return [(path, len(value)), *(item for key in value for item in _baked(f"{path}.{key}", value[key]))]
    if isinstance(value, list | tuple):
        return [(path, len(value)), *(item for at, inner in enumerate(value) for item in _baked(f"{path}.{at}", inner))]
    return [(path, value)]
