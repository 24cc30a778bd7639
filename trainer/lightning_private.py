"""Names of Lightning's loop that its documentation does not promise, and whether the installed Lightning has them.

They are looked up on a trainer that was built as for a fit. Where one is gone, or the trainer cannot be built,
upstream's own loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

NAMES = {
    "num_training_batches": "how long an epoch is",
    "fit_loop.max_batches": "how long an epoch is",
    "fit_loop._combined_loader": "how long an epoch is",
    "fit_loop._data_fetcher": "where an epoch's batches come from",
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


def follow_length(trainer: pl.Trainer, batches: Sized) -> None:
    """Let the epoch that starts run to the present end of ``batches``; call it before the epoch's first batch.

    Lightning takes the number of batches once, as the fit starts, and would cut the epochs of a longer loader that
    somebody has put in place since. Its option to ask anew does so before an epoch's callbacks have run.
    """
    if trainer.num_training_batches != len(batches):
        loop = trainer.fit_loop
        loop.max_batches = len(batches)
        loop._combined_loader.limits = [len(batches)]
        iter(loop._data_fetcher)


def wrap_run(trainer: pl.Trainer, wrapper: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Put what ``wrapper`` makes of the loop's ``run`` in its place."""
    trainer.fit_loop.run = wrapper(trainer.fit_loop.run)
