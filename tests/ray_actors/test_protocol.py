"""Each call counts once, all shards are at the same moment, whatever dies; see ``actor_world``."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray_actors.actor_world import Process, World, answer_of, load
from support.exhaustive import seeds


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with load() as found:
        yield found


class Tally:
    """A ``ShardState`` that knows the names of the gradients in its sum."""

    repeated = {"take": "taken"}  # noqa: RUF012
    clock = 0

    def __init__(self, settings: Any) -> None:
        self.shard = settings.shard
        self.load(None)

    def apply(self, name: str, message: Any) -> bool:
        if message != (name, self.shard):
            raise TypeError(f"the message of {name} is {message}")
        self.held.append(name)
        self.history.append(name)
        return True

    def take(self, key: Any, num_required: int, message: None) -> Any:
        assert len(self.held) >= num_required
        self.results[key[0]] = (key[1], self.held)
        self.held = []
        return self.taken(key[0])

    def taken(self, caller: str) -> Any:
        return list(self.results[caller][1])

    def forget(self, key: Any) -> None:
        if self.results.get(key[0], (0,))[0] == key[1]:
            del self.results[key[0]]

    def can_take(self, num_required: int) -> bool:
        return len(self.held) >= num_required

    def missing(self, num_required: int) -> str:
        return f"{len(self.held)} of {num_required}"

    def save(self) -> Any:
        return {"held": self.held, "history": self.history, "results": self.results}

    def load(self, state: Any) -> None:
        state = state or {"held": [], "history": [], "results": {}}
        self.held, self.history = state["held"], state["history"]
        self.results = state["results"]


class Run:
    """Clients of shards.

    Args:
        modules: of gradreduce.ray.
        seed: of the world.
        num_shards: number of shards.
        period: commands between two snapshots; 0: there are none.

    Attributes:
        acknowledged: names of applied gradients.
        taken: names of taken gradients.
        kill_chance: that a message kills an actor.
    """

    def __init__(self, modules: SimpleNamespace, seed: int, num_shards: int, period: int) -> None:
        self.world = World(
            modules, seed, has_snapshots=period > 0, on_message=lambda *_: self._maybe_kill()
        )
        self.kill_chance = 0.0
        self.modules, self.num_shards, self.period = modules, num_shards, period
        folder = "memory" if period else None
        self.settings = modules.shard.Settings("a", 0, num_shards, folder, period or 1, 0)
        self.acknowledged: list[str] = []
        self.taken: list[str] = []
        self.names = [f"a#{shard}" if shard else "a" for shard in range(num_shards)]

    def _maybe_kill(self) -> None:
        if self.world.random.random() < self.kill_chance:
            self.world.kill(self.world.random.choice(self.names))

    def connect(self, client: Process) -> Any:
        return self.world.start(self.settings, Tally, client)

    @property
    def lead(self) -> Any:
        return self.world.actors["a"].instance

    async def apply(self, lead: Any, worker: str, number: int) -> None:
        name = f"{worker}.{number}"
        origin = self.modules.lead.Origin(worker, number, 0)
        first, *others = [(name, shard) for shard in range(self.num_shards)]
        sent = ((worker, number), "apply", (name,), first, others, origin)
        answers = await answer_of(self.modules, lambda: lead.call.remote(*sent))
        assert answers[0].value is True
        self.acknowledged.append(name)

    async def take(self, lead: Any, key: Any, num_required: int, polls: int = 10**9) -> list[str]:
        """Takes as ``Client.take``; returns the names, or none."""
        for _ in range(polls):
            found = await answer_of(self.modules, lambda: lead.take.remote(key, num_required, 1.0))
            if isinstance(found, list):
                break
        else:
            found = await answer_of(self.modules, lambda: lead.withdraw.remote(key))
        if found is None:
            return []
        lead.delivered.remote(key)
        first, *others = [each.value for each in found]
        assert others == [first] * (self.num_shards - 1)
        self.taken += first
        return first

    async def work(self, client: Process, worker: str, num_applies: int) -> None:
        """Applies gradients."""
        lead = self.connect(client)
        for number in range(1, num_applies + 1):
            await self.apply(lead, worker, number)

    async def take_all(self, client: Process, taker: str, workers: Any) -> None:
        """Takes until all workers have ended."""
        lead = self.connect(client)
        for number in itertools.count(1):
            if all(each.done() for each in workers):
                return
            await self.take(lead, (taker, number), self.world.random.randint(1, 3), polls=3)

    async def play(self, *, a_worker_dies: bool) -> None:
        """Runs three workers and two takers to their end."""
        clients = [Process() for _ in range(5)]
        workers = [
            clients[each].run(
                self.work(clients[each], f"w{each}", self.world.random.randint(3, 10))
            )
            for each in range(3)
        ]
        takers = [clients[i].run(self.take_all(clients[i], f"t{i}", workers)) for i in (3, 4)]
        if a_worker_dies:
            await asyncio.sleep(self.world.random.random())
            clients[0].end()
        done, late = await asyncio.wait([*workers, *takers], timeout=500)
        assert not late
        for each in done:
            if not each.cancelled():
                each.result()
        self.kill_chance = 0.0
        await asyncio.sleep(30)  # no message is on its way now

    async def contents(self) -> dict[str, Any]:
        """Returns what every shard has, which is the same."""
        lead = self.connect(Process())
        found = await answer_of(self.modules, lambda: lead.read_all.remote("save", ()))
        first, *others = [each.value for each in found]
        for each in others:
            assert (each["held"], each["history"]) == (first["held"], first["history"])
        return first

    def check(self, found: dict[str, Any]) -> None:
        """Checks that nothing is lost that must not be, counted twice, or kept for nobody."""
        for name in self.names:
            actor = self.world.actors[name].instance
            assert actor._staged == {}
            assert actor._number == self.lead._number
        assert self.lead._queue == {}
        assert len(set(found["history"])) == len(found["history"])
        lost = set(self.acknowledged) - set(found["history"])
        if self.period == 1:
            assert not lost
            counts = Counter(self.taken + found["held"])
            assert counts == Counter(found["history"])
        assert len(lost) <= self.period * self.world.num_kills


def play(modules: SimpleNamespace, seed: int, num_shards: int, period: int) -> None:
    """A run in which actors die, and sometimes a worker."""
    run = Run(modules, seed, num_shards, period)
    run.kill_chance = run.world.random.choice([0.0, 0.005, 0.02, 0.05])
    a_worker_dies = run.world.random.random() < 0.5

    async def main() -> None:
        await run.play(a_worker_dies=a_worker_dies)
        found = await run.contents()
        run.check(found)
        if not run.world.num_kills:
            assert found["results"] == {}

    run.world.run(main)


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("some", seeds(12, 600))
def test_each_call_counts_once_whatever_dies(modules, some, num_shards, period):
    for seed in some:
        try:
            play(modules, seed, num_shards, period)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
