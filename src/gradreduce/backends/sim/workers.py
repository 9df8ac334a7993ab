"""The thread pool that runs launches of simulated devices.

In the main thread, a signal handler may run and may raise between any two steps of ``Workers.run``.
Shared state is therefore changed by single C calls (``SimpleQueue``, ``dict.setdefault``,
``list.append``), which a handler cannot interrupt.
"""

from __future__ import annotations

from _thread import start_new_thread
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise, repeat
from queue import SimpleQueue
from typing import Any
from weakref import finalize

# Passing work to another thread costs about 50 us: with fewer elements one thread is faster.
SPLIT_SIZE = 1 << 18
# Elements in a block of a NumPy reference. Small blocks keep scratch memory in the cache and can be
# shared among threads. Large blocks make threads wait less for the interpreter lock. Adding 8 terms
# of 8M float32 on two cores, in turns, 2026-11: 2^14 23 ms, 2^16 14.0 ms, 2^17 12.2 ms, 2^18 11.3
# ms, 2^20 11.5 ms; 2^17 beats 2^16 at smaller sizes too. SGD, momentum and Adam over 16M float32 in
# 50 variables, best of 12 in turns on two busy cores, 2026-11: 2^15 10.3, 15.5, 34.2 ms, 2^16 9.6,
# 14.3, 31.4, 2^17 7.8, 12.7, 29.8; NumPy's own SGD in blocks of 2^15 8.7.
BLOCK_SIZE = 1 << 17
# Jobs of a large launch for each thread. With several, a thread that starts late or runs on a slow
# core does fewer. 32 MB arrays on two cores, in turns, 2026-11, ms with 1, 2, 4, 8 and 16 jobs:
# compiled adam 4.3, 3.9, 3.5, 3.6, 3.6; add_n of two 3.6, 2.5, 2.3, 2.2, 2.4; in NumPy 3.0, 2.1,
# 2.0, 2.0, 2.0.
JOBS_PER_THREAD = 4


class _Batch:
    """The jobs of one ``Workers.run``; each is run by one thread.

    The caller runs all jobs that no other thread has claimed, so it does not depend on other
    threads.
    """

    __slots__ = ("_claims", "_ended", "_failures", "_jobs", "_news")

    def __init__(self, jobs: Sequence[Callable[[], None]]) -> None:
        self._jobs = jobs
        self._claims: dict[int, object] = {}  # job index -> who runs it (self: the caller)
        self._ended: list[int] = []  # indices of the jobs that another thread has run
        self._news: SimpleQueue[None] = SimpleQueue()  # one entry for each index in _ended
        self._failures: list[BaseException] = []

    def help(self) -> None:
        """Runs remaining jobs in a worker thread."""
        me = object()
        for index, job in enumerate(self._jobs):
            if self._claims.setdefault(index, me) is me:
                try:
                    job()
                except BaseException as error:  # the caller raises it
                    self._failures.append(error)
                self._ended.append(index)
                self._news.put(None)

    def run(self) -> None:
        """Runs remaining jobs in the caller's thread, waits, and raises a failure."""
        for index in reversed(range(len(self._jobs))):
            if self._claims.setdefault(index, self) is self:
                self._jobs[index]()
        self._wait()
        if self._failures:
            try:
                raise self._failures[0]
            finally:
                self._failures.clear()  # else the error's frames keep this batch alive

    def drop(self) -> None:
        """Cancels remaining jobs; waits for running ones, then raises an interruption."""
        interruption: BaseException | None = None
        while True:
            try:
                for index in range(len(self._jobs)):
                    self._claims.setdefault(index, self)
                self._wait()
                break
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def _wait(self) -> None:
        """Waits for the jobs that other threads have started; no more are started."""
        others = len([owner for owner in self._claims.values() if owner is not self])
        while len(self._ended) < others:  # an entry of _news is still to come
            self._news.get()
        self._jobs = ()  # a late thread would keep the jobs' memory alive


def _serve(inbox: SimpleQueue[_Batch | None]) -> None:
    """Runs a worker thread, which does not keep ``Workers`` alive."""
    while (batch := inbox.get()) is not None:
        batch.help()


def _end(inbox: SimpleQueue[_Batch | None], threads: list[int]) -> None:
    for _ in threads:
        inbox.put(None)


class Workers:
    """The host threads that run launches of all simulated devices of a mesh.

    The process does not wait for them when it ends.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._inbox: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads: list[int] = []  # started at the first job
        self._end = finalize(self, _end, self._inbox, self._threads)
        self._end.atexit = False

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Runs all jobs, some in the calling thread; raises a failure after all have ended.

        When it raises, jobs that no thread had begun do not run.
        """
        if len(jobs) == 1:
            jobs[0]()
            return
        batch = _Batch(jobs)
        try:
            if len(self._threads) < self.num_threads - 1:
                self._start()
            for _ in range(min(len(jobs) - 1, len(self._threads))):
                self._inbox.put(batch)
            batch.run()
        except BaseException:
            batch.drop()  # the caller may free memory that a running job writes
            raise

    def _start(self) -> None:
        """Starts the missing threads, or as many as the system allows.

        Two simultaneous calls may start some more, which wait for work like the others.
        """
        missing = self.num_threads - 1 - len(self._threads) if self._end.alive else 0
        arguments = repeat(_serve, missing), repeat((self._inbox,), missing)
        # One C call starts and lists a thread. Thread.start waits in Python code, where Ctrl-C
        # leaves a lock held.
        with suppress(RuntimeError):  # "can't start new thread": the caller runs the jobs
            self._threads.extend(map(start_new_thread, *arguments))

    def close(self) -> None:
        """Ends the threads; does not wait for them."""
        self._end()

    def block_size(self, size: int, *, streams: bool) -> int:
        """Returns the block size for a NumPy reference's row of ``size`` elements.

        A reference that streams needs no cache for scratch memory: it gets four blocks for each
        thread, which keeps all threads busy. Adding 64 MB to a sum, in turns with NumPy's ``+=`` on
        two cores, 2026-11: 1.03 to 1.10 times NumPy's time in blocks of 2^17 elements, 0.91 to 0.96
        in blocks of 2^19 or more.
        """
        return max(BLOCK_SIZE, -(-size // (4 * self.num_threads))) if streams else BLOCK_SIZE

    def shares(
        self, blocks: Sequence[Any], size: int, costs: Sequence[int] | None = None
    ) -> list[Any]:
        """Splits ``blocks`` into contiguous parts; small work stays whole.

        Makes one part per thread, or up to ``JOBS_PER_THREAD`` of at least ``BLOCK_SIZE`` elements.

        Args:
            blocks: the blocks of work, in order.
            size: the number of elements in all blocks.
            costs: the cost of each block, as a number of elements. None: all are equal.
        """
        if self.num_threads == 1 or len(blocks) == 1 or size < SPLIT_SIZE:
            return [blocks]
        most = min(JOBS_PER_THREAD * self.num_threads, size // BLOCK_SIZE)
        num_parts = min(max(self.num_threads, most), len(blocks))
        if costs is None:
            cuts = [len(blocks) * part // num_parts for part in range(num_parts)]
        else:
            ends = list(accumulate(costs))
            middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
            cuts = [bisect_left(middles, ends[-1] * part / num_parts) for part in range(num_parts)]
        parts = [blocks[start:end] for start, end in pairwise([*cuts, len(blocks)])]
        return [part for part in parts if len(part)]
