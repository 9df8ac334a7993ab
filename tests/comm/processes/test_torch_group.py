"""The processes of a PyTorch group, as threads: with gloo, and with its stand-in."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from fake_cupy import distributed
from support.signal_injection import alarm

from gradreduce.comm.process_group import ProcessError
from gradreduce.errors import CollectiveError

MODULE = "gradreduce.comm.torch_group"
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
    text = "did not answer within 0.3 s, but is not known to have ended"
    assert text in f"{found[0][1]} {found[1][1]}"
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
    assert (error.rank, str(error)) == (1, "has gone, or makes another call")
    assert first.reason_for(1) == "process 1: out of memory"
    assert seconds < SOON_S


def test_an_interrupt_ends_an_exchange_and_nothing_arrives_later(connect):
    first, second = connect(2)
    came = np.full(4, 7, np.uint8)
    with pytest.raises(KeyboardInterrupt), alarm(0.1):
        first.exchange([], [(1, came)], 1, 30.0)
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


@pytest.mark.parametrize("call", ["post", "read"])
def test_a_store_that_answers_late_by_an_error_can_be_used_again(connect, monkeypatch, call):
    first, second = connect(2)
    monkeypatch.setattr(import_module(MODULE), "_STORE_SECONDS", 0.05)
    store, is_over = first._store, threading.Event()

    class StuckStore(GoneStore):
        def check(self, keys: Any) -> bool:
            assert is_over.wait(30)
            return super().check(keys)

    first._store = StuckStore()
    assert first.read(1, "closed", 0.0) is None
    with pytest.raises(CollectiveError, match=r"^the store of the processes does not answer$"):
        first.post("failed", "too early")
    first._store = store
    is_over.set()
    ended = first._stuck._ended
    ended.put(ended.get(timeout=SOON_S))  # its call has ended
    second.post("failed", "out of memory")
    if call == "post":
        first.post("failed", "out of disk space")
        assert second.read(0, "failed", SOON_S) == "out of disk space"
    assert first.read(1, "failed", SOON_S) == "out of memory"


class GoneStore:
    """A store whose process has ended."""

    def check(self, keys: Any) -> bool:
        raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_leaving_ends_when_another_process_has_ended(connect, monkeypatch):
    monkeypatch.setattr(import_module(MODULE), "_NOTICE_SECONDS", 0.0)
    first, second, third = connect(3)
    with ThreadPoolExecutor(2) as pool:
        leaving = [pool.submit(each.leave, None) for each in (first, third)]
        assert second.read(0, "closed", SOON_S) and second.read(2, "closed", SOON_S)
        second._abort(1, second.others)  # closes its connections
        for each in leaving:
            with pytest.raises(ProcessError, match=r"^process 1 of 3 has ended without closing"):
                each.result(SOON_S)


def test_processes_leave_without_a_store(connect):
    groups = connect(3)
    for group in groups:
        group._store = GoneStore()
    with ThreadPoolExecutor(3) as pool:
        for leaving in [pool.submit(group.leave, None) for group in groups]:
            leaving.result(SOON_S)


@pytest.mark.parametrize("key", ["failed", "closed"])
def test_a_process_that_is_alive_may_say_why_after_its_connections_have_ended(connect, key):
    """Such as one whose exchange has failed, because this process has made fewer calls."""
    first, second = connect(2)
    first._bytes[1] = SimpleQueue()
    first._bytes[1].put(RuntimeError("Connection closed by peer"))
    read = first.read

    def read_before_the_notice(*arguments: Any) -> Any:
        found = read(*arguments)
        second.post(key, "1 interrupted")
        return found

    first.read = read_before_the_notice
    assert first._has_left(1, SOON_S)


def test_leaving_ends_when_the_store_of_a_group_of_nccl_alone_has_gone(connect, monkeypatch):
    monkeypatch.setattr(import_module(MODULE), "_NOTICE_SECONDS", 0.0)
    first, _ = connect(2)
    first.sends_host_memory = False
    first._store = GoneStore()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ProcessError, match=r"reset by peer\)$"):
        pool.submit(first.leave, None).result(SOON_S)


def test_a_process_that_fails_sends_no_byte_and_leaves_no_thread(connect):
    first, second = connect(2)
    second.tell_failure("out of memory")
    second.leave("out of memory")
    first.leave(None)
    assert first._leaving.has_ended(SOON_S)


@pytest.fixture
def default_group(monkeypatch):
    """Makes the default group of a process that torchrun has started alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    with distributed.installed():
        distributed.make_world(distributed.Store(), 0, 1)
        yield import_module(MODULE)


def test_a_process_that_stops_before_it_connects_is_named(default_group, monkeypatch):
    others = threading.Barrier(2, timeout=60)

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


class Argument:
    """An argument of a call, as a send or receive of PyTorch is."""


def test_a_thread_of_calls_frees_the_arguments_of_a_call_before_it_has_ended(connect):
    """PyTorch frees them without the interpreter lock, which aborts a process that ends."""
    connect(2)  # for the stand-in of PyTorch
    thread = import_module(MODULE)._CallingThread()
    argument = Argument()
    freed = weakref.ref(argument)
    thread.start(partial(id, argument))
    del argument
    assert thread.has_ended(30.0)
    assert freed() is None
    thread.stop()
