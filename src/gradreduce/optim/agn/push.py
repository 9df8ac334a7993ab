"""Pushes mean gradients of a period to the center, updates it, and pulls.

With a compiled rule, one launch on each of the center's GPUs normalizes dense sums, updates, and
pulls to memory that the GPU can access. For sparse sums and Python rules, the update is that of
``Optimizer``: mean, update and pull are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseSum
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    PackInfo,
    can_access,
    copy_over,
    join_streams,
    to_accessible,
)
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.update_plan import Job, writer_of

from .center import CenterState
from .sums import Sums, merged_rows


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


class DevicePush(NamedTuple):
    """What a push does on one physical device of the center.

    Attributes:
        ready: functions that return the launch of an update with given scalars; a Python rule is
            computed right away.
        pulls: copies that follow: destination and source.
    """

    ready: Sequence[Callable[[Scalars], Callable[[], None]]]
    pulls: Sequence[tuple[Buffer, Buffer]]


class PushPlan:
    """One push of a worker, with all memory; ``run`` launches it.

    Creating it reads the center: with locking, do it and ``run`` inside ``center.pushing``.

    Args:
        center: receives the push; its slots are created here.
        optimizer: of the worker; its slots exist.
        sums: of the variables that have gradients in this period.
        centers: the center's copy of each variable.
        pulled: for each variable the center at the last pull; for the distance.
        config: settings of the push.

    Attributes:
        sums: the same.
        version: of the center.
        is_reusable: whether it can run again: it holds no temporary memory.
    """

    def __init__(
        self,
        center: CenterState,
        optimizer: Optimizer,
        sums: Sums,
        centers: Mapping[Variable, Variable],
        pulled: Mapping[Variable, Variable],
        config: PushConfig,
    ) -> None:
        self._center, self._optimizer, self._config = center, optimizer, config
        self.sums, self._centers, self._pulled = sums, centers, pulled
        self.version = center.version  # read before the slots: a load may come between
        self.is_reusable = True
        # A loaded checkpoint may have had no slots, and can be loaded at any time.
        self._rows = center.prepare(optimizer, [centers[var] for var in sums])
        self._label = PackInfo(range(len(sums)), names=[var.name for var in sums])
        groups: dict[int, list[Variable]] = {}
        for var in sums:
            groups.setdefault(centers[var].devices[0].physical, []).append(var)
        with center.devices[0].mesh_state.label_scope(self._label):
            self._pushes = [self._planned(group) for group in groups.values()]

    def _planned(self, group: Sequence[Variable]) -> DevicePush:
        """Plans the push of variables whose center copies are on one physical device."""
        leader, slots = self._centers[group[0]].devices[0], self._optimizer._slots
        fused: list[ops.Update] = []  # what one launch writes, and the sum
        apart: list[tuple[list[Buffer], Part]] = []  # what an update writes, and the mean
        means: list[tuple[Buffer, Buffer]] = []  # and the sums that they are computed from
        pulls: list[tuple[Buffer, Buffer]] = []
        for var, (total, indices) in zip(group, self._accessible(leader, group), strict=True):
            written, (mine, *others) = self._rows[self._centers[var]], slots.rows(var)
            pulled = mine[: 2 if slots.wants_master(var) else 1]
            if self._optimizer._rule is not None and indices is None:
                targets = [self._writable(leader, out) for out in pulled]
                fused.append([*written, *targets, total])
                staged = zip(pulled, targets, strict=True)
                pulls += [(out, value) for out, value in staged if value is not out]
            else:
                mean = self._new(leader, total, var.dtype)
                part = mean if indices is None else IndexedSlices.of(mean, indices, var.shape)
                means.append((mean, total))
                apart.append((written, part))
                pulls += zip(pulled, written, strict=False)
            for row in others:
                pulls += zip(row, pulled, strict=False)
            if self._config.gamma is not None:
                pulls.append((self._pulled[var].buffers[0], mine[0]))
        ready = []
        if fused:
            ready.append(self._fused(leader, fused, [var.devices[0] for var in group]))
        if apart:
            ready.append(self._apart(leader, apart, means))
        return DevicePush(ready, pulls)

    def _fused(
        self, leader: Device, rows: Sequence[ops.Update], others: Sequence[Device]
    ) -> Callable[[Scalars], Callable[[], None]]:
        """Plans one launch for mean, update and pull of dense sums."""
        optimizer, period = self._optimizer, self._config.period
        written = [row[:-1] for row in rows]
        job, writer = Job(written, [row[-1] for row in rows], others), writer_of(leader, written)
        return lambda scalars: optimizer._ready(job, (period, *scalars), writer, "global")

    def _apart(
        self,
        leader: Device,
        updates: Sequence[tuple[list[Buffer], Part]],
        means: Sequence[tuple[Buffer, Buffer]],
    ) -> Callable[[Scalars], Callable[[], None]]:
        """Computes means, and plans the update by them: of sparse sums, and for Python rules."""
        join_streams(leader, dict.fromkeys([total.device for _, total in means]))
        outs, totals = zip(*means, strict=True)
        ops.pack(outs, totals, divisor=float(self._config.period), device=leader)
        job, optimizer = Job(*zip(*updates, strict=True)), self._optimizer
        return lambda scalars: optimizer._ready(job, scalars, None)

    def _accessible(
        self, leader: Device, group: Sequence[Variable]
    ) -> list[tuple[Buffer, ops.Indices | None]]:
        """Returns sums that a device can access, and the indices of rows.

        They are scaled by the distance that the center has moved.
        """
        found: list[tuple[Buffer, ops.Indices | None]] = []
        scalings: list[tuple[Buffer, Buffer, Buffer, Buffer]] = []
        gamma = self._config.gamma
        for var in group:
            total, indices = self.sums[var], None
            if isinstance(total, SparseSum):
                merged = merged_rows(var, total)
                own, indices = merged.values, merged.indices
            else:
                own = total[0]
            pushed = self._readable(leader, own)
            if gamma is not None:
                now, then = self._centers[var].buffers[0], self._pulled[var].buffers[0]
                if indices is not None:
                    now, then = _taken(now, indices), _taken(then, indices)
                scaled = self._new(leader, pushed, pushed.dtype)
                scalings.append((scaled, pushed, now, to_accessible(leader, then)))
                pushed = scaled
            found.append((pushed, indices))
        if gamma is not None:
            outs, *read = zip(*scalings, strict=True)
            join_streams(leader, dict.fromkeys([each.device for row in read for each in row]))
            ops.distance_scale(outs, *read, gamma=gamma, device=leader)
        return found

    # -- memory -----------------------------------------------------------------------------------

    def _new(self, leader: Device, like: Buffer, dtype: DType) -> Buffer:
        """Returns temporary memory, of the shape of a buffer."""
        self.is_reusable = False
        return leader.empty(like.shape, dtype)

    def _readable(self, leader: Device, buffer: Buffer) -> Buffer:
        """Returns a buffer, or a copy that the leader can read."""
        found = to_accessible(leader, buffer)
        self.is_reusable = self.is_reusable and found is buffer
        return found

    def _writable(self, leader: Device, buffer: Buffer) -> Buffer:
        """Returns a buffer, or one of its shape that the leader can write."""
        return buffer if can_access(leader, buffer) else self._new(leader, buffer, buffer.dtype)

    # -- the communication ------------------------------------------------------------------------

    def run(self, scalars: Scalars, then: Callable[[], None]) -> None:
        """Launches the push. If it fails before the center is changed, state is unchanged.

        Args:
            scalars: of the rule.
            then: called after the launches; an error in it means that the push failed part-way.

        Raises:
            StalePushError: a checkpoint was loaded after the push was planned.
        """
        mesh_state = self._center.devices[0].mesh_state
        failed = partial(self._center.mark_push_failed, self._config.task)
        with mesh_state.label_scope(self._label):
            launches = [[ready(scalars) for ready in push.ready] for push in self._pushes]
            work = list(zip(launches, self._pushes, strict=True))
            steps = [work] if self._config.use_locking else [[each] for each in work]
            with mesh_state.on_partial_failure(failed):
                for step in steps:
                    with mesh_state.launch_lock:
                        self._center.check_version(self.version)
                        for launch in [launch for each, _ in step for launch in each]:
                            launch()
                        for out, value in [pull for _, push in step for pull in push.pulls]:
                            copy_over(out.device, out, value)
                then()


def _taken(whole: Buffer, indices: ops.Indices) -> Buffer:
    """Gathers rows of an array."""
    rows = whole.device.empty((len(indices), *whole.shape[1:]), whole.dtype)
    ops.take_rows_command([rows], [whole], [indices])()
    return rows
