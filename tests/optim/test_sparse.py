"""Sparse gradients: rows that they touch are updated as by dense ones, others unchanged."""

from __future__ import annotations

import numpy as np
import pytest
from optim.test_update_rules import RULES, Model
from support.exact_data import FLOATS, exact_data, random_data, same

import gradreduce as gr

SHAPE = (9, 5)
INDICES = np.array([7, 2, 7, 0, 2, 7])


@pytest.fixture(params=RULES)
def rule(request):
    """An optimizer of each rule that changes only the rows of a gradient."""
    formula, make, starts = RULES[request.param]
    lazy = {"lazy": True} if "m" in starts else {}
    return formula, lambda **more: make(**lazy, **more), starts


def slices(values, indices=INDICES, shape=SHAPE):
    return gr.IndexedSlices(values, indices, shape)


def merged(values, indices=INDICES):
    """The indices without repeats, and the sum of the rows of each, from exact data."""
    found = np.unique(indices)
    sums = [values[indices == index].astype(np.float64).sum(0) for index in found]
    return found, np.array(sums).astype(values.dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_only_the_rows_are_touched(mesh, rule, dtype):
    """Four steps with different rows: these and their slots change, bit by bit like the model."""
    _, make, starts = rule
    optimizer, values = make(), random_data(SHAPE, dtype, seed=3)
    variable, model = gr.Variable(values, device=mesh), Model(rule, values)
    for turn in range(4):
        indices = (INDICES + turn) % SHAPE[0]
        grad = exact_data((len(indices), SHAPE[1]), dtype, seed=turn)
        optimizer.apply_gradients([(slices(grad, indices), variable)])
        rows, sums = merged(grad, indices)
        model.move(sums, rows)
        model.check(optimizer, variable, starts)


def test_plain_mirrored_and_per_replica_rows(mesh, rule):
    _, make, _ = rule
    grad = exact_data((len(INDICES), SHAPE[1]), "float32")
    part, apart = slices(grad), []
    num_replicas = len(mesh)
    for place in range(num_replicas):  # the mean of all is the plain one
        factor = num_replicas if place == 1 else 0
        apart.append(slices(grad * np.float32(factor)))
    found = []
    for given in (part, gr.Mirrored([part] * len(mesh), mesh), gr.PerReplica(apart, mesh),
                  gr.Mirrored([part] * len(mesh), devices=mesh.devices[::-1])):  # fmt: skip
        variable = gr.Variable(np.ones(SHAPE, "float32"), device=mesh)
        make().apply_gradients([(given, variable)])
        found += [buffer.numpy() for buffer in variable.buffers]
    # A mean of n replicas divides: exact only if n is a power of two.
    assert all(np.allclose(found[0], other, rtol=1e-6, atol=0) for other in found)
    assert all(same(found[0], other) for other in found[: 2 * len(mesh)])


def test_adam_moves_every_row_unless_it_is_lazy(mesh):
    values = random_data(SHAPE, "float32")
    by_rows, by_zeros = (gr.Variable(values, device=mesh) for _ in range(2))
    sparse, dense = gr.AdamOptimizer(0.1), gr.AdamOptimizer(0.1)
    for turn in range(3):
        grad = exact_data((len(INDICES), SHAPE[1]), "float32", seed=turn)
        rows, sums = merged(grad)
        whole = np.zeros(SHAPE, "float32")
        whole[rows] = sums
        sparse.apply_gradients([(slices(grad), by_rows)])
        dense.apply_gradients([(whole, by_zeros)])
        for name in ("m", "v"):
            assert same(
                sparse.get_slot(by_rows, name).numpy(), dense.get_slot(by_zeros, name).numpy()
            )
        assert all(same(a.numpy(), b.numpy()) for a, b in zip(by_rows.buffers, by_zeros.buffers,
                                                              strict=True))  # fmt: skip


@pytest.mark.parametrize("num_sparse", [1, 5])
def test_launches_do_not_grow_with_the_number_of_variables(mesh, num_sparse):
    """Dense and sparse gradients share the launch of the rule: one for each GPU and dtype."""
    optimizer = gr.MomentumOptimizer(0.5, 0.5)
    pairs = []
    for place in range(num_sparse):
        grad = slices(np.ones((len(INDICES), SHAPE[1]), "float32"), (INDICES + place) % SHAPE[0])
        variables = [gr.Variable(np.zeros(SHAPE, "float32"), device=mesh) for _ in range(2)]
        dense = gr.Mirrored([np.ones(SHAPE, "float32")] * len(mesh), mesh)
        pairs += [(gr.Mirrored([grad] * len(mesh), mesh), variables[0]), (dense, variables[1])]
    optimizer.prepare([variable for _, variable in pairs])
    with mesh.journal() as journal:
        optimizer.apply_gradients(pairs)
    num_rows = [num_sparse * len(places) for places in mesh.by_physical.values()]
    launches = [(record.name, record.num_rows) for record in journal.records
                if record.kind == "launch"]  # fmt: skip
    assert launches == [
        each
        for rows in num_rows
        for each in [("segment_sum", rows), ("take_rows", 2 * rows), ("momentum", 2 * rows),
                     ("segment_sum", 2 * rows)]  # added by index, gathered, updated, scattered
    ]  # fmt: skip
    for place, (_, variable) in enumerate(pairs[::2]):  # each by rows of its own
        counts = np.bincount((INDICES + place) % SHAPE[0], minlength=SHAPE[0])
        wanted = np.repeat(-0.5 * counts[:, None], SHAPE[1], axis=1)
        assert all((buffer.numpy() == wanted).all() for buffer in variable.buffers)
    assert journal.uploads == 3 * len(num_rows)
    assert (journal.copies, journal.syncs) == (0, 0)


def test_no_row_changes_nothing(mesh, rule):
    _, make, _ = rule
    optimizer, variable = make(), gr.Variable(np.ones(SHAPE, "float32"), device=mesh)
    nothing = slices(np.empty((0, SHAPE[1]), "float32"), [])
    for grad in (nothing, gr.Mirrored([nothing] * len(mesh), mesh)):
        optimizer.apply_gradients([(grad, variable)])
    assert all((buffer.numpy() == 1).all() for buffer in variable.buffers)


def test_rows_of_vectors_and_of_more_dimensions(mesh):
    for shape in [(9,), (9, 2, 3), (9, 0)]:
        variable = gr.Variable(np.zeros(shape, "float32"), device=mesh)
        grad = gr.IndexedSlices(np.ones((3, *shape[1:]), "float32"), [4, 1, 4])
        gr.GradientDescentOptimizer(0.5).apply_gradients([(grad, variable)])
        wanted = np.zeros(shape, "float32")
        wanted[1], wanted[4] = -0.5, -1.0
        assert all(same(buffer.numpy(), wanted) for buffer in variable.buffers)


def test_rows_are_not_written_and_not_kept(mesh):
    variable = gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
    grad = np.ones((len(INDICES), SHAPE[1]), "float32")
    grad.flags.writeable = False
    gr.MomentumOptimizer(0.5, 0.5).apply_gradients([(slices(grad), variable)])
    assert (grad == 1).all()


def test_rows_that_do_not_fit_change_nothing(mesh, rule):
    _, make, starts = rule
    optimizer = make()
    first, second = variables = [gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
                                 for _ in range(2)]  # fmt: skip
    scalar = gr.Variable(1.0, device=mesh)
    good = slices(np.ones((len(INDICES), SHAPE[1]), "float32"))
    optimizer.apply_gradients([(good, variable) for variable in variables])
    kept = [*variables, *(optimizer.get_slot(each, name) for each in variables for name in starts)]
    before = [buffer.numpy().tolist() for each in kept for buffer in each.buffers]
    own = first.buffers[-1].view(0, (2, SHAPE[1]))
    for bad, match in [
        (gr.IndexedSlices(np.ones((1, 4), "float32"), [0]), "has rows float32"),
        (gr.IndexedSlices(np.ones((1, 5), "float64"), [0]), "has rows float64"),
        (gr.IndexedSlices(np.ones((1, 5), "float32"), [9]), "not below dense_shape"),
        (gr.IndexedSlices(np.ones((1, 5), "float32"), [8], (10, 5)), "has dense_shape"),
        (gr.IndexedSlices(own, [0, 1]), "shares memory with a variable or slot"),
        (gr.PerReplica([gr.IndexedSlices(np.ones((1, 5), "float32"), [9])] * len(mesh), mesh),
         "not below"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            optimizer.apply_gradients([(good, first), (bad, second)])
    with pytest.raises(ValueError, match="has rows "):
        optimizer.apply_gradients([(gr.IndexedSlices([1.0], [0]), scalar)])
    assert [buffer.numpy().tolist() for each in kept for buffer in each.buffers] == before
