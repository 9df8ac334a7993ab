"""The interface of an all-reduce algorithm: one class, in a file of its own.

``algorithms.ALGORITHMS`` names the classes. The pipeline makes one instance for each list of
devices, packs a stage, runs its steps, and unpacks it; an algorithm only adds buffers.

Reduce-scatter and all-gather have a default implementation by copies, which an algorithm may
override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    Queue,
    accumulate_dtype,
    as_count,
    by_physical,
    ensure_accessible,
)
from gradreduce.errors import brief, listed
from gradreduce.sums.exact_terms import sum_exactly

# The replica numbers of each group, in the order of its additions; groups in the order of theirs.
ReductionGroups = tuple[tuple[int, ...], ...]
# The replicas of each process are one group.
ProcessesName = Literal["processes"]
# The work of one stage, in steps. At each yield it waits for transfers, and other stages can run.
Steps = Iterator[None]


@dataclass(frozen=True)
class Job:
    """The reduction of one pack: every out becomes the divided sum of all inputs.

    Attributes:
        inputs: one for each replica, in mesh order, on its device; all of one size and dtype.
        outs: one for each replica, on its device. An out is exactly its own input, or overlaps no
            input; on simulated devices it may be another replica's input if the caller wants that.
        divisor: divides the sum; 1: no division.
        owner: in a reduce-scatter the number of the only replica with an out, in an all-gather of
            the only replica with an input, counted over all processes. In the other processes
            ``outs`` or ``inputs`` is empty. None: an all-reduce.
    """

    inputs: Sequence[Buffer]
    outs: Sequence[Buffer]
    divisor: float = 1
    owner: int | None = None

    def part(self, start: int, stop: int) -> Job:
        """Returns the job for the elements from ``start`` to ``stop``; itself for all of them."""
        if (start, stop) == (0, (self.inputs or self.outs)[0].size):
            return self
        return Job(
            [part_of(buffer, start, stop) for buffer in self.inputs],
            [part_of(buffer, start, stop) for buffer in self.outs],
            self.divisor,
            self.owner,
        )


class Algorithm(ABC):
    """An all-reduce algorithm for the replicas on one list of devices.

    Attributes:
        devices: the devices of the replicas, in order.
        senders: the device of each input of a job: of a replica, or of one of its words.
        in_place: whether inputs may be outs. Then nothing is allocated after the first launch, so
            that a failed allocation leaves the inputs unchanged.
        writes_targets: whether it may write results into the caller's memory, possibly its inputs,
            even if it is not ``in_place``.
        reads_peers: whether launches access inputs and outs on other physical devices.
        always_overlaps: whether stages overlap for replicas on one physical device, too.
        exact: whether the inputs of a job are added as real numbers.

    Args:
        devices: see above.
        reduction_groups: the groups, for an algorithm with ``has_groups``; None: its default.

    Raises:
        ValueError: ``reduction_groups`` is for another number of replicas.
        BackendUnavailableError: the algorithm needs a library that is missing.
    """

    has_groups = False
    in_place = True
    writes_targets = False
    reads_peers = False
    always_overlaps = False
    exact = False

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        self.devices = self.senders = tuple(devices)
        self._groups: Sequence[Sequence[int]] = [range(len(self.devices))]

    def connect(self) -> None:  # noqa: B027  # optional
        """Connects the devices, if that takes time; called before the first launch."""

    def allocate(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Allocates the memory that jobs need besides their own; launches nothing.

        Returns:
            For each job what ``all_reduce`` gets of it. Default: the job.
        """
        return jobs

    @abstractmethod
    def all_reduce(self, jobs: Sequence[Any], queue: Queue) -> Steps:
        """Returns the steps of a stage.

        Args:
            jobs: the results of ``allocate`` for the stage's jobs.
            queue: the queue for transfers. Sums run on the compute queues.
        """

    def reduce_scatter(self, jobs: Sequence[Job]) -> None:
        """Reduces each job into its owner's out, on the compute queues.

        Each job is added on the device of its owner, with the bits of an all-reduce.

        Args:
            jobs: jobs with owners, in the order of the owners.
        """
        devices, groups = self.devices, self._groups
        split = len(groups[0]) if len(groups) == 2 else 0
        by_gpu: dict[int, list[Job]] = {}
        for job in jobs:
            assert job.owner is not None, "a reduce-scatter has owners"
            by_gpu.setdefault(devices[job.owner].physical, []).append(job)
        owners = [here[0].outs[0].device for here in by_gpu.values()]
        terms = []
        for device, here in zip(owners, by_gpu.values(), strict=True):
            # Each device starts with copies from a different device.
            first = self.senders.index(device)
            places = [*range(first, len(self.senders)), *range(first)]
            inputs = [
                {place: ensure_accessible(device, job.inputs[place]) for place in places}
                for job in here
            ]
            terms.append(inputs)
        for device, here, inputs in zip(owners, by_gpu.values(), terms, strict=True):
            rows = [[row[at] for each in groups for at in each] for row in inputs]
            if len(groups) > 2:
                rows = [
                    [group_sum(device, [row[at] for at in each]) for each in groups]
                    for row in inputs
                ]
            sums = [(job.divisor, job.outs, row) for job, row in zip(here, rows, strict=True)]
            write_sums(sums, device, split, exact=self.exact)

    def all_gather(self, jobs: Sequence[Job]) -> None:
        """Copies each job's only input to all its outs, on the compute queues.

        Args:
            jobs: jobs with owners, in the order of the owners. One of the outs may be the input.
        """
        copy_to_all([(job.inputs[0], job.outs) for job in jobs], self.devices)


def part_of(buffer: Buffer, start: int, stop: int) -> Buffer:
    """Returns the elements from ``start`` to ``stop``; the Buffer itself for all of them."""
    if (start, stop) == (0, buffer.size):
        return buffer
    return buffer.parts((start,), (stop - start,))[0]


def write_sums(
    sums: Iterable[tuple[float, Sequence[Buffer], Sequence[Buffer]]],
    device: Device,
    split: int = 0,
    queue: Queue = "compute",
    *,
    exact: bool = False,
) -> None:
    """Adds, divides and writes, with one launch of ``device`` for each divisor.

    Args:
        sums: divisor, outs and inputs of each sum.
        device: a device that can access all of them.
        split: see ``ops.all_sum``.
        queue: see ``ops.all_sum``.
        exact: whether to add by ``sum_exactly``, which has no order.
    """
    by_divisor: dict[float, tuple[list[Sequence[Buffer]], list[Sequence[Buffer]]]] = {}
    for divisor, outs, inputs in sums:
        rows = by_divisor.setdefault(divisor, ([], []))
        rows[0].append(outs)
        rows[1].append(inputs)
    for divisor, rows in by_divisor.items():
        if exact:
            sum_exactly(*rows, divisor=divisor, device=device, queue=queue)
        else:
            ops.all_sum(*rows, split, divisor=divisor, device=device, queue=queue)


def group_sum(
    device: Device,
    terms: Sequence[Buffer],
    empty: Callable[[tuple[int, ...], DType], Buffer] | None = None,
) -> Buffer:
    """Adds buffers that ``device`` can access left to right, in the accumulate type.

    Args:
        device: the device that adds.
        terms: the buffers, all of one dtype.
        empty: allocates memory for the sum; default: ``device.empty``.
    """
    acc_dtype = accumulate_dtype(terms[0].dtype)
    if len(terms) == 1 and terms[0].dtype == acc_dtype:
        return terms[0]
    total = (empty or device.empty)(terms[0].shape, acc_dtype)
    ops.add_n([total], [terms], device=device)
    return total


def as_one_dtype(
    device: Device,
    terms: Sequence[Buffer],
    empty: Callable[[tuple[int, ...], DType], Buffer] | None = None,
) -> Sequence[Buffer]:
    """Returns terms that one launch can read: in the accumulate type if only some are sums."""
    if len({term.dtype for term in terms}) == 1:
        return terms
    return [group_sum(device, [term], empty) for term in terms]


def copy_to_all(
    copies: Sequence[tuple[Buffer, Sequence[Buffer]]], devices: Sequence[Device]
) -> None:
    """Copies each source to its outs; there is one for each device."""
    for index, device in enumerate(devices):
        # Each device starts with the sources of a different device.
        first = index * len(copies) // len(devices)
        for source, outs in [*copies[first:], *copies[:first]]:
            if source.device.physical != device.physical:
                device.copy(outs[index], source)
    copy_on_gpus(copies, devices)


def copy_on_gpus(
    copies: Sequence[tuple[Buffer, Sequence[Buffer]]], devices: Sequence[Device]
) -> None:
    """Copies each source to its outs on its GPU, with one launch per GPU."""
    for here in by_physical(devices).values():
        moves = [
            [(outs[index], source)]
            for source, outs in copies
            for index in here
            if source.device.physical == devices[index].physical
            and source.address != outs[index].address
        ]
        ops.pack_rows(moves, device=devices[here[0]])


def as_reduction_groups(reduction_groups: Any) -> ReductionGroups | ProcessesName:
    """Checks the groups as far as possible without knowing the devices.

    Raises:
        ValueError: it is neither lists nor ``"processes"``, a number is not a non-negative integer
            or is repeated, or a number below the largest is missing.
    """
    if isinstance(reduction_groups, str) and reduction_groups == "processes":
        return "processes"
    if not isinstance(reduction_groups, list | tuple):
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} must be a list of lists of replica "
            "numbers, or 'processes'"
        )
    groups = tuple([_as_group(reduction_groups, group) for group in reduction_groups])
    names = f"reduction_groups={brief(reduction_groups)} names"
    named = sorted([number for group in groups for number in group])
    if not named:
        raise ValueError(f"{names} no replica")
    if named[-1] >= 2 * len(named) + 8:  # a list of the missing ones would be too long
        raise ValueError(f"{names} replica {named[-1]} and leaves out most replicas below it")
    twice = [number for number, after in pairwise(named) if number == after]
    if twice:
        raise ValueError(f"{names} {_replicas(dict.fromkeys(twice))} twice")
    missing = sorted(set(range(named[-1])) - set(named))
    if missing:
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} leaves out {_replicas(missing)}"
        )
    return groups


def reduction_groups_of(
    num_replicas: int, reduction_groups: ReductionGroups | None = None
) -> ReductionGroups:
    """Returns ``reduction_groups``; by default the first n // 2 replicas and the rest.

    Raises:
        ValueError: ``reduction_groups`` is for another number of replicas.
    """
    if reduction_groups is None:
        split = num_replicas // 2
        return tuple(range(split)), tuple(range(split, num_replicas))
    num_named = sum(map(len, reduction_groups))
    if num_named != num_replicas:
        ends = sorted([num_named, num_replicas])
        verb = "leaves out" if num_named < num_replicas else "names"
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)} {verb} {_replicas(range(*ends))} of "
            f"{num_replicas} replicas"
        )
    return reduction_groups


def _as_group(reduction_groups: Any, group: Any) -> tuple[int, ...]:
    if not isinstance(group, list | tuple | range):
        raise ValueError(
            f"reduction_groups={brief(reduction_groups)}: {brief(group)} must be a list of replica "
            "numbers"
        )
    where = f"reduction_groups={brief(reduction_groups)}: "
    return tuple([as_count(where, number) for number in group])


def _replicas(numbers: Collection[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
