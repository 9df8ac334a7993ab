"""Optimizers give the same result in every order that the waits allow."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from optim.agn.team import Own
from support.exact_data import exact_data, same
from support.exhaustive import seeds

import gradreduce as gr

SEEDS = seeds(6, 24)
PLACEMENTS = {"00": [0, 0], "0110": [0, 1, 1, 0]}


RULES = {
    "adam": partial(gr.AdamOptimizer, 0.5),
    "lazy adam": partial(gr.AdamOptimizer, 0.5, lazy=True),
    "nesterov": partial(gr.MomentumOptimizer, 0.5, 0.5, use_nesterov=True),
    "own": Own,
}


def trained(make, placement, **options) -> list[np.ndarray]:
    with gr.open_mesh(placement, backend="sim", strict=True, **options) as mesh:
        optimizer = make(master_dtype="float32")
        table = gr.Variable(exact_data((7, 3), "float16"), "table", device=mesh)
        weights = gr.Variable(exact_data((40,), "float32"), "weights", device=mesh)
        alone = gr.Variable(exact_data((5,), "float32"), "alone", device=mesh.devices[1])
        for turn in range(3):
            given = exact_data((6, 4, 3), "float16", seed=turn)
            parts = [gr.IndexedSlices(part, [5, turn, 5, 2])
                     for part in given[: len(mesh)]]  # fmt: skip
            spread = list(exact_data((len(mesh), 40), "float32", seed=turn))
            pairs = [(gr.PerReplica(parts, mesh), table), (gr.PerReplica(spread, mesh), weights),
                     (exact_data((5,), "float32", seed=turn), alone)]  # fmt: skip
            optimizer.apply_gradients(pairs)
            if turn == 1:
                optimizer.load_state_dict(optimizer.state_dict(), [alone, table, weights])
            del given, parts, spread, pairs
        kept = [table, weights, alone, *optimizer.variables()]
        return [buffer.numpy() for each in kept for buffer in each.buffers]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seeds", SEEDS)
def test_every_order_gives_the_same(rule, placement, seeds):
    wanted = trained(RULES[rule], placement)
    for seed in seeds:
        found = trained(RULES[rule], placement, schedule_seed=seed, peer_access=seed % 2 == 0)
        assert all(map(same, found, wanted)), seed


def crossed(has_copies, is_sparse, **options) -> list[np.ndarray]:
    """A variable on both devices of a GPU, or a gradient on the device without a copy of it."""
    with gr.open_mesh([0, 0], backend="sim", strict=True, **options) as mesh:
        home, beside = mesh.devices
        variable = gr.Variable(
            np.zeros((6, 3), "float32"), "v", device=mesh if has_copies else home
        )
        optimizer = gr.MomentumOptimizer(0.5, 0.5)
        for turn in range(4):
            variable.assign_add(exact_data((6, 3), "float32", seed=turn))  # each copy in its queue
            owner = home if has_copies else beside
            given = owner.empty((6, 3), "float32")
            for seed in range(40):  # a reader that does not wait reads an earlier one
                owner.upload(exact_data((6, 3), "float32", seed=seed), out=given)
            if is_sparse:
                given = gr.IndexedSlices(given, [1, 4, 1, 0, 5, 4])
            optimizer.apply_gradients([(given, variable)])
            del given
        kept = [variable, *optimizer.variables()]
        return [buffer.numpy() for each in reversed(kept) for buffer in reversed(each.buffers)]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("has_copies", [False, True], ids=["gradient beside", "copies"])
@pytest.mark.parametrize("seeds", SEEDS)
def test_devices_of_one_gpu_are_ordered_with_each_other(has_copies, is_sparse, seeds):
    wanted = crossed(has_copies, is_sparse)
    for seed in seeds:
        found = crossed(has_copies, is_sparse, schedule_seed=seed)
        assert all(map(same, found, wanted)), seed


def clipped(**options) -> list[np.ndarray]:
    """Arrays that a queued launch of each device will write, overwritten after the call."""
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, **options) as mesh:
        given = []
        for place, device in enumerate(mesh):
            terms = [device.upload(exact_data((40,), "float32", seed=place)) for _ in range(2)]
            given.append(gr.add_n(terms, output_type="buffer"))
        found, norm = gr.clip_by_global_norm(given, 1.0)
        for buffer in given:
            buffer.device.upload(np.full(40, 9, "float32"), out=buffer)
        return [each.numpy() for each in (*found, norm)]


def test_a_clip_is_ordered_after_writers_and_before_overwriters():
    wanted = clipped()
    for seed in range(40):
        assert all(map(same, clipped(schedule_seed=seed), wanted)), seed
