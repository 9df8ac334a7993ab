"""Valid arguments of a dense accumulator: dtypes, definitions, required numbers."""

from functools import partial

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse, bits, contents, counters, expected, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.errors import DeadlineExceededError, InvalidArgumentError

# -- dtypes and conversion ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_only_cast_converts(device, kind, dtype, given):
    """Equal rows of a gradient are added in its own accumulate type, before it is converted."""
    wide = accumulate_dtype(dtype)
    acc, exact, merged = (
        kind.make(each, reduction_type="SUM", device=device)
        for each in (dtype, wide, accumulate_dtype(given))
    )

    def converted(grad, to):
        with np.errstate(all="ignore"):
            return mapped(grad, lambda array: array.astype(to))

    for seed in range(3):
        grad = kind.random(seed, given)
        if given != dtype:
            text = f"the gradient is {given}, the accumulator is {dtype}.*cast=True"
            for each in (grad, mapped(grad, device.put)):
                with pytest.raises(ValueError, match=text):
                    gr.apply_grads([acc], [each])
        assert gr.apply_grads([acc], [mapped(grad, device.put)], cast=True)
        gr.apply_grads([merged], [converted(grad, merged.dtype)], seed)
        gr.apply_grads([exact], [converted(gr.take_grads([merged], 1)[0], wide)])
    found, wanted = gr.take_grads([acc, exact], 3, output_type="numpy")
    assert bits(found) == bits(converted(wanted, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grad", [[1, 2], (1.0, 2.0), [True, 2], [np.float64(1), 2], 2, 6.0])
def test_lists_and_numbers_convert(accumulator, dtype, grad):
    acc = accumulator(dtype)
    assert acc.apply_grad(grad)
    taken = acc.take_grad(1)
    assert (taken.dtype, taken.tolist()) == (dtype, np.asarray(grad, "float64").tolist())


def test_an_array_may_be_a_scalar_or_not_contiguous(accumulator):
    acc, whole = accumulator(), np.arange(24, dtype="float32").reshape(4, 6)
    pairs = (np.float32(1), np.array(2, "float32")), (whole.T, whole.T[:, ::-1])
    for step, (left, right) in enumerate(pairs):
        assert acc.apply_grad(left, step)
        assert acc.apply_grad(right, step)
        assert (acc.take_grad(2) == (left + right) / 2).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_without_elements_count_and_launch_nothing(home, kind, dtype):
    acc, size = kind.make(dtype, device=home), len(home) if isinstance(home, gr.Mesh) else 1
    empty = np.empty((0, 3), dtype)
    given = gr.IndexedSlices(empty, []) if kind is Sparse else empty
    with acc.accumulator_ref.devices[0].mesh.journal() as journal:
        assert gr.apply_grads([acc], [given])
        if size > 1:
            assert gr.apply_grads([acc], [gr.PerReplica([given] * size, home)])
        (taken,) = gr.take_grads([acc], size)
    assert journal.launches == journal.copies == 0
    wanted = expected([[given]], dtype)
    assert bits(taken) == ([wanted] * size if isinstance(home, gr.Mesh) else wanted)


# -- definitions ----------------------------------------------------------------------------------

OTHER_DTYPES = ["int32", "uint8", "bool", "str", "complex64", "nonsense", None]
OTHER_TYPES = ["mean", "Sum", "", None, "AVERAGE", gr.ReduceOp.MEAN]
WRONG_DEFINITIONS = [
    *[({"dtype": dtype}, TypeError, "dtype") for dtype in OTHER_DTYPES],
    *[({"reduction_type": each}, ValueError, 'not in: "MEAN", "SUM"') for each in OTHER_TYPES],
    ({"shape": (2, -1)}, ValueError, "has a negative extent"),
    *[({"shape": each}, TypeError, "must be a list of integers") for each in ((2.0,), 3)],
    *[({"device": each}, TypeError, "is not a Mesh, a Device") for each in (0, [])],
    ({"device": "sim"}, ValueError, "is not the name of a device"),
    ({"cross_device_ops": "nccl"}, TypeError, "must be a CrossDeviceOps"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG_DEFINITIONS)
def test_wrong_definitions(device, kind, options, error, text):
    with pytest.raises(error, match=text):
        kind.make(**{"dtype": "float32", "device": device, **options})


@pytest.mark.parametrize("wrong", ["per row", "PER_ROW", "", None, 1, "per_gradient"])
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_another_sparse_mean_is_an_error(device, wrong, reduction_type):
    """A sum has no divisor."""
    text = f'sparse_mean {wrong!r} not in: "per_row", "per_gradient"'
    if wrong == "per_gradient":
        reduction_type = "SUM"
        text = "sparse_mean='per_gradient' is only for reduction_type='MEAN'; a SUM is not divided"
    make = partial(Sparse.make, "float32", reduction_type=reduction_type, device=device)
    with pytest.raises(ValueError) as error:
        make(shared_name="named", sparse_mean=wrong)
    assert str(error.value) == text
    make(shared_name="named", sparse_mean="per_row").close()  # the name is free


def test_names(device, kind):
    by_default = {Dense: "conditional_accumulator", Sparse: "sparse_conditional_accumulator"}
    for given, name in [({}, by_default[kind]), ({"name": None}, by_default[kind]),
                        ({"name": "y"}, "y"), ({"name": "Q/x/y"}, "y")]:  # fmt: skip
        acc = kind.make("bfloat16", device=device, **given)
        assert acc.name == name
        assert acc.dtype == gr.device.as_dtype("bfloat16")
        assert isinstance(acc, gr.ConditionalAccumulatorBase)
        assert acc.accumulator_ref is acc.accumulator_ref


def test_the_default_device_is_the_first_of_the_default_mesh(monkeypatch):
    with gr.open_mesh(3, backend="sim") as mesh:
        monkeypatch.setattr("gradreduce.accumulator.base.default_mesh", lambda: mesh)
        acc = gr.ConditionalAccumulator("float32")
        assert acc.accumulator_ref.devices == mesh.devices[:1]


def test_names_of_operations_are_ignored(accumulator):
    acc = accumulator()
    acc.set_global_step(3, "set")
    assert acc.apply_grad([2.0], 3, "apply")
    assert acc.num_accumulated("count") == acc.num_accumulated(name="count") == 1
    assert acc.take_grad(1, "take").tolist() == [2.0]


# -- required numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_required", "error", "text"),
    [
        *[(each, InvalidArgumentError, "must be positive, but was") for each in (0, -1, -(10**30))],
        *[(each, TypeError, "") for each in (1.0, "1", None, [1], np.array([1]))],
    ],
)
def test_a_required_number_is_a_positive_integer(device, kind, num_required, error, text):
    acc = kind.make("float32", device=device)
    gr.apply_grads([acc], [kind.value(1.0)])
    for take in (acc.take_grad, getattr(acc, "take_indexed_slices_grad", acc.take_grad)):
        with pytest.raises(error, match=f"num_required.*{text}"):
            take(num_required)
    assert counters(acc) == [(1, 0, 0)]
    assert contents(gr.take_grads([acc], np.int64(1))) == [kind.result(1.0)]


def test_a_required_number_may_be_a_variable(accumulator, device):
    dense, sparse = accumulator(), gr.SparseConditionalAccumulator("float32", device=device)
    rows = gr.IndexedSlices(np.ones((1, 1), np.float32), [0])
    for dtype, home in (("int32", device), ("int64", device.mesh), ("uint8", device)):
        number = gr.Variable(1, trainable=False, dtype=dtype, device=home)
        for _ in range(2):
            gr.apply_grads([dense, sparse], [[3.0], rows], 2**62)
        number.assign_add(1)
        assert dense.take_grad(number).tolist() == [3.0]
        assert sparse.take_grad(number)[0].tolist() == [0]
        gr.apply_grads([dense, sparse], [[4.0], rows], 2**62)
        with pytest.raises(DeadlineExceededError, match="1 of 2 gradients"):
            gr.take_grads([dense, sparse], number, timeout=0)
        number.assign(0)
        with pytest.raises(InvalidArgumentError, match="must be positive, but was 0"):
            gr.take_grads([dense, sparse], number)
        number.assign(1)
        assert gr.take_grads([dense, sparse], number)[0].tolist() == [4.0]
    for wrong in (1.0, [1]):
        number = gr.Variable(wrong, trainable=False, device=device)
        with pytest.raises(TypeError, match=r"num_required=<Variable .* must hold one integer"):
            dense.take_grad(number)
