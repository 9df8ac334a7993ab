"""Exchange of buffers between the processes of a mesh, as one operation of a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from gradreduce.device import (
    Device,
    GpuMove,
    Label,
    MeshState,
    Message,
    Parcel,
    PendingCall,
    Queue,
    to_local,
)
from gradreduce.errors import CollectiveError

from .process_group import ProcessError, ProcessGroup, group_of

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
    group = group_of(device)
    home = device.mesh.devices[0]
    if group.move_on_gpu is not None and device.physical != home.physical:
        _exchange_at_home(home, sends, receives, queue)
        return
    label = mesh_state.thread.label
    move = group.move_on_gpu

    def command() -> None:
        with mesh_state.recording_commands(None):
            if move is None:
                _exchange_by_host(device, sends, receives, queue, label, group)
            else:
                _exchange_on_gpu(device, sends, receives, queue, label, move)

    device._queue_exchange(command, sends, receives, queue)


def _exchange_at_home(
    home: Device, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue
) -> None:
    """Exchanges by copies on the first GPU of the mesh, by which the processes are connected."""
    local = {id(buffer): to_local(home, buffer) for _, buffer in sends}  # one copy for all
    outgoing = [(rank, local[id(buffer)]) for rank, buffer in sends]
    incoming = [(rank, home.empty(buffer.shape, buffer.dtype)) for rank, buffer in receives]
    exchange(home, outgoing, incoming, queue)
    for (_, buffer), (_, copy) in zip(receives, incoming, strict=True):
        home.copy(buffer, copy, queue=queue)


def _exchange_by_host(
    device: Device,
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    queue: Queue,
    label: Label | None,
    group: ProcessGroup,
) -> None:
    seconds = seconds_of(device.mesh_state, group)  # applies to each call of a prepared step
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
    move: GpuMove,
) -> None:
    group = group_of(device)
    outgoing = [parcel for parcel in sends if parcel[1].nbytes]
    incoming = [parcel for parcel in receives if parcel[1].nbytes]
    if not (outgoing or incoming):
        return
    with watched([device], label):
        for batch in batches(group.rank, group.size, outgoing, incoming):
            device._exchange_on_gpu(*batch, queue, move)


@contextmanager
def watched(devices: Sequence[Device], label: Label | None) -> Iterator[None]:
    """Context manager: the work with other processes that is queued inside has a deadline.

    The watchdog also checks that the other processes make the same calls.

    Args:
        devices: the devices whose queues get the work.
        label: the packs of the work; None: those of the present call.

    Raises:
        CollectiveError: the work cannot be queued. The mesh has failed, and the other processes are
            told.
    """
    mesh_state, group = devices[0].mesh_state, group_of(devices[0])
    what = group.called if label is None else str(label)
    pending = PendingExchange(what, seconds_of(mesh_state, group), devices, group)
    with _failing(mesh_state, group, label), mesh_state.enforce_deadline(pending):
        yield


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
    by_place: dict[tuple[int, int], tuple[list[Parcel], list[Parcel]]] = {}
    for side, parcels in enumerate((sends, receives)):
        counts = [0] * size
        for parcel in parcels:
            other = parcel[0]
            distance = (other - rank if side == 0 else rank - other) % size
            place = (distance - 1) // _GROUP_DISTANCES, counts[other] // _GROUP_PARCELS
            counts[other] += 1
            by_place.setdefault(place, ([], []))[side].append(parcel)
    return [by_place[place] for place in sorted(by_place)]


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
        mesh_state.fail_all(reason)
        raise CollectiveError(reason) from error
    except BaseException as error:  # Ctrl-C too: the other processes wait for data that is not sent
        mesh_state.raise_failure(error)
        what = group.called if label is None else f"the exchange of {label}"
        mesh_state.fail_all(describe_stop(what, error))
        raise


class PendingExchange(PendingCall):
    """A pending exchange, or collective, between the GPUs of several processes.

    It is resolved when it is done and all processes are known to make the same calls.

    Args:
        what: the names of its tensors.
        seconds: the deadline.
        devices: the devices whose queues run it.
        group: the processes.
    """

    def __init__(
        self, what: str, seconds: float, devices: Sequence[Device], group: ProcessGroup
    ) -> None:
        super().__init__(what, seconds, devices, devices[0].mesh_state.generation)
        self._group = group
        call = group.last_call
        self._number = -1 if call is None else call.number

    @property
    def is_resolved(self) -> bool:
        """See ``PendingCall``."""
        is_known = self.dropped or self._group.confirmed >= self._number
        return super().is_resolved and is_known

    @property
    def waits_for_others(self) -> bool:
        """See ``PendingCall``."""
        return not super().is_resolved

    def failure(self) -> str | None:
        """See ``PendingCall``."""
        reason = self._group.look()
        return None if reason is None else f"{self.call}: {reason}"


def describe_stop(what: str, error: BaseException) -> str:
    """Returns why the mesh has failed; other processes write this process's name before it."""
    return f"stopped in {what}: {error!r}"


def seconds_of(mesh_state: MeshState, group: ProcessGroup) -> float:
    """Returns how long the calling thread's call may wait for other processes."""
    pending_call = mesh_state.thread.pending_call
    if pending_call is None:
        return group.timeout
    return min(group.timeout, max(0.0, pending_call.remaining))
