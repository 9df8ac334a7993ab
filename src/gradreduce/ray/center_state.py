"""The variables and slots of an AGN center that one shard holds, and the commands on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.arrays.convert import cast_array
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import StateTable, anything, downloader, some_of, validate_state
from gradreduce.device import Buffer, Device, as_dtype, copy_to
from gradreduce.optim.agn.center_state import CenterState, check_same_tensor
from gradreduce.optim.agn.checkpoint import center_table, progress_entry, ready_center
from gradreduce.optim.agn.local_step import rehearse_push
from gradreduce.optim.agn.push import PushConfig, PushedVariable, PushPlan
from gradreduce.optim.agn.rounds import AS_AGN, CenterOptions, Progress, Quorum, Round
from gradreduce.optim.agn.sums import Sum, dense_sum
from gradreduce.optim.checkpoint import ready_slots
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER
from gradreduce.weights import to_units

from .commands import (
    ActorCommand,
    Begin,
    CenterPart,
    ClearFailure,
    Create,
    End,
    Join,
    ListShards,
    ListWorkers,
    LoadCenter,
    MarkFailed,
    Pull,
    Push,
    PushRound,
    SlotsOf,
    SlotValue,
)
from .messages import Layout, Spec, TensorMessage, rehearse_packing, specs_of
from .shard_state import ActorSettings, ShardState

MAX_COUNT = 2**63 - 1  # number of gradients in a sum of rows; a push does not divide by it


class DenseKey(NamedTuple):
    """What pushes must have in common to use the same plan.

    Attributes:
        names: names of the variables.
        form: ``TensorMessage.form`` of their sums.
        config: settings of the push, without the worker's name.
        rule: rule of the optimizer.
    """

    names: Sequence[str]
    form: str
    config: PushConfig
    rule: Any


class NotJoinedError(RuntimeError):
    """The actor does not know the rule or a variable: it is new, or has loaded a snapshot."""


class DensePush:
    """Pushes of the same variables with dense sums, by a compiled rule without distance scaling.

    The small variables of one dtype, and their slots, are moved to flat Buffers with the layout of
    the message. So a push needs one upload, one launch and one download for each dtype.

    Args:
        key: what the pushes have in common; ``form`` is also that of the variables.
        rows: for each name the variable of the center, and its slots.
        optimizer: the optimizer with the rule; its kernels are compiled.
        device: device of the variables.
        failed: called with the error if a push fails part-way.

    Attributes:
        key: see above; a push with another key needs another plan.
    """

    def __init__(
        self,
        key: DenseKey,
        rows: Sequence[Sequence[Variable]],
        optimizer: Optimizer,
        device: Device,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.key = key
        self._optimizer, self._device, self._failed = optimizer, device, failed
        self._layout = Layout.of(key.form)
        self._sums = self._layout.packs(device)
        columns = [self._layout.move(device, column) for column in zip(*rows, strict=True)]
        self._packs = columns[0] if columns else []  # the small variables
        self._rows = rows
        small = zip(*columns, strict=True)
        self._plans = self._plan_updates(
            [("small variables", row, total) for row, total in zip(small, self._sums, strict=True)]
        )

    def run(self, scalars: Scalars, weight: float, message: TensorMessage) -> TensorMessage:
        """Pushes the sums of a message, divided by a weight; returns the new values."""
        self._layout.upload(self._sums, message)
        names, alone = self.key.names, self._layout.alone(self._device, message)
        rows = {index: [each.buffers[0] for each in self._rows[index]] for index in alone}
        rest = self._plan_updates(
            [(names[index], row, alone[index]) for index, row in rows.items()]
        )
        push: Callable[[], None] = lambda: None  # noqa: E731
        for plan in (*rest, *self._plans):  # the last one calls the others
            plan.weight = weight
            push = partial(plan.run, scalars, push)
        push()
        return self._layout.message_of(self._packs, {index: row[0] for index, row in rows.items()})

    def _plan_updates(
        self, updates: Sequence[tuple[str, Sequence[Buffer], Buffer]]
    ) -> list[PushPlan]:
        """Returns a plan of updates, or none.

        Args:
            updates: for each update its name, the Buffers that it writes, and the sum.
        """
        if not updates:
            return []
        pushed = [PushedVariable(name, row, (total,), [row[:1]]) for name, row, total in updates]
        return [PushPlan(pushed, self._optimizer, self.key.config, 1.0, self._failed)]


class CenterShardState(ShardState):
    """The variables of a center that this shard holds, and their slots.

    Args:
        settings: settings of the shard.
        options: how pushes are applied.
    """

    def __init__(self, settings: ActorSettings, options: CenterOptions = AS_AGN) -> None:
        super().__init__(settings)
        self._shard, self._options = settings.shard, options
        self.load(None)

    @property
    def clock(self) -> int:
        """The number of pushes."""
        return self._center.progress.num_pushes

    def load(self, state: dict[str, Any] | None) -> None:
        """See ``ShardState``; restores slots when a worker joins, because it sends their rule."""
        self._center = CenterState((self._device,), self._options)
        self._optimizer: Optimizer | None = None
        self._specs: dict[str, Spec] = {}
        self._shards: dict[str, int] = {}
        self._dense: DensePush | None = None  # plan of the last push
        self._answered: list[ref[np.ndarray]] = []  # large arrays of answers
        # Launches a push by a Python rule, which ``check`` has computed.
        self._checked: Callable[[], None] | None = None
        # Rule and slots of a snapshot, which are kept until a worker joins.
        self._saved_optimizer: dict[str, Any] | None = None
        if state is None:
            return
        self._center.progress = Progress(state["num_pushes"])
        self._shards = state["shards"]
        for name, (shape, dtype) in state["specs"].items():
            self._specs[name] = (tuple(shape), as_dtype(dtype))
        for name, value in state["center"]["variables"].items():
            array = cast_array(value, self._specs[name][1])
            self._center.variable_for(name, Variable(array, name, device=self._device))
        self._saved_optimizer = state["center"]["optimizer"]
        if "workers" in state:  # absent in older snapshots
            self._center.registry.load(**state["workers"])
        if "progress" in state["center"]:
            entry = progress_entry(self._center)
            entry.ready(entry("progress", state["center"]["progress"]))()

    # -- commands ---------------------------------------------------------------------------------

    @Create.handler
    def create(self, command: Create, message: TensorMessage) -> int:
        """See ``Create``.

        Raises:
            ValueError: a variable of this name has another shape or dtype.
        """
        (spec,) = Layout.of(message.form).specs
        name, found = command.name, self._specs.get(command.name)
        if found is not None:
            check_same_tensor(name, spec, found)
            return self._shards[name]
        held = [0] * self._settings.num_shards
        for other, shard in self._shards.items():
            extents, dtype = self._specs[other]
            held[shard] += math.prod(extents) * dtype.itemsize
        shard = held.index(min(held))
        if shard == self._shard:
            (value,) = Layout([spec]).unpack(self._device, message)
            self._center.variable_for(name, Variable(value, name, device=self._device))
        self._specs[name], self._shards[name] = spec, shard
        return shard

    @Join.handler
    def join(self, command: Join) -> None:
        """See ``Join``; the first worker to join restores slots from a snapshot."""
        known, kind = self._optimizer, command.kind
        if known is not None and _full_name(kind) == _full_name(type(known)):
            # Ray sends a class of ``__main__`` by value, so each process sends another object.
            kind = type(known)
        optimizer = kind.__new__(kind)
        vars(optimizer).update(command.attributes)
        Optimizer.__init__(optimizer, optimizer.get_name(), master_dtype=command.master_dtype)
        self._center.join(optimizer)
        self._dense = None
        self._optimizer = self._optimizer or optimizer
        self._center.num_worker = max(self._center.num_worker, command.num_worker)
        saved, self._saved_optimizer = self._saved_optimizer, None
        slots = self._center.slots
        if saved is not None and slots is not None:
            by_name = {variable.name: variable for variable in self._center.variables.values()}
            ready_slots(slots, {by_name[name]: each for name, each in saved["slots"].items()})()

    @Push.handler
    def push(self, command: Push, message: TensorMessage) -> TensorMessage | bool:
        """See ``Push``."""
        optimizer = self._check_push(command)
        if not self._accepts(command):
            return False
        after, weight, scalars = self._begin(command)
        names, config = command.names[self._shard], command.config._replace(task="")
        key = DenseKey(names, message.form, config, optimizer._rule)
        if self._dense is None or self._dense.key != key:
            self._dense = self._dense_push(key, optimizer)
        if self._dense is not None:
            answer = self._dense.run(scalars, weight, message)
        else:
            launch, self._checked = self._checked, None
            if names:
                (launch or self._ready_push(optimizer, names, command, message))()
            answer = self._values(names)
        self._center.progress = after
        return self._record_answer(answer._replace(value=(self.clock, answer.value or [])))

    def _check_push(self, command: Push) -> Optimizer:
        """Checks a push; returns the rule or optimizer that updates, with the push's settings."""
        if self._optimizer is None:
            raise NotJoinedError("the rule of the center is unknown: create an AGNOptimizer")
        self._check_known(command.names)
        self._center.check_usable()
        self._keep_answers()
        optimizer = self._options.rule or self._optimizer
        vars(optimizer).update(command.settings)
        if self._options.rule is not None or optimizer._rule is None:
            vars(optimizer).update(zip(optimizer._hyperparameters, command.scalars, strict=True))
        self._task = command.config.task
        return optimizer

    def _accepts(self, command: Push) -> bool:
        """Returns whether a push is not too old."""
        return self._center.accepts(self._center.age_of(command.pulled_at))

    def _begin(self, command: Push) -> tuple[Progress, float, Scalars]:
        """See ``CenterState.begin_push``; without a rule a push only counts."""
        center, rule = self._center, self._options.rule
        if rule is None:
            return center.progress.after(0), command.weight, command.scalars
        return center.begin_push(rule, command.weight, center.age_of(command.pulled_at))

    def _note_fault(self, error: BaseException) -> None:
        """Records that the push failed part-way."""
        self._center.mark_push_failed(self._task, error)

    def _dense_push(self, key: DenseKey, optimizer: Optimizer) -> DensePush | None:
        """Returns a plan for pushes with this key; None if ``DensePush`` cannot run them."""
        form = Layout([self._specs[name] for name in key.names]).form
        if optimizer._rule is None or key.form != form:
            return None
        centers = [self._center.variables[name] for name in key.names]
        self._prepare(centers, key.config, sparse=False)
        slots = self._center.slots
        rows = [[each, *(slots.of(each) if slots else ())] for each in centers]
        return DensePush(key, rows, optimizer, self._device, self._note_fault)

    def may_raise(self, command: ActorCommand[Any]) -> bool:
        """See ``ShardState``: a load, or a rule in Python, which may raise for one variable."""
        optimizer = self._options.rule or self._optimizer
        is_python = optimizer is not None and optimizer._rule is None
        is_push = isinstance(command, Push | PushRound)
        return isinstance(command, LoadCenter) or (is_push and is_python)

    def check(self, command: ActorCommand[Any], *message: TensorMessage) -> None:
        """See ``ShardState``; the push uses what the rule computes here."""
        self._checked = None
        if isinstance(command, LoadCenter):
            self._ready(command.state)
        elif isinstance(command, Push):
            optimizer = self._check_push(command)
            names = command.names[self._shard]
            if names and self._accepts(command):
                self._checked = self._ready_push(optimizer, names, command, *message)
        elif isinstance(command, PushRound):
            self._checked = self._ready_round(command, message)

    def _ready_push(
        self, optimizer: Optimizer, names: Sequence[str], command: Push, message: TensorMessage
    ) -> Callable[[], None]:
        """Prepares a push of dense sums and sums of rows; returns a function that launches it."""
        centers = [self._center.variables[name] for name in names]
        sparse = not command.sparse.isdisjoint(names)
        rows = self._prepare(centers, command.config, sparse=sparse)
        _, weight, scalars = self._begin(command)
        sums, last = self._operands(names, command, message)
        pushed = [
            PushedVariable(name, written, total, (), then)
            for name, written, total, then in zip(names, rows, sums, last, strict=True)
        ]
        plan = PushPlan(pushed, optimizer, command.config, weight, self._note_fault)
        return partial(plan.ready(scalars), lambda: None)

    def _prepare(
        self, centers: Sequence[Variable], config: PushConfig, *, sparse: bool
    ) -> list[list[Buffer]]:
        """Compiles the kernels of a push and makes slots; see ``CenterState.make_slots``."""
        assert self._optimizer is not None, "_check_push"
        rehearse_push(self._optimizer, centers, config, self._options, sparse=sparse)
        rehearse_packing(centers, self._device)
        return self._center.make_slots(self._optimizer, centers)

    # -- rounds -----------------------------------------------------------------------------------

    @PushRound.handler
    def push_round(self, command: PushRound, *messages: TensorMessage) -> bool:
        """See ``PushRound``."""
        launch, self._checked = self._checked or self._ready_round(command, messages), None
        launch()
        return True

    def _ready_round(
        self, command: PushRound, messages: Sequence[TensorMessage]
    ) -> Callable[[], None]:
        """Adds the pushes of a round; returns a function that launches the update."""
        center, round_ = self._center, Round()
        for push, message in zip(command.pushes, messages, strict=True):
            self._check_push(push)
            names = push.names[self._shard]
            centers = [center.variables[name] for name in names]
            self._prepare(centers, push.config, sparse=not push.sparse.isdisjoint(names))
            totals, _ = self._operands(names, push, message)
            sums = [
                (var, dense_sum(var, total)[0]) for var, total in zip(centers, totals, strict=True)
            ]
            is_delta = self._options.push == "delta"
            age = center.age_of(push.pulled_at)
            round_.add(sums, to_units(push.weight), age, is_delta=is_delta)
        assert self._optimizer is not None, "_check_push"
        return center.ready_round(round_, self._optimizer, command.pushes[0].config)

    def is_of_round(self, command: ActorCommand[Any]) -> bool:
        """See ``ShardState``. A push that is too old does not wait."""
        if self._options.num_required is None or not isinstance(command, Push):
            return False
        self._check_push(command)
        return self._accepts(command)

    def seconds_left(self, quorum: Quorum) -> float | None:
        """See ``ShardState``."""
        return self._center.seconds_left(quorum)

    def missing(self, number: int) -> str:
        """See ``ShardState``."""
        return f"has {number} of {self._center.num_required} pushes"

    def _operands(
        self, names: Sequence[str], command: Push, message: TensorMessage
    ) -> tuple[list[Sum], list[Buffer | None]]:
        """Returns the sums of a message, and the values of the worker's last pull."""
        layout = Layout.of(message.form)
        buffers = layout.unpack(self._device, message)
        pairs = iter(zip(layout.arrays(message), buffers, strict=True))
        sums: list[Sum] = []
        for name in names:
            if name not in command.sparse:
                sums.append((next(pairs)[1],))
                continue
            shape, dtype = self._specs[name]
            saved = {key: next(pairs)[0] for key in ("indices", "num_touches", "values")}
            sums.append(SPARSE.load(name, saved, dtype, shape, MAX_COUNT)(self._device))
        last = [None if command.config.gamma is None else next(pairs)[1] for _ in names]
        return sums, last

    @LoadCenter.handler
    def load_center(self, command: LoadCenter) -> None:
        """See ``LoadCenter``."""
        load = self._ready(command.state)
        self._keep_answers()
        load()
        self._dense = self._saved_optimizer = None
        self._center.end_load()

    def _check_known(self, names: Sequence[Sequence[str]]) -> None:
        """Raises ``NotJoinedError`` unless all variables exist on these shards."""
        found = {name: shard for shard, of_shard in enumerate(names) for name in of_shard}
        if missing := [name for name, shard in found.items() if self._shards.get(name) != shard]:
            raise NotJoinedError(f"there is no variable {missing[0]!r}: create it again")

    # -- reads ------------------------------------------------------------------------------------

    @Pull.handler
    def pull(self, command: Pull) -> TensorMessage:
        """See ``Pull``."""
        self._check_known(command.names)
        found = self._values(command.names[self._shard])
        return self._record_answer(found._replace(value=(self.clock, found.value)))

    def _values(self, names: Sequence[str]) -> TensorMessage:
        """Returns variables, then masters; ``value`` has the names of variables with a master."""
        masters = self._center.slots.by_name.get(MASTER, {}) if self._center.slots else {}
        variables = {name: self._center.variables[name] for name in names}
        with_master = [name for name, each in variables.items() if each in masters]
        tensors = [*variables.values(), *[masters[variables[name]] for name in with_master]]
        buffers = [each.buffers[0] for each in tensors]
        message = Layout(specs_of(buffers)).pack(self._device, buffers)
        return message._replace(value=with_master)

    @SlotsOf.handler
    def slots_of(self, command: SlotsOf) -> dict[str, str]:
        """See ``SlotsOf``."""
        variable, slots = self._center.variables.get(command.name), self._center.slots
        if variable is None or slots is None:
            return {}
        return {
            slot: of_slot[variable].name
            for slot, of_slot in slots.by_name.items()
            if variable in of_slot
        }

    @SlotValue.handler
    def slot_value(self, command: SlotValue) -> TensorMessage:
        """See ``SlotValue``."""
        variable = self._center.variables.get(command.name)
        found = None if variable is None else self._center.slot(variable, command.slot)
        buffers = [] if found is None else [found.buffers[0]]
        return self._record_answer(Layout(specs_of(buffers)).pack(self._device, buffers))

    def _record_answer(self, answer: TensorMessage) -> TensorMessage:
        """Records the large arrays of an answer, which may be views of variables."""
        self._answered += [ref(array) for array in answer.bigs]
        return answer

    def _keep_answers(self) -> None:
        """Moves a variable to new memory if an answer that Ray has not stored yet uses the old."""
        arrays = [array for each in self._answered if (array := each()) is not None]
        addresses, self._answered = {array.ctypes.data for array in arrays}, []
        held = [*self._center.variables.values(), *self._center.slot_variables()]
        for each in held if addresses else ():
            if each.buffers[0].address in addresses:
                each._buffers = (copy_to(self._device, each.buffers[0]),)

    @ListShards.handler
    def shards(self, command: ListShards) -> dict[str, int]:
        """See ``ListShards``."""
        return dict(self._shards)

    @CenterPart.handler
    def state(self, command: CenterPart) -> dict[str, Any]:
        """See ``CenterPart``."""
        self._center.check_usable()
        state: dict[str, Any] = downloader(None)(self._table().save())
        if self._saved_optimizer is not None:
            state["optimizer"] = self._saved_optimizer
        return state

    def _table(self) -> StateTable:
        """Returns the table of the part of this shard."""
        center = self._center
        return center_table(center.variables, center.slots, center.owner_of_progress)

    def _ready(self, state: Any) -> Any:
        """Validates a state of the center; returns a function that loads the part of this shard."""
        names = dict.fromkeys(self._specs, anything)
        entries = validate_state("state", state, dict.fromkeys(self._table(), anything))
        arrays = validate_state("state['variables']", entries["variables"], names)
        own = self._center.variables
        entries["variables"] = {name: arrays[name] for name in own}
        if isinstance(entries["optimizer"], Mapping) and "slots" in entries["optimizer"]:
            full_names = {f"global_center_variable/{name}": anything for name in names}
            slots = some_of(full_names)(
                "state['optimizer']['slots']", entries["optimizer"]["slots"]
            )
            kept = {variable.name for variable in own.values()}
            slots = {name: each for name, each in slots.items() if name in kept}
            entries["optimizer"] = {**entries["optimizer"], "slots": slots}
        return ready_center(own, self._center.slots, entries, self._center.owner_of_progress)

    # -- workers ----------------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:
        """See ``ShardState``."""
        for task in set(tasks).difference(self._center.registry.list_begun()):
            self._center.registry.begin(task)

    @Begin.handler
    def begin(self, command: Begin) -> None:
        """See ``Begin``."""
        self._center.registry.begin(command.task_index)

    @End.handler
    def end(self, command: End) -> None:
        """See ``End``."""
        self._center.registry.end(command.task_index)

    @ClearFailure.handler
    def clear_failure(self, command: ClearFailure) -> None:
        """See ``ClearFailure``."""
        self._center.registry.clear_failure(command.task_index)

    @MarkFailed.handler
    def mark_failed(self, command: MarkFailed) -> None:
        """See ``MarkFailed``."""
        self._center.registry.mark_failed(command.task_index, RuntimeError(command.text))

    @ListWorkers.handler
    def list_workers(self, command: ListWorkers) -> tuple[list[int], list[int]]:
        """See ``ListWorkers``."""
        return self._center.registry.list_begun(), self._center.registry.list_failed()

    # -- snapshots --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """See ``ShardState``."""
        return {
            "specs": {
                name: [list(shape), str(dtype)] for name, (shape, dtype) in self._specs.items()
            },
            "shards": self._shards,
            "num_pushes": self.clock,
            "workers": self._center.registry.save(),
            "center": self.state(CenterPart()),
        }


def _full_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
