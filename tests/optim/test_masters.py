"""float16 and bfloat16 variables with a float32 master, which keeps unrounded values."""

from __future__ import annotations

import numpy as np
import pytest
from optim.test_sparse import INDICES, SHAPE, merged, slices
from optim.test_update_rules import RULES, Model
from support.exact_data import FLOATS, exact_data, random_data

import gradreduce as gr
from gradreduce.optim.slots import MASTER

HALVES, SINGLE = FLOATS[:2], np.dtype("float32")


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


def check_master(optimizer, variable, model, names):
    """Checks master and slots against the model; the variable is the rounded master."""
    found = [optimizer.get_slot(variable, name) for name in (MASTER, *names)]
    for slot, value in zip(found, model.state, strict=True):
        assert slot.dtype == SINGLE
        for buffer in slot.buffers:
            assert np.array_equal(buffer.numpy(), value, equal_nan=True)
    with np.errstate(all="ignore"):
        rounded = model.state[0].astype(variable.dtype).astype(SINGLE)
    for buffer in variable.buffers:
        assert np.array_equal(buffer.numpy().astype(SINGLE), rounded, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_steps_are_those_of_float32(mesh, rule, dtype):
    _, make, starts = rule
    optimizer, values = make(master_dtype="float32"), exact_data((257,), dtype)
    variable, model = gr.Variable(values, device=mesh), Model(rule, values, master=True)
    for turn in range(4):
        grad = random_data((257,), dtype, seed=turn)
        optimizer.apply_gradients([(grad, variable)])
        model.move(grad)
        check_master(optimizer, variable, model, starts)
        if turn == 1:  # the assigned value replaces the master, unless the master rounds to it
            values = exact_data((257,), dtype, seed=9)
            variable.assign(values)
            with np.errstate(all="ignore"):
                kept = model.state[0].astype(dtype) == values
            model.state[0] = np.where(kept, model.state[0], values.astype(SINGLE))


def test_rows_have_masters_too(mesh, rule):
    _, make, starts = rule
    lazy = {"lazy": True} if "m" in starts else {}
    optimizer, values = make(master_dtype="float32", **lazy), exact_data(SHAPE, "float16")
    variable, model = gr.Variable(values, device=mesh), Model(rule, values, master=True)
    for turn in range(3):
        grad = exact_data((len(INDICES), SHAPE[1]), "float16", seed=turn)
        optimizer.apply_gradients([(slices(grad), variable)])
        rows, sums = merged(grad)
        model.move(sums, rows)
        check_master(optimizer, variable, model, starts)


def test_only_half_precision_variables_have_a_master(mesh, rule):
    """And there is one launch for each pair of dtypes."""
    _, make, starts = rule
    optimizer = make(master_dtype=np.float32)
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
        kept = SINGLE if has_one else variable.dtype
        assert all(optimizer.get_slot(variable, name).dtype == kept for name in starts)
    assert optimizer.get_slot_names() == sorted({MASTER, *starts})


@pytest.mark.parametrize("wrong", ["float64", "float16", "bfloat16", np.int32])
def test_a_master_is_float32(wrong):
    with pytest.raises(ValueError, match="master_dtype"):
        gr.AdamOptimizer(master_dtype=wrong)
    with pytest.raises(TypeError):
        gr.AdamOptimizer(master_dtype="half a float")
