"""The scripts that measure held-out accuracy and the map of the step: what is equal, refused, and told in a row.

And what they share with `bench.py`: each reads its own records, budgets, and what a failed process leaves.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ultralytics.utils import LOGGER

from fixtures import script, scripts  # noqa: F401 fixture
from helpers import ROOT


def job(metric=0.5, state="s", replayed=96, steps=100):
    return {
        "test": {"weights": "w", "map": metric.hex(), "map50": metric.hex()},
        "digests": {"ema": state},
        "steps": steps,
        "replayed": replayed,
        "eager": {"batch of another shape": 3, "step that was recorded": 1},
        "blocked": None,
    }


def test_accuracy_is_equal_to_the_bit_or_not_at_all():
    accuracy = script("accuracy")
    arms = {"eager": ["ours"], "replay": ["ours", "capture_network=True"]}

    def told(replay, gpu="GPU X"):
        jobs = {"0": {"eager": job(replayed=0), **({"replay": replay} if replay else {})}}
        whole = {"arms": arms, "words": [], "environment": {"gpu": gpu}, "seeds": [0], "jobs": jobs}
        return accuracy.verdict(whole, "0"), accuracy.table(whole)

    verdict, text = told(job())
    assert verdict == "equal" and f"| 0.500000 | {(0.5).hex()} |" in text and "| 96/100 | equal |" in text
    assert told(job(metric=0.5 + 2**-53))[0] == "NOT equal: replay: test map, replay: test map50"
    assert told(job(state="t"))[0] == "NOT equal: replay: digests ema"
    assert told(job(steps=101))[0] == "NOT equal: replay: steps"
    assert told(job(replayed=50))[0] == "NOT equal: replay replayed 50 of 97 full batches"
    assert told(job(replayed=0), gpu=None)[0] == "equal"  # nobody expects a replay on a CPU
    assert told({"error": "x"})[0] == "NOT equal: replay failed" and "did not run" in told(None)[0]


def test_accuracy_refuses_what_is_not_held_out(tmp_path, capsys, make_dataset):
    data = make_dataset(tmp_path / "data", 2, 2)
    assert script("accuracy").main([str(tmp_path / "r.json"), str(data)]) == 2
    assert "has no test split" in capsys.readouterr().err and not (tmp_path / "r.json").exists()
    assert script("accuracy").main([str(tmp_path / "r.json"), str(data), "--seeds", "0,x"]) == 2


def test_map_cases_arms_and_rows():
    module, refused = script("map"), script("sittings").Refused
    assert len(module.cases([])) == 35
    assert [case.batch for case in module.cases(["yolo26n fp16"])] == [1, 2, 4, 8, 16, 32, 64]
    assert [case.batch for case in module.cases(["batch 1 "]) if case.model == "yolo26s.yaml"] == [1]
    assert module.read_options(["a:", "b:capture_network=True,self_check=False"])["b"][1] == "self_check=False"
    for texts in (["a:", "a:"], ["a:nothing=1"], ["a:capture_network=1"], [":x=1"]):
        with pytest.raises(refused):
            module.read_options(texts)
    eager = {"step_ms": [10.0, 12.0, 11.0], "allocated": 5 << 20, "reserved": 9 << 20, "steps": 4, "replayed": 0}
    eager |= {"digests": {"ema": "a"}, "blocked": None, "kernel_ms": 1.1, "kernels": 100}
    replay = {**eager, "step_ms": [5.5, 5.0, 6.0], "replayed": 3, "digests": {"ema": "b"}, "kernels": 20}
    row = module.row("case", {"eager": eager, "replay": replay, "more": {"error": "out of memory"}})
    assert "| 11.0 / 5.5 / out of memory | 1.00 / 2.00 / - | 10% / trace lacks kernels (20) / - |" in row
    assert "| 0/4 / 3/4 / - | reference / DIFFERS: ema / - |" in row
    on = ["capture_network=True"]
    assert module.wrong(replay, eager, on) and not module.wrong({**replay, "digests": {"ema": "a"}}, eager, on)
    assert not module.wrong({"error": "out of memory"}, eager, on) and module.wrong({"error": "x"}, eager, on)
    assert module.wrong({**eager, "blocked": "reason"}, eager, on) and not module.wrong(eager, eager, [])
    blocked = {**eager, "blocked": "recording failed: CUDA out of memory."}
    assert not module.wrong(blocked, eager, on) and module.wrong({**blocked, "digests": {"ema": "b"}}, eager, on)


def test_map_goes_on_after_an_arm_that_fails():
    import torch

    finished = []
    bench = SimpleNamespace(finish=lambda: finished.append(True))
    for error, told in [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("first line\nsecond"), "RuntimeError: first line"),
    ]:

        def fail(*_, error=error):
            raise error

        assert script("map").attempt(fail, bench, 2, None) == {"error": told}
    assert len(finished) == 2


def test_map_takes_the_first_pictures_of_a_batch_with_their_labels():
    import torch

    batch = {
        "img": torch.arange(4 * 3).reshape(4, 3, 1, 1),
        "batch_idx": torch.tensor([0.0, 0.0, 1.0, 3.0]),
        "cls": torch.arange(4.0).reshape(4, 1),
        "bboxes": torch.arange(16.0).reshape(4, 4),
        "im_file": ["a", "b", "c", "d"],
    }
    warm = script("map").WarmBatches(SimpleNamespace(dataset=[]), [batch], 2)
    first, again = next(iter(warm)), next(iter(warm))
    assert torch.equal(first["img"], batch["img"][:2]) and first["im_file"] == ["a", "b"]
    assert torch.equal(first["batch_idx"], torch.tensor([0.0, 0.0, 1.0])) and torch.equal(
        first["cls"], batch["cls"][:3]
    )
    first["img"] = None  # as the trainer does
    assert again["img"] is not None and next(iter(warm))["img"] is not None


# What the scripts share -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["map", "accuracy"])
def test_records_of_other_scripts_are_not_shown(other, capsys):
    path = next((ROOT / "benchmarks" / "records").glob(f"{other}_*.json"))
    assert script("bench").main([str(path), "--show"]) == 2
    assert f"{path} is a record of {other}.py: give bench.py one of its own" in capsys.readouterr().err


@pytest.fixture
def levels():
    """Give upstream's logger its level back: `map.py` takes it from its process, which goes on here."""
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.mark.parametrize(("name", "more"), [("bench", []), ("accuracy", ["data.yaml"]), ("map", ["data.yaml"])])
def test_negative_budget_is_refused(name, more, tmp_path, capsys, monkeypatch, levels):
    words = [str(tmp_path / "r.json"), *more, "--budget", "-5"]
    monkeypatch.setattr("sys.argv", [name, *words])
    assert script(name).main() == 2
    assert "--budget -5: give seconds, 0 or more" in capsys.readouterr().err


def test_process_that_fails_leaves_the_end_of_its_output(tmp_path):
    sittings, bad = script("sittings"), tmp_path / "bad.py"
    bad.write_text("import sys\nprint('x' * 5000)\nraise SystemExit('cannot write ' + sys.argv[1])\n")
    with pytest.raises(sittings.FitFailed) as caught:
        sittings.run_script(str(bad), str(tmp_path / "out"), folder=tmp_path)
    assert str(caught.value).endswith("cannot write RUN/out") and len(str(caught.value)) < 2200
