"""Local steps of a worker: update variables and accumulate gradients in one launch.

This extends the updates of ``Optimizer`` by the sum of each variable. A sparse gradient updates its
rows by the plain rule, and its rows are added to those of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeGuard

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseAdditions
from gradreduce.accumulator.state import PendingGradient, SparseSum
from gradreduce.arrays.distributed import Part, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.device import Buffer, Device
from gradreduce.optim.array_rules import run_python_rule
from gradreduce.optim.gradient_inputs import Colocated, made_dense
from gradreduce.optim.optimizer import Optimizer
from gradreduce.optim.update_plan import Job, Plan, by_kernel

from .variables import Member

# Kinds of updates: a dense gradient is written to the sum, or added to it; sparse rows.
_FIRST, _LATER, _ROWS = range(3)


class LocalPlan(Plan):
    """Reusable plan for local steps of the same variables with dense gradients.

    Args:
        optimizer: its rule is a kernel; its slots of the variables exist.
        members: the variables; their sums have memory.
        others: other memory that gradients must not overlap. The plan keeps it alive, so that no
            gradient can be allocated there while the plan is in use.
        version: of the center when ``others`` was collected.

    Attributes:
        members: the variables.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        others: Sequence[Buffer],
        version: int,
    ) -> None:
        variables = [member.local for member in members]
        self._memory = [member.total.memory for member in members]
        super().__init__(variables, optimizer._slots, optimizer._kernel, self._memory)
        self.members = list(members)
        self._others = others
        self._changes, self._seen = members[0].total.changes, -1
        self._version, self._lies_there = version, True
        self._first: bool | None = None
        self.ranges = ops.Ranges([*(each for row in self.written for each in row), *others])

    def has_its_memory(self, version: int) -> bool:
        """Whether sums and slots of the center are where they were when it was made.

        Gradients may have been allocated in memory that was freed.
        """
        return version == self._version and (self.first is not None or self._lies_there)

    @property
    def first(self) -> bool | None:
        """Whether gradients are written to the sums, not added; None if neither works."""
        if self._seen != self._changes.count:
            self._seen, self._first = self._changes.count, self._shared_is_first()
        return self._first

    def _shared_is_first(self) -> bool | None:
        pairs = list(zip(self.members, self._memory, strict=True))
        self._lies_there = all([each.total.memory is here for each, here in pairs])
        if not self._lies_there or any([each.total.rows is not None for each, _ in pairs]):
            return None
        firsts = {member.total.is_first for member in self.members}
        return firsts.pop() if len(firsts) == 1 else None

    def added(self) -> None:
        """Records that a gradient was written to each sum, or added to it."""
        if self._first:
            for member in self.members:
                member.total.added()


class Step(Protocol):
    """A local step, with all memory and plans; ``launch`` runs it."""

    def sums(self) -> dict[Member, Buffer | SparseSum]:
        """Returns the sum of each variable on its first device, as ``launch`` leaves it."""

    def launch(self, then: Callable[[], None]) -> None:
        """Updates all variables and counts the step; if it fails part-way, the devices fail.

        Args:
            then: called after the launches to count the step.
        """


def is_planned(gradients: Sequence[Part], plan: LocalPlan) -> TypeGuard[Sequence[Buffer]]:
    """Whether a plan can run: gradients are dense, sums have the same state."""
    return plan.first is not None and {type(part) for part in gradients} == {Buffer}


class DenseStep:
    """A step that uses a ``LocalPlan``; see ``Step``.

    Args:
        plan: of its variables.
        gradients: for each copy of each variable; ``is_planned`` is true.
        scalars: of the rule.
    """

    def __init__(
        self, plan: LocalPlan, gradients: Sequence[Buffer], scalars: Sequence[float]
    ) -> None:
        self._plan, self._scalars = plan, tuple(scalars)
        self._jobs = [
            Job([plan.written[index] for index in indices], [gradients[index] for index in indices])
            for indices in plan.indices_by_gpu
        ]

    def sums(self) -> dict[Member, Buffer | SparseSum]:
        """Returns the sums; see ``Step``."""
        return {member: member.total.memory[0] for member in self._plan.members}

    def launch(self, then: Callable[[], None]) -> None:
        """Launches the step; see ``Step``."""
        plan, scalars = self._plan, (int(bool(self._plan.first)), *self._scalars)
        assert plan.kernel is not None
        kernel = ops.local_update_of(plan.kernel)
        mesh_state = plan.devices[0].mesh_state
        with mesh_state.launch_lock, mesh_state.fail_on_partial_write(plan.devices):
            for job, writer in zip(self._jobs, plan.writers, strict=True):
                job.run(by_kernel(kernel, scalars, writer))
            plan.added()
            then()


def mixed(members: Sequence[Member], gradients: Sequence[Colocated]) -> list[Colocated | None]:
    """Converts sparse gradients of dense sums to dense ones; None for other gradients.

    Makes sparse sums dense that get a dense gradient.
    """
    found: list[Colocated | None] = [None] * len(members)
    indices = []
    for index, (member, colocated) in enumerate(zip(members, gradients, strict=True)):
        if not isinstance(colocated[0], IndexedSlices):
            member.total.make_dense()
        elif not member.total.is_first:
            indices.append(index)
    dense = made_dense(
        [gradients[index] for index in indices], [members[index].local for index in indices]
    )
    for index, colocated in zip(indices, dense, strict=True):
        found[index] = colocated
    return found


class LocalStep:
    """A step with gradients of any kind; see ``Step``.

    Args:
        optimizer: of the rule; its slots of the variables exist.
        members: the variables.
        gradients: for each variable, colocated with its copies; no dense one for a sparse sum.
        additions: result of ``mixed`` for them.
        scalars: of the rule.

    Attributes:
        devices: of the variables.
        is_dense: whether it consists of kernel launches over whole variables.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        gradients: Sequence[Colocated],
        additions: Sequence[Colocated | None],
        scalars: Sequence[float],
    ) -> None:
        self._dense: list[Member] = []
        self._sparse: list[tuple[Member, PendingGradient]] = []
        groups: dict[tuple[int, int], list[tuple[list[Buffer], Part, Buffer | None]]] = {}
        apart: dict[int, list[tuple[Buffer, Part]]] = {}
        for member, colocated, added in zip(members, gradients, additions, strict=True):
            rows = optimizer._slots.rows(member.local)
            kind, totals = self._kind(member, colocated[0], added)
            for written, part, total in zip(rows, colocated, totals, strict=True):
                key = (written[0].device.physical, kind)
                groups.setdefault(key, []).append((written, part, total))
            for memory, dense in zip(member.total.memory, added, strict=True) if added else ():
                apart.setdefault(memory.device.physical, []).append((memory, dense))
        has_rows = any([kind == _ROWS for _, kind in groups])
        self.is_dense = not has_rows and optimizer._kernel is not None
        self._additions = SparseAdditions(
            [pending_gradient for _, pending_gradient in self._sparse]
        )
        self.devices = [copy.device for member in members for copy in member.local.buffers]
        self._launches = [
            launch
            for (_, kind), group in groups.items()
            for launch in _launches(optimizer, kind, group, tuple(scalars))
        ]
        self._launches += [_sums(pairs, first=False) for pairs in apart.values()]

    def _kind(
        self, member: Member, gradient: Part, added: Colocated | None
    ) -> tuple[int, Sequence[Buffer] | Sequence[None]]:
        """Returns the kind of update, and the sum of each copy if it is dense."""
        if isinstance(gradient, IndexedSlices):
            if added is not None:
                self._dense.append(member)
            else:
                self._sparse.append((member, member.total.pending_gradient(gradient)))
            return _ROWS, [None] * len(member.local.buffers)
        self._dense.append(member)
        return (_FIRST if member.total.is_first else _LATER), member.total.memory

    def sums(self) -> dict[Member, Buffer | SparseSum]:
        """Returns the sums; see ``Step``."""
        totals = {state: total for state, _, total in self._additions.totals()}
        rows = {member: totals[pending_gradient.state] for member, pending_gradient in self._sparse}
        dense = {member: member.total.memory[0] for member in self._dense}
        return dense | {member: total for member, total in rows.items() if total is not None}

    def launch(self, then: Callable[[], None]) -> None:
        """Launches the step; see ``Step``."""
        mesh_state = self.devices[0].mesh_state
        with mesh_state.launch_lock, mesh_state.fail_on_partial_write(self.devices):
            for launch in self._launches:
                launch()
            self._additions.launch_out_of_place()
            self._additions.launch_in_place()
            for member in self._dense:
                member.total.added()
            for state, index, total in self._additions.totals():
                state.totals[index] = total
            for member, pending_gradient in self._sparse:
                member.total.added_rows(pending_gradient.state)
            then()


def _launches(
    optimizer: Optimizer,
    kind: int,
    group: Sequence[tuple[list[Buffer], Part, Buffer | None]],
    scalars: tuple[float, ...],
) -> list[Callable[[], None]]:
    """Returns the launches that update copies of one kind on one physical device."""
    kernel, parts = optimizer._kernel, [part for _, part, _ in group]
    if kernel is None:
        return _by_arrays(optimizer, kind, group)
    if kind == _ROWS:
        job = Job([written for written, _, _ in group], parts)
        return [partial(job.run, by_kernel(kernel, scalars))]
    written = [[*row, total] for row, _, total in group if total is not None]
    local, local_scalars = ops.local_update_of(kernel), (int(kind == _FIRST), *scalars)
    job = Job(written, parts)
    return [partial(job.run, by_kernel(local, local_scalars))]


def _by_arrays(
    optimizer: Optimizer, kind: int, group: Sequence[tuple[list[Buffer], Part, Buffer | None]]
) -> list[Callable[[], None]]:
    """Runs a Python rule; returns launches that copy its results and accumulate."""
    job = Job([written for written, _, _ in group], [part for _, part, _ in group])
    ends: list[Callable[[], None]] = [
        partial(job.end, run_python_rule(optimizer._apply, optimizer._slot_names, job))
    ]
    pairs = [
        (total, part) for _, part, total in group if total is not None and type(part) is Buffer
    ]
    if pairs:
        ends.append(_sums(pairs, first=kind == _FIRST))
    return ends


def _sums(pairs: Sequence[tuple[Buffer, Part]], *, first: bool) -> Callable[[], None]:
    """Returns a launch that adds gradients to their sums, or writes them there."""
    job = Job([[total] for total, _ in pairs], [part for _, part in pairs])
    for total, part in pairs:
        dtype = buffer_of(part).dtype
        ops.prepare_pack(job.leader, total.dtype, dtype)
        ops.prepare_accumulate_n(job.leader, total.dtype, dtype)
    return partial(job.run, partial(_add, first=first))


def _add(rows: Sequence[Sequence[Buffer]], device: Device, *, first: bool) -> None:
    totals, gradients = [row[0] for row in rows], [row[1] for row in rows]
    if first:
        ops.pack(totals, gradients, device=device)
    else:
        ops.accumulate_n(totals, [[gradient] for gradient in gradients], device=device)
