"""What the loop restates of upstream, and the check that it still says the same.

Our loop follows the order of events of one upstream function. Its fingerprint is compared with the ones that were
read when the loop was written; on drift upstream's own loop runs. The lines that upstream's loop logs are not
repeated here: they are taken out of upstream's own source when a fit needs them, so both loops word them alike.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import cache

from ultralytics import __version__ as upstream_version
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.detect import DetectionTrainer

from detgraph.patches import Known, PatchStatus

LOOP = Known(
    target="ultralytics.engine.trainer:BaseTrainer._do_train",
    fingerprints={"d8f45dcfe548e661e6161b2abf19e72279b7a76d6f6d383a232f6fdf9a3814e8": "8.4.183 to 8.4.190"},
)

# Places of the log lines inside upstream's loop, in source order; valid for every fingerprint of LOOP.
LOG_START, LOG_OUT_OF_MEMORY, LOG_COMPLETED = "Starting training for", "and retrying", "epochs completed"


def loop_drift() -> str | None:
    """Return why our loop may not stand in for the installed upstream's, or None when it may."""
    if "_do_train" in vars(DetectionTrainer):
        return "DetectionTrainer has a training loop of its own, put there by this program, which runs"
    try:
        if LOOP.installed() in LOOP.fingerprints:
            return None
    except OSError:  # as in a frozen application
        return "the source of upstream's training loop cannot be read, so that loop itself runs"
    return (
        f"the training loop of ultralytics {upstream_version} differs from the one that detgraph follows "
        f"(releases {LOOP.releases}), so upstream's own loop runs; install one of these releases to replay"
    )


def loop_status() -> PatchStatus:
    """Return the loop's line of `yolo patches`."""
    return PatchStatus("loop", LOOP.target, "our loop restates it, under Lightning", False, loop_drift())


@cache
def _log_statement(marker: str):
    """Compile the one statement of upstream's loop that logs a line containing ``marker``."""
    source = textwrap.dedent(inspect.getsource(BaseTrainer._do_train))
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and getattr(node.value.func.value, "id", None) == "LOGGER"
        and any(isinstance(c, ast.Constant) and marker in str(c.value) for c in ast.walk(node))
    ]
    assert len(found) == 1, f"{len(found)} log lines with {marker!r} in upstream's loop"
    return compile(ast.Expression(found[0].value), f"<upstream log line: {marker}>", "eval")


def log_as_upstream(marker: str, trainer: BaseTrainer, **names: object) -> None:
    """Log upstream's own line that contains ``marker``, with ``names`` as the local names it refers to."""
    namespace = sys.modules[BaseTrainer.__module__].__dict__
    eval(_log_statement(marker), namespace, {"self": trainer, **names})  # noqa: S307 upstream's own, installed source
