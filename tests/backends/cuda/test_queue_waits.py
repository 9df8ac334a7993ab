"""Waits that are not passed to CUDA, because they would add no order; and those that are."""

from functools import partial

import cupy
import numpy as np
import pytest
from support.captures import captured
from support.reduction_calls import dense

import gradreduce as gr
from gradreduce import ops

SUM = gr.ReduceOp.SUM
pytestmark = pytest.mark.fake_cupy


@pytest.mark.parametrize("num_packs", [0, 1])
def test_a_step_on_one_gpu_makes_no_cuda_calls_but_launches(num_packs, gpus):
    """Plain calls also allocate."""
    machine = gpus(0)
    with gr.open_mesh([0] * 8, backend="cuda") as mesh:
        ops = gr.HierarchicalCopyAllReduce(num_packs, mesh=mesh)
        pairs = [(value, value) for value in (dense(mesh, (5,), "float32", k) for k in range(9))]

        def plain():
            ops.batch_reduce(SUM, pairs)

        def twice(step):
            step()
            return machine.counted(step)

        launches = {"launch": 1 + num_packs}
        plain()
        assert twice(plain) == {**launches, "malloc": 8}
        assert twice(ops.prepare(SUM, pairs)) == launches
        assert twice(ops.capture(SUM, pairs)) == {"graph_launch": 1}
        step = ops.prepare(SUM, pairs)
        step()
        for buffer in pairs[0][0].buffers:
            buffer.device.upload(np.zeros(5, np.float32), out=buffer)
        assert machine.counted(step) == launches  # all of them are in one stream


def test_results_in_gpu_memory_do_not_make_the_host_wait(gpus):
    """Several results per device, for which their library's stream waits once."""
    machine = gpus(1)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        rows = [[cupy.asarray(np.ones(3, np.float32)) for _ in range(3)] for _ in mesh]
        cross, reduced = gr.HierarchicalCopyAllReduce(mesh=mesh), []
        found = machine.counted(lambda: reduced.extend(cross.all_reduce(rows, op=SUM)))
        assert "synchronize" not in found
        assert all((array.get() == 2).all() for row in reduced for array in row)


SUBMITTING = {
    "launch": lambda device, near: ops.add_n([near["b"]], [[near["a"]]], device=device),
    "copy": lambda device, near: device.copy(near["b"], near["a"]),
    "fill": lambda device, near: device.zeros((3,), "float32"),
    "upload": lambda device, near: device.upload(np.ones(3, np.float32), out=near["a"]),
    "download": lambda device, near: near["a"].numpy(),
    "memory": lambda device, near: device.empty((1000,), "float32"),
    "wait": lambda device, near: device.queue_wait(near["other"].queue_mark("transfer")),
    "stream": lambda device, near: device.adopt(near["foreign"], 0),
    "collective": lambda device, near: device.mesh.collective.all_reduce([near["a"], near["far"]]),
    "graph": lambda device, near: near["graph"](),
}


@pytest.mark.parametrize("way", SUBMITTING)
def test_a_queue_is_marked_again_after_new_work(way, gpus):
    machine = gpus(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        device, other, away = mesh.devices
        near = {name: device.upload(np.ones(3, np.float32)) for name in "ab"}
        near |= {"other": other, "far": away.upload(np.ones(3, np.float32))}
        near["foreign"] = device.release(near["b"], 0)
        near["graph"] = captured([device], partial(SUBMITTING["launch"], device, near)).submit
        mark = device.queue_mark()
        assert machine.counted(lambda: [device.queue_mark() for _ in "abc"]) == {}
        assert device.queue_mark().event is mark.event
        SUBMITTING[way](device, near)
        assert device.queue_mark().event is not mark.event


def test_no_wait_is_queued_twice(gpus):
    """Two operations that need the same wait; the mark is made once, too."""
    machine = gpus(0)
    with gr.open_mesh([0, 1, 2], backend="cuda") as mesh:
        source, *readers = mesh.devices
        terms = [source.upload(np.ones(3, np.float32)) for _ in "ab"]
        outs = [[device.empty((3,), "float32") for _ in terms] for device in readers]

        def read():
            for device, row in zip(readers, outs, strict=True):
                for out, term in zip(row, terms, strict=True):
                    ops.add_n([out], [[term]], device=device)

        assert machine.counted(read) == {"launch": 4, "record": 1, "wait": 2}
        assert machine.counted(read) == {"launch": 4}
        source.fill_zero(terms[0])
        assert machine.counted(read)["wait"] == 2


def test_a_freed_block_that_another_device_of_the_gpu_used_is_free_at_once(gpus):
    gpus(0)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        first, other = mesh.devices
        term = first.upload(np.ones(400, np.float32))
        found = set()
        for _ in range(3):
            made = other.empty((7,), "float32")
            found.add(made.address)
            ops.add_n([made], [[term.view(0, (7,))]], device=first)
            del made
        assert len(found) == 1
        assert not other._deferred_free._deferred
