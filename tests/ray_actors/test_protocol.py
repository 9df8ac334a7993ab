"""Each call counts once, all shards are at the same moment, whatever ends; see ``actor_world``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray_actors.actor_world import LOST, Process, RayTaskError, answer_of, load
from ray_actors.tally import FailOn, Run, Tally
from support.exhaustive import seeds
from support.signal_injection import ctrl_c

from gradreduce.errors import CancelledError


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with load() as found:
        yield found


def play(
    modules: SimpleNamespace, seed: int, num_shards: int, period: int, *, in_rounds: bool = False
) -> None:
    """A run in which actors are killed, and sometimes a worker."""
    run = Run(modules, seed, num_shards, period)
    run.kill_chance = run.world.random.choice([0.0, 0.005, 0.02, 0.05])
    a_worker_ends = run.world.random.random() < 0.5

    async def main() -> None:
        await (run.play_rounds if in_rounds else run.play)(a_worker_ends=a_worker_ends)
        found = await run.contents()
        run.check(found, 3 if in_rounds else 1)
        if not run.world.num_kills:
            assert found["results"] == {}

    run.world.run(main)


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("some", seeds(12, 600))
@pytest.mark.parametrize("in_rounds", [False, True], ids=["alone", "in rounds"])
def test_each_call_counts_once_whatever_ends(modules, some, num_shards, period, in_rounds):
    for seed in some:
        try:
            play(modules, seed, num_shards, period, in_rounds=in_rounds)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_round_waits_for_its_quorum_for_grace_or_for_everyone(modules, num_shards, monkeypatch):
    monkeypatch.setattr(Tally, "grace", 4.5)
    now = lambda: asyncio.get_running_loop().time()  # noqa: E731

    async def main(run: Run) -> None:
        client = Process()
        coordinator = run.connect(client)
        one, two = [client.run(run.push(coordinator, worker, 1)) for worker in "ab"]
        await asyncio.sleep(4.3)
        assert not one.done()
        await asyncio.wait_for(asyncio.gather(one, two), 0.5)  # at once, not at the next poll
        tasks, start = [client.run(run.push(coordinator, "a", 2))], now()
        await asyncio.sleep(20)
        tasks += [client.run(run.push(coordinator, worker, 2)) for worker in "bc"]
        await asyncio.wait_for(asyncio.gather(*tasks), 1)
        last = client.run(run.push(coordinator, "c", 3))
        await asyncio.sleep(20)
        assert not last.done()
        for worker in "ab":
            await run.leave(worker)
        await asyncio.wait_for(last, 1)
        assert sorted((await run.contents())["history"]) == sorted(run.acknowledged)
        assert now() < start + 45

    Run(modules, 0, num_shards, 1).run(main)


@pytest.mark.parametrize("bad_on", [0, 2])
def test_a_round_that_raises_on_one_shard_changes_none(modules, bad_on):
    async def main(run: Run) -> None:
        client = Process()
        coordinator = run.connect(client)
        sent = [run.push(coordinator, "a", 1), run.push(coordinator, "b", 1, bad_on=bad_on)]
        tasks = [client.run(each) for each in sent]
        for task in tasks:
            with pytest.raises(ArithmeticError, match="a bad push"):
                await task
        await asyncio.sleep(1)
        assert not any(run.world.actors[name].instance._staged for name in run.names)
        assert (await run.contents())["history"] == []
        tasks = [client.run(run.push(coordinator, worker, 1)) for worker in "ab"]
        await asyncio.gather(*tasks)
        assert sorted((await run.contents())["history"]) == ["a.1", "b.1"]

    Run(modules, 0, 3, 1).run(main)


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
