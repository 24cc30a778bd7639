"""What the capture itself costs the host in a step: `python benchmarks/own_cost.py DATA.yaml [--batch 4]`.

In one process: the median of replayed steps (preprocessing, network, objective, backward, optimizer, EMA; synchronized,
batches loaded before), then each part of our own by itself, the median of many calls: the signature, making room for
the next replay, handing gradients to autograd with and without the copy that accumulation needs, and a step of
Lightning's loop around hooks that do nothing. Prints a Markdown table with the shares of the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median

import lightning.pytorch as pl
import torch
from cuda_parity import CUDA, Bench, Case

from detgraph.trainer.capture.report import environment
from detgraph.trainer.fit.loop import DetectionModule
from detgraph.trainer.fit.trainer import EpochBatches, LoopState
from detgraph.trainer.fit.under_lightning import fit

LOOP_STEPS = 1500


class Nothing(DetectionModule):
    """Our module with hooks that do nothing: what is left of a step is Lightning's loop."""

    def __init__(self, trainer) -> None:
        super().__init__(trainer, LoopState(0, LOOP_STEPS, 0, 1, True), EpochBatches(trainer))
        self.times: list[float] = []
        self.loss = torch.zeros((), requires_grad=True)

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def training_step(self, batch: int, batch_idx: int) -> torch.Tensor:
        return self.loss.sum()

    def backward(self, loss: torch.Tensor) -> None: ...

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: object, closure: Callable) -> None:
        closure()

    def on_train_batch_end(self, outputs: object, batch: int, batch_idx: int) -> None:
        self.trainer.should_stop = len(self.times) > LOOP_STEPS


def loop_step(trainer) -> float:
    """Return the median milliseconds between two starts of a batch that does nothing."""
    module = Nothing(trainer)
    fit(module, [0] * (LOOP_STEPS + 2), torch.device("cpu"), list[pl.Callback]())
    return 1e3 * median(b - a for a, b in zip(module.times, module.times[1:], strict=False))


def cost(call: Callable[[], object], times: int = 100) -> float:
    """Return the median milliseconds of a call until the host has issued it."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1e3 * median(seconds)


def parts(trainer, case: Case) -> dict[str, float]:
    """Return milliseconds by part, between two steps of a fit whose recording is alive and whose gradients are gone."""
    step = trainer.network_step
    images = torch.zeros(step.shape, device=trainer.device)
    dtype = torch.float16 if case.precision == "fp16" else torch.bfloat16
    with torch.autocast(images.device.type, dtype=dtype, enabled=case.precision != "fp32"):
        assert step.signature.change(images) is None, step.signature.change(images)
        found = {"signature": cost(lambda: step.signature.change(images))}
    found["room for the next replay"] = cost(step._kept_gradient)
    found["gradients handed over"] = cost(step.gradients.hand_out)
    step.gradients.accumulates = True
    found["the same, first of an accumulating window"] = cost(step.gradients.hand_out)
    step.gradients.accumulates = False
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    case = Case("bf16" if CUDA else "fp32", CUDA, args.batch, args.batch)
    bench = Bench(case, args.data, args.steps, **({} if CUDA else {"imgsz": 64}))
    found: dict[str, float] = {}
    replay = bench.run(True, {args.steps - 1: lambda trainer: found.update(parts(trainer, case))})
    found["a step of Lightning's loop"] = loop_step(bench.trainer)
    ours = found["signature"] + found["room for the next replay"] + found["a step of Lightning's loop"]
    print(f"{case.name}: replayed step {replay.step_ms:.1f} ms, {replay.report['replayed']} of {args.steps} replayed\n")
    print("| part | ms | share of the step |\n|---|---|---|")
    for name, ms in [*found.items(), ("signature, room and loop together", ours)]:
        print(f"| {name} | {ms:.3f} | {ms / replay.step_ms:.2%} |")
    print(f"\n{json.dumps(environment())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
