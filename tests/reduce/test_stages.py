"""Stages: a pack is packed on the compute queues while the one before it is transferred."""

from functools import partial

import numpy as np
import pytest
from support.meshes import launches_of

import gradreduce as gr
from gradreduce.backends.sim import device as sim
from gradreduce.reduce import pipeline
from gradreduce.reduce.algorithm import Algorithm
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.packing import STAGE_BYTES, plan_stages


@pytest.fixture(autouse=True)
def small_stages(monkeypatch):
    monkeypatch.setattr(pipeline, "STAGE_BYTES", 400)


@pytest.mark.parametrize(
    ("packs", "expected"),
    [
        ([], [[]]),
        ([(10, True)], [[0]]),
        ([(10, True), (10, True)], [[0], [1]]),
        ([(9, True), (9, True), (9, True)], [[0, 1], [2]]),
        ([(5, False), (5, False), (50, False)], [[0, 1, 2]]),  # nothing to gather: no stages
        ([(10, True), (50, False), (10, True), (4, True)], [[0, 1], [2], [3]]),
        ([(10, True), (9, True), (4, True)], [[0], [1, 2]]),
    ],
)
def test_moved_packs_share_a_stage_until_it_is_full(packs, expected):
    assert plan_stages(packs, 10) == expected


def test_a_stage_is_full_with_eight_mebibytes():
    moved = [(4 << 20, True)] * 3
    assert plan_stages(moved, STAGE_BYTES) == [[0, 1], [2]]
    assert plan_stages([((4 << 20) - 1, True), *moved[1:]], STAGE_BYTES) == [[0, 1, 2]]


def test_a_stage_is_packed_before_the_previous_one_continues(monkeypatch):
    """The compute queue waits for that transfer, which would delay the packing."""
    done = []

    class Steps(Algorithm):
        def compile(self, wire, total):
            pass

        def allocate(self, jobs):
            return range(len(jobs))

        def all_reduce(self, jobs, queue):
            for step in ("send", "add", "end"):
                done.append((step, *jobs, queue))
                yield

    def recorded(what, packs, **_):
        done.append((what, *[start for _, start, _ in packs]))
        return []

    monkeypatch.setitem(ALGORITHMS, "steps", Steps)
    monkeypatch.setattr(pipeline, "moves_in", partial(recorded, "pack"))
    monkeypatch.setattr(pipeline, "moves_out", partial(recorded, "unpack"))
    with gr.open_mesh(2, backend="sim") as mesh:
        grads = [[np.ones(150, np.float32)] * 2] * 2  # two tensors, because one alone is not packed
        gr.AllReduceCrossDeviceOps("steps", 3, mesh=mesh).all_reduce(grads)
        assert done == [
            ("pack", 0), ("send", 0, "transfer"),
            ("pack", 100), ("send", 1, "transfer"), ("add", 0, "transfer"),
            ("pack", 200), ("send", 2, "transfer"), ("add", 1, "transfer"), ("end", 0, "transfer"),
            ("add", 2, "transfer"), ("end", 1, "transfer"), ("unpack", 0),
            ("end", 2, "transfer"), ("unpack", 100),
            ("unpack", 200),
        ]  # fmt: skip
        done.clear()
        gr.AllReduceCrossDeviceOps("steps", 1, mesh=mesh).all_reduce(grads)
    assert done[:2] == [("pack", 0), ("send", 0, "compute")]  # nothing to overlap with


@pytest.mark.parametrize(
    ("algorithm", "peers", "num_packed"),
    [
        ("nccl", True, [2, 2, 2]),  # then the results of the first need its transfer
        ("hierarchical_copy", False, [3, 2, 4]),  # each device adds another pack
        ("hierarchical_copy", True, [4, 4, 4]),  # the transfer queues add
    ],
)
def test_one_pack_is_packed_while_another_is_transferred(algorithm, peers, num_packed, monkeypatch):
    """The compute queues run alone, until they need a transfer."""
    placement = [0, 1, 2]
    with gr.open_mesh(placement, backend="sim", peer_access=peers, schedule_seed=0) as mesh:
        ops = gr.AllReduceCrossDeviceOps(algorithm, 4, mesh=mesh)
        rows = [[device.upload(np.ones(200, np.float32)) for _ in "ab"] for device in mesh]
        mesh.synchronize()
        ran = []
        run = sim.without_warnings

        def watched(reference, *arguments):
            ran.append(reference.__name__)
            run(reference, *arguments)

        monkeypatch.setattr(sim, "without_warnings", watched)
        with mesh.journal() as journal:
            (result, _), *_ = ops.all_reduce(rows)
        assert len(launches_of(journal, "pack")) == 4 * len(placement)
        assert _run_compute_queues(mesh, ran) == num_packed
        assert (result.numpy() == 1).all()
        assert ran.count("_pack_reference") == 4 * len(placement)
    travelling = [record for record in journal.records if record.queue == "transfer"]
    assert travelling
    assert "pack" not in {record.name for record in travelling}


def _run_compute_queues(mesh, ran):
    """Runs all work of the compute queues that needs no transfer; returns each one's packs."""
    scheduler = mesh.devices[0].scheduler
    num_packed = []
    for device in mesh:
        line, before = scheduler._queues[device.physical, "compute"], len(ran)
        while scheduler._can_run(line):
            kind, item = line.popleft()
            if kind == "work":
                item()
            elif kind == "record":
                item.done = True
        num_packed.append(ran[before:].count("_pack_reference"))
    return num_packed


def test_packs_that_are_not_moved_or_stay_on_one_gpu_have_one_stage():
    for placement, num_packs in (([0, 1], 0), ([0, 0], 4)):
        with gr.open_mesh(placement, backend="sim") as mesh:
            ops = gr.HierarchicalCopyAllReduce(num_packs, mesh=mesh)
            rows = [[device.upload(np.ones(40_000, np.float32))] for device in mesh]
            with mesh.journal() as journal:
                ops.all_reduce(rows)
            assert {record.queue for record in journal.records} == {"compute"}
            assert len(launches_of(journal, "all_sum")) == len(mesh.by_physical)
