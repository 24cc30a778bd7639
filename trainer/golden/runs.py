"""Comparing run folders that hold no golden: by results.csv, epoch by epoch, and by the tensors of the checkpoints.

Upstream writes results at five significant digits and checkpoints in half precision, so equality says less here than
between goldens, and a difference has an epoch or a tensor but no step. Checkpoints are pickles, opened as upstream
opens them: compare only runs that you trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .compare import DIFFERENT, SAME, Comparison, Parting
from .file import FILE_NAME, GoldenError, read_results

CHECKPOINTS = ("weights/last.pt", "weights/best.pt")


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare what two run folders hold, results first.

    Raises:
        GoldenError: if they have neither results.csv nor a checkpoint in common.
    """
    compared, partings = [], []
    results = [folder / "results.csv" for folder in (a, b)]
    if all(path.is_file() for path in results):
        rows = [read_results(path) for path in results]
        if not any(rows):
            raise GoldenError(
                f"neither {results[0]} nor {results[1]} has an epoch to compare: train to the end of one."
            )
        compared.append(f"results.csv ({len(rows[0])} epochs, as stored)")
        partings += _results_parting(*rows)
    for name in CHECKPOINTS:
        files = [folder / name for folder in (a, b)]
        if not all(path.is_file() for path in files):
            continue
        states = [checkpoint_tensors(path) for path in files]
        compared.append(f"{Path(name).name} ({len(states[0])} tensors, bit for bit)")
        if found := checkpoint_difference(*states):
            parting = Parting(Path(name).name, None, name=found["tensor"], count=found["count"], total=len(states[0]))
            parting.how, parting.amount = found["size"], found["amount"]
            partings.append(parting)
    if not compared:
        raise GoldenError(
            f"{a} and {b} have neither {FILE_NAME}, nor results.csv, nor a checkpoint in common: give two run folders "
            "of upstream's, or record goldens (yolo golden record)."
        )
    notes = [f"no {FILE_NAME} in both folders: compared from the files, not from a step on"]
    for name in ("results.csv", *CHECKPOINTS):
        if (a / name).is_file() != (b / name).is_file():
            notes.append(f"{name} is in {a if (a / name).is_file() else b} alone, and was not compared")
    return Comparison(DIFFERENT if partings else SAME, "by " + ", ".join(compared), partings, notes)


def last_checkpoints(a: Path, b: Path) -> dict | None:
    """Return `checkpoint_difference` of the last.pt of two run folders; None if one has none, or none differs."""
    files = [folder / CHECKPOINTS[0] for folder in (a, b)]
    if not all(path.is_file() for path in files):
        return None
    return checkpoint_difference(*(checkpoint_tensors(path) for path in files))


def _results_parting(a: list[dict[str, str]], b: list[dict[str, str]]) -> list[Parting]:
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        columns = list(dict.fromkeys([*x, *y]))
        if differ := [column for column in columns if x.get(column) != y.get(column)]:
            how = f"epoch {number}: {x.get(differ[0], 'absent')} and {y.get(differ[0], 'absent')}"
            return [Parting("results.csv", None, number, None, differ[0], len(differ), len(columns), how)]
    if len(a) != len(b):
        return [Parting("results.csv", None, min(len(a), len(b)), how=f"{len(a)} and {len(b)} epochs")]
    return []


def checkpoint_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of one of upstream's checkpoints by name: model, EMA and optimizer, as far as it has them.

    Raises:
        GoldenError: if it cannot be opened.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as e:  # a pickle may raise anything
        raise GoldenError(
            f"{path} cannot be opened as a checkpoint: {type(e).__name__}: {e}; use the ultralytics that wrote it."
        ) from e
    return dict(_tensors(content, ""))


def _tensors(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(content, torch.nn.Module):
        content = content.state_dict()
    if isinstance(content, torch.Tensor):
        yield prefix, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(content, (list, tuple)):
        for i, value in enumerate(content):
            yield from _tensors(value, f"{prefix}.{i}")


def checkpoint_difference(a: dict[str, Any], b: dict[str, Any]) -> dict | None:
    """Return how two checkpoints' tensors differ, or None if they do not.

    The mapping has `tensor` (the one that differs most), `amount` (its largest absolute difference, None if shape,
    dtype or presence differ), `count` (tensors that differ), and in words `size` (the amount) and `how` (all of it).
    """
    import torch

    differ: dict[str, float | None] = {}
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            differ[name] = None
        elif not torch.equal(_bits(x), _bits(y)):
            differ[name] = float((x.double() - y.double()).abs().max())
    if not differ:
        return None
    name = max(differ, key=lambda key: float("inf") if differ[key] is None else differ[key])
    amount = differ[name]
    size = "in shape, dtype or presence" if amount is None else f"by at most {amount:.3g}"
    how = f"{len(differ)} tensors differ, most {name}, {size}"
    return {"tensor": name, "amount": amount, "count": len(differ), "size": size, "how": how}


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
