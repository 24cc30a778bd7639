"""Helpers that tests share with their child processes: no pytest in here, and torch only where it is asked for."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
STARTUP = ROOT / "tests" / "startup" / "sitecustomize.py"
JUDGED = "golden judged by"  # property of a test's report: a rule, and the golden that it was applied to


def import_path(*folders: Path) -> str:
    """Return the PYTHONPATH of a child process: `folders`, and what every process of the tests runs when it starts."""
    return os.pathsep.join(filter(None, [*map(str, folders), str(STARTUP.parent), os.environ.get("PYTHONPATH")]))


def missing_gpu() -> str:
    """Return why no CUDA test can run here, or an empty string."""
    import torch

    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no CUDA device (torch {torch.__version__}, {built})"


def pool_bytes() -> int:
    """Return what is reserved on the GPU in pools of CUDA graphs, used or not: nothing, once no recording is left."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def put_font(config: Path) -> None:
    """Put a font where upstream looks for its own, in the folder of YOLO_CONFIG_DIR; else every fit asks the network.

    Where names are not answered, that takes minutes.
    """
    (matplotlib,) = find_spec("matplotlib").submodule_search_locations
    folder = config / "Ultralytics"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(matplotlib) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", folder / "Arial.ttf")


def make_dataset(
    folder: str | Path, n_train: int, n_val: int, imgsz: int = 64, classes: int = 2, empty: Collection[int] = ()
) -> Path:
    """Write a data set of noise with two labelled rectangles a picture and return the path of its ``data.yaml``.

    The same arguments give the same bytes. A picture's number runs from 0 through both splits, train first; those in
    `empty` are written without a label file, as background pictures.
    """
    folder = Path(folder).resolve()
    for split, numbers in (("train", range(n_train)), ("val", range(n_train, n_train + n_val))):
        images, labels = (folder / kind / split for kind in ("images", "labels"))
        images.mkdir(parents=True, exist_ok=True)
        labels.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            image, rows = _picture(number, imgsz, classes)
            if not cv2.imwrite(str(images / f"{number:04d}.png"), image):
                raise OSError(f"cannot write into {images}")
            if number not in empty:
                (labels / f"{number:04d}.txt").write_text("".join(rows))
    text = yaml.safe_dump(
        {"train": "images/train", "val": "images/val", "names": {i: f"class{i}" for i in range(classes)}}
    )
    (folder / "data.yaml").write_text(text)
    return folder / "data.yaml"


def _picture(number: int, imgsz: int, classes: int) -> tuple[np.ndarray, list[str]]:
    """Return one picture (HWC, BGR, uint8) and its label lines: a rectangle in the left half, one in the right."""
    rng = np.random.default_rng(number)
    image = rng.integers(0, 96, (imgsz, imgsz, 3), dtype=np.uint8)
    rows = []
    half = imgsz // 2
    for left in (0, half):
        w, h = (int(v) for v in rng.integers(half // 2, half - 2, 2))
        x, y = left + int(rng.integers(half - w)), int(rng.integers(imgsz - h))
        cls = int(rng.integers(classes))
        image[y : y + h, x : x + w] = (255 * (cls + 1) // classes, 200, rng.integers(128, 256))
        rows.append(f"{cls} {(x + w / 2) / imgsz:.6f} {(y + h / 2) / imgsz:.6f} {w / imgsz:.6f} {h / imgsz:.6f}\n")
    return image, rows


def part_of(trainer, name: str):
    """Return the part ``name`` of the step of a fit that upstream has set up, and why it is not in force, or None."""
    from detgraph.trainer.fit.assemble import build_part
    from detgraph.trainer.parts import spec

    refused: list[str] = []
    part = build_part(trainer, spec(name), lambda key, reason: refused.append(reason))
    return part, next(iter(refused), None)
