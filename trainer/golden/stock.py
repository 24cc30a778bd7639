"""The process of a stock fit: `python stock.py OUT DETAIL WORDS...` records upstream's own `yolo WORDS`.

Neither detgraph nor Lightning can be imported in it. OUT may be empty.
"""

from __future__ import annotations

import importlib.abc
import runpy
import sys
from pathlib import Path

NOT_SEEN, NOT_WRITTEN = 3, 4  # exit statuses


class Banned(importlib.abc.MetaPathFinder):
    """Refuses our package and Lightning, so that a stock fit is stock beyond doubt."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] in {"detgraph", "lightning", "pytorch_lightning"}:
            raise ModuleNotFoundError(f"{name} is banned where a stock fit runs", name=name)
        return None


def main() -> int:
    """Return NOT_SEEN if there was no fit, NOT_WRITTEN if its golden could not be written, else 0."""
    out, detail, *words = sys.argv[1:]
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        del sys.path[0]  # the neighbours of this file are no top-level modules
    sys.meta_path.insert(0, Banned())
    sys.argv = ["yolo", *words]
    runpy.run_path(str(here / "by_path.py"))
    import ultralytics.cfg
    from by_path.golden import record
    from by_path.golden.file import GoldenError

    records: list[record.FitRecord] = []
    try:
        with record.recording(out or None, record.parse_detail(detail)) as records:
            ultralytics.cfg.entrypoint()
    except GoldenError as e:
        print(f"yolo golden: error: {e}", file=sys.stderr)
        return NOT_WRITTEN
    finally:
        for line in record.told(records):
            print(line, flush=True)
    return 0 if records else NOT_SEEN


if __name__ == "__main__":
    sys.exit(main())
