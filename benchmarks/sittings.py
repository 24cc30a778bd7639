"""What the measuring scripts share: arms, fits in fresh processes, and a JSON record that grows over several sittings.

Importing this module imports neither torch nor detgraph: `fit.py` uses it in the process of an upstream arm.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).resolve().parent
runpy.run_path(str(HERE.parent / "trainer" / "golden" / "by_path.py"))
from by_path.output import unwritable, write_whole  # noqa: E402

KINDS = ("upstream", "ours")
SET_HERE = (
    "project",
    "name",
    "exist_ok",
    "resume",
    "cfg",
)  # a fit of a measurement has a new folder and explicit words
COMPLETE, FAILED, REFUSED, NOT_YET = range(4)  # exit status of the scripts
NOTHING = "nothing"  # what a message says for a key that the other side lacks


class Refused(ValueError):
    """A measurement that cannot begin as it was asked for; nothing was run and no record was touched."""


class FitFailed(RuntimeError):
    """A process of a measurement ended with an error; the text is the end of its output."""


# Arms -----------------------------------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Return the ``key=value`` words of a comma-separated list; a comma inside a value, as in [0,1], splits nothing."""
    return _words(word.strip() for word in re.split(r",(?=\s*\w+=)", text) if word)


def _words(texts: Iterable[str]) -> list[str]:
    words = list(texts)
    for word in words:
        if not re.match(r"\w+=", word):
            raise Refused(f"'{word}' is no argument: write key=value")
    return words


def read_arms(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return [kind, word, ...] by name from texts ``NAME:KIND:key=value,...``, in their order.

    Raises:
        Refused: another form, an unknown kind, a name given twice, or fewer than two arms.
    """
    arms: dict[str, list[str]] = {}
    for text in texts:
        name, kind, extra = (text.split(":", 2) + ["", ""])[:3]
        if not name or not kind:
            raise Refused(f"'{text}' is no arm: write NAME:KIND or NAME:KIND:key=value,...")
        if kind not in KINDS:
            raise Refused(f"arm '{text}': kind '{kind}' is unknown, known are {', '.join(KINDS)}")
        if name in arms:
            raise Refused(f"two arms are called '{name}': a record tells arms apart by their names")
        arms[name] = [kind, *split_words(extra)]
    if len(arms) < 2:
        raise Refused(f"a comparison needs two or more arms, here is {len(arms)}: give --arm NAME:KIND:key=value,...")
    return arms


def lay_over(defaults: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the words of both; of two words with one key the last stands, at the place of the first.

    Raises:
        Refused: a word is not of the form ``key=value``.
    """
    merged = {word.partition("=")[0]: word for word in (*defaults, *_words(words))}
    return list(merged.values())


def capture_keys() -> set[str]:
    """Return the names that belong to the capture, whether keys of the command line or options of Python."""
    from detgraph.cfg import CaptureOptions

    return {field.name for field in fields(CaptureOptions)}


def check_arms(arms: dict[str, list[str]], words: list[str]) -> None:
    """Let upstream and `detgraph.cfg` read every arm's arguments as its fits will.

    Raises:
        Refused: an unknown key, a value that is not allowed, a contradiction, or a key that the scripts set.
    """
    import torch
    from ultralytics.cfg import get_cfg, parse_key_value_pair
    from ultralytics.utils import DEFAULT_CFG_DICT
    from ultralytics.utils.checks import check_imgsz

    from detgraph.cfg import CaptureOptions, check_contradictions

    for name, (kind, *own) in arms.items():
        try:
            args = dict(parse_key_value_pair(word) for word in (*words, *own))
            if taken := [key for key in SET_HERE if key in args]:
                raise Refused(f"{taken[0]}= is not for a measurement: every fit is a new one in a folder of its own")
            ours = {key: args.pop(key) for key in capture_keys() & set(args) if kind == "ours"}
            for key in args.keys() - DEFAULT_CFG_DICT.keys():  # upstream would print its whole help
                known = [*DEFAULT_CFG_DICT, *(capture_keys() if kind == "ours" else ())]
                close = "".join(f" Did you mean {near}=...?" for near in get_close_matches(key, known, n=1))
                raise Refused(f"'{key}' is no training argument of this kind of arm.{close}")
            checked = get_cfg(overrides=args)
            check_imgsz(checked.imgsz, stride=1, max_dim=1)  # this and the next upstream leaves to the fit
            if checked.amp == "bf16" and not torch.cuda.is_available():
                raise Refused("amp=bf16 needs a CUDA device: give amp=False")
            check_contradictions(CaptureOptions.from_dict(ours), args)
        except (Exception, SystemExit) as error:  # upstream raises SyntaxError, TypeError, ValueError, or just exits
            reason = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().split("\n\n")[0]
            raise Refused(f"arm '{name}' ({kind}): {reason}") from error


# Fits -----------------------------------------------------------------------------------------------------------------


def run_script(script: str, *words: str, folder: Path) -> None:
    """Run a script of this folder in a fresh process of this interpreter; `folder` is where it writes.

    Raises:
        FitFailed: with the end of its output, paths of this machine taken out.
    """
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        tail = done.stdout.replace(str(folder), "RUN").replace(f"{HERE.parent}/", "")[-2000:].strip()
        raise FitFailed(f"{script} ended with {done.returncode}: {tail or 'no output'}")


def run_fit(kind: str, words: list[str], folder: Path) -> dict:
    """Run one fit in a fresh process and return what `fit.py` wrote, and ``wall_seconds`` of the whole process."""
    out, began = folder / "fit.json", time.monotonic()
    run_script("fit.py", kind, str(out), f"project={folder}", *words, folder=folder)
    fit = json.loads(out.read_text())
    fit["wall_seconds"] = round(time.monotonic() - began, 2)
    for known in ("kind", "words"):  # the record says both
        fit.pop(known)
    (fit["report"] or {}).pop("environment", None)
    return fit


class Budget:
    """The seconds that this sitting may take, counted from here; None means no limit.

    Raises:
        Refused: a number below 0, or none at all.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise Refused(f"--budget {seconds:g}: give seconds, 0 or more")
        self.seconds, self.started = seconds, time.monotonic()

    def allows(self, expected: float | None) -> bool:
        """Return whether work of ``expected`` seconds is over in time; work that nobody knows may start until then."""
        return self.seconds is None or time.monotonic() - self.started + (expected or 0.0) < self.seconds


# Records --------------------------------------------------------------------------------------------------------------


def environment() -> dict:
    """Return the report's environment, and what a timing needs besides: driver, cores, torch's build, commit."""
    import torch

    from detgraph.trainer.capture import report

    versions = report.environment()
    driver = None
    if versions["gpu"]:
        driver = _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = os.environ.get("DETGRAPH_COMMIT") or _output("git", "describe", "--always", "--dirty", "--abbrev=12")
    return {**versions, "torch": torch.__version__, "driver": driver, "cores": os.cpu_count(), "commit": commit}


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def sitting() -> dict[str, str]:
    """Return when a sitting began, which is now, and on which processor; for the record's ``sittings``."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info.read_text(), flags=re.M) if info.exists() else []
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"began": now, "processor": models[0] if models else platform.processor() or platform.machine()}


def open_record(path: Path, script: str, **asked) -> dict:
    """Return the record at ``path``, or a new one that holds ``asked`` and no sitting yet; no file is written.

    Raises:
        Refused: it cannot be written there, the file is no record of ``script``, or it was begun with something else
            than ``asked``; each difference is named.
    """
    _check_name(path)
    record = read_record(path, script) if path.exists() else {"script": script, **asked, "sittings": []}
    if reason := unwritable(path, folders=True):
        raise Refused(f"{path} cannot be written ({reason}): name a file in a folder where you may write")
    if found := [text for key, value in asked.items() for text in _differences(key, record.get(key), value)]:
        raise Refused(
            f"{path} was begun with something else, and one record is one measurement: {'; '.join(found)}. "
            "Name another file, or ask for what this one was begun with."
        )
    return record


def read_record(path: Path, script: str) -> dict:
    """Return the record of ``script`` at ``path``.

    Raises:
        Refused: there is none, the file is something else, or another script's record.
    """
    _check_name(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read as a record ({error})") from error
    if not isinstance(record, dict) or "sittings" not in record:
        raise Refused(f"{path} is no record of these scripts: it has no 'sittings'")
    if record.get("script") != script:
        raise Refused(f"{path} is a record of {record.get('script')}.py: give {script}.py one of its own")
    return record


def _check_name(path: Path) -> None:
    if path.suffix != ".json":
        raise Refused(f"record '{path}': give a name that ends in .json; .png is its picture")


def _differences(key: str, had: object, now: object) -> list[str]:
    """Return a text for every key whose value in the record is not what it is now; words and arms have keys, too."""
    if isinstance(had, list) and isinstance(now, list):
        had, now = _by_key(had), _by_key(now)
    if isinstance(had, dict) and isinstance(now, dict):
        names = [*had, *(name for name in now if name not in had)]
        values = ((name, had.get(name, NOTHING), now.get(name, NOTHING)) for name in names)
        return [text for name, *both in values for text in _differences(f"{key}.{name}", *both)]
    had, now = (" ".join(value) if isinstance(value, list) else value for value in (had, now))
    return [] if had == now else [f"{key} is {had} in the record, {now} now"]


def _by_key(words: list[str]) -> dict[str, str]:
    """Return the values by key of ``key=value`` words; an arm's first word has no key, it is the kind."""
    pairs = (word.partition("=") for word in words)
    return {key if equals else "kind": value if equals else key for key, equals, value in pairs}


def write_record(path: Path, record: dict) -> None:
    """Write ``record`` to ``path``; the file appears whole or stays what it was."""
    write_whole(path, f"{as_json(record)}\n".encode())


def as_json(value: object, depth: int = 0) -> str:
    """Return JSON with one line per key and per list, so that hundreds of step times stay one line."""
    nested = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if not value or not (nested or isinstance(value, dict)):
        return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)
    if isinstance(value, dict):
        items, ends = [f"{json.dumps(key)}: {as_json(item, depth + 1)}" for key, item in value.items()], "{}"
    else:
        items, ends = [as_json(item, depth + 1) for item in value], "[]"
    inner = ",".join(f"\n{' ' * (depth + 1)}{item}" for item in items)
    return f"{ends[0]}{inner}\n{' ' * depth}{ends[1]}"
