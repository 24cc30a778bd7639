"""Held-out accuracy, arm against arm to the bit: `python benchmarks/accuracy.py RECORD.json DATA.yaml -- epochs=60`.

For every seed and arm a fit in a fresh process, then, in another one that imports upstream alone, best.pt on the
**test** split, which neither the fit nor the choice of best.pt has seen. Arms and words are as in `bench.py`; only
bits count here and no time does, so --jobs of them may share the device. The record is written after every job, and
the same call goes on where the last one stopped.

Exit status: 0 every arm equals the first to the bit for every seed, 1 one does not or failed, 2 refused, 3 not
complete yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import yaml
from sittings import (
    COMPLETE,
    FAILED,
    NOT_YET,
    REFUSED,
    Budget,
    FitFailed,
    Refused,
    check_arms,
    environment,
    lay_over,
    open_record,
    read_arms,
    run_fit,
    run_script,
    sitting,
    write_record,
)

ARMS = ("eager:ours:capture_network=False", "replay:ours:capture_network=True")
WORDS = (
    "model=yolo26n.yaml imgsz=640 batch=16 nbs=16 amp=bf16 optimizer=MuSGD epochs=60 "
    "workers=4 cache=ram pretrained=False plots=False"
)
VALIDATION_KEYS = ("data", "imgsz", "batch", "device", "workers")
METRICS = {"map": "mAP50-95", "map50": "mAP50"}


def validate(best: str, out: str, words: list[str]) -> None:
    """Validate ``best`` on the test split by upstream alone; write hexadecimal metrics and the weights' digest."""
    from by_path.golden.digests import digest
    from ultralytics import YOLO
    from ultralytics.cfg import parse_key_value_pair

    args = dict(parse_key_value_pair(word) for word in words)
    model = YOLO(best)
    weights = digest(dict(model.model.state_dict()))  # before validation fuses layers
    kept = {key: args[key] for key in VALIDATION_KEYS if key in args}
    box = model.val(**kept, split="test", plots=False, project=str(Path(out).parent)).box
    if ours := {"detgraph", "lightning"} & set(sys.modules):
        raise RuntimeError(f"validation in a process that has imported {', '.join(sorted(ours))}")
    metrics = {name: float(getattr(box, name)).hex() for name in METRICS}
    Path(out).write_text(json.dumps({"weights": weights, **metrics}))


def run_job(kind: str, words: list[str]) -> dict:
    """Fit and validate in fresh processes, in a folder that goes afterwards; return what is compared, or an error."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "test.json"
        try:
            fit = run_fit(kind, words, folder)
            run_script("accuracy.py", "--validate", fit["best"], str(out), *words, folder=folder)
        except FitFailed as error:
            return {"error": str(error)}
        report = fit["report"] or {}
        return {
            "test": json.loads(out.read_text()),
            "digests": fit["digests"],
            "steps": fit["steps"],
            **{key: report.get(key) for key in ("replayed", "eager", "blocked")},
            "wall_seconds": round(time.monotonic() - began, 1),
        }


def missing(record: dict) -> list[tuple[str, str]]:
    """Return (seed, arm) of every job that is still to run; a failed one is run again."""
    jobs = record["jobs"]
    todo = [(seed, name) for seed in map(str, record["seeds"]) for name in record["arms"]]
    return [(seed, name) for seed, name in todo if "test" not in jobs.get(seed, {}).get(name, {})]


def measure(record: dict, path: Path, jobs: int, budget: Budget) -> bool:
    """Run what is missing, ``jobs`` at a time, as far as the budget reaches; return whether all of it has run."""
    todo, running = missing(record), {}
    record["sittings"].append(sitting())
    with ThreadPoolExecutor(jobs) as pool:
        while running or todo:
            walls = [job["wall_seconds"] for done in record["jobs"].values() for job in done.values() if "test" in job]
            while todo and len(running) < jobs and budget.allows(max(walls, default=None)):
                seed, name = todo.pop(0)
                kind, *words = record["arms"][name]
                print(f"seed {seed}, arm {name}: started, {len(todo)} wait", flush=True)
                running[pool.submit(run_job, kind, [*record["words"], *words, f"seed={seed}"])] = (seed, name)
            if not running:
                return False
            _collect(record, running, path)
    return True


def _collect(record: dict, running: dict[Future, tuple[str, str]], path: Path) -> None:
    """Wait for a job to end and put it into the record."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        seed, name = running.pop(future)
        job = future.result()
        record["jobs"].setdefault(seed, {})[name] = job
        write_record(path, record)
        told = f"FAILED: {job['error'].splitlines()[-1]}" if "error" in job else f"{job['wall_seconds']:.0f} s"
        print(f"seed {seed}, arm {name}: {told}", flush=True)


def idle(record: dict, name: str, job: dict) -> str | None:
    """Return a complaint about an arm that was to replay and did so in less than 0.9 of the steps that could be."""
    from detgraph.trainer.capture.reasons import OTHER_SHAPE

    words = dict(word.split("=", 1) for word in (*record["words"], *record["arms"][name][1:]))
    if words.get("capture_network", "False").lower() == "false" or not record["environment"]["gpu"]:
        return None
    eligible = job["steps"] - job["eager"].get(OTHER_SHAPE, 0)
    if job["replayed"] >= 0.9 * eligible:
        return None
    return f"{name} replayed {job['replayed']} of {eligible} full batches"


def verdict(record: dict, seed: str) -> str:
    """Return "equal", or what is not: every arm's job of one seed against the first arm's."""
    jobs, names = record["jobs"].get(seed, {}), list(record["arms"])
    wrong = [f"{name} failed" for name in names if "error" in jobs.get(name, {})]
    wrong += [f"{name} did not run" for name in names if name not in jobs]
    ran = [name for name in names if "test" in jobs.get(name, {})]
    wrong += [text for name in ran if (text := idle(record, name, jobs[name]))]
    for name in ran[1:]:
        first = ran[0]
        for what in ("test", "digests"):
            a, b = jobs[first][what], jobs[name][what]
            wrong += [f"{name}: {what} {key}" for key in a if a[key] != b.get(key)]
        if jobs[first]["steps"] != jobs[name]["steps"]:
            wrong.append(f"{name}: steps")
    return "equal" if not wrong else "NOT equal: " + ", ".join(wrong)


def table(record: dict) -> str:
    """Return the Markdown table of the record and one line per seed that says whether its arms are equal."""
    heads = [f"test {label}" for metric in METRICS.values() for label in (metric, f"{metric}, exact")]
    lines = [f"| seed | arm | {' | '.join(heads)} | replayed | final state |", "|---" * (len(heads) + 4) + "|"]
    for seed in map(str, record["seeds"]):
        jobs, first = record["jobs"].get(seed, {}), None
        for name, job in ((name, jobs[name]) for name in record["arms"] if name in jobs):
            if "error" in job:
                lines.append(f"| {seed} | {name} | FAILED {'| - ' * (len(heads) + 1)}|")
                continue
            values = [text for key in METRICS for text in (f"{float.fromhex(job['test'][key]):.6f}", job["test"][key])]
            first = first or job
            state = "reference" if job is first else "equal" if job["digests"] == first["digests"] else "NOT equal"
            replayed = "-" if job["replayed"] is None else f"{job['replayed']}/{job['steps']}"
            lines.append(f"| {seed} | {name} | {' | '.join(values)} | {replayed} | {state} |")
    lines.append("")
    for seed in map(str, record["seeds"]):
        lines.append(f"- seed {seed}: {verdict(record, seed)}")
        for name, job in record["jobs"].get(seed, {}).items():
            if text := job.get("error") or job.get("blocked"):
                lines.append(f"- seed {seed}, {name}: {text.splitlines()[-1]}")
    return "\n".join([*lines, f"- Environment: {json.dumps(record['environment'])}"])


def begin(args: argparse.Namespace) -> dict:
    """Return the record to go on with; raises Refused before any work for what cannot be measured."""
    arms = read_arms(args.arm or ARMS)
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        raise Refused(f"--seeds {args.seeds}: give integers, as in 0,1,2") from None
    if len(set(seeds)) != len(seeds) or args.jobs < 1:
        raise Refused("--seeds names every seed once, and --jobs is 1 or more")
    try:
        splits = yaml.safe_load(Path(args.data).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise Refused(f"{args.data} cannot be read as a data.yaml: {error}") from error
    if not (isinstance(splits, dict) and splits.get("test")):
        raise Refused(f"{args.data} has no test split: best.pt is chosen on val, so only test: is held out")
    if fixed := [word for word in args.words if word.partition("=")[0] in {"data", "seed"}]:
        raise Refused(f"{fixed[0]}: data is the second argument, seeds are given by --seeds")
    words = lay_over([f"data={args.data}", *WORDS.split()], args.words)
    check_arms(arms, words)
    asked = {"script": "accuracy", "arms": arms, "words": words, "environment": environment()}
    record = open_record(args.record, **asked)
    record.setdefault("jobs", {})
    record["seeds"] = seeds
    return record


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--validate"]:
        validate(argv[1], argv[2], argv[3:])
        return COMPLETE
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file to write or to go on with")
    parser.add_argument("data", help="path of a data.yaml with a train, a val and a test split")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="fits at the same time, on one device")
    parser.add_argument("--arm", action="append", help=f"two or more; without it: {' '.join(ARMS)}")
    parser.add_argument("--budget", type=float, help="seconds; no job is started that is not expected to end in time")
    parser.epilog = f"Words after --, with their defaults: {WORDS}"
    args = parser.parse_args(argv[:split])
    args.words = argv[split + 1 :]
    try:
        budget = Budget(args.budget)
        record = begin(args)
    except Refused as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return REFUSED
    complete = measure(record, args.record, args.jobs, budget)
    print(f"\n{table(record)}")
    if not complete:
        print(f"record: {args.record}; NOT complete yet: the same call goes on with it")
        return NOT_YET
    return COMPLETE if all(verdict(record, str(seed)) == "equal" for seed in record["seeds"]) else FAILED


if __name__ == "__main__":
    sys.exit(main())
