"""The house: who may import whom, how large a room's files are, and what a new part needs to be one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from detgraph.cfg import COMMAND_LINE_KEYS, CaptureOptions
from detgraph.trainer import parts
from detgraph.trainer.capture.holder import Observe, Replay
from detgraph.trainer.capture.program import Program
from detgraph.trainer.capture.reasons import RECORDING
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.fit.assemble import assemble
from detgraph.trainer.parts import PARTS, Part, PartSpec
from emulator import EmulatingRecorder
from helpers import ROOT
from steps import make_batch, make_model

# From the ground up; a room imports from its own floor and from those below.
FLOORS = (
    ("detgraph.cfg", "detgraph.models", "detgraph.patches", "detgraph.trainer.output"),
    ("detgraph.trainer.capture",),
    ("detgraph.trainer.parts",),
    ("detgraph.trainer.fit",),
    ("detgraph.trainer.routing", "detgraph.trainer.model", "detgraph.trainer.command_line"),
    ("detgraph.trainer.golden", "detgraph.trainer.why"),
    ("detgraph.trainer.cli",),
)
FOLDERS = {
    "cfg": "detgraph.cfg",
    "models": "detgraph.models",
    "patches": "detgraph.patches",
    "trainer": "detgraph.trainer",
}
# A patch is an entry: what it does when upstream calls it is the trainer's.
ENTRIES = {("detgraph.patches.route_train", "detgraph.trainer.routing")}
# These hand out what is above them, when somebody asks.
DOORS = {"detgraph.trainer", "detgraph.trainer.__main__", "detgraph.trainer.namespace.__main__"}


def module(file: Path) -> str:
    folder, *rest = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


MODULES = {module(file): file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))}


def imports(name: str, file: Path, deferred: bool) -> Iterator[str]:
    """Yield the modules that a module names in its imports; with ``deferred``, those inside functions, too."""
    tree = ast.parse(file.read_text())
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    inside = {node for scope in ast.walk(tree) if isinstance(scope, ast.FunctionDef) for node in ast.walk(scope)}
    typing = {node for test in ast.walk(tree) if isinstance(test, ast.If) for node in ast.walk(test)}
    for node in ast.walk(tree):
        if node in typing or (node in inside and not deferred):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            found = [f"{base}.{alias.name}" for alias in node.names]
            yield from (one if one in MODULES else base for one in found)


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) for room in rooms if f"{name}.".startswith(f"{room}."))


@pytest.mark.parametrize("name", [name for name in MODULES if name not in DOORS])
def test_nobody_imports_upwards(name):
    ours = {other for other in imports(name, MODULES[name], deferred=True) if other.startswith("detgraph.")}
    ours = {other for other in ours if (name, other) not in ENTRIES and other not in DOORS}
    assert [other for other in sorted(ours) if floor(other) > floor(name)] == []


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: set(imports(name, file, deferred=False)) & MODULES.keys() for name, file in MODULES.items()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}


def test_the_capture_needs_torch_and_neither_upstream_nor_lightning():
    code = (
        "import sys, pkgutil, importlib, detgraph.trainer.capture as room\n"
        "for found in pkgutil.iter_modules(room.__path__):\n"
        "    importlib.import_module(f'{room.__name__}.{found.name}')\n"
        "print({'torch', 'ultralytics', 'lightning', 'detgraph.trainer.fit', 'detgraph.patches'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'torch'}", done.stderr


def test_what_watches_from_outside_can_be_had_without_detgraph():
    code = (
        "import runpy, sys\n"
        "sys.modules['detgraph'] = sys.modules['lightning'] = None  # importing them is an error\n"
        f"runpy.run_path({str(ROOT / 'trainer' / 'golden' / 'by_path.py')!r})\n"
        "import by_path.output, by_path.golden.stock\n"
        "assert 'torch' not in sys.modules\n"
        "import by_path.golden.record\n"
        "print({name for name in sys.modules if 'ultralytics' in name})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


def test_files_are_of_a_size_to_be_read():
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in MODULES.values()}
    assert {file: count for file, count in lines.items() if count > 360} == {}


# A new part ----------------------------------------------------------------------------------------------------------


class MeanProgram(Program):
    """The mean over all weights, as a part that somebody might add: what its file would hold."""

    part, key = "mean", "capture_mean"

    def __init__(self, weights: list[Tensor], seen: Tensor) -> None:
        self.weights, self.seen, self.mean = weights, seen, None

    def segments(self):
        return [lambda: [torch.stack([weight.mean() for weight in self.weights]).mean()]]

    def running(self):
        return torch.no_grad()

    def kept(self):
        return torch.no_grad()

    def captured(self, results) -> None:
        self.mean = results[0][0]

    def results(self, of=None):
        return {"mean": (self.mean if of is None else of[0][0]).clone()}

    def own(self, expected):
        return expected, {"mean": self.seen}

    def change(self, *live):
        return None

    def load(self, segment, *live) -> None: ...

    def release(self) -> None:
        self.mean = None


class Mean(Part):
    """Takes the mean after every backward."""

    def __init__(self, model, recorder, options, report, blocked) -> None:
        super().__init__("capture_mean", model, recorder, options, report, blocked)
        self.seen = []

    def after_backward(self) -> None:
        weights = list(self.model.parameters())
        plan = self.holder.plan(None, lambda recording: recording.program.change(), lambda: None)
        if isinstance(plan, Replay):
            plan.recording.play(0)
            self.seen.append(plan.recording.program.mean.item())
            self.report.replayed += 1
            return
        with torch.no_grad():
            seen = torch.stack([weight.mean() for weight in weights]).mean()
        self.seen.append(seen.item())
        self.report.eager[RECORDING if isinstance(plan, Observe) else plan.reason] += 1
        if isinstance(plan, Observe):
            with self.holder.attempting():
                self.holder.record(MeanProgram(weights, seen))


def build(trainer, recorder, blocked) -> Mean:
    report = trainer.capture_report.counts("capture_mean")
    return Mean(trainer.model, recorder, trainer.capture, report, blocked)


@dataclass(frozen=True, kw_only=True)
class Options(CaptureOptions):
    """The options with one key more, as a line in `cfg/capture.yaml` makes them."""

    capture_mean: bool = False

    @property
    def asked(self):
        return {**super().asked, **({"capture_mean": True} if self.capture_mean else {})}


@dataclass
class Trainer:
    """What assembling a step needs of a trainer that upstream has set up."""

    capture: CaptureOptions
    recorder: EmulatingRecorder | None = None

    def __post_init__(self) -> None:
        self.device, self.model = torch.device("cpu"), make_model()
        torch.manual_seed(0)
        self.capture_report = CaptureReport(self.capture)
        self.capture_report.parts["mean"] = type(self.capture_report.orthogonalization)()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps_of(trainer: Trainer) -> Mean:
    refused: list[str] = []
    step = assemble(trainer, lambda key, reason: refused.append(f"{key}: {reason}"))
    for number in range(4):
        loss, _ = step.forward(make_batch(number))
        step.backward(loss.sum())
        step.update()
    assert step.recorded == bool(trainer.capture_report.counts("capture_mean").recordings)
    step.drop()
    assert not step.recorded and refused == (
        [] if trainer.recorder else ["capture_mean: " + step.parts["mean"].blocked]
    )
    return step.parts["mean"]


def test_a_part_is_its_file_and_a_line_in_the_table(monkeypatch):
    line = PartSpec("mean", build, lambda trainer: None, "mean too")
    monkeypatch.setattr(parts, "PARTS", (*PARTS, line))
    monkeypatch.setattr("detgraph.trainer.fit.assemble.PARTS", parts.PARTS)
    replayed = steps_of(Trainer(Options(capture_mean=True), EmulatingRecorder()))
    assert replayed.report.replayed == 3 and replayed.report.eager == {RECORDING: 1}
    eager = steps_of(Trainer(Options(capture_mean=True)))
    assert eager.report.replayed == 0 and eager.seen == replayed.seen and len(set(eager.seen)) == 4
    assert list(eager.report.eager) == ["replay needs a CUDA device, this fit runs on 'cpu'"]
    assert replayed.report.to_dict() == replayed.report.to_dict() | {"steps": 4, "recordings": 1, "blocked": None}


def test_the_table_has_a_line_for_each_key():
    assert tuple(line.key for line in PARTS) == COMMAND_LINE_KEYS
    assert len({line.arm for line in PARTS}) == len(PARTS)
