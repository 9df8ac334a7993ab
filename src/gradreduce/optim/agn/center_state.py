"""The state of an AGN center in this process: variables, slots, pushes and rounds.

A lock is held while a push is planned and launched, and while variables and slots are created. It
is not held while the host waits for a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from gradreduce.arrays.variable import Variable
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    DType,
    Waiters,
)
from gradreduce.errors import CollectiveError, DeadlineExceededError
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER, Slots
from gradreduce.weights import to_units

from .center_interface import Center, WorkerVariables
from .center_rules import CenterRule
from .push import PushConfig, PushedVariable, PushPlan
from .rounds import AS_AGN, CenterOptions, Progress, Quorum, Round
from .session_hook import Registry
from .sums import dense_sum


class CenterState(Center):
    """The state of a center in this process.

    Args:
        devices: the devices of the variables.
        options: how pushes are applied.

    Attributes:
        options: see above.
        variables: the variables, by the names that the workers use.
        slots: the slots of the variables; None before the first optimizer joins.
        fault: why pushes are rejected; None if they are accepted.
        progress: what a center with a rule has applied.
        num_worker: the number of workers.
        clock: returns the time in seconds.
    """

    registry: Registry

    def __init__(self, devices: tuple[Device, ...], options: CenterOptions = AS_AGN) -> None:
        self.devices, self.options = devices, options
        self.variables: dict[str, Variable] = {}
        self.slots: Slots | None = None
        self.fault: str | None = None
        self.progress, self.clock = Progress(), time.monotonic
        self._mutex = threading.RLock()
        self._round, self.num_worker = Round(), 1
        self._waiters = Waiters(self._mutex)
        self.registry = Registry(devices[0].mesh_state, self._waiters)

    @property
    def lock(self) -> threading.RLock:
        """The lock; raises ``BackendUnavailableError`` in a forked child."""
        self.devices[0].mesh_state.check_process()
        return self._mutex

    def variable_for(self, name: str, local: Variable) -> Variable:
        """See ``Center``. The variable goes to the device with the fewest bytes."""
        with self.lock:
            center = self.variables.get(name)
            if center is None:
                held = dict.fromkeys(self.devices, 0)
                for variable in self.variables.values():
                    held[variable.devices[0]] += variable.buffers[0].nbytes
                device = min(self.devices, key=held.__getitem__)
                center = self.variables[name] = Variable(
                    local.buffers[0],
                    f"global_center_variable/{name}",
                    trainable=False,
                    device=device,
                )
            check_same_tensor(name, (local.shape, local.dtype), (center.shape, center.dtype))
            return center

    def join(self, optimizer: Optimizer) -> Slots:
        """See ``Center``. Returns the center's slots, which the first call creates."""
        with self.lock:
            own, slots = optimizer._slots, self.slots
            if self.options.rule is not None:
                own = self.options.rule.slots_like(own)
            if slots is None:
                slots = self.slots = Slots(
                    own.kind, own.owner, own.names, "float32" if own.has_masters else None
                )
            elif (own.kind, own.names, own.has_masters) != (
                slots.kind,
                slots.names,
                slots.has_masters,
            ):
                kind, center_kind = own.kind.__name__, slots.kind.__name__
                raise ValueError(
                    f"the center uses {center_kind} with slots {list(slots.names)}"
                    f"{' and masters' if slots.has_masters else ''}; this worker uses "
                    f"{'another ' if kind == center_kind and own.kind is not slots.kind else ''}"
                    f"{kind} with {list(own.names)}"
                    f"{' and masters' if own.has_masters else ''}; all workers must use the same "
                    "rule"
                )
            return slots

    def expect(self, num_worker: int) -> None:
        """See ``Center``."""
        self.options.check_num_worker(num_worker)
        with self.lock:
            self.num_worker = max(self.num_worker, num_worker)

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """See ``Center``."""
        with self.lock:
            return self.slots.by_name.get(name, {}).get(variable) if self.slots else None

    def slot_variables(self) -> list[Variable]:
        """See ``Center``."""
        with self.lock:
            return self.slots.all() if self.slots else []

    def set_up_push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        of: Sequence[Variable],
        config: PushConfig,
    ) -> None:
        """See ``Center``."""
        self.make_slots(optimizer, [variables.center_of(var) for var in of])

    def make_slots(self, optimizer: Optimizer, centers: Sequence[Variable]) -> list[list[Buffer]]:
        """Creates missing slots of center variables; returns ``PushedVariable.written``.

        Slots can be missing at each push, because a checkpoint without slots may have been loaded.
        """
        with self.lock:
            self.check_usable()
            slots = self.join(optimizer)
            slots.make(centers, (self.options.rule or optimizer)._slot_start)
            return [slots.rows(center)[0] for center in centers]

    def list_written_buffers(self, variables: WorkerVariables) -> list[Buffer]:
        """See ``Center``."""
        return [
            copy
            for each in (*variables.centers.values(), *self.slot_variables())
            for copy in each.buffers
        ]

    def push_scope(self) -> AbstractContextManager[None]:
        """See ``Center``; Ctrl-C ends the wait for a round."""
        return DeferInterrupts() if self.options.num_required is None else nullcontext()

    def push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
        scalars: Scalars,
        weight: float,
        then: Callable[[bool], None],
    ) -> None:
        """See ``Center``."""
        arguments = optimizer, variables, config, scalars, weight, then
        while (waited := self.try_push(*arguments)) is not None:
            self._wait_for(waited, optimizer, config)

    def try_push(  # those of push
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
        scalars: Scalars,
        weight: float,
        then: Callable[[bool], None],
    ) -> Round | None:
        """Like ``push``, but does not wait.

        Returns:
            The round that the push was added to: call this again when it has been applied. None if
            the push is done, and ``then`` was called.
        """
        is_applied = True
        with DeferInterrupts(), self.lock:
            self.check_usable()
            if self.options.rule is None:
                self._push_alone(optimizer, variables, config, scalars, weight, 0, then)
                return None
            age, known = self.age_of(variables.pulled_at), variables.round
            if known is None or not (known.is_applied or known is self._round):
                is_applied = self.accepts(age)
                if is_applied and self.options.num_required is None:
                    self._push_alone(optimizer, variables, config, scalars, weight, age, then)
                    return None
                if is_applied:
                    self._add_to_round(variables, config, weight, age)
            known = variables.round
            if known is not None and not known.is_applied:
                return known
            self._copy(optimizer, variables, variables.sums)
            then(is_applied)
            return None

    def _push_alone(  # those of push
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        config: PushConfig,
        scalars: Scalars,
        weight: float,
        age: int,
        then: Callable[[bool], None],
    ) -> None:
        """Applies one push."""
        rule, done = self.options.rule, partial(then, True)
        if rule is not None:
            after, weight, scalars = self.begin_push(rule, weight, age)
            done = partial(self._finish, variables, after, done)
        plan, sums, slots = variables.last_push or (None, None, None)
        variables.last_push = None
        own = self.slots and self.slots.by_name  # replaced by a checkpoint that is loaded
        if plan is None or sums is not variables.sums or slots is not own:
            sums = variables.sums
            plan = self._push_plan(optimizer, variables, config, weight)
        plan.weight = weight
        plan.run(scalars, done)
        variables.last_push = (plan, sums, own) if plan.is_reusable else None

    def age_of(self, pulled_at: int) -> int:
        """Returns the age of a push; 0 if an older state was loaded after the worker's pull."""
        return max(0, self.progress.num_pushes - pulled_at)

    def accepts(self, age: int) -> bool:
        """Returns whether a push of this age is not dropped."""
        limit = self.options.max_staleness
        return limit is None or age <= limit

    def begin_push(
        self, rule: CenterRule, weight: float, age: int
    ) -> tuple[Progress, float, Scalars]:
        """Returns the progress after a push, the divisor of its sums, and scalars of the rule."""
        units = to_units(weight)
        after = self.progress.after(units)
        scalars = rule.begin(age, after.relative(units), self.progress.num_updates)
        return after, after.divisor(units, self.options), scalars

    def _finish(
        self, variables: WorkerVariables, after: Progress, done: Callable[[], None]
    ) -> None:
        """Counts a push of a center with a rule, from which the worker has pulled."""
        self.progress, variables.pulled_at = after, after.num_pushes
        done()

    def _push_plan(
        self, optimizer: Optimizer, variables: WorkerVariables, config: PushConfig, weight: float
    ) -> PushPlan:
        """Plans a push of the sums of a worker."""
        slots, centers, sums = optimizer._slots, variables.centers, variables.sums
        rows = self.make_slots(optimizer, [centers[var] for var in sums])
        pushed = [
            PushedVariable(
                var.name,
                written,
                total,
                [row[: 2 if slots.wants_master(var) else 1] for row in slots.rows(var)],
                None if config.gamma is None else variables.pulled[var],
            )
            for written, (var, total) in zip(rows, sums.items(), strict=True)
        ]
        return self._plan(pushed, optimizer, config, weight)

    def _plan(
        self,
        pushed: Sequence[PushedVariable],
        optimizer: Optimizer,
        config: PushConfig,
        weight: float,
    ) -> PushPlan:
        failed = partial(self.mark_push_failed, config.task)
        return PushPlan(pushed, self.options.rule or optimizer, config, weight, failed)

    # -- rounds -----------------------------------------------------------------------------------

    def _add_to_round(
        self, variables: WorkerVariables, config: PushConfig, weight: float, age: int
    ) -> None:
        """Adds the sums of a worker to the round."""
        centers, mesh_state = variables.centers, self.devices[0].mesh_state
        pushed = [(centers[var], dense_sum(var, total)[0]) for var, total in variables.sums.items()]
        failed = partial(self.mark_push_failed, config.task)
        with mesh_state.launch_lock, mesh_state.on_partial_failure(failed):
            self._round.add(pushed, to_units(weight), age, is_delta=self.options.push == "delta")
            variables.round = self._round
        self.seconds_left(self._round)  # if the round has enough pushes now, its grace begins
        self._waiters.notify()

    def _wait_for(self, known: Round, optimizer: Optimizer, config: PushConfig) -> None:
        """Waits until a round is applied, or lost by a load; applies it when it is due."""
        pending = self.devices[0].mesh_state.thread.pending_call
        end = None if pending is None else time.monotonic() + 0.9 * pending.remaining
        left: float | None = None

        def is_over() -> bool:
            nonlocal left
            self.check_usable()
            if known is not self._round:
                return True
            seconds = self.seconds_left(known)
            if seconds == 0:
                with DeferInterrupts():
                    self.ready_round(known, optimizer, config)()
                return True
            until_end = None if end is None else end - time.monotonic()
            if until_end is not None and until_end <= 0:
                raise DeadlineExceededError(
                    f"the round of this push has {known.num_pushes} of {self.num_required} pushes "
                    "at 90 % of the deadline; the next call waits for it again"
                )
            left = min([each for each in (seconds, until_end) if each is not None], default=None)
            return False

        self._waiters.until(is_over, lambda: left)

    @property
    def num_required(self) -> int:
        """The number of pushes that a round needs: at most that of the workers that are left."""
        return max(1, min(self.options.num_required or 1, self._num_left()))

    def _num_left(self) -> int:
        return self.num_worker - self.registry.num_ended()

    def seconds_left(self, quorum: Quorum) -> float | None:
        """Returns the time until a round is due; None: pushes are missing."""
        grace, left = self.options.grace, self._num_left()
        return quorum.seconds_left(self.clock(), self.num_required, left, grace)

    def ready_round(
        self, round_: Round, optimizer: Optimizer, config: PushConfig
    ) -> Callable[[], None]:
        """Prepares the update by a round; returns a function that launches it.

        The lock is held until that function has returned. Then the next round begins.
        """
        rule, end = self.options.rule, partial(self._end_round, round_)
        assert rule is not None, "rounds need a rule"
        rows = self.make_slots(optimizer, list(round_.sums))
        pushed = [
            PushedVariable(center.name, written, (total,), ())
            for written, (center, total) in zip(rows, round_.sums.items(), strict=True)
        ]
        divisor = round_.divisor(is_delta=self.options.push == "delta")
        scalars = rule.begin(round_.age, 1.0, self.progress.num_updates)
        if not pushed:  # of an actor without these variables
            return end
        return partial(self._plan(pushed, optimizer, config, divisor).ready(scalars), end)

    def _end_round(self, round_: Round) -> None:
        """Counts a round whose work is launched, and wakes its workers."""
        self._round = Round()
        self.progress = self.progress.after(round_.weight, round_.num_pushes)
        round_.is_applied = True
        self._waiters.notify()

    @property
    def owner_of_progress(self) -> CenterState | None:
        """This object if its state has ``progress``, which only a rule uses."""
        return self if self.options.rule is not None else None

    def end_load(self) -> None:
        """Accepts pushes after a load; those of a round that was not applied are added again."""
        self.fault, self._round = None, Round()
        self._waiters.notify()

    # -- a pull -----------------------------------------------------------------------------------

    def pull(
        self, optimizer: Optimizer, variables: WorkerVariables, then: Callable[[], None]
    ) -> None:
        """See ``Center``."""
        with self.lock:
            self.check_usable()
            self._copy(optimizer, variables, variables.centers)
            then()

    def _copy(
        self, optimizer: Optimizer, variables: WorkerVariables, of: Iterable[Variable]
    ) -> None:
        """Copies the center to variables of a worker, and to their masters."""
        for local in of:
            center = variables.centers[local]
            local.assign(center)
            optimizer._slots.update_master(local)
            theirs, mine = self.slot(center, MASTER), optimizer.get_slot(local, MASTER)
            if theirs is not None and mine is not None:
                mine.assign(theirs)
        variables.pulled_at, variables.round = self.progress.num_pushes, None

    def check_usable(self) -> None:
        """Raises ``CollectiveError`` if a push failed part-way."""
        if self.fault is not None:
            raise CollectiveError(
                f"the center is only partly updated: {self.fault}; restore it with load_state_dict"
            )

    def mark_push_failed(self, task: str, error: BaseException) -> None:
        """Records that a push failed part-way; later pushes raise."""
        self.fault = f"a push failed part-way: {task}: {error!r}"
        error.add_note(
            "A push failed part-way: the center rejects pushes until load_state_dict restores it."
        )


def check_same_tensor(
    name: str, own: tuple[tuple[int, ...], DType], known: tuple[tuple[int, ...], DType]
) -> None:
    """Raises ``ValueError`` if a worker's variable has another shape or dtype than the center's."""
    if own != known:
        (shape, dtype), (known_shape, known_dtype) = own, known
        raise ValueError(
            f"{name!r} is {dtype}{list(shape)} at this worker, but {known_dtype}"
            f"{list(known_shape)} at the center, where another worker created it: use the same "
            "shape and dtype in all workers"
        )
