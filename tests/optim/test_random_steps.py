"""Every optimizer against NumPy, bit by bit, through steps of every kind in a random order."""

import pickle

import numpy as np
import pytest
from optim.agn.team import KINDS
from optim.test_update_rules import RULES, Model
from support.exact_data import FLOATS, exact_data, random_data

import gradreduce as gr
from gradreduce.optim.slots import MASTER

HALVES = FLOATS[:2]
SHAPE, NUM_STEPS = (7, 3), 20
RULES_AND_OWN = {**RULES, "own": KINDS["own"]}
# Rules whose moments decay in all rows, unless the optimizer is lazy.
DECAYING = [name for name, (_, _, starts) in RULES.items() if "m" in starts]


def exact(rng, shape, num_replicas, dtype):
    """Values with exact sums and means, also in 16 bits."""
    return (rng.integers(-4, 5, shape) * num_replicas / 4).astype(dtype)


def rows_of(rng, num_replicas, dtype):
    """Rows of a gradient, some with the same index or none, and their sum as a whole array."""
    indices = rng.integers(0, SHAPE[0], rng.integers(0, 6))
    values = exact(rng, (len(indices), SHAPE[1]), num_replicas, dtype)
    whole = np.zeros(SHAPE)
    np.add.at(whole, indices, values.astype(np.float64))
    return gr.IndexedSlices(values, indices, SHAPE), whole, set(indices.tolist())


def step_of(rng, mesh, dtype):
    """A gradient of some type, the same as a whole array, and its rows."""
    kind, num_replicas = rng.integers(0, 9), len(mesh)
    if kind < 3:
        parts = [rows_of(rng, num_replicas, dtype)] * num_replicas
        given, whole, rows = parts[0]
        devices = mesh.devices[:: -1 if kind == 2 else 1]
        if kind:
            given = gr.Mirrored([given] * num_replicas, devices=devices)
        return given, whole, sorted(rows)
    if kind == 3:
        parts = [rows_of(rng, num_replicas, dtype) for _ in range(num_replicas)]
        given = gr.PerReplica([part for part, _, _ in parts], mesh)
        mean = np.mean([whole for _, whole, _ in parts], axis=0)
        return given, mean, sorted(set.union(*(rows for _, _, rows in parts)))
    dense = exact(rng, (num_replicas, *SHAPE), num_replicas, dtype)
    given = {
        4: gr.PerReplica(list(dense), mesh),
        5: dense[0],
        6: dense[0].tolist(),
        7: mesh.devices[1].put(dense[0]),
        8: gr.Mirrored([dense[0]] * num_replicas, mesh),
    }[kind]
    whole = dense.astype(np.float64)
    return given, whole.mean(0) if kind == 4 else whole[0], list(range(SHAPE[0]))


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [*[(each, False) for each in FLOATS], *[(each, True) for each in HALVES]],
    ids=str,
)
@pytest.mark.parametrize("name", [*RULES_AND_OWN, *[f"lazy {name}" for name in DECAYING]])
def test_steps_of_every_kind_in_a_random_order(mesh, name, dtype, masters):
    """The rows of a gradient change, and those of a variable whose moments decay."""
    masters |= name == "own" and dtype in HALVES  # without them its own operations round
    rule = _, make, starts = RULES_AND_OWN[name.removeprefix("lazy ")]
    rng = np.random.default_rng(len(name) + len(mesh))
    options = {"master_dtype": "float32"} if masters else {}
    options |= {"lazy": True} if "lazy" in name else {}
    optimizer = make(**options)
    values = exact_data(SHAPE, dtype)
    variable, model = gr.Variable(values, device=mesh), Model(rule, values, master=masters)
    for turn in range(NUM_STEPS):
        if turn == NUM_STEPS // 2:  # continues with the same bits after a save and a load
            state = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = make(**options)
            optimizer.load_state_dict(state, [variable])
        given, whole, rows = step_of(rng, mesh, dtype)
        optimizer.apply_gradients([(given, variable)])
        if name in DECAYING:
            rows = list(range(SHAPE[0]))
        model.move(whole[rows].astype(dtype), rows)
        model.check(optimizer, variable, starts)


@pytest.mark.parametrize("name", ["momentum", "own"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_assigned_value_replaces_the_master_unless_it_rounds_to_it(mesh, dtype, name):
    rule = _, make, starts = RULES_AND_OWN[name]
    optimizer, values = make(master_dtype="float32"), exact_data((257,), dtype)
    variable, model = gr.Variable(values, device=mesh), Model(rule, values, master=True)
    for turn in range(4):
        grad = random_data((257,), dtype, seed=turn)
        optimizer.apply_gradients([(grad, variable)])
        model.move(grad)
        model.check(optimizer, variable, starts)
        if turn == 1:
            values = exact_data((257,), dtype, seed=9)
            values[::2] = model.value[::2]
            variable.assign(values)
            kept = model.value == values
            assert 100 < kept.sum() < 200
            model.state[0] = np.where(kept, model.state[0], values.astype("float32"))


def test_only_half_precision_variables_have_a_master(mesh):
    """And there is one launch for each pair of dtypes."""
    optimizer = gr.AdamOptimizer(master_dtype=np.float32)
    variables = [gr.Variable(np.zeros(3, dtype), device=mesh) for dtype in FLOATS * 2]
    grads = [gr.Mirrored([np.ones(3, var.dtype)] * len(mesh), mesh) for var in variables]
    pairs = list(zip(grads, variables, strict=True))
    optimizer.apply_gradients(pairs)
    with mesh.journal() as journal:
        optimizer.apply_gradients(pairs)
    assert journal.launches == len(FLOATS) * len(mesh.by_physical)
    for variable in variables:
        has_one = variable.dtype in HALVES
        assert (optimizer.get_slot(variable, MASTER) is not None) == has_one
        kept = np.float32 if has_one else variable.dtype
        assert all(optimizer.get_slot(variable, name).dtype == kept for name in "mv")
    assert optimizer.get_slot_names() == ["m", MASTER, "v"]
