"""Profiles a reduction: its plan, lower bounds for its time, and what was measured.

The plan comes from a dry run. The lower bound of a stage is its bytes divided by the copy
bandwidth, which is measured on this mesh. The journal counts what was done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gradreduce.device import Buffer, Device, Mesh, Record

from .pipeline import PHASES
from .plan import DryRun, OperationCounts, ReducePlan, Traffic, add_traffic

# Bytes of a measured copy: more than a cache holds, and on a GPU enough that the host queues the
# next copy before the present one ends.
HOST_BYTES, GPU_BYTES = 64 << 20, 256 << 20
ROUNDS = 5  # the fastest counts, because lower bounds are computed from it


def copy_bandwidth(device: Device, source: Device) -> float:
    """Returns bytes per second of copies by ``device`` from the physical device of ``source``.

    Measured at the first use, which may take a second, waits for the devices, and appears in open
    journals. On simulated devices all memory is host memory: the bandwidth of np.copyto in one
    thread is used for all.
    """
    is_sim, plans = device.mesh_state.shares_host_memory, device.mesh_state.plans
    key = ("copy bandwidth", *((0, 0) if is_sim else (source.physical, device.physical)))
    if key not in plans:
        nbytes = HOST_BYTES if is_sim else GPU_BYTES
        # Zeros, not empty: the system maps unwritten host memory to one page, which a cache holds.
        src = (device if is_sim else source).zeros((nbytes,), "uint8")
        dst = device.zeros((nbytes,), "uint8")
        seconds = [_copy_seconds(device, dst, src) for _ in range(ROUNDS + 1)]
        plans[key] = nbytes / min(seconds[1:])
    found: float = plans[key]
    return found


def _copy_seconds(device: Device, dst: Buffer, src: Buffer) -> float:
    for each in (src.device, device):
        each.synchronize()
    start = time.perf_counter()
    device.copy(dst, src)
    device.synchronize()
    return time.perf_counter() - start


STAGES = (*PHASES, "copies")
# Without uploads: the index of merged IndexedSlices is uploaded once and kept.
_COUNTED = ("launch", "copy", "collective", "exchange", "fill")


@dataclass(frozen=True)
class Stage:
    """One of ``STAGES``: planned and measured counts, bytes, and a lower bound of its time.

    Attributes:
        name: ``pack`` moves tensors into flat buffers. ``all-reduce`` adds and divides, also on one
            device. ``unpack`` moves results out of flat buffers (usually they are views, which need
            no work) or to other replicas. ``copies`` are copies from device to device.
        planned: the counts of the dry run.
        done: the counts of the journal.
        traffic: the bytes of the plan.
        floor_seconds: the lower bound of its time: its bytes at the speed of a copy.
    """

    name: str
    planned: OperationCounts
    done: OperationCounts
    traffic: Traffic
    floor_seconds: float


@dataclass(frozen=True)
class Profile:
    """A reduction's plan with lower bounds of its time, and measured times; ``print`` it.

    Attributes:
        plan: the plan.
        stages: the stages, in the order of ``STAGES``.
        traffic: the bytes of all stages.
        floor_seconds: the lower bound for all stages; work of different devices and links may
            overlap.
        seconds: the time from the call until all devices had finished.
        host_seconds: the time until the call returned.
        memory_bandwidth: physical device -> bytes per second that copies read and write, for
            devices of the plan.
        link_bandwidth: (from, to) of physical devices -> bytes per second, for links of the plan.
        differences: one line for each record that only the plan or only the journal has.
    """

    plan: ReducePlan
    stages: tuple[Stage, ...]
    traffic: Traffic
    floor_seconds: float
    seconds: float
    host_seconds: float
    memory_bandwidth: Mapping[int, float]
    link_bandwidth: Mapping[tuple[int, int], float]
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self._table(), *self._bandwidth_lines(), *self._end()])

    def _table(self) -> Iterator[str]:
        """Yields a line for each stage: planned counts and, if different, the journal's."""
        head = ("launches", "copies", "ranks", "MB leave", "MB read", "MB written", "floor ms")
        yield f"  {'stage':12}" + "".join(f"{word:>12}" for word in head)
        for stage in self.stages:
            planned, done = stage.planned, stage.done
            cells = [
                *[
                    _cell(str(getattr(planned, each)), str(getattr(done, each)))
                    for each in ("launches", "copies", "collectives")
                ],
                _cell(_megabytes(planned.bytes), _megabytes(done.bytes)),
                _megabytes(stage.traffic.read.total()),
                _megabytes(stage.traffic.written.total()),
                f"{stage.floor_seconds * 1e3:.4f}",
            ]
            yield f"  {stage.name:12}" + "".join(f"{cell:>12}" for cell in cells)

    def _bandwidth_lines(self) -> Iterator[str]:
        """Yields a line for each device and link: its bytes and its copy bandwidth."""
        total = self.traffic
        for physical, nbytes in sorted(total.memory.items()):
            bandwidth = self.memory_bandwidth[physical]
            yield (
                f"  device {physical}: {_megabytes(total.read[physical])} MB read, "
                f"{_megabytes(total.written[physical])} MB written, at "
                f"{bandwidth / 1e9:.2f} GB/s {nbytes / bandwidth * 1e3:.4f} ms"
            )
        for (source, target), nbytes in sorted(total.links.items()):
            bandwidth = self.link_bandwidth[source, target]
            yield (
                f"  link {source} to {target}: {_megabytes(nbytes)} MB, at "
                f"{bandwidth / 1e9:.2f} GB/s {nbytes / bandwidth * 1e3:.4f} ms"
            )

    def _end(self) -> Iterator[str]:
        times = f", {self.seconds / self.floor_seconds:.2f} times" if self.floor_seconds else ""
        yield (
            f"  took {self.seconds * 1e3:.4f} ms{times} the floor of "
            f"{self.floor_seconds * 1e3:.4f} ms; the host {self.host_seconds * 1e3:.4f} ms"
        )
        if self.differences:
            yield "  the journal differs from the plan:"
            yield from (f"    {line}" for line in self.differences)
        else:
            yield "  the journal counted what was planned"


def profile_of(dry_run: DryRun, mesh: Mesh, reduce: Callable[[], object]) -> Profile:
    """Runs the reduction, and compares it with its plan.

    Args:
        dry_run: the dry run of ``reduce``.
        mesh: the mesh of the values.
        reduce: runs the reduction and returns the results, which are dropped. Called twice;
            compiling, connecting and allocating of the first call are not measured.
    """
    whole = mesh.devices[0].mesh
    reduce()
    whole.synchronize()
    with whole.journal() as journal:
        start = time.perf_counter()
        results = reduce()
        returned = time.perf_counter()
    whole.synchronize()
    ended = time.perf_counter()
    del results
    planned: dict[str, list[Record]] = {name: [] for name in STAGES}
    traffic, total = {name: Traffic() for name in STAGES}, Traffic()
    for operation in dry_run.operations:
        name = _stage_of(operation.records[0])
        planned[name] += operation.records
        for each in (traffic[name], total):
            add_traffic(each, operation, dry_run.plan.mesh)
    done = [record for record in journal.records if record.kind in _COUNTED]
    firsts = {device.physical: device for device in reversed(whole.devices)}
    memory = {each: 2 * copy_bandwidth(firsts[each], firsts[each]) for each in total.memory}
    links = {link: copy_bandwidth(firsts[link[1]], firsts[link[0]]) for link in total.links}

    def floor(part: Traffic) -> float:
        """Returns a lower bound: devices and links overlap, except simulated ones."""
        of_memory = [nbytes / memory[each] for each, nbytes in part.memory.items()]
        if whole.mesh_state.shares_host_memory:
            return sum(of_memory)
        of_links = [nbytes / links[each] for each, nbytes in part.links.items()]
        return max([*of_memory, *of_links], default=0.0)

    stages = [
        Stage(
            name,
            OperationCounts.of(planned[name]),
            OperationCounts.of([each for each in done if _stage_of(each) == name]),
            traffic[name],
            floor(traffic[name]),
        )
        for name in STAGES
    ]
    return Profile(
        plan=dry_run.plan,
        stages=tuple(stages),
        traffic=total,
        floor_seconds=floor(total),
        seconds=ended - start,
        host_seconds=returned - start,
        memory_bandwidth=memory,
        link_bandwidth=links,
        differences=tuple(
            _differences([x for each in dry_run.operations for x in each.records], journal.records)
        ),
    )


def _stage_of(record: Record) -> str:
    return "copies" if record.kind == "copy" else record.phase


def _differences(planned: Iterable[Record], done: Iterable[Record]) -> Iterator[str]:
    before = Counter(record for record in planned if record.kind in _COUNTED)
    after = Counter(record for record in done if record.kind in _COUNTED)
    for word, lone in (("only planned", before - after), ("only done", after - before)):
        for record, count in lone.items():
            yield f"{word}: {count} x {record}"


# -- text ------------------------------------------------------------------------------------------


def _cell(planned: str, done: str) -> str:
    """Formats a planned and a measured count; one number if they are equal."""
    return planned if planned == done else f"{planned}, not {done}"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f}"
