"""Captures that fail on a GPU, each in its own way: the fit goes on with upstream's bytes, and so does the process.

A capture that has become invalid leaves torch's generator counting for a graph that will never be, and the graph's pool
in use, unless somebody takes it down.
"""

from __future__ import annotations

import gc

import pytest
import torch
import ultralytics.nn.tasks as tasks
import yaml
from torch import nn

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture.recorders import CudaRecorder
from detgraph.trainer.golden import digests
from steps import TINY

pytestmark = pytest.mark.gpu
DEVICE: int | str = 0


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class Failing(nn.Module):
    """Does what a capture may not do, where it says so; at other times it does it as well, or nothing."""

    how = ""

    def forward(self, x):
        if self.training:
            x = getattr(self, self.how)(x)
        return x

    def read(self, x):
        return x * (1.0 if x.abs().max().item() < 1e9 else 0.5)

    def synchronize(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return x

    def pageable(self, x):
        return x * torch.ones(1).to(x.device)

    def error(self, x):
        if capturing():
            raise ValueError("a block that looked")
        return x

    def interrupt(self, x):
        if capturing():
            raise KeyboardInterrupt
        return x

    def memory(self, x):
        return x if not capturing() else x + torch.empty(1 << 46, dtype=torch.uint8, device=x.device)[0]

    def generator(self, x):
        if capturing():  # one that the graph does not know
            x = x + torch.rand(1, generator=torch.Generator(x.device), device=x.device)
        return x

    def drawn(self, x):
        x = x + 0 * torch.rand_like(x)
        return self.read(x)


HOW = ("read", "synchronize", "pageable", "error", "interrupt", "memory", "generator", "drawn")


@pytest.fixture(scope="module")
def args(tmp_path_factory, make_dataset) -> dict:
    """Return the arguments of a fit of three steps, whose network has a block that fails."""
    tasks.Failing = Failing
    folder = tmp_path_factory.mktemp("failing")
    network = {**TINY, "backbone": [*TINY["backbone"][:-1], [-1, 1, "Failing", []]]}
    (folder / "failing26n.yaml").write_text(yaml.safe_dump(network))
    return {
        "model": str(folder / "failing26n.yaml"),
        "data": str(make_dataset(folder / "six", 6, 2)),
        "imgsz": 64,
        "batch": 2,
        "epochs": 1,
        "optimizer": "SGD",
        "nbs": 2,
        "amp": False,
        "workers": 0,
        "plots": False,
        "val": False,
        "pretrained": False,
        "device": DEVICE,
        "project": str(folder),
        "exist_ok": True,
    }


def run_fit(args: dict, capture: bool) -> tuple[dict | str, dict]:
    """Run a fit; return the digests of what it left, or its end, and its report."""
    trainer = LightningDetectionTrainer(overrides={**args, "capture_network": capture})
    try:
        trainer.train()
        end = digests.fit_digests(trainer)
    except KeyboardInterrupt:
        end = "interrupted"
    return end, trainer.capture_report.to_dict()


def clean() -> int:
    """Return the bytes that torch holds on the device when nothing is left to collect."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("how", HOW)
def test_a_failed_capture_costs_no_more_than_the_recording(how: str, args: dict, monkeypatch) -> None:
    monkeypatch.setattr(Failing, "how", how)
    eager, _ = run_fit(args, False)
    held = []
    for _ in range(2):
        found, report = run_fit(args, True)
        assert found == ("interrupted" if how == "interrupt" else eager)
        assert report["replayed"] == report["recordings"] == 0
        assert how == "interrupt" or report["blocked"].startswith("recording failed: "), report
        torch.rand(4, device="cuda" if torch.cuda.is_available() else "cpu")  # was an error
        held.append(clean())
    assert held[1] <= held[0]  # was 214 MiB more with each

    monkeypatch.setattr(Failing, "how", "error")
    monkeypatch.setattr(Failing, "error", lambda self, x: x)
    sound, _ = run_fit(args, False)
    replayed, report = run_fit(args, True)
    assert replayed == sound and report["replayed"] == 2 and report["recordings"] == 1
    assert clean() <= held[0]


def test_without_taking_it_down_the_process_draws_no_more(args: dict, monkeypatch) -> None:
    """The fault itself, mended again at the end by a capture that is whole."""
    monkeypatch.setattr(Failing, "how", "read")
    take_down = CudaRecorder._abandon

    def leave(self, graph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            pools.append(self._memory.pool)

    pools: list = []
    monkeypatch.setattr(CudaRecorder, "_abandon", leave)
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        run_fit(args, True)
    assert len(pools) == 1
    monkeypatch.setattr(CudaRecorder, "_abandon", take_down)
    recorder = CudaRecorder(torch.device("cuda", 0))
    with recorder.session(), pytest.raises(RuntimeError):
        recorder.capture(lambda: torch.ones(1, device="cuda").item())
    torch.rand(4, device="cuda")
    torch._C._cuda_endAllocateToPool(0, pools[0])
    torch._C._cuda_releasePool(0, pools[0])


def test_verified_steps_reserve_no_more_and_more(args: dict, monkeypatch) -> None:
    monkeypatch.setattr(Failing, "how", "error")
    monkeypatch.setattr(Failing, "error", lambda self, x: x)
    reserved: list[int] = []
    overrides = {**args, "epochs": 14, "capture_network": "verify"}
    trainer = LightningDetectionTrainer(overrides=overrides)
    trainer.add_callback("on_train_batch_end", lambda trainer: reserved.append(torch.cuda.memory_reserved()))
    trainer.train()
    assert trainer.capture_report.replayed >= 40
    assert max(reserved[9:]) == reserved[8], [value >> 20 for value in reserved]
