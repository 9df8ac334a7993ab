"""The processes of a mesh: bytes from one to another, and notices that all can read.

A reduction over several processes exchanges terms and results by ``exchange``. Before a process
runs a plan for the first time it compares it with the others' (``agree``): a difference would hang,
or add tensors that do not belong together.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from gradreduce.errors import CollectiveError, InvalidArgumentError, listed

if TYPE_CHECKING:
    from .buffer import Buffer
    from .device import Device

# The rank of another process, and a flat array of bytes that goes to it or comes from it.
Message = tuple[int, np.ndarray]
# The rank of another process, and a buffer that goes to it or comes from it.
Parcel = tuple[int, "Buffer"]
# Sends and receives host arrays.
Move = Callable[[Sequence[Message], Sequence[Message]], None]
# Queues sends and receives of memory of a GPU, whose number and stream handle come last.
GpuMove = Callable[[Sequence[Parcel], Sequence[Parcel], int, int], None]
# Notices and descriptions of this many calls are kept.
_KEPT_CALLS = 1024
# A process remembers so many different calls. It compares one that it has forgotten again.
_KNOWN_CALLS = 256
# How long a process that lost another waits for a notice that tells why.
_REASON_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_MOST_TAGS = (1 << 28) - 1


class Description(NamedTuple):
    """What a call does, for the comparison with other processes.

    Attributes:
        digest: equal for equal calls.
        text: JSON: what all processes must agree in, by name; and the names of the tensors.
    """

    digest: str
    text: str

    @classmethod
    def of(
        cls, what: Mapping[str, Any], names: Sequence[str] = (), *, compared: bool = True
    ) -> Description:
        """Describes a call by JSON values.

        Args:
            what: they.
            names: of its tensors, for errors; empty: they have none.
            compared: whether processes must agree in the names, too.
        """
        text = json.dumps({**what, "names": names} if names else what, default=str)
        digested = text if compared else json.dumps(what, default=str)
        return cls(digest_of(digested.encode()), text)


class Call(NamedTuple):
    """A call of this process.

    Attributes:
        number: from 0.
        description: what it does.
        history: equal where all calls until this one are equal.
    """

    number: int
    description: Description
    history: str


class ProcessGroup(ABC):
    """The processes of a mesh, as one of them sees the others.

    Attributes:
        rank: of this process, from 0.
        size: the number of processes.
        timeout: seconds that a call waits for another process, unless its own deadline is earlier.
        counts: the number of logical devices of each process.
        confirmed: number of the last call that ``look`` has found equal in all processes.
        sends_host_memory: whether ``exchange`` works.
        gpu_library: what may move memory of GPUs: ``"host"``, by way of host memory; ``"nccl"``, a
            communicator of this mesh; ``"group"``, ``exchange_on_gpu``.
        move_on_gpu: what moves it, once that is known; None: it goes by way of host memory.
    """

    sends_host_memory = True
    gpu_library = "host"
    move_on_gpu: GpuMove | None = None

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.counts: tuple[int, ...] = (1,) * size
        self._is_closed = False
        self._calls = 0
        self._last_calls: deque[Call] = deque(maxlen=_KEPT_CALLS)
        self._call = ""  # number and digest of the last one
        self._exchanges = 0  # in that call
        self.confirmed = -1
        self._looked_at: Call | None = None
        self._unknown: set[int] = set()  # processes that have not come to it, as far as is known
        self._next_look = 0.0
        # Digest of each call that was compared: number of its description. Least recent first.
        self._known: dict[str, int] = {}

    @property
    def others(self) -> list[int]:
        """The ranks of all other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def rank_of(self, replica: int) -> int:
        """Returns the rank of the process of a replica, of all processes' numbers."""
        return bisect_right(list(accumulate(self.counts)), replica)

    # -- what a launcher's library does -----------------------------------------------------------

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """Sends and receives arrays; returns when all have arrived, and all sent may be reused.

        Args:
            sends: in the order in which the other process receives them.
            receives: which are overwritten.
            tag: from ``next_tag``; what is sent with another is not received.
            seconds: for all of them.

        Raises:
            ProcessError: another process did not answer within ``seconds``, or ended.
        """

    def exchange_on_gpu(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], gpu: int, stream: int
    ) -> None:
        """Queues sends and receives of GPU memory; only where ``gpu_library`` is ``"group"``.

        Args:
            sends: not empty each, in the order in which the other process receives them.
            receives: which are overwritten.
            gpu: number of the GPU.
            stream: handle of its stream, in whose order it happens.

        Raises:
            CollectiveError: the library refuses.
        """
        raise NotImplementedError

    @abstractmethod
    def post(self, key: str, text: str) -> None:
        """Leaves a notice for the others, without waiting; replaces an earlier one of this key.

        Raises:
            CollectiveError: nobody can read it any more.
        """

    def post_soon(self, key: str, text: str) -> None:
        """As ``post``, or later: in ``post_kept``, which the next notice and exchange call too."""
        self.post(key, text)

    def post_kept(self) -> None:  # noqa: B027  # not every one keeps some
        """Leaves the notice that ``post_soon`` has kept."""

    @abstractmethod
    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """Returns another process's notice; None if none has come within ``seconds``."""

    def close(self) -> None:  # noqa: B027  # not every one must
        """Releases what this group has made."""

    def leave(self, failure: str | None) -> None:
        """Tells the others that this process leaves, waits until they do, and closes.

        A process whose mesh has failed waits for nobody.

        Args:
            failure: why the mesh has failed; None: it has not.

        Raises:
            CollectiveError: another process has not left within ``timeout``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._tell_end("closed its mesh")
        try:
            missing = self._wait_for_leaving(self.timeout) if failure is None else []
            if missing:
                raise CollectiveError(self.describe_missing(missing, "close", self.timeout))
        except BaseException as error:
            self.tell_failure(f"left its mesh by {error!r}")
            raise
        finally:
            self.close()

    def leave_at_exit(self, how: str) -> None:
        """Tells the others that this process ends without closing its mesh.

        Args:
            how: for an error of another process, without the name of this one.
        """
        if not self._is_closed:
            self._is_closed = True
            self._tell_end(how)

    def _tell_end(self, how: str) -> None:
        with suppress(CollectiveError):  # the others may be gone
            self.post("closed", f"{self._calls} {how}")

    def tell_failure(self, reason: str) -> None:
        """Tells the others why this process's mesh has failed."""
        with suppress(CollectiveError):  # the others may be gone
            self.post("failed", reason)

    def leave_unopened(self, reason: str) -> None:
        """Tells the others that this process cannot open its mesh, and closes.

        Waits a moment for them to read it: this process may hold the store.

        Args:
            reason: without the name of this process.
        """
        self._is_closed = True
        with suppress(CollectiveError):
            self.post("failed", reason)
            self._wait_for_leaving(_REASON_SECONDS)
        self.close()

    def _wait_for_leaving(self, seconds: float) -> list[int]:
        """Waits until all others have failed or closed their mesh; returns who has not in time."""
        end = time.monotonic() + seconds
        missing = []
        for rank in self.others:
            while self.read(rank, "failed", 0.0) is None:
                if self.read(rank, "closed", _LOOK_SECONDS) is not None:
                    break
                if time.monotonic() >= end:
                    missing.append(rank)
                    break
        return missing

    # -- what follows from it ---------------------------------------------------------------------

    def agree(self, description: Description, seconds: float) -> None:
        """Compares a call that is about to run with the same call of all other processes.

        A process that remembers such a call leaves its notice, and does not wait; so one process
        may have forgotten it and another not.

        Args:
            description: of the call.
            seconds: for the others' notices.

        Raises:
            InvalidArgumentError: another process makes another call.
            CollectiveError: another process has not made its call within ``seconds``.
        """
        number = self._calls
        self._calls += 1
        before = "" if self.last_call is None else self.last_call.history
        history = digest_of(f"{before} {description.digest}".encode())
        call = Call(number, description, history)
        self._last_calls.append(call)
        self._call, self._exchanges = f"{number} {description.digest}", 0
        place = self._known.pop(description.digest, -1)
        is_new = place < 0
        if is_new:
            place = len(self._known)
            if place == _KNOWN_CALLS:
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
        """The last call, for errors: its number, what it is, and its first tensors."""
        call = self.last_call
        return "open_mesh" if call is None else f"call {call.number} ({_summary(call.description)})"

    def flight_record(self) -> dict[str, Any]:
        """Returns this process and its last calls as JSON values.

        The last call is not known to be done, the earlier ones are: an exchange ends before the
        next call begins.
        """
        calls = self._last_calls.copy()
        last = self._calls - 1
        return {
            "process": self.rank,
            "num_processes": self.size,
            "calls": [
                {"number": number, "digest": each.digest, "done": number < last}
                for number, each, _ in calls
            ],
            "descriptions": {each.digest: json.loads(each.text) for _, each, _ in calls},
        }

    def next_tag(self) -> int:
        """Returns the tag of the next exchange: equal in processes that make the same calls.

        Processes whose calls differ though each is known exchange nothing: their tags differ.
        """
        self._exchanges += 1
        return crc32(f"{self._call} {self._exchanges}".encode()) & _MOST_TAGS

    @property
    def last_call(self) -> Call | None:
        """The last call that was compared, or is being compared; None before the first."""
        return self._last_calls[-1] if self._last_calls else None

    def difference(self, rank: int, call: Call, end: float = 0.0) -> str | None:
        """Describes how another process's call differs from this one's.

        Args:
            rank: of that process.
            call: of this process.
            end: until when it waits for the other's.

        Returns:
            The difference; empty if there is none; None if that process has not called in time.
        """
        number, own, history = call
        while True:
            # Looked up first: a process may leave its notice and go.
            is_last = time.monotonic() >= end or self.has_gone(rank) is not None
            seconds = min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))
            text = self.read(rank, _key(number), 0.0 if is_last else seconds)
            found = (text or "").split()
            if found and int(found[0]) >= number:
                break
            if is_last:
                return None
            if found:
                time.sleep(1e-3)  # an older notice of the same key
        _, digest, place, other_history = found
        # One that is so far ahead has left this call behind: its notice is replaced.
        if int(found[0]) > number or (digest, other_history) == (own.digest, history):
            return ""
        if digest == own.digest:
            return f"before call {number} process {rank} made other calls than process {self.rank}"
        theirs = self.read(rank, f"description/{place}", 0.0) or ""
        is_theirs, _, text = theirs.partition(" ")
        return _describe_difference(
            own.text, text if is_theirs == digest else None, self.rank, rank
        )

    def describe_missing(self, ranks: Sequence[int], what: str, seconds: float) -> str:
        """Describes processes that have not come to ``what``, and why, as far as it is known."""
        names = f"process{'es' if len(ranks) > 1 else ''} {listed(ranks)}"
        have = "have" if len(ranks) > 1 else "has"
        text = f"{names} of {self.size} {have} not come to {what}"
        reasons = self.reasons(ranks, 0.0)
        return f"{text}: {'; '.join(reasons)}" if reasons else f"{text} within {seconds:.3g} s"

    def reason_for(self, rank: int) -> str | None:
        """Returns why a process did not take part in an exchange, if it can be known."""
        reasons = self.reasons([rank])
        if reasons:
            return reasons[0]
        call = self.last_call
        return (self.difference(rank, call) or None) if call is not None else None

    def describe_late(self, seconds: float) -> str | None:
        """Describes the processes that have not come to this one's last call; None: all have."""
        call = self.last_call
        if call is None:
            return None
        late = [rank for rank in self.others if self.difference(rank, call) is None]
        return self.describe_missing(late, self.called, seconds) if late else None

    def look(self) -> str | None:
        """Looks, without waiting, whether the others make this process's calls.

        For a watchdog, while GPUs exchange: nothing else compares calls that each process has made
        before. Takes a twentieth of its thread's time at most.

        Returns:
            Why one does not; None if that is not known.
        """
        begin = time.monotonic()
        if begin < self._next_look:
            return None
        try:
            return self._difference_of_all() or "; ".join(self.reasons(self.others, 0.0)) or None
        finally:
            end = time.monotonic()
            self._next_look = end + 19 * (end - begin)

    def _difference_of_all(self) -> str | None:
        """Compares one call after the other, but not each: its history stands for those before."""
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
        """Returns why these processes failed or left, as far as they have said so."""
        end = time.monotonic() + seconds
        found = []
        for rank in ranks:
            reason = self.has_gone(rank)
            while reason is None and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS / 10)
                reason = self.has_gone(rank)
            if reason is not None:
                found.append(f"process {rank}: {reason}")
        return found

    def has_gone(self, rank: int) -> str | None:
        """Returns why a process will not take part in this one's last call; None if unknown."""
        failed = self.read(rank, "failed", 0.0)
        if failed is not None:
            return failed
        calls, _, how = (self.read(rank, "closed", 0.0) or "").partition(" ")
        if not calls or int(calls) >= self._calls:
            return None
        return f"{how} after {calls} calls"


class ProcessError(CollectiveError):
    """Another process did not send or receive in time, or ended.

    Attributes:
        rank: of that process.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


# What to use instead of accumulators, AGN and a reduction to one device.
IN_STEP = (
    "use SyncStep or AllReduceCrossDeviceOps, which all processes call together (asynchronous work "
    "of several processes is in gradreduce.ray)"
)


def check_one_process(device: Device, what: str, instead: str = IN_STEP) -> None:
    """Raises ``RuntimeError`` for an object that cannot work over several processes."""
    group = device.mesh_state.process_group
    if group is not None:
        raise RuntimeError(
            f"{what} works inside one process only, and the mesh of {device.name} has "
            f"{group.size} processes: {instead}, or open a mesh of this process alone by "
            "gr.open_mesh(processes='none')"
        )


def _key(number: int) -> str:
    """Returns the key of a call's notice."""
    return f"call/{number % _KEPT_CALLS}"


def digest_of(content: bytes | memoryview) -> str:
    """Returns 15 hexadecimal digits of the SHA-256: a number that fits in int64."""
    from hashlib import sha256  # loads OpenSSL, which takes as long as ten of our modules

    return sha256(content).hexdigest()[:15]


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns an array's memory as bytes; it is contiguous."""
    return array.reshape(-1).view(np.uint8)


def _summary(description: Description) -> str:
    """Names a call and its first tensor."""
    what = json.loads(description.text)
    tensors = _named(what)
    return f"{what['call']}, tensors: {listed(tensors, 2)}" if tensors else what["call"]


def _named(what: Mapping[str, Any]) -> list[str]:
    """Returns the tensors of a call: their names, if they have any, dtypes and shapes."""
    tensors, names = what["tensors"], what.get("names")
    if not names:
        return list(tensors)
    return [  # a SyncStep lists indices of its variables
        name if isinstance(each, int) else f"{name} {each}"
        for name, each in zip(names, tensors, strict=True)
    ]


def _describe_difference(ours: str, theirs: str | None, rank: int, other: int) -> str:
    """Describes the first difference between two calls."""
    if theirs is None:
        return f"process {other} makes another call than process {rank}"
    here, there = json.loads(ours), json.loads(theirs)
    for name, value in here.items():
        if name not in ("tensors", "names") and there.get(name) != value:
            return (
                f"the processes make different calls: {name} is {value} in process {rank}, "
                f"{there.get(name)} in process {other}"
            )
    mine, others = here["tensors"], there["tensors"]
    names, other_names = here.get("names") or [], there.get("names") or []
    differ = "the processes reduce different tensors: "
    if len(mine) != len(others):
        alone = [
            f" ({listed(missing)} only in process {number})"
            for number, own, theirs in ((rank, names, other_names), (other, other_names, names))
            if (missing := [name for name in own if name not in theirs])
        ]
        counts = f"{len(mine)} in process {rank}, {len(others)} in process {other}"
        return differ + counts + "".join(alone)
    pairs = [
        (mine, others),
        (names, other_names),
    ]  # names differ only where dtypes and shapes agree
    one, two = next(pair for pair in pairs if pair[0] != pair[1])
    index = next(index for index, each in enumerate(one) if [each] != two[index : index + 1])
    place: Any = index
    if names != other_names:
        mine, others = _named(here), _named(there)
    elif names:
        place = names[index]
    return (
        f"{differ}tensor {place} is {mine[index]} in process {rank}, {others[index]} in process "
        f"{other}"
    )
