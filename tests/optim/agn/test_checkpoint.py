"""Checkpoints of workers and centers: training continues with the same bits."""

import copy
import hashlib
import pickle
import re

import numpy as np
import pytest
from optim.agn.team import Own, pair, whole
from support.checkpoint_cases import changed

import gradreduce as gr
from gradreduce.accumulator.sparse_storage import SparseSum

SHAPES = {"table": (6, 2), "weights": (5,)}
WAYS = {
    "momentum": (lambda: gr.MomentumOptimizer(0.1, 0.9), {}),
    "masters": (lambda: gr.MomentumOptimizer(0.1, 0.9, master_dtype="float32"), {}),
    "adam": (lambda: gr.AdamOptimizer(0.1), {"distance_scale": 0.5, "reset_momentum": True}),
    "lazy adam": (lambda: gr.AdamOptimizer(0.1, lazy=True), {}),
    "own": (Own, {"distance_scale": 0.5}),
}


def team_of(mesh, way):
    make, options = WAYS[way]
    dtype = "float16" if way == "masters" else "float32"
    starts = {name: whole(shape, dtype, 3) for name, shape in SHAPES.items()}
    return pair(mesh, 3, make, starts, 2, **options)


def steps(team, seeds):
    for seed in seeds:
        worker = team[seed % 2]
        dtype = worker.variables["table"].dtype
        grads = {name: whole(shape, dtype, seed) for name, shape in SHAPES.items()}
        if seed % 7 != 1:  # rows, and in some periods an array too
            grads["table"] = gr.IndexedSlices(grads["table"][:3], [5, seed % 6, 5], SHAPES["table"])
        worker.step(grads)


def saved(team):
    center = team[0].getter.center
    return copy.deepcopy([center.state_dict(), *(w.optimizer.state_dict() for w in team)])


def loaded(team, states):
    team[0].getter.center.load_state_dict(states[0])
    for worker, state in zip(team, states[1:], strict=True):
        worker.optimizer.load_state_dict(state)


def digest(team) -> str:
    found = hashlib.sha256()
    for worker in team:
        for name, arrays in worker.everything()["arrays"]:
            found.update(f"{name}{arrays[0]}".encode())
        found.update(repr(worker.inner._slots.powers).encode())
    return found.hexdigest()


@pytest.mark.parametrize("num_before", [1, 8, 12])
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_with_the_same_bits(mesh, way, num_before):
    """On a mesh of another implementation, within a period and at the end of one."""
    one = team_of(mesh, way)
    steps(one, range(num_before))
    states = saved(one)
    steps(one, range(num_before, 15))
    with gr.open_mesh(3, backend="sim", kernels="compiled", strict=True, peer_access=False) as mesh:
        two = team_of(mesh, way)
        steps(two, range(30, 34))  # replaced by the load
        loaded(two, states)
        steps(two, range(num_before, 15))
        assert digest(two) == digest(one)


def test_sums_of_rows_are_saved_as_rows(mesh):
    (worker,) = pair(mesh, 3, None, {"t": np.zeros((6, 2), "float16")}, 1)
    worker.step({"t": gr.IndexedSlices(np.ones((2, 2), "float16"), [4, 4])})
    state = worker.optimizer.state_dict()
    rows = state["sums"]["t"]
    assert (rows["indices"].tolist(), rows["values"].tolist()) == ([4], [[2, 2]])
    assert rows["values"].dtype == np.dtype("float32")
    assert state["pulled"] == {}
    worker.optimizer.load_state_dict(state)
    assert isinstance(worker.getter._shared.sums[worker.variables["t"]], SparseSum)
    rows["values"][...] = rows["indices"][...] = 0
    assert worker.sums["t"][4].tolist() == [2, 2]


def test_a_checkpoint_of_before_the_first_push_has_no_slots(mesh):
    """The slots are created again before a push."""
    one, two = pair(mesh, 1, WAYS["momentum"][0]), pair(mesh, 1, WAYS["momentum"][0])
    empty = one[0].getter.center.state_dict()
    for team in (one, two):
        for _ in range(3):
            team[0].step({"v": np.ones(3, "float32")})
    one[0].getter.center.load_state_dict({**empty, "optimizer": None})
    assert one[0].optimizer.get_slot(one[0].getter.center.variables()[0], "momentum") is None
    two[0].getter.center.load_state_dict(empty)
    found = []
    for team in (one, two):
        team[0].step({"v": np.ones(3, "float32")})
        slots = team[0].getter.center._shared.slot_variables()
        found.append((team[0].center["v"].tolist(), [var.numpy().tolist() for var in slots]))
    assert found == [([-np.float32(0.1)] * 3, [[1.0] * 3])] * 2


def test_missing_slots_are_made_for_variables_of_earlier_pushes(mesh):
    starts = {"a": np.zeros(2, "float32"), "b": np.zeros(2, "float32")}
    (worker,) = pair(mesh, 2, WAYS["momentum"][0], starts, 1)
    empty = worker.getter.center.state_dict()
    for _ in range(2):
        worker.step({name: value + 1 for name, value in starts.items()})
    worker.step({"a": starts["a"] + 1})
    worker.getter.center.load_state_dict(empty)
    assert worker.step({"b": starts["b"] + 1}) is True
    assert worker.center["a"].tolist() == worker.center["b"].tolist()


# Cases in addition to those that tests/test_checkpoint.py has for every class.
WRONG = [
    ("worker", ("sums", "table", "indices"), np.array([9, 1]), ValueError, "['sums']['table']"),
    ("worker", ("local_step",), 2**31, ValueError, "=2147483648 must be at most 2147483647"),
    ("worker", ("is_due",), 1, TypeError, "state['is_due']=1 must be True or False"),
    ("center", ("optimizer", "slots"), 3, TypeError, "expected a dict"),
]


def test_what_is_wrong_changes_nothing(mesh):
    team = team_of(mesh, "momentum")
    steps(team, [2, 3, 4, 5, 6, 10, 12])  # a period, and sums of rows in the next
    states, everything = saved(team), [worker.everything() for worker in team]
    targets = {"center": team[0].getter.center, "worker": team[0].optimizer}
    for which, path, value, error, text in WRONG:
        state = changed(states[which == "worker"], path, value)
        with pytest.raises(error, match=re.escape(text)):
            targets[which].load_state_dict(state)
        assert [worker.everything() for worker in team] == everything
    assert pickle.dumps(saved(team)) == pickle.dumps(states)


def test_states_of_sums_that_cannot_be_pushed(mesh):
    """A pending push needs sums; the distance needs what was pulled."""
    plain, scaled = (
        pair(mesh, 4, num=1, distance_scale=scale)[0].optimizer for scale in (None, 1.0)
    )
    with pytest.raises(ValueError, match="there are no sums to push"):
        plain.load_state_dict({**plain.state_dict(), "is_due": True})
    (worker,) = pair(mesh, 4, num=1)
    worker.step({"v": np.ones(3, "float32")})
    with pytest.raises(ValueError, match=r"state\['pulled'\] has no \['v'\]"):
        scaled.load_state_dict(worker.optimizer.state_dict())
    assert plain.local_step.numpy() == scaled.local_step.numpy() == 0


def test_loading_slots_requires_an_optimizer(mesh):
    one, center = team_of(mesh, "momentum"), gr.AGNCenter(mesh)
    steps(one, range(6))
    getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
    for name, shape in SHAPES.items():
        gr.get_variable(name, np.zeros(shape, "float32"), custom_getter=getter)
    state = one[0].getter.center.state_dict()
    with pytest.raises(ValueError, match=r"has slots; create the workers' AGNOptimizers first"):
        center.load_state_dict(state)
    assert all((var.numpy() == 0).all() for var in center.variables())
    center.load_state_dict({**state, "optimizer": None})
    assert not all((var.numpy() == 0).all() for var in center.variables())
