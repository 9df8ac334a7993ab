"""AGN centers that several processes and machines share: variables and slots in actors of Ray.

Workers run local steps with ``gr.AGNOptimizer``, as in one process. A push sends the sums of a
worker to the actors, which update their variables and return the new values.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SPARSE, SparseSum
from gradreduce.arrays.convert import to_buffer
from gradreduce.arrays.variable import Variable
from gradreduce.backends import Kernels, default_mesh
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.checkpoint import downloader, map_leaves, on_host
from gradreduce.device import Buffer, DeferInterrupts, Device, Mesh, as_dtype
from gradreduce.optim.agn.center import AGNCenter as LocalCenter
from gradreduce.optim.agn.center_interface import Center, WorkerVariables
from gradreduce.optim.agn.center_rules import CenterRule
from gradreduce.optim.agn.push import PushConfig
from gradreduce.optim.agn.rounds import AS_AGN, CenterOptions, PushKind, as_options
from gradreduce.optim.agn.session_hook import Registry, check_begun
from gradreduce.optim.agn.sums import Sum, Sums
from gradreduce.optim.agn.variables import LazyVariable
from gradreduce.optim.optimizer import Optimizer, Scalars
from gradreduce.optim.slots import MASTER

from .center_state import CenterShardState, NotJoinedError
from .client import Client, SharedObject, settings_of
from .commands import (
    Begin,
    CallKey,
    CenterPart,
    ClearFailure,
    Create,
    End,
    Join,
    ListShards,
    ListWorkers,
    LoadCenter,
    MarkFailed,
    Origin,
    Pull,
    Push,
    Read,
    SlotsOf,
    SlotValue,
)
from .messages import Layout, TensorMessage, rehearse_packing, specs_of

# Attributes of optimizers that do not belong to the rule.
_NOT_OF_RULE = ("_slots", "_cross_device_ops", "_plan")

_Names = list[list[str]]  # for each shard the names of its variables
_LOOK_SECONDS = 0.1  # between two looks whether all workers have begun
_MOST_JOINS = 10  # for one push or pull


class RemoteRegistry(Registry):
    """The workers of a center, which are registered in its actor.

    Args:
        client: the connection to the center.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        # Task index -> thread, of the workers of this process that have begun.
        self._here: dict[int, int] = {}

    def begin(self, task_index: int) -> None:
        """See ``Registry``."""
        self._client.ask(Begin(task_index))
        self._here[task_index] = threading.get_ident()

    def end(self, task_index: int) -> None:
        """See ``Registry``."""
        self._here.pop(task_index, None)
        self._client.call(End(task_index))

    def of_this_thread(self) -> tuple[int, ...]:
        """Returns the task indices of the workers that have begun in this thread."""
        here = threading.get_ident()
        return tuple([task for task, thread in list(self._here.items()) if thread == here])

    def list_failed(self) -> list[int]:
        """See ``Registry``."""
        return self._client.ask(ListWorkers())[1]

    def clear_failure(self, task_index: int) -> None:
        """See ``Registry``."""
        self._client.ask(ClearFailure(task_index))

    def mark_failed(self, task_index: int, error: BaseException) -> None:
        """See ``Registry``."""
        self._here.pop(task_index, None)
        # As text, because not every error can be pickled.
        self._client.ask(MarkFailed(task_index, f"{type(error).__name__}: {error}"))

    def wait_for(self, num_worker: int, timeout: float) -> None:
        """See ``Registry``."""
        end = time.monotonic() + timeout
        while (
            len(begun := self._client.ask(ListWorkers())[0]) < num_worker and time.monotonic() < end
        ):
            for task in self._here.keys() - begun:  # a restarted actor does not know them
                self._client.ask(Begin(task))
            time.sleep(_LOOK_SECONDS)
        check_begun(begun, num_worker, timeout)


class RemoteCenter(Center):
    """A center whose state is in actors; see ``Center``.

    Args:
        client: the connection to the actors.
        devices: devices of this process, of the same mesh as those of the workers.
        worker: name of the first worker that uses this object; the next ones are ``worker/1``, ...
        options: how pushes are applied.
    """

    def __init__(
        self,
        client: Client,
        devices: tuple[Device, ...],
        worker: str,
        options: CenterOptions = AS_AGN,
    ) -> None:
        self.devices, self.options = devices, options
        self.registry: RemoteRegistry = RemoteRegistry(client)
        self._client, self._worker, self._num_worker = client, worker, 1
        self._shards: dict[str, int] = {}
        self._workers: weakref.WeakKeyDictionary[WorkerVariables, Connection] = (
            weakref.WeakKeyDictionary()
        )

    def variable_for(self, name: str, local: Variable) -> Variable:
        """See ``Center``."""
        self._create(name, local)
        return self._variable(name, local.devices[0])

    def _variable(self, name: str, device: Device) -> Variable:
        """Returns a center variable, whose value is fetched to a device each time it is read."""
        return _fetched(f"global_center_variable/{name}", device, partial(self._value, name))

    def _create(self, name: str, local: Variable) -> None:
        """Creates a center variable, unless one of this name exists."""
        value = local.numpy()
        message = Layout(specs_of([value])).message([value])
        messages = [message] * self._client.num_shards
        self._shards[name] = self._client.call(Create(name), messages)[0]

    def _value(self, name: str) -> np.ndarray:
        """Returns the value of a center variable."""
        return self._first_array(Pull(self._by_shard([name])), self._shards[name])

    def _first_array(self, command: Read[TensorMessage], shard: int) -> np.ndarray:
        """Returns the first array of a shard's answer."""
        message = self._client.read(command)[shard]
        return Layout.of(message.form).arrays(message)[0]

    def _by_shard(self, names: Iterable[str]) -> list[list[str]]:
        """Returns for each shard the names of its variables."""
        names_of_shards: list[list[str]] = [[] for _ in range(self._client.num_shards)]
        for name in names:
            names_of_shards[self._shards[name]].append(name)
        return names_of_shards

    def join(self, optimizer: Optimizer) -> None:
        """See ``Center``."""
        self._client.call(replace(join_of(optimizer), num_worker=self._num_worker))

    def expect(self, num_worker: int) -> None:
        """See ``Center``; ``join`` sends the number."""
        self.options.check_num_worker(num_worker)
        self._num_worker = max(self._num_worker, num_worker)

    def slot(self, variable: Variable, name: str) -> Variable | None:
        """See ``Center``."""
        return self._slots(variable.name.removeprefix("global_center_variable/")).get(name)

    def slot_variables(self) -> list[Variable]:
        """See ``Center``."""
        return [slot for name in self._locate_variables() for slot in self._slots(name).values()]

    def _slots(self, name: str) -> dict[str, Variable]:
        """Returns the slots of a center variable by name, such as ``"momentum"``."""
        shard = self._shards.get(name, 0)
        slots = self._client.read(SlotsOf(name))[shard]
        reads = {slot: partial(self._first_array, SlotValue(name, slot), shard) for slot in slots}
        return {slot: _fetched(slots[slot], self.devices[0], read) for slot, read in reads.items()}

    def _locate_variables(self) -> list[str]:
        """Returns the sorted names of all center variables; records the shard of each."""
        shards = self._client.ask(ListShards())
        self._shards |= shards
        return sorted(shards)

    def set_up_push(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        of: Sequence[Variable],
        config: PushConfig,
    ) -> None:
        """See ``Center``; compiles what packs a push. The actors prepare at their first push."""
        rehearse_packing(of, self.devices[0], as_dtype("int64"))

    def list_written_buffers(self, variables: WorkerVariables) -> list[Buffer]:
        """See ``Center``."""
        return []

    def push_scope(self) -> AbstractContextManager[None]:
        """See ``Center``; Ctrl-C ends a push that waits for an actor."""
        return nullcontext()

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
        connection, sums = self._connection(variables), variables.sums
        key = connection.key_of(sums)
        origin = Origin(
            self._worker + connection.suffix,
            variables.num_steps,
            variables.pulled_at,
            self.registry.of_this_thread(),
        )
        of_rule = self.options.rule or optimizer
        if self.options.rule is not None:
            scalars, _ = of_rule._next_update(())
        settings = {name: getattr(of_rule, name) for name in of_rule._settings}

        def call(names: _Names) -> list[TensorMessage | bool | None]:
            sent = connection.sent
            if sent is None or sent.sums is not sums or sent.names != names:
                sent = connection.sent = SentSums(variables, names, config)
            command = Push(
                names, sent.sparse, config, scalars, settings, weight, variables.pulled_at
            )
            left = _time_left(self.devices[0])
            return self._client.call(command, sent.messages(), origin, key, left)

        self._exchange(optimizer, variables, sums, call, then)

    def pull(
        self, optimizer: Optimizer, variables: WorkerVariables, then: Callable[[], None]
    ) -> None:
        """See ``Center``."""
        self._exchange(
            optimizer,
            variables,
            variables.centers,
            lambda names: self._client.read(Pull(names)),
            lambda _: then(),
        )

    def _exchange(
        self,
        optimizer: Optimizer,
        variables: WorkerVariables,
        of: Iterable[Variable],
        call: Callable[[_Names], Sequence[TensorMessage | bool | None]],
        then: Callable[[bool], None],
    ) -> None:
        """Makes a call, and writes what it returns to variables of the worker.

        If an actor has lost variables or the rule, joins and makes the call again. It may be lost
        again meanwhile, so this is done up to ``_MOST_JOINS`` times.

        Args:
            optimizer: the worker's optimizer.
            variables: the worker's variables.
            of: those of them that are written.
            call: gets for each shard the names of its variables; returns the answer of each shard.
            then: gets whether the call was applied; see ``Center.push``.
        """
        by_name, connection = {var.name: var for var in of}, self._connection(variables)
        for joins in count():
            try:
                names = self._by_shard(by_name)  # the variables may have moved
                answers = call(names)
                messages = [each for each in answers if isinstance(each, TensorMessage)]
                # None after a round, of a dropped push, or if a retry found its answer lost.
                messages = messages or self._client.read(Pull(names))
                break
            except NotJoinedError:
                if joins == _MOST_JOINS:
                    raise
                for var in variables.centers:
                    self._create(var.name, var)
                self.join(optimizer)
        with DeferInterrupts():
            variables.pulled_at = self._write(optimizer, by_name, names, messages)
            connection.pending = None  # a failed push is not retried after a pull
            then(answers[0] is not False)

    def _connection(self, variables: WorkerVariables) -> Connection:
        number = len(self._workers)
        return self._workers.setdefault(variables, Connection(f"/{number}" if number else ""))

    def _write(
        self,
        optimizer: Optimizer,
        by_name: Mapping[str, Variable],
        names: _Names,
        messages: Sequence[TensorMessage],
    ) -> int:
        """Writes pulled values to all copies of variables and masters; returns the clock."""
        pairs: list[tuple[Sequence[Buffer], Buffer]] = []  # copies of one tensor, and their value
        for of_shard, message in zip(names, messages, strict=True):
            clock, with_master = message.value
            values = Layout.of(message.form).unpack(_device_of(by_name.values()), message)
            unrounded = dict(zip(with_master, values[len(of_shard) :], strict=True))
            for name, value in zip(of_shard, values, strict=False):
                pairs.append((by_name[name].buffers, value))
                master = optimizer.get_slot(by_name[name], MASTER)
                if master is not None:
                    pairs.append((master.buffers, unrounded.get(name, value)))
        outs, values = [copies[0] for copies, _ in pairs], [value for _, value in pairs]
        dtypes = {(out.dtype, value.dtype) for out, value in zip(outs, values, strict=True)}
        compile_rows("pack", ops.pack_to_rows, dtypes, _device_of(by_name.values()))
        ops.pack(outs, values)
        for (first, *others), _ in pairs:
            for other in others:
                other.device.copy(other, first)
        return int(clock)


def _fetched(name: str, device: Device, read: Callable[[], Any]) -> LazyVariable:
    """Returns a read-only Variable on a device, whose value ``read`` fetches."""
    return LazyVariable(name, (device,), lambda: (device.upload(read()),))


class Connection:
    """The state of the pushes of one worker of this process.

    Args:
        suffix: end of the worker's name, by which workers of one process differ.

    Attributes:
        suffix: see above.
        pending: the sums of a push that has not succeeded; None if there is none.
        sent: the sums of the last push.
    """

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.pending: Sums | None = None
        self.sent: SentSums | None = None
        self._caller, self._number = uuid.uuid4().hex, 0

    def key_of(self, sums: Sums) -> CallKey:
        """Returns the key of a push; a retry has the same sums, and gets the key of the push."""
        if sums is not self.pending:
            self.pending, self._number = sums, self._number + 1
        return self._caller, self._number


class SentSums:
    """Packs the messages of a push and of later ones, as long as the worker has the same sums.

    Args:
        variables: variables of the worker.
        names: for each shard the names of its variables that have a sum.
        config: settings of the push.

    Attributes:
        sums: the sums, by variable.
        names: see above.
        sparse: names of the variables whose sums are rows.
    """

    def __init__(self, variables: WorkerVariables, names: _Names, config: PushConfig) -> None:
        self.sums, self.names = variables.sums, names
        by_name = {var.name: var for var in self.sums}
        self.sparse = frozenset(
            name for name, var in by_name.items() if isinstance(self.sums[var], SparseSum)
        )
        self._packers: list[Callable[[], TensorMessage]] = []
        device = _device_of(variables.centers)
        for of_shard in names:
            pushed = [by_name[name] for name in of_shard]
            buffers = [part for var in pushed for part in _parts_of(self.sums[var], device)]
            if config.gamma is not None:
                buffers += [variables.pulled[var] for var in pushed]
            self._packers.append(Layout(specs_of(buffers)).packer(device, buffers))

    def messages(self) -> list[TensorMessage]:
        """Returns a message of sums for each shard; with ``gamma`` also the last pulled values."""
        return [pack() for pack in self._packers]


def _parts_of(total: Sum, device: Device) -> list[Buffer]:
    """Returns the tensors of a sum: one of a dense sum, three of a sum of rows."""
    if not isinstance(total, SparseSum):
        return [total[0]]
    saved = downloader(None)(SPARSE.save(total))
    return [to_buffer(saved[name], device) for name in ("indices", "num_touches", "values")]


def _time_left(device: Device) -> float | None:
    """Returns how many seconds a push may wait; None if its call has no ``deadline=``.

    The push may use 90 % of the time until the deadline. The rest is for the devices, because the
    mesh fails at the deadline.
    """
    pending_call = device.mesh_state.thread.pending_call
    return None if pending_call is None else max(0.0, 0.9 * pending_call.remaining)


def _device_of(variables: Iterable[Variable]) -> Device:
    """Returns the first device of a worker."""
    return next(iter(variables)).devices[0]


def join_of(optimizer: Optimizer) -> Join:
    """Returns the command that registers the rule of an optimizer.

    Callables and Variables are left out: each push sends their values.
    """
    attributes = {
        name: None if callable(value) or isinstance(value, Variable) else value
        for name, value in vars(optimizer).items()
        if name not in _NOT_OF_RULE
    }
    return Join(type(optimizer), "float32" if optimizer._slots.has_masters else None, attributes)


class AGNCenter(SharedObject, LocalCenter):
    """A ``gr.AGNCenter`` in actors of Ray, for workers in several processes and machines.

    Pass it to ``gr.AGNCustomGetter(device, center=...)``. Getter, optimizer and hook are the same
    as in one process. Center variables and slots have the shapes and dtypes of the workers'
    variables; the first worker that creates a variable sets its value. The actors apply pushes one
    after the other. Each push is atomic, over all variables and all shards. A push blocks until the
    actors have applied it. A failed push is retried before the worker's next step; it is applied
    exactly once. If a worker ends, only its own gradients since its last push are lost.

    The first process that uses a name starts the actors. They run until ``close`` or until the
    cluster ends, even if that process ends earlier. All methods are thread-safe and block until the
    actors answer. They can also raise the errors of actors that ``docs/debugging.md`` lists. A
    center can be an argument of Ray tasks and actors. Source: arXiv 1710.02368, with the parameter
    server in actors.

    Args:
        name: name of the actor; see ``shared_name`` of ``AccumulatorSet``.
        mesh: devices of the workers of this process: a mesh, a part of one, or a device; see
            ``gr.AGNCenter``.
        center_rule: see ``gr.AGNCenter``. Each process passes an equal rule; the actors apply that
            of the first one. A rule in Python runs in the actors.
        push: see ``gr.AGNCenter``.
        num_required: see ``gr.AGNCenter``.
        grace: see ``gr.AGNCenter``.
        max_staleness: see ``gr.AGNCenter``.
        num_shards: number of actors. A new variable goes to the actor with the fewest bytes.
        num_gpus: 1: each actor reserves a GPU and keeps its variables there. 0: the variables are
            in host memory.
        kernels: see ``AccumulatorSet``.
        snapshots: see ``AccumulatorSet``.
        durability: see ``AccumulatorSet``; a push changes the state.
        worker: see ``AccumulatorSet``.
        timeout: see ``AccumulatorSet``. A push raises ``DeadlineExceededError`` if it has no answer
            after this time, or after 90 % of the ``deadline`` of ``apply_gradients``.

    Raises:
        ValueError: the actor of this name is not a center, or has another rule, number of shards,
            ``snapshots`` or other option; or see ``gr.AGNCenter``.
        TypeError: see ``AccumulatorSet`` and ``gr.AGNCenter``.
        DeadlineExceededError: see ``AccumulatorSet``.
        RuntimeError, ConnectionError: see ``gr.ray.init``.

    Example: see ``docs/ray.md``. In short::

        center = gr.ray.AGNCenter("digits", snapshots="/shared/digits", durability="push")
        getter = gr.AGNCustomGetter(gr.default_mesh().devices[0], center=center)
        weights = gr.get_variable("weights", initial, custom_getter=getter)
        optimizer = gr.AGNOptimizer(gr.AdamOptimizer(), 4, getter)
    """

    def __init__(  # noqa: PLR0913  # options of one call
        self,
        name: str,
        *,
        mesh: Mesh | DeviceLike | None = None,
        center_rule: CenterRule | None = None,
        push: PushKind = "gradient_mean",
        num_required: int | None = None,
        grace: float = 0.0,
        max_staleness: int | None = None,
        num_shards: int = 1,
        num_gpus: int = 0,
        kernels: Kernels = "numpy",
        snapshots: str | os.PathLike[str] | None = None,
        durability: str | int = 100,
        worker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.devices = as_devices(default_mesh() if mesh is None else mesh, "mesh=")
        options = as_options(center_rule, push, num_required, grace, max_staleness)
        definition = {"kind": "AGN center", "num_shards": num_shards, **options._asdict()}
        definition["center_rule"] = repr(definition.pop("rule"))
        settings = settings_of(name, num_shards, num_gpus, kernels, snapshots, durability)._replace(
            definition=definition
        )
        super().__init__(settings, partial(CenterShardState, options=options), worker, timeout)
        self._shared: RemoteCenter = RemoteCenter(self._client, self.devices, self._worker, options)

    def __repr__(self) -> str:
        return f"<AGNCenter {self._client.name!r} on Ray>"

    def variables(self) -> list[Variable]:
        """Returns the center variables without slots, sorted by name.

        Each read of a variable fetches its value, and copies it to a device of this process.
        """
        names, device = self._shared._locate_variables(), self.devices[0]
        return [self._shared._variable(name, device) for name in names]

    def values(self) -> dict[str, np.ndarray]:
        """Returns a read-only NumPy array of each variable by its name (``"w"``).

        All values are of the same moment, between two pushes.
        """
        names_of_all, arrays_by_name = self._shared._locate_variables(), dict[str, np.ndarray]()
        by_shard = self._shared._by_shard(names_of_all)
        for names, message in zip(by_shard, self._client.read(Pull(by_shard)), strict=True):
            # The message also has masters, after the variables.
            arrays_by_name |= zip(names, Layout.of(message.form).arrays(message), strict=False)
        return {name: arrays_by_name[name] for name in names_of_all}

    def leave(self) -> None:
        """Removes the workers of this object from ``workers()``; a push adds its worker again."""
        for connection in list(self._shared._workers.values()):
            self._client.leave(self._worker + connection.suffix)

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns center variables and slots at one moment, between two pushes, as host data.

        Args:
            deadline: has no effect, because this process waits for no device.
            output_type: see ``gr.ConditionalAccumulator.state_dict``.

        Returns:
            A dict in the form of ``gr.AGNCenter.state_dict``. NumPy arrays are read-only.

        Raises:
            CollectiveError: a push failed part-way.
        """
        download = downloader(None, output_type)
        first, *others = self._client.read(CenterPart())
        for other in others:
            first["variables"] |= other["variables"]
            if first["optimizer"] is not None:
                first["optimizer"]["slots"] |= other["optimizer"]["slots"]
        return dict(download(first))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, also that of a ``gr.AGNCenter``; on error, state is unchanged.

        Args:
            state: see ``gr.AGNCenter.load_state_dict``.

        Raises:
            KeyError, TypeError, ValueError: see there.
        """
        self._client.call(LoadCenter(map_leaves(on_host, state)))
