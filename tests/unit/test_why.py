"""`yolo why` without a fit: the verdict's rules, what is advised, how it is shown, the clock and the trace."""

import json
import re
import subprocess
import sys

import pytest

from detgraph.cfg import CaptureOptions
from detgraph.trainer.capture.report import CaptureReport
from detgraph.trainer.why import report as why_report
from detgraph.trainer.why import words as why_words
from detgraph.trainer.why.measure import recordings
from detgraph.trainer.why.report import MOST_FAULTS, Arm, Look, Phase, advise, bound_by, command, shortened
from detgraph.trainer.why.show import draw, table
from helpers import ROOT

WORDS = ["train", "model=yolo26n.yaml", "data=coco8.yaml", "batch=4"]
FIT = {
    "model": "yolo26n.yaml",
    "data": "coco8.yaml",
    "device": "cuda:0",
    "batch": 4,
    "imgsz": 640,
    "precision": "bf16",
    "optimizer": "MuSGD",
    "accumulate": 16,
    "images": 8,
    "faults": [],
    "cache": False,
    "workers": 8,
    "workers_asked": 8,
    "cores": 16,
    "asked": {},
}


def arm(name="eager", step=100.0, wait=1.0, busy=None, reserved=None, **more):
    """Return an arm whose phases are one of waiting and one of everything else."""
    rest = Phase("forward", step - wait, step - wait, busy, None if busy is None else 7000.0)
    waiting = Phase("data wait", wait, wait, None if busy is None else 0.0, None if busy is None else 0.0)
    memory = {} if reserved is None else {"peak_allocated": reserved // 2, "peak_reserved": reserved}
    known = {"steps_ms": [step, step + 1], "phases": [waiting, rest], "memory_bytes": memory, "steps": 9}
    return Arm(name, **{"step_ms": step, "wait_ms": wait, **known, **more})


def replay(step=80.0, **more):
    return arm("replay", step, capture={"capture_network": True}, replayed=8, **more)


def look(*arms, **fit):
    environment = {"torch": "2.11.0", "gpu": "A GPU"}
    return Look(WORDS, {**FIT, **fit}, environment, list(arms))


# The verdict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "wait", "busy", "bound"),
    [
        (100, 1, 95, "gpu"),
        (100, 60, 95, "gpu"),  # the GPU works off its queue while the host waits
        (100, 1, 90, "gpu"),
        (100, 50, 20, "data"),
        (100, 20, 70, "data"),
        (100, 1, 20, "host"),
        (100, 19, 50, "host"),
        (100, 25, 10, "mixed"),  # waiting is much, and still the smaller part of what the GPU idles
        (100, 40, 85, "mixed"),  # faster batches could win no more than the idle 15
        (100, 1, 70, "mixed"),
        (100, 20, None, "data"),
        (100, 19, None, "cpu"),
        (2000, 20, 1900, "gpu"),
    ],
)
def test_bound_by(step, wait, busy, bound):
    assert bound_by(step, wait, busy) == bound


@pytest.mark.parametrize(
    ("wait", "busy", "said"),
    [
        (1.0, 95.0, "GPU-bound: the GPU works 95.0 of 100.0 ms (95%)"),
        (50.0, 20.0, "Data-bound: a step waits 50.0 of 100.0 ms"),
        (1.0, 20.0, "makes 7,000 launches a step"),
        (1.0, 70.0, "Mixed: the GPU works 70.0"),
        (1.0, None, "Bound by computing on the CPU"),
        (50.0, None, "Data-bound: a step waits 50.0"),
    ],
)
def test_every_verdict_says_its_numbers(wait, busy, said):
    assert said in advise(look(arm(wait=wait, busy=busy))).sentences[0]


def test_a_gpu_that_something_else_uses_is_told():
    """A GPU cannot work longer than a step takes: then the profile measured another program's work, too."""
    said = "something else uses it"
    assert said in advise(look(arm(busy=154.0))).sentences[1]
    assert said in advise(look(arm(busy=95.0), replay(90.0, busy=120.0))).sentences[1]
    assert said not in " ".join(advise(look(arm(busy=105.0), replay(98.0, busy=99.0))).sentences)


def test_without_a_gpu_it_says_what_it_can(capsys):
    """What torch is handed in a step, which is the host's work on a GPU as well; and that this is no verdict."""
    counted = arm()
    counted.phases = [Phase(name, 10.0, 10.0, operations=1234.5) for name in ("forward", "backward", "optimizer")]
    said = advise(look(counted, device="cpu")).sentences[1]
    assert "no verdict on a GPU" in said and "1,234 in forward, 1,234 in backward. Replay" in said
    text = table(look(counted, device="cpu"))
    assert re.search(r"^forward +10.00 +33% +1,234 ", text, re.M) and re.search(r"^sum .* 3,704$", text, re.M)
    assert "no verdict" in advise(look(arm())).sentences[1] and "operations" not in table(look(arm()))
    assert "no verdict" not in " ".join(advise(look(arm(busy=20.0))).sentences)


# The advice -----------------------------------------------------------------------------------------------------------


def test_replay_is_advised_where_it_was_faster():
    advice = advise(look(arm(busy=20.0, reserved=2**30), replay(reserved=2**30 + 2**28)))
    assert advice.command == "yolo train model=yolo26n.yaml data=coco8.yaml batch=4 capture_network=True"
    assert "Replay takes the step from 100.0 to 80.0 ms (-20%) and reserved memory by +256 MiB." in advice.sentences


@pytest.mark.parametrize("step", [96.0, 100.0, 120.0])
def test_replay_is_not_advised_where_it_does_not_pay(step):
    advice = advise(look(arm(busy=95.0), replay(step)))
    assert "capture_network" not in advice.command
    assert "it does not pay" in advice.sentences[-1]


def test_a_fit_has_to_earn_its_recording_back():
    arms = arm(busy=20.0), replay(recording_seconds=1.25)
    long, short, timed = (advise(look(*arms, steps=steps)) for steps in (6000, 80, None))
    assert long.command.endswith("capture_network=True") and timed.command == long.command
    assert long.sentences[-1].endswith("(-20%); 63 steps earn back the 1.2 s that recording takes.")
    assert "capture_network" not in short.command
    said = "it does not pay, as all 80 steps are 4.4% shorter with the 1.2 s that recording takes."
    assert short.sentences[-1].endswith(said)
    shorter = advise(look(*arms, steps=9)).sentences[-1]
    assert "9 steps are 118.9% longer" in shorter


def test_both_recordings_count_where_both_were_asked_for():
    report = CaptureReport(CaptureOptions(capture_network=True, capture_orthogonalization=True))
    report.seconds.update(recording=1.0, checking=0.25)
    report.orthogonalization.seconds["recording"] = 0.5
    assert recordings(report) == (1.75, None)
    report.orthogonalization.block("recording failed: no room")
    assert recordings(report) == (1.75, "the rest trained eagerly: recording failed: no room")
    report.retire("tensor address")
    assert recordings(report)[1] == "1 recordings were retired, the last: tensor address"
    alone = CaptureReport(CaptureOptions(capture_network=True), orthogonalization=report.orthogonalization)
    assert recordings(alone) == (0, None)


def test_the_arm_that_records_less_wins_a_short_fit():
    both = arm("both", 60.0, capture={"capture_network": True, "more": True}, recording_seconds=4.0)
    arms = arm(busy=20.0), replay(70.0, recording_seconds=1.0), both
    short, long = (advise(look(*arms, steps=steps)) for steps in (250, 350))
    assert short.command.endswith("capture_network=True") and long.command.endswith("more=True")
    said = "In the 250 steps of this fit, replay is done before both."
    assert short.sentences[-1] == said and said.replace("250", "350") not in long.sentences


def test_what_the_user_asked_for_is_taken_back_where_it_does_not_pay():
    for asked in (True, "verify"):
        advice = advise(look(arm(busy=95.0), replay(99.0), asked={"capture_network": asked}))
        assert advice.command.endswith("batch=4 capture_network=False")


def test_an_arm_that_could_not_run_says_why():
    blocked = Arm("replay", {"capture_network": True}, blocked="replay needs a CUDA device, this fit runs on 'cpu'")
    advice = advise(look(arm(), blocked))
    assert advice.sentences[-1] == f"Replay was not measured: {blocked.blocked}."
    assert "capture_network" not in advice.command


def test_a_recording_that_was_given_up_is_told():
    note = "the rest trained eagerly: recording failed"
    for step in (99.0, 80.0):  # the second is faster by chance: its steps were the eager ones
        advice = advise(look(arm(busy=20.0), replay(step, note=note, recording_seconds=1.0), steps=6000))
        assert advice.sentences[-1].endswith(f"; {note}." if step == 80.0 else f"it does not pay; {note}.")
        assert "capture_network" not in advice.command


def test_the_fastest_of_several_arms_wins():
    both = arm("both", 60.0, capture={"capture_network": True, "more": True})
    advice = advise(look(arm(busy=20.0), replay(), both))
    assert advice.command.endswith("capture_network=True more=True")
    assert advise(look(arm(busy=20.0), replay(50.0), both)).command.endswith("capture_network=True")


@pytest.mark.parametrize(
    ("fit", "changes"),
    [
        ({}, "cache=ram workers=16"),
        ({"workers": 2, "images": 8}, "cache=ram"),  # as many as there are batches: more would find nothing to do
        ({"cores": 8}, "cache=ram"),
        ({"cache": "ram"}, "workers=16"),
        ({"device": "cpu", "workers": 0, "workers_asked": 0}, "cache=ram"),
        ({"cache": "disk", "cores": 8}, ""),
    ],
)
def test_a_fit_that_waits_is_told_what_to_change(fit, changes):
    found = look(arm(wait=60.0, busy=None if "device" in fit else 20.0), **fit)
    advice = advise(found)
    assert advice.bound == "data" and advice.command.endswith(f"batch=4 {changes}".strip())
    expected = f"Try {changes} and look again." if changes else "Lighter augmentation"
    assert advice.sentences[1].startswith(expected)


def test_a_fit_bound_by_its_gpu_is_not_told_to_load_faster():
    assert advise(look(arm(wait=60.0, busy=95.0))).command == "yolo train model=yolo26n.yaml data=coco8.yaml batch=4"


def test_command_replaces_and_quotes():
    words = ["mode=train", "--workers=2", "model=a b.yaml", "cache = True", "train"]
    changes = {"workers": 8, "cache": "ram", "gone": None}
    assert command(words, changes) == "yolo train workers=8 'model=a b.yaml' cache=ram"
    assert command([*words, "workers=3"], {"workers": 8, "model": None}, "why") == "yolo why workers=8 'cache = True'"


# Shown ----------------------------------------------------------------------------------------------------------------


def inside_optimizer(value):
    outer, inner = Phase("optimizer", 3.0, 3.0), Phase("orthogonalization", 7.0, 7.0)
    value.arms[0].phases += [outer, inner]
    return value


def test_table_of_a_gpu():
    text = table(look(arm(busy=20.0, reserved=2**30), replay(reserved=2**31)))
    assert "on A GPU: batch 4, 640 px, bf16, MuSGD" in text and "every 16 steps" in text
    assert "host ms" in text and "launches" in text and "reserved MiB" in text and "2,048" in text
    assert text.endswith("batch=4 capture_network=True")


def test_table_of_a_cpu_has_no_device_columns():
    blocked = Arm("replay", {"capture_network": True}, blocked="no")
    text = table(look(arm(), blocked, device="cpu", accumulate=1))
    assert "on CPU" in text and "every step" in text and "not measured" in text
    assert "GPU ms" not in text and "reserved" not in text


def test_faults_in_the_data_are_counted_and_the_first_are_told():
    assert "8 images, cache" in table(look(arm()))
    assert "8 images, 1 fault in pictures or labels, cache" in table(look(arm(), faults=["a"]))
    assert "8 images, 2 faults in pictures or labels, cache" in table(look(arm(), faults=["a", "b"]))
    many = [str(number) for number in range(MOST_FAULTS + 2)]
    assert shortened(many[:-2]) == many[:-2]
    assert shortened(many) == [*many[:-2], "and 2 more faults in pictures or labels"]


def test_the_row_of_the_optimizer_includes_its_orthogonalization():
    lines = table(inside_optimizer(look(arm()))).splitlines()
    (optimizer,) = [line for line in lines if line.startswith("optimizer")]
    (inner,) = [line for line in lines if line.startswith("  orthogonalization")]
    (whole,) = [line for line in lines if line.startswith("sum")]
    assert "10.00" in optimizer and "7.00" in inner and "110.00" in whole


def test_json_round_trip():
    found = inside_optimizer(look(arm(busy=20.0, reserved=2**30), replay()))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == why_report.SCHEMA and data["verdict"]["bound"] == "host"
    assert Look.from_dict(data) == found
    with pytest.raises(ValueError, match="schema 0"):
        Look.from_dict({**data, "schema": 0})


def test_picture(tmp_path):
    draw(inside_optimizer(look(arm(), replay(), Arm("blocked", blocked="no"))), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# The words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seconds 0", "more than 0"),
        ("seconds=soon", "'soon' is no time"),
        ("--json missing/x.json", "a folder that exists"),
        ("json=.", "cannot be written (it is a folder)"),
        ("json=file/x.json", "cannot be written (Not a directory)"),
        ("picture=x.gif", ".png"),
    ],
)
def test_files_and_seconds_are_checked_first(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert why_words.main([*words.split(), "model=yolo26n.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("yolo why: error: ") and said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("as_json", ["--json -", "--json=-", "json=-"])
@pytest.mark.parametrize("words", ["seconds=0", "model=yolo26n.yaml data=missing.yaml"])
def test_an_error_is_json_where_that_was_asked_for(capsys, words, as_json):
    assert why_words.main([*words.split(), *as_json.split()]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.keys() == {"schema", "error"} and found["schema"] == why_report.SCHEMA
    assert err.splitlines()[-1] == f"yolo why: error: {found['error']}"


def test_an_error_of_a_loaders_worker_is_told_by_its_last_line():
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nKeyError: 3\n"
    assert why_words.one_line(RuntimeError(text)) == "KeyError: 3"
    assert why_words.one_line(ValueError("\x1b[31m\x1b[1mred\x1b[0m\n and plain")) == "red and plain"
    assert why_words.one_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("command", ["why", "golden"])
def test_help_is_there_at_once(command):
    """Without torch and upstream, whose import takes seconds."""
    code = (
        "import sys; from detgraph.trainer.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "finally: print(sorted({'torch', 'ultralytics', 'numpy', 'lightning'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"usage: yolo {command}" in done.stdout and done.stderr == "[]\n"


def test_fields_and_limits_are_documented():
    text = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    data = look(arm(busy=20.0), replay()).to_dict()
    first = data["arms"][0]
    names = [*data, *data["gpu"], *data["verdict"], *first, *first["phases"][0], *data["fit"]]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not [phase for phase in why_report.PHASES if f"`{phase}`" not in text and phase != why_report.LOOP]
    assert f"schema version {why_report.SCHEMA}" in text
    for limit in (why_report.GPU_BOUND, why_report.HOST_BOUND, why_report.DATA_BOUND):
        assert re.search(rf"at (least|most) {limit}\b", text)
    assert f"by {why_report.WORTHWHILE:.0%}".replace("%", " %") in text
