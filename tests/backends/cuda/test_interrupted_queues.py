"""Ctrl-C, other threads and signal handlers at any point of a call: no later wait is lost."""

import sys
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import cupy
import numpy as np
import pytest
from support.captures import captured
from support.reduction_calls import dense
from support.signal_injection import SignalInjection, ctrl_c

import gradreduce as gr
from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import from_buffer
from gradreduce.device import CommandList, RepeatedWork
from gradreduce.errors import CaptureError

SUM = gr.ReduceOp.SUM
ONES = np.ones(40, np.float32)
OURS = str(Path(gr.__file__).parent)
pytestmark = pytest.mark.fake_cupy


@pytest.fixture
def mesh(gpus):
    """Two GPUs; nothing runs before the host waits."""
    gpus(0)
    with gr.open_mesh([0, 1], backend="cuda") as made:
        yield made


def at_each_point(call, handler):
    """Makes a call once for each point in our code where a handler may run; yields after each.

    The handler runs at another point each time. Calls of CUDA are never interrupted.
    """
    for place in count(1):
        passed = 0

        def call_handler(place=place):
            nonlocal passed
            if sys._getframe(2).f_code.co_filename.startswith(OURS):
                passed += 1
                if passed == place:
                    handler()

        with suppress(KeyboardInterrupt), SignalInjection(1, call_handler, every=1):
            call()
        yield
        if passed < place:
            return


def receive(sends, receives, gpu, stream):
    """Receives on a stream, like NCCL."""
    for _, buffer in receives:
        cupy.cuda.runtime.memsetAsync(buffer.address, 0, buffer.nbytes, stream)


class SubmittedWork:
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

    def check(self):
        """Overwrites the results on the other GPU."""
        ops.add_n([self.near], [[self.far]], device=self.away)


ON_TRANSFER = ("copy", "upload", "exchange")


@pytest.mark.whole_product
@pytest.mark.parametrize("by", ["ctrl-c", "thread"])
@pytest.mark.parametrize("way", ["launch", "fill", "graph", *ON_TRANSFER])
def test_waiting_for_a_queue_waits_for_all_its_work(way, by, mesh):
    """Also if Ctrl-C interrupted a call, or another thread marked its queue meanwhile."""
    queue = "transfer" if way in ON_TRANSFER else "compute"
    device = mesh[0]
    submitted = SubmittedWork(*mesh.devices)
    call = getattr(submitted, way)
    submitted.check()
    mark = partial(device.queue_mark, queue)
    for _ in at_each_point(call, ctrl_c if by == "ctrl-c" else mark):
        submitted.check()


def test_a_writer_that_ctrl_c_interrupted_waits_for_copies_when_called_again(mesh):
    device, away = mesh.devices
    far, near = away.upload(ONES), device.upload(ONES)
    value = dense(mesh[:1], (40,), "float32", 0)
    step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(SUM, [(value, value)])
    (result,) = step.results[0].buffers
    read = {near: partial(device.fill_zero, near), result: step}
    for source, write in read.items():
        away.copy(far, source)
        for _ in at_each_point(write, ctrl_c):
            write()
            away.copy(far, source)


@pytest.mark.parametrize("form", ["prepare", "capture"])
def test_later_work_waits_for_a_step_that_ctrl_c_interrupted(form, mesh):
    """On the compute queue of each GPU whose memory the step uses."""
    value = dense(mesh, (40,), "float32", 0)
    step = getattr(gr.HierarchicalCopyAllReduce(mesh=mesh), form)(SUM, [(value, value)])
    used = [*value.buffers, *step.results[0].buffers]
    for _ in at_each_point(step, ctrl_c):
        for buffer in used:
            buffer.device.fill_zero(buffer)


def test_callers_arrays_are_read_before_they_change_after_ctrl_c(mesh):
    """By a step, also on another GPU, if the caller's stream waits for a later call."""
    arrays = []
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            arrays.append(cupy.asarray(ONES))
    value = gr.PerReplica(arrays, mesh)
    step = gr.HierarchicalCopyAllReduce(mesh=mesh).prepare(SUM, [(value, value)])
    for _ in at_each_point(step, ctrl_c):
        for device, array in zip(mesh, arrays, strict=True):
            device.block_stream(cupy.cuda.get_current_stream(device.physical))
            with cupy.cuda.Device(device.physical):
                array[...] = 1


@pytest.mark.parametrize("by", ["ctrl-c", "thread"])
def test_a_step_and_a_copy_of_what_it_writes_wait_for_each_other(by, mesh):
    """Also if Ctrl-C interrupted the copy, or another thread's step began in the middle of it."""
    device = mesh[0]
    near, term, out = (device.upload(ONES) for _ in "abc")
    commands = CommandList()
    with mesh.mesh_state.recording_commands(commands):
        ops.accumulate_n([near], [[term]], device=device)
        work = RepeatedWork(mesh.devices, commands)

    def look():  # takes no lock, because no other queue has used the blocks
        if near.block.uses is device.compute:
            work._settle()

    copy = partial(device.copy, out, near, queue="transfer")
    for _ in at_each_point(copy, ctrl_c if by == "ctrl-c" else look):
        work.run(commands.run)


def test_memory_that_a_download_writes_is_not_used_again_after_ctrl_c(mesh):
    device = mesh[0]
    near = device.upload(ONES)
    near.numpy()
    device.synchronize(deadline=60.0)  # from now on downloads go through pinned memory
    for _ in at_each_point(near.numpy, ctrl_c):
        device.upload(ONES)


def test_a_result_that_a_copy_still_reads_is_returned_after_it_in_stream_order(gpus):
    """Also if the caller's stream already waits for an earlier result."""
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


def test_a_stream_waits_for_copies_when_a_release_is_called_again_after_ctrl_c(mesh):
    device, away = mesh.devices
    near, far = device.upload(ONES), away.empty((40,), "float32")
    release = partial(device.release, near, 0)
    away.copy(far, near)
    for _ in at_each_point(release, ctrl_c):
        with cupy.cuda.Device(0):
            release()[...] = 2
        device.wait_for_stream(0)
        away.copy(far, near, queue="transfer")


def test_a_signal_handler_cannot_add_work_to_a_capture(mesh):
    device = mesh[0]
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
