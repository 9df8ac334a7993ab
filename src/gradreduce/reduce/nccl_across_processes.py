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
        """See ``Algorithm.reduce_scatter``; all jobs are in one group call.

        NCCL's reduce-scatter if the shares of all ranks are equal, else a reduce for each job.
        """
        rest = [job for job in jobs if cannot_add(job.inputs[0].dtype)]
        if rest:
            self._exchange.reduce_scatter(rest)
        added = [job for job in jobs if not cannot_add(job.inputs[0].dtype)]
        sources, totals = self._fold(added), [self._total_of_owner(job) for job in added]
        rounds = self._rounds([(self._rank_of(job), job.inputs[0]) for job in added])
        joined = [self._joined_inputs(sources, totals, each) for each in rounds or ()]
        with self._collective.group():
            for outs, wholes in joined:
                self._collective.reduce_scatter(outs, wholes)
            for job, of_job, total in zip(added, sources, totals, strict=True):
                if rounds is None:
                    self._collective.reduce(total, of_job, self._rank_of(job))
        for job, total in zip(added, totals, strict=True):
            if total is not None:
                self._finish(job, total)

    def _joined_inputs(
        self,
        sources: Sequence[Sequence[Buffer]],
        totals: Sequence[Buffer | None],
        jobs: Sequence[int],
    ) -> tuple[list[Buffer], list[Buffer]]:
        """Returns outputs and inputs of a reduce-scatter of these jobs, one of each rank."""
        outs = [total for job in jobs if (total := totals[job]) is not None]
        wholes = []
        for place, rank in enumerate(self._ranks.values()):
            parts = [sources[job][place] for job in jobs]
            whole = _as_one(parts)
            if whole is None:
                whole, pieces = _new_whole(parts, rank.device)
                ops.pack_to_rows(list(zip(pieces, parts, strict=True)), rank.device)
            wholes.append(whole)
        return outs, wholes

    def all_gather(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.all_gather``; all jobs are in one group call.

        NCCL's all-gather if the shares of all ranks are equal, else a broadcast for each job.
        """
        for job in jobs:
            for source in job.inputs:
                rank = self._ranks[self._rank_of(job)]
                _copy([(job.outs[rank.here[0]], source)], rank.device)
        received = [[job.outs[rank.here[0]] for rank in self._ranks.values()] for job in jobs]
        rounds = self._rounds([(self._rank_of(job), job.outs[0]) for job in jobs])
        joined = [self._joined_outs(received, each) for each in rounds or ()]
        with self._collective.group():
            for wholes, own, _ in joined:
                self._collective.all_gather(wholes, own)
            for job, of_ranks in zip(jobs, received, strict=True):
                if rounds is None:
                    self._collective.broadcast(of_ranks, self._rank_of(job))
        for place, rank in enumerate(self._ranks.values()):
            for _, _, copies in joined:
                _copy(copies[place], rank.device)
            first, *others = rank.here
            pairs = [(job.outs[index], job.outs[first]) for job in jobs for index in others]
            _copy(pairs, rank.device)
            self._copy_apart([job.outs for job in jobs], rank)

    def _joined_outs(
        self, received: Sequence[Sequence[Buffer]], jobs: Sequence[int]
    ) -> tuple[list[Buffer], list[Buffer], list[list[tuple[Buffer, Buffer]]]]:
        """Returns outputs and inputs of an all-gather of these jobs, one of each rank.

        The third result is for each rank the copies (to, from) to make afterwards.
        """
        wholes, own, copies = [], [], []
        for place, (number, rank) in enumerate(self._ranks.items()):
            parts = [received[job][place] for job in jobs]
            whole, pieces = _as_one(parts), parts
            if whole is None:
                whole, pieces = _new_whole(parts, rank.device)
            wholes.append(whole)
            own.append(parts[number])
            copies.append(list(zip(parts, pieces, strict=True)))
        return wholes, own, copies

    def _rounds(self, shares: Sequence[tuple[int, Buffer]]) -> list[tuple[int, ...]] | None:
        """Divides jobs into rounds that have one job of each rank, all of one size and dtype.

        All processes decide the same.

        Args:
            shares: for each job the rank of its owner, and a buffer of its size and dtype.

        Returns:
            The indices of the jobs of each round; None if the shares of the ranks differ.
        """
        of_ranks: list[list[int]] = [[] for _ in range(self._numbers.size)]
        for index, (rank, _) in enumerate(shares):
            of_ranks[rank].append(index)
        kinds = [[(shares[i][1].size, shares[i][1].dtype) for i in each] for each in of_ranks]
        if any([each != kinds[0] for each in kinds]):
            return None
        return list(zip(*of_ranks, strict=True))

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


def _as_one(parts: Sequence[Buffer]) -> Buffer | None:
    """Returns equal parts as one Buffer, if they follow each other in memory; else None."""
    first = parts[0]
    for index, part in enumerate(parts):
        if part.block is not first.block or part.offset != first.offset + index * first.nbytes:
            return None
    return Buffer(first.block, first.offset, (len(parts) * first.size,), first.dtype)


def _new_whole(parts: Sequence[Buffer], device: Device) -> tuple[Buffer, list[Buffer]]:
    """Returns new memory for equal parts together, and the place of each part in it."""
    first, count = parts[0], len(parts)
    whole = device.empty((count * first.size,), first.dtype)
    starts = range(0, whole.size, first.size)
    return whole, whole.parts([*starts], [first.size] * count)


def _copy(pairs: Sequence[tuple[Buffer, Buffer]], device: Device) -> None:
    """Copies (to, from) to memory of a GPU, from the same GPU by one launch."""
    local = []
    for out, source in pairs:
        if source.device.physical != device.physical:
            device.copy(out, source)
        elif source.address != out.address:
            local.append((out, source))
    ops.pack_to_rows(local, device)
