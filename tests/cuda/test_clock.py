"""The benchmarks' clock for GPUs leaves a device as a user has it."""

from __future__ import annotations

import pytest
from early import ROOT
from scenes import dense

import gradreduce as gr

pytestmark = pytest.mark.fake_cupy


def test_a_timed_call_recycles_its_results(gpus, monkeypatch):
    """A stream that was shown to a caller would keep them until the GPU has passed."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from measure.clock import GpuClock

    machine = gpus(0)  # which runs nothing before somebody waits
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
            assert not any(line.shown for line in device._lines.values())
            device.drain()
            assert not device._parking._parked
