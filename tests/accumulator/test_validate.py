"""Valid arguments of a dense accumulator: dtypes, definitions, required numbers."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse, bits, counters, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.errors import DeadlineExceededError, InvalidArgumentError


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


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


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(Sparse, "int32"), *[(Dense, each) for each in ("int32", "bool", "complex64", "g", ">f4")]],
)
def test_other_dtypes_cannot_be_cast(device, kind, wrong):
    acc = kind.make("float32", device=device)
    text = f"the gradient is {np.dtype(wrong)}, the accumulator is float32$"  # no hint to cast
    with pytest.raises(ValueError, match=text):
        gr.apply_grads([acc], [kind.value(0, wrong)])
    with pytest.raises(ValueError, match="cannot convert"):
        gr.apply_grads([acc], [kind.value(0, wrong)], cast=True)
    assert acc.num_accumulated() == 0


def test_a_numpy_scalar_is_an_array(accumulator):
    acc = accumulator("float32")
    assert acc.apply_grad(np.float32(1))
    with pytest.raises(ValueError, match="float64"):
        acc.apply_grad(np.float64(1))


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
    assert counters(acc) == [(0, 0, 0)]


def test_values_of_other_modules_are_no_gradients(accumulator, device):
    acc = accumulator()
    for grad in (gr.Variable([1.0], device=device), gr.Mirrored([[1.0]], devices=[device])):
        with pytest.raises(TypeError, match=type(grad).__name__):
            acc.apply_grad(grad)
    with gr.open_mesh(1, backend="sim") as other:
        for grad in (other.devices[0].put(ones(1)), gr.PerReplica([ones(1)], other)):
            for step in (0, -1):  # checked before the step
                with pytest.raises(gr.errors.DeviceMismatchError):
                    acc.apply_grad(grad, step)
    assert counters(acc) == [(0, 0, 0)]


# -- definitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "str", "complex64", "nonsense", None])
def test_a_dtype_that_is_not_accumulated(device, kind, dtype):
    with pytest.raises(TypeError, match="dtype"):
        kind.make(dtype, device=device)


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
def test_wrong_definitions(device, kind, options, error):
    with pytest.raises(error):
        kind.make("float32", **{"device": device, **options})


def test_names(device, kind):
    by_default = {Dense: "conditional_accumulator", Sparse: "sparse_conditional_accumulator"}
    for given, name in [({}, by_default[kind]), ({"name": None}, by_default[kind]),
                        ({"name": "y"}, "y"), ({"name": "Q/x/y"}, "y")]:  # fmt: skip
        acc = kind.make("bfloat16", device=device, **given)
        assert acc.name == name
        assert acc.dtype == gr.device.as_dtype("bfloat16")
        assert isinstance(acc, gr.ConditionalAccumulatorBase)
        assert acc.accumulator_ref is acc.accumulator_ref


def test_names_of_operations_are_ignored(accumulator):
    acc = accumulator()
    acc.set_global_step(3, "set")
    assert acc.apply_grad([2.0], 3, "apply")
    assert acc.num_accumulated("count") == acc.num_accumulated(name="count") == 1
    assert acc.take_grad(1, "take").tolist() == [2.0]


@pytest.mark.parametrize("num_required", [0, -1, -(10**30)])
def test_num_required_must_be_positive(device, kind, num_required):
    acc = kind.make("float32", device=device)
    gr.apply_grads([acc], [kind.value(1.0)])
    for take in (acc.take_grad, getattr(acc, "take_indexed_slices_grad", acc.take_grad)):
        with pytest.raises(InvalidArgumentError, match="num_required must be positive, but was"):
            take(num_required)
    assert counters(acc) == [(1, 0, 0)]


@pytest.mark.parametrize("reduction_type", ["mean", "Sum", "", None, "AVERAGE", gr.ReduceOp.MEAN])
def test_reduction_types_are_mean_and_sum(accumulator, reduction_type):
    with pytest.raises(ValueError, match='not in: "MEAN", "SUM"'):
        accumulator(reduction_type=reduction_type)


def test_the_default_device_is_the_first_of_the_default_mesh(monkeypatch):
    with gr.open_mesh(3, backend="sim") as mesh:
        monkeypatch.setattr("gradreduce.accumulator.base.default_mesh", lambda: mesh)
        acc = gr.ConditionalAccumulator("float32")
        assert acc.accumulator_ref.devices == mesh.devices[:1]


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
    assert counters(acc) == [(1, 0, 0)]
    assert acc.take_grad(np.int64(1)).tolist() == [1.0]
