"""What one place holds, as it can be compared and put back: the list in a container, an object's attributes, a cell."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
import torch

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Other:
    """Stands for an object in contents: equal to itself alone."""

    __slots__ = ("number",)

    def __init__(self, value: object) -> None:
        self.number = id(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Other and other.number == self.number


def contents(values: list) -> list:
    """Return ``values`` with scalars as they are and an identity in the place of everything else."""
    return [value if type(value) in SCALARS else Other(value) for value in values]


def entries(attributes: dict) -> list:
    return contents([*attributes.keys(), *attributes.values()])


def difference(before: list, now: list) -> str:
    """Word how one place's contents changed."""
    if len(before) != len(now):
        return f"changed: {len(before)} entries -> {len(now)}"
    for old, new in zip(before, now, strict=True):
        if old != new:
            scalars = type(old) is not Other and type(new) is not Other
            return f"changed: {old!r} -> {new!r}"[:200] if scalars else "changed: an object was replaced"
    return "changed"


def fill(array: np.ndarray, old: bytes) -> None:
    array[...] = np.frombuffer(old, array.dtype).reshape(array.shape)


def refill(container: list | set | deque, old: list) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(old)


def refill_bytes(values: bytearray | array, old: bytes) -> None:
    del values[:]
    (values.extend if isinstance(values, bytearray) else values.frombytes)(old)


def cells(of: tuple) -> list:
    found = []
    for cell in of:
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return found


def fill_cells(of: tuple, old: list) -> None:
    for cell, value in zip(of, old, strict=True):
        cell.cell_contents = value
