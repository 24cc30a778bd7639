"""How a look is shown: a table for people, and a picture."""

from __future__ import annotations

from pathlib import Path

from .report import LOOP, OPTIMIZER, ORTHOGONALIZATION, PHASES, Arm, Look, Phase, advise

BAR = 24  # characters of a bar that is a whole step
NAMES = {LOOP: "rest of the loop", ORTHOGONALIZATION: "  orthogonalization"}


def table(look: Look) -> str:
    """Return the look as lines: what was set up, where a step's time goes, the arms, the verdict, the command."""
    advice = advise(look)
    verdict = "\n".join(advice.sentences)
    return "\n\n".join([_fit_line(look), _phase_table(look), _arm_table(look), verdict, f"To train: {advice.command}"])


def rows(phases: list[Phase]) -> list[Phase]:
    """Return the rows of the table: as measured, but with the optimizer's row including its orthogonalization."""
    inner = next((phase for phase in phases if phase.name == ORTHOGONALIZATION), None)
    return [_sum(OPTIMIZER, [phase, inner]) if inner and phase.name == OPTIMIZER else phase for phase in phases]


def _sum(name: str, phases: list[Phase]) -> Phase:
    def total(field: str) -> float | None:
        values = [getattr(phase, field) for phase in phases]
        return None if None in values else sum(values)

    return Phase(name, *(total(field) for field in ("ms", "host_ms", "gpu_ms", "launches", "operations")))


def _fit_line(look: Look) -> str:
    fit = look.fit
    where = look.environment["gpu"] if fit["device"] != "cpu" else "CPU"
    lines = [
        f"{fit['model']} on {where}: batch {fit['batch']}, {fit['imgsz']} px, {fit['precision']}, {fit['optimizer']}",
        f"{fit['images']} images, {_faults(fit)}cache={fit['cache']}, {fit['workers']} loader workers, "
        f"{fit['cores']} cores, weights updated every {fit['accumulate']} steps",
    ]
    return "\n".join(lines).replace("every 1 steps", "every step")


def _faults(fit: dict) -> str:
    count = len(fit.get("faults", ()))  # absent in older files
    return f"{count} fault{'s' * (count > 1)} in pictures or labels, " if count else ""


def _phase_table(look: Look) -> str:
    phases = look.eager.phases
    whole = _sum("sum", phases)
    device, counted = whole.gpu_ms is not None, whole.operations is not None
    head = f"{'phase of a step':<22}{'ms':>9}{'share':>7}"
    more = f"{'host ms':>10}{'GPU ms':>9}{'launches':>10}" if device else f"{'operations':>12}" if counted else ""
    lines = [head + more]
    for phase in [*rows(phases), whole]:
        share = phase.ms / whole.ms
        line = f"{NAMES.get(phase.name, phase.name):<22}{phase.ms:>9.2f}{share:>7.0%}"
        if device:
            line += f"{phase.host_ms:>10.2f}{phase.gpu_ms:>9.2f}{phase.launches:>10,.0f}"
        elif counted:
            line += f"{phase.operations:>12,.0f}"
        bar = "" if phase is whole else "  " + round(BAR * share) * ("-" if phase.name == ORTHOGONALIZATION else "#")
        lines.append((line + bar).rstrip())
    return "\n".join(lines)


def _arm_table(look: Look) -> str:
    device = any(arm.memory_bytes for arm in look.arms)
    head = f"{'arm':<10}{'ms a step':>10}{'fastest':>9}{'slowest':>9}{'measured':>10}{'replayed':>10}"
    lines = [head + (f"{'launches':>10}{'GPU ms':>8}{'allocated MiB':>15}{'reserved MiB':>14}" if device else "")]
    for arm in look.arms:
        if not arm.ran:
            lines.append(f"{arm.name:<10}not measured")
            continue
        line = f"{arm.name:<10}{arm.step_ms:>10.2f}{min(arm.steps_ms):>9.2f}{max(arm.steps_ms):>9.2f}"
        line += f"{len(arm.steps_ms):>10}{f'{arm.replayed / arm.steps:.0%}' if arm.capture else '-':>10}"
        if device:
            line += f"{'-' if arm.launches is None else f'{arm.launches:,.0f}':>10}"
            line += f"{'-' if arm.busy_ms is None else f'{arm.busy_ms:.2f}':>8}"
        for name, width in (("peak_allocated", 15), ("peak_reserved", 14)) if device else ():
            line += f"{arm.memory_bytes[name] / 2**20:>{width},.0f}"
        lines.append(line)
    return "\n".join(lines)


def draw(look: Look, path: Path) -> None:
    """Draw phases and step times of every arm that ran, and write the picture to ``path`` (format by its suffix)."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    arms = [arm for arm in look.arms if arm.ran]
    figure = Figure(figsize=(9, 2.2 + 0.7 * len(arms) + 2.2), layout="constrained")
    bars, times = figure.subplots(2, 1, height_ratios=[1 + 0.7 * len(arms), 2.2])
    colours = dict(zip(PHASES, colormaps["tab10"].colors, strict=True))
    for name in PHASES:
        widths = [_width(arm, name) for arm in arms]
        if any(widths):
            lefts = [sum(_width(arm, earlier) for earlier in PHASES[: PHASES.index(name)]) for arm in arms]
            bars.barh([arm.name for arm in arms], widths, left=lefts, label=name, color=colours[name])
    bars.invert_yaxis()
    bars.set_xlabel("ms a step, by phase")
    bars.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    for arm in arms:
        times.hist(arm.steps_ms, bins=40, histtype="step", label=f"{arm.name}: {arm.step_ms:.1f} ms a step")
    times.set_xlabel("ms a step")
    times.set_ylabel("steps")
    times.legend(fontsize="small", frameon=False)
    figure.suptitle(_fit_line(look).partition("\n")[0], fontsize="medium")
    figure.savefig(path)


def _width(arm: Arm, name: str) -> float:
    return sum(phase.ms for phase in arm.phases if phase.name == name)
