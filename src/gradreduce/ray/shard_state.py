"""The interface of the state of an actor: a set of accumulators, or a center."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Key = tuple[str, int]  # identifies a call: name of the caller, number of the call


class ShardState(ABC):
    """The state of a shard, and the commands on it.

    All shards run the same commands in the same order, each on its own tensors, so all shards make
    the same decisions. A command is a method. All shards get the same arguments, except for the
    last one, ``message``, which has the arrays for this shard. A command that raises leaves the
    state unchanged. A command returns a small value that is equal on all shards, or a ``Message``
    with the tensors of this shard.

    Attributes:
        repeated: name of a command that returns a message -> name of the method that returns this
            message again. If such a command is not listed, its repeated call returns None.
    """

    repeated: Mapping[str, str]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns what all clients of an actor must agree on, such as its kind and shapes."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """The number of updates; the staleness of a gradient is computed from it."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Returns the state as host data; see ``gradreduce.checkpoint``."""

    @abstractmethod
    def load(self, state: dict[str, Any] | None) -> None:
        """Replaces the state by a saved one; None means the empty state of a new actor."""

    def may_raise(self, command: str) -> bool:
        """Returns whether a command may raise on some shards only; if so, ``check`` runs first."""
        return False

    def check(self, command: str, *arguments: Any) -> None:
        """Raises the error that a command would raise; runs on all shards before the command."""
        raise NotImplementedError

    # -- accumulators only ------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """Frees the results of a take."""
        raise NotImplementedError

    def can_take(self, num_required: int) -> bool:
        """Returns whether a take need not wait: there are enough gradients, or it raises."""
        raise NotImplementedError

    def missing(self, num_required: int) -> str:
        """Returns what a take still waits for, as a text for error messages."""
        raise NotImplementedError

    # -- centers only -----------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:
        """Registers those of these workers that the actor does not know, after its restart."""
        raise NotImplementedError
