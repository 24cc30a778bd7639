"""Complete fits in fresh processes, arms in turn: `python benchmarks/pairs.py RECORD.json --pairs 5 --warmup 1 ...`.

    --arm eager:ours:capture_network=False --arm replay:ours:capture_network=True  -- model=... data=... batch=4

An arm is NAME:KIND:key=value,... (kinds as in fit.py). Rounds run every arm once, in order; the first --warmup rounds
are discarded. The record is appended to after every fit, so that a long measurement can be made in several sittings;
the table says the median with minimum and maximum, the median of the ratios of each round, and whether all digests
of all arms are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_fit(kind: str, words: list[str]) -> dict:
    """Run one fit in a fresh process and return its result; raises with the end of its output when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fit.json"
        command = [sys.executable, str(HERE / "fit.py"), kind, str(out), f"project={folder}", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return json.loads(out.read_text())


def environment() -> dict:
    """Return the report's environment, and what a timing needs besides: driver, cores, torch's build, commit."""
    import torch

    from detgraph.trainer import report

    versions = report.environment()
    driver = None
    if versions["gpu"]:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    more = {"torch": torch.__version__, "driver": driver, "cores": os.cpu_count()}
    return {**versions, **more, "commit": os.environ.get("DETGRAPH_COMMIT")}


def table(record: dict, warmup: int) -> str:
    """Return the Markdown table of a record."""
    names = list(record["arms"])
    rounds = [r for r in record["rounds"][warmup:] if set(names) <= set(r)]
    if not rounds:
        return "no complete round yet"
    first = names[0]
    heads = ("arm", "fit s, median (min - max)", f"ratio to {first}", "median step ms", "allocated MiB", "reserved MiB")
    lines = ["| " + " | ".join([*heads, "replayed"]) + " |", "|---" * 7 + "|"]
    for name in names:
        seconds = [r[name]["fit_seconds"] for r in rounds]
        ratio = statistics.median(r[name]["fit_seconds"] / r[first]["fit_seconds"] for r in rounds)
        last = rounds[-1][name]
        report = last["report"] or {}
        lines.append(
            f"| {name} | {statistics.median(seconds):.1f} ({min(seconds):.1f} - {max(seconds):.1f}) | {ratio:.3f} "
            f"| {last['step_ms'].get('50', 0):.1f} | {last['peak_allocated'] >> 20} | {last['peak_reserved'] >> 20} "
            f"| {report.get('replayed', 0)}/{last['steps']} |"
        )
    digests = {json.dumps(r[name]["digests"], sort_keys=True) for r in rounds for name in names}
    equal = "equal" if len(digests) == 1 else f"NOT equal ({len(digests)} different)"
    lines.append(f"\n{len(rounds)} counted rounds; digests of all arms: {equal}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--arm", action="append", required=True)
    parser.add_argument("words", nargs="+")
    args = parser.parse_args()
    arms = {}
    for text in args.arm:
        name, kind, extra = (text.split(":", 2) + [""])[:3]
        arms[name] = (kind, [word for word in extra.split(",") if word])
    record = json.loads(args.record.read_text()) if args.record.exists() else {"rounds": []}
    record |= {"arms": {name: [kind, *extra] for name, (kind, extra) in arms.items()}, "words": args.words}
    record["environment"] = environment()
    while len(record["rounds"]) < args.warmup + args.pairs or set(arms) - set(record["rounds"][-1]):
        if not record["rounds"] or not set(arms) - set(record["rounds"][-1]):
            record["rounds"].append({})
        current = record["rounds"][-1]
        for name in [name for name in arms if name not in current]:
            kind, extra = arms[name]
            current[name] = run_fit(kind, [*args.words, *extra])
            print(f"round {len(record['rounds'])} {name}: {current[name]['fit_seconds']:.2f} s", flush=True)
            part = args.record.with_suffix(".part")
            part.write_text(json.dumps(record, indent=1))
            part.replace(args.record)
    print(table(record, args.warmup))
    return 0


if __name__ == "__main__":
    sys.exit(main())
