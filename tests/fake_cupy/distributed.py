"""The parts of ``torch`` and ``torch.distributed`` that the process group uses.

The processes are threads. A group's NCCL has a stream of its own, as PyTorch's has: it waits for
the current stream, and ``wait`` makes the current stream wait for it. Both are taken from the
descriptions of ``ProcessGroupNCCL``; ``tests/comm/processes/test_torch_calls.py`` compares the
signatures with PyTorch's. Host memory is sent as by gloo, with which
``tests/comm/processes/test_torch_group.py`` compares it: a wait that ends too late closes the
connections of its process, and with them all waits of both ends.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from . import nccl
from .arrays import memcpyAsync
from .surface import Device, Event, Stream, eventRecord, streamWaitEvent

# These import them.
_OURS = [f"gradreduce.comm.{name}" for name in ("torch_group", "torch_on_gpu", "opening_order")]


# PyTorch's signed integers are NCCL's unsigned ones in the fake: their sums have the same bits.
DTYPES = {
    "uint8": 1, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_ITEMSIZES = {1: 1, 3: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}


class _Local(threading.local):
    """The state of one process."""

    stream = 0  # handle of the current one


_local = _Local()
_world: list[ProcessGroup] = []  # the default group of the only process that makes one
_address: list[tuple[Store, int, int]] = []  # of the default group that can be made


class Connections:
    """Connections of the processes of a store, for host memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed: set[frozenset[int]] = set()
        self.waiting: dict[tuple[int, int, int], list[HostWork]] = defaultdict(list)

    def close_all_of(self, rank: int) -> None:
        self.closed |= {frozenset((rank, other)) for other in range(16)}
        self.changed.notify_all()


class HostWork:
    """A send or receive of host memory; done when the other process has joined."""

    def __init__(self, connections: Connections, rank: int, pair: frozenset[int], array) -> None:
        self._connections, self._rank, self._pair = connections, rank, pair
        self.array = array
        self.is_done = False

    def wait(self, timeout):
        connections = self._connections
        with connections.changed:
            connections.changed.wait_for(
                lambda: self.is_done or self._pair in connections.closed, timeout.total_seconds()
            )
            if self.is_done:
                return True
            if self._pair in connections.closed:
                raise RuntimeError("Connection closed by peer")
            connections.close_all_of(self._rank)
            raise RuntimeError("Timed out waiting for an operation to complete")


class Store:
    """A key-value store of all processes, or a part of it with a prefix."""

    def __init__(self, prefix: str = "", store: Store | None = None) -> None:
        self.connections: Connections = Connections() if store is None else store.connections
        self._prefix = "" if store is None else f"{store._prefix}{prefix}/"
        self._values: dict[str, bytes] = {} if store is None else store._values
        self._counts: dict[str, int] = {} if store is None else store._counts
        self._lock: Any = threading.Lock() if store is None else store._lock

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            count = self._counts[self._prefix + key] = (
                self._counts.get(self._prefix + key, 0) + amount
            )
            return count

    def set_timeout(self, timeout: Any) -> None:
        """Has no effect, because nothing here waits."""

    def set(self, key: str, value: str) -> None:
        self._values[self._prefix + key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[self._prefix + key]


class ProcessGroup:
    """A group as one process sees it.

    Args:
        config: its backends: ``"cpu:gloo,cuda:nccl"``.
        global_ranks: of its processes.
    """

    group_name = "0"

    def __init__(self, config: str, store: Store, rank: int, global_ranks: Sequence[int]) -> None:
        self.config = config
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.destroyed = False
        self._store = store
        self._nccl: tuple[nccl.NcclCommunicator, Stream] | None = None

    def get_group_store(self) -> Store:
        return self._store

    def send(self, tensors, rank, tag):
        return self._started(tensors, (self.rank, rank, tag), is_send=True)

    def recv(self, tensors, rank, tag):
        return self._started(tensors, (rank, self.rank, tag), is_send=False)

    def _started(self, tensors, key: tuple[int, int, int], *, is_send: bool) -> HostWork:
        (array,) = tensors
        connections, pair = self._store.connections, frozenset(key[:2])
        work = HostWork(connections, self.rank, pair, array)
        with connections.changed:
            if pair in connections.closed:
                raise RuntimeError("Connection closed by peer")
            waiting = connections.waiting[*key[:2], 2 * key[2] + (not is_send)]
            if not waiting:
                connections.waiting[*key[:2], 2 * key[2] + is_send].append(work)
                return work
            other = waiting.pop(0)
            source, target = (array, other.array) if is_send else (other.array, array)
            target[...] = source
            work.is_done = other.is_done = True
            connections.changed.notify_all()
        return work

    def nccl(self) -> tuple[nccl.NcclCommunicator, Stream]:
        """The communicator and its stream, made at the first use by all processes."""
        if self._nccl is None:
            if self.rank == 0:
                self._store.set("nccl", nccl.get_unique_id().hex())
            assert nccl.until(lambda: self._store.check(["nccl"]))
            identity = bytes.fromhex(self._store.get("nccl").decode())
            made = nccl.NcclCommunicator(len(self.global_ranks), identity, self.rank)
            self._nccl = made, Stream(non_blocking=True)
        return self._nccl


class Tensor(NamedTuple):
    """A flat tensor on GPU memory; PyTorch's NCCL dtypes by their numbers in NCCL."""

    address: int
    nbytes: int
    dtype: int = nccl.CONSTANTS["NCCL_UINT8"]

    def view(self, dtype: int) -> Tensor:
        assert self.nbytes % _ITEMSIZES[dtype] == 0
        return self._replace(dtype=dtype)

    def numel(self) -> int:
        return self.nbytes // _ITEMSIZES[self.dtype]

    def copy_(self, source: Tensor) -> Tensor:
        assert (self.nbytes, self.dtype) == (source.nbytes, source.dtype)
        memcpyAsync(self.address, source.address, self.nbytes, 3, _local.stream)
        return self


class TorchDevice(NamedTuple):
    type: str
    index: int


class ExternalStream(NamedTuple):
    stream_ptr: int
    device: TorchDevice


class P2POp:
    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        self.op, self.tensor, self.peer, self.group = op, tensor, peer, group


class Work:
    """A queued batch."""

    def __init__(self, end: Event) -> None:
        self._end = end

    def wait(self, timeout=None):
        assert timeout is None, "the host would wait, and then abort the user's communicator"
        streamWaitEvent(_local.stream, self._end.ptr)


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    raise AssertionError("only in a batch: two processes that send to each other hang")


def irecv(tensor, src=None, group=None, tag=0, group_src=None):
    raise AssertionError("only in a batch: two processes that send to each other hang")


def batch_isend_irecv(p2p_op_list):
    group = p2p_op_list[0].group
    communicator, stream = group.nccl()
    begin = Event(disable_timing=True)
    eventRecord(begin.ptr, _local.stream)
    stream.wait_event(begin)
    nccl.groupStart()
    for each in p2p_op_list:
        call = {isend: communicator.send, irecv: communicator.recv}[each.op]
        peer = group.global_ranks.index(each.peer)
        call(*each.tensor[:2], nccl.CONSTANTS["NCCL_UINT8"], peer, stream.ptr)
    nccl.groupEnd()
    end = Event(disable_timing=True)
    eventRecord(end.ptr, stream.ptr)
    return [Work(end)]


def _queued(group: ProcessGroup, async_op: bool, name: str, *arguments: int) -> Work:
    """Queues a collective on the stream of the group's NCCL."""
    assert async_op, "else the host may wait"
    communicator, stream = group.nccl()
    begin = Event(disable_timing=True)
    eventRecord(begin.ptr, _local.stream)
    stream.wait_event(begin)
    getattr(communicator, name)(*arguments, stream.ptr)
    end = Event(disable_timing=True)
    eventRecord(end.ptr, stream.ptr)
    return Work(end)


def all_reduce(tensor, op=0, group=None, async_op=False):
    arguments = tensor.address, tensor.address, tensor.numel(), tensor.dtype, op
    return _queued(group, async_op, "allReduce", *arguments)


def reduce(tensor, dst=None, op=0, group=None, async_op=False, group_dst=None):
    arguments = tensor.address, tensor.address, tensor.numel(), tensor.dtype, op
    return _queued(group, async_op, "reduce", *arguments, group.global_ranks.index(dst))


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    arguments = tensor.address, tensor.address, tensor.numel(), tensor.dtype
    return _queued(group, async_op, "broadcast", *arguments, group.global_ranks.index(src))


def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    assert output_tensor.nbytes == input_tensor.nbytes * len(group.global_ranks)
    arguments = input_tensor.address, output_tensor.address, input_tensor.numel()
    return _queued(group, async_op, "allGather", *arguments, input_tensor.dtype)


def reduce_scatter_single(output, input, op=0, group=None, async_op=False):
    assert input.nbytes == output.nbytes * len(group.global_ranks)
    arguments = input.address, output.address, output.numel(), output.dtype, op
    return _queued(group, async_op, "reduceScatter", *arguments)


def as_tensor(data, dtype=None, device=None):
    interface = data.__cuda_array_interface__
    assert (interface["typestr"], interface["data"][1]) == ("|u1", False)
    assert interface["version"] == 2
    assert device == TorchDevice("cuda", Device().id)
    return Tensor(interface["data"][0], interface["shape"][0])


@contextmanager
def stream(stream):
    before = _local.stream
    with Device(stream.device.index):
        _local.stream = stream.stream_ptr
        try:
            yield
        finally:
            _local.stream = before


def init_process_group(
    backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None
):
    assert not _world
    _world.append(ProcessGroup(backend, store, rank, range(world_size)))


def destroy_process_group(group=None):
    assert group is None, "the default group"
    _world.pop().destroyed = True


def make_world(store: Store, rank: int, size: int) -> None:
    """Sets the default group that can be made."""
    _address[:] = [(store, rank, size)]
    _world.clear()


@contextmanager
def default_group(store: Store, size: int) -> Iterator[None]:
    """Context manager: there is a default group, of all processes."""
    _world[:] = [ProcessGroup("gloo", store, 0, range(size))]
    try:
        yield
    finally:
        _world.clear()


def _backend_config(group):
    config = group.config
    return config if ":" in config else f"cpu:{config},cuda:{config}"


class _Groups:
    @property
    def WORLD(self) -> ProcessGroup | None:
        return _world[0] if _world else None


@contextmanager
def installed() -> Iterator[None]:
    """Context manager: replaces PyTorch by these modules."""
    torch, distributed = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    cuda = types.SimpleNamespace(stream=stream, ExternalStream=ExternalStream)
    vars(torch).update(
        distributed=distributed, cuda=cuda, as_tensor=as_tensor, device=TorchDevice, empty=np.empty,
        from_numpy=np.asarray, **DTYPES,
    )  # fmt: skip
    vars(distributed).update(
        ProcessGroup=ProcessGroup, PrefixStore=Store, P2POp=P2POp, isend=isend, irecv=irecv,
        batch_isend_irecv=batch_isend_irecv, all_reduce=all_reduce, reduce=reduce,
        broadcast=broadcast, all_gather_single=all_gather_single,
        reduce_scatter_single=reduce_scatter_single, init_process_group=init_process_group,
        destroy_process_group=destroy_process_group, group=_Groups(),
        get_backend_config=_backend_config,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: len(group.global_ranks),
        get_global_rank=lambda group, group_rank: group.global_ranks[group_rank],
        is_initialized=lambda: bool(_world),
        is_nccl_available=lambda: True,
        rendezvous=lambda url, timeout: iter(_address),
    )  # fmt: skip
    replaced = {"torch": torch, "torch.distributed": distributed, **dict.fromkeys(_OURS)}
    before = {name: sys.modules.pop(name, None) for name in replaced}
    sys.modules.update({name: module for name, module in replaced.items() if module})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
