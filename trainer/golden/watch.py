"""Watching a trainer from outside, upstream's own as well as ours: never by a subclass, and without a bit changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping


def around(trainer, **functions: Callable) -> None:
    """Put each function around the method of its name, on this trainer alone.

    It is called with the method and then the method's arguments, calls the method itself, and returns what that does.
    """
    for name, function in functions.items():
        method = getattr(trainer, name)
        setattr(trainer, name, functools.wraps(method)(functools.partial(function, method)))


def losses(trainer) -> dict[str, str]:
    """Return the sum that the latest backward started from, and upstream's loss items by name, `exact`."""
    items = trainer.loss_items
    if not isinstance(items, Mapping):  # earlier releases keep them in one tensor
        items = dict(zip(trainer.loss_names, items, strict=True))
    return {name: exact(value) for name, value in {"loss": trainer.loss, **items}.items()}


def exact(value) -> str:
    """Return a number, or a tensor of one, as hexadecimal text."""
    return float(value.detach() if hasattr(value, "detach") else value).hex()
