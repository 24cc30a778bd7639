"""What a network's modules keep beside parameters and buffers, wherever it hangs: found once, compared, put back.

A replay runs no Python. A counter in a dictionary, a list that a hook fills, a BatchNorm in a plain list, a value in a
closure or a global name: an eager step moves them, the extra passes of a recording move them once more each, and a
replay not at all. So everything that is reachable from the modules is looked at before a step that may be recorded and
again after it. Tensors are no obstacle: recorded work moves them in place as it moves buffers, so they are copied,
proven and put back like those. Anything else that a step moves keeps it eager.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor, nn

from .contents import SCALARS, Other, cells, contents, difference, entries, fill, fill_cells, refill, refill_bytes
from .state import as_bytes
from .torch_private import own_tensors

INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in every module
SHARED = (random.random.__self__, np.random.rand.__self__)  # the process's own generators
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
CACHE = type(functools.cache(len))
WEAK = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
# What classes and functions of these keep for themselves is not the state of anybody's network.
LIBRARIES = frozenset({"torch", "torchvision", "ultralytics", "numpy", *sys.stdlib_module_names})
CLOSED = LIBRARIES - {"ultralytics", "types", "collections", "argparse", "_thread"}  # whose objects are not looked into
SHARING = ("multiprocessing", "ctypes", "_ctypes", "queue", "_queue")  # whose objects others may change
LARGEST = 100_000  # objects; a module that reaches more has hold of something that is not the network's


@dataclass(frozen=True)
class Held:
    """One place that holds values: ``read`` returns them, ``write`` puts such a list back."""

    path: str
    read: Callable[[], list]
    write: Callable[[list], None]


class Reach:
    """Everything that the modules of ``root`` reach, as it was when this was made.

    Tensors on the host, where ``device`` is another, are numbers: recorded work has their values baked in.

    Attributes:
        obstacle: what of it nobody can follow (a generator, an iterator, a weight that is no parameter), or None.
        tensors: the tensors by path that are neither parameters nor buffers of ``root``.
    """

    def __init__(self, root: nn.Module, name: str = "model", device: torch.device | None = None) -> None:
        self.obstacle: str | None = None
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self._held: list[Held] = []
        self._attributes: list[tuple[str, dict, dict]] = []  # of modules of ``root``, with copies
        self._seen: dict[int, object] = {}  # the objects, too: an address must not be taken over
        self._names: set[tuple[int, str]] = set()  # global names seen, by scope
        self._own = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self._modules = {id(module) for module in root.modules()}
        stack: list[tuple[str, object]] = []
        for path, module in reversed(list(root.named_modules())):
            stack.append((f"{name}.{path}" if path else name, module))
        while stack:
            stack += reversed(list(self._visit(*stack.pop())))
            if len(self._seen) > LARGEST:
                self.obstacle = f"the modules keep more than {LARGEST} objects beside their weights"
                break
        self._before = [contents(held.read()) for held in self._held]

    def change(self) -> str | None:
        """Return what is not as it was, tensors aside, or None."""
        for held, before in zip(self._held, self._before, strict=True):
            if (now := contents(held.read())) != before:
                return f"{held.path} {difference(before, now)}"
        for path, attributes, before in self._attributes:
            if (now := entries(attributes)) != (old := entries(before)):
                return f"{path} {difference(old, now)}"
        return None

    def restore(self) -> None:
        """Put everything but tensors back to where it was."""
        for held, before in zip(self._held, self._before, strict=True):
            if contents(held.read()) != before:
                held.write([self._seen.get(item.number, None) if type(item) is Other else item for item in before])
        for _, attributes, before in self._attributes:
            if entries(attributes) != entries(before):
                attributes.clear()
                attributes.update(before)

    def reader(self) -> Callable[[], list]:
        """Return what reads the present contents at once, to be compared between steps; paths are in ``paths``."""
        reads = [held.read for held in self._held]
        return lambda: [contents(read()) for read in reads]

    @property
    def paths(self) -> list[str]:
        return [held.path for held in self._held]

    def _visit(self, path: str, value: object) -> Iterator[tuple[str, object]]:
        """Note ``value`` and yield what it reaches, each with its path."""
        if isinstance(value, (*SCALARS, Enum, types.ModuleType)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        if isinstance(value, Tensor):
            self._visit_tensor(path, value)
        elif isinstance(value, GENERATORS):
            self._obstruct(f"random generator '{path}'")
        elif isinstance(value, nn.Module):
            yield from self._visit_module(path, value)
        elif isinstance(value, CONTAINERS):
            yield from self._visit_container(path, value)
        elif isinstance(value, np.ndarray):
            self._hold(path, lambda: [value.tobytes()], lambda old: fill(value, old[0]))
        elif isinstance(value, (bytearray, array)):
            self._hold(path, lambda: [bytes(value)], lambda old: refill_bytes(value, old[0]))
        elif isinstance(value, ContextVar):
            self._hold(path, lambda: [value.get(None)], lambda old: value.set(*old))
            yield path, value.get(None)
        elif isinstance(value, WEAK):
            target = value() if isinstance(value, weakref.ref) else value
            if id(target) not in self._own | self._modules:  # which live as long anyway
                self._obstruct(f"weak reference '{path}'")
        elif isinstance(value, CACHE):
            yield from self._visit_cache(path, value)
        elif isinstance(value, functools.partial):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, types.BuiltinFunctionType):
            if not any(value.__self__ is shared for shared in SHARED):
                yield f"{path}.__self__", value.__self__
        elif isinstance(value, types.MethodType):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("__func__", "__self__"))
        elif isinstance(value, types.FunctionType):
            yield from self._visit_function(path, value)
        elif isinstance(value, type):
            yield from self._visit_class(path, value)
        elif hasattr(kind, "__next__"):
            self._obstruct(f"iterator '{path}'")
        elif _package(kind) in SHARING:
            self._obstruct(f"object of class {kind.__qualname__} '{path}'")
        elif _package(kind) not in CLOSED or kind.__module__.startswith("torch.distributions"):
            yield from self._visit_object(path, value)

    def _obstruct(self, what: str) -> None:
        self.obstacle = self.obstacle or what

    def _hold(self, path: str, read: Callable[[], list], write: Callable[[list], None]) -> None:
        self._held.append(Held(path, read, write))

    def _visit_tensor(self, path: str, tensor: Tensor) -> None:
        if self.device is not None and tensor.device.type == "cpu" != self.device.type:
            self._hold(path, lambda: [bytes(as_bytes(tensor).numpy())], lambda old: None)  # put back with the buffers
        if id(tensor) in self._own:
            return
        if tensor.layout is not torch.strided:
            self._obstruct(f"tensor '{path}' of layout {tensor.layout}")
        elif tensor.requires_grad and tensor.is_leaf:  # its gradient would be left out of the recording
            self._obstruct(f"weight '{path}' that is no parameter of a module")
        self.tensors[path] = tensor

    def _visit_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
        attributes = vars(module)
        if id(module) in self._modules:  # what it holds by itself, the signature compares
            parts = [attributes, *(value for key, value in attributes.items() if key in INTERNAL)]
            self._attributes += [(path, part, dict(part)) for part in parts if isinstance(part, dict)]
            attributes = {key: value for key, value in attributes.items() if key not in INTERNAL}
            yield from ((f"{path}.{key}", tensor) for key, tensor in own_tensors(module) if tensor is not None)
        else:
            self._hold_attributes(path, attributes)
        yield from ((f"{path}.{key}", value) for key, value in attributes.items())
        yield type(module).__qualname__, type(module)

    def _visit_container(self, path: str, value) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            self._hold_attributes(path, value)
            yield from ((f"{path}[{key!r}]", key) for key in value if not isinstance(key, SCALARS))
            yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
            return
        if not isinstance(value, (tuple, frozenset)):  # which hold what they held: only that can have moved
            self._hold(path, lambda: list(value), functools.partial(refill, value))
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))

    def _visit_cache(self, path: str, cached) -> Iterator[tuple[str, object]]:
        """Follow what a function's cache holds. A call that finds its result there moves nothing, another one does."""
        self._hold(f"cache of {path}", lambda: [cached.cache_info().misses], lambda old: None)
        for item in gc.get_referents(cached):
            if type(item) is dict and cached.cache_parameters()["maxsize"] is None:
                yield from ((f"{path}()", result) for result in item.values())
            elif not (type(item) is dict and any(type(link).__name__ == "_lru_list_elem" for link in item.values())):
                yield f"{path}()", item

    def _visit_object(self, path: str, value: object) -> Iterator[tuple[str, object]]:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._hold_attributes(path, attributes)
            yield from ((f"{path}.{key}", item) for key, item in attributes.items())
        slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
        slots = [name for name in slots if name not in ("__dict__", "__weakref__")]
        if slots:
            read = lambda: [getattr(value, name, None) for name in slots]  # noqa: E731
            self._hold(path, read, lambda old: [setattr(value, n, v) for n, v in zip(slots, old, strict=True)])
            yield from ((f"{path}.{name}", item) for name, item in zip(slots, read(), strict=True))
        yield type(value).__qualname__, type(value)

    def _visit_class(self, path: str, cls: type) -> Iterator[tuple[str, object]]:
        for owner in cls.__mro__:
            names = [n for n, v in vars(owner).items() if not (n.startswith("__") or hasattr(type(v), "__get__"))]
            for name in names if _package(owner) not in LIBRARIES else ():
                self._hold(
                    f"{owner.__qualname__}.{name}",
                    lambda owner=owner, name=name: [vars(owner).get(name)],
                    lambda old, owner=owner, name=name: setattr(owner, name, *old),
                )
                yield f"{owner.__qualname__}.{name}", vars(owner)[name]
            if _package(owner) not in LIBRARIES:  # methods, and what is new
                self._hold(f"class {owner.__qualname__}", lambda owner=owner: [*vars(owner).values()], lambda old: None)
            for name, value in vars(owner).items():  # of a library's class, too: a method may have been replaced
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    yield f"{owner.__qualname__}.{name}", function

    def _visit_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        if _package(function) in LIBRARIES:
            return
        if closure := function.__closure__:
            read = functools.partial(cells, closure)
            self._hold(path, read, functools.partial(fill_cells, closure))
            yield from ((f"{path}.{name}", v) for name, v in zip(function.__code__.co_freevars, read(), strict=True))
        yield f"{path}.__defaults__", function.__defaults__
        yield f"{path}.__kwdefaults__", function.__kwdefaults__
        yield f"{path}.__dict__", vars(function)
        used, scope = _global_names(function.__code__), function.__globals__
        yield from self._visit_names("global ", scope, used)
        modules = [scope.get(name, sys.modules.get(name)) for name in used]  # one may be imported inside
        while modules:
            module = modules.pop()
            if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] not in LIBRARIES:
                yield from self._visit_names(f"{module.__name__}.", vars(module), used)
                inner = [vars(module).get(name) for name in used]
                modules += [m for m in inner if getattr(m, "__name__", "").startswith(f"{module.__name__}.")]

    def _visit_names(self, where: str, scope: dict, used: list[str]) -> Iterator[tuple[str, object]]:
        for name in used:
            if name not in scope or (id(scope), name) in self._names:
                continue
            self._names.add((id(scope), name))
            if not isinstance(scope[name], types.ModuleType):
                write = lambda old, n=name: scope.__setitem__(n, *old)  # noqa: E731
                self._hold(where + name, lambda n=name: [scope.get(n)], write)
            yield where + name, scope[name]

    def _hold_attributes(self, path: str, attributes: dict) -> None:
        def write(old: list) -> None:
            half = len(old) // 2
            attributes.clear()
            attributes.update(zip(old[:half], old[half:], strict=True))

        self._hold(path, lambda: [*attributes.keys(), *attributes.values()], write)


def _package(value: type | types.FunctionType) -> str:
    """Return the top package that a class or a function is from; a function is from where its global names are."""
    name = value.__module__ if isinstance(value, type) else value.__globals__.get("__name__")
    return str(name).partition(".")[0]


def _slots(cls: type) -> list[str]:
    """Return the names of the slots of a class itself, private ones as the interpreter spells them."""
    slots = vars(cls).get("__slots__", ())
    private = f"_{cls.__name__.lstrip('_')}"
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]


def _global_names(code: types.CodeType) -> list[str]:
    """Return the global names that ``code`` may use, functions inside it included."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))
