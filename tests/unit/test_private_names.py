"""Names that other packages do not promise: each is used in one file, and one that is gone makes a fit eager."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import yaml
from ultralytics.engine.model import Model
from ultralytics.engine.trainer import BaseTrainer

import torch_range
from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture import guards, torch_private
from detgraph.trainer.capture.holder import Holder
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.fit import lightning_private, upstream
from detgraph.trainer.fit import step as fit_step
from emulator import EmulatingRecorder
from fixtures import warned  # noqa: F401 a fixture
from helpers import ROOT, make_dataset, part_of
from steps import TINY, make_model, twin

FILES = [file for room in ("cfg", "models", "patches", "trainer") for file in sorted((ROOT / room).rglob("*.py"))]
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}

# One file each --------------------------------------------------------------------------------------------------------


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names(text: str) -> list[str]:
    """Return the parts of a dotted name, and nothing for any other text."""
    parts = text.split(".")
    return parts if all(part.isidentifier() for part in parts) else []


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield what a module of ours defines: functions, classes, and names and attributes that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


OURS = {name for tree in TREES.values() for name in defined(tree) if private(name)}


def foreign(tree: ast.AST, ours: set[str] = OURS) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name that is somebody else's: attribute, import, or text for ``getattr``.

    Below ``torch`` none is ours, whatever it is called.
    """
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            below_torch = ast.unparse(node).split(".")[0] in ("torch", "nn")
            found = [node.attr] if below_torch or node.attr not in ours else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [*names(node.module), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in names(alias.name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [name for name in names(node.value) if name not in ours]
        yield from ((node.lineno, name) for name in found if private(name))


# Upstream's loop and its `Model.train` are known by their source: what that calls itself is there.
UPSTREAM = {name for function in (BaseTrainer._do_train, Model.train) for name in function.__code__.co_names}
LOOKED_UP = {"_predict_once"}  # a method of upstream's model: one that is not there is not upstream's
INTERPRETER = {"_thread", "_ctypes", "_queue", "_lru_list_elem"}  # by which its own classes are told
STATE = {"_growth_tracker"}  # a key of what torch's scaler saves


@pytest.mark.parametrize("file", [file for file in TREES if not file.endswith("_private.py")])
def test_private_names_of_others_stand_in_one_file(file):
    allowed = STATE | LOOKED_UP | INTERPRETER | {name for name in UPSTREAM if private(name)}
    assert [(line, name) for line, name in foreign(TREES[file]) if name not in allowed] == []


def test_upstreams_private_names_are_used_by_what_is_fingerprinted():
    assert upstream.loop_drift() is None
    assert {"_setup_train", "_model_train", "_smart_load"} <= UPSTREAM


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._len_torch_dispatch_stack()",
        "torch._clear(x)",
        "getattr(torch._C, name)",
        "getattr(c, '_cuda_releasePool')",
        "from torch._dynamo import config",
        "from torch.nn import _reduction",
        "import torch._inductor.config",
        "storage._cdata",
        "loop._data_fetcher",
    ],
)
def test_a_private_name_is_found(source):
    assert list(foreign(ast.parse(source), {"_clear"}))


# Names of torch that are gone -----------------------------------------------------------------------------------------

NEEDED = [
    "_C._storage_Use_Count", "_C._len_torch_dispatch_stack", "_C._len_torch_function_stack",
    "_C._autograd._top_saved_tensors_default_hooks", "_foreach_copy_", "_foreach_mul_", "_foreach_add_",
    *(f"nn.modules.module._global{name}" for name in torch_private.MODULE_HOOKS),
]  # fmt: skip
LENDING = [
    "_C._cuda_clearCublasWorkspaces", "_C._cuda_beginAllocateCurrentStreamToPool", "_C._cuda_endAllocateToPool",
    "_C._cuda_releasePool",
]  # fmt: skip
FLAGS = ["_C._get_fp32_precision_getter", "_C._get_sdp_priority_order"]


@pytest.fixture
def without(monkeypatch):
    """Return a function that looks the names of torch up anew, in a torch that does not have one of them."""

    def look(path: str) -> None:
        owner, _, name = path.rpartition(".")
        owner = attrgetter(owner)(torch) if owner else torch
        if not hasattr(owner, name):
            pytest.skip(f"torch {torch.__version__} has no torch.{path} yet")
        value = getattr(owner, name)
        delattr(owner, name)
        try:
            importlib.reload(torch_private)
        finally:
            setattr(owner, name, value)  # torch itself cannot do without
        guards._context.cache_clear()

    yield look
    importlib.reload(torch_private)
    guards._context.cache_clear()


def fit_of(model: torch.nn.Module) -> SimpleNamespace:
    """Return what the rules look at of a fit of ours that asked for both captures."""
    options = CaptureOptions(capture_network=True, capture_orthogonalization=True)
    loader = SimpleNamespace(dataset=None, batch_size=2)
    return SimpleNamespace(
        model=model, capture=options, capture_report=CaptureReport(options), recorder=EmulatingRecorder(), stride=32,
        device=torch.device("cpu"), train_loader=loader, args=SimpleNamespace(imgsz=64, multi_scale=0.0),
        data={"channels": 3}, optimizer=None,
    )  # fmt: skip


def test_the_releases_that_a_reason_names_are_those_of_the_requirements():
    first, last = torch_private.TESTED.split(" to ")
    series, minor = last.split(".")
    assert set(torch_range.allowed().split(",")) == {f">={first}", f"<{series}.{int(minor) + 1}"}
    assert torch_range.ends() == [f"=={first}.0", torch_range.allowed()]


def test_this_torch_has_all_of_them():
    assert torch_private.missing() is None and torch_private.reduced("cuda") == [] and torch_private.can_lend()


@pytest.mark.parametrize("path", NEEDED)
def test_a_fit_without_a_needed_name_is_eager_and_says_so(path, without):
    without(path)
    fit = fit_of(make_model())
    for name in ("network", "orthogonalization"):
        part, blocker = part_of(fit, name)
        assert part.blocked == blocker == torch_private.missing()
    assert f"torch {torch.__version__} has no torch.{path}, by which" in blocker
    pair = twin(steps=3)
    assert not pair.differences and pair.report.eager == {blocker: 3}


def test_without_the_rule_a_needed_name_is_an_error_that_costs_the_recording(without, monkeypatch):
    without(NEEDED[0])
    said = torch_private.missing()
    monkeypatch.setattr(fit_step, "split_blocker", lambda model: None)
    pair = twin(steps=3)
    assert not pair.differences and pair.report.blocked == f"recording failed: {said}"
    monkeypatch.setattr(Holder, "attempting", lambda self, what="": nullcontext())
    with pytest.raises(torch_private.MissingName, match=re.escape(said)):
        twin(steps=3)


@pytest.mark.parametrize("path", FLAGS)
def test_a_flag_that_cannot_be_read_is_no_guard_and_the_fit_says_so(path, without, warned):  # noqa: F811
    without(path)
    step, blocker = part_of(fit_of(make_model()), "network")
    assert blocker is None and step.blocked is None
    assert len(warned) == 1 and f"has no torch.{path}: " in warned[0] and "without being noticed" in warned[0]
    twin(steps=3).assert_same(replayed=2)


@pytest.mark.parametrize("path", LENDING)
def test_memory_is_lent_with_all_the_names_for_it_or_not_at_all(path, without, warned):  # noqa: F811
    without(path)
    assert not torch_private.can_lend() and torch_private.missing() is None
    assert [f"has no torch.{path}: " in text for text in torch_private.reduced("cuda")] == [True]
    torch_private.clear_cublas_workspaces()
    part_of(fit_of(make_model()), "network")  # on a CPU nothing is missed
    assert warned == []


def test_a_name_that_is_younger_than_torch_is_not_missed(without, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.8.0"))
    without(FLAGS[0])
    assert torch_private.reduced("cuda") == [] and torch_private.fp32_precision is None


# Names of Lightning that are gone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", lightning_private.NAMES)
def test_a_lightning_without_a_name_leaves_the_fit_to_upstreams_loop(path, monkeypatch):
    from detgraph.trainer.fit import under_lightning as fitting

    device, build = torch.device("cpu"), fitting.build_trainer
    assert fitting.lightning_blocker(device) is None

    class Lacking:
        """Hides one name of what it wraps."""

        def __init__(self, inner: object, path: str) -> None:
            self._inner, self._path = inner, path

        def __getattr__(self, name: str) -> object:
            first, _, rest = self._path.partition(".")
            if name == first and not rest:
                raise AttributeError(name)
            value = getattr(self._inner, name)
            return Lacking(value, rest) if name == first else value

    monkeypatch.setattr(fitting, "build_trainer", lambda *arguments: Lacking(build(*arguments), path))
    blocker = fitting.lightning_blocker(device)
    assert f"no {path}" in blocker and "upstream's own loop runs" in blocker


def test_a_lightning_that_takes_other_arguments_leaves_the_fit_to_upstreams_loop(monkeypatch):
    import lightning.pytorch as pl

    from detgraph.trainer.fit import under_lightning as fitting

    class Older(pl.Trainer):
        def __init__(self, *, strategy, devices) -> None: ...

    monkeypatch.setattr(pl, "Trainer", Older)
    assert "its Trainer cannot be built" in fitting.lightning_blocker(torch.device("cpu"))


class Broken:
    """A Lightning that cannot be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning":
            raise ImportError("broken")


def test_a_fit_without_lightning_is_upstreams(tmp_path):
    """In a process of its own: this one has imported it."""
    data = make_dataset(tmp_path / "data", 4, 2)
    model = tmp_path / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY))
    script = tmp_path / "fit.py"
    script.write_text(
        "import sys\n"
        + inspect.getsource(Broken)
        + "sys.meta_path.insert(0, Broken())\n"
        + "from detgraph.trainer import LightningDetectionTrainer\n"
        + f"trainer = LightningDetectionTrainer(overrides=dict(model={str(model)!r}, data={str(data)!r}, imgsz=64,\n"
        + "    batch=2, epochs=1, workers=0, device='cpu', plots=False, optimizer='SGD', capture_network=True))\n"
        + "trainer.train()\n"
        + "print('blocked:', trainer.capture_report.blocked)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "blocked: Lightning cannot be imported (broken), so upstream's own loop runs" in done.stdout
