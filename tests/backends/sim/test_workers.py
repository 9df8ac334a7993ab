"""Simulated launches use several threads, with the bits and errors of one thread."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest
from support.exact_data import random_data
from support.threads import in_threads

from gradreduce.backends import open_mesh
from gradreduce.backends.sim import workers as sim_workers
from gradreduce.backends.sim.workers import BLOCK_SIZE, SPLIT_SIZE, Workers
from gradreduce.device import Device
from gradreduce.ops.add_n import ADD_N

PAIR = ("float32", "float32", 2)
LARGE = SPLIT_SIZE + 13
TIMEOUT = 60


@contextmanager
def opened(num_threads: int, implementation: str = "numpy") -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADREDUCE_SIM_THREADS", str(num_threads))
        mesh = open_mesh(1, backend="sim", kernels=implementation, strict=True)
    with mesh:
        assert mesh.devices[0].options.workers.num_threads == num_threads
        yield mesh.devices[0]


def together(num_threads: int):
    """A reference that waits until a number of threads run it, and records them."""
    barrier, seen = threading.Barrier(num_threads), set()

    def reference(rows, num_inputs: int) -> None:
        barrier.wait(TIMEOUT)
        seen.add(threading.get_ident())
        ADD_N.reference(rows, num_inputs)

    return replace(ADD_N, reference=reference), seen


def operands(device: Device, size: int, num_rows: int = 1) -> list:
    return [
        [
            device.empty((size,), "float32"),
            *(device.upload(random_data((size,), "float32", seed=2 * row + k)) for k in range(2)),
        ]
        for row in range(num_rows)
    ]


@pytest.mark.parametrize(
    ("size", "num_rows", "num_threads", "expected"),
    [(LARGE, 1, 3, 3), (1000, LARGE // 1000 + 1, 3, 3), (1000, 1, 3, 1), (SPLIT_SIZE - 1, 1, 3, 1),
     (LARGE, 1, 1, 1)],
    ids=["large", "many rows", "small", "not large", "one thread"],
)  # fmt: skip
def test_large_launches_alone_run_in_several_threads(size, num_rows, num_threads, expected):
    with opened(num_threads) as device:
        rows = operands(device, size, num_rows)
        kernel, seen = together(expected)

        def launch() -> None:
            device.launch(kernel, PAIR, rows, (2,))
            assert threading.get_ident() in seen

        in_threads(launch)
        assert len(seen) == expected


def test_rows_that_are_not_elementwise_are_not_split():
    """In several threads, although the small row has as much work as the large one."""
    seen = []

    def reference(rows, num_inputs: int) -> None:
        seen.append([[array.size for array in row] for row in rows])

    whole = replace(ADD_N, reference=reference, items=lambda sizes: sizes[0])
    with opened(2) as device:
        rows = [operands(device, size)[0] for size in (LARGE, 5)]
        device.launch(whole, PAIR, rows, (2,))
        device.launch(whole, PAIR, rows[:1], (2,))
    assert sorted(seen) == [[[5] * 3], [[LARGE] * 3], [[LARGE] * 3]]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["the caller", "a worker", "everywhere"])
def test_a_failure_comes_when_no_job_runs(where, error):
    """Otherwise a job could write into memory that has a new owner."""
    workers, ended = Workers(3), []
    all_begun, failing = threading.Barrier(3), threading.Event()
    caller: list[int] = []
    chosen: dict[int, int] = {}

    def job() -> None:
        all_begun.wait(TIMEOUT)
        me = threading.get_ident()
        is_there = where == "everywhere" or (me == caller[0]) == (where == "the caller")
        if is_there and (where == "everywhere" or chosen.setdefault(0, me) == me):
            failing.set()  # the others end after this one has begun to fail
            raise error("planted")
        assert failing.wait(TIMEOUT)
        for _ in range(10_000):
            pass
        ended.append(None)

    def run() -> None:
        caller.append(threading.get_ident())
        try:
            workers.run([job] * 3)
        finally:
            ended.append("all")

    with pytest.raises(error, match="planted"):
        in_threads(run)
    assert ended == [*([] if where == "everywhere" else [None, None]), "all"]
    # The threads still work.
    in_threads(lambda: workers.run([partial(threading.Barrier(3).wait, TIMEOUT)] * 3))
    workers.close()


@pytest.mark.parametrize(
    ("costs", "num_threads", "sizes"),
    [
        ([5] * 6, 3, [2, 2, 2]),
        ([5] * 5, 2, [2, 3]),
        ([100, *[1] * 100], 2, [1, 100]),
        ([*[1] * 100, 100], 2, [100, 1]),
        ([1, 1, 100, 1, 1], 3, [2, 1, 2]),
        ([100, 1, 1], 3, [1, 2]),  # every thread gets work
        ([7], 3, [1]),
        ([1, 1], 8, [1, 1]),
    ],
)
def test_blocks_are_distributed_by_cost(costs, num_threads, sizes):
    blocks = list(range(len(costs)))
    parts = Workers(num_threads).shares(blocks, SPLIT_SIZE, costs)
    assert [len(part) for part in parts] == sizes
    assert [block for part in parts for block in part] == blocks


@pytest.mark.parametrize(
    ("size", "num_parts"),
    [(SPLIT_SIZE - 1, 1), (SPLIT_SIZE, 3), (5 * BLOCK_SIZE, 5), (100 * BLOCK_SIZE, 12)],
)
def test_large_work_is_cut_into_several_parts_per_thread(size, num_parts):
    parts = Workers(3).shares(range(100), size)
    assert len(parts) == num_parts
    assert [block for part in parts for block in part] == list(range(100))


@pytest.mark.parametrize("num_started", [0, 1])
def test_where_threads_cannot_start_the_caller_does_each_job_once(monkeypatch, num_started):
    real, workers, times = sim_workers.start_new_thread, Workers(4), [0] * 40
    started: list[int] = []

    def start(*arguments):
        if len(started) == num_started:
            raise RuntimeError("can't start new thread")
        started.append(real(*arguments))
        return started[-1]

    def job(place: int) -> None:
        times[place] += 1

    jobs = [partial(job, place) for place in range(len(times))]
    with monkeypatch.context() as patch:
        patch.setattr(sim_workers, "start_new_thread", start)
        workers.run(jobs)
        assert times == [1] * len(jobs)
    workers.run(jobs)  # starts the missing threads, which do the remaining work
    in_threads(lambda: workers.run([partial(threading.Barrier(4).wait, TIMEOUT)] * 4))
    assert times == [2] * len(jobs)
    workers.close()


def test_an_interruption_is_raised_once_no_job_runs():
    """Also if several come: otherwise jobs would write memory that has a new owner."""
    go, begun, ended, pressed = threading.Event(), threading.Event(), [], []

    class InterruptedQueue(SimpleQueue):
        def get(self, *arguments):
            if len(pressed) < 3:
                pressed.append(True)
                raise KeyboardInterrupt
            go.set()
            return super().get(*arguments)

    def job() -> None:
        begun.set()
        assert go.wait(TIMEOUT)
        ended.append(True)

    batch = sim_workers._Batch([job, lambda: None])
    batch._news = InterruptedQueue()
    helper = threading.Thread(target=batch.help)
    helper.start()
    assert begun.wait(TIMEOUT)
    with pytest.raises(KeyboardInterrupt):
        batch.drop()
    assert ended == [True]
    helper.join(TIMEOUT)


def test_an_abandoned_batch_keeps_no_memory():
    """A busy thread takes up a batch much later."""
    workers, go = Workers(2), threading.Event()
    array = np.zeros(3)
    kept = weakref.ref(array)

    def busy() -> None:
        if threading.current_thread() is not caller:
            begun.set()
            assert go.wait(TIMEOUT)

    caller, begun = threading.current_thread(), threading.Event()
    blocked = threading.Thread(target=workers.run, args=([busy, lambda: begun.wait(TIMEOUT)],))
    blocked.start()
    assert begun.wait(TIMEOUT)
    workers.run([array.sum, array.sum])
    del array
    assert kept() is None
    go.set()
    blocked.join(TIMEOUT)
    workers.close()


def test_a_failure_keeps_no_memory():
    workers, all_begun = Workers(2), threading.Barrier(2)
    array = np.zeros(3)
    kept = weakref.ref(array)

    def fails(array: np.ndarray) -> None:
        all_begun.wait(TIMEOUT)
        raise ZeroDivisionError("planted")

    gc.disable()  # it would free the block later
    try:
        with pytest.raises(ZeroDivisionError):
            workers.run([partial(fails, array), partial(all_begun.wait, TIMEOUT)])
        del array
        assert kept() is None
    finally:
        gc.enable()
    workers.close()


class ThreadLocalObject:
    """An object in thread-local data, which exists as long as its thread."""


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_threads_end_with_their_mesh(end):
    local, ended = threading.local(), SimpleQueue()
    workers = Workers(3)
    assert not workers._threads  # threads are started when needed
    barrier = threading.Barrier(3)

    def job() -> None:
        local.here = ThreadLocalObject()
        weakref.finalize(local.here, ended.put, threading.get_ident())
        barrier.wait(TIMEOUT)

    in_threads(lambda: workers.run([job] * 3))
    threads = set(workers._threads)
    assert len(threads) == 2
    if end == "closed":
        workers.close()
        times: list[int] = []
        workers.run([lambda: times.append(threading.get_ident())] * 3)
        assert times == [threading.get_ident()] * 3  # in this thread alone
        assert len(workers._threads) == 2
    else:
        del workers
    assert threads <= {ended.get(timeout=TIMEOUT) for _ in range(3)}


@pytest.mark.parametrize("out, terms, streams", [
    ("float32", ["float32"], True),
    ("float64", ["float64"], True),
    ("float32", ["float16"], False),  # needs a cast, so scratch memory
    ("bfloat16", ["bfloat16"], False),  # is added in another type
    ("float32", ["float32", "float32"], False),  # the sum is reused from the cache
])  # fmt: skip
def test_kernels_without_scratch_are_cut_into_fewer_blocks(out, terms, streams):
    """As few as keep all threads busy: a block costs as much as thousands of additions."""
    size = 16 * BLOCK_SIZE
    lengths = []

    def reference(rows, num_inputs: int) -> None:
        lengths.extend(row[0].size for row in rows)

    with opened(2) as device:
        row = [device.empty((size,), dtype) for dtype in (out, *terms)]
        device.launch(
            replace(ADD_N, reference=reference), (out, terms[0], len(terms)), [row], (len(terms),)
        )
    assert lengths == [2 * BLOCK_SIZE] * 8 if streams else lengths == [BLOCK_SIZE] * 16
