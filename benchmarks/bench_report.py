"""What a record of `bench.py` says: a Markdown table and a picture. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

PROTOCOL = (5, 2)  # counted and discarded rounds of a claim
HEADS = (
    "arm",
    "fit s, median (min - max)",
    "ratio to {first}, median (min - max)",
    "step ms, median",
    "validation s",
    "allocated MiB",
    "reserved MiB",
    "replayed",
    "digests",
)


def errors(record: dict) -> dict[str, tuple[int, str]]:
    """Return (round, text) of every arm that failed; rounds count from 1."""
    return {
        name: (number, fit["error"])
        for number, done in enumerate(record["rounds"], 1)
        for name, fit in done.items()
        if "error" in fit
    }


def counted(record: dict) -> dict[str, list[dict]]:
    """Return the fits of every arm that did not fail, in the counted rounds that have them all; empty if none has."""
    names = [name for name in record["arms"] if name not in errors(record)]
    rounds = [done for done in record["rounds"][record["warmup"] :] if set(names) <= set(done)]
    return {name: [done[name] for done in rounds] for name in names} if rounds else {}


def digests(record: dict) -> dict[str, dict[str, dict]]:
    """Return the distinct digests of every arm's fits, discarded rounds too, keyed by themselves as text."""
    found: dict[str, dict[str, dict]] = {name: {} for name in record["arms"]}
    for done in record["rounds"]:
        for name, fit in done.items():
            if "error" not in fit:
                found[name][json.dumps(fit["digests"], sort_keys=True)] = fit["digests"]
    return {name: distinct for name, distinct in found.items() if distinct}


def differing(record: dict, name: str, first: str) -> list[str]:
    """Return the parts, such as "ema", that are not the same in every fit of two arms (or of one, given twice)."""
    found = digests(record)
    every = [*found.get(name, {}).values(), *found.get(first, {}).values()]
    return [part for part in every[0] if len({one.get(part) for one in every}) > 1] if every else []


def table(record: dict) -> str:
    """Return the Markdown table of a record, with what has to be said beside it."""
    fits, failed = counted(record), errors(record)
    lines, notes = [], []
    first = next(iter(fits), None)
    if first is None:
        notes.append("No complete counted round yet.")
    else:
        lines = ["| " + " | ".join(HEADS).format(first=first) + " |", "|---" * len(HEADS) + "|"]
    for name in record["arms"]:
        if name in failed:
            number, text = failed[name]
            last = text.splitlines()[-1].replace("|", "\\|")
            lines += [f"| {name} | FAILED in round {number} " + "| - " * (len(HEADS) - 2) + "|"] if first else []
            notes.append(f"{name} failed in round {number}, its fits are not counted: {last}")
        elif first is not None:
            row, more = _row(record, name, fits[name], first, fits[first])
            lines.append(f"| {' | '.join(row)} |")
            notes += more
    rounds = len(fits[first]) if first else 0
    if first and (rounds, record["warmup"]) != PROTOCOL:
        notes.append("A departure from the protocol, which counts {} rounds after {} discarded ones.".format(*PROTOCOL))
    processors = {sitting["processor"] for sitting in record["sittings"]}
    if len(processors) > 1:
        notes.append(f"Sittings on different processors: {', '.join(sorted(processors))}.")
    notes.append(f"{rounds} counted rounds, {record['warmup']} discarded, {len(record['sittings'])} sittings.")
    notes.append(f"Environment: {json.dumps(record['environment'])}")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).strip()


def _row(record: dict, name: str, fits: list[dict], first: str, reference: list[dict]) -> tuple[list[str], list[str]]:
    """Return an arm's cells, and what has to be said beside them."""
    notes = []
    seconds = [fit["fit_seconds"] for fit in fits]
    ratios = [a["fit_seconds"] / b["fit_seconds"] for a, b in zip(fits, reference, strict=True)]
    last, report = fits[-1], fits[-1]["report"]
    cuda = last["peak_reserved"] > 0
    distinct, parts = len(digests(record)[name]), differing(record, name, first)
    verdict = "reference" if name == first else "NOT equal" if parts else "equal"
    if parts:
        other = f"from {first}'s" if name != first else "from fit to fit, so no arm can equal them"
        notes.append(f"{name}: digests differ {other} in {', '.join(parts)}")
    if report and report["blocked"]:
        notes.append(f"{name}: {report['blocked']}")
    cells = [
        name,
        f"{median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})",
        "1" if name == first else f"{median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})",
        f"{median(_steps(fits)):.1f}",
        f"{median(fit['validation_seconds'] for fit in fits):.2f}",
        f"{max(fit['peak_allocated'] for fit in fits) >> 20}" if cuda else "-",
        f"{max(fit['peak_reserved'] for fit in fits) >> 20}" if cuda else "-",
        f"{report['replayed']}/{last['steps']}" if report else "-",
        f"{verdict}, {distinct} distinct",
    ]
    return cells, notes


def _steps(fits: list[dict]) -> list[float]:
    return [ms for fit in fits for ms in fit["step_ms"]]


def picture(record: dict, path: Path) -> Path:
    """Draw the counted rounds into ``path``: times with a line per round, step times, peak memory. Returns ``path``.

    Raises:
        ValueError: the record has no counted round to draw.
    """
    fits = counted(record)
    if not fits:
        raise ValueError("the record has no complete counted round to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * 3, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, steps, memory = figure.subplots(1, 3)
    gpu = record["environment"].get("gpu") or "no GPU"
    shown = [word for word in record["words"] if word.split("=")[0] in {"model", "imgsz", "batch", "amp"}]
    failed = "".join(f"; {name} failed" for name in errors(record))
    figure.suptitle(f"{' '.join(shown)}, {gpu}{failed}", fontsize=10)
    _draw_times(times, fits)
    _draw_steps(steps, fits)
    _draw_memory(memory, fits)
    figure.savefig(path, dpi=120)
    return path


def _draw_times(axes, fits: dict[str, list[dict]]) -> None:
    places = range(len(fits))
    for round_of_fits in zip(*fits.values(), strict=True):
        axes.plot(places, [fit["fit_seconds"] for fit in round_of_fits], color="0.75", linewidth=0.9, zorder=1)
    for place, (name, own) in enumerate(fits.items()):
        axes.scatter([place] * len(own), [fit["fit_seconds"] for fit in own], color=f"C{place}", label=name, zorder=2)
    axes.set(
        title="complete fit; a line joins the fits of a round",
        ylabel="seconds, not from 0",
        xlim=(-0.5, len(fits) - 0.5),
    )
    axes.set_xticks(places, fits, rotation=20)


def _draw_steps(axes, fits: dict[str, list[dict]]) -> None:
    """Draw the share of steps that took at most so long; the slowest 2 % lie outside."""
    starts, ends = [], []
    for place, (name, own) in enumerate(fits.items()):
        values = sorted(_steps(own))
        axes.step(
            values, [(i + 1) / len(values) for i in range(len(values))], where="post", color=f"C{place}", label=name
        )
        starts.append(values[0])
        ends.append(values[min(int(0.98 * len(values)), len(values) - 1)])
    axes.set(
        title="step time, all counted steps",
        xlabel="ms",
        ylabel="share of steps",
        xlim=(0.95 * min(starts), 1.05 * max(ends)),
    )
    axes.legend(frameon=False)


def _draw_memory(axes, fits: dict[str, list[dict]]) -> None:
    axes.set(title="peak GPU memory")
    if not any(fit["peak_reserved"] for own in fits.values() for fit in own):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not measured: no CUDA device", ha="center", va="center", transform=axes.transAxes)
        return
    for shift, key, shade in ((-0.2, "peak_allocated", 1.0), (0.2, "peak_reserved", 0.45)):
        for place, own in enumerate(fits.values()):
            size = max(fit[key] for fit in own) >> 20
            axes.bar(place + shift, size, width=0.4, color=f"C{place}", alpha=shade)
            axes.annotate(f"{size}", (place + shift, size), ha="center", va="bottom", fontsize=8)
    axes.set(ylabel="MiB; dark: allocated, light: reserved")
    axes.set_xticks(range(len(fits)), fits, rotation=20)
