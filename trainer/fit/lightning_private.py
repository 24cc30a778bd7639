"""Names of Lightning's loop that its documentation does not promise, and whether the installed Lightning has them.

They are looked up on a trainer that was built as for a fit. Where one is gone, or the trainer cannot be built,
upstream's own loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

NAMES = {
    "fit_loop.run": "how a fit ends",
}


def missing(trainer: pl.Trainer) -> str | None:
    """Return which of the names ``trainer`` does not have, or None."""
    for path, purpose in NAMES.items():
        owner = trainer
        for name in path.split("."):
            if not hasattr(owner, name):
                return f"its Trainer has no {path}, which says {purpose}"
            owner = getattr(owner, name)
    return None


def wrap_run(trainer: pl.Trainer, wrapper: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Put what ``wrapper`` makes of the loop's ``run`` in its place."""
    trainer.fit_loop.run = wrapper(trainer.fit_loop.run)
