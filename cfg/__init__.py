"""What a user may ask for: our keys, the options object made from them, and the contradictions refused.

This folder is the bottom layer. It imports nothing of ours, and neither torch nor ultralytics at import.
"""

from detgraph.cfg.options import (
    COMMAND_LINE_KEYS,
    PYTHON_KEY,
    REPORT_NAME,
    REPORT_SCHEMA,
    VALUE_WORDS,
    CaptureOptionError,
    CaptureOptions,
    as_words,
    check_contradictions,
    describe_options,
    merge_options,
    min_torch,
    precision_blocker,
    refuse_outside_training,
    remembered_options,
    split_options,
)

__all__ = (
    "COMMAND_LINE_KEYS",
    "PYTHON_KEY",
    "REPORT_NAME",
    "REPORT_SCHEMA",
    "VALUE_WORDS",
    "CaptureOptionError",
    "CaptureOptions",
    "as_words",
    "check_contradictions",
    "describe_options",
    "merge_options",
    "min_torch",
    "precision_blocker",
    "refuse_outside_training",
    "remembered_options",
    "split_options",
)
