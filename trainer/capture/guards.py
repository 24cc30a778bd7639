"""What the recordings share: guards that compare what was baked in, and the state of the process that they all bake in.

A guard reads one thing that a recording has baked in and words a difference. `Guards` compares many of them at every
step, so readers return lists that are built once and compared as wholes; only a difference pays for finding out what it
was. What a recording of the network bakes in besides is in `signature`, what one of the optimizer does in `updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch

from . import torch_private

LONGEST = 400  # characters of a reason


@dataclass(frozen=True)
class Guard:
    """One thing that a recording bakes in: how to read it, and how to word a difference."""

    name: str
    read: Callable[[], object]
    explain: Callable[[object, object], str]


class Guards:
    """Guards with the values that they had when a recording was made."""

    def __init__(self, guards: list[Guard]) -> None:
        self._checks = [(guard, guard.read, guard.read()) for guard in guards]

    @property
    def guards(self) -> list[str]:
        """Return the names of what is compared, in order."""
        return [guard.name for guard, _, _ in self._checks]

    def change(self) -> str | None:
        """Return the first difference from the present, worded by its guard, or None.

        What cannot be read or compared any more has changed: a number that became an array, an attribute that is gone.
        """
        for guard, read, baked in self._checks:
            try:
                now = read()
                changed = bool(now != baked)
            except Exception as error:
                return f"{guard.name}: {error}" + (" is gone" if isinstance(error, (KeyError, AttributeError)) else "")
            if changed:
                return _short(guard, baked, now)
        return None


def _short(guard: Guard, baked: object, now: object) -> str:
    """Word a difference in one line of a length that a log can bear; values may be anything."""
    try:
        text = " ".join(guard.explain(baked, now).split())
    except Exception:  # what says that it differs may not say where
        return f"{guard.name} changed"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def from_to(name: str) -> Callable[[object, object], str]:
    """Return how to word that ``name`` has another value; of flags by name, those that differ."""

    def explain(baked: object, now: object) -> str:
        if isinstance(baked, dict):
            return f"{name}: " + ", ".join(f"{k} {baked[k]} -> {now[k]}" for k in baked if baked[k] != now[k])
        return f"{name}: {baked} -> {now}"

    return explain


def first_difference(baked: list, now: list) -> int:
    """Return the index of the first difference: the shorter length where one list begins the other."""
    return next((i for i, (a, b) in enumerate(zip(baked, now, strict=False)) if a != b), min(len(baked), len(now)))


def _fp32_precision() -> Callable[[], dict[str, object]]:
    """Return the reader of all flags that say how precisely FP32 is computed, by name.

    Newer torch keeps them by backend and operation, and then refuses to tell the older ones where they disagree.
    """
    cudnn = torch.backends.cudnn
    flags = {"cudnn.allow_tf32": lambda: cudnn.allow_tf32, "matmul": torch.get_float32_matmul_precision}
    getter = torch_private.fp32_precision
    for pair in product(("generic", "cuda", "cudnn"), ("all", "matmul", "conv", "rnn")) if getter else ():
        with suppress(RuntimeError):  # no such pair in this torch
            getter(*pair)
            flags[".".join(pair)] = partial(getter, *pair)

    def value(read: Callable[[], object]) -> object:
        try:
            return read()
        except RuntimeError:
            return "set by operation"

    return lambda: {name: value(read) for name, read in flags.items()}


def _kernel_choice() -> Callable[[], dict[str, object]]:
    """Return the reader of the flags that say which kernels compute products and attention; those that torch has."""
    cuda = torch.backends.cuda
    readers = {
        "BLAS": cuda.preferred_blas_library,
        "flash attention": cuda.flash_sdp_enabled,
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
        "math attention": cuda.math_sdp_enabled,
        "cudnn attention": cuda.cudnn_sdp_enabled,
        "reduced attention": cuda.fp16_bf16_reduction_math_sdp_allowed,
        "fp16 accumulation": lambda: cuda.matmul.allow_fp16_accumulation,
    }
    if torch_private.attention_order:
        readers["attention order"] = torch_private.attention_order
    return lambda: {name: read() for name, read in readers.items()}


def _products(allowed: str, in_parts: str) -> Callable[[], dict[str, object]]:
    """Return the reader of whether products may sum less precisely, and in parts where torch tells that apart."""
    matmul = torch.backends.cuda.matmul
    return lambda: {"allowed": getattr(matmul, allowed), "split-k": getattr(matmul, in_parts, None)}


@cache  # readers, not values
def _context(device_type: str) -> dict[str, Callable[[], object]]:
    """Return the readers of process state, by the name that a reason uses."""
    cudnn = torch.backends.cudnn
    return {
        "grad mode": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "default dtype": torch.get_default_dtype,
        "autocast": lambda: torch.is_autocast_enabled(device_type),
        "autocast dtype": lambda: torch.get_autocast_dtype(device_type),
        "autocast cache": torch.is_autocast_cache_enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic warn-only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "fp32 precision": _fp32_precision(),
        "fp16 reduced-precision reduction": _products(
            "allow_fp16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k"
        ),
        "bf16 reduced-precision reduction": _products(
            "allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k"
        ),
        "kernel choice": _kernel_choice(),
        "anomaly mode": torch.is_anomaly_enabled,
        "saved-tensor hooks": torch_private.saved_tensors_hooked,
        "dispatch modes": torch_private.dispatch_modes,
        "function modes": torch_private.function_modes,
        "global module hooks": torch_private.global_module_hooks,
    }


def process_obstacle(device_type: str, recordable: dict[str, object]) -> str | None:
    """Return which state of the process does not have the value that ``recordable`` gives for its name, or None."""
    readers = _context(device_type)
    for name, allowed in recordable.items():
        if (value := readers[name]()) != allowed:
            return f"{name}: {value}"
    return None


def process_guards(device_type: str, names: Collection[str] | None = None) -> list[Guard]:
    """Return the guards of the state of the process: all of it, or the part that ``names`` selects."""
    readers = _context(device_type)
    return [Guard(name, readers[name], from_to(name)) for name in names or readers]
