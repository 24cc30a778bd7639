"""The oracle that nobody here wrote: upstream's own loop, same seed, must leave the same bytes.

Each case trains three times: upstream's trainer in a process that knows neither us nor Lightning, our loop eagerly, and
our loop replaying network and orthogonalization through the emulator. Everything is compared: gradients before clipping
at every optimizer step, losses of every micro-batch, images as they reach the network, final state by part, callbacks,
log, files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from arms import Arm, differences, fits

from .conftest import BASE


@dataclass
class Case:
    """Arguments over the base, what is done to the fit, and whether it ends with an error."""

    name: str
    args: dict = field(default_factory=dict)
    perturb: list = field(default_factory=list)
    data: str = "six"
    fails: bool = False
    replays: bool = True  # whether any batch has the form that is recorded


NANO = {"model": "yolo26n.yaml"}
MUSGD = {"optimizer": "MuSGD"}  # where what happens to the fit could reach the recording of its optimizer step
IN_BATCH = {"event": "on_train_batch_end", "number": 5}
CASES = [
    Case("musgd", {**NANO, **MUSGD}),
    Case("sgd", NANO),
    Case("adamw", {**NANO, "optimizer": "AdamW", "lr0": 0.001}),
    Case("auto", {"optimizer": "auto"}),
    Case("accumulate", {"nbs": 8, "epochs": 4}),
    Case("accumulate_warmup", {**MUSGD, "nbs": 8, "epochs": 4, "warmup_epochs": 2.0}),
    Case("partial_batch", {"batch": 4, "epochs": 4}, data="seven"),
    Case("tail_of_one", {"batch": 4, "nbs": 16, "epochs": 4}, data="nine"),
    Case("close_mosaic", {"close_mosaic": 1}),
    Case("freeze", {**MUSGD, "freeze": 5}),
    Case("freeze_list", {"freeze": [0, 3]}),
    Case("multi_scale", {"multi_scale": 0.5, "imgsz": 96, "epochs": 3}),
    Case("cos_lr", {"cos_lr": True, "warmup_epochs": 1.0, "epochs": 3}),  # halfway, cosine and line meet
    Case("cls_pw", {"cls_pw": 0.5}),
    Case("single_cls", {"single_cls": True}),
    Case("rect", {"rect": True}),
    Case("background", data="background"),
    Case("save_period", {"save_period": 1}),
    Case("time", {"time": 0.004, "epochs": 6}, [["clock", {"seconds": 3.0}]]),  # five batches
    Case("early_stop", {"patience": 1, "epochs": 6}, [["no_improvement", {}]]),
    Case("external_stop", {"epochs": 3}, [["stop_at", {"batch": 5}]]),
    Case("two_workers", {"close_mosaic": 1, "epochs": 3}, [["workers", {"count": 2}]]),
    Case("scaler", MUSGD, [["scaler", {"scale": 1024.0}]]),
    Case("scaler_overflow", {**MUSGD, "epochs": 3}, [["scaler", {"scale": 2.0**124}]]),
    Case("scaler_fused", {"optimizer": "AdamW", "epochs": 3}, [["fused_adamw", {}], ["scaler", {"scale": 2.0**124}]]),
    Case("nan_loss", {**MUSGD, "epochs": 3}, [["nan_loss", {"epochs": [1, 2]}]]),
    Case("nan_first_epoch", {}, [["nan_loss", {"epochs": [0]}]]),
    Case("nan_persists", {"epochs": 3}, [["nan_loss", {"epochs": [1, 1, 1, 1]}]], fails=True),
    Case("nan_weight", {**MUSGD, "epochs": 3}, [["nan_weight", {"epoch": 1}]]),
    Case("other_loader", {"epochs": 3}, [["smaller_batches", {"epoch": 1}]]),
    Case("other_loader_at_once", {}, [["smaller_batches", {"epoch": 0}]], replays=False),
    Case("plain_loader", {}, [["plain_loader", {}]]),
    Case("close_mosaic_late", {}, [["set_at_start", {"name": "close_mosaic", "value": 1}]]),
    Case("start_epoch_late", {"epochs": 3}, [["set_at_start", {"name": "start_epoch", "value": 1}]]),
    Case("out_of_memory", {**MUSGD, "batch": 4}, [["out_of_memory", {"call": 1}]], "eight"),
    Case("out_of_memory_late", {"batch": 4}, [["out_of_memory", {"call": 2}]], "eight"),
    Case("out_of_memory_second_epoch", {"batch": 4}, [["out_of_memory", {"call": 4}]], "eight", fails=True),
    Case("interrupt", {}, [["raise_at", {**IN_BATCH, "error": "KeyboardInterrupt"}]], fails=True),
    Case("stop_iteration", {}, [["raise_at", {**IN_BATCH, "error": "StopIteration"}]], fails=True),
    Case("no_val", {"val": False}),
    Case("no_mosaic_dropout", {"mosaic": 0.0, "mixup": 0.5, "fliplr": 0.5}),
    Case("yolo11", {"model": "yolo11n.yaml"}),
    Case("yolov8", {"model": "yolov8n.yaml"}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_bytes_as_upstream(case: Case, small_data, stock_arm, our_arm, emulated_arm) -> None:
    args = {**BASE, "data": small_data[case.data], **case.args}
    stock, ours, emulated = fits([(arm, args) for arm in (stock_arm, our_arm, emulated_arm)], case.perturb)

    assert (stock["error"] is not None) == case.fails, stock["error"]
    assert stock["type"].startswith("ultralytics.") and ours["type"].startswith("detgraph.")
    assert not differences(stock, ours)
    assert not differences(stock, emulated)

    for fit in (ours, emulated):  # Lightning ran every micro-batch: none went through upstream's loop
        completed = len(stock["images"]) - _lost(stock)
        assert fit["micro_batches"] == completed, (fit["micro_batches"], completed)
    report = emulated["report"]
    assert report["steps"] == len(stock["images"])
    assert report["blocked"] is None and report["unverifiable"] == []
    set_aside = sum(n for reason, n in report["eager"].items() if reason in SET_ASIDE)
    assert report["replayed"] >= 0.9 * (report["steps"] - set_aside)
    assert (report["replayed"] > 0) == case.replays

    steps = report["orthogonalization"]
    # What the report calls replayed was: two tapes a batch, and one at least a step of the optimizer.
    assert emulated["replays"] >= 2 * report["replayed"] + steps["replayed"] - _lost(stock)
    assert steps["steps"] == len(stock["gradients"])
    if args["optimizer"] == "MuSGD":
        assert steps["blocked"] is None and steps["unverifiable"] == [] and steps["retirements"] == []
        assert set(steps["eager"]) <= {"step that was recorded", "step without orthogonalization"}
        assert steps["replayed"] > 0 and steps["recordings"] == steps["eager"]["step that was recorded"]
    else:
        assert steps["replayed"] == 0 and "only MuSGD orthogonalizes" in steps["blocked"]


def test_same_bytes_as_upstream_with_the_objective_replayed(small_data, stock_arm, our_arm, emulated_arm) -> None:
    """Two epochs, whose weights of the two heads differ, a partial batch, and a scaler, into all files."""
    args = {**BASE, "data": small_data["seven"], "epochs": 3, "nbs": 4}
    requests = [(stock_arm, args), (our_arm, args), (emulated_arm, {**args, "capture_objective": True})]
    stock, ours, emulated = fits(requests, [["scaler", {"scale": 1024.0}]])
    assert stock["error"] is None and not differences(stock, ours) and not differences(stock, emulated)
    report = emulated["report"]["objective"]
    assert report["steps"] == len(stock["images"]) and report["blocked"] is None and report["unverifiable"] == []
    assert report["retirements"] == [] and report["replayed"] >= 0.4 * report["steps"]


def test_a_loss_replaced_on_the_class_is_the_one_that_trains(small_data, stock_arm, our_arm, emulated_arm) -> None:
    args = {**BASE, "data": small_data["six"], "epochs": 1}
    perturb = [["half_bright_loss", {}]]
    stock, ours, emulated = fits([(arm, args) for arm in (stock_arm, our_arm, emulated_arm)], perturb)
    assert not differences(stock, ours) and not differences(stock, emulated)
    assert emulated["report"]["blocked"] == "the model's loss() was replaced on its class"


def test_importing_lightning_moves_neither_generators_nor_the_clock(small_data, stock_arm) -> None:
    """The first fit of a process imports it after upstream has seeded the fit and before its time starts to count."""
    arm = Arm("ours", "draws-on-import")
    args = {**BASE, "data": small_data["eight"], "epochs": 1, "name": "draws"}  # the arms count their fits apart
    stock, ours = fits([(stock_arm, args), (arm, args)])
    arm.close()
    assert not differences(stock, ours)
    late = {"detgraph", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}
    assert "imported" in ours and not late & set(ours["imported"])


SET_ASIDE = ("step that was recorded", "batch of another shape")


def _lost(fit: dict) -> int:
    """Return how many micro-batches of a fit failed before their backward was done."""
    return sum("out of memory" in str(line).lower() for line in fit["log"]) + ("out of memory" in str(fit["error"]))
