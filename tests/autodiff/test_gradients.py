"""compute_gradients and minimize: what is differentiated, by what, and what is refused."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError, InvalidVariableError
from gradreduce.loss_context import current_reader

DESCENT = gr.GradientDescentOptimizer(1.0)
ADD_N, TREE, ACCUMULATE_N = 0, 1, 2


@pytest.fixture(scope="module")
def mesh():
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True) as made:
        yield made


@pytest.fixture
def v(mesh):
    return gr.Variable([1.0, 2.0, 3.0], "v", device=mesh)


@pytest.fixture
def w(mesh):
    return gr.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "w", device=mesh.devices[1])


def gradients(loss, *args, **options):
    return [gradient for gradient, _ in DESCENT.compute_gradients(loss, *args, **options)]


# -- which variables ------------------------------------------------------------------------------


def test_the_default_is_what_the_loss_reads_in_the_order_of_first_reading(v, w, mesh):
    count = gr.Variable(3, trainable=False, device=mesh)
    fixed = gr.Variable(2.0, trainable=False, device=mesh)
    gr.Variable(7.0, device=mesh)  # never read
    pairs = DESCENT.compute_gradients(lambda: np.sum(v @ w) * fixed + int(count) + np.sum(w * v[0]))
    assert [variable for _, variable in pairs] == [v, w]
    assert pairs[0][0].tolist() == [2 * 3 + 21, 14.0, 22.0]
    assert pairs[1][0].tolist() == [[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]


def test_a_var_list_is_answered_in_its_order(v, w, mesh):
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


def test_what_the_loss_does_not_reach_has_none(v, w):
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


def test_terms_of_several_replicas_in_one_loss_are_added_where_the_first_lies(mesh, v):
    def loss():
        total = 0.0
        for replica in (2, 0, 2):
            with gr.replica(replica):
                total = total + np.sum(v * (replica + 1.0))
        return total

    for method in (ADD_N, TREE, ACCUMULATE_N):
        with mesh.journal() as journal:
            (found,) = gradients(loss, aggregation_method=method)
        assert found.tolist() == [7.0, 7.0, 7.0]
        copied = [record.device for record in journal.records if record.kind == "copy"]
        assert len(copied) == journal.copies <= 1


# -- what a loss may do ---------------------------------------------------------------------------


def test_variables_take_part_in_arithmetic(v, w):
    for loss, wanted in [
        (lambda: np.sum(v * 2 + 1), [2.0] * 3),
        (lambda: np.sum(2 * v - v / 2), [1.5] * 3),
        (lambda: (v**2).sum(), [2.0, 4.0, 6.0]),
        (lambda: np.sum(np.ones(3, "float32") * v), [1.0] * 3),
        (lambda: np.sum(-v + abs(v)), [0.0] * 3),
        (lambda: v[1] * v[-1], [0.0, 3.0, 2.0]),
        (lambda: np.ones((1, 3), "float32") @ v, [1.0] * 3),
        (lambda: v @ np.float32([1, 2, 3]), [1.0, 2.0, 3.0]),
        (lambda: np.sum(np.tanh(v) * 0) + v.mean() * 3 + v.sum(), [2.0] * 3),
        (lambda: np.sum(np.stack([v, v])), [2.0] * 3),
        (lambda: gr.autodiff.relu(v - 2).sum(), [0.0, 0.0, 1.0]),
        (lambda: np.sum(v.reshape(3, 1).T.astype("float64")), [1.0] * 3),
    ]:
        (found,) = gradients(loss)
        assert found.tolist() == wanted
        assert found.dtype == np.float32
        outside = loss()
        assert isinstance(outside, np.ndarray | np.floating), "elsewhere plain arrays"


def test_outside_a_loss_a_value_does_not_change(v):
    before = v.read()
    view = v[1:]
    v.assign([7.0, 8.0, 9.0])
    assert before.tolist() == [1.0, 2.0, 3.0]
    assert view.tolist() == [2.0, 3.0]
    assert isinstance(v.read("buffer"), gr.Buffer)
    with pytest.raises(ValueError, match="as_kind"):
        v.read("tensorflow")


def test_an_operator_writes_no_variable(v):
    for write in (
        lambda x: x.__iadd__(1.0),
        lambda x: x.__imul__(1.0),
        lambda x: np.add(x, 1, out=x),
    ):
        with pytest.raises(TypeError, match="assign"):
            write(v)
    assert v.numpy().tolist() == [1.0, 2.0, 3.0]
    assert v == v  # identity, as before
    assert {v: 1}[v] == 1


def test_a_traced_value_is_not_written_and_not_lost(v):
    plain = np.zeros(3, "float32")

    def into_an_array():
        plain[...] = v * 2

    def in_place():
        array = np.zeros(3, "float32")
        array += v * 2
        return np.sum(array)

    def item():
        (v * 2)[0] = 1.0

    for loss, match in [
        (into_an_array, "stop_gradient"),
        (in_place, "write a = a"),
        (item, "cannot be written"),
        (lambda: np.sum(np.asarray(v * 2)), "stop_gradient"),
        (lambda: np.sum(np.array([v[0], v[1]])), "np.stack"),
        (lambda: np.sum(np.asarray(v)), "numpy"),
        (lambda: np.sum(np.exp(v * 2, out=plain)), "out"),
        (lambda: np.sum(v * 2, out=plain[0]), "out="),
    ]:
        with pytest.raises(TypeError, match=match):
            DESCENT.compute_gradients(loss)
    assert not plain.any()

    def augmented():
        total = v * 1
        total += v * 2
        return np.sum(total)

    assert gradients(augmented)[0].tolist() == [3.0] * 3


def test_a_value_says_what_an_array_says(v):
    def loss():
        x = v * 2
        assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((3,), 1, 3, 3, np.float32)
        assert np.shape(x) == (3,)
        assert (x > 3).tolist() == [False, True, True]
        assert x.numpy().tolist() == x.tolist() == [2.0, 4.0, 6.0]
        assert (float(x[0]), int(x[1]), bool(x[2]), x[0].item()) == (2.0, 4, True, 2.0)
        assert x.argmax() == 2
        assert x.astype("int32").tolist() == [2, 4, 6], "integers are constants"
        assert "Traced" in repr(x)
        with pytest.raises(TypeError):
            len(x[0])
        with pytest.raises(TypeError):
            hash(x)
        assert not hasattr(x, "partition")
        return x.sum()

    assert gradients(loss)[0].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda x: np.sort(x), "np.sort"),
        (lambda x: np.linalg.inv(np.outer(x, x)), "np.linalg.inv"),
        (lambda x: np.fft.fft(x), "np.fft.fft"),
        (lambda x: np.sinc(x), "np.sinc"),
        (lambda x: np.spacing(x), "np.spacing"),
        (lambda x: x * 1j, "complex"),
        (lambda x: np.logaddexp.reduce(x), "logaddexp.reduce"),
        (lambda x: np.add.outer(x, x), "add.outer"),
        (lambda x: np.add(x, x, where=[True, False, True]), "where="),
        (lambda x: np.sum(x, where=np.array([True, False, True])), "where="),
        (lambda x: np.max(x, initial=0.0), "initial="),
        (lambda x: np.einsum("ii", np.outer(x, x)), "twice"),
        (lambda x: np.einsum(x, [0], [0]), "subscripts"),
        (lambda x: np.reshape(x, (3, 1), order="F"), "order="),
        (lambda x: np.linalg.norm(x, ord=1), "norm"),
        (lambda x: x.partition(1), "partition"),
    ],
)
def test_what_has_no_rule_says_so_and_names_pytorch(v, loss, name):
    with pytest.raises(NotImplementedError, match=name) as caught:
        DESCENT.compute_gradients(lambda: loss(v * 1))
    assert "PyTorch" in str(caught.value)


def test_what_cupys_own_functions_ask_is_answered(v):
    """As ``cupy.multiply(2, v * 1)`` does, which does not know NumPy's protocols."""
    kernel = SimpleNamespace(name="cupy_multiply")
    assert (
        gradients(lambda: np.sum((v * 1).__cupy_override_elementwise_kernel__(kernel, 2, v * 3)))[
            0
        ].tolist()
        == [6.0] * 3
    )
    assert v.__cupy_override_elementwise_kernel__(np.add, v, 1).tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(NotImplementedError, match="cupy_erf"):
        gradients(
            lambda: (v * 1).__cupy_override_elementwise_kernel__(
                SimpleNamespace(name="cupy_erf"), v * 1
            )
        )


def test_reductions_of_ufuncs_are_those_of_functions(v):
    assert gradients(lambda: np.add.reduce(v * 2))[0].tolist() == [2.0] * 3
    assert gradients(lambda: np.maximum.reduce(v * 2))[0].tolist() == [0.0, 0.0, 2.0]
    assert gradients(lambda: np.multiply.reduce(v * 1))[0].tolist() == [6.0, 3.0, 2.0]


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


def test_operands_may_be_named(v):
    assert gradients(lambda: np.sum(a=v * 2, axis=0))[0].tolist() == [2.0] * 3
    assert gradients(lambda: np.sum(np.clip(v * 1, a_min=v - 1, a_max=v[1])))[0].tolist() == [
        1.0, 2.0, 0.0
    ]  # fmt: skip
    assert gradients(lambda: np.sum(v) * np.argmax(a=v * 2, axis=0))[0].tolist() == [2.0] * 3
    for loss, name in [
        (lambda: np.sum(v * 1, where=v * 1), "where="),
        (lambda: np.sort(a=v * 1), "np.sort"),
        (lambda: np.where(v * 1), "np.where"),
    ]:
        with pytest.raises(NotImplementedError, match=name):
            gradients(loss)


def test_a_condition_has_no_gradient(v):
    assert gradients(lambda: np.sum(np.where((v - 1) * 1, v * 2, v)))[0].tolist() == [1.0, 2.0, 2.0]
    assert gradients(lambda: np.sum(np.where(v * 1, 1.0, 0.0)), [v]) == [None]


def test_an_index_may_be_a_variable(w, mesh):
    place = gr.Variable(1, trainable=False, device=mesh)
    assert gradients(lambda: w[place, 0] * 1, [w])[0].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert gradients(lambda: (w * 2)[place, 1:][0])[0].tolist() == [[0, 0], [0, 2], [0, 0]]


def test_ties(v):
    assert gradients(lambda: np.sum(np.maximum(v, v * 1)))[0].tolist() == [1.0] * 3
    assert gradients(lambda: np.sum(np.minimum(2.0, v)))[0].tolist() == [1.0, 0.0, 0.0]
    assert gradients(lambda: np.max(v * 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.max(np.minimum(v, 2)))[0].tolist() == [0.0, 0.5, 0.0]
    assert gradients(lambda: np.sum(gr.autodiff.relu(v - 2)))[0].tolist() == [0.0, 0.0, 1.0]
    assert gradients(lambda: np.std(v * 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.prod(v - 1))[0].tolist() == [2.0, 0.0, 0.0]
    assert gradients(lambda: np.prod((v - 1) * (v - 2)))[0].tolist() == [0.0, 0.0, 0.0]


def test_corners_without_nan(mesh, v):
    infinite = [np.inf] * 3
    assert gradients(lambda: np.maximum(v, 2.5), grad_loss=infinite)[0].tolist() == [0, 0, np.inf]
    assert gradients(lambda: np.sum((v - 1) ** 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum((v - 1) ** np.float32([0, 0, 2])))[0].tolist() == [0, 0, 4]
    exponents = gradients(lambda: np.sum(np.float32([0, 1, 0]) ** v))
    assert exponents[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum(0**v))[0].tolist() == [0.0] * 3
    many = gr.Variable(np.zeros(70_000), dtype="float16", device=mesh)
    (found,) = gradients(lambda: np.mean(many))
    assert (found == np.float16(1 / 70_000)).all()
    logits = gr.Variable([-np.inf, 0.0], dtype="float32", device=mesh)
    loss = lambda: gr.autodiff.softmax_cross_entropy(logits, np.array(1))  # noqa: E731
    assert (float(loss()), gradients(loss)[0].tolist()) == (0.0, [0.0, 0.0])


def test_functions_of_ours_do_not_overflow(mesh):
    x = gr.Variable([1000.0, -1000.0, 0.0], dtype="float32", device=mesh)
    assert gradients(lambda: gr.autodiff.logsumexp(x))[0].tolist() == [1.0, 0.0, 0.0]
    assert gr.autodiff.sigmoid(x).tolist() == [1.0, 0.0, 0.5]
    assert gradients(lambda: np.sum(gr.autodiff.sigmoid(x)))[0].tolist() == [0.0, 0.0, 0.25]
    (found,) = gradients(lambda: gr.autodiff.softmax_cross_entropy(x, np.array(1)))
    assert found.tolist() == [1.0, -1.0, 0.0]
    assert gr.autodiff.logsumexp(np.float32([-np.inf, -np.inf])) == -np.inf
    assert gr.autodiff.logsumexp(np.zeros((2, 3), "f"), axis=(0, -1)).dtype == np.float32
    for labels in (np.zeros(2, int), np.zeros(2)):
        with pytest.raises(ValueError, match="labels"):
            gr.autodiff.softmax_cross_entropy(x, labels)


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_gradient_has_the_dtype_of_its_variable(mesh, dtype):
    x = gr.Variable([[0.5, 1.0], [1.5, 2.0]], dtype=dtype, device=mesh)
    for loss, wanted in [
        (lambda: np.sum(x * x) + np.sum(x), [[2.0, 3.0], [4.0, 5.0]]),
        (lambda: np.mean(np.square(x)), [[0.25, 0.5], [0.75, 1.0]]),
        (lambda: np.sum(x * np.full(2, 2.0)), [[2.0, 2.0], [2.0, 2.0]]),  # float64 beside it
        (lambda: np.sum(gr.autodiff.relu(x - 1) * 2), [[0.0, 0.0], [2.0, 2.0]]),
        (lambda: np.max(x) * 2, [[0.0, 0.0], [0.0, 2.0]]),
    ]:
        (found,) = gradients(loss)
        assert found.dtype == x.dtype
        assert found.tolist() == wanted


def test_halves_are_added_in_float32(mesh):
    x = gr.Variable(np.zeros(2), dtype="float16", device=mesh)
    terms = [2048.0, 1.0, 1.0, 1.0]
    for method in (ADD_N, TREE, ACCUMULATE_N):
        (found,) = gradients(lambda: sum(np.sum(x * t) for t in terms), aggregation_method=method)
        assert found.tolist() == [2052.0, 2052.0]  # 2051, rounded once; in halves 2048


def test_what_is_no_float_is_refused(mesh, v):
    count = gr.Variable(3, trainable=False, device=mesh)
    with pytest.raises(InvalidVariableError, match="Invalid type int64"):
        DESCENT.compute_gradients(lambda: np.sum(v), [count])
    for loss in (lambda: np.argmax(v), lambda: np.array(1j), lambda: np.array([True])):
        with pytest.raises(InvalidVariableError, match="Invalid type"):
            DESCENT.compute_gradients(loss, [v])
    for made in (None, "loss", [1.0], {}, True, object()):
        with pytest.raises(InvalidVariableError, match="the loss returned"):
            DESCENT.compute_gradients(lambda made=made: made, [v])


# -- arguments ------------------------------------------------------------------------------------


def test_arguments_are_checked_before_the_loss_is_called(v):
    def loss():
        raise AssertionError("called")

    for wrong in (3, -1, 1.5, "GATE_OP", None, True):
        with pytest.raises(ValueError, match="gate_gradients must be one of"):
            DESCENT.compute_gradients(loss, gate_gradients=wrong)
    for wrong in (3, -1, "TREE", 0.5):
        with pytest.raises(ValueError, match="Invalid aggregation_method"):
            DESCENT.compute_gradients(loss, aggregation_method=wrong)
    for wrong in ("torch", "tape", 1):
        with pytest.raises(ValueError, match="engine"):
            DESCENT.compute_gradients(loss, engine=wrong)
    for wrong in ([v, 1.0], [None], ["v"], [v.numpy()], 3, np.ones(2), "v"):
        with pytest.raises(InvalidVariableError) as caught:
            DESCENT.compute_gradients(loss, wrong)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
        with pytest.raises(InvalidVariableError):
            DESCENT.minimize(loss, var_list=wrong)
    for wrong in (3.0, None, v.numpy(), "loss"):
        with pytest.raises(RuntimeError, match="function"):
            DESCENT.compute_gradients(wrong)
        with pytest.raises(RuntimeError, match="function"):
            DESCENT.minimize(wrong)
    with pytest.raises(ValueError, match="No variables to optimize"):
        DESCENT.compute_gradients(loss, [])
    with pytest.raises(ValueError, match="No variables to optimize"):
        DESCENT.compute_gradients(lambda: 1.0)


def test_gates_and_colocation_make_no_difference(v):
    for gate in (gr.Optimizer.GATE_NONE, gr.Optimizer.GATE_OP, gr.Optimizer.GATE_GRAPH):
        found = gradients(
            lambda: np.sum(v * 2), gate_gradients=gate, colocate_gradients_with_ops=True
        )
        assert found[0].tolist() == [2.0] * 3


def test_grad_loss(v):
    vector = lambda: v * v  # noqa: E731
    assert gradients(vector)[0].tolist() == [2.0, 4.0, 6.0], "of the sum"
    for given in ([1.0, 0.5, 2.0], np.array([1.0, 0.5, 2.0]), np.float32([1, 0.5, 2])):
        assert gradients(vector, grad_loss=given)[0].tolist() == [2.0, 2.0, 12.0]
    assert gradients(lambda: np.sum(v), grad_loss=3)[0].tolist() == [3.0] * 3
    for wrong in (2.0, [1.0], np.ones((3, 1))):
        with pytest.raises(ValueError, match="grad_loss"):
            DESCENT.compute_gradients(vector, grad_loss=wrong)


def test_minimize(v, w, mesh):
    step = gr.Variable(0, trainable=False, device=mesh)
    assert DESCENT.minimize(lambda: np.sum(v * 2), step) is None
    assert v.numpy().tolist() == [-1.0, 0.0, 1.0]
    DESCENT.minimize(lambda: np.sum(v) + np.sum(w), step, [w], name="step", grad_loss=2.0)
    assert v.numpy().tolist() == [-1.0, 0.0, 1.0]
    assert w.numpy().tolist() == [[-1.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    assert int(step) == 2
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        DESCENT.minimize(lambda: np.sum(v), step, [w])
    with pytest.raises(ValueError, match="No variables to optimize"):
        DESCENT.minimize(lambda: 1.0, step)
    assert int(step) == 2


def test_a_loss_may_return_a_variable(mesh):
    scalar = gr.Variable(3.0, device=mesh)
    ((gradient, _),) = DESCENT.compute_gradients(lambda: scalar)
    assert (gradient.shape, gradient.dtype, float(gradient)) == ((), np.float32, 1.0)


# -- whose memory ---------------------------------------------------------------------------------


def test_a_gradient_is_the_callers(v, w, mesh):
    other = gr.Variable([1.0, 1.0, 1.0], device=mesh)
    seed = np.ones(3, "float32")
    for loss, options in [
        (lambda: v + other, {"grad_loss": seed}),
        (lambda: np.sum(v + other), {}),
        (lambda: np.sum(v * other), {}),
        (lambda: np.sum(np.broadcast_to(v, (2, 3)).T[:, 0]) + np.sum(other), {}),
    ]:
        first, second = gradients(loss, [v, other], **options)
        assert not np.shares_memory(first, second)
        assert not np.shares_memory(first, seed)
        for gradient in (first, second):
            assert gradient.flags.writeable
            assert gradient.flags.c_contiguous
        before = v.numpy()
        first[...] = 7
        second[...] = 9
        assert (first == 7).all()
        assert (v.numpy() == before).all()
    kept = gradients(lambda: np.sum(np.square(v)), [v])[0]
    gradients(lambda: np.sum(v * 100) + np.sum(v), [v], aggregation_method=TREE)
    v.assign([0.0, 0.0, 0.0])
    assert kept.tolist() == [2.0, 4.0, 6.0]


def test_the_variable_cannot_be_written_through_its_value(v):
    def loss():
        gr.autodiff.stop_gradient(v)[0] = 5.0

    with pytest.raises(ValueError, match="read-only"):
        DESCENT.compute_gradients(loss)
    assert v.numpy().tolist() == [1.0, 2.0, 3.0]


# -- rows -----------------------------------------------------------------------------------------


def test_what_is_looked_up_has_rows_as_its_gradient(w):
    for method in (ADD_N, TREE, ACCUMULATE_N):
        (found,) = gradients(
            lambda: (
                np.sum(gr.embedding_lookup(w, [[2, 0], [2, 2]]) * 3)
                + np.sum(np.take(w, [-1, 0], axis=0))
            ),
            aggregation_method=method,
        )
        assert isinstance(found, gr.IndexedSlices)
        assert found.indices.tolist() == [2, 0, 2, 2, 2, 0], "in the order of the uses"
        assert found.values.tolist() == [[3.0, 3.0]] * 4 + [[1.0, 1.0]] * 2
        assert found.dense_shape == (3, 2)
        found.values[...] = 1  # the caller's
        (alone,) = gradients(lambda: np.sum(gr.embedding_lookup(w, [1])), [w])
        assert alone.values.tolist() == [[1.0, 1.0]]
        alone.values[...] = 5


def test_rows_among_dense_terms_are_made_dense(w):
    for method in (ADD_N, TREE, ACCUMULATE_N):
        for order in (0, 1):

            def loss(order=order):
                terms = [np.sum(gr.embedding_lookup(w, [2, 2])), np.sum(w * 2)]
                return terms[order] + terms[1 - order] + np.sum(gr.embedding_lookup(w, [0]))

            (found,) = gradients(loss, aggregation_method=method)
            assert found.tolist() == [[3.0, 3.0], [2.0, 2.0], [4.0, 4.0]]


def test_rows_of_what_is_no_variable_are_dense(w):
    for look_up in (
        lambda x: gr.embedding_lookup(x, np.array([2, 0, 2])),
        lambda x: x[[2, 0, 2]],
        lambda x: np.take(x, [2, 0, -1], axis=0),
        lambda x: np.take(x, [5, 0, 2], axis=0, mode="wrap"),
        lambda x: np.take(x, [2, -7, 9], axis=0, mode="clip"),
        lambda x: np.take(x, [4, 5, 0, 1, 4, 5]),
    ):
        (found,) = gradients(lambda look_up=look_up: np.sum(look_up(w * 2)))
        assert found.tolist() == [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]
    (fancy,) = gradients(lambda: np.sum(w[[2, 0, 2]]))
    assert fancy.tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]], "an index is dense"
    (nothing,) = gradients(lambda: np.sum(w[w.numpy() > 9]) + np.sum(gr.embedding_lookup(w, [])))
    assert not nothing.any()


def test_what_cannot_be_looked_up(w):
    for ids, error in [
        ([0.5], TypeError),
        (["a"], TypeError),
        ([3], InvalidArgumentError),
        ([-1], InvalidArgumentError),
        ([[0], [5]], InvalidArgumentError),
    ]:
        with pytest.raises(error):
            gr.embedding_lookup(w, ids)
        with pytest.raises(error):
            DESCENT.compute_gradients(lambda ids=ids: np.sum(gr.embedding_lookup(w, ids)))
    assert gr.embedding_lookup(w, [[1], [0]]).tolist() == [[[3.0, 4.0]], [[1.0, 2.0]]]
    assert gr.embedding_lookup(w.numpy(), [1]).tolist() == [[3.0, 4.0]]


# -- sums of ours ---------------------------------------------------------------------------------


def test_sums_of_ours_are_differentiable(v, w):
    for add in (
        gr.add_n,
        gr.accumulate_n,
        gr.aggregate,
        lambda xs: gr.accumulate_n(xs, shape=[3], tensor_dtype="float32"),
        lambda xs: gr.aggregate(iter(xs), TREE),
        lambda xs: gr.aggregate((x for x in [*xs, None]), ACCUMULATE_N),
    ):

        def loss(add=add):
            return np.sum(add([v, v * 2, np.ones(3, "float32"), w[:, 0]]) * [1, 2, 3])

        first, second = gradients(loss)
        assert first.tolist() == [3.0, 6.0, 9.0]
        assert second.tolist() == [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    assert gr.add_n([v, v]).tolist() == [2.0, 4.0, 6.0], "outside a loss too"
    assert gradients(lambda: np.sum(gr.add_n([v])))[0].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="same size and shape"):
        DESCENT.compute_gradients(lambda: np.sum(gr.add_n([v, w])))


# -- one call inside another ----------------------------------------------------------------------


def test_a_gradient_of_a_gradient(v):
    def penalty():
        ((slope, _),) = DESCENT.compute_gradients(lambda: np.sum(v**3))
        return np.sum(np.square(slope))  # 9 v**4

    assert gradients(penalty)[0].tolist() == [36.0, 288.0, 972.0]

    def twice():
        (slope,) = gradients(penalty)
        return np.sum(slope)  # 36 v**3

    assert gradients(twice)[0].tolist() == [108.0, 432.0, 972.0]


@pytest.mark.parametrize("method", [ADD_N, TREE, ACCUMULATE_N])
def test_a_gradient_of_a_sum_of_terms(v, w, method):
    def inner():
        rows = np.sum(np.square(gr.embedding_lookup(w, [0, 0, 2])))
        return np.sum(v) + np.sum(v * 1) + np.sum(v * v) + np.sum(v**3) + rows + np.sum(w[1:] * 2)

    def outer():
        slopes = gradients(inner, [v, w], aggregation_method=method)
        return np.sum(np.square(slopes[0])) + np.sum(slopes[1] * slopes[1])

    first, second = gradients(outer, [v, w], aggregation_method=method)
    x = v.numpy()
    assert first.tolist() == (2 * (2 * x + 2 + 3 * x**2) * (2 + 6 * x)).tolist()
    assert second.indices.tolist() == [0, 0, 2], "only looked up, as far as its slope depends on it"
    assert second.to_dense().tolist() == [[32.0, 64.0], [0.0, 0.0], [48.0, 56.0]]


def test_an_inner_call_may_use_values_of_the_outer_one(v):
    def loss():
        doubled = v * 2
        (slope,) = gradients(lambda: np.sum(doubled * v * v + doubled), [v])  # 2 doubled v
        return np.sum(slope)

    assert gradients(loss)[0].tolist() == [8.0, 16.0, 24.0]


def test_an_inner_call_is_a_constant_to_other_variables(v, w):
    def loss():
        (slope,) = gradients(lambda: np.sum(v * v), [v])
        return np.sum(w * slope[0])  # 2 v[0] w

    first, second = gradients(loss)
    assert first.tolist() == [42.0, 0.0, 0.0]
    assert second.tolist() == [[2.0, 2.0]] * 3


def test_a_value_of_an_earlier_loss_is_a_constant(v):
    kept = []

    def loss():
        kept.append(v * 2)
        return np.sum(kept[-1])

    gradients(loss)
    assert (kept[0] + 1).tolist() == [3.0, 5.0, 7.0], "plain arithmetic"
    assert gradients(lambda: np.sum(kept[0] * v))[0].tolist() == [2.0, 4.0, 6.0]
    assert gradients(lambda: np.sum(kept[0]), [v]) == [None]


# -- micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ADD_N, TREE, ACCUMULATE_N])
def test_a_loss_may_yield_terms(v, w, method):
    def loss():
        shared = v * 2
        for place in range(5):
            yield np.sum(shared * place) + np.sum(gr.embedding_lookup(w, [place % 3]))

    first, second = gradients(loss, aggregation_method=method)
    assert first.tolist() == [20.0] * 3
    assert second.indices.tolist() == [0, 1, 2, 0, 1]
    assert gradients(loss, [v], aggregation_method=method, grad_loss=2.0)[0].tolist() == [40.0] * 3
    assert gradients(lambda: iter([np.sum(v), np.float32(1), np.sum(v)]))[0].tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="No variables"):
        DESCENT.compute_gradients(lambda: iter([]))


def test_each_term_ends_before_the_next_is_made(v):
    alive = []

    def loss():
        for _ in range(4):
            assert not [each for each in alive if each() is not None]
            hidden = np.tanh(v * 2)
            alive.append(weakref.ref(hidden.value))
            term = np.sum(hidden)
            del hidden
            yield term
            del term

    gc.disable()
    try:
        assert np.allclose(gradients(loss)[0], 8 * (1 - np.tanh(v.numpy() * 2) ** 2))
    finally:
        gc.enable()
    assert len(alive) == 4


# -- faults ---------------------------------------------------------------------------------------


class Planted(RuntimeError):
    """The failure that a test plants."""


def test_an_exception_in_a_loss_leaves_nothing_behind(v):
    alive = []

    def loss():
        hidden = v * 2
        plain = hidden.value
        alive.append(weakref.ref(plain.value if hasattr(plain, "value") else plain))
        raise Planted

    def inner():
        gradients(loss)
        return np.sum(v)

    def late():
        yield np.sum(v * 2)
        raise Planted

    gc.disable()
    try:
        for faulty in (loss, inner, late):
            try:
                gradients(faulty)
            except Planted:
                pass
            else:
                raise AssertionError("nothing was raised")
            assert current_reader() is None
            assert isinstance(v * 2, np.ndarray)
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()
    assert gradients(lambda: np.sum(v * v))[0].tolist() == [2.0, 4.0, 6.0]


def test_a_caught_exception_of_an_inner_call_changes_nothing(v):
    def loss():
        total = np.sum(v * v)
        with pytest.raises(Planted):
            gradients(faulty)
        return total + np.sum(v)

    def faulty():
        np.sum(v * 100)
        raise Planted

    assert gradients(loss)[0].tolist() == [3.0, 5.0, 7.0]
