"""What users keep and change in places that are easy to overlook: noticed, or put back as it was.

Each case was wrong once, and none of them said so.
"""

from __future__ import annotations

import contextvars
import functools
import multiprocessing
import random
import sys
import threading
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steps import Wrapped, twin, wrap

GATE = contextvars.ContextVar("gate", default=1.0)
OWNED: list = []
activation = F.silu
package = types.ModuleType("eyes_package")
package.inner = types.ModuleType("eyes_package.inner")
sys.modules |= {module.__name__: module for module in (package, package.inner)}


@functools.lru_cache
def settings() -> SimpleNamespace:
    return SimpleNamespace(gate=1.0)


@functools.cache
def table() -> dict:
    return {"gate": 1.0}


class Slots:
    __slots__ = ("__gate",)

    def __init__(self) -> None:
        self.__gate = 1.0

    def get(self) -> float:
        return self.__gate

    def put(self, value: float) -> None:
        self.__gate = value


class Schedule:
    gate = 1.0


class Gated(Wrapped):
    """Multiplies by what ``gate`` returns; ``put`` is how a callback changes it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.put(1.0)

    def forward(self, x):
        return self.inner(x) * self.gate()


class InLruCache(Gated):
    gate = lambda self: settings().gate  # noqa: E731
    put = lambda self, value: setattr(settings(), "gate", value)  # noqa: E731


class InCache(Gated):
    gate = lambda self: table()["gate"]  # noqa: E731
    put = lambda self, value: table().update(gate=value)  # noqa: E731


class InContextVariable(Gated):
    gate = lambda self: GATE.get()  # noqa: E731
    put = lambda self, value: GATE.set(value) and None  # noqa: E731


class InKeywordDefault(Gated):
    def gate(self, *, kept={}):  # noqa: B006
        return kept.get("gate", 1.0)

    def put(self, value: float) -> None:
        type(self).gate.__kwdefaults__["kept"]["gate"] = value


class InThread(Gated):
    gate = lambda self: self.local.gate  # noqa: E731

    def put(self, value: float) -> None:
        if "local" not in vars(self):
            self.local = threading.local()
        self.local.gate = value


class InBytes(Gated):
    gate = lambda self: self.bytes[0] / 2  # noqa: E731

    def put(self, value: float) -> None:
        if "bytes" not in vars(self):
            self.bytes = bytearray(1)
        self.bytes[0] = int(2 * value)


class InPrivateSlot(Gated):
    gate = lambda self: self.slots.get()  # noqa: E731

    def put(self, value: float) -> None:
        if "slots" not in vars(self):
            self.slots = Slots()
        self.slots.put(value)


class InDistribution(Gated):
    gate = lambda self: self.kept.mean  # noqa: E731

    def put(self, value: float) -> None:
        if "kept" not in vars(self):
            self.kept = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
        self.kept.loc = torch.full((1,), value)


class InPackage(Gated):
    gate = lambda self: package.inner.GATE  # noqa: E731
    put = lambda self, value: setattr(package.inner, "GATE", value)  # noqa: E731


class InLocalImport(Gated):
    def gate(self):
        from eyes_package import inner

        return inner.GATE

    put = lambda self, value: setattr(package.inner, "GATE", value)  # noqa: E731


class InNewClassAttribute(Gated):
    gate = lambda self: getattr(type(self), "later", 1.0)  # noqa: E731

    def put(self, value: float) -> None:
        delattr(InNewClassAttribute, "later") if value == 1.0 and hasattr(type(self), "later") else None
        setattr(InNewClassAttribute, "later", value) if value != 1.0 else None


class InMethod(Gated):
    gate = lambda self: 1.0  # noqa: E731
    put = lambda self, value: setattr(InMethod, "gate", lambda self: value)  # noqa: E731


class InGlobalFunction(Gated):
    gate = lambda self: activation(torch.ones(1))  # noqa: E731

    def put(self, value: float) -> None:
        global activation
        activation = F.silu if value == 1.0 else F.relu


CHANGED = (InLruCache, InCache, InContextVariable, InKeywordDefault, InThread, InBytes, InPrivateSlot, InDistribution)
CHANGED += (InPackage, InLocalImport, InNewClassAttribute, InMethod, InGlobalFunction)


@pytest.mark.parametrize("kind", CHANGED, ids=lambda kind: kind.__name__)
def test_what_a_callback_changes_retires_the_recording(kind):
    pair = twin({3: lambda fit: fit.layer("3").put(0.5)}, prepare=wrap(kind))
    pair.assert_same(replayed=5)
    assert len(pair.reasons) == 1 and " changed: " in pair.reasons[0]


class InWeakReference(Gated):
    gate = lambda self: self.ref().gate  # noqa: E731

    def put(self, value: float) -> None:
        if "ref" not in vars(self):
            globals()["OWNED"][:] = [Schedule()]
            self.ref = weakref.ref(globals()["OWNED"][0])
        self.ref().gate = value


class InSharedMemory(Gated):
    gate = lambda self: self.shared.value  # noqa: E731

    def put(self, value: float) -> None:
        if "shared" not in vars(self):
            self.shared = multiprocessing.Value("d", 0.0)
        self.shared.value = value


class InBoundMethod(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.draw = random.Random(5).random

    def forward(self, x):
        return self.inner(x) * (0.5 if self.draw() < 0.4 else 1.0)

    def put(self, value: float) -> None:
        pass


OBSTACLES = {
    InWeakReference: "weak reference 'model.3.ref'",
    InSharedMemory: "object of class Synchronized 'model.3.shared'",
    InBoundMethod: "random generator 'model.3.draw.__self__'",
}


@pytest.mark.parametrize("kind", OBSTACLES, ids=lambda kind: kind.__name__)
def test_what_nobody_can_follow_keeps_the_fit_eager(kind):
    pair = twin({3: lambda fit: fit.layer("3").put(0.5)}, prepare=wrap(kind))
    pair.assert_same(replayed=0)
    assert pair.report.blocked == OBSTACLES[kind]


def test_a_weak_reference_to_a_part_of_the_network_is_no_obstacle():
    def prepare(model: nn.Module) -> None:
        model.model[3].parent = weakref.ref(model.model[2])

    twin(prepare=prepare).assert_same(replayed=6)
