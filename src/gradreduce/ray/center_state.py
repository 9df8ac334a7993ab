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
from gradreduce.checkpoint import anything, downloader, some_of, validate_state
from gradreduce.device import Buffer, Device, as_dtype, copy_to
from gradreduce.optim.agn.center import CenterState, check_same_tensor
from gradreduce.optim.agn.checkpoint import center_table, ready_center
from gradreduce.optim.agn.local_step import rehearse_push
from gradreduce.optim.agn.push import PushConfig, PushedVariable, PushPlan
from gradreduce.optim.agn.sums import Sum
from gradreduce.optim.checkpoint import ready_slots
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER

from .messages import Layout, Spec, TensorMessage, rehearse_packing, specs_of
from .shard_state import ActorSettings, ShardState

MAX_COUNT = 2**63 - 1  # number of gradients in a sum of rows; a push does not divide by it


class Rule(NamedTuple):
    """What an actor needs to create an optimizer equal to that of a worker.

    Attributes:
        kind: class of the optimizer.
        master_dtype: see ``Optimizer``.
        attributes: the other attributes of the object.
    """

    kind: type[Optimizer]
    master_dtype: str | None
    attributes: Mapping[str, Any]

    def optimizer(self) -> Optimizer:
        """Returns a new optimizer of this rule, without slots."""
        optimizer = self.kind.__new__(self.kind)
        vars(optimizer).update(self.attributes)
        Optimizer.__init__(optimizer, optimizer.get_name(), master_dtype=self.master_dtype)
        return optimizer


class PushRequest(NamedTuple):
    """The arguments of a push.

    Attributes:
        names: for each shard the names of its variables that have a sum, in the order of the
            message.
        sparse: names of the variables whose sums are rows.
        config: settings of the push.
        scalars: scalars of the rule.
        settings: attributes of the optimizer that choose its rule.
    """

    names: Sequence[Sequence[str]]
    sparse: frozenset[str]
    config: PushConfig
    scalars: Scalars
    settings: Mapping[str, Any]


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

    Attributes:
        key: see above; a push with another key needs another plan.
    """

    def __init__(
        self,
        key: DenseKey,
        rows: Sequence[Sequence[Variable]],
        optimizer: Optimizer,
        device: Device,
    ) -> None:
        self.key = key
        self._optimizer, self._device = optimizer, device
        self._layout = Layout.of(key.form)
        self._sums = self._layout.packs(device)
        columns = [self._layout.move(device, column) for column in zip(*rows, strict=True)]
        self._packs = columns[0] if columns else []  # the small variables
        self._rows = rows
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        small = zip(*columns, strict=True)
        self._plan = self._plan_updates(
            [("small variables", row, total) for row, total in zip(small, self._sums, strict=True)]
        )

    def run(
        self, scalars: Scalars, message: TensorMessage, failed: Callable[[BaseException], None]
    ) -> TensorMessage:
        """Pushes the sums of a message; returns the new values."""
        self._on_failure = failed
        self._layout.upload(self._sums, message)
        names, alone = self.key.names, self._layout.alone(self._device, message)
        rows = {index: [each.buffers[0] for each in self._rows[index]] for index in alone}
        rest = self._plan_updates(
            [(names[index], row, alone[index]) for index, row in rows.items()]
        )
        self._plan(scalars, partial(rest, scalars, lambda: None))
        return self._layout.message_of(self._packs, {index: row[0] for index, row in rows.items()})

    def _plan_updates(
        self, updates: Sequence[tuple[str, Sequence[Buffer], Buffer]]
    ) -> Callable[[Scalars, Callable[[], None]], None]:
        """Returns the ``run`` of a plan.

        Args:
            updates: for each update its name, the Buffers that it writes, and the sum.
        """
        if not updates:
            return lambda scalars, then: then()
        pushed = [PushedVariable(name, row, (total,), [row[:1]]) for name, row, total in updates]
        fail = lambda error: self._on_failure(error)  # noqa: E731  # each push sets ``_on_failure``
        return PushPlan(pushed, self._optimizer, self.key.config, fail).run


class CenterShardState(ShardState):
    """The variables of a center that this shard holds, and their slots.

    Args:
        settings: settings of the shard.
    """

    repeated: Mapping[str, str] = {}  # a repeated push returns None, and its client then pulls
    clock = 0  # the number of pushes

    def __init__(self, settings: ActorSettings) -> None:
        super().__init__(settings)
        self._shard = settings.shard
        self.load(None)

    def load(self, state: dict[str, Any] | None) -> None:
        """See ``ShardState``; restores slots when a worker joins, because it sends their rule."""
        self._center = CenterState((self._device,))
        self._optimizer: Optimizer | None = None
        self._specs: dict[str, Spec] = {}
        self._shards: dict[str, int] = {}
        self.clock = 0
        self._dense: DensePush | None = None  # plan of the last push
        self._answered: list[ref[np.ndarray]] = []  # large arrays of answers
        # Launches a push by a Python rule, which ``check`` has computed.
        self._checked: Callable[[], None] | None = None
        # Rule and slots of a snapshot, which are kept until a worker joins.
        self._saved_optimizer: dict[str, Any] | None = None
        if state is None:
            return
        self.clock, self._shards = state["num_pushes"], state["shards"]
        for name, (shape, dtype) in state["specs"].items():
            self._specs[name] = (tuple(shape), as_dtype(dtype))
        for name, value in state["center"]["variables"].items():
            array = cast_array(value, self._specs[name][1])
            self._center.variable_for(name, Variable(array, name, device=self._device))
        self._saved_optimizer = state["center"]["optimizer"]

    # -- commands ---------------------------------------------------------------------------------

    def create(self, name: str, message: TensorMessage) -> int:
        """Creates a variable, unless one of this name exists; returns its shard.

        Raises:
            ValueError: a variable of this name has another shape or dtype.
        """
        (spec,) = Layout.of(message.form).specs
        found = self._specs.get(name)
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

    def join(self, rule: Rule, message: None) -> None:
        """Registers a worker's rule; the first worker to join restores slots from a snapshot."""
        known = self._optimizer
        if known is not None and _full_name(rule.kind) == _full_name(type(known)):
            # Ray sends a class of ``__main__`` by value, so each process sends another object.
            rule = rule._replace(kind=type(known))
        optimizer = rule.optimizer()
        self._center.join(optimizer)
        self._dense = None
        self._optimizer = self._optimizer or optimizer
        saved, self._saved_optimizer = self._saved_optimizer, None
        slots = self._center.slots
        if saved is not None and slots is not None:
            by_name = {variable.name: variable for variable in self._center.variables.values()}
            ready_slots(slots, {by_name[name]: each for name, each in saved["slots"].items()})()

    def push(self, request: PushRequest, message: TensorMessage) -> TensorMessage:
        """Updates the center with the sums of a worker; returns the new values."""
        optimizer = self._check_push(request)
        names, config = request.names[self._shard], request.config._replace(task="")
        key = DenseKey(names, message.form, config, optimizer._rule)
        if self._dense is None or self._dense.key != key:
            self._dense = self._dense_push(key, optimizer)
        if self._dense is not None:
            failed = partial(self._center.mark_push_failed, request.config.task)
            answer = self._dense.run(request.scalars, message, failed)
        else:
            launch, self._checked = self._checked, None
            if names:
                (launch or self._ready_push(names, request, message))()
            answer = self._values(names)
        self.clock += 1
        return self._record_answer(answer._replace(value=(self.clock, answer.value or frozenset())))

    def _check_push(self, request: PushRequest) -> Optimizer:
        """Checks a push; returns the optimizer, with the settings of the push."""
        if self._optimizer is None:
            raise NotJoinedError("the rule of the center is unknown: create an AGNOptimizer")
        self._check_known(request.names)
        self._center.check_usable()
        self._keep_answers()
        vars(self._optimizer).update(request.settings)
        return self._optimizer

    def _dense_push(self, key: DenseKey, optimizer: Optimizer) -> DensePush | None:
        """Returns a plan for pushes with this key; None if ``DensePush`` cannot run them."""
        form = Layout([self._specs[name] for name in key.names]).form
        if optimizer._rule is None or key.form != form:
            return None
        centers = [self._center.variables[name] for name in key.names]
        rehearse_push(optimizer, centers, key.config, sparse=False)
        self._center.make_slots(optimizer, centers)
        slots = self._center.slots
        rows = [[each, *(slots.of(each) if slots else ())] for each in centers]
        return DensePush(key, rows, optimizer, self._device)

    def may_raise(self, command: str) -> bool:
        """See ``ShardState``; a rule in Python may raise because of the values of one variable."""
        return command == "push" and self._optimizer is not None and self._optimizer._rule is None

    def check(self, command: str, request: PushRequest, message: TensorMessage) -> None:
        """See ``ShardState``; the push uses what the rule computes here."""
        self._checked = None
        self._check_push(request)
        if names := request.names[self._shard]:
            self._checked = self._ready_push(names, request, message)

    def _ready_push(
        self, names: Sequence[str], request: PushRequest, message: TensorMessage
    ) -> Callable[[], None]:
        """Prepares a push of dense sums and sums of rows; returns a function that launches it."""
        optimizer = self._optimizer
        assert optimizer is not None
        if optimizer._rule is None:
            vars(optimizer).update(zip(optimizer._hyperparameters, request.scalars, strict=True))
        centers = [self._center.variables[name] for name in names]
        sparse = not request.sparse.isdisjoint(names)
        rehearse_push(optimizer, centers, request.config, sparse=sparse)
        rehearse_packing(centers, self._device)
        rows = self._center.make_slots(optimizer, centers)
        sums, last = self._operands(names, request, message)
        pushed = [
            PushedVariable(name, written, total, (), then)
            for name, written, total, then in zip(names, rows, sums, last, strict=True)
        ]
        failed = partial(self._center.mark_push_failed, request.config.task)
        launch = PushPlan(pushed, optimizer, request.config, failed).ready(request.scalars)
        return partial(launch, lambda: None)

    def _operands(
        self, names: Sequence[str], request: PushRequest, message: TensorMessage
    ) -> tuple[list[Sum], list[Buffer | None]]:
        """Returns the sums of a message, and the values of the worker's last pull."""
        layout = Layout.of(message.form)
        arrays, buffers = iter(layout.arrays(message)), iter(layout.unpack(self._device, message))
        sums: list[Sum] = []
        for name in names:
            if name not in request.sparse:
                next(arrays)
                sums.append((next(buffers),))
                continue
            shape, dtype = self._specs[name]
            parts = [next(arrays) for _ in range(3)]
            for _ in parts:
                next(buffers)
            saved = dict(zip(("indices", "num_touches", "values"), parts, strict=True))
            sums.append(SPARSE.load(name, saved, dtype, shape, MAX_COUNT)(self._device))
        last = [None if request.config.gamma is None else next(buffers) for _ in names]
        return sums, last

    def load_center(self, state: Mapping[str, Any], message: None) -> None:
        """Loads a state of the whole center."""
        load = self._ready(state)
        self._keep_answers()
        load()
        self._dense = self._saved_optimizer = None
        self._center.fault = None

    def _check_known(self, names: Sequence[Sequence[str]]) -> None:
        """Raises ``NotJoinedError`` unless all variables exist on these shards."""
        for shard, of_shard in enumerate(names):
            for name in of_shard:
                if self._shards.get(name) != shard:
                    raise NotJoinedError(f"there is no variable {name!r}: create it again")

    # -- reads ------------------------------------------------------------------------------------

    def pull(self, names: Sequence[Sequence[str]]) -> TensorMessage:
        """Returns values of variables of this shard; each master follows its variable."""
        self._check_known(names)
        found = self._values(names[self._shard])
        return self._record_answer(found._replace(value=(self.clock, found.value)))

    def _values(self, names: Sequence[str]) -> TensorMessage:
        """Returns variables and masters; ``value`` has the names of variables with a master."""
        masters = self._center.slots.by_name.get(MASTER, {}) if self._center.slots else {}
        buffers: list[Buffer] = []
        with_master: list[str] = []
        for name in names:
            variable = self._center.variables[name]
            buffers.append(variable.buffers[0])
            if variable in masters:
                buffers.append(masters[variable].buffers[0])
                with_master.append(name)
        message = Layout(specs_of(buffers)).pack(self._device, buffers)
        return message._replace(value=frozenset(with_master))

    def slots_of(self, name: str) -> dict[str, str]:
        """Returns the full names of a variable's slots; empty if another shard holds it."""
        variable, slots = self._center.variables.get(name), self._center.slots
        if variable is None or slots is None:
            return {}
        return {
            slot: of_slot[variable].name
            for slot, of_slot in slots.by_name.items()
            if variable in of_slot
        }

    def slot_value(self, name: str, slot: str) -> TensorMessage:
        """Returns the value of a variable's slot; no tensor if this shard does not hold it."""
        variable = self._center.variables.get(name)
        found = None if variable is None else self._center.slot(variable, slot)
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

    def shards(self) -> dict[str, int]:
        """Returns the shard of each variable of the center, by name."""
        return dict(self._shards)

    def state(self) -> dict[str, Any]:
        """Returns the state of this shard in the form of ``gr.AGNCenter.state_dict``."""
        self._center.check_usable()
        state: dict[str, Any] = downloader(None)(
            center_table(self._center.variables, self._center.slots).save()
        )
        if self._saved_optimizer is not None:
            state["optimizer"] = self._saved_optimizer
        return state

    def check_state(self, state: Any) -> None:
        """Raises the error that ``load_center`` would raise."""
        self._ready(state)

    def _ready(self, state: Any) -> Any:
        """Validates a state of the center; returns a function that loads the part of this shard."""
        names = dict.fromkeys(self._specs, anything)
        entries = validate_state(
            "state", state, dict.fromkeys(("format", "variables", "optimizer"), anything)
        )
        arrays = validate_state("state['variables']", entries["variables"], names)
        own = self._center.variables
        entries["variables"] = {name: arrays[name] for name in own}
        if isinstance(entries["optimizer"], Mapping) and "slots" in entries["optimizer"]:
            full_names = {f"global_center_variable/{name}": anything for name in names}
            slots = some_of(full_names)(
                "state['optimizer']['slots']", entries["optimizer"]["slots"]
            )
            kept = {variable.name for variable in own.values()}
            of_own = {name: each for name, each in slots.items() if name in kept}
            entries["optimizer"] = {**entries["optimizer"], "slots": of_own}
        return ready_center(own, self._center.slots, entries)

    # -- workers ----------------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:
        """See ``ShardState``."""
        for task in set(tasks).difference(self._center.registry.list_begun()):
            self._center.registry.begin(task)

    def registry(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the ``Registry`` of the center."""
        return getattr(self._center.registry, method)(*arguments)

    # -- snapshots --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """See ``ShardState``."""
        return {
            "specs": {
                name: [list(shape), str(dtype)] for name, (shape, dtype) in self._specs.items()
            },
            "shards": self._shards,
            "num_pushes": self.clock,
            "center": self.state(),
        }


def _full_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
