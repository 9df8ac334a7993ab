"""Plans: what a reduction will launch, copy and transfer, found by a dry run.

The pipeline itself runs on dry-run devices (``backends/dry_run.py``). A plan depends on shapes,
dtypes, settings and mesh, and on which tensors are in one flat buffer already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradreduce.arrays.distributed import ReduceOp
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.comm.process_group import group_of
from gradreduce.device import (
    Buffer,
    CommandList,
    Device,
    DType,
    Journal,
    Operation,
    PackInfo,
    Ranks,
    Record,
    bytes_sent,
)
from gradreduce.errors import counted

from .algorithms import Settings
from .arguments import Request, batches_of, check_one_mesh, names_of
from .pack_buffers import lay_out
from .pipeline import BatchPlan, plan_requests
from .requests import dry_run_request, with_all_reduced
from .weighting import Weighting


@dataclass(frozen=True)
class PlannedPack:
    """One pack of a plan: tensors that are reduced together.

    Attributes:
        tensors: the indices in the batch of its tensors, in order. Parts of the first and the last
            may be in the neighbouring packs.
        dtype: the dtype of the tensors.
        wire: the dtype in which they are transferred.
        nbytes: the transferred bytes of one replica's pack, with the gaps between tensors.
        way: ``"hierarchical_copy"``, ``"nccl"`` or ``"one device"``.
        devices: the logical indices of the devices whose replicas are added.
        moved: the number of devices on which the tensors are first packed into a flat buffer. On
            the other devices they are read in place.
        crossing: how bytes get from one physical device to another. ``"none"``: they do not.
            ``"direct"``: the launches that add read and write the memory of peers. ``"copies"``:
            memory that a launch cannot access is copied first. ``"result"``: only the result is
            copied. ``"collective"``: by the collective library. ``"exchange"``: by an exchange with
            other processes. ``"rows"``: by an exchange of IndexedSlices; the plan assumes that
            other processes have as many rows as this one.
    """

    tensors: tuple[int, ...]
    dtype: DType
    wire: DType
    nbytes: int
    way: str
    devices: tuple[int, ...]
    moved: int
    crossing: str


@dataclass(frozen=True)
class OperationCounts:
    """Totals of the operations on all devices.

    Attributes:
        launches: the number of kernel launches.
        copies: the number of copies between devices.
        collectives: the number of ranks in calls of the collective library, one for each device of
            a call.
        bytes: the bytes that move from one device to another by copies, collectives, exchanges, and
            launches that access a peer's memory. Each rank of a collective counts with its buffer.
    """

    launches: int = 0
    copies: int = 0
    collectives: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> OperationCounts:
        """Counts these records."""
        log = Journal(list(records))
        return OperationCounts(log.launches, log.copies, len(log.of("collective")), log.bytes)


@dataclass(frozen=True, kw_only=True)
class ReducePlan(OperationCounts):
    """The plan of one ``batch_reduce``: packs and counts; ``print`` it.

    Attributes:
        packs: the packs; those that are reduced one after the other are in this order.
        mesh: the physical device of each logical device.
        backend: the backend of the mesh.
        sent: physical device -> bytes that it sends to other devices and processes; a collective
            counts as a ring.
        ring_bytes: the bytes that each physical device would send if a ring over all of them
            reduced the packs. Other processes are assumed to have as many as this one.
        exchanges: the number of exchanges with other processes.
        exchange_bytes: the bytes that this process sends in exchanges; ``bytes`` includes them.
        names: the names of the tensors of the batch, by index; empty if none has a name.
        weights: the weights of this process's replicas; empty if all are 1.
    """

    packs: tuple[PlannedPack, ...]
    mesh: tuple[int, ...]
    backend: str
    sent: Mapping[int, int]
    ring_bytes: int
    exchanges: int = 0
    exchange_bytes: int = 0
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        exchanges = of_process = ""
        if self.exchanges:
            of_process = " of this process"
            exchanges = (
                f"{counted(self.exchanges, 'exchange')} of {counted(self.exchange_bytes, 'byte')}, "
            )
        least, most = min(self.sent.values()), max(self.sent.values())
        lines = [
            f"{counted(len(self.packs), 'pack')} on {self.backend} {list(self.mesh)}: "
            f"{counted(self.launches, 'launch', 'launches')}, "
            f"{counted(self.copies, 'copy', 'copies')}, "
            f"{counted(self.collectives, 'collective rank')}, {exchanges}"
            f"{'at most ' * (least < most)}{most:,} bytes sent by a device, "
            f"{sum(self.sent.values()):,} by all"
            f"{of_process} (in a ring {self.ring_bytes:,} by each)"
        ]
        if self.weights:
            lines.append(f"  weights of the replicas: {', '.join(map(str, self.weights))}")
        for index, pack in enumerate(self.packs):
            several = len(pack.devices) > 1
            replicas = f"{'each of ' if several else ''}{counted(len(pack.devices), 'replica')}"
            lines.append(
                f"  {index:4} {pack.way:18}{pack.dtype!s:10}{pack.nbytes:14,} bytes of "
                f"{replicas}{_transfer_text(pack, self.mesh)}: tensors "
                f"{tensor_ranges(pack.tensors, self.names)}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Traffic:
    """Bytes that operations move, by device and link.

    Attributes:
        read: physical device -> bytes that any device reads in its memory.
        written: physical device -> bytes that any device writes in its memory.
        links: (from, to) of physical devices -> bytes; a collective counts as a ring.
        exchanged: physical device -> bytes that it sends to other processes.
    """

    read: Counter[int] = field(default_factory=Counter)
    written: Counter[int] = field(default_factory=Counter)
    links: Counter[tuple[int, int]] = field(default_factory=Counter)
    exchanged: Counter[int] = field(default_factory=Counter)

    @property
    def memory(self) -> Counter[int]:
        """Returns the bytes read and written in the memory of each physical device."""
        return self.read + self.written

    @property
    def sent(self) -> Counter[int]:
        """Returns the bytes that each physical device sends to other devices and processes."""
        total = self.exchanged.copy()
        for (source, _), nbytes in self.links.items():
            total[source] += nbytes
        return total


def add_traffic(total: Traffic, operation: Operation, mesh: Sequence[int]) -> None:
    """Adds the bytes that an operation moves; a collective uses the links of a ring.

    Args:
        total: the traffic, which is changed.
        operation: the operation.
        mesh: the physical device of each logical device.
    """
    record, rows = operation.records[0], operation.rows
    # A copy may run on either of its two devices; the destination's memory is written.
    home = rows[0][0].device.physical if record.kind == "copy" else mesh[record.device]
    for row in rows:
        for index, buffer in enumerate(row):
            there, is_written = buffer.device.physical, index < operation.num_written
            (total.written if is_written else total.read)[there] += buffer.nbytes
            if there != home and record.kind != "collective":
                total.links[(home, there) if is_written else (there, home)] += buffer.nbytes
    if record.kind == "collective":
        ring = [row[0].device.physical for row in rows]
        ranks = _ranks_of(rows[0][0].device)
        num_ranks = len(ring) if ranks is None else ranks.size
        sent = bytes_sent(record.name, record.nbytes, num_ranks)
        for link in zip(ring, [*ring[1:], ring[0]], strict=True) if sent else ():
            if ranks is not None and link[0] == ring[-1]:  # the next rank is in another process
                total.exchanged[link[0]] += sent
            else:
                total.links[link] += sent
    elif record.kind == "exchange":
        total.exchanged[home] += record.nbytes


def _ranks_of(device: Device) -> Ranks | None:
    """Returns the ranks of the collectives over the processes of a mesh; None if there are none."""
    collective = group_of(device).collective
    return None if collective is None else collective.ranks


@dataclass(frozen=True)
class DryRun:
    """The plan of a dry run with its operations.

    Attributes:
        plan: the plan.
        operations: the logged operations, in order, with their operands and records.
    """

    plan: ReducePlan
    operations: tuple[Operation, ...]


def dry_run_of(
    settings: Settings,
    reduce_op: ReduceOp,
    requests: Sequence[Request],
    reduce: Callable[[list[Request]], object],
    weighting: Weighting | None = None,
) -> DryRun:
    """Runs a reduction of these requests on dry-run devices.

    Args:
        settings: the settings of the reduction.
        reduce_op: see ``batch_reduce``.
        requests: checked requests.
        reduce: reduces requests with these settings, operation and weights.
        weighting: the weights of the replicas; None: all are 1.

    Raises:
        ValueError: there is no request, or values are on several meshes.
    """
    check_one_mesh(requests, "a plan")
    dry_run_mesh = DryRunMesh.like(requests[0].value.mesh)
    mesh, names = dry_run_mesh.mesh, names_of(requests, range(len(requests)))
    requests = [dry_run_request(dry_run_mesh, request) for request in requests]
    commands = CommandList()
    with mesh.mesh_state.recording_commands(commands):
        reduce(requests)
    operations = tuple([each for each in commands.operations if each.records])
    log = Journal([record for each in operations for record in each.records])
    requests = with_all_reduced(requests, always=settings.exact and weighting is not None)
    found, others = batches_of(requests, reduce_op)
    packs = []
    for indices, counts in found:
        gradients, batch = plan_requests(
            settings, reduce_op, requests, indices, counts, is_weighted=weighting is not None
        )
        packs += _packs_of(batch, gradients, indices, settings.all_reduce_alg, log)
    packs += [_pack_of_one(requests[index], index, log) for index in others]
    exchanges, traffic = log.of("exchange"), Traffic()
    physical = tuple([device.physical for device in mesh])
    ranks = _ranks_of(mesh[0])
    for each in operations:
        add_traffic(traffic, each, physical)
    sent = traffic.sent
    num_ranks = len(set(physical)) * mesh.num_processes if ranks is None else ranks.size
    plan = ReducePlan(
        **vars(OperationCounts.of(log.records)),
        packs=tuple(packs),
        mesh=physical,
        backend=mesh.backend,
        sent={device: sent[device] for device in sorted(set(physical))},
        ring_bytes=bytes_sent("all_reduce", sum([pack.nbytes for pack in packs]), num_ranks),
        exchanges=len(exchanges),
        exchange_bytes=sum([record.nbytes for record in exchanges]),
        names=names,
        weights=() if weighting is None else weighting.own,
    )
    return DryRun(plan, operations)


def _packs_of(
    batch: BatchPlan,
    gradients: Sequence[Sequence[Buffer]],
    positions: Sequence[int],
    way: str,
    log: Journal,
) -> list[PlannedPack]:
    """Describes the packs of a batch; ``positions`` are its tensors' positions in the call."""
    packs = []
    indices = tuple([device.index for device in batch.devices])
    pack_buffers = lay_out(batch.flat, gradients, batch.algorithm)
    for number, (at, start, stop) in enumerate(batch.packs, 1):
        flat = batch.flat[at]
        moved = sum(tensors is not None for tensors in pack_buffers[at].filling)
        inside = tuple([positions[flat.tensors[each]] for each in flat.pieces[start, stop].tensors])
        nbytes = (stop - start) * flat.wire.itemsize
        crossing = _crossing(log, inside[0], number)
        packs.append(
            PlannedPack(inside, flat.dtype, flat.wire, nbytes, way, indices, moved, crossing)
        )
    return packs


def _crossing(log: Journal, tensor: int, pack: int | None = None) -> str:
    """Returns how the bytes of a tensor's pack crossed between physical devices."""
    ways = {
        (record.phase == "unpack", record.kind)
        for record in log.records
        if isinstance(label := record.label, PackInfo)
        and record.nbytes
        and tensor in label.tensors
        and (pack is None or pack in label.packs)
    }
    return next((crossing for way, crossing in _CROSSINGS.items() if way in ways), "none")


# Whether results were distributed, and the kind of a record -> crossing. The first match counts.
_CROSSINGS = {
    (False, "exchange"): "exchange",
    (False, "collective"): "collective",
    (False, "copy"): "copies",
    (False, "launch"): "direct",
    (True, "copy"): "result",
}


def _transfer_text(pack: PlannedPack, mesh: Sequence[int]) -> str:
    """Describes how a pack is transferred."""
    words = [] if pack.wire == pack.dtype else [f"as {pack.wire}"]
    if pack.moved:
        words.append(f"packed on {counted(pack.moved, 'device')}")
    is_apart = len({mesh[device] for device in pack.devices}) > 1
    reader = "by the device that adds them"
    if pack.way != "one device":
        reader = "and written by their peers"
    crossings = {
        "none": "nothing to transfer" if is_apart else "on one physical device",
        "direct": f"read {reader}",
        "copies": "copied to where they are added",
        "result": "only the result is copied",
        "collective": "by the collective library",
        "exchange": "exchanged with other processes",
        "rows": "exchanged with other processes, whose rows are assumed to be as many",
    }
    return ", ".join(["", *words, crossings[pack.crossing]])


def _pack_of_one(request: Request, index: int, log: Journal) -> PlannedPack:
    """Describes a value that is added on one device."""
    part = request.value.parts[0]
    rows = part if isinstance(part, Buffer) else part.values
    indices = tuple([device.index for device in request.value.devices])
    crossing = _crossing(log, index)
    is_rows = all([isinstance(each, IndexedSlices) for each in request.value.parts])
    if crossing == "exchange" and is_rows:
        crossing = "rows"
    return PlannedPack(
        (index,), rows.dtype, rows.dtype, rows.nbytes, "one device", indices, 0, crossing
    )


def tensor_ranges(numbers: Sequence[int], names: Sequence[str]) -> str:
    """Formats tensors as ranges, such as ``0-3, 7``, or ``layers.0.weight to head.bias``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    between = " to " if names else "-"
    ends = [[first] if first == last else [first, last] for first, last in ranges]
    return ", ".join(
        between.join(str(names[each]) if names else str(each) for each in pair) for pair in ends
    )
