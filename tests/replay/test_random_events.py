"""Whatever happens to a fit, in whatever order: a replaying one leaves the bytes of a plain eager one after each step.

Hypothesis draws the sequence of events; the examples are the same at every run.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steps import Fit, Twin, make_batch

LAYERS = ("0", "2", "3", "8", "9.cv2.0.0")
BATCH_NORMS = ("0.bn", "3.bn", "9.cv3.1.0.1.bn")
WEIGHTS = ("0.conv.weight", "3.bn.weight", "9.cv2.0.2.bias")
BUFFERS = ("0.bn.running_mean", "3.bn.num_batches_tracked")
REPLACEABLE = ("0", "3", "5")


# Every event is a function of the fit and of one number, which says where or how much.


def other_batch(fit: Fit, number: int) -> None:
    fit.batch = make_batch(fit.number, (1 + 2 * (number % 2), 3, 64, 64))


def other_size(fit: Fit, number: int) -> None:
    fit.batch = make_batch(fit.number, (2, 3, 32 * (1 + 2 * (number % 2)), 64))


def background(fit: Fit, number: int) -> None:
    fit.batch = make_batch(fit.number, labels=0)


def freeze_or_unfreeze(fit: Fit, number: int) -> None:
    for parameter in fit.layer(LAYERS[number % len(LAYERS)]).parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def flip_batch_norm(fit: Fit, number: int) -> None:
    module = fit.layer(BATCH_NORMS[number % len(BATCH_NORMS)])
    module.train(not module.training)


def change_momentum(fit: Fit, number: int) -> None:
    fit.layer(BATCH_NORMS[number % len(BATCH_NORMS)]).momentum *= 0.9


def move_storage(fit: Fit, number: int) -> None:
    owner, _, name = (WEIGHTS + BUFFERS)[number % 5].rpartition(".")
    tensor = getattr(fit.layer(owner), name)
    tensor.data = tensor.data.clone()


def rebind_buffer(fit: Fit, number: int) -> None:
    owner, _, name = BUFFERS[number % len(BUFFERS)].rpartition(".")
    setattr(fit.layer(owner), name, getattr(fit.layer(owner), name).clone() + 1)


def swap_module(fit: Fit, number: int) -> None:
    i = int(REPLACEABLE[number % len(REPLACEABLE)])
    fit.model.model[i] = deepcopy(fit.model.model[i])
    fit.rebuild_optimizer()


def write_in_place(fit: Fit, number: int) -> None:
    with torch.no_grad():
        fit.layer("3.conv").weight.mul_(1 + number / 50)
    fit.layer("8").load_state_dict({k: v.clone() for k, v in fit.layer("8").state_dict().items()})


def add_hook(fit: Fit, number: int) -> None:
    layer, hooks = fit.layer(LAYERS[number % len(LAYERS)]), fit.memory.setdefault("hooks", [])

    def note(*args) -> None:
        fit.note("hook", number)

    kinds = (layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook)
    hooks.append(kinds[number % 3](note))


def add_parameter_hook(fit: Fit, number: int) -> None:
    weight = fit.layer("3.conv").weight
    if weight.requires_grad:
        handle = weight.register_hook(lambda gradient: fit.note("gradient") or gradient * 0.5)
        fit.memory.setdefault("hooks", []).append(handle)


def remove_hooks(fit: Fit, number: int = 0) -> None:
    for handle in fit.memory.pop("hooks", []):
        handle.remove()


def change_precision(fit: Fit, number: int) -> None:
    fit.amp = None if fit.amp else torch.bfloat16


def accumulate(fit: Fit, number: int) -> None:
    fit.accumulate = 1 + number % 3


def keep_gradients(fit: Fit, number: int) -> None:
    ways = (lambda: None, lambda: fit.optimizer.zero_grad(set_to_none=False), lambda: fit.optimizer.zero_grad())
    fit.zero_grad = ways[number % 3]


def fail_before_backward(fit: Fit, number: int) -> None:
    def fail() -> None:
        fit.before_backward = lambda: None
        raise InterruptedError("injected")

    fit.before_backward = fail


EVENTS = (
    other_batch, other_size, background, freeze_or_unfreeze, flip_batch_norm, change_momentum, move_storage,
    rebind_buffer, swap_module, write_in_place, add_hook, add_parameter_hook, remove_hooks, change_precision,
    accumulate, keep_gradients, fail_before_backward,
)  # fmt: skip
STEPS = st.lists(
    st.none() | st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), min_size=6, max_size=12
)  # what happens before each step


@settings(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_same_bytes_after_every_event(steps):
    def at(step):
        return None if step is None else lambda fit: step[0](fit, step[1])

    events = {2 + i: at(step) for i, step in enumerate(steps)}
    quiet = 2 + len(steps)
    events[quiet] = remove_hooks
    fits = []
    for capture in (False, True):
        fit = Fit(capture, accumulate=2)
        fits.append(fit.run(quiet + 3, events, accept=InterruptedError).end())
    Twin(*fits).assert_same()
    assert fits[1].report.blocked is None
    assert fits[1].report.replayed >= 2  # of the last three steps, in the worst case
