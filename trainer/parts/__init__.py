"""The parts of a training step that can be recorded, one file each, and `PARTS`, the table of them.

The table drives which keys mean something, how a fit's step is put together, what its report counts, which ways of
running a fit `yolo why` measures, and what is dropped at the end. A part's key is ``capture_`` and its name, with its
values in `cfg/capture.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from detgraph.trainer.capture.recording import Recorder

from . import network, objective, orthogonalization
from .eligibility import network_blocker
from .part import Part

__all__ = ("PARTS", "Part", "PartSpec", "spec")


@dataclass(frozen=True)
class PartSpec:
    """A line of the table.

    Attributes:
        name: the part's name; the key that asks for it is ``capture_`` and the name.
        build: makes the part of one fit, from upstream's trainer with `capture` and `capture_report`, a recorder or
            None, and why every step is eager, or None.
        blocker: says why a trainer's fit keeps the part eager from the start, or None.
        arm: name of the way to run a fit, for `yolo why`, that captures this part and all before it.
    """

    name: str
    build: Callable[[Any, Recorder | None, str | None], Part]
    blocker: Callable[[Any], str | None]
    arm: str

    @property
    def key(self) -> str:
        return f"capture_{self.name}"


# In the order of a step.
PARTS: tuple[PartSpec, ...] = (
    PartSpec("network", network.build, network_blocker, "replay"),
    PartSpec("objective", objective.build, network_blocker, "objective"),
    PartSpec("orthogonalization", orthogonalization.build, orthogonalization.blocker, "all"),
)


def spec(name: str) -> PartSpec:
    """Return the line of the table that is called ``name``."""
    return next(line for line in PARTS if line.name == name)
