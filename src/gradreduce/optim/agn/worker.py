"""Runs the local steps of an AGN worker, and a push after each period of steps.

Everything in a local step that can fail is done before its first launch. Steps with dense gradients
of the same variables share one plan. So do pushes that need no temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from gradreduce.accumulator.state import launch_all
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.trace_context import check_unread
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, Device, DType, PackInfo, copy_to, deadline_scope
from gradreduce.optim.gradient_inputs import ready_count
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER
from gradreduce.optim.update_plan import Plan
from gradreduce.weights import ONE, from_units, is_too_large

from .center_interface import Center, WorkerVariables
from .local_step import LocalStep, rehearse_push
from .push import PushConfig
from .rounds import write_deltas
from .step_weight import StepWeight
from .sums import dense_sum


class Worker:
    """State and steps of one worker.

    Args:
        inner: the inner optimizer, for worker and center.
        variables: the variables of the worker's getter.
        center: receives the pushes.
        config: the settings of the pushes.
        period: the number of steps in a period.
        resets: whether a pull sets the worker's momentum to zero.

    Attributes:
        inner: see above.
        variables: see above.
        config: see above.
        period: see above.
        push_pending: whether the next step must first retry a push, because the push failed before
            it changed the center.
        num_applied: the number of pushes that the center has applied.
        num_dropped: the number of pushes that it has dropped, because they were too old.
        has_rule: whether the center has a rule.
    """

    def __init__(
        self,
        inner: Optimizer,
        variables: WorkerVariables,
        center: Center,
        config: PushConfig,
        *,
        period: int,
        resets: bool,
    ) -> None:
        self.inner, self.variables, self.config, self.period = inner, variables, config, period
        self._center, self._resets = center, resets
        self.push_pending = False
        self.num_applied = self.num_dropped = 0
        self.has_rule = center.options.rule is not None
        self._pushes_deltas = center.options.push == "delta"
        self._keeps_pulled = config.gamma is not None or self._pushes_deltas
        self._local: Plan | None = None  # the plan of the last step, if it was dense

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        weight: StepWeight,
        global_step: Variable | None,
        seconds: float | None,
    ) -> bool:
        """Implements ``AGNOptimizer.apply_gradients``, without validating arguments.

        Args:
            gradients: one for each variable; not used if the weight is 0.
            variables: each once.
            weight: the weight of the step.
            global_step: a Variable that counts the pushes, or None.
            seconds: the seconds until the deadline, from ``as_deadline``.
        """
        inner, retry_push, num_applied = self.inner, self.push_pending, self.num_applied
        if weight.units != ONE or self.variables.excess:
            self._check_weight(weight)
        plan = None if retry_push else self._local
        if plan is not None and not plan.is_valid_for(variables, inner._slots, inner._rule):
            plan = None
        devices = plan.devices if plan else [each for var in variables for each in var.devices]
        with deadline_scope("apply_gradients", seconds, [*devices, *self._center.devices]):
            parts = self._colocate(gradients, variables, plan, weight)
            if retry_push:
                self._submit(self._ready_push(inner._slots.powers, variables, global_step))
            with inner._slots.rollback_on_error() if plan is None else nullcontext():
                self._step(variables, devices, parts, plan, weight, global_step)
        return self.num_applied > num_applied

    def _check_weight(self, weight: StepWeight) -> None:
        """Raises ``ValueError`` unless the period can have a step of this weight."""
        shared = self.variables
        total = weight.units if self.push_pending else shared.weight() + weight.units
        if is_too_large(total):
            raise ValueError(
                "weight: the sum of the weights of a period exceeds the largest float64"
            )
        if not total and not (self.variables.num_steps + 1) % self.period:
            raise ValueError(
                f"weight=0: all {self.period} steps of this period would have weight 0, and there "
                "would be no mean to push; the last step needs a weight above 0"
            )

    def _colocate(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        plan: Plan | None,
        weight: StepWeight,
    ) -> Sequence[Part]:
        """Validates gradients; returns one for each copy of each variable, or () for weight 0."""
        if not weight.units:
            for var in variables:
                self.variables.center_of(var)
                var.devices[0].mesh_state.check_usable(var.devices[0])  # as no launch does
            return ()
        others: list[Buffer] = []
        if plan is None:
            sums = self.variables.sums.values()
            others += [copy for total in sums if isinstance(total, tuple) for copy in total]
        if self.push_pending:  # the retried push writes the center before the step reads gradients
            others += self._center.list_written_buffers(self.variables)
        rehearse = self._rehearse
        if weight.units != ONE:
            rehearse = partial(rehearse, weight=weight.factor)
            if plan is not None:
                rehearse(variables)
        return self.inner._colocate_gradients(
            gradients, variables, plan, others, rehearse=rehearse, weights=weight.of_replicas
        )

    # -- a step -----------------------------------------------------------------------------------

    def _step(
        self,
        variables: Sequence[Variable],
        devices: Sequence[Device],
        parts: Sequence[Part],
        plan: Plan | None,
        weight: StepWeight,
        global_step: Variable | None,
    ) -> None:
        """Runs a local step, and a push if the step is the last of its period."""
        inner, powers = self.inner, self.inner._slots.powers
        scalars: Scalars = ()
        if parts:
            # Called first, because a hyperparameter may be a callable that raises.
            scalars, powers = inner._next_update(powers)
        pushes = []
        if not (self.variables.num_steps + 1) % self.period:
            pushes = [self._ready_push(powers, variables, global_step)]
        step = LocalStep(inner, scalars, self.variables.sums, weight.factor)
        if plan is not None and {*map(type, parts)} == {Buffer}:
            label = plan.label
            step.accumulate_and_update(plan, parts)
        else:
            label = PackInfo(range(len(variables)), names=[var.name for var in variables])
            if parts:
                self.prepare(variables)
                step.add(variables, parts, self._local)
            else:
                step.plan = self._local
        count = partial(self._count_step, step, weight, bool(pushes))
        self._submit(partial(inner._launch, step.launches, devices, label, powers, count), *pushes)

    def _submit(self, *calls: Callable[[], None]) -> None:
        """Launches a step and its push, or one of them, or a pull; see ``Center.push_scope``."""
        with self._center.push_scope():
            launch_all(calls)

    def _count_step(self, step: LocalStep, weight: StepWeight, ends_period: bool) -> None:
        """Counts a local step whose work is launched; keeps the sums after it, and its plan."""
        self.variables.num_steps += 1
        self.variables.count += 1
        self.variables.excess += weight.units - ONE
        self.push_pending = ends_period  # until the push has been launched
        self.variables.sums, self._local = step.sums, step.plan

    def _rehearse(
        self, variables: Sequence[Variable], *, sparse: bool = False, weight: float = 1.0
    ) -> None:
        """Compiles kernels of step and push; raises ``KeyError`` for unknown variables."""
        for var in variables:
            self.variables.center_of(var)
        rehearse_push(
            self.inner, variables, self.config, self._center.options,
            sparse=sparse, steps=True, weight=weight,
        )  # fmt: skip

    def prepare(self, variables: Sequence[Variable]) -> None:
        """Compiles kernels of step and push, and creates slots of worker and center.

        Raises:
            KeyError: the getter did not create a variable.
        """
        inner = self.inner
        inner._check_hyperparameters()
        self._rehearse(variables)
        self._center.set_up_push(inner, self.variables, variables, self.config)
        inner._slots.make(variables, inner._slot_start)
        for var in variables if self._keeps_pulled else ():
            # If the worker has not pulled yet, its initial values count as pulled.
            if var not in self.variables.pulled:
                self.variables.pulled[var] = copy_to(var.devices[0], self._unrounded(var))

    # -- a communication --------------------------------------------------------------------------

    def _ready_push(
        self, powers: Scalars, variables: Sequence[Variable], global_step: Variable | None
    ) -> Callable[[], None]:
        """Validates a push; returns a function that pushes the sums.

        Args:
            powers: the powers of the inner optimizer at the push.
            variables: the variables of the step before the push.
            global_step: a Variable that counts the pushes, or None.
        """
        inner, shared = self.inner, self.variables
        written = {*shared.sums, *variables}
        check_unread([*written, *map(shared.centers.__getitem__, written)])
        count = ready_count(global_step)
        scalars: Scalars = ()
        if not self.has_rule:
            scalars, powers = inner._next_update(powers)
        then = partial(self._count_push, powers, count)
        return partial(self._push, scalars, then)

    def _push(self, scalars: Scalars, then: Callable[[bool], None]) -> None:
        """Pushes the sums or deltas, and the sum of their weights; see ``Center.push``."""
        shared = self.variables
        if self._pushes_deltas:
            self._replace_sums()
        # Without weights the divisor is the period, also if a start has dropped some of its steps.
        weight = from_units(shared.weight()) if shared.excess else float(self.period)
        self._center.push(self.inner, shared, self.config, scalars, weight, then)

    def _replace_sums(self) -> None:
        """Replaces the sums of gradients by the last pulled values minus the present ones."""
        shared = self.variables
        shared.sums = {var: dense_sum(var, total) for var, total in shared.sums.items()}
        rows = [
            (total[0], shared.pulled[var], self._unrounded(var))
            for var, total in shared.sums.items()
            if isinstance(total, tuple)
        ]
        write_deltas(rows)

    def pulled_dtype(self, var: Variable) -> DType:
        """Returns the dtype of the pulled value that is kept for a variable."""
        return self.inner._slots.state_dtype(var) if self._pushes_deltas else var.dtype

    def _unrounded(self, var: Variable) -> Buffer:
        """Returns the first copy of a variable; for deltas that of its master, if it has one."""
        master = self.inner.get_slot(var, MASTER) if self._pushes_deltas else None
        return (master or var).buffers[0]

    def _count_push(self, powers: Scalars, count: Callable[[], None], is_applied: bool) -> None:
        """Ends the period of a push whose work is launched, or which the center has dropped.

        Args:
            powers: the powers of the inner optimizer after the push.
            count: increments the user's ``global_step``.
            is_applied: whether the center has applied the push.
        """
        pushed = self.variables.sums
        self.num_applied += is_applied
        self.num_dropped += not is_applied
        self.inner._slots.powers = powers
        if self._resets:
            self._reset(pushed)
        self._end_period(pushed)
        if is_applied:
            count()

    def _end_period(self, variables: Iterable[Variable]) -> None:
        """Ends a period after a pull or push, when these variables equal the center.

        ``distance_scale`` measures the distance between the center at the next push and the values
        that are copied here. A push copies the variables that it pushes; the others keep the value
        of an earlier pull. Until the first pull or push, the value that counts is the one of the
        worker's variable at ``prepare`` or its first step, even if the center has another.
        """
        for var in variables if self._keeps_pulled else ():
            kept = self.variables.pulled[var]
            kept.device.copy(kept, self._unrounded(var))
        self.variables.sums = {}
        self.variables.count = self.variables.excess = 0
        self.push_pending = False

    def _reset(self, variables: Iterable[Variable]) -> None:
        """Sets the momentum of variables to zero."""
        for name in _MOMENTUM & set(self.inner._slots.names):
            for var in variables:
                for copy in self.inner._slots.by_name[name][var].buffers:
                    copy.device.fill_zero(copy)

    def start(self) -> None:
        """Copies the center to the worker and clears its sums."""
        check_unread(self.variables.centers)
        then = partial(self._end_period, self.variables.pulled)
        self._submit(partial(self._center.pull, self.inner, self.variables, then))


# Names of slots that hold momentum.
_MOMENTUM = {"momentum", "m"}
