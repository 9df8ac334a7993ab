"""Rows with indices on the CUDA backend are added as on the simulation, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import DTYPES, random_data, same
from support.implementations import segment_sum

import gradreduce as gr
from gradreduce.ops import plan_segments


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_segment_sum_is_that_of_the_simulation(dtype, gpus):
    """Repeatedly, because the plans of a call are freed while its launch may be queued."""
    gpus(3)
    indices = np.random.default_rng(0).integers(0, 40, 300)
    plan = plan_segments(indices)
    divisors = [1] if dtype.kind in "iu" else [1, 3, 1.0 + np.arange(plan.num_segments)]
    found = []
    with (
        gr.open_mesh([0], backend="cuda") as mesh,
        gr.open_mesh([0], backend="sim", strict=True) as sim,
    ):
        for device in (mesh.devices[0], sim.devices[0]):
            made, values = [], []
            for seed, width in enumerate((1, 7, 16, 33)):
                terms = random_data((300, width), dtype, seed=seed)
                values.append(device.upload(terms))
            for divisor in divisors:
                outs = [device.zeros((40, *rows.shape[1:]), dtype) for rows in values]
                segment_sum(outs, values, [plan] * 4, into=[plan.indices] * 4, divisor=divisor)
                made += outs
            found.append([out.numpy() for out in made])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.fake_cupy
def test_sparse_rows_on_gpus(new_machine):
    """Results are CuPy arrays, and the host waits for their indices only."""
    import cupy

    here = new_machine(5)
    values = random_data((6, 5), "float32")
    with (
        gr.open_mesh([0, 1], backend="cuda") as mesh,
        gr.open_mesh([0, 0], backend="sim", strict=True) as sim,
        pytest.MonkeyPatch.context() as patch,
    ):
        results = []
        for opened in (sim, mesh):
            patch.setattr("gradreduce.backends._default", [opened])
            slices = gr.IndexedSlices(values, [3, 1, 3, 0, 1, 3], (4, 5))
            merged = slices.coalesce(output_type="buffer")
            joined = gr.aggregate([slices, slices], output_type="buffer")
            mixed = gr.aggregate([slices, values[:4], slices], output_type="numpy")
            results.append((merged.values.numpy(), slices.to_dense(output_type="numpy"),
                            joined.values.numpy(), mixed))  # fmt: skip
        assert all(same(one, other) for one, other in zip(*results, strict=True))
        with cupy.cuda.Device(1):
            theirs = cupy.asarray(values)
            indices = cupy.asarray(np.array([3, 1, 3, 0, 1, 3], np.int32))
        slices = gr.IndexedSlices(theirs, indices, (4, 5))
        assert (slices.kind, slices.values, slices.device) == ("cupy", theirs, None)
        before = here.counts["synchronize"]
        merged, dense = slices.coalesce(), slices.to_dense()
        assert here.counts["synchronize"] == before
        assert isinstance(merged.values, cupy.ndarray)
        assert dense.device.id == 1
        for made, wanted in zip((merged.values, dense), results[0][:2], strict=True):
            with made.device:
                assert same(made.get(), wanted)
