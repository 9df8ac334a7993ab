"""wire_dtype: bytes, launches and the documented bound; test_values.py has the bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import examples
from support.meshes import MeshCase, launches_of, per_replica

import gradreduce as gr

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
WIRES = ("float16", "bfloat16", "float32")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}


@given(
    data=st.lists(
        st.lists(st.floats(-1000, 1000, width=32), min_size=4, max_size=4), min_size=2, max_size=6
    ),
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from(["float32", "float64"]),
    op=st.sampled_from([SUM, MEAN]),
)
@settings(max_examples=examples(150), deadline=None)
def test_the_error_stays_within_the_documented_bound(data, wire, dtype, op):
    arrays = [np.array(row, dtype) for row in data]
    n = len(arrays)
    with gr.open_mesh(n, backend="sim") as opened:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=opened, wire_dtype=wire)
        value = gr.PerReplica([np.array(each) for each in arrays], opened)
        found = ops.reduce(op, value, value).primary.astype(np.float64)
    wide = np.array(data, np.float64)  # float32 data: sums of six of them are exact enough here
    early = op is MEAN and wire != "float32"
    terms = wide / n if early else wide
    bound = (2.01 * UNIT[wire] + n * 2.0**-23) * np.abs(terms).sum(0) + (n + 1) * LEAST[wire]
    exact = wide.sum(0) / (n if op is MEAN else 1)
    if op is MEAN and not early:
        bound = bound / n
    bound = bound + np.abs(exact) * 2.0**-52 * n  # of this reference itself
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize(
    ("dtype", "wire", "read", "written", "packs"),
    [
        ("float32", "float16", 2, 2, 4),  # packed, and cast back, on each GPU
        ("float32", None, 4, 4, 2),
        ("float32", "float32", 4, 4, 2),
        ("float16", "float32", 4, 2, 2),  # the launch that adds rounds
    ],
    ids=str,
)
def test_the_links_carry_the_wires_bytes_in_no_more_launches(dtype, wire, read, written, packs):
    """The main device reads a replica of the other one, and writes the sum back."""
    with MeshCase((0, 1)).open() as opened:
        size = 4096
        values = [per_replica(opened, lambda _: np.ones(size, dtype)) for _ in "ab"]
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=opened, wire_dtype=wire)
        pairs = [(value, value) for value in values]
        plan = ops.plan(MEAN, pairs)
        with opened.journal() as journal:
            ops.batch_reduce(MEAN, pairs)
    assert len(launches_of(journal, "pack")) == packs
    assert journal.bytes == plan.bytes == 2 * size * (read + written)
    assert plan.launches == journal.launches


def test_rows_and_other_destinations_ignore_the_wire_dtype():
    with MeshCase((0, 1)).open() as opened:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=opened, wire_dtype="float16")
        value = per_replica(opened, lambda _: np.full(8, 123_457, np.float32))
        assert (ops.reduce(SUM, value, opened.devices[0]).primary == 246_914).all()
        rows = gr.IndexedSlices(np.full((1, 2), 123_457, np.float32), [0], (3, 2))
        value = gr.PerReplica([rows] * 2, opened)
        assert (ops.reduce(SUM, value, opened, coalesce=True).primary.values == 246_914).all()


def test_another_wire_dtype_is_refused():
    for wrong in ("float64", "int8", "half-ish", 16, float, object()):
        with pytest.raises(ValueError, match=r"wire_dtype=.* is not 'float16', 'bfloat16' or"):
            gr.AllReduceCrossDeviceOps(wire_dtype=wrong)
    assert gr.AllReduceCrossDeviceOps(wire_dtype=np.float16).wire_dtype == np.float16
    assert gr.HierarchicalCopyAllReduce().wire_dtype is None
