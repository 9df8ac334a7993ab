"""Ctrl-C, another thread or a signal handler at any point of a call: no wait is left out later."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial

import cupy
import numpy as np
import pytest
from support.captures import captured
from support.reduction_calls import dense
from support.signal_injection import Strike, num_points_of, pressed

import gradreduce as gr
from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffer
from gradreduce.errors import CaptureError

SUM = gr.ReduceOp.SUM
ONES = np.ones(40, np.float32)
pytestmark = pytest.mark.fake_cupy


def interrupted_at(place, call):
    """Presses Ctrl-C at one point of a call of ours; calls of CUDA cannot be interrupted."""

    def press():
        if "fake_cupy" not in sys._getframe(2).f_code.co_filename:
            pressed()

    with suppress(KeyboardInterrupt), Strike(place, press):
        call()


def receive(sends, receives, gpu, stream):
    """Receives as NCCL does, on a stream."""
    for _, buffer in receives:
        cupy.cuda.runtime.memsetAsync(buffer.address, 0, buffer.nbytes, stream)


class Giving:
    """Work that writes ``near``, on a queue of a device."""

    def __init__(self, device, away):
        self.device, self.away = device, away
        self.near, self.term = (device.upload(ONES) for _ in "ab")
        self.far = away.upload(ONES)
        self.graph = captured([device], self.launch).submit

    def launch(self):
        ops.add_n([self.near], [[self.term]], device=self.device)

    def fill(self):
        self.device.fill_zero(self.near)

    def copy(self):
        self.device.copy(self.near, self.term, queue="transfer")

    def upload(self):
        self.device.upload(ONES, out=self.near, queue="transfer")

    def exchange(self):
        self.device._exchange_on_gpu([], [(0, self.near)], "transfer", receive)

    def check(self, queue):
        """Writes what the work wrote, on the other GPU; the queue waits, and was marked."""
        self.away.wait(self.device.mark(queue))
        ops.add_n([self.near], [[self.far]], device=self.away)
        self.device.wait(self.away.mark(), queue=queue)
        self.away.wait(self.device.mark(queue))


ON_TRANSFER = ("copy", "upload", "exchange")


@pytest.mark.whole_product
@pytest.mark.parametrize("by", ["ctrl-c", "thread"])
@pytest.mark.parametrize("way", ["launch", "fill", "graph", *ON_TRANSFER])
def test_who_waits_for_a_queue_waits_for_all_work(way, by, gpus):
    """Also where Ctrl-C cut a call short, or another thread marked its queue meanwhile."""
    gpus(0)
    queue = "transfer" if way in ON_TRANSFER else "compute"
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        device = mesh[0]
        giving = Giving(*mesh.devices)
        call = getattr(giving, way)
        device.wait(device.mark(), queue=queue)
        for place in range(1, num_points_of(call) + 1):
            giving.check(queue)
            if by == "ctrl-c":
                interrupted_at(place, call)
            else:
                with Strike(place, partial(device.mark, queue)):
                    call()
        giving.check(queue)


def test_a_queue_that_comes_in_the_middle_of_a_wait_waits_too(gpus):
    gpus(0)
    with gr.open_mesh([0, 1, 2], backend="cuda") as mesh:
        source, middle, reader = mesh.devices
        near, out = source.upload(ONES), reader.upload(ONES)
        for place in range(1, num_points_of(lambda: middle.wait(source.mark())) + 9):
            source.wait(reader.mark())
            source.fill_zero(near)
            mark = source.mark()
            reader.wait(middle.mark())

            def read(mark=mark):
                middle.wait(mark)
                reader.wait(middle.mark())
                ops.add_n([out], [[near]], device=reader)

            with Strike(place, read):
                middle.wait(mark)


def test_a_writer_that_ctrl_c_cut_short_waits_for_copies_when_it_is_called_again(gpus):
    gpus(0)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        device, away = mesh.devices
        far, near = away.upload(ONES), device.upload(ONES)
        value = dense(mesh[:1], (40,), "float32", 0)
        step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(SUM, [(value, value)])
        (result,) = step.results[0].buffers
        read = {near: partial(device.fill_zero, near), result: step}
        for source, write in read.items():
            away.copy(far, source)
            for place in range(1, num_points_of(write) + 1, 3):
                away.copy(far, source)
                interrupted_at(place, write)
                write()


def test_a_result_that_a_copy_still_reads_is_handed_out_behind_it(gpus):
    """Also where the caller's stream waits already, for an earlier result."""
    gpus(0)
    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        *near, away = mesh.devices
        buffers = [device.upload(ONES) for device in near]
        far = away.empty((40,), "float32")
        away.copy(far, buffers[1])
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            with StreamScope():
                arrays = [from_buffer(each, "cupy") for each in buffers]
            arrays[1][...] = 0
        assert (far.numpy() == 1).all()


def test_a_signal_handler_can_put_nothing_into_a_capture(gpus):
    gpus(0)
    with gr.open_mesh([0], backend="cuda") as mesh:
        (device,) = mesh.devices
        near, term, other = (device.upload(ONES) for _ in "abc")

        def handle():
            for call in (near.numpy, partial(device.fill_zero, other), device.synchronize):
                with pytest.raises(CaptureError, match="signal handler"):
                    call()

        def work():
            for _ in range(2):
                ops.accumulate_n([near], [[term]], device=device)

        graph = captured([device], work, handle)
        device.fill_zero(near)
        for _ in range(2):
            graph.submit()
        assert (near.numpy() == 4).all()
        assert (other.numpy() == 1).all()
