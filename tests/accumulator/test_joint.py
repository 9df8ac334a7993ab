"""Several accumulators in one call: all or none, one launch, and no deadlock."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from exact import exact_data, same

import gradreduce as gr
from gradreduce.accumulator import serve, take_now
from gradreduce.device.sim_pool import SimPool
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError


def counters(*accumulators):
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


def queues(*accumulators):
    return [len(acc.accumulator_ref.queue) for acc in accumulators]


@pytest.fixture
def several(accumulator):
    """Makes accumulators on one device."""
    return lambda count, **options: [accumulator(**options) for _ in range(count)]


# -- apply ----------------------------------------------------------------------------------------


def test_all_are_kept_or_all_are_dropped(several):
    accumulators = several(3)
    assert gr.apply_grads(accumulators, [[1.0], [2.0, 2.0], 3.0]) is True
    accumulators[1].set_global_step(1)
    assert gr.apply_grads(accumulators, [[1.0], [2.0, 2.0], 3.0]) is False
    assert counters(*accumulators) == [(1, 0, 1), (1, 1, 1), (1, 0, 1)]
    assert gr.apply_grads(accumulators, [[3.0], [4.0, 4.0], 5.0], local_step=1) is True
    assert [acc.take_grad(2).tolist() for acc in accumulators] == [[2.0], [3.0, 3.0], 4.0]


def test_one_that_does_not_fit_keeps_all_out(several, device):
    first, second = accumulators = several(2)
    second.apply_grad([1.0])
    with device.mesh.journal() as journal:
        for grads, error in [
            ([[1.0], [1.0, 2.0]], InvalidArgumentError),
            ([[1.0], np.ones(1)], ValueError),
            ([[1.0], None], TypeError),
            ([[1.0]], ValueError),
            ([[1.0]] * 3, ValueError),
        ]:
            with pytest.raises(error):
                gr.apply_grads(accumulators, grads)
    assert counters(first, second) == [(0, 0, 0), (1, 0, 0)]
    assert journal.launches == 0


def test_wrong_lists_of_accumulators(several):
    first, second = several(2)
    for accumulators in ([], [first, first], [first, second, first]):
        with pytest.raises(ValueError, match=r"empty|twice"):
            gr.apply_grads(accumulators, [[1.0]] * len(accumulators))
        with pytest.raises(ValueError, match=r"empty|twice"):
            gr.take_grads(accumulators, 1)
    twin = gr.ConditionalAccumulator(
        "float32", device=first.accumulator_ref.devices[0], shared_name="twice"
    )
    again = gr.ConditionalAccumulator(
        "float32", device=first.accumulator_ref.devices[0], shared_name="twice"
    )
    with pytest.raises(ValueError, match="twice"):
        gr.apply_grads([twin, again], [[1.0], [1.0]])
    with gr.open_mesh([0, 1, 0], backend="sim") as other:
        stranger = gr.ConditionalAccumulator("float32", device=other.devices[1])
        for call in (
            lambda: gr.apply_grads([first, stranger], [[1.0], [1.0]]),
            lambda: gr.take_grads([first, stranger], 1, timeout=0),
        ):
            with pytest.raises(gr.errors.DeviceMismatchError, match="different meshes"):
                call()
    assert counters(first, second, twin) == [(0, 0, 0)] * 3
    assert queues(first, second) == [0, 0]


def test_one_launch_for_all_of_a_dtype(device):
    accumulators = [
        gr.ConditionalAccumulator(dtype, device=each)
        for dtype in ("float32", "float16")
        for each in device.mesh.devices  # two logical devices of one physical
    ]
    grads = [np.full(3 + place, place, acc.dtype) for place, acc in enumerate(accumulators)]
    names = []
    for _ in range(3):
        with device.mesh.journal() as journal:
            gr.apply_grads(accumulators, grads)
        names.append([(record.name, record.num_rows) for record in journal.records])
    assert names == [[("add_n", 2)] * 2, [("accumulate_n", 2)] * 2, [("accumulate_n", 2)] * 2]
    accumulators[0].apply_grad(grads[0])
    accumulators[0].set_global_step(0)
    with device.mesh.journal() as journal:
        taken = gr.take_grads(accumulators, 3)
    # float16: one for both; float32, in place: the sum of four and the sum of three.
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("all_sum", 2), ("all_sum", 1), ("all_sum", 1),
    ]  # fmt: skip
    assert all(same(left, right) for left, right in zip(taken, grads, strict=True))
    assert counters(*accumulators) == [(0, 1, 0)] * 4


def test_fresh_and_later_sums_in_one_call(several, device):
    accumulators = several(3, reduction_type="SUM")
    accumulators[1].apply_grad([10.0])
    with device.mesh.journal() as journal:
        gr.apply_grads(accumulators, [[1.0], [2.0], [3.0]])
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("add_n", 2), ("accumulate_n", 1),
    ]  # fmt: skip
    assert [array.tolist() for array in gr.take_grads(accumulators, 1)] == [[1.0], [12.0], [3.0]]


def test_sums_that_share_memory_are_apart(several):
    """They lie end to end in one flat buffer: writing one result leaves the others alone."""
    accumulators = several(3)
    shapes = [(5,), (), (2, 3)]
    gr.apply_grads(accumulators, [np.full(shape, 4, "float32") for shape in shapes])
    first = accumulators[1].take_grad(1)
    first[...] = -1
    gr.apply_grads(
        [accumulators[0], accumulators[2]], [np.full(shapes[0], 8.0), np.full(shapes[2], 8.0)],
        cast=True,
    )  # fmt: skip
    rest = gr.take_grads([accumulators[2], accumulators[0]], 2)
    assert [array.shape for array in rest] == [(2, 3), (5,)]
    assert all((array == 6).all() for array in rest)


# -- over a mesh ----------------------------------------------------------------------------------


def test_over_a_mesh_one_launch_for_each_gpu_and_one_batch_at_the_take(mesh):
    accumulators = [gr.ConditionalAccumulator("float32", device=mesh) for _ in range(3)]
    shapes = [(7,), (), (3, 5)]
    values = [exact_data((len(mesh), *shape), "float32", seed=len(shape)) for shape in shapes]
    grads = [gr.PerReplica(list(value), mesh) for value in values]
    num_physical = len(mesh.by_physical)
    for _ in range(2):
        with mesh.journal() as journal:
            gr.apply_grads(accumulators, grads)
        assert [record.kind for record in journal.records] == ["launch"] * num_physical
    assert counters(*accumulators) == [(2 * len(mesh), 0, 0)] * 3
    with mesh.journal() as together:
        taken = gr.take_grads(accumulators, 1)
    for result, value in zip(taken, values, strict=True):
        total = (2 * value.astype(np.float64)).sum(axis=0).astype(np.float32)
        wanted = np.asarray(total / np.float32(2 * len(mesh)))
        assert all(same(buffer.numpy(), wanted) for buffer in result.buffers)
    alone = gr.ConditionalAccumulator("float32", device=mesh)
    alone.apply_grad(grads[0])
    alone.apply_grad(grads[0])
    with mesh.journal() as single:
        alone.take_grad(1)
    assert together.launches == single.launches
    assert [record.name for record in together.of("launch")].count("pack") == 0


def test_a_joint_take_of_partly_filled_accumulators(mesh):
    accumulators = [gr.ConditionalAccumulator("float32", device=mesh) for _ in range(len(mesh))]
    for place, acc in enumerate(accumulators):
        with gr.replica(place):
            acc.apply_grad(np.full(4, place + 1, "float32"))
    for place, result in enumerate(gr.take_grads(accumulators, 1)):
        assert all((value == place + 1).all() for value in result.values)


def test_accumulators_of_a_device_and_of_a_mesh_together(mesh):
    single = gr.ConditionalAccumulator("float16", device=mesh.devices[1])
    spread = gr.ConditionalAccumulator("float32", device=mesh)
    grad = gr.PerReplica([[1.0], [3.0]] + [[2.0]] * (len(mesh) - 2), mesh)
    for _ in range(2):
        gr.apply_grads([spread, single], [grad, [5.0]], cast=True)
    mirrored, plain = gr.take_grads([spread, single], 2)
    assert [value.tolist() for value in mirrored.values] == [[2.0]] * len(mesh)
    assert (plain.dtype, plain.tolist()) == (np.float16, [5.0])


# -- take -----------------------------------------------------------------------------------------


def test_a_joint_take_needs_enough_in_each(several, crew):
    first, second = several(2)
    take = crew.waiting(gr.take_grads, [first, second], 2)
    gr.apply_grads([first, second], [[1.0], [2.0]])
    first.apply_grad([3.0])
    assert not take.served
    second.apply_grad([4.0])
    assert take.served
    assert [array.tolist() for array in take.result()] == [[2.0], [3.0]]
    assert counters(first, second) == [(0, 1, 0), (0, 1, 0)]
    assert queues(first, second) == [0, 0]


def test_a_joint_take_waits_until_it_is_head_everywhere(several, crew):
    first, second = several(2)
    before = crew.waiting(second.take_grad, 2)
    joint = crew.waiting(gr.take_grads, [first, second], 1)
    behind = crew.waiting(first.take_grad, 1)
    gr.apply_grads([first, second], [[1.0], [1.0]])
    assert not joint.served
    assert not behind.served
    second.apply_grad([3.0])
    assert before.served
    assert not joint.served, "what it needs of the second was just taken"
    second.apply_grad([7.0], 1)
    assert [array.tolist() for array in joint.result()] == [[1.0], [7.0]]
    assert not behind.served
    first.apply_grad([9.0], 1)
    assert before.result().tolist() == [2.0]
    assert behind.result().tolist() == [9.0]


def test_a_timeout_in_front_lets_the_joint_take_through(several, crew):
    first, second = several(2)
    gr.apply_grads([first, second], [[1.0], [2.0]])
    before = crew.expiring(second.take_grad, 2)
    joint = crew.waiting(gr.take_grads, [first, second], 1)
    assert not joint.served
    before.expire()
    with pytest.raises(DeadlineExceededError):
        before.result()
    assert joint.served
    assert [array.tolist() for array in joint.result()] == [[1.0], [2.0]]


def test_a_timeout_leaves_all_queues_and_names_each(several):
    first, second = several(2)
    first.apply_grad([5.0])
    second.set_global_step(3)
    with pytest.raises(DeadlineExceededError) as caught:
        gr.take_grads([first, second], 1, timeout=0)
    assert "step 0: 1 of 1 gradients, 0 missing" in str(caught.value)
    assert "step 3: 0 of 1 gradients, 1 missing" in str(caught.value)
    assert queues(first, second) == [0, 0]
    assert counters(first, second) == [(1, 0, 0), (0, 3, 0)]
    assert first.take_grad(1, timeout=0).tolist() == [5.0]


def test_when_a_joint_take_times_out_the_next_of_every_queue_is_served(several, crew):
    first, second, third = several(3)
    gr.apply_grads([first, third], [[1.0], [3.0]])
    joint = crew.expiring(gr.take_grads, [first, second, third], 1)
    behind = [crew.waiting(acc.take_grad, 1) for acc in (first, second, third)]
    assert [take.served for take in behind] == [False] * 3
    joint.expire()
    with pytest.raises(DeadlineExceededError):
        joint.result()
    assert behind[0].result().tolist() == [1.0]
    assert behind[2].result().tolist() == [3.0]
    assert not behind[1].served
    second.apply_grad([2.0])
    assert behind[1].result().tolist() == [2.0]


def test_close_of_one_cancels_the_joint_take_and_frees_the_queues_of_the_others(several, crew):
    first, second, third = several(3)
    gr.apply_grads([second, third], [[2.0], [3.0]])
    joint = crew.waiting(gr.take_grads, [first, second], 1)
    behind = crew.waiting(second.take_grad, 1)
    joint_behind = crew.waiting(gr.take_grads, [third, second], 1)
    first.close()
    with pytest.raises(CancelledError):
        joint.result()
    assert behind.served
    assert behind.result().tolist() == [2.0]
    assert not joint_behind.served
    second.apply_grad([8.0], 1)
    assert [array.tolist() for array in joint_behind.result()] == [[3.0], [8.0]]
    for call in (
        lambda: gr.apply_grads([first, second], [[1.0], [1.0]], 5),
        lambda: gr.take_grads([second, first], 1),
    ):
        with pytest.raises(CancelledError):
            call()
    assert counters(second) == [(0, 2, 0)]
    assert queues(second, third) == [0, 0]


def test_an_apply_while_one_is_being_closed_serves_nobody(several, crew, monkeypatch):
    """Closed already, and its takes not cancelled yet: they are as good as gone."""
    first, second = several(2)
    first.apply_grad([1.0])
    joint = crew.waiting(gr.take_grads, [first, second], 1)
    locked, kept = serve.locked, []

    def late(states):
        if not kept:
            kept.append(None)
            kept.append(crew.start(second.apply_grad, [2.0]).result())
        return locked(states)

    monkeypatch.setattr(serve, "locked", late)
    first.close()
    assert kept == [None, True]
    with pytest.raises(CancelledError):
        joint.result()
    assert second.take_grad(1, timeout=0).tolist() == [2.0]


def test_opposite_orders_never_deadlock(several, crew):
    """take_grads([A, B]) against take_grads([B, A]), both against applies in both orders."""
    rounds = 150
    first, second = several(2, reduction_type="SUM")
    start = threading.Barrier(4)

    def take(accumulators):
        start.wait(30)
        return [
            [float(array[0]) for array in gr.take_grads(accumulators, 1)] for _ in range(rounds)
        ]

    def apply(accumulators, grads):
        start.wait(30)
        return sum(gr.apply_grads(accumulators, grads, 10**9) for _ in range(rounds))

    takes = [crew.start(take, order) for order in ([first, second], [second, first])]
    applies = [
        crew.start(apply, [first, second], [[1.0], [2.0]]),
        crew.start(apply, [second, first], [[2.0], [1.0]]),
    ]
    assert [call.result() for call in applies] == [rounds, rounds]
    # As many takes as applies, so the last ones may find less than they need: feed them.
    while crew.any_runs(takes):
        gr.apply_grads([first, second], [[1.0], [2.0]], 10**9)
    for call, (left, right) in zip(takes, ((1, 2), (2, 1)), strict=True):
        results = call.result()
        assert len(results) == rounds
        assert all(pair[0] * right == pair[1] * left > 0 for pair in results)


def test_a_ring_of_joint_takes_never_deadlocks(several, crew):
    rounds = 60
    ring = several(3)
    start = threading.Barrier(4)

    def take(accumulators):
        start.wait(30)
        for _ in range(rounds):
            gr.take_grads(accumulators, 1)

    takes = [crew.start(take, [ring[place], ring[(place + 1) % 3]]) for place in range(3)]
    start.wait(30)
    while crew.any_runs(takes):
        gr.apply_grads(ring, [[1.0]] * 3, 10**9)
    for call in takes:
        call.result()
    assert [step for _, step, _ in counters(*ring)] == [2 * rounds] * 3


# -- take_now: what the training step uses --------------------------------------------------------


def test_take_now_never_blocks_and_moves_every_step(several, crew):
    first, second = several(2)
    assert take_now([first, second], 1) is None
    first.apply_grad([1.0])
    first.apply_grad([3.0])
    assert take_now([first, second], 3) is None
    waiting = crew.waiting(second.take_grad, 1)
    assert take_now([first, second], 2) is None, "another take waits"
    assert counters(first, second) == [(2, 0, 0), (0, 0, 0)]
    second.apply_grad([7.0])
    assert waiting.result().tolist() == [7.0]
    taken, nothing = take_now([first, second], 2)
    assert taken.tolist() == [2.0]
    assert nothing is None
    assert counters(first, second) == [(0, 1, 0), (0, 2, 0)]
    second.close()
    with pytest.raises(CancelledError):
        take_now([first, second], 1)


@pytest.mark.parametrize("algorithm", ["hierarchical_copy", "nccl"])
def test_a_joint_take_that_gets_no_memory_leaves_every_sum(algorithm, monkeypatch):
    """Of several batches the first ones may have been launched when a later one gets none."""
    size = 40
    with gr.open_mesh(2, backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, 1, mesh=mesh)
        made = [
            gr.ConditionalAccumulator(dtype, (size,), device=mesh, cross_device_ops=ops)
            for dtype in ("float32", "float32", "float16")
        ]
        for acc, times in zip(made, (2, 1, 1), strict=True):
            for _ in range(times):
                acc.apply_grad(
                    gr.PerReplica([np.full(size, r + 1, acc.dtype) for r in (0, 1)], mesh)
                )
        take = SimPool.take
        for failing in range(20):
            asked = itertools.count()

            def fails(pool, nbytes, failing=failing, asked=asked):
                if next(asked) == failing:
                    raise MemoryError("no more")
                return take(pool, nbytes)

            monkeypatch.setattr(SimPool, "take", fails)
            try:
                taken = gr.take_grads(made, 1, timeout=0)
            except MemoryError:
                assert [acc.num_accumulated() for acc in made] == [4, 2, 2]
                continue
            break
        assert failing > 1
        assert all((value == 1.5).all() for each in taken for value in each.values)
