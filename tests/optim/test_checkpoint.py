"""Checkpoints of optimizers: after a load, training has the same bits; invalid ones fail."""

import logging

import numpy as np
import pytest
from optim.test_update_rules import RULES
from support.exact_data import exact_data, same

import gradreduce as gr

SHAPES = {"w": (4, 3), "b": (3,)}


@pytest.fixture(params=RULES)
def make(request):
    return RULES[request.param][1]


def variables_on(mesh, dtype):
    return [gr.Variable(exact_data(shape, dtype), name, device=mesh)
            for name, shape in SHAPES.items()]  # fmt: skip


def step(optimizer, variables, seed):
    pairs = [(exact_data(var.shape, var.dtype, seed=seed), var) for var in variables]
    optimizer.apply_gradients(pairs)


def test_before_the_first_update_there_is_nothing(mesh, make):
    optimizer, variables = make(), variables_on(mesh, "float32")
    empty = optimizer.state_dict()
    assert (empty["slots"], empty["powers"]) == ({}, None)
    step(optimizer, variables, 0)
    optimizer.load_state_dict(empty, variables)
    assert optimizer.get_slot_names() == optimizer.variables() == []
    assert optimizer.state_dict() == empty


def test_slots_that_no_update_has_changed_have_no_powers(mesh):
    """After ``prepare`` only; and a single variable can be passed instead of a list."""
    half = gr.Variable(np.full(3, 2, "float16"), "h", device=mesh)
    one, two = (gr.AdamOptimizer(0.5, master_dtype="float32") for _ in range(2))
    one.prepare([half])
    state = one.state_dict()
    assert (list(state["slots"]), state["powers"]) == (["h"], None)
    two.load_state_dict(state, half)
    assert two.get_slot_names() == ["m", "master", "v"]
    step(two, [half], 0)


def test_an_update_while_it_is_downloaded_is_not_in_it(mesh, monkeypatch):
    optimizer, variables = gr.MomentumOptimizer(0.5, 0.5), variables_on(mesh, "float32")
    step(optimizer, variables, 0)
    before = [optimizer.get_slot(var, "momentum").numpy() for var in variables]
    cls = type(mesh.devices[0])
    download = cls.download

    def late(*args, **options):
        monkeypatch.setattr(cls, "download", download)
        step(optimizer, variables, 1)
        return download(*args, **options)

    monkeypatch.setattr(cls, "download", late)
    slots = optimizer.state_dict()["slots"]
    assert cls.download is download
    assert all(same(slots[var.name]["momentum"], value)
               for var, value in zip(variables, before, strict=True))  # fmt: skip


def test_names_must_be_unique_and_passed(mesh):
    optimizer, variables = gr.AdamOptimizer(0.5), variables_on(mesh, "float32")
    step(optimizer, variables, 0)
    state = optimizer.state_dict()
    twice = gr.Variable([1.0], "w", device=mesh)
    for those, error, match in [
        (variables[:1], KeyError, r"state\['slots'\] has wrong keys: 'b' unknown"),
        ([*variables, twice], ValueError, "two variables have the name 'w'"),
    ]:
        with pytest.raises(error, match=match):
            optimizer.load_state_dict(state, those)
    step(optimizer, [twice], 0)
    with pytest.raises(ValueError, match="two variables have the name 'w'"):
        optimizer.state_dict()


def _unnamed(mesh, values, dtype="float32"):
    return [gr.Variable(np.full(2, value), dtype=dtype, device=mesh) for value in values]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unnamed_variables_that_are_made_in_another_order_are_found_by_their_values(
    mesh, dtype, caplog
):
    variables = [*_unnamed(mesh, [0.5, 0.5, 2, 3], dtype), *_unnamed(mesh, [5], "float64")]
    variables.append(gr.Variable(np.full(2, 2), "named", dtype=dtype, device=mesh))
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    optimizer.apply_gradients(
        [(np.full(2, index, each.dtype), each) for index, each in enumerate(variables)]
    )
    names = [each.name for each in variables]
    with caplog.at_level(logging.WARNING, "gradreduce"):
        state = [optimizer.state_dict() for _ in range(2)][1]
    assert caplog.messages == [
        f"the state of Momentum has slots of Variables without a name whose slots are alike: "
        f"{', '.join(names[:4])}. They are numbered as they are made, and a program that makes "
        "them in another order would exchange their slots: give each a name"
    ]
    assert list(state["fingerprints"]) == names[:5]

    def load(*order):
        for variable, index in zip(variables, order, strict=False):
            variable.name = names[index]
        other = gr.MomentumOptimizer(0.5, 0.5)
        try:
            other.load_state_dict(state, variables[::-1])
        finally:
            assert len(other.variables()) in (0, 6)
        return [other.get_slot(variable, "momentum").numpy()[0] for variable in variables[:4]]

    assert load(0, 1, 2, 3) == [0, 1, 2, 3]
    text = (
        rf"^state\['fingerprints'\]: the value of '{names[3]}' is that of '{names[2]}' in the "
        r"state, so the slots would be exchanged; Variables without a name are numbered as they "
        r"are made: give each a name$"
    )
    with pytest.raises(ValueError, match=text):
        load(0, 1, 3, 2)
    variables[0].assign(np.full(2, 9, variables[0].dtype))  # as before a load of the values
    assert load(0, 1, 3, 2) == [0, 1, 3, 2]


@pytest.mark.parametrize(
    ("dtypes", "num_trained"),
    [(["float32"] * 3, 2), (["float32"] * 2, 1), (["float32", "bfloat16", "float16"], 3)],
)
def test_fingerprints_find_exchanged_slots_of_all_that_could_have_them(mesh, dtypes, num_trained):
    variables = [_unnamed(mesh, [2 + index], each)[0] for index, each in enumerate(dtypes)]
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    optimizer.apply_gradients([(np.ones(2, each.dtype), each) for each in variables[:num_trained]])
    names, state = [each.name for each in variables], optimizer.state_dict()
    for variable, name in zip(variables, [*names[1:], names[0]], strict=True):
        variable.name = name
    other = gr.MomentumOptimizer(0.5, 0.5)
    with pytest.raises(ValueError, match="so the slots would be exchanged"):
        other.load_state_dict(state, variables)
    assert not other.variables()


def test_variables_that_differ_in_shape_or_have_names_log_no_warning(mesh, caplog):
    unnamed = [*_unnamed(mesh, [1]), *_unnamed(mesh, [1], "float64")]
    named = [gr.Variable(np.float32([1, 1]), name, device=mesh) for name in "ab"]
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    optimizer.prepare([*unnamed, *named])
    with caplog.at_level(logging.WARNING, "gradreduce"):
        assert list(optimizer.state_dict()["fingerprints"]) == [each.name for each in unnamed]
    assert not caplog.messages
