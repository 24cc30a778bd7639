"""How a fit ends when it does not end by itself: signals to real processes, bad input, and what the console shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import ultralytics
from ultralytics.models.yolo.detect import DetectionTrainer

from arm import normalised
from detgraph.cfg import CaptureOptionError, remembered_options
from detgraph.trainer import YOLO, LightningDetectionTrainer

from .conftest import FIT, Replaying, warned

MODULES = {"stock": "ultralytics.cfg.__init__", "ours": "detgraph.trainer"}
ENDLESS = {"epochs": 10000, "val": False, "patience": 0}

# A program that catches the interrupt, and that tells whether its handlers were given back.
CATCHING = """
import json, signal, sys
from {package} import YOLO
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
assert handlers[0] is signal.default_int_handler
args = json.loads(sys.argv[1])
try:
    YOLO(args["model"]).train(**args)
except KeyboardInterrupt:
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    raise SystemExit(7)
"""


def words(args: dict) -> list[str]:
    return [f"{key}={value}" for key, value in args.items()]


def start(command: list, folder: Path) -> subprocess.Popen:
    """Start a process as a shell does: with the default action for interrupts, whatever the test's own parent set."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "out.txt", "w") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


def end(process: subprocess.Popen, run: Path, number: int) -> tuple[int, float]:
    """Send a signal once two epochs are done; return the exit status and the seconds until it was there.

    An interrupt is an exception wherever Python is just then, and C code that clears errors loses it, under upstream's
    loop, too: so it is sent again, as somebody at a keyboard would.
    """
    table = run / "results.csv"
    started = time.monotonic()
    try:
        while not table.exists() or len(table.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() - started < 120, (run.parent / "out.txt").read_text()
            time.sleep(0.02)
        for _ in range(4 if number == signal.SIGINT else 1):
            sent = time.monotonic()
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=20), time.monotonic() - sent
        raise AssertionError((run.parent / "out.txt").read_text()[-4000:])
    finally:
        process.kill()
        process.wait()


# Signals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["ultralytics", "detgraph.trainer"])
def test_an_interrupt_reaches_the_program(package, tiny, tmp_path) -> None:
    """A real SIGINT, somewhere in the fit, arrives in the caller's `except KeyboardInterrupt`."""
    args = {**FIT, **ENDLESS, "data": tiny["some"], "project": str(tmp_path), "name": "run"}
    if package != "ultralytics":
        args["capture_network"] = True
    process = start(["-c", CATCHING.format(package=package), json.dumps(args)], tmp_path)
    status, seconds = end(process, tmp_path / "run", signal.SIGINT)
    assert (status, seconds < 20) == (7, True), (tmp_path / "out.txt").read_text()


@pytest.fixture(scope="module")
def terminated(tiny, tmp_path_factory) -> dict[str, tuple[Path, int, float]]:
    """Return run folder, exit status and duration of command lines that were told to terminate in a fit."""
    found = {}
    for kind, module in MODULES.items():
        folder = tmp_path_factory.mktemp(kind)
        args = {**FIT, **ENDLESS, "data": tiny["some"], "project": folder, "name": "run"}
        extra = ["capture_network=True"] if kind == "ours" else []
        process = start(["-m", module, "train", *words(args), *extra], folder)
        found[kind] = (folder / "run", *end(process, folder / "run", signal.SIGTERM))
    return found


@pytest.mark.parametrize("kind", MODULES)
def test_termination_is_prompt(terminated, kind) -> None:
    """A shell sees 143: nobody catches SIGTERM to do something else first."""
    folder, status, seconds = terminated[kind]
    assert status == -signal.SIGTERM and seconds < 10
    assert (folder / "weights" / "last.pt").exists()


def test_a_killed_fit_remembers_its_options(terminated, tmp_path) -> None:
    """No process can write its report after a kill, so the options have to be on disk before."""
    folder = shutil.copytree(terminated["ours"][0], tmp_path / "run")
    options = remembered_options(folder)
    assert options is not None and options.enabled
    trainer = Replaying(overrides={"resume": str(folder / "weights" / "last.pt"), "save_dir": str(folder)})
    trainer.add_callback("on_train_epoch_end", lambda trainer: setattr(trainer, "stop", True))
    trainer.train()
    assert trainer.capture_report.replayed > 0


def test_an_interrupted_command_line_ends_as_upstreams(tiny, tmp_path) -> None:
    """By the signal, so that a shell's loop ends, too. Where tabulate is installed, torch, as Lightning imports it,
    imports that at exit: it evaluates text, after which Python knows of no interrupt any more.
    """
    (tmp_path / "tabulate.py").write_text("eval('0')\ndef tabulate(*rows, **style):\n    return ''\n")
    args = {**FIT, **ENDLESS, "data": tiny["some"], "project": tmp_path, "name": "run"}
    process = start(["-m", MODULES["ours"], "train", *words(args), "capture_network=True"], tmp_path)
    status, _ = end(process, tmp_path / "run", signal.SIGINT)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert status == -signal.SIGINT and "KeyboardInterrupt" in lines, "\n".join(lines[-40:])
    (told,) = [line for line in lines if "To go on from here" in line]
    assert told.endswith(f": yolo train resume model={tmp_path / 'run' / 'weights' / 'last.pt'}")
    assert remembered_options(tmp_path / "run").enabled
    assert not [line for line in lines if re.search("graceful|lightning", line, re.I) and line[:2] != "  "]  # no frame


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, StopIteration, RuntimeError])
def test_an_error_in_a_callback_reaches_the_caller(error, fit_args) -> None:
    """As it was raised, and the next fit of the process is as good as the first."""
    raised = error("injected")

    def stop(trainer):
        raise raised

    trainer = Replaying(overrides={**fit_args, "capture_network": True})
    trainer.add_callback("on_train_batch_end", stop)
    with pytest.raises(error) as caught:
        trainer.train()
    assert caught.value is raised
    if error is ValueError:
        again = Replaying(overrides={**fit_args, "capture_network": True, "epochs": 1})
        again.train()
        assert again.capture_report.replayed > 0 and again.last.exists()


def test_a_stop_button_in_a_thread_reaches_it(fit_args) -> None:
    """Only the main thread may touch signals."""
    raised, caught = KeyboardInterrupt("stop button"), []

    def stop(trainer):
        raise raised

    def run():
        trainer = Replaying(overrides=fit_args)
        trainer.add_callback("on_train_batch_end", stop)
        try:
            trainer.train()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert caught == [raised]


def test_anomaly_mode_that_ignores_nan_stays_so(fit_args) -> None:
    seen = []
    trainer = Replaying(overrides={**fit_args, "epochs": 1})
    trainer.add_callback("on_train_batch_end", lambda trainer: seen.append(torch.is_anomaly_check_nan_enabled()))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        trainer.train()
    assert seen and not any(seen)


def test_an_exit_after_an_interrupt_is_an_exit(fit_args) -> None:
    def leave(trainer):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(3) from None

    trainer = Replaying(overrides=fit_args)
    trainer.add_callback("on_train_batch_end", leave)
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration])
def test_an_error_keeps_its_cause_and_context(error, fit_args) -> None:
    def stop(trainer):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as first:
            raise error("injected") from first

    trainer = Replaying(overrides=fit_args)
    trainer.add_callback("on_train_batch_end", stop)
    with pytest.raises(error) as caught:
        trainer.train()
    assert type(caught.value.__cause__) is type(caught.value.__context__) is ZeroDivisionError


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"capture_network": "maybe"}, "capture_network=maybe"),
        ({"capture_network": 1}, "capture_network=1 "),
        ({"capture_network": None}, "capture_network=None"),
        ({"capture_netwrok": True}, "Did you mean capture_network"),
        ({"capture_network": True, "compile": True}, "compile=False"),
        ({"capture_options": {"record_at_step": -1}}, "record_at_step=-1"),
    ],
)
def test_the_trainer_refuses_before_any_work(given, part, fit_args) -> None:
    with pytest.raises(CaptureOptionError, match=re.escape(part)):
        LightningDetectionTrainer(overrides={**fit_args, **given})
    assert not Path(fit_args["project"]).exists()


@pytest.mark.parametrize(
    "given",
    [
        {"amp": "bf16"},
        {"amp": "maybe"},
        {"data": "missing.yaml"},
        {"epochs": "many"},
        {"epoch": 3},
        {"optimizer": "Adamw2"},
        {"imgsz": 32, "batch": 7},
        {"resume": "missing.pt"},
    ],
    ids=lambda given: ",".join(words(given)),
)
def test_upstreams_errors_stay_upstreams(given, fit_args, tmp_path, monkeypatch) -> None:
    """With the capture asked for, an input that upstream refuses is refused in the same words."""
    monkeypatch.chdir(tmp_path)
    said = []
    for make, ours in ((ultralytics.YOLO, {}), (YOLO, {"capture_network": True})):
        with pytest.raises(Exception) as error:  # noqa: B017 whatever upstream raises
            make(fit_args["model"]).train(**{**fit_args, **given}, **ours)
        said.append((type(error.value), str(error.value).replace("fit-2", "fit")))
    assert said[0] == said[1] and said[0][0] is not CaptureOptionError


def test_labels_out_of_range(make_dataset, fit_args, tmp_path, heard) -> None:
    """Upstream warns of each bad file, leaves it out and trains with the others; so do we."""
    data = make_dataset(tmp_path / "bad", 8, 4)
    for number in (1, 2):
        (data.parent / f"labels/train/{number:04d}.txt").write_text("7 0.5 0.5 0.2 0.2\n")
    found = []
    for trainer_class, ours in ((DetectionTrainer, {}), (Replaying, {"capture_network": True})):
        heard.clear()
        trainer = trainer_class(overrides={**fit_args, **ours, "data": str(data), "epochs": 1, "batch": 2})
        trainer.train()
        (tmp_path / "bad" / "labels" / "train.cache").unlink()
        found.append([line for line in heard if "exceeds dataset class count" in line])
        assert len(trainer.train_loader.dataset) == 6
    assert found[0] == found[1] and len(found[0]) == 2
    assert trainer.capture_report.replayed > 0


# The console ----------------------------------------------------------------------------------------------------------


def printed(kind: str, args: dict, folder: Path, *more: str) -> tuple[int, list[str]]:
    """Run a command line; return its exit status and what it printed, with progress bars and durations taken out."""
    process = start(["-m", MODULES[kind], "train", *words({**args, "project": folder}), *more], folder)
    status = process.wait(timeout=120)
    lines = normalised((folder / "out.txt").read_text().splitlines(), str(folder))
    return status, [line for line in lines if "━" not in line and "─" not in line and line.strip()]


def test_the_console_is_upstreams(tiny, tmp_path) -> None:
    """Our one warning, our column and our summary are all that is more; nothing of Lightning is to be read."""
    args = {**FIT, "data": tiny["some"], "name": "run", "epochs": 1}
    lines = {}
    for kind in MODULES:
        (tmp_path / kind).mkdir()
        ours = ["capture_network=True"] if kind == "ours" else []
        status, lines[kind] = printed(kind, args, tmp_path / kind, *ours)
        assert status == 0
    assert len(warned(lines["ours"])) == 1
    (summary,) = [line for line in lines["ours"] if line.startswith("capture_network")]
    assert summary.startswith("capture_network: 0 of 2 steps replayed") and "needs a CUDA device" in summary
    rest = [line.removesuffix("   Replayed") for line in lines["ours"] if "capture_network" not in line]
    assert rest == lines["stock"]


def test_an_error_is_the_last_word(tiny, tmp_path) -> None:
    """Exit status 1 and upstream's message at the end of the output, where one looks for it."""
    args = {**FIT, "data": tiny["some"], "name": "run", "amp": "bf16"}
    last = {}
    for kind in MODULES:
        (tmp_path / kind).mkdir()
        status, lines = printed(kind, args, tmp_path / kind, *(["capture_network=True"] if kind == "ours" else []))
        written = (tmp_path / kind / "out.txt").read_text()
        last[kind] = status, lines[-1], re.split(r"[\r\n]+", written.strip())[-1]
    assert last["stock"] == last["ours"]
    assert last["ours"][0] == 1 and last["ours"][2].startswith("RuntimeError: bfloat16 autocast requires CUDA")


def test_lightning_is_quiet_under_its_older_name_too(tiny, tmp_path) -> None:
    """Its older package, imported after it, is the name that it speaks under from then on."""
    pytest.importorskip("pytorch_lightning")
    args = {**FIT, "epochs": 1, "data": tiny["some"], "project": str(tmp_path)}
    code = f"""
from detgraph.trainer import YOLO
YOLO({args["model"]!r}).train(**{args!r})
import pytorch_lightning
YOLO({args["model"]!r}).train(**{args!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "available" not in done.stdout + done.stderr, done.stderr
