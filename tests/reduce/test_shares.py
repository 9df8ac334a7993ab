"""Reduce-scatter and all-gather, in one process and over several (threads in these tests)."""

import numpy as np
import pytest
from support.exact_data import DTYPES, exact_data, random_data, same
from support.thread_group import run_replicas

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


@pytest.fixture(
    params=[((0,), True), ((0, 0, 1, 1), False), ((0, 1, 1, 2, 0), True)],
    ids=["one", "copies", "peers"],
)
def mesh(request):
    placement, peer_access = request.param
    with gr.open_mesh(placement, backend="sim", peer_access=peer_access, strict=True) as mesh:
        yield mesh


def make_grads(num_replicas, dtypes=("float32", "float16", "int16"), make=random_data):
    """``[replica][tensor]``: tensors of several dtypes, two in one pack, one empty."""
    shapes = [(num_replicas * 3, 5), (num_replicas * 2,), (0, 4), (num_replicas * 700,)]
    return [
        [
            make(shape, dtype, seed=100 * replica + 10 * number + position)
            for number, dtype in enumerate(dtypes)
            for position, shape in enumerate(shapes)
        ]
        for replica in range(num_replicas)
    ]


def written(call, grads, *op):
    """Returns the results of a call, and checks that it writes the same into ``out``."""
    found = call(grads, *op)
    out = [[np.full_like(each, 1) for each in row] for row in found]
    assert call(grads, *op, out=out) is out
    for row, other in zip(found, out, strict=True):
        assert all(map(same, row, other))
    return out


def check_shares(wanted, shares, whole):
    """Checks that shares are rows of the sums, and gathered shares the sums."""
    for index, (sums, of_one, gathered) in enumerate(zip(wanted, shares, whole, strict=True)):
        for total, share, again in zip(sums, of_one, gathered, strict=True):
            assert same(again, total)
            count = len(total) // len(wanted)
            assert same(share, total[index * count : (index + 1) * count])


@pytest.mark.parametrize(("num_packs", "op"), [(0, SUM), (1, MEAN), (3, SUM)])
def test_shares_have_the_bits_of_an_all_reduce(mesh, op, num_packs):
    n = len(mesh)
    grads = make_grads(n)
    groups = [None, [[*range(0, n, 2)], [], [*range(1, n, 2)]], [[i] for i in reversed(range(n))]]
    for number, chosen in enumerate(groups):
        ops = gr.AllReduceCrossDeviceOps(
            "hierarchical_copy",
            num_packs,
            mesh=mesh,
            reduction_groups=chosen,
            wire_dtype="bfloat16" if number == 1 else None,
        )
        shares = written(ops.reduce_scatter, grads, op)
        check_shares(ops.all_reduce(grads, op), shares, written(ops.all_gather, shares))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype(mesh, algorithm):
    n = len(mesh)
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    grads = make_grads(n, DTYPES, exact_data)
    for op in (SUM, MEAN) if algorithm == "hierarchical_copy" else (SUM,):
        shares = ops.reduce_scatter(grads, op)
        check_shares(ops.all_reduce(grads, op), shares, ops.all_gather(shares))


@pytest.mark.parametrize("peer_access", [False, True])
def test_each_device_sends_what_another_one_owns(peer_access):
    n, size = 4, 4 * 1000
    options = {"backend": "sim", "peer_access": peer_access}
    with gr.open_mesh(tuple(range(n)), **options) as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        grads = [[device.put(np.ones(size, np.float32))] for device in mesh]
        with mesh.journal() as journal:
            shares = ops.reduce_scatter(grads, SUM)
        assert journal.bytes == n * (n - 1) * size // n * 4  # half of a ring's all-reduce
        assert {record.phase for record in journal.records if record.nbytes} == {"reduce-scatter"}
        with mesh.journal() as journal:
            ops.all_gather(shares)
        assert journal.bytes == n * (n - 1) * size // n * 4
        assert {record.phase for record in journal.records if record.nbytes} == {"all-gather"}
        assert not any(record.phase in ("pack", "unpack") for record in journal.records)


def test_nccl_reduces_and_broadcasts_shares():
    with gr.open_mesh((0, 1, 1, 2), backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps("nccl", mesh=mesh)
        for dtype, name in (("float32", "reduce"), ("int16", None)):  # which it cannot add
            grads = [[device.put(np.ones(512, dtype))] for device in mesh]
            with mesh.journal() as journal:
                shares = ops.reduce_scatter(grads, SUM)
            calls = [(record.name, record.nbytes) for record in journal.of("collective")]
            assert calls == ([(name, 512)] * 3 * 4 if name else [])  # each share on each GPU
            with mesh.journal() as journal:
                ops.all_gather(shares)
            calls = [(record.name, record.nbytes) for record in journal.of("collective")]
            assert calls == [("broadcast", shares[0][0].nbytes)] * 3 * 4
            assert journal.copies == 0


def test_results_lie_on_their_replicas_devices_and_have_the_kind_and_nesting_of_the_inputs():
    with gr.open_mesh((0, 0, 1), backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        grads = [
            {"a": [np.full((3, 2), 1.0 + i)], "b": (None, {"i": np.arange(6, dtype=np.int32)})}
            for i in range(3)
        ]
        shares = ops.reduce_scatter(tuple(grads), MEAN, output_type="buffer")
        assert isinstance(shares, tuple) and [list(each) for each in shares] == [[*grads[0]]] * 3
        assert [each["a"][0].device for each in shares] == list(mesh.devices)
        numbers = [each["b"][1]["i"] for each in shares]
        assert [each.numpy().tolist() for each in numbers] == [[0, 1], [2, 3], [4, 5]]
        assert {each.dtype.name for each in numbers} == {"float64"}
        for each in ops.all_gather(shares, output_type="numpy"):
            assert each["b"][0] is None and (each["a"][0] == 2.0).all()
            assert each["b"][1]["i"].tolist() == [0, 1, 2, 3, 4, 5]
        empty = [[np.ones((0, 2))]] * 3
        assert ops.all_gather(ops.reduce_scatter(empty))[2][0].shape == (0, 2)
        assert ops.reduce_scatter([[], [], []]) == [[], [], []] == ops.all_gather([[], [], []])


def test_what_cannot_be_shared_raises():
    with gr.open_mesh(2, backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        with mesh.journal() as journal:
            with pytest.raises(ValueError, match=r"grads\[…\]\[1\] has 5 rows, which 2 replicas"):
                ops.reduce_scatter([[np.ones(4), np.ones((5, 2))]] * 2)
            with pytest.raises(ValueError, match=r"\['a'\] is a scalar, which has no rows"):
                ops.all_gather([{"a": np.float32(1)}] * 2)
            with pytest.raises(ValueError, match=r"\['a.1'\] has 3 rows, which 2 rep"):
                ops.reduce_scatter([{"a": [np.ones(6), np.ones(3)]}] * 2)
            rows = gr.IndexedSlices(np.ones((1, 2)), [0], (4, 2))
            with pytest.raises(TypeError, match=r"IndexedSlices: pass .to_dense\(\)"):
                ops.reduce_scatter([[rows]] * 2)
            with pytest.raises(ValueError, match=r"grads has 1 entries; it must have one entry"):
                ops.all_gather([[np.ones(2)]])
            with pytest.raises(ValueError, match="replicas must agree in shape"):
                ops.all_gather([[np.ones(2)], [np.ones(3)]])
            whole = [[np.ones(4)], [np.ones(4)]]
            with pytest.raises(ValueError, match=r"out.* is float64\[4\]; expected float64\[2\]"):
                ops.reduce_scatter([[np.ones(4)]] * 2, out=whole)
            with pytest.raises(ValueError, match=r"it must not share memory with an input"):
                ops.all_gather([[whole[0][0][:2]], [np.ones(2)]], out=whole)
        assert not journal.launches and not journal.copies


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_terms_of_an_owner_and_no_sums_cross_processes(algorithm):
    counts, size = (2, 1, 2), 5 * 16
    groups = "processes" if algorithm == "hierarchical_copy" else None

    def work(mesh, _):
        group = mesh.mesh_state.processes
        ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, reduction_groups=groups)
        ops.all_gather(ops.reduce_scatter([[np.ones((0, 2))]] * len(mesh)))
        with mesh.journal() as journal:
            mine = ops.reduce_scatter([[np.ones(size, np.float32)]] * len(mesh), SUM)
        scattered = dict(group.sent)
        group.sent.clear()
        ops.all_gather(mine)
        exchanges = journal.of("exchange")
        assert sum(record.nbytes for record in exchanges) == sum(scattered.values())
        assert len(exchanges) == 1 and "tensor 0" in str(exchanges[0].label)
        return scattered, dict(group.sent)

    share = size // sum(counts) * 4
    for rank, (scattered, gathered) in enumerate(run_replicas(counts, work)):
        others = [other for other in range(3) if other != rank]
        # one term, already added, for each share of the other; and its own shares to all others
        assert scattered == {other: counts[other] * share for other in others}
        assert gathered == {other: counts[rank] * share for other in others}
