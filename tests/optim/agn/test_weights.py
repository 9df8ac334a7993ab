"""Weights of local steps; ``test_model.py`` compares their values with a model."""

import re
from collections import Counter

import numpy as np
import pytest
from optim.agn.team import KINDS, Own, Worker, one_variable, pair, whole
from support.checkpoint_cases import changed
from support.compiled_first import check_compiled_first
from support.failing_operations import InjectedError, failing_at

import gradreduce as gr

STARTS = {"table": whole((6, 2)), "weights": whole((5,), seed=1)}


def gradients(seed, *, rows=False):
    grads = {name: whole(value.shape, seed=seed) for name, value in STARTS.items()}
    if rows:
        grads["table"] = gr.IndexedSlices(grads["table"][:3], [5, seed % 6, 5], (6, 2))
    return grads


def sgd():
    return gr.GradientDescentOptimizer(1.0)


@pytest.mark.parametrize("kind", ["momentum", "own"])
@pytest.mark.parametrize("rows", [False, True])
def test_weights_of_1_have_the_launches_and_bits_of_no_weights(mesh, kind, rows):
    (plain,), (weighted,) = (pair(mesh, 2, KINDS[kind][1], STARTS, 1) for _ in range(2))
    for seed in range(6):
        with mesh.journal() as journal:
            plain.step(gradients(seed, rows=rows))
        with mesh.journal() as same:
            weighted.step(gradients(seed, rows=rows), weight=(1, 1.0, np.int32(1), [1])[seed % 4])
        wanted, found = (
            [(each.kind, each.name, each.num_rows, each.nbytes) for each in each.records]
            for each in (journal, same)
        )
        assert found == wanted
    assert weighted.everything() == plain.everything()
    assert "weight" not in weighted.optimizer.state_dict()


def test_a_weight_takes_a_launch_more_for_each_dtype(mesh):
    """Only in its local step; the first one of a period does not read the sum."""
    starts = {"a": np.zeros(3, "float32"), "b": np.zeros(4), "c": np.zeros(5, "float32")}
    (worker,) = pair(mesh, 3, KINDS["momentum"][1], starts, 1)
    home = worker.getter.devices[0]
    grads = {name: home.upload(value + 1) for name, value in starts.items()}
    found = []
    for _ in range(2):  # the first period makes the slots
        for weight in (2, 1, 3):
            with mesh.journal() as journal:
                worker.step(grads, weight=weight)
            found.append(Counter(each.name for each in journal.of("launch")))
    assert found[3] == {"momentum": 2, "scale": 2}
    assert found[4] == {"local_momentum": 2}
    pushed = {name: count for name, count in found[5].items() if name.startswith("global")}
    assert found[5] == {"momentum": 2, "add_scaled": 2, **pushed}
    assert list(pushed) == ["global_momentum"]


def test_a_sum_of_weights_is_exact_and_rounded_once(mesh):
    getter, var, optimizer = one_variable(mesh, sgd(), 4, np.zeros(1))
    for weight, value in (1e16, 0.0), (1.0, 0.0), (1.0, 0.0), (2.0**-60, 2.0**70):
        optimizer.apply_gradients([(np.array([value]), var)], weight=weight)
    assert getter.center_variable(var).numpy() == -(2.0**10) / (1e16 + 2)


def test_a_product_is_rounded_once(mesh):
    """A weight of more digits than float32 has is not rounded to float32 first."""
    assert np.float32(9 * 0.1) != np.float32(9) * np.float32(0.1)
    getter, var, optimizer = one_variable(mesh, sgd(), 3, np.zeros(1, "float32"))
    for total in 9 * 0.1, 0:  # the second gradient is added
        optimizer.apply_gradients([(np.float32([9 if total else -9]), var)], weight=0.1)
        assert getter.accumulation(var).numpy() == np.float32(total)


def test_unread_gradients_change_nothing_but_the_count(mesh):
    (worker,) = pair(mesh, 3, KINDS["adam"][1], STARTS, 1)
    worker.step(gradients(0), weight=3)
    before, bad = worker.everything(), {"table": "no array", "weights": None}
    assert worker.step(bad, weight=0) is False
    after = worker.everything()
    assert [each for each in before["arrays"] if each not in after["arrays"]] == [
        ("local_step", [("<i4", (), np.int32(1).tobytes())])
    ]
    assert after["powers"] == before["powers"]
    (calm,) = pair(mesh, 1, KINDS["adam"][1], STARTS, 1)
    calm.step(gradients(0))
    assert worker.step(dict.fromkeys(bad), weight=[0.0]) is True  # pushes 3 * g / 3
    assert all((worker.center[name] == calm.center[name]).all() for name in STARTS)


def refused(worker, error, text, grads, weight):
    before, state = worker.everything(), worker.optimizer.state_dict()
    with pytest.raises(error, match=re.escape(text)):
        worker.step(grads, weight=weight)
    assert worker.everything() == before
    assert worker.optimizer.state_dict().get("weight") == state.get("weight")


def test_weights_that_are_refused(mesh):
    """Nothing changes, also if the call would have pushed; then the worker goes on."""
    home = mesh[[0, 1]]
    worker = Worker(home, gr.AGNCenter(mesh), STARTS, sgd, period=2)
    grads = {name: np.zeros_like(value) for name, value in STARTS.items()}
    refusals = [
        ("3", TypeError, "weight='3' must be a number on the host"),
        (True, TypeError, "weight=True must be a number on the host"),
        (np.ones(2), TypeError, "weight=ndarray float64[2] must be a number on the host"),
        (-1, ValueError, "weight=-1 must be a finite number of at least 0"),
        (float("nan"), ValueError, "weight=nan must be a finite number"),
        (10**400, ValueError, "must be a finite number"),
        ([1, -2.0], ValueError, "weight[1]=-2.0 must be a finite number"),
        ([1], ValueError, "weight has 1 entries; expected 2, one per replica of the worker"),
        ([1e308, 1e308], ValueError, "weight: the sum of the weights of a period exceeds"),
    ]
    for step in range(2):
        for weight, error, text in refusals:
            refused(worker, error, text, grads, weight)
        with pytest.raises(ValueError, match="weight=-1 must be"):
            worker.optimizer.minimize(pytest.fail, weight=-1)
        assert worker.step(grads, weight=(1e308, 7e307)[step]) is (step == 1)
        if not step:
            refused(worker, ValueError, "weight: the sum of the weights", grads, 1e308)
    alien = gr.Variable([1.0], "alien", device=home)
    with pytest.raises(KeyError, match="was not created by"):
        worker.optimizer.apply_gradients([(None, alien)], weight=0)


def test_a_period_without_weights_has_no_end(mesh):
    text = "weight=0: all 2 steps of this period would have weight 0"
    (worker,) = pair(mesh, 2, sgd, STARTS, 1)
    assert worker.step(gradients(0), weight=0) is False
    for _ in range(2):
        refused(worker, ValueError, text, gradients(0), 0)
    assert worker.step(gradients(0), weight=0.5) is True
    for name, grad in gradients(0).items():
        assert (worker.center[name] == STARTS[name] - grad).all()
    worker.step(gradients(0), weight=2)
    worker.optimizer.get_init_op(0)()  # drops the gradient and its weight
    refused(worker, ValueError, text, gradients(0), 0)


def test_a_start_drops_weights_with_the_gradients(mesh):
    (worker,) = pair(mesh, 3, sgd, STARTS, 1)
    worker.step(gradients(0), weight=100)
    worker.optimizer.get_init_op(0)()
    assert "weight" not in worker.optimizer.state_dict()
    for seed, weight in (1, 3), (2, 1):
        worker.step(gradients(seed), weight=weight)
    for name in STARTS:
        mean = (3 * gradients(1)[name] + gradients(2)[name]) / np.float32(4)
        assert (worker.center[name] == STARTS[name] - mean).all()


@pytest.mark.parametrize("weight", [0, 1, 3])
def test_a_push_that_is_retried_has_the_weights_of_its_period(mesh, weight):
    """Not that of the step that retries it."""
    teams = [pair(mesh, 2, KINDS["momentum"][1], STARTS, 1, center=gr.AGNCenter(mesh[1:]))[0]
             for _ in range(2)]  # fmt: skip
    for seed in range(3):
        for worker in teams:
            worker.step(gradients(seed), weight=2 + seed)
    calm, failed = teams
    calm.step(gradients(3), weight=6)
    with failing_at(mesh.devices[1:], 1, ["_launch"]), pytest.raises(InjectedError):
        failed.step(gradients(3), weight=6)
    assert failed.optimizer.state_dict()["weight"] == [10.0]
    failed.optimizer.load_state_dict(failed.optimizer.state_dict())
    for worker in teams:
        assert worker.step(gradients(4), weight=weight) is (worker is failed)
        worker.step(gradients(5), weight=1)
    assert failed.everything() == calm.everything()


def test_a_retried_push_does_not_come_before_an_error(mesh):
    """With a period of 1, weight 0 is always refused."""
    (worker,) = pair(mesh, 1, sgd, STARTS, 1, center=gr.AGNCenter(mesh[1:]))
    with failing_at(mesh.devices[1:], 1, ["_launch"]), pytest.raises(InjectedError):
        worker.step(gradients(0), weight=2)
    refused(worker, ValueError, "all 1 steps of this period would have weight 0", {"table": 0}, 0)
    assert worker.step(gradients(1), weight=2) is True


@pytest.mark.parametrize("way", ["momentum", "own", "distance"])
@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_checkpoint_carries_the_sum_of_weights(mesh, way, num_before):
    make, options = (sgd, {"distance_scale": 0.5}) if way == "distance" else (KINDS[way][1], {})
    one, two = (pair(mesh, 4, make, STARTS, 1, **options)[0] for _ in range(2))
    weights = 1, 2.5, 0, 3, 1, 1, 2, 0
    for seed in range(num_before):
        one.step(gradients(seed, rows=seed % 2), weight=weights[seed])
    state = one.optimizer.state_dict()
    wanted = [None, [3.5], [3.5]][num_before - 1]
    assert state.get("weight") == wanted
    two.step(gradients(7), weight=9)  # replaced by the load
    two.getter.center.load_state_dict(one.getter.center.state_dict())
    two.optimizer.load_state_dict(gr.checkpoint.join(*gr.checkpoint.split(state)))
    assert two.optimizer.state_dict().get("weight") == wanted
    for seed in range(num_before, 8):
        for worker in (one, two):
            worker.step(gradients(seed, rows=seed % 2), weight=weights[seed])
    assert two.everything() == one.everything()


def test_a_state_of_a_worker_that_read_nothing(mesh):
    (one,), (two,) = (pair(mesh, 3, sgd, STARTS, 1) for _ in range(2))
    one.step(gradients(0), weight=0)
    state = one.optimizer.state_dict()
    assert (state["weight"], state["sums"]) == ([], {})
    two.optimizer.load_state_dict(state)
    for worker in (one, two):
        worker.step(gradients(1), weight=2)
        worker.step(gradients(2), weight=6)
    assert two.everything() == one.everything()


def test_wrong_sums_of_weights_in_a_state(mesh):
    (worker,) = pair(mesh, 3, sgd, STARTS, 1)
    empty = worker.optimizer.state_dict()
    worker.step(gradients(0), weight=2)
    state, before = worker.optimizer.state_dict(), worker.everything()
    number = "state['weight']=[{}] must be finite numbers, whose sum is at least 0 and finite"
    for wrong, error, text in [
        (changed(state, ("weight",), [-1.0]), ValueError, number.format(-1.0)),
        (changed(state, ("weight",), [1e308] * 2), ValueError, number.format("1e+308, 1e+308")),
        (changed(state, ("weight",), ["2"]), TypeError, "state['weight']=['2'] must be a list of"),
        (changed(state, ("weight",), []), ValueError, "state['weight'] is [], but state['sums'] "
                                                      "has 2 sums"),
        ({**empty, "weight": [2.0]}, ValueError, "state['weight'] is [2.0], but state['sums'] has "
                                                 "0 sums; the first is empty if there are none"),
    ]:  # fmt: skip
        with pytest.raises(error, match=re.escape(text)):
            worker.optimizer.load_state_dict(wrong)
        assert worker.everything() == before
        assert worker.optimizer.state_dict()["weight"] == [2.0]


def test_minimize_weighs_replicas_and_steps(mesh):
    """The same examples as one batch on one device."""
    batches = [([1, 2, 3], [4]), ([5], [6, 7, 8]), ([9, 10], [])]
    starts = {"scale": np.float32(0)}
    worker = Worker(mesh[[0, 1]], gr.AGNCenter(mesh), starts, sgd, period=3)
    (scale,) = worker.variables.values()
    local = np.float32(0)
    for batch in batches:
        data = gr.PerReplica([np.float32(each) for each in batch], devices=worker.getter.devices)

        def loss(data=data):
            given = np.asarray(data.get())
            return np.sum(scale * given) / np.float32(given.size) if given.size else scale * np.nan

        worker.optimizer.minimize(loss, var_list=[scale], weight=list(map(len, batch)))
        local -= np.mean(np.float32([*batch[0], *batch[1]]))
        if batch is not batches[-1]:
            assert all(copy.numpy() == local for copy in scale.buffers)
    assert worker.center["scale"] == scale.numpy() == np.float32(-5.5)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("make", [KINDS["momentum"][1], Own], ids=["momentum", "own"])
def test_no_weighted_step_compiles_after_its_first_launch(make, first):
    """Nor a step without weight after it."""

    def calls(mesh):
        starts = {"one": np.ones((4, 3), np.float16), "two": np.ones((4, 3), np.float16)}
        (worker,) = pair(mesh, 2, make, starts, 1)
        yield
        whole = starts["one"]
        rows = gr.IndexedSlices(whole[:2], [1, 2])
        given = whole, whole, whole, rows, rows, rows, whole, rows, whole, whole
        for each, weight in zip(given, (first, 3, 1, 2, 2, 1, 2, 2, 0, 1), strict=True):
            worker.step({"one": each, "two": whole}, weight=weight)
            yield

    with gr.open_mesh(1, backend="sim") as mesh:
        check_compiled_first(mesh, calls)
