"""Errors name the wrong object among many by the user's name for it, in a few words."""

import re

import numpy as np
import pytest
from support.meshes import mesh_of

import gradreduce as gr
from gradreduce.errors import brief, listed, repeated

SUM = gr.ReduceOp.SUM
NUM = 300
ONES = np.ones(3, np.float32)
ROWS = gr.IndexedSlices(np.ones((1, 2), np.float32), [3])
LONG = ["x"] * 3000
WRONG = (TypeError, ValueError, KeyError)


mesh = mesh_of(4, scope="module")


big = mesh_of(64, scope="module")


def test_lists_have_five_items_at_most():
    assert listed("abcde") == "a, b, c, d, e"
    assert listed(range(12)) == "0, 1, 2, 3, 4 and 7 more"
    assert repeated([3, 1, 3, 2, 1, 3]) == [3, 1]
    assert brief(list(range(9))) == "[0, 1, 2, 3, 4, ...]"
    assert brief({"a": np.ones((2, 3))}) == "{'a': ndarray float64[2, 3]}"
    assert brief((2.5, None, "sim:0")) == "(2.5, None, 'sim:0')"
    assert max(len(brief(each)) for each in (LONG, "x" * 3000, object(), [LONG] * 9)) < 250


@pytest.fixture(scope="module")
def many(mesh):
    """300 dense accumulators, sparse ones and variables."""
    dense = [gr.ConditionalAccumulator("float32", (3,), device=mesh, name=f"d{i}")
             for i in range(NUM)]  # fmt: skip
    sparse = [gr.SparseConditionalAccumulator("float32", (10, 2), device=mesh, name=f"s{i}")
              for i in range(NUM)]  # fmt: skip
    variables = [gr.Variable(ONES, f"w{i}", device=mesh) for i in range(NUM)]
    return dense, sparse, variables


def with_one(usual, odd):
    return [usual] * 17 + [odd] + [usual] * (NUM - 18)


def check_named(calls):
    """Checks that each call raises an error that starts like this, and is short."""
    for text, call in calls:
        with pytest.raises(WRONG, match=f"^{text}") as caught:
            call()
        assert len(str(caught.value)) < 250


def test_the_wrong_one_of_many_accumulators_is_named(mesh, big, many):
    dense, sparse, _ = many
    far = gr.PerReplica([ONES] * 64, big)
    outside = gr.IndexedSlices(np.ones((1, 2), np.float32), [33])
    some = gr.ConditionalAccumulator("float32", device=mesh, name="some")
    some.apply_grad(np.ones(4, np.float32))  # the shape of its sum
    of_17 = r"grads\[17\], for accumulator '{}': "
    check_named([
        (of_17.format("d17") + r"Shapes \(4,\) and",
         lambda: gr.apply_grads(dense, with_one(ONES, np.ones(4, "f4")))),
        (of_17.format("d17") + "the gradient is on another mesh",
         lambda: gr.apply_grads(dense, with_one(ONES, far))),
        (of_17.format("s17") + "index of slice 0 exceeded",
         lambda: gr.apply_grads(sparse, with_one(ROWS, outside))),
        (of_17.format("some") + "Shape mismatch",
         lambda: gr.apply_grads([*dense[:17], some], [ONES] * 18)),
        (r"accumulators=<Cond.* must be a list of accumulators",
         lambda: gr.apply_grads(dense[0], [ONES])),
        (r"accumulators\[300\] is the same as accumulators\[3\]",
         lambda: gr.apply_grads([*dense, dense[3]], [ONES] * 301)),
    ])  # fmt: skip
    assert not any(each.num_accumulated() for each in (*dense, *sparse))
    missing = r"s; accumulators\[0\] at step 0: 0 of 1 .*; and 295 more$"
    with pytest.raises(TimeoutError, match=missing) as late:
        gr.take_grads(dense, 1, timeout=0)
    assert len(str(late.value)) < 500


def test_the_wrong_one_of_many_gradients_is_named(big, many):
    *_, variables = many
    optimizer = gr.GradientDescentOptimizer(0.1)
    far = gr.PerReplica([ONES] * 64, big)
    wide = gr.Variable(ONES, "wide", device=big)
    four = np.ones(4, np.float32)
    of_17 = "the gradient of <Variable 'w17' .*"

    def update(grads, found=variables):
        return lambda: optimizer.apply_gradients(list(zip(grads, found, strict=True)))

    check_named([
        (rf"{of_17} is float32\[4\]; it", update(with_one(ONES, four))),
        (f"{of_17}: str is not an array", update(with_one(ONES, "ab"))),
        (f"{of_17} is on sim:0, .* 59 m", update(with_one(ONES, far))),
        (r"grads_and_vars\[17\]: \['x', .* is not a Variab",
         update([ONES] * 18, [*variables[:17], LONG])),
        ("grads_and_vars .*<Variable 'w3' .* more ",
         update([ONES] * 18, [*variables[:17], variables[3]])),
        ("the gradient of <Variable 'wide' .* and 59 more> is float", update([four], [wide])),
        (r"grads_and_vars\[1\] is \[nda",
         lambda: optimizer.apply_gradients([(ONES, wide), [ONES]])),
        ("grads_and_vars=3 must be a list", lambda: optimizer.apply_gradients(3)),
        (r".*: var_list\[1\] is \['x'", lambda: optimizer.compute_gradients(sum, [wide, LONG])),
        (r"t_list\[17\]: str is not",
         lambda: gr.clip_by_global_norm(with_one(ONES, "ab"), 1.0)),
        (r"t_list\[17\] is a PerReplica",
         lambda: gr.clip_by_global_norm(with_one(ONES, far), 1.0)),
        (r"t_list\[1\] is int32; it",
         lambda: gr.clip_by_global_norm([ONES, np.ones(3, "i4")], 1)),
        ("input 2: str is not an array", lambda: gr.add_n([ONES, ONES, "ab"])),
    ])  # fmt: skip


def test_no_message_contains_a_whole_long_argument(mesh, big, many):
    value, far = gr.PerReplica([ONES] * 4, mesh), gr.PerReplica([ONES] * 64, big)
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    reduction_groups = (range(1500), range(1500, 3000))
    step = gr.SyncStep(many[2], gr.GradientDescentOptimizer(0.1), ops)
    number = gr.Variable(np.zeros(2000, "i1"), trainable=False, device=mesh)
    for call in (
        lambda: ops.batch_reduce(SUM, [(LONG, LONG, 1)]),
        lambda: ops.batch_reduce(SUM, [(value, LONG)]),
        lambda: ops.batch_reduce(SUM, [(value, ["sim:0"] * 3000)]),
        lambda: ops.reduce(LONG, value, value),
        lambda: ops.reduce(SUM, value, value, output_type=LONG),
        lambda: ops.reduce(SUM, value, value, out=far),
        lambda: ops.broadcast(far, mesh),
        lambda: ops.all_reduce([{"x" * 3000: each} for each in (ONES, ONES[:2], ONES, ONES)]),
        lambda: gr.AllReduceCrossDeviceOps(LONG),
        lambda: gr.NcclAllReduce(wire_dtype=LONG),
        lambda: gr.NcclAllReduce(mesh=LONG),
        lambda: gr.NcclAllReduce(LONG),
        lambda: gr.HierarchicalCopyAllReduce(reduction_groups=LONG),
        lambda: gr.HierarchicalCopyAllReduce(reduction_groups=reduction_groups).reduce(
            SUM, value, value
        ),
        lambda: gr.PerReplica([ONES] * 64, devices=[big.devices[0]] * 64),
        lambda: gr.PerReplica([ONES] * 64, mesh, devices=big.devices),
        lambda: gr.PerReplica([ONES] * 64, mesh=LONG),
        lambda: far.get(mesh.devices[0]),
        lambda: gr.PerReplica([ROWS] * 64, big).buffers,
        lambda: gr.accumulate_n([ONES] * 3, shape=[4] * 3000),
        lambda: gr.aggregate([ONES], LONG),
        lambda: gr.IndexedSlices(ONES, [1, 2, 3], [1.5] * 3000),
        lambda: gr.IndexedSlices(ONES, [1, 2, 3], [4] * 3000),
        lambda: gr.ConditionalAccumulator("float32", [1.5] * 3000),
        lambda: gr.ConditionalAccumulator("float32", device=LONG),
        lambda: many[0][0].take_grad(LONG),
        lambda: many[0][0].apply_grad(ONES, local_step=LONG),
        lambda: many[0][0].load_state_dict(dict.fromkeys(range(3000))),
        lambda: number.assign([1000] * 2000),
        lambda: step([[LONG] * NUM] * 4),
        lambda: mesh.flat_buffer([[1.5] * 3000], "float32"),
    ):
        with pytest.raises(WRONG) as caught:
            call()
        assert len(str(caught.value)) < 400
        assert str(caught.value).count("sim:") < 12


def test_arguments_of_another_kind_are_named(mesh, many):
    """Also those that TensorFlow has at this position."""
    first, two = many[2][0], np.array([1, 2])
    pairs, device = [(ONES, first)], mesh[0]
    variable = gr.Variable(ONES, "w", device=mesh)
    table = gr.Variable(np.ones((2, 3)), device=mesh)
    inner, adam = gr.MomentumOptimizer(0.1, 0.9), gr.AdamOptimizer(0.1)
    outer = gr.AGNOptimizer(inner, 1, gr.AGNCustomGetter(device, center=gr.AGNCenter(mesh)))
    accumulator = gr.ConditionalAccumulator("float32", device=device)
    step = gr.SyncStep([first], gr.GradientDescentOptimizer(0.1), gr.AllReduceCrossDeviceOps())
    adam.beta2 = "x"
    number, params = "must be a number$", r"params must be a Variable or an array \(rows, …\), got"

    def fast():
        return "fast"

    def train(rate):
        return lambda: gr.MomentumOptimizer(rate, 0.9).apply_gradients(pairs)

    def open_with(**options):
        return lambda: gr.open_mesh(2, **options)

    check_named([
        (f"learning_rate='x' {number}", train("x")),
        (f"learning_rate=None {number}", train(None)),
        (rf"learning_rate=ndarray float64\[2\] {number}", train(np.ones(2))),
        ("learning_rate=.*fast returned 'fast'; it must return a number$", train(fast)),
        (f"beta2='x' {number}", lambda: adam.apply_gradients(pairs)),
        (".*is not a Variable; pass a list as var_list=$",
         lambda: inner.minimize(lambda: first @ first, [first])),
        ("terms=None must be a list with one entry per device", lambda: step(None)),
        (r"terms\[2\]=3 must be a list with one",
         lambda: step([[[ONES]], [[ONES]], 3, [[ONES]]])),
        ("name=False must be a string$", lambda: gr.Variable(ONES, False)),
        ("name=3 must be a string$", lambda: gr.get_variable(3, ONES)),
        *[("the value for the variable 'w': str is not an array", lambda call=call: call("x"))
          for call in (variable.assign, variable.assign_add)],
        *[("cross_device_ops='nccl' is not a CrossDeviceOps$",
           lambda each=each: setattr(each, "cross_device_ops", "nccl"))
          for each in (inner, outer)],
        ("backend=", open_with(backend=two)),
        ("kernels=", open_with(backend="sim", kernels=two)),
        ("processes=", open_with(processes=two)),
        ("schedule_seed=", open_with(backend="sim", schedule_seed=two)),
        ("schedule_seed=", open_with(backend="sim", schedule_seed=True)),
        (r"cast=ndarray int64\[2\] must be True or False$",
         lambda: accumulator.apply_grad(ONES, cast=two)),
        (r"timeout=ndarray int64\[2\] must be a number",
         lambda: accumulator.take_grad(1, timeout=two)),
        (r"values=array\(3\.\) must be a list", lambda: gr.PerReplica(np.array(3.0), mesh)),
        ("mesh='sim' must be a Mesh", lambda: gr.PerReplica([ONES] * 4, "sim")),
        ("values=3 must be a list", lambda: gr.PerReplica(3, mesh)),
        ("devices='sim' must be a list", lambda: gr.PerReplica([ONES] * 4, devices="sim")),
        (f"{params} NoneType", lambda: gr.embedding_lookup(None, [1])),
        (f"{params} list", lambda: gr.embedding_lookup([table], [1])),
        (f"{params} float64", lambda: gr.embedding_lookup(np.float64(1), [0])),
        ("shapes=3 must be a list", lambda: mesh.flat_buffer(3, "float32")),
        (r"shapes\[0\]=3 must be a list", lambda: mesh.flat_buffer((3, 4), "float32")),
        (r"all_reduce_alg=\['nccl'\] is not one of", lambda: gr.AllReduceCrossDeviceOps(["nccl"])),
    ])  # fmt: skip
    mesh.synchronize(deadline=10**400)
    assert mesh[np.int64(1)] is mesh.devices[1]
    assert gr.NcclAllReduce(np.int64(2), mesh=mesh).num_packs == 2


@pytest.mark.parametrize("wrong", [True, np.True_])
def test_no_boolean_is_an_integer(mesh, wrong):
    accumulator = gr.ConditionalAccumulator("float32", device=mesh[0])
    getter = gr.AGNCustomGetter(mesh[0], center=gr.AGNCenter(mesh))
    named = f".*{re.escape(repr(wrong))}"
    check_named([(named, call) for call in (
        lambda: gr.open_mesh(wrong, backend="sim"),
        lambda: mesh.flat_buffer([(3,), (wrong,)], "float32"),
        lambda: gr.ConditionalAccumulator("float32", (wrong,), device=mesh[0]),
        lambda: accumulator.apply_grad([1.0], wrong),
        lambda: accumulator.take_grad(wrong),
        lambda: accumulator.set_global_step(wrong),
        lambda: gr.AGNOptimizer(gr.GradientDescentOptimizer(0.1), wrong, getter),
        lambda: gr.IndexedSlices(np.ones((1, 2)), [0], [wrong, 2]),
        lambda: gr.HierarchicalCopyAllReduce(wrong),
    )])  # fmt: skip
