"""The settings of an actor, and the interface of its state: accumulators, or a center."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from gradreduce.backends import Kernels, open_mesh
from gradreduce.device import Device
from gradreduce.optim.agn.rounds import Quorum

from .commands import ActorCommand, Answer, CallKey, Describe
from .messages import TensorMessage


class ActorSettings(NamedTuple):
    """The settings of an actor.

    Attributes:
        name: name of the coordinator; the other shards are called ``name#1``, ``name#2``, ...
        shard: number of the shard.
        num_shards: number of shards.
        folder: folder of the snapshots; None: there are none.
        period: number of commands from one snapshot to the next; 1: each command is answered after
            a snapshot that includes it is on the disk.
        num_gpus: number of GPUs of each actor.
        kernels: how actors without a GPU compute; see ``open_mesh``.
        definition: what else all clients of the actor must agree on, such as its kind and shapes.
    """

    name: str
    shard: int
    num_shards: int
    folder: str | None
    period: int
    num_gpus: float
    kernels: Kernels
    definition: Mapping[str, Any] = {}  # never changed

    def open_device(self) -> Device:
        """Opens the device of the calling actor."""
        if self.num_gpus:
            return open_mesh(backend="cuda").devices[0]
        return open_mesh(1, backend="sim", kernels=self.kernels).devices[0]

    def description(self) -> dict[str, Any]:
        """Returns what all clients of the actor must agree on, by name."""
        durability = "push" if self.period == 1 else self.period
        return {**self.definition, "snapshots": self.folder, "durability": durability}

    @property
    def actor_name(self) -> str:
        """The name of the shard's actor."""
        return f"{self.name}#{self.shard}" if self.shard else self.name


class ShardState(ABC):
    """The state of a shard, and the commands on it.

    All shards run the same changes in the same order, each on its own tensors, so all shards make
    the same decisions. All shards get the same command; if it has arrays, each gets its own
    message. A change that raises leaves the state unchanged. It returns a small value that is equal
    on all shards, or a ``TensorMessage`` with the tensors of this shard.

    Args:
        settings: settings of the shard.
    """

    _handlers: ClassVar[Mapping[type, Callable[..., Any]]]  # the method that runs a command

    def __init__(self, settings: ActorSettings) -> None:
        self._settings, self._device = settings, settings.open_device()

    def __init_subclass__(cls) -> None:
        methods = [*vars(ShardState).values(), *vars(cls).values()]
        cls._handlers = {each.command: each for each in methods if hasattr(each, "command")}

    def run(self, command: ActorCommand[Answer], *message: TensorMessage) -> Answer:
        """Runs a command; ``message`` is there for a command with arrays."""
        return self._handlers[type(command)](self, command, *message)  # type: ignore[no-any-return]

    @Describe.handler
    def describe(self, command: Describe) -> dict[str, Any]:
        """See ``Describe``."""
        return self._settings.description()

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

    def may_raise(self, command: ActorCommand[Any]) -> bool:
        """Returns whether a command may raise on some shards only; if so, ``check`` runs first."""
        return False

    def check(self, command: ActorCommand[Any], *message: TensorMessage) -> None:  # noqa: B027
        """Raises the error that a command would raise; runs on all shards before the command."""

    def missing(self, number: int) -> str:
        """Returns what a take of so many gradients, or a round of so many pushes, waits for."""
        raise NotImplementedError

    # -- accumulators only ------------------------------------------------------------------------

    def forget(self, key: CallKey) -> None:  # noqa: B027
        """Frees the results of a take."""

    def can_take(self, num_required: int) -> bool:
        """Returns whether a take need not wait: there are enough gradients, or it raises."""
        raise NotImplementedError

    # -- centers only -----------------------------------------------------------------------------

    def register(self, tasks: Sequence[int]) -> None:  # noqa: B027
        """Registers those of these workers that the actor does not know, after its restart."""

    def is_of_round(self, command: ActorCommand[Any]) -> bool:
        """Returns whether a command is a push that has to wait for others; checks the push."""
        return False

    def seconds_left(self, quorum: Quorum) -> float | None:
        """Returns the time until a round is due; None: pushes are missing."""
        raise NotImplementedError


def set_last(known: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Sets the newest entry of a dict; drops the oldest entries beyond ``most``."""
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]
