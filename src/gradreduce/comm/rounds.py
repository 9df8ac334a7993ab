"""Rounds of reductions that an error ends in some processes: whether all have dropped the round.

A process that drops a round posts a notice. A process that waits for it in the same round answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradreduce.errors import CollectiveError

if TYPE_CHECKING:
    from .process_group import ProcessGroup

_LOOK_SECONDS = 0.05


class Rounds:
    """The rounds of one process, by the number of their owner, such as a DataParallel.

    All processes have the same owners, with the same numbers.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # The last round that this process has computed, and the last that all have dropped.
        self._computed: list[int] = []
        self._dropped: list[int] = []

    def add_owner(self) -> int:
        """Returns the number of a new owner."""
        self._computed.append(-1)
        self._dropped.append(-1)
        return len(self._computed) - 1

    def note_computed(self, owner: int, number: int) -> None:
        """Notes that this process has computed its part of a round, which it does not drop."""
        self._computed[owner] = number

    def drop(self, owner: int, number: int, launched: int) -> int | None:
        """Drops a round; waits until each other process has dropped it too, or waits in it.

        Args:
            owner: see ``add_owner``.
            number: the number of the round.
            launched: how many reductions of the round this process has started.

        Returns:
            The most reductions that a process has started, if all have dropped the round. None if
            others wait, but no process that has dropped the round has started any: this process may
            begin the round again.

        Raises:
            CollectiveError: other processes wait for a round that cannot be completed, have gone,
                or have not come in time.
        """
        group = self._group
        group.post(_key(owner, number), f"{number} {launched}")
        most, end, waits = launched, time.monotonic() + group.timeout, False
        for rank in group.others:
            found = self._await(rank, owner, number, end)
            waits = waits or found < 0
            most = max(most, found)
        if waits and most > 0:
            raise CollectiveError("other processes wait in the same step")
        if waits:
            return None
        self._dropped[owner] = number
        return most

    def _await(self, rank: int, owner: int, number: int, end: float) -> int:
        """Waits until another process has dropped the round, or waits in it; see ``drop``."""
        group = self._group
        while True:
            # Checked before the notices are read: a process may post one and then leave.
            reason = group.departure_reason(rank, ahead=1)
            found = self._read_launched(rank, owner, number)
            if found is not None:
                return found
            if reason is not None or time.monotonic() >= end:
                late = f" within {group.timeout:.3g} s, but is not known to have ended"
                why = late if reason is None else f": {reason}"
                raise CollectiveError(
                    f"process {rank} of {group.size} has not come to this step{why}"
                )
            time.sleep(_LOOK_SECONDS / 10)

    def _read_launched(self, rank: int, owner: int, number: int) -> int | None:
        """Like ``_read``; -1: the process waits in the round."""
        if (launched := self._read(rank, owner, number)) is not None:
            return launched
        return -1 if self._group.read(rank, f"waits/{owner}", 0.0) == str(number) else None

    def _read(self, rank: int, owner: int, number: int) -> int | None:
        """Returns how many reductions a process has started that has dropped the round."""
        text = self._group.read(rank, _key(owner, number), 0.0) or "-1 0"
        found, launched = map(int, text.split())
        return launched if found == number else None

    def answer(self, rank: int) -> None:
        """Tells a process that this one waits in a round, if the other one has dropped it."""
        for owner, computed in enumerate(self._computed):
            # The process may have dropped the round before, after its last reduction had started.
            for number in range(max(0, computed - 1, self._dropped[owner] + 1), computed + 1):
                if self._read(rank, owner, number) is not None:
                    self._group.post(f"waits/{owner}", str(number))


def _key(owner: int, number: int) -> str:
    """Returns the key for a notice; a process is at most one round behind another."""
    return f"dropped/{owner}/{number % 2}"
