"""Gradients in a training loop over replicas, whose work is queued."""

import numpy as np
import pytest
from support.exhaustive import seeds

import gradreduce as gr

NUM_REPLICAS, NUM_STEPS = 4, 4


def trained(mesh) -> list[list[float]]:
    """A small network after training; its data are exact, so that any order gives the same."""
    weights = gr.Variable(np.full((3, 2), 0.5), dtype="float32", device=mesh)
    table = gr.Variable(np.arange(8.0).reshape(4, 2), dtype="float32", device=mesh)
    optimizer = gr.MomentumOptimizer(0.125, 0.5)

    def loss(replica):
        x = np.float32([[1, 2, 0], [0, 1, replica]])
        hidden = np.maximum(x @ weights, table[[replica, 1]])
        return np.sum(hidden) + np.sum(weights * replica) + np.sum(table * weights[0])

    for _ in range(NUM_STEPS):
        parts = []
        for replica in range(NUM_REPLICAS):
            with gr.replica(replica):
                parts.append(
                    optimizer.compute_gradients(
                        lambda replica=replica: loss(replica),
                        [weights, table],
                        aggregation_method=gr.AggregationMethod.EXPERIMENTAL_TREE,
                    )
                )
        spread = [
            (gr.PerReplica([part[place][0] for part in parts], mesh), variable)
            for place, variable in enumerate((weights, table))
        ]
        optimizer.apply_gradients(spread)
    return [variable.numpy().tolist() for variable in (weights, table)]


@pytest.fixture(scope="module")
def wanted():
    with gr.open_mesh(NUM_REPLICAS, backend="sim") as mesh:
        return trained(mesh)


@pytest.mark.parametrize("seeds", seeds(4, 12))
def test_queued_work_gives_the_same(wanted, seeds):
    for seed in seeds:
        options = {"schedule_seed": seed, "strict": True, "peer_access": bool(seed % 2)}
        with gr.open_mesh([0, 1, 1, 0], backend="sim", **options) as mesh:
            assert trained(mesh) == wanted
