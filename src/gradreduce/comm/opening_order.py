"""Finds meshes over PyTorch groups that two processes open in different orders.

Each would wait for the other until its timeout. So a process notes in the store of the default
group which groups it opens meshes over, and looks what the processes that it waits for have noted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from gradreduce.errors import CollectiveError

# For how long another process must wait in another group: one that has just gone on may still have
# its note in the store.
_SURE_SECONDS = 1.0
# Rank in the default group -> the groups over which threads of this process open meshes.
_opening: dict[int, list[str]] = defaultdict(list)
_lock = Lock()


class Opening:
    """Context manager: this process opens a mesh over a group.

    Does nothing if there is no default group.

    Args:
        group: a process group of PyTorch.
        global_ranks: the ranks of its processes in the default group.
        rank: the rank of this process in the group.
    """

    def __init__(self, group: Any, global_ranks: Sequence[int], rank: int) -> None:
        world = dist.group.WORLD
        self._store = None if world is None else world.get_group_store()
        self._own = global_ranks[rank]
        self._others = [each for each in global_ranks if each != self._own]
        ranks = " ".join(map(str, global_ranks))
        self._name = "" if world is None else f"{group.group_name!r} of processes {ranks}"
        self._since: dict[tuple[int, str], float] = {}

    def __enter__(self) -> Self:
        with _lock:
            _opening[self._own].append(self._name)
            self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _opening[self._own].remove(self._name)
            if error is None:  # else the other process must find the note, too
                self._write()

    def _write(self) -> None:
        if self._store is not None:
            self._store.set(_key(self._own), "\n".join(_opening[self._own]))

    def check(self) -> None:
        """Checks that no other process waits for this one in a group that it does not open.

        Raises:
            CollectiveError: one does.
        """
        for other in self._others if self._store is not None else ():
            for name in self._wrong(other):
                now = time.monotonic()
                if now - self._since.setdefault((other, name), now) >= _SURE_SECONDS:
                    raise CollectiveError(
                        f"the processes open meshes in different orders: process {self._own} over "
                        f"the group {self._name}, process {other} over the group {name}"
                    )

    def _wrong(self, other: int) -> list[str]:
        """Returns the groups in which another process waits for this one, which does not come."""
        if self._store is None or not self._store.check([_key(other)]):
            return []
        noted = self._store.get(_key(other)).decode().splitlines()
        if self._name in noted:
            return []
        return [
            name
            for name in noted
            if name not in _opening[self._own]
            and str(self._own) in name.rpartition(" of processes ")[2].split()
        ]


def _key(rank: int) -> str:
    return f"gradreduce/opens/{rank}"
