"""Results that TensorFlow computed, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from optim.agn.team import pair

import gradreduce as gr


def ones(**grads):
    return {name: np.array(value, "float32") for name, value in grads.items()}


def followed(worker, grads, shared=None):
    """The local value and the center's after each step."""
    found = []
    for grad in grads:
        worker.step(ones(v=grad), global_step=shared)
        found.append((float(worker.local["v"]), float(worker.center["v"])))
    return [list(column) for column in zip(*found, strict=True)]


def close(found, wanted):
    assert found == [pytest.approx(column, abs=1e-6) for column in wanted]


def alone(mesh, make, **options):
    return pair(mesh, make=make, num=1, starts={"v": np.float32(0)}, **options)[0]


def test_one_worker_adam_without_memory(mesh):
    starts = {"v0": np.float32(0), "v1": np.float32(0.5)}
    (worker,) = pair(mesh, 4, lambda: gr.AdamOptimizer(0.1, 0.0, 0.0), starts, num=1)
    shared = gr.Variable(0, trainable=False, dtype="int64", device=mesh.devices[0])
    found = []
    for _ in range(8):
        did = worker.step(ones(v0=-1, v1=-1), global_step=shared)
        local, center, sums = worker.local, worker.center, worker.sums
        found.append((local["v0"], local["v1"], center["v0"], center["v1"], sums["v0"]))
        assert (did, shared.numpy()) == (len(found) % 4 == 0, len(found) // 4)
    v0 = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.4, 0.2]
    center = [0, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.2]
    close([*zip(*found, strict=True)], [
        v0, [0.5 + each for each in v0], center, [0.5 + each for each in center],
        [-1, -2, -3, 0, -1, -2, -3, 0],
    ])  # fmt: skip
    assert (shared.numpy(), worker.optimizer.local_step.numpy()) == (2, 8)
    assert worker.optimizer.local_step.dtype == np.dtype("int32")


def test_two_workers_alternate(mesh):
    parts = {f"part_{place}": np.zeros((1, 4), "float32") for place in (0, 1)}
    starts = {"v0": np.float32(0), **parts}
    workers = pair(mesh, 1, lambda: gr.AdamOptimizer(0.1, 0.0, 0.0), starts)
    shared = gr.Variable(0, trainable=False, dtype="int64", device=mesh.devices[0])
    for turn in range(6):
        grads = {name: np.full_like(value, -1) for name, value in starts.items()}
        assert workers[turn % 2].step(grads, global_step=shared) is True
        for value in workers[turn % 2].center.values():
            assert np.allclose(value, 0.1 * (turn + 1), atol=1e-6)
    assert shared.numpy() == 6


def test_gradient_descent(mesh):
    worker = alone(mesh, lambda: gr.GradientDescentOptimizer(0.1), period=2)
    close(followed(worker, [1, 3, -2, 4, 10]),
          [[-0.1, -0.2, 0, -0.3, -1.3], [0, -0.2, -0.2, -0.3, -0.3]])  # fmt: skip


def test_momentum_is_kept_at_a_pull(mesh):
    worker = alone(mesh, lambda: gr.MomentumOptimizer(0.1, 0.9), period=2)
    slots = []
    for wanted in zip([-0.1, -0.1, -0.371, -0.29, -0.69951], [0, -0.1, -0.1, -0.29, -0.29],
                      strict=True):  # fmt: skip
        close(followed(worker, [1]), [[each] for each in wanted])
        var = worker.variables["v"]
        kept = [worker.optimizer.get_slot(each, "momentum")
                for each in (var, worker.getter.center_variable(var))]  # fmt: skip
        slots.append([float(each.numpy()) for each in kept])
    close([*zip(*slots, strict=True)], [[1, 1.9, 2.71, 3.439, 4.0951], [0, 1, 1, 1.9, 1.9]])


def test_two_workers_interleaved(mesh):
    first, second = pair(mesh, 2, lambda: gr.GradientDescentOptimizer(0.1),
                         {"v": np.float32(0)})  # fmt: skip
    close(followed(first, [1, 1]), [[-0.1, -0.1], [0, -0.1]])
    close(followed(second, [4, 4])[1:], [[-0.1, -0.5]])
    assert float(first.local["v"]) == pytest.approx(-0.1)
    assert float(second.local["v"]) == pytest.approx(-0.5)


def test_adams_powers_are_one_pair_for_both_updates(mesh):
    """With a period of two, the first center update uses the third powers."""
    worker = alone(mesh, lambda: gr.AdamOptimizer(0.1), period=2)
    _, center = followed(worker, [1, 1])
    assert center[1] == pytest.approx(-0.0639, abs=5e-5)
    kept = {each.name: each.numpy() for each in worker.optimizer.variables()}
    powers = [value for name, value in sorted(kept.items()) if "power" in name]
    assert powers == pytest.approx([0.9**4, 0.999**4])


def test_minimize(mesh):
    (worker,) = pair(mesh, 2, lambda: gr.GradientDescentOptimizer(0.1),
                     {"v": np.array([1, 2], "float32")}, num=1)  # fmt: skip
    var, found = worker.variables["v"], []
    for _ in range(4):
        did = worker.optimizer.minimize(lambda: np.sum(var * var))
        found.append((did, *worker.local["v"]))
    assert [each[0] for each in found] == [False, True, False, True]
    wanted = [[0.8, 1.6], [0.82, 1.64], [0.656, 1.312], [0.6724, 1.3448]]
    close([each[1:] for each in found], [tuple(each) for each in wanted])


def test_a_period_of_one_is_the_center_after_every_step(mesh):
    workers = pair(mesh, 1)
    for turn in range(4):
        worker = workers[turn % 2]
        assert worker.step({"v": np.full(3, turn, "float32")}) is True
        assert (worker.local["v"] == worker.center["v"]).all()
        assert (worker.sums["v"] == 0).all()
