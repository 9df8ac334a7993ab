"""Plans the launches that update many variables; a plan is used for many steps.

For a sparse gradient, rows with the same index are added first. The rows that the gradient touches
are copied out of the variable and its slots, updated in the same launch as other operands, and
copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

from gradreduce import ops
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.staging import Staging
from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    Device,
    LaunchBatch,
    PackInfo,
    by_physical,
)
from gradreduce.device.buffer import same_dtypes
from gradreduce.ops import Update

from .gradient_inputs import check_no_overlap, device_over_processes
from .slots import Slots


class Plan:
    """Reusable plan for updates of the same variables in the same order.

    Args:
        variables: the variables to update; their slots exist.
        slots: the slots of the optimizer.
        rule: the compiled rule; None for a Python rule.
        totals: for each variable, sums that the update writes too, one for each copy.

    Attributes:
        shared: the variables that share memory with parameters of a PyTorch module.
        written: for each copy of each variable, the buffers that an update writes.
        devices: the device of each copy.
        label: names the variables in the operation log.
        ranges: the address ranges of the buffers in ``written``.
        rule: the compiled rule; None for a Python rule.
        indices_by_gpu: for each physical device, the indices of the copies there.
        writers: for each physical device, the result of ``writer_of``.
        device_over_processes: a device of a mesh of several processes; None: all have one.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        slots: Slots,
        rule: ops.UpdateRule | None,
        totals: Sequence[Sequence[Buffer]] = (),
    ) -> None:
        self.variables = tuple(variables)
        self.label = PackInfo(range(len(variables)), names=[each.name for each in variables])
        self.shared = [var for var in variables if var._parameters]
        self.rule = rule
        self._slots = slots.by_name  # a checkpoint that is loaded later replaces this dict
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
        self.device_over_processes = device_over_processes(variables)

    def is_valid_for(
        self, variables: Sequence[Variable], slots: Slots, rule: ops.UpdateRule | None
    ) -> bool:
        """Whether the plan was made for these variables, slots and rule."""
        if rule is not self.rule or slots.by_name is not self._slots:
            return False
        return len(variables) == len(self.variables) and all(map(is_, variables, self.variables))

    def jobs(self, gradients: Sequence[Part]) -> list[tuple[Job, LaunchBatch | None]]:
        """Returns a job for each physical device, and its writer if all gradients are dense."""
        found: list[tuple[Job, LaunchBatch | None]] = []
        for indices, writer in zip(self.indices_by_gpu, self.writers, strict=True):
            written = [self.written[index] for index in indices]
            job = Job(written, [gradients[index] for index in indices])
            found.append((job, writer if job.is_dense else None))
        return found

    def plain(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        """Returns gradients as Buffers if all are on their devices or on the host.

        Returns None if a gradient is anything else. This is a fast path with one test for each
        gradient. Overlaps with memory that the update writes are checked only if an address
        differs from the last call.
        """
        found = None if self._has_copies else self._as_buffers(gradients)
        if found is not None:
            addresses = [grad.address for grad in found]
            if addresses != self._addresses:
                check_no_overlap(self.variables, [(part,) for part in found], self.ranges)
                self._addresses = addresses
        return found

    def _as_buffers(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        is_external = False
        for grad, (device, dtype, shape) in zip(gradients, self._wanted, strict=True):
            if type(grad) is not Buffer:
                # A Python rule may keep its arguments, so they must not be in reused memory.
                return self._staging.staged(gradients) if self.rule is not None else None
            if grad.device is not device or grad.dtype is not dtype or grad.shape != shape:
                return None
            is_external = is_external or grad.array_owner is not None
        if is_external:
            wait_for_inputs(gradients)
        return gradients


def writer_of(device: Device, rows: Sequence[Sequence[Buffer]]) -> LaunchBatch | None:
    """Returns a ``LaunchBatch`` of these rows, or None if they need more than one launch."""
    return LaunchBatch(device, rows) if len(same_dtypes(rows)) == 1 else None


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
        gradients: the gradient of each copy, on the same physical device.

    Attributes:
        device: the device of the first copy, whose compute queue launches.
        updates: the operands of the rule, a row for each copy.
        is_dense: whether all gradients are dense, so that ``updates`` has the order of ``written``.
    """

    def __init__(self, written: Sequence[Sequence[Buffer]], gradients: Sequence[Part]) -> None:
        self.device = written[0][0].device
        pairs = list(zip(written, gradients, strict=True))
        self.updates: list[Update] = [
            [*operands, part] for operands, part in pairs if type(part) is Buffer
        ]
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self.is_dense = len(self.updates) == len(pairs)
        if not self.is_dense:
            self._add_sparse(
                [(operands, part) for operands, part in pairs if isinstance(part, IndexedSlices)]
            )

    def _add_sparse(self, pairs: Sequence[tuple[Sequence[Buffer], IndexedSlices]]) -> None:
        """Allocates memory for the merged rows of gradients and the rows that they update."""
        device = self.device
        merges: list[tuple[Buffer, Buffer, ops.Segments]] = []
        takes: list[tuple[Buffer, Buffer, ops.Segments]] = []
        for written, part in pairs:
            if not part.values.size:
                continue
            segments = ops.plan_segments(part.indices)
            shape = (segments.num_segments, *written[0].shape[1:])
            merged = device.empty(shape, part.values.dtype)
            taken = [device.empty(shape, operand.dtype) for operand in written]
            merges.append((merged, part.values, segments))
            takes += [(rows, whole, segments) for rows, whole in zip(taken, written, strict=True)]
            self.updates.append([*taken, merged])
        if not merges:
            return
        rows, wholes, plans = zip(*takes, strict=True)
        indices = [segments.indices for segments in plans]
        singles = [ops.single_row_segments(segments.num_segments) for segments in plans]
        self._before = [
            ops.segment_sum_command(*zip(*merges, strict=True), device=device),
            ops.take_rows_command(rows, wholes, indices, device=device),
        ]
        self._after = [ops.segment_sum_command(wholes, rows, singles, into=indices, device=device)]

    def begin(self) -> None:
        """Gathers rows for sparse gradients."""
        for launch in self._before:
            launch()

    def end(self, rule: Rule) -> None:
        """Launches the rule, and scatters rows back."""
        rule(self.updates, self.device)
        for launch in self._after:
            launch()

    def run(self, rule: Rule) -> None:
        """Updates the copies by a rule: ``begin``, then ``end``."""
        self.begin()
        self.end(rule)
