"""Stream capture and CUDA graphs: records, checks and replays the calls of capturing streams.

A call that CUDA forbids to a thread during a capture raises CUDA's error and invalidates the
capture; a call that no thread may make is a fault at once. A replay is ordered only by the graph's
edges and by the stream on which it is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import Call, Machine, Queue


GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
streamCaptureModeGlobal = GLOBAL
streamCaptureModeThreadLocal = THREAD_LOCAL
streamCaptureModeRelaxed = RELAXED
# The numbers of CUDA's errors.
UNSUPPORTED, INVALIDATED, UNJOINED, IMPLICIT, CAPTURED_EVENT = 900, 901, 904, 906, 907
_NAMES = {
    UNSUPPORTED: "cudaErrorStreamCaptureUnsupported",
    INVALIDATED: "cudaErrorStreamCaptureInvalidated",
    UNJOINED: "cudaErrorStreamCaptureUnjoined",
    IMPLICIT: "cudaErrorStreamCaptureImplicit",
    CAPTURED_EVENT: "cudaErrorCapturedEvent",
}


@dataclass(eq=False)
class Node:
    """One captured call, which events refer to.

    Attributes:
        capture: the capture that contains it.
        queue: the queue of the call.
        what: describes the call, for messages.
        work: the function that runs at each launch of the graph.
        before: nodes that are known to precede it.
        needs: the nodes that it follows directly.
    """

    capture: GraphCapture
    queue: Queue
    what: str
    work: Callable[[Call], None] | None
    needs: list[Node] = field(default_factory=list)
    before: set[Node] = field(default_factory=set)


class GraphCapture:
    """A capture in progress: its queues, and the node that each queue's next call follows.

    Attributes:
        mode: which calls of which threads invalidate it; see ``check_safe``.
        thread: the thread that began it.
        invalid: whether a call has invalidated it; it can only be ended then.
    """

    def __init__(self, machine: Machine, origin: Queue, mode: int) -> None:
        self.machine = machine
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.last: dict[Queue, list[Node]] = {origin: []}
        self.over = False
        self.invalid = False

    def add(self, queue: Queue, what: str, work: Callable[[Call], None] | None) -> Node:
        """Adds a call of a captured queue."""
        if self.invalid:
            raise _error(INVALIDATED, f"{what} on {queue}")
        if threading.get_ident() != self.thread:
            self.machine.fail(f"capture: another thread's {what} on {queue} gets into the graph")
        needs = self.last[queue]
        node = Node(self, queue, f"{what} on {queue}, captured", work, list(needs))
        for need in needs:
            node.before |= {need, *need.before}
        self.nodes.append(node)
        self.last[queue] = [node]
        return node

    def join(self, queue: Queue, node: Node) -> None:
        """A queue that waits for a node joins the capture."""
        if queue.capture is None:
            queue.capture = self
            self.last[queue] = []
        self.last[queue].append(node)

    def unjoined(self) -> list[Queue]:
        """The queues that the origin has not joined."""
        seen = {each for last in self.last[self.origin] for each in (last, *last.before)}
        return [queue for queue, last in self.last.items() if not set(last) <= seen]


def _error(status: int, what: str) -> Exception:
    from .surface import CUDARuntimeError

    return CUDARuntimeError(f"{_NAMES[status]}: {what}", status)


def begin(machine: Machine, queue: Queue, mode: int) -> None:
    """``cudaStreamBeginCapture``."""
    if queue.capture is not None:
        machine.fail(f"capture: {queue} records already")
    queue.capture = GraphCapture(machine, queue, mode)
    machine.captures.append(queue.capture)
    machine.count("begin_capture")


def end(machine: Machine, queue: Queue) -> Graph:
    """``cudaStreamEndCapture``; returns the instantiated graph.

    CUDA's errors are raised as such: who abandons a capture ends it all the same.
    """
    from .surface import CUDARuntimeError

    capture = queue.capture
    if capture is None or capture.origin is not queue:
        raise CUDARuntimeError(f"cudaErrorIllegalState: {queue} began no capture", 401)
    if capture.thread != threading.get_ident():
        machine.fail("capture: ended by another thread than began it")
    capture.over = True
    machine.captures.remove(capture)
    for each in capture.last:
        each.capture = None
    machine.count("end_capture")
    if capture.invalid:
        raise _error(INVALIDATED, f"the capture of {queue}")
    left = capture.unjoined()
    if left:
        raise _error(UNJOINED, f"unjoined work on {left}")
    return Graph(machine, capture)


def wait(machine: Machine, queue: Queue, call: Any) -> bool:
    """Whether a wait concerns a capture; if so, it is handled."""
    captured = isinstance(call, Node)
    for capture in (queue.capture, call.capture if captured else None):
        if capture is not None and capture.invalid:
            raise _error(INVALIDATED, f"a wait on {queue}")
    if captured and call.capture.over:
        machine.fail(f"capture: {queue} waits for an event of a capture that has ended")
    if not captured:
        if queue.capture is not None:
            machine.fail(f"capture: {queue} records, and waits for an event from outside")
        return False
    if queue.handle < machine.num_gpus:
        call.capture.invalid = True
        raise _error(IMPLICIT, f"{queue} would record")
    if queue.capture not in (None, call.capture):
        machine.fail(f"capture: {queue} waits for an event of another capture")
    call.capture.join(queue, call)
    return True


def is_capturing(machine: Machine, queue: Queue) -> bool:
    """``cudaStreamIsCapturing``, as CuPy calls it."""
    if queue.capture is not None and queue.capture.invalid:
        raise RuntimeError(f"{queue} was capturing, and its capture is invalid")
    if _blocks_legacy(machine, queue):
        raise _error(IMPLICIT, f"a blocking stream of GPU {queue.gpu} records")
    return queue.capture is not None


def check_legacy(machine: Machine, queue: Queue) -> None:
    """Raises for work on a null stream while a blocking stream of its GPU is captured."""
    found = _blocks_legacy(machine, queue)
    for capture in found:
        capture.invalid = True
    if found:
        raise _error(IMPLICIT, f"{queue} would follow what is captured")


def _blocks_legacy(machine: Machine, queue: Queue) -> list[GraphCapture]:
    if queue.handle >= machine.num_gpus:  # not a null stream
        return []
    return [each.capture for each in queue.blocking if each.capture is not None]


def check_safe(machine: Machine, what: str) -> None:
    """Raises for a potentially unsafe call (CUDA's term) if a capture forbids it.

    That is a global one of any thread, and every one of this thread but a relaxed one. It is
    invalid then.
    """
    here = threading.get_ident()
    found = [
        capture
        for capture in machine.captures
        if capture.mode == GLOBAL or (capture.mode == THREAD_LOCAL and capture.thread == here)
    ]
    for capture in found:
        capture.invalid = True
    if found:
        raise _error(UNSUPPORTED, f"{what} while a capture goes on")


def check_synchronize(machine: Machine, gpu: int, queue: Queue | None = None) -> None:
    """Raises for a host wait for a captured queue, or (without a queue) for a whole GPU.

    Whatever the mode, and whoever captures. Source: reports of others, as CUDA's documentation does
    not say it: github.com/NVIDIA/TensorRT/issues/2888, github.com/ROCm/rocm-systems/pull/4508.
    """
    found = [
        capture
        for capture in machine.captures
        for each in capture.last
        if (each.gpu == gpu if queue is None else each is queue)
    ]
    for capture in found:
        capture.invalid = True
    if found:
        raise _error(UNSUPPORTED, "the host waits for work that is captured")


def event_status(call: Any) -> int:
    """The result of ``cudaEventQuery`` for a captured call; 0 for any other."""
    if not isinstance(call, Node):
        return 0
    call.capture.invalid = True
    return CAPTURED_EVENT


def check_event(call: Any) -> None:
    """Raises if the host waits for a captured call, which was not queued."""
    if event_status(call):
        raise _error(CAPTURED_EVENT, f"the host waits for {call.what}")


class Graph:
    """A captured graph. Its launches run one after the other, each on its own queues."""

    def __init__(self, machine: Machine, capture: GraphCapture) -> None:
        self._machine = machine
        self._nodes = capture.nodes
        self._origin = capture.origin
        self._own = {
            queue: machine.add_queue(queue.gpu, f"graph of {queue.name}") for queue in capture.last
        }

    def upload(self, stream=None):
        self._checked_queue(stream)

    def launch(self, stream=None):
        with self._machine.entered() as machine:
            queue = self._checked_queue(stream)
            machine.count("graph_launch")
            begun = machine.submit(queue, "graph begins")
            for own in self._own.values():
                machine.wait(own, begun)
            made: dict[Node, Call] = {}
            for node in self._nodes:
                own = self._own[node.queue]
                for need in node.needs:
                    if need.queue is not node.queue:
                        machine.wait(own, made[need])
                made[node] = machine.submit(own, node.what, node.work)
            for own in self._own.values():
                machine.wait(queue, machine.submit(own, "graph ends"))

    def _checked_queue(self, stream) -> Queue:
        from .surface import queue_of

        queue = queue_of(self._machine, stream)
        if queue.capture is not None:
            self._machine.fail(f"capture: a graph is launched on {queue}, which records")
        return queue
