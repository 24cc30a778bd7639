"""What a training is asked for, of our keys: in its arguments, in its ``cfg=`` file, and on the command line above it.

Where that file is the args.yaml of a run, what that run remembers counts, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from detgraph.cfg import (
    PYTHON_KEY,
    REPORT_NAME,
    CaptureOptionError,
    CaptureOptions,
    as_words,
    merge_options,
    remembered_options,
    split_options,
)

ambient_options: ContextVar[CaptureOptions | None] = ContextVar("ambient_options", default=None)
"""What the command line said, for the calls of `Model.train` below it. None: the command line did not say."""


def chosen_options(
    ours: Mapping[str, Any], cfg: Any = None, ambient: CaptureOptions | None = None
) -> CaptureOptions | None:
    """Return what a training is asked for: `merge_options`, over what the run remembers whose args.yaml `cfg` is.

    What is taken from there is said in one line.

    Raises:
        CaptureOptionError: If a value is not allowed. If the run's report cannot be used, and nobody gave an option.
    """
    remembered = None
    if ambient is None and PYTHON_KEY not in ours and isinstance(cfg, (str, Path)) and Path(cfg).name == "args.yaml":
        folder = Path(cfg).parent
        try:
            remembered = remembered_options(folder)
        except CaptureOptionError:
            if not ours:
                raise
    if remembered is not None and (taken := {k: v for k, v in remembered.asked.items() if k not in ours}):
        from ultralytics.utils import LOGGER

        LOGGER.info(f"{as_words(taken)}, as {folder / REPORT_NAME} has it. What you give yourself wins.")
    return merge_options(ours, ambient or remembered)


@contextmanager
def stock_yaml(cfg: Any) -> Iterator[tuple[str | None, dict[str, Any], dict[str, Any]]]:
    """Yield what upstream may read of the `cfg=` file: (path of a copy, our keys in it, all others).

    The path is None when the file holds none of our keys and can be read as it is. The copy lives as long as the
    context. A file that cannot be found or read is left for upstream to report.

    Raises:
        CaptureOptionError: If the file holds a misspelling of our keys, or a key for Python only.
    """
    from ultralytics.utils import YAML, checks

    content, file = {}, ""
    if cfg:
        with suppress(OSError, ValueError, AssertionError):
            file = checks.check_yaml(cfg)
            content = YAML.load(file)
    ours, rest = split_options(content, known_keys(), python=False)
    if not ours:
        yield None, {}, rest
        return
    with TemporaryDirectory(prefix="detgraph-") as folder:
        path = Path(folder) / Path(file).name
        YAML.save(path, rest)
        yield str(path), ours, rest


def known_keys() -> frozenset[str]:
    """Return upstream's own argument names, which are never taken for misspellings of ours."""
    from ultralytics.utils import DEFAULT_CFG_DICT

    return frozenset(DEFAULT_CFG_DICT)
