"""One perturbation for each guard of a signature, which only that guard notices. For tests/replay/test_guards.py.

A perturbation is an event of `steps.Fit`. ``effect`` says what a replay that ignores it gets wrong: ``bytes`` (the
fits part), ``outcome`` (eager raises and the replay does not), or ``state`` (nothing that a CPU could show: flags of
CUDA libraries, and modes whose effect another part of PyTorch already reports).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from ultralytics.utils.loss import E2ELoss

from detgraph.trainer.capture.guards import Guards
from steps import Event, Fit, Wrapped, make_batch


@dataclass
class Perturbation:
    """What is done before a step, what the reason must say, and the settings of the fit that it needs."""

    event: Event
    says: str
    effect: str = "bytes"
    settings: dict = field(default_factory=dict)


# Input ------------------------------------------------------------------------------------------------------------


def smaller_batch(fit: Fit) -> None:
    """A batch of one has the strides of a batch of two; the network step's own check of the shape is led astray."""
    fit.batch = make_batch(fit.number, (1, 3, 64, 64))
    fit.network_step.shape = (1, 3, 64, 64)


def image(change: Callable[[torch.Tensor], torch.Tensor]) -> Event:
    def event(fit: Fit) -> None:
        fit.batch["img"] = fit.memory["image"] = change(fit.batch["img"])

    return event


# Process state ----------------------------------------------------------------------------------------------------


def context(enter: Callable) -> Event:
    """Run this and later forwards inside ``enter()``."""
    return lambda fit: setattr(fit, "context", enter)


def flag(read: Callable[[], object], write: Callable[[object], object], value: object) -> Event:
    """Give a flag of the process another value for this and later forwards."""

    @contextmanager
    def enter():
        before = read()
        write(value)
        try:
            yield
        finally:
            write(before)

    return context(enter)


def attribute(owner: object, name: str, value: object) -> Event:
    return flag(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def deterministic(on: bool, warn_only: bool) -> Event:
    return flag(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (on, warn_only),
    )


@contextmanager
def inference_with_gradients():
    with torch.inference_mode(), torch.enable_grad():
        yield


@contextmanager
def rounded_activations():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16() if t.is_floating_point() else t, widened):
        yield


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


class LouderKernels(TorchDispatchMode):
    """Changes what one operator returns."""

    def __init__(self, operator: Callable) -> None:
        super().__init__()
        self.operator = operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if func is self.operator else result


class LouderFunctions(TorchFunctionMode):
    """Changes what one function returns."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if func is self.function else result


def remove_guard(signatures: Iterable[Guards], name: str) -> None:
    """Take the guard of this name out of all signatures that have it."""
    for signature in signatures:
        if name in signature.guards:
            del signature._checks[signature.guards.index(name)]


def hook_every_module(fit: Fit) -> None:
    def louder(module, args, output):
        return output * 1.25 if isinstance(module, nn.Conv2d) else None

    fit.cleanup.callback(register_module_forward_hook(louder).remove)


class ReadsFeatures(E2ELoss):
    """An objective that reads values of feature maps, which a replay does not supply."""

    def __call__(self, preds, batch):
        loss, items = super().__call__(preds, batch)
        return loss + 0.1 * preds["one2many"]["feats"][0].float().mean(), items


# Modules and tensors ----------------------------------------------------------------------------------------------


class TwiceSiLU(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


class Function(nn.Module):
    """Holds a function as an attribute."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class UsedTwice(Wrapped):
    """One convolution at two places: with autocast's weight cache its gradients are summed before the cast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.sigmoid(self.conv(self.inner(x))))


def use_a_weight_twice(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.model[4] = UsedTwice(model.model[4])


def unfreeze(fit: Fit) -> None:
    fit.layer("1.conv").weight.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model.model[1].conv.weight.requires_grad_(False)


def replace_network(fit: Fit) -> None:
    fit.model.model = deepcopy(fit.model.model)
    fit.rebuild_optimizer()


def replace_layer(fit: Fit) -> None:
    fit.model.model[3] = deepcopy(fit.model.model[3])
    fit.rebuild_optimizer()


def share_a_generator(fit: Fit) -> None:
    """Add noise to every gradient: which one gets which draw is a matter of the hooks' order."""
    for parameter in fit.model.parameters():
        handle = parameter.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))
        fit.cleanup.callback(handle.remove)


def set_data(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Event:
    """Rebind the data of a parameter or buffer: the tensor object stays the same."""

    def event(fit: Fit) -> None:
        owner, _, name = path.rpartition(".")
        tensor = getattr(fit.layer(owner), name)
        tensor.data = change(tensor.data)

    return event


def hook_in_new_dictionary(fit: Fit) -> None:
    """Clear the hooks of a layer as snippets do, and register one."""
    norm = fit.layer("3.bn")
    norm._forward_hooks = OrderedDict()
    norm.register_forward_hook(lambda module, args, output: output * 0.5)


def set_attribute(path: str, name: str, value: object) -> Event:
    return lambda fit: setattr(fit.layer(path), name, value)


cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
FP16, BF16 = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
BFLOAT = {"amp": torch.bfloat16}

PERTURBATIONS: dict[str, Perturbation] = {
    "input shape": Perturbation(smaller_batch, "input shape: torch.Size([2, 3, 64, 64]) -> torch.Size([1, 3, 64, 64])"),
    "input dtype": Perturbation(image(torch.Tensor.double), "torch.float32 -> torch.float64", "outcome"),
    "input device": Perturbation(image(lambda x: x.to("meta")), "cpu -> meta", "state"),
    "input strides": Perturbation(image(lambda x: x.to(memory_format=torch.channels_last)), "input strides", "state"),
    "input requires_grad": Perturbation(image(lambda x: x.requires_grad_()), "False -> True"),
    "default dtype": Perturbation(
        flag(torch.get_default_dtype, torch.set_default_dtype, torch.float64), "float32 -> torch.float64", "state"
    ),
    "grad mode": Perturbation(context(torch.no_grad), "True -> False", "state"),
    "inference mode": Perturbation(context(inference_with_gradients), "False -> True", "state"),
    "autocast": Perturbation(lambda fit: setattr(fit, "amp", torch.bfloat16), "False -> True"),
    "autocast dtype": Perturbation(lambda fit: setattr(fit, "amp", torch.float16), "-> torch.float16", settings=BFLOAT),
    "autocast cache": Perturbation(
        flag(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
        "True -> False",
        settings={**BFLOAT, "prepare": use_a_weight_twice},
    ),
    "deterministic algorithms": Perturbation(deterministic(True, False), "False -> True", "state"),
    "deterministic warn-only": Perturbation(deterministic(False, True), "False -> True", "state"),
    "fill_uninitialized_memory": Perturbation(
        attribute(torch.utils.deterministic, "fill_uninitialized_memory", False), "True -> False", "state"
    ),
    "cudnn.enabled": Perturbation(attribute(cudnn, "enabled", False), "True -> False", "state"),
    "cudnn.deterministic": Perturbation(attribute(cudnn, "deterministic", True), "False -> True", "state"),
    "cudnn.benchmark": Perturbation(attribute(cudnn, "benchmark", True), "False -> True", "state"),
    "fp32 precision": Perturbation(
        flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"), "-> high", "state"
    ),
    "fp16 reduced-precision reduction": Perturbation(attribute(matmul, FP16, False), "fp16 reduced", "state"),
    "bf16 reduced-precision reduction": Perturbation(attribute(matmul, BF16, False), "bf16 reduced", "state"),
    "kernel choice": Perturbation(
        flag(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
        "flash attention",
        "state",
    ),
    "anomaly mode": Perturbation(context(torch.autograd.detect_anomaly), "False -> True", "state"),
    "saved-tensor hooks": Perturbation(context(rounded_activations), "False -> True"),
    "dispatch modes": Perturbation(context(lambda: LouderKernels(torch.ops.aten.convolution.default)), "0 -> 1"),
    "function modes": Perturbation(context(lambda: LouderFunctions(torch.conv2d)), "0 -> 1"),
    "global module hooks": Perturbation(hook_every_module, "0 -> 1"),
    "objective": Perturbation(lambda fit: setattr(fit.model, "criterion", ReadsFeatures(fit.model)), "ReadsFeatures"),
    "saved layer indices": Perturbation(lambda fit: fit.model.save.remove(2), "saved layer indices", "outcome"),
    "network": Perturbation(replace_network, "network"),
    "module classes": Perturbation(set_attribute("3.act", "__class__", TwiceSiLU), "SiLU -> TwiceSiLU"),
    "dictionaries": Perturbation(hook_in_new_dictionary, "dictionaries of model.3.bn were replaced"),
    "module attributes": Perturbation(set_attribute("3.bn", "momentum", 0.5), "momentum of model.3.bn: 0.03 -> 0.5"),
    "set of module attributes": Perturbation(set_attribute("3.act", "forward", F.relu), "new: forward"),
    "object attributes": Perturbation(
        set_attribute("3.act", "function", torch.tanh),
        "attribute function of model.3.act was replaced",
        settings={"prepare": lambda model: setattr(model.model[3], "act", Function(torch.relu))},
    ),
    "contents of attributes": Perturbation(lambda fit: fit.layer("7").f.reverse(), "model.7.f changed: -1 -> 2"),
    "modules, parameters and buffers": Perturbation(replace_layer, "module 3 of model was replaced"),
    "module hooks": Perturbation(
        lambda fit: fit.layer("3").register_forward_hook(lambda module, args, output: output * 1.25),
        "a hook (forward_hooks) was registered on model.3",
    ),
    "parameter hooks": Perturbation(share_a_generator, "hooks were registered on several parameters"),
    "tensor size": Perturbation(
        set_data("3.bn.running_mean", lambda t: t[:-1]), "size of tensor model.3.bn.running_mean changed", "outcome"
    ),
    "tensor address": Perturbation(set_data("3.conv.weight", torch.clone), "address of tensor model.3.conv.weight"),
    "tensor dtype": Perturbation(
        set_data("3.bn.num_batches_tracked", lambda t: t.view(torch.float64)),
        "dtype of tensor model.3.bn.num_batches_tracked changed: torch.int64 -> torch.float64",
    ),
    "tensor requires_grad": Perturbation(
        unfreeze, "requires_grad of tensor model.1.conv.weight changed: False -> True", settings={"prepare": freeze}
    ),
    "tensor strides": Perturbation(
        set_data("3.conv.weight", lambda t: t.transpose(2, 3)), "strides of tensor model.3.conv.weight"
    ),
}
