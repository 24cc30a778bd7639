"""Who trains: calls that are routed to our trainer, and those that stay upstream's, with and without the patch."""

from types import SimpleNamespace

import pytest
import yaml
from ultralytics import RTDETR as UpstreamRTDETR
from ultralytics import YOLO as UpstreamYOLO
from ultralytics import YOLOE as UpstreamYOLOE
from ultralytics import YOLOWorld as UpstreamYOLOWorld
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER, callbacks

from detgraph import patches
from detgraph.cfg import CaptureOptionError, CaptureOptions
from detgraph.trainer import YOLO, LightningDetectionTrainer
from detgraph.trainer.fit.asked import ambient_options
from detgraph.trainer.routing import route

ON = CaptureOptions(capture_network=True)


class Stop(Exception):
    """Ends a real training right after its trainer was built."""


@pytest.fixture(autouse=True)
def stock_upstream():
    yield
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

    return route(model, upstream_train, trainer, kwargs)


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


def test_stock_detection_goes_to_our_trainer(model, warnings_logged):
    assert routed(model, epochs=3).trainer is LightningDetectionTrainer
    assert routed(model, epochs=3).kwargs == {"epochs": 3}  # not given is not False: a resumed fit must remember
    assert routed(model, capture_network="verify").kwargs == {
        "capture_options": CaptureOptions(capture_network="verify")
    }
    assert routed(model, capture_network=False).kwargs == {"capture_options": CaptureOptions()}
    assert not warnings_logged


def test_command_line_options_are_ambient_and_arguments_win(model):
    token = ambient_options.set(ON)
    try:
        assert routed(model).kwargs == {"capture_options": ON}
        assert routed(model, capture_network=False).kwargs == {"capture_options": CaptureOptions()}
    finally:
        ambient_options.reset(token)


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
        route(model, upstream_train, None, {"cfg": str(cfg), **kwargs})
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


@pytest.mark.parametrize("kind", [UpstreamYOLO, YOLO])
@pytest.mark.parametrize("asked", [{}, {"capture_network": False}, {"capture_network": True}, {"capture_options": ON}])
def test_several_data_sets_go_to_the_processes_that_upstream_starts(kind, asked, data, warnings_logged):
    """Those begin from other weights than a trainer in this process does. They cannot capture, and that is said."""
    call = routed(kind("yolo26n.yaml"), data=[data, data], **asked)
    assert call.trainer is None and not any("capture" in name for name in call.kwargs)
    if True in asked.values() or ON in asked.values():
        (warning,) = warnings_logged
        assert warning.startswith("capture_network=True is not in force: ")
        assert "trainer=LightningDetectionTrainer" in warning and "one data set" in warning
    else:
        assert not warnings_logged


def test_several_data_sets_from_a_yaml_are_as_several(data, tmp_path, warnings_logged):
    cfg = tmp_path / "mine.yaml"
    cfg.write_text(yaml.safe_dump({"data": [data, data], "capture_network": True}))
    call = routed(YOLO("yolo26n.yaml"), cfg=str(cfg))
    assert call.trainer is None and len(warnings_logged) == 1


def test_several_data_sets_with_a_trainer_or_a_callback_train_in_this_process(data, warnings_logged):
    """There upstream names the trainer itself, and so it is ours that is named."""
    named = routed(UpstreamYOLO("yolo26n.yaml"), LightningDetectionTrainer, data=[data, data], capture_network=True)
    model = UpstreamYOLO("yolo26n.yaml")
    model.add_callback("on_train_start", print)
    called = routed(model, data=[data, data], capture_network=True)
    assert named.trainer is called.trainer is LightningDetectionTrainer
    assert named.kwargs["capture_options"] == called.kwargs["capture_options"] == ON and not warnings_logged


@pytest.mark.parametrize(
    ("kwargs", "warnings"), [({}, 1), ({"capture_network": True}, 1), ({"capture_network": False}, 0)]
)
def test_no_second_route_when_the_patch_is_applied_too(data, tmp_path, warnings_logged, kwargs, warnings):
    """The command line asked for the capture, too: a second pass would read that again, and over the arguments."""
    patches.apply()
    token = ambient_options.set(ON)
    try:
        asked = {"trainer": DetectionTrainer, "data": data, "project": str(tmp_path / "runs"), **kwargs}
        (trainer,) = started(YOLO("yolo26n.yaml"), **asked)
    finally:
        ambient_options.reset(token)
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
