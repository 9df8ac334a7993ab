"""Traces of operations in the Trace Event Format, which Perfetto and chrome://tracing show.

Source: "Trace Event Format", the specification of Chrome's trace viewer: complete events (``X``)
and metadata (``M``); times are in microseconds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .op_log import QUEUES, Journal, OpLog, Record, ThreadState, replace_file

TraceEvent = dict[str, Any]


class TimedRecords(list[Record]):
    """The records of a journal, with the times at which they were logged.

    Attributes:
        timed: each record with its begin and end on the host in nanoseconds, and the thread that
            submitted it.
    """

    def __init__(self, thread: ThreadState) -> None:
        super().__init__()
        self.timed: list[tuple[Record, int, int, int]] = []
        self._thread = thread

    def extend(self, records: Iterable[Record]) -> None:
        """Appends records that the calling thread has just submitted."""
        end = time.perf_counter_ns()
        start, self._thread.started = self._thread.started or end, 0
        made = list(records)
        self.timed += [(record, start, end, threading.get_ident()) for record in made]
        super().extend(made)


def trace_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a file that can be made or replaced.

    Raises:
        ValueError: the path is a folder or a device, or in a folder that does not exist.
    """
    target = Path(path).absolute()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise ValueError(f"path={str(path)!r} must name a regular file in an existing folder")
    return target


@contextmanager
def write_trace(log: OpLog, path: Path | None, names: Mapping[int, str]) -> Iterator[Journal]:
    """Context manager: opens a journal, and writes its trace when the block ends.

    Args:
        log: the log of the mesh.
        path: the file to write; None: no file.
        names: the name of each device, by logical index.
    """
    records = TimedRecords(log.thread)
    begin = time.perf_counter_ns()
    with log.journal(records) as journal:
        try:
            yield journal
        finally:
            if path is not None:
                events = [_event_of(*each, begin) for each in records.timed.copy()]
                replace_file(path, trace_text(events, names), mode=0o666)


def _event_of(record: Record, start: int, end: int, thread: int, begin: int) -> TraceEvent:
    return event_of(
        kind=record.kind,
        name=record.name,
        device=record.device,
        queue=record.queue,
        start=(start - begin) / 1e3,
        duration=(end - start) / 1e3,
        details={
            "source": record.source,
            "bytes": record.nbytes,
            "rows": record.num_rows,
            "tensors": "" if record.label is None else str(record.label),
            "phase": record.phase,
            "thread": thread,
        },
    )


def event_of(
    *,
    kind: str,
    name: str,
    device: int,
    queue: str,
    start: float,
    duration: float,
    details: Mapping[str, Any],
) -> TraceEvent:
    """Returns the complete event of one operation.

    Args:
        kind: see ``Record``; also for the next three.
        name: the name of the event; if empty, the kind is its name.
        device: becomes the process of the event, because viewers group events by process.
        queue: becomes the thread of the event.
        start: the start in microseconds.
        duration: the duration in microseconds.
        details: JSON values that a viewer shows for a selected event.
    """
    return {
        "name": name or kind,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": device,
        "tid": QUEUES.index(queue) + 1 if queue in QUEUES else 0,
        "args": dict(details),
    }


def trace_text(events: Iterable[TraceEvent], names: Mapping[int, str]) -> bytes:
    """Returns a file's content: these events and the names of devices and queues."""
    named: list[TraceEvent] = []
    for device, name in names.items():
        named.append(_metadata("process_name", device, 0, name))
        named += [
            _metadata("thread_name", device, tid, queue) for tid, queue in enumerate(QUEUES, 1)
        ]
    content = {"displayTimeUnit": "ms", "traceEvents": [*named, *events]}
    return (json.dumps(content) + "\n").encode()


def _metadata(what: str, device: int, tid: int, name: str) -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0, "pid": device, "tid": tid, "args": {"name": name}}
