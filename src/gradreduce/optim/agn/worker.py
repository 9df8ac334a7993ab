"""Runs the local steps of an AGN worker, and its pushes when they are due.

All memory, kernels and plans of a call exist before its first launch. A step with dense gradients
of the same variables is planned once, and so is a push that needs no staging memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

from gradreduce.arrays.caller_streams import release_inputs
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.trace_context import check_unread
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DeferInterrupts, copy_over, deadline_scope
from gradreduce.optim.gradient_inputs import ready_count
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER

from .center import StalePushError
from .local_step import LocalPlan, local_step, planned_step
from .push import PushConfig, PushPlan, Sum
from .variables import AGNCustomGetter, HostCounter, Member


class Worker:
    """State and steps of one worker.

    Args:
        inner: its optimizer, for worker and center.
        getter: created its variables.
        config: of its pushes.
        resets: whether a pull sets its momentum to zero.

    Attributes:
        inner: the optimizer.
        step: number of local steps.
        is_due: whether a push failed before it changed anything, and must be made.
        pulled: for its variables, the center at the last pull; used by the distance scaling.
    """

    def __init__(
        self, inner: Optimizer, getter: AGNCustomGetter, config: PushConfig, *, resets: bool
    ) -> None:
        self.inner, self._getter, self._center = inner, getter, getter.center
        self._config, self._resets = config, resets
        self.step = HostCounter("local_step", getter.devices[0])
        self.is_due = False
        self.pulled: dict[Variable, Variable] = {}
        self._local: LocalPlan | None = None  # of the last dense step
        self._push: PushPlan | None = None  # the next one, or the last, if that may be run again

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        global_step: Variable | None,
        seconds: float | None,
    ) -> bool:
        """Implements ``AGNOptimizer.apply_gradients``, without validating arguments.

        Args:
            gradients: one for each variable.
            variables: each once.
            global_step: counts the pushes; or None.
            seconds: until the deadline, from ``as_deadline``.
        """
        inner, plan = self.inner, self._local
        if plan and (
            plan.version != self._center._version
            or not plan.is_valid_for(variables, inner._slots, inner._rule)
        ):
            plan = None
        members = plan.members if plan else [self._getter._member(var) for var in variables]
        devices = [device for var in variables for device in var.devices] if seconds else []
        with deadline_scope("apply_gradients", seconds, [*devices, *self._center.devices]):
            others = () if plan else self._written_besides(members)
            parts = inner._colocated_gradients(gradients, variables, plan, others)
            makes_up = self.is_due
            if makes_up:
                self._retry_push(global_step)
            with inner._slots.rollback_on_error() if plan is None else nullcontext():
                self._local = self._step_by(members, parts, plan, global_step) or self._local
        return makes_up or not self.step.value % self._config.period

    @property
    def by_distance(self) -> bool:
        """Whether gradients are scaled by the distance that the center has moved."""
        return self._config.gamma is not None

    @property
    def members(self) -> list[Member]:
        """All trainable variables with their copies, in the order of creation."""
        return list(self._getter._members.values())

    def new_pulled(self, var: Variable, value: Buffer) -> Variable:
        """Returns a copy of the center at a pull, to be kept in ``pulled``."""
        return Variable(value, f"pulled/{var.name}", trainable=False)

    # -- a step -----------------------------------------------------------------------------------

    def _written_besides(self, members: Sequence[Member]) -> list[Buffer]:
        """Returns what a call writes besides the worker's variables and their slots."""
        written = [member.center for member in members] + list(self.pulled.values())
        written += [slot for member in members for slot in self._center._slots_of(member.center)]
        copies = [copy for each in written for copy in each.buffers]
        return copies + [copy for member in members for copy in member.total.allocated]

    def _step_by(
        self,
        members: Sequence[Member],
        parts: Sequence[Part],
        plan: LocalPlan | None,
        global_step: Variable | None,
    ) -> LocalPlan | None:
        """Runs a local step and a push if due, after all that can fail.

        Returns:
            A plan for later steps like this one, if there was none.
        """
        inner, planned = self.inner, None
        # A callable may raise; nothing has been created yet.
        scalars, powers = inner._next_update(inner._slots.powers)
        if plan is not None and _are_dense(parts):
            step = planned_step(plan, parts, scalars)
        else:
            self.prepare(members)
            step = local_step(inner, members, parts, scalars)
        is_due = not (self.step.value + 1) % self._config.period
        if is_due:
            push = self._ready_push(self._current_sums() | step.sums(), global_step, powers)
        if plan is None and inner._rule is not None and _are_dense(parts):
            version = self._center._version  # read before the slots: a load may come between
            others = self._written_besides(members)
            planned = LocalPlan(inner, step.dense, others, version)

        def count() -> None:
            inner._slots.commit(powers)
            self.step.value += 1
            self.is_due = is_due

        with DeferInterrupts():
            step.launch(count)
            release_inputs()
            if is_due:
                push()
        return planned

    def prepare(self, members: Sequence[Member]) -> None:
        """Compiles the kernels of a step, and creates slots of worker and center."""
        self.inner.prepare([member.local for member in members])
        self._center._prepare(self.inner, [member.center for member in members])
        for local in [member.local for member in members] if self.by_distance else ():
            # Without a start, the worker's initial values count as pulled.
            if local not in self.pulled:
                self.pulled[local] = self.new_pulled(local, local.buffers[0])

    # -- a communication --------------------------------------------------------------------------

    def _current_sums(self) -> dict[Member, Sum]:
        """Returns the sums of the current period."""
        return {
            member: member.total.current for member in self.members if not member.total.is_empty
        }

    def _ready_push(
        self, sums: Mapping[Member, Sum], global_step: Variable | None, powers: Scalars
    ) -> Callable[[], None]:
        """Plans a push; the returned function runs it.

        Args:
            sums: of the period.
            global_step: counts the pushes; or None.
            powers: of the inner optimizer at the push.
        """
        check_unread([var for member in sums for var in (member.local, member.center)])
        if self._push is None or not self._push.is_valid_for(sums):
            self._push = PushPlan(self._center, self.inner, sums, self.pulled, self._config)
        push, count = self._push, ready_count(global_step)
        scalars, powers = self.inner._next_update(powers)

        def pushed() -> None:
            self.is_due = False
            self.inner._slots.powers = powers
            for member in push.members:
                member.total.cleared()
            if self._resets:
                self._reset([member.local for member in push.members])
            count()

        def communicate() -> None:
            if not push.is_reusable:
                self._push = None
            try:
                with DeferInterrupts():
                    push.run(scalars, pushed)
            except StalePushError:  # the center was loaded meanwhile: push the same sums again
                self._retry_push(global_step)

        return communicate

    def _retry_push(self, global_step: Variable | None) -> None:
        """Plans and runs a push that has failed before."""
        self._ready_push(self._current_sums(), global_step, self.inner._slots.powers)()

    def _reset(self, variables: Sequence[Variable]) -> None:
        """Sets the momentum of variables to zero."""
        for name in _MOMENTUM & set(self.inner._slots.names):
            for var in variables:
                for copy in self.inner._slots.by_name[name][var].buffers:
                    copy.device.fill_zero(copy)

    def start(self) -> None:
        """Copies the center to the worker and clears its sums."""
        members = self.members
        check_unread([member.local for member in members])
        center = self._center
        with DeferInterrupts(), center._lock:
            center._check_usable()
            with center.devices[0].mesh_state.launch_lock:  # each push holds it, at least
                for member in members:
                    _copy_everywhere(member.center, member.local)
                    self.inner._slots.update_master(member.local)
                    theirs = center.slot(member.center, MASTER)
                    mine = self.inner.get_slot(member.local, MASTER)
                    if theirs is not None and mine is not None:
                        _copy_everywhere(theirs, mine)
            for member in members:
                member.total.cleared()
                if member.local in self.pulled:
                    self.pulled[member.local].assign(member.local.buffers[0])
            self.is_due = False


def _copy_everywhere(center: Variable, local: Variable) -> None:
    """Copies a center variable to each copy of a worker's variable."""
    (source,) = center.buffers
    for copy in local.buffers:
        copy_over(copy.device, copy, source)


def _are_dense(parts: Sequence[Part]) -> TypeGuard[Sequence[Buffer]]:
    return {type(part) for part in parts} == {Buffer}


# Names of slots that hold momentum.
_MOMENTUM = {"momentum", "m"}
