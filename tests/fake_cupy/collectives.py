"""The collectives of the fake NCCL.

The n-th calls of all ranks belong together, whichever process names its own first. The stream of a
rank reads, waits until the streams of all ranks come, and writes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from .machine import READ, WRITE, Call, Machine, Queue

DTYPES = {
    1: "uint8", 3: "uint32", 5: "uint64", 6: "float16", 7: "float32", 8: "float64",
    9: ml_dtypes.bfloat16,
}  # fmt: skip
REDUCTIONS = ("allReduce", "reduce", "reduceScatter")


@dataclass
class Request:
    """One rank's part of a collective."""

    comm: Any  # its NcclCommunicator
    name: str
    send: int
    recv: int
    count: int
    datatype: int
    extra: int  # operation, or root of a broadcast
    queue: Queue
    root: int = 0  # of a reduce

    @property
    def agrees(self) -> tuple:
        return (self.name, self.count, self.datatype, self.extra, self.root)


class Round:
    """One collective of a clique whose processes name their ranks' parts in turn.

    Attributes:
        arrived: for each rank a call that passes when its stream comes to the collective.
        asked: the parts of the ranks that are named.
        come: the ranks whose streams have come.
        sources: what the streams of the ranks have read.
    """

    def __init__(self, machine: Machine, num_ranks: int) -> None:
        self.asked: dict[int, Request] = {}
        self.come: set[int] = set()
        self.sources: dict[int, np.ndarray] = {}
        self.arrived = []
        for rank in range(num_ranks):
            queue = Queue(-1, -1, f"rank {rank} of another process")
            call = Call(queue, 0, machine.number, {}, "a rank of another process")
            queue.waiting.append(call)
            machine.stuck.add(queue)  # before the other process names its part
            self.arrived.append(call)


def run(machine: Machine, asked: list[Request]) -> None:
    """Queues the collectives of one group: all read before any writes."""
    by_clique: dict[int, list[Request]] = {}
    for one in asked:
        by_clique.setdefault(id(one.comm._clique), []).append(one)
    for ones in by_clique.values():
        comms = [one.comm for one in ones]
        counts = [comms.count(comm) for comm in comms[0].own_ranks()]
        if len(set(counts)) != 1:
            machine.fail(f"NCCL: a rank is left out: calls of each rank {counts}")
    rounds = [_named(machine, one) for one in asked]
    for one, the_round in zip(asked, rounds, strict=True):
        arrived = the_round.arrived[one.comm._rank]  # processes that came earlier wait for it
        read = partial(_read, machine, one, the_round, arrived)
        begin = machine.submit(one.queue, f"nccl {one.name} begins", read)
        arrived.blocker = the_round.arrived[one.comm._rank] = begin
        machine.stuck.discard(arrived.queue)
    for one, the_round in zip(asked, rounds, strict=True):
        held = [machine.wait(one.queue, each) for each in the_round.arrived]
        one.comm._held += [waiting for waiting in held if waiting is not None]
        machine.submit(one.queue, f"nccl {one.name}", partial(_write, machine, one, the_round))


def _named(machine: Machine, one: Request) -> Round:
    """Adds a rank's part to its collective."""
    comm = one.comm
    rounds = comm._clique[0].rounds
    the_round = rounds.setdefault(comm.num_rounds, Round(machine, comm.size()))
    the_round.asked[comm._rank] = one
    asked = [each.agrees for each in the_round.asked.values()]
    if len(set(asked)) != 1:
        machine.fail(f"NCCL: the ranks disagree: {asked}")
    if len(asked) == comm.size():
        machine.count(one.name)
        del rounds[comm.num_rounds]
    comm.num_rounds += 1
    return the_round


def _read(machine: Machine, one: Request, the_round: Round, arrived: Call, call: Call) -> None:
    arrived.passed = True
    the_round.come.add(one.comm._rank)
    if one.comm._ended != "abort" and (one.name != "broadcast" or one.comm._rank == one.extra):
        dtype = np.dtype(DTYPES[one.datatype])
        count = one.count * (one.comm.size() if one.name == "reduceScatter" else 1)
        _check(machine, call, one, one.send, count * dtype.itemsize, READ)
        the_round.sources[one.comm._rank] = _array(one.send, count, dtype).copy()


def _write(machine: Machine, one: Request, the_round: Round, call: Call) -> None:
    # A rank whose communicator was aborted has come, and sends nothing.
    needed = [one.extra] if one.name == "broadcast" else range(one.comm.size())
    is_whole = len(the_round.come) == one.comm.size() and the_round.sources.keys() >= {*needed}
    is_written = one.name != "reduce" or one.comm._rank == one.root
    if one.comm._ended == "abort" or not is_whole or not is_written:
        return
    sources = [the_round.sources.get(rank) for rank in range(one.comm.size())]
    result = _result(one.name, sources, one.extra)
    if one.name == "reduceScatter":
        result = result[one.comm._rank * one.count :][: one.count]
    dtype = np.dtype(DTYPES[one.datatype])
    _check(machine, call, one, one.recv, result.size * dtype.itemsize, WRITE)
    with np.errstate(all="ignore"):
        _array(one.recv, result.size, dtype)[...] = result


def _check(machine: Machine, call: Call, one: Request, start: int, nbytes: int, how: int) -> None:
    slot = machine.heap.find(start)
    if slot is not None and slot.place != one.comm._gpu:
        machine.fail(f"NCCL: {one.name}: rank {one.comm._rank} has a buffer elsewhere")
    machine.check(call, [(start, start + nbytes, how)], peers_matter=False)


def _result(name: str, sources: list, extra: int) -> np.ndarray:
    if name == "broadcast":
        return sources[extra]
    if name == "allGather":
        return np.concatenate(sources)
    wide = np.float32 if sources[0].dtype.itemsize == 2 else sources[0].dtype
    total = sources[0].astype(wide)
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            total = total + source.astype(wide)
    return total


def _array(address: int, size: int, dtype: np.dtype) -> np.ndarray:
    raw = (ctypes.c_ubyte * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)
