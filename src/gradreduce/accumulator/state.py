"""The state of an accumulator: counts, partial sums and waiting takes under one lock."""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
        shape: of the whole array; -1 as its first entry if that is unknown.
    """

    values: Buffer
    segments: Segments
    shape: tuple[int, ...]

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


Taken = tuple[tuple[Part, ...], Kind]


@dataclass(eq=False, slots=True)
class PendingTake:
    """A waiting take, queued at each of its accumulators.

    Attributes:
        states: the accumulators that it takes from.
        num_required: the number of gradients that each must have.
        deadline: seconds for the devices to compute the result; None without limit.
        done: set when it has left all queues, with a result or an error.
        taken: for each state, its gradient on each of its devices, and the array type to return.
        error: raised when it completes.
    """

    states: tuple[AccumulatorState, ...]
    num_required: int
    deadline: float | None = None
    done: Done | threading.Event = field(default_factory=Done)
    taken: list[Taken] = field(default_factory=list)
    error: BaseException | None = None

    def is_first_of(self, state: AccumulatorState) -> bool:
        """Whether it is first in the queue of an accumulator, whose lock must be held."""
        return bool(state.queue) and state.queue[0] is self

    def is_ready(self) -> bool:
        """Whether it is first in every queue and all have enough; all locks must be held."""
        for state in self.states:
            if state.closed or state.count < self.num_required or not self.is_first_of(state):
                return False
        return True

    def leave(self) -> None:
        """Removes it from every queue; all locks must be held."""
        for state in self.states:
            if self in state.queue:
                state.queue.remove(self)
        self.done.set()


@dataclass(eq=False, repr=False)
class AccumulatorState:
    """The state of an accumulator, shared by all with the same ``shared_name``.

    Attributes:
        dtype: of gradients and results.
        shape: what gradients must fit; None for anything, None entries for any extent.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        devices: one partial sum is kept on each.
        over_mesh: whether results are ``Mirrored`` on all devices.
        cross_device_ops: reduces the partial sums of a mesh at a take.
        storage: of the partial sums.
        number: order of creation, in which locks are taken.
        name: of its first accumulator, for errors.
        tensor: the name of its variable, in what a take does; empty: it has none.
        mesh_state: of the devices.
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

    dtype: DType
    shape: tuple[int | None, ...] | None
    reduction_type: str
    devices: tuple[Device, ...]
    over_mesh: bool
    cross_device_ops: CrossDeviceOps
    storage: Storage

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        self.name = self.tensor = ""
        self.mesh_state = self.devices[0].mesh_state
        self._lock = threading.RLock()
        self.count = 0
        self.step = 0
        self.num_dropped = 0
        self.has_warned = False
        self.sum_shape: tuple[int, ...] | None = None
        self.totals: list[Any] = [None] * len(self.devices)
        self.kind: Kind = "native"
        self.queue: deque[PendingTake] = deque()
        self.closed = False

    @property
    def lock(self) -> threading.RLock:
        """The lock; raises ``BackendUnavailableError`` in a forked child."""
        self.mesh_state.check_process()
        return self._lock

    def check_open(self) -> None:
        """Raises ``CancelledError`` if the accumulator was closed; the lock must be held."""
        if self.closed:
            raise CancelledError(f"the accumulator {self.name!r} was closed")

    def check_devices(self) -> None:
        """Raises ``BackendUnavailableError`` if the mesh was closed or a device has failed."""
        for device in self.devices:
            self.mesh_state.check_usable(device)

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

    def reset(self, step: int) -> None:
        """Clears the sum and sets the step; the lock must be held."""
        self.update(count=0, step=step, sum_shape=None, totals=[None] * len(self.devices))

    def update(self, **attributes: Any) -> None:
        """Sets the attributes; the lock must be held."""
        vars(self).update(attributes)


# Index in ``AccumulatorState.devices``, and gradient.
Addend = tuple[int, Buffer | SparseGradient]


class PendingGradient(NamedTuple):
    """The validated gradients of one call for one accumulator.

    Attributes:
        state: the accumulator.
        parts: each counts as one gradient; those of one device are added in this order.
        kind: the type of the caller's arrays.
    """

    state: AccumulatorState
    parts: tuple[Addend, ...]
    kind: Kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first gradient."""
        return self.parts[0][1].shape

    @property
    def buffers(self) -> list[Buffer]:
        """The arrays, or the rows of sparse ones."""
        return [each if isinstance(each, Buffer) else each.values for _, each in self.parts]


@dataclass
class Additions:
    """Prepared additions of gradients to partial sums: memory is allocated.

    Attributes:
        out_of_place: launches that write new sums; on error, the existing sums are unchanged.
        in_place: launches that add to sums; after an error, contents of existing ones are
            undefined.
        overwritten: devices of the existing sums that ``in_place`` writes.
        totals: each sum that changes, with its accumulator and device index.
    """

    out_of_place: list[Callable[[], None]]
    in_place: list[Callable[[], None]]
    overwritten: list[Device]
    totals: list[tuple[AccumulatorState, int, Buffer | SparseSum]]

    def launch_out_of_place(self) -> None:
        """Writes new sums."""
        for launch in self.out_of_place:
            launch()

    def launch_in_place(self) -> None:
        """Adds to sums, after ``launch_out_of_place``."""
        for launch in self.in_place:
            launch()


class Storage(ABC):
    """How accumulators store their partial sums: as dense arrays, or as rows with indices.

    Attributes:
        sparse: whether sums are rows with indices.
        format: identifies the kind of accumulator and the version of a checkpoint's layout.
    """

    sparse: bool
    format: str

    @abstractmethod
    def prepare(self, state: AccumulatorState) -> None:
        """Compiles the kernels for gradients of the accumulator's dtype, and for takes."""

    @abstractmethod
    def checked(self, state: AccumulatorState, grad: Any, cast: bool) -> Any:
        """Checks the gradient of a replica; returns an array or IndexedSlices.

        Raises:
            TypeError: it is not an array, or not IndexedSlices for sparse sums.
            ValueError: its dtype or shape does not fit the accumulator's.
        """

    @abstractmethod
    def converted(self, state: AccumulatorState, grad: Any, cast: bool) -> Addend:
        """Checks and converts the gradient of a replica; see ``to_sum_device`` for where."""

    @abstractmethod
    def prepare_parts(self, state: AccumulatorState, parts: Sequence[Addend]) -> None:
        """Compiles the kernels for these gradients that ``prepare`` did not."""

    @abstractmethod
    def check_sum_shape(self, gradient: Any, wanted: tuple[int, ...]) -> None:
        """Checks a converted gradient against the shape of the sum.

        Raises:
            InvalidArgumentError: the shape differs, or an index is too large.
        """

    @abstractmethod
    def additions(self, pending_gradients: Sequence[PendingGradient]) -> Additions:
        """Prepares additions; all locks are held. On error, nothing has changed."""

    @abstractmethod
    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """Returns the gradient of each state on each of its devices.

        Args:
            states: each with at least one gradient.
            guard: if sums are overwritten, this marks their devices as failed on an error.
        """

    @abstractmethod
    def fits(self, shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
        """Whether a sum of ``shape`` fits an accumulator whose shape is ``wanted``."""

    @abstractmethod
    def save(self, total: Any) -> Callable[[float | None], Any]:
        """Queues a copy of a partial sum; the result downloads it until a point in time."""

    @abstractmethod
    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Buffer | SparseSum]:
        """Validates a saved partial sum; the result uploads it into new memory.

        Args:
            name: of the entry, for errors.
            saved: the entry.
            dtype: of the accumulator.
            shape: of the sum.
            count: gradients in the sum.
        """


def locked(states: Sequence[AccumulatorState]) -> AbstractContextManager[object]:
    """Holds the locks of all states; acquires them in order of creation."""
    return states[0].lock if len(states) == 1 else _all_locked(states)


@contextmanager
def _all_locked(states: Sequence[AccumulatorState]) -> Iterator[None]:
    with DeferInterrupts(), ExitStack() as held:  # Ctrl-C must leave none of them locked
        for state in sorted(set(states), key=lambda state: state.number):
            held.enter_context(state.lock)
        yield
