"""Pushes mean gradients of a period to the center, updates it, and pulls.

If the center's GPU can access the worker's memory, one launch normalizes, updates and pulls.
Otherwise sums are copied to the center before, and the pulled values back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gradreduce import ops
from gradreduce.accumulator.state import SparseSum
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    Device,
    LaunchBatch,
    can_access,
    copy_over,
    fork_streams,
    join_streams,
)
from gradreduce.optim.array_rules import run_python_rule
from gradreduce.optim.optimizer import Optimizer
from gradreduce.optim.update_plan import Job, Rule, by_kernel

from .center import AGNCenter
from .variables import Member

Sum = Buffer | SparseSum  # of a period, on the worker's first device
# Output, sum, current center and center at the last pull: see ``ops.distance_scale``.
_Scaling = tuple[Buffer, Buffer, Buffer, Buffer]
_Copy = tuple[Device, Buffer, Buffer]  # device that copies, destination, source


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
        takes: launches that gather rows from the worker's memory.
        copies_in: copies of the worker's memory to memory that the leader can access.
        reads: launches that read the center into new memory.
        others: devices of all operands.
        begins: launches that gather rows of the center, together with the updates.
        updates: launches that change the center, given the scalars of the rule.
        copies_out: copies of the pulled values.
        is_staged: whether it has staging memory for what the leader cannot access.
    """

    leader: Device
    takes: list[Callable[[], None]] = field(default_factory=list)
    copies_in: list[_Copy] = field(default_factory=list)
    reads: list[Callable[[], None]] = field(default_factory=list)
    others: list[Device] = field(default_factory=list)
    begins: list[Callable[[], None]] = field(default_factory=list)
    updates: list[Callable[[tuple[float, ...]], None]] = field(default_factory=list)
    copies_out: list[_Copy] = field(default_factory=list)
    is_staged: bool = False

    def readable(self, buffer: Buffer) -> Buffer:
        """Returns the worker's memory, or a staged copy that the leader can read."""
        self.others.append(buffer.device)
        if can_access(self.leader, buffer):
            return buffer
        self.is_staged = True
        staged = self.leader.empty(buffer.shape, buffer.dtype)
        self.copies_in.append((self.leader, staged, buffer))
        return staged

    def writable(self, buffer: Buffer) -> Buffer:
        """Returns the worker's memory, or staging memory that the leader can write."""
        self.others.append(buffer.device)
        if can_access(self.leader, buffer):
            return buffer
        self.is_staged = True
        staged = self.leader.empty(buffer.shape, buffer.dtype)
        self.copies_out.append((buffer.device, buffer, staged))
        return staged

    def fenced(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Orders a launch between the streams of all devices whose memory it uses.

        The result does not refer to this object: a reference cycle would keep its memory until the
        garbage collector runs.
        """
        return partial(_fenced, self.leader, self.others, launch)


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
        self.members, self._places = list(sums), list(sums.values())
        self._version, self._slots_seen = center._version, optimizer._slots.by_name
        self._center, self._optimizer, self._config = center, optimizer, config
        self._kernel = optimizer._kernel
        # A loaded checkpoint may have had no slots, and can be loaded at any time.
        self._rows = center._prepare(optimizer, [member.center for member in sums])
        self._slots = center._join(optimizer)
        self._pulled = pulled
        self._merges: dict[Device, list[tuple[Buffer, Buffer, ops.Segments]]] = {}
        self._pushes: list[DevicePush] = []
        self._jobs: list[tuple[DevicePush, Job]] = []  # of a Python rule
        groups: dict[int, list[tuple[Member, Sum]]] = {}
        for member, total in sums.items():
            groups.setdefault(member.center.devices[0].physical, []).append((member, total))
        for group in groups.values():
            push = DevicePush(group[0][0].center.devices[0])
            self._pushes.append(push)
            fused = [(m, s) for m, s in group if isinstance(s, Buffer) and optimizer._kernel]
            if fused:
                self._plan_fused(push, fused)
            if len(fused) < len(group):
                self._plan_by_parts(push, [pair for pair in group if pair not in fused])
            for member, _ in group:
                self._plan_copies(push, member)
        self.is_reusable = not any(push.is_staged or push.reads for push in self._pushes)
        self._before = [_merge(device, rows) for device, rows in self._merges.items()]
        self._before += [take for push in self._pushes for take in push.takes]
        for push in self._pushes:
            push.others[:] = dict.fromkeys(push.others)

    # -- plans ------------------------------------------------------------------------------------

    def _plan_fused(self, push: DevicePush, group: Sequence[tuple[Member, Sum]]) -> None:
        """Plans one launch for all dense sums, if the rule is a kernel."""
        assert self._optimizer._kernel is not None
        kernel = ops.global_update_of(self._optimizer._kernel)
        rows: list[ops.Update] = []
        scalings: list[_Scaling] = []
        for member, total in group:
            assert isinstance(total, Buffer)
            changed = self._rows[member.center]
            mine = self._optimizer._slots.rows(member.local)[0]
            pushed = push.readable(total)
            if self._config.gamma is not None:
                scaled = push.leader.empty(total.shape, total.dtype)
                then = push.readable(self._pulled[member.local].buffers[0])
                scalings.append((scaled, pushed, changed[0], then))
                pushed = scaled
            copies = [push.writable(each) for each in mine[: self._num_copies(member)]]
            rows.append([*changed, *copies, pushed])
            push.others.append(changed[0].device)
            ops.prepare_rule(
                kernel, push.leader, member.local.dtype, self._slots.state_dtype(member.center)
            )
        self._scale(push, scalings)
        written = [row[:-1] for row in rows]
        kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in written}
        writer = LaunchBatch(push.leader, written) if len(kinds) == 1 else None

        period, leader, others = self._config.period, push.leader, push.others

        # No reference to the DevicePush: see ``fenced``.
        def update(scalars: tuple[float, ...]) -> None:
            join_streams(leader, others)
            ops.update_rows(kernel, rows, (period, *scalars), leader, writer=writer)
            fork_streams(leader, others)

        push.updates.append(update)

    def _plan_by_parts(self, push: DevicePush, group: Sequence[tuple[Member, Sum]]) -> None:
        """Plans separate launches for mean, update and pull: sparse sums and Python rules."""
        parts = self._plan_means(push, group)
        members = [member for member, _ in group]
        job = Job([self._rows[member.center] for member in members], parts)
        for member in members:  # copied from the center: no launch writes the worker's memory
            changed = self._rows[member.center]
            mine = self._optimizer._slots.rows(member.local)[0]
            for index in range(self._num_copies(member)):
                push.copies_out.append((mine[index].device, mine[index], changed[index]))
        kernel = self._optimizer._kernel
        if kernel is None:
            self._jobs.append((push, job))
            return
        for member in members:
            state = self._slots.state_dtype(member.center)
            ops.prepare_rule(kernel, push.leader, member.center.dtype, state)
        push.begins.append(job.begin)
        push.updates.append(lambda scalars: job.end(by_kernel(kernel, scalars)))

    def _plan_means(self, push: DevicePush, group: Sequence[tuple[Member, Sum]]) -> list[Part]:
        """Plans the mean gradient of each variable, on the center's device and in its dtype."""
        divided: list[tuple[Buffer, Buffer]] = []
        scalings: list[_Scaling] = []
        parts: list[Part] = []
        gather = _RowGather()
        for member, total in group:
            center = member.center.buffers[0]
            rows, indices = (total, None) if isinstance(total, Buffer) else self._merged(total)
            pushed = push.readable(rows)
            if self._config.gamma is not None:
                scaled = push.leader.empty(rows.shape, rows.dtype)
                now, then = center, self._pulled[member.local].buffers[0]
                if indices is not None:
                    now = gather.rows(push.leader, center, indices)
                    then = gather.rows(then.device, then, indices)
                scalings.append((scaled, pushed, now, push.readable(then)))
                pushed = scaled
            mean = push.leader.empty(rows.shape, center.dtype)
            divided.append((mean, pushed))
            push.others.append(center.device)
            parts.append(mean if indices is None else IndexedSlices.of(mean, indices, center.shape))
        push.takes += gather.before(push.leader)
        push.reads += [push.fenced(take) for take in gather.behind(push.leader)]
        self._scale(push, scalings)
        for mean, pushed in divided:
            ops.prepare_pack(push.leader, mean.dtype, pushed.dtype)
        outs, sums = (list(column) for column in zip(*divided, strict=True))
        by = float(self._config.period)
        divide = partial(ops.pack, outs, sums, divisor=by, device=push.leader)
        push.reads.append(push.fenced(divide))
        return parts

    def _merged(self, total: SparseSum) -> tuple[Buffer, ops.Indices]:
        """Returns memory for the rows of a sum in index order, filled by ``run``."""
        plan, _ = ops.merged_row_index([total.slots], mean=False)
        device = total.values.device
        rows = device.empty((plan.num_segments, *total.values.shape[1:]), total.values.dtype)
        ops.prepare_segment_sum(device, rows.dtype, rows.dtype)
        self._merges.setdefault(device, []).append((rows, total.rows, plan))
        return rows, plan.indices

    def _scale(self, push: DevicePush, rows: Sequence[_Scaling]) -> None:
        """Plans one launch that scales sums down where the center has moved."""
        if not rows or self._config.gamma is None:
            return
        for _, _, now, _ in rows:
            ops.prepare_distance_scale(push.leader, now.dtype)
        columns = [list(column) for column in zip(*rows, strict=True)]
        scale = partial(ops.distance_scale, *columns, gamma=self._config.gamma, device=push.leader)
        push.reads.append(push.fenced(scale))

    def _num_copies(self, member: Member) -> int:
        """Returns the number of buffers to pull: the variable, and any master."""
        return 2 if self._slots.wants_master(member.center) else 1

    def _plan_copies(self, push: DevicePush, member: Member) -> None:
        """Plans copies from the worker's first device to its others, and to ``pulled``."""
        first, *others = self._optimizer._slots.rows(member.local)
        for row in others:
            for index in range(self._num_copies(member)):
                push.copies_out.append((row[index].device, row[index], first[index]))
        if self._config.gamma is not None:
            pulled = self._pulled[member.local].buffers[0]
            push.copies_out.append((pulled.device, pulled, first[0]))

    # -- the communication ------------------------------------------------------------------------

    def is_valid_for(self, sums: Mapping[Member, Sum]) -> bool:
        """Whether it can run again for these sums: only their values have changed."""
        if self._center._version != self._version:
            return False
        if self._optimizer._slots.by_name is not self._slots_seen:
            return False
        if self._optimizer._kernel is not self._kernel:  # use_nesterov may have changed
            return False
        pairs = zip(self._places, sums.values(), strict=False)
        return len(sums) == len(self._places) and all([one is two for one, two in pairs])

    def run(self, scalars: Sequence[float], then: Callable[[], None]) -> None:
        """Launches the push. If it fails before the center is changed, state is unchanged.

        Args:
            scalars: of the rule.
            then: called after the launches; an error in it means that the push failed part-way.

        Raises:
            CollectiveError: an earlier push has updated the center only partly.
        """
        for launch in self._before:
            launch()
        for push in self._pushes:
            for mover, to, of in push.copies_in:
                copy_over(mover, to, of)
        # A Python rule reads the center and writes it later.
        with self._center._pushing(use_locking=self._config.use_locking or bool(self._jobs)):
            self._center._check_usable(self._version)
            for push in self._pushes:
                for read in push.reads:
                    read()
            for push, job in self._jobs:
                job.begin()
                rule = run_python_rule(self._optimizer._apply, self._optimizer._slot_names, job)
                push.updates.append(partial(_end, job, rule))
            self._launch(tuple(scalars), then)

    def _launch(self, scalars: tuple[float, ...], then: Callable[[], None]) -> None:
        mesh_state = self._center.devices[0].mesh_state
        failed = partial(self._center._mark_push_failed, self._config.task)
        steps = [self._pushes] if self._config.use_locking else [[each] for each in self._pushes]
        with ExitStack() as stack:
            for pushes in steps:
                with mesh_state.launch_lock:
                    for begin in [begin for push in pushes for begin in push.begins]:
                        begin()
                    if pushes is steps[0]:  # from here on the center changes
                        stack.enter_context(mesh_state.on_partial_failure(failed))
                    for push in pushes:
                        _updated(push, scalars)
            then()


def _end(job: Job, rule: Rule, scalars: tuple[float, ...]) -> None:
    job.end(rule)


def _merge(
    device: Device, rows: Sequence[tuple[Buffer, Buffer, ops.Segments]]
) -> Callable[[], None]:
    """Returns a launch that sorts rows of sums by index, one for each device."""
    outs, values, plans = zip(*rows, strict=True)
    return ops.segment_sum_command(outs, values, plans, device=device)


def _fenced(leader: Device, others: Sequence[Device], launch: Callable[[], None]) -> None:
    join_streams(leader, others)
    launch()
    fork_streams(leader, others)


def _updated(push: DevicePush, scalars: tuple[float, ...]) -> None:
    for update in push.updates:
        update(scalars)
    for mover, to, of in push.copies_out:
        copy_over(mover, to, of)


class _RowGather:
    """Gathers rows of arrays on the devices of the arrays."""

    def __init__(self) -> None:
        self._of: dict[Device, list[tuple[Buffer, Buffer, ops.Indices]]] = {}

    def rows(self, device: Device, whole: Buffer, indices: ops.Indices) -> Buffer:
        """Returns new memory for rows, filled by the launches of the other two methods."""
        out = device.empty((indices.size, *whole.shape[1:]), whole.dtype)
        ops.prepare_take_rows(device, whole.dtype)
        self._of.setdefault(device, []).append((out, whole, indices))
        return out

    def before(self, leader: Device) -> list[Callable[[], None]]:
        """Returns launches that gather rows on devices other than the leader."""
        return [self._ready(device) for device in self._of if device is not leader]

    def behind(self, leader: Device) -> list[Callable[[], None]]:
        """Returns launches that gather rows on the leader."""
        return [self._ready(device) for device in self._of if device is leader]

    def _ready(self, device: Device) -> Callable[[], None]:
        outs, wholes, indices = zip(*self._of[device], strict=True)
        return ops.take_rows_command(outs, wholes, indices, device=device)
