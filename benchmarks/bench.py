"""Complete fits in fresh processes, arms in turn: table, JSON record and picture. `make bench` runs it.

    python benchmarks/bench.py RECORD.json --arm eager:ours --arm replay:ours:capture_network=True -- batch=4 epochs=6

An arm is NAME:KIND:key=value,... (kinds: upstream, ours); the words after -- are arguments of all arms, laid over the
defaults. Rounds run every arm once, in order; the first --warmup rounds are discarded. The record is written after
every fit, and the same call goes on where the last one stopped. An arm that fails leaves its error in the record and
sits out the rest. Without --data the embedded demo data set is drawn beside the record.

Exit status: 0 complete, 1 complete but for a failed arm, 2 refused before any fit, 3 not complete yet, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_report import counted, picture, table
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
    read_record,
    run_fit,
    sitting,
    write_record,
)

ARMS = ("upstream:upstream", "eager:ours:capture_network=False", "replay:ours:capture_network=True")
COMMON = "model=yolo26n.yaml optimizer=MuSGD pretrained=False plots=False seed=0"
WORDS = f"{COMMON} imgsz=640 batch=4 nbs=4 amp=bf16 epochs=6 workers=4 cache=ram"  # the records were made with them
DEMO_WORDS = f"{COMMON} imgsz=160 batch=8 nbs=8 amp=bf16 epochs=2 workers=0"  # what a first look can wait for
CPU_WORDS = f"{COMMON} imgsz=64 batch=16 nbs=16 amp=False epochs=2 workers=0"  # and without a GPU, which bf16 needs
ROUNDS = {True: (5, 2), False: (2, 1)}  # counted and discarded; without a GPU there is nothing to claim
INTERRUPTED = 130
NO_CUDA = "No CUDA device: replay needs CUDA, so an arm that asks for it trains eagerly. This tries the command only."


def missing(record: dict) -> list[tuple[int, str]]:
    """Return (round, arm) of every fit that is still to run, in order; a failed arm has none."""
    rounds, total = record["rounds"], record["warmup"] + record["pairs"]
    failed = {name for done in rounds for name, fit in done.items() if "error" in fit}
    names = [name for name in record["arms"] if name not in failed]
    return [(i, name) for i in range(total) for name in names if i >= len(rounds) or name not in rounds[i]]


def expected(record: dict, name: str) -> float | None:
    """Return the longest an earlier fit of the arm took, or of any arm where it has none; None where there is none."""
    walls = [(arm, fit["wall_seconds"]) for done in record["rounds"] for arm, fit in done.items() if "error" not in fit]
    own = [seconds for arm, seconds in walls if arm == name]
    return max(own or [seconds for _, seconds in walls], default=None)


def measure(record: dict, path: Path, budget: Budget, run: Callable[[str, list[str]], dict]) -> int:
    """Run what is missing, as far as the budget reaches, writing the record after every fit; return the exit status."""
    total = len(record["arms"]) * (record["warmup"] + record["pairs"])
    record["sittings"].append(sitting())
    while todo := missing(record):
        number, name = todo[0]
        known = [expected(record, arm) for _, arm in todo]
        if not budget.allows(known[0]):
            print(
                f"budget: a fit of {name} takes up to {known[0] or 0:.0f} s, too long to start; {len(todo)} fits left"
            )
            return NOT_YET
        left = f"about {sum(known) / 60:.1f} min left" if known[0] else "no estimate yet"
        kind = "discarded" if number < record["warmup"] else "counted"
        print(
            f"fit {total - len(todo) + 1} of {total}: round {number + 1} of {record['warmup'] + record['pairs']} "
            f"({kind}), arm {name}; {left}",
            flush=True,
        )
        while len(record["rounds"]) <= number:
            record["rounds"].append({})
        arm, *words = record["arms"][name]
        try:
            fit = run(arm, [*record["words"], *words])
            print(f"  {fit['fit_seconds']:.2f} s the fit, {fit['wall_seconds']:.1f} s the process", flush=True)
        except FitFailed as error:
            fit = {"error": str(error)}
            print(f"  FAILED, the other arms go on: {str(error).splitlines()[-1]}", flush=True)
        record["rounds"][number][name] = fit
        try:
            write_record(path, record)
        except OSError as error:  # a full disk
            print(f"  NOT WRITTEN, the record is what it was before this fit: {error}", flush=True)
            return NOT_YET
    return FAILED if any("error" in fit for done in record["rounds"] for fit in done.values()) else COMPLETE


def fresh_fit(kind: str, words: list[str]) -> dict:
    """Run one fit in a fresh process and a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        fit = run_fit(kind, words, Path(folder))
    fit.pop("best")
    return fit


def begin(args: argparse.Namespace) -> dict:
    """Return the record to go on with; raises Refused before any work for what cannot be measured."""
    if args.pairs is not None and args.pairs < 1 or args.warmup is not None and args.warmup < 0:
        raise Refused("--pairs is 1 or more, --warmup 0 or more")
    arms = read_arms(args.arm or ARMS)
    if args.data and not Path(args.data).is_file():
        raise Refused(f"--data {args.data}: no such file; give the path of a data.yaml")
    if any(word.startswith("data=") for word in args.words):
        raise Refused("data= is given by --data")
    where = environment()
    cuda = bool(where["gpu"])
    defaults = CPU_WORDS if not cuda else WORDS if args.data else DEMO_WORDS
    data = args.data or os.path.relpath(args.record.parent / "demo-data" / "data.yaml")
    words = lay_over([f"data={data}", *defaults.split()], args.words)
    check_arms(arms, words)
    pairs, warmup = (
        given if given is not None else usual
        for given, usual in zip((args.pairs, args.warmup), ROUNDS[cuda], strict=True)
    )
    record = open_record(args.record, script="bench", arms=arms, words=words, warmup=warmup, environment=where)
    record |= {"pairs": pairs, "rounds": record.get("rounds", [])}
    if args.retry:
        record["rounds"] = [{n: fit for n, fit in done.items() if "error" not in fit} for done in record["rounds"]]
    if not args.data:
        from detgraph.cfg.demo import draw_demo

        try:
            draw_demo(Path(data).parent)
        except OSError as error:
            raise Refused(f"the demo data set cannot be drawn: {error}; give --data") from error
    print(f"arguments of all arms: {' '.join(words)}")
    print("\n".join(f"arm {name}: {' '.join(arm)}" for name, arm in arms.items()))
    if not cuda:
        print(NO_CUDA)
    return record


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file to write or to go on with; the picture lies beside it")
    parser.add_argument("--arm", action="append", help=f"two or more; without it: {' '.join(ARMS)}")
    parser.add_argument("--data", help="path of a data.yaml; without it the demo data set")
    parser.add_argument("--pairs", type=int, help="counted rounds: 5, without a GPU 2")
    parser.add_argument("--warmup", type=int, help="discarded rounds before them: 2, without a GPU 1")
    parser.add_argument("--budget", type=float, help="seconds; no fit is started that is not expected to end in time")
    parser.add_argument("--retry", action="store_true", help="run the fits of failed arms again")
    parser.add_argument("--show", action="store_true", help="table and picture of the record as it is; runs nothing")
    parser.epilog = f"Words after --, with their defaults: {WORDS}. Demo data: {DEMO_WORDS}. Without a GPU: {CPU_WORDS}"
    args = parser.parse_args(argv[:split])
    args.words = argv[split + 1 :]
    try:
        budget = Budget(args.budget)
        record = read_record(args.record, "bench") if args.show else begin(args)
        status = COMPLETE if args.show else measure(record, args.record, budget, fresh_fit)
    except Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"\nbench: interrupted, the fit that ran is lost; {kept(args.record, INTERRUPTED)}", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{table(record)}\n")
    if counted(record):
        try:
            print(f"picture: {picture(record, args.record.with_suffix('.png'))}")
        except OSError as error:
            print(f"picture: none, it cannot be written ({error})")
    print(kept(args.record, status))
    return status


def kept(path: Path, status: int) -> str:
    """Return where the record is, and whether the same call goes on with it."""
    unfinished = "" if status in {COMPLETE, FAILED} else "; NOT complete yet: the same call goes on"
    return f"record: {path if path.exists() else 'none yet, no fit has ended'}{unfinished}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, it takes fit and folder along
    sys.exit(main())
