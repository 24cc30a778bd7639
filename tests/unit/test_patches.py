"""The patch series: identity after revert, refusal on drift, what a fingerprint counts."""

import functools
import sys
import textwrap

import pytest
from ultralytics.engine.model import Model
from ultralytics.optim import muon

from detgraph import patches
from detgraph.patches import PatchDriftError, fingerprint, replay_orthogonalization, route_train

STOCK_TRAIN = Model.train


@pytest.fixture(autouse=True)
def stock_upstream():
    yield
    Model.train = STOCK_TRAIN
    patches.revert()


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
        assert patch.known.target.replace(":", ".") in header
        assert all(version in header for version in patch.known.fingerprints.values())


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
