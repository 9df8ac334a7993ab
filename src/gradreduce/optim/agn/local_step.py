"""Local steps of a worker: add gradients to the period's sums, and update variables.

With a compiled rule, one launch does both for dense gradients. For sparse gradients, Python rules
and weights, the update is that of ``Optimizer``, and separate launches add the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain, islice

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
from gradreduce.sums.aggregators import scaled

from .push import PushConfig, PushedVariable, PushPlan
from .rounds import AS_AGN, CenterOptions, rehearse_sums
from .sums import Sum, Sums, dense_sum


class LocalStep:
    """A local step of a worker, with all memory allocated; ``launches`` run it.

    Its stages are accumulate and update. For dense gradients and a compiled rule, one launch for
    each physical device and dtype does both; otherwise, and for a weight that is not 1, the update
    is launched first.

    Args:
        optimizer: has the rule and slots of the variables.
        scalars: the scalars of the rule.
        sums: the sums of the period so far.
        weight: multiplies the gradients that are added to the sums, not those of the update.

    Attributes:
        launches: called in this order.
        sums: the sums after the step.
        plan: the plan of the variables with dense gradients; None if there are none, or for a
            Python rule.
    """

    def __init__(
        self, optimizer: Optimizer, scalars: Scalars, sums: Sums, weight: float = 1.0
    ) -> None:
        self._optimizer, self._scalars, self._weight = optimizer, scalars, weight
        self.launches: list[Callable[[], None]] = []
        self.sums = sums
        self.plan: Plan | None = None

    def add(
        self, variables: Sequence[Variable], parts: Sequence[Part], last: Plan | None = None
    ) -> None:
        """Prepares both stages for gradients of any kind.

        Args:
            variables: each once.
            parts: for each copy of each variable, a colocated gradient.
            last: the plan of the last step, which is used again if it is valid for this step.
        """
        optimizer, left = self._optimizer, iter(parts)
        dense: dict[Variable, Colocated] = {}
        apart: dict[Variable, Colocated] = {}
        for var in variables:
            colocated = tuple(islice(left, len(var.devices)))
            is_fused = optimizer._rule is not None and isinstance(colocated[0], Buffer)
            (dense if is_fused else apart)[var] = colocated
        if dense:
            if last is None or not last.is_valid_for([*dense], optimizer._slots, optimizer._rule):
                last = self._plan(list(dense))
            self.accumulate_and_update(last, list(chain(*dense.values())))
        if apart:
            update = Plan(list(apart), optimizer._slots, optimizer._rule)
            jobs = update.jobs(list(chain(*apart.values())))
            additions = self._accumulate(apart)
            updates = [each for job in jobs for each in optimizer._ready(job, self._scalars)]
            self.launches += [*updates, *additions]

    def _plan(self, variables: Sequence[Variable]) -> Plan:
        """Plans steps with dense gradients. If a variable has a sum, all get one, as arrays."""
        first = not any(var in self.sums for var in variables)
        memory = {var: dense_sum(var, self.sums.get(var), fill=not first) for var in variables}
        if not first:
            self.sums = {**self.sums, **memory}
        return Plan(variables, self._optimizer._slots, self._optimizer._rule, memory)

    def accumulate_and_update(self, plan: Plan, gradients: Sequence[Part]) -> None:
        """Prepares one launch for each physical device and dtype, by a compiled rule.

        If the weight is not 1, there are two: the update, and the addition to the sums.

        Args:
            plan: the plan of the variables and their sums. Either all of the variables have a sum,
                which is in the plan's memory, or none has.
            gradients: the dense gradient of each copy of each variable.
        """
        self.plan, first = plan, plan.variables[0] not in self.sums
        if first:  # the launch writes gradients to the sums and does not add
            self.sums = {**self.sums, **plan.totals} if self.sums else plan.totals
        scalars = (int(first), *self._scalars)
        for job in plan.jobs(gradients):
            if self._weight == 1:
                self.launches += self._optimizer._ready(job, scalars, "local")
                continue
            totals, terms = zip(*[row[-2:] for row in job.updates], strict=True)
            job.updates = [[*row[:-2], row[-1]] for row in job.updates]
            self.launches += self._optimizer._ready(job, self._scalars)
            add = ops.scale if first else ops.add_scaled
            self.launches.append(partial(add, totals, terms, self._weight, device=job.device))

    def _accumulate(self, gradients: Mapping[Variable, Colocated]) -> Launches:
        """Returns launches that add gradients to the sums."""
        added: dict[Variable, Sum] = {}
        sparse: list[Addition] = []
        rows: list[list[Buffer]] = []  # a sum, and what is added to it
        for var, colocated in gradients.items():
            total, gradient = self.sums.get(var), colocated[0]
            if isinstance(gradient, IndexedSlices) and not isinstance(total, tuple):
                values, segments = gradient.values, ops.plan_segments(gradient.indices)
                if self._weight != 1:
                    values = scaled(values, self._weight)
                addend = Addend(0, values, var.shape, segments)
                sparse.append(Addition(var, 0, var.devices[0], total, [addend]))
            else:
                added[var] = memory = dense_sum(var, total)
                terms = map(buffer_of, make_dense([colocated], [var])[0])
                rows += map(list, zip(memory, terms, strict=True))
        launches = []
        for indices in by_physical([total.device for total, _ in rows]).values():
            on_gpu = [rows[index] for index in indices]
            device = on_gpu[0][0].device
            if self._weight == 1:
                launches.append(partial(ops.add_to_rows, on_gpu, device))
            else:
                totals, addends = zip(*on_gpu, strict=True)
                add = partial(ops.add_scaled, totals, addends, self._weight, device=device)
                launches.append(add)
        out_of_place, in_place = launches_of(SPARSE, sparse)
        self.sums = {**self.sums, **added, **{each.owner: each.total for each in sparse}}
        return [*launches, *out_of_place, *in_place]


def rehearse_push(
    optimizer: Optimizer,
    variables: Sequence[Variable],
    config: PushConfig,
    options: CenterOptions = AS_AGN,
    *,
    sparse: bool,
    steps: bool = False,
    weight: float = 1.0,
) -> None:
    """Compiles the kernels of a push to variables like these.

    Args:
        optimizer: the optimizer with the rule.
        variables: variables of a worker or a center.
        config: settings of the push.
        options: those of the center.
        sparse: whether some gradients are rows.
        steps: whether to compile also the kernels of the local steps before the push.
        weight: 1 for steps without weights.
    """
    rule = options.rule

    def push_each_sum(dry: Optimizer, likes: Sequence[Variable]) -> None:
        slots = dry._slots
        if rule is not None:
            slots = rule.slots_like(slots)
            slots.make(likes, rule._slot_start)
        gradients: list[Sequence[Part]] = [[var.buffers[0] for var in likes]]
        if weight != 1:  # the first gradient and later ones have different kernels
            gradients *= 2
        if sparse:  # new rows, more rows, rows in place, an array, and rows that are added to it
            some, rows = [gradients_like(dry, likes, each) for each in ([0], [0, 1])]
            gradients = [some, rows, rows, *gradients, rows]
        sums: Sums = {}
        for parts in gradients:
            step = LocalStep(dry, (), sums, weight)
            step.add(likes, parts)
            launch_all(step.launches if steps else ())
            sums = step.sums
            if rule is not None:
                totals = [dense_sum(var, sums[var])[0] for var in likes]
                rehearse_sums(totals, likes, dry._slots, options)
            rows_of = [(sums[var], slots.rows(var)[0]) for var in likes]
            pushed = [PushedVariable("", row, total, (), row[0]) for total, row in rows_of]
            plan = PushPlan(pushed, rule or dry, config, 1.0, lambda error: None)
            plan.ready(())(lambda: None)

    of_rule: Hashable = None
    if rule is not None:
        of_rule = rule._rule, rule._slots.names, options.push, options.num_required is None
    what = ("a push", config.gamma is None, sparse, steps, weight == 1, of_rule)
    optimizer._rehearse(variables, what, push_each_sum)
