"""The options of a captured fit: read, validated, compared with what else the user asked for.

Everything here is a pure function of its arguments and of `capture.yaml`, so a bad request dies before torch is even
imported. Errors follow one form: the value, the key, what is allowed, and the way out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

_SPEC = yaml.safe_load(Path(__file__).with_name("capture.yaml").read_text(encoding="utf-8"))
_KEYS, _OPTIONS = _SPEC["keys"], _SPEC["options"]

COMMAND_LINE_KEYS = tuple(_KEYS)
PYTHON_KEY = "capture_options"
REPORT_NAME = "capture.json"
REPORT_SCHEMA = 1  # of the reports that are written, and the only one that is read
VALUE_WORDS = frozenset(str(value).lower() for spec in _KEYS.values() for value in spec["allowed"])

_WORDS = {"true": True, "false": False}  # what a shell or a quoted yaml value hands over instead of a bool
_MODES = frozenset({"val", "predict", "export", "track", "benchmark"})  # upstream's modes that train nothing


class CaptureOptionError(ValueError):
    """A request that cannot be honoured: an unknown value, a misspelt key, or two keys that contradict each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureOptions:
    """What the user asked of one fit. Immutable and always valid.

    Attributes:
        capture_network: True, False or "verify". The words "true", "false" and "verify" are accepted in any case, as
            on a command line; numbers and None are not.
        capture_objective: True, False or "verify", in the same spellings; needs `capture_network`.
        capture_orthogonalization: True or False, in the same spellings.
        record_at_step: Index of the first training batch of a fit whose network may be recorded.
        max_recordings: Most recordings one fit may make, counted apart for each part.
        self_check: Whether a recording is proven against an eager step before it counts.

    Raises:
        CaptureOptionError: If a value is not allowed, or a key lacks the one that it needs.
    """

    capture_network: bool | str = _KEYS["capture_network"]["default"]
    capture_objective: bool | str = _KEYS["capture_objective"]["default"]
    capture_orthogonalization: bool = _KEYS["capture_orthogonalization"]["default"]
    record_at_step: int = _OPTIONS["record_at_step"]["default"]
    max_recordings: int = _OPTIONS["max_recordings"]["default"]
    self_check: bool = _OPTIONS["self_check"]["default"]

    def __post_init__(self) -> None:
        for name in _KEYS:
            object.__setattr__(self, name, _checked_choice(name, getattr(self, name)))
        for name in ("record_at_step", "max_recordings"):
            value, minimum = getattr(self, name), _OPTIONS[name]["minimum"]
            if type(value) is not int or value < minimum:  # bool is an int for isinstance
                raise CaptureOptionError(f"{name}={value!r} is not allowed: give an integer of {minimum} or more.")
        if type(self.self_check) is not bool:
            raise CaptureOptionError(f"self_check={self.self_check!r} is not allowed: give True or False.")
        if self.capture_objective is not False and self.capture_network is False:
            raise CaptureOptionError(
                f"capture_objective={self.capture_objective} needs capture_network: it replays what is made of the "
                "recorded network's predictions. Write capture_network=True, too."
            )

    @property
    def asked(self) -> dict[str, bool | str]:
        """The keys that ask for something to be recorded, with their values."""
        return {name: value for name in _KEYS if (value := getattr(self, name)) is not False}

    @property
    def enabled(self) -> bool:
        """Whether the fit may record and replay anything at all."""
        return bool(self.asked)

    @property
    def network(self) -> bool:
        """Whether the fit may record and replay the network."""
        return "capture_network" in self.asked

    @property
    def verify(self) -> bool:
        """Whether every replayed step of the network is checked against an eager one."""
        return self.capture_network == "verify"

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain data, as `capture.json` keeps them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaptureOptions:
        """Build options from plain data.

        Raises:
            CaptureOptionError: If `data` is no mapping, holds an unknown name, or a value that is not allowed.
        """
        if not isinstance(data, Mapping):
            raise CaptureOptionError(f"{PYTHON_KEY}={data!r} is not allowed: give a CaptureOptions or a dict.")
        names = [field.name for field in fields(cls)]
        for name in data:
            if name not in names:
                raise CaptureOptionError(f"'{name}' is not an option of the capture: known are {', '.join(names)}.")
        return cls(**data)


def split_options(
    mapping: Mapping[str, Any], known: Collection[str] = (), *, python: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into ours and the rest, without touching `mapping`.

    Args:
        mapping: Arguments by name, from a command line, a yaml file or keyword arguments.
        known: Names that belong to somebody else and are never taken for a misspelling of ours.
        python: Whether `mapping` comes from Python, where `capture_options` is allowed as well.

    Returns:
        Our arguments, unvalidated, and all others in their order.

    Raises:
        CaptureOptionError: If a name is a near miss of one of ours, or one that only Python can give.
    """
    ours = {k: v for k, v in mapping.items() if k in _KEYS or k == PYTHON_KEY}
    rest = {k: v for k, v in mapping.items() if k not in ours}
    if PYTHON_KEY in ours and not python:
        raise CaptureOptionError(
            f"'{PYTHON_KEY}' exists in Python only: train({PYTHON_KEY}=CaptureOptions(...)). "
            "Here, write capture_network=True."
        )
    for name in rest:
        if isinstance(name, str) and name not in known:
            refuse_near_miss(name)
    return ours, rest


def refuse_near_miss(name: str) -> None:
    """Raise CaptureOptionError if `name` looks like one of our keys, misspelt, or is a Python-level option."""
    if name in _OPTIONS:
        raise CaptureOptionError(
            f"'{name}' is an option of the capture, not a key of its own. "
            f"In Python, write train({PYTHON_KEY}=CaptureOptions(capture_network=True, {name}=...))."
        )
    spelt = name.lower().replace("-", "_").strip("_")
    close = get_close_matches(spelt, [*_KEYS, PYTHON_KEY], n=1, cutoff=0.75)
    if "cudagraph" in spelt.replace("_", ""):  # as other trainers name the like
        close = ["capture_network"]
    if spelt.startswith("capture"):
        begun = [name for name in _KEYS if name.startswith(spelt)]
        close = begun or close or get_close_matches(spelt, _KEYS, n=1, cutoff=0)
    if close:
        raise CaptureOptionError(f"'{name}' is not a valid argument. Did you mean {close[0]}=...?")


def merge_options(ours: Mapping[str, Any], ambient: CaptureOptions | None = None) -> CaptureOptions | None:
    """Validate what `split_options` took out and lay it over `ambient`.

    A `capture_options` value replaces `ambient`; a command-line key then replaces that one field.

    Returns:
        The options, or None if nobody gave any: a resumed fit then asks `remembered_options`, which a False would hide.

    Raises:
        CaptureOptionError: If a value is not allowed.
    """
    options = ambient
    if PYTHON_KEY in ours:
        given = ours[PYTHON_KEY]
        options = given if isinstance(given, CaptureOptions) else CaptureOptions.from_dict(given)
    given = {k: v for k, v in ours.items() if k in _KEYS}
    return replace(options or CaptureOptions(), **given) if given else options


def refuse_outside_training(ours: Mapping[str, Any], mode: str) -> None:
    """Refuse our arguments, as `split_options` took them out, where nothing is trained.

    Args:
        ours: Our arguments; none are no matter.
        mode: Upstream's mode, or the name of a command.

    Raises:
        CaptureOptionError: If there are any and `mode` is not "train"; it names those that were given.
    """
    if ours and mode != "train":
        kind = "mode" if mode in _MODES else "command"
        raise CaptureOptionError(
            f"{as_words(ours)} has no meaning for {kind} '{mode}': only training records anything. "
            f"Leave {' and '.join(ours)} out, or use mode 'train'."
        )


def check_contradictions(options: CaptureOptions | None, args: Mapping[str, Any]) -> None:
    """Refuse requests that cannot both be met. `options` is None when the user gave none, and then all is well.

    Args:
        options: The options the user gave.
        args: Upstream's arguments beside them.

    Raises:
        CaptureOptionError: If `compile` is on together with `capture_network`.
    """
    if options is not None and options.network and (compiled := args.get("compile")):
        raise CaptureOptionError(
            f"capture_network={options.capture_network} and compile={compiled} contradict each other: the capture "
            "replays the network as eager mode runs it, bit for bit, and torch.compile computes another one. "
            "Set compile=False to capture, or capture_network=False to compile."
        )


def min_torch(precision: str) -> str:
    """Return the oldest torch version whose replay is used for 'fp32', 'fp16' or 'bf16'.

    Raises:
        ValueError: If the precision is another.
    """
    try:
        return _SPEC["precision"][precision]
    except KeyError:
        raise ValueError(f"precision {precision!r} is unknown: known are {', '.join(_SPEC['precision'])}.") from None


def precision_blocker(precision: str, torch_version: str) -> str | None:
    """Return why `torch_version` (as in `torch.__version__`) cannot replay `precision`, or None if it can.

    Raises:
        ValueError: If the precision or the form of the version is unknown.
    """
    oldest = min_torch(precision)
    if _release(torch_version) >= _release(oldest):
        return None
    return f"{precision} replay needs torch {oldest} or newer, this is {torch_version}"


def remembered_options(run_dir: str | Path) -> CaptureOptions | None:
    """Return the options that `capture.json` of an earlier fit remembers, or None if there is no such file.

    Raises:
        CaptureOptionError: If the file is there and cannot be used: empty, broken, of another program or schema.
    """
    path = Path(run_dir) / REPORT_NAME
    try:
        return _reported_options(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:  # a CaptureOptionError is a ValueError
        raise CaptureOptionError(
            f"{path} cannot be used ({e}), so the options of the earlier fit are unknown. Give capture_network=True or "
            "capture_network=False, or move the file away to train eagerly."
        ) from e


def _reported_options(text: str) -> CaptureOptions:
    """Return the options in a report's text. Raises ValueError, saying what the text is instead."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not JSON: {e}") from e
    schema, options = (content.get(key) for key in ("schema", "options")) if isinstance(content, dict) else (None, None)
    if type(schema) is not int:  # nor a bool
        raise ValueError("it is no report of detgraph: it has no number of a schema")
    if schema != REPORT_SCHEMA:
        raise ValueError(f"its schema is {schema}, and this version reads {REPORT_SCHEMA}: another version wrote it")
    if not isinstance(options, dict) or not options.keys() & _KEYS.keys():
        raise ValueError(f"it is no report of detgraph: its 'options' have no {' or '.join(_KEYS)}")
    return CaptureOptions.from_dict(options)


def as_words(given: Mapping[str, Any]) -> str:
    """Return keys with their values as on a command line: "capture_network=True capture_orthogonalization=True"."""
    return " ".join(f"{name}={value}" for name, value in given.items())


def describe_options() -> str:
    """Return the keys and options with default, allowed values and help, as `yolo cfg` prints them."""
    lines = ["# detgraph"]
    for name, spec in _KEYS.items():
        lines.append(f"{name}: {spec['default']} # {spec['help']} ({', '.join(map(str, spec['allowed']))})")
    lines.append(f"# Python only, in train({PYTHON_KEY}=...)")
    lines += [f"#   {name}: {spec['default']} # {spec['help']}" for name, spec in _OPTIONS.items()]
    return "\n".join(lines)


def _checked_choice(name: str, value: Any) -> bool | str:
    """Return `value` as one of the allowed values of key `name`."""
    allowed = _KEYS[name]["allowed"]
    found = _WORDS.get(value.lower(), value.lower()) if isinstance(value, str) else value
    for choice in allowed:
        if type(found) is type(choice) and found == choice:  # True == 1, but 1 is no answer to this question
            return choice
    raise CaptureOptionError(f"{name}={value} is not allowed: write {' or '.join(f'{name}={c}' for c in allowed)}.")


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"version {version!r} does not start with two numbers")
    return int(match[1]), int(match[2])
