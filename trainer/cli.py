"""The `yolo` script: upstream's command line, our keys, and a few commands of ours.

Our keys are taken out before upstream looks, so upstream sees a command line of its own. What was asked for travels to
the patched `Model.train` as an ambient value, and to nobody else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from detgraph.cfg import (
    COMMAND_LINE_KEYS,
    VALUE_WORDS,
    CaptureOptionError,
    CaptureOptions,
    check_contradictions,
    describe_options,
    merge_options,
    refuse_outside_training,
    split_options,
)

# Our commands, by first word -> "module:function", imported when called. A function takes the words after it and may
# return an exit status.
COMMANDS = {
    "patches": "detgraph.trainer.cli:show_patches",
    "golden": "detgraph.trainer.golden.commands:main",
    "why": "detgraph.trainer.why.words:main",
}

HELP = """
    detgraph adds to the training of detectors (yolo cfg shows values and defaults):
        yolo train model=yolo26n.yaml data=coco8.yaml batch=4 capture_network=True

    and the commands:
        yolo why model=... data=...             where the time of such a fit goes, and what replay would bring
        yolo golden record model=... data=...   train, and write down what every step computes
        yolo golden compare A B                 say whether two fits are the same
        yolo patches                            say whether patches and loop fit the installed upstream
"""

# Words at which upstream stops reading arguments and does something else; it accepts dashes, singulars and initials, of
# which a later command's count.
_UPSTREAM_COMMANDS = ("checks", "version", "settings", "cfg", "login", "logout", "copy-cfg", "solutions", "help")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one `yolo` command line.

    Args:
        argv: The words after the program's name, or None for those of `sys.argv`.

    Raises:
        SystemExit: With status 2 and one message on stderr, if the request cannot be honoured; before any work, for all
            that the command line itself shows. With a command's own status, if that is not 0.
    """
    from detgraph.patches import PatchDriftError

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in COMMANDS:
            status = _imported(COMMANDS[words[0]])(words[1:])
            if status:
                raise SystemExit(status)
            return
        with ExitStack() as stack:
            options, words, trains = read_command_line(words, stack)
            if trains:
                _apply_patches(options)
            run_upstream(words, options)
            _add_to_upstream(upstream_command(words[0]) if words else "help")
    except (CaptureOptionError, PatchDriftError) as e:
        print(f"yolo: error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


def read_command_line(words: list[str], stack: ExitStack) -> tuple[CaptureOptions | None, list[str], bool]:
    """Take our keys out of a command line, in every spelling that upstream accepts for its own.

    Args:
        words: The words after the program's name.
        stack: Keeps the cleaned copies of `cfg=` files for as long as upstream may read them.

    Returns:
        The options or None if there was no word of them; the words for upstream, untouched if there was nothing to
        take out; and whether the command trains.

    Raises:
        CaptureOptionError: For a misspelt or incomplete key, a value that is not allowed, or a contradiction.
    """
    from ultralytics.cfg import DEFAULT_CFG, DEFAULT_CFG_DICT, MODES, TASKS, smart_value

    from detgraph.patches import route_train

    try:
        merged = merged_words(words)
    except (SyntaxError, IndexError):  # upstream will say what is wrong with its brackets
        return None, words, False

    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}  # upstream's arguments as upstream will read them, to find contradictions
    rest: list[str] = []
    command, known, cfg = None, route_train.known_keys(), None
    for word in merged:
        key, equals, value = _split_word(word)
        if key in COMMAND_LINE_KEYS:
            if not value:
                raise CaptureOptionError(f"'{key}' has no value: write {key}=True.")
            ours[key] = smart_value(value)
            continue
        rest.append(word)
        if command:  # the words after a command are the command's
            continue
        if equals:
            split_options({key: value}, known, python=False)
            value = smart_value(value)
            if key == "cfg" and value is not None:
                path, yaml_ours, yaml_theirs = stack.enter_context(route_train.stock_yaml(value))
                if path is not None:
                    rest[-1] = f"cfg={path}"
                cfg = cfg or value
                ours, theirs = {**yaml_ours, **ours}, {**yaml_theirs, **theirs}  # what was said before wins
            else:
                theirs[key] = value
        elif key in TASKS:
            theirs["task"] = key
        elif key in MODES:
            theirs["mode"] = key
        elif upstream_command(key):
            command = key
        elif isinstance(DEFAULT_CFG_DICT.get(key), bool):
            theirs[key] = True  # a bare `compile` switches it on
        else:
            first = word is merged[0] and word.isalpha() and key not in DEFAULT_CFG_DICT
            if meant := get_close_matches(key, COMMANDS, 1) if first else []:
                raise CaptureOptionError(f"'{word}' is no command. Did you mean yolo {meant[0]}?")
            split_options({key: None}, known, python=False)

    mode = "track" if theirs.get("task") == "track" else theirs.get("mode") or DEFAULT_CFG.mode or "predict"
    trains = bool(words) and command is None and mode == "train"  # without a word, upstream prints its help
    options = route_train.chosen_options(ours, cfg) if trains else merge_options(ours)
    refuse_outside_training(ours, command or mode)
    check_contradictions(options, theirs)
    if options is None:
        return None, words, trains
    # A word that still ends in '=' is an error that upstream reports; it must not swallow the word after a gap of ours.
    rest.sort(key=lambda word: word.endswith("="))
    return options, rest or [f"mode={mode}"], trains


def merged_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as upstream joins them around '=' and in brackets, our keys with a value each.

    As with upstream's switches, a key alone is True; a value may also follow it, as in `--capture_network True`.

    Raises:
        SyntaxError, IndexError: As upstream's, for a bracket or an '=' that has no other side.
    """
    from ultralytics.cfg import merge_equals_args

    merged: list[str] = []
    bare = None  # the key of ours that the word before is, without a value
    for word in merge_equals_args(list(words)):
        key, equals, _ = _split_word(word)
        if bare and not equals and key.lower() in VALUE_WORDS:
            merged[-1], bare = f"{bare}={key}", None
            continue
        bare = key if key in COMMAND_LINE_KEYS and not equals else None
        merged.append(f"{bare}=True" if bare else word)
    return merged


def _split_word(word: str) -> tuple[str, str, str]:
    """Return key, '=' (or nothing) and value of a word, without what upstream overlooks: two dashes, a comma."""
    text = word[2:] if word.startswith("--") else word
    text = text[:-1] if text.endswith(",") else text
    key, equals, value = (part.strip() for part in text.partition("="))
    return key, equals, value


def show_patches(words: list[str]) -> int:
    """Print the patch series and whether our loop follows the installed upstream's. Returns 1 on any drift, else 0."""
    if words:
        raise CaptureOptionError(f"'{words[0]}' has no meaning for yolo patches, which takes no words: leave it out.")
    from detgraph.patches import status

    from .fit.upstream import loop_drift

    lines = status()
    for line in lines:
        state = "applied" if line.applied else "does not fit" if line.drift else "fits"
        print(f"{line.name}: {state}\n  target: {line.target}\n  what:   {line.what}")
        if line.drift:
            print(f"  drift:  {line.drift}")
    drift = loop_drift()
    print(f"loop: {'does not fit' if drift else 'fits'}\n  target: ultralytics.engine.trainer:BaseTrainer._do_train")
    if drift:
        print(f"  drift:  {drift}")
    return int(bool(drift) or any(line.drift for line in lines))


def _apply_patches(options: CaptureOptions | None) -> None:
    """Apply the series. On drift, train as upstream does unless the capture was asked for."""
    from detgraph import patches

    try:
        patches.apply()
    except patches.PatchDriftError as e:
        if options is not None and options.enabled:
            raise
        from ultralytics.utils import LOGGER

        LOGGER.warning(f"{e} This command does without it and trains by upstream's own loop.")


def run_upstream(words: list[str], options: CaptureOptions | None) -> None:
    """Call upstream's entry point with `words` as its command line."""
    import ultralytics.cfg
    import ultralytics.utils

    from detgraph.patches.route_train import ambient_options

    # Upstream keeps the list that was sys.argv at its import, under two names, and tells a command line from a script
    # by the program's name in it: predict saves its pictures in one case and not in the other.
    lists = (ultralytics.cfg.ARGV, ultralytics.utils.ARGV)
    before = [list(argv) for argv in lists]
    program = sys.argv[0] if sys.argv and sys.argv[0].endswith("yolo") else "yolo"
    token = ambient_options.set(options)
    try:
        for argv in lists:
            argv[:] = [program, *words]
        ultralytics.cfg.entrypoint()
    finally:
        ambient_options.reset(token)
        for argv, words_before in zip(lists, before, strict=True):
            argv[:] = words_before


def upstream_command(word: str) -> str | None:
    """Return which of upstream's commands `word` is, or None."""
    bare = word.lower().lstrip("-")
    names = reversed(_UPSTREAM_COMMANDS)
    return next((name for name in names if bare in (name, name[0], name.removesuffix("s"))), None)


def _add_to_upstream(command: str | None) -> None:
    """Print or do what we add to one of upstream's commands, after it."""
    if command == "help":
        print(HELP)
    elif command == "cfg":
        print(describe_options())
    elif command == "version":
        print(f"detgraph {version('detgraph')} on ultralytics {version('ultralytics')}")
    elif command == "copy-cfg":
        # Switched off: the copy serves upstream alone and modes that do not train, too.
        ours = (line if line.startswith("#") else f"# {line}" for line in describe_options().splitlines())
        with Path("default_copy.yaml").open("a", encoding="utf-8") as copy:
            copy.write("\n" + "\n".join(ours) + "\n")
        print("Its last lines are keys of detgraph, for training only: take the '# ' away to use one.")


def _imported(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)
