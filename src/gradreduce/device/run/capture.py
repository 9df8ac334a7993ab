"""Captures recorded commands, and runs them again as one operation.

On GPUs the operation is a CUDA graph, in the simulation the list of commands. The capture uses
streams of its own. Other threads may therefore use the devices meanwhile, and a failed capture has
no effect.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
from itertools import product
from typing import TYPE_CHECKING

from gradreduce.device.failure.forks import after_fork
from gradreduce.device.log.op_log import CROSSING, Record
from gradreduce.errors import CaptureError, listed

from .commands import CommandList

if TYPE_CHECKING:
    from gradreduce.device.device import Device


class _NoCollection(ContextDecorator):
    """Disables Python's garbage collection, as a context manager or a decorator, in any thread.

    A finalizer may free GPU memory or wait for a GPU. In a thread that captures, CUDA forbids both
    and invalidates the capture. While a step over many tensors is planned, collections would look
    at all new objects again and again, and take most of the time.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        """Sets the number of threads inside to 0; also in a forked child."""
        self._lock = threading.RLock()
        self._num_inside = 0
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if gc.isenabled():
                self._was_enabled = True
                gc.disable()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._was_enabled and not self._num_inside:
                self._was_enabled = False
                gc.enable()


no_collection = _NoCollection()


class Capture:
    """The commands of a list as one operation, which ``submit`` runs.

    The constructor runs nothing. The operation waits for earlier work of the devices' compute
    queues, and later work of these queues waits for it. It is logged as if each command were
    called. The capture keeps the list and the memory of its commands alive.

    Args:
        devices: at least one device, all of one mesh; call ``check_peers`` first.
        command_list: a closed list whose commands use no other devices.

    Raises:
        CaptureError: CUDA cannot make a graph of the commands.
    """

    def __init__(self, devices: Sequence[Device], command_list: CommandList) -> None:
        self._devices = tuple(dict.fromkeys(devices))
        self._device = self._devices[0]
        computes = dict.fromkeys(device.compute for device in self._devices)
        self._others = [each for each in computes if each is not self._device.compute]
        self._mesh_state = self._device.mesh_state
        thread = self._mesh_state.thread
        pending_call, thread.pending_call = thread.pending_call, None  # no marks in the capture
        try:
            with no_collection, self._mesh_state.recording_commands(None):
                self._mesh_state.capturing.add(threading.get_ident())
                self._run = self._device._capture(self._devices, command_list)
        finally:
            self._mesh_state.capturing.discard(threading.get_ident())
            thread.pending_call = pending_call
        self._records = [each for part in command_list.operations for each in part.records]
        labels = [each.label for each in self._records if each.label is not None]
        # One record for all commands: the cost of a call must not depend on their number.
        self._record = Record(
            "launch",
            "captured step",
            self._device.index,
            nbytes=sum(each.nbytes for each in self._records if each.kind in CROSSING),
            num_rows=len(self._records),
            label=listed(dict.fromkeys(map(str, labels))) or None,
        )

    def submit(self) -> None:
        """Submits the captured work; the caller has checked the devices. The host does not wait."""
        mesh_state, compute = self._mesh_state, self._device.compute
        order = mesh_state.order
        with mesh_state.pack_scope(self._record.label, self._devices):
            if self._others:
                order.join(compute, self._others)
            if mesh_state.log.num_traces:
                mesh_state.thread.started = time.perf_counter_ns()
            self._run()
            if self._others:
                order.add_work(compute)
            for other in self._others:
                order.join(other, (compute,))
            mesh_state.log.repeat(self._record, self._records)


def check_peers(devices: Sequence[Device]) -> None:
    """Raises ``CaptureError`` if two physical devices have no peer access."""
    physicals = dict.fromkeys(device.physical for device in devices)
    for here, there in product(physicals, physicals):
        if not devices[0].mesh_state.peers(here, there):
            raise CaptureError(
                f"physical devices {here} and {there} have no peer access: CUDA cannot "
                "capture copies between them"
            )
