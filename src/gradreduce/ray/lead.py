"""The lead is shard 0: it decides the order of the commands of all shards.

    client -> call          stages the arrays on the other shards, while earlier commands still run
              (lock)        a call that was already applied only gets its answer again
              execute       every shard runs the command, and writes a snapshot if one is due
              serve         runs the takes that now have enough gradients, as commands
              answer        the small values and arrays of all shards

A take that waits does not hold the lock, so other calls continue. All code of an actor runs in one
thread, and switches to another call only at an ``await``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import ray

from gradreduce.errors import BackendUnavailableError, CancelledError, log_warning

from .cluster import NAMESPACE
from .messages import Message
from .shard import RetryError, Settings, Shard, why_not_started
from .shard_state import Key, ShardState

LEASE_SECONDS = 5.0  # a take is dropped if its client has not asked again for so long
MAX_CALLERS = 10_000  # callers whose last call is known; also the workers in ``workers``


class Origin(NamedTuple):
    """Where a gradient comes from.

    Attributes:
        worker: its name.
        step: of the gradient; see ``WorkerInfo``.
        clock: the ``clock`` of the state at the worker's last pull.
        tasks: task indices that the worker's thread has registered. A lead that was restarted
            registers them again.
    """

    worker: str
    step: int
    clock: int
    tasks: tuple[int, ...] = ()


class Call(NamedTuple):
    """A call of a command, as one object: Ray needs 50 us for each argument of a call.

    Attributes:
        key: of the call; the numbers of a caller ascend.
        command: name of the state's method.
        arguments: for all shards.
        message: arrays for the lead, or None.
        others: references to the messages for the other shards; empty for a command without arrays.
        origin: of a gradient, or None.
    """

    key: Key
    command: str
    arguments: Sequence[Any]
    message: Message | None = None
    others: Sequence[Any] = ()
    origin: Origin | None = None


class WorkerInfo(NamedTuple):
    """What a lead knows of a worker.

    Attributes:
        name: of the worker.
        step: of its last gradient: the ``local_step`` for accumulators, the number of local steps
            for AGN.
        staleness: the number of updates between its last pull and its last gradient.
        last_contact: seconds since its last gradient.

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
        key: of the call.
        num_required: number of gradients that it waits for.
        seen: when its client asked last, by the monotonic clock.
        done: will have the answers of all shards.
    """

    key: Key
    num_required: int
    seen: float = 0.0
    done: asyncio.Future[list[Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def start_shard(settings: Settings, make_state: Callable[[Settings], ShardState]) -> Any:
    """Returns the actor of a shard; starts it if there is none of its name."""
    num_retries = 0 if settings.folder is None else -1
    actor = ray.remote(Shard if settings.shard else Lead).options(
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
    """Decorates a method of the lead that must run to its end, also if Ray cancels the call.

    ``ray.cancel`` of a task also cancels the calls that the task waits for, at any ``await``.
    Without this, some shards would have run a command and others not.
    """

    @wraps(method)
    async def run(self: Lead, *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(method(self, *args, **kwargs))
        self._running.add(task)  # the event loop itself has weak references only
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    return run


class Lead(Shard):
    """Shard 0; see the module.

    Args:
        settings: how it is made.
        make_state: returns an empty state for a shard.
    """

    def __init__(self, settings: Settings, make_state: Callable[[Settings], ShardState]) -> None:
        self._calls: dict[str, list[Any]] = {}  # caller -> number of its last call, command, value
        super().__init__(settings, make_state)
        self._make_state = make_state
        self._others = self._start_others()
        self._in_sync = not self._others  # whether all shards have run the same commands
        self._fault = ""
        self._closed = False
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._queue: dict[Key, QueuedTake] = {}
        self._workers: dict[str, tuple[int, int, float]] = {}
        self._asked = asyncio.Event()

    def _start_others(self) -> list[Any]:
        """Returns the actors of the other shards; starts those that do not exist."""
        return [
            start_shard(self._settings._replace(shard=shard), self._make_state)
            for shard in range(1, self._settings.num_shards)
        ]

    # -- commands ---------------------------------------------------------------------------------

    @_run_to_completion
    async def call(self, sent: Call) -> list[Any]:
        """Runs a command on all shards, unless a call with its key was already applied."""
        message_id, generation = uuid.uuid4().hex if sent.others else "", self._generation
        try:
            with suppress(RetryError):  # a shard has ended: _ready sees it too
                calls = [(generation, message_id, each) for each in sent.others]
                await self._from_others("stage", calls)
            async with self._lock:
                await self._ready()
                if self._is_known(sent.key):
                    return await self._repeat_answer(sent.key[0])
                if generation != self._generation:
                    raise RetryError("staged before the shards went back to a snapshot")
                if sent.origin is not None:
                    self._note(sent.origin)
                answers = await self._run(*sent[:4], message_id)
                await self._serve()
                return answers
        finally:
            for other in self._others if message_id else ():
                other.discard.remote(message_id)

    async def _run(
        self,
        key: Key,
        command: str,
        arguments: Sequence[Any],
        message: Message | None = None,
        message_id: str = "",
    ) -> list[Any]:
        """Runs a command on all shards; the lock is held."""
        number = self._number + 1
        if self._others and self._state.may_raise(command):
            checks = [(self._generation, self._number, command, arguments, message_id)]
            await self._from_others("check", checks * len(self._others))
            self._state.check(command, *arguments, message)
        own = self._execute(key, command, arguments, message)
        if not self._others:
            return [own]
        calls = [(self._generation, number, key, command, arguments, message_id)] * len(
            self._others
        )
        self._in_sync = False
        found = await self._from_others("execute", calls)
        self._in_sync = True
        return [own, *found]

    def _note_call(self, key: Key, command: str, value: Any) -> None:
        _set_last(
            self._calls, key[0], [key[1], command, None if isinstance(value, Message) else value]
        )

    def _snapshot(self) -> dict[str, Any]:
        return {**super()._snapshot(), "calls": self._calls}

    def _load(self, number: int) -> dict[str, Any]:
        saved = super()._load(number)
        self._calls = saved.get("calls", {})
        return saved

    async def _from_others(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls all other shards at the same time, waits for all, and raises the first error.

        Args:
            method: name of a method of ``Shard``.
            calls: the arguments for each shard; empty if there is nothing to call.
        """
        pending = [
            getattr(other, method).remote(*call)
            for other, call in zip(self._others, calls, strict=bool(calls))
        ]
        found = await asyncio.gather(*pending, return_exceptions=True)
        try:
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return found
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RetryError):
                self._in_sync = False
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            self._in_sync = False
            name = self._settings.name
            if cause := why_not_started(error):
                self._others = self._start_others()  # the next call succeeds if the cause is gone
                raise BackendUnavailableError(
                    f"a shard of {name!r} could not start: {cause}"
                ) from None
            raise RetryError(f"a shard of {name!r} has ended") from error

    def _is_known(self, key: Key) -> bool:
        """Whether a call, or a later call of the same caller, was already applied."""
        known = self._calls.get(key[0])
        return known is not None and key[1] <= known[0]

    async def _repeat_answer(self, caller: str) -> list[Any]:
        """Returns the answers to the last call of a caller."""
        _, command, value = self._calls[caller]
        repeat = self._state.repeated.get(command)
        return [value] if repeat is None else await self._read(repeat, (caller,))

    # -- reads ------------------------------------------------------------------------------------

    @_run_to_completion
    async def read_all(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        """Calls a method that only reads, on all shards, between two commands."""
        async with self._lock:
            await self._ready()
            return await self._read(command, arguments)

    async def _read(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        own = getattr(self._state, command)(*arguments)
        calls = [(self._generation, self._number, command, arguments)] * len(self._others)
        return [own, *await self._from_others("read", calls)]

    @_run_to_completion
    async def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Calls a method of the lead's state, for which no other shard is needed."""
        async with self._lock:
            await self._ready()
            value = getattr(self._state, method)(*arguments)
        self._asked.set()
        self._asked = asyncio.Event()
        return value

    async def wait_for(self, method: str, least: int, seconds: float) -> list[Any]:
        """Returns a list of the state; first waits until it has ``least`` entries."""
        end = time.monotonic() + seconds
        while True:
            found: list[Any] = getattr(self._state, method)()
            left = end - time.monotonic()
            if len(found) >= least or left <= 0:
                return found
            await _wait(self._asked.wait(), left)

    # -- takes ------------------------------------------------------------------------------------

    @_run_to_completion
    async def take(self, key: Key, num_required: int, seconds: float) -> list[Any] | str:
        """Takes gradients if there are enough; takes complete in the order of their first calls.

        Args:
            key: of the take. The client calls again with the same key until it has the answers.
            num_required: number of gradients.
            seconds: how long this call waits.

        Returns:
            The answers of all shards, or a text that says what the take waits for.
        """
        async with self._lock:
            await self._ready()
            if self._is_known(key):
                self._queue.pop(key, None)
                return await self._repeat_answer(key[0])
            queued = self._queue.setdefault(key, QueuedTake(key, num_required))
            queued.seen = time.monotonic()
            await self._serve()
        await _wait(asyncio.shield(queued.done), seconds)
        queued.seen = time.monotonic()
        return queued.done.result() if queued.done.done() else self._state.missing(num_required)

    @_run_to_completion
    async def withdraw(self, key: Key) -> list[Any] | None:
        """Removes a take from the queue; returns its answers if it has already completed."""
        async with self._lock:
            self._queue.pop(key, None)
            await self._ready()
            if self._is_known(key):
                return await self._repeat_answer(key[0])
            await self._serve()
            return None

    async def delivered(self, key: Key) -> None:
        """Frees the results of a take, which have arrived or are no longer wanted."""
        await self.forget(key)
        for other in self._others:
            other.forget.remote(key)

    async def _serve(self) -> None:
        """Runs the takes at the front of the queue that have enough gradients.

        The lock is held.
        """
        while self._queue:
            queued = next(iter(self._queue.values()))
            if time.monotonic() - queued.seen > LEASE_SECONDS:
                log_warning(__name__, "a take of %r was dropped: its client is gone", queued.key[0])
                del self._queue[queued.key]
            elif self._is_known(queued.key):  # its answer is lost: the client asks again
                del self._queue[queued.key]
            elif self._state.can_take(queued.num_required):
                key = queued.key
                try:
                    answers = await self._run(key, "take", (key, queued.num_required))
                except RetryError:
                    raise  # it is still queued
                except Exception as error:  # goes to the client that takes, not to this caller
                    queued.done.set_exception(error)
                else:
                    queued.done.set_result(answers)
                del self._queue[key]
            else:
                return

    # -- workers ----------------------------------------------------------------------------------

    def _note(self, origin: Origin) -> None:
        if origin.tasks:
            self._state.register(origin.tasks)
        staleness = max(0, self._state.clock - origin.clock)
        _set_last(self._workers, origin.worker, (origin.step, staleness, time.monotonic()))

    async def workers(self) -> list[WorkerInfo]:
        """Returns a ``WorkerInfo`` of each worker, sorted by name."""
        now = time.monotonic()
        return [
            WorkerInfo(name, step, staleness, now - seen)
            for name, (step, staleness, seen) in sorted(self._workers.items())
        ]

    async def leave(self, worker: str) -> None:
        """Forgets a worker."""
        self._workers.pop(worker, None)

    # -- failures ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError(f"{self._settings.name!r} was closed")
        if self._fault:
            raise BackendUnavailableError(self._fault)

    async def _ready(self) -> None:
        """Raises if closed; if a shard was restarted, loads the newest common snapshot on all."""
        self._check_open()
        if self._in_sync:
            return
        numbers = set(await self.snapshots())
        generation = uuid.uuid4().hex
        try:
            for found in await self._from_others("snapshots", [()] * len(self._others)):
                numbers &= set(found)
            if numbers:
                calls = [(max(numbers), generation)] * len(self._others)
                await self._from_others("go_back", calls)
        except RetryError:
            if numbers:
                self._others = self._start_others()  # Ray does not restart what ray.kill has ended
                raise
        if not numbers:
            self._fault = (
                f"{self._settings.name!r} cannot go on: a shard has ended, or a call has failed on "
                "some shards, and they have no common snapshot: close it, and make it again; pass "
                "snapshots= to survive this"
            )
            self._check_open()
        await self.go_back(max(numbers), generation)
        self._in_sync = True

    @_run_to_completion
    async def end(self) -> None:
        """Closes: waiting takes and later calls raise, and the other shards end."""
        async with self._lock:
            self._closed = True
            for queued in self._queue.values():
                queued.done.set_exception(CancelledError("TakeGrad operation was cancelled"))
            self._queue = {}
        closed = [other.close.options(max_task_retries=0).remote() for other in self._others]
        await asyncio.gather(*closed, return_exceptions=True)  # each has ended


def _set_last(known: dict[str, Any], key: str, value: Any) -> None:
    """Makes an entry the last of a dict; drops the oldest ones beyond ``MAX_CALLERS``."""
    known.pop(key, None)
    known[key] = value
    while len(known) > MAX_CALLERS:
        del known[next(iter(known))]


async def _wait(awaitable: Any, seconds: float) -> None:
    """Waits at most ``seconds`` for an awaitable; raises none of its errors."""
    try:
        await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        pass
    except CancelledError:
        pass
