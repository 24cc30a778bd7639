"""What every recorder, tape and memory promises: the emulator here, and the CUDA recorder where there is a GPU.

Work is warmed up before it is captured, as the product does. Results count from the first replay on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from detgraph.trainer.capture.lending import Memory
from detgraph.trainer.capture.recorders import CudaRecorder
from detgraph.trainer.capture.recording import Recorder, Tape
from detgraph.trainer.capture.state import Generators, NetworkState
from emulator import EmulatingRecorder
from helpers import pool_bytes

LARGE = 1 << 19  # elements: in a pool, what is freed of this size is what the next of this size gets


@dataclass
class Place:
    """A recorder, and where it records."""

    recorder: Recorder
    device: torch.device

    def record(self, *works: Callable[[], object]) -> tuple[Memory, list[tuple[object, Tape]]]:
        """Return the memory of a recording, and each work's result and tape."""
        with self.recorder.session() as memory:
            for work in works:
                work()
            return memory, [self.recorder.capture(work) for work in works]

    def tensor(self, *values: float) -> Tensor:
        return torch.tensor(values, device=self.device)

    def reserved(self) -> int:
        """Return how many bytes recordings have reserved: the emulator reserves none."""
        return pool_bytes() if self.device.type == "cuda" else 0


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request) -> Place:
    if request.param == "emulated":
        return Place(EmulatingRecorder(), torch.device("cpu"))
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(CudaRecorder(device), device)


# Recorder and tape ----------------------------------------------------------------------------------------------------


def test_a_replay_does_the_same_work_on_the_same_addresses_with_the_values_of_its_time(place):
    x = place.tensor(1.0, 2.0)
    _, [(result, tape)] = place.record(lambda: x * 2 + 1)
    address = result.data_ptr()
    for values in ([5.0, 6.0], [-1.0, float("nan")]):
        x.copy_(place.tensor(*values))
        tape.replay()
        assert result.data_ptr() == address
        assert torch.equal(result.nan_to_num(7.0), (x * 2 + 1).nan_to_num(7.0))


def test_a_tensor_that_moves_is_not_followed(place):
    x = place.tensor(1.0)
    old = x.detach()
    _, [(result, tape)] = place.record(lambda: x * 2)
    x.data = place.tensor(100.0)
    old.fill_(3.0)
    tape.replay()
    assert result.item() == 6.0


def test_tapes_replay_in_any_number_and_what_python_does_is_not_done_again(place):
    x, total, calls = place.tensor(1.0), place.tensor(0.0), []
    _, [(_, tape)] = place.record(lambda: (calls.append(1), total.add_(x)))
    done = len(calls)
    total.zero_()
    for _ in range(3):
        tape.replay()
    assert total.item() == 3.0 and len(calls) == done


def test_what_a_later_tape_returns_lies_where_an_earlier_one_works(place):
    """So a later result is over when an earlier tape of the recording replays again."""
    x = torch.ones(LARGE, device=place.device)
    _, [(_, first), (later, second)] = place.record(lambda: (x * 2)[:1] + 1, lambda: x * 3)
    first.replay()
    second.replay()
    assert torch.equal(later, x * 3)
    first.replay()
    assert not torch.equal(later, x * 3)


def test_one_recorder_makes_several_recordings_that_leave_each_other_alone(place):
    x = place.tensor(1.0)
    _, [(one, first)] = place.record(lambda: x + 1)
    _, [(other, second)] = place.record(lambda: x + 2)
    second.replay()
    first.replay()
    assert (one.item(), other.item()) == (2.0, 3.0)
    first.release()
    x.fill_(5.0)
    second.replay()
    assert other.item() == 7.0


def test_what_a_recording_moves_is_put_back_in_place_and_moved_by_replays(place):
    """Buffers and generators: the caller restores them, and replays go on from there as eager work does."""
    module = nn.BatchNorm1d(2).to(place.device)
    state = NetworkState.take(module, place.device)
    addresses = [buffer.data_ptr() for buffer in module.buffers()]

    def work() -> Tensor:
        return module(torch.rand(4, 2, device=place.device))

    with torch.no_grad():
        expected = [(work(), *(b.clone() for b in module.buffers())) for _ in range(2)]
        state.restore()
        _, [(result, tape)] = place.record(work)
        state.restore()
        for eager in expected:
            tape.replay()
            assert all(map(torch.equal, eager, (result, *module.buffers())))
    assert [buffer.data_ptr() for buffer in module.buffers()] == addresses


def read_on_the_host(x: Tensor) -> None:
    x.sum().item()


def fail(x: Tensor) -> None:
    raise ValueError("first")


def interrupt(x: Tensor) -> None:
    raise KeyboardInterrupt


FAILURES = {
    "host read": (read_on_the_host, RuntimeError),
    "error": (fail, ValueError),
    "interrupt": (interrupt, KeyboardInterrupt),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("draws", [False, True], ids=["", "after a draw"])
def test_a_failed_capture_leaves_nothing_and_the_next_one_works(name, draws, place):
    failure, kind = FAILURES[name]
    x = torch.ones(LARGE, device=place.device)
    before, generators = place.reserved(), Generators.take(place.device)
    expected = torch.rand(3, device=place.device)
    generators.restore()
    held = []

    def work() -> None:
        y = x * torch.rand(LARGE, device=place.device) if draws else x * 2
        held.append(weakref.ref(y))
        failure(y)

    read_on_the_host(x)  # warm
    with pytest.raises(kind) as caught, place.recorder.session():
        place.recorder.capture(work)
    assert name != "error" or str(caught.value) == "first"
    del caught
    place.recorder.settle()
    generators.restore()
    assert torch.equal(torch.rand(3, device=place.device), expected)
    assert [ref() for ref in held] == [None] and place.reserved() == before
    assert gc.isenabled()

    _, [(result, tape)] = place.record(lambda: x * 3)
    tape.replay()
    assert torch.equal(result, x * 3)


def test_release_gives_the_memory_back_and_may_be_called_again(place):
    x = torch.ones(LARGE, device=place.device)
    before, held = place.reserved(), []

    def work() -> Tensor:
        y = x * 2
        held.append(weakref.ref(y))
        return y + 1

    memory, [(result, tape)] = place.record(work)
    tape.replay()
    assert result[0].item() == 3.0
    del result, memory
    for _ in range(2):
        tape.release()
    place.recorder.settle()
    assert [ref() for ref in held] == [None, None] and place.reserved() == before


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(place) -> tuple[Memory, Tape]:
    """Return the memory of a recording, with room for large tensors in it, and its tape."""
    x = torch.ones(LARGE, device=place.device)
    memory, [(result, tape)] = place.record(lambda: (x * 2 + 1).sum())
    tape.replay()
    tape.kept = result
    return memory, tape


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_what_outlives_a_loan_moves_and_keeps_identity_aliases_and_values(named, place, recorded):
    memory, tape = recorded
    with memory.lend() as loan:
        base = torch.arange(6.0, device=place.device)
        view, nested, address = base[2:], {"deep": [torch.ones(LARGE, device=place.device)]}, base.data_ptr()
        torch.ones(LARGE, device=place.device)  # gone before the loan ends
    keys = {memory.key(tensor.untyped_storage()) for tensor in (base, nested["deep"][0])}
    assert memory.in_use() - loan.before == keys
    kept = id(base), id(view)
    assert loan.settle([base, None] if named else []) == 0
    assert memory.in_use() == loan.before and base.data_ptr() != address
    tape.replay()
    assert base.tolist() == [0, 1, 2, 3, 4, 5] and nested["deep"][0].eq(1).all()
    base[3] = 9.0
    assert view.tolist() == [2, 9, 4, 5] and (id(base), id(view)) == kept


def test_what_cannot_be_found_is_counted(place, recorded, monkeypatch):
    memory, _ = recorded
    with memory.lend() as loan:
        base, other = torch.ones(6, device=place.device), torch.ones(3, device=place.device)
        view = base[2:]
    monkeypatch.setattr(gc, "get_objects", list)
    assert loan.settle([other]) == 1  # one storage, however many tensors look at it
    monkeypatch.undo()
    assert view.tolist() == [1, 1, 1, 1] and loan.settle([]) == 0


def test_an_interrupt_in_a_loan_ends_it(place, recorded):
    memory, tape = recorded
    before = memory.in_use()
    with pytest.raises(KeyboardInterrupt), memory.lend():
        half = torch.ones(LARGE, device=place.device)
        raise KeyboardInterrupt
    outside = torch.ones(LARGE, device=place.device)
    assert memory.in_use() - before == {memory.key(half.untyped_storage())}
    assert memory.key(outside.untyped_storage()) not in memory.in_use()
    if place.device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with memory.lend() as loan:  # and another may follow
        late = torch.ones(3, device=place.device)
    assert loan.settle([late]) == 0
    assert memory.in_use() - before == {memory.key(half.untyped_storage())}
    tape.release()
    assert outside.eq(1).all() and late.eq(1).all()
