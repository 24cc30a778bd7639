"""One recording of the orthogonalization in an optimizer step: a tape for each call of upstream's ``muon_update``.

The function moves the momentum, a few operations over all tensors at once, and then orthogonalizes what comes of it, in
hundreds of small ones. The first part stays eager, on the optimizer's own buffers: momentum, gradients, Nesterov or not
may be others at every step. The second part is on the tape.

The tape is a recording of upstream's own function, called so that its first part does nothing: with a momentum of 1,
without Nesterov, and with gradients of zeros. ``x * 1 + 0 * 0`` is ``x`` but for the sign of a zero, and that the
function loses next, where it adds every matrix to zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from detgraph.trainer.capture import proof, torch_private
from detgraph.trainer.capture.guards import Guard, Guards, first_difference, from_to, process_guards
from detgraph.trainer.capture.recording import Recorder, Tape

BAKED_PROCESS_STATE = (
    "autocast",
    "autocast dtype",
    "deterministic algorithms",
    "deterministic warn-only",
    "fill_uninitialized_memory",
    "fp32 precision",
    "fp16 reduced-precision reduction",
    "bf16 reduced-precision reduction",
    "kernel choice",
    "dispatch modes",
    "function modes",
)

Tensors = list[Tensor]
Update = Callable[..., Tensors]


def surroundings(function: Update, device_type: str) -> Guards:
    """Return what a recording bakes in beside the arguments: the process, and what ``function`` calls by name."""
    iteration = "zeropower_via_newtonschulz5"
    called = Guard(iteration, lambda: function.__globals__[iteration], from_to(iteration))
    return Guards([*process_guards(device_type, BAKED_PROCESS_STATE), called])


class CallSignature(Guards):
    """What a recording bakes in of one call of ``muon_update``: the form of its arguments, by position.

    No tensor is identified: momentum buffers may be replaced, and another parameter of the same form may take a place.
    """

    def __init__(self, number: int, grads: Tensors, momentums: Tensors, names: Callable[[Tensors], list[str]]) -> None:
        self._grads, self._momentums = grads, momentums
        self.names = names(grads)

        def guard(name: str, read: Callable[[], list]) -> Guard:
            def explain(baked: list, now: list) -> str:
                if len(baked) != len(now):
                    others = names(self._grads)
                    gone = [f"without {name}" for name in self.names if name not in others]
                    new = [f"with {name}" for name in others if name not in self.names]
                    which = ", ".join([*gone[:3], *new[:3]])
                    return f"gradients in muon group {number}: {len(baked)} -> {len(now)} ({which})"
                i = first_difference(baked, now)
                return f"{name} of {self.names[i]}: {baked[i]} -> {now[i]}"

            return Guard(name, read, explain)

        super().__init__([
            guard("gradient shape", lambda: list(map(attrgetter("shape"), self._grads))),
            guard("gradient dtype", lambda: list(map(attrgetter("dtype"), self._grads))),
            guard("momentum strides", lambda: list(map(Tensor.stride, self._momentums))),
            guard("momentum dtype", lambda: list(map(attrgetter("dtype"), self._momentums))),
            guard("momentum device", lambda: list(map(attrgetter("device"), self._momentums))),
        ])  # fmt: skip
        self._grads, self._momentums = [], []

    def change(self, grads: Tensors, momentums: Tensors) -> str | None:
        """Compare with the arguments of the call that is to be replayed."""
        self._grads, self._momentums = grads, momentums
        try:
            return super().change()
        finally:
            self._grads, self._momentums = [], []


@dataclass
class Call:
    """One call of ``muon_update``: seen in an eager step, then recorded.

    Attributes:
        function: upstream's.
        signature: the form of its arguments.
        updates: what is orthogonalized, in memory of its own with the layout of the momentum buffers.
        zeros: the gradients that the recorded function gets, in the same layout.
        expected: what the function returned in the step that was seen; given up once the recording is proven.
        results: what the recorded function returned, written over by each replay of ``tape``.
    """

    function: Update
    signature: CallSignature
    updates: Tensors
    zeros: Tensors
    expected: Tensors
    results: Tensors = field(default_factory=list)
    tape: Tape | None = None

    @classmethod
    def seen(cls, function: Update, signature: CallSignature, expected: Tensors, *arguments) -> Call:
        grads, momentums, *_ = arguments
        updates = [torch.empty_like(momentum) for momentum in momentums]
        zeros = [torch.zeros_like(update, dtype=grad.dtype) for update, grad in zip(updates, grads, strict=True)]
        call = cls(function, signature, updates, zeros, expected)
        call.load(*arguments)
        return call

    def load(self, grads: Tensors, momentums: Tensors, beta: float, nesterov: bool) -> None:
        """Set ``updates`` from a momentum that has moved: upstream's operations in upstream's order, in place."""
        torch_private.foreach_copy(self.updates, momentums)
        if nesterov:
            torch_private.foreach_mul(self.updates, beta)
            torch_private.foreach_add(self.updates, grads, alpha=1 - beta)

    def orthogonalize(self) -> Tensors:
        """Run upstream's function over ``updates``, which keep their values; returns what a replay leaves again."""
        return self.function(self.zeros, self.updates, beta=1.0, nesterov=False)

    def replay(self, grads: Tensors, momentums: Tensors, beta: float, nesterov: bool) -> Tensors:
        """Do what the function does, momentum moved in place; what is returned is valid until the next replay."""
        torch_private.foreach_mul(momentums, beta)
        torch_private.foreach_add(momentums, grads, alpha=1 - beta)
        self.load(grads, momentums, beta, nesterov)
        self.tape.replay()
        return list(self.results)

    def named(self, tensors: Tensors) -> proof.Results:
        return {f"update of {name}": tensor for name, tensor in zip(self.signature.names, tensors, strict=True)}


class OrthogonalizationRecording:
    """The calls of one optimizer step, recorded in order. Their tapes share memory, so they replay in order only."""

    def __init__(self, recorder: Recorder, calls: list[Call], around: Guards) -> None:
        self.calls = calls
        self.around = around
        self._recorder = recorder

    def change(self, number: int, grads: Tensors, momentums: Tensors) -> str | None:
        """Return why call ``number`` of a step may not be replayed, or None."""
        if number >= len(self.calls):
            return f"number of muon groups: {len(self.calls)} -> {number + 1}"
        return self.around.change() or self.calls[number].signature.change(grads, momentums)

    def eager(self) -> proof.Results:
        """Orthogonalize once without the recording."""
        return self._collected(lambda call: call.orthogonalize())

    def capture(self) -> None:
        """Record. On an error nothing recorded is left."""
        try:
            for call in self.calls:
                call.results, call.tape = self._recorder.capture(call.orthogonalize)
        except BaseException:
            self.release()
            raise

    def replay(self) -> proof.Results:
        """Replay over what is loaded."""
        for call in self.calls:
            call.tape.replay()
        return self._collected(lambda call: call.results)

    def expected(self) -> proof.Results:
        return self._collected(lambda call: call.expected)

    def _collected(self, results: Callable[[Call], Tensors]) -> proof.Results:
        return {name: tensor for call in self.calls for name, tensor in call.named(results(call)).items()}

    def release(self) -> None:
        """Give the memory back. Updates that left the recording must not be read afterwards."""
        calls, self.calls = self.calls, []
        for call in calls:
            call.results = []
            if call.tape is not None:
                call.tape.release()
