"""A state that knows which calls it counts, and clients of it, for ``test_protocol``."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray_actors.actor_world import Process, World, answer_of


@dataclass(frozen=True)
class FailOn:
    """A command that raises on one shard."""

    shard: int


@dataclass(frozen=True)
class Save:
    """A command that returns what a shard has."""


@dataclass(frozen=True)
class RoundPush:
    """A push that waits for others; ``bad_on``: the shard on which its round raises."""

    name: str
    bad_on: int = 9


def weight_of(name: str) -> int:
    """The weight of a gradient; one with weight 0 is not sent."""
    return int(name.rpartition(".")[2]) % 3


class Tally:
    """A ``ShardState`` that knows the names of the gradients in its sum.

    The ``local_step`` of an ``Apply`` is the name of its gradient; see ``weight_of``.
    """

    clock = 0
    grace = 0.5  # of rounds of two of three workers

    def __init__(self, settings: Any) -> None:
        self.shard, self._checks_all = settings.shard, settings.period == 4
        self.registered: set[int] = set()
        self.load(None)

    def run(self, command: Any, *message: Any) -> Any:
        methods = {
            "Apply": self.apply,
            "End": self.end,
            "FailOn": self.fail_on,
            "LastTake": self.last_take,
            "PushRound": self.push_round,
            "Save": self.save,
            "Take": self.take,
        }
        return methods[type(command).__name__](*vars(command).values(), *message)

    def may_raise(self, command: Any) -> bool:
        applies = type(command).__name__ == "Apply"
        is_round = type(command).__name__ == "PushRound"
        return isinstance(command, FailOn) or is_round or (applies and self._checks_all)

    def check(self, command: Any, *message: Any) -> None:
        if type(command).__name__ == "PushRound":
            if self.shard in [push.bad_on for push in command.pushes]:
                raise ArithmeticError("a bad push")
        elif not isinstance(command, FailOn):
            name = command.local_step
            assert message == (((name, self.shard),) if weight_of(name) else ())
        elif command.shard == self.shard:
            raise ArithmeticError(f"on shard {command.shard}")

    def fail_on(self, shard: int) -> bool:
        assert shard != self.shard
        return True

    def register(self, tasks: Any) -> None:
        self.registered |= set(tasks)

    def apply(self, name: str, kinds: Any, weight: float, message: Any = None) -> bool:
        assert weight == weight_of(name)
        if message != ((name, self.shard) if weight else None):
            raise TypeError(f"the message of {name} is {message}")
        self.held.append(name)
        self.history.append(name)
        return True

    def is_of_round(self, command: Any) -> bool:
        return isinstance(command, RoundPush)

    def seconds_left(self, quorum: Any) -> float | None:
        left, now = 3 - self.ended, asyncio.get_running_loop().time()
        return quorum.seconds_left(now, max(1, min(2, left)), left, self.grace)

    def push_round(self, pushes: Any, *messages: Any) -> bool:
        names = [push.name for push in pushes]
        assert list(messages) == [(name, self.shard) for name in names]
        self.held += names
        self.history += names
        return True

    def end(self, task: int) -> None:
        self.ended += 1

    def take(self, key: Any, num_required: int) -> Any:
        assert len(self.held) >= num_required
        self.results[key[0]] = (key[1], self.held)
        self.held = []
        return self.last_take(key[0])

    def last_take(self, caller: str) -> Any:
        return list(self.results[caller][1])

    def forget(self, key: Any) -> None:
        if self.results.get(key[0], (0,))[0] == key[1]:
            del self.results[key[0]]

    def can_take(self, num_required: int) -> bool:
        return len(self.held) >= num_required

    def missing(self, num_required: int) -> str:
        return f"{len(self.held)} of {num_required}"

    def save(self) -> Any:
        found = {name: getattr(self, name) for name in ("held", "history", "results")}
        return {**found, "ended": self.ended}

    def load(self, state: Any) -> None:
        state = state or {"held": [], "history": [], "results": {}, "ended": 0}
        self.held, self.history = state["held"], state["history"]
        self.results, self.ended = state["results"], state["ended"]


class Run:
    """Clients of shards; ``period``: commands between two snapshots, 0 if there are none."""

    def __init__(self, modules: SimpleNamespace, seed: int, num_shards: int, period: int) -> None:
        self.kill_chance = 0.0  # of each message
        self.world = World(
            modules, seed, has_snapshots=period > 0, on_message=lambda *_: self._maybe_kill()
        )
        self.modules, self.num_shards, self.period = modules, num_shards, period
        self.settings = modules.shard.ActorSettings(
            "a", 0, num_shards, "memory" if period else None, period or 1, 0, "numpy"
        )
        self.acknowledged: list[str] = []  # names of applied gradients
        self.taken: list[str] = []
        self.names = [f"a#{shard}" if shard else "a" for shard in range(num_shards)]

    def run(self, main: Callable[[Run], Coroutine[Any, Any, None]]) -> None:
        """Runs a coroutine function of this object to its end."""
        self.world.run(partial(main, self))

    def _maybe_kill(self) -> None:
        if self.world.random.random() < self.kill_chance:
            self.world.kill(self.world.random.choice(self.names))

    def connect(self, client: Process) -> Any:
        return self.world.start(self.settings, Tally, client)

    @property
    def coordinator(self) -> Any:
        return self.world.actors["a"].instance

    def applying(self, name: str, key: Any, messages: Any = (), origin: Any = None) -> Any:
        """Returns a call that applies a gradient; ``messages``: others than its own."""
        weight, of_call = weight_of(name), self.modules.commands
        if weight and not messages:
            messages = [(name, shard) for shard in range(self.num_shards)]
        return of_call.OrderedCall(key, of_call.Apply(name, (), weight), messages, origin)

    async def apply(self, coordinator: Any, worker: str, number: int) -> None:
        name = f"{worker}.{number}"
        origin = self.modules.commands.Origin(worker, number, 0)
        sent = self.applying(name, (worker, number), origin=origin)
        answers = await answer_of(self.modules, lambda: coordinator.call.remote(sent))
        assert answers[0] is True
        self.acknowledged.append(name)

    async def take(
        self, coordinator: Any, key: Any, num_required: int, polls: int = 10**9
    ) -> list[str]:
        """Takes as ``Client.take``; returns the names, or none."""
        for _ in range(polls):
            found = await answer_of(
                self.modules, lambda: coordinator.take.remote(key, num_required, 1.0)
            )
            if isinstance(found, list):
                break
        else:
            found = await answer_of(self.modules, lambda: coordinator.withdraw.remote(key))
        if found is None:
            return []
        coordinator.delivered.remote(key)
        first, *others = found
        assert others == [first] * (self.num_shards - 1)
        self.taken += first
        return first

    async def work(self, client: Process, worker: str, num_applies: int) -> None:
        """Applies gradients."""
        coordinator = self.connect(client)
        for number in range(1, num_applies + 1):
            await self.apply(coordinator, worker, number)

    async def take_all(self, client: Process, consumer: str, workers: Any) -> None:
        """Takes until all workers have ended."""
        coordinator = self.connect(client)
        for number in itertools.count(1):
            if all(each.done() for each in workers):
                return
            await self.take(
                coordinator, (consumer, number), self.world.random.randint(1, 3), polls=3
            )

    async def push(self, coordinator: Any, worker: str, number: int, **more: int) -> None:
        """Pushes as ``Client.call``, and waits for the round."""
        name, key, answer = f"{worker}.{number}", (worker, number), None
        of_shards = [(name, shard) for shard in range(self.num_shards)]
        sent = self.modules.commands.OrderedCall(key, RoundPush(name, **more), of_shards)
        while answer is None:
            answer = await answer_of(self.modules, lambda: coordinator.call.remote(sent))
            while isinstance(answer, str):
                wait = lambda: coordinator.await_round.remote(key, 1.0)  # noqa: E731
                answer = await answer_of(self.modules, wait)
        assert answer == [True]
        self.acknowledged.append(name)

    async def leave(self, worker: str) -> None:
        of_call = self.modules.commands
        sent = of_call.OrderedCall((worker, 999), of_call.End(0))
        coordinator = self.connect(Process())
        await answer_of(self.modules, lambda: coordinator.call.remote(sent))

    async def work_in_rounds(self, client: Process, worker: str, num_pushes: int) -> None:
        """Pushes, after steps of some length, and leaves."""
        coordinator = self.connect(client)
        try:
            for number in range(1, num_pushes + 1):
                await asyncio.sleep(self.world.random.random())
                await self.push(coordinator, worker, number)
        finally:
            await asyncio.shield(asyncio.ensure_future(self.leave(worker)))

    async def play_rounds(self, *, a_worker_ends: bool) -> None:
        """Runs three workers whose pushes are applied in rounds, to their end."""
        clients, draw = [Process() for _ in range(3)], self.world.random.randint
        workers = [
            client.run(self.work_in_rounds(client, f"w{number}", draw(3, 10)))
            for number, client in enumerate(clients)
        ]
        if a_worker_ends:
            await asyncio.sleep(2 * self.world.random.random())
            clients[0].end()
        done, late = await asyncio.wait(workers, timeout=500)
        assert not late
        for each in done:
            if not each.cancelled():
                each.result()
        self.kill_chance = 0.0
        await asyncio.sleep(30)  # no message is on its way now
        assert self.coordinator._waiting == {}

    async def play(self, *, a_worker_ends: bool) -> None:
        """Runs three workers and two consumers to their end."""
        clients, draw = [Process() for _ in range(5)], self.world.random.randint
        workers = [
            client.run(self.work(client, f"w{number}", draw(3, 10)))
            for number, client in enumerate(clients[:3])
        ]
        consumers = [clients[i].run(self.take_all(clients[i], f"t{i}", workers)) for i in (3, 4)]
        if a_worker_ends:
            await asyncio.sleep(self.world.random.random())
            clients[0].end()
        done, late = await asyncio.wait([*workers, *consumers], timeout=500)
        assert not late
        for each in done:
            if not each.cancelled():
                each.result()
        self.kill_chance = 0.0
        await asyncio.sleep(30)  # no message is on its way now

    async def contents(self) -> dict[str, Any]:
        """Returns what every shard has, which is the same."""
        coordinator = self.connect(Process())
        found = await answer_of(self.modules, lambda: coordinator.query.remote(Save()))
        first, *others = found
        for each in others:
            assert (each["held"], each["history"]) == (first["held"], first["history"])
        return first

    def check(self, found: dict[str, Any], in_command: int = 1) -> None:
        """Checks that nothing is lost that must not be, counted twice, or kept for nobody."""
        for name in self.names:
            actor = self.world.actors[name].instance
            assert actor._staged == {}
            assert actor._number == self.coordinator._number
        assert self.coordinator._queue == {}
        assert len(set(found["history"])) == len(found["history"])
        lost = set(self.acknowledged) - set(found["history"])
        if self.period == 1:
            assert not lost
            counts = Counter(self.taken + found["held"])
            assert counts == Counter(found["history"])
        assert len(lost) <= self.period * self.world.num_kills * in_command
