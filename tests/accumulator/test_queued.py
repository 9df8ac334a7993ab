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
from gradreduce.reduce.algorithms import ALGORITHMS

PLACEMENTS = ([0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 0])
CASES = list(itertools.product(PLACEMENTS, (True, False)))
SIZE = 37
SEEDS = seeds(60, 200)


class Scenario:
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

    def overwrite(self, *buffers):
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
    scenario = Scenario(placement, peers, seed)
    first, second, last = scenario.devices[0], scenario.devices[1], scenario.devices[-1]
    with scenario.mesh:
        accumulators = [
            gr.ConditionalAccumulator("float32", device=second),
            gr.ConditionalAccumulator("float16", device=first),
            gr.ConditionalAccumulator("float32", device=last, reduction_type="SUM"),
            gr.ConditionalAccumulator("float32", device=first),
        ]
        dtypes = [acc.dtype for acc in accumulators]
        for step in range(2):
            for producer in (first, last):
                grads = [scenario.produced(producer, dtype) for dtype in dtypes]
                gr.apply_grads(accumulators, grads, step)
                scenario.overwrite(*grads)
            everywhere = [scenario.produced(device) for device in scenario.devices]
            accumulators[0].apply_grad(gr.PerReplica(everywhere), step)
            accumulators[3].apply_grad(gr.PerReplica(everywhere), step)
            accumulators[2].apply_grad(everywhere[0], step)
            scenario.overwrite(*everywhere)
            # On its own queue alone; the joint take has one launch for these two.
            for place, device in ((0, second), (3, first)):
                accumulators[place].apply_grad(scenario.produced(device), step)
            if step == 0:
                taken = gr.take_grads(accumulators, 1)
            else:
                taken = [acc.take_grad(1) for acc in accumulators]
            scenario.consume(taken[3], first)
            scenario.consume(taken[0], last)
            scenario.consume(taken[2], first)
            scenario.held.append(taken[1])
            scenario.overwrite(taken[0])  # the caller owns it
            del taken, grads, everywhere
        return scenario.read()


def over_a_mesh(placement, peers, seed, algorithm="hierarchical_copy", num_packs=1):
    """Accumulators of one mesh, with gradients from all, some or one of its devices."""
    scenario = Scenario(placement, peers, seed)
    with scenario.mesh as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
        accumulators = [
            gr.ConditionalAccumulator(dtype, device=mesh, cross_device_ops=ops)
            for dtype in ("float32", "float16")
        ]
        for step in range(2):
            grads = [
                gr.PerReplica([scenario.produced(device, acc.dtype) for device in mesh])
                for acc in accumulators
            ]
            gr.apply_grads(accumulators, grads, step)
            for grad in grads:
                scenario.overwrite(*grad.buffers)
            lone = scenario.produced(scenario.devices[step])
            accumulators[0].apply_grad(lone, step)
            scenario.overwrite(lone)
            for result in gr.take_grads(accumulators, 1):
                scenario.consume(result.buffers[-1], scenario.devices[0])
                scenario.held += result.buffers[:-1]
        accumulators[0].apply_grad(scenario.produced(scenario.devices[-1]), 2)
        result, nothing = take_now(accumulators, 1)
        assert nothing is None
        scenario.held += result.buffers
        del grads, grad, lone, result
        return scenario.read()


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
