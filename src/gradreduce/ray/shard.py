"""The actors of gradreduce.ray: what every shard does.

The tensors of a set of accumulators, or of a center, can be distributed over several actors, the
shards. All shards run the same commands in the same order. Shard 0 is the coordinator: it numbers
the commands; see ``coordinator.py``. A snapshot has the number of the last command that it
includes, and all shards write snapshots of the same numbers. After a restart of one shard, all
shards load their snapshots of one number, so that they agree again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from gradreduce.errors import log_warning

from .commands import Answer, CallKey, Change, End, Read
from .messages import TensorMessage
from .shard_state import ActorSettings, ShardState
from .snapshots import Snapshots


class RetryError(RuntimeError):
    """A shard was restarted or has ended: the client must send its call again."""


def why_not_started(error: ray.exceptions.RayActorError) -> str:
    """Returns the error that the constructor of an actor raised; empty if it raised none."""
    text = str(error).strip()
    return text.rpartition("\n")[2] if "in its creation task" in text else ""


def store_large_arrays(value: Any) -> Any:
    """Puts the large arrays of an answer into Ray's object store, and a reference in the answer.

    The coordinator forwards the reference to the client, and does not copy the arrays.
    """
    if isinstance(value, TensorMessage) and value.bigs:
        return value._replace(bigs=ray.put(list(value.bigs)))
    return value


def load_large_arrays(value: Any) -> Any:
    """Undoes ``store_large_arrays``; the arrays of the answer are read-only."""
    if isinstance(value, TensorMessage) and isinstance(value.bigs, ray.ObjectRef):
        return value._replace(bigs=ray.get(value.bigs))
    return value


class Shard:
    """An actor. Its methods are asynchronous, but only those of the coordinator wait.

    Args:
        settings: settings of the actor.
        make_state: returns an empty state for a shard.
    """

    def __init__(
        self, settings: ActorSettings, make_state: Callable[[ActorSettings], ShardState]
    ) -> None:
        self._settings = settings
        self._state = make_state(settings)
        # A random name for the last ``go_back`` of all shards; empty in a new process.
        self._generation = ""
        folder, name = settings.folder, settings.actor_name
        self._snapshots = None if folder is None else Snapshots(folder, name)
        self._load(0 if self._snapshots is None else self._snapshots.newest())

    async def stage(self, generation: str, message_id: str, message: TensorMessage) -> None:
        """Keeps the arrays of a call until ``execute`` or ``discard``.

        Ignores arrays of another generation: they were sent before the last ``go_back``.
        """
        if generation == self._generation:
            self._staged[message_id] = message

    async def discard(self, message_id: str) -> None:
        """Drops the arrays of a call that will not be executed."""
        self._staged.pop(message_id, None)

    async def execute(
        self, generation: str, number: int, command: Change[Any], message_ids: Sequence[str]
    ) -> Any:
        """Runs a command.

        Args:
            generation: name of the last ``go_back`` of all shards.
            number: number of the command before.
            command: the command.
            message_ids: identify the arrays that ``stage`` has kept.

        Raises:
            RetryError: a shard was restarted; this one may lack commands or arrays.
        """
        self._check_moment(generation, number)
        messages = [self._staged.pop(each) for each in message_ids]
        value = self._execute(command, *messages)
        self._write_snapshot(command)
        return store_large_arrays(value)

    async def check(
        self, generation: str, number: int, command: Change[Any], message_ids: Sequence[str]
    ) -> None:
        """Raises the error that the command after ``number`` would raise; changes no state."""
        self._check_moment(generation, number)
        self._state.check(command, *[self._staged[each] for each in message_ids])

    async def read(self, generation: str, number: int, command: Read[Any]) -> Any:
        """Runs a command that only reads, after command ``number``."""
        self._check_moment(generation, number)
        return store_large_arrays(self._state.run(command))

    def _check_moment(self, generation: str, number: int) -> None:
        if (generation, number) != (self._generation, self._number):
            raise RetryError(f"{self._settings.actor_name} was restarted")

    async def forget(self, key: CallKey) -> None:
        """Frees the results of a call, which are kept in case the client repeats the call."""
        self._state.forget(key)

    async def snapshots(self) -> list[int]:
        """Returns the numbers of the states that ``go_back`` can load."""
        if self._snapshots is None:
            # Only a new coordinator lets all shards start again from the empty state: any commands
            # that they have run are those of a coordinator that has ended.
            return [] if self._number and not self._settings.shard else [0]
        return self._snapshots.loadable()

    async def go_back(self, number: int, generation: str) -> None:
        """Loads the snapshot of a command number; 0 means the empty state of a new actor."""
        self._load(number)
        self._generation = generation

    async def close(self) -> None:
        """Removes the snapshots, and ends the actor."""
        if self._snapshots is not None:
            try:
                self._snapshots.remove()
            except OSError as error:
                log_warning(
                    __name__,
                    "the snapshots of %r were not removed: %s",
                    self._settings.actor_name,
                    error,
                )
        leave: Any = ray.actor.exit_actor  # untyped
        leave()

    def _execute(self, command: Change[Answer], *message: TensorMessage) -> Answer:
        value = self._state.run(command, *message)
        self._number += 1
        return value

    def _write_snapshot(self, command: Change[Any]) -> None:
        """Writes a snapshot if one is due; always after ``End``, so that rounds do not wait.

        If that fails and ``period`` is 1, undoes the last command and raises.
        """
        is_wanted = self._number % self._settings.period == 0 or isinstance(command, End)
        if self._snapshots is None or not is_wanted:
            return
        try:
            self._snapshots.write(self._number, {"state": self._state.save(), "calls": self._calls})
        except OSError as error:
            if self._settings.period == 1:
                self._load(self._number - 1)
                raise
            log_warning(
                __name__,
                "no snapshot %d of %r: %s",
                self._number,
                self._settings.actor_name,
                error,
            )

    def _load(self, number: int) -> None:
        """Loads a snapshot; 0 means the empty state of a new actor."""
        saved: dict[str, Any] = {}
        if self._snapshots is not None:
            saved = self._snapshots.read(number) if number else {}
            self._snapshots.remove(above=number)  # the next commands get these numbers
        self._state.load(saved.get("state"))
        # Of shard 0 only: caller -> number of its last call, whether it was a take, and its value.
        self._calls: dict[str, list[Any]] = saved.get("calls", {})
        self._number = number  # of the last command
        self._staged: dict[str, TensorMessage] = {}
