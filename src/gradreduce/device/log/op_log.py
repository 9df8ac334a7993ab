"""The operation log of a mesh, and its views: journals and the flight record.

Each operation is appended once, as one ``Record``. A journal collects the records that are made
while it is open. The log itself keeps the last 1,000 records. The flight record is a list of these;
which of them are done is found out when it is requested.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradreduce.device.failure.waiting import run_in_thread
from gradreduce.device.memory.buffer import Mark, Queue, Row
from gradreduce.errors import log_warning

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.failure.pending_calls import Label, PendingCall
    from gradreduce.device.processes import Processes
    from gradreduce.device.run.commands import Command, CommandList

# Operations that may move bytes from one device to another.
CROSSING = ("launch", "copy", "collective", "exchange")
OperationKind = Literal[
    "launch", "copy", "collective", "exchange", "fill", "upload", "download", "sync"
]
LENGTH = 1000  # operations
_MARKS = 256  # events kept: two for each queue of 64 devices
_LOOK_SECONDS = 0.005  # how long a flight record waits for marks that it makes itself
QUEUES: tuple[Queue, ...] = ("compute", "transfer")
_numbers = count(1)  # for the file names of this process's meshes


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which is a microsecond slower
class Record:
    """One operation that was submitted to a device; do not change it.

    Attributes:
        kind: ``launch``, ``copy``, ``collective``, ``exchange`` (with other processes), ``fill``,
            ``upload``, ``download`` or ``sync``.
        name: the kernel or collective; ``captured step`` for the launch of a whole capture; of a
            download that no call waits for, what it reads; else empty.
        device: the logical index of the device whose queue runs it.
        source: the logical index of the device that a copy reads; -1 for other operations.
        nbytes: the bytes that it moves. Copy, upload, download, fill: the size of the memory.
            Launch: the size of operands on other physical devices. Collective: the size of one
            buffer, in the record of each device. Exchange: the size of what is sent to other
            processes.
        queue: ``compute`` or ``transfer``.
        num_rows: the number of rows (tensors) of a launch, or of operations in a capture; else 0.
        weight: what a launch multiplies its terms by; see docs/weighted_means.md.
        label: the packs and tensors that it works on; None if unknown.
        phase: the step of the reduction, such as ``pack`` or ``unpack``; empty if unknown.
    """

    kind: OperationKind
    name: str
    device: int
    source: int = -1
    nbytes: int = 0
    queue: str = "compute"
    num_rows: int = 0
    weight: float = 1
    label: Label | None = field(default=None, compare=False, repr=False)
    phase: str = field(default="", compare=False, repr=False)


@dataclass(repr=False)
class Journal:
    """The records that were made inside a ``with mesh.journal()`` block, in order."""

    records: list[Record] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Journal of {len(self.records)} records: {self.launches} launches, {self.copies} "
            f"copies, {self.bytes} bytes, {self.uploads} uploads, {self.syncs} syncs>"
        )

    def of(self, kind: OperationKind) -> list[Record]:
        """Returns the records of one kind, in order."""
        return [record for record in self.records if record.kind == kind]

    @property
    def launches(self) -> int:
        """The number of kernel launches."""
        return len(self.of("launch"))

    @property
    def copies(self) -> int:
        """The number of copies from device to device, also within one device."""
        return len(self.of("copy"))

    @property
    def bytes(self) -> int:
        """The number of bytes that copies, collectives and launches moved between devices."""
        return sum(record.nbytes for record in self.records if record.kind in CROSSING)

    @property
    def uploads(self) -> int:
        """The number of transfers from host memory to a device."""
        return len(self.of("upload"))

    @property
    def syncs(self) -> int:
        """The number of host waits: downloads, except those with a name, and ``synchronize``."""
        downloads = [record for record in self.of("download") if not record.name]
        return len(self.of("sync")) + len(downloads)


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """A ``Record`` in the flight record.

    Attributes:
        sequence: the number of the operation in the mesh, from 1, in the order of submission.
        kind: see ``Record``; also for the next five.
        name: the kernel or collective.
        device: the logical index of the device whose queue runs it.
        source: the logical index of the device that a copy reads.
        nbytes: the bytes that it moves.
        num_rows: the tensors of a launch, or the operations of a captured step.
        tensors: the packs and tensors: ``"pack 3 of 8 (tensors 5 to 9)"``; empty if unknown.
        queue: ``compute`` or ``transfer``.
        done: whether it is known to be done. False for ever if it was not done when the mesh was
            reset.
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
    """What one thread is working on in a mesh, and what records its commands.

    Attributes:
        label: the label of its records.
        phase: the phase of its records.
        command_list: records its commands; None: not recorded.
        pending_call: the call with a deadline that the thread is in; or None.
        num_submitted: the number of launches, copies and collectives; see
            ``MeshState.on_partial_failure``.
        started: the time in nanoseconds when it began to submit the operation; 0 if no trace is
            open.
        compared: names and values that its calls over processes compare too.
    """

    label: Label | None = None
    phase: str = ""
    command_list: CommandList | None = None
    pending_call: PendingCall | None = None
    num_submitted: int = 0
    started: int = 0
    compared: tuple[tuple[str, object], ...] = ()


class ProfilerRanges(NamedTuple):
    """The calling thread's ranges in a profiler, such as NVTX.

    Attributes:
        push: begins a range inside the open one.
        pop: ends the range that was begun last.
    """

    push: Callable[[str], object]
    pop: Callable[[], object]


_QueueOf = tuple[int, str]  # a physical device, and one of its queues


class OpLog:
    """The operations of one mesh; all threads append to it without a lock.

    Attributes:
        ring: the number and record of the last operations.
        thread: the state of the calling thread.
        num_traces: the number of open traces.
        ranges: the profiler's ranges, one for each label; None: no profiler.
        physical: the physical device of each logical index.
    """

    ranges: ProfilerRanges | None = None

    def __init__(self) -> None:
        self.num_traces = 0
        self.ring: deque[tuple[int, Record]] = deque(maxlen=LENGTH)
        self.thread = ThreadState()
        self.physical: dict[int, int] = {}
        self._numbers = count(1)  # drawn after an operation was submitted
        self._journals: tuple[Journal, ...] = ()
        self._lock = threading.RLock()  # to open and close journals
        # The number of the last operation before a mark, and the mark.
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=_MARKS)
        # The last operation of each queue that a wait of the host has shown to be done.
        self._over: dict[_QueueOf, int] = {}
        self._dropped: set[int] = set()  # operations that a reset has dropped

    @contextmanager
    def journal(self, timed: list[Record] | None = None) -> Iterator[Journal]:
        """Opens a journal of all threads' work until the block ends.

        Args:
            timed: a list for its records that also stores times: then submissions store when they
                begin.
        """
        journal = Journal([] if timed is None else timed)
        is_trace = timed is not None
        with self._lock:
            self.num_traces += is_trace
            self._journals = (*self._journals, journal)
        try:
            yield journal
        finally:
            with self._lock:
                self.num_traces -= is_trace
                self._journals = tuple(each for each in self._journals if each is not journal)

    def append(
        self,
        record: Record,
        command: Command | None = None,
        rows: Sequence[Row] = (),
        num_written: int = 0,
    ) -> int:
        """Labels and logs a submitted operation, before a later mark is made.

        Args:
            record: a new record of it.
            command: submits it again, for this thread's command list; None: it cannot be repeated.
            rows: the operands; those that are written come first.
            num_written: the number of operands that are written in each row.

        Returns:
            The number of the operation.
        """
        thread = self.thread
        record.label, record.phase = thread.label, thread.phase
        if thread.command_list is not None and command is not None:
            thread.command_list.add(command, (record,), rows, num_written)
        return self.repeat(record)

    def repeat(self, record: Record, parts: Sequence[Record] = ()) -> int:
        """Logs an operation that was submitted again.

        Args:
            record: the record of the first time.
            parts: for journals: the records of a captured step's operations.
        """
        number = next(self._numbers)
        self.ring.append((number, record))
        for journal in self._journals:
            journal.records.extend(parts or (record,))
        return number

    def mark_finished(self, number: int, device: Device, *queues: Queue) -> None:
        """Records that these queues have finished all operations up to ``number``."""
        for queue in queues:
            key = device.physical, queue
            self._over[key] = max(number, self._over.get(key, 0))

    def note_mark(self, mark: Mark) -> None:
        """Records a mark that has just been made."""
        if self.ring:
            self._marks.append((self.ring[-1][0], mark))

    def entries(self, devices: Sequence[Device], *, fresh: bool) -> list[FlightEntry]:
        """Returns all entries, oldest first.

        Args:
            devices: all devices of the mesh.
            fresh: mark every queue now, and wait some milliseconds for these marks to pass.
                Otherwise only marks that exist already are queried.
        """
        submitted = sorted(self.ring.copy())  # by their numbers
        if fresh and submitted:
            self._query_marks(devices)
        reached = self._last_done()
        return [
            FlightEntry(
                sequence=number,
                tensors="" if record.label is None else str(record.label),
                done=number <= reached.get((self.physical[record.device], record.queue), 0)
                and number not in self._dropped,
                **{name: getattr(record, name) for name in _OF_RECORD},
            )
            for number, record in submitted
        ]

    def late_devices(self, devices: Sequence[Device]) -> list[Device]:
        """Returns the devices whose queues are not empty.

        Leaves out devices whose queues are known to wait for another device, unless all do.
        """
        passed = {
            mark.device.queues[mark.queue] for mark in self._query_marks(devices) if mark.passed
        }
        queues = [(device, name) for device in devices for name in QUEUES]
        late = [each for each in queues if each[0].queues[each[1]] not in passed]
        stuck = [(device, name) for device, name in late if not device._is_waiting(name)]
        return list(dict.fromkeys(device for device, _ in stuck or late))

    def drop(self) -> None:
        """For a reset: entries that are not known to be done now never become done."""
        entries = self.entries((), fresh=False)
        self._over = self._last_done()
        self._dropped = {each.sequence for each in entries if not each.done}
        self._marks.clear()

    def _last_done(self) -> dict[_QueueOf, int]:
        """Returns the number of the last operation that each queue is known to have done."""
        reached = dict(self._over)
        for last, mark in self._marks.copy():
            key = mark.device.physical, mark.queue
            if last > reached.get(key, 0) and mark.passed:
                reached[key] = last
        return reached

    def _query_marks(self, devices: Sequence[Device]) -> list[Mark]:
        """Marks all queues in a new thread: a driver with a full queue may block.

        Returns:
            The marks that could be made.
        """
        new_marks: list[Mark] = []
        queues = {queue for device in devices for queue in device.queues.values()}
        last = self.ring[-1][0] if self.ring else 0

        def mark() -> None:
            for queue in queues:
                # A failed device cannot be queried. A backend makes its device current: this thread
                # has none yet.
                with suppress(Exception):
                    new_marks.append(queue.device.mesh_state.order.new_mark(queue))
            for device in devices:
                device._progress()

        end = time.monotonic() + _LOOK_SECONDS
        run_in_thread(mark).wait(_LOOK_SECONDS * 4)
        marks = list(new_marks)
        self._marks.extend((last, mark) for mark in marks)
        while time.monotonic() < end and not all(mark.passed for mark in marks):
            time.sleep(_LOOK_SECONDS / 20)
        return marks


class PackScope:
    """See ``MeshState.pack_scope``. A class, because a generator is three times slower.

    Makes marks only if the call has a deadline.
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


def flight_path(value: str) -> str:
    """Returns the flight record's path of a mesh, such as ``flight.4711-1.json``.

    That is the path for ``flight.json``, process 4711 and its first mesh. A path that is a device
    or a FIFO is returned unchanged.

    Args:
        value: the value of ``GRADREDUCE_FLIGHT_RECORD``; if empty, nothing is written.

    Raises:
        ValueError: the path cannot be written.
    """
    if not value:
        return ""
    try:
        target = Path(value).absolute()
        if target.is_dir() or value.endswith(os.sep):
            raise OSError("it is a folder")
        if _is_special(target):
            if not os.access(target, os.W_OK):
                raise OSError("you have no permission to write it")
            return str(target)
        if target.is_symlink():
            raise OSError("it is a symbolic link; name the file itself")
        number = f"{os.getpid()}-{next(_numbers)}"
        target = target.with_name(f"{target.stem}.{number}{target.suffix}")
        _write_part(target, b"", mode=0o600).unlink()  # tests that it can be written later
    except OSError as error:
        raise ValueError(
            f"GRADREDUCE_FLIGHT_RECORD={value!r} cannot be written: {error.strerror or error}; "
            "name a file in an existing folder that you can write to"
        ) from error
    return str(target)


def write_flight(
    path: str, mesh: str, reason: str, entries: Sequence[FlightEntry], group: Processes
) -> None:
    """Writes mesh, reason and entries as JSON, completely or not at all.

    The object is ``{"mesh": …, "reason": …, "entries": [{…}, …]}``.

    With several processes it also has the fields of ``Processes.flight_record``, and the file's
    name contains the rank. A failure to write is logged and not raised, so that it does not hide
    why the mesh failed.

    Args:
        path: the result of ``flight_path``.
        mesh: the name of the mesh.
        reason: why it failed.
        entries: the entries of its flight record.
        group: its processes.
    """
    target = Path(path)
    content = {"mesh": mesh, "reason": reason, "entries": [asdict(each) for each in entries]}
    if group.size > 1:
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
    """Whether the path is a device or a FIFO, which is not replaced."""
    return path.exists() and not (path.is_file() or path.is_dir())


def replace_file(target: Path, content: bytes, *, mode: int) -> None:
    """Replaces ``target`` by a regular file, completely or not at all; follows no link.

    Args:
        target: the file to replace or make.
        content: the new content.
        mode: the permissions, less those of the process's umask.

    Raises:
        OSError: the file cannot be written. It was not changed, and no other file is left.
    """
    part = _write_part(target, content, mode=mode)
    try:
        part.replace(target)
    except OSError:
        part.unlink()
        raise


def _write_part(target: Path, content: bytes, *, mode: int) -> Path:
    """Writes a new file with a random name beside ``target``, and syncs it to disk."""
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
