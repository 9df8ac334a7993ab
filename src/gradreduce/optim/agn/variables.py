"""Variables of an AGN worker: local copies, sums of gradients, and the step counter.

The sum of a period is zero after a push, and ``local_step`` is counted on the host. Their buffers
are written when they are read, which saves a launch in each step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SPARSE, SparseSum
from gradreduce.accumulator.state import AccumulatorState, Addend, PendingGradient
from gradreduce.arrays.convert import numbers
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesced, densified
from gradreduce.arrays.variable import Variable, reused
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import Buffer, Device, DType, Mesh, accumulate_dtype, as_dtype, copied_to
from gradreduce.errors import DeviceMismatchError, NotCopied, listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps

from .center import AGNCenter, process_wide


class LazyVariable(Variable):
    """A read-only Variable whose buffers are computed when they are read.

    Args:
        name: of the Variable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainable = False

    @property
    @abstractmethod
    def _computed_buffers(self) -> tuple[Buffer, ...]:
        """Buffers with the current value."""

    def assign(self, value: Any) -> NoReturn:
        """Raises ``TypeError``: the Variable is read-only."""
        raise TypeError(f"{self.name!r} is read-only: only its optimizer writes it")

    def assign_add(self, delta: Any) -> NoReturn:
        """Raises ``TypeError``: the Variable is read-only."""
        raise TypeError(f"{self.name!r} is read-only: only its optimizer writes it")

    @property
    def _buffers(self) -> tuple[Buffer, ...]:  # type: ignore[override]  # which a plain one keeps
        return self._computed_buffers


class HostCounter(LazyVariable):
    """An int32 counter on the host.

    Args:
        name: of the Variable.
        device: of its buffer when it is read.

    Attributes:
        value: the current count.
    """

    def __init__(self, name: str, device: Device) -> None:
        super().__init__(name)
        self.value = 0
        self._device = device

    @property
    def _computed_buffers(self) -> tuple[Buffer, ...]:
        return (self._device.upload(numbers(self.value, as_dtype("int32"))),)


class Revision:
    """Counts the changes of a worker's sums other than adding one more gradient."""

    count = 0


class Accumulation(LazyVariable):
    """The sum of the gradients of a worker's variable since its last push.

    Its dtype is the accumulate dtype: float32 for float16 and bfloat16. It is dense, on each device
    of the variable, or, as long as every gradient was sparse, sparse rows on the first device.
    Reading a sparse sum returns a dense array but does not make the sum dense, because an update of
    rows differs from one by an array that is zero elsewhere.

    Args:
        local: the worker's variable.
        name: of this Variable.
        changes: revision of the worker's sums.

    Attributes:
        allocated: memory of a dense sum on each device, if it was allocated.
        is_dense: whether that holds the sum.
        rows: the sparse sum; None if the sum is dense or empty.
        changes: revision of the worker's sums.
    """

    def __init__(self, local: Variable, name: str, changes: Revision) -> None:
        super().__init__(name)
        self._local, self.changes = local, changes
        self.allocated: tuple[Buffer, ...] = ()
        self.is_dense = False
        self.rows: AccumulatorState | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the worker's variable."""
        return self._local.devices

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the worker's variable."""
        return self._local.shape

    @property
    def dtype(self) -> DType:
        """The accumulate dtype of the worker's variable."""
        return accumulate_dtype(self._local.dtype)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was added since the last push."""
        return self.rows is None and not self.is_dense

    @property
    def current(self) -> Buffer | SparseSum:
        """The dense or sparse sum on the first device; there must be one."""
        total = self.allocated[0] if self.rows is None else self.rows.totals[0]
        assert total is not None
        return total

    def is_in(self, memory: tuple[Buffer, ...]) -> bool:
        """Whether the sum is in this memory, or will be if it is empty."""
        return self.allocated is memory and self.rows is None

    def as_arrays(self) -> tuple[Buffer, ...]:
        """Returns the sum as dense arrays on every device: of an empty sum memory for it."""
        if self.rows is not None:
            (whole,) = densified([self.merged()])
            return (whole, *(copied_to(device, whole) for device in self.devices[1:]))
        if not self.allocated:
            self.allocated = tuple(device.empty(self.shape, self.dtype) for device in self.devices)
        return self.allocated

    def merged(self) -> IndexedSlices:
        """Returns the sparse sum in index order, in new memory."""
        total = self.current
        assert isinstance(total, SparseSum)
        plan, _ = ops.merged_row_index([total.slots], mean=False)
        (rows,) = coalesced([total.rows], [plan])
        return IndexedSlices.of(rows, plan.indices, self.shape)

    def added(self, memory: tuple[Buffer, ...]) -> None:
        """Records that this memory, from ``as_arrays``, holds the sum with a dense gradient."""
        if not self.is_dense:
            self.allocated = memory
            self._update(is_dense=True)

    def cleared(self) -> None:
        """Resets the sum to zero, without a launch."""
        self._update()

    def _update(self, *, is_dense: bool = False, rows: AccumulatorState | None = None) -> None:
        self.is_dense, self.rows = is_dense, rows
        self.changes.count += 1

    def _new_rows(self) -> AccumulatorState:
        return AccumulatorState(
            self._local.dtype, self.shape, "SUM", self.devices[:1], False, _NO_OPS, SPARSE
        )

    def pending_gradient(self, gradient: IndexedSlices) -> PendingGradient:
        """Prepares a sparse gradient for addition; call ``added_rows`` after adding it."""
        state = self.rows or self._new_rows()
        SPARSE.prepare(state, gradient.dtype)
        segments = ops.plan_segments(gradient.indices)
        part = Addend(0, gradient.values, self.shape, segments)
        return PendingGradient(state, (part,), "native")

    def added_rows(self, state: AccumulatorState) -> None:
        """Records that a sparse gradient was added to these rows."""
        if self.rows is not state:
            self._update(rows=state)

    def update(self, total: tuple[Buffer, ...] | SparseSum | None) -> None:
        """Replaces the sum: dense ones for each device, a sparse one on the first, or None."""
        self.cleared()
        if isinstance(total, SparseSum):
            rows = self._new_rows()
            rows.totals[0] = total
            self.added_rows(rows)
        elif total is not None:
            self.added(total)

    @property
    def _computed_buffers(self) -> tuple[Buffer, ...]:
        if self.is_empty:  # a concurrent step of the worker may be writing to the memory
            return tuple(device.zeros(self.shape, self.dtype) for device in self.devices)
        return self.as_arrays()


_NO_OPS = AllReduceCrossDeviceOps()  # unused: a sum on one device is not reduced


@dataclass(frozen=True, eq=False)
class Member:
    """The local copy, center copy and sum of gradients of a worker's variable.

    Attributes:
        local: the worker's copy.
        center: the center's copy.
        total: the sum of its gradients since the last push.
    """

    local: Variable
    center: Variable
    total: Accumulation


class AGNCustomGetter(NotCopied):
    """Creates the local, center and accumulation copies of a worker's variables.

    Create one for each worker and pass it as ``custom_getter`` to ``gr.get_variable``. A trainable
    variable ``n`` is on the worker; its sum of gradients ``grad_variable/n`` starts at zero. The
    center has ``global_center_variable/n``; the first worker to create ``n`` sets its value. Other
    variables are only on the worker. If a worker's initial values differ from the center's, use the
    hook of its ``AGNOptimizer``, or ``get_init_op``, before its first step.

    Args:
        worker_device: the worker's device, its name (``"gpu:1"``) or a ``torch.device``, in the
            mesh of ``center``, else in ``gr.default_mesh()``; or a part of a mesh: then the worker
            has several replicas, and its variables are mirrored there.
        center: has the center variables. Default: the process-wide center, over the mesh of the
            first getter, which exists as long as one of its getters. So drop the getters of a
            training before the next one, or give each training its own center.

    Raises:
        DeviceMismatchError: the worker's device does not belong to the center's mesh.
        TypeError: an argument of another type.
        ValueError: a name of a device that the mesh does not have.
    """

    _copy_hint = "create one for each worker"

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
        home = self.center.devices[0]
        for device in self.devices:
            if device.mesh_state is not home.mesh_state:
                raise DeviceMismatchError(
                    f"{device.name} of the worker and {home.name} of the center belong "
                    "to different meshes; pass center=gr.AGNCenter(mesh) with the worker's mesh"
                )
        self._members: dict[Variable, Member] = {}  # of trainable variables, as created
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
        """Creates a variable; called by ``gr.get_variable``.

        With ``reuse``, returns the variable that this getter has created.

        Raises:
            ValueError: this getter has already created a trainable variable of this name, or the
                center has one with another shape or dtype. With ``reuse``, see
                ``gr.get_variable``.
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
            self._members[local] = Member(local, self.center._variable_for(name, local), total)
        self._made[name] = local
        return local

    def center_variable(self, var: Variable) -> Variable:
        """Returns the center copy of a worker's variable.

        Pushes continue while it is read; for a consistent state use the center's ``state_dict``.

        Args:
            var: a variable that this getter created.

        Raises:
            KeyError: another variable.
        """
        return self._member(var).center

    def accumulation(self, var: Variable) -> Variable:
        """Returns the read-only sum of gradients of a variable since the last push.

        It is float32 for float16 and bfloat16. Reading a sum of sparse gradients returns a dense
        array; the sum stays sparse.

        Args:
            var: a variable that this getter created.

        Raises:
            KeyError: another variable.
        """
        return self._member(var).total

    def _member(self, var: Variable) -> Member:
        """Returns all copies of a worker's variable; ``KeyError`` for another one."""
        found = self._members.get(var) if isinstance(var, Variable) else None
        if found is None:
            raise KeyError(f"{var!r} was not created by this AGNCustomGetter")
        return found
