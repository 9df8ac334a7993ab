"""Where the memory of dead blocks waits until every queue that used it has passed; never frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .memory import Dead, User

if TYPE_CHECKING:
    from .base import Device

__all__ = ["Parking"]

_Shown = tuple[Dead, list[tuple["Device", User]]]


class Parking:
    """The dead blocks of one device.

    Takes no lock: blocks die anywhere, in any thread, and ``deque`` is atomic where it matters.

    Attributes:
        dead: memory of blocks that have died since the last ``drain``.
    """

    def __init__(self) -> None:
        self.dead: deque[Dead] = deque()
        self._parked: deque[tuple[Dead, list[Any]]] = deque()
        self._kept: list[Dead] = []

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.dead or self._parked)

    def drain(self, home: Device) -> None:
        """Gives back to the pool of ``home`` what nobody uses any more.

        What another queue has used waits, parked, until that queue has passed the place where it
        is now: only then may the compute queue, in whose order the pool hands memory out, write it.
        So does what a caller's stream was shown, whose own order nobody else knows.
        """
        used = []
        with suppress(IndexError):  # another thread was faster
            while self.dead:
                dead = self.dead.popleft()
                if dead.owned and not dead.touched:  # only its home queue knew it
                    home._recycle(dead.raw, dead.nbytes)
                else:
                    used.append(dead)
        if used:
            self._park(used, home)
        with suppress(IndexError):
            for _ in range(len(self._parked)):
                dead, marks = self._parked.popleft()
                if all(home._passed(mark) for mark in marks):
                    if dead.owned:
                        home._recycle(dead.raw, dead.nbytes)
                else:
                    self._parked.append((dead, marks))

    def shown_to(self, stream: int) -> list[_Shown]:
        """What has died by now and was shown to a caller's stream; for ``passed``."""
        if not self.dead:
            return []
        found = []
        for dead in self.dead.copy():
            users = [each for each in list(dead.touched) if _is(each[1], stream)]
            if users:
                found.append((dead, users))
        return found

    def passed(self, shown: Iterable[_Shown]) -> None:
        """The compute queue has come behind that stream: it is no user any more.

        So in a training loop, where a call brings arrays of the stream that had the last results,
        their memory is at hand at once, however far the host is ahead.
        """
        for dead, users in shown:
            dead.touched.difference_update(users)

    def _park(self, used: list[Dead], home: Device) -> None:
        """One mark of each queue serves all that died before it."""
        marks: dict[tuple[Device, User], Any] = {}
        while used:
            dead = used[-1]
            users = list(dead.touched) if dead.owned else [*dead.touched, (home, "compute")]
            try:
                alive = not any(device.physical in home.fabric.lost for device, _ in users)
                missing = [user for user in users if alive and user not in marks]
                marks.update((user, user[0]._mark(user[1])) for user in missing)
            except Exception:  # such as of a stream that its owner has destroyed
                alive = False
            if alive:
                self._parked.append((dead, [marks[user] for user in users]))
            else:
                self._kept.append(dead)  # nobody ever says that it is done
            used.pop()


def _is(user: User, stream: int) -> bool:
    """Whether a user of memory is the caller's stream with this handle."""
    return not isinstance(user, str) and bool(getattr(user, "ptr", user) == stream)
