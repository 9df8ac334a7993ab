"""Calls actors from any process; a call that is sent again is not applied again."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

import ray

from gradreduce.accumulator import take_queue
from gradreduce.accumulator.validate import as_timeout
from gradreduce.backends import Kernels
from gradreduce.device import DeferInterrupts
from gradreduce.errors import (
    BackendUnavailableError,
    CancelledError,
    DeadlineExceededError,
    brief,
    listed,
    log_warning,
)
from gradreduce.optim.hyperparameters import as_integer

from . import cluster
from .commands import (
    Answer,
    Ask,
    CallKey,
    Change,
    Counts,
    Describe,
    OrderedCall,
    Origin,
    Read,
)
from .coordinator import WorkerInfo, start_shard
from .messages import TensorMessage
from .shard import RetryError, load_large_arrays, why_not_started
from .shard_state import ActorSettings, ShardState

START_SECONDS = 60.0  # a new actor is a new process, which takes some seconds to start
POLL_SECONDS = 1.0  # a waiting take is answered after so long; then its client asks again


class _Caller(threading.local):
    """Numbers the calls of a thread."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.number = 0
        self.unanswered: Any = None  # reference to the answer of a call that reached its deadline

    def next_key(self) -> CallKey:
        """Returns the key of the thread's next call."""
        self.number += 1
        return self.name, self.number


class Client:
    """A connection to the actors of a name; starts them if there are none.

    Args:
        settings: settings of shard 0.
        make_state: returns an empty state for a shard.
        timeout: seconds that a call waits for its answer. The constructor may wait for the start of
            the actor, so it waits at least 60 seconds. None: wait as long as the actor lives.

    Attributes:
        actor: the handle of the coordinator.
        name: name of the coordinator.
        num_shards: number of actors.

    Raises:
        ValueError: the actor of this name has another description, or other settings.
    """

    def __init__(
        self,
        settings: ActorSettings,
        make_state: Callable[[ActorSettings], ShardState],
        timeout: float | None,
    ) -> None:
        cluster.init()
        self.name, self.num_shards = settings.name, settings.num_shards
        limit = as_timeout(timeout)
        self._settings = settings
        self._timeout = None if limit is None else max(limit, START_SECONDS)
        # Less than ``timeout``, so that a waiting take is answered in time.
        self._poll_seconds = min(POLL_SECONDS, math.inf if timeout is None else timeout / 2)
        self.actor = start_shard(settings, make_state)
        self._caller = _Caller()
        description = self.ask(Describe())
        self._timeout = limit
        differences = [
            f"{name} {brief(description[name])}, not {brief(value)}"
            for name, value in settings.description().items()
            if description.get(name, value) != value
        ]
        if differences:
            raise ValueError(
                f"the actor {self.name!r} has {', and '.join(differences)}; use another name, "
                "or the class and the arguments that made the actor"
            )

    @property
    def _coordinator(self) -> Any:
        """The handle of the coordinator.

        Raises:
            BackendUnavailableError: this process is a fork, or Ray was shut down in it. A call to
                Ray would hang, or end the process.
        """
        cluster.check_usable()
        return self.actor

    def call(
        self,
        command: Change[Answer],
        messages: Sequence[TensorMessage] = (),
        origin: Origin | None = None,
        key: CallKey | None = None,
        timeout: float | None = None,
    ) -> list[Answer]:
        """Runs a command once; returns the answer of each shard.

        A call that is repeated, because its answer was lost, may return that of one shard only. So
        does a push to a center with rounds, which waits for its round.

        Args:
            command: the command.
            messages: one message for each shard; empty for a command without arrays.
            origin: the worker, if the call sends a gradient.
            key: key of an earlier call that failed. This call then retries that call, and the
                command is applied at most once. Default: a new key.
            timeout: seconds to wait for the answer. The client's ``timeout`` applies too.

        Raises:
            DeadlineExceededError: no answer within ``timeout``; whether the command was applied is
                unknown. A push stays in its round.
            CancelledError: the actor was closed.
        """
        cluster.check_usable()
        key = self._caller.next_key() if key is None else key
        sent = OrderedCall(key, command, [*messages[:1], *map(ray.put, messages[1:])], origin)
        limit, answer = self._limit(timeout), None
        end = math.inf if limit is None else time.monotonic() + limit
        while answer is None:  # also if actors have lost the round of a push
            answer = self._send(self._coordinator.call, sent, timeout=timeout, in_order=True)
            while isinstance(answer, str):
                seconds = min(end - time.monotonic(), self._poll_seconds)
                if seconds <= 0:
                    raise DeadlineExceededError(
                        f"the round of this push {answer} after {limit:.3g} s; the next call waits "
                        "for it again"
                    )
                answer = self._send(self._coordinator.await_round, key, seconds)
        return list(answer)

    def read(self, command: Read[Answer]) -> list[Answer]:
        """Runs a command that only reads on all shards; returns the answer of each."""
        return list(self._send(self._coordinator.query, command, in_order=True))

    def take(self, num_required: int, timeout: float | None) -> list[TensorMessage]:
        """Blocks until there are enough gradients, and takes them.

        Logs a warning after a minute, once, that says what is missing and which workers came.

        Raises:
            DeadlineExceededError: nothing was taken within ``timeout`` seconds.
        """
        key, limit = self._caller.next_key(), as_timeout(timeout)
        start = time.monotonic()
        end = math.inf if limit is None else start + limit
        log_time = start + take_queue.LOG_SECONDS
        try:
            while True:
                seconds = min(max(0.0, end - time.monotonic()), self._poll_seconds)
                answer = self._send(self._coordinator.take, key, num_required, seconds)
                if isinstance(answer, list) or time.monotonic() >= end:
                    break
                if time.monotonic() >= log_time:
                    log_time = math.inf
                    self._log_wait(answer)
            taken: list[TensorMessage] | None = (
                answer if isinstance(answer, list) else self._send(self._coordinator.withdraw, key)
            )
        except BaseException:  # also Ctrl-C: nobody waits for the answer
            with DeferInterrupts():  # else a second Ctrl-C could leave the take in the queue
                self._coordinator.withdraw.remote(key)
                self._coordinator.delivered.remote(key)
            raise
        if taken is None:
            raise DeadlineExceededError(f"not enough gradients within {limit} s; {answer}")
        self._coordinator.delivered.remote(key)
        return taken

    def _log_wait(self, waits_for: str) -> None:
        """Logs what a take waits for, and which workers have sent a gradient of this step."""
        workers, step = self.workers(), self.ask(Counts())[0]
        log_warning(
            __name__,
            "a take of %r has waited for %g s: %s, from the workers [%s]; others: [%s]",
            self.name,
            take_queue.LOG_SECONDS,
            waits_for,
            listed(each.name for each in workers if each.step >= step),
            listed(f"{each.name} (step {each.step})" for each in workers if each.step < step),
        )

    def ask(self, command: Ask[Answer]) -> Answer:
        """Runs a command on the coordinator alone; returns its answer."""
        return self._send(self._coordinator.query, command)[0]  # type: ignore[no-any-return]

    def workers(self) -> list[WorkerInfo]:
        """Returns a ``WorkerInfo`` for each worker, sorted by name."""
        return list(self._send(self._coordinator.workers))

    def leave(self, worker: str) -> None:
        """Removes a worker from ``workers()``."""
        self._send(self._coordinator.leave, worker)

    def close(self) -> None:
        """Ends the actors and removes their snapshots; does nothing if they have ended."""
        coordinator = self._coordinator
        try:
            with suppress(CancelledError):
                self._send(coordinator.end)
                self._send(coordinator.close.options(max_task_retries=0))
        except BackendUnavailableError:  # the coordinator has ended, other shards may still run
            for shard in range(1, self.num_shards):
                name = self._settings._replace(shard=shard).actor_name
                with suppress(ValueError):  # there is none
                    ray.kill(ray.get_actor(name, namespace=cluster.NAMESPACE))

    def _send(
        self, method: Any, *arguments: Any, timeout: float | None = None, in_order: bool = False
    ) -> Any:
        """Calls a method of the coordinator; retries after ``RetryError`` and lost arrays.

        Args:
            method: the method.
            arguments: its arguments.
            timeout: seconds to wait for the answer. The client's ``timeout`` applies too.
            in_order: whether to wait first for a call that reached its deadline unanswered. For
                calls on all shards: each thread has at most one in progress, so they run in its
                order. Ray itself may run the calls of an asynchronous actor in any order.

        Returns:
            The answer, with its arrays.

        Raises:
            DeadlineExceededError: within ``timeout`` the earlier call or this one got no answer.
        """
        limit = self._limit(timeout)
        end = math.inf if limit is None else time.monotonic() + limit
        try:
            if in_order and self._caller.unanswered is not None:
                if not ray.wait([self._caller.unanswered], timeout=limit)[0]:
                    raise ray.exceptions.GetTimeoutError
                self._caller.unanswered = None
            while True:
                reference = method.remote(*arguments)
                left = None if limit is None else max(0.0, end - time.monotonic())
                with suppress(RetryError, ray.exceptions.ObjectLostError):
                    answer = self._get(reference, left)
                    if isinstance(answer, list):
                        return [load_large_arrays(each) for each in answer]
                    return answer
        except ray.exceptions.GetTimeoutError:
            self._caller.unanswered = self._caller.unanswered or reference
            raise DeadlineExceededError(
                f"no answer from the actor {self.name!r} within {limit:.3g} s"
            ) from None

    def _limit(self, timeout: float | None) -> float | None:
        """Returns the seconds that a call may wait."""
        return min((x for x in (timeout, self._timeout) if x is not None), default=None)

    def _get(self, reference: Any, timeout: float | None) -> Any:
        """Returns an answer; raises the error of the method, or one that says why it has ended."""
        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            if "INTENDED_USER_EXIT" in str(error):
                raise CancelledError(f"{self.name!r} was closed") from None
            if cause := why_not_started(error):
                raise BackendUnavailableError(
                    f"the actor {self.name!r} could not start: {cause}"
                ) from None
            # After the reason, Ray's text has a paragraph of hints.
            reason = str(error).rpartition(" is dead because ")[2].partition(". ")[0].rstrip(".")
            hint = (
                "pass snapshots= to have it restarted"
                if self._settings.folder is None
                else "make it again: it continues from its snapshots"
            )
            raise BackendUnavailableError(
                f"the actor {self.name!r} has ended: {reason}; {hint}"
            ) from None


def settings_of(
    name: str,
    num_shards: int,
    num_gpus: int,
    kernels: Kernels,
    snapshots: str | os.PathLike[str] | None,
    durability: str | int,
) -> ActorSettings:
    """Validates options of accumulators and centers; returns the settings of shard 0.

    Raises:
        ValueError: an option is invalid.
        TypeError: an option has a wrong type.
    """
    cluster.check_name("shared_name", name)
    if isinstance(durability, str) and durability != "push":
        raise ValueError(f"durability={brief(durability)} must be 'push' or a number of calls")
    writes_each = durability == "push"
    if writes_each and snapshots is None:
        raise ValueError("durability='push' needs a folder: pass snapshots=")
    if num_gpus not in (0, 1):
        raise ValueError(f"num_gpus={brief(num_gpus)} must be 0 or 1")
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels={brief(kernels)} is not one of {get_args(Kernels)}")
    return ActorSettings(
        name,
        0,
        as_integer("num_shards", num_shards, least=1),
        None if snapshots is None else os.fspath(Path(snapshots).resolve()),
        1 if writes_each else as_integer("durability", durability, least=1),
        num_gpus,
        kernels,
    )


class SharedObject:
    """Base class of accumulators and centers: an object in actors.

    A copy, also in another process, is another worker, and uses the default mesh there.

    Args:
        settings: settings of shard 0.
        make_state: returns an empty state for a shard.
        worker: see ``AccumulatorSet``.
        timeout: see ``AccumulatorSet``.
    """

    _made_by: tuple[tuple[Any, ...], dict[str, Any]]  # what copies are made by

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Keeps the arguments."""
        new = super().__new__(cls)
        kept = {name: value for name, value in options.items() if name not in ("mesh", "worker")}
        new._made_by = arguments, kept
        return new

    def __init__(
        self,
        settings: ActorSettings,
        make_state: Callable[[ActorSettings], ShardState],
        worker: str | None,
        timeout: float | None,
    ) -> None:
        if worker is not None and not isinstance(worker, str):
            raise TypeError(f"worker={brief(worker)} must be a string or None")
        self._worker = worker or f"{platform.node()}:{os.getpid()}"
        self._client = Client(settings, make_state, timeout)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments, options = self._made_by
        return partial(type(self), **options), arguments

    @property
    def name(self) -> str:
        """The name of the actor."""
        return self._client.name

    def workers(self) -> list[WorkerInfo]:
        """Returns a ``WorkerInfo`` for each worker that has sent gradients, sorted by name.

        A restarted actor has an empty list; workers appear there with their next gradients or push.
        """
        return self._client.workers()

    def close(self) -> None:
        """Ends the actors and removes their snapshots; a second call does nothing.

        In every process, waiting takes and all later calls raise ``CancelledError``.
        """
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def shards_for(sizes: Sequence[int], num_shards: int) -> tuple[int, ...]:
    """Returns the shard of each tensor, so that all shards have about the same bytes.

    Each tensor goes to the shard with the fewest bytes; the largest tensor is the first to go.

    Raises:
        ValueError: there are fewer tensors than shards.
    """
    if num_shards > len(sizes):
        raise ValueError(f"num_shards={num_shards} is more than the {len(sizes)} tensors")
    held, shards = [0] * num_shards, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        shard = min(range(num_shards), key=held.__getitem__)
        shards[index] = shard
        held[shard] += max(1, sizes[index])
    return tuple(shards)
