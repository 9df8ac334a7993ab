"""All-reduce over the replicas of several processes, with the same bits as in one process.

The order of additions is that of ``hierarchical_copy`` over all replicas, in the order of the
processes. Each process adds its replicas that are at the start of a group, and sends the sum and
its other replicas unchanged. Packs are cut into one slice for each process. The process adds its
slice and sends the result to the others. If the replicas of each process are one group, each
process sends and receives as many bytes as in a ring. Small packs are sent whole to all processes,
and each adds them.

Exact sums have no order. Each process sends its replicas unchanged, or, if these are fewer bytes,
words whose exact sum is that of its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple
from weakref import ref

from gradreduce import ops
from gradreduce.comm.exchange import exchange
from gradreduce.comm.replicas import Replicas
from gradreduce.device import (
    Block,
    Buffer,
    Device,
    DType,
    Parcel,
    Queue,
    accumulate_dtype,
    ensure_accessible,
)
from gradreduce.sums.exact_terms import new_flags, report_flags

from .algorithm import (
    Algorithm,
    Job,
    ReductionGroups,
    Steps,
    as_one_dtype,
    copy_to_all,
    group_sum,
    part_of,
    reduction_groups_of,
    write_sums,
)
from .hierarchical_copy import SLICE_BYTES, Slice, extents, plan_slices


class Term(NamedTuple):
    """A process's term of a group: a replica, or the sum of several.

    Attributes:
        rank: the rank of the process.
        replicas: the indices of its replicas, in the order in which they are added.
        word: the number of a word, if several words hold the sum.
    """

    rank: int
    replicas: tuple[int, ...]
    word: int | None = None


def plan_terms(counts: Sequence[int], groups: ReductionGroups) -> list[list[Term]]:
    """Plans the terms of each group, in the order of its additions.

    Only the replicas at the start of a group may be added before they are sent; any other sum would
    change the order of additions.

    Args:
        counts: the number of replicas of each process.
        groups: replica numbers over all processes.
    """
    ends = list(accumulate(counts))
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    planned = []
    for group in groups:
        terms: list[Term] = []
        for number in group:
            rank = owners[number]
            index = number - (ends[rank] - counts[rank])
            if len(terms) == 1 and terms[0].rank == rank:
                terms[0] = Term(rank, (*terms[0].replicas, index))
            else:
                terms.append(Term(rank, (index,)))
        if terms:
            planned.append(terms)
    return planned


@cache
def plan_exact_terms(counts: tuple[int, ...], words: int, wire: DType) -> list[list[Term]]:
    """Plans the terms of exact sums, each as a group of its own.

    They are the terms of a process, or words of their sum, if these are fewer bytes. Sums of
    integers are exact, so one word holds them.

    Args:
        counts: the number of terms of each process.
        words: how many words hold a sum of floats.
        wire: the dtype of the terms; the words have its accumulate dtype.
    """
    num_words = 1 if wire.kind in "iu" else words
    most = num_words * accumulate_dtype(wire).itemsize // wire.itemsize
    return [
        [term]
        for rank, count in enumerate(counts)
        for term in (
            [Term(rank, (index,)) for index in range(count)]
            if count <= most
            else [Term(rank, tuple(range(count)), word) for word in range(num_words)]
        )
    ]


def process_groups(counts: Sequence[int]) -> ReductionGroups:
    """Returns the replicas of each process as one group; ``counts``: their numbers."""
    return tuple(
        [
            tuple(range(end - count, end))
            for end, count in zip(accumulate(counts), counts, strict=True)
        ]
    )


class AcrossProcesses(Algorithm):
    """Reduces every job over all processes; every process makes the same calls."""

    has_groups = True
    in_place = False
    writes_targets = True

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        super().__init__(devices)
        self._replicas = Replicas(devices)
        self._group = group = self._replicas.group
        self._terms = plan_terms(
            group.counts, reduction_groups_of(sum(group.counts), reduction_groups)
        )
        self._device = self.devices[0]
        self._temporaries: list[ref[Block]] = []
        self._num_used = 0  # how many of these the present reduction uses

    def reduce_scatter(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.reduce_scatter``; each process receives the terms that it adds."""
        device = self._device
        self._num_used = 0
        slices = [
            Slice(index, self._rank_of(job), 0, job.inputs[0].size)
            for index, job in enumerate(jobs)
        ]
        terms = self._exchange_terms(jobs, slices, "compute")
        for (index, *_), groups in terms:
            (out,) = jobs[index].outs
            is_here = out.device.physical == device.physical
            total = out if is_here else device.empty(out.shape, out.dtype)
            self._add(total, groups, jobs[index].divisor)
            if not is_here:
                out.device.copy(out, total)

    def all_gather(self, jobs: Sequence[Job]) -> None:
        """See ``Algorithm.all_gather``."""
        owned = [
            ensure_accessible(self._device, job.inputs[0]) if job.inputs else job.outs[0]
            for job in jobs
        ]
        self._replicas.send_to_all(list(zip(map(self._rank_of, jobs), owned, strict=True)))
        copy_to_all([((*job.inputs, job.outs[0])[0], job.outs) for job in jobs], self.devices)

    def _rank_of(self, job: Job) -> int:
        """Returns the process of a job's owner."""
        assert job.owner is not None, "only jobs with an owner are reduced or sent for one"
        return self._group.rank_of(job.owner)

    def all_reduce(self, jobs: Sequence[Job], queue: Queue) -> Steps:
        """See ``Algorithm.all_reduce``."""
        self._num_used = 0
        packs = extents(jobs)
        slices = plan_slices(packs, range(self._group.size))
        # One exchange of few bytes instead of two exchanges.
        all_add = sum([size * itemsize for size, itemsize in packs]) < SLICE_BYTES
        terms = self._exchange_terms(jobs, slices, queue, all_add=all_add)
        yield
        for (index, _, start, stop), groups in terms:
            self._add(part_of(jobs[index].outs[0], start, stop), groups, jobs[index].divisor)
        if not all_add:
            sums = [(adder, part_of(jobs[job].outs[0], *cut)) for job, adder, *cut in slices]
            self._replicas.send_to_all(sums, queue)
            yield
        for job in jobs:
            for device, out in zip(self.devices[1:], job.outs[1:], strict=True):
                device.copy(out, job.outs[0])

    def _exchange_terms(
        self,
        jobs: Sequence[Job],
        slices: Sequence[Slice],
        queue: Queue,
        *,
        all_add: bool = False,
    ) -> list[tuple[Slice, list[list[Buffer]]]]:
        """Exchanges terms; returns the terms of each slice that this process adds, by group.

        Args:
            jobs: the jobs.
            slices: the parts of the jobs; ``main`` is the process that adds.
            queue: the queue of the exchange.
            all_add: whether all processes add each slice.
        """
        rank = self._group.rank
        own = self._own_terms(jobs)
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        groups_of_slices = []
        for piece in slices:
            mine = {
                term: part_of(buffer, piece.start, piece.stop)
                for term, buffer in own[piece.job].items()
            }
            adders = range(self._group.size) if all_add else (piece.main,)
            sends += [
                (other, buffer) for other in adders if other != rank for buffer in mine.values()
            ]
            if rank in adders:
                wire = jobs[piece.job].inputs[0].dtype
                groups = self._with_memory(wire, mine)
                groups_of_slices.append((piece, groups))
                for terms, buffers in zip(self._plan(wire), groups, strict=True):
                    pairs = zip(terms, buffers, strict=True)
                    receives += [(term.rank, buffer) for term, buffer in pairs if term.rank != rank]
        exchange(self._device, sends, receives, queue)
        return groups_of_slices

    def _plan(self, wire: DType) -> list[list[Term]]:
        """Returns the terms of each group; ``wire``: the dtype of the replicas."""
        return self._terms

    def _own_terms(self, jobs: Sequence[Job]) -> list[dict[Term, Buffer]]:
        """Returns the terms of this process for each job: unchanged replicas, and sums."""
        return [
            {
                term: self._sum(
                    [ensure_accessible(self._device, job.inputs[index]) for index in term.replicas]
                )
                for terms in self._plan(job.inputs[0].dtype)
                for term in terms
                if term.rank == self._group.rank
            }
            for job in jobs
        ]

    def _with_memory(self, wire: DType, mine: dict[Term, Buffer]) -> list[list[Buffer]]:
        """Returns the terms of a slice by group, with memory for terms of other processes."""
        shape = next(iter(mine.values())).shape
        dtypes = {False: wire, True: accumulate_dtype(wire)}
        return [
            [
                mine[term]
                if term.rank == self._group.rank
                else self._temporary(shape, dtypes[len(term.replicas) > 1])
                for term in terms
            ]
            for terms in self._plan(wire)
        ]

    def _temporary(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """Returns memory for this reduction; a prepared step reuses that of another reduction.

        The reductions use it one after the other on the device's compute queue.
        """
        index, nbytes = self._num_used, math.prod(shape) * dtype.itemsize
        self._num_used += 1
        block = self._temporaries[index]() if index < len(self._temporaries) else None
        if block is None or block.nbytes < nbytes:
            block = self._device.allocate(shape, dtype).block
            self._temporaries[index : index + 1] = [ref(block)]
        return Buffer(block, 0, shape, dtype)

    def _sum(self, terms: Sequence[Buffer]) -> Buffer:
        """Adds terms left to right in the accumulate dtype; returns a single term unchanged."""
        if len(terms) == 1:
            return terms[0]
        same = as_one_dtype(self._device, terms, self._temporary)
        return group_sum(self._device, same, self._temporary)

    def _add(self, out: Buffer, groups: Sequence[Sequence[Buffer]], divisor: float) -> None:
        """Adds each group left to right, then their sums, divides, and rounds once."""
        sums = [self._sum(terms) for terms in groups]
        same = as_one_dtype(self._device, sums, self._temporary)
        write_sums([(divisor, [out], same)], self._device, exact=self.exact)


class ExactAcrossProcesses(AcrossProcesses):
    """Adds the replicas of all processes in one exact sum, whose bits no order changes.

    Args:
        devices: the devices of the replicas of this process.
        words: how many words a process with more terms sends.
        num_words: the number of terms of each replica: one, or the words of a sum.
    """

    exact = True

    def __init__(self, devices: Sequence[Device], words: int, num_words: int = 1) -> None:
        super().__init__(devices)
        self.senders = tuple([device for device in devices for _ in range(num_words)])
        self._words = words
        self._counts = tuple([count * num_words for count in self._group.counts])

    def _plan(self, wire: DType) -> list[list[Term]]:
        return plan_exact_terms(self._counts, self._words, wire)

    def _own_terms(self, jobs: Sequence[Job]) -> list[dict[Term, Buffer]]:
        """Returns the terms of this process for each job: unchanged, or words of their sum."""
        of_jobs, added = list[dict[Term, Buffer]](), list[tuple[list[Buffer], list[Buffer]]]()
        for job in jobs:
            first = job.inputs[0]
            own = [term for (term,) in self._plan(first.dtype) if term.rank == self._group.rank]
            if own[0].word is None or len(own) == 1:
                of_jobs += super()._own_terms([job])
                continue
            words = [self._temporary(first.shape, accumulate_dtype(first.dtype)) for _ in own]
            added.append((words, [ensure_accessible(self._device, each) for each in job.inputs]))
            of_jobs.append(dict(zip(own, words, strict=True)))
        if added:
            self._add_words(*zip(*added, strict=True))
        return of_jobs

    def _add_words(self, words: Sequence[list[Buffer]], terms: Sequence[list[Buffer]]) -> None:
        """Adds the terms of each pack to its words. If a sum does not fit, a later call warns."""
        flags = new_flags([self._device] * len(words))
        ops.add_words(words, flags, terms, fresh=True, device=self._device)
        report_flags(flags)
