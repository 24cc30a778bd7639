"""One eager step of the fit that a recording is to be made from: what went in, and what the objective sent back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from detgraph.models import NetworkView
from detgraph.trainer.capture.proof import Results
from detgraph.trainer.capture.recording import Autocast
from detgraph.trainer.capture.signature import Signature, has_hooks
from detgraph.trainer.capture.state import NetworkState


def autocast_remains(device: torch.device) -> bool:
    """Return whether autocast is on now, where the training loop has left its own: a user's region around the fit."""
    return torch.is_autocast_enabled(device.type)


@dataclass
class Observed:
    """What a recording of the step needs: ``begin`` notes it before the forward, ``listen`` what the backward sends.

    Attributes:
        view: the network as tensors in, tensors out.
        images: the step's input, (batch, channels, height, width).
        mode: the autocast state that the forward ran in.
        before: buffers, tensors kept elsewhere, and generators before the forward.
        signature: all that a replay would bake in, before the forward.
        alone: the parameters, by name, whose gradient no hook changes: what it was before, and this step's.
        earlier: what it was before, on the host, where it was not None.
        incoming: one gradient per output, as the objective's backward sends it; None where none arrived.
    """

    view: NetworkView
    images: Tensor
    mode: Autocast
    before: NetworkState
    signature: Signature
    alone: dict[str, nn.Parameter]
    earlier: dict[str, Tensor]
    incoming: list[Tensor | None] = field(default_factory=list)
    _handles: list = field(default_factory=list)

    @classmethod
    def begin(cls, network: nn.Module, images: Tensor) -> Observed:
        """Note what there is before the forward of ``network`` on ``images``."""
        view = NetworkView(network)
        mode = Autocast.now(images.device.type)
        signature = Signature(network, images)
        before = NetworkState.take(network, images.device, signature.reach.tensors.values())
        parameters = network.named_parameters()
        alone = {name: p for name, p in parameters if p.requires_grad and not has_hooks(p)}
        earlier = {name: p.grad.to("cpu", copy=True) for name, p in alone.items() if p.grad is not None}
        return cls(view, images.detach(), mode, before, signature, alone, earlier)

    def state(self) -> NetworkState:
        """Return a copy of what ``before`` is a copy of, as it is now."""
        return NetworkState.take(self.view.model, self.images.device, self.signature.reach.tensors.values())

    def accumulated(self, expected: Results) -> Results:
        """Return what the gradients of the step itself are by now, on the host, if its own part is as ``expected``."""
        sums = {}
        for name, parameter in self.alone.items():
            own, earlier = expected[f"gradient of {name}"], self.earlier.get(name)
            if own is not None and earlier is not None:
                own = (earlier.to(parameter.device) + own.to(parameter.device)).cpu()
            sums[f"gradient of {name}"] = earlier if own is None else own
        return sums

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
        """Note the gradients that the backward sends to ``outputs``, until ``complete``."""
        self.incoming = incoming = [None] * len(outputs)
        self._handles = [
            output.register_hook(lambda gradient, i=i: incoming.__setitem__(i, gradient))
            for i, output in enumerate(outputs)
            if output.requires_grad
        ]

    def complete(self) -> bool:
        """Return whether a backward has come by, and stop listening then. Without one nothing can be recorded."""
        if all(gradient is None for gradient in self.incoming):
            return False
        for handle in self._handles:
            handle.remove()
        return True
