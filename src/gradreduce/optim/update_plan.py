"""Plans the launches that update many variables; a plan is used for many steps.

For a sparse gradient, rows with the same index are added first. The rows that the gradient touches
are copied out of the variable and its slots, updated in the same launch as other operands, and
copied back. A rule that a subclass writes in Python (``Optimizer._apply``) runs on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

from gradreduce import ops
from gradreduce.arrays.caller_streams import StreamScope, SuspendedScope
from gradreduce.arrays.convert import from_buffer
from gradreduce.arrays.convert_gpu import on_gpu_of, wait_for_current_stream, wait_for_inputs
from gradreduce.arrays.distributed import Mirrored, Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.staging import HostStaging
from gradreduce.arrays.variable import Variable
from gradreduce.backends.dry_run import DryRunDevice
from gradreduce.device import Buffer, Device, PackInfo, by_physical, same_dtypes
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
        totals: see above.
        shared: the variables that share memory with parameters of a PyTorch module.
        written: for each copy of each variable, the buffers that an update writes.
        devices: the device of each copy.
        label: names the variables in the operation log.
        ranges: the address ranges of the buffers in ``written``.
        rule: the compiled rule; None for a Python rule.
        device_over_processes: a device of a mesh of several processes; None: all have one.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        slots: Slots,
        rule: ops.UpdateRule | None,
        totals: Mapping[Variable, tuple[Buffer, ...]] | None = None,
    ) -> None:
        self.variables, self.totals = tuple(variables), totals or {}
        self.label = PackInfo(range(len(variables)), names=[each.name for each in variables])
        self.shared = [var for var in variables if var._parameters]
        self.rule = rule
        self._slots = slots.by_name  # a checkpoint that is loaded later replaces this dict
        self.written = [row for var in variables for row in slots.rows(var)]
        for row, total in zip(self.written, chain(*self.totals.values()), strict=False):
            row.append(total)
        self.devices = [row[0].device for row in self.written]
        self.ranges = ops.Ranges([operand for row in self.written for operand in row])
        self._wanted = [(row[0].device, row[0].dtype, row[0].shape) for row in self.written]
        # For each physical device the indices of the copies there, what their update writes, and
        # whether the dtypes of these agree.
        self._groups = [
            (
                indices,
                rows := [self.written[index] for index in indices],
                len(same_dtypes(rows)) == 1,
            )
            for indices in by_physical(self.devices).values()
        ]
        self._num_copies = [len(var.devices) for var in variables]
        self._owners = [var for var in variables for _ in var.devices]  # of each copy
        self._staging = HostStaging(self._wanted)
        self._addresses: list[int] = []
        self.device_over_processes = device_over_processes(variables)

    def is_valid_for(
        self, variables: Sequence[Variable], slots: Slots, rule: ops.UpdateRule | None
    ) -> bool:
        """Whether the plan was made for these variables, slots and rule."""
        return (
            rule is self.rule
            and slots.by_name is self._slots
            and len(variables) == len(self.variables)
            and all(map(is_, variables, self.variables))
        )

    def jobs(self, gradients: Sequence[Part]) -> list[UpdateJob]:
        """Returns a job for each physical device."""
        return [
            UpdateJob(rows, [gradients[index] for index in indices], are_alike=are_alike)
            for indices, rows, are_alike in self._groups
        ]

    def plain(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        """Returns a Buffer for each copy of each variable, if the gradients are just these.

        Each is a Buffer on its device, an array on the host, or a ``Mirrored`` of Buffers. Returns
        None if a gradient is anything else. This is a fast path with one test for each gradient.
        Overlaps with memory that the update writes are checked only if an address differs from the
        last call.
        """
        if type(gradients[0]) is Mirrored:
            gradients = self._parts_of(gradients)
        buffers = self._as_buffers(gradients) if len(self.devices) == len(gradients) else None
        if buffers is not None:
            addresses = [grad.address for grad in buffers]
            if addresses != self._addresses:
                check_no_overlap(self._owners, [(part,) for part in buffers], self.ranges)
                self._addresses = addresses
        return buffers

    def _parts_of(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the parts of each ``Mirrored``; nothing if a variable has other copies."""
        parts: list[Any] = []
        for grad, num_copies in zip(gradients, self._num_copies, strict=True):
            if not isinstance(grad, Mirrored) or len(grad) != num_copies:
                return []
            grad._discard_copies()
            parts += grad.parts
        return parts

    def _as_buffers(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        is_external = False
        for grad, (device, dtype, shape) in zip(gradients, self._wanted, strict=True):
            if type(grad) is not Buffer:
                # A Python rule may keep its arguments, so they must not be in reused memory.
                return self._staging.upload(gradients) if self.rule is not None else None
            if grad.device is not device or grad.dtype is not dtype or grad.shape != shape:
                return None
            is_external = is_external or grad.array_owner is not None
        if is_external:
            wait_for_inputs(gradients)
        return gradients


class UpdateJob:
    """One update of the copies on one physical device, with all memory allocated.

    Args:
        written: for each copy of a variable, the buffers that its update writes, the variable
            first.
        gradients: the gradient of each copy, on the same physical device.
        are_alike: whether the rows of ``written`` are known to have the same dtypes.

    Attributes:
        device: the device of the first copy, whose compute queue launches.
        updates: the operands of the rule, a row for each copy.
        are_alike: see above.
        before: launches before the rule, which gather the rows of sparse gradients.
        after: launches after the rule, which scatter the rows back.
    """

    def __init__(
        self,
        written: Sequence[Sequence[Buffer]],
        gradients: Sequence[Part],
        *,
        are_alike: bool = False,
    ) -> None:
        self.device, self.are_alike = written[0][0].device, are_alike
        self.updates: list[Update] = [
            [*operands, part]
            for operands, part in zip(written, gradients, strict=True)
            if type(part) is Buffer
        ]
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        if len(self.updates) < len(written):
            self._add_sparse(
                [
                    (operands, part)
                    for operands, part in zip(written, gradients, strict=True)
                    if isinstance(part, IndexedSlices)
                ]
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
        self.before = [
            ops.segment_sum_command(*zip(*merges, strict=True), device=device),
            ops.take_rows_command(rows, wholes, indices, device=device),
        ]
        self.after = [ops.segment_sum_command(wholes, rows, singles, into=indices, device=device)]


OnArrays = Callable[[Any, dict[str, Any], Any], object]  # should return None


def ready_python_rule(apply: OnArrays, names: Sequence[str], job: UpdateJob) -> Callable[[], None]:
    """Runs a Python rule on copies; returns a function that copies the results back.

    Because it runs on copies, variables and slots are unchanged if it raises. No lock is held while
    it runs. ``job.before`` must have been launched.

    Args:
        apply: ``apply(variable, slots, gradient)`` changes the first two in place. The arguments
            are NumPy or CuPy arrays. For a variable with a master, ``variable`` is the master.
            It is not called in a dry run.
        names: the names of the slots.
        job: the job of the update.
    """
    outs: list[Buffer] = []
    values: list[Buffer] = []
    for row in job.updates:
        copied = _copy_written(row, job.device)
        changed = copied[-len(names) - 1 :]  # the master if there is one, else the variable; slots
        if not isinstance(job.device, DryRunDevice):
            _call(apply, names, [*changed, row[-1]], job.device)
        if len(copied) > len(changed):
            copied[0] = changed[0]  # the copy below rounds the master to its variable
        outs += row[:-1]
        values += copied
    return partial(ops.pack, outs, values, device=job.device)


def _copy_written(row: Update, device: Device) -> list[Buffer]:
    """Copies the written operands; sets a master that does not round to its variable."""
    copies = [device.empty(operand.shape, operand.dtype) for operand in row[:-1]]
    ops.pack(copies, row[:-1], device=device)
    if len(row) > 2 and copies[1].dtype != copies[0].dtype:
        zeros = device.zeros(row[0].shape, row[0].dtype)
        ops.update_rows(
            ops.RULE_KERNELS[ops.RULES["sgd"], "plain"],
            [[copies[0], copies[1], zeros]],
            (0.0,),
            device,
        )
    return copies


def _call(apply: OnArrays, names: Sequence[str], buffers: Sequence[Buffer], device: Device) -> None:
    with SuspendedScope():
        with StreamScope():
            variable, *slots, gradient = [from_buffer(each, "native") for each in buffers]
        by_name = dict(zip(names, slots, strict=True))
        with on_gpu_of(device):  # CuPy computes on its current GPU
            returned = apply(variable, by_name, _only_read(gradient, device))
    if returned is not None:  # its author expects it to become the new value
        name = getattr(apply, "__qualname__", "_apply")
        raise ValueError(
            f"{name} returned {type(returned).__name__}; it must return None and change variable "
            "and slots in place, as in variable -= 0.1 * gradient or variable[...] = new"
        )
    for name, slot in zip(names, slots, strict=True):
        if by_name.get(name) is not slot:  # otherwise the new value would be lost silently
            raise ValueError(
                f"_apply replaced the array slots[{name!r}]; change it in place, as in "
                f"slots[{name!r}][...] = new"
            )
    if device.mesh_state.has_streams:
        wait_for_current_stream(buffers[:1], "native")


def _only_read(gradient: Any, device: Device) -> Any:
    """Returns a gradient that the rule cannot overwrite: it may be the caller's memory."""
    if not device.mesh_state.shares_host_memory:
        return gradient.copy()  # CuPy has no read-only arrays
    view = gradient.view()
    view.flags.writeable = False
    return view
