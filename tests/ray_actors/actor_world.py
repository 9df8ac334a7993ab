"""Actors of ``gradreduce.ray`` in one thread, without Ray, some of which are killed.

``load`` imports the package with a stand-in for Ray. A ``World`` runs its actors in an event loop
whose clock jumps to the next event, so that a seed always gives the same run.

Delivery is Ray's: messages may overtake each other; but for large ones they arrive before a killed
actor has restarted, those of a killed sender too. If an actor ends before its answer is out, and
restarts, then Ray sends the message again; else the sender gets ``RayActorError``.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import random
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gradreduce

LIMIT_S = 10_000.0  # of the clock that jumps
LOST = "an argument that was in the memory of a process that has ended"


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's; ``cause`` is what the method has raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(repr(cause))
        self.cause = cause


RayActorError = type("RayActorError", (RayError,), {})
ObjectLostError = type("ObjectLostError", (RayError,), {})


class Exited(BaseException):
    """Ends an actor."""


def _exit_actor() -> None:
    raise Exited


def _stand_in() -> ModuleType:
    ray: Any = ModuleType("ray")
    spec = find_spec("ray")
    ray.__path__ = spec.submodule_search_locations if spec else []
    ray.exceptions = SimpleNamespace(
        RayTaskError=RayTaskError, RayActorError=RayActorError, ObjectLostError=ObjectLostError,
        GetTimeoutError=type("GetTimeoutError", (RayError,), {}),
    )  # fmt: skip
    ray.actor = SimpleNamespace(exit_actor=_exit_actor)
    ray.put = ray.get = lambda value, timeout=None: value
    return ray


@contextmanager
def load() -> Iterator[SimpleNamespace]:
    """Imports modules of ``gradreduce.ray`` anew, with a stand-in for Ray; undoes it."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.startswith("gradreduce.ray")]

    had = {name: sys.modules.pop(name) for name in ours()}
    attribute = vars(gradreduce).pop("ray", None)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Only while they are imported: threads of a Ray that runs may import parts of it.
            patch.setitem(sys.modules, "ray", _stand_in())
            files = Path(gradreduce.__file__).parent.joinpath("ray").glob("[!_]*.py")
            names = sorted(file.stem for file in files)
            found = {name: importlib.import_module(f"gradreduce.ray.{name}") for name in names}
        yield SimpleNamespace(**found)
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules |= had
        vars(gradreduce).pop("ray", None)
        if attribute is not None:
            gradreduce.ray = attribute


class _Clock(selectors.DefaultSelector):
    """A selector that does not wait: it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("every task waits for something that nobody will do")
        self.now += timeout
        if self.now > LIMIT_S:
            raise AssertionError("it goes on for ever")
        return super().select(0)


class MemorySnapshots:
    """``Snapshots`` in memory; the ``World`` keeps ``files`` while an actor is down."""

    def __init__(self, files: dict[int, Any]) -> None:
        self._files, self.is_full = files, False

    def write(self, number: int, state: Any) -> None:
        if self.is_full:
            raise OSError("disk full")
        self._files[number] = copy.deepcopy(state)
        older = sorted(each for each in self._files if each < number)
        for each in set(self._files) - {number, *older[-1:]}:
            del self._files[each]

    def loadable(self) -> list[int]:
        return sorted(self._files) if len(self._files) > 1 else [0, *self._files]

    def newest(self) -> int:
        return self.loadable()[-1]

    def read(self, number: int) -> Any:
        return copy.deepcopy(self._files[number])

    def remove(self, above: int = 0) -> None:
        for each in [each for each in self._files if each > above]:
            del self._files[each]


class Process:
    """An actor, from a start to its end, or a client; ``has_exited``: it does not restart."""

    def __init__(self) -> None:
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that runs are repeated
        self.is_alive, self.has_exited = True, False
        self.instance: Any = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a coroutine in it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def end(self) -> None:
        """Ends it at once: none of its code runs any more, and what it sends does not leave."""
        self.is_alive = False
        own = sorted(getattr(self.instance, "_running", ()), key=lambda task: task.get_name())
        for task in [*self.tasks, *own]:
            task.cancel()


class Handle:
    """An actor as the process ``sender`` sees it: ``handle.method.remote(...)``."""

    def __init__(self, world: World, sender: Process, name: str) -> None:
        self._send = (world, sender, name)

    def __getattr__(self, method: str) -> Any:
        world, sender, name = self._send

        def remote(*arguments: Any, **options: bool) -> asyncio.Future[Any]:
            return world.send(sender, name, method, arguments, **options)

        once = SimpleNamespace(remote=partial(remote, is_repeated=False))
        return SimpleNamespace(remote=remote, options=lambda max_task_retries: once)


class World:
    """Actors, which restart if they have snapshots, and clients; times and choices are random.

    ``on_message`` is called before each message arrives, with the actor's name and the method: it
    may kill.
    """

    def __init__(self, modules, seed, *, has_snapshots, on_message=lambda name, method: None):
        self.random, self.modules, self.num_kills = random.Random(seed), modules, 0
        self.actors: dict[str, Process] = {}
        self.files: dict[str, dict[int, Any]] = {}
        self._made: dict[str, Callable[[], Any]] = {}
        self._has_snapshots, self.on_message = has_snapshots, on_message
        self._starting = Process()

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Runs a coroutine function to its end."""
        clock, failed = _Clock(), []
        loop = asyncio.SelectorEventLoop(clock)
        loop.set_exception_handler(lambda _, context: failed.append(context))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: clock.now)
            coordinator, shard = self.modules.coordinator, self.modules.shard
            patch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: clock.now))
            patch.setattr(coordinator, "start_shard", self._start)
            of_actor = lambda _, name: MemorySnapshots(self.files.setdefault(name, {}))  # noqa: E731
            patch.setattr(shard, "Snapshots", of_actor)
            try:
                loop.run_until_complete(main())
            finally:
                clock.now = 0.0
                for process in self.actors.values():
                    process.end()
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(1))
                loop.close()
        assert not [each for each in failed if "never retrieved" not in each["message"]], failed

    def start(self, settings: Any, make_state: Callable[[Any], Any], client: Process) -> Handle:
        """Starts an actor if there is none of its name; returns a client's handle."""
        self._starting = client
        return self._start(settings, make_state)

    def _start(self, settings: Any, make_state: Callable[[Any], Any]) -> Handle:
        name = settings.actor_name
        if name not in self.actors or self.actors[name].has_exited:
            of_shard, of_first = self.modules.shard.Shard, self.modules.coordinator.Coordinator
            kind = of_shard if settings.shard else of_first
            self._made[name] = lambda: kind(settings, make_state)
            self._make(name)
        sender = self.actors[settings.name] if settings.shard else self._starting
        return Handle(self, sender, name)

    def _make(self, name: str) -> None:
        process = self.actors[name] = Process()
        process.instance = self._made[name]()

    def kill(self, name: str, *, for_good: bool = False) -> None:
        """Kills an actor; it restarts after a while if it has snapshots, but not for good."""
        process = self.actors[name]
        if process.is_alive:
            self.num_kills += 1
            process.end()
            process.has_exited = for_good or not self._has_snapshots
            if not process.has_exited:
                self.later(5.0, lambda: self._make(name), least=0.05)

    def state(self, name: str) -> Any:
        """Returns the state of an actor."""
        return self.actors[name].instance._state

    def later(self, most: float, function: Callable[[], None], least: float = 0.0) -> None:
        """Calls a function after a random time."""
        seconds = least + most * self.random.random() ** 3  # mostly short
        asyncio.get_running_loop().call_later(seconds, function)

    def send(self, sender, name, method, arguments, *, is_repeated=True) -> asyncio.Future[Any]:
        """Sends a message; returns the answer's future."""
        is_repeated = is_repeated and self._has_snapshots
        message = _Message(self, sender, name, method, copy.deepcopy(arguments), is_repeated)
        if sender.is_alive:
            # Arrays of a client may take longer than its coordinator lives.
            self.later(0.2 if method == "stage" else 0.02, message.arrive)
        return message.answer


class _Message:
    """A call of an actor's method, until its answer has arrived."""

    def __init__(self, world, sender, name, method, arguments, is_repeated):
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._world, self._sender, self._is_repeated = world, sender, is_repeated
        self._call = name, method, arguments

    def arrive(self) -> None:
        """Starts the method."""
        name, method, arguments = self._call
        self._world.on_message(name, method)
        process = self._world.actors[name]
        if not process.is_alive:
            self._fail()
            return
        if LOST in arguments:
            self._finish(ObjectLostError())
            return
        task = process.run(getattr(process.instance, method)(*copy.deepcopy(arguments)))
        task.add_done_callback(
            lambda done: self._world.later(0.02, lambda: self._reply(process, done))
        )

    def _reply(self, process: Process, done: asyncio.Task[Any]) -> None:
        """Brings the answer."""
        self._world.on_message(self._call[0], "answer of " + self._call[1])
        if not process.is_alive:
            self._fail()
        elif (error := done.exception()) is None:
            self._finish(None, copy.deepcopy(done.result()))
        elif isinstance(error, Exited):
            process.end()
            process.has_exited = True
            self._finish(RayActorError("exited"))
        else:
            self._finish(RayTaskError(error))

    def _fail(self) -> None:
        """Sends again, or answers that the actor has ended."""
        has_exited = self._world.actors[self._call[0]].has_exited
        if self._is_repeated and self._sender.is_alive and not has_exited:
            self._world.later(1.0, self._send_again)
        else:
            self._finish(RayActorError("has ended"))

    def _send_again(self) -> None:
        """Sends again, if the sender has not ended meanwhile: it is the sender that does so."""
        if self._sender.is_alive:
            self.arrive()

    def _finish(self, error: Exception | None, value: Any = None) -> None:
        if not self._sender.is_alive:
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # nobody has to look at it


async def answer_of(modules: SimpleNamespace, call: Callable[[], asyncio.Future[Any]]) -> Any:
    """Returns the answer to a call, as ``Client`` asks for it: again after ``RetryError``."""
    while True:
        try:
            return await call()
        except RayTaskError as error:
            if not isinstance(error.cause, modules.shard.RetryError):
                raise error.cause from None
