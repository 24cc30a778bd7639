"""The measuring scripts: arms, records that grow, budgets, failures, tables and pictures; one fit is real."""

from __future__ import annotations

import json
import os

import cv2
import pytest

from fixtures import script, scripts  # noqa: F401 fixture

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
    ],
)
def test_arguments_that_no_fit_would_take_are_refused_before_any(arm, message):
    sittings = script("sittings")
    with pytest.raises(sittings.Refused, match=f"arm 'x'.*{message}"):
        sittings.check_arms(sittings.read_arms(["first:upstream:compile=reduce-overhead", arm]), ["epochs=1"])


def test_words_replace_defaults():
    assert script("sittings").lay_over(["a=1", "b=2"], ["b=3", "c=4"]) == ["a=1", "b=3", "c=4"]


# Records --------------------------------------------------------------------------------------------------------------


def test_record_goes_on_with_the_same_and_refuses_anything_else(tmp_path):
    sittings, path = script("sittings"), tmp_path / "r.json"
    asked = {"arms": ARMS, "words": ["batch=4", "epochs=1"], "environment": WHERE}
    new = sittings.open_record(path, **asked)
    sittings.write_record(path, {**new, "rounds": [three()]})
    assert sittings.open_record(path, **asked)["rounds"] == [three()]
    before = path.read_bytes()
    for changed, message in [
        ({"words": ["batch=8", "epochs=1"]}, r"words is \['batch=4'\], now \['batch=8'\]"),
        ({"environment": {**WHERE, "torch": "2.12.0"}}, r"environment.torch is 2.11.0, now 2.12.0"),
        ({"arms": {**ARMS, "more": ["ours"]}}, r"arms.more is None, now \['ours'\]"),
        ({"arms": {**ARMS, "replay": ["ours", "capture_network=verify"]}}, "arms.replay"),
    ]:
        with pytest.raises(sittings.Refused, match=message):
            sittings.open_record(path, **{**asked, **changed})
    assert path.read_bytes() == before
    path.write_text("{}")
    with pytest.raises(sittings.Refused, match="no record of these scripts"):
        sittings.open_record(path, **asked)


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


def test_process_that_fails_leaves_the_end_of_its_output(tmp_path):
    sittings, bad = script("sittings"), tmp_path / "bad.py"
    bad.write_text("import sys\nprint('x' * 5000)\nraise SystemExit('cannot write ' + sys.argv[1])\n")
    with pytest.raises(sittings.FitFailed) as caught:
        sittings.run_script(str(bad), str(tmp_path / "out"), folder=tmp_path)
    assert str(caught.value).endswith("cannot write RUN/out") and len(str(caught.value)) < 2200


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
    assert "epochs=1" in capsys.readouterr().err
    assert script("bench").main([str(path), "--show"]) == 0
