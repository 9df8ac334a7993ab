"""Terms of one gradient on one device: the order of additions, the launches, and every error."""

import enum
import re
from functools import reduce

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.meshes import refused

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.sums import aggregators
from gradreduce.sums.aggregators import aggregate_buffers

ADD_N, TREE, ACCUMULATE_N = 0, 1, 2
METHODS = [ADD_N, TREE, ACCUMULATE_N]
HALVES = ["float16", "bfloat16"]


def left_to_right(terms):
    return reduce(np.add, terms)


def binary_counter(terms):
    """Adds two sums of equal size as soon as both exist; at the end the rest, smallest first."""
    stack = []
    for term in terms:
        stack.append((1, term))
        while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
            (size, right), (_, left) = stack.pop(), stack.pop()
            stack.append((2 * size, np.add(left, right)))
    while len(stack) > 1:
        (size, right), (other, left) = stack.pop(), stack.pop()
        stack.append((size + other, np.add(left, right)))
    return stack[0][1]


def reference(terms, method):
    """Adds in the accumulate type and rounds once."""
    wide = accumulate_dtype(terms[0].dtype)
    with np.errstate(all="ignore"):
        add = binary_counter if method == TREE else left_to_right
        return add([term.astype(wide) for term in terms]).astype(terms[0].dtype)


# -- the methods ----------------------------------------------------------------------------------


def test_replicas_are_no_terms():
    """Replicas are on different devices, so adding them is a reduction."""
    text = r"PerReplica.*; use AllReduceCrossDeviceOps\(\)\.reduce\("
    with gr.open_mesh(2, backend="sim") as mesh:
        value = gr.PerReplica([np.ones(3)] * 2, mesh)
        for call, kind in ((gr.aggregate, TypeError), (gr.add_n, ValueError),
                           (gr.accumulate_n, ValueError)):  # fmt: skip
            with refused(mesh, kind, text):
                call(value)
        text = r"^input 1: PerReplica is not an array.* or value\[0\] for one"
        with refused(mesh, TypeError, text):
            gr.add_n([np.ones(3), value])


def test_the_method_is_an_enum_with_the_numbers_of_tensorflow():
    method = gr.AggregationMethod
    names = {"ADD_N": 0, "EXPERIMENTAL_TREE": 1, "EXPERIMENTAL_ACCUMULATE_N": 2}
    assert {member.name: int(member) for member in method} == names
    assert method.DEFAULT is method.ADD_N
    assert issubclass(method, enum.IntEnum)


@pytest.mark.parametrize("given", [0, 1, 2, None, *gr.AggregationMethod, True, False, np.int64(2)])
def test_accepted_names_of_a_method(given):
    terms = [np.array([value], "float32") for value in (1e8, 1, -1e8, 1, 1)]
    wanted = 1.0 if given is not None and int(given) == TREE else 2.0
    assert gr.aggregate(terms, given).tolist() == [wanted]
    assert gr.aggregate(terms).tolist() == [2.0]


@pytest.mark.parametrize("wrong", [3, -1, 0.5, "ADD_N", "", [], (), {}, object(), gr.ReduceOp.SUM])
@pytest.mark.parametrize("num_terms", [0, 1, 2])
def test_an_invalid_method_even_for_a_single_term(wrong, num_terms):
    with pytest.raises(ValueError, match="Invalid aggregation_method specified"):
        gr.aggregate([np.ones(2)] * num_terms, wrong)


# -- what goes in and comes out -------------------------------------------------------------------


def test_none_is_left_out_and_nothing_gives_none(method):
    one, two = np.ones(2), np.full(2, 2.0)
    assert gr.aggregate([], method) is None
    for terms in ([None, None], iter([None, None]), iter(())):
        assert gr.aggregate(terms, method) is None
    assert gr.aggregate(iter([None, one, None]), method) is one
    assert gr.aggregate([None, one, None], method) is one
    assert gr.aggregate([None, one, None, two, two, None], method).tolist() == [5.0, 5.0]


def test_a_single_term_is_passed_through(method, mesh):
    flag = np.array([True])  # a single term is returned without a check of its dtype
    for term in (np.ones(2), [1.0, 2.0], 3.0, mesh.devices[1].put(np.ones(2)), flag):
        assert gr.aggregate([term], method) is term
        assert gr.add_n([term]) is term
        assert gr.accumulate_n([term]) is term


def test_an_iterable_is_read_to_its_end(method):
    seen = []

    def terms():
        for value in (1.0, 2.0, 3.0):
            seen.append(value)
            yield np.array([value])

    assert gr.aggregate(terms(), method).tolist() == [6.0]
    assert seen == [1.0, 2.0, 3.0]
    assert gr.aggregate(np.ones((4, 2)), method).tolist() == [4.0, 4.0]


def test_the_array_type_is_that_of_the_first_term(method, mesh):
    array, buffer = np.ones(2, "float32"), mesh.devices[0].put(np.ones(2, "float32"))
    assert type(gr.aggregate([array, buffer, buffer], method)) is np.ndarray
    assert type(gr.aggregate([buffer, array, array], method)) is gr.Buffer
    assert type(gr.aggregate([[1.0, 1.0], np.ones(2)], method)) is np.ndarray


def test_terms_lie_on_the_device_of_the_replica(method, mesh):
    terms = [np.ones(2, "float32")] * 3
    with mesh.journal() as journal, gr.replica(2):
        gr.aggregate(terms, method)
    assert {record.device for record in journal.records} == {2}
    with gr.replica(4), pytest.raises(ValueError, match="replica 4: the mesh has 4"):
        gr.aggregate(terms, method)


def test_empty_and_scalar_terms(method, mesh):
    with mesh.journal() as journal:
        made = gr.aggregate([np.empty((0, 3), "float32")] * 5, method)
    assert (made.shape, journal.launches) == ((0, 3), 0)
    made = gr.aggregate([np.array(1.5), 2.0, np.float64(3)], method)
    assert (made.shape, made.item()) == ((), 6.5)


# -- launches -------------------------------------------------------------------------------------


def launched(mesh, gradients, method):
    """The names and rows of all launches, and the results."""
    device = mesh.devices[1]
    buffers = [[device.put(term) for term in terms] for terms in gradients]
    with mesh.journal() as journal:
        made = aggregate_buffers(buffers, device, tree=method == TREE)
    assert {record.kind for record in journal.records} <= {"launch"}
    for total, terms in zip(made, gradients, strict=True):
        assert total.device is device
        assert same(total.numpy(), reference(terms, method))
    return [(record.name, record.num_rows) for record in journal.records]


@pytest.mark.parametrize("num_terms", range(1, 18))
def test_launches_do_not_grow_with_the_number_of_gradients(mesh, method, num_terms):
    many = 119  # more than a table inline has
    gradients = [
        list(random_data((num_terms, size), "float32", seed=size)) for size in range(1, 1 + many)
    ]
    wanted = [("add_n", many)]
    if method == TREE and num_terms > 2:
        level = (num_terms + 1) // 2
        wanted = [("add_n", num_terms // 2 * many)]
        while level > 1:
            wanted.append(("accumulate_n", level // 2 * many))
            level = (level + 1) // 2
    assert launched(mesh, gradients, method) == (wanted if num_terms > 1 else [])


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_rounded_in_one_more_launch(mesh, method, dtype):
    gradients = [list(random_data((4, size), dtype)) for size in (1, 30, 1000)]
    assert launched(mesh, gradients, method) == {
        ADD_N: [("add_n", 3)],
        ACCUMULATE_N: [("add_n", 3)],
        TREE: [("add_n", 6), ("accumulate_n", 3), ("pack", 3)],
    }[method]  # fmt: skip


def test_gradients_with_different_numbers_of_terms_and_dtypes(mesh, method):
    gradients = [
        list(random_data((num_terms, 40 + num_terms), dtype, seed=num_terms))
        for num_terms in (1, 2, 3, 7, 16)
        for dtype in ("float32", "float16", "int32")
    ]
    names = [name for name, _ in launched(mesh, gradients, method)]
    limit = {ADD_N: 4 * 3, ACCUMULATE_N: 4 * 3, TREE: 3 + 3 + 4 * 4 + 1}[method]
    assert len(names) <= limit


# -- errors ---------------------------------------------------------------------------------------

SUMS = {
    "add_n": gr.add_n,
    "accumulate_n": gr.accumulate_n,
    **{f"aggregate {m}": lambda terms, m=m: gr.aggregate(terms, m) for m in METHODS},
    "aggregate an iterator": lambda terms: gr.aggregate(iter(terms), ACCUMULATE_N),
}


def test_invalid_lists_of_arrays_are_refused():
    for inputs, says in (
        ([], "got none$"),
        ((), "got none$"),
        (np.ones((2, 2)), "got one ndarray$"),
        ([np.ones(1000)] * 5000 + [None], "got None at 5000$"),
        ([None] * 20, "got None at 0, 1, 2, 3, 4 and 15 more$"),
        ((None, np.ones(2)), "got None at 0$"),
        *((wrong, "") for wrong in (None, iter([np.ones(2)]), {1: np.ones(2)}, "ab", 3)),
    ):
        for call, kind in ((gr.add_n, "Tensor/IndexedSlices"), (gr.accumulate_n, "Tensor")):
            text = f"inputs must be a list of at least one {kind} with the same dtype and.*{says}"
            with pytest.raises(ValueError, match=text):
                call(inputs)


@pytest.mark.parametrize("name", SUMS)
def test_terms_that_do_not_fit_are_refused(name):
    call, ones = SUMS[name], np.ones(2)
    of_tensorflow = ("accumulate_n", "aggregate 2", "aggregate an iterator")
    mixed = ValueError if name in of_tensorflow else TypeError
    for left, right in [("float32", "float64"), ("int32", "uint32"), ("float16", "bfloat16")]:
        terms = [np.ones(2, gr.device.as_dtype(dtype)) for dtype in (left, left, right)]
        text = f"that don't all match: input 0 is {left}, input 2 is {right}"
        with pytest.raises(mixed, match=text):
            call(terms)
    for shapes in (((2,), (3,)), ((2,), (2, 1)), ((1,), (2,)), ((2,), ()), ((2, 3), (3, 2)),
                   ((2,), (2,), (2,), (1, 2))):  # fmt: skip
        first, *_, last = map(list, shapes)
        text = re.escape(f"Input 0: {first} != input {len(shapes) - 1}: {last}")
        with pytest.raises(ValueError, match=f"same size and shape.*{text}"):
            call([np.ones(shape) for shape in shapes])
    for wrong in (np.array([True, False]), np.array(["a", "b"]), np.array([None, None])):
        with pytest.raises(TypeError, match="cannot be added"):
            call([wrong, wrong])
    for wrong in ("ab", object(), {1}):
        for inputs in ([wrong], [ones, wrong]):
            with pytest.raises(TypeError, match="is not an array"):
                call(inputs)


def test_accumulate_n_only_checks_the_dtype_and_takes_a_shape():
    term = np.ones(2, "float32")
    for dtype in ("float32", np.float32, np.dtype("float32"), None):
        assert gr.accumulate_n([term, term], tensor_dtype=dtype).dtype == np.float32
    for num_terms in (1, 2):
        for dtype in ("float64", "int32", "bfloat16"):
            with pytest.raises(TypeError, match="tensor_dtype"):
                gr.accumulate_n([term] * num_terms, tensor_dtype=dtype)
    assert gr.accumulate_n([term], None, "float32", "name") is term
    assert gr.add_n([term, term], "name").tolist() == [2.0, 2.0]
    term = np.ones((2, 3))
    for shape in (None, (2, 3), [2, 3], (None, 3), (2, None), (None, None)):
        assert (gr.accumulate_n([term, term], shape=shape) == 2).all()
        assert gr.accumulate_n([term], shape) is term
    with pytest.raises(ValueError, match=r"Shapes \(2, 3\) and \(3,\) are not compatible"):
        gr.accumulate_n([term] * 2, shape=(3,))


def test_a_rounded_sum_waits_for_the_last_user_of_its_memory(monkeypatch):
    """The last user may be work that another thread has queued on that device meanwhile."""
    sum_tree = aggregators._sum_tree

    def and_free(gradients, device):
        made = sum_tree(gradients, device)
        made[0].device.empty((40,), "float16")  # freed, and filled with NaN by its queue
        return made

    monkeypatch.setattr(aggregators, "_sum_tree", and_free)
    for seed in range(8):
        with gr.open_mesh([0, 0], backend="sim", schedule_seed=seed) as mesh:
            device, home = mesh.devices
            terms = [home.upload(np.full(40, number, np.float16)) for number in (1, 2, 3)]
            (made,) = aggregate_buffers([terms], device, tree=True)
            assert same(made.numpy(), np.full(40, 6, np.float16))
