"""The state of an accumulator: counts, partial sums and waiting takes under one lock."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Part
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    Done,
    DType,
    fork_streams,
    join_streams,
)
from gradreduce.errors import CancelledError, log_warning
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

_numbers = itertools.count()


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
            log_warning(
                __name__,
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


class Addend(NamedTuple):
    """A validated gradient of one replica.

    Attributes:
        device_index: index in ``AccumulatorState.devices`` of the device whose sum it is added to.
        values: its array, or its rows.
        shape: of the gradient as a whole.
        segments: of rows: ``Segments`` of those that have the same index.
    """

    device_index: int
    values: Buffer
    shape: tuple[int, ...]
    segments: Any = None


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


@dataclass(eq=False, slots=True)
class Addition:
    """A partial sum, and the gradients that one call adds to it.

    Attributes:
        state: the accumulator.
        device_index: index of the device in ``state.devices``.
        device: that device.
        total: the sum before the call, None without; ``Storage.allocate`` sets it to the sum
            after the call, whose new memory is uninitialized until the launches.
        gradients: in the order of addition.
        in_place: whether the launches write memory of the sum before the call.
        steps: one launch adds each; ``Storage.allocate`` sets them.
    """

    state: AccumulatorState
    device_index: int
    device: Device
    total: Any
    gradients: list[Addend]
    in_place: bool = False
    steps: Sequence[Any] = ()


@dataclass
class Additions:
    """Prepared additions of gradients to partial sums: memory is allocated.

    Attributes:
        sums: that change.
        out_of_place: launches that write new memory; on error, the existing sums are unchanged.
        in_place: launches that add to sums; after an error, contents of existing ones are
            undefined.
    """

    sums: list[Addition]
    out_of_place: list[Callable[[], None]]
    in_place: list[Callable[[], None]]


class Storage(ABC):
    """How accumulators store their partial sums: as dense arrays, or as rows with indices.

    What ``AccumulatorState.totals`` has for a device with gradients only its storage knows. All
    accumulators of a kind share one storage, so that a call on several of them shares launches.

    Attributes:
        format: identifies the kind of accumulator and the version of a checkpoint's layout.
        overwrites: whether ``take`` may overwrite sums; then it comes after those that do not.
    """

    format: str
    overwrites = False

    @abstractmethod
    def prepare(self, state: AccumulatorState, dtype: DType) -> None:
        """Compiles the kernels that add gradients of this dtype."""

    @abstractmethod
    def prepare_take(self, state: AccumulatorState) -> None:
        """Compiles the kernels of a take."""

    @abstractmethod
    def checked(self, state: AccumulatorState, grad: Any, cast: bool) -> Any:
        """Checks the gradient of a replica; returns an array or IndexedSlices.

        Raises:
            TypeError: it is not an array, or not IndexedSlices for sparse sums.
            ValueError: its dtype or shape does not fit the accumulator's.
        """

    @abstractmethod
    def converted(self, state: AccumulatorState, checked: Any) -> Addend:
        """Converts a checked gradient; see ``to_sum_device`` for where."""

    @abstractmethod
    def check_sum_shape(self, gradient: Addend, wanted: tuple[int, ...]) -> None:
        """Checks a converted gradient against the shape of the sum.

        Raises:
            InvalidArgumentError: the shape differs, or an index is too large.
        """

    @abstractmethod
    def allocate(self, additions: Sequence[Addition]) -> None:
        """Sets ``total``, ``in_place`` and ``steps`` of each; may write only new memory."""

    @abstractmethod
    def command(
        self, steps: Sequence[tuple[Addition, Any]]
    ) -> tuple[list[Device], Callable[[], None]]:
        """Prepares a launch that adds one step to each of several sums of a GPU.

        Returns:
            The devices whose memory it accesses, first the one that launches; and the launch.
        """

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
    def save(self, total: Any) -> Any:
        """Queues a copy of a partial sum; the result is part of what ``checkpoint`` downloads."""

    @abstractmethod
    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Any]:
        """Validates a saved partial sum; the result uploads it into new memory.

        Args:
            name: of the entry, for errors.
            saved: the entry.
            dtype: of the accumulator.
            shape: of the sum.
            count: gradients in the sum.
        """


def additions_of(pending_gradients: Sequence[PendingGradient]) -> Additions:
    """Prepares additions; all locks are held. On error, nothing has changed.

    Each GPU adds the n-th steps of all sums of a storage in one launch.
    """
    sums: dict[tuple[AccumulatorState, int], Addition] = {}
    by_storage: dict[Storage, list[Addition]] = {}
    for state, parts, _ in pending_gradients:
        for part in parts:
            index = part.device_index
            if (state, index) in sums:
                sums[state, index].gradients.append(part)
                continue
            device, total = state.devices[index], state.totals[index]
            made = sums[state, index] = Addition(state, index, device, total, [part])
            by_storage.setdefault(state.storage, []).append(made)
    launches: dict[bool, list[Callable[[], None]]] = {False: [], True: []}
    for storage, additions in by_storage.items():
        storage.allocate(additions)
        waves: dict[tuple[bool, int, int], list[tuple[Addition, Any]]] = {}
        for each in additions:
            for number, step in enumerate(each.steps):
                key = (each.in_place, number, each.device.physical)
                waves.setdefault(key, []).append((each, step))
        for key in sorted(waves):
            launches[key[0]].append(partial(_launch, *storage.command(waves[key])))
    return Additions(list(sums.values()), launches[False], launches[True])


def _launch(devices: Sequence[Device], add: Callable[[], None]) -> None:
    join_streams(devices[0], devices)
    add()
    fork_streams(devices[0], devices)


def locked(states: Sequence[AccumulatorState]) -> AbstractContextManager[object]:
    """Holds the locks of all states; acquires them in order of creation."""
    return states[0].lock if len(states) == 1 else _all_locked(states)


@contextmanager
def _all_locked(states: Sequence[AccumulatorState]) -> Iterator[None]:
    with DeferInterrupts(), ExitStack() as held:  # Ctrl-C must leave none of them locked
        for state in sorted(set(states), key=lambda state: state.number):
            held.enter_context(state.lock)
        yield
