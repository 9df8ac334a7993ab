"""Calls with a deadline: the named device, calls that do not block, and failed meshes."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.exact_data import same
from support.hanging_devices import TEST_TIMEOUT, clock, resume, stall, wait_for_failure, watchdogs

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.device.failure import pending_calls
from gradreduce.errors import BackendUnavailableError, CancelledError, CollectiveError
from gradreduce.reduce.algorithms import ALGORITHMS

__all__ = ["clock"]
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


def test_a_call_that_finishes_in_time_does_not_fail_the_mesh(mesh, clock):
    results = reduce_all(mesh, deadline=30)
    clock.advance(31)  # nothing has run yet: queued work runs only during a wait
    assert is_right(results)
    mesh.synchronize(deadline=TEST_TIMEOUT)
    assert mesh.mesh_state.reason is None


def trained(mesh, ops, value) -> None:
    variable = gr.Variable(np.zeros(SIZES[1], np.float32), "w", device=mesh)
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    optimizer.cross_device_ops = ops
    optimizer.apply_gradients([(value, variable)], deadline=9)


OTHERS = {
    "prepare": lambda mesh, ops, value: ops.prepare(SUM, [(value, value)], deadline=9),
    "capture": lambda mesh, ops, value: ops.capture(SUM, [(value, value)], deadline=9),
    "apply_gradients": trained,
    "reduce": lambda mesh, ops, value: ops.reduce(SUM, value, value, deadline=9),
    "to one": lambda mesh, ops, value: gr.ReductionToOneDevice().batch_reduce(
        SUM, [(value, mesh.devices[2])], deadline=9
    ),
    "broadcast": lambda mesh, ops, value: ops.broadcast(value.buffers[0], mesh, deadline=9),
}


@pytest.mark.parametrize("call", OTHERS)
def test_every_call_across_devices_takes_a_deadline(mesh, clock, call):
    value = gr.PerReplica([row[1] for row in gradients(mesh)], mesh)
    stall(mesh.devices[2])
    OTHERS[call](mesh, gr.HierarchicalCopyAllReduce(mesh=mesh), value)
    clock.advance(10)
    name = "w" if call == "apply_gradients" else "0"
    words = rf"of 9 s for \w+ passed: sim:2 has not joined .*tensor {name}\b"
    assert re.search(words, wait_for_failure(mesh))


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


def test_a_step_of_training_takes_a_deadline(mesh, clock):
    variable = gr.Variable(np.zeros(4, np.float32), "w", device=mesh)
    step = gr.SyncStep([variable], gr.MomentumOptimizer(1.0, 0.5), gr.NcclAllReduce(mesh=mesh))
    terms = [[[np.ones(4, np.float32)]]] * 4
    assert step(terms, deadline=TEST_TIMEOUT)
    mesh.synchronize()
    stall(mesh.devices[3])
    step(terms, deadline=5)
    clock.advance(6)
    assert "for a SyncStep passed: sim:3 has not joined pack 1 of 1 (tensor w)" in wait_for_failure(
        mesh
    )
    mesh.reset(timeout=TEST_TIMEOUT)
    assert step(terms, deadline=TEST_TIMEOUT)
    mesh.synchronize(deadline=TEST_TIMEOUT)


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
