"""`YOLO` with our keys as keyword arguments, for code that imports it from here instead of from ultralytics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ultralytics
from ultralytics.utils import LOGGER

from detgraph.cfg import as_words, check_contradictions, merge_options, refuse_outside_training, split_options
from detgraph.patches import route_train

from .fit.asked import known_keys
from .routing import route


class CaptureKeys:
    """Accepts our keys and `capture_options` where they mean something, and refuses them where they do not.

    A mixin over upstream's `Model` classes. Nothing else changes, and no patch has to be applied.
    """

    def train(self, trainer: Any = None, **kwargs: Any) -> Any:
        """Train as upstream does, with the capture where upstream would have used its stock detection trainer.

        Args:
            trainer: As upstream's. A subclass of `LightningDetectionTrainer` receives the options as well.
            **kwargs: Upstream's, and `capture_network` and `capture_objective` (True, False or "verify"),
                `capture_orthogonalization` (True or False) and `capture_options` (a `CaptureOptions` or a dict).

        Raises:
            CaptureOptionError: Before any work, for a value, a name or a combination that is not allowed.
        """
        return route(self, route_train.unpatched_train(), trainer, kwargs)

    def tune(self, use_ray: bool = False, iterations: int = 300, *args: Any, **kwargs: Any) -> Any:
        """Tune as upstream does. The trainings of a search run upstream's own command line or workers: eagerly.

        Raises:
            CaptureOptionError: Before any work, for a value, a name or a combination that is not allowed.
        """
        ours, rest = split_options(kwargs, known_keys())
        options = merge_options(ours)
        check_contradictions(options, rest)
        if options is not None and options.enabled:
            LOGGER.warning(
                f"{as_words(options.asked)} is not in force: the trainings that tune() starts run upstream's own "
                "command line or workers. Training eagerly."
            )
        return super().tune(use_ray, iterations, *args, **rest)

    def val(self, *args: Any, **kwargs: Any) -> Any:
        """Validate as upstream does. Raises `CaptureOptionError` for our keys."""
        _refuse("val", kwargs)
        return super().val(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as upstream does. Raises `CaptureOptionError` for our keys."""
        _refuse("predict", kwargs)
        return super().predict(*args, **kwargs)

    def track(self, *args: Any, **kwargs: Any) -> Any:
        """Track as upstream does. Raises `CaptureOptionError` for our keys."""
        _refuse("track", kwargs)
        return super().track(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export as upstream does. Raises `CaptureOptionError` for our keys."""
        _refuse("export", kwargs)
        return super().export(*args, **kwargs)

    def benchmark(self, *args: Any, **kwargs: Any) -> Any:
        """Benchmark as upstream does. Raises `CaptureOptionError` for our keys."""
        _refuse("benchmark", kwargs)
        return super().benchmark(*args, **kwargs)


class YOLO(CaptureKeys, ultralytics.YOLO):
    """Upstream's YOLO, and our keys in `train`.

    Like upstream's, an instance turns into a YOLOWorld, YOLOE or RTDETR when the model is one. Those are trained by
    upstream's trainers; they accept our keys with a warning.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream's constructor has turned this object into one of its classes; keep our keyword arguments on it.
        self.__class__ = _RELATIVES.get(type(self), type(self))


class YOLOWorld(CaptureKeys, ultralytics.YOLOWorld):
    """Upstream's YOLOWorld, as `YOLO` turns into it."""


class YOLOE(CaptureKeys, ultralytics.YOLOE):
    """Upstream's YOLOE, as `YOLO` turns into it."""


class RTDETR(CaptureKeys, ultralytics.RTDETR):
    """Upstream's RTDETR, as `YOLO` turns into it."""


_RELATIVES = {ultralytics.YOLOWorld: YOLOWorld, ultralytics.YOLOE: YOLOE, ultralytics.RTDETR: RTDETR}


def _refuse(mode: str, kwargs: Mapping[str, Any]) -> None:
    ours, _ = split_options(kwargs, known_keys())
    merge_options(ours)  # a value that is not allowed is said first
    refuse_outside_training(ours, mode)
