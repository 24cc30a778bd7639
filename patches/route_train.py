"""Patch: train stock detectors with `LightningDetectionTrainer`.

What: `Model.train` takes our keys out of its arguments and, where upstream would have used the stock
    `DetectionTrainer` itself, trains with ours. World, YOLOE, RTDETR, other tasks and trainers that a user chose stay
    as they are, with one warning when the capture was asked for.
Why not a subclass: `detgraph.trainer.YOLO` is that subclass, and shares `route` below. But upstream's command line and
    every script with `from ultralytics import YOLO` build upstream's own classes by name.
Target: `ultralytics.engine.model.Model.train`
Upstream versions: 8.4.183 to 8.4.190
Forwarded: no. Upstream accepts `trainer=`, which is all the call needs; the choice of the default is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from detgraph.patches.registry import Known, Patch


def unpatched_train() -> Callable[..., Any]:
    """Return upstream's `Model.train` itself, whether the patch is applied or not."""
    return patch.original


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    from detgraph.trainer.routing import route  # late: the trainer imports this package

    @functools.wraps(original)
    def train(self, trainer=None, **kwargs):
        return route(self, original, trainer, kwargs)

    return train


patch = Patch(
    name="route_train",
    known=Known(
        target="ultralytics.engine.model:Model.train",
        fingerprints={"0f85d61a53464cf66bea51b5cf9135857b218c280aef0582fae3ae2b0454344e": "8.4.190"},
        signature="(self, trainer=None, **kwargs)",
    ),
    what="stock detectors train with LightningDetectionTrainer; train() accepts our keys",
    replacement=_patched,
)
