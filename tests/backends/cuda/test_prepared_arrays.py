"""Prepared steps on GPU arrays: each call is ordered with their library's stream."""

import sys

import cupy
import numpy as np
import pytest
from fake_cupy import foreign
from support.exact_data import same

import gradreduce as gr

pytestmark = pytest.mark.fake_cupy
SHAPES = [(5, 3), (400,), (7,)]
SUM = gr.ReduceOp.SUM


class Library:
    """CuPy, or the fake of PyTorch, with a current stream on each GPU."""

    def __init__(self, name: str) -> None:
        self.name, self.torch = name, foreign.stand_in()
        self.old = []  # PyTorch's streams are never destroyed

    def change_streams(self) -> None:
        self.old += foreign.change_streams(self.torch)

    def during(self, gpu: int, work):
        """Runs ``work`` on the library's current stream, like its own code."""
        with self.torch.on(gpu):
            return work()

    def call(self, step):
        """Calls inside ``with`` blocks of CuPy's streams; PyTorch has its own current streams."""
        if self.name == "torch":
            return step()
        with self.torch.on(0), self.torch.on(1):
            return step()

    def wrap(self, array):
        return foreign.Tensor(array) if self.name == "torch" else array

    def raw(self, array):
        return array.array if self.name == "torch" else array


@pytest.fixture(params=["cupy", "torch"])
def library(request, mesh, monkeypatch) -> Library:
    made = Library(request.param)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    return made


def prepared(library, mesh, **options):
    """A step, and the CuPy arrays that it reads: ``[tensor][device]``."""
    ones = [np.ones(shape, np.float32) for shape in SHAPES]
    arrays = [
        [library.during(device.physical, lambda one=one: cupy.asarray(one)) for device in mesh]
        for one in ones
    ]

    def made():
        values = [gr.PerReplica([library.wrap(array) for array in row], mesh) for row in arrays]
        pairs = [(value, value) for value in values]
        return gr.HierarchicalCopyAllReduce(**options).prepare(SUM, pairs)

    return library.call(made), arrays


def fill(library, array, number) -> None:
    def work():
        array[...] = number

    library.during(array.device.id, work)


@pytest.mark.parametrize("num_packs", [0, 1])
def test_calls_are_ordered_with_the_streams_current_at_the_call(library, mesh, num_packs):
    step, arrays = prepared(library, mesh, num_packs=num_packs)
    shown = [array for result in step.results for array in result.values]
    for turn in range(1, 4):
        for row in arrays:
            for replica, array in enumerate(row):
                fill(library, array, turn * (replica + 1))
        results = library.call(step)
        assert all(
            one is other
            for one, other in zip(
                [a for result in results for a in result.values], shown, strict=True
            )
        )
        if turn == 2:
            library.change_streams()
        for array in map(library.raw, shown):
            found = library.during(array.device.id, array.get)
            assert same(found, np.full(found.shape, 6 * turn, np.float32))


@pytest.mark.parametrize("way", ["prepare", "capture"])
def test_outs_are_ordered_with_the_streams_current_at_the_call(library, mesh, way):
    """Old outs may still be read when the next call is made; its inputs are our memory."""
    inputs = [[device.zeros(shape, "float32") for device in mesh] for shape in SHAPES]
    outs = [
        [library.during(d.physical, lambda s=shape: cupy.asarray(np.zeros(s, "f4"))) for d in mesh]
        for shape in SHAPES
    ]

    def made():
        pairs = [(value, value) for value in (gr.PerReplica(row, mesh) for row in inputs)]
        targets = [gr.PerReplica([library.wrap(a) for a in row], mesh) for row in outs]
        return getattr(gr.HierarchicalCopyAllReduce(1), way)(SUM, pairs, out=targets)

    step, seen = library.call(made), []
    for turn in range(1, 4):
        for row in inputs:
            for replica, each in enumerate(row):
                each.device.upload(np.full(each.shape, turn * (replica + 1), np.float32), out=each)
        library.call(step)
        for array in [array for row in outs for array in row]:
            seen.append((turn, library.during(array.device.id, array.copy)))
        library.change_streams()
    for turn, copied in seen:
        found = library.during(copied.device.id, copied.get)
        assert same(found, np.full(found.shape, 6 * turn, np.float32))


@pytest.mark.parametrize("way", ["prepare", "capture"])
def test_values_of_different_devices_of_a_gpu_are_ordered_after_its_stream(gpus, way):
    gpus(0)
    with gr.open_mesh([0] * 4, backend="cuda") as mesh:
        values = [
            gr.PerReplica([cupy.asarray(np.zeros(4, np.float32)) for _ in pair], devices=pair)
            for pair in (mesh.devices[:2], mesh.devices[2:])
        ]
        pairs = [(value, value) for value in values]
        step = getattr(gr.HierarchicalCopyAllReduce(), way)(SUM, pairs)
        for turn in range(1, 4):
            for value in values:
                for array in value.values:
                    array[...] = turn
            found = [array for result in step() for array in result.values]
            assert all(same(each.get(), np.full(4, 2 * turn, np.float32)) for each in found)


def test_a_step_looks_at_arrays_that_were_dropped_once(gpus):
    gpus(1)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:

        def value():
            return gr.PerReplica([cupy.ndarray((4,), np.float32) for _ in mesh], mesh)

        kept = value()
        step = gr.AllReduceCrossDeviceOps(mesh=mesh).capture(gr.ReduceOp.SUM, [(kept, kept)])
        dropped = [value() for _ in range(100)]
        del dropped
        assert min(len(device.freed) for device in mesh) >= 100
        step()
        assert max(len(device.freed) for device in mesh) == 0
