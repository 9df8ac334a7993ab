"""The processes of a PyTorch group, as threads: with gloo, and with its stand-in."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from fake_cupy import distributed

from gradreduce.device.process_group import ProcessError
from gradreduce.errors import CollectiveError

MODULE = "gradreduce.backends.processes.torch_group"
LIMIT_S = 0.3  # of exchanges without an answer
SOON_S = 3.0  # on a machine that is busy

Connect = Callable[[int], list[Any]]


def connected(make: Callable[[int, int], Any], size: int) -> list[Any]:
    """Groups of a number of processes, which are opened together."""
    torch_group = import_module(MODULE)
    with ThreadPoolExecutor(size) as pool:

        def opened(rank: int) -> Any:
            return torch_group.TorchGroup(make(rank, size), 30.0)

        return list(pool.map(opened, range(size)))


@pytest.fixture(params=["stand-in", pytest.param("gloo", marks=pytest.mark.torch)])
def connect(request: Any, monkeypatch: Any) -> Iterator[Connect]:
    if request.param == "stand-in":
        store = distributed.Store()
        with distributed.installed():
            yield lambda size: connected(
                lambda rank, _: distributed.ProcessGroup("cpu:gloo", store, rank, range(size)), size
            )
        return
    import torch
    import torch.distributed as dist

    store = dist.HashStore()

    def made(rank: int, size: int) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(0, 30))
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    # PyTorch has these for the groups of one process only.
    for name, found in {
        "get_backend_config": lambda group: "cpu:gloo",
        "get_rank": lambda group: group.rank(),
        "get_world_size": lambda group: group.size(),
        "get_global_rank": lambda group, rank: rank,
    }.items():
        monkeypatch.setattr(dist, name, found)
    yield lambda size: connected(made, size)


def exchanged(group: Any, tag: int = 1, seconds: float = 6.0) -> tuple[list[float], Any, float]:
    """Exchanges with all others; returns the results, the error and the seconds."""
    came = {rank: np.full(1, -1.0) for rank in group.others}
    mine = np.full(1, float(group.rank)).view(np.uint8)
    begin, error = time.monotonic(), None
    try:
        group.exchange(
            [(rank, mine) for rank in came],
            [(rank, array.view(np.uint8)) for rank, array in came.items()],
            tag,
            seconds,
        )
    except ProcessError as found:
        error = found
    return [array[0] for array in came.values()], error, time.monotonic() - begin


def test_a_late_process_is_named_and_nothing_arrives_later(connect):
    first, second, late = connect(3)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda group: exchanged(group, 1, LIMIT_S), (first, second)))
    assert [error.rank for _, error, _ in found] == [2, 2]
    assert "did not answer within 0.3 s" in f"{found[0][1]} {found[1][1]}"
    assert max(seconds for *_, seconds in found) < LIMIT_S + 2
    came, error, _ = exchanged(late)
    assert (came, error is None) == ([-1, -1], False)


def test_messages_of_another_exchange_are_not_taken(connect):
    groups = connect(2)
    with ThreadPoolExecutor(2) as pool:
        good = list(pool.map(exchanged, groups, [5, 5]))
        bad = list(pool.map(exchanged, groups, [6, 7], [LIMIT_S] * 2))
    assert [each[:2] for each in good] == [([1], None), ([0], None)]
    assert [came for came, *_ in bad] == [[-1], [-1]]
    assert [error.rank for _, error, _ in bad] == [1, 0]


def test_a_process_that_has_failed_is_not_waited_for(connect):
    first, second = connect(2)
    second.tell_failure("out of memory")
    _, error, seconds = exchanged(first)
    assert (error.rank, str(error)) == (1, "has gone")
    assert first.reason_for(1) == "process 1: out of memory"
    assert seconds < SOON_S


def test_an_interrupt_ends_an_exchange_and_nothing_arrives_later(connect):
    first, second = connect(2)
    came = np.full(4, 7, np.uint8)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            first.exchange([], [(1, came)], 1, 30.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    first.tell_failure("interrupted")  # gloo does not always notice that a connection has closed
    with pytest.raises(ProcessError):
        second.exchange([(0, np.zeros(4, np.uint8))], [], 1, 30.0)
    assert (came == 7).all()


def test_the_notice_of_a_known_call_is_there_while_its_exchange_waits(connect):
    first, second = connect(2)
    first.post_soon("call/0", "0 known")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchanged, first)
        assert second.read(0, "call/0", SOON_S) == "0 known"
        second.tell_failure("has read it")
        assert waiting.result(SOON_S)[1] is not None
    first.post_soon("call/1", "1 known")
    assert second.read(0, "call/1", 0.0) is None
    first.tell_failure("has stopped")
    assert second.read(0, "call/1", 0.0) == "1 known"


@pytest.fixture
def default_group(monkeypatch):
    """Makes the default group of a process that torchrun has started alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    with distributed.installed():
        distributed.make_world(distributed.Store(), 0, 1)
        yield import_module(MODULE)


def test_a_process_that_stops_before_it_connects_is_named(default_group, monkeypatch):
    others = threading.Barrier(2, timeout=30)

    def waits_too_long(*arguments, **options):
        others.wait()
        raise RuntimeError("wait timeout")

    store = distributed.Store()
    monkeypatch.setattr(default_group.dist, "init_process_group", waits_too_long)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(default_group._new_name, store, 1, 3, 30.0)
        calls = [
            pool.submit(default_group._make_default_group, (store, rank, 3), 30.0, False)
            for rank in (0, 2)
        ]
        for call in calls:
            with pytest.raises(CollectiveError, match=r"have not come.*: 1; .* \(wait timeout\)"):
                call.result()


def test_the_last_mesh_over_a_default_group_destroys_it(default_group):
    first, second = [default_group.open_torchrun(30.0, on_gpus=False) for _ in range(2)]
    (world,) = distributed._world
    first.leave(None)
    assert not world.destroyed
    second.leave(None)
    assert world.destroyed


def test_a_default_group_is_destroyed_if_no_mesh_can_be_opened_over_it(default_group, monkeypatch):
    def fails(*arguments, **options):
        raise TimeoutError("others are missing")

    monkeypatch.setattr(default_group, "TorchGroup", fails)
    with pytest.raises(TimeoutError):
        default_group.open_torchrun(30.0, on_gpus=False)
    assert not distributed._world
