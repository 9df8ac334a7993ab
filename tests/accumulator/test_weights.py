"""Weighted gradients: sums, means, checkpoints and what is not read."""

import re
from functools import partial

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse, counters, slices
from support.exact_data import same

import gradreduce as gr


@pytest.fixture
def device():
    with gr.open_mesh(1, backend="sim", strict=True) as mesh:
        yield mesh[0]


@pytest.fixture(params=["process", pytest.param("actor", marks=pytest.mark.ray)])
def make(request, device):
    """Makes accumulators in this process, and such in actors of Ray."""
    if request.param == "process":
        yield lambda kind, *args, **options: kind.make(*args, device=device, **options)
        return
    name, made = request.getfixturevalue("unique_name"), []

    def make(kind, dtype, shape=None):
        cls = getattr(gr.ray, kind.make.__name__)
        made.append(cls(dtype, shape, f"{name}-{len(made)}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_multiplication_needs_no_launch_of_its_own(device):
    names = []
    for weight in (1, 3):
        acc = gr.ConditionalAccumulator("float32", device=device)
        with device.mesh.journal() as journal:
            for _ in range(2):
                acc.apply_grad(np.float32([1, 2]), weight=weight)
            acc.take_grad(2)
        names.append([each.name for each in journal.records if each.kind == "launch"])
    assert names == [["add_n", "accumulate_n", "all_sum"], ["scale", "add_scaled", "all_sum"]]


def test_an_unread_gradient_counts_but_may_be_anything(make):
    dense, rows = make(Dense, "float32", (2,)), make(Sparse, "float32")
    assert dense.apply_grad(None, weight=0)
    assert rows.apply_grad(None, "nothing", weight=0)
    assert rows.apply_indexed_slices_grad(None, weight=0.0)
    for acc in (dense, rows):
        with pytest.raises(gr.errors.InvalidArgumentError, match="have weight 0: at least one"):
            acc.take_grad(1, timeout=60)
    assert counters(dense, rows) == [(1, 0, 0), (2, 0, 0)]
    dense.apply_grad([2.0, 4.0], weight=3)
    rows.apply_grad([3], [[1.0]], weight=2)
    assert same(dense.take_grad(2), np.float32([2, 4]))
    assert same(rows.take_grad(3)[1], np.ones((1, 1), "float32"))


def test_unread_gradients_of_several_accumulators(device):
    accs = [kind.make("float32", device=device) for kind in (Dense, Sparse)]
    assert gr.apply_grads(accs, [None, None], weight=0)
    assert counters(*accs) == [(1, 0, 0)] * 2


def test_the_weight_of_a_stale_gradient_is_not_counted(make):
    acc = make(Dense, "float32")
    acc.set_global_step(1)
    assert not acc.apply_grad([1.0], local_step=0, weight=100)
    assert not acc.apply_grad(None, local_step=0, weight=0)
    acc.apply_grad([1.0], local_step=1, weight=2)
    assert counters(acc) == [(1, 1, 2)]
    assert acc.state_dict()["weight"] == [2.0]


def test_a_sum_of_many_weights_is_exact(make):
    acc = make(Dense, "float64")
    for weight in (1e16, 1.0, 1.0, 2.0**-60):
        acc.apply_grad(0.0, weight=weight)
    state = acc.state_dict()
    assert state["weight"] == [1e16 + 2, 2.0**-60]
    acc.load_state_dict(state)
    assert acc.state_dict()["weight"] == state["weight"]


def test_wrong_weights_change_nothing(make, device):
    dense, rows = make(Dense, "float32"), make(Sparse, "float32")
    calls = [
        partial(dense.apply_grad, [1.0]),
        partial(rows.apply_grad, [0], [[1.0]]),
        partial(rows.apply_indexed_slices_grad, slices([0], 1.0)),
    ]
    number = "must be a number on the host, of at least 0"
    with device.mesh.journal() as journal:
        for weight, kind, message in (
            (-1, ValueError, "weight=-1 must be a finite number of at least 0"),
            (np.ones(1), TypeError, f"weight=ndarray float64[1] {number}"),
        ):
            for call in calls:
                with pytest.raises(kind, match=f"^{re.escape(message)}$"):
                    call(weight=weight)
    assert counters(dense, rows) == [(0, 0, 0)] * 2
    assert not journal.records


def test_wrong_weights_of_replicas_change_nothing(device):
    acc = gr.ConditionalAccumulator("float32", device=device)
    for weight, message in (
        ([1, -2], "weight[1]=-2 must be a finite number of at least 0"),
        ([1, 2], "accumulator 'conditional_accumulator': weight has 2 entries; "),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            acc.apply_grad([1.0], weight=weight)
    assert counters(acc) == [(0, 0, 0)]


@pytest.mark.parametrize("weight", [2, 0.1])
def test_a_weighted_gradient_without_rows_is_saved(make, weight):
    acc = make(Sparse, "float32")
    acc.apply_grad(np.zeros(0, int), np.zeros((0, 1), "float32"), weight=weight)
    acc.load_state_dict(acc.state_dict())
    acc.apply_grad([3], [[4.0]], weight=2)
    assert same(acc.take_grad(2)[1], np.float32([[4]]))


def test_wrong_saved_weights_are_refused(make):
    acc = make(Dense, "float32")
    acc.apply_grad([1.0])
    state = acc.state_dict()
    for weight, kind, message in (
        ("3", TypeError, "['weight']='3' must be a list of numbers"),
        ([-1.0], ValueError, "['weight']=[-1.0] must be finite numbers, whose sum is at le"),
        ([float("nan")], ValueError, "['weight']=[nan] must be finite numbers, whose sum"),
    ):
        with pytest.raises(kind) as caught:
            acc.load_state_dict({**state, "weight": weight})
        assert message in str(caught.value)  # an actor's begins with the name
    assert same(acc.take_grad(1), np.float32([1]))


def test_a_gradient_may_be_added_several_times_in_one_call(device):
    same_buffer = device.upload(np.float32([1]))
    w = gr.Variable(np.zeros(1, "float32"), "w", device=device.mesh)
    step = gr.SyncStep([w], gr.GradientDescentOptimizer(1.0), gr.NcclAllReduce())
    assert step([[[same_buffer] * 4]], weights=[[2, 3, 4, 1]])
    assert same(w.numpy(), np.float32([-1]))


def test_a_sum_of_weights_above_the_largest_float64_is_refused(make):
    acc = make(Dense, "float64")
    acc.apply_grad([1.0], weight=1e308)
    with pytest.raises(gr.errors.InvalidArgumentError) as caught:
        acc.apply_grad([1.0], weight=1e308)
    assert str(caught.value).endswith("the sum of all weights exceeds the largest float64")
    assert counters(acc) == [(1, 0, 0)]
