"""Golden files: what a fit computed, step by step, sealed in JSON. Needs the standard library and nothing else.

A golden holds `environment`, `arguments`, `fit` (which trainer, how it ended), `loss_names`, `steps` (one entry a
micro-batch), `tensors` (a digest and a summary per tensor, for the steps that were asked for), `final` (sub-digests at
the end) and, in the repository's own goldens, `tolerance`. Numbers are exact: floats are hexadecimal text. `seal` is
SHA-256 over all the rest, so a file in which one bit has changed is refused.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zlib
from pathlib import Path

from ..output import write_whole

FORMAT, SCHEMA = "detgraph golden", 1
FILE_NAME = "golden.json.gz"

# Parts of a step, in the order in which a step computes them; the first part that differs is where two fits part.
PARTS = (
    "parameters",  # as the forward finds them
    "buffers",  # as the forward finds them
    "images",  # as they reach the network
    "targets",
    "losses",  # the sum that backward starts from, then upstream's loss items
    "gradients",  # before unscaling and clipping; this and what follows only where the optimizer steps
    "schedule",  # learning rate, momentum and weight decay of each parameter group
    "optimizer",  # state after the optimizer step
    "scaler",
    "ema",
)
# Keys of `environment` that have to agree before the same bits can be expected. Of Python, major and minor version.
EXACT_KEYS = (
    "ultralytics", "torch", "torchvision", "numpy", "opencv", "python", "machine", "processor", "cpu_capability",
    "threads", "device", "cuda", "cudnn",
)  # fmt: skip


class GoldenError(Exception):
    """A golden or run folder that cannot be read, recorded or compared: what, where, and the way out."""


def environment_differences(a: dict, b: dict) -> list[str]:
    """Return one line per key of EXACT_KEYS in which two environments differ; none if bits can be expected to agree."""

    def value(environment: dict, key: str):
        found = environment.get(key)
        return ".".join(str(found).split(".")[:2]) if key == "python" else found

    pairs = [(key, value(a, key), value(b, key)) for key in EXACT_KEYS]
    return [f"{key}: {x} and {y}" for key, x, y in pairs if x != y]


def seal(content: dict) -> str:
    """Return SHA-256 over everything in ``content`` but its seal."""
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def dump(content: dict) -> str:
    """Return ``content`` as JSON that reads well in a diff: a line per key, per step, and per entry of a mapping."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        elif isinstance(value, dict) and value:
            rows = (f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            text = "{\n" + ",\n".join(rows) + "\n }"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(content: dict, path: str | Path) -> None:
    """Seal ``content`` and write it, compressed where the name ends in .gz; the file appears whole or not at all."""
    path = Path(path)
    rest = {key: value for key, value in content.items() if key not in ("format", "schema", "seal")}
    head = {"format": FORMAT, "schema": SCHEMA}
    data = dump({**head, "seal": seal({**head, **rest}), **rest}).encode()
    write_whole(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def read(path: str | Path) -> dict:
    """Return a golden's content.

    Raises:
        GoldenError: if it cannot be read, is no golden, is of another schema, or its seal does not fit.
    """
    path = Path(path)
    again = "record it again (yolo golden record)"
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise GoldenError(f"{path} cannot be read as a golden: {type(e).__name__}: {e}; {again}.") from e
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise GoldenError(f"{path} is no golden: its 'format' is not '{FORMAT}'; {again}.")
    if content.get("schema") != SCHEMA:
        raise GoldenError(
            f"{path} has schema {content.get('schema')!r}, this version reads {SCHEMA}: {again} with this version."
        )
    if content.get("seal") != (found := seal(content)):
        raise GoldenError(
            f"{path} was changed after it was recorded: its seal is {str(content.get('seal'))[:16]}, "
            f"its content has {found[:16]}; restore the file or {again}."
        )
    return content


def read_results(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results.csv without the time, which differs between any two fits.

    Raises:
        GoldenError: if it is no text.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{(k or "").strip(): str(v or "").strip() for k, v in row.items()} for row in csv.DictReader(file)]
    except (ValueError, csv.Error) as e:
        raise GoldenError(f"{path} cannot be read as results of a fit: {e}.") from e
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def results_digest(folder: Path) -> str | None:
    """Return a digest of what the results.csv of a run folder says, None without one."""
    path = folder / "results.csv"
    return hashlib.sha256(json.dumps(read_results(path)).encode()).hexdigest()[:16] if path.is_file() else None
