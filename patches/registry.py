"""What is known of upstream, and how a patch on it is checked, applied and taken back.

What we rely on is one attribute of one upstream class or module, the signature it was read with, and fingerprints of
its source. Anything else is drift, and drift is refused: nobody guesses.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IRRELEVANT = frozenset({"ctx", "kind", "type_comment"})  # spelling, not meaning
_UNSET = object()


class PatchDriftError(RuntimeError):
    """The installed upstream, or somebody else's patch, is not what one of our patches was written against."""


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """One line of `yolo patches`. `drift` says why what is installed is not what we know, or is None."""

    name: str
    target: str
    what: str
    applied: bool
    drift: str | None


@dataclass(frozen=True, slots=True)
class Known:
    """One attribute of upstream's as it was read: what a patch replaces, or what our loop restates.

    Args:
        target: Dotted module, a colon, and the attribute's path: "package.module:Class.method".
        fingerprints: `fingerprint(target)` -> the upstream versions that have it.
        signature: Its parameters and defaults, without annotations: "(self, trainer=None, **kwargs)". None: any.
    """

    target: str
    fingerprints: Mapping[str, str]
    signature: str | None = None

    @property
    def releases(self) -> str:
        """The upstream versions that have what is known, as text."""
        return ", ".join(sorted(set(self.fingerprints.values())))

    def place(self) -> tuple[Any, str]:
        """Return the class or module that has the attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        *owners, attribute = path.split(".")
        place = importlib.import_module(module)
        for owner in owners:
            place = getattr(place, owner)
        return place, attribute

    def current(self) -> Any:
        """Return what the attribute is right now: the object itself, not what a descriptor makes of it."""
        place, attribute = self.place()
        return vars(place)[attribute]

    def installed(self) -> str:
        """Return the fingerprint of what the attribute is right now; raises as `fingerprint` does."""
        return fingerprint(self.current())

    def drift(self) -> str | None:
        """Return why the attribute is not the known one, or None."""
        try:
            current = self.current()
        except (ImportError, AttributeError, KeyError) as e:
            return f"it is gone ({type(e).__name__}: {e})"
        try:
            if self.signature is not None and (found := _signature(current)) != self.signature:
                return f"its signature is {found}, expected {self.signature}"
            if (found := self.installed()) not in self.fingerprints:
                return f"its source has changed (fingerprint {found[:12]})"
        except (TypeError, ValueError, OSError, SyntaxError) as e:  # no source, or not a function at all
            return f"it cannot be inspected ({type(e).__name__}: {e})"
        return None


class Patch:
    """One reversible replacement of one upstream attribute.

    Args:
        name: Name of the patch, which is its module's name.
        known: The attribute, as the patch was written against it.
        what: One line that says what changes.
        replacement: Takes the original object and returns the one to put in its place.
        on_request: Whether `apply()` leaves it out: whoever needs the patch applies it, and takes it back.
    """

    def __init__(
        self,
        *,
        name: str,
        known: Known,
        what: str,
        replacement: Callable[[Any], Any],
        on_request: bool = False,
    ) -> None:
        self.name, self.known, self.what = name, known, what
        self.replacement, self.on_request = replacement, on_request
        self._original = self._installed = _UNSET

    @property
    def applied(self) -> bool:
        """Whether the target is our replacement right now."""
        return self._installed is not _UNSET and self.known.current() is self._installed

    @property
    def original(self) -> Any:
        """What the target is without this patch."""
        return self._original if self.applied else self.known.current()

    def drift(self) -> str | None:
        """Return why the patch cannot be applied now, or None. An applied patch does not drift."""
        return None if self.applied else self.known.drift()

    def apply(self) -> None:
        """Put the replacement in place. Does nothing if it is there already.

        Raises:
            PatchDriftError: If the target is not what the patch was written against. Nothing is changed then.
        """
        if self.applied:
            return
        if (drift := self.drift()) is not None:
            raise PatchDriftError(self._refusal(drift))
        self._original = self.known.current()
        self._installed = self.replacement(self._original)
        setattr(*self.known.place(), self._installed)

    def revert(self) -> None:
        """Put the very object back that was there before. Does nothing if the patch is not applied.

        Raises:
            PatchDriftError: If somebody replaced the target after us: taking ours back would take theirs as well.
        """
        if self._installed is _UNSET:
            return
        if not self.applied and self.known.current() is not self._original:
            raise PatchDriftError(
                f"patch '{self.name}' cannot be reverted: {self.known.target} was replaced after it, by "
                f"{self.known.current()!r}. Undo that replacement first, then revert."
            )
        if self.applied:
            setattr(*self.known.place(), self._original)
        self._original = self._installed = _UNSET

    def status(self) -> PatchStatus:
        """Return the patch's line of `yolo patches`."""
        return PatchStatus(self.name, self.known.target, self.what, self.applied, self.drift())

    def _refusal(self, drift: str) -> str:
        known, installed, supported = self.known, _upstream_version(), self.known.releases
        return (
            f"patch '{self.name}' does not fit {known.target}: {drift}. Installed is ultralytics {installed}, "
            f"supported is {supported}. Install a supported version (pip install ultralytics=={supported}), undo other "
            "patches on the same target, or train without the capture."
        )


@cache
def series() -> tuple[Patch, ...]:
    """Return the patches in the order of `patches/series`."""
    lines = Path(__file__).with_name("series").read_text(encoding="utf-8").splitlines()
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    return tuple(importlib.import_module(f"detgraph.patches.{name}").patch for name in names)


def apply() -> None:
    """Apply the series, in order, but for what is applied on request only. What is applied already stays.

    Raises:
        PatchDriftError: If a patch does not fit the installed upstream. Then this call has applied none.
    """
    done: list[Patch] = []
    try:
        for patch in series():
            if not patch.applied and not patch.on_request:
                patch.apply()
                done.append(patch)
    except PatchDriftError:
        for patch in reversed(done):
            patch.revert()
        raise


def revert() -> None:
    """Take the series back, in reverse order. What is not applied is left alone.

    Raises:
        PatchDriftError: If somebody replaced a target after us.
    """
    for patch in reversed(series()):
        patch.revert()


def status() -> list[PatchStatus]:
    """Return the state of every patch, in order."""
    return [patch.status() for patch in series()]


def fingerprint(obj: Any) -> str:
    """Return SHA-256 over what the source of a function or class means.

    Comments, layout and docstrings do not count. The tree is written down here rather than by `ast.dump`, whose text
    changes with the Python version, and decorators that set `__wrapped__` are not looked through: a wrapped function
    is another function.

    Raises:
        OSError: If the source is not available.
        TypeError: If `obj` is not a function, method or class.
    """
    lines, start = inspect.findsource(obj)
    block = inspect.getblock(lines[start:])
    source = "".join(["if True:\n", *block] if block[0][:1].isspace() else block)  # a method stays indented as it is
    return hashlib.sha256(repr(_plain(ast.parse(source))).encode()).hexdigest()


def _plain(node: Any) -> Any:
    """Turn a syntax tree into nested tuples that read the same on every supported Python."""
    if isinstance(node, list):
        return tuple(_plain(item) for item in node)
    if not isinstance(node, ast.AST):
        return node
    parts = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if name not in _IRRELEVANT and value is not None and value != []:  # later Pythons add fields, empty here
            parts.append((name, _plain(value)))
    return tuple(parts)


def _signature(obj: Any) -> str:
    found = inspect.signature(obj, follow_wrapped=False)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _upstream_version() -> str:
    try:
        return version("ultralytics")
    except PackageNotFoundError:
        return "of unknown version"
