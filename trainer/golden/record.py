"""Recording a golden: watch a fit from outside and write down what it computes, step by step.

Upstream's own trainer is recorded as well as ours: stock.py does so in a process that cannot import detgraph or
lightning, so nothing here names detgraph. Observing reads; a recorded fit computes what an unrecorded one does, more
slowly: every tensor is copied to the host and hashed at every step.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from . import digests
from . import file as golden_file
from .watch import around, exact, losses

DETAIL = (0, 100)
"""Steps, from the first up to but not including the last, whose tensors are recorded one by one."""


def short(*parts: object) -> str:
    """Return the first 16 digits of a digest."""
    return digests.digest(*parts)[:16]


def environment(device: torch.device) -> dict[str, object]:
    """Return versions, processor and device that the bits of a fit belong to."""
    import cv2

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cuda = device.type == "cuda"
    return {
        **{name: installed(name) for name in ("ultralytics", "torchvision", "numpy", "lightning", "detgraph")},
        "torch": torch.__version__,  # the build counts, too: 2.9.0+cpu brings other libraries than 2.9.0+cu128
        "opencv": cv2.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kept = {}
    for line in lines:
        key, _, value = line.partition(":")
        kept.setdefault(key.strip(), value.strip())
    names = [kept[key] for key in ("model name", "cpu family", "model") if key in kept]  # "AMD EPYC" alone says little
    return " ".join(names) or platform.processor()


class FitRecord:
    """What one fit computes, noted as it happens.

    Args:
        trainer: Any trainer of upstream's, before its loop starts.
        detail: First step, and the step after the last one, whose tensors are noted one by one.
    """

    def __init__(self, trainer, detail: tuple[int, int] = DETAIL) -> None:
        self.trainer, self.detail = trainer, detail
        self.steps: list[dict] = []
        self.final: dict[str, str] = {}
        self.loss_names: list[str] = []
        self.updates = 0  # optimizer steps
        self.device: torch.device | None = None
        self.written: list[Path] = []
        self.unwritten: list[str] = []  # with the reasons
        self._names: dict[str, dict[str, int]] = {}
        self._tensors: dict[str, dict[str, list]] = {}
        around(
            trainer,
            preprocess_batch=self._preprocess_batch,
            optimizer_step=self._optimizer_step,
            run_callbacks=self._run_callbacks,
        )

    def _preprocess_batch(self, prepare: Callable, *args, **kwargs) -> dict:
        batch = prepare(*args, **kwargs)
        if self.device is not None:  # the loop has started
            self._before_forward(batch)
        return batch

    def _optimizer_step(self, update: Callable, *args, **kwargs) -> None:
        self._before_update()
        update(*args, **kwargs)
        self._after_update()

    def _run_callbacks(self, run: Callable, event: str) -> None:
        run(event)
        if event == "on_train_start":
            self.device = self.trainer.device
        elif event == "on_train_batch_end" and self.steps:
            found = losses(self.trainer)
            self.loss_names, self.steps[-1]["losses"] = list(found), list(found.values())
        elif event == "on_train_end":
            self._end()

    def _before_forward(self, batch: dict) -> None:
        model = self.trainer.model
        self.steps.append({"epoch": self.trainer.epoch, "update": None, "losses": None})
        self._note("parameters", model.named_parameters())
        self._note("buffers", model.named_buffers())
        self.steps[-1]["images"] = short(batch["img"])
        self.steps[-1]["targets"] = short({k: v for k, v in batch.items() if isinstance(v, Tensor) and k != "img"})

    def _before_update(self) -> None:
        if not self.steps:
            return
        self.steps[-1]["update"], self.updates = self.updates, self.updates + 1
        self._note("gradients", ((name, p.grad) for name, p in self.trainer.model.named_parameters()))

    def _after_update(self) -> None:
        if not self.steps:
            return
        trainer, step = self.trainer, self.steps[-1]
        groups, state = trainer.optimizer.param_groups, trainer.optimizer.state
        step["schedule"] = [
            [exact(g["lr"]), exact(g.get("momentum", g.get("betas", (0.0,))[0])), exact(g.get("weight_decay", 0.0))]
            for g in groups
        ]
        self._note("optimizer", ((name, state.get(p)) for name, p in trainer.model.named_parameters()))
        scaler = trainer.scaler.state_dict()
        step["scaler"] = [exact(scaler["scale"]), scaler["_growth_tracker"]] if scaler else []
        if trainer.ema:
            self._note("ema", trainer.ema.ema.state_dict().items())

    def _end(self) -> None:
        """Note the sub-digests of the finished fit; not the generators', which validation and plots move, too."""
        self.final = {k: v for k, v in digests.fit_digests(self.trainer).items() if k != "generators"}
        if self.detail[1]:
            model = self.trainer.model
            self._digest("final", "parameters", model.named_parameters())
            self._digest("final", "buffers", model.named_buffers())
            self._digest("final", "ema", self.trainer.ema.ema.state_dict().items())

    def _note(self, part: str, named: Iterable[tuple[str, Tensor | Mapping | None]]) -> None:
        """Note the digest of a part of the latest step; within the detail, its tensors as well."""
        number = len(self.steps) - 1
        detailed = self.detail[0] <= number < self.detail[1]
        self.steps[-1][part] = self._digest(str(number) if detailed else None, part, named)

    def _digest(self, key: str | None, part: str, named: Iterable[tuple[str, Tensor | Mapping | None]]) -> str:
        """Return the digest of a part; under ``key``, if given, keep a digest and a summary of each of its tensors."""
        whole = {}
        if key is not None:
            names = self._names.setdefault(part, {})
            entries = self._tensors.setdefault(key, {}).setdefault(part, [])
        for name, value in named:
            value = value.detach().cpu() if isinstance(value, Tensor) else value
            whole[name] = None if value is None else digests.digest(value)
            if key is not None:
                place = names.setdefault(name, len(names))
                entries += [None] * (place + 1 - len(entries))
                entries[place] = None if value is None else [whole[name][:16], *_summary(value)]
        return short(whole)

    def content(self, error: BaseException | None = None) -> dict:
        """Return the golden of the fit so far; ``error`` is what ended it early, if it has not ended itself."""
        trainer = self.trainer
        report = getattr(trainer, "capture_report", None)
        arguments = {k: v for k, v in vars(trainer.args).items() if k not in ("save_dir", "name", "project")}
        return {
            "environment": environment(self.device or trainer.device),
            "arguments": {
                k: v if isinstance(v, (bool, int, float, type(None))) else str(v) for k, v in arguments.items()
            },
            "fit": {
                "trainer": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
                "loop": self._loop(),
                "replayed": report.replayed if report else 0,
                "ended": self._ended(error),
                "results": golden_file.results_digest(Path(trainer.save_dir)),
            },
            "loss_names": self.loss_names,
            "final": self.final,
            "steps": self.steps,
            "tensors": {"names": {k: list(v) for k, v in self._names.items()}, **self._tensors},
        }

    def _ended(self, error: BaseException | None) -> str | None:
        if self.final:
            return None
        if error is None:
            return "did not reach its end"
        return re.sub(r"\x1b\[[0-9;]*m", "", " ".join(f"{type(error).__name__}: {error}".split()))

    def _loop(self) -> str:
        if self.device is None:
            return "not begun"
        return "upstream" if getattr(self.trainer, "loop_state", None) is None else "lightning"

    def write(self, out: str | Path | None = None, error: BaseException | None = None) -> None:
        """Write the golden into the run folder, and to ``out`` if given; note what was ``written``, and not."""
        content = self.content(error)
        for path in (Path(self.trainer.save_dir) / golden_file.FILE_NAME, *([Path(out)] if out else [])):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                golden_file.write(content, path)
                self.written.append(path)
            except OSError as e:
                self.unwritten.append(f"{path} ({e.strerror or e})")


def _summary(value: object) -> list[str]:
    """Return sum and largest magnitude of a tensor, both taken in float64."""
    if not isinstance(value, Tensor) or value.is_complex():
        return []
    value = value.double()
    return [exact(value.sum()), exact(value.abs().max()) if value.numel() else "0x0.0p+0"]


@contextmanager
def recording(out: str | Path | None = None, detail: tuple[int, int] = DETAIL) -> Iterator[list[FitRecord]]:
    """Record every fit whose model or trainer is built inside the context; yields their records.

    Each fit's golden is written into its run folder at the end of the context, whether or not the fit ended well, and
    the last one's to ``out`` if given. Fits in child processes (several GPUs, several data sets) are not seen.

    Raises:
        golden_file.GoldenError: if a golden could not be written; an error of the fit's goes first.
    """
    from ultralytics.utils import callbacks

    records: list[FitRecord] = []

    def watch(trainer) -> None:
        records.append(FitRecord(trainer, detail))

    event, error = "on_pretrain_routine_start", None
    callbacks.default_callbacks[event].append(watch)
    try:
        yield records
    except BaseException as caught:
        error = caught
        raise
    finally:
        if watch in callbacks.default_callbacks[event]:
            callbacks.default_callbacks[event].remove(watch)
        for record in records:
            record.write(out, error)
        unwritten = ", ".join(told for record in records for told in record.unwritten)
        if unwritten and error is not None:  # whose own message goes first
            print(f"golden not written: {unwritten}", file=sys.stderr)
    if unwritten:
        raise golden_file.GoldenError(
            f"the fit is trained, but its golden could not be written: {unwritten}. Make room or name another file, "
            "and record again."
        )


def told(records: Iterable[FitRecord]) -> list[str]:
    """Return a line for each fit whose golden was written: where it is."""
    return [f"golden: {', '.join(map(str, record.written))}" for record in records if record.written]


def parse_detail(text: str) -> tuple[int, int]:
    """Return the steps that 'FIRST:LAST' names, LAST not included; either may be left out.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if not match:
        raise ValueError(f"'{text}' is not FIRST:LAST")
    first, last = int(match[1] or 0), int(match[2] or sys.maxsize)
    if last < first:
        raise ValueError(f"'{text}' ends before it begins: give the smaller step first")
    return first, last
