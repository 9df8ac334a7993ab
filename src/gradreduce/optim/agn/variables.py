"""An AGN worker's variables: local copies, accumulations, and values computed when they are read.

The sum of a period is zero after a push, and ``local_step`` is a number that the host counts. To
write either at every step would cost a launch that nobody reads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseAdditions, prepare_gradient
from gradreduce.accumulator.state import (
    AccumulatorState,
    PendingGradient,
    SparseGradient,
    SparseSum,
)
from gradreduce.arrays.convert import numbers
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesced, densified
from gradreduce.arrays.variable import Variable, reused
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import Buffer, Device, DType, Mesh, accumulate_dtype, as_dtype, copy_over
from gradreduce.errors import NotCopied, listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .center import AGNCenter, process_wide

__all__ = ["AGNCustomGetter", "Accumulation", "HostCounter", "LazyVariable", "Member", "Revision"]


class LazyVariable(Variable):
    """Whatever reads it asks for its buffers, and so gets the truth.

    Args:
        name: of the Variable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainable = False

    @property
    @abstractmethod
    def _true(self) -> tuple[Buffer, ...]:
        """Memory that holds what the Variable is."""

    def assign(self, value: Any) -> NoReturn:
        """Refused: what is assigned would be lost."""
        raise TypeError(f"{self.name!r} is read-only: only its optimizer writes it")

    def assign_add(self, delta: Any) -> NoReturn:
        """Refused, likewise."""
        raise TypeError(f"{self.name!r} is read-only: only its optimizer writes it")

    @property
    def _buffers(self) -> tuple[Buffer, ...]:  # type: ignore[override]  # which a plain one keeps
        return self._true


class HostCounter(LazyVariable):
    """An int32 that the host counts.

    Args:
        name: of the Variable.
        device: where it is shown.

    Attributes:
        value: what it is.
    """

    def __init__(self, name: str, device: Device) -> None:
        super().__init__(name)
        self.value = 0
        self._device = device
        self._shown: tuple[int, Buffer] | None = None

    @property
    def _true(self) -> tuple[Buffer, ...]:
        if self._shown is None or self._shown[0] != self.value:
            number = numbers(self.value, as_dtype("int32"))
            self._shown = (self.value, self._device.upload(number))
        return (self._shown[1],)


# What the memory of a sum is: of an earlier period or not there, or the sum.
_Holds = Literal["nothing", "sum"]


class Revision:
    """How often the sums of a worker became something else than a sum of one gradient more."""

    count = 0


class Accumulation(LazyVariable):
    """The sum of the gradients of a worker's variable since its last push.

    Of the accumulate type: float32 of halves. It is dense, on each device of the variable, or, as
    long as every gradient was sparse, the rows that they touched, on the first. Only to be read:
    whoever does is given rows as an array, and the sum stays what it is, because the centre's
    update of rows is another than one of an array that is zero elsewhere.

    Args:
        local: the worker's variable.
        name: of this one.
        changes: of the worker.

    Attributes:
        rows: the sparse sum; None if it is dense, or nothing.
        changes: see there.
    """

    def __init__(self, local: Variable, name: str, changes: Revision) -> None:
        super().__init__(name)
        self._local, self.changes = local, changes
        self._memory: tuple[Buffer, ...] = ()
        self._holds: _Holds = "nothing"
        self.rows: AccumulatorState | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those of the variable."""
        return self._local.devices

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the variable."""
        return self._local.shape

    @property
    def dtype(self) -> DType:
        """The accumulate type."""
        return accumulate_dtype(self._local.dtype)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient came since the last push."""
        return self.rows is None and self._holds != "sum"

    @property
    def is_first(self) -> bool:
        """Whether a dense gradient is to be written to the memory: what is there is not read."""
        return self._holds != "sum"

    @property
    def memory(self) -> tuple[Buffer, ...]:
        """The memory for a dense sum on each device; it holds anything if ``is_first``."""
        if not self._memory:
            self._memory = tuple(device.empty(self.shape, self.dtype) for device in self.devices)
        return self._memory

    @property
    def allocated(self) -> tuple[Buffer, ...]:
        """As ``memory``, but nothing is made."""
        return self._memory

    def added(self) -> None:
        """A dense gradient was added, or written."""
        if self._holds != "sum":
            self._update("sum")

    def cleared(self) -> None:
        """It is zero from now on; launches nothing."""
        self._update("nothing")

    @property
    def state(self) -> tuple[tuple[Buffer, ...], _Holds, AccumulatorState | None]:
        """What it is, to be set again if a call is refused that has made it dense."""
        return self._memory, self._holds, self.rows

    @state.setter
    def state(self, before: tuple[tuple[Buffer, ...], _Holds, AccumulatorState | None]) -> None:
        self._memory, holds, rows = before
        self._update(holds, rows)

    def _update(self, holds: _Holds, rows: AccumulatorState | None = None) -> None:
        self._holds, self.rows = holds, rows
        self.changes.count += 1

    def pending_gradient(self, gradient: IndexedSlices) -> PendingGradient:
        """A sparse gradient on its way into the rows; whoever adds it says ``added_rows``."""
        state = self.rows or AccumulatorState(
            self._local.dtype, self.shape, "SUM", self.devices[:1], False, _NO_OPS, sparse=True
        )
        prepare_gradient(state, gradient.dtype)
        segments = ops.plan_segments(gradient.indices)
        part = SparseGradient(gradient.values, segments, self.shape)
        return PendingGradient(state, ((0, part),), "native")

    def added_rows(self, state: AccumulatorState) -> None:
        """A sparse gradient was added to these."""
        if self.rows is not state:
            self._update(self._holds, state)

    @property
    def sparse_sum(self) -> SparseSum:
        """The rows, which there must be."""
        assert self.rows is not None
        (total,) = self.rows.totals
        assert isinstance(total, SparseSum)
        return total

    @property
    def current(self) -> Buffer | SparseSum:
        """The sum on the first device, as it is; there must be one."""
        return self.memory[0] if self.rows is None else self.sparse_sum

    def make_dense(self) -> None:
        """Rows become an array, on every device."""
        if self.rows is not None:
            self._memory = self._as_arrays()
            self._update("sum")

    def _as_arrays(self) -> tuple[Buffer, ...]:
        """The rows on every device, with zeros elsewhere, in new memory."""
        (whole,) = densified([self.merged()])
        return (whole, *(_copied(device, whole) for device in self.devices[1:]))

    def merged(self) -> IndexedSlices:
        """The rows in the order of their indices, in new memory."""
        total = self.sparse_sum
        plan, _ = ops.merged_row_index([total.slots], mean=False)
        (rows,) = coalesced([total.rows], [plan])
        return IndexedSlices.of(rows, plan.indices, self.shape)

    def update(self, dense: Any | None, rows: IndexedSlices | None) -> None:
        """What a checkpoint holds, instead of what is there.

        Args:
            dense: on the host; None: it is not dense.
            rows: on the first device; None: it is not sparse.
        """
        self.cleared()
        if dense is not None:
            self._memory = tuple(device.upload(dense) for device in self.devices)
            self._update("sum")
        elif rows is not None:
            pending_gradient = self.pending_gradient(rows)
            addition = SparseAdditions([pending_gradient])
            addition.launch_out_of_place()
            ((state, index, total),) = addition.totals()
            state.totals[index] = total
            self.added_rows(state)

    @property
    def _true(self) -> tuple[Buffer, ...]:
        if self.rows is not None:
            return self._as_arrays()
        if self._holds == "nothing":  # a step of the worker may be writing there at this moment
            return tuple(device.zeros(self.shape, self.dtype) for device in self.devices)
        return self._memory


def _copied(device: Device, buffer: Buffer) -> Buffer:
    copied = device.empty(buffer.shape, buffer.dtype)
    copy_over(device, copied, buffer)
    return copied


_NO_OPS = AllReduceCrossDeviceOps()  # a sum on one device is never reduced


@dataclass(frozen=True, eq=False)
class Member:
    """A variable of a worker.

    Attributes:
        local: the worker's copy.
        center: the centre's.
        total: the sum of its gradients since the last push.
    """

    local: Variable
    center: Variable
    total: Accumulation


class AGNCustomGetter(NotCopied):
    """Makes the local, centre and accumulation copies of a worker's variables.

    One for each worker: the ``custom_getter`` of ``gr.get_variable``. A trainable variable ``n``
    lies on the worker; the centre has ``global_center_variable/n``, made by whichever worker comes
    first, with that one's value, and the worker ``grad_variable/n``, zero at first. Others lie on
    the worker, alone. A worker that begins at another value than the centre's wants the hook of its
    ``AGNOptimizer``, or ``get_init_op``, before its first step.

    Args:
        worker_device: the worker's device, its name (``"gpu:1"``) or a ``torch.device``, in the
            mesh of ``center``, else in ``gr.default_mesh()``; or its part of a mesh: then its
            variables are mirrored there, and it is several replicas.
        center: where the centre variables are. Default: the process-wide centre, spread over the
            mesh of the getter that comes first; it serves as long as one of its getters lives. So
            let go of a training's getters before the next begins, or give each its own centre.

    Raises:
        DeviceMismatchError: the worker's device is not of the centre's mesh.
        TypeError: an argument of another type.
        ValueError: a name of a device that the mesh has not.
    """

    _copied_as = "make one for each worker"

    def __init__(
        self, worker_device: DeviceLike | Mesh, *, center: AGNCenter | None = None
    ) -> None:
        if center is not None and not isinstance(center, AGNCenter):
            raise TypeError(f"center={center!r} is not an AGNCenter")
        named_in = None if center is None else center.devices[0].mesh
        self.devices: tuple[Device, ...] = as_devices(worker_device, "worker_device=", named_in)
        self.worker_device = worker_device if isinstance(worker_device, Mesh) else self.devices[0]
        for device in self.devices:
            device.mesh_state.check_usable(device)
        self.center = process_wide(self.devices[0], self) if center is None else center
        self.center.check_reached(self.devices)
        self._members: dict[Variable, Member] = {}
        self._made: dict[str, Variable] = {}
        self._changes = Revision()

    def __repr__(self) -> str:
        names = listed(device.name for device in self.devices)
        return f"<AGNCustomGetter of {len(self._members)} variables on {names}>"

    def __call__(
        self,
        getter: Callable[..., Variable],
        name: str,
        initial_value: Any,
        *,
        trainable: bool = True,
        reuse: bool = False,
        **options: Any,
    ) -> Variable:
        """See ``gr.get_variable``, which calls it; ``reuse`` gives what this getter has made.

        Raises:
            ValueError: this getter has made a trainable one of this name, which would be the same
                at the centre, or the centre has one with another shape or dtype. With ``reuse``,
                see there.
        """
        before = self._made.get(name)
        if reuse:
            shape, dtype = options.get("shape"), options.get("dtype")
            return reused(before, name, initial_value, shape, dtype)
        if trainable and before is not None and before.trainable:
            raise ValueError(
                f"this getter has already created a variable named {name!r}; pass "
                "reuse=True to get it"
            )
        options["device"] = self.worker_device
        local = getter(name, initial_value, trainable=trainable, **options)
        if local.trainable:
            total = Accumulation(local, f"grad_variable/{name}", self._changes)
            self._members[local] = Member(local, self.center.variable_for(name, local), total)
        self._made[name] = local
        return local

    def center_variable(self, var: Variable) -> Variable:
        """The centre copy of a worker's variable: what the last push of any worker made of it.

        Pushes go on while it is read: the values of one moment are the centre's ``state_dict``.

        Args:
            var: a variable that came through this getter.

        Raises:
            KeyError: another one.
        """
        return self.member(var).center

    def accumulation(self, var: Variable) -> Variable:
        """The sum of the gradients of a worker's variable since its last push; only to be read.

        Of float32 for halves. A sum of sparse gradients is shown as an array, and stays sparse.

        Args:
            var: a variable that came through this getter.

        Raises:
            KeyError: another one.
        """
        return self.member(var).total

    def member(self, var: Variable) -> Member:
        """All copies of a worker's variable; ``KeyError`` for another one."""
        found = self._members.get(var) if isinstance(var, Variable) else None
        if found is None:
            raise KeyError(f"{var!r} was not created by this AGNCustomGetter")
        return found

    @property
    def members(self) -> list[Member]:
        """Of every trainable variable, in the order in which they were made."""
        return list(self._members.values())
