"""Names of tensors: in errors, plans, profiles, the flight record, and between processes."""

import numpy as np
import pytest
from support import meshes
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
NAMES = ("layers.0.weight", "layers.0.bias", "head.weight")

mesh = meshes.mesh_of((0, 0, 1), strict=True)


def named(mesh, names=NAMES, dtype=np.float32):
    values = [
        gr.PerReplica([np.full(size, replica, dtype) for replica in range(len(mesh))], mesh,
                      name=name)
        for size, name in enumerate(names, 3)
    ]  # fmt: skip
    return [(value, value) for value in values]


def labels_of(mesh, call):
    """The labels of a call's operations, in the journal and in the flight record."""
    count = mesh.flight_record()[-1].sequence if mesh.flight_record() else 0
    with mesh.journal() as journal:
        call()
    noted = {str(record.label) for record in journal.records if record.label is not None}
    found = {each.tensors for each in mesh.flight_record() if each.sequence > count}
    assert noted == found - {""}
    return noted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_plan_profile_journal_and_flight_record_have_the_names(mesh, algorithm):
    pairs = named(mesh)
    ops = gr.AllReduceCrossDeviceOps(algorithm, 1, mesh=mesh)
    plan = ops.plan(MEAN, pairs)
    assert plan.names == NAMES
    assert str(plan).endswith(": tensors layers.0.weight to head.weight")
    assert "layers.0.weight to head.weight" in str(ops.profile(MEAN, pairs))
    pack = f"pack 1 of 1 (tensors {', '.join(NAMES)})"
    assert labels_of(mesh, lambda: ops.batch_reduce(MEAN, pairs)) == {pack}
    made = (ops.prepare, ops.capture) if algorithm == "hierarchical_copy" else (ops.prepare,)
    for make in made:
        assert {each for each in labels_of(mesh, make(MEAN, pairs)) if "pack" in each} == {pack}


def test_equal_batches_keep_their_own_names(mesh):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
    for names in ("ab", "cd"):
        found = labels_of(mesh, lambda names=names: ops.batch_reduce(SUM, named(mesh, names)))
        assert found == {f"pack 1 of 1 (tensors {', '.join(names)})"}
    plans = [ops.plan(SUM, named(mesh, names)) for names in (NAMES, "abc", [None] * 3)]
    assert [plan.names for plan in plans] == [NAMES, ("a", "b", "c"), ()]
    assert str(plans[2]).endswith(": tensors 0-2")


def test_every_way_to_reduce_names_its_tensors(mesh):
    """Stages, integers, values on one device, IndexedSlices, copies to an out, one device."""
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 0, mesh=mesh)
    pairs = named(mesh, "ab", np.int32)
    assert labels_of(mesh, lambda: ops.batch_reduce(MEAN, pairs)) == {
        "packs 1 to 2 of 2 (tensors a, b)", "tensors a, b",
    }  # fmt: skip
    (value, _), (other, _) = named(mesh, "ab")
    wide = [(value, value), (other, ["sim:1"])]
    assert labels_of(mesh, lambda: ops.batch_reduce(SUM, wide)) == {
        "pack 1 of 1 (tensor a)", "tensor b",
    }  # fmt: skip
    rows = gr.PerReplica([gr.IndexedSlices(np.ones((1, 2)), [0])] * 3, mesh, name="rows")
    assert labels_of(mesh, lambda: ops.reduce(SUM, rows, rows)) == {"tensor rows"}
    to_one = gr.ReductionToOneDevice(mesh=mesh)
    assert labels_of(mesh, lambda: to_one.batch_reduce(SUM, wide)) == {"tensor a", "tensor b"}
    one = gr.PerReplica([np.ones(2)], devices=mesh.devices[:1], name="one")
    assert labels_of(mesh, lambda: ops.broadcast([one], mesh)) == {"tensor one"}


def test_a_flat_buffer_may_have_names(mesh):
    flat = mesh.flat_buffer({"w": (2, 3), "bias": (3,)}, "float32")
    assert flat.names == ["w", "bias"] and flat.views[0][1].shape == (3,)
    step = flat.prepare_all_reduce(MEAN)
    assert labels_of(mesh, step) == {"pack 1 of 1 (tensors w, bias)"}


def test_accumulators_of_the_same_name_have_numbers(mesh):
    ones = gr.PerReplica([np.ones(3, np.float32)] * 3, mesh)
    for names, tensors in (((), "0 to 1"), (("w", "b"), "w, b")):
        options = [{"name": name} for name in names] or [{}, {}]
        accumulators = [
            gr.ConditionalAccumulator("float32", (3,), device=mesh, **each) for each in options
        ]
        gr.apply_grads(accumulators, [ones, ones])
        found = labels_of(mesh, lambda taken=accumulators: gr.take_grads(taken, 3))
        assert found == {f"pack 1 of 1 (tensors {tensors})"}


def test_errors_have_the_names(mesh):
    ((value, _),) = named(mesh, "a")
    odd = gr.PerReplica([np.ones(2), np.ones(3), np.ones(2)], mesh, name="odd")
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    with pytest.raises(ValueError, match=r"^value 1 \(odd\): replica 1 is float64\[3\], replica 0"):
        ops.batch_reduce(SUM, [(value, value), (odd, odd)])
    with pytest.raises(TypeError, match=r"^odd: replica 1: dtype bool cannot"):
        gr.PerReplica([np.ones(2), np.ones(2, bool), np.ones(2)], mesh, name="odd")
    with pytest.raises(ValueError, match=r"^out 0 \(a\): replica 2: out is float32\[4\]; expected"):
        ops.reduce(SUM, value, value, out=[np.ones(3, "f4"), np.ones(3, "f4"), np.ones(4, "f4")])
    rows = gr.PerReplica([gr.IndexedSlices(np.ones((1, 2)), [0])] * 3, mesh, name="rows")
    with pytest.raises(ValueError, match=r"^value 1 \(rows\) contains IndexedSlices"):
        ops.prepare(SUM, [(value, value), (rows, rows)])
    with pytest.raises(TypeError, match=r"^name=3 must be a string"):
        gr.PerReplica([1.0] * 3, mesh, name=3)
    to_one = gr.ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0][:1])
    with pytest.raises(ValueError, match=r"^accumulation_fn returned float32\[1\]") as caught:
        to_one.reduce(SUM, value, "sim:1")
    assert caught.value.__notes__ == ["It was about value 0 (a)."]
    long = gr.PerReplica([1.0] * 3, mesh, name="layers." + "x" * 500 + ".weight").name
    assert len(long) == 120 and long.startswith("layers.x") and long.endswith("x.weight")
    assert gr.PerReplica([1.0] * 3, mesh).name is None


@pytest.mark.parametrize("sharded", [False, True])
def test_steps_and_optimizers_use_the_names_of_variables(mesh, sharded):
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    variables = [gr.Variable(np.zeros(3, np.float32), name, device=mesh) for name in ("w", "bias")]
    step = gr.SyncStep(variables, gr.AdamOptimizer(), ops, shard_optimizer=sharded)
    only = [[None, [np.ones(3, np.float32)]] for _ in mesh]
    step(only)
    with mesh.journal() as journal:
        labels = labels_of(mesh, lambda: step(only))
    assert all(record.label is not None for record in journal.of("launch"))
    assert {each.partition(" (")[2] for each in labels if "pack" in each} == {"tensor bias)"}
    assert "tensors w, bias" in labels  # of sums on each device, and of the update
    grads = [(gr.PerReplica([np.ones(3, np.float32)] * 3, mesh), each) for each in variables]
    optimizer = gr.GradientDescentOptimizer(0.1)
    found = labels_of(mesh, lambda: optimizer.apply_gradients(grads))
    assert found == {"pack 1 of 1 (tensors w, bias)", "tensors w, bias"}
    assert grads[0][0].name is None


# -- processes ------------------------------------------------------------------------------------


def messages_of(work):
    """The error of a failing call in each of two processes."""

    def said(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        with pytest.raises(InvalidArgumentError) as caught:
            work(mesh, group.rank)
        return str(caught.value)

    return run_processes(2, said)


def reduced(make):
    """A call of ``all_reduce`` for the gradients ``make(rank)``."""
    return lambda mesh, rank: gr.all_reduce([make(rank)], mesh=mesh)


def divided(*replicas):
    """A sum in process 0, and a mean in process 1, of the same value."""
    return lambda mesh, rank: gr.NcclAllReduce(mesh=mesh).reduce(
        (SUM, MEAN)[rank], gr.PerReplica(replicas, mesh), mesh
    )


def shared(mesh, rank):
    ops = gr.NcclAllReduce(mesh=mesh)
    (ops.reduce_scatter, ops.all_gather)[rank]([[np.ones(4)]])


def stepped(*missing):
    """A step in which the process of rank r has no gradient of variable ``missing[r]``."""

    def differ(mesh, rank):
        variables = [gr.Variable(np.zeros(2), name, device=mesh) for name in ("w", "bias")]
        step = gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce())
        try:
            step([[None if index == missing[rank] else [np.ones(2)] for index in range(2)]])
        finally:
            assert all(each.num_accumulated() == 0 for each in step.accumulators)

    return differ


def called(call):
    """A method for gradients whose second one has another dtype in process 1."""
    return lambda mesh, rank: getattr(gr.AllReduceCrossDeviceOps(mesh=mesh), call)(
        [{"a": np.ones(4), "b": np.ones(4, "f8" if rank else "f4")}]
    )


def spread(mesh, rank):
    arrays = {"a": np.ones(4), "b": np.ones(4, "f8" if rank else "f4")}
    values = [gr.PerReplica([each], mesh, name=name) for name, each in arrays.items()]
    gr.AllReduceCrossDeviceOps(mesh=mesh).broadcast(values, mesh)


DTYPES = "tensor b is float32[4] in process 0, float64[4] in process 1"
ORDER = (1, -1)  # of process 0, of process 1
DIFFERENCES = {
    "a shape": (
        reduced(lambda rank: {"w": np.ones(3), "bias": np.ones(2 + rank)}),
        "tensor bias is float64[2] in process 0, float64[3] in process 1",
    ),
    "a nested shape": (
        reduced(lambda rank: {"layers": [{"w": np.ones(3)}, {"w": np.ones(2 + rank)}]}),
        "tensor layers.1.w is float64[2] in process 0, float64[3] in process 1",
    ),
    "a tensor less": (
        reduced(lambda rank: {"w": np.ones(3), "bias": np.ones(2) if rank else None}),
        "1 in process 0, 2 in process 1 (bias only in process 1)",
    ),
    "another order": (
        reduced(lambda rank: dict([("w", np.ones(3)), ("bias", np.ones(3))][:: ORDER[rank]])),
        "tensor 0 is w float64[3] in process 0, bias float64[3] in process 1",
    ),
    "IndexedSlices": (
        reduced(lambda rank: [gr.IndexedSlices(np.ones((1, 2), "f8" if rank else "f4"), [0])]),
        "tensor 0 is float32 rows of [2], dense_shape None in process 0, float64 rows of [2], "
        "dense_shape None in process 1",
    ),
    "other variables": (stepped(0, 1), "tensor 0 is bias in process 0, w in process 1"),
    "a variable less": (
        stepped(None, 1), "2 in process 0, 1 in process 1 (bias only in process 0)",
    ),
    "an op": (divided(np.ones(3)), "divisor is 1 in process 0, 2 in process 1"),
    "an op of integers": (divided(np.ones(3, int)), "mean of integers is"),
    "an op of rows": (divided(gr.IndexedSlices(np.ones((1, 2)), [0])), "op is"),
    "num_packs": (
        lambda mesh, rank: gr.NcclAllReduce(1 + rank, mesh=mesh).all_reduce([[np.ones(3)]]),
        "num_packs is 1 in process 0, 2 in process 1",
    ),
    "a call": (shared, "different calls: reduce_scatter of float64[4] in process 0, all_gather of"),
    "all_reduce": (called("all_reduce"), DTYPES),
    "reduce_scatter": (called("reduce_scatter"), DTYPES),
    "all_gather": (called("all_gather"), DTYPES),
    "broadcast": (spread, DTYPES),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_name_what_differs(what):
    differ, text = DIFFERENCES[what]
    first, second = messages_of(differ)
    assert text in first
    assert "process 0" in second and "process 1" in second


def test_names_of_variables_may_differ_between_processes_but_are_reported():
    def work(group):
        mesh = gr.open_mesh(1, backend="sim", process_group=group)
        variable = gr.Variable(np.zeros(2, np.float32), f"w{group.rank}", device=mesh)
        step = gr.SyncStep([variable], gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce())
        step([[[np.full(2, float(group.rank), np.float32)]]])
        record = {each.tensors for each in mesh.flight_record() if "pack" in each.tensors}
        return variable.numpy().tolist(), record

    assert run_processes(2, work) == [
        ([-0.5, -0.5], {f"pack 1 of 1 (tensor w{rank})"}) for rank in range(2)
    ]

    def differ(mesh, rank):
        variables = [gr.Variable(np.zeros(2 + rank * k), f"w{k}", device=mesh) for k in range(2)]
        gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce())

    text = "tensor w1 is float64[2] in process 0, float64[3] in process 1"
    assert text in messages_of(differ)[0]
