"""Devices and meshes for accumulators, and threads that must end in time."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from accumulator.kinds import KINDS, Dense, Sparse
from support.meshes import implementation, with_and_without_peers

import gradreduce as gr
from gradreduce.accumulator import multi

__all__ = ["implementation"]

mesh = with_and_without_peers([0, 0], [0, 0, 1, 1], [0, 1, 1, 2, 0])
LIMIT_S = 30.0  # these calls take milliseconds, so only a deadlock takes so long


@pytest.fixture(scope="session")
def device(implementation) -> Iterator[gr.Device]:
    """The second logical device of a GPU, strict: fresh memory is NaN."""
    with gr.open_mesh([0, 0], backend="sim", kernels=implementation, strict=True) as mesh:
        yield mesh.devices[1]


def makes(cls: type) -> Callable[..., Any]:
    """A fixture that makes accumulators on the device."""

    @pytest.fixture
    def maker(device):
        return lambda dtype="float32", *args, **options: cls(dtype, *args, device=device, **options)

    return maker


accumulator = makes(gr.ConditionalAccumulator)
sparse = makes(gr.SparseConditionalAccumulator)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request) -> type[Dense | Sparse]:
    """What both kinds of accumulators do."""
    return request.param


@pytest.fixture(params=["device", "mesh"])
def home(request, mesh) -> gr.Device | gr.Mesh:
    """Where an accumulator is: on one device, or over a mesh."""
    return mesh if request.param == "mesh" else mesh.devices[1]


class Expiring(threading.Event):
    """An event whose timeout expires when ``expired`` is set, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.expired = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        assert self.expired.wait(LIMIT_S)
        return self.is_set()


class Call:
    """A call that runs in a thread of its own.

    Attributes:
        pending_take: the take of the call, once it is in the queue.
    """

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.pending_take: Any = None
        self.queued = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(call, args, kwargs), daemon=True)

    def _run(self, call, args, kwargs) -> None:
        _running.call = self
        try:
            self._value = call(*args, **kwargs)
        except BaseException as error:
            self._error = error
        finally:
            self.queued.set()

    def expire(self) -> None:
        """Lets the timeout of a take from ``CallThreads.expiring`` expire."""
        self.pending_take.done.expired.set()

    @property
    def is_done(self) -> bool:
        """Whether its take has left the queue; its thread may not have noticed yet."""
        return self.pending_take.done.is_set()

    def result(self, limit: float = LIMIT_S) -> Any:
        """Returns or raises what the call did; fails if it does not end in time."""
        self.thread.join(limit)
        assert not self.thread.is_alive(), "deadlock: a call did not end"
        if self._error is not None:
            raise self._error
        return self._value


class CallThreads:
    """Starts calls in threads."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        made = Call(call, args, kwargs)
        self.calls.append(made)
        made.thread.start()
        return made

    def waiting(self, take: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Starts a take; returns when it is in its queues."""
        made = self.start(take, *args, **kwargs)
        assert made.queued.wait(LIMIT_S), "deadlock: a take did not even queue"
        assert made.pending_take is not None, "the take ended without a place in the queue"
        return made

    def expiring(self, take: Callable[..., Any], *args: Any) -> Call:
        """Like ``waiting``, with a timeout that expires when the test calls ``expire()``."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                multi, "PendingTake", functools.partial(multi.PendingTake, done=Expiring())
            )
            return self.waiting(take, *args, timeout=0.2)


_running = threading.local()


@pytest.fixture(autouse=True)
def watched_takes(monkeypatch) -> None:
    """Notes takes of ``CallThreads``; one in the test's own thread has a time limit.

    Otherwise it could hang the whole run.
    """
    await_take = multi.await_take

    def watched(pending_take, timeout):
        call = getattr(_running, "call", None)
        if call is not None and call.pending_take is None:
            call.pending_take = pending_take
            call.queued.set()
        own = threading.current_thread() is threading.main_thread()
        await_take(pending_take, LIMIT_S if own and timeout is None else timeout)

    monkeypatch.setattr(multi, "await_take", watched)


@pytest.fixture
def call_threads() -> Iterator[CallThreads]:
    """Threads, all of which must have ended when the test has."""
    made = CallThreads()
    yield made
    end = time.monotonic() + LIMIT_S
    for call in made.calls:
        call.thread.join(max(0.0, end - time.monotonic()))
    assert not [call for call in made.calls if call.thread.is_alive()], "threads did not end"
