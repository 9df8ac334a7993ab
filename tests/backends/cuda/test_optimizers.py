"""Optimizers on the CUDA backend: the bits of the simulation, and one launch per GPU."""

from __future__ import annotations

import numpy as np
import pytest
from optim.test_update_rules import RULES as UPDATE_RULES
from support.exact_data import random_data, same

import gradreduce as gr
from gradreduce.device import Mesh

SHAPES = ((9, 5), (1003,), ())


class Clipped(gr.Optimizer):
    """A user's rule with operations that NumPy and CuPy round alike."""

    _slot_names = ("mean", "steps")

    def __init__(self, rate, **more):
        super().__init__("Clipped", **more)
        self.rate = rate

    def _slot_start(self, name):
        return 1.0 if name == "steps" else 0.0

    def _apply(self, variable, slots, gradient):
        mean = slots["mean"]
        mean *= 0.5
        mean += 0.5 * gradient
        slots["steps"] += 1
        variable -= self.rate * np.maximum(np.minimum(mean, 1), -1) / slots["steps"]


RULES = {
    **{name: make for name, (_, make, _) in UPDATE_RULES.items()},
    "lazy adam": lambda **more: gr.AdamOptimizer(0.1, epsilon=0.01, lazy=True, **more),
    "own": lambda **more: Clipped(0.25, **more),
}
PLACED = [
    pytest.param([0, 0], marks=pytest.mark.gpu, id="00"),
    pytest.param([0, 1, 1, 0], marks=pytest.mark.multi_gpu(2), id="0110"),
]


def values(shape, dtype, seed: int) -> np.ndarray:
    """Values of moderate size: sums lose none."""
    found = random_data(shape or (1,), dtype, seed=seed).reshape(shape)
    return np.clip(np.nan_to_num(found.astype(np.float32)), -8, 8).astype(found.dtype)


def rows(device, dtype, seed: int) -> gr.IndexedSlices:
    indices = np.random.default_rng(seed).integers(0, SHAPES[0][0], 6)
    return gr.IndexedSlices(device.upload(values((6, SHAPES[0][1]), dtype, seed)), indices)


def trained(mesh: Mesh, make, dtype, **more) -> list[np.ndarray]:
    """Dense and sparse gradients, per replica and mirrored, and a checkpoint on the way."""
    optimizer, other = make(**more), make(**more)
    variables = [gr.Variable(values(shape, dtype, place), f"v{place}", device=mesh)
                 for place, shape in enumerate(SHAPES)]  # fmt: skip
    for turn in range(3):
        replicas = [
            [device.upload(values(shape, dtype, 100 * turn + 10 * place + k))
             for place, device in enumerate(mesh)]
            for k, shape in enumerate(SHAPES)
        ]  # fmt: skip
        grads = [gr.PerReplica(each, mesh) for each in replicas]
        if turn == 1:
            grads[0] = gr.PerReplica([rows(device, dtype, place)
                                      for place, device in enumerate(mesh)], mesh)  # fmt: skip
            grads[1] = replicas[1][-1]
        if turn == 2:
            other.load_state_dict(optimizer.state_dict(), variables)
            optimizer = other
            grads[0] = rows(mesh.devices[-1], dtype, 7)
        ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
        optimizer.cross_device_ops = ops
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
    mirrored = [gr.Mirrored.of(variable.buffers) for variable in variables]
    clipped, norm = gr.clip_by_global_norm(mirrored, 0.5)
    found = [part.numpy() for each in (*clipped, norm) for part in each.parts]
    kept = [*variables, *optimizer.variables()]
    return found + [buffer.numpy() for each in kept for buffer in each.buffers]


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_simulation(placement, rule, gpus):
    gpus(10 + len(placement))
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        for dtype, more in (("float32", {}), ("float16", {"master_dtype": "float32"})):
            found, wanted = (trained(each, RULES[rule], dtype, **more) for each in (mesh, sim))
            assert all(map(same, found, wanted)), dtype


@pytest.mark.gpu
def test_a_step_is_one_launch_and_no_wait(gpus):
    gpus(30)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        variables = [gr.Variable(np.zeros(5, "float32"), device=mesh) for _ in range(200)]
        ones = [gr.Mirrored([device.upload(np.ones(5, "float32")) for device in mesh])
                for _ in variables]  # fmt: skip
        optimizer = gr.AdamOptimizer(0.1)
        for _ in range(2):
            optimizer.apply_gradients(list(zip(ones, variables, strict=True)))
        with mesh.journal() as journal:
            optimizer.apply_gradients(list(zip(ones, variables, strict=True)))
        assert [(each.name, each.num_rows) for each in journal.records] == [("adam", 400)]


@pytest.mark.gpu
def test_a_hook_that_writes_its_gradient_writes_a_copy(gpus):
    """CuPy has no read-only arrays, and the replicas on one GPU share the gradient."""

    class Halved(gr.Optimizer):
        def _apply(self, variable, slots, gradient):
            gradient *= 0.5
            variable -= gradient

    gpus(31)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        variable = gr.Variable(np.ones(3, "float32"), device=mesh)
        given = mesh.devices[0].upload(np.ones(3, "float32"))
        Halved("halved").apply_gradients([(given, variable)])
        assert given.numpy().tolist() == [1, 1, 1]
        assert [buffer.numpy().tolist() for buffer in variable.buffers] == [[0.5] * 3] * 2
