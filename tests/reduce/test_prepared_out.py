"""Steps that write into arrays of the caller: prepared ones, and captured ones."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from support.exact_data import exact_data, same
from support.meshes import MeshCase, adopted, owned

import gradreduce as gr
from gradreduce.device import Buffer

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [(12, 5), (3,), (), (40,)]
WAYS = ["prepare", "capture"]


def rows_of(mesh, place):
    return [[place(device, np.zeros(shape, np.float32)) for device in mesh] for shape in SHAPES]


def arrays_of(rows):
    return [[each.numpy() if isinstance(each, Buffer) else each for each in row] for row in rows]


@pytest.mark.parametrize("where", ["apart", "in place", "flat", "numpy"])
@pytest.mark.parametrize(
    ("way", "placement", "peers"),
    [
        ("prepare", (0, 0, 1), True),
        ("capture", (0, 0, 1), True),
        ("prepare", (0, 1, 1), False),  # which a capture refuses
        ("capture", (0, 0, 0), False),
    ],
    ids=str,
)
def test_each_call_writes_what_it_was_given(way, where, placement, peers):
    with MeshCase(placement, peers).open() as mesh:
        inputs = rows_of(mesh, owned)
        outs = {
            "apart": lambda: rows_of(mesh, adopted),
            "in place": lambda: inputs,
            "flat": lambda: list(zip(*mesh.flat_buffer(SHAPES, "float32").views, strict=True)),
            "numpy": lambda: rows_of(mesh, lambda _, array: array),
        }[where]()
        outs = [list(row) for row in outs]
        pairs = [(value, value) for value in (gr.PerReplica(row, mesh) for row in inputs)]
        step = getattr(gr.HierarchicalCopyAllReduce(1), way)(MEAN, pairs, out=outs)
        for seed in (100, 200):
            data = [
                [exact_data(each.shape, np.float32, seed=seed + each.device.index) for each in row]
                for row in inputs
            ]
            for row, numbers in zip(inputs, data, strict=True):
                for buffer, array in zip(row, numbers, strict=True):
                    buffer.device.upload(array, out=buffer)
            with mesh.journal() as journal:
                found = step()
            assert journal.uploads == journal.syncs == 0
            for row, result, out in zip(data, found, outs, strict=True):
                total = (np.sum(row, axis=0, dtype=np.float32) / np.float32(3)).astype(np.float32)
                assert all(one is other for one, other in zip(result.values, out, strict=True))
                assert all(same(array, total) for array in arrays_of([out])[0])


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
