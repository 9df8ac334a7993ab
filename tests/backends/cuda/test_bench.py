"""Programs of ``bench/`` for GPUs restore the device, and measure every promised figure."""

import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from backends.cuda.test_failed_devices import kill
from support.background_runs import ROOT
from support.reduction_calls import dense

import gradreduce as gr

pytestmark = pytest.mark.fake_cupy


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def test_a_timed_call_recycles_its_results(gpus):
    """A stream that a caller has seen would keep them until the GPU has finished."""
    from measure.clock import GpuClock

    machine = gpus(0)  # it runs nothing before a wait
    with gr.open_mesh([0] * 3, backend="cuda") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        value = dense(mesh, (5000,), "float32", 0)

        def call():
            ops.batch_reduce(gr.ReduceOp.MEAN, [(value, value)])

        clock = GpuClock(mesh.devices[0], quick=True)
        for _ in range(3):
            call()
        slots = sum(map(len, machine.heap._slots.values()))
        clock._batch(call, 8, 1)
        assert sum(map(len, machine.heap._slots.values())) == slots, "cudaMalloc"
        took = clock.measure({"ours": call}, 64)
        assert set(took) == {"ours", "copy"}
        for device in mesh:
            device.drain()
            assert not device._deferred_free._deferred


def test_operands_of_a_benchmark_are_random(gpus):
    """Zeros may be quicker to add and to move."""
    import bench_all_reduce
    from measure import operands
    from measure.clock import GpuClock

    gpus(1)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        size = 2 * operands.PATTERN_SIZE + 3
        copy = GpuClock(mesh.devices[0], quick=True)._copy_of(8 * size)
        (value,) = bench_all_reduce.one_tensor(mesh, 4 * size).values
        for buffer in (*copy.args, *value.buffers):
            found = buffer.numpy()
            assert found.size == size
            assert len(np.unique(found)) > operands.PATTERN_SIZE / 2
        assert np.array_equal(found, operands.integers(size, replica=1))


def test_a_bit_that_differs_from_the_simulation_fails_the_program(gpus, monkeypatch):
    from gpu_check import same_bits

    gpus(0)
    results = same_bits.results

    def other(backend, size):
        for number, (name, found) in enumerate(results(backend, size)):
            yield name, -found if (backend, number) == ("cuda", 40) else found

    monkeypatch.setattr(same_bits, "DTYPES", ("float32",) * 4)
    monkeypatch.setattr(same_bits, "results", other)
    with pytest.raises(AssertionError, match="other bits than the simulation"):
        same_bits.compared(quick=True)


@pytest.fixture
def busy(gpus):
    from gpu_check import busy_gpu

    gpus(0)  # it runs nothing before a wait
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        yield SimpleNamespace(
            module=busy_gpu, mesh=mesh, slow=busy_gpu.SlowWork(mesh.devices[0], quick=True)
        )


def test_a_standstill_of_the_interpreter_fails_the_program(gpus, monkeypatch):
    from gpu_check import busy_gpu

    gpus(1)
    monkeypatch.setattr(busy_gpu, "DEADLINE", 60.0)
    figures = busy_gpu.measured(True)
    assert figures["compared results of dropped steps"] == 2 * 2 * busy_gpu.QUICK_STEPS
    longest = "a full launch queue, is idle: standstill, ms"
    assert figures[longest] < 60e3
    monkeypatch.setattr(busy_gpu, "DEADLINE", -1.0)
    with pytest.raises(AssertionError, match="no watchdog could notice"):
        busy_gpu.measured(True)


def test_queries_are_made_while_another_thread_is_blocked(busy):
    made, event = threading.Event(), busy.slow.submit(1)
    found = busy.module.watched(event, partial(made.wait, 60), made.set)
    assert found.keys() == {"busy", "blocked", "query", "standstill"}
    assert found["blocked"] is True


def test_a_dropped_step_with_a_wrong_result_is_noticed(busy, monkeypatch):
    make = busy.module.called_and_dropped
    assert busy.module.dropped(busy.mesh, busy.slow, 2) == 8
    monkeypatch.setattr(busy.module, "called_and_dropped", lambda mesh, turn: make(mesh, 5))
    with pytest.raises(AssertionError, match="tensor 0 on device 0 is not the mean"):
        busy.module.dropped(busy.mesh, busy.slow, 2)


def test_every_floor_of_the_hosts_time_has_a_measured_value(gpus, monkeypatch):
    """The floor of a plain call is per Buffer, because it looks at each."""
    import bench_all_reduce
    from measure import clock
    from measure.runner import Bench

    monkeypatch.setattr(clock, "PAUSE_SECONDS", 0)
    monkeypatch.setattr("measure.operands.QUICK_TENSORS", 2)
    no_clock = SimpleNamespace(measure=lambda calls, nbytes: {})
    gpus(1)
    with gr.open_mesh([0] * bench_all_reduce.NUM_LOGICAL, backend="cuda") as mesh:
        bench = Bench(quick=True, on_gpu=True, meshes={"cuda": mesh})
        bench.clock = no_clock
        bench_all_reduce.resnet_on_gpu(bench)
    (case,) = bench.cases.values()
    of_the_case = [each for each in bench_all_reduce.GPU_FLOORS if each.case == case.name]
    figures = [floor.check({case.name: case}, {})["figure"] for floor in of_the_case]
    assert len(figures) == 3
    assert None not in figures
    assert figures[0] * 8 * 2 == pytest.approx(case.figures["num_packs=1, host us"])


def test_every_call_after_a_failed_assertion_says_that_the_gpu_has_failed(gpus, monkeypatch):
    """The program makes a kernel of PyTorch fail an assertion, CUDA error 710, and waits for it."""
    from gpu_check.programs import fail_assertion, said_after

    machine = gpus(1)

    def synchronize():
        kill(machine, 0, 710)  # not before: the kernel runs on a stream of PyTorch
        raise RuntimeError("CUDA error: device-side assert triggered")

    torch = SimpleNamespace(
        tensor=lambda *words, **options: 0, ones=lambda *words, **options: [1],
        cuda=SimpleNamespace(synchronize=synchronize),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    said = said_after(fail_assertion)
    assert len(said) == 5
    assert all("failed" in text for text in said)
    machine.freed.clear()
    with pytest.raises(AssertionError, match="raised nothing"):
        said_after(lambda: None)
