"""AGN on the CUDA backend: the bits of the simulation, one launch per GPU, and order."""

from __future__ import annotations

import numpy as np
import pytest
from backends.cuda.test_optimizers import PLACED, values
from support.exact_data import same

import gradreduce as gr

SHAPES = {"table": (9, 5), "weights": (1003,), "bias": (5,)}
WAYS = {
    "momentum": (lambda: gr.MomentumOptimizer(0.1, 0.9, master_dtype="float32"), {}),
    "adam": (lambda: gr.AdamOptimizer(0.1, epsilon=0.01),
             {"distance_scale": 0.5, "reset_momentum": True}),
    "rows": (lambda: gr.MomentumOptimizer(0.1, 0.9), {"distance_scale": 0.5,
                                                      "use_locking": False}),
}  # fmt: skip


def trained(mesh, way, num_turns=10) -> list[np.ndarray]:
    """Two workers, one with several replicas, and a checkpoint during the training."""
    (make, options), dtype = WAYS[way], "float16" if way == "momentum" else "float32"
    center, team = gr.AGNCenter(mesh[::-1]), []
    for home in (mesh.devices[-1], mesh[1:3] if len(mesh) > 2 else mesh):
        getter = gr.AGNCustomGetter(home, center=center)
        ours = [gr.get_variable(name, values(shape, dtype, place), custom_getter=getter)
                for place, (name, shape) in enumerate(SHAPES.items())]  # fmt: skip
        team.append((getter, ours, gr.AGNOptimizer(make(), 2, getter, 2, **options)))
    for turn in range(num_turns):
        _, ours, optimizer = team[turn % 2]
        home = mesh.devices[turn % len(mesh)]
        grads = [home.upload(values(shape, dtype, 10 * turn + place))
                 for place, shape in enumerate(SHAPES.values())]  # fmt: skip
        if way == "rows":
            rows = home.upload(values((3, 5), dtype, turn))
            grads[0] = gr.IndexedSlices(rows, [turn % 9, 4, turn % 9])
        optimizer.apply_gradients(list(zip(grads, ours, strict=True)))
        if turn == 3:
            center.load_state_dict(center.state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.get_init_op(1)()
        del grads
    kept = [each for getter, ours, _ in team for var in ours[::-1]
            for each in (getter.accumulation(var), var)]  # fmt: skip
    kept = [*team[0][2].variables(), *team[1][2].variables(), *center.variables(), *kept]
    # The last device first: reading the first one waits for its work for others.
    return [buffer.numpy() for each in kept[::-1] for buffer in each.buffers[::-1]]


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_the_simulation(placement, way, gpus):
    gpus(40 + len(placement))
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        found, wanted = trained(mesh, way), trained(sim, way)
        assert all(map(same, found, wanted))


@pytest.mark.parametrize("placement", PLACED)
def test_each_replica_is_differentiated_on_its_own_gpu(placement, gpus):
    """Whichever GPU is current."""
    gpus(60 + len(placement))
    import cupy

    with gr.open_mesh(placement, backend="cuda") as mesh:
        getter = gr.AGNCustomGetter(mesh, center=gr.AGNCenter(mesh))
        var = gr.get_variable("v", values((7,), "float32", 0), custom_getter=getter)
        optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 1, getter, 1)
        before = var.numpy()
        data = gr.PerReplica([np.full(7, place + 1.0, "float32") for place in range(len(mesh))],
                             mesh)  # fmt: skip
        current = []

        def loss():
            current.append(cupy.cuda.Device().id)
            return np.sum(np.square(var * data.get()) / 2)

        assert optimizer.minimize(loss) is True
        assert current == [device.physical for device in mesh]
        factor = sum((place + 1) ** 2 for place in range(len(mesh))) / len(mesh)
        for copy in var.buffers:
            np.testing.assert_allclose(copy.numpy(), before * (1 - factor), rtol=1e-5)


@pytest.mark.fake_cupy
@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_is_fenced(way, gpus):
    """Also without peer access."""
    with gr.open_mesh([0, 1, 1, 2], backend="sim", strict=True) as sim:
        wanted = trained(sim, way)
    for seed in range(8):
        machine = gpus(seed, peers=seed % 2 == 0)
        with gr.open_mesh([0, 1, 1, 2], backend="cuda") as mesh:
            assert all(map(same, trained(mesh, way), wanted)), seed
        machine.settle()


@pytest.mark.gpu
def test_a_step_is_one_launch_and_a_communication_one_more(gpus):
    gpus(60)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        getter = gr.AGNCustomGetter(mesh.devices[1], center=gr.AGNCenter(mesh))
        ours = [gr.get_variable(f"v{place}", np.zeros(5, "float32"), custom_getter=getter)
                for place in range(200)]  # fmt: skip
        optimizer = gr.AGNOptimizer(gr.AdamOptimizer(0.1), 1, getter, 2)
        pairs = [(mesh.devices[1].upload(np.ones(5, "float32")), var) for var in ours]
        for _ in range(4):
            optimizer.apply_gradients(pairs)
        with mesh.journal() as journal:
            assert optimizer.apply_gradients(pairs) is False
            assert optimizer.apply_gradients(pairs) is True
        local, push = ("local_adam", 200), ("global_adam", 200)
        found = [(each.name, each.num_rows) for each in journal.records]
        assert found == [local, local, push]
