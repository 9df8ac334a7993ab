"""What takes return, of both kinds, on a device and over a mesh, bit by bit."""

import pytest
from accumulator.kinds import MEANS, Dense, Sparse, bits, counters, expected, options_of
from support.exact_data import FLOATS, exact_data

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_take_includes_all_that_arrived_in_order(device, kind, dtype, mean):
    acc = kind.make(dtype, device=device, **options_of(kind, mean))
    for turn, shape in enumerate([(1003,), (), (2, 3), (16,), (1,)]):
        grads = [kind.random(seed, dtype, shape) for seed in range(turn, turn + 4)]
        for place, grad in enumerate(grads, 1):
            assert gr.apply_grads([acc], [grad], turn) is True
            assert counters(acc) == [(place, turn, 0)]
        (taken,) = gr.take_grads([acc], 1)
        assert bits(taken) == expected([grads], dtype, mean)
        assert counters(acc) == [(0, turn + 1, 0)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("num_packs", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_replica_counts_once(mesh, kind, dtype, mean, num_packs, algorithm):
    """Sums of rows are added in the order of the mesh, others by the algorithm."""
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    acc = kind.make(dtype, device=mesh, cross_device_ops=ops, **options_of(kind, mean))
    size, in_halves = len(mesh), kind is Dense and algorithm == "hierarchical_copy"

    def given(seed):
        if kind is Sparse or in_halves:
            return kind.random(seed, dtype)
        return exact_data((19,), dtype, seed=seed)  # in any order

    for step, num_applies in enumerate((1, 3)):
        by_device = [
            [given(turn * size + place) for turn in range(num_applies)] for place in range(size)
        ]
        for turn in range(num_applies):
            grad = gr.PerReplica([each[turn] for each in by_device], mesh)
            assert gr.apply_grads([acc], [grad], step)
            assert counters(acc) == [((turn + 1) * size, step, 0)]
        (taken,) = gr.take_grads([acc], 1)
        assert counters(acc) == [(0, step + 1, 0)]
        assert type(taken) is gr.Mirrored
        assert taken.devices == mesh.devices
        wanted = expected(by_device, dtype, mean, in_halves=in_halves)
        assert bits(taken) == [wanted] * size
        buffers = [part.values if kind is Sparse else part for part in taken.parts]
        assert [buffer.device for buffer in buffers] == list(mesh.devices)
        if buffers[0].size:
            assert len({buffer.address for buffer in buffers}) == size
