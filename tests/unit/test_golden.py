"""`yolo golden`: fits that are the same are found the same, and one that is not is found where it parts.

The fits run once for all tests, in a child process by goldens.fits and, beside it, through the command line itself.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from detgraph.trainer import golden, golden_file
from detgraph.trainer.golden_compare import DIFFERENT, SAME, WITHIN, Tolerance, compare

from ..goldens import goldens

PARAMETER = "model.4.cv2.conv.weight"
ULP = ["ulp", {"step": 5, "parameter": PARAMETER, "element": 7}]
RAISES = ["raise_at", {"event": "on_train_batch_start", "number": 4, "error": "RuntimeError"}]
ARGS = {**goldens.BASE, "epochs": 2, "lr0": 0.01, "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_dataset) -> Path:
    """Return a folder of run folders: base, again, replay, seed, ulp, broken, and from the command line ours, stock."""
    folder = tmp_path_factory.mktemp("runs")
    args = {**ARGS, "data": str(make_dataset(folder / "data", 8, 4)), "project": str(folder)}
    requests = [
        {"kind": "ours", "args": {**args, "name": "base"}},
        {"kind": "ours", "args": {**args, "name": "again"}},
        {"kind": "emulated", "args": {**args, "name": "replay"}},
        {"kind": "ours", "args": {**args, "name": "seed", "seed": 1}},
        {"kind": "ours", "args": {**args, "name": "ulp"}, "perturb": [ULP]},
        {"kind": "ours", "args": {**args, "name": "broken"}, "perturb": [RAISES]},
    ]
    words = [f"{key}={value}" for key, value in args.items()]
    options = {"ours": [], "stock": ["--stock", "--out", str(folder / "stock.json")]}
    with ThreadPoolExecutor() as pool:  # each thread waits for a process
        commands = [pool.submit(yolo, "golden", "record", *more, *words, f"name={n}") for n, more in options.items()]
        goldens.fits(requests, folder)
    for command in commands:
        assert command.result().returncode == 0, command.result().stdout + command.result().stderr
    return folder


def yolo(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "detgraph.trainer", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def answer(capsys, *words: object) -> tuple[int, dict]:
    """Return exit status and JSON of `yolo golden compare`."""
    status = golden.main(["compare", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["again", "replay", "ours", "stock"])
def test_same_fit(runs, name, capsys) -> None:
    status, found = answer(capsys, runs / "base", runs / name)
    assert (status, found["verdict"], found["first"]) == (0, "same", None)
    assert "environments" not in " ".join(found["notes"])


def test_stock_is_stock_and_replay_replayed(runs) -> None:
    fits = {name: golden_file.read(runs / name / golden_file.FILE_NAME)["fit"] for name in ("stock", "ours", "replay")}
    assert fits["stock"]["trainer"].startswith("ultralytics.") and fits["stock"]["loop"] == "upstream"
    assert fits["ours"]["trainer"].startswith("detgraph.") and fits["ours"]["loop"] == "lightning"
    assert fits["replay"]["replayed"] == 7 and fits["ours"]["replayed"] == 0
    assert golden_file.read(runs / "stock.json") == golden_file.read(runs / "stock" / golden_file.FILE_NAME)


def test_another_seed_parts_at_step_0(runs, capsys) -> None:
    status, found = answer(capsys, runs / "base", runs / "seed")
    assert status == 1 and found["first"]["step"] == 0
    losses = next(parting for parting in found["partings"] if parting["part"] == "losses")
    assert losses["step"] == 0 and losses["name"] == "loss" and losses["amount"] > 0
    assert "arguments differ in seed: 0 and 1" in found["notes"]


def test_one_ulp_is_found_at_its_step_in_its_tensor(runs, capsys) -> None:
    status, found = answer(capsys, runs / "base", runs / "ulp")
    first = found["first"]
    assert status == 1 and first["part"] == "parameters"
    assert (first["step"], first["epoch"], first["update"]) == (5, 1, 5)
    assert (first["name"], first["count"]) == (PARAMETER, 1)
    assert 0 < first["amount"] < 1e-7
    assert found["checkpoint"]["amount"] > 0 and found["checkpoint"]["tensor"].startswith("model.")

    assert golden.main(["compare", str(runs / "base"), str(runs / "ulp")]) == 1
    assert f"at step 5 (epoch 1, optimizer step 5): parameters, in {PARAMETER}: sum by" in capsys.readouterr().out


def test_a_broken_fit_is_recorded_as_far_as_it_came(runs, capsys) -> None:
    status, found = answer(capsys, runs / "base", runs / "broken")
    assert status == 1
    assert [(parting["part"], parting["step"]) for parting in found["partings"][:2]] == [("length", 3), ("end", None)]
    assert "RuntimeError: injected" in found["partings"][1]["how"]


@pytest.mark.parametrize("name", ["stock", "ulp", "broken"])
def test_run_folders_without_goldens(runs, name, tmp_path, capsys) -> None:
    for side in ("base", name):
        shutil.copytree(runs / side, tmp_path / side, ignore=shutil.ignore_patterns("golden*"))
    status, found = answer(capsys, tmp_path / "base", tmp_path / name)
    if name == "broken":  # no epoch, no checkpoint
        assert status == 2 and "nor results.csv" in found["message"]
        return
    assert (status, found["verdict"]) == ((0, "same") if name == "stock" else (1, "different"))
    assert found["basis"].startswith("by results.csv (2 epochs") and "last.pt (708 tensors" in found["basis"]
    assert "from the files, not from a step" in " ".join(found["notes"])
    if name == "ulp":
        assert found["first"]["part"] == "results.csv" and found["first"]["epoch"] == 1
        assert found["partings"][-1]["part"] == "best.pt" and found["partings"][-1]["amount"] > 0


def test_errors_have_status_2(runs, tmp_path, capsys) -> None:
    file = runs / "base" / golden_file.FILE_NAME
    (tmp_path / "cut.json.gz").write_bytes(file.read_bytes()[:5000])
    (tmp_path / "text.json").write_text('{"format": "another"}')
    future = {**golden_file.read(file), "schema": 2}
    (tmp_path / "future.json").write_text(json.dumps(future))
    (tmp_path / "empty").mkdir()
    for other, said in {
        "missing": "does not exist",
        "cut.json.gz": "cannot be read",
        "text.json": "is no golden",
        "future.json": "has schema 2, this version reads 1",
        "empty": "has no golden.json.gz",
    }.items():
        status, found = answer(capsys, file, tmp_path / other)
        assert status == 2 and found["verdict"] == "error" and said in found["message"], found
    with pytest.raises(SystemExit) as usage:
        golden.main(["compare", str(file), str(file), "--tolerance", "little"])
    assert usage.value.code == 2
    assert golden.main(["compare", str(file), str(file), "model=yolo26n.yaml"]) == 2
    assert golden.main(["record", "val", "model=yolo26n.yaml"]) == 2
    assert golden.main(["record"]) == 2


def test_the_command_passes_its_status_on(runs) -> None:
    files = [str(runs / name / golden_file.FILE_NAME) for name in ("base", "again", "ulp")]
    same, different = yolo("golden", "compare", *files[:2]), yolo("golden", "compare", files[0], files[2])
    assert same.returncode == 0 and same.stdout.startswith("same: 8 steps, 8 of the optimizer's, bit for bit")
    assert different.returncode == 1 and different.stdout.startswith("different: 8 steps")
    assert yolo("golden", "compare", files[0], "nowhere").returncode == 2


@pytest.fixture
def base(runs) -> dict:
    return golden_file.read(runs / "base" / golden_file.FILE_NAME)


def test_every_part_is_named(base) -> None:
    """Changing one recorded number of any part, at any step, makes the comparison name the part and the step."""
    for number in (0, 3, 7):
        for part in golden_file.PARTS:
            other = copy.deepcopy(base)
            value = other["steps"][number][part]
            if part == "losses":
                value[2] = (float.fromhex(value[2]) + 1e-7).hex()
            elif part == "schedule":
                value[1][0] = "0x1.0p-3"
            elif part == "scaler":
                other["steps"][number][part] = ["0x1.0p+10", 1]
            else:
                other["steps"][number][part] = "0" * 16
            found = compare(base, other)
            assert found.verdict == DIFFERENT and len(found.partings) == 1
            assert (found.first.part, found.first.step) == (part, number)
    for part in base["final"]:
        found = compare(base, {**base, "final": {**base["final"], part: "0"}})
        assert (found.verdict, found.first.part, found.first.step) == (DIFFERENT, f"final {part}", None)


def test_names_in_losses_and_schedule(base) -> None:
    other = copy.deepcopy(base)
    other["steps"][2]["losses"][1] = (2 * float.fromhex(other["steps"][2]["losses"][1])).hex()
    assert compare(base, other).first.name == base["loss_names"][1] == "box_loss"
    other = copy.deepcopy(base)
    other["steps"][2]["schedule"][3][1] = "0x1.0p-1"
    assert compare(base, other).first.name == "group 3 momentum"
    other = copy.deepcopy(base)
    del other["steps"][2]["gradients"]
    assert compare(base, other).first.how == "B has none at this step"


def test_tolerance_is_for_losses_of_the_first_steps(base) -> None:
    tolerance = Tolerance(1e-3, 3)
    assert compare(base, base, tolerance).verdict == SAME
    for step, factor, verdict in (
        (1, 1.0009, WITHIN),
        (1, 1.002, DIFFERENT),
        (5, 2.0, WITHIN),
        (1, float("nan"), DIFFERENT),
    ):
        other = copy.deepcopy(base)
        losses = other["steps"][step]["losses"]
        losses[0] = (float.fromhex(losses[0]) * factor).hex()
        assert compare(base, other, tolerance).verdict == verdict, (step, factor)
    short = {**base, "steps": base["steps"][:2]}
    assert compare(base, short, tolerance).verdict == DIFFERENT


def test_without_detail_the_part_is_still_found(runs) -> None:
    base, other = (golden_file.read(runs / name / golden_file.FILE_NAME) for name in ("base", "ulp"))
    first = compare({**base, "tensors": {}}, {**other, "tensors": {}}).first
    assert (first.part, first.step, first.name) == ("parameters", 5, None) and "--detail" in first.how


def test_environment_rule(base) -> None:
    environment = base["environment"]
    patch = ".".join([*environment["python"].split(".")[:2], "99"])
    same = {**environment, "python": patch, "detgraph": "9", "lightning": "9"}
    assert golden_file.environment_differences(environment, same) == []
    for key in golden_file.EXACT_KEYS:
        assert key in environment
        assert len(golden_file.environment_differences(environment, {**environment, key: "9.9"})) == 1
    note = compare(base, {**base, "environment": {**environment, "torch": "2.0.0"}}).notes
    assert note == [f"environments differ in torch: {environment['torch']} and 2.0.0"]


def test_a_file_is_small_and_the_same_bytes_again(runs, base, tmp_path) -> None:
    file = runs / "base" / golden_file.FILE_NAME
    assert file.stat().st_size < 8 * 50_000
    golden_file.write(base, tmp_path / file.name)
    assert gzip.decompress(file.read_bytes()) == gzip.decompress((tmp_path / file.name).read_bytes())


def test_nothing_is_active_unless_asked() -> None:
    code = (
        "import sys, detgraph.trainer.cli as cli, detgraph.trainer.loop, ultralytics.utils.callbacks.base as base\n"
        "assert not [m for m in sys.modules if 'detgraph.trainer.golden' in m]\n"
        "import detgraph.trainer.golden, detgraph.trainer.golden_record as record\n"
        "before = {k: list(v) for k, v in base.default_callbacks.items()}\n"
        "with record.recording():\n    assert base.default_callbacks != before\n"
        "assert base.default_callbacks == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
