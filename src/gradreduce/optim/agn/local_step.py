"""Local steps of a worker: update variables, and add gradients to the period's sums.

With a compiled rule, one launch does both for dense gradients. For sparse gradients and Python
rules, the update is that of ``Optimizer``, and separate launches add the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.accumulator.state import PendingGradient, additions_of
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesced
from gradreduce.arrays.variable import Variable
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.device import Buffer, Device, PackInfo, accumulate_dtype, by_physical
from gradreduce.optim.gradient_inputs import Colocated, made_dense
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.update_plan import Job, Plan

from .sums import Sum, Sums, dense_sum, pending_rows, state_of


class LocalStep(NamedTuple):
    """A planned local step, with all memory allocated.

    Attributes:
        launches: called in this order.
        sums: the sums of the period after the step.
        plan: the plan for dense gradients; None if there are none, or for a Python rule.
        devices: the devices that the launches write.
        label: names the variables in the operation log.
    """

    launches: Sequence[Callable[[], None]]
    sums: Sums
    plan: LocalPlan | None
    devices: Sequence[Device]
    label: PackInfo


class LocalPlan(Plan):
    """Plan for local steps of the same variables with dense gradients.

    It can be used again if the last step used it.

    Args:
        optimizer: has a compiled rule and slots of the variables.
        sums: for each variable the memory of its sum, on each device.
    """

    def __init__(self, optimizer: Optimizer, sums: Mapping[Variable, tuple[Buffer, ...]]) -> None:
        super().__init__(list(sums), optimizer._slots, optimizer._rule, list(sums.values()))
        self._optimizer, self._sums = optimizer, sums

    def step(self, gradients: Sequence[Part], scalars: Scalars, sums: Sums) -> LocalStep:
        """Returns a step: one launch for each physical device and dtype.

        Args:
            gradients: the dense gradient of each copy of each variable.
            scalars: the scalars of the rule.
            sums: the sums of the period so far. Either all variables of the plan have a sum, which
                is in the plan's memory, or none has.
        """
        first = self.variables[0] not in sums
        if first:  # the launch writes gradients to the sums and does not add
            sums = {**sums, **self._sums} if sums else self._sums
        launches = [
            self._optimizer._ready(job, (int(first), *scalars), writer, "local")
            for job, writer in self.jobs(gradients)
        ]
        return LocalStep(launches, sums, self, self.devices, self.label)


def local_step(
    optimizer: Optimizer,
    variables: Sequence[Variable],
    parts: Sequence[Part],
    scalars: Scalars,
    sums: Sums,
    last: LocalPlan | None,
) -> LocalStep:
    """Plans a step with gradients of any kind.

    Args:
        optimizer: has the rule and slots of the variables.
        variables: each once.
        parts: for each copy of each variable, a colocated gradient.
        scalars: the scalars of the rule.
        sums: the sums of the period so far.
        last: the plan of the last step, which is used again if it is valid for this step.
    """
    left = iter(parts)
    dense: dict[Variable, Colocated] = {}
    apart: dict[Variable, Colocated] = {}
    for var in variables:
        colocated = tuple(islice(left, len(var.devices)))
        is_fused = optimizer._rule is not None and isinstance(colocated[0], Buffer)
        (dense if is_fused else apart)[var] = colocated
    launches: Sequence[Callable[[], None]] = ()
    plan = last if dense else None
    if dense and not (last and last.is_valid_for(list(dense), optimizer._slots, optimizer._rule)):
        first = not any(var in sums for var in dense)
        memory = {var: dense_sum(var, sums.get(var), fill=not first) for var in dense}
        plan = LocalPlan(optimizer, memory)
        sums = sums if first else {**sums, **memory}
    if plan is not None:
        gradients = [part for colocated in dense.values() for part in colocated]
        launches, sums, *_ = plan.step(gradients, scalars, sums)
    if apart:
        jobs = Plan(list(apart), optimizer._slots, optimizer._rule).jobs(
            [part for colocated in apart.values() for part in colocated]
        )
        additions, added = _additions(apart, sums)
        updates = [optimizer._ready(job, scalars, writer) for job, writer in jobs]
        launches, sums = [*launches, *updates, *additions], {**sums, **added}
    devices = [device for var in variables for device in var.devices]
    label = PackInfo(range(len(variables)), names=[var.name for var in variables])
    return LocalStep(launches, sums, plan, devices, label)


def _additions(
    gradients: Mapping[Variable, Colocated], sums: Sums
) -> tuple[list[Callable[[], None]], dict[Variable, Sum]]:
    """Returns launches that add gradients to the sums of variables, and these sums."""
    added: dict[Variable, Sum] = {}
    pending: dict[Variable, PendingGradient] = {}
    totals: list[Buffer] = []
    terms: list[Part] = []
    for var, colocated in gradients.items():
        total, gradient = sums.get(var), colocated[0]
        if isinstance(gradient, IndexedSlices) and not isinstance(total, tuple):
            pending[var] = pending_rows(var, total, gradient)
        else:
            added[var] = memory = dense_sum(var, total)
            totals += memory
            terms += made_dense([colocated], [var])[0]
    launches: list[Callable[[], None]] = []
    for indices in by_physical([total.device for total in totals]).values():
        job = Job([[totals[index]] for index in indices], [terms[index] for index in indices])
        launches.append(partial(job.run, ops.add_to_rows))
    rows, out_of_place, in_place = additions_of(list(pending.values()))
    added |= {var: each.total for var, each in zip(pending, rows, strict=True)}
    return [*launches, *out_of_place, *in_place], added


def compile_sums(variables: Sequence[Variable]) -> None:
    """Compiles the kernels that add gradients to sums, but not with the rule in one launch."""
    for var in variables:
        SPARSE.compile(state_of(var), var.dtype)
        dtypes = {(accumulate_dtype(var.dtype), var.dtype)}
        compile_rows("sums of AGN", _rehearse, dtypes, var.devices[0])


def _rehearse(rows: Sequence[ops.Update], device: Device) -> None:
    """Adds gradients to sums, and computes means as ``PushPlan`` does with the center's lock."""
    ops.add_to_rows(rows, device)
    merged = coalesced([total for total, _ in rows], [ops.single_row_segments(2)] * len(rows))
    ops.pack([mean for _, mean in rows], merged, device=device)
