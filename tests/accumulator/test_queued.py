"""Accumulators in random schedules: producers, sums and consumers in every allowed order.

Seed 0 runs work as late as the host allows, seed 1 as early, other seeds mix. Freed memory becomes
NaN.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.exhaustive import seeds

import gradreduce as gr
from gradreduce.accumulator import take_now

PLACEMENTS = ([0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 0])
CASES = list(itertools.product(PLACEMENTS, (True, False)))
ALGORITHMS = ("hierarchical_copy", "nccl")
SIZE = 37
SEEDS = seeds(50, 200)


class Scene:
    """A mesh with queues in the order of a seed, a generator of data, and the values read."""

    def __init__(self, placement, peers, seed):
        self.rng = np.random.default_rng(11)
        self.mesh = gr.open_mesh(
            placement, backend="sim", strict=True, peer_access=peers, schedule_seed=seed
        )
        self.devices = self.mesh.devices
        self.held = []

    def data(self, dtype="float32"):
        return self.rng.standard_normal(SIZE).astype(dtype)

    def produced(self, device, dtype="float32"):
        """An array that a queued launch of the device will write."""
        terms = [device.upload(self.data(dtype)) for _ in range(2)]
        return gr.add_n(terms)

    def spoil(self, *buffers):
        """Overwrites them on their device; readers of the old values need a wait."""
        for buffer in buffers:
            buffer.device.upload(self.data(buffer.dtype), out=buffer)

    def consume(self, buffer, consumer):
        """Reads a result on another device and frees it; what was computed is read late."""
        other = consumer.upload(self.data(buffer.dtype))
        self.held.append(gr.add_n([other, buffer]))

    def read(self):
        """Returns all results, reading the device of the last one first."""
        return [buffer.numpy().tobytes() for buffer in reversed(self.held)]


def on_devices(placement, peers, seed):
    """Accumulators of several devices, alone and together, with gradients from all devices."""
    scene = Scene(placement, peers, seed)
    first, second, last = scene.devices[0], scene.devices[1], scene.devices[-1]
    with scene.mesh:
        accumulators = [
            gr.ConditionalAccumulator("float32", device=second),
            gr.ConditionalAccumulator("float16", device=first),
            gr.ConditionalAccumulator("float32", device=last, reduction_type="SUM"),
            gr.ConditionalAccumulator("float32", device=first),
        ]
        dtypes = [acc.dtype for acc in accumulators]
        for step in range(2):
            for producer in (first, last):
                grads = [scene.produced(producer, dtype) for dtype in dtypes]
                gr.apply_grads(accumulators, grads, step)
                scene.spoil(*grads)
            everywhere = [scene.produced(device) for device in scene.devices]
            accumulators[0].apply_grad(gr.PerReplica(everywhere), step)
            accumulators[3].apply_grad(gr.PerReplica(everywhere), step)
            accumulators[2].apply_grad(everywhere[0], step)
            scene.spoil(*everywhere)
            # On its own queue alone; the joint take has one leader for these two.
            for place, device in ((0, second), (3, first)):
                accumulators[place].apply_grad(scene.produced(device), step)
            if step == 0:
                taken = gr.take_grads(accumulators, 1)
            else:
                taken = [acc.take_grad(1) for acc in accumulators]
            scene.consume(taken[3], first)
            scene.consume(taken[0], last)
            scene.consume(taken[2], first)
            scene.held.append(taken[1])
            scene.spoil(taken[0])  # the caller owns it
            del taken, grads, everywhere
        return scene.read()


def over_a_mesh(placement, peers, seed, algorithm="hierarchical_copy", num_packs=1):
    """Accumulators of one mesh, with gradients from all, some or one of its devices."""
    scene = Scene(placement, peers, seed)
    with scene.mesh as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
        accumulators = [
            gr.ConditionalAccumulator(dtype, device=mesh, cross_device_ops=ops)
            for dtype in ("float32", "float16")
        ]
        for step in range(2):
            grads = [
                gr.PerReplica([scene.produced(device, acc.dtype) for device in mesh])
                for acc in accumulators
            ]
            gr.apply_grads(accumulators, grads, step)
            for grad in grads:
                scene.spoil(*grad.buffers)
            lone = scene.produced(scene.devices[step])
            accumulators[0].apply_grad(lone, step)
            scene.spoil(lone)
            for result in gr.take_grads(accumulators, 1):
                scene.consume(result.buffers[-1], scene.devices[0])
                scene.held += result.buffers[:-1]
        accumulators[0].apply_grad(scene.produced(scene.devices[-1]), 2)
        result, nothing = take_now(accumulators, 1)
        assert nothing is None
        scene.held += result.buffers
        del grads, grad, lone, result
        return scene.read()


@pytest.mark.parametrize("seeds", SEEDS)
def test_on_devices_the_bits_are_the_same_in_every_legal_order(seeds):
    expected = [on_devices(*case, None) for case in CASES]
    for seed in seeds:
        place = seed % len(CASES)
        assert on_devices(*CASES[place], seed) == expected[place], (seed, CASES[place])


MESH_CASES = [
    (tuple(placement), peers, *options)
    for options in itertools.product(ALGORITHMS, (1, 2))
    for placement, peers in CASES
]


@pytest.mark.parametrize("seeds", SEEDS)
def test_over_a_mesh_the_bits_are_the_same_in_every_legal_order(seeds):
    """Also for a single gradient and zeros; with peer access and without."""
    expected = {}
    for seed in seeds:
        case = placement, peers, *options = MESH_CASES[seed % len(MESH_CASES)]
        if case not in expected:
            expected[case] = over_a_mesh(placement, peers, None, *options)
        assert over_a_mesh(placement, peers, seed, *options) == expected[case], seed
