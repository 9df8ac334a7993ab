"""What holds the memory of blocks until every queue that used it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradreduce.errors import BackendUnavailableError

from .buffer import PER_THREAD, Block, Dead, Stream, User, handle_of

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Parking"]

# Blocks whose size nobody asks for again must not pile up.
MAX_LED = 32
_Shown = tuple[Dead, list[tuple["Device", User]]]


class Parking:
    """The dead blocks of one device.

    Takes no lock: blocks die anywhere, in any thread, and what is called then is C. A finalizer of
    ours could be cut short by Ctrl-C, and the memory would be free while work still uses it.

    Attributes:
        held: all whose memory is not free, those of living blocks too.
        dead: those of blocks that have died since the last ``drain``.
    """

    def __init__(self) -> None:
        self.held: set[Dead] = set()
        self.dead: deque[Dead] = deque()
        self._parked: deque[tuple[Dead, list[Any]]] = deque()
        self._led: deque[Dead] = deque()

    def watch(self, block: Block) -> Block:
        """Holds the memory of a block, also when it has died, until it is free."""
        dead = Dead(block, self.dead.append)
        dead.raw, dead.nbytes = block.raw, block.nbytes
        dead.touched, dead.owned = block.touched, block.owned
        self.held.add(dead)
        block.watch = dead
        return block

    def free(self, dead: Dead, home: Device) -> None:
        """Gives memory back to the pool, or to the caller."""
        if dead.owned:
            home._recycle(dead.raw, dead.nbytes)
        self.held.discard(dead)

    def take(self, nbytes: int) -> Dead | None:
        """A dead block of this size whose users its home queue trails, for its next owner.

        The pool could not have it: its order is that of the home queue, which knows nothing yet.
        """
        with suppress(IndexError):
            for _ in range(len(self._led)):
                dead = self._led.popleft()
                if dead.nbytes == nbytes:
                    return dead
                self._led.append(dead)
        return None

    def drain(self, home: Device) -> None:
        """Gives back to the pool of ``home`` what nobody uses any more.

        What another queue has used waits, parked, until that queue has passed the place where it
        is now: only then may the compute queue, in whose order the pool hands memory out, write it.
        So does what a caller's stream was shown, whose own order nobody else knows.
        """
        try:
            if len(self._led) > MAX_LED:
                home._catch_up()
            for _ in range(len(self._led)):
                self._settle(self._led.popleft(), home)
            for _ in range(len(self.dead)):  # one that must wait comes back
                self._settle(self.dead.popleft(), home)
            for _ in range(len(self._parked)):
                dead, marks = self._parked.popleft()
                if all(home._passed(mark) for mark in marks):
                    self.free(dead, home)
                else:
                    self._parked.append((dead, marks))
        except IndexError:  # another thread was faster
            pass

    def join(self, home: Device, wait: Callable[[Any], None]) -> None:
        """Gives back to the pool all that is parked: its home queue waits for the marks instead.

        A caller's memory stays parked: its next user is in nobody's order that we know.
        """
        with suppress(IndexError):
            for _ in range(len(self._parked)):
                dead, marks = self._parked.popleft()
                if dead.owned:
                    for mark in marks:
                        wait(mark)
                    self.free(dead, home)
                else:
                    self._parked.append((dead, marks))

    def shown_to(self, stream: Stream) -> list[_Shown]:
        """What has died by now and was shown to a caller's stream; for ``passed``."""
        handle = handle_of(stream)
        # PER_THREAD names this thread's stream; those of other threads may still use the memory.
        if not self.dead or handle == PER_THREAD:
            return []
        found = []
        for dead in self.dead.copy():
            users = [each for each in list(dead.touched) if _is(each[1], handle)]
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

    def _settle(self, dead: Dead, home: Device) -> None:
        if dead.owned and not dead.touched:  # only its home queue knew it
            self.free(dead, home)
            return
        # Or that comes behind all who did.
        users = list(dead.touched)
        ours = dead.owned and all(isinstance(queue, str) for _, queue in users)
        if ours and all(home._comes_behind(*user) for user in users):
            if users and home._is_led:
                self._led.append(dead)
            else:
                self.free(dead, home)
        else:
            self._park(dead, users if dead.owned else [*users, (home, "compute")], home)

    def _park(self, dead: Dead, users: list[tuple[Device, User]], home: Device) -> None:
        """What cannot be marked is held for ever: nobody ever says that it is done."""
        if not any(device.physical in home.fabric.lost for device, _ in users):
            with suppress(BackendUnavailableError):  # lost meanwhile
                marks = [device._mark(queue) for device, queue in users]
                if any(mark is None for mark in marks):
                    self.dead.append(dead)  # until a caller's capture has ended
                else:
                    self._parked.append((dead, marks))


def _is(user: User, handle: int) -> bool:
    """Whether a user of memory is the caller's stream with this handle."""
    return not isinstance(user, str) and handle_of(user) == handle
