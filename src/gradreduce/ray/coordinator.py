"""The coordinator, shard 0: it gives the commands of all shards one order.

    client -> call          sends arrays to the other shards, while earlier commands still run
              (lock)        if the call was already applied, only repeats its answer
              execute       every shard runs the command, and writes a snapshot if one is due
              serve         runs waiting takes that now have enough gradients, each by a ``Take``,
                            and the waiting pushes of a round that is due, by a ``PushRound``
              answer        returns the small values and the arrays of all shards

What waits does not hold the lock, so other calls continue. Waiting pushes have changed nothing yet:
if their shards load a snapshot, their clients send them again. All code of an actor runs in one
thread, which switches to another call only at an ``await``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import ray

from gradreduce.errors import BackendUnavailableError, CancelledError, log_warning
from gradreduce.optim.agn.rounds import Quorum

from .cluster import NAMESPACE
from .commands import (
    Answer,
    Ask,
    CallKey,
    Change,
    LastTake,
    OrderedCall,
    Origin,
    PushRound,
    Read,
    Take,
)
from .messages import TensorMessage
from .shard import RetryError, Shard, why_not_started
from .shard_state import ActorSettings, ShardState, set_last

LEASE_SECONDS = 5.0  # a take is dropped if its client has not asked for so long
MAX_CALLERS = 10_000  # callers whose last call is kept; also the most workers in ``workers``


class WorkerInfo(NamedTuple):
    """One worker, as ``workers()`` of an accumulator or a center lists it.

    Attributes:
        name: name of the worker.
        step: for accumulators, the ``local_step`` of the worker's last gradient; for AGN, its
            number of local steps at its last push.
        staleness: for accumulators, how many steps ``local_step`` was behind ``global_step``; for
            AGN, the number of pushes of other workers between its last pull and its last push.
        last_contact: seconds since its last gradient or push arrived.

    Example: see ``docs/ray.md``.
    """

    name: str
    step: int
    staleness: int
    last_contact: float


@dataclass(eq=False)
class QueuedTake:
    """A take that waits in the queue.

    Attributes:
        num_required: number of gradients that it waits for.
        seen: time at which its client asked last, by the monotonic clock.
        done: a future of the answers of all shards.
    """

    num_required: int
    seen: float = 0.0
    done: asyncio.Future[list[Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingPush(NamedTuple):
    """A push that waits for its round.

    Attributes:
        push: the command.
        message: its arrays for this shard.
        message_id: identifies its arrays that the other shards have staged.
        done: a future of the answers.
    """

    push: Change[Any]
    message: TensorMessage
    message_id: str
    done: asyncio.Future[list[Any]]


def start_shard(settings: ActorSettings, make_state: Callable[[ActorSettings], ShardState]) -> Any:
    """Returns the actor of a shard; starts one if no actor has this name."""
    num_retries = 0 if settings.folder is None else -1
    actor = ray.remote(Shard if settings.shard else Coordinator).options(
        name=settings.actor_name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        num_gpus=settings.num_gpus,
        max_restarts=num_retries,
        max_task_retries=num_retries,
    )
    return actor.remote(settings, make_state)


def _run_to_completion(method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Decorates a method of the coordinator that must complete even if Ray cancels the call.

    ``ray.cancel`` of a task also cancels the calls that the task waits for, at any ``await`` in
    them. Without this, some shards could have run a command and others not.
    """

    @wraps(method)
    async def run(self: Coordinator, *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(method(self, *args, **kwargs))
        self._running.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    return run


class Coordinator(Shard):
    """The coordinator, which is the actor of shard 0; see the docstring of the module.

    Args:
        settings: settings of shard 0.
        make_state: returns an empty state for a shard.
    """

    def __init__(
        self, settings: ActorSettings, make_state: Callable[[ActorSettings], ShardState]
    ) -> None:
        super().__init__(settings, make_state)
        self._make_state = make_state
        self._others = self._start_others()
        self._in_sync = not self._others  # whether all shards have run the same commands
        self._error: Exception | None = None  # what all calls raise from now on
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._queue: dict[CallKey, QueuedTake] = {}
        self._waiting: dict[CallKey, WaitingPush] = {}  # pushes of the round
        self._quorum = Quorum()  # of the round
        self._workers: dict[str, tuple[int, int, float]] = {}

    def _start_others(self) -> list[Any]:
        """Returns the actors of the other shards; starts those that do not exist."""
        return [
            start_shard(self._settings._replace(shard=shard), self._make_state)
            for shard in range(1, self._settings.num_shards)
        ]

    # -- commands ---------------------------------------------------------------------------------

    @_run_to_completion
    async def call(self, sent: OrderedCall) -> list[Any] | str:
        """Runs a command on all shards; a call that was already applied gets its answer again.

        Returns:
            The answers of all shards, or of one. For a push whose round is not due, a text that
            says what the round waits for; see ``await_round``.
        """
        own, others, generation = sent.messages[:1], sent.messages[1:], self._generation
        message_id = uuid.uuid4().hex if others else ""
        try:
            with suppress(RetryError):  # a shard has ended: _ready notices it
                await self._answers(
                    other.stage.remote(generation, message_id, each)
                    for other, each in zip(self._others, others, strict=bool(others))
                )
            async with self._lock:
                await self._ready()
                if self._is_known(sent.key):
                    return await self._repeat_answer(sent.key[0])
                if generation != self._generation:
                    raise RetryError("staged before the shards went back to a snapshot")
                if sent.origin is not None:
                    self._note(sent.origin)
                if self._state.is_of_round(sent.command):
                    if sent.key not in self._waiting:
                        done = asyncio.get_running_loop().create_future()
                        waiting = WaitingPush(sent.command, own[0], message_id, done)
                        self._waiting[sent.key] = waiting
                        message_id = ""  # the round drops the arrays
                    return await self._answer_of(self._waiting[sent.key])
                answers = await self._run([sent.key], sent.command, own, [message_id])
                await self._serve()
                return answers
        finally:
            for other in self._others if message_id else ():
                other.discard.remote(message_id)

    async def _run(
        self,
        keys: Sequence[CallKey],
        command: Change[Answer],
        messages: Sequence[TensorMessage] = (),
        message_ids: Sequence[str] = (),
    ) -> list[Answer]:
        """Runs a command on all shards; the caller holds the lock.

        Args:
            keys: keys of the calls.
            command: the command.
            messages: for a command with arrays, those for this shard; else empty.
            message_ids: identify the arrays that the other shards have staged; "": there are none.
        """
        sent = self._generation, self._number, command, [each for each in message_ids if each]
        if self._others and self._state.may_raise(command):
            self._state.check(command, *messages)
            await self._answers(other.check.remote(*sent) for other in self._others)
        own = self._execute(command, *messages)
        value = None if isinstance(own, TensorMessage) else own
        for caller, number in keys:
            set_last(self._calls, caller, [number, isinstance(command, Take), value], MAX_CALLERS)
        self._write_snapshot(command)
        self._in_sync = False
        found = await self._answers(other.execute.remote(*sent) for other in self._others)
        self._in_sync = True
        return [own, *found]

    async def _answers(self, calls: Iterable[Any]) -> list[Any]:
        """Returns the answers to calls of all other shards; raises the first error."""
        answers = await asyncio.gather(*calls, return_exceptions=True)
        try:
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            return answers
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RetryError):
                self._in_sync = False
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            self._in_sync = False
            if cause := why_not_started(error):
                # If the cause has been removed, the next call succeeds.
                self._others = self._start_others()
                raise BackendUnavailableError(
                    f"a shard of {self._settings.name!r} could not start: {cause}"
                ) from None
            raise RetryError(f"a shard of {self._settings.name!r} has ended") from error

    def _is_known(self, key: CallKey) -> bool:
        """Returns whether this call, or a later call of the same caller, was already applied."""
        known = self._calls.get(key[0])
        return known is not None and key[1] <= known[0]

    async def _repeat_answer(self, caller: str) -> list[Any]:
        """Returns the answers to the last call of a caller once more."""
        _, was_take, value = self._calls[caller]
        return await self._read(LastTake(caller)) if was_take else [value]

    # -- reads ------------------------------------------------------------------------------------

    @_run_to_completion
    async def query(self, command: Read[Any] | Ask[Any]) -> list[Any]:
        """Runs a command between two changes; returns the answer of each shard that it asks."""
        async with self._lock:
            await self._ready()
            return await self._read(command)

    async def _read(self, command: Read[Any] | Ask[Any]) -> list[Any]:
        own, others = self._state.run(command), [] if isinstance(command, Ask) else self._others
        sent = self._generation, self._number, command
        return [own, *await self._answers(other.read.remote(*sent) for other in others)]

    # -- takes ------------------------------------------------------------------------------------

    @_run_to_completion
    async def take(self, key: CallKey, num_required: int, seconds: float) -> list[Any] | str:
        """Takes gradients if there are enough; takes complete in the order of their first calls.

        Args:
            key: identifies the take. The client calls again with the same key until it has the
                answers.
            num_required: number of gradients.
            seconds: how long this call waits at most.

        Returns:
            The answers of all shards; or a text that says what the take still waits for.
        """
        async with self._lock:
            await self._ready()
            if self._is_known(key):
                self._queue.pop(key, None)
                return await self._repeat_answer(key[0])
            queued = self._queue.setdefault(key, QueuedTake(num_required))
            queued.seen = time.monotonic()
            await self._serve()
        await asyncio.wait([queued.done], timeout=seconds)
        queued.seen = time.monotonic()
        return queued.done.result() if queued.done.done() else self._state.missing(num_required)

    @_run_to_completion
    async def withdraw(self, key: CallKey) -> list[Any] | None:
        """Removes a take from the queue; returns its answers if it was already applied."""
        async with self._lock:
            self._queue.pop(key, None)
            await self._ready()
            if self._is_known(key):
                return await self._repeat_answer(key[0])
            await self._serve()
            return None

    async def delivered(self, key: CallKey) -> None:
        """Frees the results of a take that have arrived, or that nobody waits for any more."""
        await self.forget(key)
        for other in self._others:
            other.forget.remote(key)

    async def _serve(self) -> None:
        """Runs what need not wait any more; the caller holds the lock."""
        if self._seconds_left() == 0:
            await self._run_round()
        await self._serve_takes()

    async def _serve_takes(self) -> None:
        """Runs the takes at the front of the queue for which there are enough gradients."""
        while self._queue:
            key, queued = next(iter(self._queue.items()))
            if time.monotonic() - queued.seen > LEASE_SECONDS:
                log_warning(__name__, "a take of %r was dropped: its client is gone", key[0])
            elif self._is_known(key):  # its answer was lost: the client asks again
                pass
            elif self._state.can_take(queued.num_required):
                try:
                    answers = await self._run([key], Take(key, queued.num_required))
                except RetryError:
                    raise  # the take stays in the queue
                except Exception as error:  # for the client of the take, not for this caller
                    queued.done.set_exception(error)
                else:
                    queued.done.set_result(answers)
            else:
                return
            del self._queue[key]

    # -- rounds -----------------------------------------------------------------------------------

    @_run_to_completion
    async def await_round(self, key: CallKey, seconds: float) -> list[Any] | str | None:
        """Waits for the round of a push, for at most some seconds.

        Returns:
            See ``call``; None if the push is not known: the client has to send it again.
        """
        end = time.monotonic() + seconds
        while True:
            async with self._lock:
                await self._ready()
                if self._is_known(key):
                    return await self._repeat_answer(key[0])
                if key not in self._waiting:
                    return None
                waiting = self._waiting[key]
                answer, left = await self._answer_of(waiting), end - time.monotonic()
                grace_left = self._seconds_left()
            if isinstance(answer, list) or left <= 0:
                return answer
            await asyncio.wait([waiting.done], timeout=min(left, grace_left or left))
            if waiting.done.done():
                return waiting.done.result()

    async def _answer_of(self, waiting: WaitingPush) -> list[Any] | str:
        """Runs the round if it is due; returns what ``call`` returns for one of its pushes."""
        await self._serve()
        if waiting.done.done():
            return waiting.done.result()
        return self._state.missing(len(self._waiting))

    def _seconds_left(self) -> float | None:
        """Returns the time until the round is due; None: pushes are missing."""
        self._quorum.num_pushes = len(self._waiting)
        return self._state.seconds_left(self._quorum) if self._waiting else None

    async def _run_round(self) -> None:
        """Runs the round. If that raises, all of its workers get the error, and push again."""
        keys, waiting = list(self._waiting), list(self._waiting.values())
        pushes, messages, message_ids, _ = map(list, zip(*waiting, strict=True))
        try:
            answers = await self._run(keys, PushRound(pushes), messages, message_ids)
        except RetryError:
            raise  # ``_ready`` drops the round
        except Exception as error:
            self._end_round(error)
            for each in message_ids if self._others else ():
                for other in self._others:
                    other.discard.remote(each)
        else:
            self._end_round(answers[:1])

    def _end_round(self, answer: list[Any] | Exception) -> None:
        """Answers the pushes of the round, and begins the next one."""
        waiting, self._waiting, self._quorum = self._waiting, {}, Quorum()
        for each in waiting.values():
            if isinstance(answer, Exception):
                each.done.set_exception(answer)
            else:
                each.done.set_result(answer)

    # -- workers ----------------------------------------------------------------------------------

    def _note(self, origin: Origin) -> None:
        self._state.register(origin.tasks)
        staleness = max(0, self._state.clock - origin.clock)
        set_last(
            self._workers, origin.worker, (origin.step, staleness, time.monotonic()), MAX_CALLERS
        )

    async def workers(self) -> list[WorkerInfo]:
        """Returns a ``WorkerInfo`` for each worker, sorted by name."""
        now = time.monotonic()
        return [
            WorkerInfo(name, step, staleness, now - seen)
            for name, (step, staleness, seen) in sorted(self._workers.items())
        ]

    async def leave(self, worker: str) -> None:
        """Removes a worker from ``workers()``."""
        self._workers.pop(worker, None)

    # -- failures ---------------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Makes all shards agree: each loads the newest snapshot that all shards have.

        Does nothing if they agree already, that is, if all have run the same commands.

        Raises:
            CancelledError: the actor was closed.
            BackendUnavailableError: the shards have no common snapshot.
            RetryError: a shard ended meanwhile.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._in_sync:
            return
        numbers = set(await self.snapshots())
        generation = uuid.uuid4().hex
        try:
            for found in await self._answers(other.snapshots.remote() for other in self._others):
                numbers &= set(found)
            if numbers:
                number = max(numbers)
                await self._answers(
                    other.go_back.remote(number, generation) for other in self._others
                )
        except RetryError:
            if numbers:
                self._others = self._start_others()  # Ray does not restart an actor after ray.kill
                raise
        if not numbers:
            self._error = BackendUnavailableError(
                f"{self._settings.name!r} cannot go on: a shard has ended, or a call has failed on "
                "some shards, and they have no common snapshot: close it, and make it again; pass "
                "snapshots= to survive this"
            )
            raise self._error
        await self.go_back(max(numbers), generation)
        self._end_round(RetryError("the round was lost"))
        self._in_sync = True

    @_run_to_completion
    async def end(self) -> None:
        """Ends the other shards; waiting takes and later calls raise ``CancelledError``."""
        async with self._lock:
            self._error = error = CancelledError(f"{self._settings.name!r} was closed")
            for queued in self._queue.values():
                queued.done.set_exception(CancelledError("TakeGrad operation was cancelled"))
            self._queue = {}
            self._end_round(error)
        closed = [other.close.options(max_task_retries=0).remote() for other in self._others]
        await asyncio.gather(*closed, return_exceptions=True)  # each raises: its actor has ended
