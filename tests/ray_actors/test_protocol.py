"""Each call counts once, all shards are at the same moment, whatever ends; see ``actor_world``."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray_actors.actor_world import LOST, Process, RayTaskError, World, answer_of, load
from support.exhaustive import seeds
from support.signal_injection import ctrl_c

from gradreduce.errors import CancelledError


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with load() as found:
        yield found


@dataclass(frozen=True)
class FailOn:
    """A command that raises on one shard."""

    shard: int


@dataclass(frozen=True)
class Save:
    """A command that returns what a shard has."""


def weight_of(name: str) -> int:
    """The weight of a gradient; one with weight 0 is not sent."""
    return int(name.rpartition(".")[2]) % 3


class Tally:
    """A ``ShardState`` that knows the names of the gradients in its sum.

    The ``local_step`` of an ``Apply`` is the name of its gradient; see ``weight_of``.
    """

    clock = 0

    def __init__(self, settings: Any) -> None:
        self.shard, self._checks_all = settings.shard, settings.period == 4
        self.registered: set[int] = set()
        self.load(None)

    def run(self, command: Any, *message: Any) -> Any:
        methods = {
            "Apply": self.apply,
            "FailOn": self.fail_on,
            "LastTake": self.last_take,
            "Save": self.save,
            "Take": self.take,
        }
        return methods[type(command).__name__](*vars(command).values(), *message)

    def may_raise(self, command: Any) -> bool:
        applies = type(command).__name__ == "Apply"
        return isinstance(command, FailOn) or (applies and self._checks_all)

    def check(self, command: Any, *message: Any) -> None:
        if not isinstance(command, FailOn):
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
        return {"held": self.held, "history": self.history, "results": self.results}

    def load(self, state: Any) -> None:
        state = state or {"held": [], "history": [], "results": {}}
        self.held, self.history = state["held"], state["history"]
        self.results = state["results"]


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

    def check(self, found: dict[str, Any]) -> None:
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
        assert len(lost) <= self.period * self.world.num_kills


def play(modules: SimpleNamespace, seed: int, num_shards: int, period: int) -> None:
    """A run in which actors are killed, and sometimes a worker."""
    run = Run(modules, seed, num_shards, period)
    run.kill_chance = run.world.random.choice([0.0, 0.005, 0.02, 0.05])
    a_worker_ends = run.world.random.random() < 0.5

    async def main() -> None:
        await run.play(a_worker_ends=a_worker_ends)
        found = await run.contents()
        run.check(found)
        if not run.world.num_kills:
            assert found["results"] == {}

    run.world.run(main)


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("some", seeds(12, 600))
def test_each_call_counts_once_whatever_ends(modules, some, num_shards, period):
    for seed in some:
        try:
            play(modules, seed, num_shards, period)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("victim", [0, 1])
def test_without_snapshots_a_lost_shard_is_an_error_for_everybody_at_once(
    modules, num_shards, victim
):
    def play(seed: int) -> None:
        run = Run(modules, seed, num_shards, 0)

        async def main() -> None:
            work = [Process() for _ in range(3)]
            tasks = [client.run(run.work(client, f"w{i}", 10**6)) for i, client in enumerate(work)]
            consumer = Process()
            tasks.append(consumer.run(run.take(run.connect(consumer), ("t", 1), 10**6)))
            await asyncio.sleep(run.world.random.random())
            run.world.kill(run.names[victim % num_shards])
            done, late = await asyncio.wait(tasks, timeout=5)
            assert not late
            errors = {type(each.exception()).__name__ for each in done}
            assert errors <= {"BackendUnavailableError", "RayActorError"}

        run.world.run(main)

    for seed in range(5):
        play(seed)


@pytest.mark.parametrize("period", [1, 4])
def test_a_shard_that_ray_does_not_restart_is_started_again(modules, period):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        for number in (1, 2, 3, 4):
            await run.apply(coordinator, "w", number)
        for number, victim in enumerate(run.names[1:], 5):
            run.world.kill(victim, for_good=True)
            await asyncio.wait_for(run.apply(coordinator, "w", number), 60)
        found = (await run.contents())["history"]
        assert found == (run.acknowledged if period == 1 else [*run.acknowledged[:4], "w.6"])

    Run(modules, 0, 3, period).run(main)


def test_without_snapshots_a_new_coordinator_clears_the_shards_of_a_killed_one(modules):
    async def main(run: Run) -> None:
        await run.apply(run.connect(Process()), "w", 1)
        run.world.kill("a")
        await asyncio.wait_for(run.apply(run.connect(Process()), "v", 1), 60)
        assert (await run.contents())["history"] == ["v.1"]

    Run(modules, 0, 2, 0).run(main)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.whole_product
def test_a_take_whose_answer_is_lost_does_not_take_again(modules, seed):
    run = Run(modules, seed, 2, 1)

    def kill(name: str, method: str) -> None:
        if (name, method) == ("a#1", "answer of execute"):
            run.world.on_message = lambda *_: None
            run.world.kill(name)
            clients[1].end()  # else it would be the first that asks again

    clients = [Process() for _ in range(2)]

    async def main() -> None:
        coordinators = [run.connect(client) for client in clients]
        await run.apply(coordinators[0], "w", 1)
        run.world.on_message = kill
        await asyncio.wait([clients[1].run(run.take(coordinators[1], ("t", 1), 1))])
        await run.apply(coordinators[0], "w", 2)
        assert (await run.contents())["held"] == ["w.2"]
        assert run.world.num_kills == 1

    run.world.run(main)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_takes_complete_in_the_order_of_the_calls(modules, num_shards):
    async def main(run: Run) -> None:
        client, order = Process(), []
        coordinator = run.connect(client)

        async def take(consumer: str, num_required: int) -> None:
            order.append((consumer, await run.take(coordinator, (consumer, 1), num_required)))

        takes = []
        for consumer, num_required in (("a", 2), ("b", 1), ("c", 3)):
            takes.append(client.run(take(consumer, num_required)))
            await asyncio.sleep(0.1)
        for number in range(1, 7):
            await run.apply(coordinator, "w", number)
        await asyncio.wait_for(asyncio.gather(*takes), 10)
        assert order == [("a", ["w.1", "w.2"]), ("b", ["w.3"]), ("c", ["w.4", "w.5", "w.6"])]

    Run(modules, 0, num_shards, 1).run(main)


def test_the_take_of_a_killed_client_is_dropped_and_blocks_nobody(modules):
    async def main(run: Run) -> None:
        clients = [Process() for _ in range(2)]
        clients[0].run(run.take(run.connect(clients[0]), ("killed", 1), 3))
        await asyncio.sleep(0.1)
        coordinator = run.connect(clients[1])
        second = clients[1].run(run.take(coordinator, ("t", 1), 1))
        await asyncio.sleep(0.1)
        clients[0].end()
        await run.apply(coordinator, "w", 1)
        await asyncio.sleep(0.5)
        assert not second.done()
        assert await asyncio.wait_for(second, 8) == ["w.1"]
        assert run.coordinator._queue == {}

    Run(modules, 0, 2, 1).run(main)


def test_a_second_ctrl_c_leaves_no_take_in_the_queue(modules, monkeypatch):
    client, sent = object.__new__(modules.client.Client), []

    def interrupted(*_):
        raise KeyboardInterrupt

    def send(name, _):
        ctrl_c()
        sent.append(name)

    names = ("take", "withdraw", "delivered")
    methods = {name: SimpleNamespace(remote=partial(send, name)) for name in names}
    client.actor, client._poll_seconds = SimpleNamespace(**methods), 1.0
    client._caller, client._send = SimpleNamespace(next_key=lambda: ("a", 1)), interrupted
    monkeypatch.setattr(modules.client.cluster, "check_usable", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        client.take(1, None)
    assert sent == ["withdraw", "delivered"]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_whose_snapshot_cannot_be_written_changes_nothing(modules, num_shards, failing):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        await run.apply(coordinator, "w", 1)
        run.world.actors[run.names[failing % num_shards]].instance._snapshots.is_full = True
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                await run.apply(coordinator, "w", 2)
        assert (await run.contents())["held"] == ["w.1"]
        run.world.actors[run.names[failing % num_shards]].instance._snapshots.is_full = False
        await run.apply(coordinator, "w", 2)
        assert (await run.contents())["held"] == ["w.1", "w.2"]

    Run(modules, 0, num_shards, 1).run(main)


@pytest.mark.parametrize("period", [0, 4])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_call_that_fails_on_one_shard_changes_none(modules, period, failing):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        await run.apply(coordinator, "w", 1)

        def fail_on(number: int, shard: int) -> Any:
            sent = modules.commands.OrderedCall(("w", number), FailOn(shard))
            return answer_of(modules, lambda: coordinator.call.remote(sent))

        for number in (2, 3):
            with pytest.raises(ArithmeticError, match=f"^on shard {failing}$"):
                await fail_on(number, failing)
        found = await fail_on(4, 3)
        assert found == [True] * 3
        await run.apply(coordinator, "w", 5)
        assert (await run.contents())["history"] == ["w.1", "w.5"]  # nothing went back

    Run(modules, 0, 3, period).run(main)


def test_a_gradient_registers_its_worker_with_a_restarted_coordinator(modules):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        await run.apply(coordinator, "w", 1)
        run.world.kill("a")
        sent = run.applying("w.2", ("w", 2), origin=modules.commands.Origin("w", 2, 0, (5,)))
        await answer_of(modules, lambda: coordinator.call.remote(sent))
        assert run.coordinator._state.registered == {5}

    Run(modules, 0, 1, 1).run(main)


@pytest.mark.parametrize("period", [0, 1])
def test_close_ends_all_shards_and_cancels_waiting_takes(modules, period):
    async def main(run: Run) -> None:
        client = Process()
        coordinator = run.connect(client)
        waiting = client.run(run.take(coordinator, ("t", 1), 1))
        await run.apply(coordinator, "w", 1)
        await waiting
        waiting = client.run(run.take(coordinator, ("t", 2), 1))
        await asyncio.sleep(0.1)
        await coordinator.end.remote()
        with pytest.raises(CancelledError, match=r"^TakeGrad operation was cancelled$"):
            await waiting
        with pytest.raises(CancelledError, match=r"^'a' was closed$"):
            await run.apply(coordinator, "w", 2)
        assert not any(run.world.actors[name].is_alive for name in run.names[1:])
        assert not any(run.world.files.get(name) for name in run.names[1:])
        assert run.coordinator._queue == {}

    Run(modules, 0, 3, period).run(main)


def test_a_lost_message_leaves_nothing_with_the_other_shards(modules):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        await run.apply(coordinator, "w", 1)
        for place in (1, 2):
            messages: list[Any] = [("w.2", shard) for shard in range(3)]
            messages[place] = LOST
            sent = run.applying("w.2", ("w", 2), messages)
            with pytest.raises(RayTaskError, match="ObjectLostError"):
                await coordinator.call.remote(sent)
        await asyncio.sleep(1)
        assert not any(run.world.actors[name].instance._staged for name in run.names)
        await run.apply(coordinator, "w", 2)
        assert (await run.contents())["history"] == ["w.1", "w.2"]

    Run(modules, 0, 3, 1).run(main)


@pytest.mark.parametrize("polls", range(12))
def test_a_call_that_ray_cancels_is_run_on_all_shards_or_none(modules, polls):
    async def main(run: Run) -> None:
        coordinator = run.connect(Process())
        await run.apply(coordinator, "w", 1)
        call = asyncio.ensure_future(run.coordinator.call(run.applying("w.2", ("w", 2))))
        await asyncio.sleep(polls * 0.005)
        call.cancel()
        await asyncio.sleep(1)
        await run.apply(coordinator, "w", 3)
        assert (await run.contents())["history"] in (["w.1", "w.2", "w.3"], ["w.1", "w.3"])
        for name in run.names:
            assert run.world.actors[name].instance._staged == {}
        assert not run.coordinator._running

    Run(modules, 0, 3, 0).run(main)
