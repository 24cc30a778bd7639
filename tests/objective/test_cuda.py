"""The objective as CUDA graphs: upstream's bytes; and what a GPU has to be like for that."""

from __future__ import annotations

import pytest
import torch

from detgraph.models.counted import SHORT_ROW, CapacityExceeded
from scenes import BOXES, IMAGES, KINDS, OUTPUTS, CudaRecording, Scene, Setting, different

pytestmark = pytest.mark.gpu

PLACES = [8 * IMAGES * 320, IMAGES * 320] * 2
LIES = (("usual",), BOXES, ("alike", "usual"), ("tiny",))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_replay(kind):
    setting = Setting(kind, "cuda")
    recording = CudaRecording(setting, PLACES[: 4 if kind.end2end else 2])
    assert len(recording.parts) >= 5
    for seed in range(48):
        boxes = (0, 0, 0) if seed == 0 else (seed % 9, seed * 5 % 9, seed // 6)
        scene = Scene(boxes, LIES[seed % 4], OUTPUTS[seed % len(OUTPUTS)], seed)
        expected = [tensor if tensor is None else tensor.clone() for tensor in setting.eager(scene)]
        assert not different(expected, recording.replay(scene)), scene
        if kind.end2end and seed % 8 == 0:
            setting.criterion.update()


def test_a_batch_too_large_spoils_no_later_replay():
    setting = Setting(KINDS[0], "cuda")
    recording = CudaRecording(setting, [300, 100, 300, 30])
    few, crowded = Scene((1, 0, 2), seed=1), Scene((8, 8, 8), seed=5)
    for _ in range(2):
        with pytest.raises(CapacityExceeded):
            recording.replay(crowded)
        expected = [tensor.clone() for tensor in setting.eager(few)]
        assert not different(expected, recording.replay(few))


def test_topk_chooses_alike_however_many_rows():
    """Which of equal values it takes is by their place; boxes without an object only add rows."""
    for anchors in (320, 2100, 8400):
        draw = torch.Generator("cuda").manual_seed(anchors)
        rows = torch.rand(1000, anchors, device="cuda", generator=draw)
        rows = torch.where(rows < 6 / anchors, (rows * anchors).round() / 4, 0)
        rows[3::50, ::5] = float("nan")
        for k in (1, 7, 10):
            chosen = [_chosen(rows[:number], k) for number in (1, 20, 41, 81, 200, 800, 1000)]
            assert all(torch.equal(part, chosen[-1][: len(part)]) for part in chosen)


def _chosen(rows: torch.Tensor, k: int) -> torch.Tensor:
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, rows.topk(k).indices, True)


def test_short_rows_are_summed_alike_however_many():
    for width in range(1, SHORT_ROW + 1):
        rows = torch.rand(4096, width, device="cuda")
        for reduce in (torch.sum, torch.mean):
            all_rows = reduce(rows, -1, keepdim=True)
            assert all(torch.equal(reduce(rows[:n], -1, keepdim=True), all_rows[:n]) for n in range(64))
