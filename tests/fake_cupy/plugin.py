"""A pytest plugin that replaces CuPy by the fake: ``-p fake_cupy.plugin``.

Each test module has one machine, because meshes may live as long. After every test its queues are
run and its faults raised. The fixture ``gpus`` (``support/gpus.py``) makes another one for a test.
"""

from __future__ import annotations

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

__all__ = ["fresh"]

# Tests that use memory without a wait on purpose, to check that no wait is added.
UNFENCED = {
    "test_what_a_failed_device_has_read_can_be_used",
    "test_memory_does_not_grow_with_use",
}
SEED = int(os.environ.get("GRADREDUCE_FAKE_SEED", "2"))


def _module(name: str, **content) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    made.__path__ = []
    made.__dict__.update(content)
    return made


def _runtime() -> types.ModuleType:
    def getDeviceCount():
        return machine.current().num_gpus

    def deviceCanAccessPeer(device, peerDevice):
        return int(machine.current().can_peer and device != peerDevice)

    def deviceEnablePeerAccess(peerDevice):
        pair = (surface.getDevice(), peerDevice)
        if pair in machine.current().peers:
            raise surface.CUDARuntimeError(704)
        if not deviceCanAccessPeer(*pair):
            raise surface.CUDARuntimeError(217)
        if (
            sum(pair[0] == here for here, _ in machine.current().peers)
            >= machine.current().most_peers
        ):
            raise surface.CUDARuntimeError(711)
        machine.current().peers.add(pair)

    def deviceDisablePeerAccess(peerDevice):
        machine.current().peers.remove((surface.getDevice(), peerDevice))

    return _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=surface.CUDARuntimeError,
        getDevice=surface.getDevice,
        setDevice=surface.setDevice,
        eventQuery=surface.eventQuery,
        eventRecord=surface.eventRecord,
        streamIsCapturing=surface.streamIsCapturing,
        streamQuery=surface.streamQuery,
        streamWaitEvent=surface.streamWaitEvent,
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 12090,
        is_hip=False,
        getDeviceCount=getDeviceCount,
        getDeviceProperties=surface.getDeviceProperties,
        deviceCanAccessPeer=deviceCanAccessPeer,
        deviceEnablePeerAccess=deviceEnablePeerAccess,
        deviceDisablePeerAccess=deviceDisablePeerAccess,
        deviceGetPCIBusId=surface.deviceGetPCIBusId,
        memcpyAsync=arrays.copy_async,
        memcpyPeerAsync=arrays.peer_copy_async,
        memsetAsync=arrays.memset_async,
        memGetInfo=arrays.memory_info,
        pointerGetAttributes=arrays.pointer_attributes,
        memcpyHostToDevice=arrays.HOST_TO_DEVICE,
        memcpyDeviceToHost=arrays.DEVICE_TO_HOST,
        memcpyDeviceToDevice=arrays.DEVICE_TO_DEVICE,
        memcpyDefault=arrays.ANYWHERE,
        streamCaptureModeGlobal=graphs.GLOBAL,
        streamCaptureModeThreadLocal=graphs.THREAD_LOCAL,
        streamCaptureModeRelaxed=graphs.RELAXED,
    )


def inject() -> None:
    """Makes ``import cupy`` import the fake, whether or not CuPy is installed."""
    ctypes.CDLL = arrays.CDLL  # type: ignore[misc]
    runtime = _runtime()
    arrays.ndarray.__module__ = "cupy"  # convert.py recognizes it by this
    nccl_module = _module(
        "cupy.cuda.nccl",
        available=True,
        NcclCommunicator=nccl.NcclCommunicator,
        NcclError=nccl.NcclError,
        groupStart=nccl.groupStart,
        groupEnd=nccl.groupEnd,
        get_unique_id=nccl.get_unique_id,
        get_version=nccl.get_version,
        **nccl.CONSTANTS,
    )
    compiler = _module(
        "cupy.cuda.compiler",
        CompileException=kernels.CompileException,
        compile_using_nvrtc=kernels.compile_using_nvrtc,
    )
    function = _module("cupy.cuda.function", CNumpyArray=kernels.CNumpyArray, Module=kernels.Module)
    nvrtc = _module("cupy.cuda.nvrtc", getVersion=kernels.nvrtc_version)
    driver = _module(
        "cupy.cuda.driver",
        CUDADriverError=surface.CUDADriverError,
        occupancyMaxActiveBlocksPerMultiprocessor=kernels.max_active_blocks,
    )
    nvtx = _module("cupy.cuda.nvtx", RangePush=surface.RangePush, RangePop=surface.RangePop)
    cuda = _module(
        "cupy.cuda",
        nvrtc=nvrtc,
        nvtx=nvtx,
        runtime=runtime,
        driver=driver,
        compiler=compiler,
        function=function,
        Device=surface.Device,
        Stream=surface.Stream,
        ExternalStream=surface.ExternalStream,
        Event=surface.Event,
        Graph=graphs.Graph,
        Function=kernels.Function,
        MemoryPool=arrays.MemoryPool,
        MemoryPointer=arrays.MemoryPointer,
        UnownedMemory=arrays.UnownedMemory,
        alloc_pinned_memory=arrays.alloc_pinned_memory,
        get_current_stream=surface.get_current_stream,
        get_elapsed_time=surface.get_elapsed_time,
        is_available=lambda: True,
    )
    cupy = _module(
        "cupy",
        FAKE=True,
        __version__="14.2.0",
        cuda=cuda,
        ndarray=arrays.ndarray,
        asarray=arrays.asarray,
        from_dlpack=arrays.from_dlpack,
        ascontiguousarray=arrays.ascontiguousarray,
    )
    for made in (cupy, cuda, nvrtc, nvtx, runtime, driver, compiler, function, nccl_module):
        sys.modules[made.__name__] = made
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
