"""The repository's goldens: what they cover, how they are recorded, and how a fit is judged by one.

`python tests/goldens/goldens.py` records them anew (`make goldens`): it trains every case eagerly and replayed, refuses
if the two differ, shows what changed against the stored golden, then writes. Each case is stored once: the eager and
the replayed fit have to be that same fit.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
MODES = {"eager": "ours", "replay": "emulated"}  # mode -> kind of arm without a GPU; with one, "captured" replays

# Learning rates are low so that fits in other environments stay comparable for some steps, see TOLERANCE.
BASE = {
    "model": "yolo26n.yaml", "imgsz": 64, "batch": 2, "nbs": 2, "epochs": 2, "optimizer": "MuSGD", "lr0": 1e-4,
    "seed": 0, "deterministic": True, "workers": 0, "plots": False, "warmup_epochs": 0, "pretrained": False,
    "close_mosaic": 0, "verbose": False,
}  # fmt: skip
DATA = (8, 4)  # pictures for training and validation, by helpers.make_dataset

# Another processor rounds otherwise, and training multiplies the difference at every optimizer step: at lr0=0.01 from
# 5e-6 to 1e-1 within two. At the rates used here, with ATen, oneDNN and MKL held to AVX2 or to no vectors, the loss
# items of the first eight steps moved by at most 1.1e-4. What has to be found moves them by more within three steps:
# no optimizer step, twice the rate, or twice the accumulation by 5e-3 to 8e-2. 1e-3 lies between.
# Half precision has 8 or 11 bits, so only the first losses can be compared, at a few of its roundings.
TOLERANCE = {"relative": 1e-3, "steps": 6}
HALF_PRECISION = {"relative": 5e-2, "steps": 1}


@dataclass(frozen=True)
class Case:
    """One golden: arguments over BASE, and what is done to the fit (perturbations.py)."""

    name: str
    args: dict = field(default_factory=dict)
    perturb: list = field(default_factory=list)
    device: str = "cpu"
    tolerance: dict = field(default_factory=lambda: TOLERANCE)

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.json"


ACCUMULATE = {"nbs": 8, "warmup_epochs": 1.0, "warmup_bias_lr": 1e-3}
CASES = [
    Case("cpu_fp32_musgd"),
    Case("cpu_fp32_musgd_accumulate", ACCUMULATE),
    Case("cpu_fp32_adamw", {"optimizer": "AdamW", "lr0": 1e-5}),
    Case("cpu_fp32_sgd_scaler", {"optimizer": "SGD"}, [["scaler", {"scale": 1024.0}]]),
    Case("cuda_fp32_musgd", {"amp": False}, device="0"),
    Case("cuda_bf16_musgd_accumulate", {"amp": "bf16", **ACCUMULATE}, device="0", tolerance=HALF_PRECISION),
    Case("cuda_bf16_adamw", {"amp": "bf16", "optimizer": "AdamW", "lr0": 1e-5}, device="0", tolerance=HALF_PRECISION),
    Case("cuda_fp16_sgd", {"amp": True, "optimizer": "SGD"}, device="0", tolerance=HALF_PRECISION),
]


def ulp(perturb, step: int, parameter: str, element: int) -> None:
    """Move one element of a parameter to the next float, before the forward of a step."""
    import torch

    state = {"step": 0}

    def nudge(trainer):
        if state["step"] == step:
            flat = trainer.model.get_parameter(parameter).data.view(-1)
            flat[element] = torch.nextafter(flat[element], torch.tensor(float("inf")))
        state["step"] += 1

    perturb.on("on_train_batch_start", nudge)


def fits(requests: list[dict], folder: Path) -> None:
    """Run fits one after the other in a child process; a request names kind, args, perturb, detail and out."""
    from helpers import import_path

    environment = {**os.environ, "PYTHONPATH": import_path(TESTS), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    (folder / "requests.json").write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, str(HERE / "goldens.py"), "--fits", str(folder / "requests.json")],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the recording process ended with status {done.returncode}:\n{done.stdout[-4000:]}")


def run_fits(requests: list[dict]) -> None:
    """Run the requests of `fits` in this process."""
    sys.path.insert(0, str(TESTS))
    import torch

    import perturbations
    from arm import make_trainer
    from detgraph.trainer.golden.record import recording

    perturbations.ulp = ulp
    torch.set_num_threads(1)
    if requests[0]["args"]["device"] != "cpu":
        # With a GPU there may be integrations that upstream imports during the first fit of a process, and that draw
        # from the generators then: that fit does not count.
        requests = [{**requests[0], "out": None}, *requests]
    for request in requests:
        args, kind = request["args"], request["kind"]
        if kind == "captured":
            captures = ("capture_network", "capture_objective", "capture_orthogonalization")
            args, kind = {**args, **dict.fromkeys(captures, True)}, "ours"
        with perturbations.active(request.get("perturb", [])) as perturb:
            try:
                with recording(request.get("out"), tuple(request.get("detail", (0, 100)))):
                    trainer = make_trainer(kind, args, perturb.callbacks)
                    perturb.attach(trainer)
                    trainer.train()
            except RuntimeError as e:
                if "injected" not in str(e):
                    raise


def record_cases(cases: list[Case], folder: Path) -> dict[tuple[str, str], dict]:
    """Train every case in every mode; returns the goldens by (name, mode)."""
    sys.path.insert(0, str(TESTS))
    from detgraph.trainer.golden import file as golden_file
    from helpers import make_dataset

    data = str(make_dataset(folder / "data", *DATA))
    requests = []
    for case in cases:
        for mode, kind in MODES.items():
            kind = "captured" if mode == "replay" and case.device != "cpu" else kind
            args = {**BASE, **case.args, "data": data, "device": case.device, "project": str(folder / "runs")}
            args["name"] = f"{case.name}.{mode}"
            out = str(folder / f"{case.name}.{mode}.json")
            requests.append({"kind": kind, "args": args, "perturb": case.perturb, "detail": [0, 0], "out": out})
    fits(requests, folder)
    goldens = {}
    for case in cases:
        for mode in MODES:
            content = golden_file.read(folder / f"{case.name}.{mode}.json")
            content["arguments"] = {**BASE, **case.args, "data": f"helpers.make_dataset{DATA}", "device": case.device}
            del content["tensors"]
            goldens[case.name, mode] = {**content, "tolerance": case.tolerance}
    return goldens


def judge(stored: dict, fit: dict) -> tuple[str, str | None]:
    """Return the rule that applies, and what is wrong with ``fit`` by it, or None.

    Exact where the environments agree; elsewhere the stored golden's tolerance on losses.
    """
    from detgraph.trainer.golden.compare import SAME, WITHIN, Tolerance, compare
    from detgraph.trainer.golden.file import environment_differences

    other = environment_differences(stored["environment"], fit["environment"])
    tolerance = Tolerance(**stored["tolerance"])
    rule = f"{tolerance}, since environments differ in {'; '.join(other)}" if other else "exact"
    comparison = compare(stored, fit, tolerance if other else None)
    good = comparison.verdict in ((SAME, WITHIN) if other else (SAME,))
    return rule, None if good else comparison.table()


def main() -> int:
    """Record the goldens of one device, show what changed, and write unless told not to."""
    parser = argparse.ArgumentParser(description="Record the goldens anew and show what changed.")
    parser.add_argument("cases", nargs="*", help="names of cases; all of the device if none")
    parser.add_argument("--device", default="cpu", help="cpu or 0 (CUDA)")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, write nothing")
    parser.add_argument("--fits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fits:
        run_fits(json.loads(args.fits.read_text()))
        return 0

    from detgraph.trainer.golden import file as golden_file
    from detgraph.trainer.golden.compare import SAME, compare

    cases = [case for case in CASES if case.device == args.device and (not args.cases or case.name in args.cases)]
    if not cases:
        parser.error(f"no case of device {args.device} by that name; there are {', '.join(c.name for c in CASES)}")
    failed, accepted = False, []
    with tempfile.TemporaryDirectory(prefix="detgraph-goldens-") as folder:
        goldens = record_cases(cases, Path(folder))
    for case in cases:
        eager, replay = goldens[case.name, "eager"], goldens[case.name, "replay"]
        between = compare(eager, replay)
        if between.verdict != SAME or not replay["fit"]["replayed"]:
            print(f"{case.name}: NOT WRITTEN, eager and replay are not the same fit\n{between.table()}")
            failed = True
            continue
        stored = _stored(case)
        if stored is None:
            print(f"{case.name}: new, {between.basis}")
        else:
            old, new = (golden_file.dump({**golden, "seal": ""}).splitlines() for golden in (stored, eager))
            print(f"{case.name}: {compare(stored, eager).table()}")
            print(
                "\n".join(line[:240] for line in difflib.unified_diff(old, new, "stored", "recorded", n=0, lineterm=""))
            )
        accepted.append((eager, case.path))
    for golden, path in [] if args.dry_run else accepted:
        golden_file.write(golden, path)
        print(f"written: {path}")
    return int(failed)


def _stored(case: Case) -> dict | None:
    from detgraph.trainer.golden import file as golden_file

    if not case.path.exists():
        return None
    try:
        return golden_file.read(case.path)
    except golden_file.GoldenError as e:
        print(f"{case.name}: {e}")
        return None


if __name__ == "__main__":
    sys.exit(main())
