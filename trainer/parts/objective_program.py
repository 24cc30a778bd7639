"""What is recorded of a detection model's objective: target assignment and loss, and the way back to the predictions.

Upstream's own code is what is recorded, under a mode that gives its data-dependent sizes capacities
(`models/recordable_objective.py`). Predictions are copied in and their gradients are copied out, so the recording
depends on no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from detgraph.models import objective_blocker
from detgraph.models.recordable_objective import Counts, RecordableObjective
from detgraph.models.targets import ROWS, Targets
from detgraph.trainer.capture import torch_private
from detgraph.trainer.capture.guards import Guard, Guards, from_to, process_guards
from detgraph.trainer.capture.passes import Autocast, apart
from detgraph.trainer.capture.program import Differentiable
from detgraph.trainer.capture.proof import Results

KEY = "capture_objective"


class Capacities:
    """How much room recordings have: boxes of a batch, of one image, and places of each mask; more on demand.

    Each is a power of two with half of what was met to spare, so that a fit meets few batches that do not fit.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.counts: Counts | None = None

    def raise_to(self, needed: dict[str, int]) -> None:
        """Make room for a batch that turned out to need ``needed``, by the names of a `CapacityExceeded`."""
        self.take_in(needed.get(ROWS, 0), self.counts.raised(needed))

    def take_in(self, rows: int, counts: Counts) -> None:
        """Make room for a batch of ``rows`` boxes that needs ``counts``."""
        self.rows = max(self.rows, _roomy(rows))
        roomy = Counts(_roomy(counts.boxes), tuple(map(_roomy, counts.places)))
        self.counts = roomy if self.counts is None else self.counts.joined(roomy)


def _roomy(number: int) -> int:
    return max(8, 1 << (number + number // 2).bit_length())


class ObjectiveProgram(Differentiable):
    """Forward and backward of the objective of ``model``, seen in one eager step of the fit.

    Made before that step's objective runs, from the tensors that the network hands over, each (batch, anchors,
    channels) in the objective's layout, and the batch; `see` and `complete` take what the step makes of them.

    Attributes:
        objective: upstream's, for tensors that stay where they are.
        targets: the static ground truths.
        predictions: static copies of what the network hands over.
        outputs: static: the loss's entries, and the loss items in one tensor.
    """

    part, key = "objective", KEY

    def __init__(
        self,
        model: nn.Module,
        outputs: Sequence[Tensor],
        restore: Callable[[tuple[Tensor, ...]], dict],
        batch: dict[str, Tensor],
        capacities: Capacities,
    ) -> None:
        device = outputs[0].device
        self.model = model
        self.capacities = capacities
        self.mode = Autocast.now(device.type)
        self.restore = restore
        self.objective = RecordableObjective(model.criterion, restore)
        self.predictions = tuple(output.detach().clone() for output in outputs)
        self.batch = {name: batch[name].detach().clone() for name in ("batch_idx", "cls", "bboxes")}
        self.targets: Targets | None = None
        self.names: tuple[str, ...] = ()
        self.incoming: tuple[Tensor, ...] = ()
        self.used = (True, False)
        self._form = _form(outputs)
        self._seen: list[Tensor | None] = []  # of the step itself: loss, items, gradients of the predictions
        self._sent: list[Tensor] = []
        self._live: tuple[Tensor, ...] = ()
        self._loss: Tensor | None = None
        self.gradients: Sequence[Tensor | None] = ()
        self.guards = Guards(
            [
                *process_guards(device.type),
                Guard("objective", lambda: objective_blocker(model) or id(model.criterion), _replaced),
                Guard("numbers of the objective", self.objective.guarded, _number),
            ]
        )

    # The step that is seen --------------------------------------------------------------------------------------

    def see(self, loss: Tensor, items: dict[str, Tensor], outputs: Sequence[Tensor]) -> None:
        """Note what the step's objective has made, and listen to its backward."""
        self.names = tuple(items)
        self._seen = [loss.detach().clone(), *(item.detach().clone() for item in items.values())]
        sent, gradients = self._sent, [None] * len(outputs)  # hooks that a kept loss holds know nothing of the fit
        loss.register_hook(lambda gradient: sent.append(gradient.detach().clone()))
        for i, output in enumerate(outputs):
            output.register_hook(lambda gradient, i=i: gradients.__setitem__(i, gradient.detach().clone()))
        self.gradients = gradients

    def complete(self) -> bool:
        """Return whether one backward has come by. Without it nothing can be recorded, nor with two."""
        if len(self._sent) != 1:
            return False
        self._seen += self.gradients
        self.incoming, self._sent, self.gradients = tuple(self._sent), [], ()
        return True

    # Making a recording -----------------------------------------------------------------------------------------

    def segments(self) -> Sequence[Callable]:
        return self._run_forward, self._run_backward

    def _run_forward(self) -> tuple[Tensor, ...]:
        self._live = tuple(tensor.detach().requires_grad_() for tensor in self.predictions)
        with torch.enable_grad(), self.mode.forward():
            self._loss, items = self.objective.run(self._live, self.targets, self.capacities.counts.places, self.cut)
            return self._loss.detach(), torch.stack([item.detach().view(()) for item in items.values()])

    def _run_backward(self) -> tuple[Tensor | None, ...]:
        live, loss = self._live, self._loss
        self._live, self._loss = (), None
        with self.mode.backward():
            return apart(torch.autograd.grad(loss, live, self.incoming, allow_unused=True), self.incoming)

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._live, self._loss = (), None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The objective moves nothing but what it borrows; before anything is recorded, it learns the batch's sizes."""
        rows, images = len(self.batch["batch_idx"]), len(self.predictions[0])
        live = tuple(tensor.detach().requires_grad_() for tensor in self.predictions)
        with torch.enable_grad(), self.mode.forward():
            counts = self.objective.learn(live, self.batch)
        self.capacities.take_in(rows, counts)
        boxes = self.capacities.counts.boxes
        self.targets = Targets(images, self.capacities.rows, boxes, self.predictions[0].device)
        self.targets.load(self.batch)
        yield

    def captured(self, results: Sequence[Sequence[Tensor | None]]) -> None:
        self.outputs, self.gradients = tuple(results[0]), tuple(results[1])

    # Proving it -------------------------------------------------------------------------------------------------

    def results(self, of: Sequence[Sequence[Tensor | None]] | None = None) -> Results:
        (loss, items), gradients = of or (self.outputs, self.gradients)
        return self._named(loss, items, gradients)

    def _named(self, loss: Tensor, items: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Results:
        named = {"loss": loss, **dict(zip(self.names, (item.view(()) for item in items), strict=True))}
        named |= {f"gradient of output {i}": gradient for i, gradient in enumerate(gradients)}
        return {
            name: None if tensor is None else tensor.detach().to("cpu", copy=True) for name, tensor in named.items()
        }

    def own(self, expected: Results) -> tuple[Results, Results]:
        count = 1 + len(self.names)
        loss, *items = self._seen[:count]
        return expected, self._named(loss, items, self._seen[count:])

    def adopted(self) -> None:
        self._seen, self.batch = [], {}

    def upstreams(self, batch: dict[str, Tensor]) -> Results:
        """Return what upstream's objective, as it is, makes of the latest replay's predictions and ``batch``."""
        live = tuple(tensor.detach().requires_grad_() for tensor in self.predictions)
        with torch.enable_grad(), self.mode.forward():
            loss, items = self.model.criterion(self.restore(live), batch)
        with self.mode.backward():
            gradients = torch.autograd.grad(loss, live, self.incoming, allow_unused=True)
        return self._named(loss, list(items.values()), gradients)

    # Replaying it -----------------------------------------------------------------------------------------------

    def change(self, outputs: Sequence[Tensor]) -> str | None:
        if (form := _form(outputs)) != self._form:
            return f"form of the predictions: {self._form} -> {form}"
        return self.guards.change()

    def load(self, segment: int, outputs: Sequence[Tensor], batch: dict[str, Tensor]) -> None:
        """Copy the step's predictions and ground truths.

        Raises:
            CapacityExceeded: for more boxes than there is room for.
        """
        with torch.no_grad():
            torch_private.foreach_copy(self.predictions, [output.detach() for output in outputs])
        self.targets.load(batch)
        self.objective.refresh()
        self.leaves = tuple(outputs)

    def load_backward(self, incoming: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self.incoming[0].copy_(incoming[0])

    def hand_out(self) -> list[Tensor | None]:
        return [None if gradient is None else gradient.detach() for gradient in self.gradients]

    def release(self) -> None:
        self.model = self.objective = self.restore = self.targets = self.guards = self._loss = None
        self.predictions = self.outputs = self.leaves = self.incoming = self.gradients = self._live = ()
        self._seen, self._sent, self.batch = [], [], {}


def _form(outputs: Sequence[Tensor]) -> tuple:
    return tuple((tuple(output.shape), output.dtype, output.requires_grad) for output in outputs)


def _replaced(baked: object, now: object) -> str:
    return now if isinstance(now, str) else "the objective was replaced"


def _number(baked: tuple, now: tuple) -> str:
    if different := {name for name, *_ in baked} ^ {name for name, *_ in now}:
        return f"objective's {min(different)} is new or gone"
    old, new = next((a, b) for a, b in zip(baked, now, strict=True) if a != b)
    return from_to(f"objective's {old[0]}")(old[1:], new[1:])
