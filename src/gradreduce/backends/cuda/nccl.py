"""Collectives by NCCL: one process drives all its GPUs, alone or with other processes.

Uses ``cupy.cuda.nccl`` directly: ``cupyx.distributed`` supports neither bfloat16 nor a mean.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

from gradreduce.device import (
    ELEMENT_OF,
    Buffer,
    CollectiveCall,
    Command,
    DeferInterrupts,
    Device,
    Done,
    GroupedCollective,
    MeshState,
    ModuleLock,
    Parcel,
    call_under_lock,
    run_in_thread,
)
from gradreduce.errors import BackendUnavailableError, CollectiveError, listed

from .device import CudaDevice
from .libnccl import error_details, warn_of_several
from .streams import CurrentGpu

# element -> NCCL's number for it; NCCL has no 16-bit integers, which are gathered and then added
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
    "reduce_scatter": "reduceScatter",
}
_SUMS = ("all_reduce", "reduce", "reduce_scatter")
_PROCESSES = ()  # key of the communicator with other processes, in place of GPUs
ABORT_SECONDS = 10.0
# Seconds that an abort waits for a thread that is inside of NCCL.
INSIDE_SECONDS = 2.0
_ASKED_SECONDS = 1e-4
_LOOK_SECONDS = 20e-3
_IN_PROGRESS = 7  # ncclInProgress
_FIRST_TO_ABORT_IN_GROUPS = 22200  # NCCL 2.22.0, as get_version() spells it


class _Ready(NamedTuple):
    """One collective to send, and the arguments of each rank without the stream."""

    call: CollectiveCall
    arguments: tuple[tuple[int, ...], ...]


class _OwnRanks(NamedTuple):
    """The ranks of new communicators that belong to this process.

    Attributes:
        gpus: rank -> its GPU.
        size: the number of ranks in all processes.
        identity: the id by which they find each other; None if this process has all ranks.
    """

    gpus: dict[int, int]
    size: int
    identity: bytes | None = None


class _Cliques:
    """Communicators that are made and aborted together.

    Attributes:
        lock: held while one of them is used, so that all GPUs get the groups of all threads in the
            same order.
        made: maps GPUs, in the order of their ranks, to their communicators in this process.
        gpu: a GPU of this process that they use.
        aborted: whether they must not be used any more.
        asked: whether the watchdog is asking one of them for errors; it must not be freed
            meanwhile.
    """

    def __init__(self) -> None:
        self.asked = False
        self.lock = threading.Lock()
        self.made: dict[tuple[int, ...], list[Any]] = {}
        self.gpu = 0
        self.aborted = False

    def communicators(self) -> list[Any]:
        """Returns all communicators, without a lock."""
        return [each for clique in list(self.made.values()) for each in clique]

    def check(self) -> None:
        """Raises ``CollectiveError`` if the communicators were aborted meanwhile."""
        if self.aborted:
            raise CollectiveError(
                "NCCL: the communicators were aborted; call mesh.reset() to use the mesh again"
            )


class NcclCollective(GroupedCollective):
    """NCCL collectives; makes one communicator per physical device at the first call.

    A communicator that is made inside an NCCL group is not ready before the group ends, and a block
    that raises must not have sent anything. Call ``loaded`` before the first collective.
    """

    _nccl: Any

    def __init__(self, mesh_state: MeshState) -> None:
        super().__init__(mesh_state)
        self._cliques = _Cliques()
        self._pending: set[Done] = set()  # of threads that make communicators, or abort them
        self._first_ranks: Sequence[int] = ()  # of each process, if there are several
        mesh_state.on_failure.append(self.abort)
        mesh_state.library_error = self.error
        mesh_state.library_finished = self.wait_for_end

    def load(self) -> NcclCollective:
        """Imports the library; returns this object.

        Raises:
            BackendUnavailableError: CuPy finds no libnccl; the error names the wheel to install.
        """
        self._nccl = _nccl()
        warn_of_several()
        return self

    def _ready(self, call: CollectiveCall) -> _Ready:
        """Returns the arguments of a call.

        Raises:
            CollectiveError: NCCL does not sum this dtype.
        """
        # NCCL takes the count of the smaller of input and output.
        first = (call.outputs if call.name == "reduce_scatter" else call.inputs)[0]
        count, kind = first.nbytes, self._nccl.NCCL_UINT8  # bytes of any dtype
        last = [] if call.root is None else [call.root]
        if call.name in _SUMS:
            count, kind = self._count_and_type(first)
            last.insert(0, self._nccl.NCCL_SUM)
        return _Ready(
            call,
            tuple(
                (source.address, target.address, count, kind, *last)
                for source, target in zip(call.inputs, call.outputs, strict=True)
            ),
        )

    # -- several processes ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """NCCL's version as ``ncclGetVersion`` returns it, such as 22200."""
        return int(self._nccl.get_version())

    def make_id(self) -> bytes:
        """Returns an id by which the processes of a communicator find each other.

        Raises:
            CollectiveError: NCCL cannot make an id; the error contains NCCL's text.
        """
        return bytes(self._run("get_unique_id", self._nccl.get_unique_id))

    def join_processes(
        self,
        devices: Sequence[Device],
        identity: bytes,
        process: int,
        num_gpus: Sequence[int],
        seconds: float,
    ) -> None:
        """Makes the communicators of this process, one for each of its GPUs.

        The host waits until all processes have made theirs.

        Args:
            devices: a device on each GPU of this process, in the order of their ranks.
            identity: the id that one process made by ``make_id``.
            process: the number of this process.
            num_gpus: the number of GPUs of each process.
            seconds: how long to wait for the other processes.

        Raises:
            CollectiveError: NCCL cannot connect the processes, or not in time.
        """
        *self._first_ranks, size = accumulate(num_gpus, initial=0)
        physicals = [device.physical for device in devices]
        ranks = _OwnRanks(dict(enumerate(physicals, self._first_ranks[process])), size, identity)
        cliques = self._cliques
        with cliques.lock:
            self._make(cliques, _PROCESSES, ranks, devices[0], seconds)

    def exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], gpu: int, stream: int
    ) -> None:
        """See ``ProcessGroup.exchange_on_gpu``; call ``join_processes`` first.

        The first GPUs of the processes exchange.
        """
        home = (sends or receives)[0][1].device

        def work() -> None:
            cliques = self._cliques
            with cliques.lock:
                cliques.check()
                communicator, *_ = cliques.made[_PROCESSES]
                with self._in_group("exchange"):
                    for call, parcels in (("send", sends), ("recv", receives)):
                        method = getattr(communicator, call)
                        for process, buffer in parcels:
                            arguments = buffer.address, buffer.nbytes, self._nccl.NCCL_UINT8
                            self._run(call, method, *arguments, self._first_ranks[process], stream)

        self._alone([home], work)

    def prepare_calls(self, calls: Sequence[CollectiveCall]) -> Command:
        """Returns a command that queues calls over all processes as one group.

        Call ``join_processes`` first. Every process passes its buffers, one on each GPU.

        Raises:
            CollectiveError: see ``_ready``.
        """
        return partial(self._group, [self._ready(call) for call in calls], across=True)

    def connect(self, devices: Sequence[Device]) -> None:
        """See ``Collective.connect``.

        Raises:
            CollectiveError: NCCL cannot connect the GPUs; the error contains NCCL's text.
        """
        cliques = self._cliques
        with cliques.lock:
            self._clique(cliques, devices)

    def close(self) -> None:
        """Aborts the communicators in another thread, because NCCL's abort can hang."""
        self.abort()
        self.wait_for_end(ABORT_SECONDS)

    def abort(self) -> None:
        """Aborts the communicators without waiting, not even for a lock.

        The thread that holds a lock may be the one that hangs. All communicators are first marked,
        so that they are not used any more, and then aborted, which frees them. Later calls make new
        ones.
        """
        cliques, self._cliques = self._cliques, _Cliques()
        cliques.aborted = True
        if cliques.made:
            work = partial(self._abort_cliques, cliques)
            self._pending.add(run_in_thread(partial(_on_gpu, cliques.gpu, work)))

    def wait_for_end(self, seconds: float) -> bool:
        """Whether every abort and initialisation is done; waits for at most ``seconds``.

        That includes an initialisation whose caller has stopped waiting.
        """
        end = time.monotonic() + seconds
        for done in list(self._pending):
            if done.wait(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX))):
                self._pending.discard(done)
        return not self._pending

    def error(self) -> str | None:
        """Returns NCCL's asynchronous error since the last call; does not wait."""
        cliques = self._cliques
        cliques.asked = True  # set before `aborted` is read, so that no lock is needed
        try:
            for communicator in () if cliques.aborted else cliques.communicators():
                self._check_async(communicator)
        except CollectiveError as error:
            return str(error)
        finally:
            cliques.asked = False
        return None

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, calls: Sequence[CollectiveCall]) -> None:
        """Sends calls as one NCCL group; several GPUs of a process would deadlock without it."""
        ready = [self._ready(call) for call in calls]
        for call in calls:  # now: the order's lock must not be held meanwhile
            self.connect([buffer.device for buffer in call.inputs])
        self._submit(partial(self._group, ready), calls)

    def _group(self, calls: Sequence[_Ready], *, across: bool = False) -> None:
        """Sends a group of calls; ``across``: over all processes."""
        devices = [buffer.device for each in calls for buffer in each.call.inputs]
        self._alone(devices, partial(self._send_group, calls, across))

    def _alone(self, devices: Sequence[Device], call: Callable[[], None]) -> None:
        """Makes a call while no other mesh sends a group to these GPUs.

        Two groups must come to all GPUs in the same order, or each waits for the other.
        """
        by_gpu = {device.physical: device for device in devices}
        for gpu in sorted(by_gpu, reverse=True):
            call = partial(self._call_locked, by_gpu[gpu], call)
        call()

    def _call_locked(self, device: Device, call: Callable[[], None]) -> None:
        while not call_under_lock(_group_lock(device.physical).lock, _LOOK_SECONDS, call):
            self._mesh_state.check_usable(device)

    def _send_group(self, calls: Sequence[_Ready], across: bool) -> None:
        cliques, device = self._cliques, cast("CudaDevice", calls[0].call.inputs[0].device)
        with device.gpu, cliques.lock:  # NCCL returns to the current GPU, see `_on_gpu`
            used = [
                cliques.made[_PROCESSES]
                if across
                else self._clique(cliques, [buffer.device for buffer in each.call.inputs])
                for each in calls
            ]
            cliques.check()
            self._run("groupStart", self._nccl.groupStart)
            try:
                for each, communicators in zip(calls, used, strict=True):
                    self._enqueue(each, communicators)
            finally:
                self._run("groupEnd", self._nccl.groupEnd)

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
            # CuPy raises KeyError(result) for results that its table does not have yet.
            said = f"result {error}" if isinstance(error, KeyError) else error
            raise CollectiveError(f"NCCL {name}: {said}{error_details()}") from error

    @contextmanager
    def _in_group(self, name: str) -> Iterator[None]:
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
            ranks = _OwnRanks(dict(enumerate(physicals)), len(physicals))
            self._make(cliques, physicals, ranks, devices[0])
        return cliques.made[physicals]

    def _make(
        self,
        cliques: _Cliques,
        key: tuple[int, ...],
        ranks: _OwnRanks,
        device: Device,
        seconds: float = math.inf,
    ) -> None:
        """Makes the communicators of this process's ranks.

        NCCL's initialisation may hang and cannot be interrupted, so it runs in a new thread. The
        caller returns when its mesh fails, after the time limit, or by Ctrl-C.
        """
        end = time.monotonic() + seconds
        failed: list[Exception] = []
        cliques.gpu = device.physical
        with DeferInterrupts():  # Ctrl-C here would leave a thread that nobody waits for
            work = partial(self._initialise, cliques, key, ranks, failed)
            done = run_in_thread(partial(_on_gpu, device.physical, work))
            self._pending.add(done)
        while not done.wait(_LOOK_SECONDS):
            self._mesh_state.check_usable(device)
            if time.monotonic() >= end:
                cliques.aborted = True  # the thread checks it, if it ever returns
                self._pending.discard(done)
                raise CollectiveError(
                    f"NCCL has not connected {len(self._first_ranks)} processes within "
                    f"{seconds:.3g} s"
                )
        self._pending.discard(done)
        if failed:
            raise failed[0]
        cliques.check()

    def _initialise(
        self, cliques: _Cliques, key: tuple[int, ...], ranks: _OwnRanks, failed: list[Exception]
    ) -> None:
        """Makes communicators in one NCCL group, one for each rank of this process.

        CuPy's ``initAll`` would hold the GIL until it returns, even if it hangs. The communicators
        become visible only after the group has ended: an earlier abort would free memory that
        NCCL's own threads write (NVIDIA/nccl#1797).
        """
        name = f"initialisation of GPUs {listed(ranks.gpus.values(), 8)}"
        communicators: list[Any] = []
        try:
            identity = ranks.identity or self._run(name, self._nccl.get_unique_id)
            with self._in_group(name):
                for rank, gpu in ranks.gpus.items():
                    with CurrentGpu(gpu):
                        arguments = ranks.size, identity, rank
                        communicators.append(
                            self._run(name, self._nccl.NcclCommunicator, *arguments)
                        )
        except Exception as error:
            failed.append(error)
            # Otherwise CuPy would call destroy, which incomplete ones do not support.
            self._abort(communicators)
            return
        # After Ctrl-C two threads may make communicators of the same GPUs. An abort that began
        # before this line does not see these.
        is_second = cliques.made.setdefault(key, communicators) is not communicators
        if is_second or (cliques.aborted and cliques.made.pop(key, None) is not None):
            self._abort(communicators)

    def _check_async(self, communicator: Any) -> None:
        """Raises on an asynchronous NCCL error, except "in progress"."""
        try:
            self._run("asynchronous error", communicator.check_async_error)
        except CollectiveError as error:
            if getattr(error.__cause__, "args", ()) != (_IN_PROGRESS,):
                raise

    def _abort_cliques(self, cliques: _Cliques) -> None:
        # ncclCommAbort also frees the communicator, which a thread inside of groupEnd still uses:
        # wait for that thread (no other can enter). If it does not return in time it hangs, and
        # only the abort can end it.
        call_under_lock(cliques.lock, INSIDE_SECONDS, lambda: None)
        while cliques.asked:
            time.sleep(_ASKED_SECONDS)
        communicators = []
        while cliques.made:
            with suppress(KeyError):  # the thread that has just made them aborts them itself
                communicators += cliques.made.popitem()[1]
        self._abort(communicators)

    def _abort(self, communicators: Sequence[Any]) -> None:
        """Aborts communicators, all at once if this NCCL can.

        Aborted one by one, each waits for all work of its GPU, also for communicators that are not
        aborted yet (NVIDIA/nccl#1013).
        """
        at_once = self._nccl.get_version() >= _FIRST_TO_ABORT_IN_GROUPS
        with suppress(CollectiveError), self._in_group("abort") if at_once else nullcontext():
            for communicator in communicators:
                with suppress(self._nccl.NcclError):  # the others must be aborted too
                    communicator.abort()

    def _count_and_type(self, buffer: Buffer) -> tuple[int, int]:
        """Returns the count and the NCCL type of a buffer's elements, for a sum."""
        element = ELEMENT_OF[buffer.dtype]
        name = _TYPES.get(element.name)
        if name is None:
            raise CollectiveError(
                f"NCCL does not support sum of {buffer.dtype}; use 'hierarchical_copy'"
            )
        return buffer.size * element.lanes, getattr(self._nccl, name)


_group_locks: dict[int, ModuleLock] = {}


def _group_lock(gpu: int) -> ModuleLock:
    """Returns the lock that is held while a group is sent to a GPU, by any mesh."""
    return _group_locks.setdefault(gpu, ModuleLock())


def _on_gpu(gpu: int, work: Callable[[], object]) -> None:
    """Runs a thread's work on a GPU: NCCL sets others, and then returns to the current one."""
    with CurrentGpu(gpu):
        work()


def _nccl() -> Any:
    """Imports CuPy's NCCL module; raises if libnccl is missing.

    In that case CuPy warns. If a filter turns the warning into an error, the import raises that
    error.
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
