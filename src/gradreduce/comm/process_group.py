"""The processes of a mesh: transfers between two, and notices that all can read.

A reduction over several processes exchanges terms and results by ``exchange``. Before a process
runs a plan for the first time, it compares the plan with those of the other processes (``agree``).
A difference would cause a hang, or sums of unrelated tensors.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import proxy
from zlib import crc32

from gradreduce.device import CollectiveCall, Message, Parcel, Processes, check_running
from gradreduce.errors import CollectiveError, InvalidArgumentError, listed

from .description import KNOWN_CALLS, Description, describe_difference, digest_of, summary
from .rounds import Rounds
from .signs_of_life import SignsOfLife

if TYPE_CHECKING:
    from gradreduce.device import Device

# The number of calls whose notices and descriptions are kept.
_KEPT_CALLS = 1024
# How long a process waits for a notice that says why another process has ended.
_REASON_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_MOST_TAGS = (1 << 28) - 1


class ComparedCall(NamedTuple):
    """A call of this process.

    Attributes:
        number: the number of the call, from 0.
        description: what the call does.
        history: a hash of all calls up to this one.
        time_ns: when the call began, in nanoseconds since 1970.
    """

    number: int
    description: Description
    history: str
    time_ns: int


class ProcessGroup(Processes):
    """The processes of a mesh, seen from one of them.

    Attributes:
        rank, size, timeout, counts, move_on_gpu, collective: see ``Processes``.
        confirmed: the number of the last call that ``look`` has found equal in all processes.
        ended: the number of a call that is known to be done; -1: of none.
        sends_host_memory: whether ``exchange`` works.
        gpu_library: how GPU memory can be moved: ``"host"``: through host memory; ``"nccl"``: by a
            communicator of this mesh; ``"group"``: by ``exchange_on_gpu`` and
            ``queue_collectives``.
        rounds: which rounds of reductions this process has computed or dropped.
    """

    sends_host_memory = True
    gpu_library = "host"

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.counts = (1,) * size
        self.rounds = Rounds(proxy(self))  # a cycle would keep the group until a collection
        self._signs = SignsOfLife(proxy(self))
        self._is_closed = False
        self._calls = 0
        self._last_calls: deque[ComparedCall] = deque(maxlen=_KEPT_CALLS)
        self._call = ""  # number and digest of the last call
        self._exchanges = 0  # in that call
        self.confirmed = self.ended = -1
        self._looked_at: ComparedCall | None = None
        self._unknown: set[int] = set()  # processes that are not known to have made it
        self._next_look = 0.0
        # Digest of each compared call -> number of its description; least recently used first.
        self._known: dict[str, int] = {}

    @property
    def others(self) -> list[int]:
        """The ranks of all other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def rank_of(self, replica: int) -> int:
        """Returns the rank of the process that has a replica, counted over all processes."""
        return bisect_right(list(accumulate(self.counts)), replica)

    def label(self, rank: int) -> str:
        """Returns the text that names a process after its replica; empty for one process."""
        return f" (process {rank})" if self.size > 1 else ""

    # -- implemented by each library --------------------------------------------------------------

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """Sends and receives arrays; returns when all have arrived and sent ones may be reused.

        Args:
            sends: arrays to send, in the order in which the other process receives them.
            receives: arrays to receive into, which are overwritten.
            tag: the result of ``next_tag``; messages with another tag are not received.
            seconds: the time limit for all of them.

        Raises:
            ProcessError: another process did not answer within ``seconds``, or ended.
        """

    def exchange_on_gpu(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], gpu: int, stream: int
    ) -> None:
        """Queues sends and receives of GPU memory; only where ``gpu_library`` is ``"group"``.

        Args:
            sends: buffers to send, none of size 0, in the order in which the other process receives
                them.
            receives: buffers to receive into, which are overwritten.
            gpu: the number of the GPU.
            stream: the handle of the stream that runs the exchange.

        Raises:
            CollectiveError: the library reports an error.
        """
        raise NotImplementedError

    def queue_collectives(self, calls: Sequence[CollectiveCall], gpu: int, stream: int) -> None:
        """Queues collectives; only where ``gpu_library`` is ``"group"``.

        Args:
            calls: the calls, each with one buffer of this process, on one queue.
            gpu: the number of the GPU.
            stream: the handle of the stream that runs them.

        Raises:
            CollectiveError: the library reports an error.
        """
        raise NotImplementedError

    @abstractmethod
    def post(self, key: str, text: str) -> None:
        """Posts a notice for the other processes without waiting; replaces one of the same key.

        Raises:
            CollectiveError: the notice cannot be posted any more.
        """

    def post_soon(self, key: str, text: str) -> None:
        """Like ``post``, but may delay it until ``post_kept``, the next notice or exchange."""
        self.post(key, text)

    def post_kept(self) -> None:  # optional
        """Posts the notice that ``post_soon`` has kept."""

    @abstractmethod
    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """Returns another process's notice; None if none has come within ``seconds``."""

    def close(self) -> None:  # optional
        """Releases the resources of this group."""

    def leave(self, failure: str | None, seconds: float | None = None) -> None:
        """See ``Processes``."""
        if self._is_closed:
            return
        self.tell_end("closed its mesh")
        seconds = self.timeout if seconds is None else min(seconds, self.timeout)
        try:
            missing = self._leave_together(seconds) if failure is None else []
            if missing:
                raise CollectiveError(self.describe_missing(missing, "close", seconds))
        except BaseException as error:
            self.tell_failure(f"left its mesh by {error!r}")
            raise
        finally:
            self.close()

    def _leave_together(self, seconds: float) -> list[int]:
        """See ``_wait_for_leaving``; a library may watch its connections meanwhile."""
        return self._wait_for_leaving(seconds)

    def _has_left(self, rank: int, seconds: float) -> bool:
        """Whether another process has left its mesh; waits at most so many seconds.

        Raises:
            ProcessError: it has ended without leaving.
        """
        return self.read(rank, "closed", seconds) is not None

    def tell_end(self, how: str) -> None:
        """Tells the other processes that this one makes no more calls; once only.

        Args:
            how: why, for errors of the other processes; without the name of this process.
        """
        if not self._is_closed:
            self._is_closed = True
            with suppress(CollectiveError):  # the others may be gone
                self.post("closed", f"{self._calls} {how}")

    def tell_failure(self, reason: str) -> None:
        """See ``Processes``."""
        with suppress(CollectiveError):  # the others may be gone
            self.post("failed", reason)

    def leave_unopened(self, reason: str) -> None:
        """Tells the other processes that this one cannot open its mesh, and closes.

        Waits a moment for them to read the notice, because this process may run the store.

        Args:
            reason: the reason, without the name of this process.
        """
        self._is_closed = True
        with suppress(CollectiveError):
            self.post("failed", reason)
            self._wait_for_leaving(_REASON_SECONDS)
        self.close()

    def _wait_for_leaving(self, seconds: float) -> list[int]:
        """Waits until other processes close or fail; returns the ranks of those that are late."""
        end = time.monotonic() + seconds
        missing = []
        for rank in self.others:
            while self.read(rank, "failed", 0.0) is None:
                if self._has_left(rank, _LOOK_SECONDS):
                    break
                if time.monotonic() >= end:
                    missing.append(rank)
                    break
        return missing

    # -- the same for all libraries ---------------------------------------------------------------

    def agree(self, description: Description, seconds: float) -> None:
        """Compares a call that is about to run with the calls of all other processes.

        A process that remembers an equal call only posts its notice and does not wait. This works
        also if another process has forgotten the call.

        Args:
            description: the description of the call.
            seconds: how long to wait for notices of the other processes.

        Raises:
            InvalidArgumentError: another process makes another call.
            CollectiveError: another process has not made its call within ``seconds``.
        """
        number = self._calls
        self._calls += 1
        before = "" if self.last_call is None else self.last_call.history
        history = digest_of(f"{before} {description.digest}".encode())
        call = ComparedCall(number, description, history, time.time_ns())
        self._last_calls.append(call)
        self._call, self._exchanges = f"{number} {description.digest}", 0
        place = self._known.pop(description.digest, -1)
        is_new = place < 0
        if is_new:
            place = len(self._known)
            if place == KNOWN_CALLS:
                place = self._known.pop(next(iter(self._known)))
            self.post(f"description/{place}", f"{description.digest} {description.text}")
        post = self.post if is_new or self.move_on_gpu is not None else self.post_soon
        post(_key(number), f"{self._call} {place} {history}")
        if not is_new:
            self._known[description.digest] = place
            return
        end = time.monotonic() + seconds
        missing = []
        for rank in self.others:
            difference = self.difference(rank, call, end)
            if difference is None:
                missing.append(rank)
            elif difference:
                self.post("failed", difference)
                raise InvalidArgumentError(difference)
        if missing:
            raise CollectiveError(self.describe_missing(missing, self.called, seconds))
        self._known[description.digest] = place

    @property
    def called(self) -> str:
        """The last call, for errors: its number, name and first tensors."""
        call = self.last_call
        return "open_mesh" if call is None else f"call {call.number} ({summary(call.description)})"

    def flight_record(self) -> dict[str, Any]:
        """See ``Processes``.

        All calls but the last are known to be done, because an exchange ends before the next call.
        The last one is done if its number is ``ended``.
        """
        calls = self._last_calls.copy()
        last = self._calls - 1
        return {
            "process": self.rank,
            "num_processes": self.size,
            "calls": [
                {
                    "number": each.number,
                    "digest": each.description.digest,
                    "done": each.number < last or each.number == self.ended,
                    "time_ns": each.time_ns,
                }
                for each in calls
            ],
            "descriptions": {each.digest: json.loads(each.text) for _, each, _, _ in calls},
        }

    def next_tag(self) -> int:
        """Returns the tag of the next exchange: equal in processes that make the same calls.

        Processes with different calls have different tags, so they do not exchange wrong data, even
        if each remembers its call and does not compare it.
        """
        self._exchanges += 1
        return crc32(f"{self._call} {self._exchanges}".encode()) & _MOST_TAGS

    @property
    def last_call(self) -> ComparedCall | None:
        """The last call that was or is being compared; None before the first."""
        return self._last_calls[-1] if self._last_calls else None

    def difference(self, rank: int, call: ComparedCall, end: float = 0.0) -> str | None:
        """Describes how another process's call differs from this one's.

        Args:
            rank: the rank of that process.
            call: the call of this process.
            end: the time until which to wait for the other process's call.

        Returns:
            The difference; empty if there is none; None if the other process has not made its call
            in time.
        """
        number, own, history, _ = call
        while True:
            # Checked before the notice is read: a process may post a notice and then leave.
            is_last = time.monotonic() >= end or self.departure_reason(rank) is not None
            seconds = min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))
            text = self.read(rank, _key(number), 0.0 if is_last else seconds)
            notice = (text or "").split()
            if notice and int(notice[0]) >= number:
                break
            if is_last:
                return None
            if notice:
                time.sleep(1e-3)  # the notice of an older call has the same key
        _, digest, place, other_history = notice
        # The process is so far ahead that its notice of this call was replaced.
        if int(notice[0]) > number or (digest, other_history) == (own.digest, history):
            return ""
        if digest == own.digest:
            return f"before call {number} process {rank} made other calls than process {self.rank}"
        theirs = self.read(rank, f"description/{place}", 0.0) or ""
        is_theirs, _, text = theirs.partition(" ")
        return describe_difference(own.text, text if is_theirs == digest else None, self.rank, rank)

    def is_ahead(self, rank: int, number: int) -> bool:
        """Whether another process is known to have made a call after the one of this number."""
        notice = (self.read(rank, _key(number + 1), 0.0) or "-1").split()
        return int(notice[0]) > number

    def describe_missing(self, ranks: Sequence[int], what: str, seconds: float) -> str:
        """Describes processes that have not come to ``what``, with the reason if it is known."""
        names = f"process{'es' if len(ranks) > 1 else ''} {listed(ranks)}"
        have, are = ("have", "are") if len(ranks) > 1 else ("has", "is")
        text = f"{names} of {self.size} {have} not come to {what}"
        reasons = self.reasons(ranks, 0.0)
        if reasons:
            return f"{text}: {'; '.join(reasons)}"
        return f"{text} within {seconds:.3g} s, but {are} not known to have ended"

    def reason_for(self, rank: int) -> str | None:
        """Returns why a process did not take part in an exchange; None if unknown."""
        reasons = self.reasons([rank])
        if reasons:
            return reasons[0]
        call = self.last_call
        return (self.difference(rank, call) or None) if call is not None else None

    def describe_late(self, seconds: float, *, asks: bool = False) -> str | None:
        """See ``Processes``."""
        call = self.last_call
        if call is None:
            return None
        late = [rank for rank in self.others if self.difference(rank, call) is None]
        if late:
            return self.describe_missing(late, self.called, seconds)
        silent = self._signs.silent(call.number) if asks else []
        if not silent:
            return None
        names, have = ("process", "has") if len(silent) == 1 else ("processes", "have")
        return (
            f"{names} {listed(silent)} of {self.size} {have} come to {self.called}, but "
            f"{have} given no sign of life since"
        )

    def look(self) -> str | None:
        """Checks, without waiting, whether the other processes make this process's calls.

        The watchdog calls it while GPUs exchange, because ``agree`` does not wait for calls that a
        process remembers. Takes at most a twentieth of the watchdog's time.

        Returns:
            Why a process makes other calls; None if no difference is known.
        """
        begin = time.monotonic()
        if begin < self._next_look:
            return None
        try:
            self._signs.answer()
            return self._difference_of_all() or next(iter(self.reasons(self.others, 0.0)), None)
        finally:
            end = time.monotonic()
            self._next_look = end + 19 * (end - begin)

    def _difference_of_all(self) -> str | None:
        """Compares the newest calls; the history of a call covers all calls before it."""
        call = self._looked_at or self.last_call
        if call is None or call.number == self.confirmed:
            return None
        if self._looked_at is None:
            self._looked_at, self._unknown = call, set(self.others)
        for rank in tuple(self._unknown):
            difference = self.difference(rank, call)
            if difference:
                return difference
            if difference == "":
                self._unknown.discard(rank)
        if not self._unknown:
            self._looked_at, self.confirmed = None, call.number
        return None

    def reasons(self, ranks: Sequence[int], seconds: float = _REASON_SECONDS) -> list[str]:
        """Returns why these processes failed or left, for those that have posted it."""
        end = time.monotonic() + seconds
        reasons = []
        for rank in ranks:
            reason = self.departure_reason(rank)
            while reason is None and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS / 10)
                reason = self.departure_reason(rank)
            if reason is not None:
                reasons.append(f"process {rank}: {reason}")
        return reasons

    def will_not_come(self, rank: int) -> bool:
        """Whether a process is known to have gone, or to make another call than this one."""
        call = self.last_call
        if self.departure_reason(rank) is not None:
            return True
        return call is not None and bool(self.difference(rank, call))

    def departure_reason(self, rank: int, ahead: int = 0) -> str | None:
        """Returns why a process cannot take part in this one's last call; None if unknown.

        Args:
            rank: the rank of the process.
            ahead: 0: in this one's last call; 1: in its next one.

        Raises:
            CollectiveError: this process ends.
        """
        check_running()
        self.rounds.answer(rank)
        failed = self.read(rank, "failed", 0.0)
        if failed is not None:
            return failed
        calls, _, how = (self.read(rank, "closed", 0.0) or "").partition(" ")
        if not calls or int(calls) >= self._calls + ahead:
            return None
        return f"{how} after {calls} calls"


class LocalGroup(ProcessGroup):
    """A group in which no other process takes part: one process, or a dry run of several.

    Args:
        rank: see ``ProcessGroup``.
        counts: see ``ProcessGroup``.
    """

    def __init__(self, rank: int = 0, counts: tuple[int, ...] = (1,)) -> None:
        super().__init__(rank, len(counts), math.inf)
        self.counts = counts
        self._notices: dict[str, str] = {}

    def agree(self, description: Description, seconds: float) -> None:
        """See ``ProcessGroup.agree``."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """See ``ProcessGroup.exchange``."""

    def post(self, key: str, text: str) -> None:
        """See ``ProcessGroup.post``."""
        self._notices[key] = text

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """See ``ProcessGroup.read``."""
        return self._notices.get(key) if rank == self.rank else None


class ProcessError(CollectiveError):
    """Another process did not send or receive in time, or ended.

    Attributes:
        rank: the rank of that process.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def group_of(device: Device) -> ProcessGroup:
    """Returns the processes of a device's mesh."""
    return cast(ProcessGroup, device.mesh_state.processes)


# What to use instead of accumulators, AGN and a reduction to one device.
IN_STEP = (
    "use SyncStep or AllReduceCrossDeviceOps, which all processes call together (asynchronous work "
    "of several processes is in gradreduce.ray)"
)


def check_one_process(device: Device, what: str, instead: str = IN_STEP) -> None:
    """Raises ``RuntimeError`` for an object that cannot work over several processes."""
    size = group_of(device).size
    if size > 1:
        raise RuntimeError(
            f"{what} works inside one process only, and the mesh of {device.name} has "
            f"{size} processes: {instead}, or open a mesh of this process alone by "
            "gr.open_mesh(processes='none')"
        )


def _key(number: int) -> str:
    """Returns the key for the notice of a call."""
    return f"call/{number % _KEPT_CALLS}"
