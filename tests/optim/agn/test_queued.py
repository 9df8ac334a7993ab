"""AGN gives the same result in every order that the waits allow."""

from __future__ import annotations

import numpy as np
import pytest
from optim.agn.team import Own, Worker
from support.exact_data import exact_data, same
from support.exhaustive import seeds

import gradreduce as gr

SHAPES = {"table": (7, 3), "weights": (40,), "bias": (5,)}
WAYS = {
    "momentum": (lambda: gr.MomentumOptimizer(0.5, 0.5, master_dtype="float32"),
                 {"distance_scale": 2.0, "reset_momentum": True}),
    "lazy adam": (lambda: gr.AdamOptimizer(0.5, lazy=True), {"use_locking": False}),
    "own": (Own, {}),
}  # fmt: skip


def trained(way, **options) -> list[np.ndarray]:
    """Three workers, one with two replicas; their gradients are freed before they are read."""
    make, more = WAYS[way]
    with gr.open_mesh([0, 1, 1, 2], backend="sim", strict=True, **options) as mesh:
        center = gr.AGNCenter(mesh[[0, 2, 3]])
        dtype = "float16" if way == "momentum" else "float32"
        starts = {name: exact_data(shape, dtype) for name, shape in SHAPES.items()}
        homes = [mesh.devices[1], mesh[[3, 2]], mesh.devices[0]]
        team = [Worker(home, center, starts, make, 3, 2, **more) for home in homes]
        for turn in range(9):
            worker = team[turn % 3]
            step(worker, mesh, dtype, turn)
            if turn == 4:
                worker.optimizer.get_init_op(1)()
            if turn == 5:
                center.load_state_dict(center.state_dict())
                worker.optimizer.load_state_dict(worker.optimizer.state_dict())
        kept = [var for worker in team[::-1] for var in worker.variables.values()]
        kept += [worker.getter.accumulation(var)
                 for worker in team for var in worker.variables.values()]  # fmt: skip
        kept += [each for worker in team for each in worker.inner.variables()]
        kept += [*center.variables(), *center._shared.slot_variables()]
        return [buffer.numpy() for each in kept for buffer in each.buffers]


def step(worker, mesh, dtype, seed):
    grads = {name: mesh.devices[seed % 4].upload(exact_data(shape, dtype, seed=seed))
             for name, shape in SHAPES.items()}  # fmt: skip
    if seed % 3 == 1:  # several replicas
        devices = worker.getter.devices
        spread = [exact_data(SHAPES["weights"], dtype, seed=seed + place) for place in (0, 1)]
        grads["weights"] = gr.PerReplica(spread, devices=devices)
    if seed % 2:
        rows = exact_data((4, 3), dtype, seed=seed)
        grads["table"] = gr.IndexedSlices(mesh.devices[2].upload(rows), [5, seed % 7, 5, 2])
    if seed > 5:
        del grads["bias"]
    worker.step(grads)


@pytest.mark.parametrize("seeds", seeds(5, 66))
@pytest.mark.parametrize("way", WAYS)
def test_every_order_gives_the_same(way, seeds):
    wanted = trained(way)
    for seed in seeds:
        found = trained(way, schedule_seed=seed, peer_access=seed % 2 == 0)
        assert all(map(same, found, wanted)), seed
