"""The demo data set: the same for everyone, loadable from anywhere, and careful with other people's files."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import cv2
import numpy as np
import pytest

from detgraph.cfg import demo


def digest(folder):
    """Hash names, decoded pixels and labels: the PNG encoder's choices are its own."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sha.update(path.relative_to(folder).as_posix().encode())
            sha.update(cv2.imread(str(path)).tobytes() if path.suffix == ".png" else path.read_bytes())
    return sha.hexdigest()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A data set that tests only read."""
    return demo.draw_demo(tmp_path_factory.mktemp("demo"))


def test_same_seed_same_bytes_other_seed_other_bytes(drawn, tmp_path):
    again = demo.draw_demo(tmp_path / "again")
    other = demo.draw_demo(tmp_path / "other", seed=1)
    assert digest(again.parent) == digest(drawn.parent)
    assert digest(other.parent) != digest(drawn.parent)


def test_every_picture_differs():
    pictures = {demo.draw_image(0, split, i)[0].tobytes() for split, n in demo.SPLITS.items() for i in range(n)}
    assert len(pictures) == sum(demo.SPLITS.values())


def test_global_random_state_is_neither_read_nor_moved():
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].copy(), random.getstate()
    first = demo.draw_image(0, "train", 0)[0]
    assert np.array_equal(np.random.get_state()[1], before[0]) and random.getstate() == before[1]
    np.random.seed(2)
    assert np.array_equal(demo.draw_image(0, "train", 0)[0], first)


@pytest.mark.parametrize("split", demo.SPLITS)
def test_boxes_are_inside_apart_and_tight(split):
    seen = set()
    for index in range(demo.SPLITS[split]):
        image, labels = demo.draw_image(0, split, index)
        assert image.shape == (demo.SIZE, demo.SIZE, 3) and image.dtype == np.uint8
        assert 1 <= len(labels) <= 4
        taken = np.zeros(image.shape[:2], bool)
        # A shape is brighter in one channel than any background: what is bright must be what the labels say.
        shape = image.max(2) > demo.BACKGROUND[1] + 24 + 20
        for cls, cx, cy, w, h in labels:
            seen.add(cls)
            x1, x2, y1, y2 = (round(v * demo.SIZE) for v in (cx - w / 2, cx + w / 2, cy - h / 2, cy + h / 2))
            assert 0 <= x1 < x2 <= demo.SIZE and 0 <= y1 < y2 <= demo.SIZE
            assert not taken[y1:y2, x1:x2].any()
            taken[y1:y2, x1:x2] = True
            inside = shape[y1:y2, x1:x2]
            assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()
        assert not (shape & ~taken).any()
    assert seen == set(range(len(demo.NAMES)))


def test_complete_folder_is_left_alone(drawn):
    before = {p: p.stat().st_mtime_ns for p in drawn.parent.rglob("*")}
    assert demo.draw_demo(drawn.parent) == drawn
    assert {p: p.stat().st_mtime_ns for p in drawn.parent.rglob("*")} == before


def test_half_written_folder_is_drawn_again(drawn, tmp_path, monkeypatch):
    draw_image = demo.draw_image

    def interrupted(seed, split, index):
        if split == "val" and index == 3:
            raise KeyboardInterrupt
        return draw_image(seed, split, index)

    monkeypatch.setattr(demo, "draw_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.draw_demo(tmp_path)
    assert not (tmp_path / "data.yaml").exists()
    (tmp_path / "images/train/000.png").write_bytes(b"half")

    monkeypatch.undo()
    demo.draw_demo(tmp_path)
    assert digest(tmp_path) == digest(drawn.parent)


def test_lost_file_and_other_seed_are_drawn_again(drawn, tmp_path):
    demo.draw_demo(tmp_path, seed=1)
    (tmp_path / "labels/train.cache").write_bytes(b"stale")
    demo.draw_demo(tmp_path)
    assert digest(tmp_path) == digest(drawn.parent)
    (tmp_path / "labels/val/000.txt").unlink()
    demo.draw_demo(tmp_path)
    assert digest(tmp_path) == digest(drawn.parent)


def test_pictures_of_another_size_are_drawn_again(drawn, tmp_path, monkeypatch):
    """Those of an earlier release, with the same names and the same seed."""
    monkeypatch.setattr(demo, "SIZE", 2 * demo.SIZE)
    demo.draw_demo(tmp_path)
    monkeypatch.undo()
    demo.draw_demo(tmp_path)
    assert digest(tmp_path) == digest(drawn.parent)


@pytest.mark.parametrize("name", ["data.yaml", "notes.txt", "images/train/mine.png"])
def test_files_of_other_origin_are_refused_and_kept(tmp_path, name):
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match=mine.name):
        demo.draw_demo(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [mine] and mine.read_text() == "mine"


def test_upstream_finds_the_pictures_from_any_folder(drawn, tmp_path, monkeypatch):
    from ultralytics.data.utils import check_det_dataset

    for cwd, data in ((tmp_path, drawn), (drawn.parent, "data.yaml"), (tmp_path, os.path.relpath(drawn, tmp_path))):
        monkeypatch.chdir(cwd)
        found = check_det_dataset(data, autodownload=False)
        assert found["train"] == str(drawn.parent / "images/train")
        assert found["val"] == str(drawn.parent / "images/val")
        assert tuple(found["names"].values()) == demo.NAMES


def test_command_line_prints_the_yaml(tmp_path):
    command = [sys.executable, "-m", "detgraph.cfg.demo", "set", "--seed", "3"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert out.strip() == os.path.join("set", "data.yaml")
    assert "seed 3" in (tmp_path / "set/data.yaml").read_text()
