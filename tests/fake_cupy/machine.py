"""Runs the streams of the fake GPUs in a random valid order, and finds unordered memory uses.

Every call that queues work has a *clock*: for each queue, how many of its calls are known to be
finished before this one starts (by stream order, event waits and host waits). Two uses of the same
bytes, one of them a write, are a fault unless one's clock covers the other. This finds a missing
wait in every order that the seed chooses; the random order finds what clocks cannot see.

A fault is kept and raised again by every later call and by ``settle``, because Python swallows
errors raised while an object is freed.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

from . import graphs
from .memory import GPU_BYTES, NUM_GPUS, PINNED, REGION, Chunk, Generation, Heap, Slot

HOST = "host"
_PARTS = {f"{__package__}.{name}" for name in ("arrays", "graphs", "kernels", "machine", "nccl",
                                               "plugin", "surface")}  # fmt: skip
READ, WRITE = 1, 2
# (first address, one past the last, READ | WRITE)
Access = tuple[int, int, int]
Clock = dict[object, int]


class Fault(AssertionError):
    """An error of the code under test."""


class Call:
    """One piece of work in a queue.

    Attributes:
        queue: the queue of the call.
        index: its number in the queue, from 1.
        number: its number among all calls of the machine.
        clock: the calls that have finished before it begins, and itself.
        what: describes the call, for messages.
        passed: whether it has run.
        blocker: for a wait, the call that must run first.
    """

    def __init__(self, queue: Queue, index: int, number: int, clock: Clock, what: str) -> None:
        self.queue = queue
        self.index = index
        self.number = number
        self.clock = clock
        self.what = what
        self.passed = False
        self.work: Callable[[Call], None] | None = None
        self.blocker: Call | None = None


class Queue:
    """A stream: its calls run in order.

    Attributes:
        handle: the handle of the CUDA stream.
        gpu: number of its GPU.
        waiting: calls that have not run.
        clock: the clock of its last call.
        blocking: for a null stream: the streams of its GPU that wait for it, and it for them.
        capture: the capture (``graphs.py``) that records its calls; None: they run.
    """

    capture: Any = None

    def __init__(self, handle: int, gpu: int, name: str) -> None:
        self.handle = handle
        self.gpu = gpu
        self.name = name
        self.waiting: deque[Call] = deque()
        self.blocking: list[Queue] = []
        self.clock: Clock = {}
        self.count = 0
        self.last: Call | None = None

    def __repr__(self) -> str:
        return self.name


def _watchdogs() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "gradreduce-watchdog"}


class Machine:
    """Some GPUs.

    Args:
        seed: of the order. 0 is fully lazy: nothing runs before the host waits. 1 is eager: after
            each call everything that can run does. Others mix.
        num_gpus: how many there are.
        peers: the pairs that could access each other's memory; default all.
        most_peers: of one GPU.
        capacity: bytes of each GPU.
        nvrtc: whether NVRTC is installed.
        pinned: bytes of host memory that can be pinned.

    Attributes:
        contexts: the GPUs that have a context. CUDA makes one by ``setDevice``, and on the current
            GPU by each call that needs one.
        old_watchdogs: those of meshes of earlier tests. One may look at its GPU once more after
            its mesh is closed.
        knows_meshes: whether ``of_meshes`` has the GPUs of the meshes that were opened. Our code
            may make contexts on these.
    """

    current_gpu: Callable[[], int]  # see surface.py
    knows_meshes = False

    def __init__(
        self,
        seed: int = 2,
        num_gpus: int = NUM_GPUS,
        peers: bool = True,
        most_peers: int = NUM_GPUS,
        capacity: int = GPU_BYTES,
        nvrtc: bool = True,
        pinned: int = GPU_BYTES,
    ) -> None:
        self.seed = seed
        self.num_gpus = num_gpus
        self.can_peer = peers
        self.most_peers = most_peers
        self.nvrtc = nvrtc
        self.peers: set[tuple[int, int]] = set()
        self.contexts, self.of_meshes = set[int](), set[int]()
        self.old_watchdogs = _watchdogs()
        self.corrupt: set[tuple[int, int]] = set()  # peers whose copies change the data
        self.faults: list[str] = []
        self.lock = threading.RLock()
        self.queues: dict[int, Queue] = {}
        self.heap = Heap(capacity, pinned)
        self.host: Clock = {HOST: 0}
        self.counts: dict[str, int] = {}
        self.retired = False
        self.ordered = True  # whether unordered uses are faults
        self.freed: dict[int, Exception] = {}  # GPUs that answer every call with this error
        self.captures: list[Any] = []  # those that go on
        self.at_sync: list[Callable[[], str | None]] = []  # each returns a fault, or None
        self.at_end: list[Callable[[], str | None]] = []  # the same, at the end
        self.stuck: set[Queue] = set()  # queues that do not run
        self.queue_size: int | None = None  # calls that fill a queue; None: it is never full
        self.destroyed: set[int] = set()  # handles of destroyed streams
        self._random = random.Random(seed)
        self._early = {0: 0.0, 1: 1.0}.get(seed, self._random.choice((0.1, 0.3, 0.6, 0.8)))
        self.number = 0
        self._pending = 0
        self._pending_free: deque[tuple[Chunk, Queue | None, bool]] = deque()
        for gpu in range(num_gpus):
            self.add_queue(gpu, f"null:{gpu}")

    # -- faults -----------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """Keeps a fault and raises it."""
        self.faults.append(text)
        raise Fault(text)

    @contextmanager
    def entered(self, *, needs_context: bool = True, frees: bool = True):
        """Wraps every call from outside: one thread at a time, and no call after a fault."""
        with self.lock:
            if self.retired:
                raise Fault("a call on a fake GPU of a test that has ended")
            if self.faults:
                raise Fault(self.faults[0])
            if needs_context:
                self.make_context(self.current_gpu())
            if frees:
                self._free_pending()
            yield self

    def make_context(self, gpu: int) -> None:
        """Makes a context, if there is none; a fault if our code does it outside of its meshes."""
        if gpu in self.contexts or threading.current_thread() in self.old_watchdogs:
            return
        self.contexts.add(gpu)
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in {*_PARTS, "contextlib"}:
            frame = frame.f_back
        caller = frame.f_globals.get("__name__", "")
        ours = self.knows_meshes and caller.startswith("gradreduce.")
        if ours and gpu not in self.of_meshes:
            self.fail(f"{caller}:{frame.f_lineno} makes a context on GPU {gpu}, outside the mesh")

    # -- queues -----------------------------------------------------------------------------------

    def add_queue(self, gpu: int, name: str, *, blocking: bool = False) -> Queue:
        """A new stream; the handles of null streams are the numbers of their GPUs.

        A ``blocking`` one and the null stream of its GPU wait for each other, whatever either is
        given.
        """
        handle = len(self.queues) if len(self.queues) < self.num_gpus else 4096 + len(self.queues)
        self.queues[handle] = queue = Queue(handle, gpu, f"{name}#{handle}")
        if blocking:
            null = self.queues[gpu]
            null.blocking.append(queue)
            if null.last is not None:
                self.wait(queue, null.last)
        return queue

    def submit(self, queue: Queue, what: str, work: Callable[[Call], None] | None = None) -> Call:
        """Puts work at the end of a queue; it may run at once, or only when the host waits."""
        self.check_alive(queue.gpu)
        graphs.check_legacy(self, queue)
        if queue.capture is not None:
            return queue.capture.add(queue, what, work)
        while self.is_full(queue):  # the host waits in the driver
            if queue in self.stuck or not self._run_one():
                self.fail(f"would hang: {what} waits until {queue} is not full")
        for other in queue.blocking:
            if other.last is not None:
                self.wait(queue, other.last)
        queue.count += 1
        self.number += 1
        clock = joined(queue.clock, self.host)
        clock[queue] = queue.count
        queue.clock = clock
        call = Call(queue, queue.count, self.number, clock, f"{what} on {queue}")
        call.work = work
        queue.waiting.append(call)
        queue.last = call
        self._pending += 1
        for other in queue.blocking:
            self.wait(other, call)
        while self._random.random() < self._early and self._run_one():
            pass
        return call

    def is_full(self, queue: Queue) -> bool:
        """Whether the next call must wait until another one has run."""
        return self.queue_size is not None and len(queue.waiting) >= self.queue_size

    def wait(self, queue: Queue, call: Call) -> Call | None:
        """Later work of the queue runs after ``call``; returns the wait, if one is needed."""
        if graphs.wait(self, queue, call):
            return None
        queue.clock = joined(queue.clock, call.clock)
        waiting = None
        if not call.passed:
            waiting = Call(queue, queue.count, self.number, queue.clock, f"wait on {queue}")
            waiting.blocker = call
            queue.waiting.append(waiting)
            self._pending += 1
        for other in queue.blocking:
            self.wait(other, call)
        return waiting

    def finish(self, call: Call | None) -> None:
        """The host waits for a call."""
        graphs.check_event(call)
        for check in self.at_sync:
            wrong = check()
            if wrong:
                self.fail(wrong)
        if call is not None:
            self.check_alive(call.queue.gpu)
        while call is not None and not call.passed:
            if self.seed == 0:
                self._run_needed(call)
            elif not self._run_one():
                self._never(call)
        if call is not None:
            self.host = joined(self.host, call.clock)

    def check_alive(self, gpu: int) -> None:
        """Raises the error of a failed GPU."""
        if gpu in self.freed:
            raise self.freed[gpu]

    def _never(self, call: Call) -> None:
        why = "would hang: the host waits for" if self.stuck else "deadlock: nothing runs"
        self.fail(f"{why} {call.what}")

    def polled(self, call: Call, *, waits: bool = False) -> bool:
        """Whether a call has run; if so, the host counts as ordered after it.

        A host that ``waits``, looking again and again, sees all run that can.
        """
        if waits and self.seed == 0:
            self._run_needed(call, must=False)
        while waits and not call.passed and self._run_one():
            pass
        if not call.passed and self.seed != 0 and self._random.random() < self._early:
            self._run_one()
        if call.passed:
            self.host = joined(self.host, call.clock)
        return call.passed

    def settle(self) -> None:
        """Runs the remaining work, then raises the first fault, if any."""
        with self.lock:
            self.stuck.clear()
            if not self.faults:
                try:
                    self._free_pending()
                    for queue in list(self.queues.values()):
                        if queue.gpu not in self.freed:
                            self.finish(queue.last)
                    for check in self.at_end:
                        wrong = check()
                        if wrong:
                            self.fail(wrong)
                except Fault:
                    pass
            if self.faults:
                raise Fault("\n".join(self.faults))

    def _run_needed(self, call: Call, *, must: bool = True) -> None:
        """Runs a call and only the calls that it waits for: the laziest valid order."""
        todo = [call]
        while todo:
            wanted = todo[-1]
            if wanted.passed:
                todo.pop()
                continue
            head = wanted.queue.waiting[0]
            if wanted.queue in self.stuck or len(todo) > 10_000:
                if must:
                    self._never(call)
                return
            if head.blocker is not None and not head.blocker.passed:
                todo.append(head.blocker)
            else:
                self._run(wanted.queue)

    def _run_one(self) -> bool:
        """Runs the first call of a random queue that is ready; False if none is."""
        ready = [
            queue
            for queue in self.queues.values()
            if queue.waiting
            and (queue.waiting[0].blocker is None or queue.waiting[0].blocker.passed)
            and queue not in self.stuck
        ]
        if not ready:
            return False
        self._run(self._random.choice(ready))
        return True

    def _run(self, queue: Queue) -> None:
        call = queue.waiting.popleft()
        self._pending -= 1
        if call.work is not None and not self.faults:
            call.work(call)
        call.passed = True
        call.work = None

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, pool: object, place: int, nbytes: int, home: Queue | None) -> Chunk:
        """Memory in the order of the queue ``home`` (None: of the host); its content is NaN.

        Raises:
            MemoryError: the GPU has no more.
        """
        chunk = self.heap.take(pool, place, nbytes, home)
        new = chunk is None
        if new:  # from cudaMalloc or cudaHostAlloc
            graphs.check_safe(self, "memory is asked for")
            chunk = self.heap.grow(pool, place, nbytes)
        self.number += 1
        slot = chunk.slot
        if not self._pending:
            slot.generations = [one for one in slot.generations if one.freed_at > self.number]
        chunk.owner = Generation(chunk.start, nbytes, self.number)
        slot.generations.append(chunk.owner)
        if new:
            self._fill_with_nan(chunk, home, "fresh memory")
        return chunk

    def free_later(self, chunk: Chunk, home: Queue | None, *, is_alive: bool = True) -> None:
        """Called while an object is freed, so without a lock; the next outside call frees it.

        Args:
            chunk: the memory.
            home: the queue in whose order it is freed.
            is_alive: whether its pool still exists.
        """
        self._pending_free.append((chunk, home, is_alive))

    def _free_pending(self, unwritten: object = None) -> list[tuple[Chunk, Queue | None]]:
        """Frees what ``free_later`` got; returns chunks of a pool that were not filled with NaN."""
        later = []
        while self._pending_free:
            chunk, home, is_alive = self._pending_free.popleft()
            self.number += 1
            chunk.owner.freed_at = self.number
            if chunk.slot.pool == unwritten:
                later.append((Chunk(chunk.slot, chunk.start, chunk.size), home))
            elif home is None or home.gpu not in self.freed:
                self._fill_with_nan(chunk, home, "the memory's end")
            if is_alive:
                self.heap.give(chunk, home)
            elif chunk.before is chunk.behind is None:
                self.heap.release([chunk])
        return later

    def free_all(self, pool: object, gpu: int) -> None:
        """``cudaFree`` of a pool's free slots; CUDA first waits for the whole GPU."""
        graphs.check_safe(self, "cudaFree")
        if gpu in {queue.gpu for queue in self.stuck}:
            self.fail("would hang: cudaFree waits for a queue that is stuck")
        later = self._free_pending(unwritten=pool)  # nothing reuses it before
        chunks = self.heap.whole(pool, gpu)
        if gpu in self.freed:
            return
        for queue in list(self.queues.values()) if chunks else ():
            if queue.gpu == gpu and queue.capture is None:
                self.finish(self.submit(queue, "cudaFree"))  # also for its waits
        self.heap.release(chunks)
        for chunk, home in later:
            if all(chunk.slot is not each.slot for each in chunks):
                self._fill_with_nan(chunk, home, "the memory's end")

    def _fill_with_nan(self, chunk: Chunk, home: Queue | None, why: str) -> None:
        """Fills every float with NaN, as one write of the whole chunk."""
        slot, start, size = chunk.slot, chunk.start, chunk.size

        def work(call: Call) -> None:
            self._use(call, slot, start, start + size, WRITE)
            slot.write(start, start + size, (call.queue, call.index, call.what))
            ctypes.memset(start, 0xFF, size)

        what = f"{why} at {start:#x}"
        if home is not None:
            self.submit(home, what, work)
            return
        self.host = {**self.host, HOST: self.host[HOST] + 1}
        queue = Queue(-1, PINNED, HOST)
        call = Call(queue, self.host[HOST], self.number, self.host, f"{what} by the host")
        call.queue = HOST  # type: ignore[assignment]  # the host is no queue, but has a clock
        work(call)

    def check(self, call: Call, accesses: Iterable[Access], *, peers_matter: bool = True) -> None:
        """Checks the memory of a call: bounds, lifetime, peer access and order.

        What is alive is what was when the call was *made*: CUDA frees in stream order.
        """
        for start, end, kind in accesses:
            slot = self.heap.find(start)
            verb = "writes" if kind & WRITE else "reads"
            owner = slot and slot.owner(start, call.number)
            if slot is None or owner is None or end > owner.start + owner.nbytes:
                bounds = f"{owner.start:#x} + {owner.nbytes}" if owner else "nothing alive"
                self.fail(f"out of bounds: {call.what} {verb} {start:#x} to {end:#x}, in {bounds}")
            near = slot.place in (call.queue.gpu, PINNED) or not peers_matter
            if not near and (call.queue.gpu, slot.place) not in self.peers:
                self.fail(f"no peer access: {call.what} {verb} memory of GPU {slot.place}")
            if not near and not slot.is_mapped:
                self.fail(f"not mapped for peers: {call.what} {verb} memory of GPU {slot.place}")
            self._use(call, slot, start, end, kind)

    def _use(self, call: Call, slot: Slot, start: int, end: int, kind: int) -> None:
        """Records an access; it is a fault if it is unordered with an earlier one."""
        user = (call.queue, call.index, call.what)
        for cell in slot.cut(start, end):
            earlier = [cell.write] if cell.write else []
            if kind & WRITE:
                earlier += cell.reads.values()
            for queue, index, what in earlier:
                if self.ordered and call.clock.get(queue, 0) < index:
                    verb = "writes" if kind & WRITE else "reads"
                    self.fail(
                        f"unordered: {call.what} {verb} {cell.start:#x} to {cell.end:#x}, which "
                        f"{what} used; no fence between them"
                    )
            if kind & WRITE:
                cell.write, cell.reads = user, {}
            else:
                cell.reads[call.queue] = user

    # -- for tests --------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        """Counts a call."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def counted(self, call: Callable[[], object]) -> Counter[str]:
        """The calls of CUDA that ``call`` makes: how many of each."""
        before = Counter(self.counts)
        call()
        return Counter(self.counts) - before

    def stall(self, device: Any) -> None:
        """Stops the compute queue of one of our devices."""
        with self.lock:
            self.stuck.add(self.queues[device._stream("compute").ptr])

    def resume(self) -> None:
        """Lets all queues run again."""
        with self.lock:
            self.stuck.clear()


def joined(clock: Clock, other: Clock) -> Clock:
    """The union of two clocks."""
    both = dict(clock)
    for queue, index in other.items():
        if both.get(queue, 0) < index:
            both[queue] = index
    return both


_current: list[Machine] = []


def current() -> Machine:
    """The machine that the fake CuPy uses now."""
    if not _current:
        _current.append(Machine())
    return _current[0]


def install(machine: Machine) -> Machine:
    """Replaces the current machine; objects of the old one must not be used again."""
    for old in _current:
        old.retired = True
    _current[:] = [machine]
    REGION.forget()
    return machine
