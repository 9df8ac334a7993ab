"""Signal handlers at every point of a call: those that raise, and those that save a checkpoint."""

import gc
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from signal import SIGINT

import numpy as np
import pytest
from support.background_runs import environment
from support.exhaustive import seeds
from support.signal_injection import SignalInjection, num_points_of, raise_interrupt
from support.threads import in_threads

import gradreduce as gr
from gradreduce import backends as opening
from gradreduce.backends import default_mesh
from gradreduce.backends.sim import device as sim
from gradreduce.backends.sim import host_compile, workers
from gradreduce.backends.sim.pool import Memory, SimPool
from gradreduce.backends.sim.scheduler import RandomScheduler
from gradreduce.device.run import table as launch_table
from gradreduce.errors import CollectiveError, DeadlineExceededError

DEADLINE = 10.0
SIZE = 100
PLACEMENT = (0, 0, 1, 1)
FAR = 128  # distance of the points that a plain run interrupts


@pytest.fixture(autouse=True)
def small_blocks():
    """Splits even small launches over three threads."""
    with pytest.MonkeyPatch.context() as patch:
        spread_small_launches(patch)
        yield


def spread_small_launches(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GRADREDUCE_SIM_THREADS", "3")
    patch.setenv("GRADREDUCE_BACKEND", "sim")
    patch.setattr(workers, "SPLIT_SIZE", SIZE)
    for module in (sim, workers):
        patch.setattr(module, "BLOCK_SIZE", 16)


def test_no_collection_of_garbage_adds_points():
    seen = []
    num_points_of(lambda: seen.append(gc.isenabled()))
    assert [*seen, gc.isenabled()] == [False, True]


LONG = (pytest.mark.exhaustive, pytest.mark.slow)


def right_calls() -> dict[str, Callable[[], bool]]:
    """Calls that use threads and locks of the simulation; returns whether results are right."""
    mesh = gr.open_mesh(PLACEMENT, backend="sim", strict=True)
    grads = [np.arange(SIZE, dtype=np.float32) * (place + 1) for place in range(4)]
    nested = [[grad] for grad in grads]
    total = np.arange(SIZE, dtype=np.float32) * 10

    def add_n() -> bool:
        return (gr.add_n(grads) == total).all()

    def all_reduce() -> bool:
        results = gr.all_reduce(nested, gr.ReduceOp.SUM, mesh=mesh)
        return all((result == total).all() for (result,) in results)

    def synchronize() -> bool:
        mesh.synchronize()
        return True

    scheduler = RandomScheduler(3)

    def wait() -> bool:
        ran: list[bool] = []
        scheduler.stall("a queue")
        scheduler.submit("a queue", partial(ran.append, True))
        late = not scheduler.finish("a queue", Brief())
        scheduler.resume("a queue")
        return late and scheduler.finish("a queue") and ran == [True]

    queued = gr.open_mesh(2, backend="sim", schedule_seed=3).devices[0]

    def late() -> bool:
        with suppress(CollectiveError):
            queued.scheduler.stall((queued.physical, "compute"))
            queued.zeros((3,), "float32").numpy(deadline=1e-6)
            return False
        queued.mesh.reset(timeout=DEADLINE)  # after this nothing hangs
        return (queued.zeros((3,), "float32").numpy() == 0).all()

    def reset() -> bool:
        mesh.mesh_state.fail("for a test")
        mesh.reset(timeout=DEADLINE)
        return all_reduce()

    calls = (add_n, all_reduce, synchronize, wait, reset, late)
    return {call.__name__: call for call in calls}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_interruption_leaves_no_lock_of_a_center_behind(first):
    """In the main thread Ctrl-C is deferred while a center is loaded."""
    center = gr.AGNCenter(gr.open_mesh(1, backend="sim"))
    registry = center._shared.registry

    def call() -> bool:
        registry.begin(0)
        with suppress(DeadlineExceededError):
            registry.wait_for(2, 1e-4)
        center.load_state_dict(center.state_dict())
        return True

    for place in range(first + 1, num_points_of(call) + 1, 3):
        with (
            suppress(KeyboardInterrupt),
            SignalInjection(place, partial(signal.raise_signal, SIGINT)),
        ):
            call()
        assert in_threads(call) == [True], place


def test_interrupted_queued_work_is_completed():
    """As on a GPU, Ctrl-C may come while the host waits for work of earlier calls."""
    scheduler, ran = RandomScheduler(0), []

    def work() -> None:
        signal.raise_signal(SIGINT)
        ran.append("first")

    scheduler.submit("a queue", work)
    scheduler.submit("a queue", partial(ran.append, "second"))
    with pytest.raises(KeyboardInterrupt):
        scheduler.finish("a queue")
    assert scheduler.finish("a queue")
    assert ran == ["first", "second"]


def test_a_handler_cannot_wait_for_queued_work_that_it_interrupts():
    """It would run later work first."""
    scheduler, ran = RandomScheduler(0), []

    def work() -> None:
        with pytest.raises(RuntimeError, match="let the handler set a flag"):
            scheduler.finish("a queue")
        scheduler.submit("a queue", partial(ran.append, "third"))
        ran.append("first")

    scheduler.submit("a queue", work)
    scheduler.submit("a queue", partial(ran.append, "second"))
    assert scheduler.finish("a queue")
    assert ran == ["first", "second", "third"]


def test_a_handler_that_waits_for_queued_work_breaks_none():
    """At every point of a wait the handler's wait completes, or raises."""

    def queued() -> tuple[RandomScheduler, list[str]]:
        scheduler, ran = RandomScheduler(0), []
        for name in ("first", "second"):
            scheduler.submit("a queue", partial(ran.append, name))
        return scheduler, ran

    def handler(scheduler: RandomScheduler) -> None:
        scheduler.submit("another queue", lambda: None)
        with suppress(RuntimeError):
            scheduler.finish("a queue")

    num_points = num_points_of(partial(queued()[0].finish, "a queue"))
    for place in range(1, num_points + 1):
        scheduler, ran = queued()
        with SignalInjection(place, partial(handler, scheduler)):
            assert scheduler.finish("a queue")
        assert ran == ["first", "second"], place


class Brief:
    """A wait policy that ends at the second check."""

    def __init__(self) -> None:
        self._looks = 0
        self.remaining = 1e-4

    @property
    def is_over(self) -> bool:
        self._looks += 1
        return self._looks > 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as Python does
@pytest.mark.parametrize(
    "firsts",
    [
        range(1),
        *(
            pytest.param(range(start, start + 16), marks=pytest.mark.exhaustive)
            for start in range(0, FAR, 16)
        ),
    ],
)
@pytest.mark.parametrize("name", ["add_n", "all_reduce", "synchronize", "wait", "reset", "late"])
def test_an_interruption_leaves_no_job_and_no_lock_behind(name, firsts):
    """The exhaustive tier tests all points of a call."""
    call, num_raised = right_calls()[name], 0
    assert call()
    num_points = num_points_of(call)

    def interrupted(place: int) -> int:
        try:
            with SignalInjection(place, raise_interrupt):
                assert call()
        except KeyboardInterrupt:
            return 1
        return 0  # in a finalizer, where it cannot be caught

    for first in firsts:
        for place in range(first + 1, num_points + 1, FAR):
            num_raised += in_threads(partial(interrupted, place))[0]
            assert in_threads(call) == [True], place
    assert num_raised or firsts.start


def interrupt_often(count: int) -> None:
    """The program of the test below: real signals at random times; the last one ends it."""
    spread_small_launches(pytest.MonkeyPatch())
    signal.signal(signal.SIGALRM, lambda *_: raise_interrupt())
    calls, moments, num_caught = right_calls(), random.Random(count), 0
    calls, is_over = [calls["add_n"], calls["all_reduce"]], False
    while not is_over:
        try:  # around everything: with other threads a signal arrives late
            while num_caught < count:
                call = moments.choice(calls)
                assert call()
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 3e-4))
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            is_over = True
        except KeyboardInterrupt:
            num_caught += 1
    sys.stdout.write("right\n")
    sys.stdout.flush()
    signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 3e-4))
    while True:
        calls[0]()


@pytest.mark.parametrize(
    ("num_processes", "count"),
    [
        (1, 100),
        pytest.param(1, 20_000, marks=LONG),
        pytest.param(30, 1, marks=LONG),
    ],
)
def test_often_interrupted_calls_stay_correct_and_end_soon(num_processes, count):
    program = f"from end_to_end import test_interrupts; test_interrupts.interrupt_often({count})"
    for _ in range(num_processes):
        with subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                assert process.stdout.readline() == "right\n"
                process.wait(5)
            finally:
                process.kill()
            assert process.returncode == -SIGINT, process.stderr.read()


class Training:
    """A variable on four devices, with its value and momentum before and after each step."""

    def __init__(self, **options) -> None:
        self.mesh = gr.open_mesh(PLACEMENT, backend="sim", strict=True, **options)
        self.variable = gr.Variable(np.zeros(SIZE, np.float32), device=self.mesh, name="w")
        self.reducer = gr.AllReduceCrossDeviceOps()
        self.optimizer = gr.MomentumOptimizer(0.5, 0.5)
        self.grads = [np.arange(SIZE, dtype=np.float32) * (place + 1) for place in range(4)]
        self.values = [np.zeros(SIZE, np.float32)]
        self.momenta = [np.zeros(SIZE, np.float32)]
        self.saved = 0
        self.step()

    def step(self) -> None:
        """All-reduces the gradients and applies them."""
        self.momenta.append(self.momenta[-1] / 2 + sum(self.grads) / 4)
        self.values.append(self.values[-1] - self.momenta[-1] / 2)
        grads = gr.PerReplica(self.grads, self.mesh)
        reduced = self.reducer.reduce(gr.ReduceOp.MEAN, grads, self.variable)
        self.optimizer.apply_gradients([(reduced, self.variable)])

    def check(self) -> None:
        """Checks the state after a step."""
        for replica in range(4):
            with gr.replica(replica):
                assert (self.variable.numpy() == self.values[-1]).all()

    def save(self) -> None:
        """Saves a checkpoint, like a handler of SIGTERM, during the last step."""
        state = self.optimizer.state_dict(deadline=DEADLINE)["slots"]["w"]["momentum"]
        assert ((state == self.momenta[-2]) | (state == self.momenta[-1])).all()
        value = self.variable.read()
        assert ((value == self.values[-2]) | (value == self.values[-1])).all()
        with self.mesh.journal() as journal:
            others = [[grad + 1] for grad in self.grads]
            (total,), *_ = gr.all_reduce(others, gr.ReduceOp.SUM, mesh=self.mesh)
        assert (total == sum(self.grads) + 4).all()
        assert journal.launches
        self.saved += 1


EVERY = 50  # distance of two handlers; if closer, deferred work never runs


@pytest.mark.parametrize("firsts", seeds(2, EVERY))
@pytest.mark.parametrize(
    "implementation", ["numpy", pytest.param("compiled", marks=pytest.mark.host)]
)
def test_a_handler_saves_a_checkpoint(implementation, firsts):
    """The exhaustive tier tests all points of a step, thousands of times."""
    training = Training(kernels=implementation)
    training.save()  # compiles, and starts the watchdog

    def train(first: int) -> None:
        with SignalInjection(1 + first, training.save, every=EVERY):
            training.step()

    for first in firsts:
        in_threads(partial(train, first))
        in_threads(training.check)  # no lock is left behind
    assert training.saved > 30 * len(firsts)
    training.mesh.close()


@pytest.mark.parametrize(
    "implementation", ["numpy", pytest.param("compiled", marks=pytest.mark.host)]
)
def test_a_handler_may_come_while_locks_are_held(implementation):
    training = Training(kernels=implementation)

    def save() -> None:
        mesh, opened = training.mesh, default_mesh()
        with ExitStack() as held:
            for each in (mesh, opened):
                mesh_state = each.mesh_state
                for lock in (
                    mesh_state.launch_lock,
                    mesh_state._watchdog_lock,
                    mesh_state.log._lock,
                ):
                    held.enter_context(lock)
            for device in (*mesh.devices, *opened.devices):
                held.enter_context(device._pool._lock)
            held.enter_context(opening._default_lock.lock)
            held.enter_context(host_compile._LOCK.lock)
            training.save()
            assert (gr.all_reduce([[np.ones(3)]] * len(opened.devices))[0][0] == 1).all()

    in_threads(save)
    training.mesh.close()


class Pooled:
    """Calls of a pool, and calls of a handler in the middle of them."""

    def __init__(self) -> None:
        self.pool = SimPool()
        self.live: list[Memory] = []

    def call(self) -> None:
        self.take(1024, 2048, 5120, 5120)
        for _ in range(2):
            self.pool.release(self.live.pop())
        self.take(4096, 512)

    def handle(self) -> None:
        self.take(512)
        for nbytes in (1024, 512, 3072):
            self.pool.release(self.pool.allocate(nbytes))
        if len(self.live) % 2:
            self.pool.clear()

    def take(self, *sizes: int) -> None:
        for nbytes in sizes:
            memory = self.pool.allocate(nbytes)
            assert memory.nbytes >= nbytes
            self.live.append(memory)

    def check(self) -> None:
        """Checks that no memory has two owners."""
        starts = sorted((memory.address, memory.nbytes) for memory in self.live)
        assert all(start + nbytes <= behind for (start, nbytes), (behind, _) in pairwise(starts))


def test_a_handler_may_use_a_pool_in_the_middle_of_its_calls():
    for place in range(1, num_points_of(Pooled().call) + 1):
        pooled = Pooled()
        with SignalInjection(place, pooled.handle, every=3):
            pooled.call()
        pooled.check()


@pytest.mark.parametrize("handled", [(1,), (1, 0)])
def test_a_handler_may_use_tables_in_the_middle_of_a_search(handled, monkeypatch):
    """A table of the handler evicts the one that the interrupted call found, or makes the same."""
    monkeypatch.setattr(launch_table, "CACHED_WORDS", 1)
    monkeypatch.setattr(launch_table, "CACHED_TABLES", 1)
    with gr.open_mesh(1, backend="sim") as mesh:
        batches = [
            [[mesh.devices[0].empty((SIZE,), "float32")] for _ in range(num_rows)]
            for num_rows in (1, 2)
        ]

        def find(*places: int) -> None:
            for place in places:
                made.find(batches[place], [SIZE] * len(batches[place]), 1024)

        made = launch_table.Tables(lambda words: (0, words))
        for place in range(1, num_points_of(partial(find, 0, 0, 1)) + 1):
            made = launch_table.Tables(lambda words: (0, words))
            with SignalInjection(place, partial(find, *handled)):
                find(0, 0, 1)
