"""Pushes mean gradients of a period to the center, updates it, and pulls.

If the center's GPU can access the worker's memory, one launch normalizes, updates and pulls dense
sums by a compiled rule. For sparse sums and Python rules, mean, update and pull are apart. Memory
that the GPU cannot access is copied to the center before, and from it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import NamedTuple

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseSum
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, DType, can_access, copy_over, join_streams
from gradreduce.optim.array_rules import run_python_rule
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.update_plan import Job, Rule, by_kernel, writer_of

from .center import AGNCenter
from .variables import Member

Sum = Buffer | SparseSum  # of a period, on the worker's first device
_Copy = tuple[Device, Buffer, Buffer]  # device that copies, destination, source
_Taken = tuple[Buffer, Buffer, ops.Indices]  # rows, the whole array, their indices


class PushConfig(NamedTuple):
    """Settings of a worker's pushes.

    Attributes:
        period: steps between two pushes; sums are divided by it.
        use_locking: whether a push excludes pushes of other workers.
        gamma: ``distance_scale``, or None.
        task: name of the worker, for messages.
    """

    period: int
    use_locking: bool
    gamma: float | None
    task: str


@dataclass(eq=False)
class DevicePush:
    """Launches and copies of one push on one physical device of the center.

    Attributes:
        leader: its compute queue launches.
        copies_in: copies of the worker's memory to memory that the leader can access.
        reads: launches that read the center and the sums, and write new memory.
        others: devices of all operands.
        jobs: updates of the center, each with a function that returns its rule for given scalars.
        copies_out: copies of the pulled values.
        holds_memory: whether it has temporary memory.
    """

    leader: Device
    copies_in: list[_Copy] = field(default_factory=list)
    reads: list[Callable[[], None]] = field(default_factory=list)
    others: list[Device] = field(default_factory=list)
    jobs: dict[Job, Callable[[Scalars], Rule]] = field(default_factory=dict)
    copies_out: list[_Copy] = field(default_factory=list)
    holds_memory: bool = False

    def new(self, like: Buffer, dtype: DType) -> Buffer:
        """Returns temporary memory of the leader, of the shape of a buffer."""
        self.holds_memory = True
        return self.leader.empty(like.shape, dtype)

    def accessible(self, buffer: Buffer, *, writes: bool = False) -> Buffer:
        """Returns the worker's memory, or a staged copy for the leader to read or to write."""
        self.others.append(buffer.device)
        if can_access(self.leader, buffer):
            return buffer
        staged = self.new(buffer, buffer.dtype)
        if writes:
            self.pull([buffer], [staged])
        else:
            self.copies_in.append((self.leader, staged, buffer))
        return staged

    def pull(self, outs: Sequence[Buffer], values: Sequence[Buffer]) -> None:
        """Plans copies that follow the updates; ``values`` may be longer."""
        pairs = zip(outs, values, strict=False)
        self.copies_out += [(out.device, out, value) for out, value in pairs]


class PushPlan:
    """One push of a worker, with all memory and plans; ``run`` launches it.

    Args:
        center: receives the push; its slots are created here.
        optimizer: of the worker; its slots exist.
        sums: of the variables that have gradients in this period; may be written until ``run``.
        pulled: for the worker's variables, the center at the last pull; for the distance.
        config: settings of the push.

    Attributes:
        members: the variables.
        is_reusable: whether it can run again: it holds no temporary memory.
    """

    def __init__(
        self,
        center: AGNCenter,
        optimizer: Optimizer,
        sums: Mapping[Member, Sum],
        pulled: Mapping[Variable, Variable],
        config: PushConfig,
    ) -> None:
        self.members, self._sums = list(sums), list(sums.values())
        self._version, self._slots_seen = center._version, optimizer._slots.by_name
        self._center, self._optimizer, self._config = center, optimizer, config
        self._rule = optimizer._rule
        # A loaded checkpoint may have had no slots, and can be loaded at any time.
        self._rows = center._prepare(optimizer, [member.center for member in sums])
        self._pulled = pulled
        # For each device of the worker, rows of sums to sort, and rows of ``pulled`` to gather.
        self._merges: dict[Device, list[tuple[Buffer, Buffer, ops.Segments]]] = {}
        self._takes: dict[Device, list[_Taken]] = {}
        groups: dict[int, list[tuple[Member, Sum]]] = {}
        for member, total in sums.items():
            groups.setdefault(member.center.devices[0].physical, []).append((member, total))
        self._pushes = [self._planned(group) for group in groups.values()]
        self.is_reusable = not any(push.holds_memory for push in self._pushes)
        self._before = [
            ops.segment_sum_command(*zip(*rows, strict=True), device=device)
            for device, rows in self._merges.items()
        ]
        self._before += [_take(device, rows) for device, rows in self._takes.items()]

    # -- plans ------------------------------------------------------------------------------------

    def _planned(self, group: Sequence[tuple[Member, Sum]]) -> DevicePush:
        """Plans the push of variables whose center copies are on one physical device."""
        push, slots = DevicePush(group[0][0].center.devices[0]), self._optimizer._slots
        fused: list[ops.Update] = []  # what one launch writes, and the sum
        apart: list[tuple[list[Buffer], Part]] = []  # what an update writes, and the mean
        means: list[tuple[Buffer, Buffer]] = []  # and the sums that they are computed from
        for (member, total), (pushed, indices) in zip(
            group, self._plan_sums(push, group), strict=True
        ):
            written, (mine, *others) = self._rows[member.center], slots.rows(member.local)
            pulled = mine[: 2 if slots.wants_master(member.local) else 1]
            if self._rule is not None and isinstance(total, Buffer):
                copies = [push.accessible(each, writes=True) for each in pulled]
                fused.append([*written, *copies, pushed])
            else:
                mean = push.new(pushed, member.local.dtype)
                means.append((mean, pushed))
                whole = member.center.shape
                part = mean if indices is None else IndexedSlices.of(mean, indices, whole)
                apart.append((written, part))
                push.pull(pulled, written)
            for row in others:
                push.pull(row[: len(pulled)], mine)
            if self._config.gamma is not None:
                push.pull(self._pulled[member.local].buffers, mine)
        if fused:
            self._plan_fused(push, fused)
        if apart:
            self._plan_apart(push, apart, means)
        return push

    def _plan_sums(
        self, push: DevicePush, group: Sequence[tuple[Member, Sum]]
    ) -> list[tuple[Buffer, ops.Indices | None]]:
        """Plans accessible sums, scaled by the distance; returns them, and the indices of rows."""
        gamma = self._config.gamma
        found: list[tuple[Buffer, ops.Indices | None]] = []
        scalings: list[tuple[Buffer, Buffer, Buffer, Buffer]] = []
        gathers: list[_Taken] = []
        for member, total in group:
            center = member.center.buffers[0]
            push.others.append(center.device)
            rows, indices = (total, None) if isinstance(total, Buffer) else self._merged(total)
            pushed = push.accessible(rows)
            if gamma is not None:
                now, then = center, self._pulled[member.local].buffers[0]
                if indices is not None:
                    home, whole = then.device, then
                    now, then = push.new(rows, center.dtype), home.empty(rows.shape, whole.dtype)
                    gathers.append((now, center, indices))
                    self._takes.setdefault(home, []).append((then, whole, indices))
                scaled = push.new(rows, rows.dtype)
                scalings.append((scaled, pushed, now, push.accessible(then)))
                ops.prepare_distance_scale(push.leader, center.dtype)
                pushed = scaled
            found.append((pushed, indices))
        if gathers:
            push.reads.append(_take(push.leader, gathers))
        if gamma is not None:
            columns = [list(column) for column in zip(*scalings, strict=True)]
            push.reads.append(
                partial(ops.distance_scale, *columns, gamma=gamma, device=push.leader)
            )
        return found

    def _merged(self, total: SparseSum) -> tuple[Buffer, ops.Indices]:
        """Returns memory for the rows of a sum in index order, filled by ``run``."""
        plan, _ = ops.merged_row_index([total.slots], mean=False)
        device = total.values.device
        rows = device.empty((plan.num_segments, *total.values.shape[1:]), total.values.dtype)
        ops.prepare_segment_sum(device, rows.dtype, rows.dtype)
        self._merges.setdefault(device, []).append((rows, total.rows, plan))
        return rows, plan.indices

    def _plan_fused(self, push: DevicePush, rows: Sequence[ops.Update]) -> None:
        """Plans one launch for mean, update and pull of dense sums."""
        assert self._rule is not None
        kernel, period = ops.RULE_KERNELS[self._rule, "global"], self._config.period
        for row in rows:
            push.leader.prepare(kernel, kernel.template_of(row))
        job = Job([row[:-1] for row in rows], [row[-1] for row in rows], push.others)
        writer = writer_of(push.leader, [row[:-1] for row in rows])
        push.jobs[job] = lambda scalars: by_kernel(kernel, (period, *scalars), writer)

    def _plan_apart(
        self,
        push: DevicePush,
        updates: Sequence[tuple[list[Buffer], Part]],
        means: Sequence[tuple[Buffer, Buffer]],
    ) -> None:
        """Plans separate launches for mean and update: of sparse sums, and for Python rules."""
        leader, rule = push.leader, self._rule
        apply, names = self._optimizer._apply, self._optimizer._slot_names
        for mean, pushed in means:
            ops.prepare_pack(leader, mean.dtype, pushed.dtype)
        outs, sums = (list(column) for column in zip(*means, strict=True))
        by = float(self._config.period)
        push.reads.append(partial(ops.pack, outs, sums, divisor=by, device=leader))
        job = Job([written for written, _ in updates], [part for _, part in updates])
        if rule is None:
            push.jobs[job] = lambda _: run_python_rule(apply, names, job)
            return
        kernel = ops.RULE_KERNELS[rule, "plain"]
        for written, _ in updates:
            leader.prepare(kernel, (written[0].dtype.name, written[-1].dtype.name))
        push.jobs[job] = lambda scalars: by_kernel(kernel, scalars)

    # -- the communication ------------------------------------------------------------------------

    def is_valid_for(self, sums: Mapping[Member, Sum]) -> bool:
        """Whether it can run again for these sums: only their values have changed."""
        optimizer = self._optimizer
        if self._center._version != self._version or optimizer._rule is not self._rule:
            return False
        if optimizer._slots.by_name is not self._slots_seen:
            return False
        return len(sums) == len(self._sums) and all(map(is_, self._sums, sums.values()))

    def run(self, scalars: Scalars, then: Callable[[], None]) -> None:
        """Launches the push. If it fails before the center is changed, state is unchanged.

        Args:
            scalars: of the rule.
            then: called after the launches; an error in it means that the push failed part-way.

        Raises:
            CollectiveError: an earlier push has updated the center only partly.
            StalePushError: a checkpoint was loaded after the push was planned.
        """
        for launch in self._before:
            launch()
        for push in self._pushes:
            for copy in push.copies_in:
                copy_over(*copy)
        # A Python rule reads the center and writes it later.
        locks = self._config.use_locking or self._rule is None
        with self._center._pushing(use_locking=locks):
            self._center._check_version(self._version)
            self._center._check_usable()
            for push in self._pushes:
                if push.reads:
                    join_streams(push.leader, push.others)
                for read in push.reads:
                    read()
            rules = {
                job: rule_of(scalars) for push in self._pushes for job, rule_of in push.jobs.items()
            }
            self._launch(rules, then)

    def _launch(self, rules: Mapping[Job, Rule], then: Callable[[], None]) -> None:
        mesh_state = self._center.devices[0].mesh_state
        failed = partial(self._center._mark_push_failed, self._config.task)
        steps = [self._pushes] if self._config.use_locking else [[each] for each in self._pushes]
        with ExitStack() as stack:
            for pushes in steps:
                with mesh_state.launch_lock:
                    self._center._check_version(self._version)
                    jobs = [job for push in pushes for job in push.jobs]
                    for job in jobs if self._rule is not None else ():
                        job.begin()
                    if pushes is steps[0]:  # from here on the center changes
                        stack.enter_context(mesh_state.on_partial_failure(failed))
                    for job in jobs:
                        job.end(rules[job])
                    for copy in [copy for push in pushes for copy in push.copies_out]:
                        copy_over(*copy)
            then()


def _take(device: Device, rows: Sequence[_Taken]) -> Callable[[], None]:
    """Returns a launch that gathers rows of arrays."""
    for out, _, _ in rows:
        ops.prepare_take_rows(device, out.dtype)
    return ops.take_rows_command(*zip(*rows, strict=True), device=device)
