"""Plans an update of many variables: the launches of each GPU, worked out once.

A sparse gradient is merged first, row by row. The rows that it touches are taken out of the
variable and its slots, updated like any other operands in the same launch, and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.arrays.convert_gpu import reading
from gradreduce.arrays.distributed import Part, device_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.staging import Staging
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, LaunchBatch, by_physical, fork_streams, join_streams
from gradreduce.ops import Update

__all__ = ["Job", "Plan", "Rule", "by_kernel", "devices_of"]


class Plan:
    """An update of these variables, in this order.

    Args:
        variables: in their order.
        rows_of: for each copy of a variable what an update of it writes, the variable first.
        kernel: that is compiled; None of a rule on arrays.

    Attributes:
        written: for each copy of each variable what an update of it writes.
        devices: of each copy.
        ranges: where all of that lies.
        places: for each physical device the copies there.
        writers: for each physical device what launches there, if one launch serves all rows.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        rows_of: Callable[[Variable], list[list[Buffer]]],
        kernel: ops.RuleKernel | None,
    ) -> None:
        self.variables = tuple(variables)
        self.kernel = kernel
        self.written = [row for var in variables for row in rows_of(var)]
        self.devices = [row[0].device for row in self.written]
        self.ranges = ops.Ranges([operand for row in self.written for operand in row])
        self.places = list(by_physical(self.devices).values())
        self._wanted = [(row[0].device, row[0].dtype, row[0].shape) for row in self.written]
        kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in self.written}
        self.writers = [
            LaunchBatch(self.devices[indices[0]], [self.written[index] for index in indices])
            if len(kinds) == 1
            else None
            for indices in self.places
        ]
        self._staging = Staging(self._wanted)
        self._addresses: list[int] = []
        self._has_copies = len(self.devices) > len(self.variables)

    def plain(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        """The gradients where they are wanted, if each is one Buffer there or a host array.

        In one quick look at each, since a step may have hundreds. None if one is anything else.
        """
        if self._has_copies:
            return None
        is_lent = False
        for grad, (device, dtype, shape) in zip(gradients, self._wanted, strict=True):
            if type(grad) is not Buffer:
                return self._from_host(gradients)
            if grad.device is not device or grad.dtype is not dtype or grad.shape != shape:
                return None
            is_lent = is_lent or grad.array_owner is not None
        if is_lent:
            reading(gradients)
        return gradients

    def _from_host(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        # A rule on arrays may keep what it is shown; a capture would keep the values of now.
        if self.kernel is None or self.devices[0].mesh_state.capture is not None:
            return None
        return self._staging.staged(gradients)

    def lie_as_before(self, gradients: Sequence[Buffer]) -> bool:
        """Whether each begins where that of the last update did, and so is apart, as that was.

        Asked of what ``plain`` gave, whose sizes are those of the variables.
        """
        return [grad.address for grad in gradients] == self._addresses

    def are_apart(self, gradients: Sequence[Buffer]) -> None:
        """Remembers where they lie: they share nothing with what is written."""
        self._addresses = [grad.address for grad in gradients]


def devices_of(variables: Sequence[Variable]) -> list[Device]:
    """That of each copy of each variable."""
    return [copy.device for var in variables for copy in var.buffers]


Rule = Callable[[Sequence[Update], Device], None]


def by_kernel(
    kernel: ops.RuleKernel, scalars: Sequence[float], writer: LaunchBatch | None = None
) -> Rule:
    """A rule that is a kernel, with all that it takes behind ``num_written``."""
    return lambda rows, at: ops.update_unchecked(kernel, rows, scalars, at, writer=writer)


class Job:
    """One update of the copies on one physical device: has all its memory, and every plan there.

    Args:
        written: for each copy of a variable what an update of it writes, the variable first.
        gradients: of each copy, on the same physical device.

    Attributes:
        leader: whose compute queue launches: that of the first copy.
        updates: what a rule is given.
        is_dense: whether these are all of ``written``, in its order.
    """

    def __init__(self, written: Sequence[list[Buffer]], gradients: Sequence[Part]) -> None:
        self.leader = written[0][0].device
        pairs = list(zip(written, gradients, strict=True))
        self.updates: list[Update] = [
            [*operands, part] for operands, part in pairs if type(part) is Buffer
        ]
        leader = self.leader
        self._devices = dict.fromkeys([leader])
        for index in (0, -1):
            others = [row[index].device for row in self.updates if row[index].device is not leader]
            self._devices |= dict.fromkeys(others)
        self._take, self._put_back = _nothing, _nothing
        self.is_dense = len(self.updates) == len(pairs)
        if not self.is_dense:
            self._add_sparse(
                [(operands, part) for operands, part in pairs if isinstance(part, IndexedSlices)]
            )

    def _add_sparse(self, pairs: Sequence[tuple[list[Buffer], IndexedSlices]]) -> None:
        self._devices |= dict.fromkeys([row[0].device for row, _ in pairs])
        self._devices |= dict.fromkeys([device_of(part) for _, part in pairs])
        rows = [_Rows(operands, part, self.leader) for operands, part in pairs if part.values.size]
        self.updates += [row.update for row in rows]
        if rows:
            self._take, self._put_back = _ready(rows, self.leader)

    def begin(self) -> None:
        """Comes behind all other devices, and takes out the rows that sparse gradients touch."""
        join_streams(self.leader, self._devices)
        self._take()

    def end(self, rule: Rule) -> None:
        """Launches the rule, puts rows back, and lets the other devices come behind."""
        rule(self.updates, self.leader)
        self._put_back()
        fork_streams(self.leader, self._devices)

    def run(self, rule: Rule) -> None:
        """Both; launches, and only that."""
        self.begin()
        self.end(rule)


class _Rows:
    """The rows that a sparse gradient touches: of itself, and of the variable and its slots.

    Attributes:
        written: whole: the variable, its master, its slots.
        segments: of the gradient's rows.
        merged: new memory for its rows, each index once.
        taken: new memory for those rows of what is written.
    """

    def __init__(self, written: list[Buffer], slices: IndexedSlices, leader: Device) -> None:
        self.written, self.given = written, slices.values
        self.segments = ops.plan_segments(slices.indices)
        shape = (self.segments.num_segments, *written[0].shape[1:])
        self.merged = leader.empty(shape, self.given.dtype)
        self.taken = [leader.empty(shape, operand.dtype) for operand in written]

    @property
    def update(self) -> Update:
        """The rows as a rule takes them."""
        return [*self.taken, self.merged]


def _ready(rows: Sequence[_Rows], leader: Device) -> tuple[Callable[[], None], Callable[[], None]]:
    """What takes rows out, and what puts them back."""
    for dtype in {buffer.dtype for row in rows for buffer in row.update}:
        ops.prepare_segment_sum(leader, dtype, dtype)
        ops.prepare_take_rows(leader, dtype)
    merge = ops.ready_segment_sum(
        [row.merged for row in rows],
        [row.given for row in rows],
        [row.segments for row in rows],
        device=leader,
    )
    pairs = [
        (row, whole, part)
        for row in rows
        for whole, part in zip(row.written, row.taken, strict=True)
    ]
    take = ops.ready_take_rows(
        [part for _, _, part in pairs],
        [whole for _, whole, _ in pairs],
        [row.segments.indices for row, _, _ in pairs],
        device=leader,
    )
    put_back = ops.ready_segment_sum(
        [whole for _, whole, _ in pairs],
        [part for _, _, part in pairs],
        [ops.each_row(row.segments.num_segments) for row, _, _ in pairs],
        into=[row.segments.indices for row, _, _ in pairs],
        device=leader,
    )

    def begin() -> None:
        merge()
        take()

    return begin, put_back


def _nothing() -> None:
    """No gradient is sparse."""
