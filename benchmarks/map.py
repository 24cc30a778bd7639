"""Where replay helps: YOLO26 n, s, m over batch sizes. `python benchmarks/map.py RECORD.json DATA.yaml [--cases TEXT]`.

A case is a model, a precision and a batch size. Its arms start from one saved state, in one process, and run the
training step itself over the same few batches, loaded before and used again, with an optimizer step in every one
(``nbs`` is the batch): 3 steps to warm up, 8 timed. So this is the step without data loading and without Lightning's
loop: it says where a fit may gain, `bench.py` says what it gains. Busy is the time of the GPU's kernels in 2 profiled
steps, per step, over the median of the steps that were not profiled; a profiler that has run may slow down what comes
after, so all cases are timed first and profiled then. The record is written after every case; cases that it has are
skipped. An arm is NAME:key=value,... with options of the capture.

Exit status: 0 complete, 1 an arm's digests differ or an arm failed, 2 refused, 3 not complete yet. An arm that runs
out of memory is a result.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
from cuda_parity import CUDA, Bench, Case, recorder, synchronize
from sittings import (
    COMPLETE,
    FAILED,
    NOT_YET,
    REFUSED,
    Budget,
    Refused,
    environment,
    open_record,
    sitting,
    split_words,
    write_record,
)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from ultralytics.cfg import parse_key_value_pair
from ultralytics.utils import LOGGER

from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.fit.eligibility import network_step_for, orthogonalization_for
from detgraph.trainer.fit.loop import DetectionModule
from detgraph.trainer.fit.trainer import EpochBatches, LoopState
from detgraph.trainer.golden import digests as d

ARMS = ("eager:capture_network=False", "replay:capture_network=True")
NETWORKS = (("yolo26n", "bf16"), ("yolo26s", "bf16"), ("yolo26m", "bf16"), ("yolo26n", "fp16"), ("yolo26n", "fp32"))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WARM_UP, TIMED, PROFILED, DISTINCT = 3, 8, 2, 2
HEADS = ("step ms", "ratio", "busy", "allocated MiB", "reserved MiB", "replayed", "digests")


def cases(texts: list[str]) -> list[Case]:
    """Return the cases whose name contains one of the texts; all of them for none."""
    every = [Case(precision, CUDA, n, n, f"{model}.yaml") for model, precision in NETWORKS for n in BATCHES]
    return [case for case in every if not texts or any(text in case.name for text in texts)]


def read_options(texts: list[str]) -> dict[str, list[str]]:
    """Return the words of each arm by name from texts ``NAME:key=value,...``; the first is the reference.

    Raises:
        Refused: another form, a name given twice, or an option that `detgraph.cfg` refuses.
    """
    arms: dict[str, list[str]] = {}
    for text in texts:
        name, _, words = text.partition(":")
        if not name or name in arms:
            raise Refused(f"arm '{text}': write NAME:key=value,... with a name of its own")
        arms[name] = split_words(words)
        try:
            options(arms[name])
        except CaptureOptionError as error:
            raise Refused(f"arm '{name}': {error}") from error
    return arms


def options(words: list[str]) -> CaptureOptions:
    return CaptureOptions.from_dict(dict(parse_key_value_pair(word) for word in words))


class WarmBatches:
    """Stands in for the train loader: batches of one size that are there already, cycled for as long as it is asked."""

    def __init__(self, loader, batches: list[dict], size: int) -> None:
        self.dataset, self.batch_size = loader.dataset, size
        self.batches = [self._first(batch, size) for batch in batches]

    def __len__(self) -> int:
        return WARM_UP + TIMED

    def __iter__(self) -> Iterator[dict]:
        while True:
            yield from (dict(batch) for batch in self.batches)  # the trainer replaces what is in a batch

    @staticmethod
    def _first(batch: dict, size: int) -> dict:
        """Return the first ``size`` pictures of a batch with their labels; tensors in page-locked memory on CUDA."""
        kept = batch["batch_idx"] < size
        part = {k: v[kept] if k in {"batch_idx", "cls", "bboxes"} else v[:size] for k, v in batch.items()}
        return {k: v.clone().pin_memory() if CUDA and isinstance(v, torch.Tensor) else v for k, v in part.items()}


class WarmBench(Bench):
    """A `Bench` of one model and precision for batches of every size up to its own; the saved state is on the host."""

    def __init__(self, case: Case, data: str, batches: list[dict] | None, **more) -> None:
        super().__init__(case, data, steps=0, **more)
        self.in_force = ExitStack()
        model, *rest = self.saved
        self.saved, self.ema = (_to_host(model), *rest), _to_host(self.ema)
        self.loader = self.trainer.train_loader
        self.warm = batches or self._load()
        if not CUDA:
            self.trainer.recorder = recorder(self.trainer.device)

    def _load(self) -> list[dict]:
        size, found = self.case.batch, []
        if len(self.loader.dataset) < size:
            raise Refused(f"{len(self.loader.dataset)} training images, but a case has a batch of {size}: see --cases")
        while len(found) < DISTINCT:
            found += [batch for batch in self.loader if len(batch["img"]) == size][: DISTINCT - len(found)]
        return found

    def start(self, size: int, options: CaptureOptions) -> tuple[DetectionModule, Iterator[dict]]:
        """Put the saved state back, empty the caches, reset the peaks; return the loop's hooks and its batches."""
        t = self.trainer
        self.restore()
        clear()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        t.train_loader = WarmBatches(self.loader, self.warm, size)
        t.capture, t.capture_report = options, CaptureReport(options)
        t.network_step, _ = network_step_for(t)
        t.orthogonalization, _ = orthogonalization_for(t)
        self.in_force.enter_context(t.orthogonalization.in_force())
        state = LoopState(0, len(t.train_loader), -1, 1, mosaic_closed=True)
        return DetectionModule(t, state, EpochBatches(t)), iter(t.train_loader)

    def finish(self) -> None:
        """Drop the recording and what the arm left in the trainer."""
        t = self.trainer
        t.drop_recordings()
        self.in_force.close()
        t.optimizer.zero_grad()
        t.optimizer.state.clear()
        t.network_step = t.orthogonalization = t.tloss = t.loss = t.loss_items = None
        clear()


def _to_host(state: dict) -> dict:
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def clear() -> None:
    gc.collect()
    if CUDA:
        recorder(torch.device("cuda")).settle()  # workspaces of cuBLAS, too: an arm's streams are its own


def step(module: DetectionModule, batches: Iterator[dict], i: int) -> float:
    """Run step ``i`` and return its milliseconds, the device's work included."""
    batch = next(batches)
    synchronize()
    started = time.perf_counter()
    module.on_train_batch_start(batch, i)
    module.backward(module.training_step(batch, i))
    module.optimizer_step(0, i, None, lambda: None)  # given the step, it would answer out-of-memory by a smaller batch
    synchronize()
    return 1e3 * (time.perf_counter() - started)


def timed(bench: WarmBench, size: int, options: CaptureOptions) -> dict:
    """Return an arm's times, memory, digests and report."""
    module, batches = bench.start(size, options)
    t, times, losses = bench.trainer, [], []
    for i in range(WARM_UP + TIMED):
        times.append(round(step(module, batches, i), 2))
        losses.append([float(t.loss.detach()), *(float(item) for item in t.loss_items.values())])
    report = t.capture_report.to_dict()
    return {
        "step_ms": times[WARM_UP:],
        "allocated": torch.cuda.max_memory_allocated() if CUDA else 0,
        "reserved": torch.cuda.max_memory_reserved() if CUDA else 0,
        "digests": {"losses": d.digest(losses), **d.fit_digests(t)},
        **{key: report[key] for key in ("steps", "replayed", "eager", "blocked", "seconds")},
    }


def profiled(bench: WarmBench, size: int, options: CaptureOptions) -> dict:
    """Return the milliseconds and the number of kernels on the GPU, per step."""
    module, batches = bench.start(size, options)
    for i in range(WARM_UP):
        step(module, batches, i)
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as prof:
        for i in range(WARM_UP, WARM_UP + PROFILED):
            step(module, batches, i)
    kernels = [
        event.time_range.elapsed_us()
        for event in prof.events()
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return {"kernel_ms": round(sum(kernels) / 1e3 / PROFILED, 3), "kernels": len(kernels) // PROFILED}


def attempt(measure, bench: WarmBench, size: int, options: CaptureOptions) -> dict:
    """Return what ``measure`` returns, or an error; raises only where the device does not answer any more."""
    try:
        return measure(bench, size, options)
    except torch.cuda.OutOfMemoryError:
        error = {"error": "out of memory"}
    except Exception as other:
        error = {"error": f"{type(other).__name__}: {(str(other).splitlines() or [''])[0]}"}
    finally:
        bench.finish()
    return error


def row(case: str, arms: dict[str, dict]) -> str:
    """Return the Markdown row of a case: in each cell the arms, in their order."""
    first = next(iter(arms.values()))
    cells = [[_cells(arm, first)[i] for arm in arms.values()] for i in range(len(HEADS))]
    return f"| {case} | {' | '.join(' / '.join(cell) for cell in cells)} |"


def _cells(arm: dict, first: dict) -> list[str]:
    if "error" in arm:
        return [arm["error"].replace("|", "\\|"), *["-"] * (len(HEADS) - 1)]
    ms, reference = median(arm["step_ms"]), first.get("step_ms")
    seen = arm.get("kernels", 0)
    whole = seen and seen >= 0.9 * first.get("kernels", 0)
    parts = [part for part, digest in arm["digests"].items() if digest != first.get("digests", arm["digests"])[part]]
    busy = f"{arm['kernel_ms'] / ms:.0%}" if whole else f"trace lacks kernels ({seen})" if seen else "-"
    blocked = f" ({arm['blocked'].splitlines()[0][:80]})".replace("|", "\\|") if arm["blocked"] else ""
    return [
        f"{ms:.1f}",
        f"{median(reference) / ms:.2f}" if reference else "-",
        busy,
        str(arm["allocated"] >> 20),
        str(arm["reserved"] >> 20),
        f"{arm['replayed']}/{arm['steps']}{blocked}",
        "reference" if arm is first else "DIFFERS: " + ", ".join(parts) if parts else "equal" if reference else "-",
    ]


def wrong(arm: dict, first: dict, words: list[str]) -> bool:
    """Return whether an arm differs from the first, or failed or did not replay for want of other than memory."""
    if "digests" in arm and arm["digests"] != first.get("digests", arm["digests"]):
        return True
    if "out of memory" in (arm.get("error") or arm["blocked"] or ""):
        return False
    return "error" in arm or (options(words).network and arm["replayed"] < arm["steps"] - 1)


def table(record: dict, names: list[str]) -> str:
    """Return the Markdown table of the record's cases."""
    heads = f"| case | {' | '.join(HEADS)} |\n{'|---' * (len(HEADS) + 1)}|"
    rows = [row(name, record["cases"][name]["arms"]) for name in names if name in record["cases"]]
    return "\n".join([heads, *rows])


def expected(record: dict, case: Case) -> float | None:
    """Return the seconds that a case may take: as long as before, double of half the batch, or the longest so far."""
    known = {name: done["wall_seconds"] for name, done in record["cases"].items()}
    half = replace(case, batch=case.batch // 2, nbs=case.batch // 2).name
    return known.get(case.name) or (2 * known[half] if half in known else max(known.values(), default=None))


def measure(record: dict, path: Path, wanted: list[Case], budget: Budget, data: str, imgsz: int) -> bool:
    """Time, then profile what is missing; return whether nothing is."""
    arms = {name: options(words) for name, words in record["arms"].items()}
    batches, late = None, False
    for stage in (timed, profiled):
        todo = [case for case in wanted if not _done(record, case, stage)]
        if stage is profiled and todo:
            os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}  # recordings outlive no teardown
            with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]):
                synchronize()
        for _, group in groupby(todo, key=lambda case: (case.model, case.precision)):
            bench, largest = None, max(case.batch for case in wanted)
            for case in group:
                if not budget.allows(expected(record, case)):
                    late = True
                    continue
                began = time.monotonic()
                if bench is None:
                    bench = WarmBench(replace(case, batch=largest, nbs=largest), data, batches, imgsz=imgsz)
                    batches = bench.warm
                entry = record["cases"].setdefault(case.name, {"wall_seconds": 0.0, "arms": {n: {} for n in arms}})
                for name, given in arms.items():
                    if "error" not in entry["arms"][name]:
                        entry["arms"][name] |= attempt(stage, bench, case.batch, given)
                entry["wall_seconds"] = round(max(entry["wall_seconds"], time.monotonic() - began), 2)
                write_record(path, record)
                print(row(case.name, entry["arms"]), flush=True)
            del bench
            clear()
    return not late


def _done(record: dict, case: Case, stage) -> bool:
    key = "step_ms" if stage is timed else "kernel_ms"
    entry = record["cases"].get(case.name)
    return entry is not None and all(key in arm or "error" in arm for arm in entry["arms"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file to write or to go on with")
    parser.add_argument("data", help="path of a data.yaml with as many training images as the largest batch")
    parser.add_argument("--arm", action="append", default=list(ARMS), help=f"one more beside {' '.join(ARMS)}")
    parser.add_argument("--cases", action="append", help="only cases whose name contains this text, as in 'batch 1 '")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--budget", type=float, help="seconds; no case is started that is not expected to end in time")
    args = parser.parse_args()
    LOGGER.setLevel("WARNING")
    try:
        budget = Budget(args.budget)
        if not Path(args.data).is_file():
            raise Refused(f"{args.data}: no such file; give the path of a data.yaml")
        wanted, arms = cases(args.cases or []), read_options(args.arm)
        if not wanted:
            raise Refused(f"--cases {args.cases}: no case is called so; names are like '{cases([])[0].name}'")
        asked = {"script": "map", "arms": arms, "data": args.data, "imgsz": args.imgsz, "environment": environment()}
        record = open_record(args.record, **asked)
        record.setdefault("cases", {})
        record["sittings"].append(sitting())
        print(f"arms, in every cell in this order: {' / '.join(arms)}\n\n{table(record, [])}")
        complete = measure(record, args.record, wanted, budget, args.data, args.imgsz)
    except Refused as error:
        print(f"map: {error}", file=sys.stderr)
        return REFUSED
    print(f"\n{table(record, [case.name for case in wanted])}")
    if not complete:
        print("\nNOT complete yet: the same call goes on with it")
        return NOT_YET
    every = [record["cases"][case.name]["arms"] for case in wanted]
    return (
        FAILED
        if any(wrong(case[name], next(iter(case.values())), arms[name]) for case in every for name in case)
        else COMPLETE
    )


if __name__ == "__main__":
    sys.exit(main())
