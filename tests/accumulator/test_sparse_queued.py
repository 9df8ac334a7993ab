"""Sparse accumulators in random schedules: no allowed order changes a bit.

Seed 0 runs work as late as the host allows, seed 1 as early, other seeds mix. Producers, sums and
consumers are on several devices, and inputs of a call are overwritten when it has returned.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.exhaustive import seeds
from support.reduction_calls import data

import gradreduce as gr

PLACES = list(itertools.product(([0, 0, 1], [0, 1, 1, 2, 0], [0, 1]), (True, False)))
# First some rows exist; then they are copied into more memory; then all exist.
TURNS = ([4, 1, 4], [1, 7, 9, 2, 8], [9, 2, 4])


def produced(mesh, turn, dtype="float32"):
    """Rows on each device, made by a launch there; different rows have equal indices."""
    made = []
    for place, device in enumerate(mesh):
        rows = device.upload(data((len(TURNS[turn]), 33), dtype, 10 * turn + place))
        values = gr.add_n([rows, rows], output_type="buffer")
        made.append(gr.IndexedSlices(values, [(index + place) % 11 for index in TURNS[turn]]))
    return made


def overwrite(slices):
    for each in slices:
        values = each.values
        values.device.upload(np.full(values.shape, 9, values.dtype), out=values)


def consumed(taken):
    """Reads the result on each device, the last first, by a launch and by the host."""
    parts = taken.parts if isinstance(taken, gr.Mirrored) else [taken]
    made = [gr.add_n([part.values, part.values], output_type="buffer") for part in parts[::-1]]
    found = [each.numpy().tobytes() for each in made]
    return found + [part.values.numpy().tobytes() for part in parts]


def over_the_mesh(mesh):
    """A gradient of each replica; sums that grow; two takes, the second in reused memory."""
    acc = gr.SparseConditionalAccumulator("float32", device=mesh)
    for period in range(2):
        for turn in range(3):
            given = produced(mesh, turn)
            acc.apply_indexed_slices_grad(gr.PerReplica(given, mesh), period)
            overwrite(given)
        yield from consumed(acc.take_indexed_slices_grad(3))


def on_one_device(mesh):
    """Gradients from every device, one after the other."""
    acc = gr.SparseConditionalAccumulator("float16", device=mesh.devices[1])
    for turn in range(3):
        given = produced(mesh, turn, "float16")
        for each in given[::-1]:
            acc.apply_indexed_slices_grad(each)
        overwrite(given)
    yield from consumed(acc.take_indexed_slices_grad(1))


def side_by_side(mesh):
    """One launch by the first device of a GPU; each takes on its own queue."""
    accs = [gr.SparseConditionalAccumulator("float32", device=device) for device in mesh]
    dense = gr.ConditionalAccumulator("float32", device=mesh.devices[-1])
    for turn in range(3):
        given = produced(mesh, turn)
        whole = mesh.devices[0].upload(data((40,), "float32", turn))
        gr.apply_grads([*accs, dense], [*given, whole])
        overwrite(given)
        whole.device.upload(np.full(40, 9, "float32"), out=whole)
    for acc in accs[::-1]:
        yield from consumed(acc.take_indexed_slices_grad(3))
    yield dense.take_grad(3, output_type="numpy").tobytes()


SCENARIOS = (over_the_mesh, on_one_device, side_by_side)
CASES = [(scenario, *where) for where in PLACES for scenario in SCENARIOS]


def bits(case, seed):
    scenario, placement, peers = case
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peers, schedule_seed=seed
    ) as mesh:
        return list(scenario(mesh))


@pytest.fixture(scope="module")
def expected():
    return [bits(case, None) for case in CASES]


@pytest.mark.parametrize("seeds", seeds(3 * len(CASES), 12 * len(CASES)))
def test_sparse_sums_have_the_same_bits_in_every_legal_order(expected, seeds):
    for seed in seeds:
        place = seed % len(CASES)
        assert bits(CASES[place], seed) == expected[place], (seed, CASES[place])
