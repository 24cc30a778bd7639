"""`yolo golden`: fits that are the same are found the same, and one that is not is found where it parts.

How goldens are compared is in test_golden_compare.py. The fits run once for all tests, in a child process by
goldens.fits and, beside it, through the command line itself.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from detgraph.trainer.golden import commands as golden
from detgraph.trainer.golden import file as golden_file
from detgraph.trainer.golden.compare import DIFFERENT, Tolerance, compare
from schemas import complaints

from ..goldens import goldens

PARAMETER = "model.4.cv2.conv.weight"
ULP = ["ulp", {"step": 5, "parameter": PARAMETER, "element": 7}]
RAISES = ["raise_at", {"event": "on_train_batch_start", "number": 4, "error": "RuntimeError"}]
ARGS = {**goldens.BASE, "optimizer": "SGD", "epochs": 2, "lr0": 0.01, "device": "cpu"}


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
    for name, command in zip(options, commands, strict=True):
        done = command.result()
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / f"{name}.txt").write_text(done.stdout)
    return folder


def yolo(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "detgraph.trainer", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def answer(capsys, *words: object) -> tuple[int, dict]:
    """Return exit status and JSON of `yolo golden compare`."""
    status = golden.main(["compare", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def base(runs) -> dict:
    return golden_file.read(runs / "base" / golden_file.FILE_NAME)


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


@pytest.mark.parametrize("name", ["base", "replay", "broken", "stock"])
def test_what_is_written_is_as_the_shipped_schemas_say(runs, name) -> None:
    assert not complaints(golden_file.read(runs / name / golden_file.FILE_NAME), "golden")
    if name == "replay":
        assert not complaints(json.loads((runs / name / "capture.json").read_text()), "capture")


def test_recording_says_where_the_golden_is(runs) -> None:
    for name, more in {"ours": "", "stock": f", {runs / 'stock.json'}"}.items():
        lines = (runs / f"{name}.txt").read_text().splitlines()
        assert f"golden: {runs / name / golden_file.FILE_NAME}{more}" in lines


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
    assert found["checkpoint"] is None
    _, found = answer(capsys, runs / "base", runs / "ulp", "--checkpoints")
    assert found["checkpoint"]["amount"] > 0 and found["checkpoint"]["tensor"].startswith("model.")

    assert golden.main(["compare", str(runs / "base"), str(runs / "ulp")]) == 1
    assert f"at step 5 (epoch 1, optimizer step 5): parameters, in {PARAMETER}: sum by" in capsys.readouterr().out


def test_a_broken_fit_is_recorded_as_far_as_it_came(runs, capsys) -> None:
    status, found = answer(capsys, runs / "base", runs / "broken")
    assert status == 1
    assert [(parting["part"], parting["step"]) for parting in found["partings"][:2]] == [("length", 3), ("end", None)]
    assert "RuntimeError: injected" in found["partings"][1]["how"]


def test_fits_that_broke_are_no_success(runs, base) -> None:
    broken = golden_file.read(runs / "broken" / golden_file.FILE_NAME)
    note = compare(broken, broken).notes[0]
    assert note.startswith("neither fit reached its end: RuntimeError: injected")
    assert compare(base, broken, Tolerance(1.0, 1)).verdict == DIFFERENT
    never = {**broken, "steps": []}
    assert compare(broken, never).verdict == DIFFERENT
    with pytest.raises(golden_file.GoldenError, match="neither fit has a step"):
        compare(never, never)


def test_a_golden_of_another_fit_than_the_folders_is_refused(runs, tmp_path, capsys) -> None:
    """A fit that is not recorded trains into a folder that holds an earlier fit's golden: exist_ok=True."""
    shutil.copytree(runs / "base", tmp_path / "used")
    assert answer(capsys, runs / "base", tmp_path / "used")[0] == 0
    shutil.copy(runs / "seed" / "results.csv", tmp_path / "used")
    status, found = answer(capsys, runs / "base", tmp_path / "used")
    assert status == 2 and "another fit has trained there since" in found["message"]
    (tmp_path / "used" / golden_file.FILE_NAME).unlink()
    assert answer(capsys, runs / "base", tmp_path / "used")[0] == 1  # by its files


def test_checkpoints_are_not_opened_unless_asked(runs, tmp_path, capsys) -> None:
    shutil.copytree(runs / "seed", tmp_path / "cut")
    (tmp_path / "cut" / "weights" / "last.pt").write_bytes(b"no pickle")
    assert answer(capsys, runs / "base", tmp_path / "cut")[0] == 1
    status, found = answer(capsys, runs / "base", tmp_path / "cut", "--checkpoints")
    assert status == 1 and "cannot be opened as a checkpoint" in found["notes"][-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "FOLDER", "model=x"], "cannot be written (it is a folder)"),
        (["--out", "FOLDER/file/x.json", "model=x"], "cannot be written"),
        (["--stock", "model=x", "capture_network=True"], "capture_network has no meaning for upstream's own loop"),
        (["--stock", "model=x", "--capture_network"], "capture_network has no meaning for upstream's own loop"),
        (["model=x", "--deatil", "0:4"], "unknown option '--deatil'"),
        (["model=x", "data=['a.yaml', 'b.yaml']"], "as in data=a.yaml"),
        (["model=x", "device=0,1"], "as in device=0"),
    ],
)
def test_what_cannot_be_recorded_is_refused_first(tmp_path, capsys, words, said) -> None:
    (tmp_path / "file").touch()
    assert golden.main(["record", *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == 2
    assert said in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("stock", [[], ["--stock"]])
def test_a_fit_that_ends_with_an_error_has_status_2(tmp_path, stock) -> None:
    done = yolo("golden", "record", *stock, "model=yolo26n.yaml", "data=missing.yaml", f"project={tmp_path}")
    assert done.returncode == 2 and "missing.yaml" in done.stderr and "what it said is above" in done.stderr


def test_a_full_disk_is_refused_first(tmp_path, capsys) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, files are made and take nothing
    try:
        status = golden.main(["record", "--out", str(tmp_path / "fit.json"), "model=x"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2 and "fit.json cannot be written (File too large)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stock", [[], ["--stock"]])
def test_a_golden_that_cannot_be_written_in_the_end_is_named_with_the_reason(tmp_path, make_dataset, stock) -> None:
    """The disk that filled meanwhile: the fit is no failure, and no file is named that is not there."""
    args = {**ARGS, "epochs": 1, "project": tmp_path, "name": "fit"}
    args["data"] = make_dataset(tmp_path / "data", 4, 2)
    out = tmp_path / "out.json"
    out.with_name("out.json.part").mkdir()  # where the draft goes
    done = yolo("golden", "record", *stock, "--out", str(out), *(f"{key}={value}" for key, value in args.items()))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if "yolo golden: error:" in line]
    assert len(error) == 1 and f"the fit is trained, but its golden could not be written: {out} (Is a dir" in error[0]
    assert f"golden: {tmp_path / 'fit' / golden_file.FILE_NAME}" in done.stdout.splitlines()
    assert golden_file.read(tmp_path / "fit" / golden_file.FILE_NAME)["fit"]["ended"] is None


def test_a_reader_that_goes_away_changes_no_status(runs) -> None:
    file = str(runs / "base" / golden_file.FILE_NAME)
    command = [sys.executable, "-m", "detgraph.trainer", "golden", "compare", file, file]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


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
    assert "from the files, not from a step" in found["notes"][0] and len(found["notes"]) == 1
    (tmp_path / "base" / "weights" / "best.pt").unlink()
    assert "weights/best.pt is in" in answer(capsys, tmp_path / "base", tmp_path / name)[1]["notes"][1]
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
    with pytest.raises(SystemExit):
        golden.main(["compare", str(file), str(file), "--tolerance", "inf:3"])
    with pytest.raises(SystemExit):
        golden.main(["record", "--detail", "a:b", "model=yolo26n.yaml"])
    assert "'a:b' is not FIRST:LAST, as in 0:100" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        golden.main(["record", "--detail", "5:2", "model=yolo26n.yaml"])
    assert "'5:2' ends before it begins: give the smaller step first, as in 0:100" in capsys.readouterr().err
    assert golden.main(["compare", str(file), str(file), "model=yolo26n.yaml"]) == 2
    assert golden.main(["record", "val", "model=yolo26n.yaml"]) == 2
    assert golden.main(["record"]) == 2


def test_the_command_passes_its_status_on(runs) -> None:
    files = [str(runs / name / golden_file.FILE_NAME) for name in ("base", "again", "ulp")]
    same, different = yolo("golden", "compare", *files[:2]), yolo("golden", "compare", files[0], files[2])
    assert same.returncode == 0 and same.stdout.startswith("same: 8 steps, 8 of the optimizer's, bit for bit")
    assert different.returncode == 1 and different.stdout.startswith("different: 8 steps")
    assert yolo("golden", "compare", files[0], "nowhere").returncode == 2


def test_without_detail_the_part_is_still_found(runs) -> None:
    base, other = (golden_file.read(runs / name / golden_file.FILE_NAME) for name in ("base", "ulp"))
    first = compare({**base, "tensors": {}}, {**other, "tensors": {}}).first
    assert (first.part, first.step, first.name) == ("parameters", 5, None) and "--detail" in first.how


def test_the_same_environment_can_be_required(base, tmp_path, capsys) -> None:
    other = {**base, "environment": {**base["environment"], "torch": "2.0.0"}}
    for name, content in {"a": base, "b": base, "c": other}.items():
        golden_file.write(content, tmp_path / name)
    assert answer(capsys, tmp_path / "a", tmp_path / "b", "--same-environment")[0] == 0
    assert answer(capsys, tmp_path / "a", tmp_path / "c")[0] == 0  # the numbers decide
    status, found = answer(capsys, tmp_path / "a", tmp_path / "c", "--same-environment")
    assert status == 2 and found["verdict"] == "error"
    assert f"environments differ in torch: {base['environment']['torch']} and 2.0.0" in found["message"]
    status, found = answer(capsys, tmp_path / "a", tmp_path / "b", "--same-environment", "--tolerance", "1e-3:3")
    assert status == 2 and "--tolerance" in found["message"]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.csv").write_text("epoch,loss\n1,2\n")
    assert answer(capsys, tmp_path / "x", tmp_path / "y")[0] == 0
    status, found = answer(capsys, tmp_path / "x", tmp_path / "y", "--same-environment")
    assert status == 2 and "has no golden.json.gz" in found["message"]  # nothing tells of their environments


def test_a_file_is_small_and_the_same_bytes_again(runs, base, tmp_path) -> None:
    file = runs / "base" / golden_file.FILE_NAME
    assert file.stat().st_size < 8 * 50_000
    golden_file.write(base, tmp_path / file.name)
    assert gzip.decompress(file.read_bytes()) == gzip.decompress((tmp_path / file.name).read_bytes())


def test_nothing_is_active_unless_asked() -> None:
    code = (
        "import sys, detgraph.trainer.cli, detgraph.trainer.fit.trainer, ultralytics.utils.callbacks.base as base\n"
        "assert not [m for m in sys.modules if 'detgraph.trainer.golden' in m]\n"
        "import detgraph.trainer.golden.commands, detgraph.trainer.golden.record as record\n"
        "before = {k: list(v) for k, v in base.default_callbacks.items()}\n"
        "with record.recording():\n    assert base.default_callbacks != before\n"
        "assert base.default_callbacks == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
