"""Queued work on simulated devices: no valid order changes a bit.

Seed 0 runs work as late as possible, seed 1 as early as possible, others in random orders.
"""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
from support.all_reduce_jobs import pack, reduce_jobs
from support.exhaustive import seeds

import gradreduce as gr
from gradreduce.backends.sim.scheduler import RandomScheduler
from gradreduce.reduce.algorithm import Job
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.packing import plan_packing

# By full name: functions of the same name hide some of them.
pack_buffers, aggregation, sparse, optimizer, arrivals, hierarchical, nccl_all_reduce = (
    importlib.import_module(f"gradreduce.{name}")
    for name in (
        "reduce.pack_buffers", "sums.aggregators", "sums.aggregation", "optim.update_plan",
        "accumulator.dense_storage", "reduce.hierarchical_copy", "reduce.nccl_all_reduce",
    )
)  # fmt: skip

PLACEMENTS = ([0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 0])
SHAPES = [(33, 7), (5,), (), (40, 45)]
METHODS = tuple(gr.AggregationMethod)


def data(rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def train(placement, algorithm, seed, *, peer_access=True, num_packs=1, method=METHODS[0]):
    """Runs two training steps; returns the bytes of every copy of every variable."""
    rng = np.random.default_rng(5)
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peer_access, schedule_seed=seed
    ) as mesh:
        variables = [gr.Variable(data(rng, shape), device=mesh) for shape in SHAPES]
        ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs, mesh=mesh)
        step = gr.SyncStep(
            variables, gr.MomentumOptimizer(0.1, 0.9), ops, aggregation_method=method
        )
        for _ in range(2):
            terms = [[[data(rng, shape) for _ in range(3)] for shape in SHAPES] for _ in placement]
            assert step(terms)
        copies = []
        for replica in range(len(placement)):
            with gr.replica(replica):
                copies += [variable.numpy().tobytes() for variable in variables]
        return copies


def reduce_and_free(placement, algorithm, seed, peer_access=True, **options):
    """An all-reduce whose inputs are freed while it is queued; new tensors reuse their memory."""
    rng = np.random.default_rng(6)
    results = []
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peer_access, schedule_seed=seed
    ) as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh, **options)
        kept = []
        for _ in range(3):
            values = [
                gr.PerReplica([device.upload(data(rng, shape)) for device in mesh], mesh)
                for shape in SHAPES
            ]
            kept.append(ops.batch_reduce(gr.ReduceOp.MEAN, [(value, value) for value in values]))
            del values
        for reduced in kept:
            results += [buffer.numpy().tobytes() for value in reduced for buffer in value.buffers]
    return results


CASES = list(itertools.product(PLACEMENTS, (True, False), (0, 1, 3)))


@pytest.mark.parametrize("turns", seeds(9, len(CASES) * len(METHODS)))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_training_has_the_same_bits_in_every_legal_order(algorithm, turns):
    for turn in turns:
        placement, peers, num_packs = CASES[7 * turn % len(CASES)]  # all values soon
        method = METHODS[(turn + turn // 3 + turn // len(CASES)) % len(METHODS)]
        options = {"peer_access": peers, "num_packs": num_packs, "method": method}
        expected = train(placement, algorithm, None, **options)
        for seed in (2 * turn, 2 * turn + 1):
            assert train(placement, algorithm, seed, **options) == expected, (seed, options)


@pytest.mark.parametrize("seeds", seeds(3, 10))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_buffers_freed_early_are_not_reused_early(algorithm, seeds):
    for placement, peers in itertools.product(PLACEMENTS, (True, False)):
        expected = reduce_and_free(placement, algorithm, None, peers)
        for seed in seeds:
            assert reduce_and_free(placement, algorithm, seed, peers) == expected, seed


REDUCTION_GROUPS = {2: ((1, 0), ()), 4: ((2, 0), (1, 3)), 5: ((3, 0), (4, 2, 1))}


@pytest.mark.parametrize("seeds", seeds(3, 10))
def test_other_reduction_groups_have_the_same_bits_in_every_legal_order(seeds):
    for placement, peers in itertools.product(PLACEMENTS, (True, False)):
        groups = REDUCTION_GROUPS[len(placement)]
        expected = reduce_and_free(
            placement, "hierarchical_copy", None, peers, reduction_groups=groups
        )
        for seed in seeds:
            found = reduce_and_free(
                placement, "hierarchical_copy", seed, peers, reduction_groups=groups
            )
            assert found == expected, seed


def gathered(placement, seed):
    """16-bit integers by nccl: the gathered inputs are freed before the work has run."""
    rng = np.random.default_rng(10)
    results = []
    with gr.open_mesh(placement, backend="sim", strict=True, schedule_seed=seed) as mesh:
        for num_packs in (1, 0, 3):
            ops = gr.NcclAllReduce(num_packs, mesh=mesh)
            for shapes in (SHAPES, SHAPES[::-1]):
                grads = [
                    [device.upload(rng.integers(0, 2**16, shape, np.uint16)) for shape in shapes]
                    for device in mesh
                ]
                reduced = ops.all_reduce(grads, gr.ReduceOp.SUM)
                overwrite_integers([buffer for row in grads for buffer in row])
                results += [buffer for row in reduced for buffer in row]
        return [buffer.numpy().tobytes() for buffer in results]


def overwrite_integers(buffers):
    for buffer in buffers:
        buffer.device.upload(np.full(buffer.shape, 7, buffer.dtype), out=buffer)


@pytest.mark.parametrize("seeds", seeds(15, 60))
def test_integers_that_are_gathered_have_the_same_bits_in_every_legal_order(seeds):
    expected = {tuple(placement): gathered(placement, None) for placement in PLACEMENTS}
    for seed in seeds:
        placement = PLACEMENTS[seed % len(PLACEMENTS)]
        assert gathered(placement, seed) == expected[tuple(placement)], seed


def over_the_transfer_queue(seed):
    """Uploads and copies on the transfer queue, with launches on the compute queue."""
    rng = np.random.default_rng(7)
    with gr.open_mesh([0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        here, there = mesh.devices
        results = []
        for _ in range(4):
            source = here.upload(data(rng, (64,)), queue="transfer")
            here.queue_wait(here.queue_mark("transfer"))
            copies = there.empty((64,), np.float32)
            here.copy(copies, source, queue="transfer")
            source.device.upload(data(rng, (64,)), out=source)  # must wait for the copy
            there.queue_wait(here.queue_mark("transfer"))
            total = gr.add_n([copies, copies])
            results += [total.numpy().tobytes(), source.numpy().tobytes()]
        return results


def overwrite(buffers, rng):
    """Writes new values on each buffer's queue, which must wait for all readers of the old ones."""
    for buffer in buffers:
        buffer.device.upload(data(rng, buffer.shape), out=buffer)


class Scenario:
    """Three replicas on two devices, a generator of data, and all results."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(8)
        self.mesh = gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=seed)
        self.results = []

    def fresh(self, shape=(37,)):
        return [device.upload(data(self.rng, shape)) for device in self.mesh]

    def overwrite(self, *lists):
        overwrite([buffer for buffers in lists for buffer in buffers], self.rng)

    def keep(self, buffers):
        self.results.extend(buffer.numpy().tobytes() for buffer in buffers)


def packing_alone(scenario):
    gradients = [scenario.fresh(), scenario.fresh((5, 3))]
    plans = plan_packing((37, 15), ((gradients[0][0].dtype,) * 2,) * 2, 1, 0, 0)
    packed = pack(plans, gradients, scenario.mesh.devices, consume=False)
    scenario.overwrite(*gradients)
    scenario.keep(packed[0].inputs)


def all_reduce_alone(scenario):
    for algorithm in ALGORITHMS:
        inputs, outs = scenario.fresh(), scenario.fresh()
        reduce_jobs(algorithm, [Job(tuple(inputs), tuple(outs), 3.0)])
        scenario.overwrite(inputs)
        scenario.keep(outs)


def aggregate_alone(scenario):
    terms = [scenario.fresh()[:2], scenario.fresh()[:2], scenario.fresh()[:2]]
    by_replica = [[term[replica] for term in terms] for replica in range(2)]
    sums = aggregation.aggregate_buffers(by_replica, scenario.mesh.devices[0])
    scenario.overwrite(*terms)
    scenario.keep(sums)


def sparse_alone(scenario):
    """Rows of several devices, concatenated, merged, and made dense among arrays."""
    for dense in ([], scenario.fresh((4, 5))):
        rows = scenario.fresh((6, 5))
        terms = [gr.IndexedSlices(buffer, [3, 1, 3, 0, 1, 3], (4, 5)) for buffer in rows]
        made = gr.aggregate([*terms, *dense])
        scenario.overwrite(rows, dense)
        scenario.keep([made if dense else made.coalesce().values])


def optimizer_alone(scenario):
    variable = gr.Variable(data(scenario.rng, (37,)), device=scenario.mesh)
    value = data(scenario.rng, (37,))
    gradient = gr.Mirrored([device.upload(value) for device in scenario.mesh], scenario.mesh)
    gr.GradientDescentOptimizer(0.5).apply_gradients([(gradient, variable)])
    scenario.overwrite(gradient.buffers)
    scenario.keep(variable.buffers)


def accumulator_alone(scenario):
    accumulator = gr.ConditionalAccumulator("float32", device=scenario.mesh)
    for _ in range(2):
        gradient = gr.PerReplica(scenario.fresh(), scenario.mesh)
        accumulator.apply_grad(gradient)
        scenario.overwrite(gradient.buffers)
    scenario.keep(accumulator.take_grad(6).buffers)


def each_module_alone(seed):
    """After each call inputs may be overwritten and results may be read."""
    scenario = Scenario(seed)
    with scenario.mesh:
        packing_alone(scenario)
        all_reduce_alone(scenario)
        aggregate_alone(scenario)
        sparse_alone(scenario)
        optimizer_alone(scenario)
        accumulator_alone(scenario)
    return scenario.results


def copied_then_freed(seed):
    """Frees a block that another device's queue still reads, and allocates again at once."""
    rng = np.random.default_rng(9)
    with gr.open_mesh([0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        here, there = mesh.devices
        copies = []
        for _ in range(4):
            source = here.upload(data(rng, (64,)))
            copies.append(there.empty((64,), np.float32))
            there.copy(copies[-1], source)
            del source
        return [buffer.numpy().tobytes() for buffer in copies]


SCENARIOS = (over_the_transfer_queue, each_module_alone, copied_then_freed)


@pytest.mark.parametrize("seeds", seeds(20, 60))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_small_scenarios_have_the_same_bits_in_every_legal_order(scenario, seeds):
    expected = scenario(None)
    for seed in seeds:
        assert scenario(seed) == expected, seed


def test_a_wait_that_cannot_end_raises_instead_of_hanging():
    scheduler = RandomScheduler(3)
    other = RandomScheduler(0)
    scheduler.wait("a", other.record("b"))
    scheduler.submit("a", lambda: None)
    with pytest.raises(RuntimeError, match="deadlock: a waits"):
        scheduler.finish("a")
