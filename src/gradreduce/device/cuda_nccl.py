"""Collectives by NCCL, one process driving all its GPUs; never decides what is reduced.

Drives ``cupy.cuda.nccl`` directly: ``cupyx.distributed`` knows no bfloat16 and no mean.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradreduce.errors import BackendUnavailableError, CollectiveError, DeviceMismatchError

from .collective import Collective
from .cuda import CudaDevice
from .dtypes import element_of
from .journal import Record
from .memory import Buffer

__all__ = ["NcclCollective"]

# element -> NCCL's number for it; the 16-bit integers are not NCCL's
_TYPES = {
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "uint8": "NCCL_UINT8",
    "uint32": "NCCL_UINT32",
    "uint64": "NCCL_UINT64",
}
_OPS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}
ABORT_SECONDS = 10.0


class NcclCollective(Collective):
    """One communicator for each physical device of a mesh, made at the first call.

    Args:
        physicals: the GPUs, in the order of their ranks.

    Raises:
        BackendUnavailableError: CuPy finds no libnccl; the text names the wheel to install.
    """

    def __init__(self, physicals: Sequence[int]) -> None:
        self._nccl = _nccl()
        self._physicals = tuple(physicals)
        self._lock = threading.Lock()
        self._communicators: dict[int, Any] = {}
        self._depth = threading.local()

    def all_reduce(self, buffers: Sequence[Buffer], op: str = "sum") -> None:
        """See ``Collective.all_reduce``."""
        if op not in _OPS:
            raise CollectiveError(f"all_reduce: op={op!r} is not one of {list(_OPS)}")
        self._check("all_reduce", buffers, buffers)
        number = getattr(self._nccl, _OPS[op])
        with self.group():
            for buffer in buffers:
                count, kind = self._typed(buffer)
                self._call(
                    "all_reduce", buffer, "allReduce",
                    buffer.address, buffer.address, count, kind, number,
                )  # fmt: skip

    def broadcast(self, buffers: Sequence[Buffer], root: int) -> None:
        """See ``Collective.broadcast``."""
        self._check_broadcast(buffers, root)
        rank = self._physicals.index(buffers[root].device.physical)
        with self.group():
            for buffer in buffers:
                count, kind = self._typed(buffer)
                self._call(
                    "broadcast", buffer, "broadcast",
                    buffer.address, buffer.address, count, kind, rank,
                )  # fmt: skip

    def all_gather(self, outputs: Sequence[Buffer], inputs: Sequence[Buffer]) -> None:
        """See ``Collective.all_gather``."""
        self._check_gather(outputs, inputs)
        with self.group():
            for out, buffer in zip(outputs, inputs, strict=True):
                count, kind = self._typed(buffer)
                self._call(
                    "all_gather", buffer, "allGather", buffer.address, out.address, count, kind
                )

    @contextmanager
    def group(self) -> Iterator[None]:
        """One NCCL group; nests. Without it a single process that drives many GPUs deadlocks."""
        self._run("groupStart", self._nccl.groupStart)
        try:
            yield
        finally:
            self._run("groupEnd", self._nccl.groupEnd)

    def close(self) -> None:
        """Ends the communicators, off the caller's thread: NCCL's abort can hang."""
        with self._lock:
            communicators, self._communicators = list(self._communicators.values()), {}
        if not communicators:
            return

        def abort() -> None:
            for communicator in communicators:
                communicator.abort()

        worker = threading.Thread(target=abort, name="gradreduce-nccl-abort", daemon=True)
        worker.start()
        worker.join(ABORT_SECONDS)

    def _typed(self, buffer: Buffer) -> tuple[int, int]:
        """Count and NCCL type of a buffer as its elements: complex as pairs."""
        element = element_of(buffer.dtype)
        name = _TYPES.get(element.name)
        if name is None:
            raise CollectiveError(f"NCCL knows no {buffer.dtype}")
        return buffer.size * element.lanes, getattr(self._nccl, name)

    def _call(self, name: str, buffer: Buffer, method: str, *arguments: int) -> None:
        device = buffer.device
        if not isinstance(device, CudaDevice):
            raise DeviceMismatchError(f"{buffer} does not lie on a GPU")
        communicator = self._communicator(device.physical)
        with device.gpu:
            call = getattr(communicator, method)
            self._run(name, call, *arguments, device.stream("compute").ptr)
        recorder = device.fabric.recorder
        if recorder.recording:
            recorder.add(Record("collective", name, device.index, nbytes=buffer.nbytes))

    def _communicator(self, physical: int) -> Any:
        with self._lock:
            if not self._communicators:
                made = self._run(
                    "initAll", self._nccl.NcclCommunicator.initAll, list(self._physicals)
                )
                self._communicators = dict(zip(self._physicals, made, strict=True))
            return self._communicators[physical]

    def _run(self, name: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nccl.NcclError as error:
            raise CollectiveError(f"NCCL {name}: {error}") from error


def _nccl() -> Any:
    """CuPy's NCCL module."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise BackendUnavailableError(
            "CuPy finds no libnccl: pip install nvidia-nccl-cu12 (or -cu13, as your CuPy)"
        )
    return nccl
