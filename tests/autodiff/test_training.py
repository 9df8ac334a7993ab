"""Gradients in a training loop, with work that is queued, over replicas, and through SyncStep."""

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


IDS = [[4, 1, 4], [0, 0, 2], [2, 4, 2]]  # of each step; each has an index twice


def descent(table, slots, rows, gradient, step):
    table -= 0.5 * gradient


def momentum(table, slots, rows, gradient, step):
    """Momentum for the rows of the gradient; other rows do not change."""
    slots[0][rows] = 0.9 * slots[0][rows] + gradient[rows]
    table[rows] -= 0.5 * slots[0][rows]


def adam(table, slots, rows, gradient, step):
    """Adam, where the moments of all rows decay."""
    slots[0] += 0.1 * (gradient - slots[0])
    slots[1] += 0.001 * (gradient**2 - slots[1])
    rate = 0.125 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    table -= rate * slots[0] / (np.sqrt(slots[1]) + 1e-8)


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (lambda: gr.GradientDescentOptimizer(0.5), descent),
        (lambda: gr.MomentumOptimizer(0.5, 0.9), momentum),
        (lambda: gr.AdamOptimizer(0.125), adam),
    ],
)
def test_minimize_with_rows_of_a_table(make, model):
    """A row with two gradients is updated once, by their sum."""
    plain = np.arange(12.0).reshape(6, 2) - 4
    scale = np.arange(1.0, 4.0)[:, None]
    with gr.open_mesh([0, 1], backend="sim", strict=True) as mesh:
        table = gr.Variable(plain, device=mesh)
        optimizer, slots = make(), np.zeros((2, 6, 2))
        for step, ids in enumerate(IDS, start=1):
            optimizer.minimize(
                lambda ids=ids: np.sum(np.square(gr.embedding_lookup(table, ids)) * scale)
            )
            gradient = np.zeros_like(plain)
            np.add.at(gradient, ids, 2 * plain[ids] * scale)
            model(plain, slots, sorted(set(ids)), gradient, step)
            for buffer in table.buffers:
                np.testing.assert_allclose(buffer.numpy(), plain, rtol=1e-12)
