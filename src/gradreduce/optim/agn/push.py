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
from gradreduce.arrays.distributed import Part, buffer_of, with_buffer
from gradreduce.arrays.indexed_slices import IndexedSlices, to_dense_n
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
        gamma: ``distance_scale``, or None.
        task: the name of the worker, for error messages.
    """

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

    These are its stages, for the variables on each physical device of the center:

    - reduce: adds rows with the same index, and copies sums that the device cannot access;
    - scale: with a distance scaling, scales the sums;
    - update: divides the sums by the weight of the period, updates the center, and writes the
      result to the worker's variables. If that takes more than one launch, the means are computed
      first.

    A new plan runs the first two, and prepares the update. The lock of the center must be held from
    the creation of a plan, which reads the center, until ``run`` has returned.

    Args:
        pushed: the memory of each variable, at least one; the slots exist.
        optimizer: has the rule, whose kernels are compiled.
        config: settings of the push.
        weight: see below.
        failed: called with the error if the push fails part-way.

    Attributes:
        weight: the sum of the weights of the period, which the sums are divided by. If the plan
            runs again, it is set before.
        is_reusable: whether the plan can run again, because it has no temporary memory.
    """

    def __init__(
        self,
        pushed: Sequence[PushedVariable],
        optimizer: Optimizer,
        config: PushConfig,
        weight: float,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._optimizer, self.weight, self._failed = optimizer, weight, failed
        self.is_reusable = (
            config.gamma is None and optimizer._rule is not None and all(map(_is_in_reach, pushed))
        )
        self._jobs: list[tuple[UpdateJob, ops.Variant]] = []
        self._pulls: list[tuple[Buffer, Buffer]] = []  # destination and source
        self._label = PackInfo(range(len(pushed)), names=[each.name for each in pushed])
        self._mesh_state = pushed[0].written[0].device.mesh_state
        with self._mesh_state.label_scope(self._label):
            for indices in by_physical([each.written[0].device for each in pushed]).values():
                group = [pushed[index] for index in indices]
                device = group[0].written[0].device
                sums = [_reduce(device, each, optimizer) for each in group]
                if config.gamma is not None:
                    sums = _scale(device, group, sums, config.gamma)
                self._plan_update(device, group, sums)

    def _plan_update(
        self, device: Device, group: Sequence[PushedVariable], sums: Sequence[Part]
    ) -> None:
        """Plans the update of variables whose center copies are on one physical device."""
        optimizer = self._optimizer
        fused: list[tuple[ops.Update, Buffer]] = []  # what the fused launch writes, and the sum
        apart: list[tuple[Sequence[Buffer], Part]] = []  # what an update writes, and the mean
        means: list[tuple[Buffer, Buffer]] = []  # a mean, and the sum that it is computed from
        for variable, total in zip(group, sums, strict=True):
            written, (first, *others) = variable.written, variable.pulled or [()]
            if optimizer._rule is not None and isinstance(total, Buffer):
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
                mean = device.empty(buffer_of(total).shape, written[0].dtype)
                means.append((mean, buffer_of(total)))
                apart.append((written, with_buffer(total, mean)))
                self._pulls += zip(first, written, strict=False)
            for row in others:
                self._pulls += zip(row, first, strict=False)
        if fused:
            self._jobs.append((UpdateJob(*zip(*fused, strict=True)), "global"))
        if apart:
            outs, totals = map(list, zip(*means, strict=True))
            ops.pack(outs, totals, divisor=self.weight, device=device)
            self._jobs.append((UpdateJob(*zip(*apart, strict=True)), "plain"))

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
        lead = {"global": (self.weight,), "plain": ()}
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


def _reduce(device: Device, variable: PushedVariable, optimizer: Optimizer) -> Part:
    """Returns the sum of a variable in memory that a device can access; rows are merged."""
    total, shape = variable.total, variable.written[0].shape
    part: Part = merge_rows(shape, total) if isinstance(total, SparseSum) else total[0]
    if isinstance(part, IndexedSlices) and optimizer._densifies:
        (part,) = to_dense_n([part])
    return with_buffer(part, ensure_accessible(device, buffer_of(part)))


def _scale(
    device: Device, group: Sequence[PushedVariable], sums: Sequence[Part], gamma: float
) -> list[Part]:
    """Returns the sums of variables, scaled by the distance that the center has moved."""
    scalings: list[tuple[Buffer, ...]] = []
    for variable, part in zip(group, sums, strict=True):
        now, then, total = variable.written[0], variable.last_pulled, buffer_of(part)
        assert then is not None, "the worker keeps the values of its last pull"
        if isinstance(part, IndexedSlices):
            now, then = _take_rows(now, part.indices), _take_rows(then, part.indices)
        scaled = device.empty(total.shape, total.dtype)
        scalings.append((scaled, total, now, ensure_accessible(device, then)))
    outs, *read = zip(*scalings, strict=True)
    ops.distance_scale(outs, *read, gamma=gamma, device=device)
    return list(map(with_buffer, sums, outs))


def _take_rows(whole: Buffer, indices: ops.Indices) -> Buffer:
    """Gathers rows of an array."""
    rows = whole.device.empty((len(indices), *whole.shape[1:]), whole.dtype)
    ops.take_rows_command([rows], [whole], [indices])()
    return rows
