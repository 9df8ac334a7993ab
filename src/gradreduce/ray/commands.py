"""The commands of actors: who runs each of them, its fields, and what it returns.

    class    sent by          run by                 when
    Change   ``Client.call``  all shards, once each  in the order of the coordinator, numbered
    Read     ``Client.read``  all shards             between two changes
    Ask      ``Client.ask``   the coordinator alone  between two changes

The coordinator itself sends ``Take`` and ``LastTake``, for a client that has called its ``take``,
and ``PushRound``.
The type in brackets is that of a shard's answer. ``accumulator_state.py`` and ``center_state.py``
have the methods that run commands; the decorator of each names its command. The method of a command
with arrays, which are ``Apply``, ``Create`` and ``Push``, also gets the arrays for its shard; that
of ``PushRound`` gets those of each push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar

from gradreduce.arrays.convert_gpu import Kind
from gradreduce.optim.agn.push import PushConfig
from gradreduce.optim.optimizer import Optimizer, Scalars

from .messages import TensorMessage

Answer = TypeVar("Answer")
_State = TypeVar("_State")
_More = ParamSpec("_More")

CallKey = tuple[str, int]  # identifies a call: name of the caller, number of the call


class ActorCommand(Generic[Answer]):
    """Base class; ``Answer`` is what one shard returns."""

    @classmethod
    def handler(
        cls, method: Callable[Concatenate[_State, Self, _More], Answer]
    ) -> Callable[Concatenate[_State, Self, _More], Answer]:
        """Decorates the method of a ``ShardState`` that runs this command."""
        vars(method)["command"] = cls
        return method


class Change(ActorCommand[Answer]):
    """Changes the state of all shards. It either raises on all shards, or changes all."""


class Read(ActorCommand[Answer]):
    """Reads the state of all shards."""


class Ask(ActorCommand[Answer]):
    """Reads or changes what only the coordinator has."""


@dataclass(frozen=True)
class Describe(Ask[dict[str, Any]]):
    """Returns what all clients of the actor must agree on, by name."""


# -- accumulators ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apply(Change[bool | int]):
    """Adds one gradient to each accumulator; the client has checked the gradients, its arrays.

    Returns True if all were added, else the step for which they are stale.

    Attributes:
        local_step: the step with which all gradients were computed.
        kinds: for each accumulator of the set the array type that the caller passed.
        weight: the weight of all gradients; with weight 0 there are no arrays.
    """

    local_step: int
    kinds: Sequence[Kind]
    weight: float


@dataclass(frozen=True)
class Take(Change[TensorMessage]):
    """Takes the gradient of each accumulator; returns what ``LastTake`` returns.

    Attributes:
        key: key of the call.
        num_required: number of gradients, which have arrived.
    """

    key: CallKey
    num_required: int


@dataclass(frozen=True)
class SetGlobalStep(Change[None]):
    """Sets the step of all accumulators."""

    step: int


@dataclass(frozen=True)
class LoadStates(Change[None]):
    """Loads the states of all accumulators of the set, in their order."""

    states: Sequence[Any]


@dataclass(frozen=True)
class LastTake(Read[TensorMessage]):
    """Returns the results of a caller's last take.

    The ``value`` of the answer is a tuple: the array type of each result, and the names of the
    tensors whose exact sum did not fit into its words.
    """

    caller: str


@dataclass(frozen=True)
class States(Read[tuple[list[Any], list[str]]]):
    """Returns the states of the accumulators of the shard, and names as ``LastTake``."""


@dataclass(frozen=True)
class Counts(Ask[tuple[int, int, int]]):
    """Returns the step, the number of gradients in the sum, and the number of dropped ones."""


# -- centers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Create(Change[int]):
    """Creates a variable, unless one of this name exists; its array is the value.

    Returns the shard of the variable.
    """

    name: str


@dataclass(frozen=True)
class Join(Change[None]):
    """Registers a worker's rule: what an actor needs to create an equal optimizer.

    Attributes:
        kind: class of the optimizer.
        master_dtype: see ``Optimizer``.
        attributes: the other attributes of the object.
        num_worker: the number of workers of the training.
    """

    kind: type[Optimizer]
    master_dtype: str | None
    attributes: Mapping[str, Any]
    num_worker: int = 1


@dataclass(frozen=True)
class Push(Change[TensorMessage | bool | None]):
    """Updates the center with the sums or deltas of a worker, which are its arrays.

    Returns the new values, as ``Pull``; None if the push is repeated, and the values were lost;
    False if the push is too old, and was dropped.

    Attributes:
        names: for each shard the names of its variables that have a sum, in the order of the
            message.
        sparse: names of the variables whose sums are rows.
        config: settings of the push.
        scalars: scalars of the rule; for a center rule, the values of its hyperparameters.
        settings: attributes of the optimizer that choose its rule, or those of the center rule.
        weight: the sum of the weights of the period, which the sums are divided by.
        pulled_at: ``clock`` of the state at the worker's last pull.
    """

    names: list[list[str]]
    sparse: frozenset[str]
    config: PushConfig
    scalars: Scalars
    settings: Mapping[str, Any]
    weight: float
    pulled_at: int


@dataclass(frozen=True)
class PushRound(Change[bool]):
    """Updates the center with the pushes of a round; returns True."""

    pushes: Sequence[Any]  # of ``Push``


@dataclass(frozen=True)
class LoadCenter(Change[None]):
    """Loads a state of the whole center; on error, state is unchanged."""

    state: Any


@dataclass(frozen=True)
class Pull(Read[TensorMessage]):
    """Returns values of variables of the shard, then their masters.

    The ``value`` of the answer is a tuple: the number of pushes, and the names of the variables
    that have a master, in the order of the masters.

    Attributes:
        names: names of the variables of each shard.
    """

    names: list[list[str]]


@dataclass(frozen=True)
class SlotsOf(Read[dict[str, str]]):
    """Returns the full names of a variable's slots; empty if another shard holds it."""

    name: str


@dataclass(frozen=True)
class SlotValue(Read[TensorMessage]):
    """Returns the value of a variable's slot; no tensor if the shard does not hold it."""

    name: str
    slot: str


@dataclass(frozen=True)
class CenterPart(Read[dict[str, Any]]):
    """Returns the state of the shard in the form of ``gr.AGNCenter.state_dict``."""


@dataclass(frozen=True)
class ListShards(Ask[dict[str, int]]):
    """Returns the shard of each variable of the center, by name."""


# -- workers of centers; see the methods of ``Registry`` ------------------------------------------


@dataclass(frozen=True)
class OfWorker(Ask[None]):
    """Base class of what happens to a worker."""

    task_index: int


@dataclass(frozen=True)
class Begin(OfWorker):
    """Registers a worker."""


@dataclass(frozen=True)
class End(Change[None]):
    """Unregisters a worker, for which rounds no longer wait."""

    task_index: int


@dataclass(frozen=True)
class ClearFailure(OfWorker):
    """Removes a worker from the failed ones."""


@dataclass(frozen=True)
class MarkFailed(OfWorker):
    """Records that an exception ended a worker; ``text`` describes it."""

    text: str


@dataclass(frozen=True)
class ListWorkers(Ask[tuple[list[int], list[int]]]):
    """Returns the task indices of the workers that have begun, and of those that have failed."""


# -- the calls of clients -------------------------------------------------------------------------


class Origin(NamedTuple):
    """The worker that sends a gradient, and the step at which it computed the gradient.

    Attributes:
        worker: name of the worker.
        step: step of the gradient; see ``WorkerInfo``.
        clock: for AGN, the ``clock`` of the state at the worker's last pull; for accumulators,
            the ``local_step``.
        tasks: the task indices that the worker's thread has registered. A restarted coordinator
            registers them again.
    """

    worker: str
    step: int
    clock: int
    tasks: tuple[int, ...] = ()


class OrderedCall(NamedTuple):
    """A call of a ``Change`` as one object, because Ray needs 50 us for each argument.

    Attributes:
        key: identifies the call; the numbers of one caller increase.
        command: the command.
        messages: for a command with arrays, those for the coordinator, and references to those for
            each other shard; else empty.
        origin: the worker, if the call sends a gradient; else None.
    """

    key: CallKey
    command: Change[Any]
    messages: Sequence[Any] = ()
    origin: Origin | None = None
