"""Collectives by NCCL, one process driving all its GPUs; never decides what is reduced.

Drives ``cupy.cuda.nccl`` directly: ``cupyx.distributed`` knows no bfloat16 and no mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradreduce.errors import BackendUnavailableError, CollectiveError, DeviceMismatchError

from .base import Device
from .collective import Collective
from .cuda import CudaDevice
from .dtypes import element_of
from .fabric import Fabric
from .memory import Buffer, Queue
from .waiting import Done, beside

__all__ = ["NcclCollective", "SharedNccl"]

# element -> NCCL's number for it; NCCL has no 16-bit integers: who adds them gathers them
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
_ASKED_SECONDS = 1e-4


@dataclass(frozen=True)
class _Call:
    """One collective, not yet sent.

    Attributes:
        name: of the collective, for the journal.
        method: of a communicator.
        buffers: whose devices are the ranks, in order; also keeps their memory.
        arguments: of each rank, all but the stream.
        queue: of each rank's device.
        outputs: whatever other memory it uses, which is kept too until the call is sent.
    """

    name: str
    method: str
    buffers: tuple[Buffer, ...]
    arguments: tuple[tuple[int, ...], ...]
    queue: Queue
    outputs: tuple[Buffer, ...] = ()

    @property
    def physicals(self) -> tuple[int, ...]:
        return tuple(buffer.device.physical for buffer in self.buffers)


class _Open(threading.local):
    """The calls of a thread's open group; None outside of any."""

    calls: list[_Call] | None = None


class _Cliques:
    """Communicators that live and die together.

    Attributes:
        lock: held while one of them is used: every GPU sees the groups of all threads in one order.
        made: GPUs in the order of their ranks -> their communicators.
        aborted: whether nobody may use them any more.
        asked: whether the watchdog is asking one for errors, which must not be freed meanwhile.
    """

    def __init__(self) -> None:
        self.asked = False
        self.lock = threading.Lock()
        self.made: dict[tuple[int, ...], list[Any]] = {}
        self.aborted = False

    def communicators(self) -> list[Any]:
        """All of them, without a lock."""
        return [each for clique in list(self.made.values()) for each in clique]

    def check(self) -> None:
        """Raises ``CollectiveError`` if they were aborted while the caller waited for the lock."""
        if self.aborted:
            raise CollectiveError("NCCL: the communicators were aborted; see mesh.reset()")


class NcclCollective(Collective):
    """One communicator for each physical device of a call, made at the first such call.

    A group's calls are kept until it ends and sent together: communicators that are made inside
    an NCCL group are not ready before it ends, and a block that raises must have sent nothing.

    Raises:
        BackendUnavailableError: CuPy finds no libnccl; the text names the wheel to install.
    """

    def __init__(self) -> None:
        self._nccl = _nccl()
        self._cliques = _Cliques()
        self._aborting: list[Done] = []
        self._open = _Open()

    def all_reduce(
        self,
        buffers: Sequence[Buffer],
        op: str = "sum",
        *,
        sources: Sequence[Buffer] | None = None,
        queue: Queue = "compute",
    ) -> None:
        """See ``Collective.all_reduce``; complex products, maxima and minima there are none.

        Raises:
            CollectiveError: beside the others: NCCL has no such operation, or not for this dtype.
        """
        if op not in _OPS:
            raise CollectiveError(f"all_reduce: op={op!r} is not one of {list(_OPS)}")
        terms = self._check_sources("all_reduce", buffers, sources)
        count, kind = self._typed(buffers[0], op)
        number = getattr(self._nccl, _OPS[op])
        self._add(
            "all_reduce",
            "allReduce",
            buffers,
            [
                (term.address, buffer.address, count, kind, number)
                for term, buffer in zip(terms, buffers, strict=True)
            ],
            queue,
            terms,
        )

    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """See ``Collective.broadcast``."""
        self._check_broadcast(buffers, root)
        count, kind = self._as_bytes(buffers[0])
        self._add(
            "broadcast",
            "broadcast",
            buffers,
            [(buffer.address, buffer.address, count, kind, root) for buffer in buffers],
            queue,
        )

    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """See ``Collective.all_gather``."""
        self._check_gather(outputs, inputs)
        count, kind = self._as_bytes(inputs[0])
        addresses = [(of.address, to.address) for to, of in zip(outputs, inputs, strict=True)]
        self._add(
            "all_gather",
            "allGather",
            inputs,
            [(source, target, count, kind) for source, target in addresses],
            queue,
            outputs,
        )

    def connect(self, devices: Sequence[Device]) -> None:
        """See ``Collective.connect``.

        Raises:
            CollectiveError: NCCL cannot connect them, with its own text.
        """
        cliques = self._cliques
        with cliques.lock:
            self._make_clique(cliques, tuple(device.physical for device in devices))

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls inside are sent as one NCCL group when the outermost block ends; nests."""
        if self._open.calls is not None:
            yield
            return
        calls: list[_Call] = []
        self._open.calls = calls
        try:
            yield
        finally:
            self._open.calls = None
        self._send(calls)

    def close(self) -> None:
        """Ends the communicators, off the caller's thread: NCCL's abort can hang."""
        self.abort()
        self.ended(ABORT_SECONDS)

    def abort(self) -> None:
        """Ends the communicators; waits for nothing, not even for a lock.

        Whoever holds one may be the one that hangs. All are marked first, so that nobody uses
        one any more, and then aborted, which is what frees them; later calls make new ones.
        """
        cliques, self._cliques = self._cliques, _Cliques()
        cliques.aborted = True
        communicators = cliques.communicators()
        if not communicators:
            return

        def abort() -> None:
            while cliques.asked:
                time.sleep(_ASKED_SECONDS)
            for communicator in communicators:
                with suppress(self._nccl.NcclError):  # the others must be ended all the same
                    communicator.abort()

        self._aborting.append(beside(abort))

    def ended(self, seconds: float) -> bool:
        """Whether every ``abort`` is over, which is waited for so long."""
        end = time.monotonic() + seconds
        for done in list(self._aborting):
            done.wait(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
        self._aborting = [done for done in self._aborting if not done.is_set()]
        return not self._aborting

    def error(self) -> str | None:
        """What NCCL found wrong by itself since it was asked last; never waits."""
        cliques = self._cliques
        cliques.asked = True  # before the question whether they are aborted: no lock is needed
        try:
            for communicator in () if cliques.aborted else cliques.communicators():
                communicator.check_async_error()
        except self._nccl.NcclError as error:
            return f"NCCL: {error}"
        finally:
            cliques.asked = False
        return None

    # -- sending ----------------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        method: str,
        buffers: Sequence[Buffer],
        arguments: Sequence[tuple[int, ...]],
        queue: Queue,
        outputs: Sequence[Buffer] = (),
    ) -> None:
        call = _Call(name, method, tuple(buffers), tuple(arguments), queue, tuple(outputs))
        if self._open.calls is None:
            self._send([call])
        else:
            self._open.calls.append(call)

    def _send(self, calls: Sequence[_Call]) -> None:
        """One NCCL group. Without it a single process that drives many GPUs deadlocks."""
        if not calls:
            return
        kept = [buffer for call in calls for buffer in call.outputs]
        given = [(call.name, call.buffers, call.queue) for call in calls]
        self._give(partial(self._group, calls), given, kept)

    def _group(self, calls: Sequence[_Call]) -> None:
        cliques = self._cliques
        with cliques.lock:
            for call in calls:
                self._make_clique(cliques, call.physicals)
            cliques.check()
            self._run("groupStart", self._nccl.groupStart)
            try:
                for call in calls:
                    self._call(call, cliques.made[call.physicals])
            finally:
                self._run("groupEnd", self._nccl.groupEnd)
                for call in calls:  # only now, all of them
                    for buffer in call.buffers:
                        cuda_device(buffer)._given(call.queue)

    def _call(self, call: _Call, communicators: Sequence[Any]) -> None:
        for communicator, buffer, arguments in zip(
            communicators, call.buffers, call.arguments, strict=True
        ):
            device = cuda_device(buffer)
            with device.gpu:
                stream = device._ready(call.queue).ptr
                self._run(call.name, getattr(communicator, call.method), *arguments, stream)

    def _make_clique(self, cliques: _Cliques, physicals: tuple[int, ...]) -> None:
        cliques.check()
        if physicals not in cliques.made:
            make = self._nccl.NcclCommunicator.initAll
            cliques.made[physicals] = self._run("initAll", make, list(physicals))

    def _run(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nccl.NcclError as error:
            raise CollectiveError(f"NCCL {name}: {error}") from error

    # -- dtypes -----------------------------------------------------------------------------------

    def _typed(self, buffer: Buffer, op: str) -> tuple[int, int]:
        """Count and NCCL type of a buffer as its elements: complex as pairs, int as unsigned.

        Both are right for a sum alone.
        """
        cuda_device(buffer)
        element = element_of(buffer.dtype)
        name = _TYPES.get(element.name)
        if op != "sum" and element.viewed is not None:
            signed = buffer.dtype.kind == "i" and op != "prod"
            name = None if element.lanes > 1 else name
            if signed and name is not None:
                name = name.replace("UINT", "INT")
        if name is None:
            raise CollectiveError(f"NCCL has no {op} of {buffer.dtype}; use 'hierarchical_copy'")
        return buffer.size * element.lanes, getattr(self._nccl, name)

    def _as_bytes(self, buffer: Buffer) -> tuple[int, int]:
        """Count and NCCL type for what moves and is not added: any dtype will do."""
        cuda_device(buffer)
        return buffer.nbytes, self._nccl.NCCL_UINT8


class SharedNccl:
    """Makes the collective of one mesh when it is first asked for, and ends it with the mesh."""

    def __init__(self, fabric: Fabric) -> None:
        self._lock = threading.Lock()
        self._made: NcclCollective | None = None
        fabric.on_death.append(self._abort)
        fabric.library_error = self._error
        fabric.library_ended = self._ended

    def __call__(self) -> NcclCollective:
        """The collective.

        Raises:
            BackendUnavailableError: CuPy finds no libnccl.
        """
        with self._lock:
            if self._made is None:
                self._made = NcclCollective()
            return self._made

    def close(self) -> None:
        """See ``NcclCollective.close``."""
        if self._made is not None:
            self._made.close()

    def _abort(self) -> None:
        if self._made is not None:
            self._made.abort()

    def _error(self) -> str | None:
        return None if self._made is None else self._made.error()

    def _ended(self, seconds: float) -> bool:
        return self._made is None or self._made.ended(seconds)


def cuda_device(buffer: Buffer) -> CudaDevice:
    """The GPU device that ``buffer`` lies on."""
    if not isinstance(buffer.device, CudaDevice):
        raise DeviceMismatchError(f"{buffer} does not lie on a GPU")
    return buffer.device


def _nccl() -> Any:
    """CuPy's NCCL module, which is there, unavailable, where libnccl is not."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise BackendUnavailableError(
            "CuPy finds no libnccl, which two GPUs or more need for 'nccl' ('hierarchical_copy' "
            "does not): pip install nvidia-nccl-cu12 (or -cu13, as your CuPy)"
        )
    return nccl
