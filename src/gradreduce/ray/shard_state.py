"""The interface of the state of an actor, which is a set of accumulators or a center."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Key = tuple[str, int]  # of a call: the caller, and its number


class ShardState(ABC):
    """The state of a shard, and the commands on it.

    Every shard runs the same commands in the same order, each on its own tensors, so all shards
    make the same decisions. A command is a method. Its arguments are the same for all shards; the
    last one, ``message``, has the arrays for this shard. If it raises, the state is unchanged. It
    returns a small value, equal on all shards, or a ``Message`` with the tensors of this shard.

    Attributes:
        repeated: name of a command -> name of the method that returns its answer again. Has the
            commands whose answer is a message.
    """

    repeated: Mapping[str, str]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns what must be equal for all users of an actor, such as its kind and shapes."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """The number of updates, from which the staleness of a gradient is computed."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Returns the state as host data; see ``gradreduce.checkpoint``."""

    @abstractmethod
    def load(self, state: dict[str, Any] | None) -> None:
        """Replaces the state by a saved one; None stands for the state of a new actor."""

    def may_raise(self, command: str) -> bool:
        """Whether a command may raise on one shard only; then ``check`` is called before it."""
        return False

    def check(self, command: str, *arguments: Any) -> None:
        """Raises the error that a command would raise; called on all shards before it."""
        raise NotImplementedError

    # -- accumulators only ------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """Frees the results of a take."""
        raise NotImplementedError

    def can_take(self, num_required: int) -> bool:
        """Whether there are enough gradients for a take, or it raises."""
        raise NotImplementedError

    def missing(self, num_required: int) -> str:
        """Returns a text for error messages: what a take still waits for."""
        raise NotImplementedError

    # -- centers only -----------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:
        """Registers workers again after a restart of the actor; does nothing for the others."""
        raise NotImplementedError
