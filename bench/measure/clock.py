"""Clocks that measure calls in turns with others and with a copy.

On a GPU events measure the time of calls that are queued back to back. Copies queued before them
keep the GPU busy until the host has queued all calls. Otherwise the clock would measure the host,
where it needs longer to queue the work than the GPU to do it.
"""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .operands import fill, normals

Call = Callable[[], Any]
Calls = Mapping[str, Call]  # by the name of the candidate
Now = Callable[[], float]  # returns a time in seconds
OfRounds = Callable[[Sequence[float]], float]
Turn = Callable[[], Mapping[str, float]]  # runs once; returns seconds by candidate

HOST_ROUNDS, GPU_ROUNDS, QUICK_ROUNDS = 25, 5, 2
WARM_UPS = 2
# Pause before each call, until no thread of the last one spins: PyTorch's threads spin for 9 ms (on
# a busy machine 15 ms) and keep their core. After 5 ms Adam's ratio was 1.4 instead of 0.95.
PAUSE_SECONDS = 0.02

LAUNCHES, QUICK_LAUNCHES = 20, 2  # of one round, back to back
FILL_BYTES, QUICK_FILL_BYTES = 2**30, 2**12  # of a copy that keeps the GPU busy
FILL_SECONDS = 0.3  # that the GPU is kept busy, at most
MARGIN = 1.5  # times the host's own time


@dataclass(frozen=True)
class Took:
    seconds: float  # until its work was done, on GPU or CPU
    host_seconds: float  # until it returned
    host_bound: bool = False  # the GPU has waited for the host: ``seconds`` is not the GPU's time


@dataclass(frozen=True)
class After:
    """A call with a preparation before each; the host clock excludes the preparation."""

    before: Call
    call: Call

    def __call__(self) -> Any:
        self.before()
        return self.call()

    def seconds(self, now: Now) -> float:
        self.before()
        start = now()
        self.call()
        return now() - start


def in_turns(
    turns: Sequence[Turn], rounds: int, *, pause: float = 0.0, warm_ups: int = WARM_UPS
) -> dict[str, list[float]]:
    """Returns the seconds of all candidates, in turns; the warm-up before does not count.

    Each turn measures one candidate, or several of one call, after a pause in seconds.
    """
    taken: dict[str, list[float]] = {}
    for number in range(warm_ups + rounds):
        for turn in turns:
            time.sleep(pause)
            found = turn()
            for name in found if number >= warm_ups else ():
                taken.setdefault(name, []).append(found[name])
    return taken


def timed(name: str, call: Call, number: int = 1, loops: int = 1, now: Now | None = None) -> Turn:
    """Returns what measures a loop over so many calls: the best of several loops."""

    def seconds() -> float:
        clock = now or time.perf_counter
        if isinstance(call, After):
            return sum([call.seconds(clock) for _ in range(number)])
        start = clock()
        for _ in range(number):
            call()
        return clock() - start

    return lambda: {name: min([seconds() for _ in range(loops)])}


def host_seconds(
    calls: Calls, number: int, *, quick: bool, rounds: int = HOST_ROUNDS, loops: int = 1
) -> dict[str, float]:
    """Returns the host time of a call of each candidate: the best of several loops.

    The best, not the median, because other work on the machine doubles a few microseconds.
    """
    turns = [timed(name, call, number, loops) for name, call in calls.items()]
    best = each(min, _turns_of_host(turns, rounds, quick=quick))
    return {name: seconds / number for name, seconds in best.items()}


def _turns_of_host(turns: Sequence[Turn], rounds: int, *, quick: bool) -> dict[str, list[float]]:
    """Returns the seconds of candidates that may use PyTorch."""
    return in_turns(turns, QUICK_ROUNDS) if quick else in_turns(turns, rounds, pause=PAUSE_SECONDS)


def each(of_rounds: OfRounds, taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns one time for each candidate, such as the median of its rounds."""
    return {name: of_rounds(times) for name, times in taken.items()}


def took_of(seconds: Mapping[str, float]) -> dict[str, Took]:
    """Returns the times of calls that are done when they return."""
    return {name: Took(taken, taken) for name, taken in seconds.items()}


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Context manager: no garbage collection makes one call longer than another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class HostClock:
    """Clock for calls that are done when they return."""

    quick: bool  # few rounds
    copy_threads: int | None = None  # that copy; default one for each core
    # Of a candidate's rounds. Use the best (``min``) on a busy machine, where a median depends on
    # the other work.
    of_rounds: OfRounds = statistics.median
    rounds: int = HOST_ROUNDS

    def measure(self, calls: Calls, nbytes: int) -> dict[str, Took]:
        """Measures every candidate, and a ``copy`` that moves as many bytes, in turns."""
        candidates: dict[str, Call] = {**calls, "copy": HostCopy(nbytes, self.copy_threads)}
        turns = [timed(name, call) for name, call in candidates.items()]
        taken = _turns_of_host(turns, self.rounds, quick=self.quick)
        return took_of(each(self.of_rounds, taken))


class HostCopy:
    """A multi-threaded copy in host memory; half of ``nbytes`` is read."""

    def __init__(self, nbytes: int, threads: int | None = None) -> None:
        threads = threads or len(os.sched_getaffinity(0))
        # Both are written: memory that never was is all one page.
        source, target = (normals(max(1, nbytes // 8), seed=seed) for seed in range(2))
        parts = zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
        self._parts = list(parts)
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        list(self._pool.map(np.copyto, *zip(*self._parts, strict=True)))


class GpuClock:
    """Clock for work on the compute stream of a GPU.

    During the calls it is CuPy's current stream. A candidate of another library must use it too.
    """

    def __init__(self, device: Any, *, quick: bool) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = device
        self._rounds = QUICK_ROUNDS if quick else GPU_ROUNDS
        self._launches = QUICK_LAUNCHES if quick else LAUNCHES
        nbytes = QUICK_FILL_BYTES if quick else FILL_BYTES
        self._fill = self._copy_of(2 * nbytes)
        self._most_fills = 1
        self._fill_seconds = max(1e-6, self._batch(self._fill, self._launches, 1).seconds)
        self._most_fills = math.ceil(FILL_SECONDS / self._fill_seconds) if not quick else 2

    def measure(self, calls: Calls, nbytes: int) -> dict[str, Took]:
        """Measures in turns; see ``HostClock``."""
        candidates = {**calls, "copy": self._copy_of(nbytes)}
        self._cuda.Device(self._device.physical).synchronize()  # operands come on other streams
        plans = {name: self._plan(call) for name, call in candidates.items()}
        taken: dict[str, list[Took]] = {name: [] for name in candidates}
        for _ in range(self._rounds):
            for name, call in candidates.items():
                number, fills = plans[name]
                took = self._batch(call, number, fills)
                taken[name].append(took)
                if took.host_bound:
                    plans[name] = (number, min(2 * fills, self._most_fills))
        return {name: _median(batches) for name, batches in taken.items()}

    def _copy_of(self, nbytes: int) -> Call:
        """Returns a copy within the device; half of ``nbytes`` is read."""
        shape = (max(1, nbytes // 8),)
        source, target = (fill(self._device.empty(shape, "float32"), seed) for seed in range(2))
        return partial(self._device.copy, target, source)

    def _plan(self, call: Call) -> tuple[int, int]:
        """Returns the number of calls back to back, and of copies before them."""
        for _ in range(WARM_UPS):
            self._batch(call, 1, 0)
        host = self._batch(call, 1, 1).host_seconds
        number = max(1, min(self._launches, int(FILL_SECONDS / MARGIN / host)))
        fills = math.ceil(MARGIN * host * number / self._fill_seconds) + 1
        return number, min(fills, self._most_fills)

    def _batch(self, call: Call, number: int, fills: int) -> Took:
        """Measures one of ``number`` calls back to back."""
        stream = self._device._stream("compute")
        with self._cuda.Device(self._device.physical), stream:
            begin, end = self._cuda.Event(), self._cuda.Event()
            for _ in range(fills):
                self._fill()
            begin.record(stream)
            start = time.perf_counter()
            for _ in range(number):
                call()
            host = time.perf_counter() - start
            waited = bool(begin.done)  # the copies were over before all was queued
            end.record(stream)
            end.synchronize()
        # What other libraries were called for.
        self._device.mesh_state.order.add_work(self._device.compute)
        seconds = self._cuda.get_elapsed_time(begin, end) / 1e3
        return Took(seconds / number, host / number, waited)


def _median(batches: Sequence[Took]) -> Took:
    """Returns the measurements during which the GPU never waited, if any."""
    chosen = [took for took in batches if not took.host_bound] or batches
    return Took(
        statistics.median(took.seconds for took in chosen),
        statistics.median(took.host_seconds for took in chosen),
        chosen[0].host_bound,
    )
