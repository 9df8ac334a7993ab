"""Local steps of a worker: update variables, and add gradients to the period's sums.

With a compiled rule, one launch does both for dense gradients. For sparse gradients and Python
rules, the update is that of ``Optimizer``, and separate launches add the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.accumulator.state import Addend, Addition, Launches, launch_all, launches_of
from gradreduce.arrays.distributed import Part, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, by_physical
from gradreduce.optim.gradient_inputs import Colocated, make_dense
from gradreduce.optim.optimizer import Optimizer, Scalars, gradients_like
from gradreduce.optim.update_plan import Plan

from .push import PushConfig, PushedVariable, PushPlan
from .sums import Sum, Sums, dense_sum


def plan_fused_step(
    optimizer: Optimizer, plan: Plan, gradients: Sequence[Part], scalars: Scalars, sums: Sums
) -> tuple[Launches, Sums]:
    """Plans one launch for each physical device and dtype; returns it and the sums after it.

    Args:
        optimizer: has a compiled rule.
        plan: the plan of the variables and their sums.
        gradients: the dense gradient of each copy of each variable.
        scalars: the scalars of the rule.
        sums: the sums of the period so far. Either all variables of the plan have a sum, which is
            in the plan's memory, or none has.
    """
    first = plan.variables[0] not in sums
    if first:  # the launch writes gradients to the sums and does not add
        sums = {**sums, **plan.totals} if sums else plan.totals
    jobs = plan.jobs(gradients)
    scalars = (int(first), *scalars)
    return [launch for job in jobs for launch in optimizer._ready(job, scalars, "local")], sums


def local_step(
    optimizer: Optimizer,
    variables: Sequence[Variable],
    parts: Sequence[Part],
    scalars: Scalars,
    sums: Sums,
    last: Plan | None,
) -> tuple[Launches, Sums, Plan | None]:
    """Plans a step with gradients of any kind.

    Returns its launches, the sums after it, and the plan of the variables with dense gradients.
    The plan is None if there are none, or for a Python rule.

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
    launches: Launches = []
    plan = last if dense else None
    if dense and not (last and last.is_valid_for(list(dense), optimizer._slots, optimizer._rule)):
        first = not any(var in sums for var in dense)
        memory = {var: dense_sum(var, sums.get(var), fill=not first) for var in dense}
        plan = Plan(list(memory), optimizer._slots, optimizer._rule, memory)
        sums = sums if first else {**sums, **memory}
    if plan is not None:
        gradients = [part for colocated in dense.values() for part in colocated]
        launches, sums = plan_fused_step(optimizer, plan, gradients, scalars, sums)
    if apart:
        jobs = Plan(list(apart), optimizer._slots, optimizer._rule).jobs(
            [part for colocated in apart.values() for part in colocated]
        )
        additions, added = _additions(apart, sums)
        updates = [launch for job in jobs for launch in optimizer._ready(job, scalars)]
        launches, sums = [*launches, *updates, *additions], {**sums, **added}
    return launches, sums, plan


def _additions(
    gradients: Mapping[Variable, Colocated], sums: Sums
) -> tuple[Launches, dict[Variable, Sum]]:
    """Returns launches that add gradients to the sums of variables, and these sums."""
    added: dict[Variable, Sum] = {}
    sparse: list[Addition] = []
    totals: list[Buffer] = []
    terms: list[Buffer] = []
    for var, colocated in gradients.items():
        total, gradient = sums.get(var), colocated[0]
        if isinstance(gradient, IndexedSlices) and not isinstance(total, tuple):
            rows, segments = gradient.values, ops.plan_segments(gradient.indices)
            addend = Addend(0, rows, var.shape, segments)
            sparse.append(Addition(var, 0, var.devices[0], total, [addend]))
        else:
            added[var] = memory = dense_sum(var, total)
            totals += memory
            terms += map(buffer_of, make_dense([colocated], [var])[0])
    launches = []
    for indices in by_physical([total.device for total in totals]).values():
        rows = [[totals[index], terms[index]] for index in indices]
        launches.append(partial(ops.add_to_rows, rows, rows[0][0].device))
    out_of_place, in_place = launches_of(SPARSE, sparse)
    added |= {each.owner: each.total for each in sparse}
    return [*launches, *out_of_place, *in_place], added


def rehearse_push(
    optimizer: Optimizer,
    variables: Sequence[Variable],
    config: PushConfig,
    *,
    sparse: bool,
    steps: bool = False,
) -> None:
    """Compiles the kernels of a push to variables like these.

    Args:
        optimizer: the optimizer with the rule.
        variables: variables of a worker or a center.
        config: settings of the push.
        sparse: whether some gradients are rows.
        steps: whether to compile also the kernels of the local steps before the push.
    """

    def push_each_sum(dry: Optimizer, likes: Sequence[Variable]) -> None:
        gradients: list[Sequence[Part]] = [[var.buffers[0] for var in likes]]
        if sparse:  # new rows, more rows, rows in place, an array, and rows that are added to it
            some, rows = [gradients_like(dry, likes, each) for each in ([0], [0, 1])]
            gradients = [some, rows, rows, *gradients, rows]
        sums: Sums = {}
        for parts in gradients:
            launches, sums, *_ = local_step(dry, likes, parts, (), sums, None)
            launch_all(launches if steps else ())
            rows_of = [(sums[var], dry._slots.rows(var)[0]) for var in likes]
            pushed = [PushedVariable("", row, total, (), row[0]) for total, row in rows_of]
            PushPlan(pushed, dry, config, lambda error: None).ready(())(lambda: None)

    what = ("a push", config.gamma is None, sparse, steps)
    optimizer._rehearse(variables, what, push_each_sum)
