"""Captures the work of one thread, and runs it again as one piece.

On GPUs it is a CUDA graph, in the simulation a list of commands; the rules are the same, and are
here. The queues that record are nobody else's, so other threads may use the devices meanwhile,
and a capture that fails leaves nothing behind.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING

from gradreduce.errors import CaptureError, listed

from .buffer import Buffer, Mark, Stream, overlap
from .command_list import Command, CommandList, WrittenSpans
from .forks import after_fork
from .op_log import CROSSING, Record, current
from .pending_calls import names_of
from .stream_sync import fork_streams, join_streams

if TYPE_CHECKING:
    from .device import Device


class Recording:
    """The backend's part of a capture; this one runs the recorded commands one by one."""

    def begin(self) -> None:
        """Starts recording; every queue starts after the first device's compute queue."""

    def end(self, command_list: CommandList) -> Command:
        """Ends recording; returns a command that runs all of it, which the list has too."""
        return command_list.run

    def abandon(self) -> None:
        """Discards the recording; none of it has run. Does not raise."""


class _NoCollection:
    """Context manager: Python collects no garbage, in any number of threads.

    What it finds may free GPU memory or wait for a GPU, which CUDA forbids to a thread that
    captures: the capture would be invalid.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        """Starts with no thread inside, also in a forked child."""
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
    """Work on some devices, captured once and run at each call.

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

    Attributes:
        records: of what was captured.
    """

    readers = True  # a block, to whoever reads and writes inside

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self._leader = self.devices[0]
        self._others = self._leader._others(self.devices)
        self._mesh_state = self._leader.mesh_state
        self._check_alone()
        self._check_peers()
        self.backend = self._leader._recording(self.devices)
        self._command_list = CommandList()  # keeps the memory, too
        self._marks: dict[int, Mark] = {}
        self.records: list[Record] = []
        self._earlier: list[Mark] = []
        self._streams: dict[tuple[Device, Stream], None] = {}
        self._reads: list[tuple[Mark, Buffer]] = []
        self._written: list[Buffer] = []
        self._spans = WrittenSpans([])
        self._again: Command | None = None
        self._record: Record | None = None

    @contextmanager
    def recorded(self) -> Iterator[Capture]:
        """Context manager, to be used once: captures this thread's work.

        Raises:
            CaptureError: inside a capture, or CUDA cannot make a graph of what was kept.
            BackendUnavailableError: the mesh is closed, or a device has failed.
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
                current.capture = self
                try:
                    with mesh_state.recording_commands(self._command_list):
                        yield self
                finally:
                    current.capture = None
                self._command_list.close()
                self._again = self.backend.end(self._command_list)
                self._spans = WrittenSpans(self._written)
                labels = [each.label for each in self.records if each.label is not None]
                # One for all of them: what a call costs is not to depend on what is in it.
                self._record = Record(
                    "launch",
                    "captured step",
                    self._leader.index,
                    nbytes=sum(each.nbytes for each in self.records if each.kind in CROSSING),
                    num_rows=len(self.records),
                    label=listed(dict.fromkeys(map(str, labels))) or None,
                )
            except BaseException:
                self.backend.abandon()
                raise

    def capture_commands(self, command_list: CommandList) -> None:
        """Captures the commands of a list, inside ``recorded``."""
        with self._mesh_state.recording_commands(None):
            command_list.replay(self._mesh_state.log)
        self._command_list.operations += command_list.operations

    def __call__(self) -> None:
        """Runs the captured work; the host does not wait.

        Raises:
            CaptureError: inside a capture, or nothing was captured.
            BackendUnavailableError: the mesh is closed, or a device has failed.
        """
        for device in self.devices:
            self._mesh_state.check_free(device, "calling a captured step")
        self.submit()

    def submit(self) -> None:
        """Runs the captured work on devices that have been checked."""
        if self._again is None or self._record is None:
            raise CaptureError(
                "the capture has not ended or has failed: record the work in another Capture"
            )
        leader, mesh_state = self._leader, self._mesh_state
        with mesh_state.launch_lock, mesh_state.pack_scope(self._record.label, self.devices):
            self._fence()
            join_streams(leader, self._others)
            self._again()
            fork_streams(leader, self._others)
            for device, stream in self._streams:  # whose arrays were read
                device.block_stream(stream)
            mesh_state.log.repeat(self._record, self.records)

    def _fence(self) -> None:
        """Queues the waits of a call, beside those for its devices' compute queues."""
        for device, stream in self._streams:
            device.check_stream(stream)
        while self._earlier:
            self._leader.wait(self._earlier.pop())
        for device, stream in self._streams:
            device.wait_for_stream(stream, checked=True)
        self._spans.wait_for_readers(self._mesh_state)

    # -- what the devices say and ask, inside -----------------------------------------------------

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
        """Records a mark that is made inside."""
        self._marks[id(mark)] = mark

    def waits_for(self, mark: Mark) -> bool:
        """Whether a mark was made inside; the first call waits for earlier ones."""
        if id(mark) in self._marks:
            return True
        self._earlier.append(mark)
        return False

    def record_reader(self, mark: Mark, part: Buffer) -> None:
        """Records a copy inside that reads ``part``; later writers wait for the call."""
        self._reads.append((mark, part))

    def readers_of(self, part: Buffer) -> list[Mark]:
        """Returns the marks inside that a writer of ``part`` has to wait for."""
        self._written.append(part)
        return [mark for mark, read in self._reads if overlap(read, part)]

    def enters(self, device: Device, stream: Stream) -> None:
        """Makes each call wait for a caller's stream."""
        self._streams[device, stream] = None

    def _check_alone(self) -> None:
        if self._mesh_state.capture is not None:
            raise CaptureError("a capture cannot begin inside another: end the first one before")

    def _check_peers(self) -> None:
        physicals = dict.fromkeys(device.physical for device in self.devices)
        for here, there in product(physicals, physicals):
            if not self._mesh_state.peers(here, there):
                raise CaptureError(
                    f"physical devices {here} and {there} have no peer access: CUDA cannot "
                    "capture copies between them"
                )
