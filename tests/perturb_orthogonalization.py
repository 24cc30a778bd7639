"""One perturbation for each guard of the orthogonalization, which only that guard notices.

For tests/orthogonalization/test_guards.py. A perturbation is an event of `optimizer_steps.Fit`; its ``effect`` is told
apart as in `perturb_network`. ``settings`` may hold an event that runs at the start of the fit, as ``before``.
"""

from __future__ import annotations

import torch
from torch import nn
from ultralytics.optim import muon

from optimizer_steps import Event, Fit
from perturb_network import (
    BF16,
    FP16,
    LouderFunctions,
    LouderKernels,
    Perturbation,
    attribute,
    context,
    deterministic,
    flag,
    matmul,
)

NAME = "model.3.conv.weight"


def momentum(change) -> Event:
    """Put another buffer in the place of each that belongs to a matrix of several columns a channel."""

    def event(fit: Fit) -> None:
        for parameter, state in fit.optimizer.state.items():
            if parameter.ndim == 4 and parameter.shape[1] > 1 and parameter.shape[2] > 1:
                state["momentum_buffer"] = change(state["momentum_buffer"])

    return event


def prune(fit: Fit) -> None:
    """Half of the filters go, of the weight and of all that belongs to it: strides stay as they are."""
    parameter = fit.parameter(NAME)
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data[:8].clone()
    parameter.grad = gradient[:8].clone()
    state = fit.optimizer.state[parameter]
    state.update({key: value[:8].clone() for key, value in state.items()})


def halve_precision(fit: Fit) -> None:
    """Weight and gradient in half precision, momentum as it was: as a cast of the model in mid-fit leaves them.

    The first of its kind in a batch of matrices decides the precision of all updates of the batch.
    """
    for parameter in fit.model.parameters():
        if parameter.ndim == 4:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.bfloat16()
            parameter.grad = gradient.bfloat16()


def add_wide_layer(model: nn.Module) -> None:
    """Columns in another order show only where sums are long: BF16 rounds the difference of short ones away."""
    torch.manual_seed(0)
    model.wide = nn.Conv2d(64, 64, 3)


def other_iteration(fit: Fit) -> None:
    stock = muon.zeropower_via_newtonschulz5

    def louder(matrices: torch.Tensor) -> torch.Tensor:
        return stock(matrices) * 1.25

    muon.zeropower_via_newtonschulz5 = louder
    fit.cleanup.callback(setattr, muon, stock.__name__, stock)


def autocast(dtype: torch.dtype) -> Event:
    return context(lambda: torch.autocast("cpu", dtype=dtype))


def float16_when_autocast(fit: Fit) -> None:
    fit.cleanup.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
    torch.set_autocast_dtype("cpu", torch.float16)


PERTURBATIONS: dict[str, Perturbation] = {
    "autocast": Perturbation(
        autocast(torch.float16), "autocast: False -> True", settings={"before": float16_when_autocast}
    ),
    "autocast dtype": Perturbation(
        autocast(torch.float16), "torch.bfloat16 -> torch.float16", settings={"before": autocast(torch.bfloat16)}
    ),
    "deterministic algorithms": Perturbation(deterministic(True, False), "False -> True", "state"),
    "deterministic warn-only": Perturbation(deterministic(False, True), "False -> True", "state"),
    "fill_uninitialized_memory": Perturbation(
        attribute(torch.utils.deterministic, "fill_uninitialized_memory", False), "True -> False", "state"
    ),
    "fp32 precision": Perturbation(
        flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"), "-> high", "state"
    ),
    "fp16 reduced-precision reduction": Perturbation(attribute(matmul, FP16, False), "fp16 reduced", "state"),
    "bf16 reduced-precision reduction": Perturbation(attribute(matmul, BF16, False), "bf16 reduced", "state"),
    "kernel choice": Perturbation(attribute(matmul, "allow_fp16_accumulation", True), "fp16 accumulation", "state"),
    "dispatch modes": Perturbation(context(lambda: LouderKernels(torch.ops.aten.baddbmm.default)), "0 -> 1"),
    "function modes": Perturbation(context(lambda: LouderFunctions(torch.baddbmm)), "0 -> 1"),
    "zeropower_via_newtonschulz5": Perturbation(other_iteration, "other_iteration.<locals>.louder"),
    "gradient shape": Perturbation(
        prune, f"of {NAME}: torch.Size([16, 8, 3, 3]) -> torch.Size([8, 8, 3, 3])", "outcome"
    ),
    "gradient dtype": Perturbation(halve_precision, "torch.float32 -> torch.bfloat16"),
    "momentum strides": Perturbation(
        momentum(lambda buffer: buffer.to(memory_format=torch.channels_last)),
        "momentum strides of model.0.conv.weight: (27, 9, 3, 1) -> (27, 1, 9, 3)",
        settings={"prepare": add_wide_layer},
    ),
    "momentum dtype": Perturbation(momentum(torch.Tensor.bfloat16), "weight: torch.float32 -> torch.bfloat16"),
    "momentum device": Perturbation(momentum(lambda buffer: buffer.to("meta")), "cpu -> meta", "state"),
}
