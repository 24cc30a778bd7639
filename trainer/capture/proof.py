"""What a pass through the network leaves, by name, and what two passes that should be the same differ in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from .state import largest_difference, same_bits

Results = dict[str, Tensor | None]


def results(
    network: nn.Module,
    outputs: Iterable[Tensor],
    gradients: Iterable[Tensor | None],
    more: Mapping[str, Tensor] | None = None,
) -> Results:
    """Return copies of outputs, gradients of the trainable parameters in their order, and buffers, by name.

    ``more`` are the tensors that the network keeps elsewhere, by path. The copies are on the host: on the device they
    would add to what the capture that follows has to reserve.
    """
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    named: Results = {f"output {i}": output for i, output in enumerate(outputs)}
    named |= {f"gradient of {name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    named |= {f"buffer {name}": buffer for name, buffer in network.named_buffers()}
    named |= {f"tensor {path}": tensor for path, tensor in (more or {}).items()}
    return {n: None if tensor is None else tensor.detach().to("cpu", copy=True) for n, tensor in named.items()}


def differences(a: Results, b: Results) -> dict[str, float]:
    """Return the largest absolute difference by name, for what is not the same to the bit; inf where one is missing."""
    different = [name for name in a if not same_bits(a[name], b[name])]
    return {
        name: float("inf") if a[name] is None or b[name] is None else largest_difference(a[name], b[name])
        for name in different
    }


def verdict(expected: Results, found: Results, unverifiable: Iterable[str], of: str = "the replay") -> str | None:
    """Return the first result in ``found`` that is not as expected, and by how much, or None.

    Names in ``unverifiable`` do not count: an eager pass does not reproduce them either. ``of`` says whose it is.
    """
    for name, difference in differences({name: expected[name] for name in found}, found).items():
        if name not in unverifiable:
            return f"self-check: {name} of {of} is off by {difference:g}"
    return None


def not_reproduced(names: Iterable[str]) -> str:
    """Word that two eager passes from one state differ in ``names`` where none may, and what helps."""
    return (
        f"self-check: two eager passes of one step differ in {_some(names)}, so no replay can be proven. "
        "A layer keeps state where it cannot be put back (keep it by register_buffer), or a kernel is not deterministic"
    )


def left_out(names: Collection[str]) -> str:
    """Word that ``names`` cannot be checked."""
    return f"{len(names)} results are left out, since eager passes do not reproduce them either: {_some(names)}"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
