"""The flow of a step on the CUDA backend gives what the simulation gives, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from exact import random_data, same
from fake_cupy import machine

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.ops import plan_segments, segment_sum

pytestmark = pytest.mark.fake_cupy

PLACEMENTS = ([0], [0, 0], [0, 0, 1, 1], [0, 1, 1, 2, 0])
ALGORITHMS = ("nccl", "hierarchical_copy")
DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "int32")
SHAPES = ((3, 5), (1003,), (), (40, 70))


def gradients(mesh: Mesh, dtype, seed: int) -> list[list[np.ndarray]]:
    """Of each device one array for each shape; the same on every mesh."""
    return [
        [
            random_data(shape or (1,), dtype, seed=seed + 100 * place + position).reshape(shape)
            for position, shape in enumerate(SHAPES)
        ]
        for place in range(len(mesh))
    ]


def reduced(mesh: Mesh, dtype, algorithm: str, **options) -> list[list[np.ndarray]]:
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, **options)
    op = gr.ReduceOp.SUM if dtype == "int32" else gr.ReduceOp.MEAN
    rows = [
        [device.upload(array) for array in row]
        for device, row in zip(mesh.devices, gradients(mesh, dtype, 7), strict=True)
    ]
    results = ops.all_reduce(rows, op=op, as_kind="buffer")
    return [[buffer.numpy() for buffer in row] for row in results]


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_all_reduce_is_that_of_the_simulation(placement, algorithm, peers, new_machine):
    new_machine(len(placement), peers=peers)
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        for dtype in DTYPES:
            for options in (
                {},
                {"num_packs": 2},
                {"num_packs": 0, "agg_small_grads_max_bytes": 99},
            ):
                found = reduced(mesh, dtype, algorithm, **options)
                wanted = reduced(sim, dtype, algorithm, **options)
                for row, wanted_row in zip(found, wanted, strict=True):
                    for array, wanted_array in zip(row, wanted_row, strict=True):
                        assert same(array, wanted_array), (dtype, options)


def trained(mesh: Mesh, algorithm: str) -> list[np.ndarray]:
    """Three steps of momentum over replicas, on mirrored variables."""
    start = [random_data(shape or (1,), "float32", seed=position).reshape(shape)
             for position, shape in enumerate(SHAPES)]  # fmt: skip
    variables = [gr.Variable(array, f"w{place}", device=mesh) for place, array in enumerate(start)]
    optimizer = gr.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
    optimizer.cross_device_ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    for step in range(3):
        rows = gradients(mesh, "float32", 1000 * step)
        pairs = [
            (gr.PerReplica([device.upload(row[position]) for device, row
                            in zip(mesh.devices, rows, strict=True)], mesh), variable)
            for position, variable in enumerate(variables)
        ]  # fmt: skip
        optimizer.apply_gradients(pairs)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_training_steps_are_those_of_the_simulation(placement, algorithm, new_machine):
    new_machine(40 + len(placement))
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        for array, wanted in zip(trained(mesh, algorithm), trained(sim, algorithm), strict=True):
            assert same(array, wanted)


@pytest.mark.parametrize("queue", ["compute", "transfer"])
def test_a_segment_sum_is_that_of_the_simulation(queue, new_machine):
    """Twice: the plans of the first call die while its launch may still wait."""
    new_machine(3)
    indices = np.random.default_rng(0).integers(0, 40, 300)
    plan = plan_segments(indices)
    found = []
    with (
        gr.open_mesh([0], backend="cuda") as mesh,
        gr.open_mesh([0], backend="sim", strict=True) as sim,
    ):
        for device in (mesh.devices[0], sim.devices[0]):
            outs, values = [], []
            for seed, (dtype, width) in enumerate([("float32", 7), ("float16", 16)] * 2):
                values.append(device.upload(random_data((300, width), dtype, seed=seed)))
                outs.append(device.zeros((40, width), dtype))
            device.wait(device.mark(), queue=queue)
            for divisor in (3, 1.0 + np.arange(plan.num_segments)):
                segment_sum(
                    outs, values, [plan] * 4, into=[plan.indices] * 4, divisor=divisor, queue=queue
                )
            device.wait(device.mark(queue))
            found.append([out.numpy() for out in outs])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_sparse_rows_on_gpus(new_machine):
    """CuPy's arrays keep their kind, and their indices are the only thing that is waited for."""
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
            patch.setattr("gradreduce.device.mesh._default", [opened])
            slices = gr.IndexedSlices(values, [3, 1, 3, 0, 1, 3], (4, 5))
            merged = slices.coalesce(as_kind="buffer")
            results.append((merged.values.numpy(), slices.to_dense(as_kind="numpy")))
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
        for made, wanted in zip((merged.values, dense), results[0], strict=True):
            with made.device:
                assert same(made.get(), wanted)


def test_an_accumulator_over_a_mesh(new_machine):
    new_machine(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        accumulator = gr.ConditionalAccumulator("float32", (5,), device=mesh)
        for step in range(2):
            values = [device.upload(np.full(5, 1 + place + step, np.float32))
                      for place, device in enumerate(mesh.devices)]  # fmt: skip
            assert accumulator.apply_grad(gr.PerReplica(values, mesh), 0)
        mean = accumulator.take_grad(2)
        for buffer in mean.buffers:
            assert (buffer.numpy() == 2.5).all()


def test_a_step_waits_for_nothing_and_uploads_nothing_twice(new_machine):
    """With the same addresses a step asks the host for nothing at all."""
    here = new_machine(1)
    with gr.open_mesh([0, 0, 1, 1], backend="cuda") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        flat = mesh.flat_buffer([(5,), (7, 3)] * 60, "float32")
        rows = [list(views) for views in flat.views]
        ops.all_reduce(rows, op=gr.ReduceOp.SUM)
        mesh.synchronize()
        before = dict(here.counts)
        with mesh.journal() as journal:
            kept = ops.all_reduce(rows, op=gr.ReduceOp.SUM)
        assert (journal.syncs, journal.uploads) == (0, 0)
        assert here.counts["synchronize"] == before["synchronize"]
        assert len(kept) == 4
        assert machine.current() is here
