"""The public pages: links lead somewhere, commands and files exist, nothing private is told; each check can fail."""

import pytest

from helpers import ROOT
from pages import PAGES, blocks, broken_links, lost_files, missing, private_words, read, wrong_commands

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


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
        ("`trainer/parts/network.py`, `tests/replay/`, `tests/goldens/*.json`", 0),
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
