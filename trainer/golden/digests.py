"""SHA-256 digests of everything a fit leaves behind, in parts that can be told apart.

A digest covers names, dtypes, shapes and raw bytes; how a tensor lies in memory does not count. The module needs
torch and nothing else, so that a process without this package's other rooms can load it by its path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor


def digest(*parts: object) -> str:
    """Return the hexadecimal SHA-256 of tensors, arrays, numbers, strings, None, and lists or mappings of these.

    Raises:
        TypeError: for an object of any other type, since its bytes would not be its value.
    """
    sha = hashlib.sha256()
    for part in parts:
        _feed(sha, part)
    return sha.hexdigest()


def _feed(sha, part: object) -> None:
    if isinstance(part, Tensor):
        sha.update(f"tensor {part.dtype} {tuple(part.shape)}".encode())
        sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(part, np.ndarray):
        sha.update(f"array {part.dtype} {part.shape}".encode())
        sha.update(np.ascontiguousarray(part).tobytes())
    elif isinstance(part, Mapping):
        sha.update(f"mapping {len(part)}".encode())
        for key, value in part.items():
            _feed(sha, str(key))
            _feed(sha, value)
    elif isinstance(part, (list, tuple)):
        sha.update(f"list {len(part)}".encode())
        for item in part:
            _feed(sha, item)
    elif isinstance(part, (float, np.floating)):
        sha.update(f"float {float(part).hex()}".encode())
    elif part is None or isinstance(part, (bool, int, str, bytes, np.integer, np.bool_)):
        sha.update(f"{type(part).__name__} {part!r}".encode())
    else:
        raise TypeError(f"no digest for {type(part).__name__}")


def named(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, str | None]:
    """Return one digest per tensor by name, None for a missing one."""
    return {name: None if tensor is None else digest(tensor) for name, tensor in tensors}


def gradients(model: torch.nn.Module) -> str:
    """Return the digest of all gradients as they are now; a missing one counts as missing, not as zeros."""
    return digest({name: parameter.grad for name, parameter in model.named_parameters()})


def generators() -> str:
    """Return the digest of the random-number generators of this process (Python, NumPy, CPU, CUDA)."""
    import random

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return digest(json.dumps(random.getstate()), list(np.random.get_state()), torch.get_rng_state(), cuda)


def fit_digests(trainer) -> dict[str, str]:
    """Return the sub-digests of an upstream trainer's state: weights, buffers, optimizer, schedule, EMA, metrics."""
    model, ema = trainer.model, trainer.ema
    optimizer = trainer.optimizer.state_dict()
    scheduler = {k: v for k, v in trainer.scheduler.state_dict().items() if k != "lr_lambdas"}
    metrics = {k: float(v) for k, v in (trainer.metrics or {}).items()}
    return {
        "parameters": digest(dict(model.named_parameters())),
        "buffers": digest(dict(model.named_buffers())),
        "optimizer": digest(optimizer["param_groups"], optimizer["state"]),
        "scaler": digest(trainer.scaler.state_dict()),
        "scheduler": digest(scheduler),
        "ema": digest(dict(ema.ema.state_dict()), ema.updates),
        "metrics": digest(metrics),
        "generators": generators(),
    }
