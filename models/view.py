"""The network as a function from a tensor to a tuple of tensors, and back to what the objective reads.

A recorded network can only hand over tensors, and it hands their gradients back in a layout of its own choosing. Both
ends of that contract live here: which tensors leave the network, and in which layout.

Layout contract with the objective. The detection losses permute each branch to (batch, anchors, channels) and make it
contiguous before anything else, so the gradients come back in that layout too. The view therefore returns the
permuted, contiguous tensors and hands the objective the permuted view of them: the objective's own ``contiguous()``
is then free, and the incoming gradients have the layout they have in an ordinary step. With the head's own layout the
biases of the last convolutions would be summed in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

BRANCH_KEYS = frozenset({"boxes", "scores", "feats"})


class UnsupportedNetwork(RuntimeError):
    """The network's training output is not one that the view can flatten; the message says what was found."""


@dataclass(frozen=True)
class DetectionLayout:
    """How a flat tuple maps to the prediction dictionary: branch names, and the feature maps' shapes and dtype.

    ``branches`` holds the keys of a two-headed output, or ``None`` alone for a single-headed one. The flat tuple is
    (boxes, scores) of each branch in that order.
    """

    branches: tuple[str | None, ...]
    feature_shapes: tuple[torch.Size, ...]
    feature_dtype: torch.dtype
    device: torch.device


class NetworkView:
    """Backbone, neck and head of a detection model as one callable; shares every weight, registers nothing.

    Calling it runs the model's own ``predict`` (so its training mode, hooks of submodules and autocast apply) on
    images of shape (batch, channels, height, width) and returns a tuple of contiguous tensors, each of shape
    (batch, anchors, channels). ``restore`` turns such a tuple into the dictionary that upstream's objective reads;
    its tensors are views of the tuple's. Feature maps do not leave the view: the objective reads only their shapes,
    dtype and device, so ``restore`` supplies stand-ins without storage of their own, filled with NaN so that a reader
    of their values cannot go unnoticed.

    Raises:
        UnsupportedNetwork: the training output is not a prediction dictionary of one or two branches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout: DetectionLayout | None = None
        self._features: list[Tensor] = []

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        return self.flatten(self.model.predict(images))

    def flatten(self, predictions: object) -> tuple[Tensor, ...]:
        """Return what a call returns, of predictions that the model has made."""
        layout = _layout(predictions)
        if layout != self.layout:
            self.layout = layout
            nan = torch.full((1,), float("nan"), dtype=layout.feature_dtype, device=layout.device)
            self._features = [nan.expand(shape) for shape in layout.feature_shapes]
        return tuple(
            branch[key].permute(0, 2, 1).contiguous()
            for branch in _branches(predictions).values()
            for key in ("boxes", "scores")
        )

    def restore(self, outputs: tuple[Tensor, ...]) -> dict:
        """Return the prediction dictionary over ``outputs``; needs one earlier call, which fixed the layout."""
        assert self.layout is not None, "restore() before the first call of the view"
        tensors = iter(outputs)
        predictions = {
            name: {
                "boxes": next(tensors).permute(0, 2, 1),
                "scores": next(tensors).permute(0, 2, 1),
                "feats": list(self._features),
            }
            for name in self.layout.branches
        }
        return predictions[None] if None in predictions else predictions


def _branches(predictions: object) -> dict[str | None, dict]:
    """Return the branches of a training output by name; raises ``UnsupportedNetwork`` for anything else."""
    if isinstance(predictions, dict):
        branches = {None: predictions} if "boxes" in predictions else predictions
        if all(isinstance(branch, dict) and set(branch) == BRANCH_KEYS for branch in branches.values()):
            return branches
    found = sorted(map(str, predictions)) if isinstance(predictions, dict) else type(predictions).__name__
    raise UnsupportedNetwork(f"the network's training output ({found}) is not the one of a Detect head")


def _layout(predictions: object) -> DetectionLayout:
    branches = _branches(predictions)
    features = next(iter(branches.values()))["feats"]
    return DetectionLayout(
        branches=tuple(branches),
        feature_shapes=tuple(feature.shape for feature in features),
        feature_dtype=features[0].dtype,
        device=features[0].device,
    )
