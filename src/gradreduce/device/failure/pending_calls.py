"""Calls with a deadline: their marks, and which devices are late.

Only calls with a deadline make marks: one on each queue when the call begins, before and after each
pack, and when the call has submitted all its work.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gradreduce.device.memory.buffer import Mark
from gradreduce.device.memory.dtypes import is_number
from gradreduce.errors import brief, listed

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.order.uses import DeviceQueue

# Seconds that the host sleeps between two polls of a device: short at first, because most work ends
# soon.
_FIRST_PAUSE, _LAST_PAUSE = 20e-6, 1e-3
# The clock of deadlines; tests replace it.
now = time.monotonic


def as_deadline(deadline: float | None, name: str = "deadline") -> float | None:
    """Validates a deadline: seconds above 0, or None for no limit.

    Raises:
        ValueError: ``deadline`` is something else.
    """
    if deadline is None:
        return None
    if not is_number(deadline) or not deadline > 0:  # NaN is not
        raise ValueError(f"{name}={brief(deadline)} must be a number of seconds above 0, or None")
    return float(min(deadline, sys.float_info.max))  # an integer may exceed the largest float


@dataclass(frozen=True, slots=True)
class PackInfo:
    """Names the tensors and packs that are reduced together.

    Attributes:
        tensors: the positions of the tensors in the batch, in order.
        packs: the numbers of the packs, from 1, in order; empty if tensors are not packed.
        num_packs: the number of packs of the batch.
        names: the names of the tensors, in order; empty if they have none.
    """

    tensors: Sequence[int]
    packs: Sequence[int] = ()
    num_packs: int = 0
    names: Sequence[str] = ()

    def __str__(self) -> str:
        """``"pack 3 of 8 (tensors 5 to 9)"`` or ``"pack 3 of 8 (tensors w, b)"``."""
        tensors = _describe_numbers("tensor", self.tensors)
        if self.names:
            tensors = f"tensor{'s' * (len(self.names) > 1)} {listed(self.names)}"
        if not self.packs:
            return tensors
        return f"{_describe_numbers('pack', self.packs)} of {self.num_packs} ({tensors})"


Label = PackInfo | str  # errors and the log use its text


def _describe_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Names numbers: ``"tensor 3"``, ``"tensors 3 to 7"`` or ``"tensors 3, 5, 7"``."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return f"{noun}s {first} to {last}"
    return f"{noun}s {listed(numbers)}"


def names_of(devices: Iterable[Device]) -> str:
    """Returns ``"sim:1, sim:2"``: the names of the devices, each once, at most 5."""
    return listed(dict.fromkeys(device.name for device in devices))


def marks_of(devices: Iterable[Device]) -> list[Mark]:
    """Marks the present ends of both queues of these devices; co-located ones share an event."""
    events: dict[DeviceQueue, Any] = {}
    marks = []
    for device in devices:
        for name, queue in device.queues.items():
            if queue not in events:
                events[queue] = device.mesh_state.order.new_mark(queue).event
            marks.append(Mark(device, name, events[queue]))
    return marks


class _CallStage(NamedTuple):
    """A point of a call that every device has to pass.

    Attributes:
        pack_info: the packs; None for the whole call.
        leaves: whether the point is after the packs; else it is before them.
        marks: a mark on every queue of every device.
    """

    pack_info: Label | None
    leaves: bool
    marks: Sequence[Mark]


class PendingCall:
    """One call with a deadline.

    Attributes:
        call: the name of the call.
        seconds: the deadline as passed by the user.
        devices: the devices that the call works on.
        submitted: whether the call has submitted all its work.
        dropped: whether the call has raised, so that its deadline no longer matters.
        generation: the mesh's ``generation``; calls from before a reset no longer matter.
    """

    def __init__(
        self, call: str, seconds: float, devices: Iterable[Device], generation: int
    ) -> None:
        self.call = call
        self.generation = generation
        self.seconds = seconds
        self._expires = now() + seconds
        self.devices = tuple(dict.fromkeys(devices))
        self.submitted = False
        self.dropped = False
        self._stages: list[_CallStage] = []

    def mark_queues(
        self, pack_info: Label | None, *, leaves: bool, devices: Iterable[Device] = ()
    ) -> None:
        """Marks the end of both queues of these devices (default: all devices of the call)."""
        marks = marks_of(dict.fromkeys(devices) or self.devices)
        for mark in marks:
            mark.device.mesh_state.log.note_mark(mark)
        self._stages.append(_CallStage(pack_info, leaves, marks))

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._expires - now()

    @contextmanager
    def reporting_itself(self, seconds: float) -> Iterator[None]:
        """Context manager: code inside checks the deadline and reports it within ``seconds``."""
        self._expires += seconds
        try:
            yield
        finally:
            self._expires -= seconds

    @property
    def is_resolved(self) -> bool:
        """Whether the call needs no more checks.

        Queries all marks, also those after a mark that has not passed: a query also detects a GPU
        that has failed.
        """
        if self.dropped or not self.submitted:
            return self.dropped
        return all([mark.passed for mark in self._stages[-1].marks])

    @property
    def waits_for_others(self) -> bool:
        """Whether queued work waits for other processes, which then answer questions."""
        return False

    def failure(self) -> str | None:
        """Returns why the call can never finish, if that is known before the deadline."""
        return None

    def failed_devices(self) -> list[Device]:
        """Returns the failed devices that have not finished their work."""
        marks = self._stages[-1].marks if self._stages else ()
        return [
            mark.device
            for mark in marks
            if mark.device.physical in mark.device.mesh_state.failed and not mark.passed
        ]

    def describe_stall(self) -> str:
        """Describes which devices are late, at the first stage that some have not passed."""
        for index, stage in enumerate(list(self._stages)):
            late = [mark for mark in stage.marks if not mark.passed]
            if late:
                return self._late(index, stage, late)
        if self.submitted:
            return "every device has finished meanwhile"
        return "the call itself has not submitted all its work to the devices"

    def _late(self, index: int, stage: _CallStage, late: Sequence[Mark]) -> str:
        pack_info = stage.pack_info
        if pack_info is None and not stage.leaves:  # the begin of the call
            later = (each.pack_info for each in self._stages[index + 1 :])
            pack_info = next((each for each in later if each is not None), None)
        what = self.call if pack_info is None else str(pack_info)
        names = names_of(mark.device for mark in late)
        have = "has" if len({mark.device for mark in late}) == 1 else "have"
        if stage.leaves:
            return f"all devices have joined {what}, but {names} {have} not finished"
        return f"{names} {have} not joined {what}: earlier work there has not finished"


class WaitPolicy:
    """Decides when a host wait ends early: deadline, failed device or failed mesh.

    Args:
        device: the device that the host waits for.
        seconds: the deadline; None: no limit.
    """

    def __init__(self, device: Device, seconds: float | None = None) -> None:
        self._device = device
        self._expires = math.inf if seconds is None else now() + seconds

    @property
    def polls(self) -> bool:
        """Whether to poll instead of waiting in the driver, which has no timeout.

        True for a wait with a deadline, and for every wait after the mesh's first deadline.
        """
        return self._expires != math.inf or self._device.mesh_state.watchdog is not None

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return now() >= self._expires

    @property
    def is_over(self) -> bool:
        """Whether waiting longer is useless."""
        mesh_state = self._device.mesh_state
        gone = mesh_state.reason is not None or mesh_state.is_closed
        return gone or self._device.physical in mesh_state.failed or self.is_late

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        if self._expires == math.inf:
            return None
        return min(max(0.0, self._expires - now()), threading.TIMEOUT_MAX)

    def until(self, done: Callable[[], bool]) -> bool:
        """Polls until ``done()`` or until the wait ends early; returns whether it is done.

        In a failed mesh work may count as done without a result: an aborted collective ends too.
        """
        pause = _FIRST_PAUSE
        while not done():
            if self.is_over:
                return done()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        return True
