"""The state that the devices of one mesh share."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from gradreduce.errors import BackendUnavailableError, CaptureError, CollectiveError

from .failure.forks import forks
from .failure.interrupts import DeferInterrupts
from .failure.pending_calls import Label, PendingCall, WaitPolicy, names_of
from .failure.waiting import Done, run_in_thread
from .failure.watchdog import Watchdog
from .log.op_log import OpLog, PackScope, ProfilerRanges, ThreadState, write_flight
from .memory.external import ExternalBuffers
from .order.order import Order
from .run.commands import CommandList
from .run.inexact import InexactSums

if TYPE_CHECKING:
    from .device import Device
    from .processes import Processes

# Callbacks for closing a mesh, and for resetting it.
_Listener = tuple[Callable[[Any], None], Callable[[Any], None]]
# A hanging file system must not delay the failure of a mesh while the flight record is written.
_WRITE_SECONDS = 2.0


class BackendKind(NamedTuple):
    """What code above the backends has to know about one.

    Attributes:
        name: ``"sim"`` or ``"cuda"``.
        shares_host_memory: whether NumPy arrays and Buffers can have the same memory.
        has_streams: whether libraries queue work on streams, which a call must be ordered with.
    """

    name: str
    shares_host_memory: bool
    has_streams: bool


class OnPartialFailure:
    """See ``MeshState.on_partial_failure``. A class, because a generator is three times slower."""

    __slots__ = ("_before", "_then", "_thread")

    def __init__(self, thread: ThreadState, then: Callable[[BaseException], None]) -> None:
        self._thread, self._then = thread, then

    def __enter__(self) -> None:
        self._before = self._thread.num_submitted

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._thread.num_submitted != self._before:
            self._then(error)


class MeshState:
    """The state that the devices of one mesh share.

    Attributes:
        kind: the kind of backend.
        backend, shares_host_memory, has_streams: see ``BackendKind``.
        peer_access: True or False for all pairs of physical devices, or the set of pairs ``(a, b)``
            where a can access the memory of b; see ``peers``.
        processes: the processes whose replicas are summed; one process is a group of one.
        compiled: has each kernel with a template that is compiled for all physical devices.
        compiled_keys: settings, devices and dtypes of reductions whose kernels are compiled.
        plans: plans, algorithms and measured bandwidths of its devices, by what they depend on.
        external_buffers: the flat buffers, whose memory other libraries pass back as their arrays.
        log: the operation log.
        inexact: the flags of exact sums that did not fit into their words.
        thread: the log's state of the calling thread.
        on_wake: callbacks that make threads which wait in a queue check again; called in a thread
            of their own.
        on_failure: callbacks for a failure of the mesh, called in the same thread; they must not
            wait.
        library_error: the watchdog calls it to get an error of the collective library.
        library_finished: waits up to so many seconds until the library has aborted its work after a
            failure; returns whether it has.
        nvtx: the NVTX ranges of a GPU backend; None for the simulation.
        flight_path: the file into which the log is written when the mesh fails; empty: none.
        launch_lock: held while a collective group or a multi-device plan is submitted, so that all
            devices get the work of all threads in the same order.
        order: orders the operations of all queues.
        failed: failed physical devices, each with the reason.
        reason: why the mesh has failed; None if it has not.
        failure_reported: set when the mesh has failed and all waiting threads are woken.
        reset_lock: held by the thread that resets the mesh.
        generation: how often the mesh was reset.
        is_closed: whether the mesh was closed.
        watchdog: checks deadlines; None before the first one. With it, host waits poll.
        capturing: the ids of the threads that capture recorded commands.
    """

    nvtx: ProfilerRanges | None = None
    flight_path = ""
    is_closed = False

    def __init__(
        self, kind: BackendKind, processes: Processes, *, peer_access: bool | Set[tuple[int, int]]
    ) -> None:
        self.kind = kind
        self.backend, self.shares_host_memory, self.has_streams = kind
        self.processes = processes
        self.external_buffers = ExternalBuffers()
        self.log = OpLog()
        self.inexact = InexactSums()
        self.thread = self.log.thread
        self.order = Order(self)
        self.compiled: dict[tuple[Any, Any], None] = {}
        self.compiled_keys: set[Hashable] = set()
        self.plans: dict[Hashable, Any] = {}
        self._listeners: WeakKeyDictionary[Any, _Listener] = WeakKeyDictionary()
        self._listeners_lock = threading.RLock()  # finalizers do not take it
        self.on_failure: list[Callable[[], None]] = []
        self.on_wake: list[Callable[[], None]] = []
        self.library_error: Callable[[], str | None] = lambda: None
        self.library_finished: Callable[[float], bool] = lambda seconds: True
        self.launch_lock = threading.RLock()
        self.failed: dict[int, str] = {}
        self.reason: str | None = None
        self.failure_reported = Done()
        self.generation = 0
        self.reset_lock = threading.Lock()
        self._last_reason, self._failures = "", deque[str]()
        self.watchdog: Watchdog | None = None
        self._watchdog_lock = threading.RLock()
        self.peer_access = peer_access
        self.capturing: set[int] = set()
        self._pid = os.getpid()
        self._forks = forks[0]

    def peers(self, physical: int, other: int) -> bool:
        """Whether a launch on one physical device may touch the memory of the other."""
        access = self.peer_access
        is_peer = access if isinstance(access, bool) else (physical, other) in access
        return physical == other or is_peer

    def add_listener(
        self, key: Any, on_close: Callable[[Any], None], on_reset: Callable[[Any], None]
    ) -> None:
        """Adds callbacks, which are called with ``key`` while it is alive.

        Args:
            key: an object with an attribute ``devices``; held weakly.
            on_close: called when the mesh is closed or fails, or one of the key's devices fails,
                because threads that wait for work on them would wait for ever.
            on_reset: called when the mesh is reset, because the key's device memory may be half
                written.
        """
        with self._listeners_lock:
            self._listeners[key] = (on_close, on_reset)

    def listeners(self) -> list[tuple[Any, _Listener]]:
        """Returns each key with its callbacks."""
        with self._listeners_lock:
            return list(self._listeners.items())

    def close(self) -> None:
        """Closes the mesh: every later use of its devices raises."""
        self.is_closed = True
        if self.watchdog is not None:
            self.watchdog.end()
        self._wake(None)

    def mark_failed(self, physical: int, reason: str) -> None:
        """Marks a physical device as failed: later uses raise with the first reason.

        Another thread wakes the threads that wait for work on it, because the calling thread may
        hold the locks that this needs.
        """
        if physical in self.failed:
            return
        self.failed[physical] = reason
        self._notify(partial(self._wake, physical))

    # -- state of the calling thread --------------------------------------------------------------

    @contextmanager
    def recording_commands(self, command_list: CommandList | None) -> Iterator[None]:
        """Context manager: records this thread's commands on ``command_list`` (None: nowhere)."""
        before, self.thread.command_list = self.thread.command_list, command_list
        try:
            yield
        finally:
            self.thread.command_list = before

    def on_partial_failure(self, then: Callable[[BaseException], None]) -> OnPartialFailure:
        """Context manager: calls ``then`` if work fails after part of it was submitted.

        A failure before this thread's first launch, copy or collective in the block changed
        nothing. After it, ``then`` is called with the error, which is then raised.
        """
        return OnPartialFailure(self.thread, then)

    def fail_on_partial_write(self, devices: Iterable[Device]) -> OnPartialFailure:
        """Context manager: marks the devices as failed if an in-place update fails half way.

        After such a failure the state is half old and half new, and must not be used. A mesh that
        has failed already stays as it is: after a reset its memory is undefined anyway.
        """

        def mark_all_failed(error: BaseException) -> None:
            if self.reason is not None:
                return
            found = list(dict.fromkeys(devices))
            for device in found:
                self.mark_failed(device.physical, f"a call failed half way: {error!r}")
            error.add_note(f"The call failed half way: {names_of(found)} cannot be used any more.")

        return self.on_partial_failure(mark_all_failed)

    def pack_scope(self, pack_info: Label | None, devices: Iterable[Device] = ()) -> PackScope:
        """Context manager: labels this thread's work with its packs.

        The log and the error of a deadline contain the label.

        Args:
            pack_info: the label.
            devices: the devices that work on the packs. Default: all devices of the call.
        """
        return PackScope(self.log, pack_info, tuple(devices), marks=True)

    def label_scope(self, label: Label) -> PackScope:
        """Context manager: labels this thread's work in the log, but not in deadline errors."""
        return PackScope(self.log, label, (), marks=False)

    # -- deadlines --------------------------------------------------------------------------------

    def has_failed(self, generation: int) -> bool:
        """Whether the mesh has failed since that generation, even if it was reset."""
        return self.reason is not None or self.generation != generation

    def guard(self) -> Watchdog:
        """Returns the watchdog; starts its thread at the first deadline."""
        self.check_process()
        with self._watchdog_lock:
            if self.watchdog is None:
                with DeferInterrupts():  # Ctrl-C would leave a started thread that is never ended
                    self.watchdog = Watchdog(self)
            return self.watchdog

    @contextmanager
    def enforce_deadline(self, pending_call: PendingCall) -> Iterator[None]:
        """Context manager: if work submitted inside misses its deadline, the mesh fails."""
        for device in pending_call.devices:
            self.check_usable(device)
        before, self.thread.pending_call = self.thread.pending_call, pending_call
        try:
            self.guard().take(pending_call)  # first: marking a full queue may block for ever
            pending_call.mark_queues(None, leaves=False)
            yield
            pending_call.mark_queues(None, leaves=True)
            pending_call.submitted = True
        except BaseException:
            pending_call.dropped = True
            raise
        finally:
            self.thread.pending_call = before

    def fail(self, reason: str) -> None:
        """Marks the mesh as failed: every later use raises with the first reason.

        Takes no lock. Another thread wakes waiting threads and takes the locks that this needs. The
        flight record is written before the failure becomes visible.
        """
        failures = self._failures
        failures.append(reason)
        if failures[0] is not reason:
            return
        if self.flight_path:
            run_in_thread(partial(self._write_flight, reason)).wait(_WRITE_SECONDS)
        self._last_reason = self.reason = reason
        self._notify(self._notify_waiters)

    def fail_all(self, reason: str) -> None:
        """Marks a mesh over several processes as failed, and tells the other processes why.

        In one process nobody waits for it, so the mesh stays usable.
        """
        if self.processes.size > 1:
            self.processes.tell_failure(reason)
            self.fail(reason)

    def abort_wait(self, what: str, device: Device, wait_policy: WaitPolicy) -> Exception:
        """Returns the error for a host wait that ended early; a missed deadline fails the mesh."""
        try:
            self.check_usable(device)
        except (BackendUnavailableError, CollectiveError) as error:
            return error
        if wait_policy.is_late:
            reason = f"the deadline for {what} passed: {self._stuck(device)}"
            self.guard().take(partial(self.fail, reason))  # Ctrl-C does not interrupt that thread
            while self.reason is None and not self.is_closed:
                time.sleep(1e-3)
        return self._failure_error(self._last_reason)

    def clear_failure(self) -> None:
        """Clears the failure, as the last step of ``reset``."""
        self.compiled_keys.clear()
        self.plans.clear()
        self.inexact.copies.clear()  # they may be incomplete
        # One C call: Ctrl-C cannot come between the changes.
        vars(self).update(
            generation=self.generation + 1, failure_reported=Done(), _failures=deque(), reason=None,
        )  # fmt: skip

    def _stuck(self, device: Device) -> str:
        """Describes what a late device waits for, possibly work of another device."""
        devices = device.mesh.devices
        late = self.log.late_devices(devices)
        if not late:
            return f"{device.name} has finished meanwhile"
        have, its = ("has", "its") if len(late) == 1 else ("have", "their")
        text = f"{names_of(late)} {have} not finished {its} queues"
        entries = [
            entry
            for entry in self.log.entries(devices, fresh=False)
            if not entry.done and entry.kind != "sync"  # a host wait, not work of a queue
        ]
        first = next((each for each in entries if devices[each.device] in late), None)
        number = 0
        if first is not None:
            number = first.sequence
            what = f"{first.kind} {first.name}".rstrip()
            of = f" of {first.tensors}" if first.tensors else ""
            on = f" on {devices[first.device].name}" if len(late) > 1 else ""
            text += f"; the first operation not known to be done is {what}{of}{on}, #{number}"
            if of:
                return text
        later = [each for each in entries if each.tensors and each.sequence > number]
        if not later:
            return text
        named = next((each for each in later if devices[each.device] in late), later[0])
        return f"{text}, before {named.tensors}, #{named.sequence}"

    def _write_flight(self, reason: str) -> None:
        entries = self.log.entries((), fresh=False)
        mesh = f"{self.backend}, process {self._pid}"
        write_flight(self.flight_path, mesh, reason, entries, self.processes)

    def _notify(self, call: Callable[[], None]) -> None:
        """Calls it in a new thread, or in the watchdog's if none starts.

        Without a watchdog it runs in the calling thread, which may hold locks.
        """
        watchdog = self.watchdog
        run_in_thread(call, otherwise=call if watchdog is None else partial(watchdog.take, call))

    def _notify_waiters(self) -> None:
        for call in self.on_failure:
            call()
        self._wake(None)
        self.failure_reported.set()

    def _wake(self, physical: int | None) -> None:
        """Wakes threads that wait for a physical device; None: for any device."""
        for call in self.on_wake:
            call()
        for waiting, (wake, _) in self.listeners():
            if physical is None or any(each.physical == physical for each in waiting.devices):
                wake(waiting)

    # -- checks -----------------------------------------------------------------------------------

    def check_usable(self, device: Device) -> None:
        """Raises if the device cannot be used.

        Raises:
            BackendUnavailableError: the device has failed, the mesh is closed, or it was opened
                before a fork.
            CollectiveError: the mesh has failed.
            CaptureError: this thread is capturing, so the call comes from a signal handler.
        """
        if self.is_closed or self.capturing or self._forks != forks[0]:
            self.check_open()
            if threading.get_ident() in self.capturing:
                raise CaptureError(
                    f"a signal handler used {device.name} while the thread that it interrupted "
                    "captured a step; its work would become a part of the step. Set a flag in the "
                    "handler, and do the work after the capture"
                )
        if self.reason is not None:
            raise self._failure_error(self.reason)
        if self.failed and device.physical in self.failed:
            raise BackendUnavailableError(
                f"device {device.name} failed: {self.failed[device.physical]}"
            )

    def check_open(self) -> None:
        """Raises ``BackendUnavailableError`` for a closed mesh, or one opened before a fork."""
        if self.is_closed:
            raise BackendUnavailableError(
                f"the mesh of this {self.backend} device was closed; gr.open_mesh() opens another"
            )
        self.check_process()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the mesh was opened."""
        return self._forks != forks[0]

    def check_process(self) -> None:
        """Raises ``BackendUnavailableError`` for a mesh that was opened before a fork.

        Call it before taking a lock: the lock may be held by a thread of the parent process.
        """
        if self._forks != forks[0]:
            raise BackendUnavailableError(
                f"this {self.backend} device was opened by process {self._pid}, before a fork; "
                "open a mesh in the new process"
            )

    def raise_failure(self, cause: BaseException) -> None:
        """If the mesh has failed, raises its error; ``cause`` only followed from it."""
        reason = self.reason
        if reason is not None and isinstance(cause, Exception):
            raise self._failure_error(reason) from cause

    def _failure_error(self, reason: str) -> CollectiveError:
        then = "mesh.reset() makes it usable again"
        if self.processes.size > 1:
            then = "end the processes and start them again"
        return CollectiveError(f"the mesh has failed: {reason}; {then}")
