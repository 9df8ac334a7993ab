"""Calls and host waits with a deadline: the named device, and what works after a reset."""

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.exact_data import same
from support.hanging_devices import (
    TEST_TIMEOUT,
    clock,
    late_waits,
    resume,
    stall,
    wait_for_failure,
    watchdogs,
)

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.device.failure import pending_calls
from gradreduce.errors import BackendUnavailableError, CancelledError, CollectiveError
from gradreduce.reduce import profile
from gradreduce.reduce.algorithms import ALGORITHMS

__all__ = ["clock", "late_waits"]
SIZES = (40, 70, 3)
SUM = gr.ReduceOp.SUM
REFUSED = re.escape("; mesh.reset() makes it usable again")


def opened(placement=(0, 0, 1, 2), seed=3, **options) -> Mesh:
    return gr.open_mesh(list(placement), backend="sim", strict=True, schedule_seed=seed, **options)


@pytest.fixture
def mesh():
    with opened() as made:
        yield made


def gradients(mesh: Mesh) -> list[list[np.ndarray]]:
    return [
        [mesh.devices[replica].upload(np.full(size, replica + 1, np.float32)) for size in SIZES]
        for replica in range(len(mesh))
    ]


def reduce_all(mesh: Mesh, ops=None, **options) -> list[list]:
    ops = ops or gr.AllReduceCrossDeviceOps("hierarchical_copy", 2, mesh=mesh)
    return ops.all_reduce(gradients(mesh), gr.ReduceOp.SUM, **options)


def is_right(results) -> bool:
    total = sum(range(1, len(results) + 1))
    return all(
        same(buffer.numpy(), np.full(size, total, np.float32))
        for row in results
        for size, buffer in zip(SIZES, row, strict=True)
    )


STUCK = (
    "the deadline of 30 s for batch_reduce passed: sim:2 has not joined packs 1 to 2 of 2 (tensors "
    "0 to 2)"
)


@pytest.mark.repo
def test_the_documentation_quotes_the_message():
    page = Path(__file__).parents[2] / "docs" / "debugging.md"
    assert f"> {STUCK}\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stuck_device_is_named_with_its_pack_and_tensors(clock, algorithm, peers, seed):
    """The call does not block; waits for its result raise; after a reset it works again."""
    with opened(seed=seed, peer_access=peers) as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
        stall(mesh.devices[2])
        results = reduce_all(mesh, ops, deadline=30)
        assert mesh.mesh_state.reason is None
        clock.advance(30)
        words = re.escape(STUCK)
        with pytest.raises(CollectiveError, match=words):
            results[3][0].numpy()
        for use in (
            results[0][0].numpy,
            lambda: mesh.devices[0].zeros((2,), "float32"),
            lambda: reduce_all(mesh),
            mesh.synchronize,
            mesh.trim,
            lambda: gr.Variable(np.zeros(2, np.float32), device=mesh),
        ):
            with pytest.raises(CollectiveError, match=words + ".*" + REFUSED):
                use()
        mesh[0:2].reset(timeout=TEST_TIMEOUT)
        assert is_right(reduce_all(mesh, ops, deadline=TEST_TIMEOUT))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_pack_at_which_a_device_hangs_is_named(clock, monkeypatch, algorithm):
    """A device that hangs at any point is named as late; over the cases it hangs in every pack."""
    monkeypatch.setattr("gradreduce.reduce.pipeline.STAGE_BYTES", 1)
    packs: set[str] = set()
    for after in range(0, 21, 2):
        with opened([0, 1, 2, 3], seed=0) as mesh:
            grads = gradients(mesh)
            mesh.synchronize()
            stall(mesh.devices[3], after=after)
            ops = gr.AllReduceCrossDeviceOps(algorithm, 3, mesh=mesh)
            ops.all_reduce(grads, deadline=5)
            clock.advance(6)
            words = r"sim:3 has not joined (.*): ear|all devices have joined (.*), but .*sim:3 ha"
            found = re.search(words, wait_for_failure(mesh))
            assert found, mesh.mesh_state.reason
            packs.add(found[1] or found[2])
    tensors = ("1 of 3 (tensor 0)", "2 of 3 (tensors 0 to 1)", "3 of 3 (tensors 1 to 2)")
    assert packs - {"batch_reduce"} == {f"pack {each}" for each in tensors}


def test_devices_that_joined_but_did_not_finish_are_named_separately(mesh, clock, monkeypatch):
    """Device 3 hangs inside the pack, which every queue has joined."""
    ops = gr.NcclAllReduce(1, mesh=mesh)
    add = type(mesh.collective).all_reduce

    def hang(collective, buffers, **options):
        mesh.synchronize()
        add(collective, buffers, **options)
        stall(mesh.devices[3])

    monkeypatch.setattr(type(mesh.collective), "all_reduce", hang)
    reduce_all(mesh, ops, deadline=30)
    clock.advance(31)
    assert "all devices have joined pack 1 of 1 (tensors 0 to 2), but sim:3 has not finished" in (
        wait_for_failure(mesh)
    )


def test_a_call_queued_behind_another_names_the_earlier_one(mesh, clock):
    stall(mesh.devices[3])
    for deadline in (100, 5):
        reduce_all(mesh, deadline=deadline)
    clock.advance(6)
    words = "; before it, in batch_reduce: sim:3 has not joined packs 1 to 2 of 2 (tensors 0 to 2)"
    assert words in wait_for_failure(mesh)


def calls_of(mesh: Mesh) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """Every call with a deadline: those that only queue work, and those that wait on the host."""
    rows = [[device.upload(np.ones(4, np.float32))] for device in mesh]
    value = gr.PerReplica([row[0] for row in rows], mesh)
    pairs, hosts = [(value, value)], [[[np.ones(4, np.float32)]]] * len(mesh)
    ops, device = gr.HierarchicalCopyAllReduce(mesh=mesh), mesh.devices[2]
    variable = gr.Variable(np.zeros(4, np.float32), "w", device=mesh)
    away = gr.Variable(np.zeros(4, np.float32), device=mesh[[2, 3]])
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    optimizer.cross_device_ops = ops
    flat = mesh.flat_buffer([(4,)], "float32")
    flat.arrays("numpy")
    taken = gr.ConditionalAccumulator("float32", device=mesh, name="w")
    stored = gr.ConditionalAccumulator("float32", device=device)
    for accumulator in (taken, stored):
        accumulator.apply_grad(np.ones(3, np.float32))
    queued = {
        "reduce": partial(ops.reduce, SUM, value, value),
        "batch_reduce": partial(ops.batch_reduce, SUM, pairs),
        "to one": partial(gr.ReductionToOneDevice().batch_reduce, SUM, [(value, device)]),
        "broadcast": partial(ops.broadcast, rows[0][0], mesh),
        "ops.all_reduce": partial(ops.all_reduce, rows),
        "gr.all_reduce": partial(gr.all_reduce, rows, mesh=mesh),
        "prepare": partial(ops.prepare, SUM, pairs),
        "capture": partial(ops.capture, SUM, pairs),
        "a prepared step": ops.prepare(SUM, pairs),
        "a SyncStep": partial(gr.SyncStep([variable], optimizer, ops), hosts),
        "apply_gradients": partial(optimizer.apply_gradients, [(value, variable)]),
        "take_grad": partial(taken.take_grad, 1),
        "take_grads": partial(gr.take_grads, [taken], 1),
    }
    return queued, {
        "profile": partial(ops.profile, SUM, pairs),
        "state_dict": stored.state_dict,
        "Variable.numpy": away.numpy,
        "FlatBuffer.zero": flat.zero,
        "FlatBuffer.release": flat.release,
        "Buffer.numpy": rows[2][0].numpy,
        "download": partial(device.download, rows[2][0]),
        "Device.synchronize": device.synchronize,
        "Mesh.synchronize": mesh.synchronize,
    }


NAMED = ("a SyncStep", "apply_gradients", "take_grad", "take_grads")


@pytest.mark.parametrize("waits", [False, True], ids=["only queues", "waits"])
def test_every_call_takes_a_deadline(late_waits, clock, monkeypatch, waits):
    """It names the device and the tensor, and works again after a reset."""
    monkeypatch.setattr(profile, "HOST_BYTES", 1 << 20)  # which otherwise copies 64 MB
    with opened() as mesh:
        names = list(calls_of(mesh)[waits])
    for name in names:
        said = rf"joined .*tensor {'w' if name in NAMED else 0}\b"
        if waits:
            said = r"(finished its queues; the first .* is fill, #\d+$|joined )"
        with opened() as mesh:
            call = calls_of(mesh)[waits][name]
            mesh.synchronize()
            stall(mesh.devices[2])
            mesh.devices[2].zeros((4,), "float32")
            with pytest.raises(CollectiveError) if waits else nullcontext():
                call(deadline=5)
            clock.advance(6)
            reason = wait_for_failure(mesh)
            assert re.search(f"passed: sim:2 has not {said}", reason), (name, reason)
            mesh.reset(timeout=TEST_TIMEOUT)
            if "take" not in name:  # the accumulators are empty
                call(deadline=TEST_TIMEOUT)
            mesh.synchronize(deadline=TEST_TIMEOUT)


def minimizers(mesh: Mesh) -> tuple[gr.Variable, list[gr.Optimizer]]:
    """A Variable of AGN, and optimizers that can minimize a loss of it."""
    getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
    variable = gr.get_variable("w", np.zeros(4, np.float32), custom_getter=getter)
    optimizer = gr.GradientDescentOptimizer(1.0)
    return variable, [optimizer, gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 1, getter)]


@pytest.mark.parametrize("deadline", [True, 0, -1.0, float("nan"), "5", 1j])
def test_a_deadline_is_a_number_above_zero(mesh, deadline):
    queued, waits = calls_of(mesh)
    loss = [].pop  # would raise, if it were called
    calls = [*queued.values(), *waits.values()]
    calls += [partial(each.minimize, loss) for each in minimizers(mesh)[1]]
    with mesh.journal() as journal:
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(f"deadline={deadline!r} must be")):
                call(deadline=deadline)
        with pytest.raises(ValueError, match=re.escape(f"timeout={deadline!r} must be")):
            mesh.reset(timeout=deadline)
    assert journal.records == []
    assert mesh.mesh_state.watchdog is None


def test_minimize_has_its_update_done_by_one(mesh, monkeypatch):
    """Every optimizer's ``minimize`` passes the deadline to its own update."""
    variable, optimizers = minimizers(mesh)
    for optimizer in optimizers:
        given = []
        monkeypatch.setattr(
            optimizer, "apply_gradients", lambda *_, into=given, **more: into.append(more)
        )
        optimizer.minimize(lambda: np.sum(variable), deadline=30)
        assert [each["deadline"] for each in given] == [30]


@pytest.mark.parametrize(
    ("form", "name"), [("prepare", "a prepared step"), ("capture", "a captured step")]
)
def test_a_recorded_step_names_its_packs_and_works_again_after_a_reset(
    mesh, clock, monkeypatch, form, name
):
    monkeypatch.setattr("gradreduce.reduce.pipeline.STAGE_BYTES", 1)
    values = [gr.PerReplica(list(column), mesh) for column in zip(*gradients(mesh), strict=True)]
    pairs = [(values[0], values[0]), (values[1], mesh.devices[0]), (values[2], values[2])]
    step = getattr(gr.HierarchicalCopyAllReduce(3, mesh=mesh), form)(gr.ReduceOp.SUM, pairs)
    tensors = "pack 1 of 3 (tensor 0)"
    step()
    if form == "capture":  # one operation with all packs
        tensors += ", pack 2 of 3 (tensor 0), pack 3 of 3 (tensors 0, 2), tensor 1"
        entry = mesh.flight_record()[-1]
        assert (entry.kind, entry.name, entry.tensors) == ("launch", "captured step", tensors)
    mesh.synchronize()
    stall(mesh.devices[2])
    step(deadline=5)
    clock.advance(6)
    reason = wait_for_failure(mesh)
    assert f"of 5 s for {name} passed: sim:2 has not joined {tensors}:" in reason
    with pytest.raises(CollectiveError, match=REFUSED):
        step()
    mesh.reset(timeout=TEST_TIMEOUT)
    first, *_ = step(deadline=TEST_TIMEOUT)
    assert same(first.buffers[2].numpy(), np.full(SIZES[0], 10, np.float32))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def test_takes_that_wait_are_cancelled_and_accumulators_are_empty_after_a_reset(
    pool, mesh, clock, caplog
):
    ones = gr.PerReplica([np.ones(5, np.float32)] * 4, mesh)
    first, second = (gr.ConditionalAccumulator("float32", device=mesh) for _ in range(2))
    alone = gr.ConditionalAccumulator("float32", device=mesh.devices[1])
    for accumulator in (first, alone):
        accumulator.set_global_step(7)
    first.apply_grad(ones, 7)
    consumers = [
        pool.submit(gr.take_grads, [first, second], 4),
        pool.submit(alone.take_grad, 2, deadline=1),
    ]
    while not (alone.accumulator_ref.queue and second.accumulator_ref.queue):
        assert not any(consumer.done() for consumer in consumers)
    clock.advance(1000)  # a take that waits for gradients has no deadline yet
    stall(mesh.devices[2])
    reduce_all(mesh, deadline=5)
    clock.advance(6)
    wait_for_failure(mesh)
    words = "^TakeGrad operation was cancelled: the mesh has failed: the deadline of 5 s for batch"
    for consumer in consumers:
        with pytest.raises(CancelledError, match=words) as caught:
            consumer.result(TEST_TIMEOUT)
        assert "sim:2 has not joined packs 1 to 2 of 2" in str(caught.value)
    for call in (lambda: first.take_grad(1), lambda: first.apply_grad(ones, 7)):
        with pytest.raises(CollectiveError, match=REFUSED):
            call()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert "at step 7 discarded 4 gradients" in caplog.text
    assert [each.num_accumulated() for each in (first, second, alone)] == [0, 0, 0]
    assert (first.global_step, alone.global_step) == (7, 7)
    ones = gr.PerReplica([np.ones(5, np.float32)] * 4, mesh)  # the reset may have dropped uploads
    assert first.apply_grad(ones, 7)
    assert same(first.take_grad(4, output_type="buffer").values[3].numpy(), np.ones(5, np.float32))


def test_the_deadline_of_a_take_starts_when_its_gradients_are_complete(pool, mesh, clock):
    accumulator = gr.ConditionalAccumulator("float32", device=mesh)
    stall(mesh.devices[2])
    take = pool.submit(lambda: accumulator.take_grad(4, deadline=5, output_type="numpy").values)
    while not accumulator.accumulator_ref.queue:
        assert not take.done()
    clock.advance(100)
    accumulator.apply_grad(gr.PerReplica([np.ones(5, np.float32)] * 4, mesh))
    assert mesh.mesh_state.reason is None
    clock.advance(5)
    assert re.search(r"for take_grad passed: sim:2 has not joined pack 1", wait_for_failure(mesh))
    assert isinstance(take.exception(TEST_TIMEOUT), CollectiveError)


def test_a_wait_without_a_deadline_ends_with_the_mesh(pool, mesh, clock):
    buffers = gradients(mesh)
    stall(mesh.devices[1])
    wait = pool.submit(buffers[1][0].numpy)
    reduce_all(mesh, deadline=5)
    clock.advance(6)
    assert isinstance(wait.exception(TEST_TIMEOUT), CollectiveError)


def test_a_queue_that_resumes_in_time_does_not_fail_the_mesh(pool, mesh, clock):
    stall(mesh.devices[1])
    wait = pool.submit(is_right, reduce_all(mesh, deadline=5))
    resume(mesh.devices[1])
    assert wait.result(TEST_TIMEOUT)
    clock.advance(6)
    mesh.synchronize()
    assert mesh.mesh_state.reason is None


def test_a_device_that_fails_during_a_call_is_named(mesh, clock):
    stall(mesh.devices[3])
    reduce_all(mesh, gr.NcclAllReduce(1, mesh=mesh), deadline=1000)
    mesh.devices[3].mark_failed("it fell off the bus")
    reason = wait_for_failure(mesh)
    assert "sim:3 failed (it fell off the bus) during batch_reduce: sim:3 has not joined" in reason
    mesh.reset(timeout=TEST_TIMEOUT)
    with pytest.raises(BackendUnavailableError, match="it fell off the bus"):
        mesh.devices[3].synchronize()
    assert is_right(reduce_all(mesh[0:3]))


def test_the_flight_record_is_written_when_a_deadline_passes(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    with opened() as mesh:
        stall(mesh.devices[2])
        reduce_all(mesh, deadline=5)
        assert list(tmp_path.iterdir()) == []
        clock.advance(6)
        reason = wait_for_failure(mesh)
        (path,) = tmp_path.iterdir()
        assert re.fullmatch(rf"flight\.{os.getpid()}-\d+\.json", path.name)
        written = json.loads(path.read_text())
        assert written["reason"] == reason
        assert written["mesh"].startswith("sim, process ")
        stuck = [each for each in written["entries"] if each["device"] == 2]
        assert "packs 1 to 2 of 2 (tensors 0 to 2)" in {each["tensors"] for each in stuck}
        assert not any(each["done"] for each in stuck if each["queue"] == "compute")
        assert [path] == list(tmp_path.iterdir())


def test_without_a_deadline_no_mark_is_made_and_no_thread_runs(mesh, monkeypatch):
    """With a deadline the log is the same, and one watchdog thread runs."""
    before = set(watchdogs())  # of meshes before it, which may be ending
    made: list[int] = []
    monkeypatch.setattr(
        pending_calls.PendingCall, "mark_queues", lambda self, *a, **b: made.append(1)
    )
    with mesh.journal() as plain:
        reduce_all(mesh)
    assert (made, set(watchdogs()) - before) == ([], set())
    monkeypatch.undo()
    with mesh.journal() as watched:
        reduce_all(mesh, deadline=TEST_TIMEOUT)
    assert watched.records == plain.records
    assert len(set(watchdogs()) - before) == 1


@pytest.mark.usefixtures("late_waits")
@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("wait", ["_download", "_synchronize"])
def test_a_wait_that_an_abort_ends_raises(mesh, monkeypatch, wait, is_reset):
    """After an abort of a collective its queue continues, and the wait itself succeeds."""
    device = mesh.devices[0]
    buffer = device.zeros((4,), "float32")
    succeeds = getattr(device, wait)

    def aborted(*arguments):
        mesh.mesh_state.fail("aborted")
        if is_reset:
            mesh.reset(timeout=TEST_TIMEOUT)
        return succeeds(*arguments)

    monkeypatch.setattr(device, wait, aborted)
    with pytest.raises(CollectiveError):
        device.synchronize() if wait == "_synchronize" else buffer.numpy()


HOW = {
    "reduce": lambda ops, pairs: lambda: ops.batch_reduce(SUM, pairs),
    "prepare": lambda ops, pairs: ops.prepare(SUM, pairs),
    "capture": lambda ops, pairs: ops.capture(SUM, pairs),
}


@pytest.mark.usefixtures("late_waits")
@pytest.mark.parametrize(
    ("algorithm", "how"),
    [("nccl", "reduce"), ("nccl", "prepare"), *(("hierarchical_copy", how) for how in HOW)],
)
def test_a_host_wait_names_the_device_that_others_wait_for(algorithm, how):
    """The host waits for device 0, which waits for device 3, which hangs."""
    for seed in (0, 1):
        with opened([0, 1, 2, 3], seed) as mesh:
            ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
            terms = [device.upload(np.ones(70, np.float32)) for device in mesh]
            value = gr.PerReplica(terms, mesh)
            step = HOW[how](ops, [(value, value)])
            mesh.synchronize()
            stall(mesh.devices[3])
            results = step()
            waits = (mesh.synchronize, results[0].buffers[0].numpy)
            words = r"passed: sim:3 has not finished its queues.* packs 1 to 2 of 2 "
            with pytest.raises(CollectiveError, match=words + r"\(tensor 0\), #\d+;"):
                waits[seed](deadline=5)


def test_all_devices_that_may_be_stuck_are_named(mesh, late_waits):
    for device in mesh.devices[1:3]:
        device.zeros((4,), "float32")
        stall(device)
        device.zeros((4,), "float32")
    words = "sim:1, sim:2 have not finished their queues; the first .* fill on sim:1, #1"
    with pytest.raises(CollectiveError, match=words):
        mesh.synchronize(deadline=5)
