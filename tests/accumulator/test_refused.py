"""Gradients that are refused: the error names the accumulator, and nothing changes."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse, bits, counters

import gradreduce as gr
from gradreduce.errors import DeviceMismatchError, InvalidArgumentError


class Case(NamedTuple):
    """A gradient that does not fit.

    Attributes:
        grad: the gradient, or a function of a device that makes it.
        text: the error, after the name of the accumulator.
        shape: of the accumulator.
        first: a gradient that fits, and whose shape this one lacks; staleness comes before it.
    """

    kind: type[Dense | Sparse]
    grad: Any
    error: type[Exception]
    text: str
    shape: Any = None
    first: Any = None


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def rows(index, values, *shape):
    """One row, with this dense_shape."""
    return gr.IndexedSlices(np.array([values], "float32"), [index], shape or None)


def replicas(*values):
    return lambda device: gr.PerReplica(values, device.mesh)


def of_shape(grad, shown, shape):
    text = (
        "Shapes {} and {} are incompatible: the gradient has the first, the accumulator the second"
    )
    return Case(Dense, grad, ValueError, text.format(shown, shape), shape)


def of_dtype(kind, grad, shown, hint=""):
    return Case(
        kind, grad, ValueError, f"the gradient is {shown}, the accumulator is float32{hint}"
    )


def unlike_first(kind, grad, first, expected, found):
    text = f"Shape mismatch: expected {expected}, got {found}"
    return Case(kind, grad, InvalidArgumentError, text, None, first)


def no_array(grad, name, hint=""):
    text = f"{name} is not an array, a list of numbers or a Buffer{hint}"
    return Case(Dense, grad, TypeError, text)


def no_rows(grad, name):
    text = f"a SparseConditionalAccumulator expects IndexedSlices, got {name}"
    return Case(Sparse, grad, TypeError, text)


def out_of(shape, grad, text):
    return Case(Sparse, grad, InvalidArgumentError, text, shape)


CAST = "; pass cast=True to convert it"
OTHER_DTYPES = ("int32", "bool", "complex64", "g", ">f4")
TABLE = rows(3, [1, 2], 7, 2)
CASES = [
    unlike_first(Dense, ones(3, 2), ones(2, 3), [2, 3], [3, 2]),
    unlike_first(Dense, 1.0, ones(2, 3), [2, 3], []),
    unlike_first(Dense, replicas(ones(3), ones(3)), ones(4), [4], [3]),
    unlike_first(Dense, ones(3, 2), ones(1, 2), [1, 2], [3, 2])._replace(shape=(None, 2)),
    of_shape(ones(2), (2,), (None, 2)),
    of_shape(ones(1, 3), (1, 3), (None, 2)),
    of_shape(ones(1, 2, 1), (1, 2, 1), (None, 2)),
    of_shape(1.0, (), (None, 2)),
    of_shape(replicas(ones(1, 3), ones(1, 3)), (1, 3), (None,)),
    Case(Dense, replicas(ones(3), ones(4)), ValueError,
         "replicas differ in shape: replica 1 has shape [4], replica 0 has [3]"),
    of_dtype(Dense, ones(3, 2, dtype="float64"), "float64", CAST)._replace(shape=(None, 2)),
    of_dtype(Dense, np.float64(1), "float64", CAST),
    of_dtype(Dense, replicas(ones(3), ones(3, dtype="float64")), "float64", CAST),
    of_dtype(Dense, gr.IndexedSlices(np.ones((1, 1)), [0], (3, 1)), "float64", CAST),
    *[of_dtype(Dense, ones(2, dtype=each), np.dtype(each)) for each in OTHER_DTYPES],
    of_dtype(Sparse, Sparse.value(0, "int32"), "int32"),
    of_dtype(Dense, np.array([None]), "object"),
    of_dtype(Dense, np.array(["a"]), "<U1"),
    Case(Dense, [1.0, "a"], ValueError, "cannot convert <U32 numbers to float32"),
    Case(Dense, [1j], ValueError, "cannot convert complex128 numbers to float32"),
    Case(Dense, [["no"] * 3] * 4, ValueError, "cannot convert <U2 numbers to float32"),
    Case(Dense, [[1.0], [1.0, 2.0]], ValueError, "setting an array element with a sequence. "
         "The requested array has an inhomogeneous shape after 1 dimensions. The detected shape "
         "was (2,) + inhomogeneous part."),
    no_array(None, "NoneType"),
    no_array("1", "str"),
    no_array({1.0}, "set"),
    no_array(object(), "object"),
    no_array(lambda device: gr.Variable([1.0], device=device), "Variable"),
    no_array(lambda device: gr.Mirrored([[1.0]], devices=[device]), "Mirrored",
             "; use AllReduceCrossDeviceOps().reduce(op, value, value) to sum the replicas, or "
             "value[0] for one of them"),
    no_rows(ones(2, 2), "ndarray"),
    no_rows(lambda device: device.put(ones(2)), "Buffer"),
    no_rows(None, "NoneType"),
    no_rows([1.0], "list"),
    no_rows(lambda device: gr.PerReplica([[1.0]], devices=[device]), "Buffer"),
    out_of((4, 2), gr.IndexedSlices(ones(2, 2), [0, 4]),
           "index of slice 1 exceeded limits of shape; index is 4 exceeded 4"),
    out_of((4, 2), rows(0, [1]), "expected values dim 1 to be 2, got 1"),
    out_of((4, 2), rows(0, 1), "expected values rank at least 2, got 1"),
    out_of((4, 2), rows(0, [1, 2], 5, 2), "expected shape dim 0 to be 4, got 5"),
    out_of(None, rows(7, [1, 2]), "index 7 is not below dense_shape[0] = 7 of the first gradient "
           "in the sum")._replace(first=TABLE),
    unlike_first(Sparse, rows(0, [1, 2], 8, 2), TABLE, [7, 2], [8, 2]),
    unlike_first(Sparse, rows(0, [1, 2, 3]), TABLE, [7, 2], [-1, 3]),
    unlike_first(Sparse, rows(0, 1), TABLE, [7, 2], [-1]),
    # Rows for a dense accumulator.
    Case(Dense, rows(1, [5]), ValueError, "dense_shape of IndexedSlices(indices=[1], "
         "values=float32[1, 1], dense_shape=None) is unknown, but the sum needs it: pass "
         "dense_shape to IndexedSlices"),
    Case(Dense, rows(3, [5]), InvalidArgumentError,
         "indices[0] = 3 is not below dense_shape[0] = 3", (3, 1)),
    Case(Dense, rows(1, [5]), InvalidArgumentError,
         "values of shape [1, 1] are not rows of an array of shape [3, 2]", (3, 2)),
    of_shape(rows(0, [5], 4, 1), (4, 1), (3, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind.__name__}-{case.text}" for case in CASES])
def test_a_gradient_that_does_not_fit_changes_nothing(device, case):
    """On one device and over a mesh, alone and with another accumulator, stale and not."""
    grad = case.grad(device) if callable(case.grad) else case.grad
    for home in (device, device.mesh):
        acc = case.kind.make("float32", case.shape, name="acc", device=home)
        beside = gr.ConditionalAccumulator("float32", device=home)
        if case.first is not None:
            gr.apply_grads([acc], [case.first])
        apply = acc.apply_grad if case.kind is Dense else acc.apply_indexed_slices_grad
        for step in (0, -1):
            for where, call, given in (
                ("accumulator 'acc'", apply, (grad, step)),
                ("grads[1], for accumulator 'acc'", gr.apply_grads,
                 ([beside, acc], [ones(1), grad], step)),
            ):  # fmt: skip
                with device.mesh.journal() as journal:
                    if step == -1 and case.first is not None:
                        assert call(*given) is False, "stale: its own shape is not looked at"
                    else:
                        with pytest.raises(case.error) as caught:
                            call(*given)
                        assert type(caught.value) is case.error
                        assert str(caught.value) == f"{where}: {case.text}"
                assert journal.records == []
        if case.first is None:
            assert counters(acc, beside) == [(0, 0, 0)] * 2
        else:
            num_dropped = 2 * len(grad) if isinstance(grad, gr.PerReplica) else 2
            assert counters(acc, beside) == [(1, 0, num_dropped), (0, 0, 1)]
            (taken,) = gr.take_grads([acc], 1)
            first = taken.primary if home is device.mesh else taken
            assert bits(first) == bits(case.first)


@pytest.mark.parametrize("case", [of_dtype(Sparse, Sparse.value(0, "int32"), "int32"),
                                  *[of_dtype(Dense, ones(2, dtype=each), each)
                                    for each in OTHER_DTYPES]])  # fmt: skip
def test_other_dtypes_cannot_be_cast(device, case):
    acc = case.kind.make("float32", device=device)
    with pytest.raises(ValueError, match="cannot convert"):
        gr.apply_grads([acc], [case.grad], cast=True)
    assert counters(acc) == [(0, 0, 0)]


def test_gradients_of_another_mesh(accumulator):
    acc = accumulator()
    with gr.open_mesh(1, backend="sim") as other:
        for grad in (other.devices[0].put(ones(1)), gr.PerReplica([ones(1)], other)):
            for step in (0, -1):  # checked before the step
                with pytest.raises(DeviceMismatchError, match="another mesh than"):
                    acc.apply_grad(grad, step)
    assert counters(acc) == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("indices", "error"),
    [([-1], InvalidArgumentError), ([0.0], TypeError), (["a"], TypeError), ([None], TypeError),
     (np.array([True]), TypeError)],
)  # fmt: skip
def test_wrong_indices(sparse, indices, error):
    acc = sparse()
    for step in (0, -1):
        with pytest.raises(error, match=r"^indices"):
            acc.apply_grad(indices, [[1.0]], None, step)
    assert counters(acc) == [(0, 0, 0)]
