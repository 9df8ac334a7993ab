"""IndexedSlices: validation, merged rows, dense arrays, and numbers of launches."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import DTYPES, INTEGERS, exact_data, random_data, same
from support.exhaustive import examples
from support.implementations import accumulate_dtype_of
from support.meshes import refused

import gradreduce as gr
from gradreduce.arrays.indexed_slices import coalesce_n, to_dense_n
from gradreduce.errors import InvalidArgumentError
from gradreduce.ops import plan_segments

IMPLEMENTATIONS = ["numpy", pytest.param("compiled", marks=pytest.mark.host)]
INDICES = [3, 1, 3, 0, 1, 3]


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def mesh(request) -> Iterator[gr.Mesh]:
    with gr.open_mesh([0, 0, 1], backend="sim", kernels=request.param, strict=True) as made:
        yield made


@pytest.fixture(autouse=True)
def default(mesh, monkeypatch):
    """The mesh for host arrays."""
    monkeypatch.setattr("gradreduce.backends._default", [mesh])


def slices_of(dtype="float32", *, width=5, seed=0):
    rows = random_data((len(INDICES), width), dtype, seed=seed)
    return gr.IndexedSlices(rows, INDICES, (6, width))


def merged(slices):
    """Adds the rows of each index in a loop, in the accumulate type; indices in order."""
    found = {}
    values = slices.values.astype(accumulate_dtype_of(slices.values.dtype))
    with np.errstate(all="ignore"):
        for index, row in zip(slices.indices.tolist(), values, strict=True):
            found[index] = found[index] + row if index in found else row
        rows = np.array([found[index] for index in sorted(found)], values.dtype)
        rows = rows.reshape(len(found), *values.shape[1:])
        return sorted(found), rows.astype(slices.values.dtype)


def whole(slices):
    indices, rows = merged(slices)
    dense = np.zeros(slices.dense_shape, slices.values.dtype)
    dense[indices] = rows
    return dense


# -- what it is -----------------------------------------------------------------------------------


def test_it_keeps_what_it_is_given(mesh):
    values, indices = np.ones((3, 2), "float32"), np.array([4, 0, 4], "int32")
    slices = gr.IndexedSlices(values, indices, [5, 2])
    indices[:] = 1
    assert slices.values is values
    assert (slices.indices.dtype, slices.indices.tolist()) == (np.int64, [4, 0, 4])
    with pytest.raises(ValueError, match="read-only"):
        slices.indices[0] = 1
    assert (slices.dense_shape, slices.shape, slices.dtype) == ((5, 2), (5, 2), np.float32)
    assert (slices.device, slices.kind) == (None, "native")
    assert repr(slices) == (
        "IndexedSlices(indices=[4, 0, 4], values=float32[3, 2], dense_shape=(5, 2))"
    )
    buffer = mesh.devices[1].put(np.ones(9))
    slices = gr.IndexedSlices(buffer, list(range(9)))
    assert slices.values is buffer
    assert (slices.device, slices.kind, slices.shape) == (mesh.devices[1], "buffer", None)
    assert repr(slices) == (
        "IndexedSlices(indices=[0, 1, 2, 3, 4, 5, …], values=float64[9], dense_shape=None)"
    )
    slices = gr.IndexedSlices([[1.0, 2.0]], [1], (3, 2))
    assert same(slices.values, np.array([[1.0, 2.0]]))
    assert same(slices.to_dense(), np.array([[0.0, 0], [1, 2], [0, 0]]))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_indices_of_every_integer_dtype(mesh, dtype):
    indices = np.array([5, 2, 5], dtype)
    for form in (
        indices,
        np.repeat(indices, 2)[::2],
        indices.astype(indices.dtype.newbyteorder()),
        mesh.devices[1].upload(indices),
        indices.tolist(),
        tuple(indices),
    ):
        assert gr.IndexedSlices(np.ones(3), form).indices.tolist() == [5, 2, 5]


def test_rows_of_rows_are_looked_up():
    """TensorFlow indexes the outer indices by the inner ones."""
    inner = gr.IndexedSlices(np.array([[1.0], [2], [4]]), [2, 0, 2], (3, 1))
    slices = gr.IndexedSlices(inner, [7, 8, 9], (10, 1))
    assert slices.indices.tolist() == [9, 7, 9]
    assert slices.values is inner.values
    assert slices.to_dense()[:, 0].tolist() == [0] * 7 + [2, 0, 5]
    unknown = gr.IndexedSlices(np.ones((2, 1)), [0, 1])
    assert gr.IndexedSlices(unknown, [3, 3, 3]).indices.tolist() == [3, 3]
    with pytest.raises(InvalidArgumentError, match=r"2 indices for values of dense_shape \(3, 1\)"):
        gr.IndexedSlices(inner, [7, 8])
    with pytest.raises(InvalidArgumentError, match=r"indices\[1\] = 1 is not below"):
        gr.IndexedSlices(unknown, [3])


# -- what is refused ------------------------------------------------------------------------------

ROWS = np.ones((3, 2), "float32")
REFUSED = [  # values, indices, dense_shape, error, its text
    (ROWS, [0, -1, 2], None, InvalidArgumentError, r"indices\[1\] = -1 is negative"),
    (ROWS, [0, 7, 4], (7, 2), InvalidArgumentError, r"\[1\] = 7 is not below dense_shape\[0\] = 7"),
    (ROWS, [0, 0, 0], (0, 2), InvalidArgumentError, r"not below dense_shape\[0\] = 0"),
    (ROWS, np.array([0, 2**63, 2], "uint64"), None, InvalidArgumentError,
     r"indices\[1\] = 9223372036854775808 is .*too large for int64"),
    (ROWS, [0.0, 1.0, 2.0], None, TypeError, "indices must be integers, got float64"),
    (ROWS[:0], np.zeros(0), None, TypeError, "indices must be integers, got float64"),
    (ROWS, [True, False, True], None, TypeError, "must be integers, got bool"),
    (ROWS, np.array(["0", "1", "2"]), None, TypeError, "must be integers"),
    (ROWS, None, None, TypeError, "NoneType is not an array"),
    (ROWS, [[0, 1, 2]], None, InvalidArgumentError, r"must be a vector, got shape \[1, 3\]"),
    (ROWS, 1, None, InvalidArgumentError, r"indices must be a vector, got shape \[\]"),
    (ROWS, [0, 1], None, InvalidArgumentError, "2 indices for 3 rows of values"),
    (ROWS, [0, 1, 2, 2], None, InvalidArgumentError, "4 indices for 3 rows"),
    (np.float32(1), [0], None, InvalidArgumentError, "at least one dimension"),
    (ROWS, [0, 1, 2], (9,), InvalidArgumentError,
     r"values of shape \[3, 2\] are not rows of an array of shape \[9\]"),
    (ROWS, [0, 1, 2], (9, 3), InvalidArgumentError, r"not rows of .* \[9, 3\]"),
    (ROWS, [0, 1, 2], (), InvalidArgumentError, "must have at least one dimension"),
    (ROWS, [0, 1, 2], (9, -2), InvalidArgumentError, "none negative"),
    (ROWS, [0, 1, 2], (-2, 2), InvalidArgumentError, "none negative"),
    (ROWS, [0, 1, 2], (9.0, 2), TypeError, "must be a list of integers"),
    (ROWS, [0, 1, 2], (True, 2), TypeError, "must be a list of integers"),
    (ROWS, [0, 1, 2], 9, TypeError, "must be a list of integers"),
    (ROWS > 0, [0, 1, 2], None, TypeError, "bool cannot be added"),
    ("abc", [0, 1, 2], None, TypeError, "str is not an array"),
    (np.ma.array([1.0], mask=[1]), [0], None, TypeError, "masked"),
]  # fmt: skip


def test_what_does_not_fit_is_refused_at_validation(mesh):
    for values, indices, dense_shape, error, text in REFUSED:
        with refused(mesh, error, text):
            gr.IndexedSlices(values, indices, dense_shape)
    assert (ROWS == 1).all()
    for dense_shape in (None, (-1, 2)):
        slices = gr.IndexedSlices(ROWS, [0, 1, 1], dense_shape)
        with refused(mesh, ValueError, "unknown"):
            slices.to_dense()
        assert slices.coalesce().dense_shape == dense_shape
    for call in (slices_of().coalesce, slices_of().to_dense):
        with refused(mesh, ValueError, "output_type='tensor' is not one of"):
            call(output_type="tensor")


# -- merged, and whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_an_index_are_added_in_order(dtype):
    for shape in [(0,), (1,), (5,), (16,), (), (2, 3), (2, 0), (1, 1, 4)]:
        values = random_data((len(INDICES), *shape), dtype)
        slices = gr.IndexedSlices(values, INDICES, (6, *shape))
        indices, rows = merged(slices)
        made = slices.coalesce()
        assert made.indices.tolist() == indices
        assert same(made.values, rows)
        assert (made.dense_shape, made.dtype) == ((6, *shape), slices.dtype)
        assert same(slices.to_dense(), whole(slices))
    for none in ([], (), np.zeros(0, "int32")):
        slices = gr.IndexedSlices(np.zeros((0, 3), dtype), none, (4, 3))
        assert same(slices.to_dense(), np.zeros((4, 3), dtype))
        assert same(slices.coalesce().values, np.zeros((0, 3), dtype))
        assert slices.coalesce().indices.tolist() == []


def test_results_share_no_memory_and_inputs_are_not_written(mesh):
    for indices in (np.array([1, 0]), np.array([0, 1])):  # also if nothing is merged or moved
        values = np.ones((2, 3), "float32")
        values.flags.writeable = False
        slices = gr.IndexedSlices(values, indices, (2, 3))
        made = slices.coalesce()
        for result in (made.values, slices.to_dense()):
            assert not np.may_share_memory(result, values)
            result[...] = 7
        assert not np.may_share_memory(made.indices, slices.indices)
        assert (values == 1).all()


def test_the_result_has_the_device_and_the_array_type_of_the_values(mesh):
    first, second, third = mesh.devices
    values = np.ones((2, 3))
    with gr.replica(1):
        assert gr.IndexedSlices(values, [1, 1]).coalesce(output_type="buffer").device is second
    assert gr.IndexedSlices(values, [1, 1], (2, 3)).to_dense(output_type="buffer").device is first
    own = gr.IndexedSlices(third.put(values), [1, 1], (2, 3))
    assert own.coalesce().device is third
    assert own.to_dense().device is third
    assert isinstance(own.coalesce(output_type="numpy").values, np.ndarray)
    assert isinstance(own.to_dense(output_type="numpy"), np.ndarray)
    assert isinstance(gr.IndexedSlices(values, [1, 1]).coalesce().values, np.ndarray)


def test_the_device_work_of_each_call(mesh):
    slices = slices_of()
    with mesh.journal() as journal:
        slices.coalesce(output_type="buffer")
    assert [record.kind for record in journal.records] == ["upload", "launch"]
    with mesh.journal() as journal:
        slices.to_dense(output_type="buffer")
    assert [record.kind for record in journal.records] == ["fill", "upload", "launch"]
    on_device = mesh.devices[0].upload(np.array([0, 1]))
    with mesh.journal() as journal:
        slices = gr.IndexedSlices(mesh.devices[0].put(np.ones((2, 3))), on_device)
        slices.coalesce()
    assert [record.kind for record in journal.records] == ["download", "upload", "launch"]


@settings(max_examples=examples(40), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    indices=st.lists(st.integers(0, 6), max_size=30),
    width=st.integers(0, 9),
    seed=st.integers(0, 999),
)
def test_conversions_agree_with_each_other(dtype, indices, width, seed):
    values = exact_data((len(indices), width), dtype, seed=seed)
    slices = gr.IndexedSlices(values, indices, (7, width))
    once, dense = slices.coalesce(), slices.to_dense()
    twice = once.coalesce()
    assert twice.indices.tolist() == once.indices.tolist() == sorted(set(indices))
    assert same(twice.values, once.values)
    assert same(once.to_dense(), dense)
    oracle = np.zeros((7, width), dtype)
    np.add.at(oracle, indices, values)
    assert same(dense, oracle)
    order = np.random.default_rng(seed).permutation(len(indices))
    woven = gr.IndexedSlices(values[order], slices.indices[order], (7, width))
    assert same(woven.to_dense(), dense)  # exact data: any order


# -- many at once ---------------------------------------------------------------------------------


def test_many_tensors_share_launches(mesh):
    first, _, third = mesh.devices
    parts = [slices_of(dtype, width=3 + k, seed=k)
             for k, dtype in enumerate(["float32", "float16", "float32", "float32"])]  # fmt: skip
    homes = [first, first, first, third]
    placed = [
        gr.IndexedSlices(home.put(part.values), part.indices, part.dense_shape)
        for part, home in zip(parts, homes, strict=True)
    ]
    with mesh.journal() as journal:
        made = to_dense_n(placed)
    assert (journal.launches, journal.uploads) == (3, 2)
    for part, buffer, home in zip(parts, made, homes, strict=True):
        assert buffer.device is home
        assert same(buffer.numpy(), whole(part))
    plans = [plan_segments(part.indices) for part in parts]
    with mesh.journal() as journal:
        made = coalesce_n([part.values for part in placed], plans)
    assert (journal.launches, journal.uploads) == (3, 2)
    assert all(same(one.numpy(), merged(part)[1]) for one, part in zip(made, parts, strict=True))
    assert coalesce_n([], []) == to_dense_n([]) == []


def test_numpy_makes_no_array_of_rows():
    rows = gr.IndexedSlices(np.ones((2, 3)), [0, 4], (5, 3))
    text = (
        r"^IndexedSlices are rows, not one array: use \.to_dense\(\) for the whole array, or "
        r"\.values for the rows$"
    )
    for convert in (np.asarray, np.array, np.sum, lambda rows: np.stack([rows])):
        with pytest.raises(TypeError, match=text):
            convert(rows)
