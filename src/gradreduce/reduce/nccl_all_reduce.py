"""All-reduce by NCCL: one rank for each physical device.

Replicas that share a physical device are folded into one buffer first, in mesh order, rounded to
the tensor's dtype so that the link carries no more bytes than the tensor has; the library adds
those; then the sum is divided and fanned out in one pass. With one physical device the library
is not called. It promises no order of additions.

NCCL knows no 16-bit integers. It carries what each device has folded to all others, and the pass
that fans out adds, in the order of the ranks, modulo 2**16. For n devices that is n buffers of
memory on each while it lasts, and n - 1 over each link instead of 2 * (n - 1) / n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Collective,
    Device,
    DType,
    Queue,
    by_physical,
    fork_streams,
    join_streams,
)

from .algorithm import Algorithm, Job, Steps
from .reduction_groups import ReductionGroups

# Packs of less than this, in the bytes of one rank's buffer, share a group call: a call costs a
# launch on every GPU and a round of messages, whatever it carries, and with packs as short as this
# that is most of what they cost. A larger one fills the links by itself and gains nothing by
# company. From the design, to be measured on links.
SHARED_GROUP_BYTES = 1024 * 1024


def plan_groups(nbytes: Sequence[int]) -> list[list[int]]:
    """Plans which packs share a group call.

    Args:
        nbytes: of each pack, one rank's buffer.

    Returns:
        The places of the packs of each group: each large one alone, in order; all small ones
        together, where the first of them stands.
    """
    groups: list[list[int]] = []
    small: list[int] = []
    for job, size in enumerate(nbytes):
        if size >= SHARED_GROUP_BYTES:
            groups.append([job])
            continue
        if not small:
            groups.append(small)
        small.append(job)
    return groups


@dataclass(frozen=True)
class _Part:
    """Memory of one job on one physical device.

    Attributes:
        folded: the sum of the replicas there, on the device of the first; the library adds those
            of all physical devices into it.
        source: what it adds: the lone replica there, or the sum itself.
        gathered: memory for the sums of all physical devices, a row for each rank; None where the
            library adds.
    """

    folded: Buffer
    source: Buffer
    gathered: Buffer | None

    @property
    def terms(self) -> Sequence[Buffer]:
        """The buffers still to be added after the collective, in the order of the ranks."""
        if self.gathered is None:
            return (self.folded,)
        num_ranks, size = self.gathered.shape
        return tuple(self.gathered.view(rank * size, (size,)) for rank in range(num_ranks))


class Nccl(Algorithm):
    """All-reduce by the mesh's collective library, in the calls of ``plan_groups``.

    All memory is asked for, and the library looked for, before the first launch: where that
    fails nothing was changed.
    """

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        super().__init__(devices)
        self._sharing = list(by_physical(self.devices).values())
        _ = self._collective  # raises where the library is missing

    @property
    def _collective(self) -> Collective | None:
        """The collective library of the mesh; None where one physical device needs none."""
        return self.devices[0].mesh.collective if len(self._sharing) > 1 else None

    def compile(self, wire: DType, total: DType) -> None:
        """See ``Algorithm.compile``; the first time, connecting may take seconds."""
        collective = self._collective
        if collective is not None:
            collective.connect([self.devices[first] for first, *_ in self._sharing])
        num_terms = {1, *map(len, self._sharing)}
        for device in self.devices:
            for out, term in dict.fromkeys([(total, wire), (wire, wire)]):
                ops.prepare_all_sum(device, out, term, num_terms)

    def start(self, jobs: Sequence[Job]) -> Callable[[Sequence[int], Queue], Steps]:
        """See ``Algorithm.start``."""
        collective = self._collective
        if collective is None:
            return lambda indices, _: _on_one_gpu([jobs[at] for at in indices])
        num_ranks = len(self._sharing)
        parts = [[_part(job, replicas, num_ranks) for job in jobs] for replicas in self._sharing]

        def steps_of(indices: Sequence[int], queue: Queue) -> Steps:
            here = [[gpu_parts[at] for at in indices] for gpu_parts in parts]
            return _over_gpus([jobs[at] for at in indices], self._sharing, here, collective, queue)

        return steps_of


def _on_one_gpu(jobs: Sequence[Job]) -> Steps:
    """Reduces jobs on one physical device: reads n buffers, writes n."""
    _finish([(job, job.inputs) for job in jobs], range(len(jobs[0].inputs)))
    yield


def _over_gpus(
    jobs: Sequence[Job],
    sharing: Sequence[Sequence[int]],
    parts: Sequence[Sequence[_Part]],
    collective: Collective,
    queue: Queue,
) -> Steps:
    """Reduces jobs over several physical devices; ``sharing`` are the replicas of each."""
    leaders = [jobs[0].inputs[indices[0]].device for indices in sharing]
    for indices, gpu_parts in zip(sharing, parts, strict=True):
        _fold(jobs, gpu_parts, indices)
    for leader in leaders:
        join_streams(leader, [leader], queue)
    for group in plan_groups([part.folded.nbytes for part in parts[0]]):
        with collective.group():
            for index in group:
                _cross(collective, [gpu_parts[index] for gpu_parts in parts], queue)
    yield
    for leader in leaders:
        fork_streams(leader, [leader], queue)
    for indices, gpu_parts in zip(sharing, parts, strict=True):
        _finish([(job, part.terms) for job, part in zip(jobs, gpu_parts, strict=True)], indices)


def _is_gathered(dtype: DType) -> bool:
    """Whether the library only gathers this dtype: NCCL cannot add 16-bit integers."""
    return dtype.kind in "iu" and dtype.itemsize == 2


def _part(job: Job, indices: Sequence[int], num_ranks: int) -> _Part:
    """Allocates the memory of one job on the device of ``indices[0]``; launches nothing."""
    first, out = job.inputs[indices[0]], job.outs[indices[0]]
    gathers = _is_gathered(first.dtype)
    gathered = first.device.empty((num_ranks, first.size), first.dtype) if gathers else None
    alone = len(indices) == 1
    if gathers and alone:
        return _Part(first, first, gathered)  # which nobody overwrites
    reused = out.dtype == first.dtype
    if not out.block.owned:  # of a simulated device, it may be memory that another one still reads
        reused = reused and out.address not in [
            each.address for at, each in enumerate(job.inputs) if at not in indices
        ]
    folded = out if reused else first.device.empty(first.shape, first.dtype)
    return _Part(folded, first if alone else folded, gathered)


def _fold(jobs: Sequence[Job], parts: Sequence[_Part], indices: Sequence[int]) -> None:
    """Adds the replicas on one physical device, if there are several."""
    if len(indices) == 1:
        return
    sharing = [jobs[0].inputs[index].device for index in indices]
    leader = sharing[0]
    join_streams(leader, sharing)
    ops.all_sum(
        [[part.folded] for part in parts],
        [[job.inputs[index] for index in indices] for job in jobs],
        device=leader,
    )


def _cross(collective: Collective, ranks: Sequence[_Part], queue: Queue) -> None:
    """Calls the collective for one job, over all physical devices."""
    folded = [part.folded for part in ranks]
    sources = [part.source for part in ranks]
    gathered = [part.gathered for part in ranks if part.gathered is not None]
    if gathered:
        collective.all_gather(gathered, sources, queue=queue)
    else:
        collective.all_reduce(folded, sources=sources, queue=queue)


def _finish(finished: Sequence[tuple[Job, Sequence[Buffer]]], indices: Sequence[int]) -> None:
    """Adds the remaining terms, divides, and writes every out on the devices of ``indices``."""
    devices = [finished[0][0].outs[index].device for index in indices]
    leader = devices[0]
    join_streams(leader, devices)
    by_divisor: dict[float, list[tuple[list[Buffer], Sequence[Buffer]]]] = {}
    for job, inputs in finished:
        outs = [job.outs[index] for index in indices]
        alone = len(outs) == len(inputs) == 1
        if alone and outs[0].address == inputs[0].address and job.divisor == 1:
            continue  # the library wrote it in place
        by_divisor.setdefault(job.divisor, []).append((outs, inputs))
    for divisor, rows in by_divisor.items():
        ops.all_sum(
            [outs for outs, _ in rows], [inputs for _, inputs in rows],
            divisor=divisor, device=leader,
        )  # fmt: skip
    fork_streams(leader, devices)
