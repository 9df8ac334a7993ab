"""Collectives by NCCL: one process drives all its GPUs; and exchanges with other processes.

Drives ``cupy.cuda.nccl`` directly: ``cupyx.distributed`` knows no bfloat16 and no mean.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import cupy

from gradreduce.device import Buffer, Collective, DeferInterrupts, Device, Done, element_of
from gradreduce.device.collective import CollectiveCall
from gradreduce.device.mesh_state import MeshState
from gradreduce.device.process_group import Parcel
from gradreduce.device.waiting import acquired_in_time, run_in_thread
from gradreduce.errors import BackendUnavailableError, CollectiveError, listed

from .device import CudaDevice
from .libnccl import error_details, warn_of_several

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
# collective -> method of a communicator
_METHODS = {
    "all_reduce": "allReduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "allGather",
}
_PROCESSES = ()  # in place of GPUs: the communicator of this process among others
ABORT_SECONDS = 10.0
# How long an abort waits for a thread that is inside of NCCL.
INSIDE_SECONDS = 2.0
_ASKED_SECONDS = 1e-4
_LOOK_SECONDS = 20e-3
_IN_PROGRESS = 7  # ncclInProgress
_FIRST_TO_ABORT_IN_GROUPS = 22200  # NCCL 2.22.0, as get_version() spells it


class _Ready(NamedTuple):
    """One collective, not yet sent, and the arguments of each rank: all but the stream."""

    call: CollectiveCall
    arguments: tuple[tuple[int, ...], ...]


class _Ranks(NamedTuple):
    """The ranks of new communicators that belong to this process.

    Attributes:
        gpus: of each rank.
        size: the number of ranks in all processes.
        identity: by which they find each other; None if this process has all ranks.
    """

    gpus: dict[int, int]
    size: int
    identity: bytes | None = None


class _Open(threading.local):
    """The calls of a thread's open group; None outside of any."""

    calls: list[_Ready] | None = None


class _Cliques:
    """Communicators that are made and aborted together.

    Attributes:
        lock: held while one of them is used: every GPU sees the groups of all threads in one order.
        made: GPUs in the order of their ranks -> their communicators; those of this process.
        aborted: whether nobody may use them any more.
        asked: whether the watchdog is asking one for errors, which must not be freed meanwhile.
    """

    def __init__(self) -> None:
        self.asked = False
        self.lock = threading.Lock()
        self.made: dict[tuple[int, ...], list[Any]] = {}
        self.aborted = False

    def communicators(self) -> list[Any]:
        """Returns all of them, without a lock."""
        return [each for clique in list(self.made.values()) for each in clique]

    def check(self) -> None:
        """Raises ``CollectiveError`` if they were aborted while the caller waited for the lock."""
        if self.aborted:
            raise CollectiveError(
                "NCCL: the communicators were aborted; call mesh.reset() to use the mesh again"
            )


class NcclCollective(Collective):
    """NCCL collectives; makes one communicator per physical device at the first call.

    A group's calls are kept until it ends and sent together: communicators that are made inside
    an NCCL group are not ready before it ends, and a block that raises must have sent nothing.

    ``loaded`` comes before the first call.
    """

    _nccl: Any

    def __init__(self, mesh_state: MeshState) -> None:
        super().__init__(mesh_state)
        self._cliques = _Cliques()
        self._pending: set[Done] = set()  # threads that make communicators, or abort them
        self._open = _Open()
        mesh_state.on_failure.append(self.abort)
        mesh_state.library_error = self.error
        mesh_state.library_finished = self.ended

    def loaded(self) -> NcclCollective:
        """Imports the library; returns this.

        Raises:
            BackendUnavailableError: CuPy finds no libnccl; the text names the wheel to install.
        """
        self._nccl = _nccl()
        warn_of_several()
        return self

    def _call(self, call: CollectiveCall) -> None:
        """See ``Collective._call``.

        Raises:
            CollectiveError: NCCL does not sum this dtype.
        """
        first = call.inputs[0]
        count, kind = first.nbytes, self._nccl.NCCL_UINT8  # any dtype, as bytes
        last = [] if call.root is None else [call.root]
        if call.name in ("all_reduce", "reduce"):
            count, kind = self._typed(first)
            last.insert(0, self._nccl.NCCL_SUM)
        ready = _Ready(
            call,
            tuple(
                (source.address, target.address, count, kind, *last)
                for source, target in zip(call.inputs, call.outputs, strict=True)
            ),
        )
        if self._open.calls is None:
            self._send([ready])
        else:
            self._open.calls.append(ready)

    # -- one rank of each process -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """NCCL's version, as ``ncclGetVersion`` returns it."""
        return int(self._nccl.get_version())

    def make_id(self) -> bytes:
        """Returns an id, by which one process of each GPU finds the others.

        Raises:
            CollectiveError: NCCL cannot make one, with its own text.
        """
        return bytes(self._run("get_unique_id", self._nccl.get_unique_id))

    def join_processes(
        self, device: Device, identity: bytes, rank: int, size: int, seconds: float
    ) -> None:
        """Makes this process's communicator, when all processes do; the host waits.

        Args:
            device: whose GPU is this process's.
            identity: of ``make_id`` in one of the processes.
            rank: of this process.
            size: the number of processes.
            seconds: for the others.

        Raises:
            CollectiveError: NCCL cannot connect them, or not in time.
        """
        cliques = self._cliques
        with cliques.lock:
            ranks = _Ranks({rank: device.physical}, size, identity)
            self._make(cliques, _PROCESSES, ranks, device, seconds)

    def exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], gpu: int, stream: int
    ) -> None:
        """See ``ProcessGroup.exchange_on_gpu``; ``join_processes`` comes before it."""
        cliques = self._cliques
        with cliques.lock:
            cliques.check()
            (communicator,) = cliques.made[_PROCESSES]
            with self._grouped("exchange"):
                for call, parcels in (("send", sends), ("recv", receives)):
                    method = getattr(communicator, call)
                    for rank, buffer in parcels:
                        arguments = buffer.address, buffer.nbytes, self._nccl.NCCL_UINT8
                        self._run(call, method, *arguments, rank, stream)

    def connect(self, devices: Sequence[Device]) -> None:
        """See ``Collective.connect``.

        Raises:
            CollectiveError: NCCL cannot connect them, with its own text.
        """
        cliques = self._cliques
        with cliques.lock:
            self._clique(cliques, devices)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context manager: sends calls inside as one NCCL group; may be nested."""
        if self._open.calls is not None:
            yield
            return
        calls: list[_Ready] = []
        self._open.calls = calls
        try:
            yield
        finally:
            self._open.calls = None
        self._send(calls)

    def close(self) -> None:
        """Aborts the communicators in another thread, because NCCL's abort can hang."""
        self.abort()
        self.ended(ABORT_SECONDS)

    def abort(self) -> None:
        """Aborts the communicators; waits for nothing, not even for a lock.

        Whoever holds one may be the one that hangs. All are marked first, so that nobody uses
        one any more, and then aborted, which is what frees them; later calls make new ones.
        """
        cliques, self._cliques = self._cliques, _Cliques()
        cliques.aborted = True
        if cliques.made:
            self._pending.add(run_in_thread(partial(self._abort_cliques, cliques)))

    def ended(self, seconds: float) -> bool:
        """Whether every abort and initialisation is done; waits for at most ``seconds``.

        An initialisation that its caller has left counts.
        """
        end = time.monotonic() + seconds
        for done in list(self._pending):
            if done.wait(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX))):
                self._pending.discard(done)
        return not self._pending

    def error(self) -> str | None:
        """Returns NCCL's asynchronous error since the last call; does not wait."""
        cliques = self._cliques
        cliques.asked = True  # before the question whether they are aborted: no lock is needed
        try:
            for communicator in () if cliques.aborted else cliques.communicators():
                self._check_async(communicator)
        except CollectiveError as error:
            return str(error)
        finally:
            cliques.asked = False
        return None

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, calls: Sequence[_Ready]) -> None:
        """Sends calls as one NCCL group; without it several GPUs of a process deadlock."""
        if calls:
            self._submit(partial(self._group, calls), [each.call for each in calls])

    def _group(self, calls: Sequence[_Ready]) -> None:
        cliques = self._cliques
        with cliques.lock:
            used = [
                self._clique(cliques, [buffer.device for buffer in each.call.inputs])
                for each in calls
            ]
            cliques.check()
            self._run("groupStart", self._nccl.groupStart)
            try:
                for each, communicators in zip(calls, used, strict=True):
                    self._enqueue(each, communicators)
            finally:
                try:
                    self._run("groupEnd", self._nccl.groupEnd)
                finally:  # one that fails may have launched on some of the GPUs
                    for call, _ in calls:  # only now, all of them
                        for buffer in call.inputs:
                            cast("CudaDevice", buffer.device)._submitted(call.queue)

    def _enqueue(self, ready: _Ready, communicators: Sequence[Any]) -> None:
        call = ready.call
        for communicator, buffer, arguments in zip(
            communicators, call.inputs, ready.arguments, strict=True
        ):
            device = cast("CudaDevice", buffer.device)
            with device.gpu:
                stream = device._stream(call.queue).ptr
                self._run(call.name, getattr(communicator, _METHODS[call.name]), *arguments, stream)

    def _run(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (self._nccl.NcclError, KeyError) as error:
            # CuPy raises KeyError(result) for results that are newer than its table of them.
            said = f"result {error}" if isinstance(error, KeyError) else error
            raise CollectiveError(f"NCCL {name}: {said}{error_details()}") from error

    @contextmanager
    def _grouped(self, name: str) -> Iterator[None]:
        self._run(name, self._nccl.groupStart)
        try:
            yield
        finally:
            self._run(name, self._nccl.groupEnd)

    # -- communicators ----------------------------------------------------------------------------

    def _clique(self, cliques: _Cliques, devices: Sequence[Device]) -> Sequence[Any]:
        """Returns the communicators of these devices' GPUs; makes them at the first call."""
        cliques.check()
        physicals = tuple(device.physical for device in devices)
        if physicals not in cliques.made:
            ranks = _Ranks(dict(enumerate(physicals)), len(physicals))
            self._make(cliques, physicals, ranks, devices[0])
        return cliques.made[physicals]

    def _make(
        self,
        cliques: _Cliques,
        key: tuple[int, ...],
        ranks: _Ranks,
        device: Device,
        seconds: float = math.inf,
    ) -> None:
        """Makes the communicators of this process's ranks.

        NCCL's initialisation may hang and cannot be interrupted, so a thread of its own is in it:
        the caller comes back when its mesh fails, when the time is over, or by Ctrl-C.
        """
        end = time.monotonic() + seconds
        failed: list[Exception] = []
        with DeferInterrupts():  # or nobody waits for a thread that has begun
            done = run_in_thread(partial(self._initialise, cliques, key, ranks, failed))
            self._pending.add(done)
        while not done.wait(_LOOK_SECONDS):
            self._mesh_state.check_usable(device)
            if time.monotonic() >= end:
                cliques.aborted = True  # the thread sees it, if it ever comes back
                self._pending.discard(done)
                raise CollectiveError(
                    f"NCCL has not connected {ranks.size} processes within {seconds:.3g} s"
                )
        self._pending.discard(done)
        if failed:
            raise failed[0]
        cliques.check()

    def _initialise(
        self, cliques: _Cliques, key: tuple[int, ...], ranks: _Ranks, failed: list[Exception]
    ) -> None:
        """Makes communicators in one NCCL group, one for each rank of this process.

        CuPy's ``initAll`` would hold the interpreter lock until it is over, hung or not. Nobody
        else sees them before the group has ended: to abort them earlier would free what NCCL's
        own threads write (NVIDIA/nccl#1797).
        """
        name = f"initialisation of GPUs {listed(ranks.gpus.values(), 8)}"
        made: list[Any] = []
        try:
            identity = ranks.identity or self._run(name, self._nccl.get_unique_id)
            with self._grouped(name):
                for rank, gpu in ranks.gpus.items():
                    with cupy.cuda.Device(gpu):
                        arguments = ranks.size, identity, rank
                        made.append(self._run(name, self._nccl.NcclCommunicator, *arguments))
        except Exception as error:
            failed.append(error)
            self._abort(made)  # else CuPy would destroy them, which is for whole ones
            return
        # After Ctrl-C two threads may make communicators of the same GPUs. An abort that began
        # before this line has not found these.
        is_second = cliques.made.setdefault(key, made) is not made
        if is_second or (cliques.aborted and cliques.made.pop(key, None) is not None):
            self._abort(made)

    def _check_async(self, communicator: Any) -> None:
        """Raises on an asynchronous NCCL error, except "in progress"."""
        try:
            self._run("asynchronous error", communicator.check_async_error)
        except CollectiveError as error:
            if getattr(error.__cause__, "args", ()) != (_IN_PROGRESS,):
                raise

    def _abort_cliques(self, cliques: _Cliques) -> None:
        # ncclCommAbort also frees the communicator, which a thread inside of groupEnd still uses:
        # wait for it (no other comes in). If it does not come out in time it hangs, and only the
        # abort can release it.
        acquired_in_time(cliques.lock, INSIDE_SECONDS, lambda: None)
        while cliques.asked:
            time.sleep(_ASKED_SECONDS)
        communicators = []
        while cliques.made:
            with suppress(KeyError):  # the thread that made the last ones has taken them
                communicators += cliques.made.popitem()[1]
        self._abort(communicators)

    def _abort(self, communicators: Sequence[Any]) -> None:
        """Aborts communicators, all at once where NCCL can.

        One by one, each waits for all work of its GPU, also of those that are not aborted yet
        (NVIDIA/nccl#1013).
        """
        at_once = self._nccl.get_version() >= _FIRST_TO_ABORT_IN_GROUPS
        with suppress(CollectiveError), self._grouped("abort") if at_once else nullcontext():
            for communicator in communicators:
                with suppress(self._nccl.NcclError):  # the others must be ended all the same
                    communicator.abort()

    def _typed(self, buffer: Buffer) -> tuple[int, int]:
        """Returns count and NCCL type of a buffer's elements, for a sum."""
        element = element_of(buffer.dtype)
        name = _TYPES.get(element.name)
        if name is None:
            raise CollectiveError(
                f"NCCL does not support sum of {buffer.dtype}; use 'hierarchical_copy'"
            )
        return buffer.size * element.lanes, getattr(self._nccl, name)


def _nccl() -> Any:
    """Imports CuPy's NCCL module; raises where libnccl is missing.

    CuPy then warns; where a filter makes that an error it is what the import raises.
    """
    try:
        from cupy.cuda import nccl

        available, cause = nccl.available, None
    except Warning as warning:
        available, cause = False, warning
    if not available:
        raise BackendUnavailableError(
            "CuPy finds no libnccl, which 'nccl' needs for two or more GPUs ('hierarchical_copy' "
            "does not): pip install nvidia-nccl-cu12 (or -cu13, as for your CuPy)"
        ) from cause
    return nccl
