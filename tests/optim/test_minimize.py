"""``minimize`` averages the gradients of all replicas of the variables."""

import numpy as np
import pytest

import gradreduce as gr

ONE = np.ones(1, "float32")


def descent() -> gr.Optimizer:
    return gr.GradientDescentOptimizer(1.0)


@pytest.mark.parametrize("as_var_list", [lambda _: None, list, iter], ids=["none", "list", "iter"])
def test_the_loss_is_called_once_for_each_replica(mesh, as_var_list):
    count = len(mesh)
    table = gr.Variable(np.zeros((count, 2), "float32"), device=mesh)
    scale = gr.Variable(np.float32(0), device=mesh)
    data = gr.PerReplica([np.float32(count * replica) for replica in range(count)], mesh)
    read, devices = [], []

    def loss():
        value = scale * np.asarray(data.get())
        devices.append(gr.add_n([ONE, ONE], output_type="buffer").device)
        read.append(float(data.get()))
        yield value
        row = len(read) - 1
        yield np.sum(gr.embedding_lookup(table, [row, row])) * (count * read[-1])

    optimizer = descent()
    optimizer.minimize(loss, var_list=as_var_list([scale, table]))
    assert read == [count * replica for replica in range(count)]
    assert devices == list(mesh)
    for copy in scale.buffers:
        assert copy.numpy() == -sum(range(count))
    for copy in table.buffers:
        assert copy.numpy().tolist() == [[-2 * count * row] * 2 for row in range(count)]


def test_variables_on_one_device_have_one_replica(mesh):
    home, elsewhere = mesh.devices[1], mesh.devices[0]
    first = gr.Variable(np.float32(0), device=home)
    second = gr.Variable(np.float32(0), device=elsewhere)
    devices = []

    def loss():
        value = first * 2 + np.sum(second) * 3
        devices.append(gr.add_n([ONE, ONE], output_type="buffer").device)
        return value

    descent().minimize(loss)
    assert (first.numpy(), second.numpy(), devices) == (-2, -3, [home])


def test_minimize_is_for_all_replicas(mesh):
    w = gr.Variable(np.float32(1), "w", device=mesh)
    agn = gr.AGNCustomGetter(mesh, center=gr.AGNCenter(mesh))
    v = gr.get_variable("v", np.float32(1), custom_getter=agn)
    calls = []
    text = (
        r"^minimize is called inside gr\.replica\(1\), but calls the loss inside the gr\.replica "
        r"of each replica, and averages the gradients: call it outside, or call compute_gradients "
        r"for the gradients of one replica$"
    )
    for optimizer, variable in ((descent(), w), (gr.AGNOptimizer(descent(), 1, agn), v)):
        with gr.replica(1), pytest.raises(RuntimeError, match=text):
            optimizer.minimize(lambda x=variable: calls.append(x) or x * x)
        assert [copy.numpy() for copy in variable.buffers] == [1] * len(mesh)
    assert not calls


def test_all_replicas_use_the_same_variables(mesh):
    w, x = (gr.Variable(np.float32(1), name, device=mesh) for name in "wx")
    part = gr.Variable(np.float32(1), "part", device=mesh.devices[0])
    replica = gr.Mirrored(range(len(mesh)), mesh)
    pairs = [
        (r"^<Variable 'part' .* and <Variable 'w' .* are on different devices; create all "
         r"variables on the same devices$", lambda: w * part),
        (r"^the loss does not use <Variable 'x' .* on replica 0, but does on others",
         lambda: w * x if replica.get() else w * 2),
    ]  # fmt: skip
    for text, loss in pairs:
        with pytest.raises(ValueError, match=text):
            descent().minimize(loss)
    assert [copy.numpy() for each in (w, x, part) for copy in each.buffers] == [1] * (
        2 * len(mesh) + 1
    )


def test_a_subclass_may_change_the_gradients_of_each_replica(mesh):
    class Clipped(gr.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            pairs = super().compute_gradients(*args, **kwargs)
            return [(np.minimum(gradient, 1), variable) for gradient, variable in pairs]

    w = gr.Variable(np.float32(0), device=mesh)
    factor = gr.PerReplica([np.float32(0.5), *[np.float32(9)] * (len(mesh) - 1)], mesh)
    Clipped(len(mesh)).minimize(lambda: w * np.asarray(factor.get()))
    assert [copy.numpy() for copy in w.buffers] == [0.5 - len(mesh)] * len(mesh)
