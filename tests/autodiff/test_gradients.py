"""compute_gradients: which variables, and what a loss may do with them."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest
from support.gradients import DESCENT, gradients

import gradreduce as gr

ADD_N, TREE, ACCUMULATE_N = 0, 1, 2
ENDS = np.array([True, False, True])


# -- which variables ------------------------------------------------------------------------------


def test_the_default_is_what_the_loss_reads_in_the_order_of_first_reading(v, w, mesh):
    count = gr.Variable(3, trainable=False, device=mesh)
    fixed = gr.Variable(2.0, trainable=False, device=mesh)
    gr.Variable(7.0, device=mesh)  # never read
    pairs = DESCENT.compute_gradients(lambda: np.sum(v @ w) * fixed + int(count) + np.sum(w * v[0]))
    assert [variable for _, variable in pairs] == [v, w]
    assert pairs[0][0].tolist() == [2 * 3 + 21, 14.0, 22.0]
    assert pairs[1][0].tolist() == [[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]


def test_gradients_are_in_the_order_of_var_list(v, w, mesh):
    fixed = gr.Variable(2.0, trainable=False, device=mesh)
    loss = lambda: np.sum(v * fixed)  # noqa: E731
    for given in ([w, fixed, v], (w, fixed, v), iter([w, fixed, v])):
        pairs = DESCENT.compute_gradients(loss, given)
        assert [variable for _, variable in pairs] == [w, fixed, v]
        assert pairs[0][0] is None, "not reached"
        assert pairs[1][0] == 6
        assert pairs[2][0].tolist() == [2.0, 2.0, 2.0]
    seen = []
    gradients(lambda: seen.append(v.read()) or np.sum(w), [w])
    assert type(seen[0]) is np.ndarray, "what nobody asked for is not traced"
    (alone,) = DESCENT.compute_gradients(loss, v)
    assert alone[1] is v
    twice = gradients(loss, [v, v])
    assert twice[0].tolist() == twice[1].tolist() == [2.0] * 3


def test_unused_variables_have_no_gradient(v, w):
    assert gradients(lambda: np.sum(v.numpy() * 2) + 0 * np.float32(v.shape[0]), [v, w]) == [
        None, None
    ]  # fmt: skip
    assert gradients(lambda: np.sum(gr.autodiff.stop_gradient(v * 2)), [v]) == [None]
    found = gradients(lambda: np.sum(np.where(v > 1.5, 1.0, 0.0)) + np.argmax(v) * 1.0, [v])
    assert found == [None], "comparisons have no gradient"
    assert gradients(lambda: 1.0, [v]) == [None]
    assert gradients(lambda: np.float32(1.0), [v]) == [None]


def test_replicas_read_their_own_copies(mesh, v):
    with mesh.journal() as journal:
        parts = []
        for replica in range(len(mesh)):
            with gr.replica(replica):
                loss = lambda scale=replica: np.sum(np.square(v)) * scale  # noqa: E731
                parts += gradients(loss)
    assert journal.copies == 0
    DESCENT.apply_gradients([(gr.PerReplica(parts, mesh), v)])
    assert v.numpy().tolist() == [1 - 2.0, 2 - 4.0, 3 - 6.0]


# -- what a loss may do ---------------------------------------------------------------------------


def test_every_operator_is_that_of_an_array_from_either_side(v):
    x = v.numpy()
    names = "add sub mul truediv floordiv mod pow lt le gt ge"
    for do in [getattr(operator, name) for name in names.split()]:
        for other in (2, 2.5, np.float32([3, 2, 1])):
            assert do(v, other).tolist() == do(x, other).tolist(), do
            assert do(other, v).tolist() == do(other, x).tolist(), do
        assert do(v, v).tolist() == do(x, x).tolist(), do
    assert (v @ [1, 2, 4], [[1, 2, 4]] @ v) == (17, [17])
    assert ((-v).tolist(), (+v).tolist(), abs(-v).tolist()) == ([-1, -2, -3], [1, 2, 3], [1, 2, 3])


def test_outside_a_loss_a_value_does_not_change(v):
    before = v.read()
    view = v[1:]
    v.assign([7.0, 8.0, 9.0])
    assert before.tolist() == [1.0, 2.0, 3.0]
    assert view.tolist() == [2.0, 3.0]
    assert isinstance(v.read("buffer"), gr.Buffer)
    with pytest.raises(ValueError, match="output_type"):
        v.read("tensorflow")
    assert v == v  # identity
    assert {v: 1}[v] == 1


def test_writing_or_storing_a_traced_value_raises(v):
    plain = np.zeros(3, "float32")

    def into_an_array():
        plain[...] = v * 2

    def in_place():
        array = np.zeros(3, "float32")
        array += v * 2
        return np.sum(array)

    def item():
        (v * 2)[0] = 1.0

    def item_of_stopped():
        gr.autodiff.stop_gradient(v)[0] = 5.0

    for loss, match in [
        (into_an_array, "stop_gradient"),
        (in_place, "write a = a"),
        (item, "cannot write into"),
        (lambda: np.sum(np.asarray(v * 2)), "stop_gradient"),
        (lambda: np.sum(np.array([v[0], v[1]])), "np.stack"),
        (lambda: np.sum(np.asarray(v)), "numpy"),
        (lambda: np.sum(np.exp(v * 2, out=plain)), "out"),
        (lambda: np.sum(v * 2, out=plain[0]), "out="),
    ]:
        with pytest.raises(TypeError, match=match):
            DESCENT.compute_gradients(loss)
    with pytest.raises(ValueError, match="read-only"):
        DESCENT.compute_gradients(item_of_stopped)
    assert not plain.any() and v.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_traced_value_has_the_attributes_of_an_array(v):
    def loss():
        x = v * 2
        assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((3,), 1, 3, 3, np.float32)
        assert np.shape(x) == (3,)
        assert (x > 3).tolist() == [False, True, True]
        assert x.numpy().tolist() == x.tolist() == [2.0, 4.0, 6.0]
        assert (x[0].item(), bool(x[2])) == (2.0, True)
        assert x.argmax() == 2
        assert (f"{x[1]:.2f}", f"{x[0]}") == ("4.00", repr(x[0]))
        for take in (
            lambda given: gr.Variable(given, device=v.devices[0]),
            lambda given: gr.IndexedSlices(given, [0, 1, 2]),
        ):
            with pytest.raises(TypeError, match=r"Traced is not an array.*stop_gradient"):
                take(x * 1)
        assert x.astype("int32").tolist() == [2, 4, 6], "integers are constants"
        assert "Traced" in repr(x)
        with pytest.raises(TypeError):
            len(x[0])
        with pytest.raises(TypeError):
            hash(x)
        assert not hasattr(x, "partition")
        return x.sum()

    assert gradients(loss)[0].tolist() == [2.0] * 3


def test_operations_without_a_rule_raise_and_name_pytorch(v):
    for loss, name in [
        (lambda x: np.sort(x), "np.sort"),
        (lambda x: np.linalg.inv(np.outer(x, x)), "np.linalg.inv"),
        (lambda x: np.fft.fft(x), "np.fft.fft"),
        (lambda x: np.sinc(x), "np.sinc"),
        (lambda x: np.block([[x, x]]), "np.block"),
        (lambda x: np.spacing(x), "np.spacing"),
        (lambda x: x * 1j, "complex"),
        (lambda x: np.logaddexp.reduce(x), "logaddexp.reduce"),
        (lambda x: np.add.outer(x, x), "add.outer"),
        (lambda x: np.add(x, x, where=[True, False, True]), "where="),
        (lambda x: np.sum(x, where=ENDS), "np.sum with these arguments.*where"),
        (lambda x: np.mean(x, where=ENDS), "np.mean with these arguments.*where"),
        (lambda x: np.prod(x, where=ENDS), "np.prod with these arguments.*where"),
        (lambda x: np.var(x, where=ENDS), "np.var with these arguments.*where"),
        (lambda x: np.std(x, where=ENDS), "np.std with these arguments.*where"),
        (lambda x: np.prod(x, initial=2.0), "initial"),
        (lambda x: np.max(x, initial=0.0), "initial"),
        (lambda x: np.einsum("ii", np.outer(x, x)), "twice"),
        (lambda x: np.einsum(x, [0], [0]), "subscripts"),
        (lambda x: np.einsum("i...,j->ij...", x, x), "ellipsis"),
        (lambda x: np.reshape(x, (3, 1), order="F"), "order="),
        (lambda x: np.linalg.norm(x, ord=1), "norm"),
        (lambda x: x.partition(1), "partition"),
        (lambda x: np.hstack((x, x), dtype="float64"), "np.hstack.*dtype"),
        (lambda x: np.sum(x, where=x), "where="),
        (lambda x: np.sort(a=x), "np.sort"),
        (lambda x: np.where(x), "np.where"),
        (lambda x: of_cupy(x, "erf", x), "cupy_erf"),
    ]:
        with pytest.raises(NotImplementedError, match=name) as caught:
            DESCENT.compute_gradients(lambda loss=loss: loss(v * 1))
        assert "PyTorch" in str(caught.value)


def of_cupy(x, name, *operands):
    """What ``cupy.multiply(2, x)`` calls; CuPy does not use NumPy's protocols."""
    kernel = SimpleNamespace(name=f"cupy_{name}")
    return x.__cupy_override_elementwise_kernel__(kernel, *operands)


def test_functions_are_traced_however_they_are_called(v, w, mesh):
    for loss, wanted in [
        (lambda x: of_cupy(x, "multiply", 2, v * 3), [6.0] * 3),
        (lambda x: of_cupy(x, "clip", v * 3, 0, 4), [3.0, 0.0, 0.0]),
        (lambda x: np.add.reduce(v * 2), [2.0] * 3),
        (lambda x: np.maximum.reduce(v * 2), [0.0, 0.0, 2.0]),
        (lambda x: np.multiply.reduce(x), [6.0, 3.0, 2.0]),
        (lambda x: np.sum(a=v * 2, axis=0), [2.0] * 3),
        (lambda x: np.clip(x, a_min=v - 1, a_max=v[1]), [1.0, 2.0, 0.0]),
        (lambda x: np.sum(v) * np.argmax(a=v * 2, axis=0), [2.0] * 3),
        (lambda x: np.where((v - 1) * 1, v * 2, v), [1.0, 2.0, 2.0]),
        (lambda x: np.broadcast_to(v, (2, 3), subok=True), [2.0] * 3),
    ]:
        assert gradients(lambda loss=loss: np.sum(loss(v * 1)), [v])[0].tolist() == wanted
    found = gradients(lambda: np.add.reduce(w * 2), [w], grad_loss=[1, 3])
    assert found[0].tolist() == [[2, 6]] * 3
    assert gradients(lambda: np.sum(np.where(v * 1, 1.0, 0.0)), [v]) == [None]
    assert v.__cupy_override_elementwise_kernel__(np.add, v, 1).tolist() == [2.0, 3.0, 4.0]
    place = gr.Variable(1, trainable=False, device=mesh)
    assert gradients(lambda: w[place, 0] * 1, [w])[0].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert gradients(lambda: (w * 2)[place, 1:][0])[0].tolist() == [[0, 0], [0, 2], [0, 0]]


def test_methods_take_what_methods_of_arrays_take(v):
    for loss, wanted in [
        (lambda x: x.sum(0, None, None, True), [2.0, 4.0, 6.0]),
        (lambda x: np.sum(x, 0, "float32", None), [2.0, 4.0, 6.0]),
        (lambda x: np.sum(x, out=None) + x.max(0, None, False), [2.0, 4.0, 12.0]),
        (lambda x: x.var(0, None, None, 1) * 0 + x.cumsum()[0] + x.repeat(2)[0], [4.0, 0.0, 0.0]),
        (lambda x: np.concatenate([x, x], axis=0, out=None).round(1).sum() + x.take(0), [2, 0, 0]),
    ]:
        (found,) = gradients(lambda loss=loss: loss(v * v), [v])
        assert found.tolist() == wanted
    with pytest.raises(NotImplementedError, match="out="):
        gradients(lambda: (v * v).sum(0, None, np.zeros(())))


def test_like_accepts_a_variable_or_a_traced_value(v, w):
    """By ``like=``, which reads nothing. On a GPU, this uploads a host array."""
    assert type(np.asarray([1.0, 2.0, 3.0], like=v)) is np.ndarray
    (found,) = gradients(lambda: np.sum(v * np.asarray(np.float32([3, 2, 1]), like=w)))
    assert found.tolist() == [3.0, 2.0, 1.0]
    assert type(np.arange(3.0, like=v)) is np.ndarray
    assert gradients(lambda: np.sum(v) * np.full((), 2.0, like=np.sum(v)))[0].tolist() == [2.0] * 3
    with pytest.raises(NotImplementedError, match=r"np\.block.*PyTorch"):
        np.block([[v, v]])
