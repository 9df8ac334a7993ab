"""Sparse gradients: rows that they touch are updated as by dense ones, others unchanged."""

import numpy as np
import pytest
from support.exact_data import same

import gradreduce as gr

SHAPE = (9, 5)
INDICES = np.array([7, 2, 7, 0, 2, 7])


def slices(values, indices=INDICES, shape=SHAPE):
    return gr.IndexedSlices(values, indices, shape)


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


def test_rows_of_vectors_and_of_more_dimensions(mesh):
    """They are not written and not kept."""
    for shape in [(9,), (9, 2, 3), (9, 0)]:
        variable = gr.Variable(np.zeros(shape, "float32"), device=mesh)
        rows = np.ones((3, *shape[1:]), "float32")
        rows.flags.writeable = False
        grad = gr.IndexedSlices(rows, [4, 1, 4])
        gr.GradientDescentOptimizer(0.5).apply_gradients([(grad, variable)])
        wanted = np.zeros(shape, "float32")
        wanted[1], wanted[4] = -0.5, -1.0
        assert all(same(buffer.numpy(), wanted) for buffer in variable.buffers)
        assert (rows == 1).all()


def test_rows_that_do_not_fit_change_nothing(mesh):
    optimizer = gr.AdamOptimizer(lazy=True)
    first, second = variables = [gr.Variable(np.zeros(SHAPE, "float32"), device=mesh)
                                 for _ in range(2)]  # fmt: skip
    scalar = gr.Variable(1.0, device=mesh)
    good = slices(np.ones((len(INDICES), SHAPE[1]), "float32"))
    optimizer.apply_gradients([(good, variable) for variable in variables])
    kept = [*variables, *(optimizer.get_slot(each, name) for each in variables for name in "mv")]
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
