"""SyncStep(shard_optimizer=True): the bits of a whole optimizer, and a share of its memory."""

import re

import numpy as np
import pytest
from optim.agn.team import Own
from optim.test_update_rules import RULES
from support.thread_group import run_processes
from train import training

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CollectiveError, brief
from gradreduce.train import shards

VARIABLES = {
    "w": ((7, 5), "float32"),
    "b": ((3,), "float16"),
    "s": ((), "float32"),
    "e": ((0, 2), "float32"),
    "h": ((40,), "bfloat16"),
    "d": ((9,), "float64"),
}


def decaying():
    """A learning rate that depends on how often it was asked for."""
    rates = iter(1 / number for number in range(1, 1000))
    return lambda: next(rates)


OPTIMIZERS = {
    **{name: make for name, (_, make, _) in RULES.items()},
    "sgd": lambda: gr.GradientDescentOptimizer(decaying()),
    "momentum": lambda: gr.MomentumOptimizer(0.1, 0.9, master_dtype="float32"),
    "adam": lambda: gr.AdamOptimizer(decaying(), master_dtype="float32"),
    "python": lambda: Own(master_dtype="float32"),
}
STALE = 2  # the call whose gradients are


def terms_of(number, num_replicas, variables):
    """Gradients of one call; in every third some variables have none, or only a small one has."""
    random = np.random.default_rng(number)
    missing = {1: {"w", "s"}, 4: VARIABLES.keys() - {"s"}}.get(number % 6, ())
    return [
        [
            None if name in missing else [np.asarray(random.standard_normal(shape), v.dtype)]
            for v, (name, (shape, _)) in zip(variables, VARIABLES.items(), strict=True)
        ]
        for _ in range(num_replicas)
    ]


def train(counts, make, shard, calls=range(6), state=None, **options):
    """The variables of each process start with other values: those of the first count."""

    def step_of(mesh, replicas):
        start = 1.0 + replicas[0]
        more = {**options, "start": start, "shard_optimizer": shard}
        return training.make_step(mesh, VARIABLES, make(), **more)

    def call(step, number, replicas):
        terms = terms_of(number, sum(counts), step.variables)[replicas[0] : replicas[-1] + 1]
        return step(terms, step.global_step - (number == STALE)), step.global_step

    return training.train(counts, step_of, call, calls, state)


@pytest.mark.parametrize("num_required", [1, 2])  # calls for an update
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_a_whole_optimizer(name, num_replicas, num_required):
    options = {"num_required": num_required * num_replicas}
    wanted = train([num_replicas], OPTIMIZERS[name], False, **options)
    np.testing.assert_equal(train([num_replicas], OPTIMIZERS[name], True, **options), wanted)
    done = [done for done, _ in wanted[1]]
    assert done == [True, True, False, True, True, True] or num_required > 1


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["adam", "python"])
def test_the_bits_of_several_processes_are_those_of_a_whole_optimizer(name, counts):
    wanted = train([sum(counts)], OPTIMIZERS[name], False)
    np.testing.assert_equal(train(counts, OPTIMIZERS[name], True), wanted)


@pytest.mark.parametrize(
    ("before", "after", "num_required"),
    [(([3], True), ([3], False), None), (([1, 2], False), ([2, 1], True), 6),
     (([1, 2], True), ([3], True), 6)],
)  # fmt: skip
def test_a_state_continues_sharded_or_not(before, after, num_required):
    make = OPTIMIZERS["momentum"]
    wanted = train([3], make, False, num_required=num_required)
    state = train(before[0], make, before[1], range(4), num_required=num_required)[2]
    found = train(after[0], make, after[1], range(4, 6), state)
    assert found[0] == wanted[0]
    np.testing.assert_equal(found[2], wanted[2])


def test_another_number_of_replicas_loads_a_sharded_state():
    state = train([4], OPTIMIZERS["adam"], True, range(2))[2]
    sharded = train([1, 1], OPTIMIZERS["adam"], True, range(6, 9), state)
    np.testing.assert_equal(sharded, train([2], OPTIMIZERS["adam"], False, range(6, 9), state))
    broken = {**state, "optimizer": {**state["optimizer"], "slots": {"w": {}}}}
    with pytest.raises(KeyError, match=r"state\['optimizer'\]\['slots'\]\['w'\] has wrong keys"):
        train([2], OPTIMIZERS["adam"], True, (), broken)


def make_step(mesh, optimizer=None, size=8, *, shard_optimizer=True):
    """A step with one variable."""
    optimizer, shapes = optimizer or gr.AdamOptimizer(0.1), {"v": ((size,), "float32")}
    return training.make_step(mesh, shapes, optimizer, shard_optimizer=shard_optimizer)


ONES = [[np.ones(8, np.float32)]]  # the gradients of a replica


def slot_bytes(step, device):
    slots = step.optimizer.variables()
    return sum(b.nbytes for slot in slots for b in slot.buffers if b.device is device)


def test_slots_take_a_share_of_the_memory_on_each_device():
    shapes, n = [(1000, 3), (17,), (5, 5)], 4
    with gr.open_mesh(n, backend="sim") as mesh:
        found = []
        for shard in (False, True):
            optimizer = gr.RMSPropOptimizer(0.1, momentum=0.5, master_dtype="float32")
            halves = {str(shape): (shape, "float16") for shape in shapes}
            step = training.make_step(mesh, halves, optimizer, shard_optimizer=shard)
            step([[[np.ones(v.shape, np.float16)] for v in step.variables]] * n)
            found.append([slot_bytes(step, device) for device in mesh])
        whole, shards = found
        size = sum(int(np.prod(shape)) for shape in shapes)
        assert whole == [3 * 4 * size] * n
        assert sum(shards) == 3 * 4 * size
        alignment = 3 * 4 * 8 * (1 + len(shapes))  # 8 elements of each slot at each cut
        assert max(shards) <= 3 * 4 * size / n + alignment


def test_a_step_sends_the_bytes_of_an_all_reduce():
    n, size = 4, 4000
    with gr.open_mesh((0, 1, 2, 3), backend="sim", strict=True) as mesh:
        step = make_step(mesh, size=size)
        terms = [[[device.put(np.ones(size, np.float32))]] for device in mesh]
        step(terms)
        with mesh.journal() as journal:
            step(terms)
        sent = {
            phase: sum(record.nbytes for record in journal.records if record.phase == phase)
            for phase in ("reduce-scatter", "all-gather")
        }
        assert sent == dict.fromkeys(sent, (n - 1) * size * 4)
        assert journal.bytes == sum(sent.values())
        assert (journal.uploads, journal.syncs, len(journal.of("fill"))) == (0, 0, 0)
        updated = [record for record in journal.of("launch") if record.name == "adam"]
        assert len(updated) == n


def test_variables_without_a_gradient_are_not_copied():
    with gr.open_mesh((0, 1), backend="sim") as mesh:
        two = {name: ((8,), "float32") for name in "vw"}
        step = training.make_step(mesh, two, gr.AdamOptimizer(0.1), shard_optimizer=True)
        with mesh.journal() as journal:
            step([[None, [np.ones(8, np.float32)]]] * 2)
        gathered = [record for record in journal.records if record.phase == "all-gather"]
        assert [record.nbytes for record in gathered] == [8 * 4]  # all in replica 1's share


def test_processes_exchange_terms_and_values_of_shards_alone():
    size = 3 * 1000

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            step = make_step(mesh, size=size)
            group.sent.clear()
            step([[[np.ones(size, np.float32)]]])
            return sum(group.sent.values())

    for sent in run_processes(3, work):
        assert abs(sent - 2 * 2 / 3 * size * 4) <= 2 * 8 + 4 * 16  # and a number for each step


class OwnReduction(gr.AllReduceCrossDeviceOps):
    """A subclass whose results are not those of an all-reduce."""

    def reduce_batch(self, reduce_op, requests, *, coalesce):
        raise NotImplementedError


def test_what_cannot_be_sharded_raises():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable(np.ones(8), "v", dtype="float32", device=mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        for other in (gr.ReductionToOneDevice(), OwnReduction(mesh=mesh)):
            optimizer = gr.AdamOptimizer(0.1)
            text = (
                "shard_optimizer=True needs an AllReduceCrossDeviceOps, or a subclass that keeps "
                f"its reduce_batch, not {brief(other)}"
            )
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                gr.SyncStep([variable], optimizer, other, shard_optimizer=True)
            assert optimizer.variables() == []
        getter = gr.AGNCustomGetter(mesh[0])
        inner = gr.MomentumOptimizer(0.1, 0.9)
        agn = gr.AGNOptimizer(inner, 1, custom_getter=getter)
        with pytest.raises(ValueError, match="needs an elementwise rule; the rule of <AGNOptimiz"):
            gr.SyncStep([variable], agn, ops, shard_optimizer=True)
        used = gr.MomentumOptimizer(0.1, 0.9)
        gr.SyncStep([variable], used, ops)
        with pytest.raises(ValueError, match=r"already has slots of 'v'.*pass a new optimizer"):
            gr.SyncStep([variable], used, ops, shard_optimizer=True)
        step = gr.SyncStep([variable], gr.AdamOptimizer(0.1), ops, shard_optimizer=True)
        with pytest.raises(TypeError, match=r"IndexedSlices are not supported; pass .to_dense\(\)"):
            step([[[gr.IndexedSlices(np.ones((1, 1)), [0], (8, 1))]]] * 2)


def test_copies_that_may_differ_cannot_be_used(monkeypatch):
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh)
        run = shards.reduce_batch

        def fail(plan, *args, **options):
            if plan.call == "all-gather":
                raise MemoryError("none left")
            return run(plan, *args, **options)

        monkeypatch.setattr(shards, "reduce_batch", fail)
        with pytest.raises(MemoryError):
            step([ONES] * 2)
        with pytest.raises(BackendUnavailableError, match="failed half way"):
            step([ONES] * 2)


def test_an_update_that_raises_in_one_process_raises_in_the_others():
    def work(group):
        calls = []

        def rate():
            calls.append(1)
            if group.rank == 1 and len(calls) == 2:
                raise KeyError("no rate")
            return 0.1

        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            step = make_step(mesh, gr.GradientDescentOptimizer(rate))
            assert step([ONES])
            with pytest.raises((KeyError, CollectiveError)) as error:
                step([ONES])
            with pytest.raises(CollectiveError, match="no rate"):
                step([ONES])
            return str(error.value)

    text = run_processes(2, work)[0]
    assert "process 1: stopped in " in text and text.endswith(": KeyError('no rate')")
