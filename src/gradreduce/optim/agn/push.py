"""Pushes mean gradients of a period to the center, updates it, and pulls.

With a compiled rule, one launch on each of the center's GPUs normalizes dense sums, updates, and
pulls to memory that the GPU can access. For sparse sums and Python rules, the update is that of
``Optimizer``: mean, update and pull are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    LaunchBatch,
    PackInfo,
    can_access,
    copy_over,
    join_streams,
    to_accessible,
)
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.update_plan import Job, writer_of

from .center import CenterState
from .sums import merged_rows
from .variables import WorkerVariables


class PushConfig(NamedTuple):
    """Settings of a worker's pushes.

    Attributes:
        period: steps between two pushes; sums are divided by it.
        gamma: ``distance_scale``, or None.
        task: name of the worker, for messages.
    """

    period: int
    gamma: float | None
    task: str


class PushPlan:
    """One push of a worker, with all memory; ``run`` launches it.

    The lock of the center must be held from its creation, which reads the center, until it ran.

    Args:
        center: receives the push; its slots are created here.
        optimizer: of the worker; its slots exist.
        variables: of the worker; its sums are pushed.
        config: settings of the push.

    Attributes:
        sums: those of the variables.
        version: of the center.
        is_reusable: whether it can run again: it holds no temporary memory.
    """

    def __init__(
        self,
        center: CenterState,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
    ) -> None:
        self._center, self._optimizer, self._config = center, optimizer, config
        self.sums, self._centers = variables.sums, variables.centers
        self._pulled = variables.pulled
        self.version = center.version
        self.is_reusable = (
            config.gamma is None
            and optimizer._rule is not None
            and all(
                isinstance(total, tuple) and can_access(self._centers[var].devices[0], total[0])
                for var, total in self.sums.items()
            )
        )
        # A loaded checkpoint may have had no slots.
        self._rows = center.prepare(optimizer, [self._centers[var] for var in self.sums])
        self._jobs: list[tuple[Job, LaunchBatch | None, ops.Variant]] = []
        self._pulls: list[tuple[Buffer, Buffer]] = []  # destination and source
        self._label = PackInfo(range(len(self.sums)), names=[var.name for var in self.sums])
        groups: dict[int, list[Variable]] = {}
        for var in self.sums:
            groups.setdefault(self._centers[var].devices[0].physical, []).append(var)
        with center.devices[0].mesh_state.label_scope(self._label):
            for group in groups.values():
                self._plan(group)

    def _plan(self, group: Sequence[Variable]) -> None:
        """Plans the push of variables whose center copies are on one physical device."""
        leader, slots = self._centers[group[0]].devices[0], self._optimizer._slots
        fused: list[ops.Update] = []  # what one launch writes, and the sum
        apart: list[tuple[list[Buffer], Part]] = []  # what an update writes, and the mean
        means: list[tuple[Buffer, Buffer]] = []  # and the sums that they are computed from
        for var, (total, indices) in zip(group, self._accessible(leader, group), strict=True):
            written, (mine, *others) = self._rows[self._centers[var]], slots.rows(var)
            pulled = mine[: 2 if slots.wants_master(var) else 1]
            if self._optimizer._rule is not None and indices is None:
                targets = [
                    out if can_access(leader, out) else leader.empty(out.shape, out.dtype)
                    for out in pulled
                ]
                fused.append([*written, *targets, total])
                staged = zip(pulled, targets, strict=True)
                self._pulls += [(out, value) for out, value in staged if value is not out]
            else:
                mean = leader.empty(total.shape, var.dtype)
                part = mean if indices is None else IndexedSlices.of(mean, indices, var.shape)
                means.append((mean, total))
                apart.append((written, part))
                self._pulls += zip(pulled, written, strict=False)
            for row in others:
                self._pulls += zip(row, pulled, strict=False)
            if self._config.gamma is not None:
                self._pulls.append((self._pulled[var], mine[0]))
        if fused:
            rows, totals = [row[:-1] for row in fused], [row[-1] for row in fused]
            job = Job(rows, totals, [var.devices[0] for var in group])
            self._jobs.append((job, writer_of(leader, rows), "global"))
        if apart:
            outs, totals = map(list, zip(*means, strict=True))
            join_streams(leader, dict.fromkeys([total.device for total in totals]))
            ops.pack(outs, totals, divisor=self._config.period, device=leader)
            self._jobs.append((Job(*zip(*apart, strict=True)), None, "plain"))

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
                pushed, indices = merged.values, merged.indices
            else:
                pushed = total[0]
            pushed = to_accessible(leader, pushed)
            if gamma is not None:
                now, then = self._centers[var].buffers[0], self._pulled[var]
                if indices is not None:
                    now, then = _taken(now, indices), _taken(then, indices)
                scaled = leader.empty(pushed.shape, pushed.dtype)
                scalings.append((scaled, pushed, now, to_accessible(leader, then)))
                pushed = scaled
            found.append((pushed, indices))
        if gamma is not None:
            outs, *read = zip(*scalings, strict=True)
            join_streams(leader, dict.fromkeys([each.device for row in read for each in row]))
            ops.distance_scale(outs, *read, gamma=gamma, device=leader)
        return found

    def run(self, scalars: Scalars, then: Callable[[], None]) -> None:
        """Launches the push; a failure before its first launch leaves the center unchanged.

        A later one, even of the launch that gathers rows, marks the center as partly updated.

        Args:
            scalars: of the rule.
            then: called after the launches; an error in it means that the push failed part-way.
        """
        mesh_state = self._center.devices[0].mesh_state
        lead = {"global": (self._config.period,), "plain": ()}
        failed = partial(self._center.mark_push_failed, self._config.task)
        with mesh_state.label_scope(self._label):
            launches = [
                self._optimizer._ready(job, (*lead[variant], *scalars), writer, variant)
                for job, writer, variant in self._jobs
            ]
            with mesh_state.on_partial_failure(failed), mesh_state.launch_lock:
                for launch in launches:
                    launch()
                for out, value in self._pulls:
                    copy_over(out.device, out, value)
                then()


def _taken(whole: Buffer, indices: ops.Indices) -> Buffer:
    """Gathers rows of an array."""
    rows = whole.device.empty((len(indices), *whole.shape[1:]), whole.dtype)
    ops.take_rows_command([rows], [whole], [indices])()
    return rows
