"""Losses on CuPy's arrays have the gradients of losses on NumPy's arrays."""

import numpy as np
import pytest
from support.loss_operations import OPERATIONS, weighted

import gradreduce as gr

pytestmark = pytest.mark.gpu

DESCENT = gr.GradientDescentOptimizer(0.125)


def gradients(mesh, operation, shapes, library):
    """Gradients of an operation on Variables of a mesh, as NumPy arrays."""
    variables = [gr.Variable(x, device=mesh) for x in operation.operands(shapes)]
    loss = weighted(operation, np, library)
    pairs = DESCENT.compute_gradients(lambda: loss(*[v * 1.0 for v in variables]), variables)
    found = [gradient for gradient, _ in pairs]
    return [None if g is None else g if type(g) is np.ndarray else g.get() for g in found]


def test_every_operation_gives_on_a_gpu_what_it_gives_on_the_host(gpus, cupy):
    gpus(0)
    with gr.open_mesh([0], backend="cuda") as device, gr.open_mesh(1, backend="sim") as host:
        for operation in OPERATIONS:
            for shapes in operation.shapes:
                wanted = gradients(host, operation, shapes, np.asarray)
                found = gradients(device, operation, shapes, cupy.asarray)
                for left, right in zip(found, wanted, strict=True):
                    said = f"{operation} {shapes}"
                    assert (left is None) == (right is None), said
                    if left is not None:
                        np.testing.assert_allclose(left, right, 1e-9, 1e-11, err_msg=said)


@pytest.mark.parametrize("method", gr.AggregationMethod)
def test_a_sum_of_rows_and_arrays_is_ready_for_cupys_stream(gpus, method, cupy):
    """A call that orders its results with it makes rows dense before the sum is queued."""
    gpus(0)
    with gr.open_mesh([0], backend="cuda") as mesh:
        table = gr.Variable(np.ones((6, 4)), device=mesh)
        opt = gr.GradientDescentOptimizer(1.0)

        def loss():
            return np.sum(gr.embedding_lookup(table, [0, 5])) + np.sum(table * 2.0)

        ((grad, _),) = opt.compute_gradients(loss, aggregation_method=method)
        wanted = np.full((6, 4), 2.0)
        wanted[[0, 5]] += 1
        np.testing.assert_array_equal(cupy.ndarray.get(grad), wanted)


@pytest.mark.multi_gpu(2)
def test_a_loss_need_not_choose_a_gpu(gpus):
    """It computes on the Variable's device; ``like=`` copies host arrays there."""
    gpus(0)
    x = np.float32([[1, 2, 3], [0, 1, 1]])

    def loss():
        hidden = np.tanh(np.asarray(x, like=v) * v)
        parts = np.maximum(hidden, np.full((), 0.5, like=hidden)) * hidden
        return np.sum(parts) + gr.autodiff.logsumexp(hidden)

    found = []
    for backend in ("cuda", "sim"):
        with gr.open_mesh([0, 1], backend=backend) as mesh:
            v = gr.Variable([1.0, 0.25, 0.5], device=mesh)
            parts = []
            for replica in (1, 0):
                with gr.replica(replica):
                    parts += [part for part, _ in DESCENT.compute_gradients(loss)]
                    if backend == "cuda":
                        assert parts[-1].device.id == mesh.devices[replica].physical
            found.append([part.get() if backend == "cuda" else part for part in parts])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_loss_has_read_is_written_after_it(gpus, seed, cupy):
    gpus(seed)
    with gr.open_mesh([0], backend="cuda") as mesh:
        read = gr.Variable(np.ones(64), device=mesh)
        other = gr.Variable(np.ones(64), device=mesh)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            ((found, _),) = DESCENT.compute_gradients(lambda: np.sum(read * other), [other])
            read.assign(np.full(64, 5.0))
            with pytest.raises(ZeroDivisionError):
                DESCENT.compute_gradients(lambda: np.sum(np.tanh(read)) * (1 / 0))
            read.assign(np.full(64, 7.0))
            assert (found == 1).all()
            assert (read.read() + other == 8).all()


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("method", list(gr.AggregationMethod))
def test_terms_of_several_gpus_are_added_on_the_first_device(gpus, method, cupy):
    gpus(2)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        v = gr.Variable([1.0, 2.0, 3.0], device=mesh)

        def loss():
            for replica in (1, 0, 1, 0):
                with gr.replica(replica), cupy.cuda.Device(mesh.devices[replica].physical):
                    term = np.sum(np.square(v) * (replica + 1.0))
                yield term

        ((found, _),) = DESCENT.compute_gradients(loss, aggregation_method=method)
        assert found.device.id == 1
        assert found.get().tolist() == [12.0, 24.0, 36.0]


class Halved(gr.Optimizer):
    def _apply(self, variable, slots, gradient):
        gradient *= 0.5
        variable -= gradient


def test_a_hook_that_writes_its_gradient_writes_a_copy(gpus):
    """CuPy has no read-only arrays, and the replicas on one GPU share the gradient."""
    gpus(31)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        variable = gr.Variable(np.ones(3, "float32"), device=mesh)
        given = mesh.devices[0].upload(np.ones(3, "float32"))
        Halved("halved").apply_gradients([(given, variable)])
        assert given.numpy().tolist() == [1, 1, 1]
        assert [buffer.numpy().tolist() for buffer in variable.buffers] == [[0.5] * 3] * 2
