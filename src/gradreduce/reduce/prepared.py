"""Prepared and captured reductions: planned once, run many times.

The pipeline runs once while the devices record a ``CommandList`` (``device/run/commands.py``).
Packs, pointer tables, kernels and all memory are then fixed. For each library, device and stream
whose arrays a call uses, it queues one stream wait in each direction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from gradreduce.arrays.caller_streams import keep_alive_longer
from gradreduce.arrays.convert_gpu import OWNED_BY_CALLER, current_of
from gradreduce.arrays.distributed import Mirrored, Part
from gradreduce.arrays.flat_arrays import attach_again
from gradreduce.arrays.outputs import count_writes, tensors_of
from gradreduce.device import (
    Buffer,
    Capture,
    CommandList,
    Device,
    RepeatedWork,
    as_deadline,
    check_peers,
    deadline_scope,
    names_of,
)
from gradreduce.errors import NotCopied

from .arguments import Request, check_one_mesh
from .checked_call import CheckedCall
from .requests import copy_to_out

Reduce = Callable[[list[Request]], list[tuple[Part, ...]]]

_ON_HOST = ("native", "numpy", "torch")
_ON_GPU = ("native", "torch", "cupy")


class StreamBoundary:
    """Queues waits between repeated work and the streams of libraries whose arrays it uses.

    One wait in each direction for each GPU and library, because the devices of a GPU share its
    compute stream.

    Args:
        devices: the devices that work, in order.
        producers: the kind and device of every input array; Buffers have no library.
        consumers: the same for the results. Libraries of inputs also wait for the work, because
            they may write their arrays again.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        producers: Sequence[tuple[str | None, Device]],
        consumers: Sequence[tuple[str, Device]],
    ) -> None:
        # On GPUs: the kind, a device, and whether arrays are read.
        self._boundaries: list[tuple[str, Device, bool]] = []
        self._host_consumers: list[Device] = []  # devices whose results are in host memory
        self._consumers: dict[tuple[str, Device], object] = {}  # the stream of the last call
        if not devices[0].mesh_state.has_streams:
            readers = [device for kind, device in consumers if kind in _ON_HOST]
            self._host_consumers = list(dict.fromkeys(readers))
            return
        shared = [each for each in dict.fromkeys(producers) if each[0] in OWNED_BY_CALLER]
        read = {(kind == "torch", device.physical) for kind, device in shared}
        by_gpu: dict[tuple[bool, int], tuple[str, Device]] = {}
        for kind, device in (*consumers, *shared):
            if kind in _ON_GPU:
                by_gpu.setdefault((kind == "torch", device.physical), (kind, device))
        self._boundaries = [(*each, index in read) for index, each in by_gpu.items()]

    def enter(self) -> None:
        """Makes our compute queues wait for the callers' current streams.

        Raises:
            CaptureError: one of these streams, or of those that ``leave`` makes wait, is capturing
                a CUDA graph. Nothing was changed.
        """
        waits = []
        for kind, device, is_read in self._boundaries:
            stream = current_of(device, kind)
            device.check_stream(stream)
            if is_read:
                waits.append((device, stream))
        for device, stream in waits:
            device.wait_for_stream(stream, checked=True)

    def leave(self, results: Iterable[Buffer] = ()) -> None:
        """Makes those streams wait for our compute queues; for host arrays the host waits.

        Args:
            results: the Buffers whose arrays are read on these streams, and may be dropped
                meanwhile.
        """
        for kind, device, _ in self._boundaries:
            consumer = current_of(device, kind)
            device.block_stream(consumer)
            if self._consumers.get((kind, device)) != consumer:  # only if it has changed
                for result in results:
                    if result.device.physical == device.physical:
                        result.block.record_stream(consumer)
                self._consumers[kind, device] = consumer
        for device in self._host_consumers:
            device.block_stream(None)


class SharedArrays(Protocol):
    """Memory that callers fill as arrays of a library; see ``FlatBuffer``."""

    def adopt(self) -> None:
        """Makes our queues wait for the library's current streams."""

    def release(self, *, deadline: float | None = None) -> None:
        """Makes the library's current streams wait for our queues."""


class PreparedStep(NotCopied):
    """A reduction that is planned once and repeated on the same arrays.

    Made by ``AllReduceCrossDeviceOps.prepare``. Each call reads the same arrays again: fill them in
    place. **Each call returns the same arrays**, and overwrites the results of the previous call.
    Any thread may call; calls run one after the other. ``docs/cuda_graphs.md`` says in which order
    a call reads and writes the arrays of other libraries.

    Attributes:
        results: one ``Mirrored`` for each pair.
    """

    _copy_hint = "prepare the step again where it is needed"

    _called = "a prepared step"
    shared: SharedArrays | None = None  # set by ``FlatBuffer.prepare_all_reduce``
    attaches = True  # False: the caller attaches gradients again before each call

    def __init__(self, call: CheckedCall, reduce: Reduce) -> None:
        self._mesh_state = call.devices[0].mesh_state
        self._devices = call.devices
        self._command_list = CommandList()
        self._replay: Callable[[], None] = partial(self._command_list.replay, self._mesh_state.log)
        self._lock = threading.Lock()
        self._active = self._devices[0]._activate()
        self._held = [request.value for request in call.requests]  # keeps the inputs alive
        read = [buffer for request in call.requests for buffer in request.value.buffers]
        written = [each for row in call.outs for each in row]
        blocks = dict.fromkeys([each.block for each in (*read, *[out.buffer for out in written])])
        for block in blocks:
            keep_alive_longer(block)
        self._tensors = tensors_of(written)
        self._pack_buffers = [block for block in blocks if block.gaps is not None]
        attach_again(self._pack_buffers)
        self._boundary = _boundary_of(call)
        writers = [("torch", block.device) for block in self._pack_buffers]  # of attached gradients
        self._attached = StreamBoundary(self._devices, writers, writers)
        boundaries = self._boundaries()
        for boundary in boundaries:
            boundary.enter()
        with self._mesh_state.recording_commands(self._command_list):
            reduced = copy_to_out(call.requests, reduce(call.requests))
            self._work = RepeatedWork(self._devices, self._command_list)
        self._outputs = [part for parts in reduced for part in parts if isinstance(part, Buffer)]
        count_writes(self._tensors)
        # Streams of new results are synchronized below.
        for boundary in boundaries if call.outs else boundaries[1:]:
            boundary.leave()
        self.results: list[Mirrored] = call.results(reduced)
        for result in self.results if not call.outs else ():
            result._keep_arrays()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._held)} values on {names_of(self._devices)}>"

    def __call__(self, *, deadline: float | None = None) -> list[Mirrored]:
        """Reduces again; waits for the devices only if results are in host memory.

        Args:
            deadline: seconds from now; if the devices take longer, the mesh fails.

        Returns:
            ``results``, whose memory is overwritten in the order of their devices' queues.

        Raises:
            CollectiveError: the mesh has failed; after ``mesh.reset()`` the step works again.
            ValueError: ``deadline`` is not a number above 0, or the ``.grad`` of an attached
                parameter has another shape or dtype. Nothing was changed.
        """
        seconds = as_deadline(deadline)
        self._mesh_state.check_usable(self._devices[0])
        for device in self._devices if self._mesh_state.failed else ():
            self._mesh_state.check_usable(device)
        if self._pack_buffers and self.attaches:
            attach_again(self._pack_buffers)
        boundaries = self._boundaries()
        if self.shared is not None:
            self.shared.adopt()
        with (
            deadline_scope(self._called, seconds, self._devices),
            self._lock,
            self._mesh_state.launch_lock,
            self._active,
        ):
            for boundary in boundaries:
                boundary.enter()
            self._work.run(self._replay)
        count_writes(self._tensors)
        for boundary in boundaries:
            boundary.leave(self._outputs)  # may wait, so no lock is held here
        if self.shared is not None:
            self.shared.release(deadline=deadline)
        if self._mesh_state.inexact.copies:
            self._mesh_state.inexact.warn()
        return self.results

    def _boundaries(self) -> list[StreamBoundary]:
        """Returns the boundary of the arrays, and that of PyTorch for attached gradients.

        A step of ``FlatBuffer.prepare_all_reduce`` is synchronized by its flat buffer.
        """
        if self.shared is None and any(
            [block.attached is not None for block in self._pack_buffers]
        ):
            return [self._boundary, self._attached]
        return [self._boundary]


class CapturedStep(PreparedStep):
    """A ``PreparedStep`` that each call submits as one CUDA graph.

    Made by ``AllReduceCrossDeviceOps.capture``. On GPUs the cost of a launch for the host does not
    depend on the size of the graph. In the simulation the commands of the prepared step run
    instead. The step always uses the arrays with which it was made.
    """

    _called = "a captured step"

    def __init__(self, call: CheckedCall, reduce: Reduce) -> None:
        check_peers(call.devices)  # before anything is launched
        super().__init__(call, reduce)
        self._replay = Capture(call.devices, self._command_list).submit


def _boundary_of(call: CheckedCall) -> StreamBoundary:
    """Makes the boundary for the libraries of a step's values and results."""
    producers = [
        (buffer.array_owner, buffer.device)
        for request in call.requests
        for buffer in request.value.buffers
    ]
    pairs = zip(call.requests, call.kinds, strict=True)
    consumers = [(kind, device) for request, kind in pairs for device in request.devices]
    if call.outs:  # their owners may still read or write them
        consumers = [(each.kind, each.buffer.device) for row in call.outs for each in row]
        producers += consumers
    return StreamBoundary(call.devices, producers, consumers)


def check_preparable(call: CheckedCall) -> None:
    """Raises ``ValueError`` for arrays that later calls could not read or write again.

    These are arrays that had to be copied, and values on several meshes.
    """
    check_one_mesh(call.requests, "a step")
    for index, (request, kind) in enumerate(zip(call.requests, call.kinds, strict=True)):
        if request.value.is_sparse:
            raise ValueError(
                f"{request.value._name_of(index)} contains IndexedSlices, whose rows may change "
                "with each call: only dense values can be prepared"
            )
        name_of = request.value._name_of
        for replica, out in enumerate(call.outs[index] if call.outs else ()):
            if out.copied is not None:
                why = (
                    "is in host memory, which deferred commands cannot write: with schedule_seed= "
                    "pass Buffers"
                    if out.buffer.device.defers
                    else "does not have the strides of its value's replicas: a step writes the "
                    "arrays themselves; pass dense ones with the same strides"
                )
                raise ValueError(f"{name_of(index, replica, 'out')} {why}")
        for replica, buffer in enumerate(request.value.buffers):
            if buffer.array_owner == "copy":
                raise ValueError(
                    f"{request.value._name_of(index, replica)} could not be shared and was copied, "
                    "so later calls would read the copy. Pass arrays on their device that are "
                    "contiguous, or dense with the same strides; on GPUs arrays in GPU memory, on "
                    "simulated devices with schedule_seed= Buffers"
                )
        on_gpu = not request.devices[0].mesh_state.shares_host_memory
        if not call.outs and (kind == "jax" or (kind == "numpy" and on_gpu)):
            raise ValueError(
                f"{request.value._name_of(index)}: later calls cannot overwrite results of kind "
                f"{kind!r}; pass another output_type"
            )
