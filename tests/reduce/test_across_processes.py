"""Sums over the replicas of several processes, which are threads in these tests."""

import json
import re
import threading
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
from comm.processes.test_values import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.exact_data import same
from support.exhaustive import examples
from support.hanging_devices import clock
from support.process_cases import LAYOUTS, WAYS, check, counts_of, results_of
from support.thread_group import run_processes, run_replicas

import gradreduce as gr
from gradreduce.backends.sim.device import SimDevice
from gradreduce.reduce import pipeline
from gradreduce.reduce.across_processes import Term, plan_terms

__all__ = ["clock"]

NO_TORCH = [way for way in WAYS if way != "attached"]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@settings(max_examples=examples(80), deadline=None, phases=[Phase.generate])  # others may wait
@given(st.data())
def test_several_processes_give_the_bits_of_one(data):
    """Calls of every kind, as in comm/processes/test_values.py, where the processes are real."""
    size = data.draw(st.integers(2, 4))
    case = data.draw(cases(size))
    groups = data.draw(st.sampled_from([case["groups"], None, "processes", "nccl", "exact"]))
    case |= {"way": data.draw(st.sampled_from(NO_TORCH)), "groups": groups}
    counts, (_, seed) = counts_of(case["layout"], size), LAYOUTS[case["layout"]]

    def work(mesh, replicas):
        assert mesh.num_replicas == sum(counts)
        return results_of(case, mesh, size)

    with pytest.MonkeyPatch.context() as patch:
        (wanted,) = run_replicas([sum(counts)], work)
        patch.setattr(pipeline, "STAGE_BYTES", data.draw(st.sampled_from([1024, 1 << 23])))
        check(case, wanted, list(chain(*run_replicas(counts, work, schedule_seed=seed))))


def test_only_replicas_at_the_start_of_a_group_are_added_before_they_are_sent():
    assert plan_terms((2, 2), ((0, 1, 2), (3,))) == [
        [Term(0, (0, 1)), Term(1, (0,))],
        [Term(1, (1,))],
    ]
    assert plan_terms((1, 3), ((0, 1, 2, 3), ())) == [
        [Term(0, (0,)), Term(1, (0,)), Term(1, (1,)), Term(1, (2,))]
    ]


def rows_on(mesh, num_rows):
    rows = gr.IndexedSlices(np.ones((num_rows, 3)), np.arange(num_rows))
    return gr.PerReplica([rows] * len(mesh), mesh)


@pytest.mark.parametrize("groups", [None, "processes"])
def test_plan_and_profile_show_what_crosses(groups):
    def work(group):
        mesh, ops = mesh_and_ops(group, 1 + group.rank, reduction_groups=groups)
        dense = gr.PerReplica([np.ones(40000, np.float32)] * len(mesh), mesh)
        rows = rows_on(mesh, 2 + group.rank)  # a plan does not know the rows of other processes
        pairs = [(rows, rows), (dense, mesh[-1]), (dense, dense)]
        plan = ops.plan(gr.ReduceOp.SUM, pairs)
        found = ops.batch_reduce(gr.ReduceOp.SUM, pairs)
        assert [len(each.devices) for each in found] == [len(mesh), 1, len(mesh)]
        assert all((each.values[0] == 6).all() for each in found[1:])
        sent = sum(group.sent.values())
        pairs[0] = (rows_on(mesh, 2),) * 2
        profile = ops.profile(gr.ReduceOp.SUM, pairs, coalesce=True)
        mesh.close()
        return plan, sent, profile

    for plan, sent, profile in run_processes(3, work):
        assert plan.exchange_bytes == sent
        assert f"{plan.exchanges} exchanges of {sent:,} bytes" in str(plan)
        crossings = {pack.tensors: pack.crossing for pack in plan.packs}
        assert crossings == {(0,): "rows", (1, 2): "exchange"}
        assert str(plan).count("whose rows are assumed to be as many") == 1
        assert "the journal counted what was planned" in str(profile)


def test_groups_of_processes_send_the_bytes_of_a_ring():
    random = np.random.default_rng(5)
    grads = [[random.standard_normal(30000).astype(np.float32)] for _ in range(6)]

    def work(group):
        mesh, ops = mesh_and_ops(group, 2, reduction_groups="processes")
        with mesh.journal() as journal:
            found = ops.all_reduce(grads[:2], gr.ReduceOp.SUM)[1][0]
        mesh.close()
        return found.tolist(), sum(group.sent.values()), len(journal.of("exchange"))

    def alone(groups, num_devices=6):
        mesh = gr.open_mesh(num_devices, backend="sim", processes="none")
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh, reduction_groups=groups)
        return ops.all_reduce((grads[:2] * 3)[:num_devices], gr.ReduceOp.SUM)[0][0].tolist()

    for found, sent, num_exchanges in run_processes(3, work):
        assert found == alone([[0, 1], [2, 3], [4, 5]])
        assert abs(sent - 2 * 2 / 3 * 120000) <= 4 * 16
        assert num_exchanges == 2
    assert alone("processes", 5) == alone([range(5)], 5)


def test_tensors_are_broadcast_in_packs_of_a_dtype(monkeypatch):
    """Of 40 bytes here. Tensors on other devices are in them too. No tensor is written."""
    monkeypatch.setattr("gradreduce.reduce.process_values._PACK_BYTES", 40)
    shapes = [(3,), (5,), (2, 2), (), (40,), (0,), (4,), (3,)]
    dtypes = ["f4", "f2", "f4", "f4", "f4", "f4", "f4", "c8"]

    def work(group):
        with gr.open_mesh(2, backend="sim", process_group=group) as mesh:
            values = [
                np.full(shape, 10 * group.rank + index).astype(dtype)
                for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
            ]
            tensors = [mesh[n * group.rank % 2].upload(each) for n, each in enumerate(values)]
            for tensor in tensors:
                tensor.block.writable = False
            with mesh.journal() as journal:
                found = gr.HierarchicalCopyAllReduce(mesh=mesh).broadcast(tensors, mesh, process=1)
            copies = [[each.numpy() for each in of_tensor.buffers] for of_tensor in found]
            return len(journal.of("exchange")), copies

    for num_exchanges, found in run_processes(3, work):
        assert num_exchanges == 5  # float32: 3 packs, of which one is the large tensor
        for index, (copies, shape, dtype) in enumerate(zip(found, shapes, dtypes, strict=True)):
            assert all(same(copy, np.full(shape, 10 + index, dtype)) for copy in copies)


def test_calls_that_were_forgotten_are_compared_again(monkeypatch):
    monkeypatch.setattr("gradreduce.comm.process_group.KNOWN_CALLS", 3)
    sizes = [*range(1, 9), 8, 7, 1, 2, 8]

    def work(group):
        mesh, ops = mesh_and_ops(group)
        for size in sizes:
            if size % 3 == group.rank:  # this process forgets its calls, the others do not
                group._known.clear()
            (found,) = ops.all_reduce([[np.ones(size)]], gr.ReduceOp.SUM)
            assert found[0].tolist() == [3.0] * size
        keys = {key for _, key in group._post.notices}
        assert sum(key.startswith("description/") for key in keys) == 3
        size = 8 if group.rank == 1 else 5  # only the call of size 8 is still known
        errors = (ValueError, gr.errors.CollectiveError)
        with pytest.raises(errors, match=r"is float64\[.\] in process ., float64\[.\] in process"):
            ops.all_reduce([[np.ones(size)]], gr.ReduceOp.SUM, deadline=0.5)
        mesh.close()

    run_processes(3, work)


def test_a_process_without_the_call_is_named_with_the_tensors():
    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        grads = [[np.ones(3, np.float32), np.ones(4, np.float32)]]
        for _ in range(2 + (group.rank == 0)):
            try:
                ops.all_reduce(grads, gr.ReduceOp.SUM, deadline=0.5)
            except gr.errors.CollectiveError as error:
                return str(error)
        mesh.close()
        return ""

    text, _ = run_processes(2, work)
    assert text.startswith("pack 1 of 1 (tensors 0 to 1): process 1: closed its mesh after 2 calls")


def test_the_flight_record_has_the_calls_of_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))

    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        for size in (3, 3, 4 + group.rank):
            try:
                ops.all_reduce([[np.ones((size, 2), np.float32)]], gr.ReduceOp.SUM)
            except ValueError:
                break
        mesh.close()

    run_processes(2, work)
    for rank in range(2):
        (path,) = tmp_path.glob(f"flight.*.rank{rank}.json")
        record = json.loads(path.read_text())
        assert (record["process"], record["num_processes"]) == (rank, 2)
        assert [
            (call["number"], *record["descriptions"][call["digest"]]["tensors"], call["done"])
            for call in record["calls"]
        ] == [
            (0, "float32[3, 2]", True),
            (1, "float32[3, 2]", True),
            (2, f"float32[{4 + rank}, 2]", False),
        ]


def test_what_works_in_one_process_only_raises():
    only = r" works inside one process only.* use SyncStep.* gradreduce\.ray"
    shared = r"^shared_name='w' works .* gradreduce\.ray"

    def work(group):
        mesh = gr.open_mesh(2, backend="sim", process_group=group)
        value = gr.PerReplica([np.ones(3)] * 2, mesh)
        part = gr.PerReplica([np.ones(3)], mesh[0:1])
        variable = gr.Variable(np.zeros(3), device=mesh)
        to_one, adam = gr.ReductionToOneDevice(), gr.AdamOptimizer(0.1)
        for error, text, call in (
            (RuntimeError, f"ReductionToOneDevice{only}",
             lambda: to_one.reduce(gr.ReduceOp.SUM, value, value)),
            (RuntimeError, f"ReductionToOneDevice{only}",
             lambda: gr.SyncStep([variable], adam, to_one)),
            (RuntimeError, f"AGNCenter{only}", lambda: gr.AGNCenter(mesh)),
            (RuntimeError, r"a captured step works inside .*: use prepare",
             lambda: gr.HierarchicalCopyAllReduce().capture(gr.ReduceOp.SUM, [(value, value)])),
            (ValueError, "pass one replica for each of the 2 devices",
             lambda: gr.AllReduceCrossDeviceOps().reduce(gr.ReduceOp.SUM, part, part)),
        ):  # fmt: skip
            with pytest.raises(error, match=text):
                call()
        for kind in (gr.ConditionalAccumulator, gr.SparseConditionalAccumulator):
            with pytest.raises(RuntimeError, match=f"ConditionalAccumulator over a mesh{only}"):
                kind(np.float32, device=mesh)
            with pytest.raises(RuntimeError, match=shared):
                kind(np.float32, shared_name="w", device=mesh[0])
            kind(np.float32, device=mesh[0]).close()
        mesh.close()

    run_processes(2, work)


def mesh_and_ops(group, num_devices=1, **options):
    mesh = gr.open_mesh(num_devices, backend="sim", process_group=group)
    return mesh, gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, **options)


@pytest.mark.parametrize("num_packs", [0, 1])
def test_arrays_of_another_axis_order_are_summed_by_index(num_packs):
    def work(group):
        mesh, ops = mesh_and_ops(group, num_packs=num_packs)
        array = np.array([[1.0, 2.0], [3.0, 4.0]], order="CF"[group.rank])
        (found,) = ops.all_reduce([[array]], gr.ReduceOp.SUM)
        (copied,) = ops.broadcast(array, mesh, process=1).values
        ops.all_reduce([[array]], gr.ReduceOp.SUM, out=[[array]])
        mesh.close()
        return found[0], copied, array

    for found, copied, array in run_processes(2, work):
        assert found.tolist() == array.tolist() == [[2, 4], [6, 8]]
        assert copied.tolist() == [[1, 2], [3, 4]]


def test_a_prepared_step_waits_for_its_own_deadline_only(clock):
    def work(group):
        mesh, ops = mesh_and_ops(group)
        value = gr.PerReplica([np.ones(4, np.float32)], mesh)
        step = ops.prepare(gr.ReduceOp.SUM, [(value, value)])
        if group.rank == 0:
            exchange, waits = group.exchange, []
            group.exchange = lambda *call: (waits.append(call[-1]), exchange(*call))
            with pytest.raises(gr.errors.CollectiveError, match="process 1"):
                step(deadline=0.05)
            assert waits == [pytest.approx(0.05)]  # the clock stands still
            with pytest.raises(gr.errors.CollectiveError, match="cannot be reset: end the process"):
                mesh.reset()
        mesh.close()

    run_processes(2, work, timeout=1.0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_prepared_steps_share_temporary_memory_and_move_nothing(num_devices, exact, monkeypatch):
    allocated = []
    allocate = SimDevice._allocate
    monkeypatch.setattr(
        SimDevice,
        "_allocate",
        lambda device, nbytes: (allocated.append(device.mesh), allocate(device, nbytes))[1],
    )

    def work(group):
        mesh, ops = mesh_and_ops(group, num_devices, exact=exact)
        flat_buffers = [mesh.flat_buffer([(size,)], "float32") for size in (40_000, 30_000)]
        counts = [allocated.count(mesh)]
        names = {"exact_sum"} if exact else {"all_sum"}
        if num_devices > 1 and not exact:
            names.add("add_n")  # of this process's replicas
        steps = []
        for flat in flat_buffers:
            steps.append(flat.prepare_all_reduce(gr.ReduceOp.SUM, cross_device_ops=ops))
            counts.append(allocated.count(mesh))
        assert counts[0] < counts[1] == counts[2]
        with mesh.journal() as journal:
            for value, (flat, step) in enumerate(zip(flat_buffers, steps, strict=True)):
                for (array,) in flat.arrays("numpy"):
                    array[:] = np.arange(array.size) % (3 + value) + group.rank
                step()
        assert {record.name for record in journal.of("launch")} == names
        found = [array.copy() for flat in flat_buffers for (array,) in flat.arrays("numpy")]
        mesh.close()
        return found

    for found in run_processes(2, work):
        for index, array in enumerate(found):
            wanted = np.arange(array.size) % (3 + index // num_devices)
            assert (array == num_devices * (2 * wanted + 1)).all()


def test_a_process_that_hangs_in_its_call_is_named_when_the_deadline_passes():
    raised = threading.Event()

    def work(group):
        mesh, ops = mesh_and_ops(group)
        if group.rank == 1:
            group.exchange = lambda *_: raised.wait(10)
            ops.all_reduce([[np.ones(3)]], gr.ReduceOp.SUM)
        else:
            with pytest.raises(gr.errors.CollectiveError) as found:
                ops.all_reduce([[np.ones(3)]], gr.ReduceOp.SUM, deadline=0.2)
            raised.set()
            text = r"pack 1 of 1 \(tensor 0\): process 1 of 2 did not answer within 0\.[12]\d* s"
            assert re.fullmatch(text, str(found.value))
            with pytest.raises(gr.errors.CollectiveError, match=text):  # as other threads' calls
                ops.all_reduce([[np.ones(3)]], gr.ReduceOp.SUM)
        with suppress(gr.errors.CollectiveError):
            mesh.close()

    run_processes(2, work)


def test_leaving_by_an_error_waits_for_nobody_and_is_seen_at_once():
    def work(group):
        error = ValueError if group.rank == 1 else gr.errors.CollectiveError
        with pytest.raises(error) as found, mesh_and_ops(group)[0] as mesh:
            if group.rank == 1:
                raise ValueError("of the user")
            gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh).all_reduce([[np.ones(3)]])
        return str(found.value)

    first, _ = run_processes(2, work, timeout=60.0)
    assert first == (
        "process 1 of 2 has not come to call 0 (reduction, tensors: float64[3]): process 1: left "
        "its mesh by ValueError('of the user')"
    )
