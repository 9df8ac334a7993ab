"""The actors of gradreduce.ray: what every shard does.

The tensors of a set of accumulators, or of a center, may be distributed over several actors, the
shards. All shards run the same commands in the same order. Shard 0, the lead, numbers the commands;
see ``lead.py``. A snapshot has the number of the last command in it, and all shards write snapshots
of the same numbers. So all can load the same one after one of them was restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

from gradreduce.backends import Kernels, open_mesh
from gradreduce.device import Device
from gradreduce.errors import log_warning

from .messages import Message
from .shard_state import Key, ShardState
from .snapshots import Snapshots


class Settings(NamedTuple):
    """How an actor is made.

    Attributes:
        name: of the lead; the others have ``name#1``, ...
        shard: number of the shard.
        num_shards: number of shards.
        folder: of the snapshots; None: there are none.
        period: number of commands from one snapshot to the next; 1: a snapshot is written before
            each command is answered.
        num_gpus: of each actor.
        kernels: of actors without a GPU; see ``open_mesh``.
    """

    name: str
    shard: int
    num_shards: int
    folder: str | None
    period: int
    num_gpus: float
    kernels: Kernels

    def open_device(self) -> Device:
        """Opens the device of the actor that calls this."""
        if self.num_gpus:
            return open_mesh(backend="cuda").devices[0]
        return open_mesh(1, backend="sim", kernels=self.kernels).devices[0]

    def description(self) -> dict[str, Any]:
        """Returns the options that all users of the actor must pass alike, by name."""
        durability = "push" if self.period == 1 else self.period
        return {"snapshots": self.folder, "durability": durability}

    @property
    def actor_name(self) -> str:
        """The name of the shard's actor."""
        return f"{self.name}#{self.shard}" if self.shard else self.name


class RetryError(RuntimeError):
    """The shards have loaded an older snapshot, so the client must send its call again."""


def why_not_started(error: ray.exceptions.RayActorError) -> str:
    """Returns the error of the constructor of an actor; empty if it has started."""
    text = str(error).strip()
    return text.rpartition("\n")[2] if "in its creation task" in text else ""


def store_large_arrays(value: Any) -> Any:
    """Returns an answer with its large arrays in Ray's store: the lead sends it on uncopied."""
    if isinstance(value, Message) and value.bigs:
        return value._replace(bigs=ray.put(list(value.bigs)))
    return value


def load_large_arrays(value: Any) -> Any:
    """Returns an answer with its large arrays, which are read-only."""
    if isinstance(value, Message) and isinstance(value.bigs, ray.ObjectRef):
        return value._replace(bigs=ray.get(value.bigs))
    return value


class Shard:
    """An actor; its methods are asynchronous, but only those of the lead wait.

    Args:
        settings: how it is made.
        make_state: returns an empty state for a shard.
    """

    def __init__(self, settings: Settings, make_state: Callable[[Settings], ShardState]) -> None:
        self._settings = settings
        self._state = make_state(settings)
        self._number = 0  # of the last command
        # A random name of the last ``go_back`` of all shards; a new process does not know it.
        self._generation = ""
        self._staged: dict[str, Message] = {}
        self._snapshots: Snapshots | None = None
        if settings.folder is not None:
            self._snapshots = Snapshots(settings.folder, settings.actor_name)
            self._load(self._snapshots.newest())

    async def stage(self, generation: str, message_id: str, message: Message) -> None:
        """Keeps the arrays of a call until ``execute`` or ``discard``.

        Ignores arrays of another generation: a lead that has ended since had sent them.
        """
        if generation == self._generation:
            self._staged[message_id] = message

    async def discard(self, message_id: str) -> None:
        """Drops the arrays of a call that will not be executed."""
        self._staged.pop(message_id, None)

    async def execute(  # of one call
        self,
        generation: str,
        number: int,
        key: Key,
        command: str,
        arguments: Sequence[Any],
        message_id: str,
    ) -> Any:
        """Runs a command.

        Args:
            generation: from the last ``go_back``.
            number: of the command.
            key: of the call.
            command: name of the state's method.
            arguments: for all shards.
            message_id: of the arrays; empty: there are none.

        Raises:
            RetryError: a shard was restarted; this one may lack commands or arrays.
        """
        self._check_moment(generation, number - 1)
        message = self._staged.pop(message_id) if message_id else None
        return store_large_arrays(self._execute(key, command, arguments, message))

    async def check(
        self,
        generation: str,
        number: int,
        command: str,
        arguments: Sequence[Any],
        message_id: str,
    ) -> None:
        """Raises what the command after ``number`` would raise; changes nothing."""
        self._check_moment(generation, number)
        self._state.check(command, *arguments, self._staged.get(message_id))

    async def read(
        self, generation: str, number: int, command: str, arguments: Sequence[Any]
    ) -> Any:
        """Calls a method of the state that only reads, after command ``number``."""
        self._check_moment(generation, number)
        return store_large_arrays(getattr(self._state, command)(*arguments))

    def _check_moment(self, generation: str, number: int) -> None:
        if (generation, number) != (self._generation, self._number):
            raise RetryError(f"{self._settings.actor_name} was restarted")

    async def forget(self, key: Key) -> None:
        """Frees the results that are kept to answer a call again."""
        self._state.forget(key)

    async def snapshots(self) -> list[int]:
        """Returns the numbers of the states that ``go_back`` can load."""
        if self._snapshots is None:
            # This shard may have run commands of an earlier lead, which a new lead has not run.
            return [] if self._number and not self._settings.shard else [0]
        return self._snapshots.loadable()

    async def go_back(self, number: int, generation: str) -> None:
        """Loads the snapshot of a command; 0 stands for the empty state of a new actor."""
        self._load(number)
        self._generation = generation

    async def close(self) -> None:
        """Removes the snapshots, and ends the actor."""
        if self._snapshots is not None:
            try:
                self._snapshots.remove()
            except OSError as error:
                name = self._settings.actor_name
                log_warning(__name__, "the snapshots of %r were not removed: %s", name, error)
        leave: Any = ray.actor.exit_actor  # untyped
        leave()

    def _execute(
        self, key: Key, command: str, arguments: Sequence[Any], message: Message | None
    ) -> Any:
        """Runs a command, and writes a snapshot if one is due."""
        value = getattr(self._state, command)(*arguments, message)
        self._number += 1
        self._note_call(key, command, value)
        if self._snapshots is not None and not self._number % self._settings.period:
            self._write_snapshot(self._snapshots)
        return value

    def _write_snapshot(self, snapshots: Snapshots) -> None:
        """Writes a snapshot; if that fails and ``period`` is 1, undoes the command."""
        try:
            snapshots.write(self._number, self._snapshot())
        except OSError as error:
            if self._settings.period == 1:
                self._load(self._number - 1)
                raise
            name = self._settings.actor_name
            log_warning(__name__, "no snapshot %d of %r: %s", self._number, name, error)

    def _note_call(self, key: Key, command: str, value: Any) -> None:
        """Called after a command, before its snapshot."""

    def _snapshot(self) -> dict[str, Any]:
        """Returns the contents of a snapshot."""
        return {"state": self._state.save()}

    def _load(self, number: int) -> dict[str, Any]:
        """Loads a snapshot and returns its contents; 0 stands for the state of a new actor."""
        saved: dict[str, Any] = {}
        if self._snapshots is not None:
            saved = self._snapshots.read(number) if number else {}
            self._snapshots.remove(above=number)  # other commands will get these numbers
        self._state.load(saved.get("state"))
        self._number, self._staged = number, {}
        return saved
