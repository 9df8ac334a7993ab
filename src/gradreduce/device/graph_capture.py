"""What one thread gives to the devices, kept instead of done, and done again as one piece.

On GPUs it is a CUDA graph, in the simulation a list that is replayed; the rules are the same, and
are here. The queues that record are nobody else's, so other threads may use the devices meanwhile,
and a capture that fails leaves nothing behind.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gradreduce.errors import CaptureError

from .buffer import Buffer, Mark, Stream, overlap
from .command_list import Command, CommandList, Span, spans_of, wait_for_readers
from .forks import after_fork
from .op_log import CROSSING, Record
from .pending_calls import PackInfo, PackInfoLike, PackInfos, names_of, together
from .stream_sync import fork_streams, join_streams

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Capture", "Recording"]


class Recording(ABC):
    """A backend's part: where the queues of some devices keep what they are given."""

    @abstractmethod
    def begin(self) -> None:
        """From here on they keep it; every queue begins where the first device's compute does."""

    @abstractmethod
    def end(self) -> Command:
        """What does all of it, on the first device's compute queue, each time it is called."""

    @abstractmethod
    def abandon(self) -> None:
        """Forgets it; nothing of it was done. Never raises."""


class _NoCollection:
    """Inside, in however many threads, Python collects no garbage.

    What it finds may free GPU memory or wait for a GPU, which CUDA forbids to a thread that
    captures: the capture would be invalid.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        """Nobody is inside: also in a forked child, whose parent's other threads may have been."""
        self._lock = threading.RLock()
        self._num_inside = 0
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if gc.isenabled():
                self._was_enabled = True
                gc.disable()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._was_enabled and not self._num_inside:
                self._was_enabled = False
                gc.enable()


_no_collection = _NoCollection()


class Capture:
    """Work of some devices that is done each time this is called.

    Made inside ``with``, by one thread: launches, copies, marks, waits and the collectives of one
    physical device are kept, not done. The rules:

    * A mark from before is not waited for inside: the first call waits for it.
    * ``adopt`` shares memory; each call waits for what its stream holds then.
    * What asks for memory (``empty``, ``zeros``, ``upload``), what the host waits for
      (``download``, ``release``, ``synchronize``, ``trim``) and what must be compiled is refused,
      and so is a device that is not among these or of another mesh, and a capture inside a capture.
    * Python collects no garbage meanwhile.
    * Collectives over several physical devices are refused.
    * A mark from inside says nothing outside.

    What is refused raises ``CaptureError`` (collectives ``CollectiveError``) and changed nothing;
    who lets it leave the block has ended the capture, and the devices are as they were.

    A call is behind all that the compute queues of the devices hold, and they go on behind it. It
    records what it did as if each part had been called. All memory that is used is kept alive.

    Args:
        devices: of one mesh, at least one; two physical ones must be peers.
    """

    recording = True  # a recorder, to whoever writes records inside
    readers = True  # and a block, to whoever reads and writes

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self._leader, *self._others = self.devices
        self._mesh_state = self._leader.mesh_state
        self._physicals = tuple(dict.fromkeys(device.physical for device in self.devices))
        self._check_alone()
        self._check_peers()
        self.backend = self._leader._recording(self.devices)
        self._command_list = CommandList()  # keeps the memory
        self._marks: dict[int, Mark] = {}
        self._records: list[Record] = []
        self._earlier: list[Mark] = []
        self._streams: dict[tuple[Device, Stream], None] = {}
        self._reads: list[tuple[Mark, Buffer]] = []
        self._written: list[Buffer] = []
        self._spans: list[Span] = []
        self._last_read: Any = None
        self._again: Command | None = None
        self._flight_record: Record | None = None
        self._pack_infos: list[PackInfo] = []
        self._pack_info: PackInfoLike | None = None

    @contextmanager
    def recorded(self) -> Iterator[Capture]:
        """Inside, this thread's work is kept; once.

        Raises:
            CaptureError: inside a capture, or CUDA cannot make a graph of what was kept.
            BackendUnavailableError: the mesh is closed, or a device is lost.
        """
        mesh_state = self._mesh_state
        self._check_alone()
        if self._again is not None:
            raise CaptureError("this Capture has already recorded: make another one")
        for device in self.devices:
            mesh_state.check_usable(device)
        with _no_collection:
            try:
                self.backend.begin()
                with mesh_state.capturing(self), mesh_state.recording_commands(self._command_list):
                    yield self
                self._again = self.backend.end()
                self._spans = spans_of(self._written)
                self._pack_info = together(self._pack_infos) if self._pack_infos else None
                # One for all of them: what a call costs is not to depend on what is in it.
                self._flight_record = Record(
                    "launch",
                    "captured step",
                    self._leader.index,
                    nbytes=sum(each.nbytes for each in self._records if each.kind in CROSSING),
                    num_rows=len(self._records),
                )
            except BaseException:
                self.backend.abandon()
                raise

    def play(self, command_list: CommandList) -> None:
        """Keeps what is on a tape, inside; the tape, and the memory on it, must outlive this."""
        command_list.play(self)

    def __call__(self) -> None:
        """Does it; the host does not wait.

        Raises:
            CaptureError: inside a capture, or nothing was captured.
            BackendUnavailableError: the mesh is closed, or a device is lost.
        """
        for device in self.devices:
            self._mesh_state.check_free(device, "calling a captured step")
        self.submit()

    def submit(self) -> None:
        """As a call, whose devices have been checked."""
        if self._again is None or self._flight_record is None:
            raise CaptureError(
                "the capture has not ended or has failed: record the work in another Capture"
            )
        leader, others, mesh_state = self._leader, self._others, self._mesh_state
        pack_info = self._pack_info
        named = (
            nullcontext() if pack_info is None else mesh_state.pack_scope(pack_info, self.devices)
        )
        with mesh_state.launch_lock, named:
            self._fence()
            join_streams(leader, others)
            self._again()
            fork_streams(leader, others)
            for device, stream in self._streams:  # whose arrays were read
                device._block_stream(stream)
            mesh_state.flight_recorder.add(self._flight_record)
            recorder = mesh_state.recorder
            for record in self._records if recorder.recording else ():
                recorder.add(record)

    def _fence(self) -> None:
        """What a call must wait for, beside its devices' compute queues."""
        for device, stream in self._streams:
            device.check_stream(stream)
        while self._earlier:
            self._leader.wait(self._earlier.pop())
        for device, stream in self._streams:
            device._wait_for_stream(stream)
        if (
            self._last_read is not self._mesh_state.last_read
        ):  # somebody copies; maybe what is written
            self._last_read = self._mesh_state.last_read
            wait_for_readers(self._spans)

    # -- what the devices say and ask, inside -----------------------------------------------------

    def add(self, record: Record) -> None:
        """Keeps what a call will have done."""
        self._records.append(record)

    def carries(self, pack_info: PackInfoLike) -> None:
        """Remembers what the work inside is for."""
        self._pack_infos += pack_info if isinstance(pack_info, PackInfos) else [pack_info]

    def replayed(self, records: Iterable[Record]) -> None:
        """As ``add``, of what a tape gives."""
        self._records += records

    def check(self, device: Device) -> None:
        """Raises ``CaptureError`` for a device that does not record.

        Also for another mesh's: CUDA may forbid its calls to a thread that captures.
        """
        if device in self.devices:
            return
        names = names_of(self.devices)
        if device.mesh_state is not self._mesh_state:
            raise CaptureError(
                f"{device.name} of another mesh is used inside a capture of {names}: use it before "
                "or after the capture"
            )
        raise CaptureError(
            f"{device.name} is not among the devices of the capture, {names}: add it to them"
        )

    def made(self, mark: Mark) -> None:
        """Remembers a mark that is made inside."""
        self._marks[id(mark)] = mark

    def waits_for(self, mark: Mark) -> bool:
        """Whether a mark was made inside; one from before is left to the first call."""
        if id(mark) in self._marks:
            return True
        self._earlier.append(mark)
        return False

    def is_read(self, mark: Mark, part: Buffer) -> None:
        """Remembers a copy inside that reads ``part``; writers outside come behind the call."""
        self._reads.append((mark, part))

    def readers_of(self, part: Buffer) -> list[Mark]:
        """What a writer of ``part`` inside waits for; a call waits for who reads it by then."""
        self._written.append(part)
        return [mark for mark, read in self._reads if overlap(read, part)]

    def enters(self, device: Device, stream: Stream) -> None:
        """Each call waits for a caller's stream."""
        self._streams[device, stream] = None

    def _check_alone(self) -> None:
        if self._mesh_state.capture is not None:
            raise CaptureError("a capture cannot begin inside another: end the first one before")

    def _check_peers(self) -> None:
        for here in self._physicals:
            for there in self._physicals:
                if not self._mesh_state.peers(here, there):
                    raise CaptureError(
                        f"physical devices {here} and {there} have no peer access: CUDA cannot "
                        "capture copies between them"
                    )
