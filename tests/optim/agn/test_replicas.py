"""A worker of several replicas differentiates its loss on each of them, and reduces."""

import numpy as np
import pytest
from optim.agn.team import Worker

import gradreduce as gr

STARTS = {"table": np.zeros((3, 2), "float32"), "scale": np.float32(0)}


@pytest.fixture
def worker(mesh) -> Worker:
    """A worker on the last two devices; a step is ten times the mean gradient."""
    make = lambda: gr.GradientDescentOptimizer(10.0)  # noqa: E731
    return Worker(mesh[len(mesh) - 2 :], gr.AGNCenter(mesh), STARTS, make, period=2)


def test_minimize_takes_the_mean_over_the_replicas(worker):
    table, scale = worker.variables.values()
    data = gr.PerReplica([np.float32(1), np.float32(3)], devices=worker.getter.devices)
    read, devices, rows, one = [], [], iter([0, 1, 0, 1]), np.ones(1, "float32")

    def loss():
        devices.append(gr.add_n([one, one], output_type="buffer").device)
        read.append(np.asarray(data.get()))
        yield scale * read[-1]
        yield np.sum(gr.embedding_lookup(table, [next(rows)])) * read[-1]

    assert worker.optimizer.minimize(loss, var_list=iter([table, scale])) is False
    assert (read, devices) == ([1, 3], list(worker.getter.devices))
    for copy in scale.buffers:
        assert copy.numpy() == -20
    for copy in table.buffers:
        assert copy.numpy().tolist() == [[-5, -5], [-15, -15], [0, 0]]
    assert worker.optimizer.minimize(loss) is True
    assert worker.center["scale"] == -20  # by the mean of the period
    assert (worker.center["table"] == [[-5, -5], [-15, -15], [0, 0]]).all()


def test_a_gradient_is_of_all_replicas_or_of_none(worker):
    table, scale = worker.variables.values()
    losses = iter([lambda: scale * 1, lambda: scale * 2])
    pairs = worker.optimizer.compute_gradients(lambda: next(losses)(), [table, scale])
    assert [var for _, var in pairs] == [table, scale]
    assert pairs[0][0] is None
    assert [part.numpy() for part in pairs[1][0].parts] == [1, 2]
    assert pairs[1][0].devices == worker.getter.devices
    losses = iter([lambda: scale * 1, lambda: np.sum(table)])
    with pytest.raises(ValueError, match="does not use <Variable 'scale'"):
        worker.optimizer.compute_gradients(lambda: next(losses)())


def test_inside_a_replica_it_is_that_one_alone(worker):
    _, scale = worker.variables.values()
    scale.buffers[1].device.upload(np.float32(2), out=scale.buffers[1])
    with gr.replica(1):
        ((gradient, _),) = worker.optimizer.compute_gradients(lambda: scale * scale)
    assert gradient == 4
