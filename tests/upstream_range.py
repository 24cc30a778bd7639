"""Drift check and a short parity case against releases of upstream, each in a virtual environment of its own.

An environment holds one release of ultralytics, without its dependencies, in front of everything that the interpreter
running this script has. In it, per release: the fingerprints of what we restate and patch, what our checks say of
them, and a parity case by goldens: upstream's own trainer in a process that cannot import detgraph, our loop, and our
loop replaying through the emulator. Where the loop's fingerprint is unknown, our loop is made to run all the same, so
that the table says what would happen if the fingerprint were added.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
VERSIONS = [f"8.4.{patch}" for patch in range(181, 191)]
ARGS = {
    "model": "yolo26n.yaml", "imgsz": 64, "batch": 2, "nbs": 4, "epochs": 2, "optimizer": "MuSGD", "seed": 0,
    "deterministic": True, "workers": 0, "plots": False, "warmup_epochs": 1.0, "pretrained": False, "close_mosaic": 1,
    "device": "cpu", "verbose": False,
}  # fmt: skip
LIMIT = 600  # seconds for one process
COLUMNS = ("release", "Model.train", "patches", "_do_train", "loop", "ours", "replay", "fit by")


def make_environment(folder: Path, release: str) -> Path:
    """Return the interpreter of the environment for ``release``, made if missing."""
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    target = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    subprocess.run([*command, "--no-compile", "--target", target, f"ultralytics=={release}"], check=True)
    # addsitedir, not a plain path: an editable install of detgraph is itself a .pth file.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(target) / "behind.pth").write_text("\n".join(lines) + "\n")
    (folder / "complete").touch()
    return python


def run(python: Path, *words: str, cwd: Path) -> tuple[int, str]:
    """Run ``python words`` and return its status and output."""
    environment = {**os.environ, "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(cwd / "config"), "MPLBACKEND": "Agg"}
    environment["PYTHONPATH"] = f"{TESTS}{os.pathsep}{TESTS / 'startup'}"
    environment |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [str(python), *words], cwd=cwd, env=environment, text=True, timeout=LIMIT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        return 124, f"{e.stdout or ''}\nno end within {LIMIT} s"
    return done.returncode, done.stdout


def inspect() -> dict:
    """Return what this process's ultralytics is to us: fingerprints, and what the checks say."""
    import ultralytics
    from ultralytics.engine.trainer import BaseTrainer

    from detgraph.patches import fingerprint, route_train, status
    from detgraph.trainer.fit.upstream import LOOP, loop_drift

    return {
        "release": ultralytics.__version__,
        "file": ultralytics.__file__,
        "fingerprints": {
            "BaseTrainer._do_train": LOOP.installed(),
            "BaseTrainer._setup_train": fingerprint(BaseTrainer._setup_train),
            "BaseTrainer.optimizer_step": fingerprint(BaseTrainer.optimizer_step),
            "Model.train": route_train.patch.known.installed(),
        },
        "patches": {line.name: line.drift for line in status()},
        "loop": loop_drift(),
    }


def fit(kind: str, out: str, data: str) -> None:
    """Record one fit by ``kind``: ours or emulated, our loop whatever its fingerprint check says."""
    import torch

    from detgraph.trainer import LightningDetectionTrainer
    from detgraph.trainer.fit.upstream import LOOP
    from detgraph.trainer.golden.record import recording

    torch.set_num_threads(1)
    LOOP.fingerprints.setdefault(LOOP.installed(), "here")
    args = {**ARGS, "data": data, "project": str(Path(out).parent), "name": f"fit-{kind}"}
    if kind == "emulated":
        from emulator import EmulatingRecorder

        LightningDetectionTrainer.recorder, args["capture_network"] = EmulatingRecorder(), True
        args["capture_orthogonalization"] = True
    with recording(out):
        LightningDetectionTrainer(overrides=args).train()


def examine(release: str, folder: Path, data: str) -> dict:
    """Return one row of the table; never raises for what a release does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = make_environment(folder / "venv", release)
    except (subprocess.CalledProcessError, OSError) as e:
        return {"release": release, "error": f"no environment: {e}"}
    status, said = run(python, str(TESTS / "upstream_range.py"), "--inspect", cwd=folder)
    if status:
        return {"release": release, "error": said[-2000:]}
    row = json.loads(said.splitlines()[-1])
    assert row["release"] == release and str(folder) in row["file"], row

    words = [f"{key}={value}" for key, value in {**ARGS, "data": data, "project": folder, "name": "fit-stock"}.items()]
    outs = {kind: folder / f"{kind}.json.gz" for kind in ("stock", "ours", "emulated")}
    for out in outs.values():
        out.unlink(missing_ok=True)
    commands = {
        "stock": [str(ROOT / "trainer" / "golden" / "stock.py"), str(outs["stock"]), "0:100", "train", *words],
        **{
            kind: [str(TESTS / "upstream_range.py"), "--fit", kind, str(outs[kind]), data]
            for kind in ("ours", "emulated")
        },
    }
    row["parity"], row["errors"], row["fit_by"] = {}, {}, {}
    for kind, command in commands.items():
        status, said = run(python, *command, cwd=folder)
        if status or not outs[kind].exists():
            lines = [line for line in said.splitlines() if line.strip()]
            row["errors"][kind] = (lines or [f"status {status}"])[-1][:200]
    from detgraph.trainer.golden.commands import compare_paths
    from detgraph.trainer.golden.file import read

    for kind in ("ours", "emulated"):
        if outs[kind].exists():
            row["fit_by"][kind] = read(outs[kind])["fit"]["loop"]
        if "stock" in row["errors"] or kind in row["errors"]:
            row["parity"][kind] = "error"
            continue
        found = compare_paths(outs["stock"], outs[kind])
        first = found.first
        row["parity"][kind] = (
            found.verdict if not first else f"{found.verdict} {first.where()}: {first.part} {first.name}"
        )
    return row


def table(rows: list[dict]) -> str:
    """Return the table, a line a release, and the errors below it."""
    cells, below = [COLUMNS], []
    for row in rows:
        if "error" in row:
            cells.append((row["release"], *["-"] * 6, "error"))
            below.append(f"{row['release']}: {row['error']}")
            continue
        prints = row["fingerprints"]
        drifted = [name for name, drift in row["patches"].items() if drift]
        cells.append((
            row["release"],
            prints["Model.train"][:12],
            "drift: " + ", ".join(drifted) if drifted else "fit",
            prints["BaseTrainer._do_train"][:12],
            "drift" if row["loop"] else "known",
            row["parity"]["ours"],
            row["parity"]["emulated"],
            row["fit_by"].get("ours", "-"),
        ))  # fmt: skip
        below += [f"{row['release']} {kind}: {error}" for kind, error in row["errors"].items()]
    if any(row.get("loop") for row in rows):
        below.insert(0, "loop 'drift': a fit trains by upstream's own loop there; the parity shown is of ours, forced")
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join(["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells] + below)


def main() -> int:
    """Examine the releases, print the table, keep the rows as JSON. Returns 1 if one that we support differs."""
    parser = argparse.ArgumentParser(description="Drift and parity against releases of upstream.")
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, help=f"releases, {VERSIONS[0]} to {VERSIONS[-1]} if none"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "upstream-range", help="environments and fits")
    parser.add_argument("--inspect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fit", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inspect:
        print(json.dumps(inspect()))
        return 0
    if args.fit:
        fit(*args.fit)
        return 0

    from helpers import make_dataset

    folder = args.folder.resolve()
    data = str(make_dataset(folder / "data", 8, 4))
    rows = []
    for release in args.versions:
        rows.append(examine(release, folder / release, data))
        print(f"{release}: {json.dumps(rows[-1])}", flush=True)
        (folder / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    supported = [row for row in rows if "error" not in row and not row["loop"]]
    return int(any(set(row["parity"].values()) != {"same"} for row in supported))


if __name__ == "__main__":
    sys.exit(main())
