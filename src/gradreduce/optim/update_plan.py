"""Plans the launches that update many variables, once for many steps.

A sparse gradient is merged first, row by row. The rows that it touches are taken out of the
variable and its slots, updated like any other operands in the same launch, and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

from gradreduce import ops
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import Part, device_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.staging import Staging
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, LaunchBatch, by_physical, fork_streams, join_streams
from gradreduce.ops import Update

from .slots import Slots


class Plan:
    """Reusable plan for updates of the same variables in the same order.

    Args:
        variables: to update; their slots exist.
        slots: of the optimizer.
        kernel: the compiled rule; None for a Python rule.
        totals: for each variable, sums that an update writes too, one for each copy.

    Attributes:
        written: for each copy of each variable, the buffers that an update writes.
        devices: of each copy.
        ranges: address ranges of those buffers.
        places: for each physical device, the indices of the copies there.
        writers: for each physical device, the result of ``writer_of``.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        slots: Slots,
        kernel: ops.RuleKernel | None,
        totals: Sequence[Sequence[Buffer]] = (),
    ) -> None:
        self.variables = tuple(variables)
        self.kernel = kernel
        self._slots = slots.by_name  # another one, when a checkpoint was loaded
        self.written = [row for var in variables for row in slots.rows(var)]
        for row, total in zip(self.written, chain(*totals), strict=False):
            row.append(total)
        self.devices = [row[0].device for row in self.written]
        self.ranges = ops.Ranges([operand for row in self.written for operand in row])
        self.indices_by_gpu = list(by_physical(self.devices).values())
        self._wanted = [(row[0].device, row[0].dtype, row[0].shape) for row in self.written]
        self.writers = [
            writer_of(self.devices[indices[0]], [self.written[index] for index in indices])
            for indices in self.indices_by_gpu
        ]
        self._staging = Staging(self._wanted)
        self._addresses: list[int] = []
        self._has_copies = len(self.devices) > len(self.variables)

    def is_valid_for(
        self, variables: Sequence[Variable], slots: Slots, kernel: ops.RuleKernel | None
    ) -> bool:
        """Whether it is of these variables, slots and rule."""
        if kernel is not self.kernel or slots.by_name is not self._slots:
            return False
        return len(variables) == len(self.variables) and all(map(is_, variables, self.variables))

    def plain(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        """Returns the gradients as Buffers if all are on their devices or host arrays.

        A fast path with one test per gradient. None if a gradient is anything else.
        """
        if self._has_copies:
            return None
        is_external = False
        for grad, (device, dtype, shape) in zip(gradients, self._wanted, strict=True):
            if type(grad) is not Buffer:
                return self._from_host(gradients)
            if grad.device is not device or grad.dtype is not dtype or grad.shape != shape:
                return None
            is_external = is_external or grad.array_owner is not None
        if is_external:
            wait_for_inputs(gradients)
        return gradients

    def _from_host(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        # A Python rule may keep its arguments; a capture would record the current values.
        if self.kernel is None or self.devices[0].mesh_state.capture is not None:
            return None
        return self._staging.staged(gradients)

    def has_known_addresses(self, gradients: Sequence[Buffer]) -> bool:
        """Whether the gradients have the addresses that were last checked for overlaps.

        For the result of ``plain``, whose sizes are those of the variables.
        """
        return [grad.address for grad in gradients] == self._addresses

    def remember_addresses(self, gradients: Sequence[Buffer]) -> None:
        """Remembers the addresses of gradients that overlap nothing that is written."""
        self._addresses = [grad.address for grad in gradients]


def writer_of(leader: Device, rows: Sequence[Sequence[Buffer]]) -> LaunchBatch | None:
    """Returns a faster launcher of rows if one launch can update all; else None."""
    kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in rows}
    return LaunchBatch(leader, rows) if len(kinds) == 1 else None


def devices_of(variables: Sequence[Variable]) -> list[Device]:
    """Returns the device of each copy of each variable."""
    return [copy.device for var in variables for copy in var.buffers]


Rule = Callable[[Sequence[Update], Device], None]


def by_kernel(
    kernel: ops.RuleKernel, scalars: Sequence[float], writer: LaunchBatch | None = None
) -> Rule:
    """Returns a rule that launches a kernel with these scalars."""
    return lambda rows, at: ops.update_rows(kernel, rows, scalars, at, writer=writer)


class Job:
    """One update of the copies on one physical device, with all memory allocated.

    Args:
        written: for each copy of a variable, the buffers that its update writes, the variable
            first.
        gradients: of each copy, on the same physical device.
        others: devices of other operands.

    Attributes:
        leader: device of the first copy; its compute queue launches.
        updates: the rows for the rule.
        is_dense: whether ``updates`` has all of ``written``, in its order.
    """

    def __init__(
        self,
        written: Sequence[Sequence[Buffer]],
        gradients: Sequence[Part],
        others: Iterable[Device] = (),
    ) -> None:
        self.leader = written[0][0].device
        pairs = list(zip(written, gradients, strict=True))
        self.updates: list[Update] = [
            [*operands, part] for operands, part in pairs if type(part) is Buffer
        ]
        leader = self.leader
        self._devices = dict.fromkeys([leader, *others])
        for index in (0, -1):
            devices = [row[index].device for row in self.updates if row[index].device is not leader]
            self._devices |= dict.fromkeys(devices)
        self._take, self._put_back = _nothing, _nothing
        self.is_dense = len(self.updates) == len(pairs)
        if not self.is_dense:
            self._add_sparse(
                [(operands, part) for operands, part in pairs if isinstance(part, IndexedSlices)]
            )

    def _add_sparse(self, pairs: Sequence[tuple[Sequence[Buffer], IndexedSlices]]) -> None:
        self._devices |= dict.fromkeys([row[0].device for row, _ in pairs])
        self._devices |= dict.fromkeys([device_of(part) for _, part in pairs])
        rows = [_Rows(operands, part, self.leader) for operands, part in pairs if part.values.size]
        self.updates += [row.update for row in rows]
        if rows:
            self._take, self._put_back = _ready(rows, self.leader)

    def begin(self) -> None:
        """Waits for the other devices' streams, and gathers the rows of sparse gradients."""
        join_streams(self.leader, self._devices)
        self._take()

    def end(self, rule: Rule) -> None:
        """Launches the rule, scatters rows back, and makes the other streams wait for that."""
        rule(self.updates, self.leader)
        self._put_back()
        fork_streams(self.leader, self._devices)

    def run(self, rule: Rule) -> None:
        """Updates the copies by a rule: ``begin``, then ``end``."""
        self.begin()
        self.end(rule)


class _Rows:
    """Temporary rows of a sparse gradient, its variable and the slots.

    Attributes:
        written: the whole variable, its master and its slots.
        segments: of the gradient's rows.
        merged: new memory for the gradient's rows, each index once.
        taken: new memory for those rows of ``written``.
    """

    def __init__(self, written: Sequence[Buffer], slices: IndexedSlices, leader: Device) -> None:
        self.written, self.grad_rows = written, slices.values
        self.segments = ops.plan_segments(slices.indices)
        shape = (self.segments.num_segments, *written[0].shape[1:])
        self.merged = leader.empty(shape, self.grad_rows.dtype)
        self.taken = [leader.empty(shape, operand.dtype) for operand in written]

    @property
    def update(self) -> Update:
        """The rows in the order of the rule's operands."""
        return [*self.taken, self.merged]


def _ready(rows: Sequence[_Rows], leader: Device) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a function that gathers the rows, and one that scatters them back."""
    for dtype in {buffer.dtype for row in rows for buffer in row.update}:
        ops.prepare_segment_sum(leader, dtype, dtype)
        ops.prepare_take_rows(leader, dtype)
    merge = ops.segment_sum_command(
        [row.merged for row in rows],
        [row.grad_rows for row in rows],
        [row.segments for row in rows],
        device=leader,
    )
    pairs = [
        (row, whole, part)
        for row in rows
        for whole, part in zip(row.written, row.taken, strict=True)
    ]
    take = ops.take_rows_command(
        [part for _, _, part in pairs],
        [whole for _, whole, _ in pairs],
        [row.segments.indices for row, _, _ in pairs],
        device=leader,
    )
    put_back = ops.segment_sum_command(
        [whole for _, whole, _ in pairs],
        [part for _, _, part in pairs],
        [ops.single_row_segments(row.segments.num_segments) for row, _, _ in pairs],
        into=[row.segments.indices for row, _, _ in pairs],
        device=leader,
    )

    def begin() -> None:
        merge()
        take()

    return begin, put_back


def _nothing() -> None:
    """Does nothing: no gradient is sparse."""
