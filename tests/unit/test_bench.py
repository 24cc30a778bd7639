"""The measuring scripts: arms, records that grow, budgets, failures, tables and pictures; one fit is real."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest

from fixtures import script, scripts  # noqa: F401 fixture
from helpers import ROOT

ARMS = {"upstream": ["upstream"], "eager": ["ours"], "replay": ["ours", "capture_network=True"]}
WHERE = {"gpu": "GPU X", "torch": "2.11.0", "commit": "abc"}


def fit(seconds, digests="same", steps=(10.0, 12.0, 11.0), wall=None, reserved=300 << 20, replayed=None):
    """Return a fit as `sittings.run_fit` does, cut down to what table and picture read."""
    return {
        "fit_seconds": seconds,
        "wall_seconds": seconds + 5 if wall is None else wall,
        "validation_seconds": 0.5,
        "steps": len(steps),
        "step_ms": list(steps),
        "peak_allocated": reserved // 2,
        "peak_reserved": reserved,
        "digests": {"losses": "same", "ema": digests},
        "report": None if replayed is None else {"replayed": replayed, "blocked": None},
    }


def record(rounds=(), warmup=0, pairs=2, arms=ARMS):
    return {
        "script": "bench",
        "arms": dict(arms),
        "words": ["data=x.yaml", "batch=4"],
        "warmup": warmup,
        "pairs": pairs,
        "environment": WHERE,
        "sittings": [{"began": "now", "processor": "P"}],
        "rounds": list(rounds),
    }


def three(upstream=20.0, eager=22.0, replay=16.0, **more):
    return {"upstream": fit(upstream), "eager": fit(eager, replayed=0), "replay": fit(replay, replayed=2, **more)}


def runner(calls, broken=()):
    """Return a stand-in for the process of a fit: it notes the call, and fails for the words in `broken`."""

    def run(kind, words):
        calls.append(words[-1])
        if words[-1] in broken:
            raise script("sittings").FitFailed(f"fit.py ended with 1: Traceback\nRuntimeError: {words[-1]} | no")
        return fit(10.0)

    return run


# Arms -----------------------------------------------------------------------------------------------------------------


def test_arms_are_read():
    texts = ["a:upstream", "b:ours:capture_network=True,classes=[0,1],batch=4"]
    expected = {"a": ["upstream"], "b": ["ours", "capture_network=True", "classes=[0,1]", "batch=4"]}
    assert script("sittings").read_arms(texts) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a"], "'a' is no arm"),
        ([":ours", "b:ours"], "':ours' is no arm"),
        (["a:theirs", "b:ours"], "'theirs' is unknown, known are upstream, ours"),
        (["a:ours", "a:ours:batch=2"], "two arms are called 'a'"),
        (["a:ours"], "two or more arms, here is 1"),
        (["a:ours:batch", "b:ours"], "'batch' is no argument: write key=value"),
        (["a:ours:batch=2,nbs", "b:upstream"], None),  # a comma belongs to the value: refused when upstream reads it
    ],
)
def test_wrong_arms_are_refused(texts, message):
    sittings = script("sittings")
    if message is None:
        assert sittings.read_arms(texts)["a"] == ["ours", "batch=2,nbs"]
        return
    with pytest.raises(sittings.Refused, match=message):
        sittings.read_arms(texts)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("x:upstream:capture_network=True", "'capture_network' is no training argument of this kind"),
        ("x:ours:capture_netwrok=True", "Did you mean capture_network"),
        ("x:ours:capture_network=maybe", "capture_network=maybe is not allowed"),
        ("x:ours:capture_network=True,compile=True", "contradict each other"),
        ("x:ours:record_at_step=-1", "record_at_step=-1 is not allowed"),
        ("x:ours:batch=many", "batch=many"),
        ("x:ours:project=here", "project= is not for a measurement"),
        ("x:ours:imgsz=abc", "imgsz=abc' is not a valid image size"),
    ],
)
def test_arguments_that_no_fit_would_take_are_refused_before_any(arm, message):
    sittings = script("sittings")
    with pytest.raises(sittings.Refused, match=f"arm 'x'.*{message}"):
        sittings.check_arms(sittings.read_arms(["first:upstream:compile=reduce-overhead", arm]), ["epochs=1"])


def test_words_replace_defaults():
    sittings = script("sittings")
    assert sittings.lay_over(["a=1", "b=2"], ["b=3", "c=4"]) == ["a=1", "b=3", "c=4"]
    with pytest.raises(sittings.Refused, match="^'b' is no argument: write key=value$"):
        sittings.lay_over(["a=1"], ["b"])


@pytest.mark.parametrize("data", [True, False])
def test_defaults_without_a_gpu_run_on_a_cpu(data, tmp_path, make_dataset, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with a GPU, too
    given = ["--data", str(make_dataset(tmp_path / "data", 2, 2))] if data else []
    assert script("bench").main([str(tmp_path / "r.json"), *given, "--budget", "0"]) == 3
    told = capsys.readouterr().out
    assert "imgsz=64 batch=16 nbs=16 amp=False epochs=2 workers=0" in told and "record: none yet" in told
    assert script("bench").main([str(tmp_path / "r.json"), *given, "--", "amp=bf16"]) == 2
    assert "amp=bf16 needs a CUDA device: give amp=False" in capsys.readouterr().err


# Records --------------------------------------------------------------------------------------------------------------


def test_record_goes_on_with_the_same_and_refuses_anything_else(tmp_path):
    sittings, path = script("sittings"), tmp_path / "r.json"
    asked = {"script": "bench", "arms": ARMS, "words": ["batch=4", "epochs=1"], "environment": WHERE}
    new = sittings.open_record(path, **asked)
    sittings.write_record(path, {**new, "rounds": [three()]})
    assert sittings.open_record(path, **asked)["rounds"] == [three()]
    before = path.read_bytes()
    for changed, message in [
        ({"words": ["epochs=1", "batch=8"]}, "words.batch is 4 in the record, 8 now"),
        ({"words": [*asked["words"], "lr0=0.1"]}, "words.lr0 is nothing in the record, 0.1 now"),
        ({"environment": {**WHERE, "torch": "2.12.0"}}, "environment.torch is 2.11.0 in the record, 2.12.0 now"),
        ({"arms": {**ARMS, "more": ["ours", "a=1"]}}, "arms.more is nothing in the record, ours a=1 now"),
        ({"arms": {**ARMS, "eager": ["upstream"]}}, "arms.eager.kind is ours in the record, upstream now"),
        (
            {"arms": {**ARMS, "replay": ["ours", "capture_network=verify"]}},
            "arms.replay.capture_network is True in the record, verify now",
        ),
    ]:
        with pytest.raises(sittings.Refused) as caught:
            sittings.open_record(path, **{**asked, **changed})
        assert f"one measurement: {message}. Name" in str(caught.value)  # this and nothing else
    assert path.read_bytes() == before
    path.write_text("{}")
    with pytest.raises(sittings.Refused, match="no record of these scripts"):
        sittings.open_record(path, **asked)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder.json", "folder.json cannot be read as a record"),
        ("file/r.json", "file/r.json cannot be written"),
        ("r.png", "give a name that ends in .json"),
        ("r.part", "give a name that ends in .json"),
    ],
)
def test_record_that_cannot_be_written_is_refused_before_any_fit(name, message, tmp_path, make_dataset, capsys):
    data = make_dataset(tmp_path / "data", 2, 2)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    assert script("bench").main([str(tmp_path / name), "--data", str(data), "--", *TINY.split()]) == 2
    told = capsys.readouterr()
    assert message in told.err and "fit 1 of" not in told.out and sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_leaves_the_old_record_and_no_draft(tmp_path, capsys):
    bench, path, draft = script("bench"), tmp_path / "r.json", tmp_path / "r.json.part"

    def run(kind, words):
        if path.exists():
            draft.symlink_to("/dev/full")
        return fit(10.0)

    assert bench.measure(record(), path, script("sittings").Budget(None), run) == 3
    assert len(json.loads(path.read_text())["rounds"][0]) == 1 and not draft.is_symlink()
    assert "NOT WRITTEN" in capsys.readouterr().out


def test_record_of_five_rounds_is_small_and_reads_back():
    steps = [round(90 + 0.37 * i % 41, 2) for i in range(384)]
    whole = record([three(steps=steps) for _ in range(7)])
    for done in whole["rounds"]:
        for one in done.values():
            one |= {"step_ms": steps, "digests": {str(i): "0" * 64 for i in range(9)}, "report": {"replayed": 1}}
    text = script("sittings").as_json(whole)
    assert json.loads(text) == whole
    assert len(text) < 200_000 and max(text.count(f'"{key}"') for key in ("step_ms", "losses")) == 21
    assert all(line.count("[") <= 1 for line in text.splitlines())


# Measuring ------------------------------------------------------------------------------------------------------------


def test_arms_take_turns_and_a_second_sitting_goes_on(tmp_path, capsys):
    bench, path, calls = script("bench"), tmp_path / "r.json", []
    arms = {name: [*words, f"tag={name}"] for name, words in ARMS.items()}
    begun = record([{"upstream": fit(10.0)}], warmup=1, pairs=1, arms=arms)
    assert bench.measure(begun, path, script("sittings").Budget(None), runner(calls)) == 0
    assert calls == ["tag=eager", "tag=replay", "tag=upstream", "tag=eager", "tag=replay"]
    told = capsys.readouterr().out
    assert "fit 2 of 6: round 1 of 2 (discarded), arm eager; about 1.2 min left" in told
    assert "round 2 of 2 (counted), arm replay" in told
    saved = json.loads(path.read_text())
    assert [list(done) for done in saved["rounds"]] == [list(ARMS)] * 2 and len(saved["sittings"]) == 2
    assert bench.measure(saved, path, script("sittings").Budget(None), runner(calls)) == 0 and len(calls) == 5


def test_budget_starts_nothing_that_would_not_end_in_time(tmp_path):
    bench, Budget, calls = script("bench"), script("sittings").Budget, []
    begun = record([{"upstream": fit(10.0, wall=50.0), "eager": fit(10.0, wall=500.0), "replay": fit(10, wall=50.0)}])
    assert bench.measure(begun, tmp_path / "r.json", Budget(300.0), runner(calls)) == 3
    assert len(calls) == 1 and list(begun["rounds"][1]) == ["upstream"]  # eager took 500 s, its turn has come
    assert bench.expected(record(), "eager") is None
    assert bench.expected(record([{"upstream": fit(10.0, wall=50.0)}]), "eager") == 50.0  # nothing of its own yet
    assert Budget(0.0).allows(None) is False and Budget(None).allows(1e9) and not Budget(10.0).allows(11.0)


def test_failed_arm_is_told_and_the_others_go_on(tmp_path):
    bench, report, path, calls = script("bench"), script("bench_report"), tmp_path / "r.json", []
    arms = {name: [*words, f"tag={name}"] for name, words in ARMS.items()}
    begun = record(arms=arms)
    status = bench.measure(begun, path, script("sittings").Budget(None), runner(calls, {"tag=upstream"}))
    assert status == 1 and calls.count("tag=upstream") == 1 and calls.count("tag=replay") == 2
    text = report.table(json.loads(path.read_text()))
    assert "| upstream | FAILED in round 1 |" in text and "RuntimeError: tag=upstream \\| no" in text
    assert "ratio to eager" in text and "2 counted rounds" in text
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_make_hands_over_names_with_spaces():
    command = ["make", "--no-print-directory", "-n", "bench", "RECORD=my job.json", "DATA=my data.yaml"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = shlex.split(told.replace("\\\n", " ")[told.index("benchmarks/bench.py") :])
    assert words == ["benchmarks/bench.py", "my job.json", "--data", "my data.yaml", "--"]


# Table and picture ----------------------------------------------------------------------------------------------------


def test_table_says_medians_ratios_memory_and_digests():
    rounds = [three(1.0, 1.0, 1.0), three(20.0, 22.0, 10.0), three(40.0, 40.0, 32.0), three(30.0, 30.0, 21.0)]
    text = script("bench_report").table(record(rounds, warmup=1, pairs=3))
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows["replay"] == (
        "| replay | 21.00 (10.00 - 32.00) | 0.700 (0.500 - 0.800) | 11.0 | 0.50 | 150 | 300 | 2/3 | equal, 1 distinct |"
    )
    assert rows["upstream"].endswith("| - | reference, 1 distinct |")
    assert "3 counted rounds, 1 discarded" in text and "departure from the protocol" in text
    assert "departure" not in script("bench_report").table(record([three()] * 7, warmup=2, pairs=5))


def test_table_names_what_differs_for_each_arm():
    rounds = [three(digests="other"), three()]
    text = script("bench_report").table(record(rounds, warmup=1, pairs=1))  # it differed in a discarded round only
    assert "| NOT equal, 2 distinct |" in text and "- replay: digests differ from upstream's in ema" in text
    assert "| equal, 1 distinct |" in text and "reference, 1 distinct" in text
    assert "No complete counted round yet" in script("bench_report").table(record([{"eager": fit(1.0)}]))


def test_picture_is_drawn_from_a_record(tmp_path):
    report = script("bench_report")
    failed = {**ARMS, "compiled": ["upstream", "compile=True"]}
    rounds = [three(), {**three(21.0, 23.0, 15.0), "compiled": {"error": "no compiler"}}]
    drawn = cv2.imread(str(report.picture(record(rounds, arms=failed), tmp_path / "a.png")))
    other = cv2.imread(str(report.picture(record([three(), three()]), tmp_path / "b.png")))
    assert drawn.shape == other.shape and drawn.shape[1] > 1200 and drawn.std() > 5
    thirds = [(drawn != other)[:, i * drawn.shape[1] // 3 : (i + 1) * drawn.shape[1] // 3].any() for i in range(3)]
    assert thirds[0], "the times differ, so must their panel"
    without = [{name: {**one, "peak_reserved": 0} for name, one in three().items()}]
    assert report.picture(record(without), tmp_path / "c.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no complete counted round"):
        report.picture(record(), tmp_path / "d.png")


# Real fits ------------------------------------------------------------------------------------------------------------

TINY = (
    "model=yolo26n.yaml imgsz=32 batch=4 nbs=4 epochs=1 amp=False optimizer=SGD workers=0 pretrained=False plots=False"
)


def test_fit_reports_every_step_and_its_validation(tmp_path, make_dataset):
    data = make_dataset(tmp_path / "data", 10, 2)
    fit = script("sittings").run_fit("upstream", [f"data={data}", *TINY.split()], tmp_path)
    assert fit["steps"] == len(fit["step_ms"]) == 3 and all(ms == round(ms, 2) > 0 for ms in fit["step_ms"])
    assert len(fit["validation_ms"]) == 2 and 0 < fit["validation_seconds"] < fit["fit_seconds"] < fit["wall_seconds"]
    assert sum(fit["step_ms"]) / 1e3 < fit["fit_seconds"] and fit["report"] is None
    assert {"losses", "parameters", "ema"} <= set(fit["digests"])


@pytest.mark.slow
def test_bench_runs_goes_on_and_shows(tmp_path, make_dataset, capsys, monkeypatch):
    data, path = make_dataset(tmp_path / "data", 10, 2), tmp_path / "r.json"
    monkeypatch.setitem(os.environ, "DETGRAPH_COMMIT", "abc")
    arms = ("--arm", "upstream:upstream", "--arm", "replay:ours:capture_network=True")
    words = [str(path), "--data", str(data), *arms, "--pairs", "1", "--warmup", "0", "--", *TINY.split(), "cache=False"]
    assert script("bench").main(words[:1] + ["--budget", "0"] + words[1:]) == 3 and not path.exists()
    assert script("bench").main(words) == 0
    told = capsys.readouterr().out
    assert "| equal, 1 distinct |" in told and path.with_suffix(".png").exists()
    before = path.read_bytes()
    assert script("bench").main(words) == 0 and path.read_bytes() == before  # nothing was left to run
    assert script("bench").main([*words, "epochs=2"]) == 2
    assert "words.epochs is 1 in the record, 2 now" in capsys.readouterr().err
    assert script("bench").main([str(path), "--show"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_bench_takes_its_fit_along_and_says_how_to_go_on(number, tmp_path, make_dataset):
    data, temporary = make_dataset(tmp_path / "data", 10, 2), tmp_path / "tmp"
    temporary.mkdir()
    words = ["r.json", "--data", str(data), "--", *TINY.split(), "epochs=1000"]
    command, told = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *words], tmp_path / "err"
    env, end = {**os.environ, "TMPDIR": str(temporary)}, time.monotonic() + 60
    with told.open("w") as err, subprocess.Popen(command, cwd=tmp_path, env=env, stdout=err, stderr=err) as bench:
        while not list(temporary.glob("tmp*/*")) and time.monotonic() < end:  # the fit's own folder
            time.sleep(0.1)
        fits = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        bench.send_signal(number)
    alive = [pid for pid in fits if Path(f"/proc/{pid}").exists()]
    for pid in alive:  # a test that fails leaves nothing behind either
        os.kill(int(pid), signal.SIGKILL)
    last = told.read_text().partition("no estimate yet")[2].strip()
    assert bench.returncode == 130 and "\n" not in last and last.endswith("the same call goes on")
    assert fits and not alive and not list(temporary.glob("tmp*/"))
