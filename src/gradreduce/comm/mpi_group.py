"""Processes of an MPI communicator, by mpi4py.

MPI moves only host memory; GPUs exchange by NCCL. Only mpi4py's calls for buffers are used
(``Isend``, ``Irecv``), which do not pickle. This module is imported only if a communicator is used,
because its import starts MPI.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from gradreduce.device import Message
from gradreduce.errors import CollectiveError, brief

from .process_group import ProcessError, ProcessGroup

_NOTICE = 0  # tag of notices; data has higher tags
_SPIN_SECONDS = 2e-3  # polls without sleeping for so long, then sleeps between polls
_PAUSE_SECONDS = 2e-4
_LOOK_SECONDS = 0.05  # between two checks for notices of processes that an exchange waits for
# Seconds that a process waits before it ends all others, so that they can report errors.
_REPORT_SECONDS = 1.0
# Requests of exchanges that have failed. They keep the memory that MPI may still access.
_abandoned: list[Any] = []
# Why this process must abort all processes at its exit, instead of waiting in MPI_Finalize.
_abort_reasons: set[str] = set()


class MpiGroup(ProcessGroup):
    """Sends and receives in a duplicate of a communicator, so that messages do not mix.

    Args:
        communicator: an mpi4py intracommunicator.
        timeout: see ``ProcessGroup``.

    Raises:
        CollectiveError: not all processes open their mesh in time.
    """

    gpu_library = "nccl"

    def __init__(self, communicator: Any, timeout: float) -> None:
        if not isinstance(communicator, MPI.Intracomm) or communicator == MPI.COMM_NULL:
            raise ValueError(
                f"communicator={brief(communicator)} is not an mpi4py intracommunicator of this "
                "process"
            )
        super().__init__(communicator.Get_rank(), communicator.Get_size(), timeout)
        self._notices: dict[tuple[int, str], str] = {}
        self._posted: list[tuple[Any, bytes]] = []  # requests, and the memory that they still read
        self._communicator: Any = None
        self._has_failed = False
        self._most_tags = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._meet(communicator)

    def _meet(self, communicator: Any) -> None:
        """Duplicates the communicator; waits first, because ``Idup`` cannot tell who is missing."""
        _abort_reasons.add("opening")
        end = time.monotonic() + self.timeout
        sends = [communicator.Isend(b"", rank, self._most_tags) for rank in self.others]
        receives = {
            rank: communicator.Irecv(bytearray(), rank, self._most_tags) for rank in self.others
        }
        try:
            if not _until(lambda: MPI.Request.Testall([*sends, *receives.values()]), self.timeout):
                missing = [rank for rank, request in receives.items() if not request.Test()]
                raise CollectiveError(self.describe_missing(missing, "open_mesh", self.timeout))
            copy, request = communicator.Idup()
            if not _until(request.Test, end - time.monotonic()):
                _abandoned.append(request)
                raise CollectiveError(
                    f"one of {self.size} processes has come to open_mesh and left it within "
                    f"{self.timeout:.3g} s"
                )
        except BaseException:
            _abandon(list(receives.values()), sends)
            raise
        self._communicator = copy
        _abort_reasons.discard("opening")

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """See ``ProcessGroup.exchange``."""
        call = self._communicator
        tag = 1 + tag % self._most_tags
        ranks = [rank for rank, _ in [*receives, *sends]]
        incoming: list[Any] = []
        outgoing: list[Any] = []
        try:
            for rank, array in receives:
                incoming.append(call.Irecv(array, rank, tag))
            for rank, array in sends:
                outgoing.append(call.Isend(array, rank, tag))
            self._wait([*incoming, *outgoing], ranks, seconds)
        except BaseException:
            _abandon(incoming, outgoing)
            raise

    def _wait(self, requests: Sequence[Any], ranks: Sequence[int], seconds: float) -> None:
        """Waits until all requests, with these processes, are done.

        Raises:
            ProcessError: one of the processes has ended or is late.
        """
        end = time.monotonic() + seconds
        while not _until(lambda: MPI.Request.Testall(requests), min(_LOOK_SECONDS, seconds)):
            self._receive_notices()
            open_ranks = [
                rank for rank, request in zip(ranks, requests, strict=True) if not request.Test()
            ]
            for rank in open_ranks:
                if self.will_not_come(rank):
                    raise ProcessError(rank, "has gone, or makes another call")
            if open_ranks and time.monotonic() >= end:
                raise ProcessError(
                    open_ranks[0],
                    f"did not answer within {seconds:.3g} s, but is not known to have ended",
                )

    def tell_failure(self, reason: str) -> None:
        """See ``ProcessGroup.tell_failure``; at exit MPI must not wait for the others."""
        _abort_reasons.add("a mesh has failed")
        self._has_failed = True
        super().tell_failure(reason)

    def post(self, key: str, text: str) -> None:
        """See ``ProcessGroup.post``."""
        if MPI.Is_finalized():
            raise CollectiveError("MPI is finalized already, so no message can be sent")
        self._receive_notices()
        self._notices[self.rank, key] = text
        self._posted = [each for each in self._posted if not each[0].Test()]
        notice = f"{key}\0{text}".encode()
        for rank in self.others:
            self._posted.append((self._communicator.Isend(notice, rank, _NOTICE), notice))

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """See ``ProcessGroup.read``."""

        def has_come() -> bool:
            self._receive_notices()
            return (rank, key) in self._notices

        _until(has_come, seconds)
        return self._notices.get((rank, key))

    def close(self) -> None:
        """See ``ProcessGroup.close``; all processes call it, unless the mesh has failed."""
        if self._has_failed:
            return
        self._receive_notices()
        _until(lambda: all([request.Test() for request, _ in self._posted]), self.timeout)
        self._communicator.Free()

    def _receive_notices(self) -> None:
        """Receives all notices that have arrived; does nothing before the mesh is open."""
        if self._communicator is None:
            return
        status = MPI.Status()
        # Matched probes: another thread cannot receive the message that this one has found.
        while found := self._communicator.Improbe(MPI.ANY_SOURCE, _NOTICE, status):
            notice = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            found.Recv(notice)
            key, _, text = notice.tobytes().decode().partition("\0")
            self._notices[status.Get_source(), key] = text


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Polls until ``done()`` or ``seconds`` have passed; returns whether it is done."""
    begin = time.monotonic()
    while not done():
        passed = time.monotonic() - begin
        if passed >= seconds:
            return False
        if passed >= _SPIN_SECONDS:
            time.sleep(_PAUSE_SECONDS)
    return True


def _abandon(receives: Sequence[Any], sends: Sequence[Any]) -> None:
    """Cancels receives, and keeps the memory of all requests."""
    _abandoned.extend([*receives, *sends])
    for request in receives:
        with suppress(MPI.Exception):  # the request is done
            request.Cancel()


def _abort() -> None:
    """Ends all processes if something has failed.

    MPI_Finalize would wait for ever for a process that hangs.
    """
    if _abort_reasons and not MPI.Is_finalized():
        time.sleep(_REPORT_SECONDS)
        MPI.COMM_WORLD.Abort(1)


atexit.register(_abort)
