"""The lead: the actor that gives all commands of a set of shards their order.

    client -> call          the other shards read their arrays, while earlier commands still run
              (lock)        was this call already applied? Then its answer is given again
              execute       every shard runs the command, and writes a snapshot if one is due
              serve         takes that now have enough gradients are commands too
              answer        the small values and arrays of all shards

A take that waits does not hold the lock: other calls go on meanwhile. All code of an actor runs in
one thread; another call can only go on at an ``await``.
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
from .shard import RetryError, Settings, Shard
from .shard_state import Key, ShardState

LEASE_SECONDS = 5.0  # a waiting take whose client has not asked again for so long is dropped
MAX_CALLERS = 10_000  # whose last calls are known, and workers


class Origin(NamedTuple):
    """Where a gradient comes from.

    Attributes:
        worker: its name.
        step: number of its gradient or step.
        clock: that of the state when the worker read what the gradient was computed from.
        tasks: task indices that the thread has registered; a lead that was restarted does not know
            them.
    """

    worker: str
    step: int
    clock: int
    tasks: tuple[int, ...] = ()


class Call(NamedTuple):
    """A call of a command, as one object: Ray needs 50 us for each argument of a call.

    Attributes:
        key: of the call; a caller's numbers ascend.
        command: name of the state's method.
        arguments: for all shards.
        message: for the lead.
        others: refer to the messages for the other shards; empty: no command has any.
        origin: of a gradient.
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
        step: of its last gradient: the ``local_step`` of an accumulator's, the number of local
            steps of AGN.
        staleness: the number of updates that its last gradient did not know of.
        last_contact: seconds since then.

    Example: see ``docs/ray.md``.
    """

    name: str
    step: int
    staleness: int
    last_contact: float


@dataclass(eq=False)
class QueuedTake:
    """The place of a waiting take in the queue.

    Attributes:
        key: of the call.
        num_required: gradients.
        seen: when its client has asked last.
        done: has the answers.
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


def _to_its_end(method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Returns a method of the lead that goes on where Ray cancels a call of it.

    ``ray.cancel`` of a task cancels the calls that the task waits for too, at any ``await``; then
    some shards would have run a command that others have not.
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
        self._are_alike = not self._others  # whether all shards have run the same commands
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

    @_to_its_end
    async def call(self, sent: Call) -> list[Any]:
        """Runs a command once on all shards, however often it is sent with the same key."""
        message_id, generation = uuid.uuid4().hex if sent.others else "", self._generation
        try:
            with suppress(RetryError):  # a shard has ended: _ready sees it too
                calls = [(generation, message_id, each) for each in sent.others]
                await self._from_others("stage", calls)
            async with self._lock:
                await self._ready()
                if self._is_known(sent.key):
                    return await self._again(sent.key[0])
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
        self._are_alike = False
        found = await self._from_others("execute", calls)
        self._are_alike = True
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
        """Calls the other shards at the same time, and waits for all; raises the first error.

        Args:
            method: of a shard.
            calls: the arguments for each; empty: there is nothing to call.
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
                self._are_alike = False
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            self._are_alike = False
            raise RetryError(f"a shard of {self._settings.name!r} has ended") from error

    def _is_known(self, key: Key) -> bool:
        """Whether a call was applied already, or its caller has made a later one."""
        known = self._calls.get(key[0])
        return known is not None and key[1] <= known[0]

    async def _again(self, caller: str) -> list[Any]:
        """Returns the answers to the last call of a caller."""
        _, command, value = self._calls[caller]
        repeat = self._state.repeated.get(command)
        return [value] if repeat is None else await self._read(repeat, (caller,))

    # -- reads ------------------------------------------------------------------------------------

    @_to_its_end
    async def read_all(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        """Runs a method that changes nothing on all shards, between two commands."""
        async with self._lock:
            await self._ready()
            return await self._read(command, arguments)

    async def _read(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        own = getattr(self._state, command)(*arguments)
        calls = [(self._generation, self._number, command, arguments)] * len(self._others)
        return [own, *await self._from_others("read", calls)]

    @_to_its_end
    async def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Calls a method of this shard's state that concerns no tensor."""
        async with self._lock:
            await self._ready()
            value = getattr(self._state, method)(*arguments)
        self._asked.set()
        self._asked = asyncio.Event()
        return value

    async def wait_for(self, method: str, least: int, seconds: float) -> list[Any]:
        """Returns a list of the state; waits until it has at least so many entries."""
        end = time.monotonic() + seconds
        while True:
            found: list[Any] = getattr(self._state, method)()
            left = end - time.monotonic()
            if len(found) >= least or left <= 0:
                return found
            await _wait(self._asked.wait(), left)

    # -- takes ------------------------------------------------------------------------------------

    @_to_its_end
    async def take(self, key: Key, num_required: int, seconds: float) -> list[Any] | str:
        """Takes, or waits for gradients; takes complete in the order of their first calls.

        Args:
            key: of the call. The client calls again with it until the take has completed.
            num_required: gradients.
            seconds: to wait.

        Returns:
            The answers, or a text that says what is missing.
        """
        async with self._lock:
            await self._ready()
            if self._is_known(key):
                self._queue.pop(key, None)
                return await self._again(key[0])
            queued = self._queue.setdefault(key, QueuedTake(key, num_required))
            queued.seen = time.monotonic()
            await self._serve()
        await _wait(asyncio.shield(queued.done), seconds)
        queued.seen = time.monotonic()
        return queued.done.result() if queued.done.done() else self._state.missing(num_required)

    @_to_its_end
    async def withdraw(self, key: Key) -> list[Any] | None:
        """Drops a waiting take; if it has completed, returns the answers."""
        async with self._lock:
            self._queue.pop(key, None)
            await self._ready()
            if self._is_known(key):
                return await self._again(key[0])
            await self._serve()
            return None

    async def delivered(self, key: Key) -> None:
        """Notes that the answers to a take have arrived, or nobody waits for them any more."""
        await self.forget(key)
        for other in self._others:
            other.forget.remote(key)

    async def _serve(self) -> None:
        """Completes the takes that have enough gradients, in order; the lock is held."""
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
                except Exception as error:  # of the client that takes, not of the one that applies
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
        """Returns what is known of each worker, sorted by name."""
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
        """Raises if closed; has all shards go back to a snapshot if one was restarted."""
        self._check_open()
        if self._are_alike:
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
        self._are_alike = True

    @_to_its_end
    async def end(self) -> None:
        """Closes: waiting takes and later calls raise; removes snapshots, and ends all actors."""
        async with self._lock:
            self._closed = True
            for queued in self._queue.values():
                queued.done.set_exception(CancelledError("TakeGrad operation was cancelled"))
            self._queue = {}
        closed = [other.close.options(max_task_retries=0).remote() for other in self._others]
        await asyncio.gather(*closed, return_exceptions=True)  # each has ended


def _set_last(known: dict[str, Any], key: str, value: Any) -> None:
    """Sets the last entry of a dict; drops the first ones if there are too many."""
    known.pop(key, None)
    known[key] = value
    while len(known) > MAX_CALLERS:
        del known[next(iter(known))]


async def _wait(awaitable: Any, seconds: float) -> None:
    """Waits for something at most some seconds; errors are left in it."""
    try:
        await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        pass
    except CancelledError:
        pass
