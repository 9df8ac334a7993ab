"""Over a mesh, for any devices with gradients: one plan, one order, zeros elsewhere."""

import itertools

import numpy as np
import pytest
from support.exact_data import exact_data, same

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SIZE = 19


def patterns(mesh):
    """Every set of devices that get a gradient."""
    places = range(len(mesh))
    return [
        set(some)
        for count in range(1, len(mesh) + 1)
        for some in itertools.combinations(places, count)
    ]


def take(mesh, acc):
    """A take, and its operations without fills."""
    with mesh.journal() as journal:
        taken = acc.take_grad(1)
    assert (journal.syncs, journal.uploads) == (0, 0)
    steps = [record for record in journal.records if record.kind != "fill"]
    return taken, steps, [record.device for record in journal.of("fill")]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pattern_of_arrivals_has_the_same_plan_and_order(mesh, algorithm, dtype):
    """The same launches, copies and collectives, between the same devices, in the same order.

    (With SUM, because a mean divides by the count, and a mean of one gradient does not divide.)
    """
    ops = gr.AllReduceCrossDeviceOps(algorithm)
    acc = gr.ConditionalAccumulator(dtype, device=mesh, cross_device_ops=ops, reduction_type="SUM")
    grads = exact_data((len(mesh), SIZE), dtype, num_terms=32)
    plans = []
    for step, pattern in enumerate(patterns(mesh)):
        for place in pattern:
            with gr.replica(place):
                acc.apply_grad(grads[place], step)
        taken, steps, zeroed = take(mesh, acc)
        plans.append(steps)
        assert zeroed == [place for place in range(len(mesh)) if place not in pattern]
        total = np.sum([grads[place].astype("float64") for place in pattern], axis=0)
        wanted = total.astype(acc.dtype)
        assert all(same(buffer.numpy(), wanted) for buffer in taken.buffers)
    assert all(plan == plans[0] for plan in plans)
    assert len([record for record in plans[0] if record.kind == "launch"]) > 0
    copied = [record for record in plans[0] if record.kind == "copy"]
    reaches = mesh.mesh_state.peers(0, 1) or len(mesh.by_physical) == 1
    copies = {"nccl": False, "hierarchical_copy": not reaches}
    if algorithm in copies:  # another algorithm may copy in any case
        assert bool(copied) is copies[algorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_accumulators_taken_together_are_transferred_packed(mesh, algorithm):
    """As many copies, collectives, launches and fills as for one, for any set of devices."""
    ops = gr.AllReduceCrossDeviceOps(algorithm)
    many, (alone,) = (
        [gr.ConditionalAccumulator("float32", device=mesh, cross_device_ops=ops)
         for _ in range(count)]
        for count in (12, 1)
    )  # fmt: skip
    counts = []
    for step, filled in enumerate((range(len(mesh)), [1])):
        for accumulators in (many, [alone]):
            for place in filled:
                with gr.replica(place):
                    grads = [np.full(3, acc, "float32") for acc, _ in enumerate(accumulators)]
                    with mesh.journal() as journal:
                        gr.apply_grads(accumulators, grads, step)
                    assert journal.launches == 1
            with mesh.journal() as journal:
                taken = gr.take_grads(accumulators, 1)
            for value, result in enumerate(taken):
                assert all((copy == value).all() for copy in result.values)
            assert "pack" not in [record.name for record in journal.of("launch")]
            kinds = [record.kind for record in journal.records]
            counts.append([kinds.count(kind) for kind in ("copy", "collective", "launch", "fill")])
    for together, single in (counts[:2], counts[2:]):
        assert together == single
