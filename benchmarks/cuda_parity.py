"""Bits on CUDA: eager against replay, beside an eager-against-eager control, for every precision and layout.

    python benchmarks/cuda_parity.py DATA.yaml [--steps 12] [--json FILE] [--cases TEXT] [--objective]
        [--orthogonalization]

All arms of a case start from one saved state, in one process, over the same batches, and run the training step itself
(preprocessing, network, objective, backward, optimizer, EMA). Compared are the losses of every step, the gradients
after every backward, before clipping, and the final state by part. Prints a Markdown table; exits 1 on a difference
and where too little was replayed. `replayed` counts training steps, then those of
the objective and of the optimizer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import torch

from detgraph.cfg import CaptureOptions
from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture.reasons import NOTHING_TO_DO
from detgraph.trainer.capture.recorders import CudaRecorder
from detgraph.trainer.capture.report import CaptureReport, environment
from detgraph.trainer.fit.assemble import assemble
from detgraph.trainer.fit.epoch import EpochBatches, LoopState
from detgraph.trainer.fit.loop import DetectionModule
from detgraph.trainer.golden import digests as d

CUDA = torch.cuda.is_available()
AMP = {"fp32": False, "fp16": "fp16", "bf16": "bf16"}


@dataclass
class Case:
    precision: str
    channels_last: bool
    batch: int
    nbs: int
    model: str = "yolo26n.yaml"

    @property
    def name(self) -> str:
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"{Path(self.model).stem} {self.precision} {layout} batch {self.batch} nbs {self.nbs}"


@dataclass
class Result:
    losses: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    state: dict = field(default_factory=dict)
    step_ms: float = 0.0
    reserved: int = 0
    allocated: int = 0
    report: dict = field(default_factory=dict)

    def differences(self, other: Result) -> list[str]:
        parts = [name for name in self.state if self.state[name] != other.state[name]]
        return parts + [name for name in ("losses", "gradients") if getattr(self, name) != getattr(other, name)]


class Bench:
    """One trainer, set up by upstream, whose state can be put back and whose steps can be run by any network step."""

    def __init__(self, case: Case, data: str, steps: int, **more) -> None:
        overrides = {
            "model": case.model,
            "data": data,
            "batch": case.batch,
            "nbs": case.nbs,
            "amp": AMP[case.precision],
            "channels_last": case.channels_last,
            "optimizer": "MuSGD",
            "pretrained": False,
            "device": 0 if CUDA else "cpu",
            "plots": False,
            "workers": 0,
            "verbose": False,
            "project": mkdtemp(),
            "epochs": 100,
            "warmup_epochs": 0 if case.nbs == case.batch else steps / (256 / case.batch),
            **more,
        }
        self.case, self.steps = case, steps
        self.trainer = t = LightningDetectionTrainer(overrides=overrides)
        t.recorder = None if CUDA else recorder(t.device)
        t._setup_train()
        epochs = itertools.repeat(t.train_loader)
        self.batches = list(itertools.islice(itertools.chain.from_iterable(epochs), steps))
        t._model_train()
        self.nominal_accumulate = t.accumulate
        self.saved = deepcopy((t.model.state_dict(), t.optimizer.state_dict(), t.scaler.state_dict()))
        self.ema = deepcopy(t.ema.ema.state_dict())

    def restore(self) -> None:
        t = self.trainer
        model, optimizer, scaler = deepcopy(self.saved)
        t.model.load_state_dict(model)
        t.optimizer.load_state_dict(optimizer)
        t.optimizer.state.clear()
        t.scaler.load_state_dict(scaler)
        t.ema.ema.load_state_dict(self.ema)
        t.ema.updates, t.ema._pairs = 0, None
        t.accumulate = self.nominal_accumulate
        t.optimizer.zero_grad()
        t.tloss = t.loss = t.loss_items = None
        torch.manual_seed(0)

    def run(self, replay: bool, events: dict | None = None, **options) -> Result:
        """Run the steps once; ``events`` maps a step to what is done to the trainer before it.

        ``replay`` is for the network; ``capture_orthogonalization=True`` among the options for the optimizer's steps.
        """
        t, result = self.trainer, Result()
        self.restore()
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        t.capture = CaptureOptions(**{"capture_network": replay, **options})
        report = t.capture_report = CaptureReport(t.capture)
        t.step = assemble(t, refuse)
        batches = len(t.train_loader)
        state = LoopState(0, batches, t._get_warmup_iterations(batches), self.nominal_accumulate, True)
        module = DetectionModule(t, state, EpochBatches(t))
        with t.step.in_force():
            self._run_steps(module, events, result)
        if CUDA:
            result.reserved, result.allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        result.state = d.fit_digests(t)
        t.drop_recordings()
        result.report = report.to_dict()
        return result

    def _run_steps(self, module: DetectionModule, events: dict | None, result: Result) -> None:
        t, times = self.trainer, []
        for i, batch in enumerate(self.batches):
            batch = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            if events and i in events:
                events[i](t)
            synchronize()
            started = time.perf_counter()
            module.on_train_batch_start(batch, i)
            module.backward(module.training_step(batch, i))
            synchronize()
            paused = time.perf_counter()
            result.gradients.append(d.gradients(t.model))
            resumed = time.perf_counter()
            module.optimizer_step(0, i, None, lambda: None)
            synchronize()
            times.append(time.perf_counter() - resumed + paused - started)
            result.losses.append(d.digest(t.loss.detach(), t.loss_items))
        result.step_ms = 1e3 * sorted(times)[len(times) // 2]


def refuse(key: str, reason: str) -> None:
    raise RuntimeError(f"{key} is not in force: {reason}")


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def recorder(device: torch.device):
    """Return the device's recorder; on a CPU the emulating one, to try the script (PYTHONPATH=tests)."""
    if CUDA:
        return CudaRecorder(device)
    from emulator import EmulatingRecorder

    return EmulatingRecorder()


def cases() -> list[Case]:
    grid = itertools.product(AMP, (False, True), (4, 16), (0, 64))
    return [Case(precision, layout, batch, nbs or batch) for precision, layout, batch, nbs in grid]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--objective", action="store_true", help="replay target assignment and loss, too")
    parser.add_argument("--orthogonalization", action="store_true", help="replay MuSGD's orthogonalization, too")
    args = parser.parse_args()
    rows, failed = [], 0
    print("| case | control | replay | replayed | eager ms | replay ms | reserved MiB eager / replay | record s |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases():
        if args.cases not in case.name:
            continue
        bench = Bench(case, args.data, args.steps)
        eager, control = bench.run(False), bench.run(False)
        more = {"capture_objective": args.objective, "capture_orthogonalization": args.orthogonalization}
        replay = bench.run(True, **more)
        wrong = {"control": eager.differences(control), "replay": eager.differences(replay)}
        if replay.report["replayed"] < 0.9 * (args.steps - 1):
            wrong["replay"].append(f"blocked: {replay.report['blocked']} {replay.report['eager']}")
        updates, replayed = replay.report["orthogonalization"], f"{replay.report['replayed']}/{args.steps}"
        if args.objective:
            # The first step makes the objective, another is recorded, and one that outgrows it, again.
            objective = replay.report["objective"]
            replayed += f", {objective['replayed']}/{args.steps}"
            if objective["replayed"] < 0.5 * args.steps:
                wrong["replay"].append(f"objective: {objective['blocked']} {objective['eager']}")
        if args.orthogonalization:
            # FP16 begins with steps that overflow. The scaler leaves them out, so nothing is orthogonalized in them.
            due = updates["steps"] - updates["eager"].get(NOTHING_TO_DO, 0)
            replayed += f", {updates['replayed']}/{due}"
            if due < 2 or updates["replayed"] < 0.9 * (due - 1):
                wrong["replay"].append(f"orthogonalization: {updates['blocked']} {updates['eager']}, try more --steps")
        failed += bool(wrong["replay"])
        told = {name: "equal" if not parts else "DIFFERS: " + ", ".join(parts) for name, parts in wrong.items()}
        print(
            f"| {case.name} | {told['control']} | {told['replay']} | {replayed} "
            f"| {eager.step_ms:.1f} | {replay.step_ms:.1f} "
            f"| {eager.reserved >> 20} / {replay.reserved >> 20} | {sum(replay.report['seconds'].values()):.2f} |",
            flush=True,
        )
        rows.append({"case": case.name, "eager": asdict(eager), "control": told["control"], "replay": asdict(replay)})
    print(f"\n{len(rows) - failed} of {len(rows)} cases equal; {json.dumps(environment())}")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "cases": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
