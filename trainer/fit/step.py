"""One training step of a fit: forward, backward, update.

It is all that runs between two batches: the loop's hooks, the tests and the benchmarks call it, and nothing else
restates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from detgraph.trainer.parts import Part
from detgraph.trainer.parts.eligibility import split_blocker
from detgraph.trainer.parts.network import NetworkStep
from detgraph.trainer.parts.objective import Objective


class Owner(Protocol):
    """Whose step it is: upstream's trainer, or what stands in for it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def optimizer_step(self) -> None: ...


class TrainingStep:
    """The step of one fit, its parts replayed where they may be. Eager fits run the same lines with eager parts.

    Args:
        owner: has the model, the optimizer, the gradient scaler, and upstream's ``optimizer_step``, which unscales,
            clips, steps, empties the gradients and averages the weights.
        parts: by name, in the order of `PARTS`; each sees the step at its place. ``network`` and
            ``objective`` are among them.
    """

    def __init__(self, owner: Owner, parts: dict[str, Part]) -> None:
        self.owner = owner
        self.parts = parts

    @property
    def network(self) -> NetworkStep:
        """The part that calls the network."""
        return self.parts["network"]

    @property
    def objective(self) -> Objective:
        """The part that makes loss and loss items of predictions and ground truths."""
        return self.parts["objective"]

    def forward(self, batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and loss items of a preprocessed batch, as upstream's model does; under the caller's autocast.

        The loss is a vector, each entry times the batch size. Where the model may not be split, it is called whole.
        """
        if reason := split_blocker(self.owner.model):
            self.objective.whole(reason)
            return self.network.whole(batch, reason)
        predictions = self.network(batch["img"])
        return self.objective(predictions, batch, self.network.is_full(batch["img"]))

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, scaled, to those of the parameters; make the recordings that are due."""
        self.owner.scaler.scale(loss).backward()
        for part in self.parts.values():
            part.after_backward()

    def update(self) -> None:
        """Take upstream's optimizer step."""
        with self._each(lambda part: part.update(self.owner.optimizer)):
            self.owner.optimizer_step()

    def in_force(self) -> AbstractContextManager[None]:
        """Return the context that all steps of a fit run in.

        Raises:
            PatchDriftError: on entry, if a patch that a part needs does not fit the installed upstream.
        """
        return self._each(lambda part: part.in_force())

    @property
    def recorded(self) -> bool:
        """Whether any recording is alive."""
        return any(part.recorded for part in self.parts.values())

    def drop(self) -> None:
        """Give up what is recorded, if anything; each part, whatever becomes of the others. May be called again."""
        with ExitStack() as drops:
            for part in self.parts.values():
                drops.callback(part.drop)

    @contextmanager
    def _each(self, context) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(context(part))
            yield
