"""Who may be replayed: circumstances of a fit that keep the loop upstream's, the model whole, or the network eager.

Each rule returns a sentence that names what was found, or None. A contradiction in what the user asked for is not
here: `detgraph.cfg` refuses it before any work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from ultralytics.nn.modules import Detect
from ultralytics.nn.tasks import DetectionModel
from ultralytics.optim import MuSGD
from ultralytics.utils import LOGGER, RANK
from ultralytics.utils.torch_utils import is_qat, unwrap_model

from detgraph.cfg import precision_blocker
from detgraph.models import objective_blocker
from detgraph.patches import replay_orthogonalization
from detgraph.trainer.capture import torch_private
from detgraph.trainer.capture.recorders import CudaRecorder
from detgraph.trainer.parts.network import EagerNetworkStep, GraphedNetworkStep
from detgraph.trainer.parts.orthogonalization import EagerOrthogonalization, GraphedOrthogonalization

from .upstream import loop_drift

if TYPE_CHECKING:
    from .trainer import LightningDetectionTrainer

REPLACEABLE_METHODS = ("forward", "predict", "_predict_once", "loss", "init_criterion")


def loop_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why upstream's own loop must run instead of ours."""
    if trainer.world_size > 1 or RANK != -1:
        return "training on several GPUs runs upstream's own loop"
    if trainer.device.type not in {"cpu", "cuda"}:
        return f"training on '{trainer.device.type}' runs upstream's own loop"
    if trainer.args.task != "detect":
        return f"task '{trainer.args.task}' runs upstream's own loop"
    return loop_drift()


def split_blocker(model: nn.Module) -> str | None:
    """Return why the model must be called whole, network and objective in one, as upstream calls it.

    Called at every step: a hook on the model itself would otherwise see another call than upstream's.
    """
    if blocker := torch_private.missing():
        return blocker
    model = unwrap_model(model)
    if type(model) is not DetectionModel:
        return f"model class {type(model).__qualname__} is not upstream's DetectionModel"
    if replaced := [name for name in REPLACEABLE_METHODS if not _is_upstreams(getattr(DetectionModel, name, None))]:
        return f"the model's {replaced[0]}() was replaced on its class"
    attributes = vars(model)
    if replaced := [name for name in REPLACEABLE_METHODS if name in attributes]:
        return f"the model's {replaced[0]}() was replaced on the instance"
    if torch_private.module_hooked(model):
        return "a hook is registered on the model itself"
    return None


def _is_upstreams(method: object) -> bool:
    """Return whether a method of the model's class is of upstream's own source, whoever was imported first."""
    code = getattr(method, "__code__", None)  # a wrapper may carry the name of what it wraps, but not its code
    return code is not None and code.co_filename == DetectionModel.__init__.__code__.co_filename


def _device_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why nothing can be recorded on the fit's device."""
    if trainer.recorder is None and trainer.device.type != "cuda":
        return f"replay needs a CUDA device, this fit runs on '{trainer.device.type}'"
    return None


def _network_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why this fit's network stays eager from the start."""
    model = unwrap_model(trainer.model)
    if blocker := _device_blocker(trainer):
        return blocker
    if blocker := split_blocker(trainer.model):
        return blocker
    head = model.model[-1]
    if not isinstance(head, Detect):
        return f"head {type(head).__qualname__} is not a Detect head"
    if blocker := objective_blocker(model):
        return blocker
    if is_qat(model):
        return "quantization-aware training (quantize=8) keeps its observers in Python"
    if trainer.recorder is None:
        precision = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(_autocast_dtype(trainer), "fp32")
        return precision_blocker(precision, torch.__version__)
    return None


def _autocast_dtype(trainer: LightningDetectionTrainer) -> torch.dtype | None:
    if trainer.args.amp == "bf16":
        return torch.bfloat16
    return torch.get_autocast_dtype(trainer.device.type) if trainer.amp else None


def nominal_shape(trainer: LightningDetectionTrainer) -> tuple[int, ...]:
    """Return the (batch, channels, height, width) of a full batch: the one shape that is worth a recording.

    With ``rect=True`` sizes differ by batch, and the most frequent one counts. The loader may be anything that can be
    iterated: where it does not say how large its batches are, they are taken to be as large as was asked for.
    """
    batch = getattr(trainer.train_loader, "batch_size", None)
    if type(batch) is not int or batch < 1:
        batch = trainer.batch_size
    height = width = trainer.args.imgsz
    if shapes := _rect_shapes(trainer.train_loader):
        height, width = max(shapes, key=shapes.count)
    return (batch, trainer.data["channels"], height, width)


def _rect_shapes(loader: object) -> list[tuple[int, int]]:
    """Return (height, width) of every batch of a ``rect=True`` data set, and nothing for any other."""
    dataset = getattr(loader, "dataset", None)
    shapes = getattr(dataset, "batch_shapes", None)
    if not getattr(dataset, "rect", False) or shapes is None:
        return []
    return [tuple(int(side) for side in shape) for shape in shapes]


def nominal_share(trainer: LightningDetectionTrainer) -> float:
    """Return the share of an epoch's full batches that will have the nominal shape."""
    stride, size = trainer.stride, trainer.args.imgsz
    if shapes := _rect_shapes(trainer.train_loader):
        return max(map(shapes.count, shapes)) / len(shapes)
    if scale := trainer.args.multi_scale:  # upstream draws a size uniformly and rounds it down to the stride
        drawn = range(max(stride, int(size * (1.0 - scale))), int(size * (1.0 + scale) + stride))
        return sum(one // stride * stride == size for one in drawn) / len(drawn)
    return 1.0


def network_step_for(trainer: LightningDetectionTrainer) -> tuple[EagerNetworkStep, str | None]:
    """Return the network step of a fit, and why it is not the one that was asked for."""
    report = trainer.capture_report
    if not trainer.capture.network:
        return EagerNetworkStep(trainer.model, report, "capture_network=False"), None
    if blocker := _network_blocker(trainer):
        return EagerNetworkStep(trainer.model, report, blocker), blocker
    recorder = trainer.recorder or CudaRecorder(trainer.device)
    shape = nominal_shape(trainer)
    if (share := nominal_share(trainer)) < 0.9:
        LOGGER.warning(
            f"capture_network: only batches of {shape[3]}x{shape[2]} are replayed, about {share:.0%} of the full ones; "
            "the others train eagerly. A fixed size (multi_scale=0, rect=False) replays all of them."
        )
    for lack in torch_private.reduced(trainer.device.type):
        LOGGER.warning(f"capture_network: {lack}")
    step = GraphedNetworkStep(trainer.model, recorder, shape, trainer.capture, report)
    step.survivors = lambda: [trainer.loss, *(trainer.loss_items or {}).values(), *(trainer.tloss or {}).values()]
    return step, None


def _orthogonalization_blocker(trainer: LightningDetectionTrainer) -> str | None:
    """Return why this fit's optimizer steps stay eager from the start."""
    if blocker := _device_blocker(trainer) or torch_private.missing():
        return blocker
    if type(trainer.optimizer) is not MuSGD:
        return (
            f"the optimizer is {type(trainer.optimizer).__qualname__}, and only MuSGD orthogonalizes "
            "(optimizer=auto picks it for fits of more than 10000 optimizer steps): train with optimizer=MuSGD"
        )
    if drift := replay_orthogonalization.patch.drift():
        return f"patch 'replay_orthogonalization' does not fit {replay_orthogonalization.patch.target}: {drift}"
    return None


def orthogonalization_for(trainer: LightningDetectionTrainer) -> tuple[EagerOrthogonalization, str | None]:
    """Return what a fit's optimizer steps run in, and why it is not what was asked for."""
    report = trainer.capture_report.orthogonalization
    if not trainer.capture.capture_orthogonalization:
        return EagerOrthogonalization(report, "capture_orthogonalization=False"), None
    if blocker := _orthogonalization_blocker(trainer):
        return EagerOrthogonalization(report, blocker), blocker
    recorder = trainer.recorder or CudaRecorder(trainer.device)
    return GraphedOrthogonalization(trainer.model, recorder, trainer.capture, report), None
