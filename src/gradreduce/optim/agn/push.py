"""A communication: the mean of a period goes to the centre, which is updated and pulled.

Where the centre reaches the worker's memory (the same GPU, or a peer) one launch does all of it:
normalise, update, pull. Elsewhere sums are copied there before, and what it pulled back afterwards.
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

__all__ = ["PushConfig", "PushPlan", "Sum"]

Sum = Buffer | SparseSum  # of a period, on the worker's first device
# Out, sum, what the centre is and what it was: see ``ops.distance_scale``.
_Scaling = tuple[Buffer, Buffer, Buffer, Buffer]
_Move = tuple[Device, Buffer, Buffer]  # who copies, where to, from where


class PushConfig(NamedTuple):
    """How a worker communicates.

    Attributes:
        period: steps between two pushes: what sums are divided by.
        use_locking: whether no other worker pushes meanwhile.
        gamma: of the distance scaling; None: there is none.
        task: who the worker is, for messages.
    """

    period: int
    use_locking: bool
    gamma: float | None
    task: str


@dataclass(eq=False)
class DevicePush:
    """What one communication does on one physical device of the centre.

    Attributes:
        leader: whose compute queue launches.
        takes: launches that take rows out of the worker's memory.
        inward: copies of the worker's memory to where the leader reaches it.
        looks: launches that read the centre, into new memory.
        others: devices of all operands.
        begins: launches that take rows of the centre out, in one step with the updates.
        updates: launches that change the centre, given the scalars of the rule.
        outward: copies of what was pulled.
        is_staged: whether there is memory for what the leader does not reach.
    """

    leader: Device
    takes: list[Callable[[], None]] = field(default_factory=list)
    inward: list[_Move] = field(default_factory=list)
    looks: list[Callable[[], None]] = field(default_factory=list)
    others: list[Device] = field(default_factory=list)
    begins: list[Callable[[], None]] = field(default_factory=list)
    updates: list[Callable[[tuple[float, ...]], None]] = field(default_factory=list)
    outward: list[_Move] = field(default_factory=list)
    is_staged: bool = False

    def near(self, buffer: Buffer) -> Buffer:
        """Memory of the worker where the leader reads it."""
        self.others.append(buffer.device)
        if can_access(self.leader, buffer):
            return buffer
        self.is_staged = True
        staged = self.leader.empty(buffer.shape, buffer.dtype)
        self.inward.append((self.leader, staged, buffer))
        return staged

    def into(self, buffer: Buffer) -> Buffer:
        """Where the leader writes what belongs to memory of the worker."""
        self.others.append(buffer.device)
        if can_access(self.leader, buffer):
            return buffer
        self.is_staged = True
        staged = self.leader.empty(buffer.shape, buffer.dtype)
        self.outward.append((buffer.device, buffer, staged))
        return staged

    def fenced(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A launch behind and in front of all whose memory it touches.

        It does not know this object: the memory of what knows itself is free only when the garbage
        collector has come by.
        """
        return partial(_fenced, self.leader, self.others, launch)


class PushPlan:
    """One communication of a worker: has its memory and its plans, and is not launched yet.

    Args:
        center: that it goes to; its slots exist.
        optimizer: of the worker; its slots exist.
        sums: of the variables that a gradient reached in the period; they may be written until
            ``run``.
        pulled: of the worker's variables what the centre was at the last pull; for the distance.
        config: see there.

    Attributes:
        members: the variables.
        is_kept: whether it may be run again: it holds no memory that is wanted elsewhere meanwhile.
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
        self._version, self._mine = center.version, optimizer._slots.by_name
        self._center, self._optimizer, self._config = center, optimizer, config
        self._kernel = optimizer._kernel
        # A checkpoint may have had no slots, and may be loaded at any moment.
        self._rows = center.prepare(optimizer, [member.center for member in sums])
        self._slots = center.join(optimizer)
        self._pulled = pulled
        self._merges: dict[Device, list[tuple[Buffer, Buffer, ops.Segments]]] = {}
        self._shares: list[DevicePush] = []
        self._jobs: list[tuple[DevicePush, Job]] = []  # of a rule on arrays
        groups: dict[int, list[tuple[Member, Sum]]] = {}
        for member, total in sums.items():
            groups.setdefault(member.center.devices[0].physical, []).append((member, total))
        for group in groups.values():
            share = DevicePush(group[0][0].center.devices[0])
            self._shares.append(share)
            fused = [(m, s) for m, s in group if isinstance(s, Buffer) and optimizer._kernel]
            if fused:
                self._plan_fused(share, fused)
            if len(fused) < len(group):
                self._plan_by_parts(share, [pair for pair in group if pair not in fused])
            for member, _ in group:
                self._plan_copies(share, member)
        self.is_kept = not any(share.is_staged or share.looks for share in self._shares)
        self._before = [_merge(device, rows) for device, rows in self._merges.items()]
        self._before += [take for share in self._shares for take in share.takes]
        for share in self._shares:
            share.others[:] = dict.fromkeys(share.others)

    # -- plans ------------------------------------------------------------------------------------

    def _plan_fused(self, share: DevicePush, group: Sequence[tuple[Member, Sum]]) -> None:
        """Dense sums, by a kernel: one launch for all of them."""
        assert self._optimizer._kernel is not None
        kernel = ops.global_update_of(self._optimizer._kernel)
        rows: list[ops.Update] = []
        scalings: list[_Scaling] = []
        for member, total in group:
            assert isinstance(total, Buffer)
            changed = self._rows[member.center]
            mine = self._optimizer._slots.rows(member.local)[0]
            near = share.near(total)
            if self._config.gamma is not None:
                scaled = share.leader.empty(total.shape, total.dtype)
                then = share.near(self._pulled[member.local].buffers[0])
                scalings.append((scaled, near, changed[0], then))
                near = scaled
            copies = [share.into(each) for each in mine[: self._num_copies(member)]]
            rows.append([*changed, *copies, near])
            share.others.append(changed[0].device)
            ops.prepare_rule(
                kernel, share.leader, member.local.dtype, self._slots.state_dtype(member.center)
            )
        self._scale(share, scalings)
        written = [row[:-1] for row in rows]
        kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in written}
        writer = LaunchBatch(share.leader, written) if len(kinds) == 1 else None

        period, leader, others = self._config.period, share.leader, share.others

        # It does not know the visit: see ``fenced``.
        def update(scalars: tuple[float, ...]) -> None:
            join_streams(leader, others)
            ops.update_unchecked(kernel, rows, (period, *scalars), leader, writer=writer)
            fork_streams(leader, others)

        share.updates.append(update)

    def _plan_by_parts(self, share: DevicePush, group: Sequence[tuple[Member, Sum]]) -> None:
        """Rows, and rules on arrays: mean, update and pull by launches of their own."""
        parts = self._plan_means(share, group)
        members = [member for member, _ in group]
        job = Job([self._rows[member.center] for member in members], parts)
        for member in members:  # from the centre itself: no launch writes the worker's memory
            changed = self._rows[member.center]
            mine = self._optimizer._slots.rows(member.local)[0]
            for index in range(self._num_copies(member)):
                share.outward.append((mine[index].device, mine[index], changed[index]))
        kernel = self._optimizer._kernel
        if kernel is None:
            self._jobs.append((share, job))
            return
        for member in members:
            state = self._slots.state_dtype(member.center)
            ops.prepare_rule(kernel, share.leader, member.center.dtype, state)
        share.begins.append(job.begin)
        share.updates.append(lambda scalars: job.end(by_kernel(kernel, scalars)))

    def _plan_means(self, share: DevicePush, group: Sequence[tuple[Member, Sum]]) -> list[Part]:
        """For each variable the mean of its gradients near the centre, of its dtype."""
        divided: list[tuple[Buffer, Buffer]] = []
        scalings: list[_Scaling] = []
        parts: list[Part] = []
        taken = _Taken()
        for member, total in group:
            center = member.center.buffers[0]
            rows, indices = (total, None) if isinstance(total, Buffer) else self._merged(total)
            near = share.near(rows)
            if self._config.gamma is not None:
                scaled = share.leader.empty(rows.shape, rows.dtype)
                now, then = center, self._pulled[member.local].buffers[0]
                if indices is not None:
                    now = taken.rows(share.leader, center, indices)
                    then = taken.rows(then.device, then, indices)
                scalings.append((scaled, near, now, share.near(then)))
                near = scaled
            mean = share.leader.empty(rows.shape, center.dtype)
            divided.append((mean, near))
            share.others.append(center.device)
            parts.append(mean if indices is None else IndexedSlices.of(mean, indices, center.shape))
        share.takes += taken.before(share.leader)
        share.looks += [share.fenced(take) for take in taken.behind(share.leader)]
        self._scale(share, scalings)
        for mean, near in divided:
            ops.prepare_pack(share.leader, mean.dtype, near.dtype)
        outs, sums = (list(column) for column in zip(*divided, strict=True))
        by = float(self._config.period)
        divide = partial(ops.pack, outs, sums, divisor=by, device=share.leader)
        share.looks.append(share.fenced(divide))
        return parts

    def _merged(self, total: SparseSum) -> tuple[Buffer, ops.Indices]:
        """The rows of a sum in the order of their indices, when ``run`` has merged them."""
        plan, _ = ops.merged_row_index([total.slots], mean=False)
        device = total.values.device
        rows = device.empty((plan.num_segments, *total.values.shape[1:]), total.values.dtype)
        ops.prepare_segment_sum(device, rows.dtype, rows.dtype)
        self._merges.setdefault(device, []).append((rows, total.rows, plan))
        return rows, plan.indices

    def _scale(self, share: DevicePush, rows: Sequence[_Scaling]) -> None:
        """Sums are made small where the centre has moved: one launch."""
        if not rows or self._config.gamma is None:
            return
        for _, _, now, _ in rows:
            ops.prepare_distance_scale(share.leader, now.dtype)
        columns = [list(column) for column in zip(*rows, strict=True)]
        scale = partial(ops.distance_scale, *columns, gamma=self._config.gamma, device=share.leader)
        share.looks.append(share.fenced(scale))

    def _num_copies(self, member: Member) -> int:
        """What is pulled of a row of the worker: the variable, and its master."""
        return 2 if self._slots.wants_master(member.center) else 1

    def _plan_copies(self, share: DevicePush, member: Member) -> None:
        """From the worker's first device to its others, and to where the distance is kept."""
        first, *others = self._optimizer._slots.rows(member.local)
        for row in others:
            for index in range(self._num_copies(member)):
                share.outward.append((row[index].device, row[index], first[index]))
        if self._config.gamma is not None:
            kept = self._pulled[member.local].buffers[0]
            share.outward.append((kept.device, kept, first[0]))

    # -- the communication ------------------------------------------------------------------------

    def serves(self, sums: Mapping[Member, Sum]) -> bool:
        """Whether it may be run again, for these: nothing but their values has changed."""
        if self._center.version != self._version:
            return False
        if self._optimizer._slots.by_name is not self._mine:
            return False
        if self._optimizer._kernel is not self._kernel:  # momentum may have become Nesterov's
            return False
        pairs = zip(self._places, sums.values(), strict=False)
        return len(sums) == len(self._places) and all([one is two for one, two in pairs])

    def run(self, scalars: Sequence[float], then: Callable[[], None]) -> None:
        """All of it. A failure before the centre is changed has changed nothing.

        Args:
            scalars: of the rule.
            then: what the worker makes of it; what fails there has failed half way.

        Raises:
            CollectiveError: the centre is half updated, by an earlier push.
        """
        for launch in self._before:
            launch()
        for share in self._shares:
            for mover, to, of in share.inward:
                copy_over(mover, to, of)
        # A rule on arrays reads the centre and writes it later.
        with self._center.pushing(use_locking=self._config.use_locking or bool(self._jobs)):
            self._center.check_usable(self._version)
            for share in self._shares:
                for look in share.looks:
                    look()
            for share, job in self._jobs:
                job.begin()
                rule = run_python_rule(self._optimizer._apply, self._optimizer._slot_names, job)
                share.updates.append(partial(_end, job, rule))
            self._launch(tuple(scalars), then)

    def _launch(self, scalars: tuple[float, ...], then: Callable[[], None]) -> None:
        mesh_state = self._center.devices[0].mesh_state
        failed = partial(self._center.half_pushed, self._config.task)
        steps = [self._shares] if self._config.use_locking else [[each] for each in self._shares]
        with ExitStack() as stack:
            for shares in steps:
                with mesh_state.launch_lock:
                    for begin in [begin for share in shares for begin in share.begins]:
                        begin()
                    if shares is steps[0]:  # from here on the centre changes
                        stack.enter_context(mesh_state.on_partial_failure(failed))
                    for share in shares:
                        _updated(share, scalars)
            then()


def _end(job: Job, rule: Rule, scalars: tuple[float, ...]) -> None:
    job.end(rule)


def _merge(
    device: Device, rows: Sequence[tuple[Buffer, Buffer, ops.Segments]]
) -> Callable[[], None]:
    """Rows of sums into the order of their indices: one launch for all that lie on a device."""
    outs, values, plans = zip(*rows, strict=True)
    return ops.ready_segment_sum(outs, values, plans, device=device)


def _fenced(leader: Device, others: Sequence[Device], launch: Callable[[], None]) -> None:
    join_streams(leader, others)
    launch()
    fork_streams(leader, others)


def _updated(share: DevicePush, scalars: tuple[float, ...]) -> None:
    for update in share.updates:
        update(scalars)
    for mover, to, of in share.outward:
        copy_over(mover, to, of)


class _Taken:
    """Rows of whole arrays, taken out on the device where they lie."""

    def __init__(self) -> None:
        self._of: dict[Device, list[tuple[Buffer, Buffer, ops.Indices]]] = {}

    def rows(self, device: Device, whole: Buffer, indices: ops.Indices) -> Buffer:
        """New memory for these rows; written by what the other two give."""
        out = device.empty((indices.size, *whole.shape[1:]), whole.dtype)
        ops.prepare_take_rows(device, whole.dtype)
        self._of.setdefault(device, []).append((out, whole, indices))
        return out

    def before(self, leader: Device) -> list[Callable[[], None]]:
        """What takes rows on other devices than the leader."""
        return [self._ready(device) for device in self._of if device is not leader]

    def behind(self, leader: Device) -> list[Callable[[], None]]:
        """What takes rows on the leader."""
        return [self._ready(device) for device in self._of if device is leader]

    def _ready(self, device: Device) -> Callable[[], None]:
        outs, wholes, indices = zip(*self._of[device], strict=True)
        return ops.ready_take_rows(outs, wholes, indices, device=device)
