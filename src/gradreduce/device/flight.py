"""The last operations that a mesh gave to its devices, and how far they came; never waits for any.

Always on: what is given is one small tuple in a ring. Which of it is done is worked out when asked.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .journal import Fields, Record
from .memory import Queue

if TYPE_CHECKING:
    from .base import Device

__all__ = ["LENGTH", "Flight", "FlightEntry", "write_flight"]

_log = logging.getLogger(__name__)
LENGTH = 1000  # operations
_MARKS = 256  # events kept: enough to tell two queues of 64 devices apart
_LOOK_SECONDS = 0.005  # for marks that are made to see how far the queues are
QUEUES: tuple[Queue, ...] = ("compute", "transfer")

What = Fields | Record


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One operation that a device was given.

    Attributes:
        sequence: its number in the mesh, from 1, in the order in which they were given.
        kind: ``launch``, ``copy``, ``collective``, ``fill``, ``upload``, ``download`` or ``sync``.
        name: the kernel or collective; empty for the rest.
        device: logical index of the device whose queue it is in.
        source: logical index of the device a copy reads from; -1 for everything else.
        nbytes: bytes that leave a device, as ``Record`` counts them.
        num_rows: tensors that a launch serves; else 0.
        tensors: what it is for: ``"pack 3 of 8 (tensors 5 to 9)"``; empty where nobody said.
        queue: ``compute`` or ``transfer``.
        done: whether it is known to be over.
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


# The number of the last operation given before a mark, and the mark: device, queue, event.
_Place = tuple[int, "Device", Queue, Any]


class _Label(threading.local):
    """What a thread works for."""

    label: object = None


class Flight:
    """The ring of one mesh. Takes no lock: ``deque`` is atomic where it matters.

    Attributes:
        ring: number, operation and label of each.
        numbers: of the next one; drawn when it has been given.
        thread: ``label`` is what the calling thread works for.
    """

    def __init__(self) -> None:
        self.ring: deque[tuple[int, What, object]] = deque(maxlen=LENGTH)
        self.numbers = count(1)
        self._marks: deque[_Place] = deque(maxlen=_MARKS)
        self.thread = _Label()

    def add(self, what: What) -> None:
        """Keeps an operation that *has been* given: what is marked later comes behind it."""
        self.ring.append((next(self.numbers), what, self.thread.label))

    def labelled(self, label: object) -> object:
        """What this thread gives from now on is for ``label``, whose text says so; the last one."""
        before, self.thread.label = self.thread.label, label
        return before

    def marked(self, device: Device, queue: Queue, event: Any) -> None:
        """Keeps a mark that has just been made for whatever reason."""
        ring = self.ring
        if ring:
            self._marks.append((ring[-1][0], device, queue, event))

    def entries(self, devices: Sequence[Device], *, fresh: bool) -> list[FlightEntry]:
        """All that is kept, oldest first.

        Args:
            devices: of the whole mesh.
            fresh: mark every queue now and look whether the marks pass at once, for some
                milliseconds; otherwise only marks that were made anyway are looked at.
        """
        given = sorted(_copied(self.ring), key=lambda each: each[0])
        if fresh and given:
            self._look(devices, given[-1][0])
        reached: dict[tuple[int, str], int] = {}
        for last, device, queue, event in _copied(self._marks):
            key = (device.index, queue)
            if last > reached.get(key, 0) and device._reached(event):
                reached[key] = last
        return [_entry(number, what, label, reached) for number, what, label in given]

    def _look(self, devices: Sequence[Device], last: int) -> None:
        """In a thread of its own: a driver whose queue is full may hold whoever marks it."""
        made: list[_Place] = []

        def mark() -> None:
            for device in devices:
                for queue in QUEUES:
                    try:
                        made.append((last, device, queue, device._mark(queue)))
                    except Exception:  # a lost device tells nothing, and that is no news here
                        continue
                device._urge()

        worker = threading.Thread(target=mark, name="gradreduce-flight", daemon=True)
        worker.start()
        end = time.monotonic() + _LOOK_SECONDS
        worker.join(_LOOK_SECONDS * 4)
        self._marks.extend(made)
        while time.monotonic() < end:
            if all(device._reached(event) for _, device, _, event in list(made)):
                return
            time.sleep(_LOOK_SECONDS / 20)


def _copied(ring: deque[Any]) -> list[Any]:
    while True:
        try:
            return list(ring)
        except RuntimeError:  # another thread appended, where the interpreter has no lock
            continue


def _entry(
    number: int, what: What, label: object, reached: dict[tuple[int, str], int]
) -> FlightEntry:
    record = what if isinstance(what, Record) else Record(*what)
    return FlightEntry(
        sequence=number,
        kind=record.kind,
        name=record.name,
        device=record.device,
        source=record.source,
        nbytes=record.nbytes,
        num_rows=record.num_rows,
        tensors="" if label is None else str(label),
        queue=record.queue,
        done=number <= reached.get((record.device, record.queue), 0),
    )


def write_flight(path: str, mesh: str, reason: str, entries: Sequence[FlightEntry]) -> None:
    """Writes ``{"mesh": …, "reason": …, "entries": [{…}, …]}`` as JSON, whole or not at all.

    Never raises: who writes it has worse to tell. A failure is logged.
    """
    target = Path(path)
    content = {"mesh": mesh, "reason": reason, "entries": [asdict(each) for each in entries]}
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(target)
    except OSError as error:
        _log.warning("GRADREDUCE_FLIGHT_RECORD=%s was not written: %s", path, error)
