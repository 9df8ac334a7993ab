"""Results of compute_gradients: dtype, memory, rows, value of the loss; and invalid arguments."""

import numpy as np
import pytest
from support.gradients import DESCENT, gradients
from support.libraries import jax, jnp, torch

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError, InvalidVariableError

ADD_N, TREE, ACCUMULATE_N = 0, 1, 2


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

    for name, text, values in [
        ("gate_gradients", "gate_gradients must be one of", (3, -1, 1.5, "GATE_OP", None, True)),
        ("colocate_gradients_with_ops", "colocate_gradients_with_ops", ("no", None, 2, 1, 0.0)),
        ("aggregation_method", "Invalid aggregation_method", (3, -1, "TREE", 0.5)),
        ("engine", "engine", ("torch", "tape", 1)),
    ]:
        for wrong in values:
            with pytest.raises(ValueError, match=text):
                DESCENT.compute_gradients(loss, **{name: wrong})
    for wrong in ([v, 1.0], [None], ["v"], [v.numpy()], 3, np.ones(2), "v"):
        with pytest.raises(InvalidVariableError) as caught:
            DESCENT.compute_gradients(loss, wrong)
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
        with pytest.raises(InvalidVariableError):
            DESCENT.minimize(loss, var_list=wrong)
    for wrong in (3.0, None, v.numpy(), "loss"):
        for call in (DESCENT.compute_gradients, DESCENT.minimize):
            with pytest.raises(RuntimeError, match="function"):
                call(wrong)
    for arguments in ((loss, []), (lambda: 1.0,)):
        with pytest.raises(ValueError, match="No variables to optimize"):
            DESCENT.compute_gradients(*arguments)


def test_grad_loss(mesh, v):
    vector = lambda: v * v  # noqa: E731
    for gate in (gr.Optimizer.GATE_NONE, gr.Optimizer.GATE_OP, gr.Optimizer.GATE_GRAPH):
        found = gradients(vector, gate_gradients=gate, colocate_gradients_with_ops=True)
        assert found[0].tolist() == [2.0, 4.0, 6.0], "of the sum"
    for given in ([1.0, 0.5, 2.0], np.array([1.0, 0.5, 2.0]), np.float32([1, 0.5, 2])):
        assert gradients(vector, grad_loss=given)[0].tolist() == [2.0, 2.0, 12.0]
    assert gradients(lambda: np.sum(v), grad_loss=3)[0].tolist() == [3.0] * 3
    for wrong in (2.0, [1.0], np.ones((3, 1)), [1j, 0, 0], ["1", "2", "3"], np.complex64(1)):
        with pytest.raises(ValueError, match="grad_loss"):
            DESCENT.compute_gradients(vector, grad_loss=wrong)
    (pair,) = DESCENT.compute_gradients(vector, grad_loss=gr.Variable([1.0, 0.5, 2.0], device=mesh))
    assert type(pair[0]) is np.ndarray, "a Variable there is no part of the loss"
    assert pair[0].tolist() == [2.0, 2.0, 12.0]


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


def test_terms_are_added_on_the_device_of_their_tensor(mesh, v):
    """A result is on the device of its first operand; a gradient on that of its operand."""
    other = gr.Variable([1.0, 1.0, 1.0], device=mesh.devices[1])

    def loss():
        with gr.replica(2):
            mixed = v * other * 2
            return np.sum(mixed * mixed) + np.sum(v) + np.sum(other)

    for method in (ADD_N, TREE, ACCUMULATE_N):
        with mesh.journal() as journal:
            gradients(loss, [v, other], aggregation_method=method)
        found = [record.device for record in journal.records if record.kind == "launch"]
        assert (found, journal.copies) == ([2, 2, 1], 0), method


# -- rows -----------------------------------------------------------------------------------------


def test_the_gradient_of_a_lookup_has_rows_alone_and_is_dense_among_others(w):
    def looked_up():
        rows = np.sum(gr.embedding_lookup(w, [[2, 0], [2, 2]]) * 3)
        return rows + np.sum(np.take(w, [-1, 0], axis=0))

    for method in (ADD_N, TREE, ACCUMULATE_N):
        (found,) = gradients(looked_up, aggregation_method=method)
        assert isinstance(found, gr.IndexedSlices)
        assert found.indices.tolist() == [2, 0, 2, 2, 2, 0], "in the order of the uses"
        assert found.values.tolist() == [[3.0, 3.0]] * 4 + [[1.0, 1.0]] * 2
        assert found.dense_shape == (3, 2)
        found.values[...] = 1  # the caller owns it
        (alone,) = gradients(lambda: np.sum(gr.embedding_lookup(w, [1])), [w])
        assert alone.values.tolist() == [[1.0, 1.0]]
        alone.values[...] = 5
        for order in (0, 1):

            def mixed(order=order):
                terms = [np.sum(gr.embedding_lookup(w, [2, 2])), np.sum(w * 2)]
                return terms[order] + terms[1 - order] + np.sum(gr.embedding_lookup(w, [0]))

            (found,) = gradients(mixed, aggregation_method=method)
            assert found.tolist() == [[3.0, 3.0], [2.0, 2.0], [4.0, 4.0]]


def test_rows_of_values_that_are_not_variables_are_dense(w):
    for look_up in (
        lambda x: gr.embedding_lookup(x, np.array([2, 0, 2])),
        lambda x: x[[2, 0, 2]],
        lambda x: np.take(x, [2, 0, -1], axis=0),
        lambda x: np.take(x, [5, 0, 2], axis=0, mode="wrap"),
        lambda x: np.take(x, [2, -8, 9], axis=0, mode="clip"),
        lambda x: np.take(x, [4, 5, 0, 1, 4, 5]),
    ):
        (found,) = gradients(lambda look_up=look_up: np.sum(look_up(w * 2)))
        assert found.tolist() == [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]
    (fancy,) = gradients(lambda: np.sum(w[[2, 0, 2]]))
    assert fancy.tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]], "an index is dense"
    (nothing,) = gradients(lambda: np.sum(w[w.numpy() > 9]) + np.sum(gr.embedding_lookup(w, [])))
    assert not nothing.any()


def test_invalid_lookups_are_refused(w):
    refusals = {TypeError: ([0.5], ["a"], 1.0), InvalidArgumentError: ([3], [-1], [[0], [5]])}
    for error, wrong in refusals.items():
        for ids in wrong:
            with pytest.raises(error):
                gr.embedding_lookup(w, ids)
            with pytest.raises(error):
                DESCENT.compute_gradients(lambda ids=ids: np.sum(gr.embedding_lookup(w, ids)))
    assert gr.embedding_lookup(w, [[1], [0]]).tolist() == [[[3.0, 4.0]], [[1.0, 2.0]]]
    assert gr.embedding_lookup(w.numpy(), [1]).tolist() == [[3.0, 4.0]]


# -- sums of ours ---------------------------------------------------------------------------------


def test_our_sums_are_differentiable(v, w):
    for add in (
        gr.add_n,
        gr.accumulate_n,
        gr.aggregate,
        lambda xs: gr.accumulate_n(xs, shape=[3], tensor_dtype="float32"),
        lambda xs: gr.aggregate(iter(xs), TREE),
        lambda xs: gr.aggregate((x for x in [*xs, None]), ACCUMULATE_N),
    ):
        terms = lambda: [v, v * 2, np.ones(3, "float32"), w[:, 0]]  # noqa: E731
        first, second = gradients(lambda add=add, terms=terms: np.sum(add(terms()) * [1, 2, 3]))
        assert first.tolist() == [3.0, 6.0, 9.0]
        assert second.tolist() == [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    assert gr.add_n([v, v]).tolist() == [2.0, 4.0, 6.0], "outside a loss too"
    assert gradients(lambda: np.sum(gr.add_n([v])))[0].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="same size and shape"):
        DESCENT.compute_gradients(lambda: np.sum(gr.add_n([v, w])))


def test_the_value_of_the_loss_is_returned_too(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    value, pairs = optimizer.compute_gradients(lambda: np.sum(w * w), [w], return_loss=True)
    assert (type(value), value, pairs[0][0].tolist()) == (np.float32, 5.0, [2.0, 4.0])
    assert pairs[0][1] is w
    terms = (np.sum(w * number) for number in (1, 2))
    values, pairs = optimizer.compute_gradients(lambda: terms, [w], return_loss=True)
    assert (values, pairs[0][0].tolist()) == ([3.0, 6.0], [3.0, 3.0])
    value, _ = optimizer.compute_gradients(lambda: w, return_loss=True)
    alone = iter([np.float32(2)])
    assert optimizer.compute_gradients(lambda: alone, [w], return_loss=True)[0] == [2.0]
    optimizer.minimize(lambda: np.sum(w * w))
    assert value.tolist() == [1.0, 2.0]  # a copy
    constant = np.ones((), np.float32)

    def constants():
        for number in range(2):
            constant[...] = number
            yield constant

    assert optimizer.compute_gradients(constants, [w], return_loss=True)[0] == [0.0, 1.0]
    with pytest.raises(TypeError, match="return_loss=1"):
        optimizer.compute_gradients(lambda: np.sum(w), return_loss=1)


def test_replicas_of_a_worker_return_one_value_each(mesh):
    getter = gr.AGNCustomGetter(mesh)
    w = gr.get_variable("return_loss/w", initial_value=np.ones(2, "float32"), custom_getter=getter)
    optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, custom_getter=getter)
    values, pairs = optimizer.compute_gradients(lambda: np.sum(w * 3.0), [w], return_loss=True)
    assert (values, len(pairs[0][0])) == ([6.0] * len(mesh), len(mesh))


@pytest.mark.torch
def test_pytorch_losses_return_detached_copies(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    value, pairs = optimizer.compute_gradients(lambda: torch.sum(torch.square(w)), return_loss=True)
    assert (type(value), value.item(), value.requires_grad) == (torch.Tensor, 5.0, False)
    assert pairs[0][0].tolist() == [2.0, 4.0]
    value, _ = optimizer.compute_gradients(lambda: w.read("torch"), [w], return_loss=True)
    optimizer.minimize(lambda: np.sum(w * w), var_list=[w])
    assert value.tolist() == [1.0, 2.0]


@pytest.mark.jax
def test_jax_losses_return_arrays_of_jax(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    options = {"engine": "jax", "return_loss": True}
    value, pairs = optimizer.compute_gradients(
        lambda: w.read("jax") * 2, [w], grad_loss=np.array([1.0, 3.0]), **options
    )
    assert (isinstance(value, jax.Array), value.tolist()) == (True, [2.0, 4.0])
    assert pairs[0][0].tolist() == [2.0, 6.0]
    values, _ = optimizer.compute_gradients(
        lambda: (jnp.sum(w.read("jax")) * number for number in (1, 2)), [w], **options
    )
    assert [float(each) for each in values] == [3.0, 6.0]
    value, pairs = optimizer.compute_gradients(lambda: jnp.float32(4), [w], **options)
    assert (float(value), pairs[0][0]) == (4.0, None)
