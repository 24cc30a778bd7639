"""Nothing of a fit is kept by anything of ours once nobody holds its trainer, however it ended."""

from __future__ import annotations

import gc
import weakref

import pytest

from detgraph.trainer import LightningDetectionTrainer
from detgraph.trainer.capture.recording import Recording
from emulator import EmulatingRecorder

HOW = ("eager", "replayed", "objective", "verified", "failed", "interrupted", "failed recording")


class Failing(EmulatingRecorder):
    def capture(self, run):
        super().capture(run)
        raise RuntimeError("no room")


@pytest.fixture
def tiny_args(fit_args) -> dict:
    return {**fit_args, "batch": 2, "epochs": 1, "exist_ok": True}


def run_fit(how: str, args: dict) -> tuple[list[weakref.ref], int]:
    """Run a fit to its end; return references to what is large in it, and how many steps it has replayed."""

    def leave(trainer) -> None:
        if trainer.loop_state.micro_batches == 3:
            raise {"failed": ValueError, "interrupted": KeyboardInterrupt}[how]

    capture = {"eager": False, "verified": "verify"}.get(how, True)
    keys = {"capture_network": capture, "capture_objective": how == "objective"}
    trainer = LightningDetectionTrainer(overrides={**args, **keys})
    trainer.recorder = Failing() if how == "failed recording" else EmulatingRecorder()
    if how in ("failed", "interrupted"):
        trainer.add_callback("on_train_batch_end", leave)
    try:
        trainer.train()
    except (ValueError, KeyboardInterrupt):
        pass
    parts = trainer, trainer.model, trainer.optimizer, trainer.ema.ema, trainer.train_loader.dataset
    counts = trainer.capture_report.objective if how == "objective" else trainer.capture_report
    return [weakref.ref(part) for part in parts], counts.replayed


@pytest.mark.parametrize("how", HOW)
def test_a_fit_is_gone_with_its_trainer(how, tiny_args):
    parts, replayed = run_fit(how, tiny_args)
    gc.collect()
    assert [type(alive).__name__ for part in parts if (alive := part()) is not None] == []
    assert (replayed > 0) == (how not in ("eager", "failed recording"))


def test_a_loss_that_somebody_keeps_keeps_no_fit(tiny_args, monkeypatch):
    """Its node of autograd is of a kind that the garbage collector does not look into."""
    kept: list = []

    def keep(trainer) -> None:
        kept.append(trainer.loss)

    def look(parts: list[weakref.ref]) -> list[str]:
        gc.collect()
        return [type(alive).__name__ for part in parts if (alive := part()) is not None]

    def fit() -> list[str]:
        trainer = LightningDetectionTrainer(overrides={**tiny_args, "capture_network": True})
        trainer.recorder = EmulatingRecorder()
        trainer.add_callback("on_train_batch_end", keep)
        trainer.train()
        assert trainer.capture_report.replayed > 0
        parts = [weakref.ref(part) for part in (trainer, trainer.model, trainer.optimizer)]
        del trainer
        return look(parts)

    assert fit() == []
    kept.clear()
    release = Recording.release

    def half(self) -> None:
        program = self.program
        view = program and program.view
        release(self)
        if program is not None:
            self.program, program.view = program, view

    monkeypatch.setattr(Recording, "release", half)
    assert "DetectionModel" in fit()
    kept.clear()
