"""Circumstances of a fit that keep the loop upstream's.

Each rule returns a sentence that names what was found, or None. A contradiction in what the user asked for is not
here: `detgraph.cfg` refuses it before any work. What keeps a part eager is the part's own matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultralytics.utils import RANK

from .upstream import loop_drift

if TYPE_CHECKING:
    from .trainer import LightningDetectionTrainer


def loop_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why upstream's own loop must run instead of ours."""
    if trainer.world_size > 1 or RANK != -1:
        return "training on several GPUs runs upstream's own loop"
    if trainer.device.type not in {"cpu", "cuda"}:
        return f"training on '{trainer.device.type}' runs upstream's own loop"
    if trainer.args.task != "detect":
        return f"task '{trainer.args.task}' runs upstream's own loop"
    return loop_drift()
