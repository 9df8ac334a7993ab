"""``cupy.cuda.nccl``: communicators, and the rules of their groups.

Several processes are threads, each with its ranks: they meet by the id.
Adds in the accumulate type in the order of the ranks and rounds once, like the simulated
collective; NCCL promises no order. A call that would hang or mix up data is a fault.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from .collectives import DTYPES, REDUCTIONS, Request, Round, run
from .machine import READ, WRITE, Call, Machine, Queue, current
from .surface import check_addresses, getDevice, queue_of, setDevice

CONSTANTS = {
    "NCCL_SUM": 0, "NCCL_UINT8": 1, "NCCL_UINT32": 3, "NCCL_UINT64": 5, "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7, "NCCL_FLOAT64": 8, "NCCL_BFLOAT16": 9,
}  # fmt: skip
globals().update(CONSTANTS)
available = True
UNIQUE_ID_BYTES = 128
# From NCCL 2.30 on it lets two ranks share a GPU.
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"

# Like CuPy 14.2, which has no names for ncclInProgress (7) and later ones.
_RESULTS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_INVALID_ARGUMENT, _INVALID_USAGE = 4, 5
_HANG_SECONDS = 20.0  # so that a broken test ends
_identities = count(1)


@dataclass
class Library:
    """The settings of libnccl that a test may change.

    Attributes:
        version: the result of ``get_version``.
        bootstrap: initialisations wait for this event, if there is one.
        begun: set when one waits.
        patience: seconds that ranks wait for other processes; 0 without other processes.
        init_result: the result of initialisations.
        made: all communicators of this machine.
        waiting: ranks that have come, by number of ranks and id.
        inside: the threads that have an open group for a GPU.
    """

    version: int = 23203
    bootstrap: threading.Event | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    patience: float = 0.0
    init_result: int = 0
    made: list[NcclCommunicator] = field(default_factory=list)
    waiting: dict[tuple, list[NcclCommunicator]] = field(default_factory=dict)
    inside: dict[int, set[int]] = field(default_factory=dict)


library = Library()


class NcclError(RuntimeError):
    """Like CuPy's: ``NCCL_ERROR_…: text``; ``KeyError`` for an unknown result."""

    def __init__(self, status):
        super().__init__(_RESULTS[status])
        self.status = status


@dataclass
class _Part:
    """One side of a message: a rank's send or receive."""

    comm: NcclCommunicator
    sends: bool
    address: int
    nbytes: int
    peer: int
    queue: Queue


class _Message:
    """Bytes that one rank sends to another; either may come first.

    Attributes:
        sent: a call that passes when the sender's stream runs it.
        sides: bytes named by the sender (True) and by the receiver (False).
        data: the bytes that the sender's stream has read.
    """

    def __init__(self, machine: Machine) -> None:
        queue = Queue(-1, -1, "another process")
        self.sent = Call(queue, 0, machine.number, {}, "a send")
        queue.waiting.append(self.sent)
        machine.stuck.add(queue)  # before the other process names its side
        self.sides: dict[bool, int] = {}
        self.data: bytes | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.failed = 0  # result of the first call inside that failed
        self.inits: list[NcclCommunicator] = []
        self.asked: list[Request] = []
        self.parts: list[_Part] = []
        self.aborted: list[NcclCommunicator] = []


_local = _Local()


def _refused() -> NcclError:
    """Raises for wrong arguments; inside a group its other calls are dropped."""
    if _local.depth:
        _local.failed = _INVALID_ARGUMENT
    return NcclError(_INVALID_ARGUMENT)


def forget() -> None:
    """For a new machine: no group is open."""
    _local.__init__()
    library.__init__()


def open_group() -> str | None:
    """The fault at a host wait: a group that was not ended."""
    return "an NCCL group is open" if _local.depth else None


def get_version():
    return library.version


def get_unique_id():
    return next(_identities).to_bytes(UNIQUE_ID_BYTES, "little")


def groupStart():
    machine = current()
    with machine.lock:
        if open_group not in machine.at_sync:
            machine.at_sync.append(open_group)
    _local.depth += 1


def groupEnd():
    if not _local.depth:
        raise NcclError(_INVALID_USAGE)
    _local.depth -= 1
    if _local.depth:
        return
    setDevice(getDevice())  # NCCL's threads and its abort set others
    failed, inits, asked, aborted = _local.failed, _local.inits, _local.asked, _local.aborted
    parts = _local.parts
    _local.__init__()
    _leave_group([one.comm._gpu for one in (*asked, *parts)])
    if failed:
        raise NcclError(failed)
    if aborted:
        _release_waiting(aborted)
    if inits:
        _bootstrap(inits)
    if asked:
        with current().entered() as machine:
            run(machine, asked)
    if parts:
        _connect(parts)
        with current().entered() as machine:
            _exchange(machine, parts)


class NcclCommunicator:
    """One rank of a clique."""

    def __init__(self, ndev, commId, rank, config=None):
        if len(commId) != UNIQUE_ID_BYTES or not 0 <= rank < ndev:
            raise _refused()
        with current().entered() as machine:
            self._set(machine, rank, getDevice())
        self._wanted = ndev, commId
        if _local.depth:
            _local.inits.append(self)
        else:
            _bootstrap([self])

    @staticmethod
    def initAll(devices):
        if not isinstance(devices, (int, list)):
            raise ValueError('"devices" should be an int or a list of int.')
        ordinals = list(range(devices)) if isinstance(devices, int) else list(devices)
        with current().entered() as machine:
            if _local.depth:
                machine.fail("NCCL: initAll inside a group: its communicators are not ready in it")
            if library.bootstrap is not None:
                machine.fail("NCCL: initAll hangs, and holds the interpreter lock all the while")
            ranks = []
            for rank, gpu in enumerate(ordinals):
                made = NcclCommunicator.__new__(NcclCommunicator)
                made._set(machine, rank, gpu)
                ranks.append(made)
            _joined(machine, ranks)
            return ranks

    def _set(self, machine: Machine, rank: int, gpu: int) -> None:
        self._machine, self._rank, self._gpu = machine, rank, gpu
        self._clique: list[NcclCommunicator] = []  # empty before it is ready
        self._ended = ""
        self.refused = 0  # result of its initialisation
        self.async_result = 0  # an asynchronous error
        self._held: list[Call] = []  # waits of its collectives, which an abort ends
        self._connected: set[int] = set()  # ranks with which it has exchanged
        self._messages: dict[int, list[_Message]] = {}  # to each rank, named by one side
        self._process = threading.get_ident()  # initialised with the other ranks of its process
        self.rounds: dict[int, Round] = {}  # of its clique, by number, if it is the first rank
        self.num_rounds = 0
        library.made.append(self)
        machine.at_end.append(self._unaborted)

    def size(self):
        return len(self._clique)

    def check_async_error(self):
        with self._machine.entered(needs_context=False):
            self._check_usable("check_async_error")
            if self.async_result:
                raise NcclError(self.async_result)

    def abort(self):
        """Drops collectives that have not run, and ends the waits for them."""
        self._end("abort")
        setDevice(getDevice())
        if not _local.depth:
            _release_waiting([self])
        elif library.version >= 22200:
            _local.aborted.append(self)
        else:
            self._machine.faults.append("NCCL: an abort inside of a group, before NCCL 2.22")

    def _unaborted(self) -> str | None:
        if not self._clique and not self._ended:
            return "NCCL: a communicator that was not made whole is not aborted"
        ends = {comm._ended for comm in self._clique}
        return f"NCCL: of one clique some are aborted only: {ends}" if len(ends) > 1 else None

    def destroy(self):
        self._end("destroy")

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._request("allReduce", (sendbuf, recvbuf), count, datatype, op, stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._request("reduce", (sendbuf, recvbuf), count, datatype, op, stream, root)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._request("broadcast", (sendbuff, recvbuff), count, datatype, root, stream)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._request("allGather", (sendbuf, recvbuf), count, datatype, 0, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._request("reduceScatter", (sendbuf, recvbuf), recvcount, datatype, op, stream)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._pair("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._pair("recv", recvbuf, count, datatype, peer, stream)

    def _pair(
        self, name: str, address: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        check_addresses(address, stream)
        with current().entered() as machine:
            self._check_usable(name)
            queue = self._checked_queue(machine, name, stream)
            if datatype not in DTYPES or not 0 <= peer < self.size():
                raise _refused()
            if not _local.depth:
                machine.fail(f"NCCL: {name} outside a group waits for the other process's")
            nbytes = count * np.dtype(DTYPES[datatype]).itemsize
            self._enter_group()
            _local.parts.append(_Part(self, name == "send", address, nbytes, peer, queue))

    def _checked_queue(self, machine: Machine, name: str, stream: int) -> Queue:
        queue = queue_of(machine, stream)
        if queue.gpu != self._gpu:
            machine.fail(f"NCCL: {name} of GPU {self._gpu} on {queue} of GPU {queue.gpu}")
        if getDevice() != self._gpu:
            machine.fail(f"wrong device: NCCL {name} of GPU {self._gpu} on {getDevice()}")
        return queue

    def _enter_group(self) -> None:
        library.inside.setdefault(self._gpu, set()).add(threading.get_ident())

    def own_ranks(self) -> list[NcclCommunicator]:
        """The ranks of its process."""
        return [comm for comm in self._clique if comm._process == self._process]

    def _end(self, how: str) -> None:
        with self._machine.lock:
            if self._ended and not self._machine.retired:
                self._machine.fail(f"NCCL: {how} of a communicator after {self._ended}")
            self._ended = how

    def _check_usable(self, name: str) -> None:
        if self._ended or not self._clique:
            when = f"after {self._ended}" if self._ended else "before the end of its group"
            self._machine.fail(f"NCCL: {name} on a communicator {when}")

    def _request(
        self,
        name: str,
        buffers: tuple,
        count: int,
        datatype: int,
        extra: int,
        stream: int,
        root: int = 0,
    ) -> None:
        check_addresses(*buffers, stream)
        with self._machine.entered() as machine:
            self._check_usable(name)
            queue = self._checked_queue(machine, name, stream)
            if datatype not in DTYPES or (name in REDUCTIONS and extra != CONSTANTS["NCCL_SUM"]):
                raise _refused()
            asked = Request(self, name, *buffers, count, datatype, extra, queue, root)
            if _local.depth:
                _local.asked.append(asked)
                self._enter_group()
            elif len(self.own_ranks()) > 1:  # PyTorch's has one rank in each process
                machine.fail(f"NCCL: {name} of one of {self.size()} ranks outside a group hangs")
            else:
                run(machine, [asked])


def _bootstrap(inits: list[NcclCommunicator]) -> None:
    """The ranks of one process find each other; CuPy does not hold the interpreter lock here."""
    library.begun.set()
    if library.bootstrap is not None:
        library.bootstrap.wait(_HANG_SECONDS)
    by_identity: dict[tuple, list[NcclCommunicator]] = {}
    for comm in inits:
        by_identity.setdefault(comm._wanted, []).append(comm)
    for wanted, ranks in by_identity.items():
        _wait_for_ranks(wanted, ranks)


def _wait_for_ranks(wanted: tuple, ranks: list[NcclCommunicator]) -> None:
    """The last process connects the ranks of all; the others wait for it."""
    machine, num_ranks = ranks[0]._machine, wanted[0]
    with machine.lock:
        come = library.waiting.setdefault(wanted, [])
        come += ranks
        come.sort(key=lambda comm: comm._rank)
        if len(come) == num_ranks:
            with machine.entered():
                if [comm._rank for comm in come] != list(range(num_ranks)):
                    machine.fail(f"NCCL: ranks {[comm._rank for comm in come]}")
                _joined(machine, come)
    if not until(lambda: bool(ranks[0]._clique) or ranks[0].refused):
        machine.fail(f"would hang: {len(come)} of {num_ranks} ranks are initialised")
    if ranks[0].refused:
        raise NcclError(ranks[0].refused)


def until(done: Callable[[], object]) -> bool:
    """Waits for other processes."""
    end = time.monotonic() + library.patience
    while not done() and time.monotonic() < end:
        threading.Event().wait(1e-3)
    return bool(done())


def _joined(machine: Machine, ranks: list[NcclCommunicator]) -> None:
    shared = len({comm._gpu for comm in ranks}) != len(ranks) and os.environ.get(SHARED_GPU) != "1"
    refused = _INVALID_USAGE if shared or not ranks else library.init_result
    for comm in ranks:
        comm.refused = refused
    if refused:
        raise NcclError(refused)
    machine.count("init")
    for comm in ranks:
        comm._clique = ranks


def _release_waiting(aborted: list[NcclCommunicator]) -> None:
    """Their kernels end; then each waits for its GPU, where another kernel may hang.

    A fault is not raised here: an abort is called by a thread that nobody watches.
    """
    machine = aborted[0]._machine
    with machine.lock:
        for comm in aborted:
            for waiting in comm._held:
                waiting.blocker = None
        for comm in library.made if machine.stuck else ():
            same_gpu = any(comm._gpu == each._gpu for each in aborted)
            hangs = any(each.blocker is not None and not each.passed for each in comm._held)
            if same_gpu and hangs and comm._clique is not aborted[-1]._clique:
                machine.faults.append("would hang: an abort waits for another clique's collective")


def _connect(parts: list[_Part]) -> None:
    """Two processes connect at their first exchange; the host waits for it in ``groupEnd``."""
    for part in parts:
        part.comm._connected.add(part.peer)

    def is_over() -> bool:
        comm = parts[0].comm
        return bool(comm._ended) or all(
            comm._rank in comm._clique[part.peer]._connected for part in parts
        )

    if not until(is_over):
        parts[0].comm._machine.faults.append("would hang: a process does not connect")
    if parts[0].comm._ended:
        raise NcclError(_INVALID_USAGE)


def _exchange(machine: Machine, parts: list[_Part]) -> None:
    """A send reads its data when the stream runs it; the receive waits for that."""
    comm, queue = parts[0].comm, parts[0].queue
    messages = [_message(machine, part) for part in parts]
    sends = [each for each in zip(parts, messages, strict=True) if each[0].sends]

    def read(call: Call) -> None:
        for part, message in sends:
            machine.check(call, [(part.address, part.address + part.nbytes, READ)])
            message.data = ctypes.string_at(part.address, part.nbytes)
            message.sent.passed = True

    begin = machine.submit(queue, "nccl sends", read)
    for part, message in zip(parts, messages, strict=True):
        machine.count("send" if part.sends else "recv")
        if part.sends:
            message.sent.blocker = begin
            machine.stuck.discard(message.sent.queue)
            machine.counts["bytes sent"] = machine.counts.get("bytes sent", 0) + part.nbytes
            continue
        waiting = machine.wait(queue, message.sent)
        if waiting is not None:
            comm._held.append(waiting)
        machine.submit(queue, "nccl receives", partial(_write, machine, part, message))


def _message(machine: Machine, part: _Part) -> _Message:
    """The first message between the two ranks of which this side has not been named."""
    other = part.comm._clique[part.peer]
    sender, receiver = (part.comm, other) if part.sends else (other, part.comm)
    queued = sender._messages.setdefault(receiver._rank, [])
    message = next((each for each in queued if part.sends not in each.sides), None)
    if message is None:
        queued.append(message := _Message(machine))
    message.sides[part.sends] = part.nbytes
    if len(message.sides) == 2:
        queued.remove(message)
        if len(set(message.sides.values())) != 1:
            machine.fail(
                f"NCCL: rank {sender._rank} sends {message.sides[True]} bytes, of which rank "
                f"{receiver._rank} receives {message.sides[False]}"
            )
    return message


def _write(machine: Machine, part: _Part, message: _Message, call: Call) -> None:
    if part.comm._ended != "abort" and message.data is not None:
        machine.check(call, [(part.address, part.address + part.nbytes, WRITE)])
        ctypes.memmove(part.address, message.data, part.nbytes)


def _leave_group(gpus: list[int]) -> None:
    """Two groups in two threads may come to the GPUs of a process in different orders."""
    machine, own = current(), threading.get_ident()
    with machine.lock:
        for gpu in set(gpus):
            threads = library.inside.get(gpu, set())
            if threads - {own}:
                machine.faults.append(f"NCCL: two threads have a group for GPU {gpu}")
            threads.discard(own)
