"""Valid arguments of a dense accumulator: dtypes, definitions, required numbers."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import FLOATS, random_data, same

import gradreduce as gr
from gradreduce.errors import DeadlineExceededError, InvalidArgumentError


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def counters(acc):
    return acc.num_accumulated(), acc.global_step, acc.num_dropped


# -- dtypes and conversion ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong", ["float16", "bfloat16", "float32", "float64", "int32", "bool",
                                   "complex64", "longdouble", ">f4"])  # fmt: skip
def test_an_array_of_another_dtype(accumulator, device, dtype, wrong):
    wrong = gr.device.as_dtype(wrong) if wrong == "bfloat16" else np.dtype(wrong)
    if wrong == dtype:
        return
    acc = accumulator(dtype)
    with pytest.raises(ValueError, match=f"is {wrong}, the accumulator is {dtype}") as no:
        acc.apply_grad(np.zeros(2, wrong))
    assert ("cast=True" in str(no.value)) == (wrong in FLOATS), "only where it helps"
    if wrong in FLOATS:
        with pytest.raises(ValueError, match="cast=True"):
            acc.apply_grad(device.put(np.zeros(2, wrong)))
        assert acc.apply_grad(np.zeros(2, wrong), cast=True)
    else:
        with pytest.raises(ValueError, match="cannot convert"):
            acc.apply_grad(np.zeros(2, wrong), cast=True)
    assert acc.num_accumulated() == (wrong in FLOATS)


def test_a_numpy_scalar_is_an_array(accumulator):
    acc = accumulator("float32")
    assert acc.apply_grad(np.float32(1))
    with pytest.raises(ValueError, match="float64"):
        acc.apply_grad(np.float64(1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_cast_converts_to_the_type_that_is_added(accumulator, dtype, given):
    acc = accumulator(dtype, reduction_type="SUM")
    wide = "float64" if dtype == np.float64 else "float32"
    terms = list(random_data((3, 501), given))
    for term in terms:
        acc.apply_grad(term, cast=True)
    with np.errstate(all="ignore"):
        wanted = terms[0].astype(wide) + terms[1].astype(wide) + terms[2].astype(wide)
        assert same(acc.take_grad(3), wanted.astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grad", [[1, 2], (1.0, 2.0), [True, 2], [np.float64(1), 2]])
def test_lists_and_numbers_convert(accumulator, dtype, grad):
    acc = accumulator(dtype)
    assert acc.apply_grad(grad)
    taken = acc.take_grad(1)
    assert (taken.dtype, taken.tolist()) == (dtype, [1, 2])


@pytest.mark.parametrize(
    ("grad", "error"),
    [
        (None, TypeError),
        ("1", TypeError),
        ({1.0}, TypeError),
        (object(), TypeError),
        ([1.0, "a"], ValueError),
        ([1j], ValueError),
        ([[1.0], [1.0, 2.0]], ValueError),
        (np.array([None]), ValueError),
        (np.array(["a"]), ValueError),
    ],
)
def test_invalid_gradients_are_refused(accumulator, grad, error):
    acc = accumulator()
    with pytest.raises(error):
        acc.apply_grad(grad)
    assert counters(acc) == (0, 0, 0)


def test_values_of_other_modules_are_no_gradients(accumulator, device):
    acc = accumulator()
    for grad in (gr.Variable([1.0], device=device), gr.Mirrored([[1.0]], devices=[device])):
        with pytest.raises(TypeError, match=type(grad).__name__):
            acc.apply_grad(grad)
    with gr.open_mesh(1, backend="sim") as other:
        for grad in (other.devices[0].put(ones(1)), gr.PerReplica([ones(1)], other)):
            with pytest.raises(gr.errors.DeviceMismatchError):
                acc.apply_grad(grad)
    assert counters(acc) == (0, 0, 0)


# -- definitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "str", "complex64", "nonsense", None])
def test_a_dtype_that_is_not_accumulated(accumulator, dtype):
    with pytest.raises(TypeError, match="dtype"):
        accumulator(dtype)


@pytest.mark.parametrize("reduction_type", ["mean", "Sum", "", None, "AVERAGE", gr.ReduceOp.MEAN])
def test_reduction_types_are_mean_and_sum(accumulator, reduction_type):
    with pytest.raises(ValueError, match='not in: "MEAN", "SUM"'):
        accumulator(reduction_type=reduction_type)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shape": (2, -1)}, ValueError),
        ({"shape": (2.0,)}, TypeError),
        ({"shape": 3}, TypeError),
        ({"device": 0}, TypeError),
        ({"device": "sim"}, ValueError),
        ({"device": []}, TypeError),
        ({"cross_device_ops": "nccl"}, TypeError),
    ],
)
def test_wrong_definitions(device, options, error):
    with pytest.raises(error):
        gr.ConditionalAccumulator("float32", **{"device": device, **options})


def test_names(accumulator):
    assert accumulator().name == "conditional_accumulator"
    assert accumulator(name="y").name == "y"
    assert accumulator(name="Q/x/y").name == "y"
    acc = accumulator("bfloat16")
    assert acc.dtype == gr.device.as_dtype("bfloat16")
    assert isinstance(acc, gr.ConditionalAccumulatorBase)
    assert acc.accumulator_ref is acc.accumulator_ref


def test_names_of_operations_are_ignored(accumulator):
    acc = accumulator()
    acc.set_global_step(3, "set")
    assert acc.apply_grad([2.0], 3, "apply")
    assert acc.num_accumulated("count") == acc.num_accumulated(name="count") == 1
    assert acc.take_grad(1, "take").tolist() == [2.0]


def test_the_default_device_is_the_first_of_the_default_mesh(monkeypatch):
    with gr.open_mesh(3, backend="sim") as mesh:
        monkeypatch.setattr("gradreduce.accumulator.base.default_mesh", lambda: mesh)
        acc = gr.ConditionalAccumulator("float32")
        assert acc.accumulator_ref.devices == mesh.devices[:1]


@pytest.mark.parametrize("num_required", [0, -1, -(10**30)])
def test_num_required_must_be_positive(accumulator, num_required):
    acc = accumulator()
    acc.apply_grad([1.0])
    with pytest.raises(InvalidArgumentError, match="num_required must be positive, but was"):
        acc.take_grad(num_required)
    assert counters(acc) == (1, 0, 0)


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


@pytest.mark.parametrize("num_required", [1.0, "1", None, [1], np.array([1])])
def test_a_required_number_is_an_integer(accumulator, num_required):
    acc = accumulator()
    acc.apply_grad([1.0])
    with pytest.raises(TypeError, match="num_required"):
        acc.take_grad(num_required)
    assert counters(acc) == (1, 0, 0)
    assert acc.take_grad(np.int64(1)).tolist() == [1.0]


def test_none_is_no_name(device):
    for make, name in (
        (gr.ConditionalAccumulator, "conditional_accumulator"),
        (gr.SparseConditionalAccumulator, "sparse_conditional_accumulator"),
    ):
        assert make("float32", name=None, device=device).name == name
        assert make("float32", name="own", device=device).name == "own"
