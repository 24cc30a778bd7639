"""Ground truths in fixed places: rows up to a capacity, and boxes of each image up to another."""

from __future__ import annotations

import torch
from torch import Tensor
from ultralytics.utils.ops import xywh2xyxy

from .counted import CapacityExceeded

ROWS = "ground truths"
BOXES = "boxes in one image"


class Targets:
    """The ground truths of one batch of ``images`` pictures, in static tensors of ``device``.

    ``rows`` is the capacity for the boxes of all pictures, ``boxes`` the one for each of them. ``most``, on the
    device, is what the most crowded picture needs after `preprocess` has run; a larger number than ``boxes`` means
    that the result is wrong, and a negative one that the rows were not in the order of their pictures.
    """

    def __init__(self, images: int, rows: int, boxes: int, device: torch.device) -> None:
        self.images, self.rows, self.boxes = images, rows, boxes
        self.most = torch.zeros((), dtype=torch.long, device=device)
        self._targets = torch.zeros(rows, 6, device=device)
        self._number = torch.zeros((), dtype=torch.long, device=device)

    def load(self, batch: dict[str, Tensor]) -> None:
        """Take a batch's ground truths. Does not wait for the device.

        Raises:
            CapacityExceeded: the batch has more rows than there are places.
        """
        targets = torch.cat((batch["batch_idx"].view(-1, 1), batch["cls"].view(-1, 1), batch["bboxes"]), 1)
        if targets.dtype != self._targets.dtype:
            raise TypeError(f"ground truths are {targets.dtype}, not {self._targets.dtype}")
        if len(targets) > self.rows:
            raise CapacityExceeded({ROWS: len(targets)}, ROWS, self.rows)
        self._targets[: len(targets)].copy_(targets)
        self._number.fill_(len(targets))

    def empty_batch(self) -> dict[str, Tensor]:
        """Return a batch without ground truths, for a caller of `preprocess` that makes its arguments of a batch."""
        none = self._targets[:0]
        return {"batch_idx": none[:, 0], "cls": none[:, :1], "bboxes": none[:, 2:]}

    def preprocess(self, targets: Tensor, batch_size: int, scale_tensor: Tensor) -> Tensor:
        """Return what upstream's function of that name returns for the batch that was loaded, with ``boxes`` places.

        ``targets`` is not looked at. Places without a box are zero, as upstream's are.
        """
        assert batch_size == self.images
        device = self.most.device
        at = torch.arange(self.rows, device=device)
        valid = at < self._number
        image = torch.where(valid, self._targets[:, 0].long(), 0)
        offsets = torch.zeros(self.images + 1, dtype=torch.long, device=device)
        offsets = offsets.scatter_add_(0, image + 1, valid.long()).cumsum(0)
        within = torch.where(valid, at - offsets[image], 0)
        self.most.copy_(torch.where((within < 0).any(), -1, offsets.diff().max()))
        # A row that has no place among the boxes gets one behind them: places are written once.
        fits = valid & (within >= 0) & (within < self.boxes)
        places = torch.where(fits, image * self.boxes + within, self.images * self.boxes + at)
        padded = torch.zeros(self.images * self.boxes + self.rows, 5, device=device)
        padded[places] = self._targets[:, 1:]
        padded = padded[: self.images * self.boxes].view(self.images, self.boxes, 5)
        padded[..., 1:5] = xywh2xyxy(padded[..., 1:5].mul_(scale_tensor))
        return padded
