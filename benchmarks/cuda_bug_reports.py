"""Public failures of recorded training, tried on CUDA: `python benchmarks/cuda_bug_reports.py DATA.yaml [--rows TEXT]`.

Every row runs the training step eagerly and replayed from one saved state, with the same events between the steps,
and must leave equal bytes; further expectations are stated in the row. Rows are named after the table of public
reports in docs/bug-reports.md. Prints a Markdown table; exits 1 when a row fails.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
from cuda_parity import Bench, Case, Result, recorder, synchronize

from detgraph.trainer.capture.gradients import ReusedGradients
from detgraph.trainer.capture.signature import Signature
from detgraph.trainer.capture.state import NetworkState
from detgraph.trainer.parts.network import OTHER_SHAPE

CUDA = torch.cuda.is_available()
HALF = "bf16" if CUDA else "fp32"  # upstream has no BF16 on a CPU, where this script is only tried
BF16 = Case(HALF, True, 4, 4)
ACCUMULATE = Case(HALF, True, 4, 16)
ROWS: dict[str, Callable] = {}


def row(name: str) -> Callable:
    def add(function: Callable) -> Callable:
        ROWS[name] = function
        return function

    return add


class Benches:
    """Benches by case, made when first asked for; small images, since these rows are about bits."""

    def __init__(self, data: str) -> None:
        self.data, self.made = data, {}

    def __call__(self, case: Case, steps: int = 7, **more) -> Bench:
        key = (case.name, steps, str(more))
        if key not in self.made:
            self.made[key] = Bench(case, self.data, steps, imgsz=128, **{"warmup_epochs": 0, **more})
        return self.made[key]


def equal(bench: Bench, events: dict | None = None, again: Callable | None = None, **options) -> Result:
    """Run both arms, require equal bytes, return the replayed arm's result; ``again`` undoes events between arms."""
    eager = bench.run(False, events)
    if again:
        again(bench.trainer)
    replay = bench.run(True, events, **options)
    if again:
        again(bench.trainer)
    assert not (wrong := eager.differences(replay)), f"differs: {wrong}; {replay.report['retirements']}"
    return replay


@contextmanager
def forward_of(module: torch.nn.Module, forward: Callable):
    """Give one module another forward, as a custom block would have, without touching its state."""
    original = type(module)
    module.__class__ = type("Custom", (original,), {"forward": forward})
    try:
        yield
    finally:
        module.__class__ = original


def weight(t):
    return t.model.model[2].cv1.conv.weight


@row("A01 accumulation, and the same with the protection off")
def a01(benches: Benches) -> str:
    bench = benches(ACCUMULATE)
    replay = equal(bench)
    vacate, hand_out = ReusedGradients.vacate, ReusedGradients.hand_out
    ReusedGradients.vacate = lambda self, parameters: None
    ReusedGradients.hand_out = lambda self: [None if g is None else g.detach() for g in self.all]
    try:
        fault = bench.run(False).differences(bench.run(True))
    finally:
        ReusedGradients.vacate, ReusedGradients.hand_out = vacate, hand_out
    assert "gradients" in fault, "the fault does not show without the protection"
    return f"{replay.report['replayed']} replayed; off: {', '.join(fault)} differ"


@row("A02 weight changed in place; autocast cache flag")
def a02(benches: Benches) -> str:
    bench = benches(BF16)

    def double(t):
        with torch.no_grad():
            weight(t).mul_(2)

    replay = equal(bench, {3: double})
    assert replay.report["retirements"] == [] and replay.report["replayed"] == 6
    assert torch.is_autocast_cache_enabled()
    return "picked up without a retirement; cache flag as before"


@row("A03 gradients under autocast: s, attention, a float scale before a matmul")
def a03(benches: Benches) -> str:
    told = []
    for model in ("yolo26s.yaml", "yolo11n.yaml", "yolo12n.yaml"):
        case = Case(HALF, True, 4, 4, model)
        replay = equal(benches(case, 4))
        told.append(f"{model} {replay.report['replayed']}/4")

    def scaled(self, x):
        y = type(self).__base__.forward(self, x)
        flat = y.flatten(2) * 0.70710678
        return y + (flat @ (flat.transpose(1, 2) @ flat * 1e-6)).view_as(y)

    bench = benches(BF16, 5)
    with forward_of(bench.trainer.model.model[4], scaled):
        replay = equal(bench)
    return ", ".join([*told, f"custom block {replay.report['replayed']}/5"])


@row("A04 buffers and generators right after recording at step 0 and 2")
def a04(benches: Benches) -> str:
    bench = benches(BF16)
    addresses = [b.data_ptr() for b in bench.trainer.model.buffers()]
    for first in (0, 2):
        replay = equal(bench, record_at_step=first)
        assert replay.report["replayed"] == 6 - first
    assert addresses == [b.data_ptr() for b in bench.trainer.model.buffers()]
    return "equal, same addresses"


@row("A05 five retirements and recordings, forward untouched")
def a05(benches: Benches) -> str:
    bench = benches(BF16, 12)

    def flip(t):
        norm = t.model.model[1].bn
        norm.train(not norm.training)

    replay = equal(bench, {i: flip for i in (2, 4, 6, 8, 10)}, again=lambda t: t._model_train(), max_recordings=10)
    assert replay.report["recordings"] == 6, replay.report
    assert all("forward" not in vars(m) for m in bench.trainer.model.modules())
    return f"{replay.report['recordings']} recordings, {replay.report['replayed']} replayed"


@row("A07 several sizes interleaved: one recording, reserved memory flat")
def a07(benches: Benches) -> str:
    bench = benches(BF16, 12, seed=5)
    batches = list(bench.batches)
    for i in range(1, 12, 2):
        side = (96, 160)[i // 2 % 2]
        bench.batches[i] = {**batches[i], "img": batches[i]["img"][..., :96, :96].contiguous()}
        if side == 160:
            bench.batches[i]["img"] = torch.nn.functional.pad(batches[i]["img"], (0, 32, 0, 32))
    reserved = []
    events = {i: lambda t: reserved.append(torch.cuda.memory_reserved() >> 20) for i in range(12)} if CUDA else {}
    replay = equal(bench, events)
    bench.batches = batches
    assert replay.report["recordings"] == 1 and replay.report["eager"][OTHER_SHAPE] == 6
    assert not CUDA or len(set(reserved[-6:])) == 1, reserved[12:]
    return f"1 recording, {replay.report['replayed']} replayed; reserved MiB by step {reserved[12:]}"


@row("A08 20 recordings with four workers, pinned memory and a busy second thread")
def a08(benches: Benches) -> str:
    bench = benches(BF16, 40, seed=7, workers=4)
    loader = bench.trainer.train_loader
    stop, done = threading.Event(), {"pins": 0, "errors": []}

    def pin_and_copy() -> None:
        try:
            while not stop.is_set():
                host = torch.empty(1 << 20).pin_memory() if CUDA else torch.empty(1 << 20)
                torch.ones(1 << 10, device=bench.trainer.device).cpu()
                done["pins"] += host.numel() > 0
        except Exception as error:  # noqa: BLE001 whatever it is, the row fails
            done["errors"].append(repr(error))

    def flip(t) -> None:
        norm = t.model.model[1].bn
        norm.train(not norm.training)
        state = NetworkState.take(norm, t.device)  # what loading draws from the generators is not part of the row
        next(loaded)
        state.restore()

    def batches():
        while True:
            yield from loader

    loaded = batches()
    thread = threading.Thread(target=pin_and_copy)
    thread.start()
    try:
        events = {i: flip for i in range(2, 40, 2)}
        replay = equal(bench, events, again=lambda t: t._model_train(), max_recordings=30)
    finally:
        stop.set()
        thread.join()
    assert not done["errors"], done["errors"]
    assert replay.report["recordings"] == 20 and replay.report["blocked"] is None, replay.report
    return f"20 of 20 recorded, {replay.report['replayed']} replayed, {done['pins']} pinned buffers meanwhile"


@row("A09 old graphs kept alive; no stream warning")
def a09(benches: Benches) -> str:
    bench, kept = benches(BF16), []
    events = {i: lambda t: kept.append(t.loss) for i in range(1, 7)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stream.*")
        replay = equal(bench, events, record_at_step=2)
    assert replay.report["replayed"] == 4
    return f"recorded at step 2 with {len(kept)} losses alive"


@row("A10 storage moved, tensors and modules replaced")
def a10(benches: Benches) -> str:
    def in_place(t):
        t.model.load_state_dict(t.model.state_dict())

    def data(t):
        weight(t).data = weight(t).data.clone()

    def assign(t):
        t.model.load_state_dict({k: v.clone() for k, v in t.model.state_dict().items()}, assign=False)
        t.model.model[1].bn.running_mean = t.model.model[1].bn.running_mean.clone()

    def layout(t):
        formats = [torch.contiguous_format, torch.channels_last]
        first = formats.index(torch.contiguous_format if CUDA else torch.channels_last)
        t.model.to(memory_format=formats[first])
        t.model.to(memory_format=formats[1 - first])

    def round_trip(t):
        for p in t.model.model[3].parameters():
            p.data = p.data.cpu().to(t.device)

    def module(t):
        old = t.model.model[5].conv
        new = torch.nn.Conv2d(old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=False)
        new.weight = old.weight
        t.model.model[5].conv = new.train()

    told = []
    for name, event, retires in [
        ("load_state_dict", in_place, False), ("p.data", data, True), ("buffer rebound", assign, True),
        ("memory format", layout, True), ("cpu and back", round_trip, True), ("module replaced", module, True),
    ]:  # fmt: skip
        replay = equal(benches(BF16), {3: event})
        assert bool(replay.report["retirements"]) == retires, (name, replay.report["retirements"])
        told.append(f"{name} ({'retired' if retires else 'kept'})")
    return ", ".join(told)


@row("A11 hooks on a submodule, before and after recording")
def a11(benches: Benches) -> str:
    bench, told = benches(BF16), []
    for name in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        for step in (0, 3):
            calls, handles = {"n": 0}, []

            def count(*_, calls=calls) -> None:
                calls["n"] += 1

            def register(t, name=name, count=count, handles=handles) -> None:
                handles.append(getattr(t.model.model[2].cv1, name)(count))

            seen: list[int] = []

            def remove(t, handles=handles, calls=calls, seen=seen) -> None:
                handles.pop().remove()
                seen.append(calls["n"])
                calls["n"] = 0

            equal(bench, {step: register}, again=remove)
            assert seen[0] == seen[1] == 7 - step, (name, step, seen)
        told.append(name.removeprefix("register_"))
    calls = {"n": 0}
    handle = weight(bench.trainer).register_hook(lambda g: calls.update(n=calls["n"] + 1))
    replay = equal(bench)
    handle.remove()
    assert calls["n"] == 14 and replay.report["replayed"] == 6, (calls, replay.report)
    return ", ".join(told) + ": same counts; parameter hook fires on replay"


@row("A13 tails of one and three images")
def a13(benches: Benches) -> str:
    bench = benches(ACCUMULATE, 9, seed=11)
    batches = list(bench.batches)
    for i, images in ((2, 1), (5, 3)):
        keep = batches[i]["batch_idx"] < images
        bench.batches[i] = {
            **batches[i], "img": batches[i]["img"][:images],
            **{k: batches[i][k][keep] for k in ("cls", "bboxes", "batch_idx")},
        }  # fmt: skip
    replay = equal(bench)
    bench.batches = batches
    assert replay.report["eager"][OTHER_SHAPE] == 2 and replay.report["recordings"] == 1
    return f"2 eager, {replay.report['replayed']} replayed, 1 recording"


@row("A14 out of memory in a recorded fit: recording and pool are gone")
def a14(benches: Benches) -> str:
    bench, seen = benches(BF16), {}

    def look(t) -> None:
        seen["recording"] = weakref.ref(t.network_step.recording)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            seen["with"] = torch.cuda.memory_reserved()

    bench.run(True, {6: look})
    bench.trainer.loss = bench.trainer.loss_items = bench.trainer.tloss = None
    bench.trainer.optimizer.zero_grad()
    assert seen["recording"]() is None, "the recording is still alive"
    if not CUDA:
        return "recording gone"
    gc.collect()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    assert after < seen["with"], (after, seen)
    return f"reserved {seen['with'] >> 20} MiB with the recording, {after >> 20} after"


@row("A14 out of memory, error and interrupt inside capture")
def a14_capture(benches: Benches) -> str:
    bench, told = benches(BF16), []
    recorder_class = type(recorder(bench.trainer.device))
    original, flags = recorder_class.capture, torch.is_autocast_cache_enabled()
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Injected"),
        RuntimeError("injected"),
        KeyboardInterrupt(),
    ):

        def fail(self, run, error=error):
            def run_and_fail():
                run()
                raise error

            return original(self, run_and_fail)

        recorder_class.capture = fail
        try:
            if isinstance(error, KeyboardInterrupt):
                try:
                    bench.run(True)
                    raise AssertionError("the interrupt was lost")
                except KeyboardInterrupt:
                    pass
            else:
                replay = equal(bench)
                assert replay.report["replayed"] == 0 and "recording failed" in replay.report["blocked"]
        finally:
            recorder_class.capture = original
        assert torch.is_autocast_cache_enabled() == flags and gc.isenabled()
        assert not CUDA or torch.cuda.current_stream() == torch.cuda.default_stream()
        told.append(type(error).__name__)
    assert equal(bench).report["replayed"] == 6
    return ", ".join(told) + ": eager with the reason, or raised; the next fit records again"


@row("A18 frozen layers; one inner BatchNorm in eval from step 2 to 4")
def a18(benches: Benches) -> str:
    def set_mode(training: bool):
        return lambda t: t.model.model[2].cv1.bn.train(training)

    replay = equal(benches(BF16), {2: set_mode(False), 4: set_mode(True)}, again=lambda t: t._model_train())
    assert len(replay.report["retirements"]) == 2
    told = []
    for freeze in (10, [0, 3]):
        frozen = equal(benches(BF16, 5, freeze=freeze))
        assert frozen.report["replayed"] == 4
        told.append(f"freeze={freeze}: 4 replayed")
    return "2 retirements; " + "; ".join(told)


@row("a block that reads the device on the host: eager with the reason")
def host_read(benches: Benches) -> str:
    bench = benches(BF16, 5)

    def reads(self, x):
        y = type(self).__base__.forward(self, x)
        return y if y.detach().float().abs().sum().item() >= 0 else -y

    with forward_of(bench.trainer.model.model[4], reads):
        replay = equal(bench)
    assert replay.report["replayed"] == 0 and replay.report["blocked"]
    return replay.report["blocked"][:90]


@row("verify at every step")
def verify(benches: Benches) -> str:
    replay = equal(benches(ACCUMULATE), capture_network="verify")
    assert replay.report["replayed"] == 6
    return f"6 verified in {replay.report['seconds']['checking']:.2f} s"


@row("cost of the signature; memory with and without the self-check")
def cost(benches: Benches) -> str:
    bench = Bench(BF16, benches.data, 8)
    images = bench.batches[0]["img"].to(bench.trainer.device).float()
    signature = Signature(bench.trainer.model, images)
    assert signature.change(images) is None
    started = time.perf_counter()
    for _ in range(200):
        signature.change(images)
    each = (time.perf_counter() - started) / 200 * 1e3
    checked, unchecked = bench.run(True), bench.run(True, self_check=False)
    synchronize()
    more = checked.reserved / unchecked.reserved - 1 if CUDA else 0.0
    assert more <= 0.02, f"the self-check reserves {more:.1%} more"
    return f"signature {each:.2f} ms, {each / checked.step_ms:.2%} of a step; self-check {more:+.1%} reserved"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rows", default="", help="only rows whose name contains this text")
    args = parser.parse_args()
    benches, failed = Benches(args.data), 0
    lines = ["| row | result | seen |", "|---|---|---|"]
    for name, function in ROWS.items():
        if args.rows not in name:
            continue
        try:
            lines.append(f"| {name} | pass | {function(benches)} |")
        except Exception as error:  # noqa: BLE001 a row that fails must not hide the others
            traceback.print_exc()
            failed += 1
            lines.append(f"| {name} | **FAIL** | {type(error).__name__}: {str(error)[:200]} |")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    print(f"\n{len(lines) - 2 - failed} of {len(lines) - 2} rows pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
