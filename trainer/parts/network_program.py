"""What is recorded of a detection model's network: its forward and its backward, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from detgraph.models import NetworkView, objective_blocker
from detgraph.trainer.capture import proof, torch_private
from detgraph.trainer.capture.gradients import ReusedGradients
from detgraph.trainer.capture.guards import Guard, from_to
from detgraph.trainer.capture.passes import Autocast, apart, parameter_aliases
from detgraph.trainer.capture.program import Differentiable
from detgraph.trainer.capture.signature import Signature, has_hooks
from detgraph.trainer.capture.state import NetworkState

KEY = "capture_network"


def network_signature(model: nn.Module, images: Tensor) -> Signature:
    """Return all that a recording of a detection model's network bakes in, as it is now.

    Changes to ``criterion`` of ``model`` count, because the layout of the outputs is agreed with it.
    """
    built = type(model.init_criterion())  # in the first step None becomes what the model itself would build
    shown = from_to("objective")

    def objective() -> object:
        """Return what upstream shipped as the objective's class, or in words how the objective differs from it."""
        criterion = getattr(model, "criterion", None)
        return objective_blocker(model) or (built if criterion is None else type(criterion))

    return Signature(
        model.model,
        images,
        [
            Guard("objective", objective, lambda old, new: new if isinstance(new, str) else shown(old, new)),
            Guard("saved layer indices", lambda: list(model.save), from_to("saved layer indices")),
            Guard("network", lambda: id(model.model), lambda baked, now: "the network (model.model) was replaced"),
        ],
    )


class NetworkProgram(Differentiable):
    """Forward and backward of a detection model's network, seen in one eager step of the fit.

    Made before that step's forward; `listen` and `complete` see its backward. Then it can be recorded.

    Attributes:
        view: the network as tensors in, tensors out.
        signature: all that a replay bakes in, before the forward.
        alone: the parameters, by name, whose gradient no hook changes: what it was before, and this step's.
        earlier: what it was before, on the host, where it was not None.
        input: the static input; ``load`` copies into it, which broadcasts: the caller guarantees the shape.
        output_gradients: static incoming gradients of the used outputs, in the objective's layout.
        gradients: what the parameters get, in their order; None before `captured`.
    """

    part, key = "network", KEY

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model = model
        self.view = NetworkView(model)
        self.mode = Autocast.now(images.device.type)
        self.signature = network_signature(model, images)
        self.before = NetworkState.take(model, images.device, self.signature.reach.tensors.values())
        named = model.named_parameters()
        self.alone = {name: p for name, p in named if p.requires_grad and not has_hooks(p)}
        self.earlier = {name: p.grad.to("cpu", copy=True) for name, p in self.alone.items() if p.grad is not None}
        self.input = images.detach()
        self.output_gradients: tuple[Tensor, ...] = ()
        self.gradients: ReusedGradients | None = None
        self._incoming: list[Tensor | None] = []
        self._handles: list = []
        self._aliases: dict[nn.Parameter, Tensor] = {}
        self._forward: tuple[Tensor, ...] = ()

    # The step that is seen --------------------------------------------------------------------------------------

    def drawn_on_the_host(self) -> str | None:
        """Return that the step has drawn random numbers that a replay would not draw again, or None."""
        return "the network draws random numbers on the host" if self.before.generators.host_moved() else None

    def moved_by_forward(self, images: Tensor) -> str | None:
        """Return what the forward just run did besides computing, which a replay would not do again, or None."""
        change = self.signature.change(images)
        return change and f"the network changes as it runs: {change}"

    def moved_by_backward(self) -> str | None:
        """Return what the backward just run did besides computing, or None."""
        change = self.signature.reach.change()
        return change and f"the network changes as its backward runs: {change}"

    def listen(self, outputs: tuple[Tensor, ...]) -> None:
        """Note the gradients that the backward sends to ``outputs``, until `complete`."""
        self._incoming = incoming = [None] * len(outputs)
        self._handles = [
            output.register_hook(lambda gradient, i=i: incoming.__setitem__(i, gradient))
            for i, output in enumerate(outputs)
            if output.requires_grad
        ]

    def complete(self) -> bool:
        """Return whether a backward has come by, and stop listening then. Without one nothing can be recorded."""
        incoming = self._incoming
        if all(gradient is None for gradient in incoming):
            return False
        for handle in self._handles:
            handle.remove()
        self.used = tuple(gradient is not None for gradient in incoming)
        return True

    # Making a recording -----------------------------------------------------------------------------------------

    def segments(self) -> Sequence[Callable]:
        return self._run_forward, self._run_backward

    def _run_forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self.mode.forward():
            self._forward = self.view(self.input)
        return self._forward

    def _run_backward(self) -> tuple[Tensor | None, ...]:
        outputs, self._forward = self._forward, ()
        used = [output for output, used in zip(outputs, self.used, strict=True) if used]
        with self.mode.backward():
            found = torch.autograd.grad(used, list(self._aliases.values()), self.output_gradients, allow_unused=True)
        return apart(found, self.output_gradients)

    @contextmanager
    def running(self) -> Iterator[None]:
        with parameter_aliases(self.model) as self._aliases:
            try:
                yield
            finally:
                self._aliases, self._forward = {}, ()

    @contextmanager
    def kept(self) -> Iterator[None]:
        reach = self.signature.reach  # the program may be released inside
        try:
            with self.state().put_back():
                self._make_static()
                yield
        finally:
            reach.restore()

    def state(self) -> NetworkState:
        """Return a copy of all that a pass moves, as it is now."""
        return NetworkState.take(self.model, self.input.device, self.signature.reach.tensors.values())

    def _make_static(self) -> None:
        """Give what was seen places of its own: dense copies in the same layout."""
        incoming, self._incoming = self._incoming, []
        self.input = self.input.clone(memory_format=torch.preserve_format)
        self.output_gradients = tuple(
            gradient.detach().clone(memory_format=torch.preserve_format)
            for gradient in incoming
            if gradient is not None
        )

    def rewind(self) -> None:
        self.before.restore()

    def captured(self, results: Sequence[Sequence[Tensor | None]]) -> None:
        outputs, gradients = results
        self.outputs = tuple(output.detach() for output in outputs)
        self.leaves = tuple(self._aliases)
        self.gradients = ReusedGradients(self.leaves, gradients)

    def moved(self) -> str | None:
        return self.signature.reach.change()

    # Proving it -------------------------------------------------------------------------------------------------

    def results(self, of: Sequence[Sequence[Tensor | None]] | None = None) -> proof.Results:
        outputs, gradients = of or (self.outputs, self.gradients.all)
        return proof.results(self.model, outputs, gradients, self.signature.reach.tensors)

    def own(self, expected: proof.Results) -> tuple[proof.Results, proof.Results]:
        """Compare gradients: what came before in the same window of accumulation, and this step's added to it."""
        should, found = {}, {}
        for name, parameter in self.alone.items():
            result = f"gradient of {name}"
            own, earlier, gradient = expected[result], self.earlier.get(name), parameter.grad
            if own is not None and earlier is not None:
                own = (earlier.to(parameter.device) + own.to(parameter.device)).cpu()
            should[result] = earlier if own is None else own
            found[result] = None if gradient is None else gradient.cpu()
        return should, found

    def adopted(self) -> None:
        self.before, self.alone, self.earlier = None, {}, {}

    # Replaying it -----------------------------------------------------------------------------------------------

    def change(self, images: Tensor) -> str | None:
        return self.signature.change(images) or self._kept_gradient()

    def _kept_gradient(self) -> str | None:
        """Make room for the next replay; return what is kept of the last gradients where it would be overwritten."""
        parameter = self.gradients.vacate(self.model.parameters())
        if parameter is None:
            return None
        names = (name for name, p in self.model.named_parameters() if p is parameter)
        return f"an earlier gradient of {next(names, 'a parameter that left the network')} is still in use"

    def load(self, segment: int, images: Tensor) -> None:
        self.input.copy_(images)

    def load_backward(self, incoming: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch_private.foreach_copy(self.output_gradients, incoming)

    def hand_out(self) -> list[Tensor | None]:
        return self.gradients.hand_out()

    def release(self) -> None:
        """Live gradients that lie in the recording get storage of their own first."""
        gradients, model = self.gradients, self.model
        self.model = self.view = self.signature = self.gradients = self.before = self.input = None
        self.outputs = self.output_gradients = self.leaves = self._forward = ()
        self._incoming, self._handles, self._aliases, self.alone, self.earlier = [], [], {}, {}, {}
        try:
            if gradients is not None:
                gradients.release(model.parameters())
        except RuntimeError:
            pass  # no room for copies: a gradient in use keeps its part of the memory, which nobody writes to any more
