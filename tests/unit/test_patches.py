"""The patch series: identity after revert, refusal on drift, and who is routed to our trainer."""

import functools
import sys
import textwrap
from types import SimpleNamespace

import pytest
import yaml
from ultralytics import RTDETR as UpstreamRTDETR
from ultralytics import YOLO as UpstreamYOLO
from ultralytics import YOLOE as UpstreamYOLOE
from ultralytics import YOLOWorld as UpstreamYOLOWorld
from ultralytics.engine.model import Model
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.optim import muon
from ultralytics.utils import LOGGER, callbacks

from detgraph import patches
from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.patches import PatchDriftError, fingerprint, replay_orthogonalization, route_train
from detgraph.trainer import YOLO, LightningDetectionTrainer

STOCK_TRAIN = Model.train
ON = CaptureOptions(capture_network=True)


class Stop(Exception):
    """Ends a real training right after its trainer was built."""


@pytest.fixture(autouse=True)
def stock_upstream():
    yield
    Model.train = STOCK_TRAIN
    patches.revert()


@pytest.fixture
def warnings_logged(monkeypatch):
    said = []
    monkeypatch.setattr(LOGGER, "warning", said.append)
    return said


@pytest.fixture
def model():
    return UpstreamYOLO("yolo26n.yaml")


@pytest.fixture
def data(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
    file = tmp_path / "tiny.yaml"
    file.write_text(
        yaml.safe_dump({"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": ["a"]})
    )
    return str(file)


def routed(model, trainer=None, **kwargs):
    """Route a call and return what upstream's train would have been given."""

    def upstream_train(model, trainer=None, **kwargs):
        return SimpleNamespace(model=model, trainer=trainer, kwargs=kwargs)

    return route_train.route(model, upstream_train, trainer, kwargs)


def started(model, **kwargs):
    """Start a real training and return every trainer that upstream built; each is stopped at once."""
    built = []

    def stop(trainer):
        built.append(trainer)
        raise Stop

    model.callbacks["on_pretrain_routine_start"] = [stop]
    try:
        model.train(device="cpu", **kwargs)
    except Stop:
        pass
    return built


# Applying and reverting -----------------------------------------------------------------------------------------------


def test_apply_and_revert_restore_the_very_object():
    patches.apply()
    wrapper = Model.train
    assert wrapper is not STOCK_TRAIN
    patches.apply()
    assert Model.train is wrapper
    route_train.patch.apply()
    assert Model.train is wrapper
    patches.revert()
    assert Model.train is STOCK_TRAIN
    patches.revert()
    assert Model.train is STOCK_TRAIN
    patches.apply()
    assert Model.train is not STOCK_TRAIN


def test_status_follows():
    def states():
        return [(s.name, s.applied, s.drift) for s in patches.status()]

    on_request = ("replay_orthogonalization", False, None)  # seen, and left alone by apply()
    assert states() == [("route_train", False, None), on_request]
    patches.apply()
    assert states() == [("route_train", True, None), on_request]
    Model.train = lambda self: None
    line, _ = patches.status()
    assert not line.applied and "signature" in line.drift
    assert line.target == "ultralytics.engine.model:Model.train" and line.what


def test_what_is_applied_on_request_is_shown_and_taken_back():
    patch = replay_orthogonalization.patch
    stock = muon.muon_update
    patch.apply()
    assert patches.status()[1].applied and muon.muon_update is not stock
    patches.revert()
    assert muon.muon_update is stock


def test_drift_of_a_patch_on_request_keeps_the_others(monkeypatch):
    monkeypatch.setattr(muon, "muon_update", lambda grad, momentum, beta=0.95, nesterov=True: grad)
    assert "source has changed" in patches.status()[1].drift
    patches.apply()
    assert route_train.patch.applied


def test_another_signature_is_refused():
    def train(self, trainer=None, data=None, **kwargs): ...

    Model.train = train
    with pytest.raises(PatchDriftError) as error:
        patches.apply()
    text = str(error.value)
    for part in ("route_train", "Model.train", "signature", "data=None", "ultralytics 8.4.190", "pip install"):
        assert part in text
    assert Model.train is train


def test_another_body_is_refused():
    def train(self, trainer=None, **kwargs):
        return trainer

    Model.train = train
    with pytest.raises(PatchDriftError, match="source has changed.*supported is 8.4.190"):
        patches.apply()
    assert Model.train is train


def test_a_wrapper_that_poses_as_the_original_is_refused():
    @functools.wraps(STOCK_TRAIN)
    def train(self, trainer=None, **kwargs):
        return STOCK_TRAIN(self, trainer, **kwargs)

    Model.train = train
    with pytest.raises(PatchDriftError, match="source has changed"):
        patches.apply()


def test_a_target_without_source_is_refused():
    namespace = {}
    exec("def train(self, trainer=None, **kwargs): ...", namespace)
    Model.train = namespace["train"]
    with pytest.raises(PatchDriftError, match="cannot be inspected"):
        patches.apply()


def test_a_lost_target_is_refused():
    del Model.train
    with pytest.raises(PatchDriftError, match="it is gone"):
        patches.apply()


def test_somebody_elses_later_patch_is_not_thrown_away():
    patches.apply()
    ours = Model.train

    def theirs(self, trainer=None, **kwargs):
        return ours(self, trainer, **kwargs)

    Model.train = theirs
    with pytest.raises(PatchDriftError, match="replaced after it"):
        patches.revert()
    assert Model.train is theirs
    Model.train = ours
    patches.revert()
    assert Model.train is STOCK_TRAIN


def test_a_patch_taken_back_by_hand_can_be_applied_again():
    patches.apply()
    Model.train = STOCK_TRAIN
    assert not patches.status()[0].applied
    patches.apply()
    assert patches.status()[0].applied


def test_every_module_of_the_series_has_its_header():
    for patch in patches.series():
        header = sys.modules[f"detgraph.patches.{patch.name}"].__doc__
        for field in ("What:", "Why not a subclass:", "Target:", "Upstream versions:", "Forwarded:"):
            assert f"\n{field}" in header
        assert patch.target.replace(":", ".") in header
        assert all(version in header for version in patch.fingerprints.values())


# Fingerprints ---------------------------------------------------------------------------------------------------------

PLAIN = """
class Box:
    def area(self, w, h=2):
        return w * h
"""


def fingerprint_of(tmp_path, source):
    file = tmp_path / f"module{len(list(tmp_path.iterdir()))}.py"
    file.write_text(textwrap.dedent(source))
    namespace = {"__name__": file.stem}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return fingerprint(namespace["Box"].area)


@pytest.mark.parametrize(
    "change",
    [
        ("return w * h", "return (w   * h)  # product"),
        ("return w * h", '"""Docstring."""\n        return w * h'),
        ("class Box:", "import os\n\nclass Box:\n    x = 1\n"),
    ],
)
def test_layout_comments_and_docstrings_do_not_count(tmp_path, change):
    assert fingerprint_of(tmp_path, PLAIN.replace(*change)) == fingerprint_of(tmp_path, PLAIN)


@pytest.mark.parametrize(
    "change",
    [
        ("w * h", "h * w"),
        ("w * h", "w + h"),
        ("h=2", "h=2.0"),
        ("h=2", "h=True"),
        ("h=2", "h"),
        ("w, h=2", "w, *, h=2"),
        ("    def", "    @staticmethod\n    def"),
        ("return w * h", "w * h"),
    ],
)
def test_meaning_counts(tmp_path, change):
    assert fingerprint_of(tmp_path, PLAIN.replace(*change)) != fingerprint_of(tmp_path, PLAIN)


# Routing --------------------------------------------------------------------------------------------------------------


def test_stock_detection_goes_to_our_trainer(model, warnings_logged):
    assert routed(model, epochs=3).trainer is LightningDetectionTrainer
    assert routed(model, epochs=3).kwargs == {"epochs": 3}  # not given is not False: a resumed fit must remember
    assert routed(model, capture_network="verify").kwargs == {
        "capture_options": CaptureOptions(capture_network="verify")
    }
    assert routed(model, capture_network=False).kwargs == {"capture_options": CaptureOptions()}
    assert not warnings_logged


def test_command_line_options_are_ambient_and_arguments_win(model):
    token = route_train.ambient_options.set(ON)
    try:
        assert routed(model).kwargs == {"capture_options": ON}
        assert routed(model, capture_network=False).kwargs == {"capture_options": CaptureOptions()}
    finally:
        route_train.ambient_options.reset(token)


def test_a_users_trainer_stays(model, warnings_logged):
    class Mine(DetectionTrainer): ...

    assert vars(routed(model, Mine, epochs=1)) == {"model": model, "trainer": Mine, "kwargs": {"epochs": 1}}
    assert not warnings_logged
    for trainer in (Mine, DetectionTrainer):
        assert routed(model, trainer, capture_network=True).trainer is trainer
    assert routed(model, Mine, capture_orthogonalization=True).trainer is Mine
    assert "capture_orthogonalization=True is not in force: trainer=Mine" in warnings_logged.pop()
    assert len(warnings_logged) == 2 and "capture_network=True is not in force: trainer=Mine" in warnings_logged[0]


def test_a_users_subclass_of_ours_gets_the_options(model, warnings_logged):
    class Mine(LightningDetectionTrainer): ...

    call = routed(model, Mine, capture_network=True)
    assert call.trainer is Mine and call.kwargs == {"capture_options": ON}
    assert not warnings_logged


def test_another_task_map_stays(warnings_logged):
    class Theirs(DetectionTrainer): ...

    class Custom(UpstreamYOLO):
        @property
        def task_map(self):
            return {"detect": {**super().task_map["detect"], "trainer": Theirs}}

    call = routed(Custom("yolo26n.yaml"), capture_network=True)
    assert call.trainer is None and call.kwargs == {}
    assert len(warnings_logged) == 1 and "Custom trains its models with a trainer of its own" in warnings_logged[0]


def test_another_task_stays(warnings_logged):
    segment = UpstreamYOLO("yolo26n-seg.yaml")
    assert routed(segment, epochs=1).trainer is None and not warnings_logged
    call = routed(segment, capture_network=True)
    assert call.trainer is None and call.kwargs == {}
    assert len(warnings_logged) == 1 and "task is 'segment'" in warnings_logged[0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capture_network": 1}, "capture_network=1"),
        ({"capture_netwrok": True}, "Did you mean capture_network"),
        ({"capture_network": True, "compile": True}, "compile=True"),
        ({"capture_options": {"record": 1}}, "'record'"),
        ({"capture_options": 3}, "capture_options=3"),
    ],
)
@pytest.mark.parametrize("make", [UpstreamYOLO, YOLO])
def test_contradictions_leave_no_run_folder(make, kwargs, message, tmp_path, data):
    patches.apply()
    for sets in (data, [data, data]):
        with pytest.raises(CaptureOptionError, match=message):
            make("yolo26n.yaml").train(data=sets, project=str(tmp_path / "runs"), **kwargs)
    assert not (tmp_path / "runs").exists()


def test_keys_in_a_yaml_file(model, tmp_path):
    cfg = tmp_path / "mine.yaml"
    cfg.write_text("epochs: 7\ncapture_network: verify\n")
    seen = []

    def upstream_train(model, trainer=None, **kwargs):
        with open(kwargs["cfg"], encoding="utf-8") as f:
            seen.append((kwargs.pop("cfg"), yaml.safe_load(f), kwargs))

    def train(**kwargs):
        route_train.route(model, upstream_train, None, {"cfg": str(cfg), **kwargs})
        return seen.pop()

    path, content, kwargs = train()
    assert content == {"epochs": 7} and kwargs == {"capture_options": CaptureOptions(capture_network="verify")}
    with pytest.raises(FileNotFoundError):
        open(path).close()
    assert train(capture_network=False)[2] == {"capture_options": CaptureOptions()}
    with pytest.raises(CaptureOptionError, match="compile=True"):
        train(compile=True)
    cfg.write_text("epochs: 7\n")
    assert train() == (str(cfg), {"epochs": 7}, {})
    for text, message in [("compile: true\n", "compile=True"), ("capture_netwrok: true", "Did you mean")]:
        cfg.write_text(text)
        with pytest.raises(CaptureOptionError, match=message):
            train(capture_network=True)


# Real trainings, stopped when their trainer is built ------------------------------------------------------------------


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("make", [UpstreamYOLO, YOLO])
def test_who_trains(make, patched, data, tmp_path):
    if patched:
        patches.apply()
    ours = patched or make is YOLO
    kwargs = {"capture_network": True} if ours else {}
    (trainer,) = started(make("yolo26n.yaml"), data=data, project=str(tmp_path / "runs"), **kwargs)
    assert type(trainer) is (LightningDetectionTrainer if ours else DetectionTrainer)
    args = (trainer.save_dir / "args.yaml").read_text()
    assert "capture" not in args and not hasattr(trainer.args, "capture_options")


def test_args_yaml_names_the_users_cfg_file(data, tmp_path):
    cfg = tmp_path / "mine.yaml"
    cfg.write_text("epochs: 7\ncapture_network: true\n")
    model = YOLO("yolo26n.yaml")
    (trainer,) = started(model, cfg=str(cfg), data=data, project=str(tmp_path / "runs"))
    assert type(trainer) is LightningDetectionTrainer
    args = yaml.safe_load((trainer.save_dir / "args.yaml").read_text())
    assert args["cfg"] == str(cfg) and args["epochs"] == 7 and "capture_network" not in args


def test_several_data_sets_reach_our_trainer_once_each(data, tmp_path, warnings_logged):
    built = started(YOLO("yolo26n.yaml"), data=[data, data], project=str(tmp_path / "runs"), capture_network=True)
    assert [type(trainer) for trainer in built] == [LightningDetectionTrainer] * 2
    assert all("capture" not in (trainer.save_dir / "args.yaml").read_text() for trainer in built)
    assert not [text for text in warnings_logged if "capture" in str(text)]


def test_several_data_sets_without_a_word_stay_upstreams(data):
    call = routed(UpstreamYOLO("yolo26n.yaml"), data=[data, data])
    assert call.trainer is None


@pytest.mark.parametrize(
    ("kwargs", "warnings"), [({}, 1), ({"capture_network": True}, 1), ({"capture_network": False}, 0)]
)
def test_no_second_route_when_the_patch_is_applied_too(data, tmp_path, warnings_logged, kwargs, warnings):
    """The command line asked for the capture, too: a second pass would read that again, and over the arguments."""
    patches.apply()
    token = route_train.ambient_options.set(ON)
    try:
        asked = {"trainer": DetectionTrainer, "data": data, "project": str(tmp_path / "runs"), **kwargs}
        (trainer,) = started(YOLO("yolo26n.yaml"), **asked)
    finally:
        route_train.ambient_options.reset(token)
    assert type(trainer) is DetectionTrainer
    assert len([text for text in warnings_logged if "not in force" in text]) == warnings


# The subclass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "upstream"),
    [("yolov8n-world.yaml", UpstreamYOLOWorld), ("yoloe-26n.yaml", UpstreamYOLOE), ("rtdetr-l.yaml", UpstreamRTDETR)],
)
def test_relatives_stay_themselves_and_accept_the_key_with_a_warning(file, upstream, warnings_logged):
    model = YOLO(file, task="detect")
    assert isinstance(model, upstream) and type(model).__name__ == upstream.__name__
    call = routed(model, capture_network=True)
    assert call.trainer is None and call.kwargs == {}
    (said,) = [text for text in warnings_logged if "capture_network" in text]
    assert f"{upstream.__name__} trains its models with a trainer of its own" in said
    with pytest.raises(CaptureOptionError, match="capture_network=True and compile=True"):
        model.train(capture_network=True, compile=True)


@pytest.mark.parametrize("mode", ["val", "predict", "track", "export", "benchmark"])
def test_modes_that_do_not_train_refuse_the_key(mode):
    model = YOLO("yolo26n.yaml")
    for kwargs in ({"capture_network": True}, {"capture_network": False}, {"capture_options": ON}):
        with pytest.raises(CaptureOptionError, match=f"capture_network=.* mode '{mode}'"):
            getattr(model, mode)(**kwargs)
    with pytest.raises(CaptureOptionError, match=f"^capture_orthogonalization=True has no meaning for mode '{mode}'"):
        getattr(model, mode)(capture_orthogonalization=True)
    with pytest.raises(CaptureOptionError, match="Did you mean"):
        getattr(model, mode)(capture_netwrok=True)


def test_tune_trains_eagerly_and_says_so(tmp_path, warnings_logged, monkeypatch):
    model = YOLO("yolo26n.yaml")
    with pytest.raises(CaptureOptionError, match="compile=True"):
        model.tune(capture_network=True, compile=True, project=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
    model.tune(iterations=0, capture_network=True, project=str(tmp_path / "runs"))
    assert len([text for text in warnings_logged if "tune()" in text]) == 1


def test_default_callbacks_are_stock():
    """The tests above hang a callback on their models only."""
    assert [f.__module__ for f in callbacks.default_callbacks["on_pretrain_routine_start"]] == [
        "ultralytics.utils.callbacks.base"
    ]
