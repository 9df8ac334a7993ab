"""Calls that read a caller's tensors, which its streams overwrite right afterwards.

For tests of the waits between our queues and callers' streams: PyTorch's, one on each GPU. Nothing
synchronizes the devices, so the clocks of the machine find a missing wait.
"""

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import cupy
import numpy as np

import gradreduce as gr
from gradreduce.device import Mesh

from .foreign import Tensor, made_on

SHAPE = (7, 30)
SUM = gr.ReduceOp.SUM
Check = Callable[[], Any]


def values(seed: int = 0) -> np.ndarray:
    """Integers as floats, whose sums are exact."""
    return np.arange(210, dtype=np.float32).reshape(SHAPE) * (seed + 1)


def check_overwritten(torch, mesh: Mesh, call: Callable[..., Check]) -> None:
    """Makes one call and overwrites its tensors before checking the result.

    Also checks that nothing holds the tensors after the call, which would waste memory.
    """
    tensors, others = (
        [on(torch, each.physical, values(place)) for place, each in enumerate(mesh)]
        for _ in range(2)
    )
    check = call(mesh, tensors, gr.PerReplica(others, mesh))
    overwrite(torch, [*tensors, *others])
    arrays_ = [ref(each.array) for each in (*tensors, *(others if call in READ_VALUE else ()))]
    del tensors, others
    held = sum(array() is not None for array in arrays_)
    assert not held, f"{held} tensors are held after {call.__name__}"
    assert (check() == sum(map(values, range(3)))).all(), f"wrong values of {call.__name__}"


def dropped(torch, mesh: Mesh, kind: str) -> None:
    """Drops results while their stream still reads them."""
    device = mesh.devices[0]
    for turn in range(3):
        theirs = torch.stream if kind == "torch" else cupy.cuda.Stream(non_blocking=True)
        with theirs:
            made = gr.add_n([device.upload(values(turn))] * 2, output_type=kind)
            array = made.array if kind == "torch" else made
            kept = array.copy()
        del made, array
        fresh_memory = device.upload(np.zeros(SHAPE, "float32"))  # could reuse their memory
        with theirs:
            assert (kept.get() == values(turn) * 2).all(), "wrong values of what was dropped"
        assert not fresh_memory.numpy().any()


def ended(torch, mesh: Mesh) -> None:
    """Like ``dropped``; the stream is destroyed too, and inputs come from another stream."""
    tensor = on(torch, 0, values())
    theirs, done = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    with theirs:
        made = gr.add_n([mesh.devices[0].upload(values())] * 2, output_type="cupy")
        kept = made.copy()
        done.record()
    del made, theirs
    gr.add_n([tensor, tensor])
    with torch.stream:
        torch.stream.wait_event(done)
        assert (kept.get() == values() * 2).all(), "wrong values of what was dropped"


def on(torch, gpu: int, values: np.ndarray) -> Tensor:
    with cupy.cuda.Device(gpu):
        return Tensor(made_on(torch.stream_of(gpu), values))


def overwrite(torch, tensors) -> None:
    """Overwrites tensors like PyTorch's next ``backward()``."""
    for tensor in tensors:
        gpu = tensor.array.device.id
        with cupy.cuda.Device(gpu), torch.stream_of(gpu):
            tensor.array[...] = -1


def reduced_to_one(mesh, tensors, value) -> Check:
    made = gr.HierarchicalCopyAllReduce().reduce(SUM, value, mesh.devices[0])
    return lambda: made.buffers[0].numpy()


def added_by_the_callers_own(mesh, tensors, value) -> Check:
    def add(arrays):
        return Tensor(arrays[0].array.copy())

    with cupy.cuda.Device(0), sys.modules["torch"].stream:
        ops = gr.ReductionToOneDevice(accumulation_fn=add)
        made = ops.reduce(SUM, gr.PerReplica(tensors[:2], devices=mesh.devices[:2]),
                          mesh.devices[0])  # fmt: skip
    return lambda: made.buffers[0].numpy() + values(1) + values(2)


def all_reduced(mesh, tensors, value) -> Check:
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    rows = ops.all_reduce([[each] for each in tensors], op=SUM, output_type="buffer")
    return lambda: rows[1][0].numpy()


def given_in_place(mesh, tensors, value) -> Check:
    outs = [each.empty(SHAPE, "float32") for each in mesh]
    gr.HierarchicalCopyAllReduce().reduce(SUM, value, value, out=outs)
    return lambda: outs[2].numpy()


def prepared(mesh, tensors, value, how="prepare") -> Check:
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    step = getattr(ops, how)(SUM, [(value, value)], output_type="buffer")
    (made,) = step()
    return lambda: made.buffers[2].numpy()


def captured(mesh, tensors, value) -> Check:
    return prepared(mesh, tensors, value, "capture")


def broadcast(mesh, tensors, value) -> Check:
    sums = [gr.HierarchicalCopyAllReduce().broadcast(each, mesh, output_type="buffer")
            for each in tensors]  # fmt: skip
    return lambda: sum(made.buffers[place].numpy() for place, made in enumerate(sums))


def broadcast_into_tensors(mesh, tensors, value) -> Check:
    """In place into each of them: their values are read in the order of their stream."""
    torch, sums = sys.modules["torch"], [np.zeros(SHAPE, "float32") for _ in mesh]
    for source, tensor in enumerate(list(tensors)):
        outs = [tensor if place == source else on(torch, device.physical, values(5))
                for place, device in enumerate(mesh)]  # fmt: skip
        (made,) = gr.HierarchicalCopyAllReduce().broadcast([tensor], mesh, out=[outs])
        assert made.values == tuple(outs)
        for place, out in enumerate(outs):
            gpu = out.device.index
            with cupy.cuda.Device(gpu), torch.stream_of(gpu):
                sums[place] += out.array.get()
    return lambda: sums[1] + 0 * sums[0]


def added(mesh, tensors, value) -> Check:
    made = gr.add_n(tensors, output_type="buffer")
    return made.numpy


def accumulated_n(mesh, tensors, value) -> Check:
    made = gr.accumulate_n(list(value.buffers), tensor_dtype="float32")
    return made.numpy


def aggregated_one_by_one(mesh, tensors, value) -> Check:
    method = gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N

    def terms():  # each is made when needed, after the waits of earlier ones
        for place in range(len(tensors)):
            yield on(sys.modules["torch"], 0, values(place))

    return gr.aggregate(terms(), method, output_type="buffer").numpy


def aggregated_at_the_end(mesh, tensors, value) -> Check:
    return gr.aggregate(iter(tensors), output_type="buffer").numpy


def copied_alone(mesh, tensors, value) -> Check:
    made = [gr.add_n([each], output_type="buffer") for each in tensors]
    return lambda: sum(each.numpy() for each in made)


def accumulated(mesh, tensors, value) -> Check:
    acc = gr.ConditionalAccumulator("float32", reduction_type="SUM", device=mesh.devices[0])
    gr.apply_grads([acc], [tensors[0]])
    acc.apply_grad(tensors[1])
    acc.apply_grad(tensors[2])  # from the other GPU
    return lambda: acc.take_grad(3, output_type="buffer").numpy()


def accumulated_by_replicas(mesh, tensors, value) -> Check:
    acc = gr.ConditionalAccumulator("float32", reduction_type="SUM", device=mesh)
    acc.apply_grad(value)
    return lambda: acc.take_grad(1, output_type="buffer").buffers[0].numpy()


def accumulated_rows(mesh, tensors, value) -> Check:
    """Each device alone, then one launch for two on a GPU: both sums grow."""
    accs = [gr.SparseConditionalAccumulator("float32", reduction_type="SUM", device=device)
            for device in mesh.devices[:2]]  # fmt: skip
    first = Tensor(tensors[0].array[:2])
    for acc in accs:
        acc.apply_grad([1, 0], first)
    for rows in rows_of(tensors):  # the last ones come from the other GPU
        gr.apply_grads(accs, [rows, rows])

    def taken():
        found = [acc.take_indexed_slices_grad(4, output_type="buffer").values for acc in accs]
        last, rows = found[1].numpy(), found[0].numpy()
        assert (last == rows).all(), "wrong values of one of them"
        rows[1::-1] -= values()[:2]
        return rows

    return taken


def accumulated_rows_by_replicas(mesh, tensors, value) -> Check:
    """Sums are combined while the caller may overwrite arrays that it passed."""
    acc = gr.SparseConditionalAccumulator("float32", reduction_type="SUM", device=mesh)
    acc.apply_indexed_slices_grad(gr.PerReplica(rows_of(tensors), mesh))
    taken = acc.take_indexed_slices_grad(3, output_type="buffer")
    return lambda: taken.parts[2].values.numpy()


def stepped(mesh, tensors, value) -> Check:
    variable = gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
    step = gr.SyncStep([variable], gr.GradientDescentOptimizer(-3.0), gr.AllReduceCrossDeviceOps(
        "hierarchical_copy", mesh=mesh))  # fmt: skip
    assert step([[[each]] for each in tensors])
    return variable.numpy


def optimized(mesh, tensors, value) -> Check:
    variables = [gr.Variable(np.zeros(SHAPE, "float32"), device=mesh) for _ in tensors]
    gr.GradientDescentOptimizer(-1.0).apply_gradients(list(zip(tensors, variables, strict=True)))
    return lambda: sum(each.numpy() for each in variables)


def optimized_by_replicas(mesh, tensors, value) -> Check:
    variable = gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
    optimizer = gr.GradientDescentOptimizer(-3.0)
    optimizer.cross_device_ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    optimizer.apply_gradients([(value, variable)])
    return variable.numpy


def assigned(mesh, tensors, value) -> Check:
    variable = gr.Variable(tensors[2], device=mesh)
    other = gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
    other.assign(tensors[1])
    other.assign_add(tensors[0])
    return lambda: variable.numpy() + other.numpy()


def rows_of(tensors) -> list[gr.IndexedSlices]:
    return [gr.IndexedSlices(each, np.arange(SHAPE[0]), SHAPE) for each in tensors]


def make_dense(mesh, tensors, value) -> Check:
    made = [rows.to_dense(output_type="buffer") for rows in rows_of(tensors)]
    return lambda: sum(each.numpy() for each in made)


def merged(mesh, tensors, value) -> Check:
    made = [rows.coalesce(output_type="buffer") for rows in rows_of(tensors)]
    return lambda: sum(each.values.numpy() for each in made)


def joined(mesh, tensors, value) -> Check:
    made = gr.aggregate(rows_of(tensors), output_type="buffer")
    return lambda: made.values.numpy().reshape(3, *SHAPE).sum(axis=0)


def joined_across(mesh, tensors, value) -> Check:
    rows = gr.PerReplica(rows_of(tensors), mesh)
    made = gr.HierarchicalCopyAllReduce().reduce(SUM, rows, mesh.devices[0], coalesce=True)
    return lambda: made.parts[0].values.numpy()


# They read the value, and keep none of it.
READ_VALUE = [
    reduced_to_one, given_in_place, accumulated_n, accumulated_by_replicas, optimized_by_replicas,
]  # fmt: skip
CASES = [
    reduced_to_one, added_by_the_callers_own, all_reduced, given_in_place, prepared, captured,
    broadcast, broadcast_into_tensors, added, accumulated_n,
    aggregated_one_by_one, aggregated_at_the_end, copied_alone,
    accumulated, accumulated_by_replicas, accumulated_rows, accumulated_rows_by_replicas,
    stepped, optimized, optimized_by_replicas, assigned,
    make_dense, merged, joined, joined_across,
]  # fmt: skip
