"""Losses that PyTorch or JAX differentiates, over the same Variables."""

import operator

import numpy as np
import pytest
from support.gradients import DESCENT, gradients
from support.libraries import jnp, torch
from support.meshes import mesh_of

import gradreduce as gr
from gradreduce.errors import InvalidVariableError

mesh = mesh_of([0, 1], scope="module")


@pytest.fixture
def w(mesh):
    return gr.Variable(np.arange(6.0).reshape(3, 2), "w", dtype="float32", device=mesh)


@pytest.mark.parametrize("library", [
    pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax),
])  # fmt: skip
def test_every_operator_beside_an_array_of_the_library(v, library):
    make = torch.tensor if library == "torch" else jnp.array
    x, other = make(v.numpy()), make([3.0, 2.0, 1.0])
    for operation in "add sub mul truediv floordiv mod pow matmul lt le gt ge".split():
        do = getattr(operator, operation)
        for made, wanted in [(do(v, other), do(x, other)), (do(other, v), do(other, x))]:
            assert type(made) is type(wanted), do
            assert made.tolist() == wanted.tolist(), do


@pytest.mark.torch
class TestTorch:
    def test_a_loss_of_tensors(self, v, w):
        x = torch.tensor([[1.0, 0.0, 2.0]])

        def loss():
            hidden = torch.tanh(torch.nn.functional.linear(x, torch.t(w))) * 1.0
            return hidden.sum() + (x * v).sum() + torch.stack([v, v]).sum() + (v * x).sum()

        pairs = DESCENT.compute_gradients(loss)
        assert [variable for _, variable in pairs] == [w, v]
        assert all(isinstance(gradient, torch.Tensor) for gradient, _ in pairs)
        assert pairs[1][0].tolist() == [4.0, 2.0, 6.0]
        slope = 1 - np.tanh(x.numpy() @ w.numpy()) ** 2
        np.testing.assert_allclose(pairs[0][0], x.numpy().T * slope, rtol=1e-6)
        before = v.numpy()
        DESCENT.apply_gradients(pairs)
        assert (v.numpy() == before - [4.0, 2.0, 6.0]).all()

    def test_tensors_share_the_variables_memory(self, v):
        def loss():
            tensor = v.read("torch")
            assert tensor.data_ptr() == v.buffers[0].address
            assert tensor is v.read("torch")
            assert tensor.requires_grad
            return torch.sum(tensor * tensor)

        assert gradients(loss)[0].tolist() == [2.0, 4.0, 6.0]
        outside = v.read("torch")
        assert not outside.requires_grad
        assert outside.data_ptr() != v.buffers[0].address
        assert torch.sum(v).item() == 6

    def test_replicas_terms_and_none(self, mesh, v, w):
        def loss():
            for replica in (1, 0, 1):
                with gr.replica(replica):
                    yield torch.sum(v.read("torch") * (replica + 1))
            yield torch.ones(())

        for method in gr.AggregationMethod:
            found = gradients(loss, [v, w], aggregation_method=method)
            assert isinstance(found[0], torch.Tensor)
            assert found[0].tolist() == [5.0] * 3
            assert found[1] is None
        assert gradients(lambda: torch.sum(v) * 0 + 1, [w]) == [None]

    def test_arguments(self, v, w, mesh):
        loss = lambda: v * torch.ones(3)  # noqa: E731
        assert gradients(loss, grad_loss=[1.0, 2.0, 3.0])[0].tolist() == [1.0, 2.0, 3.0]
        assert gradients(loss)[0].tolist() == [1.0] * 3
        for seed in (1.0, [1j, 0, 0], torch.ones(3, dtype=torch.complex64)):
            with pytest.raises(ValueError, match="grad_loss"):
                gradients(loss, grad_loss=seed)
        (found,) = gradients(lambda: np.tanh(v) * 0 + v, grad_loss=torch.ones(3))
        assert isinstance(found, np.ndarray)
        assert found.tolist() == [1.0] * 3
        given = gr.Variable([1.0, 2.0, 3.0], device=mesh)
        ((found, only),) = DESCENT.compute_gradients(lambda: torch.mul(v, v), grad_loss=given)
        assert only is v
        assert found.tolist() == [2.0, 8.0, 18.0]
        with pytest.raises(InvalidVariableError, match="Invalid type"):
            gradients(lambda: torch.sum(v).long(), [v])
        embedding = torch.nn.functional.embedding
        zeros = torch.tensor([0, 0])
        (rows,) = gradients(lambda: embedding(zeros, w.read("torch"), sparse=True).sum())
        assert rows.tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
        layer = torch.nn.Linear(3, 1)
        (found,) = gradients(lambda: layer(v.read("torch")).sum())
        assert found.tolist() == layer.weight[0].tolist()
        assert layer.weight.grad is None
        DESCENT.minimize(lambda: torch.sum(v) * 2)
        assert v.numpy().tolist() == [-1.0, 0.0, 1.0]

    def test_half_precision(self, mesh):
        x = gr.Variable([1.0, 2.0], dtype="bfloat16", device=mesh)
        (found,) = gradients(lambda: torch.sum(torch.mul(x, x)))
        assert found.dtype == torch.bfloat16
        DESCENT.apply_gradients([(found, x)])
        assert x.numpy().tolist() == [-1.0, -2.0]

    def test_a_stopped_gradient(self, v):
        stop, read, ones = gr.autodiff.stop_gradient, lambda: v.read("torch"), torch.ones(3)
        for stopped in (
            lambda: stop(read()), lambda: stop(v * ones), lambda: stop([ones, read()])[1],
        ):  # fmt: skip
            found = gradients(lambda stopped=stopped: (stopped() * read()).sum())
            assert found[0].tolist() == [1.0, 2.0, 3.0]

    def test_a_traced_value_in_a_torch_function_raises_and_names_the_replacement(self, v):
        with pytest.raises(TypeError, match="torch"):
            gradients(lambda: torch.sum(v * 2))
        for do in (operator.mul, np.multiply):
            for tensor in (torch.ones(3), torch.ones(3, requires_grad=True)):
                with pytest.raises(TypeError, match=r'read\("torch"\)'):
                    gradients(lambda do=do, tensor=tensor: np.sum(do(v * 2, tensor)))

    def test_numpy_operations_in_a_loss_of_tensors_are_not_traced(self, v, w):
        def loss():
            return torch.sum(v) * np.sum(w).item()

        found = gradients(loss, [v, w])
        assert found[0].tolist() == [15.0] * 3
        assert found[1] is None


@pytest.mark.jax
class TestJax:
    def test_a_loss_of_jax(self, v, w):
        x = jnp.array([[1.0, 0.0, 2.0]])

        def loss():
            return jnp.sum(jnp.tanh(x @ w.read("jax") / 8)) + jnp.sum(x * v) + (v * v).sum()

        pairs = DESCENT.compute_gradients(loss, engine="jax")
        assert [variable for _, variable in pairs] == [w, v]
        assert pairs[1][0].tolist() == [3.0, 4.0, 8.0]
        slope = (1 - np.tanh(np.asarray(x) @ w.numpy() / 8) ** 2) / 8
        np.testing.assert_allclose(pairs[0][0], np.asarray(x).T * slope, rtol=1e-5)
        DESCENT.apply_gradients(pairs)
        assert v.numpy().tolist() == [-2.0, -2.0, -5.0]

    def test_arguments(self, v, w, mesh):
        loss = lambda: v.read("jax") * 2  # noqa: E731
        one, two = gradients(lambda: jnp.sum(v * 2), [w, v], engine="jax")
        assert one is None
        assert two.tolist() == [2.0] * 3
        (found,) = gradients(loss, engine="jax", grad_loss=np.array([1.0, 2.0, 3.0]))
        assert found.tolist() == [2.0, 4.0, 6.0]
        assert gradients(loss, engine="jax")[0].tolist() == [2.0] * 3
        for seed in (1.0, [1j, 0, 0], np.ones(3, "complex64"), jnp.ones(3, "complex64")):
            with pytest.raises(ValueError, match="grad_loss"):
                gradients(loss, engine="jax", grad_loss=seed)
        with pytest.raises(InvalidVariableError, match="Invalid type"):
            gradients(lambda: jnp.argmax(v.read("jax")), engine="jax")
        with pytest.raises(InvalidVariableError, match="the loss returned NoneType"):
            gradients(lambda: None, engine="jax")
        with pytest.raises(ValueError, match="No variables"):
            gradients(lambda: 1.0, engine="jax")
        with pytest.raises(ValueError, match="engine"):
            gradients(lambda: jnp.sum(v.read("jax")))
        count = gr.Variable(3, trainable=False, device=mesh)
        assert gradients(lambda: jnp.sum(v * int(count)), engine="jax")[0].tolist() == [3.0] * 3

        def fails():
            jnp.sum(v.read("jax"))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            gradients(fails, engine="jax")
        assert isinstance(v * 2, np.ndarray)  # tracing has ended

    def test_arrays_of_jax_are_constants_of_a_numpy_loss(self, mesh):
        """Also in float64, which JAX disables by default."""
        d = gr.Variable([1.0, 2.0, 3.0], "d", dtype="float64", device=mesh)
        x = jnp.array([3.0, 2.0, 1.0])
        (found,) = gradients(lambda: (d * 2) @ x + np.sum(np.stack([d * 1, x]) * x), grad_loss=x[2])
        assert (type(found), found.dtype) == (np.ndarray, np.float64)
        assert found.tolist() == [9.0, 6.0, 3.0]

    def test_terms_replicas_and_other_dtypes(self, mesh, v):
        wide = gr.Variable([1.0, 2.0], dtype="float64", device=mesh)
        half = gr.Variable([1.0, 2.0], dtype="float16", device=mesh)

        def loss():
            for replica in (0, 1):
                with gr.replica(replica):
                    yield jnp.sum(v.read("jax")) * (replica + 1)
            yield jnp.sum(wide.read("jax") * 2) + jnp.sum(half.read("jax") * 3)

        found = gradients(loss, engine="jax")
        assert [np.asarray(each).tolist() for each in found] == [[3.0] * 3, [2.0] * 2, [3.0] * 2]
        assert [str(each.dtype) for each in found] == ["float32", "float64", "float16"]
        DESCENT.minimize(loss, engine="jax")
        assert v.numpy().tolist() == [-2.0, -1.0, 0.0]

    def test_a_stopped_gradient(self, v):
        stop, read = gr.autodiff.stop_gradient, lambda: v.read("jax")
        for stopped in (
            lambda: stop(v), lambda: stop(read() * 1), lambda: stop((v, read()))[1],
        ):  # fmt: skip
            loss = lambda stopped=stopped: jnp.sum(stopped() * read())  # noqa: E731
            assert gradients(loss, engine="jax")[0].tolist() == [1.0, 2.0, 3.0]

    def test_a_tuple_is_no_loss(self, v):
        def pair():
            return jnp.sum(v.read("jax")), jnp.sum(v.read("jax"))

        def terms():
            yield pair()

        for loss in (pair, lambda: list(pair()), terms):
            with pytest.raises(InvalidVariableError, match=r"the loss returned (tuple|list);"):
                gradients(loss, engine="jax")
