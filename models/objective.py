"""Whether a fit's objective is the one that upstream shipped, from which the layout contract of `view` was read.

An objective that was changed may read what a replay does not supply, or read it in another layout, and nothing would
tell. So everything that it calls is looked at: its class, those of its parts, their methods and the functions behind
them, wherever somebody may have put another one. Numbers and tensors that it holds may change as they like.

A function is upstream's when its code comes from the file of its module and it has the name that it is called by. That
holds whoever was imported first, and for no wrapper, ``partial`` or callable object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from operator import attrgetter, getitem, is_
from types import CodeType, FunctionType, ModuleType

import torch
from torch import nn

# What the objectives are made of: module of each class, and the classes of its parts by the attribute that holds them.
SHIPPED = {
    "E2ELoss": ("ultralytics.utils.loss", {"one2many": "v8DetectionLoss", "one2one": "v8DetectionLoss"}),
    "v8DetectionLoss": (
        "ultralytics.utils.loss",
        {"bce": "BCEWithLogitsLoss", "assigner": "TaskAlignedAssigner", "bbox_loss": "BboxLoss"},
    ),
    "BboxLoss": ("ultralytics.utils.loss", {"dfl_loss": "DFLoss"}),
    "DFLoss": ("ultralytics.utils.loss", {}),
    "TaskAlignedAssigner": ("ultralytics.utils.tal", {}),
    "BCEWithLogitsLoss": ("torch.nn.modules.loss", {}),
}
OBJECTIVES = ("E2ELoss", "v8DetectionLoss")
MAY_BE_NONE = ("dfl_loss",)
OF_EVERY_CLASS = ("__dict__", "__weakref__")
TRUSTED = ("ultralytics", "torch", "numpy", "math")  # packages whose modules and classes the functions name
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks") and "ward_" in name)  # of a call
IN_A_CONTEXT = torch.no_grad()(lambda: None).__code__  # what ``@torch.no_grad()`` puts around a function


def objective_blocker(network: nn.Module) -> str | None:
    """Return how the objective of a detection model differs from what upstream shipped, or None.

    A model without one is judged by the one that it would build in its first step. Called at every step: while nothing
    has changed since the last call, it costs some 25 microseconds.
    """
    criterion = getattr(network, "criterion", None)
    if criterion is None:
        criterion = network.init_criterion()
    if _shipped_classes().get(type(criterion)) not in OBJECTIVES:
        return f"objective {type(criterion).__qualname__} is not one of upstream's detection losses"
    change = _changed_part(criterion, "", _shipped_classes()) or _code().change()
    return change and f"objective: {change}"


def _changed_part(part: object, path: str, classes: dict[type, str]) -> str | None:
    """Return what differs in a part, whose class is right, or in parts of it; ``path`` is how to get there."""
    attributes = part.__dict__
    methods = _methods(type(part))
    if not methods.isdisjoint(attributes):
        return f"{path}{min(methods.intersection(attributes))}() was replaced on the instance"
    for hooks in HOOKS:
        if attributes.get(hooks):
            return f"a hook is registered on {path.rstrip('.')}"
    for name, expected in SHIPPED[classes[type(part)]][1].items():
        inner = getattr(part, name, None)
        if inner is None and name in MAY_BE_NONE:
            continue
        if classes.get(type(inner)) != expected:
            return f"{path}{name} is of class {type(inner).__qualname__}, not {expected}"
        if change := _changed_part(inner, f"{path}{name}.", classes):
            return change
    return None


@cache
def _methods(kind: type) -> frozenset[str]:
    """Return the names that an instance may not have for itself, or its class would not be asked."""
    return frozenset(dir(kind)) - {"__dict__", "__doc__", "__module__", "__weakref__"}


@cache
def _shipped_classes() -> dict[type, str]:
    """Return the classes that upstream's modules have under the known names; their code is looked at elsewhere."""
    found = {}
    for name, (module, _) in SHIPPED.items():
        kind = None
        with suppress(ImportError):  # a release that has moved it: the objective is another one
            kind = getattr(import_module(module), name, None)
        if isinstance(kind, type) and (kind.__module__, kind.__qualname__) == (module, name):
            found[kind] = name
    return found


class _Code:
    """The code behind the objectives: found and judged, and from then on compared with what was found right.

    What somebody has put there is not kept: it may hold on to a fit.
    """

    def __init__(self) -> None:
        self._owners: list[Mapping] = []
        self._names: list[str] = []
        self._values: list[object] = []
        self._functions: list[FunctionType] = []
        self._codes: list[CodeType] = []
        self._sizes: list[int] = []

    def change(self) -> str | None:
        """Return what is not upstream's, in words, or None."""
        if self._as_found_right():
            return None
        seen = list(_reachable())
        if words := next((words for *_, words in seen if words), None):
            return words
        self._owners, self._names, self._values = ([*column] for column in list(zip(*seen, strict=True))[:3])
        self._functions = [value for value in map(_innermost, self._values) if isinstance(value, FunctionType)]
        self._codes = [function.__code__ for function in self._functions]
        self._sizes = [len(vars(kind)) for kind in _shipped_classes()]
        return None

    def _as_found_right(self) -> bool:
        try:
            return (
                all(map(is_, map(getitem, self._owners, self._names), self._values))
                and all(map(is_, map(attrgetter("__code__"), self._functions), self._codes))
                and [len(vars(kind)) for kind in _shipped_classes()] == self._sizes
            )
        except KeyError:  # one is gone
            return False


@cache
def _code() -> _Code:
    return _Code()


def _reachable() -> Iterator[tuple[Mapping, str, object, str | None]]:
    """Yield what the objectives call: where it is kept, its name there, itself, and how it differs from upstream's."""
    ahead: list[FunctionType] = []
    for kind, name in _shipped_classes().items():
        for key, value in vars(kind).items():
            if key in OF_EVERY_CLASS or not (callable(value) or hasattr(type(value), "__get__")):
                continue
            fine = _is_from(value, SHIPPED[name][0], f"{name}.{key}")
            yield vars(kind), key, value, None if fine else f"{name}.{key}() was replaced on its class"
            ahead += [_innermost(value)] if fine else []
    known = set()
    while ahead:
        function = ahead.pop()
        if function in known:
            continue
        known.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if not (callable(value) or isinstance(value, ModuleType)):
                continue
            fine = _is_fine(name, value)
            where = function.__globals__.get("__name__")
            yield function.__globals__, name, value, None if fine else f"{name} was replaced in {where}"
            ahead += [_innermost(value)] if fine and isinstance(value, FunctionType) else []


def _is_fine(name: str, value: object) -> bool:
    """Return whether what a function finds under a global name is what upstream has put there."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in TRUSTED
    home = str(getattr(value, "__module__", None))
    if isinstance(value, type):
        return home.partition(".")[0] in TRUSTED and value.__name__ == name
    return home.startswith("ultralytics.") and _is_from(value, home, name)


def _is_from(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is the plain function of that qualified name from the source of ``module``."""
    function = _innermost(value)
    if not isinstance(function, FunctionType) or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return function.__code__.co_filename == file and function.__qualname__ == name


def _innermost(value: object) -> object:
    """Return the function inside ``@torch.no_grad()``; anything else is returned as it is, other wrappers too."""
    while isinstance(value, FunctionType) and value.__code__ is IN_A_CONTEXT:
        value = getattr(value, "__wrapped__", None)
    return value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
