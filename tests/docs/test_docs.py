"""The public pages: links lead somewhere, commands are ones that exist, and tables are complete.

Every check is a function from text to complaints, so that the last tests can show that it finds a fault.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest

from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer import network, orthogonalization
from detgraph.trainer.cli import COMMANDS, read_command_line
from detgraph.trainer.report import SCHEMA, CaptureReport
from helpers import ROOT

FOLDERS = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "benchmarks" / "records")
PAGES = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
OUR_SCRIPTS = (["yolo"], ["detgraph"], ["python", "-m", "detgraph.trainer"])


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
    if words[0] in COMMANDS:
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
    from detgraph.trainer.golden import _parser

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


# Pages ----------------------------------------------------------------------------------------------------------------


def test_there_are_pages():
    names = {str(path.relative_to(ROOT)) for path in PAGES}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"} <= names
    assert len([name for name in names if name.startswith("docs/")]) >= 10


@page
def test_links(path):
    assert not broken_links(path.read_text(encoding="utf-8"), path.parent)


@page
def test_commands(path, monkeypatch):
    monkeypatch.chdir(ROOT)  # cfg= files are named from here
    assert not wrong_commands(path.read_text(encoding="utf-8"))


@page
def test_python_compiles(path):
    for block in blocks(path.read_text(encoding="utf-8"), "python"):
        compile(block, str(path), "exec")


@page
def test_named_files_exist(path):
    assert not lost_files(path.read_text(encoding="utf-8"))


@page
def test_nothing_private(path):
    assert not private_words(path.read_text(encoding="utf-8"))


def test_readme_is_short_and_leads_to_every_page():
    text = read("README.md")
    assert len(text.splitlines()) < 150
    assert not missing((f"(docs/{path.name})" for path in ROOT.glob("docs/*.md")), text)


def test_every_record_is_listed():
    names = [path.name for path in ROOT.glob("benchmarks/records/*.md")]
    assert names and not missing((f"(records/{name})" for name in names), read("benchmarks/README.md"))


# Tables that have to be complete --------------------------------------------------------------------------------------


def reason_constants() -> list[str]:
    values = [pair for module in (network, orthogonalization) for pair in vars(module).items()]
    return [value for name, value in values if name.isupper() and isinstance(value, str)]


def literal_parts(node: ast.AST) -> list[str]:
    """Return the fixed text of a string or f-string, in pieces."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value.strip() for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for text in texts if len(text) > 3]


def returned_reasons(source: str, functions: str) -> list[str]:
    """Return the fixed text of whatever the functions whose name matches may return."""
    return [
        text
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and re.search(functions, function.name)
        for statement in ast.walk(function)
        if isinstance(statement, ast.Return) and statement.value is not None
        for text in literal_parts(statement.value)
    ]


TELLING = ("RuntimeError", "UnsupportedNetwork", "_block", "_say_not_in_force")


def raised_and_blocked(source: str) -> list[str]:
    """Return the beginning of the fixed text of errors and of what blocks a fit or the rest of it."""
    return [
        text.rstrip("(").strip()
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and call.args
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in TELLING
        for text in literal_parts(call.args[0])[:1]
    ]


def guards() -> list[str]:
    import torch
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    from detgraph.trainer.signature import Signature

    model = DetectionModel("yolo26n.yaml", nc=2, verbose=False)
    model.args = get_cfg()
    return Signature(model, torch.zeros(1, 3, 64, 64)).guards


def orthogonalization_guards() -> list[str]:
    import torch
    from ultralytics.optim.muon import muon_update

    from detgraph.trainer.updates import CallSignature, surroundings

    tensors = [torch.zeros(2, 2)]
    return surroundings(muon_update, "cpu").guards + CallSignature(0, tensors, tensors, lambda grads: ["x"]).guards


def test_reasons_are_documented():
    text = read("docs/reasons.md")
    assert len(reason_constants()) >= 3
    assert not missing(reason_constants(), text)
    found = returned_reasons(read("trainer/eligibility.py"), "blocker")
    assert len(found) > 10
    found += returned_reasons(read("trainer/upstream.py"), "drift")
    found += returned_reasons(read("cfg/options.py"), "blocker")
    found += returned_reasons(read("trainer/proof.py"), "verdict") + returned_reasons(
        read("trainer/holder.py"), "failed"
    )
    assert not missing(found, text)


def test_errors_and_blocks_are_documented():
    files = ("trainer/network.py", "trainer/holder.py", "trainer/loop.py", "models/view.py")
    found = [text for name in files for text in raised_and_blocked(read(name))]
    assert len(found) >= 8
    beginnings = [re.split(r"[;(]", text)[0].strip() for text in found]
    assert not missing(beginnings, read("docs/reasons.md"))


def test_guards_are_documented():
    names = guards()
    assert len(names) > 30
    text = read("docs/reasons.md")
    assert not missing(names, text)
    _, _, ours = text.partition("What the orthogonalization's signature compares")
    assert len(orthogonalization_guards()) > 10 and not missing(orthogonalization_guards(), ours)


def report_names() -> list[str]:
    report = CaptureReport(CaptureOptions()).to_dict()
    return [*report, *report["options"], *report["environment"]]


def test_report_fields_are_documented():
    text = read("docs/report.md")
    assert not missing((f"`{name}`" for name in report_names()), text)
    assert f"schema version {SCHEMA}" in text


def test_options_and_commands_are_documented():
    text = read("docs/command-line.md")
    assert not missing((f"`{field.name}`" for field in fields(CaptureOptions)), text)
    assert not missing((f"yolo {command}" for command in COMMANDS), text)


def test_patches_are_documented():
    from detgraph.patches import series

    names = [text for patch in series() for text in (f"`{patch.name}`", patch.target)]
    assert names and not missing(names, read("docs/patches.md"))


def test_bug_reports_are_all_there():
    text = read("docs/bug-reports.md")
    rows = [f"A{number:02}" for number in range(1, 19)]
    assert re.findall(r"^### (A\d\d)$", text, flags=re.M) == rows
    for row, section in zip(rows, re.split(r"^### A\d\d$", text, flags=re.M)[1:], strict=True):
        assert "https://github.com/" in section and "Here:" in section and "Shown by:" in section, row
        on_cuda = f'@row("{row} ' in read("benchmarks/cuda_bug_reports.py")
        assert on_cuda == bool(re.search(rf"CUDA rows? {row}", section)), row


def test_stages_and_targets_are_documented():
    import gate

    text = read("docs/developing.md")
    names = [stage.name for stage in gate.stages(Path(".venv"), accelerator=True)]
    assert names and not [name for name in names if not re.search(rf"^\|[^|]*\b{name}\b", text, flags=re.M)]
    assert not missing((f"`make {target}`" for target in make_targets()), text)


def test_golden_parts_are_documented():
    from detgraph.trainer.golden_file import PARTS

    assert not missing((f"`{part}`" for part in PARTS), read("docs/goldens.md"))


# The checks find faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[x](nowhere.md)", 1),
        ("[x](README.md#nowhere)", 1),
        ("[x](#nowhere)", 1),
        ("[x](README.md#use)", 0),
        ("# Here, there\n[x](#here-there)", 0),
        ("[x](https://example.org/nowhere)", 0),
        ("```text\n[x](nowhere.md)\n```", 0),
    ],
)
def test_broken_links_are_found(link, found):
    assert len(broken_links(link, ROOT)) == found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("make nothing", 1),
        ("make gate VENV=x", 0),
        ("yolo train model=yolo26n.yaml capture_netwrok=True", 1),
        ("yolo train model=yolo26n.yaml capture_network=maybe", 1),
        ("yolo train model=yolo26n.yaml capture_network=True compile=True", 1),
        ("yolo val model=yolo26n.pt capture_network=True", 1),
        ("yolo train modle=yolo26n.yaml", 1),
        ("detgraph train \\\n  epochz=1", 1),
        ("python -m detgraph.trainer train epochs=1 capture_network=verify # why", 0),
        ("yolo golden record --stokc model=yolo26n.yaml", 1),
        ("yolo golden record --detail 3 model=yolo26n.yaml", 1),
        ("yolo golden record modle=yolo26n.yaml", 1),
        ("yolo golden compare a", 1),
        ("yolo golden compare a b --tolerance 1e-3:3", 0),
        ("python benchmarks/nothing.py", 1),
        ("rm -rf something", 1),
    ],
)
def test_wrong_commands_are_found(command, found):
    assert len(wrong_commands(f"```bash\n{command}\n```\n")) == found, wrong_commands(f"```bash\n{command}\n```\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`trainer/nothing.py`", 1),
        ("`trainer/network.py`, `tests/replay/`, `tests/goldens/*.json`", 0),
        ("`replay/nothing.py`", 1),
        ("`test_nothing_at_all`, `test_a01_...`", 1),
    ],
)
def test_lost_files_are_found(text, found):
    assert len(lost_files(text)) == found


def test_private_words_are_found():
    path = "/".join(["", "work", "main", "x"])
    assert private_words(f"see {path} and shared/data") and private_words("well done \U0001f680")
    assert not private_words("shared memory, `/elsewhere/venv`, A/B/A/B")


def test_gaps_in_tables_are_found():
    text = read("docs/reasons.md")
    for name in [*reason_constants(), "objective CLASS", "tensor address"]:
        assert missing([name], text.replace(name, ""))
    assert missing(["`steps`"], "steps") and not missing(["two words"], "two\nwords")
    source = "def x_blocker():\n    return f'because of {a} it is so'\n"
    assert returned_reasons(source, "blocker") == ["because of", "it is so"]
    assert raised_and_blocked("raise RuntimeError(f'no {a} at all')") == ["at all"]
