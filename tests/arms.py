"""Runs fits in the arms of a comparison and says where two of them differ."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import import_path

HERE = Path(__file__).resolve().parent
OURS = ("capture_network", "capture_objective", "capture_orthogonalization")  # what our log lines start with


class Arm:
    """A child process of one kind (stock, ours, emulated), started at the first fit and kept for the next ones.

    It sees no GPU unless ``cuda`` says so: a comparison on the CPU must not depend on the machine having one.
    """

    def __init__(self, kind: str, *words: str, cuda: bool = False) -> None:
        self.kind = kind
        self.words = words
        self.hidden = {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
        self.process: subprocess.Popen | None = None
        self.folder = Path(tempfile.mkdtemp(prefix=f"detgraph-{kind}-"))
        self.count = 0
        atexit.register(self.close)

    def start(self, args: dict, perturb: list = (), **more) -> Path:
        """Ask for a fit; returns the file that the answer will be in."""
        if self.process is None or self.process.poll() is not None:
            environment = {**os.environ, "PYTHONPATH": import_path(HERE), "TQDM_DISABLE": "1", **self.hidden}
            self.log = open(self.folder / "log.txt", "w")  # noqa: SIM115 open as long as the process
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "arm.py"), self.kind, *self.words],
                stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.PIPE, text=True, env=environment,
                cwd=self.folder,
            )  # fmt: skip
        self.count += 1
        out = self.folder / f"{self.count}.json"
        args = {"project": str(self.folder / "runs"), "name": f"fit{self.count}", **args}
        request = {"args": args, "perturb": list(perturb), "out": str(out), **more}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return out

    def finish(self, out: Path) -> dict:
        """Wait for the fit whose answer goes to ``out``."""
        tail: list[str] = []
        while not out.exists():
            line = self.process.stderr.readline()
            tail.append(line)
            if not line and self.process.poll() is not None:
                raise RuntimeError(f"arm '{self.kind}' died:\n" + "".join(tail[-40:]))
        return json.loads(out.read_text())

    def fit(self, args: dict, perturb: list = (), **more) -> dict:
        return self.finish(self.start(args, perturb, **more))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.stdin.close()
            self.process.terminate()
            self.process.wait(timeout=30)


def fits(requests: list[tuple[Arm, dict]], perturb: list = ()) -> list[dict]:
    """Run fits side by side, one an arm, and return what they say in the order of the requests."""
    started = [(arm, arm.start(args, perturb)) for arm, args in requests]
    return [arm.finish(out) for arm, out in started]


def differences(a: dict, b: dict) -> list[str]:
    """Return the parts in which two fits differ: every sub-digest, and what they said and wrote."""
    found = [
        f"digest of {part}: {a['digests'][part][:12]} {b['digests'].get(part, '-')[:12]}"
        for part in a.get("digests", {})
        if a["digests"][part] != b.get("digests", {}).get(part)
    ]
    for part in ("losses", "gradients", "images", "csv", "events", "error", "batch_size", "epochs"):
        if a.get(part) != b.get(part):
            found.append(f"{part}: {first_difference(a.get(part), b.get(part))}")
    logs = [[line for line in said(fit)] for fit in (a, b)]
    if logs[0] != logs[1]:
        found.append(f"log: {first_difference(*logs)}")
    files = [[f for f in fit.get("files", []) if f != "capture.json"] for fit in (a, b)]
    if files[0] != files[1]:
        found.append(f"files: {set(files[0]) ^ set(files[1])}")
    return found


def said(fit: dict) -> list[str]:
    """Return the log without our lines, and without our column in the header."""
    lines = [line for line in fit["log"] if not line.split("WARNING ")[-1].lstrip("⚠️ ").startswith(OURS)]
    return [line.removesuffix("   Replayed").rstrip() for line in lines]


def first_difference(a, b) -> str:
    if not isinstance(a, list) or not isinstance(b, list):
        return f"{a!r} != {b!r}"
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"[{i}] {x!r} != {y!r}"
    return f"lengths {len(a)} != {len(b)}: {(a if len(a) > len(b) else b)[min(len(a), len(b)) :][:3]}"
