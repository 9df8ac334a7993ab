"""Holds freed memory until every queue that used it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradreduce.errors import BackendUnavailableError

from .buffer import LEGACY, PER_THREAD, Block, FreedBlock, Stream, handle_of

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.order.uses import DeviceQueue

_Streams = list[tuple["Device", Stream]]


class DeferredFree:
    """Freed blocks of one device whose memory may still be in use.

    Takes no lock: a block can be freed at any point of any thread. The weak reference calls
    ``freed.append``, which is C code: Ctrl-C could interrupt a Python finalizer, and memory that is
    still in use would be freed.

    Attributes:
        held: one entry for each block whose memory is not free, living blocks included.
        freed: the entries of blocks that were freed since the last ``drain``.
    """

    def __init__(self) -> None:
        self.held: set[FreedBlock] = set()
        self.freed: deque[FreedBlock] = deque()
        self._deferred: deque[tuple[FreedBlock, list[Any]]] = deque()

    def track(self, block: Block) -> Block:
        """Tracks a block, and keeps its memory until it can be freed."""
        freed = FreedBlock(block, self.freed.append)
        freed.raw, freed.nbytes = block.raw, block.nbytes
        freed.uses, freed.streams = block.uses, set()
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
        """Returns freed memory that no queue uses any more to the pool of ``home``.

        The pool hands out memory in the order of the compute queue. Memory that another queue or a
        caller's stream has used is therefore kept until their present work is done.
        """
        try:
            for _ in range(len(self.freed)):  # a block that must wait is appended again
                self._free_or_defer(self.freed.popleft(), home)
            if self._deferred:
                with home._activate():
                    self._free_passed(home)
        except IndexError:  # another thread has drained it
            pass

    def _free_passed(self, home: Device) -> None:
        for _ in range(len(self._deferred)):
            freed, events = self._deferred.popleft()
            if all(event.done for event in events):
                self.free(freed, home)
            else:
                self._deferred.append((freed, events))

    def leave(self, last_owner: Callable[[Any], Any]) -> None:
        """Afterwards only living blocks keep their memory; the queues must have passed.

        Args:
            last_owner: takes memory of the pool, and returns an object that keeps it.
        """
        for freed in list(self.held):
            block = freed()
            if block is not None and freed.raw is not None:  # not done by an earlier close
                if freed.owned:
                    block.raw = last_owner(freed.raw)
                freed.raw = None

    def forget(self) -> None:
        """Returns all memory to its owners; the queues must have passed, the blocks be garbage."""
        for freed in self.held:
            freed.raw = None

    def join(self, home: Device, wait: Callable[[Any], None]) -> None:
        """Returns all deferred memory to the pool; the home queue waits for its marks.

        A caller's memory stays deferred: its next use is in an unknown order.
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

    def find_used_by(self, stream: Stream) -> list[tuple[FreedBlock, _Streams]]:
        """Returns the freed blocks that a caller's stream may use; for ``remove_users``."""
        # PER_THREAD is this thread's stream only; other threads' streams may still use the memory.
        if not self.freed or handle_of(stream) == PER_THREAD:
            return []
        handle = handle_of(stream)
        freed_users = []
        for freed in self.freed.copy():
            users = [each for each in list(freed.streams) if handle_of(each[1]) == handle]
            if users:
                freed_users.append((freed, users))
        return freed_users

    def remove_users(self, freed_users: Iterable[tuple[FreedBlock, _Streams]]) -> None:
        """Removes a stream from the users, after the compute queue has waited for it.

        In a training loop the memory of the last results can then be reused at once, even if the
        host is far ahead of the device.
        """
        for freed, users in freed_users:
            freed.streams.difference_update(users)

    def _free_or_defer(self, freed: FreedBlock, home: Device) -> None:
        uses = freed.uses
        if freed.owned:  # free now if the home queue runs after all users
            is_free = not freed.streams and (
                uses is home.compute or home.mesh_state.order.is_behind(home.compute, uses)
            )
        else:  # a caller's memory: its stream waits for us, so nothing is kept
            is_free = freed.raw is None
        if is_free:
            self.free(freed, home)
        else:
            queues = dict.fromkeys(uses.counts())
            queues.pop(home.compute, None)  # the pool hands out memory in the order of this queue
            own = [] if freed.owned else [home.compute]
            self._defer(freed, [*queues, *own], list(freed.streams), home)

    def _defer(
        self, freed: FreedBlock, queues: Iterable[DeviceQueue], streams: _Streams, home: Device
    ) -> None:
        """Keeps a block's memory until marks pass; for ever if none can be made."""
        failed, order = home.mesh_state.failed, home.mesh_state.order
        users = [queue.device for queue in queues] + [device for device, _ in streams]
        if not (failed and any(device.physical in failed for device in users)):
            with suppress(BackendUnavailableError):  # failed meanwhile
                # PER_THREAD is a different stream in each thread; LEGACY waits for all of them.
                streams = [
                    (device, LEGACY if handle_of(stream) == PER_THREAD else stream)
                    for device, stream in streams
                ]
                if any([device._is_capturing(stream) for device, stream in streams]):
                    self.freed.append(freed)  # try again when the caller's capture has ended
                else:
                    marks = [order.mark(queue).event for queue in queues]
                    marks += [device._mark(stream) for device, stream in streams]
                    self._deferred.append((freed, marks))
