"""The public sums, with all dtypes, shapes, numbers of inputs, strides and offsets."""

import numpy as np
import pytest
from sums.test_aggregation import TREE, reference
from support.exact_data import DTYPES, finite_data, random_data, same
from support.meshes import refused

import gradreduce as gr

SHAPES = [(), (1,), (0,), (3, 0, 2), (1, 1, 1), (7, 13), (16_385,)]


# what -> the call, and the method whose order of additions it has
SUMS = {
    "add_n": (gr.add_n, 0),
    "accumulate_n": (gr.accumulate_n, 2),
    **{
        f"{name} {form.__name__}": (lambda terms, m=m, form=form: gr.aggregate(form(terms), m), m)
        for m, name in enumerate(["ADD_N", "TREE", "ACCUMULATE_N"])
        for form in (list, iter)
    },
}


@pytest.fixture(params=SUMS.values(), ids=SUMS)
def call(request):
    return request.param


def check(call, terms) -> None:
    """Asserts the sum, bit by bit, that no term is written and that the sum is new memory."""
    total, method = call
    before = [term.copy() for term in terms]
    shown = [(term.strides, term.ctypes.data, term.flags.writeable) for term in terms]
    made = total(terms)
    assert same(made, np.asarray(reference(before, method)))
    assert not any(np.shares_memory(made, term) for term in terms)
    made[...] = 1
    assert all(map(same, terms, before))
    assert [(term.strides, term.ctypes.data, term.flags.writeable) for term in terms] == shown


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(call, dtype):
    for num_terms in (2, 3, 5):
        for shape in SHAPES:
            check(call, [np.asarray(random_data(shape, dtype, seed=k)) for k in range(num_terms)])


def test_a_thousand_inputs(call):
    for dtype in ("bfloat16", "complex128"):
        terms = list(finite_data((1000, 5), dtype))
        check(call, terms)
    assert not same(reference(terms, TREE), reference(terms, 0))  # the data can tell


def shifted(values: np.ndarray, nbytes: int) -> np.ndarray:
    """An array that starts a number of bytes after a vector boundary."""
    memory = np.zeros(values.nbytes + nbytes, np.uint8)[nbytes:].view(values.dtype)
    memory = memory.reshape(values.shape)
    memory[...] = values
    return memory


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


# Of shape (6, 10) each; the first three are shared, all others copied.
FORMS = {
    "plain": lambda values: values,
    "one later": lambda values: shifted(values, values.itemsize),
    "read-only": read_only,
    "transposed": lambda values: values.reshape(10, 6).T,
    "backwards": lambda values: values[::-1, ::-1],
    "every second": lambda values: np.repeat(values, 2, axis=1)[:, ::2],
    "in the order of Fortran": np.asfortranarray,
    "a part of rows": lambda values: np.concatenate([values, values], axis=1)[:, 3:13],
    "one row for all": lambda values: np.broadcast_to(values[0], (6, 10)),
    "one number for all": lambda values: np.broadcast_to(values[0, 0], (6, 10)),
    "misaligned": lambda values: shifted(values, 1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_any_form_of_array_is_taken_in_and_left_alone(call, form):
    """Such arrays come first, last and everywhere, with plain arrays between them."""
    for dtype in DTYPES:
        plain = list(random_data((3, 6, 10), dtype))
        other = form(random_data((6, 10), dtype, seed=9))
        for terms in ([other, *plain], [*plain, other], [other, other], [other, plain[0], other]):
            check(call, terms)


# -- what a result is -----------------------------------------------------------------------------


CALLS = {
    "add_n": gr.add_n,
    "accumulate_n": gr.accumulate_n,
    "aggregate a list": gr.aggregate,
    "aggregate": lambda terms, **options: gr.aggregate(iter(terms), **options),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_single_term_is_returned_unless_another_output_type_is_requested(call, mesh):
    """For another output type the result is a copy on the same device."""
    array, device = random_data((3, 5), "float32"), mesh.devices[1]
    buffer = device.upload(array)
    assert call([array], output_type="numpy") is array
    assert call([buffer], output_type="buffer") is buffer
    made = call([buffer], output_type="numpy")
    assert same(made, array)
    made[...] = 1
    assert same(buffer.numpy(), array)
    before = array.copy()
    with gr.replica(1):
        held = call([array], output_type="buffer")
    assert (type(held), held.device) == (gr.Buffer, device)
    array[...] = 1
    assert same(held.numpy(), before)
    assert same(call([[1.0, 2.0]], output_type="numpy"), np.array([1.0, 2.0]))
    if call is gr.add_n or call is gr.accumulate_n:
        return
    rows = gr.IndexedSlices(buffer, [4, 4, 2], (5, 5))
    assert call([rows], output_type="buffer") is rows
    made = call([rows], output_type="numpy")
    assert same(made.values, before)
    assert (made.indices.tolist(), made.dense_shape) == ([4, 4, 2], (5, 5))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_unknown_output_type_is_refused(call, mesh):
    for wrong in ("tensor", "", "native"):
        for terms in ([np.ones(3, "float32")], [np.ones(3, "float32")] * 2):
            with refused(mesh, ValueError, f"output_type='{wrong}' is not one of"):
                call(terms, output_type=wrong)
        with refused(mesh, ValueError, f"output_type='{wrong}' is not one of"):
            gr.aggregate([None], output_type=wrong)


@pytest.mark.parametrize("num_terms", [1, 2])
def test_an_invalid_or_different_shape_is_refused(num_terms, mesh):
    for error, shapes in (
        (TypeError, (3, (3.0,), "3", (True, 3))),
        (ValueError, ((-1,), (4,), (3, 1), (None, 3), ())),
    ):
        for shape in shapes:
            with refused(mesh, error, "shape=|not compatible"):
                gr.accumulate_n([np.ones(3, "float32")] * num_terms, shape)
