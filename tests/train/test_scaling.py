"""SyncStep's clip_norm, skip_nonfinite, loss_scale and check_finite."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import examples
from support.thread_group import run_processes, run_replicas
from train import training

import gradreduce as gr
from gradreduce.ops import BLOCK

VARIABLES = {
    "w": ((3, BLOCK - 5), "float32"),
    "b": ((7,), "float32"),
    "e": ((0, 2), "float32"),
    "h": ((40,), "bfloat16"),
    "d": ((2 * BLOCK + 1,), "float64"),
}
WRONG = (math.nan, math.inf, -math.inf)


def make_step(mesh, variables=VARIABLES, **options):
    return training.make_step(mesh, variables, gr.AdamOptimizer(0.1), **options)


def terms_of(number, step, replicas, wrong=()):
    """Gradients of one call, of these replicas; in every third call one variable has none.

    Args:
        wrong: (call, replica, variable, value): there an element is this value.
    """
    made = []
    for replica in replicas:
        random = np.random.default_rng((number, replica))
        row = [[np.asarray(random.standard_normal(v.shape) * 50, v.dtype)] for v in step.variables]
        for call, of_replica, index, value in wrong:
            if (call, of_replica) == (number, replica):
                row[index][0].reshape(-1)[-1] = value
        if number % 3 == 1:
            row[0] = None
        made.append(row)
    return made


def train(counts, calls=range(4), wrong=(), state=None, placement=None, seed=None, **options):
    """Returns the values, what each call returned and left, and the state."""

    def call(step, number, replicas):
        done = step(terms_of(number, step, replicas, wrong))
        norm = step.last_norm
        norm = None if norm is None else np.float64(norm).tobytes()
        return done, step.global_step, step.num_skipped, step.loss_scale, norm

    return training.train(
        counts, lambda mesh, _: make_step(mesh, **options), call, calls, state, placement, seed
    )


@st.composite
def cases(draw):
    options = draw(st.fixed_dictionaries({}, optional={
        "clip_norm": st.sampled_from([0.5, 2000.0, math.inf]),
        "skip_nonfinite": st.booleans(),
        "loss_scale": st.sampled_from([8.0, 0.25, gr.DynamicLossScale(16.0, growth_interval=2)]),
    }))  # fmt: skip
    counts = draw(st.sampled_from([(2,), (3,), (1, 1), (2, 1), (1, 1, 2)]))
    calls = draw(st.integers(0, 2)) * sum(counts) or None  # for an update
    replica, variable = st.integers(0, sum(counts) - 1), st.sampled_from([0, 1, 4])
    wrong = st.tuples(st.integers(0, 3), replica, variable, st.sampled_from(WRONG))
    return counts, draw(st.lists(wrong, max_size=2)), {**options, "num_required": calls}


@given(cases(), st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_the_bits_depend_on_the_replicas_alone(case, is_sharded):
    counts, wrong, options = case
    wanted = train([sum(counts)], wrong=wrong, **options)
    np.testing.assert_equal(
        train(counts, wrong=wrong, shard_optimizer=is_sharded, **options), wanted
    )


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 0, 0), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_bits_are_the_same_for_replicas_that_share_a_device(is_sharded, placement, seed):
    options = {"clip_norm": 1.0, "loss_scale": gr.DynamicLossScale(), "calls": range(12)}
    wanted = train([3], **options)
    found = train([3], placement=placement, seed=seed, shard_optimizer=is_sharded, **options)
    np.testing.assert_equal(found, wanted)


def test_different_numbers_of_gradients_do_not_change_the_order_of_a_norm():
    """Small squares are lost if they are added to a large one, but not if they come before it."""
    variables = {f"v{index}": ((1,), "float64") for index in range(40)}
    found = []
    with gr.open_mesh(2, backend="sim", strict=True) as mesh:
        for is_sharded in (False, True):
            options = {"clip_norm": 1.0, "num_required": 4, "shard_optimizer": is_sharded}
            step = make_step(mesh, variables, **options)
            row = [[np.float64([2**27 if index == 1 else 1.25])] for index in range(40)]
            assert not step([[None if index == 1 else each for index, each in enumerate(row)]] * 2)
            assert step([row] * 2)
            found.append((step.last_norm, [each.numpy().tobytes() for each in step.variables]))
    assert found[0][0] == 2.0**27
    assert found[1] == found[0]


@pytest.mark.parametrize("scale", [None, 4.0])
def test_means_are_clipped_as_by_clip_by_global_norm(scale):
    with gr.open_mesh((0, 1, 1), backend="sim", strict=True) as mesh:
        step = make_step(mesh, clip_norm=30.0, loss_scale=scale)
        other = make_step(mesh, {f"{name}2": of for name, of in VARIABLES.items()})
        for number in range(3):
            terms = terms_of(number, step, range(3))
            step(terms)
            means = [
                None if of_first is None
                else mesh_mean([row[index][0] for row in terms], mesh, scale or 1.0)
                for index, of_first in enumerate(terms[0])
            ]  # fmt: skip
            clipped, norm = gr.clip_by_global_norm(means, 30.0)
            other.optimizer.apply_gradients(zip(clipped, other.variables, strict=True))
            assert np.float32(step.last_norm) == norm.primary
            assert step.last_norm > 30
        for one, two in zip(step.variables, other.variables, strict=True):
            assert one.numpy().tobytes() == two.numpy().tobytes()


def mesh_mean(replicas, mesh, scale):
    """The mean of arrays, divided by a power of two, on each device."""
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    value = gr.PerReplica(replicas, mesh)
    mean = ops.reduce(gr.ReduceOp.MEAN, value, value).primary
    return gr.Mirrored([(mean.astype(np.float64) / scale).astype(mean.dtype)] * len(mesh), mesh)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_skipped_update_changes_nothing_but_the_step(is_sharded):
    options = {"skip_nonfinite": True, "shard_optimizer": is_sharded}
    wanted, _, state = train([2], calls=(0, 2, 3), **options)
    found, seen, other = train([2], calls=(0, 5, 2, 3), wrong=[(5, 1, 4, math.nan)], **options)
    assert found == wanted
    assert [each[:4] for each in seen] == [
        (True, 1, 0, 1.0), (False, 2, 1, 1.0), (True, 3, 1, 1.0), (True, 4, 1, 1.0),
    ]  # fmt: skip
    np.testing.assert_equal(other["optimizer"], state["optimizer"])
    assert np.isnan(np.frombuffer(seen[1][4]))
    without, *_ = train([2], calls=(0, 5), wrong=[(5, 1, 4, math.nan)], clip_norm=1.0)
    assert all(np.isnan(np.frombuffer(each, np.float64)).all() for each in without[4:])


def test_an_overflow_in_the_wire_dtype_is_skipped_too():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable(np.ones(3), "w", dtype="float32", device=mesh)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, wire_dtype="float16")
        step = gr.SyncStep([variable], gr.AdamOptimizer(0.1), ops, skip_nonfinite=True)
        assert not step([[[np.full(3, 1e6, np.float32)]]] * 2)
        assert (step.num_skipped, step.last_norm) == (1, math.inf)
        assert variable.numpy().tolist() == [1.0] * 3


def test_gradients_are_transferred_multiplied_by_the_scale():
    """2**-26 is less than half of the smallest float16."""
    with gr.open_mesh(8, backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, wire_dtype="float16")
        for scale, wanted in ((1.0, 0.0), (1024.0, 2.0**-26)):
            variable = gr.Variable(np.zeros(3), "w", dtype="float32", device=mesh)
            optimizer = gr.GradientDescentOptimizer(1.0)
            step = gr.SyncStep([variable], optimizer, ops, loss_scale=scale)
            assert step([[[np.full(3, scale * 2.0**-26, np.float32)]]] * 8)
            assert variable.numpy().tolist() == [-wanted] * 3


def test_gradients_of_another_scale_are_stale():
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh, loss_scale=gr.DynamicLossScale())
        first = step.global_step
        assert not step(terms_of(0, step, range(2), [(0, 0, 1, math.nan)]), first)
        late = terms_of(2, step, range(2), [(2, 0, 1, math.nan)])
        assert not step(late, first)
        assert [each.num_dropped for each in step.accumulators] == [2] * len(VARIABLES)
        assert (step.num_skipped, step.global_step) == (1, 1)


def test_a_dynamic_scale_shrinks_at_once_and_grows_later():
    rule = gr.DynamicLossScale(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    wrong = [(number, 0, 1, math.inf) for number in (2, 9)]
    _, seen, state = train([1], calls=range(12), wrong=wrong, loss_scale=rule)
    assert [each[3] for each in seen] == [8, 8, 2, 2, 2, 8, 8, 8, 32, 8, 8, 8]
    assert (state["num_skipped"], state["loss_scale"], state["growth_tracker"]) == (2, 8.0, 2)
    sooner = gr.DynamicLossScale(growth_interval=1)  # than the saved number of updates
    _, seen, _ = train([1], calls=range(12, 14), state=state, loss_scale=sooner)
    assert [each[3] for each in seen] == [16.0, 32.0]
    smallest = gr.DynamicLossScale(2.0**-125)  # by which gradients are divided, and overflow
    assert [each[3] for each in train([1], range(2), loss_scale=smallest)[1]] == [2.0**-126] * 2
    largest = gr.DynamicLossScale(2.0**126, growth_interval=1)
    assert [each[3] for each in train([1], range(2), loss_scale=largest)[1]] == [2.0**127] * 2


def test_a_norm_that_another_thread_reads_late_does_not_replace_a_newer_one(monkeypatch):
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh, {"w": ((1,), "float32")}, clip_norm=math.inf)
        step([[[np.float32([3])]]] * 2)
        read = gr.Buffer.numpy

        def read_late(buffer):
            monkeypatch.setattr(gr.Buffer, "numpy", read)
            value = read(buffer)
            step([[[np.float32([4])]]] * 2)
            return value

        monkeypatch.setattr(gr.Buffer, "numpy", read_late)
        assert (step.last_norm, step.last_norm) == (3.0, 4.0)


CHECKED = [([3], 2, "replica 2"), ([1, 2], 2, r"replica 2 \(process 1\)"),
           ([1, 2], 0, r"replica 0 \(process 0\)")]  # fmt: skip


@pytest.mark.parametrize(("counts", "replica", "where"), CHECKED)
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(counts, replica, where):
    text = f"^the gradient of 'b' in {where} is not finite at step 1; nothing was added$"

    def work(mesh, replicas):
        step = make_step(mesh, check_finite=True)
        assert step(terms_of(0, step, replicas))
        before = step.state_dict()
        wrong = [(3, replica, 1, math.nan), (3, replica, 4, math.inf), (3, 1, 4, math.inf)]
        terms = terms_of(3, step, replicas, wrong)
        with pytest.raises(FloatingPointError, match=text):
            step(terms)
        np.testing.assert_equal(step.state_dict(), before)
        # Gradients that one process knows to be stale are dropped, as they are.
        assert not step(terms, 0 if replicas[0] == 0 else None)
        assert step(terms_of(2, step, replicas))
        return step.state_dict()

    found = run_replicas(counts, work)
    wanted = train([sum(counts)], (0, 2))[2]
    for state in found:
        np.testing.assert_equal(state["variables"], wanted["variables"])


def test_what_the_host_waits_for_and_what_is_launched():
    waits, launches = {}, {}
    cases = {"none": {}, "clip": {"clip_norm": 1.0}, "scale": {"loss_scale": 2.0},
             "skip": {"skip_nonfinite": True}, "check": {"check_finite": True},
             "all": {"clip_norm": 1.0, "loss_scale": gr.DynamicLossScale()}}  # fmt: skip
    for number in (3, 20):
        variables = {f"v{place}": ((9,), "float32") for place in range(number)}
        for name, options in cases.items():
            with gr.open_mesh((0, 1), backend="sim") as mesh:
                step = make_step(mesh, variables, **options)
                terms = [[[device.put(np.ones(9, np.float32))]] * number for device in mesh]
                step(terms)
                with mesh.journal() as journal:
                    assert step(terms)
                waits[name, number] = journal.syncs
                launches[name, number] = journal.launches
                assert (journal.uploads, journal.copies) == (0, 0)
    assert {name: waits[name, 20] for name in cases} == {
        "none": 0, "clip": 0, "scale": 0, "skip": 1, "check": 2, "all": 1,
    }  # fmt: skip
    extra = {name: launches[name, 20] - launches["none", 20] for name in cases}
    # Of each device: two for the sums of blocks, one for the norm, one each to clip and to divide.
    assert extra == {"none": 0, "clip": 8, "scale": 2, "skip": 3, "check": 4, "all": 10}
    assert all(launches[name, 3] == launches[name, 20] for name in cases)


@pytest.mark.parametrize(("is_sharded", "more"), [(False, 0), (True, 1)])
def test_the_decision_takes_no_exchange_of_its_own(is_sharded, more):
    """Sharded, the sums of blocks are exchanged; else nothing, and no number is sent alone."""

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            found = []
            for options in ({}, {"clip_norm": 1.0, "loss_scale": gr.DynamicLossScale()}):
                step = make_step(mesh, shard_optimizer=is_sharded, **options)
                step(terms_of(0, step, [group.rank]))
                with mesh.journal() as journal:
                    assert step(terms_of(0, step, [group.rank]))
                found.append(len(journal.of("exchange")))
                slots = step.optimizer.variables()
                assert not is_sharded or all(slot.buffers[0].size for slot in slots)
            return found

    for plain, scaled in run_processes(2, work):
        assert scaled == plain + more


@pytest.mark.parametrize("counts", [([2], [1, 1]), ([1, 1], [2])], ids=str)
def test_a_training_continues_with_its_scale(counts):
    before, after = counts
    options = {"loss_scale": gr.DynamicLossScale(64.0, growth_interval=2), "num_required": 4}
    wrong = [(3, 1, 1, math.nan)]
    wanted = train([2], range(9), wrong, **options)
    state = train(before, range(5), wrong, **options)[2]
    assert [state[key] for key in ("num_skipped", "loss_scale", "growth_tracker")] == [1, 32.0, 0]
    found = train(after, range(5, 9), wrong, state, shard_optimizer=True, **options)
    assert found[0] == wanted[0]
    np.testing.assert_equal(found[2], wanted[2])


def test_states_of_other_scales():
    dynamic = gr.DynamicLossScale(64.0, growth_interval=2)
    fixed = train([2], range(2), loss_scale=8.0)[2]
    assert train([2], (), state=fixed, loss_scale=dynamic)[2]["loss_scale"] == 64.0
    assert train([2], (), state=fixed, loss_scale=2.0)[2]["loss_scale"] == 2.0
    state = train([2], range(2), loss_scale=dynamic)[2]
    assert (state["loss_scale"], train([2], (), state=state)[2]["loss_scale"]) == (128.0, 1.0)
    waiting = train([2], range(1), loss_scale=8.0, num_required=4)[2]
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh, loss_scale=4.0)
        before = step.state_dict()
        for change, text in [
            (waiting, "^the state has gradients with loss_scale 8 that wait for an "
             "update, but this step has loss_scale 4: use the same loss_scale, or load a state "
             "that was saved right after the step returned True$"),
            ({"loss_scale": 0.0}, r"^state\['loss_scale'\]=0\.0 must be above 0"),
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=text):
                step.load_state_dict({**fixed, **change})
            np.testing.assert_equal(step.state_dict(), before)


def test_arguments_that_cannot_be_used():
    with gr.open_mesh(2, backend="sim") as mesh:
        step = make_step(mesh)
        assert (step.num_skipped, step.loss_scale, step.last_norm) == (0, 1.0, None)
        measured = make_step(mesh, clip_norm=math.inf)
        for each in (step, measured):
            assert each(terms_of(0, each, range(2)))
        assert (step.last_norm, measured.last_norm > 1000) == (None, True)
        for one, other in zip(step.variables, measured.variables, strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()
        for options, error, text in [
            ({"clip_norm": 0}, ValueError, "^clip_norm=0 must be above 0$"),
            ({"clip_norm": math.nan}, ValueError, "^clip_norm=nan must be above 0$"),
            ({"clip_norm": "1"}, TypeError, "^clip_norm='1' must be a number$"),
            ({"loss_scale": math.inf}, ValueError, "^loss_scale=inf must be above 0 and finite$"),
            ({"loss_scale": True}, TypeError, "^loss_scale=True must be a number$"),
            ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite=1"),
            ({"check_finite": True, "skip_nonfinite": True}, ValueError, "pass one of them$"),
            ({"check_finite": True, "loss_scale": gr.DynamicLossScale()}, ValueError,
             "would skip: pass one of them$"),
            ({"variables": {"h": ((2,), "float16")}, "loss_scale": 2.0}, ValueError,
             "^loss_scale=2.0 cannot be used with 'h', which is float16: a gradient divided by"),
        ]:  # fmt: skip
            with pytest.raises(error, match=text):
                make_step(mesh, **options)
    for arguments, text in [
        ({"init_scale": 0}, "^init_scale=0 must be above 0 and finite$"),
        ({"growth_factor": 1.0}, "^growth_factor=1.0 must be above 1$"),
        ({"backoff_factor": 1.0}, "^backoff_factor=1.0 must be below 1$"),
        ({"growth_interval": 0}, "^growth_interval=0 must be at least 1$"),
    ]:
        with pytest.raises(ValueError, match=text):
            gr.DynamicLossScale(**arguments)
