"""Runs the trainings of a study in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import TypeVar

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def outcomes_of(
    run: Callable[[Case], Outcome], cases: Sequence[Case], num_processes: int
) -> Iterator[tuple[Case, Outcome]]:
    """Yields cases and their outcomes as they are ready; each case runs in one process.

    Args:
        run: a function of a module.
        cases: can be pickled, and are all different.
        num_processes: 1 runs all in this process.
    """
    if num_processes == 1:
        yield from ((case, run(case)) for case in cases)
        return
    before = active_children()
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        futures = {pool.submit(run, case): case for case in cases}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # Ctrl-C too: do not wait for running cases
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - set(before):
                process.terminate()
            raise
