"""Which trainer trains: ours wherever upstream would have used its stock detection trainer, and no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from detgraph.cfg import CaptureOptions, as_words, check_contradictions, split_options

from .fit.asked import ambient_options, chosen_options, known_keys, stock_yaml


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
