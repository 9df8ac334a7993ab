"""All-reduce by hierarchical copy: adds replicas in groups, without a collective library.

The order of additions depends only on the number n of replicas. The first n // 2 replicas in mesh
order are one group, the rest the other; each group is added left to right, then the two sums (n =
5: (r0+r1) + ((r2+r3)+r4)). ``reduction_groups`` replaces these by any number of groups; each is
added left to right, then their sums are. Exact sums have no order and no groups. The rest of this
module decides how bytes are transferred.

Source: hierarchical copy of tf.contrib.distribute.AllReduceCrossDeviceOps. For an odd number of
replicas TensorFlow leaves out the last one; here any number works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradreduce.device import (
    ALIGNMENT,
    Buffer,
    Device,
    Queue,
    by_physical,
    ensure_accessible,
)
from gradreduce.sums.exact_terms import exact_sum_command

from .algorithm import (
    Algorithm,
    Job,
    ReductionGroups,
    Steps,
    as_one_dtype,
    group_sum,
    reduction_groups_of,
    write_sums,
)

# Packs of a stage with at least this many bytes together are divided among the devices, so that
# every link is used. Smaller ones are reduced by one device each, which saves launches. Not
# measured on GPUs yet.
SLICE_BYTES = 64 * 1024


class Slice(NamedTuple):
    """A part of a pack, and the replica whose device adds it (or the process).

    Attributes:
        job: the index of the pack.
        main: the replica whose device adds it; over processes the rank of the process.
        start: the first element.
        stop: one past the last element.
    """

    job: int
    main: int
    start: int
    stop: int


def plan_slices(
    packs: Sequence[tuple[int, int]], mains: Sequence[int], slice_bytes: int = SLICE_BYTES
) -> list[Slice]:
    """Plans which device adds which part of which pack of a stage.

    The packs, laid end to end, are cut into one run of equal bytes for each physical device.
    (Cutting each pack would not use the links better, and would make packs times devices slices.)

    Args:
        packs: ``(elements, bytes of an element)`` of each pack. If inputs and outs have different
            dtypes, the bytes of the narrower one, so that a cut is a vector boundary in both.
        mains: the first replica on each physical device.
        slice_bytes: if all packs together have fewer bytes, they are not cut but assigned to the
            devices in turn.
    """
    total = sum([size * itemsize for size, itemsize in packs])
    if total < slice_bytes or len(mains) == 1:
        return [Slice(job, mains[job % len(mains)], 0, size) for job, (size, _) in enumerate(packs)]
    slices: list[Slice] = []
    part, before = 0, 0  # the current run; bytes of the previous packs
    for job, (size, itemsize) in enumerate(packs):
        unit = ALIGNMENT // itemsize
        start = 0
        while start < size:
            limit = total * (part + 1) // len(mains) - before  # bytes of this pack in the run
            stop = size if limit >= size * itemsize else limit // itemsize // unit * unit
            if stop > start:
                slices.append(Slice(job, mains[part], start, stop))
                start = stop
            if start < size:
                part += 1
        before += size * itemsize
    return slices


def extents(jobs: Sequence[Job]) -> list[tuple[int, int]]:
    """Returns the argument ``packs`` of ``plan_slices`` for jobs."""
    return [
        (job.inputs[0].size, min(job.inputs[0].dtype.itemsize, job.outs[0].dtype.itemsize))
        for job in jobs
    ]


class HierarchicalCopy(Algorithm):
    """Reduces every job, with the same bits for every placement, packs and slices.

    If all devices are peers and there are at most two groups, each main device reads all inputs of
    its slices and writes all outs, in one launch for each stage. Otherwise each group is added
    separately, and memory that a launch cannot access is copied.
    """

    has_groups = True

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        super().__init__(devices)
        found = reduction_groups_of(len(devices), reduction_groups)
        self._groups = [group for group in found if group]
        self._mains = [replicas[0] for replicas in by_physical(self.devices).values()]
        peers = devices[0].mesh_state.peers
        gpus = {device.physical for device in devices}
        in_one_launch = self.exact or len(self._groups) <= 2
        self.in_place = in_one_launch and all(peers(a, b) for a in gpus for b in gpus)
        self.reads_peers = self.in_place and len(gpus) > 1
        self._order = [replica for group in self._groups for replica in group]
        self._split = len(self._groups[0]) if len(self._groups) == 2 else 0

    def all_reduce(self, jobs: Sequence[Job], queue: Queue) -> Steps:
        """See ``Algorithm.all_reduce``."""
        work = [
            (main, jobs[at].part(start, stop))
            for at, main, start, stop in plan_slices(extents(jobs), self._mains)
        ]
        if self.in_place:
            return self._direct(work, queue)
        return _reduce_in_steps([self._steps(*each, queue) for each in work])

    def _direct(self, work: Sequence[tuple[int, Job]], queue: Queue) -> Steps:
        """Launches one kernel for each main device and divisor: reads n buffers, writes n."""
        by_main: dict[int, list[tuple[float, Sequence[Buffer], Sequence[Buffer]]]] = {}
        for main, job in work:
            terms = [job.inputs[replica] for replica in self._order]
            by_main.setdefault(main, []).append((job.divisor, job.outs, terms))
        for main, sums in by_main.items():
            write_sums(sums, self.devices[main], self._split, queue, exact=self.exact)
        yield

    def _steps(self, main: int, job: Job, queue: Queue) -> Steps:
        """Reduces one slice by several launches; copies memory that is not accessible.

        The main replica is the k-th of its group, and its device adds that group. Any other group
        is added on the device of its own k-th replica (k modulo its size).
        """
        devices, groups, home = self.devices, self._groups, self.devices[main]
        at = next(group.index(main) for group in groups if main in group)
        adders = [home if main in group else devices[group[at % len(group)]] for group in groups]
        accessible = [
            [ensure_accessible(device, job.inputs[index], queue) for index in group]
            for device, group in zip(adders, groups, strict=True)
        ]
        yield
        # A single replica needs no sum: it is copied in its own dtype.
        partials = [
            ensure_accessible(
                home, terms[0] if len(terms) == 1 else group_sum(device, terms), queue
            )
            for device, terms in zip(adders, accessible, strict=True)
        ]
        accessible.clear()
        yield
        terms = [*as_one_dtype(home, partials)]
        partials.clear()
        yield from self._write(main, job, terms, queue)

    def _write(self, main: int, job: Job, terms: list[Buffer], queue: Queue) -> Steps:
        """Adds terms on a device into the outs of its GPU; copies the sum to other GPUs.

        The list of terms becomes empty, so that their memory is freed early.
        """
        devices, home = self.devices, self.devices[main]
        on_gpus = by_physical(devices)
        here = on_gpus.pop(home.physical)
        outs = [job.outs[index] for index in here]
        write_sums([(job.divisor, outs, terms)], home, exact=self.exact)
        terms.clear()
        for first, *_ in on_gpus.values():
            devices[first].copy(job.outs[first], job.outs[main], queue=queue)
        yield
        for first, *others in on_gpus.values():  # logical devices that share a GPU
            for index in others:
                devices[index].copy(job.outs[index], job.outs[first])


class ExactCopy(HierarchicalCopy):
    """Adds all terms of a slice in one exact sum, whose bits no order changes.

    Args:
        devices: see ``Algorithm``.
        num_words: the number of terms of each replica: one, or the words of a sum.
    """

    exact = True

    def __init__(self, devices: Sequence[Device], num_words: int = 1) -> None:
        super().__init__(devices)
        self.senders = tuple([device for device in devices for _ in range(num_words)])
        self._groups, self._order = [range(len(self.senders))], list(range(len(self.senders)))
        self._split = 0

    def _direct(self, work: Sequence[tuple[int, Job]], queue: Queue) -> Steps:
        """See ``HierarchicalCopy``. The flags of float64 are allocated now."""
        rows: dict[tuple[int, float], tuple[list[Sequence[Buffer]], list[Sequence[Buffer]]]] = {}
        for main, job in work:
            outs, inputs = rows.setdefault((main, job.divisor), ([], []))
            outs.append(job.outs)
            inputs.append(job.inputs)
        return _launch_all(
            [exact_sum_command(*each, divisor=divisor, device=self.devices[main], queue=queue)
             for (main, divisor), each in rows.items()]
        )  # fmt: skip

    def _steps(self, main: int, job: Job, queue: Queue) -> Steps:
        """Copies terms that are not accessible, and adds all of them."""
        home = self.devices[main]
        terms = [ensure_accessible(home, term, queue) for term in job.inputs]
        yield
        yield  # as many steps as for groups
        yield from self._write(main, job, terms, queue)


def _launch_all(launches: Sequence[Callable[[], None]]) -> Steps:
    """Calls the launches in one step."""
    for launch in launches:
        launch()
    yield


def _reduce_in_steps(slices: Sequence[Steps]) -> Steps:
    """Reduces slices that need several launches: one step of all slices at a time.

    One slice after the other would be slower: each would wait for the last copies of the previous
    one.
    """
    for _ in range(3):
        for steps in slices:
            next(steps)
        yield
    for steps in slices:
        next(steps, None)
