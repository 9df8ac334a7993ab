"""Errors name the wrong object among many by the user's name for it, in a few words."""

from __future__ import annotations

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


def test_the_wrong_one_of_many_accumulators_is_named(mesh, big, many):
    dense, sparse, _ = many
    far = gr.PerReplica([ONES] * 64, big)
    outside = gr.IndexedSlices(np.ones((1, 2), np.float32), [33])
    some = gr.ConditionalAccumulator("float32", device=mesh, name="some")
    some.apply_grad(np.ones(4, np.float32))  # the shape of its sum
    for accumulators, usual, odd, told in (
        (dense, ONES, np.ones(4, "f4"), r"Shapes \(4,\) and"),
        (dense, ONES, np.ones(3), "the gradient is float64"),
        (dense, ONES, None, "NoneType is not an array"),
        (dense, ONES, far, "the gradient is o[fn] another mesh"),
        (sparse, ROWS, ONES, ".* expects IndexedSlices"),
        (sparse, ROWS, outside, "index of slice 0 exceeded"),
    ):
        named = rf"^grads\[17\], for accumulator '{accumulators[17].name}': {told}"
        with pytest.raises(WRONG, match=named) as caught:
            gr.apply_grads(accumulators, with_one(usual, odd))
        assert len(str(caught.value)) < 250
    for accumulators, num_grads, told in (
        ([*dense[:17], some], 18, r"grads\[17\], for accumulator 'some': Shape mismatch"),
        (dense, 299, "grads has 299 entries, accumulators has 300; pass one"),
        ([*dense[:17], 3], 18, r"accumulators\[17\]=3 must be an accumulator of this process"),
        (dense[0], 1, "accumulators=<Cond.* must be a list of accumulators"),
        ([*dense, dense[3]], 301, r"accumulators\[300\] is the same as accumulators\[3\]"),
    ):
        with pytest.raises(WRONG, match=f"^{told}") as caught:
            gr.apply_grads(accumulators, [ONES] * num_grads)
        assert len(str(caught.value)) < 250
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
    for grads, found, told in (
        (with_one(ONES, four), variables, rf"{of_17} is float32\[4\]; it"),
        (with_one(ONES, "ab"), variables, f"{of_17}: str is not an array"),
        (with_one(ONES, far), variables, f"{of_17} is on sim:0, .* 59 m"),
        ([ONES] * 18, [*variables[:17], LONG], r"grads_and_vars\[17\]: \['x', .* is not a Variab"),
        (
            [ONES] * 18,
            [*variables[:17], variables[3]],
            "grads_and_vars .*<Variable 'w3' .* more ",
        ),
        ([four], [wide], "the gradient of <Variable 'wide' .* and 59 more> is float"),
    ):
        pairs = list(zip(grads, found, strict=True))
        with pytest.raises(WRONG, match=f"^{told}") as caught:
            optimizer.apply_gradients(pairs)
        assert len(str(caught.value)) < 250
    for call, told in (
        (
            lambda: optimizer.apply_gradients([(ONES, wide), [ONES]]),
            r"grads_and_vars\[1\] is \[nda",
        ),
        (lambda: optimizer.apply_gradients(3), "grads_and_vars=3 must be a list"),
        (lambda: optimizer.compute_gradients(sum, [wide, LONG]), r".*: var_list\[1\] is \['x'"),
        (lambda: gr.clip_by_global_norm(with_one(ONES, "ab"), 1.0), r"t_list\[17\]: str is not"),
        (lambda: gr.clip_by_global_norm(with_one(ONES, far), 1.0), r"t_list\[17\] is a PerReplica"),
        (lambda: gr.clip_by_global_norm([ONES, np.ones(3, "i4")], 1), r"t_list\[1\] is int32; it"),
        (lambda: gr.add_n([ONES, ONES, "ab"]), "input 2: str is not an array"),
    ):
        with pytest.raises(WRONG, match=f"^{told}") as caught:
            call()
        assert len(str(caught.value)) < 250


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


def test_numbers_of_optimizers_and_terms_are_named(many):
    first = many[2][0]
    pairs = [(ONES, first)]

    def fast():
        return "fast"

    for number, told in (
        ("x", "'x' must be a number"),
        (None, "None must be a number"),
        (np.ones(2), r"ndarray float64\[2\] must be a number"),
        (fast, ".*fast returned 'fast'; it must return a number"),
    ):
        with pytest.raises(WRONG, match=f"^learning_rate={told}$"):
            gr.MomentumOptimizer(number, 0.9).apply_gradients(pairs)
    optimizer = gr.AdamOptimizer(0.1)
    optimizer.beta2 = "x"
    with pytest.raises(ValueError, match=r"^beta2='x' must be a number$"):
        optimizer.apply_gradients(pairs)
    with pytest.raises(TypeError, match=r"is not a Variable; pass a list as var_list=$"):
        optimizer.minimize(lambda: first @ first, [first])
    step = gr.SyncStep([first], gr.GradientDescentOptimizer(0.1), gr.AllReduceCrossDeviceOps())
    with pytest.raises(TypeError, match=r"^terms=None must be a list with one entry per device"):
        step(None)
    with pytest.raises(TypeError, match=r"^terms\[2\]=3 must be a list with one"):
        step([[[ONES]], [[ONES]], 3, [[ONES]]])


def test_arguments_of_another_kind_are_named(mesh):
    """Arguments that TensorFlow has at this position, or that a user may pass by mistake."""
    with pytest.raises(TypeError, match=r"^name=False must be a string$"):
        gr.Variable(ONES, False)  # trainable, in TensorFlow
    with pytest.raises(TypeError, match=r"^name=3 must be a string$"):
        gr.get_variable(3, ONES)
    variable = gr.Variable(ONES, "w", device=mesh)
    for call in (variable.assign, variable.assign_add):
        with pytest.raises(
            TypeError, match=r"^the value for the variable 'w': str is not an array"
        ):
            call("x")
    inner = gr.MomentumOptimizer(0.1, 0.9)
    outer = gr.AGNOptimizer(inner, 1, gr.AGNCustomGetter(mesh[0], center=gr.AGNCenter(mesh)))
    for optimizer in (inner, outer):
        with pytest.raises(TypeError, match=r"^cross_device_ops='nccl' is not a CrossDeviceOps$"):
            optimizer.cross_device_ops = "nccl"


def test_options_that_are_arrays_or_too_large_are_named(mesh):
    two = np.array([1, 2])
    for error, name, options in (
        (ValueError, "backend", {"backend": two}),
        (ValueError, "kernels", {"backend": "sim", "kernels": two}),
        (ValueError, "processes", {"processes": two}),
        (TypeError, "schedule_seed", {"backend": "sim", "schedule_seed": two}),
        (TypeError, "schedule_seed", {"backend": "sim", "schedule_seed": True}),
    ):
        with pytest.raises(error, match=f"^{name}="):
            gr.open_mesh(2, **options)
    accumulator = gr.ConditionalAccumulator("float32", device=mesh[0])
    with pytest.raises(TypeError, match=r"^cast=ndarray int64\[2\] must be True or False$"):
        accumulator.apply_grad(ONES, cast=two)
    with pytest.raises(TypeError, match=r"^timeout=ndarray int64\[2\] must be a number"):
        accumulator.take_grad(1, timeout=two)
    with pytest.raises(TypeError, match=r"^values=array\(3\.\) must be a list"):
        gr.PerReplica(np.array(3.0), mesh)
    mesh.synchronize(deadline=10**400)


def test_the_closed_one_of_many_accumulators_is_named(mesh):
    accs = [gr.ConditionalAccumulator("float32", device=mesh, name=f"q/a{i}") for i in range(9)]
    accs[7].close()
    calls = (
        lambda: gr.apply_grads(accs, [ONES] * 9),
        lambda: gr.apply_grads(accs, [ONES] * 9, -1),
        lambda: gr.take_grads(accs, 1),
        lambda: accs[7].num_accumulated(),
    )
    for call in calls:
        with pytest.raises(gr.errors.CancelledError, match=r"^the accumulator 'a7' was closed$"):
            call()
