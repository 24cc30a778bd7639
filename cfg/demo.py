"""The embedded demo data set: small labelled pictures of circles, squares and triangles.

``python -m detgraph.cfg.demo FOLDER`` draws it; nothing is downloaded. Every picture comes from a random generator of
its own, keyed by seed, split and index, and is drawn with integer arithmetic: the same seed gives the same pixels and
labels on every machine, for as long as NumPy keeps its generators' streams. The global random state is neither read
nor moved.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import cv2
import numpy as np
import yaml

NAMES = ("circle", "square", "triangle")
SPLITS = {"train": 192, "val": 24}
SIZE = 96  # pixels, width and height
RADIUS = (9, 21)  # half the side of a shape's box, inclusive
GAP = 3  # free pixels between two boxes
BACKGROUND = (16, 112)  # every channel of the background, before noise
BRIGHT = (190, 255)  # one channel of each shape, so that it stands out from any background; the others are free


def draw_demo(folder: str | Path, seed: int = 0) -> Path:
    """Draw the data set into `folder` and return the path of its ``data.yaml``.

    ``data.yaml`` is written last, in one move, and vouches for the rest: a complete folder is left as it is, one that
    was interrupted, lost a file or was drawn with another seed is drawn again. A folder with files of other origin is
    refused with `FileExistsError`, before anything is written.
    """
    folder = Path(folder)
    seal, text = folder / "data.yaml", _description(seed)
    samples = [(split, index, *_files(split, index)) for split, count in SPLITS.items() for index in range(count)]
    expected = {file for _, _, *files in samples for file in files}
    if seal.is_file() and seal.read_text(encoding="utf-8") == text and all((folder / f).is_file() for f in expected):
        return seal

    _refuse_strangers(folder, expected)
    seal.unlink(missing_ok=True)
    for cache in folder.glob("labels/*.cache"):  # upstream recognises labels by path and size, not by content
        cache.unlink()
    for split, index, picture, note in samples:
        for parent in (picture.parent, note.parent):
            (folder / parent).mkdir(parents=True, exist_ok=True)
        image, labels = draw_image(seed, split, index)
        if not cv2.imwrite(str(folder / picture), image):
            raise OSError(f"cannot write {folder / picture}")
        lines = (f"{c} {x:.6f} {y:.6f} {w:.6f} {h:.6f}\n" for c, x, y, w, h in labels)
        (folder / note).write_text("".join(lines), encoding="utf-8")
    draft = seal.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(seal)
    return seal


def draw_image(seed: int, split: str, index: int) -> tuple[np.ndarray, list[tuple[int, float, float, float, float]]]:
    """Return one picture (HWC, BGR, uint8) and its labels: class, centre x, centre y, width, height, in 0 to 1."""
    rng = np.random.default_rng((seed, list(SPLITS).index(split), index))
    background = rng.integers(*BACKGROUND, 3, endpoint=True)
    image = background + rng.integers(-24, 25, (SIZE, SIZE, 3))
    ys, xs = np.mgrid[:SIZE, :SIZE]
    labels = []
    for shape, cx, cy, r in _place(rng, count=rng.integers(1, 5)):
        dx, dy = xs - cx, ys - cy
        inside = (
            dx**2 + dy**2 <= r**2,
            np.maximum(abs(dx), abs(dy)) <= r,
            (dy <= r) & (2 * abs(dx) <= dy + r),
        )[shape]
        colour = rng.permutation((rng.integers(*BRIGHT, endpoint=True), *rng.integers(0, 256, 2)))
        image[inside] = colour + rng.integers(-12, 13, (inside.sum(), 3))
        side = (2 * r + 1) / SIZE  # all three shapes touch all four sides of their box
        labels.append((int(shape), (cx + 0.5) / SIZE, (cy + 0.5) / SIZE, side, side))
    return image.clip(0, 255).astype(np.uint8), labels


def _place(rng: np.random.Generator, count: int) -> list[tuple[int, int, int, int]]:
    """Return up to `count`, at least one, of (shape, centre x, centre y, radius) whose boxes keep their distance."""
    placed: list[tuple[int, int, int, int]] = []
    for _ in range(20 * count):
        if len(placed) == count:
            break
        r = int(rng.integers(*RADIUS, endpoint=True))
        cx, cy = (int(v) for v in rng.integers(r, SIZE - r, 2))
        if all(max(abs(cx - x), abs(cy - y)) > r + q + GAP for _, x, y, q in placed):
            placed.append((int(rng.integers(len(NAMES))), cx, cy, r))
    return placed


def _files(split: str, index: int) -> tuple[Path, Path]:
    """Return picture and label file of one sample, relative to the data set's folder."""
    return Path("images", split, f"{index:03d}.png"), Path("labels", split, f"{index:03d}.txt")


def _description(seed: int) -> str:
    """Return the text of ``data.yaml``: without `path`, upstream resolves the splits from the file's own folder."""
    body = {**{split: f"images/{split}" for split in SPLITS}, "names": dict(enumerate(NAMES))}
    return f"# detgraph demo data set, {SIZE} px, seed {seed}\n" + yaml.safe_dump(body, sort_keys=False)


def _refuse_strangers(folder: Path, expected: set[Path]) -> None:
    """Raise if `folder` holds anything that neither this module nor upstream's label cache has put there."""
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        name = path.relative_to(folder)
        ours = path.is_dir() or name in expected or name.suffix in {".cache", ".tmp"}
        if name == Path("data.yaml"):
            ours = path.read_text(encoding="utf-8").startswith("# detgraph demo data set")
        if not ours:
            raise FileExistsError(f"{path} is not part of the demo data set: name an empty or a new folder")


def main() -> None:
    """Draw the data set where the command line says and print the path of its ``data.yaml``."""
    parser = argparse.ArgumentParser(prog="python -m detgraph.cfg.demo", description="Draw the demo data set.")
    parser.add_argument("folder", type=Path, help="where to draw; made if missing, left alone if complete")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other pictures (default: 0)")
    args = parser.parse_args()
    print(draw_demo(args.folder, args.seed))


if __name__ == "__main__":
    main()
