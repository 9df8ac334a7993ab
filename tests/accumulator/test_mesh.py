"""A dense accumulator over a mesh: a partial sum on each device, one all-reduce at the take."""

import numpy as np
import pytest
from accumulator.kinds import Sparse, bits, expected
from support.exact_data import exact_data, same

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS


@pytest.fixture(params=ALGORITHMS)
def algorithm(request) -> str:
    return request.param


@pytest.fixture
def accumulator(mesh, algorithm):
    """Makes accumulators over the mesh."""

    def make(dtype="float32", shape=None, num_packs=1, **options):
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
        return gr.ConditionalAccumulator(dtype, shape, device=mesh, cross_device_ops=ops, **options)

    return make


def replicas(mesh, dtype="float32", shape=(19,), seed=0):
    return exact_data((len(mesh), *shape), dtype, num_terms=32, seed=seed)


def check_mirrored(taken, mesh, wanted):
    assert type(taken) is gr.Mirrored
    assert taken.devices == mesh.devices
    assert [buffer.device for buffer in taken.buffers] == list(mesh.devices)
    assert all(same(buffer.numpy(), wanted) for buffer in taken.buffers)
    assert len({buffer.address for buffer in taken.buffers}) == len(mesh)


def test_a_plain_gradient_is_added_on_its_own_device(accumulator, mesh):
    """A host array on the device of the replica; a Buffer on its own, whatever the replica."""
    acc, last = accumulator(), len(mesh) - 1

    def put(value):
        return mesh.devices[last].put(np.full(3, value, "float32"))

    with mesh.journal() as journal:
        acc.apply_grad(np.ones(3, "float32"))
        with gr.replica(last):
            acc.apply_grad([3.0] * 3)
            with gr.replica(0):
                acc.apply_grad([5.0] * 3)
        acc.apply_grad(put(7))
        with gr.replica(0):
            acc.apply_grad(put(8))
    totals = [None if total is None else total.numpy() for total in acc.accumulator_ref.totals]
    assert totals[0].tolist() == [6.0] * 3
    assert totals[1:-1] == [None] * (last - 1)
    assert totals[-1].tolist() == [18.0] * 3
    assert (journal.copies, journal.bytes, journal.launches) == (0, 0, 5)
    check_mirrored(acc.take_grad(5), mesh, np.full(3, 4.8, "float32"))


def test_a_replica_outside_the_mesh_is_an_error(mesh):
    """A host array would silently go to the first device."""
    text = f"replica {len(mesh)}: the mesh has {len(mesh)} devices"
    rows = gr.IndexedSlices(np.ones((1, 2), np.float32), [0], (5, 2))
    for home in (mesh, mesh[:1], mesh.devices[1]):
        dense = gr.ConditionalAccumulator("float32", device=home)
        sparse = gr.SparseConditionalAccumulator("float32", device=home)
        for acc, grad in ((dense, np.ones(3, np.float32)), (dense, [1.0]), (dense, rows),
                          (sparse, rows)):  # fmt: skip
            with gr.replica(len(mesh)), pytest.raises(ValueError, match=text):
                gr.apply_grads([acc], [grad])
            assert acc.num_accumulated() == 0


class OneDevice(gr.CrossDeviceOps):
    """CrossDeviceOps of a user, which add on the last device."""

    num_values = 0

    def reduce_batch(self, reduce_op, requests, *, coalesce):
        self.num_values += len(requests)
        home = requests[0].value.devices[-1]
        return gr.ReductionToOneDevice(home).reduce_batch(reduce_op, requests, coalesce=coalesce)


class OwnAllReduce(gr.NcclAllReduce):
    """A subclass of AllReduceCrossDeviceOps with its own reduction."""

    num_values = 0
    reduce_batch = OneDevice.reduce_batch


@pytest.mark.parametrize("make", [OneDevice, OwnAllReduce, gr.ReductionToOneDevice])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_any_ops_reduce_the_sums_of_a_mesh(mesh, make, dtype, reduction_type):
    """In a joint take, where some devices have no gradient."""
    own, found = make(), []
    options = {"device": mesh, "reduction_type": reduction_type}
    for ops in (None, own):
        accumulators = [
            gr.ConditionalAccumulator(dtype, cross_device_ops=ops, **options) for _ in range(2)
        ]
        for seed, acc in enumerate(accumulators):
            for place in (0, len(mesh) - 1, 0):
                with gr.replica(place):
                    acc.apply_grad(replicas(mesh, dtype, seed=seed)[place])
        with mesh.journal() as journal:
            taken = gr.take_grads(accumulators, 3)
        assert journal.syncs == 0
        assert [acc.num_accumulated() for acc in accumulators] == [0, 0]
        assert [each.devices for each in taken] == [mesh.devices] * 2
        found.append(bits(list(taken)))
    assert found[0] == found[1]
    assert getattr(own, "num_values", 2) == 2


def test_ops_that_cannot_reduce(mesh):
    """Rows are not reduced by ops of a user; if ops fail, the sums remain."""

    class Fails(gr.CrossDeviceOps):
        def reduce_batch(self, reduce_op, requests, *, coalesce):
            raise OSError("tested")

    with pytest.raises(TypeError, match="must be an AllReduceCrossDeviceOps: a Sparse"):
        gr.SparseConditionalAccumulator("float32", device=mesh, cross_device_ops=Fails())
    options = {"device": mesh, "shared_name": "fails"}
    acc = gr.ConditionalAccumulator("float32", cross_device_ops=Fails(), **options)
    acc.apply_grad([1.0])
    with pytest.raises(OSError, match="tested"):
        acc.take_grad(1)
    assert acc.num_accumulated() == 1
    with pytest.raises(ValueError, match="shared_name='fails' has cross_device_ops <"):
        gr.ConditionalAccumulator("float32", cross_device_ops=Fails(), **options)
    acc.close()


def test_a_gradient_from_outside_the_part_is_read_by_its_first_device(mesh):
    """By a copy, unless its launches can access a peer's memory."""
    part, outside = mesh[1:], mesh.devices[0]
    is_read = mesh.mesh_state.peers(mesh.devices[1].physical, outside.physical)
    for place in (outside.put, outside.upload):
        acc = gr.ConditionalAccumulator("float32", device=part)
        gradient = place(np.full(2, 4, "float32"))
        with mesh.journal() as journal:
            acc.apply_grad(gradient)
        assert (journal.copies, journal.launches) == (0 if is_read else 1, 1)
        assert acc.accumulator_ref.totals[0].numpy().tolist() == [4.0, 4.0]
        acc.apply_grad([2.0, 2.0])
        check_mirrored(acc.take_grad(2), part, np.full(2, 3, "float32"))


def test_sparse_accumulators_filled_together_share_launches(mesh):
    """Each is merged alone, and divided by its own rule in the same launches."""
    kinds = ["per_row", "per_row", "per_gradient", "per_row", "per_gradient"]
    accumulators = [
        gr.SparseConditionalAccumulator("float32", device=mesh, sparse_mean=kind) for kind in kinds
    ]
    grads = [
        gr.PerReplica([Sparse.random(seed, "float32", (2 + seed % 5,))
                       for seed in range(turn, turn + 5 * len(mesh), 5)], mesh)
        for turn in range(5)
    ]  # fmt: skip
    with mesh.journal() as journal:
        gr.apply_grads(accumulators, grads)
    assert journal.launches == len(mesh.by_physical)
    with mesh.journal() as journal:
        taken = gr.take_grads(accumulators, 1)
    launched = [record.name for record in journal.of("launch")]
    assert (launched.count("segment_sum"), journal.uploads, journal.syncs) == (5, 5, 0)
    for each, grad, kind in zip(taken, grads, kinds, strict=True):
        if kind == "per_gradient":
            continue
        parts = [gr.IndexedSlices(part.values.numpy(), part.indices) for part in grad.parts]
        assert bits(each) == [expected([[part] for part in parts], "float32")] * len(mesh)
