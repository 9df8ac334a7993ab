"""A pytest plugin that replaces CuPy by the fake: ``-p fake_cupy.plugin``.

Each test module has one machine, because meshes may live as long. After every test its queues are
run and its faults raised. The fixture ``gpus`` (``support/gpus.py``) makes another one for a test.
"""

import ctypes
import gc
import importlib.util
import os
import sys
import types

import pytest

from . import arrays, graphs, kernels, machine, nccl, surface
from .kernels import Declared, declared
from .machine import Machine, install
from .signatures import RECORD

# Tests that use memory without a wait on purpose, to check that no wait is added.
UNFENCED = {"test_what_a_failed_device_has_read_can_be_used", "test_memory_does_not_grow_with_use"}
SEED = int(os.environ.get("GRADREDUCE_FAKE_SEED", "2"))


def _module(name: str, **content) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    made.__path__ = []
    made.__dict__.update(content)
    return made


# For each module of CuPy, the files that hold what the record names in it.
MODULES = {
    "cupy": (arrays,),
    "cupy.cuda": (surface, arrays, kernels, graphs),
    "cupy.cuda.compiler": (kernels,),
    "cupy.cuda.driver": (surface, kernels),
    "cupy.cuda.function": (kernels,),
    "cupy.cuda.nccl": (nccl,),
    "cupy.cuda.nvrtc": (kernels,),
    "cupy.cuda.nvtx": (surface,),
    "cupy.cuda.runtime": (surface, arrays, graphs),
}


def inject() -> None:
    """Makes ``import cupy`` import the fake, whether or not CuPy is installed."""
    ctypes.CDLL = arrays.CDLL  # type: ignore[misc]
    arrays.ndarray.__module__ = "cupy"  # convert.py recognizes it by this
    for place, files in MODULES.items():
        names = [name.rpartition(".")[2] for name in RECORD if name.rpartition(".")[0] == place]
        made = {
            name: getattr(file, name) for name in names for file in files if hasattr(file, name)
        }
        sys.modules[place] = _module(place, **made)
        parent, _, name = place.rpartition(".")
        if parent and name != "nccl":  # which is imported by its full name
            setattr(sys.modules[parent], name, sys.modules[place])
    vars(sys.modules["cupy"]).update(FAKE=True, __version__="14.2.0")
    sys.modules["cupyx"] = None  # type: ignore[assignment]  # importing it fails


def declare_launches() -> None:
    """Checks every launch of the CUDA backend against ``Kernel.writes``."""
    from gradreduce.backends.cuda.device import CudaDevice

    launch = CudaDevice._launch

    def held(self, kernel, template, work, scalars, crossing):
        rows, num_written = work.rows, work.num_written
        spans = [[(one.address, one.address + one.nbytes) for one in row] for row in rows]
        what = Declared(
            tuple(span for row in spans for span in row[:num_written]),
            tuple(span for row in spans for span in row[num_written:]),
        )
        with declared(what):
            return launch(self, kernel, template, work, scalars, crossing)

    CudaDevice._launch = held


def declare_meshes() -> None:
    """Tells the machine on which GPUs meshes are opened."""
    from gradreduce.backends.cuda import streams

    enable = streams.enable_peer_access

    def opened(physicals):
        machine.current().of_meshes.update(physicals)
        return enable(physicals)

    streams.enable_peer_access = opened
    Machine.knows_meshes = True


def fresh(seed: int = SEED, **options) -> Machine:
    """Replaces the machine by a new one; faults of the old one are not raised."""
    gc.collect()
    surface.forget()
    streams = sys.modules.get("gradreduce.backends.cuda.streams")
    if streams is not None:
        streams._OURS.clear()
    nccl.forget()
    return install(Machine(seed, **options))


inject()


def pytest_configure(config: pytest.Config) -> None:
    from gradreduce.backends.cuda import streams

    declare_launches()
    declare_meshes()
    streams.enable_peer_access(range(machine.NUM_GPUS))  # checks each pair once per process
    fresh()


def pytest_runtest_setup(item: pytest.Item) -> None:
    machine.current().ordered = getattr(item, "originalname", "") not in UNFENCED


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Runs the test's remaining work; a fault fails the test."""
    here = machine.current()
    try:
        here.settle()
    finally:
        other = nextitem is None or nextitem.path != item.path
        if here.faults or other:
            fresh()
