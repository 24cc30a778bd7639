"""Patch: ask whether `muon_update` may be replayed.

What: inside an optimizer step of a fit that asked for it (`capture_orthogonalization=True`), calls of `muon_update` go
    to the fit's recording. Everywhere else, in other threads too, it is upstream's function. Applied by each such fit
    for as long as it runs, and not by `detgraph.patches.apply()`.
Why not a subclass: `MuSGD.step` calls the function by its global name. A subclass of MuSGD would have to restate
    `step`, and checkpoints and `optimizer=` would name another class.
Target: `ultralytics.optim.muon.muon_update`
Upstream versions: 8.4.183 to 8.4.190
Forwarded: no. Upstream could take the function from an attribute of the optimizer, and this patch would be a setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

from detgraph.patches.registry import Known, Patch, PatchDriftError

replacing: ContextVar[Callable[..., Any] | None] = ContextVar("replacing", default=None)
"""What is called instead, with upstream's function and then its arguments in order; None: upstream's function itself.

A thread sees what it has set itself, so no other thread's optimizer is touched.
"""

_lock = Lock()
_users = 0


@contextmanager
def installed() -> Iterator[None]:
    """Keep the patch applied inside. Fits may overlap: it is taken back with the last of them.

    Raises:
        PatchDriftError: On entry, if it does not fit the installed upstream.
    """
    global _users
    with _lock:
        patch.apply()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _revert()


def _revert() -> None:
    """Take the patch back, unless somebody else's came after it: that one may call ours, which calls upstream's."""
    try:
        patch.revert()
    except PatchDriftError as error:
        from ultralytics.utils import LOGGER

        LOGGER.warning(error)


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def muon_update(grad, momentum, beta=0.95, nesterov=True):
        replacement = replacing.get()
        if replacement is None:
            return original(grad, momentum, beta, nesterov)
        return replacement(original, grad, momentum, beta, nesterov)

    return muon_update


patch = Patch(
    name="replay_orthogonalization",
    known=Known(
        target="ultralytics.optim.muon:muon_update",
        fingerprints={"b2899c23dfc00fa4319aed1e4d6d4c78fb7d8ca91aea01f0951bee313b717c0f": "8.4.190"},
        signature="(grad, momentum, beta=0.95, nesterov=True)",
    ),
    what="capture_orthogonalization: the orthogonalization in MuSGD's step may be replayed; applied during such fits",
    replacement=_patched,
    on_request=True,
)
