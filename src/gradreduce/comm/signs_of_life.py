"""Finds processes that have ended without a notice, by asking all for a sign of life.

A process that is killed inside a collective of the GPUs posts nothing, and those that wait for it
see only that the collective does not end. A process that is late asks; the watchdogs of those that
wait answer.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gradreduce.errors import CollectiveError

if TYPE_CHECKING:
    from .process_group import ProcessGroup

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 5e-3


class SignsOfLife:
    """The questions and answers of one process.

    Args:
        group: the processes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._answered: dict[int, str] = {}  # the last question of each process

    def answer(self) -> None:
        """Answers the questions of other processes."""
        group = self._group
        for rank in group.others:
            question = group.read(rank, "asks", 0.0)
            if question is not None and self._answered.get(rank) != question:
                self._answered[rank] = question
                with suppress(CollectiveError):  # the store is gone
                    group.post(f"answers/{rank}", question)

    def silent(self, number: int) -> list[int]:
        """Returns the processes that do not answer within a second.

        Args:
            number: the number of this process's last call; one that makes a later call is alive.
        """
        group = self._group
        silent = group.others
        with suppress(CollectiveError):  # the store is gone: nobody can answer
            group.post("asks", str(number))
            end = time.monotonic() + _ANSWER_SECONDS
            while silent and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
                self.answer()
                silent = [rank for rank in silent if not self._is_alive(rank, number)]
        return silent

    def _is_alive(self, rank: int, number: int) -> bool:
        group = self._group
        answered = group.read(rank, f"answers/{group.rank}", 0.0) == str(number)
        return answered or group.departure_reason(rank) is not None or group.is_ahead(rank, number)
