"""How a pass of the fit is run again elsewhere: its autocast state, and its parameters under other names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import torch_private


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward, to be entered again elsewhere, with a weight cache of its own.

    A cached cast made outside a recording would be missing from it, one made inside would leak out of it: the cache
    is empty when the forward starts and when it has ended. Whether there is one is part of the state, because a
    weight that is used twice sums its gradients before the cast with it and after the cast without.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    @contextmanager
    def forward(self) -> Iterator[None]:
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache):
                yield
        finally:
            torch.clear_autocast_cache()

    def backward(self) -> AbstractContextManager:
        """Backward passes run outside autocast, as the training loop's do."""
        return torch.autocast(self.device_type, enabled=False, cache_enabled=False)


def autocast_remains(device: torch.device) -> bool:
    """Return whether autocast is on now, where the training loop has left its own: a user's region around the fit."""
    return torch.is_autocast_enabled(device.type)


@contextmanager
def parameter_aliases(model: nn.Module) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Put fresh leaf tensors over the same storage in place of the trainable parameters; yields parameter -> alias.

    A pass over the aliases leaves the parameters' hooks, accumulated gradients and gradient nodes alone; the latter
    may belong to the stream of an earlier, still living graph. A tied parameter has one alias.
    """
    aliases: dict[nn.Parameter, Tensor] = {}
    replaced: list[tuple[dict, str, nn.Parameter]] = []

    def put_back() -> None:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter

    try:
        for module in model.modules():
            for name, parameter in torch_private.own_parameters(module).items():
                if parameter is not None and parameter.requires_grad:
                    if parameter not in aliases:
                        aliases[parameter] = parameter.detach().requires_grad_()
                    replaced.append((torch_private.own_parameters(module), name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = aliases[parameter]
        yield aliases
    finally:
        try:
            put_back()
        except BaseException:  # an interrupt in the middle of it
            put_back()
            raise


def apart(gradients: tuple[Tensor | None, ...], incoming: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Give every gradient storage of its own, inside the recording: none that another one or ``incoming`` has.

    A sum of two weights sends both one tensor, which an eager backward copies for one of them. A replay hands out what
    it has: adopted twice, the tensor would be clipped twice in place.
    """
    taken = {gradient.untyped_storage().data_ptr() for gradient in incoming}
    found = []
    for gradient in gradients:
        if gradient is not None and gradient.untyped_storage().data_ptr() in taken:
            gradient = gradient.clone(memory_format=torch.preserve_format)
        if gradient is not None and gradient.numel():
            taken.add(gradient.untyped_storage().data_ptr())
        found.append(gradient)
    return tuple(found)
