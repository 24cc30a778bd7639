"""Checks of the public pages: each is a function from text to complaints."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from detgraph.cfg import CaptureOptionError
from detgraph.trainer.cli import COMMANDS, read_command_line, upstream_command
from helpers import ROOT

FOLDERS = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "benchmarks" / "records")
PAGES = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
OUR_SCRIPTS = (["yolo"], ["detgraph"], ["python", "-m", "detgraph.trainer"], ["python", "-m", "detgraph"])


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# Reading Markdown -----------------------------------------------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in the bash blocks."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


# Checks: text -> complaints -------------------------------------------------------------------------------------------


def broken_links(text: str, folder: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (folder / name) if name else None
        if file is not None and not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if file is None else file.read_text(encoding="utf-8")):
            found.append(f"{target}: no such heading")
    return found


def wrong_commands(text: str) -> list[str]:
    """Return what is wrong with the commands: targets of make, scripts and their words, files for python to run."""
    found = []
    for words in commands(text):
        line = " ".join(words)
        script = next((script for script in OUR_SCRIPTS if words[: len(script)] == script), None)
        if words[0] == "make":
            found += [f"{line}: no target {w}" for w in words[1:] if "=" not in w and w not in make_targets()]
        elif script is not None:
            found += [f"{line}: {why}" for why in wrong_words(words[len(script) :])]
        elif words[0] == "python":
            if not (ROOT / words[1]).is_file():
                found.append(f"{line}: no such script")
        elif words[0] != "pip":
            found.append(f"{line}: nobody checks this command")
    return found


def wrong_words(words: list[str]) -> list[str]:
    """Return why our command line would not take ``words``."""
    from ultralytics.cfg import MODES, TASKS
    from ultralytics.utils import DEFAULT_CFG_DICT

    if words[0] == "golden":
        return wrong_golden_words(words[1:])
    if words[0] in COMMANDS or upstream_command(words[0]):
        return []
    try:
        with ExitStack() as stack:
            _, rest, trains = read_command_line(words, stack)
    except CaptureOptionError as error:
        return [str(error)]
    found = [] if trains else ["does not train"]
    known = {*DEFAULT_CFG_DICT, *MODES, *TASKS}
    return found + [f"upstream does not know {word}" for word in rest if word.partition("=")[0] not in known]


def wrong_golden_words(words: list[str]) -> list[str]:
    from detgraph.trainer.golden.commands import _parser

    class Refused(Exception):
        pass

    def refuse(self, message):
        raise Refused(message)

    before, argparse.ArgumentParser.error = argparse.ArgumentParser.error, refuse
    try:
        args, rest = _parser().parse_known_args(words)
    except Refused as error:
        return [str(error)]
    finally:
        argparse.ArgumentParser.error = before
    if args.command == "record":
        return wrong_words(["train", *rest])
    return [f"unknown words {rest}"] if rest else []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", read("Makefile"), flags=re.M))


def lost_files(text: str) -> list[str]:
    """Return the files and tests of this repository that the text names in code and that do not exist."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", prose(text)):
        path = code.replace("replay/", "tests/replay/") if code.startswith("replay/") else code
        path = path.replace("compat/", "tests/compat/") if path.startswith("compat/") else path
        room = re.match(r"(cfg|models|trainer|patches|tests|benchmarks|docs|\.ci)/[\w./*-]*$", path)
        if room and not list(ROOT.glob(path.rstrip("/"))):
            found.append(code)
        if re.fullmatch(r"test_\w+(\.\.\.)?", code) and f"def {code.rstrip('.')}" not in all_tests():
            found.append(code)
    return found


def all_tests() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


def private_words(text: str) -> list[str]:
    """Return what belongs to somebody's machine and not into a public page."""
    return re.findall(r"(?:/work|/tmp|/root|/home)/\S*|\bshared/\S*|^.*[\U0001F300-\U0001FAFF].*$", text, flags=re.M)


def missing(names: Iterable[str], text: str) -> list[str]:
    """Return the names that the text lacks, whatever its line breaks."""
    text = " ".join(text.split())
    return [name for name in names if " ".join(name.split()) not in text]
