"""Holds freed memory until every queue that used it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from gradreduce.errors import BackendUnavailableError

from .buffer import LEGACY, PER_THREAD, Block, FreedBlock, Queue, Stream, User, handle_of

if TYPE_CHECKING:
    from .device import Device

_FreedUsers = tuple[FreedBlock, list[tuple["Device", User]]]


class DeferredFree:
    """Freed blocks of one device whose memory may still be in use.

    Takes no lock: blocks are freed anywhere, in any thread, and what is called then is C. A Python
    finalizer could be cut short by Ctrl-C, and the memory would be free while work still uses it.

    Attributes:
        held: all whose memory is not free, those of living blocks too.
        freed: those of blocks that were freed since the last ``drain``.
    """

    def __init__(self) -> None:
        self.held: set[FreedBlock] = set()
        self.freed: deque[FreedBlock] = deque()
        self._deferred: deque[tuple[FreedBlock, list[Any]]] = deque()

    def track(self, block: Block) -> Block:
        """Tracks a block, and holds its memory until it can be freed."""
        freed = FreedBlock(block, self.freed.append)
        freed.raw, freed.nbytes = block.raw, block.nbytes
        freed.touched = block.touched = set()
        freed.owned = block.owned
        self.held.add(freed)
        block.remains = freed
        return block

    def free(self, freed: FreedBlock, home: Device) -> None:
        """Frees a block: its memory returns to the pool, or to its owner."""
        if freed.owned:
            home._recycle(freed.raw, freed.nbytes)
        self.held.discard(freed)

    def drain(self, home: Device) -> None:
        """Returns to the pool of ``home`` the memory that no queue uses any more.

        What another queue has used is held until that queue has passed the place where it
        is now: only then may the compute queue, in whose order the pool hands memory out, write it.
        So is what a caller's stream was shown, whose own order nobody else knows.
        """
        try:
            for _ in range(len(self.freed)):  # one that must wait comes back
                self._free_or_defer(self.freed.popleft(), home)
            for _ in range(len(self._deferred)):
                freed, events = self._deferred.popleft()
                if all(event.done for event in events):
                    self.free(freed, home)
                else:
                    self._deferred.append((freed, events))
        except IndexError:  # another thread was faster
            pass

    def join(self, home: Device, wait: Callable[[Any], None]) -> None:
        """Returns all deferred memory to the pool: the home queue waits for the marks.

        A caller's memory stays deferred: the order of its next user is unknown.
        """
        with suppress(IndexError):
            for _ in range(len(self._deferred)):
                freed, marks = self._deferred.popleft()
                if freed.owned:
                    for mark in marks:
                        wait(mark)
                    self.free(freed, home)
                else:
                    self._deferred.append((freed, marks))

    def used_by(self, stream: Stream) -> list[_FreedUsers]:
        """Freed blocks that were exposed to a caller's stream; for ``passed``."""
        # PER_THREAD names this thread's stream; those of other threads may still use the memory.
        if not self.freed or handle_of(stream) == PER_THREAD:
            return []
        handle = handle_of(stream)
        found = []
        for freed in self.freed.copy():
            users = [each for each in list(freed.touched) if _is(each[1], handle)]
            if users:
                found.append((freed, users))
        return found

    def passed(self, freed_users: Iterable[_FreedUsers]) -> None:
        """Removes a stream as a user: the compute queue has waited for it.

        So in a training loop, where a call brings arrays of the stream that had the last results,
        their memory is at hand at once, however far the host is ahead.
        """
        for freed, users in freed_users:
            freed.touched.difference_update(users)

    def _free_or_defer(self, freed: FreedBlock, home: Device) -> None:
        users = list(freed.touched)
        if not freed.owned:
            self._defer(freed, [*users, (home, "compute")], home)
        # All work is done when it is submitted, or its home queue comes behind all who used it.
        elif not (home.defers or home.mesh_state.failed) or all(
            isinstance(queue, str) and home._comes_behind(device, cast("Queue", queue))
            for device, queue in users
        ):
            self.free(freed, home)
        else:
            self._defer(freed, users, home)

    def _defer(self, freed: FreedBlock, users: list[tuple[Device, User]], home: Device) -> None:
        """Defers a block until marks pass; for ever where no mark can be made."""
        if not any(device.physical in home.mesh_state.failed for device, _ in users):
            with suppress(BackendUnavailableError):  # failed meanwhile
                # In every thread PER_THREAD is another stream; LEGACY waits for all of them.
                users = [(who, LEGACY if _is(user, PER_THREAD) else user) for who, user in users]
                if any(who._is_capturing(user) for who, user in users if not isinstance(user, str)):
                    self.freed.append(freed)  # until a caller's capture has ended
                else:
                    self._deferred.append((freed, [who._mark(user) for who, user in users]))


def _is(user: User, handle: int) -> bool:
    """Whether a user of memory is the caller's stream with this handle."""
    return not isinstance(user, str) and handle_of(user) == handle
