"""Prepared steps on the CUDA backend: the simulation's bits, and no CUDA calls but work."""

from __future__ import annotations

import sys

import pytest
from fake_cupy import surface
from support.exact_data import random_data, same
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [((40, 7), "float32"), ((9,), "int16"), ((20_000,), "float32"), ((33,), "bfloat16")]
MANY = [((5,), "float32")] * 90  # too many for an inline table

PLACEMENTS = [
    pytest.param([0], marks=pytest.mark.gpu, id="0"),
    pytest.param([0, 0, 0], marks=pytest.mark.gpu, id="000"),
    pytest.param([0, 0, 1, 1], marks=pytest.mark.multi_gpu(2), id="0011"),
    pytest.param([0, 1, 1, 2, 0], marks=pytest.mark.multi_gpu(3), id="01120"),
]


def replayed(mesh, algorithm, shapes):
    """The results of three calls with other numbers each, also without a wait between them."""
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
    values = [dense(mesh, shape, dtype, place) for place, (shape, dtype) in enumerate(shapes)]
    targets = [*values[:-1], [mesh.devices[-1]]]
    step = ops.prepare(MEAN, list(zip(values, targets, strict=True)))
    arrays = []
    for turn in range(3):
        for place, value in enumerate(values):
            for buffer in value.buffers:
                numbers = random_data(buffer.shape, buffer.dtype, seed=turn * 50 + place)
                buffer.device.upload(numbers, out=buffer)
        step()
        step()
        arrays += [buffer.numpy() for result in step.results for buffer in result.buffers]
    with mesh.journal() as journal:
        step()
    assert (journal.uploads, journal.syncs) == (0, 0)
    return arrays


def check(placement, algorithm, shapes=SHAPES):
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        found, wanted = replayed(mesh, algorithm, shapes), replayed(sim, algorithm, shapes)
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["few", "many"])
def test_steps_are_those_of_the_simulation(placement, shapes, gpus):
    gpus(len(placement))
    check(placement, "hierarchical_copy", shapes)


@pytest.mark.fake_cupy  # real NCCL promises no order of additions
@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1, 2, 0]], ids=str)
def test_over_nccl_too(placement, gpus):
    gpus(len(placement))
    check(placement, "nccl")


@pytest.mark.fake_cupy
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(4))
def test_without_peer_access_too(algorithm, seed, gpus):
    gpus(seed, peers=False)
    check([0, 1, 1, 2, 0], algorithm)


@pytest.mark.fake_cupy
@pytest.mark.parametrize("way", ["prepare", "capture"])
def test_a_call_makes_its_gpu_the_current_one_once(gpus, monkeypatch, way):
    gpus(0)
    cupy = sys.modules["cupy"]
    switched, switch = [], cupy.cuda.runtime.setDevice

    def counted(number):
        switched.extend([number] * (number != surface.getDevice()))
        switch(number)

    cupy.cuda.Device(0).use()  # to which a call returns
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", counted)
    with gr.open_mesh([1, 1, 1], backend="cuda") as mesh:
        values = [dense(mesh, (7,), dtype, 0) for dtype in ("float32", "int16")]
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
        step = getattr(ops, way)(SUM, [(value, value) for value in values])
        step()
        with mesh.journal() as journal:
            switched.clear()
            step()
        assert switched == [1, 0]
        assert journal.launches > 1
