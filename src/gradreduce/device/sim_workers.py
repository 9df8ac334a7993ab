"""The host threads that stand for the cores of simulated devices; never knows what the work is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["BLOCK_SIZE", "SPREAD_SIZE", "Workers"]

# Handing work to another thread costs about 50 us: below this many elements one thread is faster.
SPREAD_SIZE = 1 << 18
# Elements of a twin's block: few enough for its scratch to stay in the cache and for every launch
# that is spread over threads to be cut, enough for threads not to wait for each other's turn with
# the interpreter. 8-term add of 8M float32 on two cores, in turns, 2026-11: 2^14 23 ms, 2^16
# 14.0 ms, 2^17 12.2 ms, 2^18 11.3 ms, 2^20 11.5 ms; 2^17 is faster than 2^16 at smaller sizes too.
BLOCK_SIZE = 1 << 17


def _wait_for(futures: Sequence[Future[None]]) -> None:
    """Until all have ended; an interruption (Ctrl-C) is raised only then."""
    interruption: BaseException | None = None
    while True:
        try:
            wait(futures)
        except BaseException as error:
            interruption = error
        else:
            break
    if interruption is not None:
        raise interruption


class Workers:
    """The host threads that stand for the cores of all simulated devices of a mesh."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        # Starts no thread before the first job.
        self._pool = ThreadPoolExecutor(max(1, num_threads - 1), "gradreduce-sim")

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Runs all jobs, the last one in the calling thread; raises a failure once all ended."""
        if len(jobs) == 1:
            jobs[0]()
            return
        futures: list[Future[None]] = []
        try:
            for job in jobs[:-1]:
                try:
                    futures.append(self._pool.submit(job))
                except RuntimeError:  # the interpreter is ending, and no thread starts any more
                    job()
            jobs[-1]()
        finally:
            _wait_for(futures)  # one that still runs writes memory which the caller may give away
        for future in futures:
            future.result()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def block_size(self, size: int, *, streams: bool) -> int:
        """Elements of the blocks into which a twin's row of so many is cut.

        One that streams has nothing that the cache must hold: four blocks for each thread leave
        none of them without work for long. 64 MB into a sum, in turns with NumPy's ``+=`` on two
        cores, 2026-11: 1.03 to 1.10 times as long in blocks of 2^17 elements, 0.91 to 0.96 in
        those of 2^19 or more.
        """
        return max(BLOCK_SIZE, -(-size // (4 * self.num_threads))) if streams else BLOCK_SIZE

    def shares(
        self, blocks: Sequence[Any], size: int, costs: Sequence[int] | None = None
    ) -> list[Any]:
        """``blocks`` cut into contiguous parts, one for each thread at most; whole if small.

        Args:
            blocks: of work, in their order.
            size: elements in all of them.
            costs: of each block, in elements or what takes as long. None: all cost the same.
        """
        if self.num_threads == 1 or len(blocks) == 1 or size < SPREAD_SIZE:
            return [blocks]
        num_parts = min(self.num_threads, len(blocks))
        if costs is None:
            cuts = [len(blocks) * part // num_parts for part in range(num_parts)]
        else:
            ends = list(accumulate(costs))
            middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
            cuts = [bisect_left(middles, ends[-1] * part / num_parts) for part in range(num_parts)]
        parts = [blocks[start:end] for start, end in pairwise([*cuts, len(blocks)])]
        return [part for part in parts if len(part)]
