"""Pushes mean gradients of a period to the center, updates it, and pulls.

With a compiled rule and dense sums, one launch on each of the center's GPUs divides the sums,
updates the center, and writes the result also to variables that the GPU can access. For sparse sums
and Python rules, the update is that of ``Optimizer``, and separate launches compute the mean and
copy the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseSum
from gradreduce.accumulator.state import launch_all
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.device import (
    Buffer,
    Device,
    PackInfo,
    by_physical,
    can_access,
    ensure_accessible,
)
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.update_plan import UpdateJob

from .sums import Sum, merge_rows


class PushConfig(NamedTuple):
    """Settings of a worker's pushes.

    Attributes:
        period: the number of steps in a period; sums are divided by it.
        gamma: ``distance_scale``, or None.
        task: the name of the worker, for error messages.
    """

    period: int
    gamma: float | None
    task: str


class PushedVariable(NamedTuple):
    """The memory of one variable that a push reads and writes.

    Attributes:
        name: the name of the worker's variable, for the operation log.
        written: what the update of the center writes: the center variable, its master if it has
            one, and its slots. The push runs on the device of the center variable.
        total: the sum of gradients. A dense sum is read only on its first device.
        pulled: for each copy of the worker's variable, where the new value is written: the
            variable, and its master if it has one. Empty if the worker is in another process.
        last_pulled: the center's value at the worker's last pull, if there is a distance scaling.
    """

    name: str
    written: Sequence[Buffer]
    total: Sum
    pulled: Sequence[Sequence[Buffer]]
    last_pulled: Buffer | None = None


class PushPlan:
    """A planned push of a worker, with all memory allocated; ``run`` launches it.

    The lock of the center must be held from the creation of a plan, which reads the center, until
    ``run`` has returned.

    Args:
        pushed: the memory of each variable, at least one; the slots exist.
        optimizer: has the rule, whose kernels are compiled.
        config: settings of the push.
        failed: called with the error if the push fails part-way.

    Attributes:
        is_reusable: whether the plan can run again, because it has no temporary memory.
    """

    def __init__(
        self,
        pushed: Sequence[PushedVariable],
        optimizer: Optimizer,
        config: PushConfig,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._optimizer, self._config, self._failed = optimizer, config, failed
        self.is_reusable = (
            config.gamma is None and optimizer._rule is not None and all(map(_is_in_reach, pushed))
        )
        self._jobs: list[tuple[UpdateJob, ops.Variant]] = []
        self._pulls: list[tuple[Buffer, Buffer]] = []  # destination and source
        self._label = PackInfo(range(len(pushed)), names=[each.name for each in pushed])
        self._mesh_state = pushed[0].written[0].device.mesh_state
        with self._mesh_state.label_scope(self._label):
            for indices in by_physical([each.written[0].device for each in pushed]).values():
                self._plan([pushed[index] for index in indices])

    def _plan(self, group: Sequence[PushedVariable]) -> None:
        """Plans the push of variables whose center copies are on one physical device."""
        device, optimizer = group[0].written[0].device, self._optimizer
        fused: list[tuple[ops.Update, Buffer]] = []  # what the fused launch writes, and the sum
        apart: list[tuple[Sequence[Buffer], Part]] = []  # what an update writes, and the mean
        means: list[tuple[Buffer, Buffer]] = []  # a mean, and the sum that it is computed from
        for variable, (total, indices) in zip(group, self._accessible(device, group), strict=True):
            written, (first, *others) = variable.written, variable.pulled or [()]
            if optimizer._rule is not None and indices is None:
                # The kernel writes the variable, and its master, to two places: the center and the
                # worker. If nothing is pulled, both are the memory of the center.
                destinations = first or written[: len(written) - len(optimizer._slots.names)]
                targets = [
                    out if can_access(device, out) else device.empty(out.shape, out.dtype)
                    for out in destinations
                ]
                fused.append(([*written, *targets], total))
                staged = zip(first, targets, strict=False)
                self._pulls += [(out, value) for out, value in staged if value is not out]
            else:
                mean, shape = device.empty(total.shape, written[0].dtype), written[0].shape
                part = mean if indices is None else IndexedSlices.of(mean, indices, shape)
                means.append((mean, total))
                apart.append((written, part))
                self._pulls += zip(first, written, strict=False)
            for row in others:
                self._pulls += zip(row, first, strict=False)
        if fused:
            self._jobs.append((UpdateJob(*zip(*fused, strict=True)), "global"))
        if apart:
            outs, totals = map(list, zip(*means, strict=True))
            ops.pack(outs, totals, divisor=self._config.period, device=device)
            self._jobs.append((UpdateJob(*zip(*apart, strict=True)), "plain"))

    def _accessible(
        self, device: Device, group: Sequence[PushedVariable]
    ) -> list[tuple[Buffer, ops.Indices | None]]:
        """Returns sums, in memory that a device can access, and indices of their rows.

        With a distance scaling, the sums are scaled.
        """
        sums: list[tuple[Buffer, ops.Indices | None]] = []
        scalings: list[tuple[Buffer, Buffer, Buffer, Buffer]] = []
        gamma = self._config.gamma
        for variable in group:
            now, then, indices = variable.written[0], variable.last_pulled, None
            if isinstance(variable.total, SparseSum):
                merged = merge_rows(now.shape, variable.total)
                pushed, indices = merged.values, merged.indices
            else:
                pushed = variable.total[0]
            pushed = ensure_accessible(device, pushed)
            if gamma is not None and then is not None:
                if indices is not None:
                    now, then = _take_rows(now, indices), _take_rows(then, indices)
                scaled = device.empty(pushed.shape, pushed.dtype)
                scalings.append((scaled, pushed, now, ensure_accessible(device, then)))
                pushed = scaled
            sums.append((pushed, indices))
        if gamma is not None:
            outs, *read = zip(*scalings, strict=True)
            ops.distance_scale(outs, *read, gamma=gamma, device=device)
        return sums

    def run(self, scalars: Scalars, then: Callable[[], None]) -> None:
        """Calls ``ready``, and the function that it returns."""
        self.ready(scalars)(then)

    def ready(self, scalars: Scalars) -> Callable[[Callable[[], None]], None]:
        """Computes a Python rule; returns a function that launches the push.

        The argument ``then`` of that function is called after the launches. If the function fails
        before its first launch, the center is unchanged. A later failure, even of the launch that
        gathers rows or of ``then``, counts as part-way: ``failed`` is called.

        Args:
            scalars: the scalars of the rule.
        """
        lead = {"global": (self._config.period,), "plain": ()}
        with self._mesh_state.label_scope(self._label):
            launches = [
                launch
                for job, variant in self._jobs
                for launch in self._optimizer._ready(job, (*lead[variant], *scalars), variant)
            ]
        return partial(self._launch, launches)

    def _launch(self, launches: Sequence[Callable[[], None]], then: Callable[[], None]) -> None:
        mesh_state = self._mesh_state
        with (
            mesh_state.label_scope(self._label),
            mesh_state.on_partial_failure(self._failed),
            mesh_state.launch_lock,
        ):
            launch_all(launches)
            for out, value in self._pulls:
                out.device.copy(out, value)
            then()


def _is_in_reach(pushed: PushedVariable) -> bool:
    """Whether a push of a variable needs no temporary memory, if its rule is compiled."""
    if not isinstance(pushed.total, tuple) or not pushed.pulled:
        return False
    device = pushed.written[0].device
    return all(can_access(device, each) for each in (pushed.total[0], *pushed.pulled[0]))


def _take_rows(whole: Buffer, indices: ops.Indices) -> Buffer:
    """Gathers rows of an array."""
    rows = whole.device.empty((len(indices), *whole.shape[1:]), whole.dtype)
    ops.take_rows_command([rows], [whole], [indices])()
    return rows
