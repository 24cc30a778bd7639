"""`yolo why`, measured: the clock of a step's phases, the sections of an arm, and the work in a trace."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from detgraph.trainer.why import clock as why_clock
from detgraph.trainer.why.clock import Clock, Operations, work_by_phase
from detgraph.trainer.why.measure import Section


@pytest.fixture
def passing(monkeypatch):
    """Stop the clock's time, and return a function that lets milliseconds pass."""
    now = [0.0]
    monkeypatch.setattr(why_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passing(ms):
        now[0] += ms / 1e3

    return passing


def test_phases_add_up_to_the_step(passing):
    waits = []
    clock = Clock(lambda: waits.append(1))
    passing(100)
    clock.start_step()
    passing(1)
    with clock.phase("optimizer"):
        passing(2)
        clock.timed("ema", passing)(4)
        passing(8)
    passing(16)
    ms, host_ms = clock.take_step()
    assert ms == host_ms == pytest.approx({"loop": 17, "optimizer": 10, "ema": 4})
    assert len(waits) == 2  # as steps start, and never between phases
    passing(32)
    assert clock.take_step()[0] == pytest.approx({"loop": 32})


def test_a_synchronized_clock_tells_waiting_for_the_device_apart(passing):
    clock = Clock(lambda: passing(5))
    clock.synchronized = True
    with clock.phase("forward"):
        passing(1)
    ms, host_ms = clock.take_step()
    assert ms["forward"] == pytest.approx(6) and host_ms["forward"] == pytest.approx(1)


def test_a_phase_ends_with_an_error(passing):
    clock = Clock(lambda: None)
    with pytest.raises(KeyError), clock.phase("forward"):
        raise KeyError
    clock.take_step()
    passing(1)
    assert clock.take_step()[0].keys() == {"loop"}


def section(count, **more):
    made = Section(**{"seconds": 1e9, **more})
    made.steps = [({"forward": float(i)}, {}) for i in range(count)]
    made.started = time.perf_counter()
    return made


def test_a_section_ends_with_whole_windows():
    assert [n for n in range(1, 9) if section(n, seconds=0, window=3, least=4).over()] == [6]
    assert [n for n in range(1, 9) if section(n, most=5).over()] == [5, 6, 7, 8]
    assert [n for n in range(1, 9) if section(n, ready=lambda done: done > 6).over()] == [7, 8]


def test_a_step_is_a_mean_of_its_window():
    """An update in every second step counts half, and one slow window does not count."""
    one = section(6, window=2)
    one.steps = [({"forward": ms}, {}) for ms in (10.0, 30.0, 10.0, 30.0, 10.0, 3000.0)]
    assert one.median(lambda ms, host_ms: ms["forward"]) == 20.0


def event(cat, name, ts, dur=1.0, **args):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_work_belongs_to_the_phase_that_issued_it():
    events = [
        event("kernel", "early", 50.0, 9.0, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 5.0, correlation=1),  # issued before the steps
        event("user_annotation", "why:backward", 200.0, 100.0),
        event("user_annotation", "why:forward", 100.0, 100.0),
        event("gpu_user_annotation", "why:forward", 120.0, 500.0),
        event("cpu_op", "aten::conv", 110.0, 20.0),
        event("cuda_runtime", "cudaLaunchKernel", 150.0, correlation=2),
        event("cuda_driver", "cuLaunchKernel", 160.0, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 250.0, correlation=4),
        event("kernel", "conv", 290.0, 2000.0, correlation=2),  # runs while the host is in another phase
        event("kernel", "conv", 2290.0, 1000.0, correlation=3),
        event("gpu_memcpy", "copy", 3290.0, 500.0, correlation=4),
        event("gpu_memset", "of nobody", 210.0, 500.0),
        event("kernel", "late", 900.0, 500.0, correlation=5),
    ]
    assert work_by_phase(events) == {"forward": (2, 3.0), "backward": (2, 1.0)}
    assert work_by_phase(events[:2]) == {}


def test_a_replayed_graph_is_one_launch():
    """All kernels of a graph have the correlation of its launch; their times add up."""
    events = [
        event("user_annotation", "why:forward", 100.0, 100.0),
        event("cuda_runtime", "cudaGraphLaunch", 110.0, correlation=7),
        *(event("kernel", f"conv {i}", 120.0 + i, 1000.0, correlation=7) for i in range(3)),
        event("cuda_runtime", "cudaLaunchKernel", 150.0, correlation=8),
        event("kernel", "add", 5000.0, 500.0, correlation=8),
    ]
    assert work_by_phase(events) == {"forward": (2, 3.5)}


def test_phases_are_in_a_real_trace(monkeypatch):
    """On a CPU, operators stand in for kernels: they are in the same trace."""
    monkeypatch.setattr(why_clock, "DEVICE_EVENTS", ("cpu_op",))
    clock = Clock(lambda: None)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.zeros(3).neg()
        clock.labelled = True
        clock.start_step()
        with clock.phase("forward"):
            ones = torch.ones(3)
            with clock.phase("ema"):
                ones.abs()
            ones.neg()
        clock.labelled = False
        clock.start_step()
        torch.zeros(3).neg()
    work = why_clock.device_work(profiled)
    assert set(work) == {"forward", "ema"} and min(launches for launches, _ in work.values()) > 0


def test_operations_are_what_gives_a_device_work():
    """Also in the backward pass. Views, bare allocations and the loader's own do not count, nor does what is later."""
    clock = Clock(lambda: None)
    x = torch.ones(3, 4, requires_grad=True)
    with Operations(clock):
        with clock.phase("data wait"):
            torch.ones(3).neg()
        with clock.phase("forward"):
            y = x.t()[1:].contiguous().exp().sum()  # a copy, exp, sum
            torch.empty(3)
        with clock.phase("backward"):
            y.backward()
        counts = dict(clock.operations)
        clock.start_step()
    torch.ones(3).neg()
    assert counts["forward"] == 3 and counts["backward"] >= 3 and counts.keys() == {"forward", "backward"}
    assert not clock.operations
