"""Optimizers average over all replicas of all processes, which are threads in these tests."""

import numpy as np
import pytest
from support.thread_group import run_replicas

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("counts", [(2, 2), (1, 2)], ids=str)
def test_each_kind_of_gradient_is_averaged(counts, algorithm):
    """Twice, because plans are used again."""
    by_row = np.zeros((2, 2, 1))  # sums of rows: of one for each process, of one for each replica
    for rank, count in enumerate(counts):
        first = sum(counts[:rank])
        by_row[:, rank] += [[(1.0 + rank) * count], [sum(range(first, first + count))]]
    total = sum((1.0 + rank) * count for rank, count in enumerate(counts))

    def work(mesh, numbers):
        rank, ones = mesh.process_index, np.ones((2, 1), np.float32)
        w = gr.Variable(np.zeros((2, 1)), "w", dtype="float32", device=mesh)
        optimizer = gr.GradientDescentOptimizer(float(sum(counts)))
        optimizer.cross_device_ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
        full, *replicas = [ones * number for number in (1.0 + rank, *numbers)]
        rows = [gr.IndexedSlices(each[:1], [rank], (2, 1)) for each in (full, *replicas)]
        for gradient, step in (
            (full, total),
            (rows[0], by_row[0]),
            (gr.PerReplica(replicas, mesh), sum(range(sum(counts)))),
            (gr.PerReplica(rows[1:], mesh), by_row[1]),
            (gr.Mirrored([ones] * len(mesh), mesh), sum(counts)),
        ):
            w.assign(np.zeros((2, 1), np.float32))
            for turn in (1, 2):
                optimizer.apply_gradients([(gradient, w)])
                assert all((each.numpy() == -turn * np.asarray(step)).all() for each in w.buffers)
        x = gr.Variable(np.zeros(3), "x", dtype="float32", device=mesh)
        adam, random = gr.AdamOptimizer(0.1), np.random.default_rng(rank)
        adam.cross_device_ops = optimizer.cross_device_ops
        for _ in range(3):
            adam.apply_gradients([(random.normal(size=3).astype(np.float32), x)])
        gr.assert_mirrored([w, x, adam.get_slot(x, "v")])
        if len(mesh) > 1:
            part = gr.Variable(np.zeros(1), "part", dtype="float32", device=mesh[0])
            text = "cannot be averaged over the processes: the variable is on 1 of the 2 "
            with pytest.raises(ValueError, match=text):
                adam.apply_gradients([(np.ones(1, np.float32), part)])

    run_replicas(counts, work)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("names", "pass different tensors: tensor 0 is w{0} float32.2. in process {0}"),
        ("number", "the processes pass different tensors: "),
        ("kind", "the processes make different calls: "),
    ],
    ids=["names", "number", "kind"],
)
def test_gradients_of_different_variables_raise_in_all_processes(wrong, text):
    def work(mesh, replicas):
        w = [gr.Variable(np.zeros(2), f"w{i}", dtype="float32", device=mesh) for i in range(2)]
        ones = np.ones(2, np.float32)
        grads = [ones, None]
        if mesh.process_index == 1:
            rows = gr.IndexedSlices(ones, [0, 1], (2,))
            grads = {"names": [None, ones], "number": [ones, ones], "kind": [rows, None]}[wrong]
        with pytest.raises((ValueError, gr.CollectiveError), match=text.format(mesh.process_index)):
            gr.GradientDescentOptimizer(1.0).apply_gradients(list(zip(grads, w, strict=True)))

    run_replicas((1, 1), work)
