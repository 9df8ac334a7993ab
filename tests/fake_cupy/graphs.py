"""Stream capture and graphs: what a recording stream is given is kept, checked, and played later.

CUDA invalidates a capture where a rule is broken; here that is a fault at once. A play is ordered
by nothing but the graph's own edges and the stream that it is launched on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import Call, Machine, Queue

__all__ = ["Graph", "GraphCapture", "begin", "end", "refuse_in_capture", "refuse_node", "wait"]

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@dataclass(eq=False)
class Node:
    """One call that was kept; stands for it where an event is asked for its call.

    Attributes:
        capture: that kept it.
        queue: that it was given to.
        what: it is, for messages.
        work: what runs at each play.
        before: nodes of which it is known that they come before it.
        needs: the nodes that it follows directly.
    """

    capture: GraphCapture
    queue: Queue
    what: str
    work: Callable[[Call], None] | None
    needs: list[Node] = field(default_factory=list)
    before: set[Node] = field(default_factory=set)


class GraphCapture:
    """A capture that goes on: which queues record, and what each one's next call follows."""

    def __init__(self, machine: Machine, origin: Queue, mode: int) -> None:
        self.machine = machine
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.last: dict[Queue, list[Node]] = {origin: []}
        self.over = False

    def add(self, queue: Queue, what: str, work: Callable[[Call], None] | None) -> Node:
        """Keeps a call of a queue that records."""
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
        """A queue waits for a node: it records too from here on."""
        if queue.capture is None:
            queue.capture = self
            self.last[queue] = []
        self.last[queue].append(node)

    def unjoined(self) -> list[Queue]:
        """The queues whose end the origin does not follow."""
        seen = {each for last in self.last[self.origin] for each in (last, *last.before)}
        return [queue for queue, last in self.last.items() if not set(last) <= seen]


def begin(machine: Machine, queue: Queue, mode: int) -> None:
    """``cudaStreamBeginCapture``."""
    if queue.capture is not None:
        machine.fail(f"capture: {queue} records already")
    if mode != THREAD_LOCAL:
        machine.fail(f"capture: mode {mode}: other threads' calls are not ours to forbid, and "
                     "allocations of ours not ours to allow")  # fmt: skip
    queue.capture = GraphCapture(machine, queue, mode)
    machine.captures.append(queue.capture)
    machine.count("begin_capture")


def end(machine: Machine, queue: Queue) -> Graph:
    """``cudaStreamEndCapture``, and the graph of it made ready to be launched.

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
    left = capture.unjoined()
    if left:
        raise CUDARuntimeError(f"cudaErrorStreamCaptureUnjoined: unjoined work on {left}", 904)
    return Graph(machine, capture)


def wait(machine: Machine, queue: Queue, call: Any) -> bool:
    """Whether a wait is a capture's affair, which is then settled."""
    captured = isinstance(call, Node)
    if captured and call.capture.over:
        machine.fail(f"capture: {queue} waits for an event of a capture that has ended")
    if not captured:
        if queue.capture is not None:
            machine.fail(f"capture: {queue} records, and waits for an event from outside")
        return False
    if queue.capture not in (None, call.capture):
        machine.fail(f"capture: {queue} waits for an event of another capture")
    call.capture.join(queue, call)
    return True


def refuse_node(machine: Machine, call: Any, verb: str) -> None:
    """Faults if a call was kept, not queued: nobody can say when it runs."""
    if isinstance(call, Node):
        machine.fail(f"capture: {verb} {call.what}")


def refuse_in_capture(machine: Machine, what: str) -> None:
    """Faults if this thread has a capture going on."""
    if any(capture.thread == threading.get_ident() for capture in machine.captures):
        machine.fail(f"capture: {what} while a capture goes on")


class Graph:
    """What was captured. Its plays follow each other; each is a run of queues of its own."""

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
