"""Patch: train stock detectors with `LightningDetectionTrainer`.

What: `Model.train` takes our keys out of its arguments and, where upstream would have used the stock
    `DetectionTrainer` itself, trains with ours. World, YOLOE, RTDETR, other tasks and trainers that a user chose stay
    as they are, with one warning when the capture was asked for.
Why not a subclass: `detgraph.trainer.YOLO` is that subclass, and shares `route` below. But upstream's command line and
    every script with `from ultralytics import YOLO` build upstream's own classes by name.
Target: `ultralytics.engine.model.Model.train`
Upstream versions: 8.4.183 to 8.4.190
Forwarded: no. Upstream accepts `trainer=`, which is all the call needs; the choice of the default is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
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
    check_contradictions,
    merge_options,
    remembered_options,
    split_options,
)
from detgraph.patches.registry import Patch

ambient_options: ContextVar[CaptureOptions | None] = ContextVar("ambient_options", default=None)
"""What the command line said, for the calls of `Model.train` below it. None: the command line did not say."""


def route(model: Any, upstream_train: Callable[..., Any], trainer: Any, kwargs: Mapping[str, Any]) -> Any:
    """Train `model` by `upstream_train`, with our trainer where it stands in for upstream's stock detection trainer.

    Args:
        model: Upstream's `Model`, of any class.
        upstream_train: Upstream's `Model.train` itself, as a function of the model.
        trainer: The trainer the caller chose, or None.
        kwargs: The caller's arguments, ours among them. They win over a `cfg=` yaml, that over `ambient_options`, and
            those over what the run remembers whose args.yaml it is.

    Raises:
        CaptureOptionError: Before any work, for a value, a name or a combination that is not allowed.
    """
    ours, kwargs = split_options(kwargs, known_keys())
    with stock_yaml(kwargs.get("cfg")) as (path, yaml_ours, yaml_rest):
        options = chosen_options({**yaml_ours, **ours}, kwargs.get("cfg"), ambient_options.get())
        check_contradictions(options, {**yaml_rest, **kwargs})

        # Upstream trains on several data sets in processes that run its own command line, from a half-precision copy of
        # the weights. With a trainer or a callback it trains here, from the weights themselves: to name a trainer
        # where nobody did would train other weights.
        data = kwargs.get("data") or yaml_rest.get("data")
        elsewhere = isinstance(data, (list, tuple)) and trainer is None and not _has_callbacks(model)
        if trainer is None and _would_be_stock(model) and not elsewhere:
            trainer = _our_trainer()

        if options is not None and _is_ours(trainer):
            kwargs["capture_options"] = options  # our trainer takes it out of its overrides before upstream sees them
        elif options is not None and options.enabled:
            _warn_not_in_force(model, trainer, options, elsewhere)

        if path is not None:
            if not elsewhere:  # those processes are not told about cfg= at all
                trainer = _remembering(trainer or model._smart_load("trainer"), kwargs["cfg"])
            kwargs["cfg"] = path
        return upstream_train(model, trainer=trainer, **kwargs)


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


def unpatched_train() -> Callable[..., Any]:
    """Return upstream's `Model.train` itself, whether the patch is applied or not."""
    return patch.original


def _would_be_stock(model: Any) -> bool:
    """Whether upstream would train `model` with the stock detection trainer, not a relative of it."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    try:
        return model._smart_load("trainer") is DetectionTrainer
    except NotImplementedError:  # a model that cannot be trained: upstream says so better
        return False


def _has_callbacks(model: Any) -> bool:
    """Whether somebody has added a callback to `model`, as upstream tells it."""
    from ultralytics.utils import callbacks

    return model.callbacks != callbacks.get_default_callbacks()


def _our_trainer() -> type:
    from detgraph.trainer import LightningDetectionTrainer  # late: the trainer imports this package

    return LightningDetectionTrainer


def _is_ours(trainer: Any) -> bool:
    return isinstance(trainer, type) and issubclass(trainer, _our_trainer())


def _warn_not_in_force(model: Any, trainer: Any, options: CaptureOptions, elsewhere: bool) -> None:
    from ultralytics.utils import LOGGER

    if trainer is not None:
        why = f"trainer={getattr(trainer, '__name__', trainer)} was chosen, and it is no LightningDetectionTrainer"
    elif model.task != "detect":
        why = f"the task is '{model.task}', and only 'detect' can be recorded"
    elif not _would_be_stock(model):
        why = f"{type(model).__name__} trains its models with a trainer of its own"
    else:
        assert elsewhere, "nothing keeps our trainer from training"
        why = (
            "with several in data=, upstream's own command line trains one data set after another, from a "
            "half-precision copy of the weights. To capture, train on one data set at a time, or give "
            "trainer=LightningDetectionTrainer, which trains here, from the weights as they are"
        )
    LOGGER.warning(f"{as_words(options.asked)} is not in force: {why}. Training eagerly.")


def _remembering(trainer: Any, cfg: Any) -> Callable[..., Any]:
    """Return `trainer` as upstream calls it, told the user's own `cfg=` path: args.yaml must not name the copy."""

    def build(overrides: dict[str, Any], _callbacks: Any = None) -> Any:
        return trainer(overrides={**overrides, "cfg": cfg}, _callbacks=_callbacks)

    return build


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self, trainer=None, **kwargs):
        return route(self, original, trainer, kwargs)

    return train


patch = Patch(
    name="route_train",
    target="ultralytics.engine.model:Model.train",
    what="stock detectors train with LightningDetectionTrainer; train() accepts our keys",
    signature="(self, trainer=None, **kwargs)",
    fingerprints={"0f85d61a53464cf66bea51b5cf9135857b218c280aef0582fae3ae2b0454344e": "8.4.190"},
    replacement=_patched,
)
