"""Tables of the public pages are complete: reasons, guards, fields, options, patches, stages."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture import reasons
from detgraph.trainer.capture.report import SCHEMA, CaptureReport
from detgraph.trainer.cli import COMMANDS
from pages import make_targets, missing, read


def reason_constants() -> list[str]:
    return [value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)]


def literal_parts(node: ast.AST) -> list[str]:
    """Return the fixed text of a string or f-string, in pieces."""
    if isinstance(node, ast.BoolOp | ast.IfExp):
        return [text for value in ast.iter_child_nodes(node) for text in literal_parts(value)]
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


# Where reasons are returned: the file, a pattern of its functions, and how many pieces of fixed text there are.
REASONS = (
    ("trainer/fit/eligibility.py", "blocker", 3),
    ("trainer/fit/assemble.py", "blocker", 1),
    ("trainer/parts/eligibility.py", "blocker", 6),
    ("trainer/parts/orthogonalization.py", "blocker", 2),
    ("trainer/fit/upstream.py", "drift", 1),
    ("trainer/fit/under_lightning.py", "blocker", 1),
    ("trainer/fit/trainer.py", "blocker", 1),
    ("trainer/capture/torch_private.py", "missing", 1),
    ("cfg/options.py", "blocker", 1),
    ("trainer/capture/proof.py", "verdict|not_reproduced", 2),
    ("trainer/capture/signature.py", "obstacle", 4),
    ("trainer/parts/network_program.py", "drawn|moved", 3),
    ("models/objective.py", "blocker|_changed_part", 6),
)
TELLING = ("RuntimeError", "UnsupportedNetwork", "block", "_obstruct", "_give_up", "_say_not_in_force")


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

    from detgraph.trainer.parts.network_program import network_signature

    model = DetectionModel("yolo26n.yaml", nc=2, verbose=False)
    model.args = get_cfg()
    return network_signature(model, torch.zeros(1, 3, 64, 64)).guards


def orthogonalization_guards() -> list[str]:
    import torch
    from ultralytics.optim.muon import muon_update

    from detgraph.trainer.parts.orthogonalization import CallSignature, surroundings

    tensors = [torch.zeros(2, 2)]
    return surroundings(muon_update, "cpu").guards + CallSignature(0, tensors, tensors, lambda grads: ["x"]).guards


def test_reasons_are_documented():
    text = read("docs/reasons.md")
    assert len(reason_constants()) >= 3
    assert not missing(reason_constants(), text)
    for file, functions, least in REASONS:
        found = returned_reasons(read(file), functions)
        assert len(found) >= least, file
        assert not missing(found, text), file


def test_errors_and_blocks_are_documented():
    rooms = {"parts": ("network", "network_program"), "capture": ("holder", "recording", "reach"), "fit": ("trainer",)}
    ours = [f"trainer/{room}/{name}.py" for room, names in rooms.items() for name in names]
    files = [*ours, "models/view.py", "models/objective.py"]
    found = [text for name in files for text in raised_and_blocked(read(name))]
    assert len(found) >= 12
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


def test_attributes_of_the_report_are_documented():
    text = read("docs/report.md").partition("## From Python")[2]
    public = {name for name in dir(CaptureReport(CaptureOptions())) if not name.startswith("_")}
    taken = {"start", "stop", "block", "retire"}  # the loop's
    names = [f"`{name}()`" if name in ("share", "line", "summary", "to_dict") else name for name in public - taken]
    assert len(names) > 15 and not missing(names, text)
    scalars = re.findall(r"`(`train/\w+`)`", read("trainer/fit/loggers.py"))
    assert len(scalars) > 2 and not missing(scalars, text)


def test_options_and_commands_are_documented():
    text = read("docs/command-line.md")
    assert not missing((f"`{field.name}`" for field in fields(CaptureOptions)), text)
    assert not missing((f"yolo {command}" for command in COMMANDS), text)


def test_patches_are_documented():
    from detgraph.patches import series

    names = [text for patch in series() for text in (f"`{patch.name}`", patch.known.target)]
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
    from detgraph.trainer.golden.file import PARTS

    assert not missing((f"`{part}`" for part in PARTS), read("docs/goldens.md"))


def test_gaps_in_tables_are_found():
    text = read("docs/reasons.md")
    for name in [*reason_constants(), "objective CLASS", "tensor address"]:
        assert missing([name], text.replace(name, ""))
    assert missing(["`steps`"], "steps") and not missing(["two words"], "two\nwords")
    source = "def x_blocker():\n    return f'because of {a} it is so'\n"
    assert returned_reasons(source, "blocker") == ["because of", "it is so"]
    assert raised_and_blocked("raise RuntimeError(f'no {a} at all')") == ["at all"]
