"""The smallest thing that a network step takes for a network: one weight, one BatchNorm, and steps of it by hand."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.parts.network import GraphedNetworkStep
from emulator import EmulatingRecorder
from steps import make_model

SHAPE = (2, 1, 1, 2)


@cache
def _objective() -> object:
    """Return an objective of upstream's, as a network step wants the model to have one; the probe's steps use none."""
    return make_model().init_criterion()


class Scale(nn.Module):
    """One weight times the input, dressed as the output of a Detect head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        boxes = (self.weight * x).flatten(2)
        return {"boxes": boxes, "scores": boxes * 1.0, "feats": [x]}


class Probe(nn.Module):
    """The part of a detection model's interface that a network step uses; ``norm`` before the weight, if wanted."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(*([nn.BatchNorm2d(1)] if norm else []), Scale())
        self.save: list[int] = []

    def forward(self, x):
        return self.predict(x)

    def predict(self, x):
        return self.model(x)

    def init_criterion(self):
        return _objective()


class ProbeFit:
    """Steps of a probe with SGD, two micro-batches a window; what they left, in ``seen``, a row a step."""

    def __init__(self, capture: str | bool = True, recorder: EmulatingRecorder | None = None) -> None:
        self.model = Probe(norm=True)
        self.options = CaptureOptions(capture_network=capture)
        self.report = CaptureReport(self.options)
        self.recorder = recorder or EmulatingRecorder()
        self.step = GraphedNetworkStep(self.model, self.recorder, SHAPE, self.options, self.report)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.seen: list[list[float]] = []
        self.number = 0

    def run(self, steps: int) -> ProbeFit:
        for _ in range(steps):
            images = torch.arange(4.0).view(SHAPE) + self.number
            self.step(images)["boxes"].square().sum().backward()
            self.step.after_backward()
            gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
            self.number += 1
            if self.number % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seen.append([x for t in (*gradients, *self.state()) for x in t.flatten().tolist()])
        return self

    def state(self) -> list[Tensor]:
        return [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())]
