"""The ordered series of reversible runtime patches on `ultralytics`.

A script that keeps `from ultralytics import YOLO` calls `detgraph.patches.apply()` once; `revert()` takes everything
back. `patches/series` gives the order. No patch rewrites a model, an assignment, a loss or an optimizer.
"""

from detgraph.patches.registry import (
    Known,
    Patch,
    PatchDriftError,
    PatchStatus,
    apply,
    fingerprint,
    revert,
    series,
    status,
)

__all__ = ("Known", "Patch", "PatchDriftError", "PatchStatus", "apply", "fingerprint", "revert", "series", "status")
