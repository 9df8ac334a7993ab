"""The state of an accumulator: counts, partial sums and waiting takes under one lock."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.types import SparseMean
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.comm.replicas import Replicas
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    Done,
    DType,
)
from gradreduce.errors import CancelledError, InvalidArgumentError, log_warning
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.weights import ONE

_numbers = itertools.count()
LAST_STEP = 2**63 - 1  # steps are int64, as in TensorFlow


Taken = tuple[tuple[Part, ...], Kind]


@dataclass(eq=False, slots=True)
class PendingTake:
    """A waiting take, which is in the queue of each of its accumulators.

    Attributes:
        states: the accumulators that it takes from.
        num_required: the number of gradients that each must have.
        deadline: seconds for the devices to compute the result; None without limit.
        done: set when the take has left all queues, with a result or an error.
        in_call: held during the call that waits. If it is free, the call has ended, and the take
            leaves its queues without a result: a second Ctrl-C came before it was withdrawn.
        taken: for each state, its gradient on each of its devices, and the array type to return.
        error: the error that the waiting call raises; None if the take succeeds.
    """

    states: tuple[AccumulatorState, ...]
    num_required: int
    deadline: float | None = None
    done: Done | threading.Event = field(default_factory=Done)
    in_call: threading.Lock = field(default_factory=threading.Lock)
    taken: Mapping[AccumulatorState, Taken] = field(default_factory=dict)
    error: BaseException | None = None

    def is_ready(self) -> bool:
        """Whether the take can complete: first in all queues, enough gradients; needs all locks."""
        return all(
            [
                not state.closed and state.count >= self.num_required and state.first_take() is self
                for state in self.states
            ]
        )

    def leave(self) -> None:
        """Removes the take from every queue; all locks must be held."""
        for state in self.states:
            if self in state.queue:
                state.queue.remove(self)
        self.done.set()


@dataclass(eq=False, repr=False)
class AccumulatorState:
    """The state of an accumulator, shared by all with the same ``shared_name``.

    Attributes:
        dtype: the dtype of gradients and results.
        shape: the shape that gradients must have; None for any shape, and an entry of None for any
            extent.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        devices: the devices that keep a partial sum each.
        over_mesh: whether results are ``Mirrored`` on all devices.
        cross_device_ops: reduces the partial sums of a mesh at a take.
        storage: adds to the partial sums and takes them.
        sparse_mean: what MEAN divides the rows of sparse gradients by: ``"per_row"``, the number of
            gradients that touched the row; ``"per_gradient"``, ``count``. None for dense gradients.
        number: counts states in order of creation; locks are acquired in this order.
        name: the name of the first accumulator with this state, for error messages.
        tensor: the name of the variable whose gradients are summed, for the operation log; empty if
            unknown.
        mesh_state: the ``MeshState`` of the devices.
        lock: guards the attributes below; raises in a forked child.
        count: the number of gradients in the sum.
        excess: the sum of weight - 1 of the gradients in the sum, of all processes, in the units of
            ``weights.py``.
        sources: how many of them each thread has added, by the name of the thread.
        step: the current step; gradients of an earlier step are stale.
        num_dropped: the number of stale gradients so far.
        has_warned: whether a drop of a gradient without ``local_step`` was logged.
        sum_shape: the shape of the gradients in the sum; None if the sum is empty. For sparse
            gradients the shape of the whole array, whose first entry is -1 if it is unknown.
        totals: the partial sum of each device, in the accumulate dtype; None for a device without
            gradients.
        kind: the array type of the first gradient in the sum.
        queue: waiting takes, first in, first out.
        closed: whether the accumulator was closed; then all calls raise ``CancelledError``.
    """

    dtype: DType
    shape: tuple[int | None, ...] | None
    reduction_type: str
    devices: tuple[Device, ...]
    over_mesh: bool
    cross_device_ops: CrossDeviceOps
    storage: Storage
    sparse_mean: SparseMean | None = None

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        self.name = self.tensor = ""
        self.mesh_state = self.devices[0].mesh_state
        self._lock = threading.RLock()
        self.count = self.excess = 0
        self.sources: dict[str, int] = {}
        self.step = 0
        self.num_dropped = 0
        self.has_warned = False
        self.sum_shape: tuple[int, ...] | None = None
        self.totals: list[Any] = [None] * len(self.devices)
        self.kind: Kind = "native"
        self.queue: deque[PendingTake] = deque()
        self.closed = False

    @property
    def label(self) -> str:
        """The name of the variable, or of the accumulator."""
        return self.tensor or self.name

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

    def first_take(self) -> PendingTake | None:
        """Returns the first take whose call waits, and drops those before; needs the lock."""
        while self.queue and not self.queue[0].in_call.locked():
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def check_step(self) -> None:
        """Raises ``InvalidArgumentError`` if the step after a take would not fit in int64."""
        if self.step >= LAST_STEP:
            raise InvalidArgumentError(
                f"the accumulator {self.name!r} is at step {self.step}, and the step after a take "
                "would not fit in int64: call set_global_step with a smaller step"
            )

    def set_step(self, step: int) -> None:
        """Sets the step, with a warning if it decreases; waiting takes are not affected."""
        with self.lock:
            self.check_open()
            before, self.step = self.step, step
        if step < before:  # no lock is held, because a log handler may use accumulators
            log_warning(
                __name__,
                "Attempt to set current_global_step_ to smaller value: current %d >= new %d",
                before,
                step,
            )

    def reset(self, step: int) -> None:
        """Clears the sum and sets the step; the lock must be held."""
        self.update(
            count=0, excess=0, sources={}, step=step, sum_shape=None,
            totals=[None] * len(self.devices),
        )  # fmt: skip

    def weight(self) -> int:
        """Returns the sum of the weights of all gradients, of all processes, in exact units."""
        count = self.count
        if self.over_mesh:  # all processes add as many gradients for each replica
            count = count * Replicas(self.devices).count // len(self.devices)
        return count * ONE + self.excess

    def update(self, **attributes: Any) -> None:
        """Sets the attributes; the lock must be held."""
        vars(self).update(attributes)


class Addend(NamedTuple):
    """A validated gradient of one replica.

    Attributes:
        device_index: index in ``AccumulatorState.devices`` of the device whose sum it is added to.
        values: the array of a dense gradient, or the rows of a sparse one.
        shape: the shape of the gradient; for a sparse one the shape of the whole array.
        segments: for a sparse gradient, the ``Segments`` of rows that have the same index.
        weight: multiplies it; not 0, because a gradient of weight 0 is not read.
    """

    device_index: int
    values: Buffer
    shape: tuple[int, ...]
    segments: Any = None
    weight: float = 1.0


class PendingGradient(NamedTuple):
    """The validated gradients of one call for one accumulator.

    Attributes:
        state: the accumulator.
        parts: the gradient of each replica whose weight is not 0. Parts of the same device are
            added in this order.
        kind: the type of the caller's arrays.
        num_gradients: the number of gradients, also of those with weight 0.
        excess: see ``AccumulatorState``.
    """

    state: AccumulatorState
    parts: tuple[Addend, ...]
    kind: Kind
    num_gradients: int
    excess: int = 0


@dataclass(eq=False, slots=True)
class Addition:
    """A partial sum, and the gradients that one call adds to it.

    Attributes:
        owner: the ``AccumulatorState``; in AGN the variable, which has a dtype and a shape, too.
        device_index: index of the device in the owner's ``devices``.
        device: that device.
        total: the sum before the call, or None if it was empty. ``Storage.allocate`` replaces it by
            the sum after the call, whose new memory is uninitialized until the launches.
        gradients: in the order of addition.
        in_place: whether the launches overwrite the memory of the sum before the call.
        steps: what each launch adds; set by ``Storage.allocate``.
    """

    owner: Any
    device_index: int
    device: Device
    total: Any
    gradients: list[Addend]
    in_place: bool = False
    steps: Sequence[Any] = ()


Launches = Sequence[Callable[[], None]]


def launch_all(launches: Launches) -> None:
    """Calls the launches, in their order."""
    for launch in launches:
        launch()


class Storage(ABC):
    """How accumulators store their partial sums: as dense arrays, or as rows with indices.

    Only the storage knows the type of the entries of ``AccumulatorState.totals``. All dense
    accumulators share one storage, and all sparse ones, so that a call on several accumulators can
    share launches.

    Attributes:
        format: identifies the kind of accumulator and the version of its checkpoints.
        overwrites: whether ``take`` may overwrite sums. Storages that do are called last, so that
            an error of the others leaves all sums intact.
        num_words: the number of floats whose exact sum is an element of a partial sum; 1: sums are
            rounded.
        is_sparse: whether gradients are IndexedSlices. Then a take merges the sums of a mesh;
            otherwise ``cross_device_ops`` reduces them.
    """

    format: str
    is_sparse: bool
    overwrites = False
    num_words = 1

    def rehearse(self, state: AccumulatorState, dtype: DType, weight: float = 1) -> None:
        """Compiles the kernels that add gradients of this dtype, and those of a take.

        Not those of ``cross_device_ops``. Override it if gradients are read on the host.
        """
        of_state = (state.dtype, state.reduction_type, state.sparse_mean, state.over_mesh)
        key = (self, dtype, weight == 1, *of_state)
        compile_ahead(state.devices, key, partial(_add_and_take, state, dtype, weight))

    @abstractmethod
    def validate(self, state: AccumulatorState, grad: Any, cast: bool) -> Any:
        """Checks the gradient of a replica; returns an array or IndexedSlices.

        Raises:
            TypeError: it is not an array or, for sparse sums, not IndexedSlices.
            ValueError: its dtype or shape does not fit the accumulator's.
        """

    @abstractmethod
    def to_addend(self, state: AccumulatorState, grad: Any) -> Addend:
        """Converts a validated gradient, on the device that ``to_sum_device`` selects."""

    @abstractmethod
    def check_sum_shape(self, gradient: Addend, sum_shape: tuple[int, ...]) -> None:
        """Checks a converted gradient against the shape of the sum.

        Raises:
            InvalidArgumentError: the shape differs, or an index is too large.
        """

    @abstractmethod
    def allocate(self, additions: Sequence[Addition]) -> None:
        """Sets ``total``, ``in_place`` and ``steps`` of each; must not write existing sums."""

    @abstractmethod
    def command(self, steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
        """Prepares a launch that adds one step to each of several sums of a GPU."""

    @abstractmethod
    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """Returns the gradient of each state on each of its devices.

        Args:
            states: each has at least one gradient.
            guard: enter ``fail_on_partial_write`` here before sums are overwritten. It marks their
                devices as failed if anything fails before the caller has reset the states.
        """

    def report_inexact(self, states: Sequence[AccumulatorState]) -> None:
        """Queues warnings about exact sums that did not fit into their words."""
        if self.num_words == 1:
            return
        flags = [
            (state.label, total.flag)
            for state in states
            for total in state.totals
            if total is not None
        ]
        if flags:
            states[0].mesh_state.inexact.add(flags)

    @abstractmethod
    def fits(self, shape: tuple[int, ...], required: tuple[int | None, ...] | None) -> bool:
        """Whether a sum of ``shape`` fits an accumulator whose shape is ``required``."""

    @abstractmethod
    def save(self, total: Any) -> Any:
        """Queues a copy of a partial sum; returns what ``checkpoint`` downloads for it."""

    @abstractmethod
    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Any]:
        """Validates a saved partial sum; returns a function that uploads it into new memory.

        Args:
            name: the name of the entry, for error messages.
            saved: the entry.
            dtype: the dtype of the accumulator.
            shape: the shape of the sum.
            count: the number of gradients in the sum.
        """


def _add_and_take(
    state: AccumulatorState, dtype: DType, weight: float, dry_run: DryRunMesh
) -> None:
    """Adds gradients to copies of an accumulator, and takes them."""
    storage = state.storage
    here = dry_run.devices_like(state.devices if storage.is_sparse else state.devices[:1])
    dry = replace(state, shape=None, devices=here, over_mesh=storage.is_sparse)
    for indices in ([0, 1], [0, 2, 3, 4], [0]):  # new rows, more rows, rows in place
        rows = [device.empty((len(indices), 2), dtype) for device in here for _ in range(2)]
        gradients = [
            IndexedSlices(each, indices, (5, 2)) if storage.is_sparse else each.view(0, (2,))
            for each in rows
        ]
        parts = [storage.to_addend(dry, each)._replace(weight=weight) for each in gradients]
        pending = PendingGradient(dry, tuple(parts), "native", len(parts))
        sums, out_of_place, in_place = additions_of([pending])
        launch_all([*out_of_place, *in_place])
        for each in sums:
            dry.totals[each.device_index] = each.total
    dry.update(count=2, sum_shape=parts[0].shape)
    with ExitStack() as guard:
        storage.take([dry], guard)


def additions_of(
    pending_gradients: Sequence[PendingGradient],
) -> tuple[list[Addition], Launches, Launches]:
    """Prepares additions and their memory; all locks must be held. On error, nothing has changed.

    On each GPU, one launch adds the n-th step of all sums of a storage.

    Returns:
        The additions; launches that write new memory, which leave existing sums unchanged if one
        fails; and launches that overwrite existing sums, which are undefined if one fails.
    """
    sums: list[Addition] = []
    by_storage: dict[Storage, list[Addition]] = {}
    for state, parts, *_ in pending_gradients:
        by_device: dict[int, list[Addend]] = {}
        for part in parts:
            by_device.setdefault(part.device_index, []).append(part)
        for index, gradients in by_device.items():
            new = Addition(state, index, state.devices[index], state.totals[index], gradients)
            sums.append(new)
            by_storage.setdefault(state.storage, []).append(new)
    out_of_place: list[Callable[[], None]] = []
    in_place: list[Callable[[], None]] = []
    for storage, additions in by_storage.items():
        first, last = launches_of(storage, additions)
        out_of_place += first
        in_place += last
    return sums, out_of_place, in_place


def launches_of(storage: Storage, additions: Sequence[Addition]) -> tuple[Launches, Launches]:
    """Prepares the memory and the launches of additions; see ``additions_of``."""
    storage.allocate(additions)
    launches: dict[bool, list[Callable[[], None]]] = {False: [], True: []}  # by ``in_place``
    waves: dict[tuple[bool, int, int], list[tuple[Addition, Any]]] = {}
    for addition in additions:
        for number, step in enumerate(addition.steps):
            key = (addition.in_place, number, addition.device.physical)
            waves.setdefault(key, []).append((addition, step))
    for key in sorted(waves):
        launches[key[0]].append(storage.command(waves[key]))
    return launches[False], launches[True]


def hold_locks(states: Sequence[AccumulatorState]) -> AbstractContextManager[object]:
    """Holds the locks of all states; acquires them in order of creation."""
    return states[0].lock if len(states) == 1 else _hold_all_locks(states)


@contextmanager
def _hold_all_locks(states: Sequence[AccumulatorState]) -> Iterator[None]:
    with DeferInterrupts(), ExitStack() as held:  # Ctrl-C must leave none of them locked
        for state in sorted(set(states), key=lambda state: state.number):
            held.enter_context(state.lock)
        yield
