"""What an actor holds: the interface of the accumulators and of the center of an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Key = tuple[str, int]  # of a call: the caller, and its number


class ShardState(ABC):
    """The state of a shard, and the commands on it.

    Every shard runs the same commands in the same order, each on its own tensors, so that all
    shards decide alike. A command is a method, called with the arguments that all shards get and
    this shard's message. If it raises, the state is unchanged. The answer is a small value that is
    equal on all shards, or a ``Message`` with this shard's tensors.

    Attributes:
        repeated: for each command whose answer is a message, the name of the method that returns
            that answer to a caller again.
    """

    repeated: Mapping[str, str]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns what all users of an actor must agree on, first of all its kind."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """The number of updates that a gradient may or may not know of."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Returns the state as host data; see ``gradreduce.checkpoint``."""

    @abstractmethod
    def load(self, state: dict[str, Any] | None) -> None:
        """Replaces the state by a saved one; None: by that of a new state."""

    def may_raise(self, command: str) -> bool:
        """Whether a command may raise on one shard only, so that ``check`` is called before it."""
        return False

    def check(self, command: str, *arguments: Any) -> None:
        """Raises what a command would raise; called on all shards before it."""
        raise NotImplementedError

    # -- accumulators only ------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """Drops what a call has taken."""
        raise NotImplementedError

    def can_take(self, num_required: int) -> bool:
        """Whether enough gradients for a take have arrived."""
        raise NotImplementedError

    def missing(self, num_required: int) -> str:
        """Returns what a take still waits for, for a message."""
        raise NotImplementedError

    # -- centers only -----------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:
        """Registers workers that are not registered, because the actor was restarted."""
        raise NotImplementedError
