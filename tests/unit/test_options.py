"""The options object: what it accepts, what it refuses and in which words, and what may stand beside it."""

import dataclasses
import json
import subprocess
import sys

import pytest
import yaml

from detgraph.cfg import (
    COMMAND_LINE_KEYS,
    REPORT_SCHEMA,
    CaptureOptionError,
    CaptureOptions,
    as_words,
    check_contradictions,
    describe_options,
    merge_options,
    min_torch,
    precision_blocker,
    refuse_outside_training,
    remembered_options,
    split_options,
)

KNOWN = ("epochs", "compile", "captures", "data")


@pytest.mark.parametrize(
    ("given", "stored", "enabled", "verify"),
    [
        (True, True, True, False),
        (False, False, False, False),
        ("verify", "verify", True, True),
        ("True", True, True, False),
        ("true", True, True, False),
        ("FALSE", False, False, False),
        ("Verify", "verify", True, True),
    ],
)
def test_allowed_values(given, stored, enabled, verify):
    options = CaptureOptions(capture_network=given)
    assert (options.capture_network, type(options.capture_network)) == (stored, type(stored))
    assert (options.enabled, options.verify) == (enabled, verify)


@pytest.mark.parametrize("value", ["maybe", 1, 0, 1.0, None, "", "1", [True], {}])
def test_other_values_are_refused_with_key_value_and_way_out(value):
    with pytest.raises(CaptureOptionError) as error:
        CaptureOptions(capture_network=value)
    text = str(error.value)
    assert f"capture_network={value}" in text
    for way_out in ("capture_network=True", "capture_network=False", "capture_network=verify"):
        assert way_out in text


def test_the_two_captures_are_asked_for_apart():
    assert CaptureOptions().asked == {} and not CaptureOptions().enabled
    both = CaptureOptions(capture_network="verify", capture_orthogonalization="true")
    assert both.asked == {"capture_network": "verify", "capture_orthogonalization": True}
    assert as_words(both.asked) == "capture_network=verify capture_orthogonalization=True"
    alone = CaptureOptions(capture_orthogonalization=True)
    assert alone.enabled and not alone.network and not alone.verify
    with pytest.raises(CaptureOptionError, match="capture_orthogonalization=verify is not allowed.*=True or .*=False"):
        CaptureOptions(capture_orthogonalization="verify")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("record_at_step", -1),
        ("record_at_step", True),
        ("record_at_step", 1.0),
        ("record_at_step", "1"),
        ("max_recordings", 0),
        ("max_recordings", None),
        ("self_check", 1),
        ("self_check", "yes"),
    ],
)
def test_python_level_values_are_checked(name, value):
    with pytest.raises(CaptureOptionError, match=f"{name}={value!r} is not allowed"):
        CaptureOptions(**{name: value})


def test_options_are_immutable_and_make_a_round_trip():
    options = CaptureOptions(capture_network="verify", record_at_step=3, max_recordings=1, self_check=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.record_at_step = 4
    assert CaptureOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert CaptureOptions.from_dict({}) == CaptureOptions()


def test_defaults_are_those_of_the_yaml_file():
    from detgraph.cfg import options

    with open(options.__file__.replace("options.py", "capture.yaml"), encoding="utf-8") as f:
        spec = yaml.safe_load(f)
    defaults = {name: entry["default"] for part in ("keys", "options") for name, entry in spec[part].items()}
    assert CaptureOptions().to_dict() == defaults
    assert COMMAND_LINE_KEYS == tuple(spec["keys"])
    for name in defaults:
        assert f"{name}: {defaults[name]}" in describe_options()


@pytest.mark.parametrize("data", [{"record_at_stop": 1}, {1: 2}])
def test_from_dict_names_the_unknown(data):
    with pytest.raises(
        CaptureOptionError, match=f"'{next(iter(data))}' is not an option of the capture.*record_at_step"
    ):
        CaptureOptions.from_dict(data)


def test_from_dict_refuses_what_is_no_mapping():
    with pytest.raises(CaptureOptionError, match="capture_options=True is not allowed"):
        CaptureOptions.from_dict(True)


def test_split_takes_ours_and_leaves_the_rest_in_order():
    given = {"epochs": 3, "capture_network": "maybe", "data": "x", "capture_options": {}}
    ours, rest = split_options(given, KNOWN)
    assert ours == {"capture_network": "maybe", "capture_options": {}}
    assert list(rest.items()) == [("epochs", 3), ("data", "x")]
    assert len(given) == 4


@pytest.mark.parametrize("typo", ["capture_netwrok", "capture-network", "Capture_Network", "capture", "capture_graph"])
def test_near_misses_are_refused_with_a_suggestion(typo):
    with pytest.raises(CaptureOptionError, match=f"'{typo}'.*Did you mean capture_network="):
        split_options({typo: True}, KNOWN)


@pytest.mark.parametrize("name", ["cuda_graph", "cuda_graphs", "cudagraphs", "use-cuda-graph"])
def test_names_of_other_trainers_are_refused_with_a_suggestion(name):
    with pytest.raises(CaptureOptionError, match=f"'{name}'.*Did you mean capture_network="):
        split_options({name: True}, KNOWN)


@pytest.mark.parametrize("typo", ["capture_orthogonalisation", "capture_ortho", "capture-orthogonalization"])
def test_near_misses_of_the_other_key(typo):
    with pytest.raises(CaptureOptionError, match=f"'{typo}'.*Did you mean capture_orthogonalization="):
        split_options({typo: True}, KNOWN)


def test_near_miss_of_the_python_key_and_options_at_the_wrong_place():
    with pytest.raises(CaptureOptionError, match="'capture_option'.*Did you mean capture_options="):
        split_options({"capture_option": {}})
    with pytest.raises(CaptureOptionError, match=r"'record_at_step'.*CaptureOptions\(.*record_at_step="):
        split_options({"record_at_step": 3})


@pytest.mark.parametrize("name", ["epochs", "captures", "network", "data", "augmentations", "space", ""])
def test_keys_of_others_never_trip(name):
    assert split_options({name: 1}, KNOWN) == ({}, {name: 1})


def test_upstreams_own_keys_are_no_near_misses_of_ours():
    """Even without `known`: a future upstream key close to ours would show here first."""
    from ultralytics.utils import DEFAULT_CFG_DICT

    assert split_options(DEFAULT_CFG_DICT) == ({}, DEFAULT_CFG_DICT)


def test_capture_options_on_a_command_line_is_refused():
    with pytest.raises(CaptureOptionError, match="'capture_options' exists in Python only.*capture_network=True"):
        split_options({"capture_options": "x"}, python=False)


def test_merge():
    ambient = CaptureOptions(capture_network=True, record_at_step=5)
    assert merge_options({}) is None
    assert merge_options({}, ambient) is ambient
    assert merge_options({"capture_network": "false"}) == CaptureOptions()
    assert merge_options({"capture_network": "verify"}, ambient) == CaptureOptions(
        capture_network="verify", record_at_step=5
    )
    assert merge_options({"capture_options": {"max_recordings": 2}}, ambient) == CaptureOptions(max_recordings=2)
    assert merge_options({"capture_options": ambient, "capture_network": False}) == CaptureOptions(record_at_step=5)
    with pytest.raises(CaptureOptionError, match="capture_network=None"):
        merge_options({"capture_network": None}, ambient)


@pytest.mark.parametrize("value", [True, "verify"])
@pytest.mark.parametrize("compiled", [True, "default"])
def test_compile_contradicts_the_capture(value, compiled):
    with pytest.raises(CaptureOptionError) as error:
        check_contradictions(CaptureOptions(capture_network=value), {"compile": compiled})
    for part in (f"capture_network={value}", f"compile={compiled}", "compile=False", "capture_network=False"):
        assert part in str(error.value)


def test_compile_stands_beside_a_capture_that_is_off():
    check_contradictions(CaptureOptions(), {"compile": True})
    check_contradictions(CaptureOptions(capture_orthogonalization=True), {"compile": True})  # a network of its own
    check_contradictions(None, {"compile": True})
    for off in (False, None, ""):
        check_contradictions(CaptureOptions(capture_network=True), {"compile": off})


@pytest.mark.parametrize("mode", ["val", "predict", "export", "track", "benchmark"])
@pytest.mark.parametrize(
    "given", [{"capture_network": False}, {"capture_orthogonalization": True, "capture_network": 1}]
)
def test_only_training_knows_the_keys(mode, given):
    """Named is what was given, as it was given, and nothing else."""
    words, names = " ".join(f"{k}={v}" for k, v in given.items()), " and ".join(given)
    with pytest.raises(CaptureOptionError, match=f"^{words} has .*mode '{mode}'.*Leave {names} out"):
        refuse_outside_training(given, mode)
    refuse_outside_training({}, mode)
    refuse_outside_training(given, "train")


@pytest.mark.parametrize(
    ("precision", "version", "blocked"),
    [
        ("bf16", "2.8.1", True),
        ("bf16", "2.8.1+cu128", True),
        ("bf16", "2.9.0", False),
        ("bf16", "2.9.0a0+git1234", False),
        ("bf16", "2.11.0+cu130", False),  # not older than 2.9, as text would have it
        ("bf16", "3.0.0", False),
        ("fp16", "2.8.0", False),
        ("fp16", "2.7.1", True),
        ("fp32", "2.11.0+cu130", False),
        ("fp32", "1.13.1", True),
    ],
)
def test_precision_blocker(precision, version, blocked):
    reason = f"{precision} replay needs torch {min_torch(precision)} or newer, this is {version}"
    assert precision_blocker(precision, version) == (reason if blocked else None)


def test_unknown_precision_and_version():
    with pytest.raises(ValueError, match="'fp8'.*fp32, fp16, bf16"):
        min_torch("fp8")
    with pytest.raises(ValueError, match="'git'"):
        precision_blocker("bf16", "git")


def test_options_of_a_report_from_before_a_key_are_remembered(tmp_path):
    (tmp_path / "capture.json").write_text('{"schema": 1, "options": {"capture_network": true}}')
    assert remembered_options(tmp_path) == CaptureOptions(capture_network=True)


def test_remembered_options(tmp_path):
    assert remembered_options(tmp_path) is None
    options = CaptureOptions(capture_network="verify", max_recordings=2)
    content = {"schema": REPORT_SCHEMA, "options": options.to_dict(), "replayed": 3}
    (tmp_path / "capture.json").write_text(json.dumps(content))
    assert remembered_options(tmp_path) == options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("\n ", "it is empty"),
        ("{", "it is not JSON"),
        ("\x00", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        (b"\xff\xfe{}", "can't decode"),
        ("[]", "no report of detgraph"),
        ('{"frames": 3}', "no report of detgraph"),
        ('{"options": {"capture_network": true}}', "no report of detgraph"),
        ('{"schema": true, "options": {"capture_network": true}}', "no report of detgraph"),
        ('{"schema": 1, "options": {}}', "no report of detgraph"),
        ('{"schema": 1, "options": {"codec": "av1"}}', "no report of detgraph"),
        ('{"schema": 1, "options": 1}', "no report of detgraph"),
        ('{"schema": 2, "options": {"capture_network": true}}', "its schema is 2, and this version reads 1"),
        ('{"schema": 1, "options": {"capture_network": 1}}', "capture_network=1 is not allowed"),
        ('{"schema": 1, "options": {"capture_network": true, "later": 1}}', "'later' is not an option"),
    ],
)
def test_a_memory_that_cannot_be_used_is_named_with_the_way_out(tmp_path, text, said):
    path = tmp_path / "capture.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CaptureOptionError) as error:
        remembered_options(tmp_path)
    for part in (
        f"{path} cannot be used (",
        said,
        "capture_network=True",
        "capture_network=False",
        "move the file away",
    ):
        assert part in str(error.value)


def test_a_folder_is_no_memory(tmp_path):
    (tmp_path / "capture.json").mkdir()
    with pytest.raises(CaptureOptionError, match="Is a directory"):
        remembered_options(tmp_path)


def test_the_bottom_layer_is_light():
    code = "import sys, detgraph.cfg; sys.exit(bool({'torch', 'ultralytics', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
