"""Exchange of buffers between the processes of a mesh, as one operation of a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from gradreduce.errors import CollectiveError, InvalidArgumentError

from .buffer import Buffer, Queue
from .device import Device
from .mesh_state import MeshState
from .op_log import Record
from .pending_calls import Label, PendingCall
from .process_group import Description, Message, Parcel, ProcessError, ProcessGroup

# Limits of the groups that ``batches`` makes: at most 16 parcels to each of at most 8 processes, so
# at most 128 sends and 128 receives.
_GROUP_DISTANCES, _GROUP_PARCELS = 8, 16
# Somewhat longer than an exchange needs to find out why another process is late.
_REPORT_SECONDS = 1.5


def exchange(
    device: Device, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue
) -> None:
    """Queues an exchange with the other processes; the host may wait for it.

    Args:
        device: the device of all buffers.
        sends: buffers to send, in the order in which the other process receives them.
        receives: buffers to receive into, which are overwritten.
        queue: the queue of ``device``.

    Raises:
        CollectiveError: another process did not answer in time, or ended; the mesh has failed.
    """
    if not (sends or receives):  # in one process, or if no process sends anything
        return
    mesh_state = device.mesh_state
    mesh_state.check_usable(device)
    group = mesh_state.process_group
    label = mesh_state.thread.label
    queued = _exchange_by_host if group.move_on_gpu is None else _exchange_on_gpu

    def command() -> None:
        with mesh_state.recording_commands(None):
            queued(device, sends, receives, queue, label, group)

    nbytes = sum([buffer.nbytes for _, buffer in sends])
    record = Record("exchange", "", device.index, -1, nbytes, queue)
    # The command orders its parts itself, because the lock of the order must not be held while the
    # host waits for other processes. A list that records it needs the waits of all.
    work = device._parcels(sends, receives, queue)
    device._order(lambda: None, work)
    device._submit(command, record, work, is_ordered=True)


def _exchange_by_host(
    device: Device,
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    queue: Queue,
    label: Label | None,
    group: ProcessGroup,
) -> None:
    seconds = _seconds(device.mesh_state, group)  # applies to each call of a prepared step
    tag = group.next_tag()

    call = device.mesh_state.thread.pending_call

    def move(outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        # The exchange reports a missed deadline itself: the watchdog cannot tell which process is
        # late.
        reports = nullcontext() if call is None else call.reporting_itself(_REPORT_SECONDS)
        with reports, _failing(device.mesh_state, group, label):
            group.exchange(outgoing, incoming, tag, seconds)

    device._exchange(sends, receives, queue, move)


def _exchange_on_gpu(
    device: Device,
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    queue: Queue,
    label: Label | None,
    group: ProcessGroup,
) -> None:
    mesh_state, move = device.mesh_state, group.move_on_gpu
    outgoing = [parcel for parcel in sends if parcel[1].nbytes]
    incoming = [parcel for parcel in receives if parcel[1].nbytes]
    if move is None or not (outgoing or incoming):
        return
    what = group.called if label is None else str(label)
    pending = PendingExchange(what, _seconds(mesh_state, group), device, group)
    with _failing(mesh_state, group, label), mesh_state.watched(pending):
        for batch in batches(group.rank, group.size, outgoing, incoming):
            device._exchange_on_gpu(*batch, queue, move)


def batches(
    rank: int, size: int, sends: Sequence[Parcel], receives: Sequence[Parcel]
) -> list[tuple[list[Parcel], list[Parcel]]]:
    """Cuts an exchange into groups of NCCL, at the same places in every process.

    NCCL itself cuts a group that is too large, but at different places in each process. The parts
    then wait for each other for ever (NVIDIA/Megatron-LM#7189, pytorch/pytorch#174942).

    Args:
        rank: the rank of this process.
        size: the number of processes.
        sends: parcels, in the order in which the other process receives them.
        receives: parcels, in the order in which the other process sends them.

    Returns:
        The sends and receives of each group, in order.
    """
    found: dict[tuple[int, int], tuple[list[Parcel], list[Parcel]]] = {}
    for side, parcels in enumerate((sends, receives)):
        counts = [0] * size
        for parcel in parcels:
            other = parcel[0]
            distance = (other - rank if side == 0 else rank - other) % size
            place = (distance - 1) // _GROUP_DISTANCES, counts[other] // _GROUP_PARCELS
            counts[other] += 1
            found.setdefault(place, ([], []))[side].append(parcel)
    return [found[place] for place in sorted(found)]


@contextmanager
def _failing(mesh_state: MeshState, group: ProcessGroup, label: Label | None) -> Iterator[None]:
    """Context manager: a failing exchange fails the mesh and notifies the other processes.

    Raises:
        CollectiveError: a ``ProcessError`` was raised, or the watchdog has failed the mesh.
    """
    try:
        yield
    except ProcessError as error:
        why = group.reason_for(error.rank) or f"process {error.rank} of {group.size} {error}"
        reason = f"{group.called if label is None else label}: {why}"
        fail(mesh_state, reason)
        raise CollectiveError(reason) from error
    except BaseException as error:  # Ctrl-C too: the other processes wait for data that is not sent
        mesh_state.raise_failure(error)
        what = group.called if label is None else f"the exchange of {label}"
        fail(mesh_state, _stopped(what, error))
        raise


class PendingExchange(PendingCall):
    """A pending exchange between GPUs.

    It is resolved when it is done and all processes are known to make the same calls.

    Args:
        what: the names of its tensors.
        seconds: the deadline.
        device: the device whose queue runs it.
        group: the processes.
    """

    def __init__(self, what: str, seconds: float, device: Device, group: ProcessGroup) -> None:
        super().__init__(what, seconds, [device], device.mesh_state.generation)
        self._group = group
        call = group.last_call
        self._number = -1 if call is None else call.number

    @property
    def is_resolved(self) -> bool:
        """See ``PendingCall``."""
        is_known = self.dropped or self._group.confirmed >= self._number
        return super().is_resolved and is_known

    def failure(self) -> str | None:
        """See ``PendingCall``."""
        reason = self._group.look()
        return None if reason is None else f"{self.call}: {reason}"


def agree(device: Device, description: Description) -> None:
    """Compares a call with the other processes before its first operation; see ``ProcessGroup``.

    Raises:
        InvalidArgumentError, CollectiveError: another process makes another call, or none. The mesh
            has failed.
    """
    mesh_state = device.mesh_state
    group = mesh_state.process_group
    if mesh_state.thread.compared:
        description = description.joined(mesh_state.thread.compared)

    def command() -> None:
        try:
            group.agree(description, _seconds(mesh_state, group))
        except (InvalidArgumentError, CollectiveError) as error:
            fail(mesh_state, str(error))
            raise
        except BaseException as error:  # the others have read that this process makes this call
            fail(mesh_state, _stopped(group.called, error))
            raise

    _run_again_too(device, command)


@contextmanager
def comparing(device: Device, settings: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: this thread's calls over processes inside compare these settings, too.

    They join the notices of these calls. So they are compared when they are first used and when
    they have changed; other calls wait for nothing.

    Args:
        device: a device of the mesh.
        settings: numbers, strings and booleans by name.
    """
    thread = device.mesh_state.thread
    before, thread.compared = thread.compared, tuple(settings.items())
    try:
        yield
    finally:
        thread.compared = before


@contextmanager
def agreed(device: Device, description: Description) -> Iterator[None]:
    """Context manager: calls ``agree``, then does what ``telling_others`` does.

    Raises:
        InvalidArgumentError, CollectiveError: see ``agree``.
    """
    agree(device, description)
    with telling_others(device):
        yield
        # A call with empty tensors has no exchange that would post the kept notice.
        _run_again_too(device, device.mesh_state.process_group.post_kept)


def _run_again_too(device: Device, command: Callable[[], None]) -> None:
    """Runs a command now, and in each call of a step that is being prepared."""
    command()
    command_list = device.mesh_state.thread.command_list
    if command_list is not None:
        command_list.add(command)


@contextmanager
def telling_others(device: Device) -> Iterator[None]:
    """Context manager: an error inside fails the mesh and notifies the other processes.

    For work that all processes must do between two exchanges.
    """
    try:
        yield
    except BaseException as error:
        mesh_state = device.mesh_state
        if mesh_state.reason is None:
            fail(mesh_state, _stopped(mesh_state.process_group.called, error))
        raise


def _stopped(what: str, error: BaseException) -> str:
    """Returns why the mesh has failed; other processes write this process's name before it."""
    return f"stopped in {what}: {error!r}"


def fail(mesh_state: MeshState, reason: str) -> None:
    """Marks a mesh over several processes as failed, and tells the other processes why.

    In one process nobody waits for it, so the mesh stays usable.
    """
    group = mesh_state.process_group
    if group.size > 1:
        group.tell_failure(reason)
        mesh_state.fail(reason)


def _seconds(mesh_state: MeshState, group: ProcessGroup) -> float:
    """Returns how long the calling thread's call may wait for other processes."""
    pending_call = mesh_state.thread.pending_call
    if pending_call is None:
        return group.timeout
    return min(group.timeout, max(0.0, pending_call.remaining))


def send_to_all(
    device: Device, owned: Sequence[tuple[int, Buffer]], queue: Queue = "compute"
) -> None:
    """Queues an exchange in which buffers go from their owners to all other processes.

    Args:
        device: the device of all buffers.
        owned: the rank of each buffer's owner, and the buffer. Those of other processes are
            overwritten.
        queue: the queue of ``device``.
    """
    group = device.mesh_state.process_group
    own = [buffer for rank, buffer in owned if rank == group.rank]
    receives = [parcel for parcel in owned if parcel[0] != group.rank]
    exchange(device, [(rank, buffer) for rank in group.others for buffer in own], receives, queue)


def exchange_all(
    device: Device, own: Sequence[Buffer], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[Buffer]:
    """Sends buffers to all other processes; returns the buffers of all processes, in order.

    Args:
        device: the device of the buffers; its compute queue runs the exchange.
        own: the buffers of this process: at least one, all of one dtype.
        shapes: the shapes of the buffers of each process.
    """
    group = device.mesh_state.process_group
    found = [
        list(own) if rank == group.rank else [device.empty(each, own[0].dtype) for each in of_rank]
        for rank, of_rank in enumerate(shapes)
    ]
    owned = [(rank, buffer) for rank, of_rank in enumerate(found) for buffer in of_rank]
    send_to_all(device, owned)
    return [buffer for _, buffer in owned]


def exchange_arrays(
    device: Device, own: Sequence[np.ndarray], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[np.ndarray]:
    """Like ``exchange_all``, for arrays in host memory. The host waits."""
    if device.mesh_state.process_group.size == 1:
        return list(own)
    found = exchange_all(device, [device.upload(each) for each in own], shapes)
    return [device.download(buffer) for buffer in found]


def exchange_numbers(
    device: Device, numbers: Sequence[int], counts: Sequence[int] | None = None
) -> list[list[int]]:
    """Sends integers to all other processes; returns those of all processes. The host waits.

    Args:
        device: the device whose compute queue runs the exchange.
        numbers: the numbers of this process.
        counts: how many numbers each process sends. Default: as many as this one.
    """
    counts = counts or [len(numbers)] * device.mesh_state.process_group.size
    shapes = [[(count,)] for count in counts]
    return [
        each.tolist() for each in exchange_arrays(device, [np.array(numbers, np.int64)], shapes)
    ]


def compare_numbers(device: Device, call: str, numbers: Sequence[int]) -> list[list[int]]:
    """Like ``exchange_numbers``; also compares the name of the call with the other processes."""
    with agreed(device, Description.of({"call": call, "tensors": []})):
        return exchange_numbers(device, numbers)
