"""Runs functions in threads, with a deadline."""

import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Runs all functions at once and returns their results; none may hang or raise.

    A lock that this thread still holds blocks them.
    """
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    return [results[place] for place in range(len(works))]
