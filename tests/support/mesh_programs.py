"""Programs of public calls that give the same bits on every backend, in every legal order.

A program takes a mesh and returns arrays. It frees or overwrites what it has passed to a call as
soon as the call has returned, and it reads the last device first: reading a device waits for its
queue, which could hide a missing wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations, starmap
from unittest.mock import patch

import numpy as np
from support.captures import captured
from support.exact_data import DTYPES, FLOATS, random_data, same
from support.implementations import segment_sum
from support.reduction_calls import (
    SHAPES,
    arrays_of,
    dense,
    everything,
    on_each,
    on_one_gpu,
    overwrite,
    read,
)  # fmt: skip
from support.training_programs import (
    AGN_WAYS,
    CLIPPED,
    OPTIMIZERS,
    clipped,
    crossed,
    mirrored,
    optimized,
    trained,
    trained_by_agn,
)  # fmt: skip

import gradreduce as gr
from gradreduce.device import Buffer, Mesh, as_dtype, mean_dtype
from gradreduce.ops import plan_segments
from gradreduce.reduce import pipeline
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.sums.aggregators import aggregate_buffers

Program = Callable[[Mesh], list[np.ndarray]]
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


def has_peers(mesh: Mesh) -> bool:
    """Whether all GPUs access each other's memory, which a capture needs."""
    return all(starmap(mesh.mesh_state.peers, permutations(mesh.by_physical, 2)))


# -- reductions -----------------------------------------------------------------------------------

PACKINGS = ({}, {"num_packs": 2}, {"num_packs": 0, "agg_small_grads_max_bytes": 99})
GROUPS = {2: ((1, 0), ()), 3: ((2, 0), (1,)), 4: ((2, 0), (1, 3)), 5: ((3, 0), (4, 2, 1))}


def every_dtype(algorithm: str, mesh: Mesh, dtypes=DTYPES, **options) -> list[np.ndarray]:
    """The inputs are freed while the reduction is queued; new tensors reuse their memory."""
    kept = []
    for turn, dtype in enumerate(dtypes):
        cross = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, **PACKINGS[turn % 3], **options)
        op = SUM if dtype.kind in "iu" else MEAN
        columns = [dense(mesh, shape, dtype, place) for place, shape in enumerate(SHAPES)]
        kept += cross.batch_reduce(op, [(value, value) for value in columns])
        del columns
    return read(buffer for value in kept for buffer in value.buffers)


def in_groups(mesh: Mesh) -> list[np.ndarray]:
    return every_dtype("hierarchical_copy", mesh, reduction_groups=GROUPS[len(mesh)])


def gathered(mesh: Mesh) -> list[np.ndarray]:
    """Integers of 16 bits, which NCCL cannot add."""
    kept = []
    for num_packs, op in ((1, SUM), (1, MEAN), (0, MEAN), (3, SUM)):
        for shapes in (SHAPES, SHAPES[::-1]):
            columns = [on_each(mesh, shape, "uint16", place) for place, shape in enumerate(shapes)]
            grads = [list(row) for row in zip(*columns, strict=True)]
            cross = gr.NcclAllReduce(num_packs, mesh=mesh)
            reduced = cross.all_reduce(grads, op, output_type="buffer")
            overwrite(*grads)
            kept += [buffer for row in reduced for buffer in row]
    return read(kept)


def shares(algorithm: str, mesh: Mesh) -> list[np.ndarray]:
    """Without packs the rows of a share begin at any address."""
    n, kept = len(mesh), []
    kinds = (((n * 3, 5), "float32"), ((n * 701,), "float32"), ((n, 3), "int16"))
    columns = [on_each(mesh, shape, dtype, place) for place, (shape, dtype) in enumerate(kinds)]
    grads = [list(row) for row in zip(*columns, strict=True)]
    for num_packs in (0, 1):
        cross = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        made = cross.reduce_scatter(grads, MEAN, output_type="buffer")
        whole = cross.all_gather(made)
        into = [[[each.device.empty(each.shape, each.dtype) for each in row] for row in rows]
                for rows in (made, whole)]  # fmt: skip
        cross.reduce_scatter(grads, MEAN, out=into[0])
        cross.all_gather(made, out=into[1])
        kept += [each for rows in (made, whole, *into) for row in rows for each in row]
    return read(kept)


def in_stages(algorithm: str, num_packs: int, mesh: Mesh) -> list[np.ndarray]:
    """The bits of one stage, also in place: a stage is packed before the last one is unpacked."""
    found = []
    for stage_bytes in (100, 1 << 40):
        cross = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        columns = [on_each(mesh, shape, seed=place) for place, shape in enumerate(SHAPES)]
        rows = [list(row) for row in zip(*columns, strict=True)]
        with patch.object(pipeline, "STAGE_BYTES", stage_bytes):
            kept = cross.all_reduce(rows)
            for _ in range(2):
                cross.all_reduce(rows, out=rows)
        found.append(read(buffer for row in (*kept, *rows) for buffer in row))
    assert all(map(same, *found))
    return found[0]


FEW = [((6, 5), "float32")] * 2
MANY = [((40, 7), "float32"), ((9,), "int16"), ((20_000,), "float32"), ((33,), "bfloat16"),
               *[((5,), "float32")] * 90]  # fmt: skip  # too many for an inline table


def repeated(
    form: str, algorithm: str, num_packs: int, shapes: list, mesh: Mesh
) -> list[np.ndarray]:
    """Calls of a step without a wait between them. The results of each stay on the devices.

    One value goes to one device: the others get no result, so that nothing makes them wait. With
    packs, results are written into memory of the caller. Without peers no step is captured.
    """
    if not has_peers(mesh):
        form = "prepare"
    values = [dense(mesh, shape, dtype, place) for place, (shape, dtype) in enumerate(shapes)]
    cross = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
    targets = [*values[:-1], [mesh.devices[-1]]]
    outs = None
    if num_packs:
        homes = [mesh] * (len(shapes) - 1) + [mesh[-1:]]
        outs = [on_each(home, shape, mean_dtype(as_dtype(dtype)))
                for home, (shape, dtype) in zip(homes, shapes, strict=True)]  # fmt: skip
    step = getattr(cross, form)(MEAN, list(zip(values, targets, strict=True)), out=outs)
    kept = []
    for turn in range(3):
        for place, value in enumerate(values):
            for buffer in value.buffers:
                numbers = random_data(buffer.shape, buffer.dtype, seed=turn * 50 + place)
                buffer.device.upload(numbers, out=buffer)
        step()
        for result in step():
            for buffer in result.buffers:
                near = buffer.device.empty(buffer.shape, buffer.dtype)
                queue = "transfer" if turn % 2 else "compute"
                buffer.device.copy(near, buffer, queue=queue)
                kept.append(near)
    with mesh.journal() as journal:
        step()
    assert (journal.uploads, journal.syncs) == (0, 0)
    return read(kept)


def flat(mesh: Mesh) -> list[np.ndarray]:
    """Steps that overwrite the gradients of the step before."""
    buffer = mesh.flat_buffer([(5,), (7,)], "float16")
    step = buffer.prepare_all_reduce(MEAN, cross_device_ops=gr.HierarchicalCopyAllReduce(mesh=mesh))
    for turn in range(2):
        for view in [view for views in buffer.views for view in views]:
            view.device.upload(random_data(view.shape, "float16", seed=turn), out=view)
        step()
        step()
    return read(view for views in buffer.views for view in views)


def captured_copies(mesh: Mesh) -> list[np.ndarray]:
    """Two graphs of different devices; later copies and uploads on either queue wait for them."""
    first, second, third = mesh.devices[0], mesh.devices[1], mesh.devices[-1]
    source, out, other = (device.zeros((300,), "float32") for device in (first, second, third))
    steps = [partial(second.copy, out, source, queue="transfer"), partial(third.copy, other, out)]
    if has_peers(mesh):
        steps = [captured(mesh.devices, step).submit for step in steps]
    kept = []
    for turn in range(1, 4):
        first.upload(np.full(300, turn, np.float32), out=source)
        for step in steps:
            step()
        near = [second.empty((300,), "float32"), first.empty((300,), "float32")]
        second.copy(near[0], out)
        first.copy(near[1], other)
        second.upload(np.full(300, -1, np.float32), out=out, queue="transfer")
        kept += near
    return read(kept)


def spread(mesh: Mesh) -> list[np.ndarray]:
    """A broadcast to devices of GPUs whose first device has not been read before."""
    source = mesh.devices[0].upload(random_data((5, 3), "float32", seed=1))
    return list(arrays_of(gr.NcclAllReduce().broadcast(source, mesh)))


# -- sums on one device ---------------------------------------------------------------------------


def gradient_of(mesh: Mesh, value: gr.PerReplica) -> Buffer:
    accumulator = gr.ConditionalAccumulator("bfloat16", device=mesh.devices[0])
    accumulator.apply_grad(value.buffers[1], cast=True)
    return accumulator.accumulator_ref.totals[0]


def rows_of(mesh: Mesh, value: gr.PerReplica) -> Buffer:
    tables = gr.PerReplica([gr.IndexedSlices(buffer, [1] * 40) for buffer in value.buffers])
    return gr.ReductionToOneDevice().reduce(SUM, tables, mesh.devices[0]).primary.values


PEER_READERS: dict[str, Callable[[Mesh, gr.PerReplica], Buffer]] = {
    "sum": lambda mesh, value: gr.ReductionToOneDevice().reduce(MEAN, value, mesh[0]).primary,
    "terms": lambda mesh, value: gr.add_n(value.buffers),
    "partial sums": lambda mesh, value: gr.add_n([*value.buffers, *value.buffers]),
    "rows": rows_of,
    "gradient": gradient_of,
}


def read_by_a_peer(reader: str, mesh: Mesh) -> list[np.ndarray]:
    """Overwrites memory of a peer while the launch that reads it is queued."""
    value = dense(mesh, (40, 7), "float32", 1)
    made = PEER_READERS[reader](mesh, value)
    overwrite(value.buffers[::-1])
    return [made.numpy()]


def aggregated(mesh: Mesh) -> list[np.ndarray]:
    """By one device for all that share its GPU."""
    near = on_one_gpu(mesh)
    terms = [on_each(near, (37,), seed=turn) for turn in range(3)]
    by_replica = [list(row) for row in zip(*terms, strict=True)]
    sums = aggregate_buffers(by_replica, near.devices[0])
    overwrite(*terms)
    return read(sums)


def sparse_terms(mesh: Mesh) -> list[np.ndarray]:
    """Rows of several devices, concatenated, merged, and made dense among arrays."""
    kept = []
    for whole in ([], on_each(mesh, (4, 5), seed=5)):
        rows = on_each(mesh, (6, 5))
        terms = [gr.IndexedSlices(buffer, [3, 1, 3, 0, 1, 3], (4, 5)) for buffer in rows]
        made = gr.aggregate([*terms, *whole])
        overwrite(rows, whole)
        kept.append(made if whole else made.coalesce().values)
        kept.append(terms[0].to_dense())
    return read(kept)


def segment_sums(mesh: Mesh) -> list[np.ndarray]:
    """Of every dtype. The plans of a call are freed while its launch is queued."""
    device, kept = mesh.devices[-1], []
    indices = np.random.default_rng(0).integers(0, 40, 300)
    for dtype in DTYPES:
        plan = plan_segments(indices)
        values = [device.upload(random_data((300, width), dtype, seed=width))
                  for width in (1, 7, 16, 33)]  # fmt: skip
        for divisor in [1] if dtype.kind in "iu" else [1, 3, 1.0 + np.arange(plan.num_segments)]:
            outs = [device.zeros((40, *rows.shape[1:]), dtype) for rows in values]
            segment_sum(outs, values, [plan] * 4, into=[plan.indices] * 4, divisor=divisor)
            kept += outs
    return read(kept)


def on_the_transfer_queue(mesh: Mesh) -> list[np.ndarray]:
    """Uploads and copies on the transfer queue, with launches on the compute queue."""
    here, there = mesh.devices[:2]
    kept = []
    for turn in range(4):
        values = random_data((64,), "float32", seed=turn)
        source = here.upload(values, queue="transfer")
        here.queue_wait(here.queue_mark("transfer"))
        copies = there.empty((64,), np.float32)
        here.copy(copies, source, queue="transfer")
        here.upload(values[::-1], out=source)  # must wait for the copy
        there.queue_wait(here.queue_mark("transfer"))
        kept += [source, gr.add_n([copies, copies])]
    return read(kept)


def copied_then_freed(mesh: Mesh) -> list[np.ndarray]:
    """Frees a block that another device's queue still reads, and allocates again at once."""
    here, there = mesh.devices[:2]
    kept = []
    for turn in range(4):
        source = here.upload(random_data((64,), "float32", seed=turn))
        kept.append(there.empty((64,), np.float32))
        there.copy(kept[-1], source)
        del source
    return read(kept)


# -- accumulators ---------------------------------------------------------------------------------


def accumulated(mesh: Mesh) -> list[np.ndarray]:
    """On one device and over the mesh; the state is saved, and loaded by others."""

    def made() -> list[gr.ConditionalAccumulator]:
        cross = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        return [
            gr.ConditionalAccumulator("float64", device=mesh.devices[1]),
            gr.ConditionalAccumulator("bfloat16", device=mesh.devices[0], reduction_type="SUM"),
            gr.ConditionalAccumulator("float16", device=mesh, cross_device_ops=cross),
        ]

    accs, kept = made(), []
    for step in range(3):
        for part in range(2):
            grads = [dense(mesh, (1003,), acc.dtype, 10 * step + part) for acc in accs]
            assert gr.apply_grads(accs, grads, step)
            overwrite(*[grad.buffers for grad in grads])
            for acc in accs:
                (alone,) = on_each(mesh[-1:], (1003,), acc.dtype, part)
                assert acc.apply_grad(alone, step - part) is (part == 0)
                overwrite([alone])
        if step == 1:
            others = made()
            for acc, other in zip(accs, others, strict=True):
                other.load_state_dict(acc.state_dict())
                kept += _buffers_of(acc.take_grad(1, output_type="buffer"))
            accs = others
        for taken in gr.take_grads(accs, 2, output_type="buffer"):
            kept += _buffers_of(taken)
    return read(kept)


def _buffers_of(taken: gr.Mirrored | Buffer) -> Sequence[Buffer]:
    return taken.buffers if isinstance(taken, gr.Mirrored) else [taken]


def _rows(device, seed: int, dtype: str) -> gr.IndexedSlices:
    """Unordered indices, some repeated; every fourth gradient is empty."""
    indices = np.random.default_rng(seed).integers(0, 20, seed % 4 * 5)
    values = random_data((len(indices), 5, 3), dtype, seed=seed)
    return gr.IndexedSlices(device.upload(values), indices)


def _taken(acc: gr.SparseConditionalAccumulator) -> list[np.ndarray]:
    made = acc.take_indexed_slices_grad(1, output_type="buffer")
    parts = made.parts if isinstance(made, gr.Mirrored) else [made]
    return [array for part in parts[::-1] for array in (part.indices, part.values.numpy())]


def sparse_over_a_mesh(dtype: str, mesh: Mesh) -> list[np.ndarray]:
    """Gradients of every replica, then of one, then a saved state is loaded; two periods."""
    acc, other = (gr.SparseConditionalAccumulator(dtype, device=mesh) for _ in range(2))
    found = []
    for period in range(2):
        for turn in range(3):
            given = [_rows(device, 3 * turn + place + period, dtype)
                     for place, device in enumerate(mesh)]  # fmt: skip
            acc.apply_indexed_slices_grad(gr.PerReplica(given, mesh), period)
            overwrite([each.values for each in given])
            if turn == 1:
                other.load_state_dict(acc.state_dict())
                acc.apply_indexed_slices_grad(_rows(mesh.devices[-1], 7, dtype), period)
        found += _taken(other) + _taken(acc)
    return found


def sparse_side_by_side(dtype: str, mesh: Mesh) -> list[np.ndarray]:
    """Three accumulators that share launches and add to existing and new rows."""
    first, last = mesh.devices[0], mesh.devices[-1]
    accs = [
        gr.SparseConditionalAccumulator(dtype, device=last),
        gr.SparseConditionalAccumulator(dtype, reduction_type="SUM", device=first),
        gr.SparseConditionalAccumulator(dtype, sparse_mean="per_gradient", device=first),
    ]
    for turn in range(4):
        given = [_rows(mesh.devices[(turn + place) % len(mesh)], 2 + turn + place, dtype)
                 for place in range(3)]  # fmt: skip
        gr.apply_grads(accs, given)
    return [array for acc in accs for array in _taken(acc)]


# -- all of them ----------------------------------------------------------------------------------


def _by_algorithm() -> dict[str, Program]:
    made: dict[str, Program] = {}
    for each in ALGORITHMS:
        made[f"every reduction, {each}"] = partial(everything, algorithm=each)
        made[f"every dtype, {each}"] = partial(every_dtype, each)
        made[f"stages, {each}"] = partial(in_stages, each, 3)
        made[f"shares, {each}"] = partial(shares, each)
        for num_packs, method in enumerate(gr.AggregationMethod):
            name = f"steps of training, {each}, {method.name}"
            made[name] = partial(trained, each, num_packs, aggregation_method=method)
    return made


PROGRAMS: dict[str, Program] = {
    **_by_algorithm(),
    "stages without packs": partial(in_stages, "hierarchical_copy", 0),
    "prepared": partial(repeated, "prepare", "hierarchical_copy", 0, FEW),
    "prepared, many": partial(repeated, "prepare", "hierarchical_copy", 0, MANY),
    "prepared, nccl": partial(repeated, "prepare", "nccl", 2, MANY),
    "captured": partial(repeated, "capture", "hierarchical_copy", 2, MANY),
    "captured copies": captured_copies,
    "reduction groups": in_groups,
    "half wire": partial(every_dtype, "hierarchical_copy", dtypes=FLOATS, wire_dtype="float16"),
    "flat buffer": flat,
    "gathered by nccl": gathered,
    "broadcast by nccl": spread,
    **{f"{reader} of a peer": partial(read_by_a_peer, reader) for reader in PEER_READERS},
    "aggregated": aggregated,
    "sparse terms": sparse_terms,
    "segment sums": segment_sums,
    "transfer queue": on_the_transfer_queue,
    "copied then freed": copied_then_freed,
    "accumulators": accumulated,
    **{f"sparse accumulators of a mesh, {dtype}": partial(sparse_over_a_mesh, str(dtype))
       for dtype in FLOATS},
    **{f"sparse accumulators, {dtype}": partial(sparse_side_by_side, str(dtype))
       for dtype in FLOATS},
    "clipped steps of training": partial(trained, "hierarchical_copy", 2, **CLIPPED),
    "checked steps of training": partial(trained, "hierarchical_copy", 0, check_finite=True),
    "sharded steps of training": partial(trained, "hierarchical_copy", 1, shard_optimizer=True),
    **{f"optimizer, {name}": partial(optimized, make) for name, make in OPTIMIZERS.items()},
    **{f"one GPU, {'copies' if copies else 'beside'}, {'rows' if rows else 'dense'}":
       partial(crossed, copies, rows) for copies in (True, False) for rows in (True, False)},
    "mirrored": mirrored,
    "clipped": clipped,
    **{f"agn, {way}": partial(trained_by_agn, way) for way in AGN_WAYS},
}  # fmt: skip
