"""All-reduce by hierarchical copy: adds replicas in two groups, without a collective library.

The order of additions is a function of the number n of replicas alone: the first n // 2 replicas
in mesh order make one group, the rest the other, each is added left to right, then the two sums
(n = 5: (r0+r1) + ((r2+r3)+r4)). ``reduction_groups`` names other groups, and their order.
Everything else here decides how bytes are transferred.

Source: hierarchical copy of tf.contrib.distribute.AllReduceCrossDeviceOps, which leaves out the
last replica of an odd number; here any number works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradreduce import ops
from gradreduce.device import (
    ALIGNMENT,
    Buffer,
    Device,
    Queue,
    accumulate_dtype,
    by_physical,
    ensure_accessible,
    fork_streams,
    join_streams,
    join_streams_each,
)

from .reduction_groups import ReductionGroups, reduction_groups_of
from .stages import Job, Stage, Steps, run_stages

__all__ = ["SLICE_BYTES", "Slice", "hierarchical_copy", "plan_slices", "works_in_place"]

# Packs of one stage of at least this many bytes are divided among the devices, so that every link
# is used; below it, one device for a whole pack saves launches. To be measured on links.
SLICE_BYTES = 64 * 1024


class Slice(NamedTuple):
    """A part of a pack, and the replica whose device adds it.

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
    """Plans which device adds which part of which pack of a stage.

    End to end they are cut into one run of equal bytes for each physical device. (Each pack cut
    for itself would load the links no better, and make as many slices as packs times devices.)

    Args:
        packs: ``(elements, bytes of an element)`` of each pack; of the narrower one where inputs
            and outs differ, so that a cut is a vector boundary in both.
        mains: the first replica on each physical device.
        slice_bytes: packs of fewer bytes in all are not cut but take turns.
    """
    total = sum(size * itemsize for size, itemsize in packs)
    if total < slice_bytes or len(mains) == 1:
        return [Slice(job, mains[job % len(mains)], 0, size) for job, (size, _) in enumerate(packs)]
    slices: list[Slice] = []
    part, before = 0, 0  # the run that is being filled; bytes of the packs before
    for job, (size, itemsize) in enumerate(packs):
        unit = ALIGNMENT // itemsize
        start = 0
        while start < size:
            limit = total * (part + 1) // len(mains) - before  # bytes of this pack up to its end
            stop = size if limit >= size * itemsize else limit // itemsize // unit * unit
            if stop > start:
                slices.append(Slice(job, mains[part], start, stop))
                start = stop
            if start < size:
                part += 1
        before += size * itemsize
    return slices


def hierarchical_copy(
    jobs: Sequence[Job],
    reduction_groups: ReductionGroups | None = None,
    *,
    stages: Sequence[Stage] = (),
) -> None:
    """Reduces every job, with the same bits for every placement, packs and slices.

    If all devices are peers, each main device reads all inputs of its slices and writes all outs,
    in one launch for each stage. If not, the two groups are added apart, with copies of the memory
    that a launch cannot access.

    Args:
        jobs: on the same devices, all of them.
        reduction_groups: the two groups, instead of the first n // 2 replicas and the rest.
        stages: see ``run_stages``.

    Raises:
        ValueError: ``reduction_groups`` names another number of replicas. Nothing was launched.
    """
    if not jobs:
        return
    devices = [buffer.device for buffer in jobs[0].inputs]
    groups = reduction_groups_of(len(devices), reduction_groups)
    mains = [replicas[0] for replicas in by_physical(devices).values()]
    direct = all(_can_access(devices[main], devices) for main in mains)

    def steps_of(indices: Sequence[int], queue: Queue) -> Steps:
        together = [jobs[index] for index in indices]
        packs = [(job.inputs[0].size, _narrower(job)) for job in together]
        work = [
            (part.main, together[part.job].part(part.start, part.stop))
            for part in plan_slices(packs, mains)
        ]
        if direct:
            return _direct(work, devices, groups, queue)
        return _staged([_Staged(*each, devices, groups) for each in work], devices, queue)

    with devices[0].mesh_state.launch_lock:
        run_stages(stages, len(jobs), steps_of)


def _narrower(job: Job) -> int:
    return min(job.inputs[0].dtype.itemsize, job.outs[0].dtype.itemsize)


def works_in_place(devices: Sequence[Device]) -> bool:
    """Whether inputs can be outs: a failure before the first launch leaves them unchanged.

    If all devices are peers, nothing is allocated after the first launch. Otherwise memory is
    allocated later, which may fail when a part has been reduced already.
    """
    return all(_can_access(device, devices) for device in devices)


def _can_access(main: Device, devices: Sequence[Device]) -> bool:
    return all(main.mesh_state.peers(main.physical, device.physical) for device in devices)


def _direct(
    work: Sequence[tuple[int, Job]],
    devices: Sequence[Device],
    groups: ReductionGroups,
    queue: Queue,
) -> Steps:
    """Launches one kernel for each main device and divisor: reads n buffers, writes n."""
    order = [*groups[0], *groups[1]]
    split = len(groups[0]) if all(groups) else 0
    by_main: dict[tuple[int, float], list[Job]] = {}
    for main, job in work:
        by_main.setdefault((main, job.divisor), []).append(job)
    working = [devices[main] for main in dict.fromkeys(main for main, _ in by_main)]
    join_streams_each(working, devices, queue)
    for (main, divisor), parts in by_main.items():
        ops.all_sum(
            [job.outs for job in parts],
            [[job.inputs[replica] for replica in order] for job in parts],
            split,
            divisor=divisor,
            device=devices[main],
            queue=queue,
        )
    yield
    for leader in working:
        fork_streams(leader, devices, queue)


class _Staged:
    """Reduces one slice where devices are not all peers: copies memory that is not accessible.

    The main device adds the group of its own replica, the k-th of that group; the other group is
    added on the device of *its* k-th replica (k modulo its size).
    """

    def __init__(
        self, main: int, job: Job, devices: Sequence[Device], groups: ReductionGroups
    ) -> None:
        group, other = groups
        if main not in group:
            group, other = other, group
        self._job, self._main, self._devices = job, main, devices
        self.leader = devices[main]
        self.partner = devices[other[group.index(main) % len(other)]] if other else self.leader
        self._groups = [(self.leader, group)] + ([(self.partner, other)] if other else [])
        self._accessible: list[list[Buffer]] = []
        self._partials: list[Buffer] = []

    def copy_inputs(self, queue: Queue) -> None:
        """Copies the replicas of each group to the device that adds them, if not accessible."""
        for device, group in self._groups:
            self._accessible.append(
                [ensure_accessible(device, self._job.inputs[index], queue) for index in group]
            )

    def add_groups(self, queue: Queue) -> None:
        """Adds each group, and copies the other sum to the main device, if not accessible.

        A single replica is exact as it is: it is copied in its own dtype.
        """
        for (device, _), terms in zip(self._groups, self._accessible, strict=True):
            partial = terms[0] if len(terms) == 1 else _group_sum(device, terms)
            self._partials.append(ensure_accessible(self.leader, partial, queue))
        self._accessible.clear()

    def add_both(self, queue: Queue) -> None:
        """Adds the two sums, and copies the result to each other GPU."""
        job, leader = self._job, self.leader
        replicas = by_physical(self._devices)[leader.physical]
        partials = self._partials
        if len({partial.dtype for partial in partials}) > 1:  # one launch reads one dtype
            partials = [_group_sum(leader, [partial]) for partial in partials]
        sharing = [self._devices[replica] for replica in replicas]
        sharing += [partial.device for partial in partials]
        join_streams(leader, sharing)
        ops.all_sum(
            [[job.outs[replica] for replica in replicas]],
            [partials],
            len(partials) - 1,
            divisor=job.divisor,
            device=leader,
        )
        fork_streams(leader, sharing)
        self._partials.clear()
        for physical, indices in by_physical(self._devices).items():
            if physical != leader.physical:
                first = job.outs[indices[0]]
                first.device.copy(first, job.outs[self._main], queue=queue)

    def fan_out(self) -> None:
        """Copies the result on each other GPU to the logical devices that share it."""
        for physical, indices in by_physical(self._devices).items():
            if physical != self.leader.physical:
                for index in indices[1:]:
                    first = self._job.outs[indices[0]]
                    self._devices[index].copy(self._job.outs[index], first)


def _staged(work: Sequence[_Staged], devices: Sequence[Device], queue: Queue) -> Steps:
    """Runs all slices together, a step at a time.

    Done one after the other, each would wait for the last copies of the one before it.
    """
    for part in work:
        part.copy_inputs(queue)
    yield
    _wait_for_copies(devices, queue)
    for part in work:
        part.add_groups(queue)
    yield
    _wait_for_copies([part.leader for part in work], queue)
    for part in work:
        part.add_both(queue)
    yield
    _wait_for_copies(devices, queue)
    for part in work:
        part.fan_out()


def _wait_for_copies(devices: Sequence[Device], queue: Queue) -> None:
    """Makes the compute queues wait for the copies on ``queue``."""
    for device in dict.fromkeys(devices) if queue != "compute" else ():
        device.wait(device.mark(queue))


def _group_sum(device: Device, terms: Sequence[Buffer]) -> Buffer:
    """Adds buffers that ``device`` can access left to right, in the accumulate type."""
    acc_dtype = accumulate_dtype(terms[0].dtype)
    if len(terms) == 1 and terms[0].dtype == acc_dtype:
        return terms[0]
    total = device.empty(terms[0].shape, acc_dtype)
    sharing = [buffer.device for buffer in terms]
    join_streams(device, sharing)
    ops.add_n([total], [terms], device=device)
    fork_streams(device, sharing)
    return total
