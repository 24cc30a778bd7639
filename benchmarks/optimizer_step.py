"""MuSGD's step, eager and with the orthogonalization replayed: `python benchmarks/optimizer_step.py DATA.yaml`.

In one process, on one optimizer, after a few steps of a fit that recorded both captures: eager and replayed steps in
turn, so that a host whose speed drifts meets both alike. Every step gets the same gradients. Timed are `MuSGD.step` by
itself, and upstream's whole optimizer step, which unscales, clips, steps, empties the gradients and averages the
weights. Prints a Markdown table of medians: until the host has issued the step, and until the device has finished it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from cuda_parity import CUDA, Bench, Case, synchronize

from detgraph.trainer.capture.report import environment

STEPS = 4


def steps(trainer) -> dict[str, Callable[[], None]]:
    """Return what is timed, by name."""
    return {"MuSGD.step": trainer.optimizer.step, "the whole optimizer step": trainer.optimizer_step}


class Turns:
    """Takes a trainer's optimizer steps, eager or replayed, with gradients given anew before each."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.gradients = [(p, torch.randn_like(p) * 1e-3) for p in trainer.model.parameters() if p.requires_grad]

    def take(self, step: Callable[[], None], replay: bool) -> tuple[float, float]:
        """Return the milliseconds until the host has issued ``step``, and until the device has finished it."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient.clone()
        t = self.trainer
        synchronize()
        started = time.perf_counter()
        with t.orthogonalization.step(t.optimizer) if replay else nullcontext():
            step()
        issued = time.perf_counter()
        synchronize()
        return 1e3 * (issued - started), 1e3 * (time.perf_counter() - started)


def measure(trainer, turns: int) -> list[str]:
    """Return the rows of the table."""
    taker, rows, named = Turns(trainer), [], steps(trainer)
    before = trainer.capture_report.orthogonalization.replayed
    times = {}
    for name, step in named.items():
        for _ in range(turns):
            for replay in (False, True):
                times.setdefault((name, replay), []).append(taker.take(step, replay))
    replayed = trainer.capture_report.orthogonalization.replayed - before
    assert replayed == turns * len(named), f"{replayed} steps replayed"
    for (name, replay), pairs in times.items():
        host, done = (median(column) for column in zip(*pairs, strict=True))
        eager = median(both for _, both in times[name, False])
        ratio = median(b / a for (_, a), (_, b) in zip(times[name, False], pairs, strict=True))
        arm = "replayed" if replay else "eager"
        rows.append(f"| {name} | {arm} | {host:.2f} | {done:.2f} | {done / eager:.3f} | {ratio:.3f} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    case = Case("bf16" if CUDA else "fp32", CUDA, args.batch, args.batch)
    bench = Bench(case, args.data, STEPS, **({} if CUDA else {"imgsz": 64}))
    rows: list[str] = []
    last = {STEPS - 1: lambda trainer: rows.extend(measure(trainer, args.turns))}
    bench.run(True, last, capture_orthogonalization=True)
    print(f"{case.name}, {args.turns} turns\n")
    print("| step | arm | host ms | ms | of eager | of eager, pair by pair |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"\n{json.dumps(environment())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
