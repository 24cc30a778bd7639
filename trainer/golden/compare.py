"""Whether two goldens tell of the same fit; if not, at which step and in which tensor they part, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from .file import PARTS, GoldenError, environment_differences

SAME, WITHIN, DIFFERENT = "same", "within tolerance", "different"


@dataclass(frozen=True)
class Tolerance:
    """Losses of the first ``steps`` steps may differ by ``relative``, measured on the larger magnitude."""

    relative: float
    steps: int

    def __str__(self) -> str:
        return f"relative {self.relative:g} on the losses of the first {self.steps} steps"


@dataclass
class Parting:
    """Where one part of two fits first differs.

    ``step`` counts micro-batches from 0 (None: at the end of the fit), ``update`` optimizer steps; ``name`` is the
    first tensor or loss item that differs (None if the goldens hold no single tensors of that step), ``count`` of
    ``total`` differ; ``how`` tells the size of the difference of ``name``, ``amount`` is its largest number.
    """

    part: str
    step: int | None
    epoch: int | None = None
    update: int | None = None
    name: str | None = None
    count: int | None = None
    total: int | None = None
    how: str = ""
    amount: float | None = None

    def where(self) -> str:
        if self.step is None:
            return "at the end" if self.epoch is None else f"in epoch {self.epoch}"
        update = "" if self.update is None else f", optimizer step {self.update}"
        return f"at step {self.step} (epoch {self.epoch}{update})"


@dataclass
class Comparison:
    """What a comparison found. ``first`` is the earliest of ``partings``, which has one entry per part that differs."""

    verdict: str
    basis: str
    partings: list[Parting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoint: dict | None = None

    @property
    def first(self) -> Parting | None:
        return self.partings[0] if self.partings else None

    def to_dict(self) -> dict:
        """Return the content of ``yolo golden compare --json``."""
        return {
            "verdict": self.verdict,
            "basis": self.basis,
            "first": asdict(self.first) if self.first else None,
            "partings": [asdict(parting) for parting in self.partings],
            "checkpoint": self.checkpoint,
            "notes": self.notes,
        }

    def table(self) -> str:
        """Return the comparison for people: the verdict, a row per part that differs, notes."""
        lines = [f"{self.verdict}: {self.basis}"]
        if first := self.first:
            tensor = f", in {first.name}" if first.name else ""
            lines.append(f"The fits part {first.where()}: {first.part}{tensor}{': ' if first.how else ''}{first.how}")
            rows = [("part", "step", "differ", "first that differs", "by")]
            for p in self.partings:
                counts = f"{p.count} of {p.total}" if p.count else "-"
                rows.append((p.part, "end" if p.step is None else str(p.step), counts, p.name or "-", p.how or "-"))
            widths = [max(len(row[i]) for row in rows) for i in range(4)]
            lines += ["  " + "  ".join([*map(str.ljust, row, widths), row[4]]) for row in rows]
        if self.checkpoint:
            lines.append(f"checkpoints: {self.checkpoint['how']}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def compare(a: dict, b: dict, tolerance: Tolerance | None = None) -> Comparison:
    """Compare two goldens bit for bit; with a ``tolerance``, fits that part may still be within it.

    Environment, arguments, trainer and replay are noted where they differ; the numbers alone decide.

    Raises:
        GoldenError: if neither has a step.
    """
    if not a["steps"] and not b["steps"]:
        raise GoldenError(f"neither fit has a step to compare (A: {_end(a)}; B: {_end(b)}): record fits that train.")
    partings = [*_first_partings(a, b), *_at_the_end(a, b)]
    n, m = len(a["steps"]), len(b["steps"])
    updates = sum(step["update"] is not None for step in a["steps"])
    comparison = Comparison(SAME, f"{n} steps, {updates} of the optimizer's, bit for bit", partings, _notes(a, b))
    if not partings:
        return comparison
    comparison.verdict = DIFFERENT
    comparison.basis = f"{n} steps" if n == m else f"{n} steps and {m}"
    if tolerance is not None:
        outside = beyond(a, b, tolerance)
        comparison.verdict = DIFFERENT if outside else WITHIN
        comparison.basis += f", {tolerance}"
        comparison.notes += [outside] if outside else []
    return comparison


def beyond(a: dict, b: dict, tolerance: Tolerance) -> str | None:
    """Return what no tolerance allows, or the first loss that differs by more than it does, in words, or None."""
    if (n := len(a["steps"])) != (m := len(b["steps"])) or _end(a) != _end(b):
        return f"beyond any tolerance: {n} steps ({_end(a)}) and {m} ({_end(b)})"
    for i in range(tolerance.steps):
        losses = [golden["steps"][i].get("losses") if i < len(golden["steps"]) else None for golden in (a, b)]
        if None in losses or len(losses[0]) != len(losses[1]):
            return f"step {i} has no losses to compare in one of the two"
        for name, x, y in zip(a["loss_names"], *losses, strict=True):
            if not (x == y or _relative(x, y) <= tolerance.relative):  # so written that NaN is beyond
                return f"beyond the tolerance at step {i}: {name} {_values(x, y)}"
    return None


def _first_partings(a: dict, b: dict) -> list[Parting]:
    """Return, for each part, where it first differs: earliest first, within a step in the order of computation."""
    found: dict[str, Parting] = {}
    for i, (x, y) in enumerate(zip(a["steps"], b["steps"], strict=False)):
        for part in PARTS:
            if part not in found and x.get(part) != y.get(part):
                parting = Parting(part, i, x["epoch"], x["update"])
                _describe(parting, a, b, x.get(part), y.get(part))
                found[part] = parting
    return list(found.values())


def _describe(parting: Parting, a: dict, b: dict, x: object, y: object) -> None:
    part, missing = parting.part, [name for name, value in (("A", x), ("B", y)) if value is None]
    if missing:
        parting.how = f"{missing[0]} has none at this step"
        return
    if part == "losses":
        pairs = [(n, v, w) for n, v, w in zip(a["loss_names"], x, y, strict=False) if v != w]
        parting.count, parting.total = len(pairs), len(x)
        if pairs:
            parting.name, parting.how = pairs[0][0], _values(*pairs[0][1:])
            parting.amount = abs(float.fromhex(pairs[0][1]) - float.fromhex(pairs[0][2]))
        else:
            parting.how = f"{len(x)} and {len(y)} of them"
    elif part == "schedule":
        names = ("learning rate", "momentum", "weight decay")
        pairs = [
            (f"group {g} {name}", v, w)
            for g, groups in enumerate(zip(x, y, strict=False))
            for name, v, w in zip(names, *groups, strict=True)
            if v != w
        ]
        parting.count, parting.total = len(pairs), len(x) * len(names)
        parting.name, parting.how = (
            (pairs[0][0], _values(*pairs[0][1:])) if pairs else (None, f"{len(x)}, {len(y)} groups")
        )
    elif part == "scaler":
        parting.how = f"(scale, growth) {_scaler(x)} and {_scaler(y)}"
    else:
        _describe_tensors(parting, a, b, str(parting.step), part)


def _describe_tensors(parting: Parting, a: dict, b: dict, key: str, part: str) -> None:
    sides = [dict(_entries(golden, key, part)) for golden in (a, b)]
    if not all(sides):
        if part in ("parameters", "buffers", "gradients", "optimizer", "ema") and key != "final":
            parting.how = "the tensors of this step were not recorded one by one: see --detail"
        return
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    pairs = [(name, sides[0].get(name), sides[1].get(name)) for name in names]
    pairs = [(name, x, y) for name, x, y in pairs if (x or [None])[0] != (y or [None])[0]]
    parting.count, parting.total = len(pairs), len(names)
    if not pairs:  # only the order of the names differs
        parting.how = "the same tensors in another order"
        return
    parting.name, x, y = pairs[0]
    if x is None or y is None:
        parting.how = f"{'A' if x is None else 'B'} has none"
    elif len(x) == len(y) == 3:
        sums, largest = ([float.fromhex(side[i]) for side in (x, y)] for i in (1, 2))
        parting.amount = max(abs(sums[0] - sums[1]), abs(largest[0] - largest[1]))
        parting.how = f"sum by {abs(sums[0] - sums[1]):.3g}, largest magnitude {largest[0]:.6g} by "
        parting.how += f"{abs(largest[0] - largest[1]):.3g}"


def _entries(golden: dict, step: str, part: str) -> Iterator[tuple[str, list]]:
    entries = golden.get("tensors", {}).get(step, {}).get(part, [])
    names = golden.get("tensors", {}).get("names", {}).get(part, [])
    return zip(names, entries, strict=False)


def _at_the_end(a: dict, b: dict) -> list[Parting]:
    found = []
    n, m = len(a["steps"]), len(b["steps"])
    if n != m:
        following = (a if n > m else b)["steps"][min(n, m)]
        how = f"{'A' if n < m else 'B'} ends here, the other goes on"
        found.append(Parting("length", min(n, m), following["epoch"], following["update"], how=how))
    if _end(a) != _end(b):
        found.append(Parting("end", None, how=f"{_end(a)} and {_end(b)}"))
    for part in dict.fromkeys([*a["final"], *b["final"]]):
        if a["final"].get(part) != b["final"].get(part):
            found.append(Parting(f"final {part}", None))
            _describe_tensors(found[-1], a, b, "final", part)
    return found


def _notes(a: dict, b: dict) -> list[str]:
    notes = []
    if a["fit"]["ended"] and b["fit"]["ended"]:
        notes.append(f"neither fit reached its end: {_end(a)} and {_end(b)}")
    notes += [f"environments differ in {line}" for line in environment_differences(a["environment"], b["environment"])]
    for key in dict.fromkeys([*a["arguments"], *b["arguments"]]):
        x, y = (golden["arguments"].get(key, "absent") for golden in (a, b))
        if x != y:
            notes.append(f"arguments differ in {key}: {x} and {y}")
    for key in ("trainer", "loop", "replayed"):
        if a["fit"][key] != b["fit"][key]:
            notes.append(f"{key}: {a['fit'][key]} and {b['fit'][key]}")
    return notes


def _end(golden: dict) -> str:
    return golden["fit"]["ended"] or "ends well"


def _relative(x: str, y: str) -> float:
    v, w = float.fromhex(x), float.fromhex(y)
    return abs(v - w) / max(abs(v), abs(w)) if v != w else 0.0


def _values(x: str, y: str) -> str:
    return f"{float.fromhex(x):.9g} and {float.fromhex(y):.9g} (relative {_relative(x, y):.2g})"


def _scaler(state: list) -> str:
    return f"({float.fromhex(state[0]):g}, {state[1]})" if state else "off"
