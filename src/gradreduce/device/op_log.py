"""The operation log of a mesh, and its views: journals and the flight record.

Each operation is appended once, as one ``Record``. A journal gets the records of the time while it
is open; tests count them. The log itself keeps the last 1,000: the flight record is these, and
which of them are done, which is computed only when it is asked.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal, Protocol

from gradreduce.errors import log_warning

from .buffer import Mark, Queue, Row
from .waiting import run_in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from .command_list import Command, CommandList
    from .device import Device
    from .pending_calls import Label, PendingCall
    from .process_group import ProcessGroup

# The kinds whose bytes leave a device for another.
CROSSING = ("launch", "copy", "collective", "exchange")
Kind = Literal["launch", "copy", "collective", "exchange", "fill", "upload", "download", "sync"]
LENGTH = 1000  # operations
_MARKS = 256  # events kept: enough to distinguish two queues of 64 devices
_LOOK_SECONDS = 0.005  # for marks that are made to see how far the queues are
QUEUES: tuple[Queue, ...] = ("compute", "transfer")
_numbers = count(1)  # of the files of this process


@dataclass(slots=True, unsafe_hash=True)  # frozen, each would take a microsecond longer
class Record:
    """One operation that was submitted to a device; not to be changed.

    Attributes:
        kind: ``launch``, ``copy``, ``collective``, ``exchange`` (with other processes), ``fill``,
            ``upload``, ``download`` or ``sync``.
        name: the kernel or collective; ``captured step`` for the one launch of a whole capture;
            empty for the rest.
        device: logical index of the device whose queue did it.
        source: logical index of the device a copy read from; -1 for everything else.
        nbytes: bytes that left a device. A copy: its size. A launch: the operands that lie on
            another physical device than the queue. A collective: the size of one buffer, on the
            record of each of its devices. An exchange: what is sent to other processes. An upload
            or download: its size, host to device.
        queue: ``compute`` or ``transfer``.
        num_rows: rows of a launch's pointer table (how many tensors it served), or operations in
            a capture; else 0.
        label: the packs and tensors that it is for; None if unknown.
        phase: what it does for them, such as ``pack`` or ``unpack``; empty if unknown.
    """

    kind: Kind
    name: str
    device: int
    source: int = -1
    nbytes: int = 0
    queue: str = "compute"
    num_rows: int = 0
    label: Label | None = field(default=None, compare=False, repr=False)
    phase: str = field(default="", compare=False, repr=False)


@dataclass(repr=False)
class Journal:
    """The records made inside a ``with mesh.journal()`` block, in call order."""

    records: list[Record] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Journal of {len(self.records)} records: {self.launches} launches, {self.copies} "
            f"copies, {self.bytes} bytes, {self.uploads} uploads, {self.syncs} syncs>"
        )

    def of(self, kind: Kind) -> list[Record]:
        """Returns the records of one kind, in order."""
        return [record for record in self.records if record.kind == kind]

    @property
    def launches(self) -> int:
        """The number of kernel launches."""
        return len(self.of("launch"))

    @property
    def copies(self) -> int:
        """The number of copies from device to device (the same one included)."""
        return len(self.of("copy"))

    @property
    def bytes(self) -> int:
        """Bytes that crossed from one device to another by copy, collective or launch."""
        return sum(record.nbytes for record in self.records if record.kind in CROSSING)

    @property
    def uploads(self) -> int:
        """The number of transfers from host memory to a device."""
        return len(self.of("upload"))

    @property
    def syncs(self) -> int:
        """The number of host waits: downloads and ``synchronize``."""
        return len(self.of("sync")) + len(self.of("download"))


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """A ``Record`` in the flight record.

    Attributes:
        sequence: its number in the mesh, from 1, in the order of submission.
        kind: see ``Record``, as the next five.
        name: the kernel or collective.
        device: logical index of the device whose queue it is in.
        source: logical index of the device a copy reads from.
        nbytes: bytes that leave a device.
        num_rows: tensors that a launch serves, or operations of a captured step.
        tensors: what it is for: ``"pack 3 of 8 (tensors 5 to 9)"``; empty if unknown.
        queue: ``compute`` or ``transfer``.
        done: whether it is known to be over. What was not when the mesh was reset never is: the
            simulation has dropped it, and what GPUs did of it in a failed mesh is worth nothing.
    """

    sequence: int
    kind: str
    name: str
    device: int
    source: int
    nbytes: int
    num_rows: int
    tensors: str
    queue: str
    done: bool


_OF_RECORD = {each.name for each in fields(FlightEntry)} - {"sequence", "tensors", "done"}


class ThreadState(threading.local):
    """What one thread works for on a mesh, and who is told.

    Attributes:
        label: of its records.
        phase: of its records.
        command_list: records its commands; None: nobody does.
        pending_call: the call with a deadline that it is in.
        num_submitted: launches, copies and collectives; see ``MeshState.on_partial_failure``.
        started: while a trace is open, when it began to submit an operation, in nanoseconds; or 0.
    """

    label: Label | None = None
    phase: str = ""
    command_list: CommandList | None = None
    pending_call: PendingCall | None = None
    num_submitted: int = 0
    started: int = 0


class Ranges(Protocol):
    """Ranges of a profiler, such as NVTX, of the calling thread."""

    def push(self, text: str) -> None:
        """Begins a range inside the one that is open."""

    def pop(self) -> None:
        """Ends the last one that was begun."""


_QueueOf = tuple[int, str]  # logical index of a device, and one of its queues


class OpLog:
    """The operations of one mesh: appended once each, by all threads, without a lock.

    Attributes:
        ring: number and record of the last ones.
        thread: what the calling thread works for.
        num_traces: how many traces are open.
        ranges: of a profiler, which shows a range for each label; None: nobody asked.
    """

    ranges: Ranges | None = None

    def __init__(self) -> None:
        self.num_traces = 0
        self.ring: deque[tuple[int, Record]] = deque(maxlen=LENGTH)
        self.thread = ThreadState()
        self._numbers = count(1)  # of the next one; drawn when it has been given
        self._journals: tuple[Journal, ...] = ()
        self._lock = threading.RLock()  # to open and close journals
        # The number of the last operation before a mark, and the mark.
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=_MARKS)
        # Up to which number a queue is over, without a mark: by what the host waited for.
        self._over: dict[_QueueOf, int] = {}
        self._dropped: set[int] = set()  # by resets: operations that are never done

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """Opens a journal of all threads' work until the block ends."""
        with self._opened(Journal()) as journal:
            yield journal

    @contextmanager
    def timed_journal(self, records: list[Record]) -> Iterator[Journal]:
        """As ``journal``, with a list that looks at the clock; submissions note when they begin."""
        with self._opened(Journal(records)) as journal:
            with self._lock:
                self.num_traces += 1
            try:
                yield journal
            finally:
                with self._lock:
                    self.num_traces -= 1

    @contextmanager
    def _opened(self, journal: Journal) -> Iterator[Journal]:
        with self._lock:
            self._journals = (*self._journals, journal)
        try:
            yield journal
        finally:
            with self._lock:
                self._journals = tuple(each for each in self._journals if each is not journal)

    def append(
        self,
        record: Record,
        command: Command | None = None,
        rows: Sequence[Row] = (),
        num_written: int = 0,
    ) -> int:
        """Labels and logs an operation that was submitted: later marks come after it.

        Args:
            record: of it, new.
            command: submits it again, for this thread's command list; None: it cannot be.
            rows: the operands, written ones first.
            num_written: how many operands of each row it writes.

        Returns:
            Its number.
        """
        thread = self.thread
        record.label, record.phase = thread.label, thread.phase
        if thread.command_list is not None and command is not None:
            thread.command_list.add(command, (record,), rows, num_written)
        return self.repeat(record)

    def repeat(self, record: Record, parts: Sequence[Record] = ()) -> int:
        """Logs an operation that was submitted again.

        Args:
            record: as it was logged the first time.
            parts: for journals: what a captured step did.
        """
        number = next(self._numbers)
        self.ring.append((number, record))
        for journal in self._journals:
            journal.records.extend(parts or (record,))
        return number

    def mark_finished(self, number: int, device: Device, *queues: Queue) -> None:
        """Records that the host saw these queues finish, up to an operation number."""
        for queue in queues:
            key = device.index, queue
            self._over[key] = max(number, self._over.get(key, 0))

    def marked(self, mark: Mark) -> None:
        """Records a mark that has just been made for any reason."""
        if self.ring:
            self._marks.append((self.ring[-1][0], mark))

    def entries(self, devices: Sequence[Device], *, fresh: bool) -> list[FlightEntry]:
        """Returns all entries, oldest first.

        Args:
            devices: of the whole mesh.
            fresh: mark every queue now and look whether the marks pass at once, for some
                milliseconds; otherwise only marks that were made anyway are looked at.
        """
        submitted = sorted(self.ring.copy())  # by their numbers
        if fresh and submitted:
            self._query_marks(devices)
        reached = self._reached()
        return [
            FlightEntry(
                sequence=number,
                tensors="" if record.label is None else str(record.label),
                done=number <= reached.get((record.device, record.queue), 0)
                and number not in self._dropped,
                **{name: getattr(record, name) for name in _OF_RECORD},
            )
            for number, record in submitted
        ]

    def late_devices(self, devices: Sequence[Device]) -> list[Device]:
        """Returns the devices whose queues are not empty.

        Without those whose queues are known to wait for another device, if any is left then.
        """
        passed = {(mark.device, mark.queue) for mark in self._query_marks(devices) if mark.passed}
        queues = [(device, queue) for device in devices for queue in QUEUES]
        late = [each for each in queues if each not in passed]
        stuck = [(device, queue) for device, queue in late if not device._is_waiting(queue)]
        return list(dict.fromkeys(device for device, _ in stuck or late))

    def drop(self) -> None:
        """Closes open entries for a reset: what is not known to be done stays so."""
        entries = self.entries((), fresh=False)
        self._over = self._reached()
        self._dropped = {each.sequence for each in entries if not each.done}
        self._marks.clear()

    def _reached(self) -> dict[_QueueOf, int]:
        """Returns the number up to which each queue is known to be done."""
        reached = dict(self._over)
        for last, mark in self._marks.copy():
            key = mark.device.index, mark.queue
            if last > reached.get(key, 0) and mark.passed:
                reached[key] = last
        return reached

    def _query_marks(self, devices: Sequence[Device]) -> list[Mark]:
        """Marks all queues in a new thread, because a driver whose queue is full may block.

        Returns:
            The marks that could be made.
        """
        made: list[Mark] = []
        last = self.ring[-1][0] if self.ring else 0

        def mark() -> None:
            for device in devices:
                for queue in QUEUES:
                    try:
                        made.append(Mark(device, queue, device._mark(queue)))
                    except Exception:  # noqa: S112  # a failed device cannot be queried
                        continue
                device._progress()

        end = time.monotonic() + _LOOK_SECONDS
        run_in_thread(mark).wait(_LOOK_SECONDS * 4)
        marks = list(made)
        self._marks.extend((last, mark) for mark in marks)
        while time.monotonic() < end and not all(mark.passed for mark in marks):
            time.sleep(_LOOK_SECONDS / 20)
        return marks


class PackScope:
    """See ``MeshState.pack_scope``. A class, because a generator is three times slower.

    Without a deadline it costs a label, and no mark.
    """

    __slots__ = ("_before", "_devices", "_log", "_marks", "_pack_info", "_ranges")

    def __init__(
        self, log: OpLog, pack_info: Label | None, devices: tuple[Device, ...], *, marks: bool
    ):
        self._log = log
        self._pack_info = pack_info
        self._devices = devices
        self._marks = marks

    def __enter__(self) -> None:
        thread = self._log.thread
        self._before = thread.label, thread.phase
        thread.label = self._pack_info
        self._ranges = self._log.ranges
        if self._ranges is not None:
            self._ranges.push(str(self._pack_info or ""))
        if self._marks and (thread.pending_call or thread.command_list) is not None:
            self._mark_queues(leaves=False)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        thread = self._log.thread
        thread.label, thread.phase = self._before
        if self._ranges is not None:
            self._ranges.pop()
        in_use = self._marks and (thread.pending_call or thread.command_list) is not None
        if error is None and in_use:
            self._mark_queues(leaves=True)

    def _mark_queues(self, *, leaves: bool) -> None:
        """Marks the queues for a call with a deadline, now and in each replay."""
        thread = self._log.thread
        if thread.pending_call is not None:
            thread.pending_call.mark_queues(self._pack_info, leaves=leaves, devices=self._devices)
        if thread.command_list is not None:
            thread.command_list.add(partial(self._mark_queues, leaves=leaves))


def flight_path(wanted: str) -> str:
    """Returns a mesh's path: ``flight.json`` gives ``flight.4711-1.json``.

    Of process 4711 the first mesh. What is there and no regular file, such as a device or a FIFO,
    is written to itself.

    Args:
        wanted: the value of ``GRADREDUCE_FLIGHT_RECORD``; empty: nowhere.

    Raises:
        ValueError: nothing can be written there.
    """
    from pathlib import Path

    if not wanted:
        return ""
    try:
        target = Path(wanted).absolute()
        if target.is_dir() or wanted.endswith(os.sep):
            raise OSError("it is a folder")
        if _is_special(target):
            if not os.access(target, os.W_OK):
                raise OSError("you have no permission to write it")
            return str(target)
        if target.is_symlink():
            raise OSError("it is a symbolic link; name the file itself")
        number = f"{os.getpid()}-{next(_numbers)}"
        target = target.with_name(f"{target.stem}.{number}{target.suffix}")
        _write_part(target, b"", mode=0o600).unlink()  # as it will be when the mesh fails
    except OSError as error:
        raise ValueError(
            f"GRADREDUCE_FLIGHT_RECORD={wanted!r} cannot be written: {error.strerror or error}; "
            "name a file in an existing folder that you can write to"
        ) from error
    return str(target)


def write_flight(
    path: str, mesh: str, reason: str, entries: Sequence[FlightEntry], group: ProcessGroup | None
) -> None:
    """Writes mesh, reason and entries as JSON, completely or not at all.

    The object is ``{"mesh": …, "reason": …, "entries": [{…}, …]}``; in one of several processes it
    has the fields of ``ProcessGroup.flight_record`` too, and the file's name has the rank.

    Does not raise: its caller has a worse error to report. A failure is logged.

    Args:
        path: from ``flight_path``.
        mesh: which one.
        reason: why it failed.
        entries: of its record.
        group: its processes; None: this one alone.
    """
    from pathlib import Path

    target = Path(path)
    content = {"mesh": mesh, "reason": reason, "entries": [asdict(each) for each in entries]}
    if group is not None:
        content |= group.flight_record()
        if not _is_special(target):
            target = target.with_name(f"{target.stem}.rank{group.rank}{target.suffix}")
    written = (json.dumps(content, indent=1) + "\n").encode()
    try:
        if _is_special(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_NOCTTY)
            with os.fdopen(descriptor, "wb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError("it is a regular file now")
                file.write(written)
        else:
            replace_file(target, written, mode=0o666)
    except OSError as error:
        log_warning(__name__, "GRADREDUCE_FLIGHT_RECORD: %s was not written: %s", target, error)


def _is_special(path: Path) -> bool:
    """Whether the path is a device or a FIFO, which is written to, not replaced."""
    return path.exists() and not (path.is_file() or path.is_dir())


def replace_file(target: Path, content: bytes, *, mode: int) -> None:
    """Replaces ``target`` by a regular file, completely or not at all; follows no link.

    Args:
        target: what has this name is replaced.
        content: of the file.
        mode: of the file, less the bits of the process's mask.

    Raises:
        OSError: nothing was changed, and nothing is left behind.
    """
    part = _write_part(target, content, mode=mode)
    try:
        part.replace(target)
    except OSError:
        part.unlink()
        raise


def _write_part(target: Path, content: bytes, *, mode: int) -> Path:
    """Writes a new file of a random name beside ``target``, synced to disk."""
    part = target.with_name(f"{target.name}.{os.urandom(8).hex()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        part.unlink()
        raise
    return part
