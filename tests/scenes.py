"""Objectives, predictions and ground truths for the tests of a recorded objective, and recordings of it on tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

from detgraph.models import NetworkView
from detgraph.models.recordable_objective import RecordableObjective
from detgraph.models.targets import Targets
from emulator import EmulatedMemory, EmulatedTape
from steps import TINY

IMAGES, SIDE = 3, 64
BOXES = ("usual", "tiny", "outside", "flat", "whole", "alike")
OUTPUTS = ("usual", "alike", "nan", "infinite", "far", "one nan")


@dataclass(frozen=True)
class Kind:
    """Which objective, and under which autocast."""

    end2end: bool = True
    reg_max: int = 1
    bfloat16: bool = False
    weights: bool = False
    classes: int = 5

    def autocast(self, device: str = "cpu") -> AbstractContextManager:
        return torch.autocast(device, torch.bfloat16, enabled=self.bfloat16)


KINDS = [
    Kind(),
    Kind(bfloat16=True, weights=True, classes=20),
    Kind(end2end=False, reg_max=16, weights=True),
    Kind(end2end=False, reg_max=16, bfloat16=True),
    Kind(reg_max=16),
    Kind(end2end=False),
]


@dataclass(frozen=True)
class Scene:
    """A batch and what a network said of it: boxes per image, how they lie, what kind of outputs."""

    boxes: tuple[int, ...]
    lie: tuple[str, ...] = ("usual",)
    outputs: str = "usual"
    seed: int = 0

    def batch(self) -> dict[str, Tensor]:
        """Return the ground truths as upstream's loader does."""
        draw = torch.Generator().manual_seed(self.seed)
        number = sum(self.boxes)
        centres = torch.rand(number, 2, generator=draw) * 0.9 + 0.05
        sides = torch.rand(number, 2, generator=draw) * 0.6 + 0.05
        for at in range(number):
            lie = self.lie[at % len(self.lie)]
            if lie == "tiny":
                sides[at] = 0.003
            elif lie == "outside":
                centres[at] += 1.5
            elif lie == "flat":
                sides[at, at % 2] = 0
            elif lie == "whole":
                centres[at], sides[at] = 0.5, 1.0
            elif lie == "alike" and at:
                centres[at], sides[at] = centres[0], sides[0]
        return {
            "batch_idx": torch.tensor([image for image, n in enumerate(self.boxes) for _ in range(n)]).float(),
            "cls": torch.randint(0, 5, (number, 1), generator=draw).float(),
            "bboxes": torch.cat((centres, sides), 1),
        }

    def predictions(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return what stands for a network's outputs, in the shapes and types of ``like``."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        found = []
        for at, tensor in enumerate(like):
            scale = {"alike": 0.0, "far": 30.0}.get(self.outputs, 1.0)
            values = torch.randn(tensor.shape, generator=draw) * scale + (2 if at % 2 == 0 else -1)
            if self.outputs == "one nan":
                values[1, :: 3 + self.seed % 5] = float("nan")
            if self.outputs in ("nan", "infinite"):
                values[torch.rand(values.shape, generator=draw) < 0.02] = float(self.outputs[:3])
            found.append(values.to(tensor.dtype))
        return found


class Setting:
    """One objective that has learned, with static tensors in the place of a network's outputs."""

    def __init__(self, kind: Kind, device: str = "cpu") -> None:
        self.kind, self.device = kind, device
        network, self.view, outputs = _network(kind, device)
        self.criterion = network.init_criterion()
        self.outputs = [output.detach().clone().requires_grad_() for output in outputs]
        self.incoming = torch.tensor([0.3, 1.7, 0.9], device=device)
        self.objective = RecordableObjective(self.criterion, self.view.restore)
        self.learn(Scene((1,) * IMAGES))

    def put(self, scene: Scene) -> None:
        with torch.no_grad():
            for output, values in zip(self.outputs, scene.predictions(self.outputs), strict=True):
                output.copy_(values)

    def batch(self, scene: Scene) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in scene.batch().items()}

    def eager(self, scene: Scene) -> list[Tensor]:
        """Return what upstream's own objective makes of a scene: loss, items, gradients of all outputs."""
        self.put(scene)
        with self.kind.autocast(self.device):
            return self.results(*self.criterion(self.view.restore(tuple(self.outputs)), self.batch(scene)))

    def results(self, loss: Tensor, items: dict[str, Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad(loss, self.outputs, self.incoming, allow_unused=True)
        return [loss.detach(), *items.values(), *gradients]

    def learn(self, scene: Scene):
        self.put(scene)
        with self.kind.autocast(self.device):
            return self.objective.learn(self.outputs, self.batch(scene))

    def fixed(self, scene: Scene, places: Sequence[int], boxes: int = 8, rows: int = 24) -> list[Tensor]:
        """Return what the objective with fixed sizes makes of a scene, without a recording."""
        self.put(scene)
        targets = Targets(len(scene.boxes), rows, boxes, torch.device(self.device))
        targets.load(self.batch(scene))
        with self.kind.autocast(self.device):
            return self.results(*self.objective.run(self.outputs, targets, places))


@cache
def _network(kind: Kind, device: str):
    torch.manual_seed(0)
    tiny = deepcopy(TINY) | {"nc": kind.classes, "end2end": kind.end2end, "reg_max": kind.reg_max}
    network = DetectionModel(tiny, verbose=False).train().to(device)
    network.args = get_cfg(overrides={"epochs": 6})
    if kind.weights:
        network.class_weights = torch.linspace(0.5, 1.5, kind.classes)
    view = NetworkView(network)
    with torch.no_grad(), kind.autocast(device):
        return network, view, view(torch.rand(IMAGES, 3, SIDE, SIDE).to(device))


class Recording:
    """Forward and backward of an objective on tapes, and what runs between them: as on CUDA, only at a replay."""

    def __init__(self, setting: Setting, places: Sequence[int], boxes: int = 8, rows: int = 24) -> None:
        self.setting = setting
        self.targets = Targets(IMAGES, rows, boxes, torch.device(setting.device))
        self.parts: list[Callable[[], None]] = []
        self._memory = EmulatedMemory()
        self._open()
        try:
            with setting.kind.autocast(setting.device):
                self.results = setting.results(*setting.objective.run(setting.outputs, self.targets, places, self.cut))
        finally:
            self._close()

    def _open(self) -> None:
        self._tape = EmulatedTape(self._memory, lambda: None)
        self._tape.__enter__()

    def _close(self) -> None:
        self._tape.__exit__(None, None, None)
        self.parts.append(self._tape.replay)

    def cut(self, piece: Callable[[], None]) -> None:
        self._close()
        self.parts.append(piece)
        self._open()

    def replay(self, scene: Scene) -> list[Tensor]:
        self.setting.put(scene)
        self.targets.load(self.setting.batch(scene))
        self.setting.objective.refresh()
        for part in self.parts:
            part()
        return self.results


class CudaRecording(Recording):
    """The same on a GPU, as graphs."""

    def __init__(self, setting: Setting, *args, **kwargs) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            setting.fixed(Scene((1,) * IMAGES), *args, **kwargs)  # what a first pass sets up cannot be recorded
            super().__init__(setting, *args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)

    def _open(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _close(self) -> None:
        self._graph.capture_end()
        self.parts.append(self._graph.replay)


def different(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> list[int]:
    """Return which of some tensors differ in a byte, in type or in shape.

    Which of the many NaNs it is does not count: a processor computes the ends of a tensor by other instructions than
    its middle, and they make other NaNs of the same numbers.
    """
    return [at for at, (a, b) in enumerate(zip(expected, found, strict=True)) if not _equal(a, b)]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_as_bytes(a), _as_bytes(b))


def _as_bytes(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), float("nan"), tensor).contiguous().view(-1).view(torch.uint8)
