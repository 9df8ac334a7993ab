"""Steps that write into arrays of the caller: prepared ones, and captured ones."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from support.meshes import MeshCase, owned

import gradreduce as gr

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
WAYS = ["prepare", "capture"]


@pytest.mark.parametrize("way", WAYS)
def test_results_computed_in_other_memory_are_copied_to_out(way):
    """Means of integers and sums on one device are computed in other memory first."""
    with MeshCase((0, 0, 1)).open() as mesh:
        counts = gr.PerReplica([owned(d, np.zeros(7, np.int16)) for d in mesh], mesh)
        value = gr.PerReplica([owned(d, np.zeros(5, np.float32)) for d in mesh], mesh)
        ends = [mesh.devices[2], mesh.devices[0]]
        outs = [[np.zeros(7, np.float32) for _ in mesh], [np.zeros(5, np.float32) for _ in ends]]
        make = getattr(gr.HierarchicalCopyAllReduce(1), way)
        step = make(MEAN, [(counts, counts), (value, ends)], out=outs)
        for number in (3, 6):
            for buffer in (*counts.buffers, *value.buffers):
                buffer.device.upload(np.full(buffer.shape, number, buffer.dtype), out=buffer)
            step()
            assert all((array == number).all() for row in outs for array in row)


@pytest.mark.parametrize("way", WAYS)
def test_what_no_call_could_write_is_refused(way):
    ops = getattr(gr.HierarchicalCopyAllReduce(1), way)
    with MeshCase((0, 1)).open() as mesh:
        value = gr.PerReplica([owned(device, np.ones(4, np.float32)) for device in mesh], mesh)
        fit = [[np.zeros(4, np.float32) for _ in mesh]]
        with mesh.journal() as journal:
            for out, why in (
                ([], "one entry for each of 1"),
                ([[np.zeros(4, np.float32)]], "out 0: it must be .* of 2 arrays"),
                ([[np.zeros(4, np.float32), np.zeros(4)]], "out 0: replica 1: .*float64"),
                ([[fit[0][0], fit[0][0]]], "out 0: replica 0 and out 0: replica 1 overlap"),
            ):
                with pytest.raises(ValueError, match=why):
                    ops(SUM, [(value, value)], out=out)
            with pytest.raises(
                ValueError, match=r"output_type='numpy' cannot be combined with out"
            ):
                ops(SUM, [(value, value)], output_type="numpy", out=fit)
        assert not journal.records
    with gr.open_mesh([0, 1], backend="sim", schedule_seed=3) as mesh:
        value = gr.PerReplica([device.upload(np.ones(4, np.float32)) for device in mesh], mesh)
        with pytest.raises(ValueError, match="out 0: replica 0 is in host memory"):
            ops(SUM, [(value, value)], out=fit)
    assert not fit[0][0].any()


@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
def test_autograd_notices_each_call(way):
    torch = importlib.import_module("torch")
    with MeshCase((0, 1)).open() as mesh:
        value = gr.PerReplica([torch.ones(4) for _ in mesh], mesh)
        outs = [torch.zeros(4) for _ in mesh]
        step = getattr(gr.HierarchicalCopyAllReduce(1), way)(SUM, [(value, value)], out=[outs])
        before = outs[0]._version
        assert before > 0
        assert step()[0].values[0] is outs[0]
        assert (outs[0]._version, outs[0].tolist()) == (before + 1, [2.0] * 4)
