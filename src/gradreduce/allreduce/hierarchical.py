"""All-reduce in two halves: who adds what where, without a collective library.

The order of additions is a function of the number n of replicas alone: the first n // 2 replicas
in mesh order make one half, the rest the other, each is added left to right, then the two halves
(n = 5: (r0+r1) + ((r2+r3)+r4)). A topology names other halves, and their order. Everything else
here decides how bytes travel.

Source: hierarchical copy of tf.contrib.distribute.AllReduceCrossDeviceOps, which leaves out the
last replica of an odd number; here any number works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradreduce import ops
from gradreduce.device import (
    ALIGNMENT,
    Buffer,
    Device,
    accumulate_dtype,
    bring,
    by_physical,
    gather,
    scatter,
)

from .halves import Halves, halves_of
from .job import Job

__all__ = ["SLICE_BYTES", "Slice", "hierarchical_copy", "plan_slices", "works_in_place"]

# A pack of at least this is cut into a slice for each physical device, so that every link works;
# below it, one device for a whole pack saves launches. From the design, to be measured on links.
SLICE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Slice:
    """A part of a pack and the replica on whose device it is added.

    Attributes:
        job: which pack.
        main: the replica whose device adds it.
        start: first element.
        stop: one past the last.
    """

    job: int
    main: int
    start: int
    stop: int


def plan_slices(
    packs: Sequence[tuple[int, int]], mains: Sequence[int], slice_bytes: int = SLICE_BYTES
) -> list[Slice]:
    """Which device adds which part of which pack.

    Args:
        packs: ``(elements, bytes of an element)`` of each pack; of the narrower one where inputs
            and outs differ, so that a cut is a vector boundary in both.
        mains: the first replica on each physical device.
        slice_bytes: a pack of at least this many bytes is cut, at 16-byte boundaries, into one
            slice for each physical device; smaller ones take turns.
    """
    slices = []
    turn = 0
    for job, (size, itemsize) in enumerate(packs):
        if size * itemsize < slice_bytes or len(mains) == 1:
            slices.append(Slice(job, mains[turn % len(mains)], 0, size))
            turn += 1
            continue
        unit = max(1, ALIGNMENT // itemsize)
        units = size // unit
        cuts = [units * part // len(mains) * unit for part in range(len(mains))] + [size]
        for part, main in enumerate(mains):
            slices.append(Slice(job, main, cuts[part], cuts[part + 1]))
    return slices


def hierarchical_copy(jobs: Sequence[Job], topology: Halves | None = None) -> None:
    """Reduces every job; the same bits on every placement, whatever the packs and slices.

    Where all replicas are within reach of each other, each main device reads all inputs of its
    slices and writes all outs, in one launch. Where not, halves are added apart and copied.

    Args:
        jobs: on the same devices, all of them.
        topology: the halves, in place of the first n // 2 replicas and the rest.

    Raises:
        ValueError: the topology is one of another number of replicas. Nothing was launched.
    """
    if not jobs:
        return
    devices = [buffer.device for buffer in jobs[0].inputs]
    halves = halves_of(len(devices), topology)
    mains = [places[0] for places in by_physical(devices).values()]
    slices = plan_slices([(job.inputs[0].size, _narrower(job)) for job in jobs], mains)
    with devices[0].fabric.launch_lock:
        if all(_reaches(devices[main], devices) for main in mains):
            _direct(jobs, slices, devices, halves)
        else:
            for part in slices:
                _staged(jobs[part.job].part(part.start, part.stop), part.main, devices, halves)


def _narrower(job: Job) -> int:
    return min(job.inputs[0].dtype.itemsize, job.outs[0].dtype.itemsize)


def works_in_place(devices: Sequence[Device]) -> bool:
    """Whether a failure on the way leaves the inputs as they were, outs being inputs or not.

    Where every device reaches every other nothing is allocated after the first launch. Staged,
    something is, and may fail when a part has been reduced already.
    """
    return all(_reaches(device, devices) for device in devices)


def _reaches(main: Device, devices: Sequence[Device]) -> bool:
    return all(main.fabric.peers(main.physical, device.physical) for device in devices)


def _direct(
    jobs: Sequence[Job], slices: Sequence[Slice], devices: Sequence[Device], halves: Halves
) -> None:
    """One launch for each main device and divisor: read n, write n."""
    order = [*halves[0], *halves[1]]
    split = len(halves[0]) if all(halves) else 0
    by_main: dict[tuple[int, float], list[Job]] = {}
    for part in slices:
        job = jobs[part.job].part(part.start, part.stop)
        by_main.setdefault((part.main, job.divisor), []).append(job)
    working = [devices[main] for main in dict.fromkeys(main for main, _ in by_main)]
    for leader in working:
        gather(leader, devices)
    for (main, divisor), parts in by_main.items():
        ops.all_sum(
            [job.outs for job in parts],
            [[job.inputs[replica] for replica in order] for job in parts],
            split,
            divisor=divisor,
            device=devices[main],
        )
    for leader in working:
        scatter(leader, devices)


def _staged(job: Job, main: int, devices: Sequence[Device], halves: Halves) -> None:
    """The halves on two devices, the sum on the main one, and back, every crossing a copy.

    The main device adds the half of its own replica, the k-th of that half; the other half is
    added on the device of *its* k-th replica (k modulo its size).
    """
    half, other = halves
    if main not in half:
        half, other = other, half
    leader = devices[main]
    partials = [_half_sum(leader, [job.inputs[replica] for replica in half])]
    if other:
        partner = devices[other[half.index(main) % len(other)]]
        partial = _half_sum(partner, [job.inputs[replica] for replica in other])
        partials.append(bring(leader, partial))
    near = by_physical(devices)[leader.physical]
    sharing = [devices[replica] for replica in near]
    gather(leader, sharing)
    ops.all_sum(
        [[job.outs[replica] for replica in near]],
        [partials],
        len(partials) - 1,
        divisor=job.divisor,
        device=leader,
    )
    scatter(leader, sharing)
    for physical, places in by_physical(devices).items():
        if physical != leader.physical:
            first = job.outs[places[0]]
            first.device.copy(first, job.outs[main])
            for place in places[1:]:
                devices[place].copy(job.outs[place], first)


def _half_sum(device: Device, inputs: Sequence[Buffer]) -> Buffer:
    """The inputs added left to right on ``device``, in the accumulate type."""
    near = [bring(device, buffer) for buffer in inputs]
    wide = accumulate_dtype(inputs[0].dtype)
    if len(near) == 1 and near[0].dtype == wide:
        return near[0]
    total = device.empty(inputs[0].shape, wide)
    sharing = [buffer.device for buffer in near]
    gather(device, sharing)
    ops.add_n([total], [near], device=device)
    scatter(device, sharing)
    return total
