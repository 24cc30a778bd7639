"""What a fit replayed, what it did not and why: counted as it happens, told at the end, written beside the weights."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from detgraph.cfg import REPORT_SCHEMA, CaptureOptions
from detgraph.trainer.output import write_whole

SCHEMA = REPORT_SCHEMA


def environment() -> dict[str, str | None]:
    """Return the versions and the device that figures of this process belong to."""
    versions = {}
    for package in ("detgraph", "ultralytics", "lightning", "torch", "torchvision"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {**versions, "python": platform.python_version(), "cuda": torch.version.cuda, "gpu": gpu}


def is_report(path: Path) -> bool:
    """Return whether ``path`` is a report, of whichever schema: by its content, since others use the name, too."""
    try:
        content = json.loads(path.read_bytes())
        return type(content["schema"]) is int and {"steps", "replayed"} <= content.keys() and "options" in content
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


@dataclass(kw_only=True)
class RecordingCounts:
    """What became of one recorded part of a fit's steps; every step of it is replayed or eager with one reason."""

    replayed: int = 0
    eager: Counter = field(default_factory=Counter)
    recordings: int = 0
    retirements: list[dict] = field(default_factory=list)
    blocked: str | None = None
    seconds: Counter = field(default_factory=Counter)
    unverifiable: list[str] = field(default_factory=list)

    def block(self, reason: str) -> None:
        """Note what keeps the whole fit, or the rest of it, eager."""
        self.blocked = reason

    def retire(self, reason: str) -> None:
        """Note that a recording was given up before the step that comes next."""
        self.retirements.append({"step": self.steps, "reason": reason})

    @property
    def steps(self) -> int:
        return self.replayed + self.eager.total()

    def share(self) -> float:
        """Return replayed steps as a fraction of all steps so far."""
        return self.replayed / self.steps if self.steps else 0.0

    def line(self) -> str:
        """Return the counts in one line."""
        text = f"{self.replayed} of {self.steps} steps replayed ({self.share():.1%})"
        if self.eager:
            text += ", eager: " + ", ".join(f"{count} ({reason})" for reason, count in self.eager.most_common())
        if self.recordings:
            text += f"; {self.recordings} recorded in {self.seconds['recording']:.2f} s"
        if self.unverifiable:
            text += f"; {len(self.unverifiable)} results could not be checked, as eager passes do not reproduce them"
        if self.retirements:
            text += f"; {len(self.retirements)} retired, last: {self.retirements[-1]['reason']}"
        if self.blocked and not self.steps:
            text += f"; {self.blocked}"
        return text

    def to_dict(self) -> dict:
        """Return the counts as plain data, as ``capture.json`` has them."""
        return {
            "steps": self.steps,
            "replayed": self.replayed,
            "eager": dict(self.eager),
            "recordings": self.recordings,
            "retirements": self.retirements,
            "blocked": self.blocked,
            "unverifiable": self.unverifiable,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


@dataclass
class CaptureReport(RecordingCounts):
    """What one fit replayed. Its own counts are the network's, and a step of theirs is one micro-batch.

    A step of ``orthogonalization`` is one optimizer step.
    """

    options: CaptureOptions
    orthogonalization: RecordingCounts = field(default_factory=RecordingCounts)
    memory: dict[str, int] = field(default_factory=dict)
    lent: Counter = field(default_factory=Counter)
    device: str = "cpu"

    def start(self, device: torch.device) -> None:
        """Begin measuring peak memory on ``device``."""
        self.device = str(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def stop(self) -> None:
        """Take the peaks: bytes allocated and reserved on the device since ``start``."""
        if self.device.startswith("cuda"):
            self.memory["peak_allocated"] = torch.cuda.max_memory_allocated(self.device)
            self.memory["peak_reserved"] = torch.cuda.max_memory_reserved(self.device)

    def counts(self, key: str) -> RecordingCounts:
        """Return the counts of what one of our keys asks for."""
        return {"capture_network": self, "capture_orthogonalization": self.orthogonalization}[key]

    def summary(self) -> list[str]:
        """Return the lines that close a fit, one for each capture that was asked for."""
        lines = [f"{key}: {self.counts(key).line()}" for key in self.options.asked]
        if reserved := self.memory.get("peak_reserved"):
            allocated = self.memory["peak_allocated"]
            lines[-1] += f"; peak {reserved / 2**30:.2f} GiB reserved, {allocated / 2**30:.2f} allocated"
        return lines

    def to_dict(self) -> dict:
        """Return the content of ``capture.json`` (schema in docs/report.md)."""
        return {
            "schema": SCHEMA,
            "options": self.options.to_dict(),
            **super().to_dict(),
            "orthogonalization": self.orthogonalization.to_dict(),
            "memory_bytes": self.memory,
            "lent": dict(self.lent),
            "device": self.device,
            "environment": environment(),
        }

    def write(self, path: Path) -> None:
        """Write ``to_dict`` to ``path``; the file appears whole or not at all.

        Raises:
            FileExistsError: something is there that is no report; it is kept.
            OSError: the file cannot be written.
        """
        if os.path.lexists(path) and not is_report(path):
            raise FileExistsError("what is there is not a report of ours and is kept")
        write_whole(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())
