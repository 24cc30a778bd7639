"""What an extra pass through a network moves besides its results: buffers and random-number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .lending import tensor_attributes


class DeviceLost(RuntimeError):
    """The device does not answer any more, or does not take back what it had: no fit can go on with it."""

    def __init__(self, first: BaseException) -> None:
        super().__init__(
            f"the device does not answer after a failure ({first_line(first)}). Nothing that this process holds on it "
            "can be used: start again without the capture, or resume from last.pt"
        )


def first_line(error: BaseException) -> str:
    """Return what ``error`` says in one line, its class where it says nothing."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


@dataclass(frozen=True)
class Generators:
    """The states of every generator that a fit may draw from: Python's, NumPy's, torch's, and a CUDA device's."""

    python: tuple
    numpy: tuple
    cpu: Tensor
    cuda: Tensor | None
    device: torch.device | None

    @classmethod
    def take(cls, device: torch.device | None = None) -> Generators:
        on_cuda = device is not None and device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_cuda else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, device)

    def host_moved(self) -> bool:
        """Return whether something was drawn on the host since: from Python, NumPy, or torch beside a CUDA device."""
        now = Generators.take()
        kept = [now.python == self.python, now.numpy[2:] == self.numpy[2:], np.array_equal(now.numpy[1], self.numpy[1])]
        return not all(kept) or self.cuda is not None and not torch.equal(now.cpu, self.cpu)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@dataclass(frozen=True)
class NetworkState:
    """A copy of the tensors that a module's forward may write to, buffers first, and of every generator it may use."""

    buffers: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    generators: Generators

    @classmethod
    def take(cls, module: nn.Module, device: torch.device, more: Iterable[Tensor] = ()) -> NetworkState:
        """Copy the state of ``module``, and ``more`` tensors that it reaches. Each is copied once."""
        found = {id(tensor): tensor for tensor in (*module.buffers(), *tensor_attributes(module), *more)}
        buffers = tuple(filter(_writable, found.values()))
        return cls(buffers, tuple(buffer.detach().clone() for buffer in buffers), Generators.take(device))

    def restore(self) -> None:
        """Write the copy back in place: addresses stay, and recorded work keeps finding its buffers."""
        with torch.no_grad():
            for buffer, saved in zip(self.buffers, self.saved, strict=True):
                buffer.copy_(saved)
        self.generators.restore()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Run the body, which moves the state; put it back, whatever the body raises.

        Raises:
            DeviceLost: the body failed and the state cannot be put back. It tells the body's error.
        """
        try:
            yield
        except DeviceLost:
            raise
        except BaseException as error:
            try:
                self.restore()
            except RuntimeError as second:
                raise DeviceLost(error) from second
            raise
        self.restore()


def _writable(tensor: Tensor) -> bool:
    """Return whether a forward could write to ``tensor`` in place; torch refuses for the two kinds named here."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not (expanded or tensor.is_inference())


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors hold the same bytes; NaN equals itself, zeros of other sign differ."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the raw bytes of a tensor in logical (row-major) order, on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape, in double precision."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
