"""Local steps of a worker: update variables and accumulate gradients in one launch.

This extends the updates of ``Optimizer`` by the sum of each variable. A sparse gradient updates its
rows by the plain rule, and its rows are added to those of the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.accumulator.state import Additions, PendingGradient
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device
from gradreduce.optim.gradient_inputs import Colocated, made_dense
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import Slots
from gradreduce.optim.update_plan import Job, Plan, by_kernel

from .push import Sum
from .variables import Member


class LocalPlan(Plan):
    """Reusable plan for local steps of the same variables with dense gradients.

    Args:
        optimizer: its rule is a kernel; its slots of the variables exist.
        dense: the variables, and the memory of their sums.
        others: other memory that gradients must not overlap. The plan keeps it alive, so that no
            gradient can be allocated there while the plan is in use.
        version: of the center when ``others`` was collected.

    Attributes:
        members: the variables.
        dense: the memory of their sums.
        version: of the center.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dense: Mapping[Member, tuple[Buffer, ...]],
        others: Sequence[Buffer],
        version: int,
    ) -> None:
        variables = [member.local for member in dense]
        super().__init__(variables, optimizer._slots, optimizer._rule, list(dense.values()))
        self.members, self.dense = list(dense), dense
        self.version, self._others = version, others
        self._changes, self._seen = self.members[0].total.changes, -1
        self._first: bool | None = None
        self.ranges = ops.Ranges([*(each for row in self.written for each in row), *others])

    def is_valid_for(
        self, variables: Sequence[Variable], slots: Slots, rule: ops.UpdateRule | None
    ) -> bool:
        """Whether it is of these variables, slots and rule, and can run with dense gradients."""
        return super().is_valid_for(variables, slots, rule) and self.first is not None

    @property
    def first(self) -> bool | None:
        """Whether gradients are written to the sums, not added; None if neither works."""
        if self._seen != self._changes.count:
            # Gradients may have been allocated in memory that was freed.
            fits = all([member.total.is_in(memory) for member, memory in self.dense.items()])
            firsts = {member.total.is_empty for member in self.members}
            self._first = firsts.pop() if fits and len(firsts) == 1 else None
            self._seen = self._changes.count
        return self._first


@dataclass(frozen=True)
class LocalStep:
    """A local step, with all memory and plans; ``launch`` runs it.

    Attributes:
        devices: of the variables.
        updates: launches.
        dense: sums that are dense afterwards: memory on each device. Those that were may be absent.
        sparse: gradients that are added to sums of rows.
        additions: of those; or None.
    """

    devices: Sequence[Device]
    updates: Sequence[Callable[[], None]]
    dense: Mapping[Member, tuple[Buffer, ...]]
    sparse: Mapping[Member, PendingGradient] = field(default_factory=dict)
    additions: Additions | None = None

    def sums(self) -> dict[Member, Sum]:
        """Returns the sums on the first device that ``launch`` writes to other memory."""
        found: dict[Member, Sum] = {member: memory[0] for member, memory in self.dense.items()}
        if self.additions is not None:
            totals = {each.state: each.total for each in self.additions.sums}
            for member, gradient in self.sparse.items():
                found[member] = totals[gradient.state]
        return found

    def launch(self, then: Callable[[], None]) -> None:
        """Updates all variables and counts the step; if it fails part-way, the devices fail.

        Args:
            then: called after the launches to count the step.
        """
        mesh_state = self.devices[0].mesh_state
        with mesh_state.launch_lock, mesh_state.fail_on_partial_write(self.devices):
            for update in self.updates:
                update()
            if self.additions is not None:
                self.additions.launch_out_of_place()
                self.additions.launch_in_place()
                for each in self.additions.sums:
                    each.state.totals[0] = each.total
            for member, memory in self.dense.items():
                member.total.added(memory)
            for member, gradient in self.sparse.items():
                member.total.added_rows(gradient.state)
            then()


def planned_step(plan: LocalPlan, gradients: Sequence[Part], scalars: Scalars) -> LocalStep:
    """Returns a step of a valid plan.

    Args:
        plan: of its variables.
        gradients: dense, for each copy of each variable.
        scalars: of the rule.
    """
    assert plan.rule is not None
    kernel, scalars = ops.RULE_KERNELS[plan.rule, "local"], (int(bool(plan.first)), *scalars)
    updates = []
    for job, writer in plan.jobs(gradients):
        updates.append(partial(job.run, by_kernel(kernel, scalars, writer)))
    return LocalStep(plan.devices, updates, plan.dense if plan.first else {})


def local_step(
    optimizer: Optimizer,
    members: Sequence[Member],
    parts: Sequence[Part],
    scalars: Scalars,
) -> LocalStep:
    """Returns a step with gradients of any kind.

    Args:
        optimizer: of the rule; its slots of the variables exist.
        members: the variables.
        parts: for each copy of each variable, a colocated gradient.
        scalars: of the rule.
    """
    left = iter(parts)
    gradients = [tuple(islice(left, len(member.local.devices))) for member in members]
    rule, additions = optimizer._rule, _dense_additions(members, gradients)
    dense: dict[Member, tuple[Buffer, ...]] = {}
    sparse: dict[Member, PendingGradient] = {}
    updates: _Groups = defaultdict(lambda: ([], []))
    sums: _Groups = defaultdict(lambda: ([], []))
    for member, colocated in zip(members, gradients, strict=True):
        rows, added = optimizer._slots.rows(member.local), additions.get(member, colocated)
        first = member.total.is_empty
        if isinstance(added[0], IndexedSlices):
            sparse[member] = member.total.pending_gradient(added[0])
            _group(updates, None, rows, colocated)
            continue
        memory = dense[member] = member.total.as_arrays()
        if rule is not None and added is colocated:  # one launch for both
            rows = [[*row, total] for row, total in zip(rows, memory, strict=True)]
            _group(updates, first, rows, colocated)
        else:
            _group(updates, None, rows, colocated)
            _group(sums, first, [[total] for total in memory], added)
    launches = []
    for (_, kind), (written, parts) in updates.items():
        job = Job(written, parts)
        if rule is None or kind is None:
            launches.append(optimizer._ready(job, scalars, None))
        else:
            kernel = ops.RULE_KERNELS[rule, "local"]
            launches.append(partial(job.run, by_kernel(kernel, (int(kind), *scalars))))
    launches += [_sum(Job(*group), first=bool(kind)) for (_, kind), group in sums.items()]
    devices = [copy.device for member in members for copy in member.local.buffers]
    return LocalStep(devices, launches, dense, sparse, SPARSE.additions(list(sparse.values())))


# By physical device, and whether gradients are written to the sums, not added (None: the launch
# does not write sums): what is written, and the gradients.
_Groups = defaultdict[tuple[int, bool | None], tuple[list[list[Buffer]], list[Part]]]


def _group(
    groups: _Groups, kind: bool | None, rows: Sequence[list[Buffer]], parts: Sequence[Part]
) -> None:
    for row, part in zip(rows, parts, strict=True):
        written, gradients = groups[row[0].device.physical, kind]
        written.append(row)
        gradients.append(part)


def _dense_additions(
    members: Sequence[Member], gradients: Sequence[Colocated]
) -> dict[Member, Colocated]:
    """Converts sparse gradients of dense sums to dense ones."""
    pairs = [
        (member, colocated)
        for member, colocated in zip(members, gradients, strict=True)
        if isinstance(colocated[0], IndexedSlices) and member.total.is_dense
    ]
    dense = made_dense([each for _, each in pairs], [member.local for member, _ in pairs])
    return {member: each for (member, _), each in zip(pairs, dense, strict=True)}


def _sum(job: Job, *, first: bool) -> Callable[[], None]:
    """Returns a launch that adds gradients to their sums, or writes them there."""

    def add(rows: Sequence[ops.Update], device: Device) -> None:
        totals, gradients = [row[0] for row in rows], [row[1] for row in rows]
        if first:
            ops.pack(totals, gradients, device=device)
        else:
            ops.accumulate_n(totals, [[gradient] for gradient in gradients], device=device)

    for total, gradient in job.updates:
        ops.prepare_pack(job.leader, total.dtype, gradient.dtype)
        ops.prepare_accumulate_n(job.leader, total.dtype, gradient.dtype)
    return partial(job.run, add)
