"""All-reduce by NCCL: one rank for each physical device.

Replicas that share a physical device are first added into one buffer, in mesh order. Its dtype is
that of the tensor, so that a link carries no more bytes than the tensor has. The library adds these
buffers. Then one pass divides the sum and copies it to the replicas. With one physical device the
library is not called. NCCL does not define the order of its additions.

NCCL does not support 16-bit integers. For these it gathers the sums of all devices, and the last
pass adds them in the order of the ranks, modulo 2**16. With n devices each then needs n buffers,
and each link carries n - 1 buffers instead of 2 * (n - 1) / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Collective,
    Device,
    DType,
    Queue,
    by_physical,
)

from .algorithm import Algorithm, Job, ReductionGroups, Steps, copy_on_gpus, write_sums


@dataclass(frozen=True)
class _NcclMemory:
    """Memory of one job on one physical device.

    Attributes:
        folded: memory for the sum of the replicas on the physical device; the library writes the
            sum of all physical devices into it.
        source: the input of the library: the only replica, or ``folded``.
        gathered: memory for the sums of all physical devices, a row for each rank; None if the
            library adds.
    """

    folded: Buffer
    source: Buffer
    gathered: Buffer | None

    @property
    def terms(self) -> Sequence[Buffer]:
        """The buffers that are added after the collective, in the order of the ranks."""
        if self.gathered is None:
            return (self.folded,)
        num_ranks, size = self.gathered.shape
        return tuple(self.gathered.view(rank * size, (size,)) for rank in range(num_ranks))


class Nccl(Algorithm):
    """All-reduce by the mesh's collective library; the packs of a stage share a group call.

    All memory is allocated, and the library loaded, before the first launch: if that fails, nothing
    was changed.
    """

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        super().__init__(devices)
        self._sharing = list(by_physical(self.devices).values())
        # None for one physical device; raises if the library is missing.
        self._collective = self.devices[0].mesh.collective if len(self._sharing) > 1 else None

    def connect(self) -> None:
        """See ``Algorithm.connect``; the first time it may take seconds."""
        if self._collective is not None:
            self._collective.connect([self.devices[first] for first, *_ in self._sharing])

    def allocate(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, Sequence[_NcclMemory]]]:
        """See ``Algorithm.allocate``; with one physical device a job needs no memory."""
        sharing = () if self._collective is None else self._sharing
        return [(job, [_part(job, replicas, len(sharing)) for replicas in sharing]) for job in jobs]

    def all_reduce(self, jobs: Sequence[tuple[Job, Sequence[_NcclMemory]]], queue: Queue) -> Steps:
        """See ``Algorithm.all_reduce``; on one physical device reads n buffers, writes n."""
        if self._collective is not None:
            for rank, indices in enumerate(self._sharing):
                folded = [parts[rank].folded for _, parts in jobs]
                fold([job for job, _ in jobs], folded, indices)
            with self._collective.group():  # each group costs a launch on every GPU and messages
                for _, parts in jobs:
                    sources = [part.source for part in parts]
                    gathered = [part.gathered for part in parts if part.gathered is not None]
                    if gathered:
                        self._collective.all_gather(gathered, sources, queue=queue)
                    else:
                        outs = [part.folded for part in parts]
                        self._collective.all_reduce(outs, sources=sources, queue=queue)
        yield
        for rank, indices in enumerate(self._sharing):
            sums = [
                (
                    job.divisor,
                    [job.outs[index] for index in indices],
                    parts[rank].terms if parts else job.inputs,
                )
                for job, parts in jobs
            ]
            write(sums, self.devices[indices[0]])

    def reduce_scatter(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.reduce_scatter``; one reduce for each job, all in one group call.

        Does not use NCCL's reduce-scatter, whose parts have equal sizes on all GPUs. 16-bit
        integers are copied to their owner and added there.
        """
        collective = self._collective
        apart = [job for job in jobs if collective is None or cannot_add(job.inputs[0].dtype)]
        super().reduce_scatter(apart)
        if collective is not None and len(apart) < len(jobs):
            rest = [job for job in jobs if not cannot_add(job.inputs[0].dtype)]
            self._reduce_to_owners(rest, collective)

    def _reduce_to_owners(self, jobs: Sequence[Job], collective: Collective) -> None:
        devices = [self.devices[first] for first, *_ in self._sharing]
        sources = [
            [
                job.inputs[indices[0]]
                if len(indices) == 1
                else device.empty(job.inputs[0].shape, job.inputs[0].dtype)
                for job in jobs
            ]
            for device, indices in zip(devices, self._sharing, strict=True)
        ]
        roots = [self._rank_of(job) for job in jobs]
        totals = []
        for root, job in zip(roots, jobs, strict=True):
            device, (out,), dtype = devices[root], job.outs, job.inputs[0].dtype
            fits = out.device is device and out.dtype == dtype
            totals.append(out if fits else device.empty(out.shape, dtype))
        for indices, folded in zip(self._sharing, sources, strict=True):
            fold(jobs, folded, indices)
        with collective.group():
            for index, (root, total) in enumerate(zip(roots, totals, strict=True)):
                collective.reduce(total, [of_gpu[index] for of_gpu in sources], root)
        for rank, indices in enumerate(self._sharing):
            finished = [
                (job.divisor, job.outs, [total])
                for root, job, total in zip(roots, jobs, totals, strict=True)
                if root == rank
            ]
            write(finished, self.devices[indices[0]])

    def all_gather(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.all_gather``; one broadcast for each job, all in one group call."""
        copy_on_gpus([(job.inputs[0], job.outs) for job in jobs], self.devices)
        if self._collective is None:
            return
        with self._collective.group():
            for job in jobs:
                first_outs = [job.outs[first] for first, *_ in self._sharing]
                self._collective.broadcast(first_outs, self._rank_of(job))
        received = [
            (job.outs[first], job.outs)
            for job in jobs
            for rank, (first, *_) in enumerate(self._sharing)
            if rank != self._rank_of(job)
        ]
        copy_on_gpus(received, self.devices)

    def _rank_of(self, job: Job) -> int:
        """Returns the rank of the GPU of a job's owner."""
        return next(rank for rank, indices in enumerate(self._sharing) if job.owner in indices)


def cannot_add(dtype: DType) -> bool:
    """Whether this dtype is gathered: NCCL cannot add 16-bit integers."""
    return dtype.kind in "iu" and dtype.itemsize == 2


def _part(job: Job, indices: Sequence[int], num_ranks: int) -> _NcclMemory:
    """Allocates the memory of one job on the device of ``indices[0]``; launches nothing."""
    first, out = job.inputs[indices[0]], job.outs[indices[0]]
    gathers = cannot_add(first.dtype)
    gathered = first.device.empty((num_ranks, first.size), first.dtype) if gathers else None
    alone = len(indices) == 1
    if gathers and alone:
        return _NcclMemory(first, first, gathered)  # first is not overwritten
    reused = out.dtype == first.dtype
    if not out.block.owned:  # on a simulated device another replica may still read it
        reused = reused and out.address not in [
            each.address for at, each in enumerate(job.inputs) if at not in indices
        ]
    folded = out if reused else first.device.empty(first.shape, first.dtype)
    return _NcclMemory(folded, first if alone else folded, gathered)


def fold(jobs: Sequence[Job], folded: Sequence[Buffer], indices: Sequence[int]) -> None:
    """Adds the replicas on one physical device into ``folded``, if there are several."""
    if len(indices) == 1 or not jobs:
        return
    ops.all_sum(
        [[each] for each in folded],
        [[job.inputs[index] for index in indices] for job in jobs],
        device=jobs[0].inputs[indices[0]].device,
    )


def write(sums: Sequence[tuple[float, Sequence[Buffer], Sequence[Buffer]]], device: Device) -> None:
    """Calls ``write_sums``, except for an out that the library has written itself."""
    left = [
        (divisor, outs, inputs)
        for divisor, outs, inputs in sums
        if divisor != 1 or len(outs) > 1 or len(inputs) > 1 or outs[0].address != inputs[0].address
    ]
    write_sums(left, device)
