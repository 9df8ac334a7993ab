"""Processes of a ``torch.distributed`` process group.

Imported only if such a group is used: importing ``torch.distributed`` takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from gradreduce.device import CollectiveCall, Message, Parcel, inside_library
from gradreduce.errors import BackendUnavailableError, CollectiveError, brief, listed

from .description import digest_of
from .opening_order import Opening
from .process_group import ProcessError, ProcessGroup
from .torch_on_gpu import on_stream, start_collective, tensor_of

# The first tag: far from the tags of user code.
_FIRST_TAG = 1 << 28
# Added to a tag this makes a tag that no exchange has, on the same connection (gloo chooses the
# connection by the remainder of the tag).
UNUSED_TAG = 60 << 23
_LOOK_SECONDS = 0.05  # between two checks for notices of processes that an exchange waits for
_OPEN_SECONDS = 0.01
_PAUSE_SECONDS = 5e-4
_STORE_SECONDS = 1.0  # limit for an answer of the store, whose process may be stopped
_NOTICE_SECONDS = 1.0  # from the end of a connection to the notice of its process, if it is alive
_MOMENT = timedelta(milliseconds=1)


class TorchGroup(ProcessGroup):
    """Sends and receives through a process group; posts notices in its store.

    Args:
        group: a process group of which this process is a member.
        timeout: see ``ProcessGroup``.
        owned: whether the group is destroyed when the last mesh over it closes.
    """

    def __init__(self, group: Any, timeout: float, *, owned: bool = False) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={brief(group)} is not a torch.distributed group of this process"
            )
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
        backends = dict(each.split(":") for each in config.split(","))
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.sends_host_memory = "cpu" in backends
        self.gpu_library = "group" if backends.get("cuda") == "nccl" else "host"
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self._group = group
        store = group.get_group_store()
        with Opening(group, self._global_ranks, self.rank) as opening:
            name = _new_name(store, self.rank, self.size, timeout, opening.check)
        self._store = dist.PrefixStore(name, store)
        self._number = int(name, 16)
        self._kept_notice: tuple[str, str] | None = None
        self._idle: list[_CallingThread] = []
        self._stuck: _CallingThread | None = None  # its call of the store has not returned
        self._store_error: RuntimeError | None = None  # of a call after which the store is gone
        self._last_tag = _FIRST_TAG + self._number % _FIRST_TAG  # of the bytes of ``leave``
        # From each other process: None when its byte has come, or the error of the connection.
        self._bytes: dict[int, SimpleQueue[RuntimeError | None]] = {}
        self._memory = np.zeros(self.size, np.uint8)  # a byte of each process
        self._leaving: _CallingThread | None = None  # waits for the bytes
        if owned or any(each._group is group for each in _owners):
            _owners.append(self)

    @inside_library()
    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """See ``ProcessGroup.exchange``."""
        tag = _FIRST_TAG + (tag + self._number) % _FIRST_TAG
        end = time.monotonic() + seconds
        # The group's own methods: isend and irecv would check the arguments again.
        calls = [(self._group.recv, *message) for message in receives]
        calls += [(self._group.send, *message) for message in sends]
        ranks = [rank for _, rank, _ in calls]
        tensors = [_as_tensor(array) for _, _, array in calls]
        works: list[Any] = []
        done: list[Any] = []
        thread = self._thread()
        try:
            for (call, rank, _), tensor in zip(calls, tensors, strict=True):
                works.append(call([tensor], rank, tag))
            thread.start(partial(_wait, works, end, done))
            self.post_kept()  # while the messages travel
            while not thread.has_ended(_LOOK_SECONDS):
                for rank in dict.fromkeys(ranks[len(done) :]):
                    if self.will_not_come(rank):
                        raise ProcessError(rank, "has gone, or makes another call")
        except BaseException as error:
            self._abort(tag, ranks)
            thread.stop()
            if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
                raise
            rank = ranks[len(done if len(works) == len(ranks) else works)]
            late = time.monotonic() >= end - 2e-3  # gloo rounds down to milliseconds
            gone = f"has ended, or its connection has broken ({without_advice(error)})"
            alive = f"did not answer within {seconds:.3g} s, but is not known to have ended"
            why = alive if late else gone
            raise ProcessError(rank, why) from error
        self._idle.append(thread)

    def _abort(self, tag: int, ranks: Sequence[int]) -> None:
        """Ends all sends and receives, so that they do not write memory later.

        A late receive makes gloo close the connections to all processes, which ends all waits.
        """
        for rank in dict.fromkeys(ranks):
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], rank, tag + UNUSED_TAG).wait(_MOMENT)

    def exchange_on_gpu(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], gpu: int, stream: int
    ) -> None:
        """See ``ProcessGroup.exchange_on_gpu``; one batch on the group's own communicator.

        Our stream is made PyTorch's current one, for which its NCCL stream waits. ``wait`` without
        a timeout makes the current stream wait for NCCL's, not the host.
        """

        def tensors_of(parcels: Sequence[Parcel]) -> list[tuple[int, torch.Tensor]]:
            return [(rank, tensor_of(buffer, gpu)) for rank, buffer in parcels]

        with on_stream(gpu, stream):
            for work in self.start_batch(tensors_of(sends), tensors_of(receives)):
                work.wait()

    def queue_collectives(self, calls: Sequence[CollectiveCall], gpu: int, stream: int) -> None:
        """See ``ProcessGroup.queue_collectives``; see also ``exchange_on_gpu``."""
        arguments = self._group, self._global_ranks, gpu
        with on_stream(gpu, stream):
            for work in [start_collective(call, *arguments) for call in calls]:
                work.wait()

    def start_batch(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[Any]:
        """Starts sends and receives of tensors, by rank in this group; returns their works."""
        batch = [
            dist.P2POp(call, tensor, self._global_ranks[rank], self._group)
            for call, messages in ((dist.irecv, receives), (dist.isend, sends))
            for rank, tensor in messages
        ]
        return list(dist.batch_isend_irecv(batch))

    def post_soon(self, key: str, text: str) -> None:
        """See ``ProcessGroup.post_soon``; takes a tenth of the time of a small exchange."""
        self.post_kept()
        self._kept_notice = (key, text)

    def post_kept(self) -> None:
        """See ``ProcessGroup.post_kept``."""
        if self._kept_notice is not None:
            notice, self._kept_notice = self._kept_notice, None
            self.post(*notice)

    def post(self, key: str, text: str) -> None:
        """See ``ProcessGroup.post``."""
        self.post_kept()
        if not self._store_answers(0.0):  # a call could wait for ever
            raise CollectiveError("the store of the processes does not answer")
        try:
            with inside_library():
                self._store.set(f"{self.rank}/{key}", text)
        except RuntimeError as error:
            raise CollectiveError(f"the store of the processes has gone: {error}") from error

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """See ``ProcessGroup.read``."""
        end = time.monotonic() + seconds
        if not self._store_answers(seconds):
            return None
        thread = self._thread()
        thread.start(partial(self._look_up, f"{rank}/{key}", end))
        try:
            if not thread.has_ended(seconds + _STORE_SECONDS):
                self._stuck = thread
                return None
        except RuntimeError as error:  # the store is gone
            self._store_error = error
            return None
        self._idle.append(thread)
        found: str | None = thread.result
        return found

    def _store_answers(self, seconds: float) -> bool:
        """Whether the store has answered all calls, within so many seconds."""
        thread = self._stuck
        if thread is not None:
            with suppress(RuntimeError):
                if not thread.has_ended(seconds):
                    return False
            self._stuck = None
            self._idle.append(thread)
        return True

    def _look_up(self, name: str, end: float) -> str | None:
        while not self._store.check([name]):  # store.wait would log a warning at its timeout
            if time.monotonic() >= end:
                return None
            time.sleep(_PAUSE_SECONDS)
        return bytes(self._store.get(name)).decode()

    def _leave_together(self, seconds: float) -> list[int]:
        """See ``ProcessGroup._leave_together``; exchanges a byte with every other process.

        A process that ends breaks its connections, which ends the receives of the others at once.
        """
        if not self.sends_host_memory:
            return self._wait_for_leaving(seconds)
        # Later than this call gives up: at its timeout gloo closes all connections.
        end = time.monotonic() + seconds + _STORE_SECONDS
        receives: list[tuple[Any, SimpleQueue[RuntimeError | None]]] = []
        sends: list[Any] = []
        self._bytes = {rank: SimpleQueue() for rank in self.others}
        for rank, result in self._bytes.items():
            try:
                memory = _as_tensor(self._memory[rank : rank + 1])
                receives.append((self._group.recv([memory], rank, self._last_tag), result))
                memory = _as_tensor(self._memory[self.rank : self.rank + 1])
                sends.append(self._group.send([memory], rank, self._last_tag))
            except RuntimeError as error:
                result.put(error)
        self._leaving = thread = self._thread()
        thread.start(partial(_wait_for_bytes, receives, sends, end))
        missing = self._wait_for_leaving(seconds)
        if not missing and thread.has_ended(_STORE_SECONDS):
            self._leaving = None
            self._idle.append(thread)
        return missing

    def _has_left(self, rank: int, seconds: float) -> bool:
        """See ``ProcessGroup._has_left``."""
        result = self._bytes.get(rank)
        error: RuntimeError | None = None
        if result is None:
            has_left = super()._has_left(rank, seconds)
            error = self._store_error
        else:
            with suppress(Empty):
                error = result.get(timeout=seconds)
                if error is None:
                    return True
            has_left = super()._has_left(rank, 0.0)
        if has_left or error is None:
            return has_left
        # A process whose exchange fails closes its connections first, and says why afterwards.
        end = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < end:
            if self.read(rank, "failed", _LOOK_SECONDS) or super()._has_left(rank, 0.0):
                return True
        raise ProcessError(
            rank,
            f"process {rank} of {self.size} has ended without closing its mesh, or its connection "
            f"has broken ({without_advice(error)})",
        )

    def _thread(self) -> _CallingThread:
        try:  # the watchdog's thread may take some too
            return self._idle.pop()
        except IndexError:
            return _CallingThread()

    def close(self) -> None:
        """See ``ProcessGroup.close``."""
        if self._leaving is not None:  # it would wait for bytes that do not come
            self._abort(self._last_tag, self.others)
            self._leaving.stop()
        while self._idle:
            self._idle.pop().stop()
        if self in _owners:
            _owners.remove(self)
            if not _owners and self._group is dist.group.WORLD:  # unless the user has destroyed it
                dist.destroy_process_group()


# The open groups over a default group that was made here.
_owners: list[TorchGroup] = []
# By address. Kept until this process ends, because the store of process 0 serves the others.
_stores: dict[str, Any] = {}


class _CallingThread:
    """A thread that makes blocking calls of torch for another thread.

    These calls ignore signals. gloo's wait cannot be polled, and closes all connections at its
    timeout. A call of the store may never return if the process of the store is stopped.

    Attributes:
        result: the result of the last call.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        start_new_thread(self._run, ())

    def start(self, call: Callable[[], Any]) -> None:
        """Starts a call; the previous one must have ended."""
        self._calls.put(call)

    def has_ended(self, seconds: float) -> bool:
        """Whether the call ends within so many seconds.

        Raises:
            Exception: the error of the call; torch's are RuntimeErrors.
        """
        try:
            error = self._ended.get(timeout=seconds)
        except Empty:
            return False
        if error is not None:
            raise error
        return True

    def stop(self) -> None:
        """Ends the thread after its call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            error: Exception | None = None
            try:
                with inside_library():
                    try:
                        self.result = call()
                    finally:
                        del call  # to free sends and receives is a call of torch too
            except Exception as found:
                error = found
            self._ended.put(error)


def _call(call: Callable[[], Any], seconds: float) -> Any:
    """Makes a blocking call of torch and returns its result; Ctrl-C ends the wait.

    Raises:
        CollectiveError: the call does not return within so many seconds.
    """
    thread = _CallingThread()
    thread.start(call)
    thread.stop()  # ends when the call has returned
    if not thread.has_ended(seconds):
        raise CollectiveError(f"the store does not answer within {seconds:g} s")
    return thread.result


def _wait(works: Sequence[Any], end: float, done: list[Any]) -> None:
    """Waits for sends and receives until a monotonic time; appends those done to ``done``."""
    for work in works:
        work.wait(timedelta(seconds=max(1e-3, end - time.monotonic())))
        done.append(work)


def _wait_for_bytes(
    receives: Sequence[tuple[Any, SimpleQueue[RuntimeError | None]]],
    sends: Sequence[Any],
    end: float,
) -> None:
    """Waits for all bytes; puts None or its error into the queue of each receive."""
    for work, result in receives:
        try:
            _wait([work], end, [])
            result.put(None)
        except RuntimeError as error:
            result.put(error)
    with suppress(RuntimeError):
        _wait(sends, end, [])


def without_advice(error: BaseException) -> str:
    """Returns the first sentence of a gloo error, without its source line."""
    return re.sub(r"^\[[^]]*:\d+\] ", "", str(error)).partition(". ")[0]


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor on an array's memory, without PyTorch's warning for read-only arrays."""
    if not array.flags.writeable and array.size:
        address = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        array = np.frombuffer(memoryview(address), np.uint8)
    return torch.from_numpy(array)


def open_torchrun(timeout: float, *, on_gpus: bool) -> TorchGroup:
    """Returns the default group of torchrun's processes; makes it if there is none."""
    if dist.is_initialized():
        return TorchGroup(dist.group.WORLD, timeout)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise BackendUnavailableError(
            f"processes='torchrun': {', '.join(missing)} is not set: start this script by torchrun"
        )
    name = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    seconds = timedelta(seconds=timeout)
    found = _connect_once(
        name, lambda: next(iter(dist.rendezvous("env://", timeout=seconds))), timeout
    )
    return _make_default_group(found, timeout, on_gpus)


def open_slurm(address: tuple[int, int, str, int], timeout: float, *, on_gpus: bool) -> TorchGroup:
    """Returns the default group of srun's processes; makes it if there is none.

    Args:
        address: the result of ``slurm_address``.
        timeout: see ``ProcessGroup``.
        on_gpus: whether the mesh has CUDA devices.
    """
    if dist.is_initialized():
        return TorchGroup(dist.group.WORLD, timeout)
    rank, size, host, port = address
    seconds = timedelta(seconds=timeout)

    def connect() -> Any:
        return dist.TCPStore(host, port, size, rank == 0, seconds, wait_for_workers=False)

    store = _connect_once(f"{host}:{port}", connect, timeout)
    return _make_default_group((store, rank, size), timeout, on_gpus)


def _connect_once(address: str, connect: Callable[[], Any], timeout: float) -> Any:
    """Returns the store of an address; calls ``connect`` only the first time."""
    if address not in _stores:
        try:
            _stores[address] = _call(connect, timeout + _STORE_SECONDS)
        except (RuntimeError, OSError) as error:  # torch's errors are RuntimeErrors
            raise BackendUnavailableError(
                f"the store of the processes at {address} cannot be reached: {error}"
            ) from error
    return _stores[address]


def _make_default_group(address: tuple[Any, int, int], timeout: float, on_gpus: bool) -> TorchGroup:
    """Makes the default group when all processes have come.

    Raises:
        CollectiveError: some processes have not come within ``timeout``.
    """
    store, rank, size = address
    store = dist.PrefixStore(_new_name(store, rank, size, timeout), store)
    seconds = timedelta(seconds=timeout)
    store.set_timeout(seconds)
    # gloo for host memory, which is needed where NCCL cannot be used: processes may share a GPU.
    backend = "cpu:gloo,cuda:nccl" if on_gpus and dist.is_nccl_available() else "gloo"
    options = {"store": store, "rank": rank, "world_size": size, "timeout": seconds}
    begun, ended = [[f"{word}/{other}" for other in range(size)] for word in ("begun", "ended")]
    store.set(begun[rank], "")
    try:
        _call(partial(dist.init_process_group, backend, **options), timeout + _STORE_SECONDS)
    except RuntimeError as error:
        missing: list[int] = []
        with suppress(CollectiveError):  # the process of the store may be stopped
            missing = _call(lambda: _absent(store, begun) or _absent(store, ended), _STORE_SECONDS)
        others = [other for other in missing if other != rank]
        raise CollectiveError(
            f"{_not_come(size, timeout, others)} ({without_advice(error)})"
        ) from error
    store.set(ended[rank], "")
    try:
        return TorchGroup(dist.group.WORLD, timeout, owned=True)
    except BaseException:  # a later open_mesh may make the group again
        dist.destroy_process_group()
        raise


def _new_name(
    store: Any, rank: int, size: int, timeout: float, check: Callable[[], None] = lambda: None
) -> str:
    """Like ``_agree_on_name``; also raises if the process of the store is stopped."""
    call = partial(_agree_on_name, store, rank, size, timeout, check)
    return str(_call(call, timeout + _STORE_SECONDS))


def _agree_on_name(
    store: Any, rank: int, size: int, timeout: float, check: Callable[[], None]
) -> str:
    """Returns a name (hexadecimal digits) on which all processes agree, new in each call.

    A store may contain values of earlier processes: torchrun restarts processes with the same
    store. So each process writes a random number, process 0 writes the list of all numbers, and the
    list is valid when every process has found its number in it. ``check`` is called meanwhile.

    Raises:
        CollectiveError: some processes have not come within ``timeout``; or what ``check`` raises.
    """
    here = [f"gradreduce/here/{other}" for other in range(size)]
    everyone = "gradreduce/here"
    own = uuid4().hex
    store.set(here[rank], own)
    end = time.monotonic() + timeout
    last = ""
    names: list[str] = []  # the lists that contain this number
    while True:
        if rank == 0 and all(store.check([key]) for key in here):
            numbers = " ".join(store.get(key).decode() for key in here)
            if numbers != last:
                store.set(everyone, last := numbers)
        numbers = store.get(everyone).decode() if store.check([everyone]) else ""
        # First, because a process that has returned may write its number for another mesh.
        for name in names:
            if store.add(name, 0) == size:
                return name
        name = digest_of(numbers.encode())
        if own in numbers and name not in names:
            names.append(name)
            store.set(f"{name}/{rank}", "")
            store.add(name, 1)
            continue
        if time.monotonic() >= end:
            keys = [f"{names[-1]}/{other}" for other in range(size)] if names else here
            # If all processes were here, process 0 is missing: it did not write the list.
            raise CollectiveError(_not_come(size, timeout, _absent(store, keys) or [0]))
        check()
        time.sleep(_OPEN_SECONDS)


def _absent(store: Any, keys: Sequence[str]) -> list[int]:
    """Returns the processes whose keys a store does not have."""
    return [other for other, key in enumerate(keys) if not store.check([key])]


def _not_come(size: int, timeout: float, missing: Sequence[int]) -> str:
    return (
        f"of {size} processes these have not come to open_mesh within {timeout:g} s: "
        f"{listed(missing)}; their output may say why"
    )
