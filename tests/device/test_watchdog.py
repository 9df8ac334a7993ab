"""The watchdog: one thread for each mesh, which ends with it; and resets of a mesh."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
from support.exact_data import same
from support.hanging_devices import (
    TEST_TIMEOUT,
    clock,
    late_waits,
    no_thread_starts,
    stall,
    wait_for_failure,
    watchdogs,
)
from support.signal_injection import ctrl_c

import gradreduce as gr
from gradreduce.accumulator.state import PendingTake
from gradreduce.accumulator.take_queue import await_take, join
from gradreduce.backends import open_mesh
from gradreduce.backends.sim.scheduler import RandomScheduler
from gradreduce.device import Mesh, deadline_scope
from gradreduce.device.failure.watchdog import _check_calls
from gradreduce.device.order.order import Work
from gradreduce.errors import BackendUnavailableError, CancelledError, CollectiveError

from .contract import FLOAT, SIZE, data, uploaded

__all__ = ["clock", "late_waits"]


@pytest.fixture
def mesh(one_gpu_mesh):
    return one_gpu_mesh


def queued(placement=(0, 1)):
    return open_mesh(list(placement), backend="sim", schedule_seed=3)


def waiting_take(mesh: Mesh) -> PendingTake:
    """A take that waits for gradients on all devices."""
    accumulator = gr.ConditionalAccumulator("float32", device=mesh)
    ticket = PendingTake((accumulator.accumulator_ref,), num_required=1)
    ticket.in_call.acquire()
    join(ticket)
    return ticket


@contextmanager
def hanging(hang: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Inside, a thread is in ``hang(wait)``, and ``wait()`` returns after this context."""
    held, let_go = threading.Event(), threading.Event()

    def wait() -> None:
        held.set()
        assert let_go.wait(TEST_TIMEOUT)

    holder = threading.Thread(target=hang, args=(wait,))
    holder.start()
    try:
        assert held.wait(TEST_TIMEOUT)
        yield
    finally:
        let_go.set()
        holder.join(TEST_TIMEOUT)


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(TEST_TIMEOUT)
    return not any(thread.is_alive() for thread in threads)


def test_waits_with_a_deadline_return_the_same_values(mesh):
    """On every backend, waits with a deadline return the same values as waits without."""
    buffer = uploaded(mesh.devices[0], 1)
    assert mesh.mesh_state.watchdog is None
    with deadline_scope("a call", TEST_TIMEOUT, mesh.devices):
        mesh.devices[1].copy(buffer, uploaded(mesh.devices[1], 2))
    assert mesh.mesh_state.watchdog is not None
    assert same(buffer.numpy(deadline=TEST_TIMEOUT), data((SIZE,), seed=2))
    assert same(buffer.numpy(), data((SIZE,), seed=2))
    mesh.synchronize(deadline=TEST_TIMEOUT)
    mesh.synchronize()
    assert mesh.mesh_state.reason is None


def test_a_reset_of_a_mesh_that_has_not_failed_does_nothing(mesh):
    buffer = uploaded(mesh.devices[0], 1)
    with mesh.journal() as journal:
        mesh.reset()
        mesh[1:].reset(timeout=None)
    assert journal.records == []
    assert same(buffer.numpy(), data((SIZE,), seed=1))
    mesh.close()
    with pytest.raises(BackendUnavailableError, match="was closed"):
        mesh.reset()


def test_each_mesh_has_one_thread_that_ends_with_it(monkeypatch):
    """Also if Ctrl-C came while it was started."""
    before = set(watchdogs())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        ctrl_c()

    with queued() as mesh:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mesh.synchronize(deadline=TEST_TIMEOUT)
        for _ in range(3):
            mesh.synchronize(deadline=TEST_TIMEOUT)
        assert len(set(watchdogs()) - before) == 1
    assert ended(list(set(watchdogs()) - before))


def test_an_idle_thread_keeps_no_mesh_alive():
    before = set(watchdogs())
    mesh = queued()
    mesh.synchronize(deadline=TEST_TIMEOUT)
    with deadline_scope("a call", TEST_TIMEOUT, mesh.devices):
        uploaded(mesh.devices[0], 1)
    mesh.synchronize()
    here = weakref.ref(mesh.mesh_state)
    del mesh
    gone = threading.Event()
    for _ in range(int(TEST_TIMEOUT / 0.005)):
        gc.collect()
        if here() is None:
            break
        gone.wait(0.005)  # until it has checked once more
    assert here() is None
    assert ended(list(set(watchdogs()) - before))


def test_the_first_reason_stays_and_a_second_failure_has_its_own(clock):
    with queued() as mesh:
        stall(mesh.devices[1])
        for call in ("first", "second"):
            with deadline_scope(call, 5, mesh.devices):
                uploaded(mesh.devices[1], 1)
        clock.advance(6)
        assert "for first passed" in wait_for_failure(mesh)
        mesh.mesh_state.fail("later reasons do not count")
        with pytest.raises(CollectiveError, match="for first passed"):
            mesh.synchronize()
        mesh.reset(timeout=TEST_TIMEOUT)
        clock.advance(100)  # calls from before the reset are not checked any more
        assert same(
            uploaded(mesh.devices[1], 4).numpy(deadline=TEST_TIMEOUT), data((SIZE,), seed=4)
        )
        stall(mesh.devices[0])
        with deadline_scope("third", 5, mesh.devices):
            uploaded(mesh.devices[0], 1)
        clock.advance(6)
        assert "for third passed: sim:0 has not joined third" in wait_for_failure(mesh)


def test_a_call_that_never_ends_on_the_host_is_named(clock):
    """As if a library hangs; the call itself raises afterwards."""
    mesh = queued()
    with (
        pytest.raises(CollectiveError, match="has failed"),
        deadline_scope("a call", 5, mesh.devices),
    ):
        clock.advance(6)
        assert "the call itself has not submitted all its work" in wait_for_failure(mesh)
        uploaded(mesh.devices[0], 1)
    mesh.close()


def test_a_call_that_raises_is_not_watched_any_more(clock):
    with queued() as mesh:
        stall(mesh.devices[1])
        with pytest.raises(KeyError), deadline_scope("a call", 5, mesh.devices):
            watched = mesh.mesh_state.thread.pending_call
            uploaded(mesh.devices[1], 1)
            raise KeyError
        clock.advance(6)
        assert _check_calls(mesh.mesh_state, [watched]) == []
        assert mesh.mesh_state.reason is None


def test_a_call_of_before_a_reset_is_not_watched_any_more(clock):
    with queued() as mesh, deadline_scope("a call", 5, mesh.devices):
        watched = mesh.mesh_state.thread.pending_call
        mesh.mesh_state.fail("for a test")
        mesh.reset(timeout=TEST_TIMEOUT)
        clock.advance(6)
        assert _check_calls(mesh.mesh_state, [watched]) == []
        assert mesh.mesh_state.reason is None


def test_an_update_that_a_failed_mesh_cuts_short_fails_no_device():
    """Its content is undefined after a reset anyway, but a failed device would stay failed."""
    with queued() as mesh:
        buffer, other = (uploaded(mesh.devices[0], seed) for seed in (1, 2))
        with pytest.raises(CollectiveError), mesh.mesh_state.fail_on_partial_write(mesh.devices):
            mesh.devices[0].copy(buffer, other)
            mesh.mesh_state.fail("for a test")
            mesh.devices[0].copy(other, buffer)
        assert mesh.mesh_state.failed == {}
        mesh.reset(timeout=TEST_TIMEOUT)
        mesh.synchronize(deadline=TEST_TIMEOUT)


def test_a_wait_for_dropped_work_does_not_return_as_if_done():
    scheduler = RandomScheduler(3)
    scheduler.stall("a")
    scheduler.submit("a", lambda: None)
    waits, found = threading.Event(), []

    class Endless:
        remaining = TEST_TIMEOUT

        @property
        def is_over(self) -> bool:
            waits.set()
            return False

    waiting = threading.Thread(target=lambda: found.append(scheduler.finish("a", Endless())))
    waiting.start()
    assert waits.wait(TEST_TIMEOUT)
    scheduler.drop()  # takes the lock as soon as the other thread waits
    waiting.join(TEST_TIMEOUT)
    assert found == [False]


def test_a_device_that_cannot_be_queried_fails_the_mesh(clock, monkeypatch):
    with queued() as mesh, monkeypatch.context() as patch:
        patch.setattr(type(mesh.devices[0]), "_is_done", lambda *_: 1 / 0)
        with deadline_scope("a call", 5, mesh.devices):
            pass
        assert "cannot be queried: ZeroDivisionError" in wait_for_failure(mesh)


def test_neither_the_thread_nor_a_failure_takes_a_lock(clock):
    """The mesh fails even while a hanging call holds every lock."""
    with queued() as mesh:
        stall(mesh.devices[1])
        with deadline_scope("a call", 5, mesh.devices):
            uploaded(mesh.devices[1], 1)

        def hang(wait: Callable[[], None]) -> None:
            state = mesh.mesh_state
            with state.launch_lock, state.order.lock, state._watchdog_lock, state.reset_lock:
                wait()

        with hanging(hang):
            clock.advance(6)
            assert "sim:1 has not joined" in wait_for_failure(mesh)
            with pytest.raises(CollectiveError, match="yet: another thread is resetting it"):
                mesh.reset(timeout=0.01)
        mesh.reset(timeout=TEST_TIMEOUT)


def test_a_deadline_ends_waits_for_a_thread_that_hangs_in_the_driver():
    """Such a thread holds the lock of the order: a download and a launch of others wait for it."""
    with queued() as mesh:
        device, other = mesh.devices[:2]
        buffer, used = device.upload(data((SIZE,))), other.upload(data((SIZE,)))
        mesh.synchronize(deadline=TEST_TIMEOUT)  # from now on waits look at the mesh
        errors = list[BaseException]()
        work = Work(other.compute, [(used,)], 1)

        def fill() -> None:
            with pytest.raises(CollectiveError, match="the mesh has failed") as raised:
                device.fill_zero(buffer)
            errors.append(raised.value)

        with hanging(lambda wait: other._order(wait, work)):
            filling = threading.Thread(target=fill)
            filling.start()
            with pytest.raises(CollectiveError, match=r"the deadline for a download of .* passed"):
                device.download(buffer, deadline=0.1)
            filling.join(TEST_TIMEOUT)
            assert len(errors) == 1
            with pytest.raises(CollectiveError, match="a call is still submitting work"):
                mesh.reset(timeout=0.1)
        mesh.reset(timeout=TEST_TIMEOUT)
        assert same(device.download(buffer), data((SIZE,)))


def test_a_mesh_closes_while_a_thread_hangs_in_the_driver():
    mesh = queued()
    device, other = mesh.devices[:2]
    used = other.upload(data((SIZE,)))
    mesh.synchronize(deadline=TEST_TIMEOUT)
    work = Work(other.compute, [(used,)], 1)
    freed = device.upload(data((SIZE,)))
    with hanging(lambda wait: other._order(wait, work)):
        del freed  # closing returns its memory to the pool
        mesh.close()


def test_where_no_thread_can_start_a_failure_is_reported_all_the_same(clock, monkeypatch, tmp_path):
    """The watchdog exists since the first deadline."""
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    with queued() as mesh, no_thread_starts() as refused:
        ticket = waiting_take(mesh)
        mesh.synchronize(deadline=TEST_TIMEOUT)
        stall(mesh.devices[1])
        with deadline_scope("a call", 5, mesh.devices):
            uploaded(mesh.devices[1], 1)
        refused.append(True)
        clock.advance(6)
        assert "sim:1 has not joined" in wait_for_failure(mesh)
        with pytest.raises(CancelledError, match="the mesh has failed"):
            await_take(ticket, TEST_TIMEOUT)
        with pytest.raises(CollectiveError, match="the mesh has failed"):
            mesh.synchronize()
    assert list(tmp_path.iterdir())


def test_where_no_thread_can_start_a_host_wait_ends_by_its_deadline():
    with queued() as mesh, no_thread_starts() as refused:
        mesh.synchronize(deadline=TEST_TIMEOUT)
        stall(mesh.devices[1])
        buffer = uploaded(mesh.devices[1], 1)
        refused.append(True)
        with pytest.raises(CollectiveError, match="sim:1 has not finished its queues"):
            buffer.numpy(deadline=1e-6)
        wait_for_failure(mesh)


@pytest.mark.parametrize("reports", ["the caller", "the watchdog"])
def test_where_no_thread_can_start_a_failed_device_is_reported(reports):
    """By the watchdog, if a lock is held: the thread that finds the failure may hold it."""
    with queued() as mesh, no_thread_starts() as refused:
        ticket = waiting_take(mesh)

        def hang(wait: Callable[[], None]) -> None:
            with ticket.states[0].lock:
                wait()

        if reports == "the watchdog":
            mesh.synchronize(deadline=TEST_TIMEOUT)
        with hanging(hang) if reports == "the watchdog" else nullcontext():
            refused.append(True)
            mesh.devices[1].mark_failed("for a test")
        with pytest.raises(CancelledError):
            await_take(ticket, TEST_TIMEOUT)


def test_a_reset_waits_for_a_call_that_still_submits_work(clock):
    with queued() as mesh:
        mesh.mesh_state.fail("for a test")
        wait_for_failure(mesh)

        def hang(wait: Callable[[], None]) -> None:
            with mesh.mesh_state.launch_lock:
                wait()

        text = "a call is still submitting work to the devices"
        with hanging(hang), pytest.raises(CollectiveError, match=text):
            mesh.reset(timeout=0.01)
        mesh.reset(timeout=TEST_TIMEOUT)
        mesh.reset(timeout=TEST_TIMEOUT)


def test_memory_from_before_a_reset_returns_to_the_pool(late_waits):
    """Dropped work keeps no block, so deferred memory returns to the pool."""
    with queued([0, 1, 2]) as mesh:
        first, second, _ = mesh.devices
        buffer = uploaded(first, 1)
        other = second.empty((SIZE,), FLOAT)
        stall(second)
        second.copy(other, buffer)
        address = buffer.address
        del buffer
        assert first.empty((SIZE,), FLOAT).address != address
        with pytest.raises(CollectiveError):
            second.synchronize(deadline=5)
        mesh.reset(timeout=TEST_TIMEOUT)
        mesh.synchronize(deadline=TEST_TIMEOUT)
        assert address in [first.empty((SIZE,), FLOAT).address for _ in range(4)]


def test_closing_a_mesh_ends_waits_of_other_threads():
    with ThreadPoolExecutor(1) as pool:
        with queued() as mesh:
            buffer = uploaded(mesh.devices[1], 1)
            stall(mesh.devices[1])
            waiting = pool.submit(buffer.numpy)
        with pytest.raises(BackendUnavailableError, match="was closed"):
            waiting.result(TEST_TIMEOUT)
