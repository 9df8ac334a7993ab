"""What an accumulator holds, and who waits for it: host integers and Buffers under one lock.

Never converts an array and never reads one; the GPU is ordered by marks alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Part
from gradreduce.device import Buffer, DeferInterrupts, Device, Done, DType
from gradreduce.errors import CancelledError
from gradreduce.ops import RowIndex, Segments
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

__all__ = [
    "AccumulatorState",
    "PendingGradient",
    "PendingTake",
    "SparseGradient",
    "SparseSum",
    "locked",
]

_log = logging.getLogger(__name__)
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """One sparse gradient on its way in.

    Attributes:
        values: its rows, ``(num_rows, …)``.
        segments: which of them have the same index.
        dense_shape: of the whole array; -1 as its first entry if that is unknown.
    """

    values: Buffer
    segments: Segments
    dense_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole array."""
        return self.dense_shape

    @property
    def dtype(self) -> DType:
        """Of the values."""
        return self.values.dtype


@dataclass(frozen=True, eq=False)
class SparseSum:
    """The partial sum of sparse gradients on one device.

    Attributes:
        slots: which row holds which index, and how many gradients touched it.
        values: ``(capacity, …)``, in the accumulate type; rows behind ``slots.num_rows`` are not
            written yet.
    """

    slots: RowIndex
    values: Buffer

    @property
    def rows(self) -> Buffer:
        """Those of ``values`` that are in use."""
        return self.values.view(0, (self.slots.num_rows, *self.values.shape[1:]))


@dataclass(eq=False, slots=True)
class PendingTake:
    """A place in the queue of every accumulator of one take.

    Attributes:
        states: whose gradients it takes together.
        num_required: how many each must hold.
        deadline: seconds that the devices may take once it is served; None for ever.
        done: set when it has left all queues, with a result or an error.
        taken: for each state, its gradient on each of its devices.
        kinds: for each state, the kind of array to hand out.
        error: what serving it raised.
    """

    states: tuple[AccumulatorState, ...]
    num_required: int
    deadline: float | None = None
    done: Done | threading.Event = field(default_factory=Done)
    taken: list[tuple[Part, ...]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    error: BaseException | None = None

    def is_ready(self) -> bool:
        """Whether it heads every queue, all open, and all hold enough; all locks must be held."""
        for state in self.states:
            heads = state.queue and state.queue[0] is self
            if not heads or state.closed or state.count < self.num_required:
                return False
        return True

    def leave(self) -> None:
        """Takes it out of every queue; all locks must be held."""
        for state in self.states:
            if self in state.queue:
                state.queue.remove(self)
        self.done.set()


class AccumulatorState:
    """One accumulator; handles with the same ``shared_name`` share it.

    Attributes:
        number: order of creation, in which locks are taken.
        name: of its first handle, for errors.
        dtype: of gradients and results.
        shape: what gradients must fit; None for anything, None entries for any extent.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        devices: one partial sum is kept on each.
        over_mesh: whether results are mirrored on all devices.
        cross_device_ops: reduces the partial sums of a mesh at a take.
        sparse: whether gradients are IndexedSlices.
        lock: guards everything below; to ask for it raises in a forked child.
        count: gradients in the sum.
        step: gradients of an earlier one are stale.
        num_dropped: stale ones so far.
        has_warned: whether a drop of a gradient without ``local_step`` was logged.
        sum_shape: of the gradients in the sum; None without any. Of sparse ones that of the whole
            array, -1 as its first entry if that is unknown.
        totals: the partial sum of each device, in the accumulate type; None where nothing came.
        kind: of the first gradient kept since the last take.
        queue: takes that wait, first come, first served.
        closed: whether every further call is an error.
    """

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int | None, ...] | None,
        reduction_type: str,
        devices: tuple[Device, ...],
        over_mesh: bool,
        cross_device_ops: CrossDeviceOps,
        *,
        sparse: bool = False,
    ) -> None:
        self.number = next(_numbers)
        self.name = ""
        self.dtype = dtype
        self.shape = shape
        self.reduction_type = reduction_type
        self.devices = devices
        self.over_mesh = over_mesh
        self.cross_device_ops = cross_device_ops
        self.sparse = sparse
        self._lock = threading.RLock()
        self.count = 0
        self.step = 0
        self.num_dropped = 0
        self.has_warned = False
        self.sum_shape: tuple[int, ...] | None = None
        self.totals: list[Buffer | SparseSum | None] = [None] * len(devices)
        self.kind: Kind = "native"
        self.queue: deque[PendingTake] = deque()
        self.closed = False

    @property
    def lock(self) -> threading.RLock:
        """Raises ``BackendUnavailableError`` in a forked child, where nobody may release it."""
        self.devices[0].mesh_state.check_process()
        return self._lock

    def check_open(self) -> None:
        """Raises ``CancelledError`` if the accumulator was closed; the lock must be held."""
        if self.closed:
            raise CancelledError(f"the accumulator {self.name!r} was closed")

    def check_devices(self) -> None:
        """Raises ``BackendUnavailableError`` if the mesh was closed or a device lost."""
        for device in self.devices:
            device.mesh_state.check_usable(device)

    def set_step(self, step: int) -> None:
        """Sets the step, with a warning if it goes back; waiting takes are not looked at."""
        with self.lock:
            self.check_open()
            before, self.step = self.step, step
        if step < before:  # a handler may do anything: no lock is held
            _log.warning(
                "Attempt to set current_global_step_ to smaller value: current %d >= new %d",
                before,
                step,
            )

    def reset(self) -> None:
        """After a take: nothing accumulated, one step on; the lock must be held."""
        nothing = [None] * len(self.devices)
        self.update(count=0, step=self.step + 1, sum_shape=None, totals=nothing)

    def update(self, **attributes: Any) -> None:
        """Sets them all; the lock must be held."""
        vars(self).update(attributes)


class PendingGradient(NamedTuple):
    """What one call brings to one accumulator.

    Attributes:
        state: the accumulator.
        parts: ``(place in state.devices, gradient)``; each is one gradient of the count, those of
            one place are added in this order.
        kind: what the caller's arrays are.
    """

    state: AccumulatorState
    parts: tuple[tuple[int, Buffer | SparseGradient], ...]
    kind: Kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its first gradient."""
        return self.parts[0][1].shape


def locked(states: Sequence[AccumulatorState]) -> AbstractContextManager[object]:
    """Holds the locks of all states, taken in the order of creation: no two callers deadlock."""
    return states[0].lock if len(states) == 1 else _all_locked(states)


@contextmanager
def _all_locked(states: Sequence[AccumulatorState]) -> Iterator[None]:
    with DeferInterrupts(), ExitStack() as held:  # Ctrl-C must leave none of them locked
        for state in sorted(set(states), key=lambda state: state.number):
            held.enter_context(state.lock)
        yield
