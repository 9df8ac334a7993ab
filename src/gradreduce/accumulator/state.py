"""The state of an accumulator: counts, partial sums and waiting takes under one lock."""

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

_log = logging.getLogger(__name__)
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """One sparse gradient to be added.

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
        """The shape of the whole array."""
        return self.dense_shape

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return self.values.dtype


@dataclass(frozen=True, eq=False)
class SparseSum:
    """The partial sum of sparse gradients on one device.

    Attributes:
        slots: which row holds which index, and how many gradients touched it.
        values: ``(capacity, …)``, in the accumulate dtype; rows from ``slots.num_rows`` on are not
            initialized.
    """

    slots: RowIndex
    values: Buffer

    @property
    def rows(self) -> Buffer:
        """The rows of ``values`` that are in use."""
        return self.values.view(0, (self.slots.num_rows, *self.values.shape[1:]))


@dataclass(eq=False, slots=True)
class PendingTake:
    """A waiting take, queued at each of its accumulators.

    Attributes:
        states: the accumulators that it takes from.
        num_required: the number of gradients that each must have.
        deadline: seconds for the devices to compute the result; None without limit.
        done: set when it has left all queues, with a result or an error.
        taken: for each state, its gradient on each of its devices.
        kinds: for each state, the array type to return.
        error: raised when it completes.
    """

    states: tuple[AccumulatorState, ...]
    num_required: int
    deadline: float | None = None
    done: Done | threading.Event = field(default_factory=Done)
    taken: list[tuple[Part, ...]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    error: BaseException | None = None

    def is_ready(self) -> bool:
        """Whether it is first in every queue and all have enough; all locks must be held."""
        for state in self.states:
            heads = state.queue and state.queue[0] is self
            if not heads or state.closed or state.count < self.num_required:
                return False
        return True

    def leave(self) -> None:
        """Removes it from every queue; all locks must be held."""
        for state in self.states:
            if self in state.queue:
                state.queue.remove(self)
        self.done.set()


class AccumulatorState:
    """The state of an accumulator, shared by all with the same ``shared_name``.

    Attributes:
        number: order of creation, in which locks are taken.
        name: of its first accumulator, for errors.
        dtype: of gradients and results.
        shape: what gradients must fit; None for anything, None entries for any extent.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        devices: one partial sum is kept on each.
        over_mesh: whether results are ``Mirrored`` on all devices.
        cross_device_ops: reduces the partial sums of a mesh at a take.
        sparse: whether gradients are IndexedSlices.
        lock: guards everything below; raises in a forked child.
        count: gradients in the sum.
        step: gradients of an earlier one are stale.
        num_dropped: stale ones so far.
        has_warned: whether a drop of a gradient without ``local_step`` was logged.
        sum_shape: of the gradients in the sum; None without any. For sparse ones that of the whole
            array, -1 as its first entry if that is unknown.
        totals: the partial sum of each device, in the accumulate dtype; None without gradients.
        kind: of the first gradient kept since the last take.
        queue: waiting takes, first in, first out.
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
        """The lock; raises ``BackendUnavailableError`` in a forked child."""
        self.devices[0].mesh_state.check_process()
        return self._lock

    def check_open(self) -> None:
        """Raises ``CancelledError`` if the accumulator was closed; the lock must be held."""
        if self.closed:
            raise CancelledError(f"the accumulator {self.name!r} was closed")

    def check_devices(self) -> None:
        """Raises ``BackendUnavailableError`` if the mesh was closed or a device has failed."""
        for device in self.devices:
            device.mesh_state.check_usable(device)

    def set_step(self, step: int) -> None:
        """Sets the step, with a warning if it decreases; waiting takes are not affected."""
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
        """Clears the sum and increments the step; the lock must be held."""
        nothing = [None] * len(self.devices)
        self.update(count=0, step=self.step + 1, sum_shape=None, totals=nothing)

    def update(self, **attributes: Any) -> None:
        """Sets the attributes; the lock must be held."""
        vars(self).update(attributes)


class PendingGradient(NamedTuple):
    """The validated gradients of one call for one accumulator.

    Attributes:
        state: the accumulator.
        parts: ``(index in state.devices, gradient)``; each counts as one gradient, those of one
            device are added in this order.
        kind: the type of the caller's arrays.
    """

    state: AccumulatorState
    parts: tuple[tuple[int, Buffer | SparseGradient], ...]
    kind: Kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first gradient."""
        return self.parts[0][1].shape


def locked(states: Sequence[AccumulatorState]) -> AbstractContextManager[object]:
    """Holds the locks of all states; acquires them in order of creation."""
    return states[0].lock if len(states) == 1 else _all_locked(states)


@contextmanager
def _all_locked(states: Sequence[AccumulatorState]) -> Iterator[None]:
    with DeferInterrupts(), ExitStack() as held:  # Ctrl-C must leave none of them locked
        for state in sorted(set(states), key=lambda state: state.number):
            held.enter_context(state.lock)
        yield
