"""What the devices of one mesh did: every launch, copy, upload and host wait; never decides any.

A test of topology counts these records instead of timing anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["CROSSING", "Fields", "Journal", "Kind", "Record", "Recorder", "Sink"]

# The fields of a Record, in order. Making one costs a tenth of making a Record.
Fields = tuple[Any, ...]
# The kinds whose bytes leave a device for another.
CROSSING = ("launch", "copy", "collective")
Kind = Literal["launch", "copy", "collective", "fill", "upload", "download", "sync"]


@dataclass(frozen=True, slots=True)
class Record:
    """One thing a device was asked to do.

    Attributes:
        kind: ``launch``, ``copy``, ``collective``, ``fill``, ``upload``, ``download`` or ``sync``.
        name: the kernel or collective; empty for the rest.
        device: logical index of the device whose queue did it.
        source: logical index of the device a copy read from; -1 for everything else.
        nbytes: bytes that left a device. A copy: its size. A launch: the operands that lie on
            another physical device than the queue. A collective: the size of one buffer, on the
            record of each of its devices. An upload or download: its size, host to device.
        queue: ``compute`` or ``transfer``.
        num_rows: rows of a launch's pointer table (how many tensors it served); else 0.
    """

    kind: Kind
    name: str
    device: int
    source: int = -1
    nbytes: int = 0
    queue: str = "compute"
    num_rows: int = 0


@dataclass(repr=False)
class Journal:
    """The records made while a ``with mesh.journal()`` block ran, in the order of the calls."""

    records: list[Record] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Journal of {len(self.records)} records: {self.launches} launches, {self.copies} "
            f"copies, {self.bytes} bytes, {self.uploads} uploads, {self.syncs} syncs>"
        )

    def of(self, kind: Kind) -> list[Record]:
        """The records of one kind, in order."""
        return [record for record in self.records if record.kind == kind]

    @property
    def launches(self) -> int:
        """Kernel launches."""
        return len(self.of("launch"))

    @property
    def copies(self) -> int:
        """Copies from a device to a device (the same one included)."""
        return len(self.of("copy"))

    @property
    def bytes(self) -> int:
        """Bytes that left a device for another: by copy, collective, or a peer's launch."""
        return sum(record.nbytes for record in self.records if record.kind in CROSSING)

    @property
    def uploads(self) -> int:
        """Transfers from host memory to a device."""
        return len(self.of("upload"))

    @property
    def syncs(self) -> int:
        """Times the host waited for a device: downloads and ``synchronize``."""
        return len(self.of("sync")) + len(self.of("download"))


class Sink(Protocol):
    """Whatever takes records."""

    @property
    def recording(self) -> bool:
        """Whether it wants any."""

    def add(self, record: Record) -> None:
        """Takes one."""

    def replayed(self, records: Iterable[Record]) -> None:
        """Takes those of an operation that a tape gave again."""


class Recorder:
    """Hands each record to every journal that is open; costs one truth test when none is.

    Args:
        keep: is given what is done again from a tape, besides.
    """

    def __init__(self, keep: Callable[[Record], object]) -> None:
        self._keep = keep
        self._open: tuple[Journal, ...] = ()
        self._lock = threading.RLock()

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """Records everything, from any thread, until the block ends."""
        journal = Journal()
        with self._lock:
            self._open = (*self._open, journal)
        try:
            yield journal
        finally:
            with self._lock:
                self._open = tuple(other for other in self._open if other is not journal)

    @property
    def recording(self) -> bool:
        """Whether any journal is open."""
        return bool(self._open)

    def replayed(self, records: Iterable[Record]) -> None:
        """Of an operation that a tape gave again."""
        for record in records:
            self._keep(record)
            if self._open:
                self.add(record)

    def add(self, record: Record) -> None:
        """Appends to every open journal (list.append is atomic: no lock on this path)."""
        for journal in self._open:
            journal.records.append(record)
