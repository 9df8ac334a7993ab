"""NCCL's own collectives over processes, which are threads in these tests."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from backends.cuda.process_meshes import LIBRARIES, here, on_devices, run_all
from fake_cupy import distributed, nccl
from support.thread_group import SharedQueues, ThreadGroup, run_processes

import gradreduce as gr
from gradreduce.errors import CollectiveError
from gradreduce.reduce import pipeline

__all__ = ["here"]
pytestmark = pytest.mark.fake_cupy
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "uint8", "int16", "int32",
          "int64")  # fmt: skip
# The GPU of each replica, by process: 2 to 4 processes, 1 to 3 GPUs of each, uneven replicas.
PLACES = {
    "one GPU each": [[0], [1]],
    "replicas share a GPU": [[0, 0], [1], [2, 2, 2]],
    "two replicas on each GPU": [[0, 0], [1, 1]],
    "two GPUs each": [[0, 1], [2, 3]],
    "uneven": [[0, 1, 0], [2], [3, 4, 5]],
    "four processes": [[0], [1, 2], [3, 3], [4, 5, 6, 4]],
}


def number_of(places: list[list[int]]) -> int:
    return sum(map(len, places))


def terms_of(places: list[list[int]], shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """One array for each replica, whose sums and means are exact in every dtype."""
    random, count = np.random.default_rng(len(shape)), number_of(places)
    terms = random.integers(0, 4, (count, *shape)) * count
    if dtype.startswith("complex"):
        terms = terms - 1j * terms[::-1]
    return [*terms.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)]


def sum_of(terms: list[np.ndarray], op: gr.ReduceOp) -> np.ndarray:
    total = np.sum(terms, axis=0, dtype=complex if terms[0].dtype.kind == "c" else np.float64)
    return total / (len(terms) if op is MEAN else 1)


@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_sums_and_means_of_all_dtypes_are_numpys(here, places, library):
    shapes = [(7,), (3, 5), (0,), (2_011,)]
    terms = {(dtype, shape): terms_of(places, shape, dtype) for dtype in DTYPES for shape in shapes}

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(2, mesh=mesh)
        values = [on_devices(mesh, [each[r] for r in replicas]) for each in terms.values()]
        pairs = [(value, value) for value in values]
        with mesh.journal() as journal:
            step = ops.prepare(SUM, pairs)
            plays = [step(), step(), ops.batch_reduce(MEAN, pairs)]
        kinds = {record.kind for record in journal.records}
        assert not kinds & {"upload", "download", "sync"}
        exchanged = {record.nbytes for record in journal.of("exchange")}
        assert max(exchanged) <= 2 * 2_011 * len(mesh) * len(places), "NCCL cannot add int16"
        assert {record.name for record in journal.of("collective")} == {"all_reduce"}
        return [[[b.numpy() for b in total.buffers] for total in play] for play in plays]

    for *sums, means in run_all(library, places, work):
        for op, totals in ((SUM, sums[0]), (SUM, sums[1]), (MEAN, means)):
            for (dtype, _), replicas, of_all in zip(terms, totals, terms.values(), strict=True):
                wanted = sum_of(of_all, op)
                for array in replicas:
                    assert op is MEAN or array.dtype == of_all[0].dtype
                    assert (array.astype(wanted.dtype) == wanted).all(), dtype
    assert here.counts.get("init") == 1


@pytest.mark.parametrize("here", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_shares_and_copies_of_one_process_are_numpys(here, places, library):
    """Shares are equal on meshes whose processes have as many replicas on each GPU."""
    count, last = number_of(places), len(places) - 1
    shapes = [(3 * count, 5), (16 * count,)]
    terms = [[terms_of(places, shape, dtype) for shape in shapes] for dtype in ("float32", "int16")]
    terms = [column for row in terms for column in row]

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(1, mesh=mesh)
        pairs = list(zip(mesh, replicas, strict=True))
        grads = [[device.upload(column[r]) for column in terms] for device, r in pairs]
        with mesh.journal() as journal:
            shares = ops.reduce_scatter(grads, SUM)
            wholes = ops.all_gather(shares)
            first = mesh[len(mesh) - 1].upload(terms[0][replicas[-1]])
            copied = [ops.broadcast(first, mesh, process=each) for each in (0, last)]
        names = {record.name for record in journal.of("collective")}
        found = [[[b.numpy() for b in row] for row in rows] for rows in (shares, wholes)]
        copies = [[b.numpy() for b in each.buffers] for each in copied]
        return names, journal.of("exchange"), *found, copies

    ends = [sum(map(len, places[: rank + 1])) for rank in range(len(places))]
    by_replica = 0
    equal = len({len(each) for each in places}) == 1 and (library != "ours" or even(places))
    for names, exchanges, shares, wholes, copies in run_all(library, places, work):
        assert names == (
            {"reduce_scatter", "all_gather", "broadcast"} if equal else {"reduce", "broadcast"}
        )
        assert exchanges, "NCCL cannot add int16"
        for share, whole in zip(shares, wholes, strict=True):
            for column, part, again in zip(terms, share, whole, strict=True):
                total = sum_of(column, SUM).reshape(count, -1)
                assert part.dtype == again.dtype == column[0].dtype
                assert (part.ravel() == total[by_replica]).all()
                assert (again.ravel() == total.ravel()).all()
            by_replica += 1
        for process, of_devices in zip((0, last), copies, strict=True):
            assert all((each == terms[0][ends[process] - 1]).all() for each in of_devices)


def even(places: list[list[int]]) -> bool:
    """Whether each GPU has as many replicas."""
    every = [gpu for each in places for gpu in each]
    return len({every.count(gpu) for gpu in every}) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_integers_that_nccl_cannot_add_may_share_a_gpu_that_is_not_the_first(here, library):
    """No other tensor is in their stage, and a rank has replicas on two GPUs."""
    places = [[0, 1, 1], [2]]
    terms = terms_of(places, (8,), "int16")

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(1, mesh=mesh)
        grads = [[terms[r]] for r in replicas]
        whole = ops.all_reduce(grads, SUM)
        share = ops.reduce_scatter(grads, SUM)
        return [(each[0], part[0]) for each, part in zip(whole, share, strict=True)]

    found = [pair for of_process in run_all(library, places, work) for pair in of_process]
    total = sum_of(terms, SUM)
    for index, (whole, share) in enumerate(found):
        assert (whole == total).all()
        assert (share == total[2 * index : 2 * index + 2]).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_broadcast_writes_no_tensor_of_its_owner(here, library):
    """It is on the second GPU of the process, and read-only."""

    def work(mesh, replicas):
        source = mesh[len(mesh) - 1].upload(np.full(5, replicas[-1], "float32"))
        source.block.writable = False
        copied = gr.NcclAllReduce(mesh=mesh).broadcast(source, mesh)
        return [each.numpy().tolist() for each in copied.buffers]

    assert run_all(library, [[0, 1], [2]], work) == [[[1.0] * 5] * 2, [[1.0] * 5]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_wire_dtype_halves_the_bytes(here, library):
    places = PLACES["uneven"]
    terms = terms_of(places, (100,), "float32")

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(1, mesh=mesh, wire_dtype="bfloat16")
        value = on_devices(mesh, [terms[r] for r in replicas])
        with mesh.journal() as journal:
            mean = ops.reduce(MEAN, value, value)
        assert {record.nbytes for record in journal.of("collective")} == {208}  # with a gap
        return [each.numpy() for each in mean.buffers]

    for means in run_all(library, places, work):
        for each in means:
            assert each.dtype == "float32"
            assert (each == sum_of(terms, MEAN)).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("algorithm", ["nccl", "hierarchical_copy"])
def test_steps_train_as_one_process_does(here, library, shard, algorithm):
    """Gradients are whole numbers for NCCL, so that no order of additions changes their sums."""
    places = PLACES["uneven"]

    def trained(mesh, replicas):
        variables = [gr.Variable(np.ones(n), f"v{n}", dtype="float16", device=mesh)
                     for n in (5, 3000)]  # fmt: skip
        ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
        optimizer = gr.AdamOptimizer(0.1, master_dtype="float32")
        step = gr.SyncStep(variables, optimizer, ops, shard_optimizer=shard)
        random = np.random.default_rng(0)
        for _ in range(3):
            rows = random.standard_normal((number_of(places), 3005)) * 4
            rows = (np.round(rows) if algorithm == "nccl" else rows).astype(np.float16)
            step([[[rows[r, :5]], [rows[r, 5:]]] for r in replicas])
        return [[each.numpy() for each in v.buffers] for v in variables], step.state_dict()

    with gr.open_mesh(number_of(places), backend="sim") as alone:
        wanted, state = trained(alone, range(number_of(places)))
    for variables, saved in run_all(library, places, trained):
        np.testing.assert_equal(saved, state)
        for (first, *_), replicas in zip(wanted, variables, strict=True):
            assert all((each == first).all() for each in replicas)


def test_a_stage_is_packed_while_the_one_before_it_is_added(here, monkeypatch):
    monkeypatch.setattr(pipeline, "STAGE_BYTES", 1)

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(3, mesh=mesh)
        values = [on_devices(mesh, [np.ones(64, np.float32)] * len(mesh)) for _ in range(3)]
        with mesh.journal() as journal:
            ops.batch_reduce(MEAN, [(value, value) for value in values])
        steps = [(each.phase, str(each.label)[:6]) for each in journal.records
                 if each.kind in ("launch", "collective") and each.device == 0]  # fmt: skip
        assert {each.queue for each in journal.of("collective")} == {"transfer"}
        return [*dict.fromkeys(steps)]

    one, two = run_all("ours", [[0], [1, 1]], work)
    begins = [("pack", "pack 1"), ("all-reduce", "pack 1"), ("pack", "pack 2")]
    assert one[:3] == two[:3] == begins


def test_a_plan_counts_the_bytes_of_a_ring(here):
    places, size = PLACES["uneven"], 70_000

    def work(mesh, replicas):
        ops = gr.NcclAllReduce(1, mesh=mesh)
        value = on_devices(mesh, [np.ones(size, np.float32)] * len(mesh))
        plan = ops.plan(SUM, [(value, value)])
        with mesh.journal() as journal:
            ops.batch_reduce(SUM, [(value, value)])
        assert (plan.launches, plan.bytes) == (journal.launches, journal.bytes)
        return plan

    for plan, gpus in zip(run_all("ours", places, work), places, strict=True):
        assert plan.ring_bytes == 2 * 5 * 4 * size // 6  # of six GPUs
        assert plan.sent == {gpu: plan.ring_bytes for gpu in sorted(set(gpus))}
        assert (plan.exchanges, plan.collectives) == (0, len(set(gpus)))
        assert {pack.crossing for pack in plan.packs} == {"collective"}


def test_all_gpus_of_a_process_are_in_one_group(here):
    def work(mesh, replicas):
        ops = gr.NcclAllReduce(4, mesh=mesh)
        values = [on_devices(mesh, [np.ones(64, np.float32)] * len(mesh)) for _ in range(2)]
        before = here.counts.get("groupEnd", 0)
        ops.batch_reduce(SUM, [(value, value) for value in values])
        mesh.synchronize()
        return before

    groups: list[int] = []
    end = nccl.groupEnd

    def counted():
        groups.append(len(nccl._local.asked))
        end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["cupy.cuda.nccl"], "groupEnd", counted)
        run_all("ours", [[0, 1], [2, 3, 4]], work)
    assert sorted(each for each in groups if each > 3) == [8, 12]  # 4 packs on each GPU


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tensor_that_is_not_packed_is_read_where_it_is(here, library):
    def work(mesh, replicas):
        value = on_devices(mesh, [np.full(5, r + 1.0) for r in replicas])
        total = gr.NcclAllReduce(0, mesh=mesh).reduce(SUM, value, value)
        found = [[each.numpy().tolist() for each in of] for of in (value.buffers, total.buffers)]
        return found

    found = run_all(library, [[0], [1, 1], [2, 3]], work)
    inputs = [each for given, _ in found for each in given]
    assert inputs == [[replica + 1.0] * 5 for replica in range(5)]
    assert [each for _, totals in found for each in totals] == [[15.0] * 5] * 5


def end_late(end: Callable[[], None] = nccl.groupEnd) -> None:
    """Ends a group after another thread had time to open one for the same GPU."""
    for _ in range(100 if nccl._local.asked else 0):
        if any(len(threads) > 1 for threads in nccl.library.inside.values()):
            break
        threading.Event().wait(1e-3)
    end()


def test_groups_of_two_meshes_do_not_interleave(here, monkeypatch):
    """Else one GPU may come to the group of one mesh first, another GPU to that of the other."""
    places, post = [[0, 1], [2, 3]], SharedQueues()
    others = [ThreadGroup(post, rank, 2, gpu_library="nccl") for rank in range(2)]

    def reduced(mesh):
        ops, value = gr.NcclAllReduce(mesh=mesh), on_devices(mesh, [np.ones(5, np.float32)] * 2)
        totals = [ops.reduce(SUM, value, value) for _ in range(3)]
        return [each.numpy().tolist() for each in totals[-1].buffers]

    def run(group):
        open_one = partial(gr.open_mesh, places[group.rank], backend="cuda")
        meshes = [open_one(process_group=each) for each in (group, others[group.rank])]
        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(reduced, meshes, timeout=60))
        for mesh in meshes:
            mesh.close()
        return sums

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "groupEnd", end_late)
    assert run_processes(2, run, gpu_library="nccl") == [[[[4.0] * 5] * 2] * 2] * 2


def test_meshes_that_are_opened_in_different_orders_are_named_before_nccl_starts(here):
    """Each process would wait for the other until its timeout."""
    world = distributed.Store()
    stores = [distributed.Store("one", world), distributed.Store("two", world)]

    def work(of_thread):
        rank = of_thread.rank
        groups = [distributed.ProcessGroup("cpu:gloo,cuda:nccl", s, rank, [0, 1]) for s in stores]
        for name, group in enumerate(groups, 1):
            group.group_name = f"{name}"
        mine, *_ = groups if rank == 0 else reversed(groups)
        with pytest.raises(CollectiveError) as caught:
            gr.open_mesh([rank], backend="cuda", process_group=mine, timeout=60)
        return str(caught.value)

    with distributed.installed(), distributed.default_group(world, 2):
        found = run_processes(2, work)
    for rank, said in enumerate(found):
        assert said == (
            f"the processes open meshes in different orders: process {rank} over the group "
            f"'{rank + 1}' of processes 0 1, process {1 - rank} over the group '{2 - rank}' of "
            "processes 0 1"
        )
    assert "init" not in here.counts
