"""What a user may ask for: our keys, the options object made from them, and the contradictions refused.

This folder is the bottom layer. It imports nothing of ours, and neither torch nor ultralytics at import.
"""

from detgraph.cfg.options import (
    COMMAND_LINE_KEYS,
    REPORT_NAME,
    CaptureOptionError,
    CaptureOptions,
    as_words,
    check_contradictions,
    describe_options,
    merge_options,
    min_torch,
    precision_blocker,
    remembered_options,
    split_options,
)

__all__ = (
    "COMMAND_LINE_KEYS",
    "REPORT_NAME",
    "CaptureOptionError",
    "CaptureOptions",
    "as_words",
    "check_contradictions",
    "describe_options",
    "merge_options",
    "min_torch",
    "precision_blocker",
    "remembered_options",
    "split_options",
)
