"""All-reduce by NCCL over several processes: one rank for each GPU, or for each process.

The replicas that share a rank are first added into one buffer of the tensor's dtype, in mesh order:
those of the rank's own GPU, then one sum for each further GPU of the process, which copies it
there. (A communicator of ours has a rank for each GPU. A PyTorch group has one for each process.)
NCCL adds the buffers of all ranks, in any order. Then one pass divides the sum and copies it to the
replicas.

NCCL cannot add 16-bit integers. The processes exchange these and add them, as ``AcrossProcesses``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradreduce import ops
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, Queue, by_physical, ensure_accessible

from .across_processes import AcrossProcesses, process_groups
from .algorithm import Algorithm, Job, ReductionGroups, Steps
from .nccl_all_reduce import cannot_add, fold, write


class _Rank(NamedTuple):
    """One rank of this process.

    Attributes:
        device: a device on the GPU of the rank.
        here: the indices of the replicas on that GPU.
        apart: for each other GPU that shares the rank the indices of its replicas.
    """

    device: Device
    here: Sequence[int]
    apart: Sequence[Sequence[int]]


class NcclAcrossProcesses(Algorithm):
    """All-reduce by the collectives of the mesh's processes; a stage is one group call."""

    always_overlaps = True

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        super().__init__(devices)
        replicas = Replicas(devices)
        collective = replicas.group.collective
        assert collective is not None and collective.ranks is not None, "see `algorithm_of`"
        self._collective, self._numbers = collective, collective.ranks
        self._exchange = AcrossProcesses(devices, process_groups(replicas.counts))
        self._ranks: dict[int, _Rank] = {}
        on_gpus = by_physical(self.devices)
        for number, home in self._numbers.homes(devices[0].mesh.devices).items():
            here = on_gpus[home.physical]
            apart = [
                indices
                for gpu, indices in on_gpus.items()
                if gpu != home.physical and self._numbers.of(self.devices[indices[0]]) == number
            ]
            self._ranks[number] = _Rank(self.devices[here[0]], here, apart)

    def allocate(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, Sequence[Buffer]]]:
        """See ``Algorithm.allocate``; adds the memory of the sum of each rank."""
        return [(job, [_total(job, rank) for rank in self._ranks.values()]) for job in jobs]

    def all_reduce(self, jobs: Sequence[tuple[Job, Sequence[Buffer]]], queue: Queue) -> Steps:
        """See ``Algorithm.all_reduce``."""
        added = [pair for pair in jobs if not cannot_add(pair[0].inputs[0].dtype)]
        rest = [job for job, _ in jobs if cannot_add(job.inputs[0].dtype)]
        sources = self._fold([job for job, _ in added], [totals for _, totals in added])
        with self._collective.group():
            for (_, totals), of_job in zip(added, sources, strict=True):
                self._collective.all_reduce(totals, sources=of_job, queue=queue)
        yield
        for place, rank in enumerate(self._ranks.values()):
            sums = [
                (job.divisor, [job.outs[index] for index in rank.here], [totals[place]])
                for job, totals in added
            ]
            write(sums, rank.device)
            self._copy_apart([job.outs for job, _ in added], rank)
        for _ in self._exchange.all_reduce(rest, queue) if rest else ():
            pass  # at once: its memory is that of one stage

    def reduce_scatter(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.reduce_scatter``; one reduce for each job, all in one group call."""
        rest = [job for job in jobs if cannot_add(job.inputs[0].dtype)]
        if rest:
            self._exchange.reduce_scatter(rest)
        added = [job for job in jobs if not cannot_add(job.inputs[0].dtype)]
        sources = self._fold(added)
        totals = [self._total_of_owner(job) for job in added]
        with self._collective.group():
            for job, of_job, total in zip(added, sources, totals, strict=True):
                self._collective.reduce(total, of_job, self._rank_of(job))
        for job, total in zip(added, totals, strict=True):
            if total is not None:
                self._finish(job, total)

    def all_gather(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.all_gather``; one broadcast for each job, all in one group call."""
        for job in jobs:
            for source in job.inputs:
                rank = self._ranks[self._rank_of(job)]
                _copy([(job.outs[rank.here[0]], source)], rank.device)
        with self._collective.group():
            for job in jobs:
                received = [job.outs[rank.here[0]] for rank in self._ranks.values()]
                self._collective.broadcast(received, self._rank_of(job))
        for rank in self._ranks.values():
            first, *others = rank.here
            pairs = [(job.outs[index], job.outs[first]) for job in jobs for index in others]
            _copy(pairs, rank.device)
            self._copy_apart([job.outs for job in jobs], rank)

    def _rank_of(self, job: Job) -> int:
        """Returns the rank of a job's owner."""
        assert job.owner is not None, "only jobs with an owner are reduced or sent for one"
        return self._numbers.of_replicas[job.owner]

    def _fold(
        self, jobs: Sequence[Job], totals: Sequence[Sequence[Buffer]] | None = None
    ) -> list[list[Buffer]]:
        """Adds the replicas of each rank that has several.

        Args:
            jobs: the jobs.
            totals: ``[job][rank]``, the memory for the sums. Default: new memory.

        Returns:
            ``[job][rank]``: the sum, or the only replica.
        """
        folded: list[list[Buffer]] = [[] for _ in jobs]
        for place, rank in enumerate(self._ranks.values()):
            terms = [[job.inputs[index] for index in rank.here] for job in jobs]
            for indices in rank.apart:
                device = self.devices[indices[0]]
                for row, each in zip(terms, _sums_on(device, jobs, indices), strict=True):
                    row.append(ensure_accessible(rank.device, each))
            sums = [row[0] for row in terms]
            if len(rank.here) + len(rank.apart) > 1:
                if totals is None:
                    sums = [_like(each, rank.device) for each in sums]
                else:
                    sums = [of_job[place] for of_job in totals]
                ops.all_sum([[each] for each in sums], terms, device=rank.device)
            for of_job, each in zip(folded, sums, strict=True):
                of_job.append(each)
        return folded

    def _copy_apart(self, rows: Iterable[Sequence[Buffer]], rank: _Rank) -> None:
        """Copies results from the GPU of a rank to the other GPUs that share it."""
        rows = list(rows)
        for first, *others in rank.apart:
            device = self.devices[first]
            for outs in rows:
                device.copy(outs[first], outs[rank.here[0]])
            _copy([(outs[index], outs[first]) for outs in rows for index in others], device)

    def _total_of_owner(self, job: Job) -> Buffer | None:
        """Returns the memory for a job's sum on the GPU of its rank; None in other processes."""
        rank = self._ranks.get(self._rank_of(job))
        if rank is None:
            return None
        (out,), dtype = job.outs, job.inputs[0].dtype
        fits = out.device is rank.device and out.dtype == dtype
        return out if fits else rank.device.empty(out.shape, dtype)

    def _finish(self, job: Job, total: Buffer) -> None:
        """Divides a sum, and copies it to its owner, which may be on another GPU."""
        (out,) = job.outs
        is_here = out.device.physical == total.device.physical
        target = out if is_here else total.device.empty(out.shape, out.dtype)
        write([(job.divisor, [target], [total])], total.device)
        if not is_here:
            out.device.copy(out, target)


def _like(buffer: Buffer, device: Device) -> Buffer:
    return device.empty(buffer.shape, buffer.dtype)


def _total(job: Job, rank: _Rank) -> Buffer:
    """Returns memory for the sum of a rank: that of its result, if it has the dtype."""
    first, out = job.inputs[rank.here[0]], job.outs[rank.here[0]]
    return out if out.dtype == first.dtype else _like(first, rank.device)


def _sums_on(device: Device, jobs: Sequence[Job], indices: Sequence[int]) -> Sequence[Buffer]:
    """Returns the sum of these replicas of each job, all on the GPU of ``device``."""
    firsts = [job.inputs[indices[0]] for job in jobs]
    if len(indices) == 1:
        return firsts
    sums = [_like(each, device) for each in firsts]
    fold(jobs, sums, indices)
    return sums


def _copy(pairs: Sequence[tuple[Buffer, Buffer]], device: Device) -> None:
    """Copies (to, from) to memory of a GPU, from the same GPU by one launch."""
    local = []
    for out, source in pairs:
        if source.device.physical != device.physical:
            device.copy(out, source)
        elif source.address != out.address:
            local.append((out, source))
    ops.pack_to_rows(local, device)
