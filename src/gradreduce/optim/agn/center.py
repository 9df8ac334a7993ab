"""The AGN center: variables and slots that the workers of one training share.

A lock is held while a push is planned and launched, and while variables and slots are created. It
is not held while the host waits for a device.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.checkpoint import downloader, load_all, values_of
from gradreduce.comm.process_group import check_one_process
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    DType,
    Mesh,
    Waiters,
    as_deadline,
    names_of,
)
from gradreduce.errors import CollectiveError, DeadlineExceededError, NotCopied
from gradreduce.optim.hyperparameters import as_integer
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER, Slots
from gradreduce.weights import to_units

from .center_interface import Center, WorkerVariables
from .center_rules import CenterRule, Nesterov
from .checkpoint import center_table, ready_center
from .push import PushConfig, PushedVariable, PushPlan
from .rounds import AS_AGN, CenterOptions, Progress, PushKind, Round, as_options
from .session_hook import Registry, WorkerThread
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
        self._round, self._num_worker = Round(), 1
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
        num_required, rule = self.options.num_required, self.options.rule
        if num_required is not None and num_required > num_worker:
            raise ValueError(
                f"num_required={num_required} of the center is more than num_worker={num_worker}: "
                "no round would be complete"
            )
        if isinstance(rule, Nesterov) and num_required != num_worker:
            warnings.warn(
                f"Nesterov diverges if pushes are old, and here rounds have {num_required or 1} of "
                f"{num_worker} pushes: pass num_required={num_worker}, or use DelayedNesterov",
                stacklevel=3,
            )
        with self.lock:
            self._num_worker = max(self._num_worker, num_worker)

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
        while (waited := self.begin_push(*arguments)) is not None:
            self._wait_for(waited, optimizer, config)

    def begin_push(  # those of push
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
        limit, is_applied = self.options.max_staleness, True
        with DeferInterrupts(), self.lock:
            self.check_usable()
            age, known = self.progress.num_pushes - variables.pulled_at, variables.round
            if known is None or not (known.is_applied or known is self._round):
                is_applied = limit is None or age <= limit
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
            units = to_units(weight)
            after = self.progress.after(units)
            weight = after.divisor(units, self.options)
            scalars = rule.begin(age, after.relative(units), self.progress.num_updates)
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
        self.seconds_left()  # if the round has enough pushes now, its grace begins
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
            seconds = self.seconds_left()
            if seconds == 0:
                self.apply_round(optimizer, config)
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
        return self._num_worker - self.registry.num_ended()

    def seconds_left(self) -> float | None:
        """Returns the time until the present round is due; None: pushes are missing."""
        grace, left = self.options.grace, self._num_left()
        return self._round.seconds_left(self.clock(), self.num_required, left, grace)

    def apply_round(self, optimizer: Optimizer, config: PushConfig) -> None:
        """Applies the present round by the rule, and begins the next one; the lock is held."""
        round_, rule = self._round, self.options.rule
        assert rule is not None, "rounds need a rule"
        rows = self.make_slots(optimizer, list(round_.sums))
        pushed = [
            PushedVariable(center.name, written, (total,), ())
            for written, (center, total) in zip(rows, round_.sums.items(), strict=True)
        ]
        divisor = round_.divisor(is_delta=self.options.push == "delta")
        scalars = rule.begin(round_.age, 1.0, self.progress.num_updates)
        with DeferInterrupts():
            self._plan(pushed, optimizer, config, divisor).run(scalars, self._end_round)

    def _end_round(self) -> None:
        """Counts a round whose work is launched, and wakes its workers."""
        round_, self._round = self._round, Round()
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


class AGNCenter(NotCopied):
    """Center variables and their slots, shared by the workers of one training.

    The first worker that creates a variable of a name also creates the center variable, with the
    same value. The first push creates the slots. Each new variable goes to the device with the
    fewest bytes, so that pushes of many workers do not queue on one GPU. All methods are
    thread-safe. Source: ``tf.contrib.opt.AGNOptimizer``, whose center is on parameter servers.

    Args:
        mesh: the devices of the variables: a mesh, a part of one, or a device. A device may be
            passed as its name (``"gpu:1"``) or as a ``torch.device``, in ``gr.default_mesh()``.
            Default: all devices of ``gr.default_mesh()``.
        center_rule: how a push changes the center: a rule of ``gr.center_rules``, or one of yours.
            The inner optimizer then makes only the local steps. Default: the center applies the
            mean gradient by the inner optimizer, as AGN does.
        push: what a rule gets: ``"gradient_mean"``, or ``"delta"``, the worker's variables at the
            start of the period minus those at its end.
        num_required: with a rule, applies it to rounds: when so many workers have pushed, the rule
            gets the weighted mean of their pushes, and all of them pull. A push waits until its
            round is applied. Workers that have ended (``make_session_run_hook``) are not waited
            for. None: each push is applied at once.
        grace: seconds that a round with enough pushes waits for those of other workers.
        max_staleness: drops a push if the center has applied more pushes of other workers since
            the worker last pulled; the worker pulls. None: no limit.

    Attributes:
        devices: the devices of the variables.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the default mesh does not have the device, a number is out of range, an option
            needs a ``center_rule``.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> center = gr.AGNCenter(mesh)
        >>> getter = gr.AGNCustomGetter(mesh.devices[1], center=center)
        >>> w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
        >>> center.variables()
        [<Variable 'global_center_variable/w' float32[1] on sim:0>]
        >>> center.values()
        {'w': array([4.], dtype=float32)}
    """

    _copy_hint = "pass its state_dict(), and load that into a new one"

    def __init__(  # options of one call
        self,
        mesh: Mesh | DeviceLike | None = None,
        *,
        center_rule: CenterRule | None = None,
        push: PushKind = "gradient_mean",
        num_required: int | None = None,
        grace: float = 0.0,
        max_staleness: int | None = None,
    ) -> None:
        self.devices: tuple[Device, ...] = as_devices(
            default_mesh() if mesh is None else mesh, "mesh="
        )
        check_one_process(self.devices[0], "AGNCenter")
        options = as_options(center_rule, push, num_required, grace, max_staleness)
        self._state = CenterState(self.devices, options)
        # Getters and optimizers use only this attribute. For a center in another process it is
        # another implementation of ``Center``.
        self._shared: Center = self._state

    def __repr__(self) -> str:
        return f"<AGNCenter of {len(self._state.variables)} variables on {names_of(self.devices)}>"

    # -- members ----------------------------------------------------------------------------------

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """Returns the slot ``name`` of a center variable; None if there is none."""
        return self._shared.slot(variable, name)

    def variables(self) -> list[Variable]:
        """Returns the center variables without slots, sorted by name.

        ``AGNOptimizer.variables`` returns the slots.
        """
        with self._state.lock:
            return sorted(self._state.variables.values(), key=lambda each: each.name)

    def values(self) -> dict[str, Any]:
        """Returns a new array of each variable by its name (``"w"``), between two pushes.

        The call waits for the devices.

        Raises:
            CollectiveError: a push failed part-way.
        """
        center = self._state
        with center.lock:
            center.check_usable()
            copies = values_of(center.variables).save()
        return {name: copies[name].numpy() for name in sorted(copies)}

    @property
    def failed_workers(self) -> tuple[int, ...]:
        """The task indices of workers that an exception ended, in the order of the exceptions."""
        return tuple(self._shared.registry.list_failed())

    def start_worker(self, task_index: int, work: Callable[[], object]) -> threading.Thread:
        """Runs a worker in its own thread.

        If an exception ends the worker, the other workers continue, and ``failed_workers`` contains
        its task index.

        Args:
            task_index: the number of the worker, from 0 on.
            work: the function to run, which is called without arguments.

        Returns:
            The running daemon thread. Call its ``join``, which raises the exception that ended the
            worker, if there was one.

        Raises:
            TypeError: ``task_index`` is not an integer, or ``work`` is not callable.
            ValueError: ``task_index`` is negative.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> center = gr.AGNCenter(mesh)
            >>> def work():
            ...     getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
            ...     w = gr.get_variable("w", np.float32([4]), custom_getter=getter)
            ...     inner = gr.GradientDescentOptimizer(0.25)
            ...     optimizer = gr.AGNOptimizer(inner, 1, getter, communication_period=2)
            ...     with optimizer.make_session_run_hook(True, 0):
            ...         for _ in range(4):
            ...             optimizer.minimize(lambda: np.sum(2 * w))
            >>> center.start_worker(0, work).join()
            >>> center.variables()[0].numpy()
            array([3.], dtype=float32)
        """
        if not callable(work):
            raise TypeError(f"work={work!r} is not callable")
        number = as_integer("task_index", task_index, least=0)
        registry = self._shared.registry
        registry.clear_failure(number)
        worker = WorkerThread(number, work, registry)
        worker.start()
        return worker

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns center variables and slots as host data, for a checkpoint.

        Float16 and bfloat16 values are saved as float32. The state is consistent: it contains each
        push completely or not at all. The call waits for the devices.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Raises:
            ValueError: ``deadline`` is not a number above 0, ``output_type`` is unknown, or it is
                ``"torch"`` and PyTorch is not imported.
            CollectiveError: a push failed part-way.
        """
        download, center = downloader(as_deadline(deadline), output_type), self._state
        with center.lock:
            center.check_usable()
            copies = center_table(center.variables, center.slots, center.owner_of_progress).save()
        return download(copies)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a ``state_dict``, which may come from another process or backend.

        Workers must first create the variables in ``state`` and, if it has slots, an
        ``AGNOptimizer``. Load the states of the workers after that of the center.

        If the center rejected pushes, because one had failed part-way, it accepts them again. If
        ``state`` is invalid, nothing changes. If a device fails during the load, the center rejects
        pushes. Pushes of other threads run before or after the load. The host waits for a push that
        is being launched, and for no device.

        Args:
            state: the ``state_dict`` of a center with variables of the same names.

        Raises:
            KeyError: a key is missing or unknown, or no worker has created a variable.
            TypeError: a value has a wrong type.
            ValueError: the format or rule differs, there are slots and no worker has an
                ``AGNOptimizer``, or an array has another shape or dtype.
        """
        center = self._state
        with center.lock:
            load = ready_center(center.variables, center.slots, state, center.owner_of_progress)
            begin = partial(setattr, center, "fault", "a load_state_dict failed part-way")
            load_all([begin, load, center.end_load])
