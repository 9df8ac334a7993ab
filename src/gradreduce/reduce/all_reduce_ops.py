"""AllReduceCrossDeviceOps: the public all-reduce of gradients across devices.

Source: tf.contrib.distribute.AllReduceCrossDeviceOps (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.distributed import Part, PerReplica, ReduceOp
from gradreduce.arrays.types import AllReduceAlg, NestT, OutputType
from gradreduce.backends import default_mesh
from gradreduce.device import (
    NOT_CAPTURED,
    Buffer,
    Device,
    DType,
    Mesh,
    as_deadline,
    as_dtype,
    as_flag,
    by_physical,
    deadline_scope,
)
from gradreduce.device.process_group import check_one_process
from gradreduce.errors import CollectiveError, brief

from .algorithms import ALGORITHMS
from .arguments import (
    Request,
    as_count,
    check_op,
    checked_mesh,
    checked_requests,
    shapes_by_rows,
)
from .cross_device_ops import CrossDeviceOps, checked_call
from .nests import Nests
from .pipeline import (
    Settings,
    algorithm_of,
    compile_for,
    copy_to_out,
    plan_batch,
    reduce_batch,
    reduce_requests,
)
from .prepared import CapturedStep, PreparedStep, check_preparable
from .process_values import num_replicas_of
from .reduction_groups import Processes, ReductionGroups, as_reduction_groups
from .shares import joined_shares, reduced_shares

if TYPE_CHECKING:
    from .plan import ReducePlan
    from .profile import Profile


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Reduction by all-reduce (tf.contrib.distribute.AllReduceCrossDeviceOps).

    Args:
        all_reduce_alg: ``"nccl"`` or ``"hierarchical_copy"``. The second gives the same bits on
            every placement of the same number of replicas; NCCL promises no order of additions,
            and is needed on two physical GPUs or more.
        num_packs: if not 0, all tensors of a dtype lie end to end in one flat buffer that is
            reduced in this many packs. Between GPUs one pack of 8 MiB or more (smaller ones share)
            is packed while the one before it is transferred.
        agg_small_grads_max_bytes: if this and the next are above 0 and ``num_packs`` is 0, tensors
            of at most this many bytes are reduced in groups.
        agg_small_grads_max_group: how many tensors a group has at most.
        mesh: where ``all_reduce`` puts its arrays. Default: ``gr.default_mesh()``.
        reduction_groups: for ``"hierarchical_copy"``: lists of replica numbers. Replica i lies on
            the i-th of a value's devices. Each list is added left to right, then their sums are;
            devices with fast links among them make a good list. A list may be empty. Every value
            that is all-reduced must have exactly the replicas named; values that are added on one
            device, for other destinations or IndexedSlices, are added left to right.
            ``"processes"``: one list for each process of the mesh, of its replicas, which it adds
            before it sends anything; over several processes dense values are all-reduced whatever
            their destinations. Default: two lists, the first n // 2 of n replicas and the rest.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: the dtype in which real floats
            are transferred between devices in an all-reduce. They are cast as they are packed, and
            back as they are unpacked. Default: each in its own dtype. See below.

    With a ``wire_dtype`` terms are rounded to it once and their sum once more; on the way our own
    kernels add in float32, NCCL in the wire's dtype. For MEAN a 16-bit wire carries x / n, so no
    sum overflows whose mean does not; a term beyond float16's 65504 does. With t the terms (x, or
    x / n for MEAN on a 16-bit wire), u the wire's unit roundoff (2**-11 for float16, 2**-8 for
    bfloat16, 2**-24 for float32) and e half its smallest positive number (2**-25 for float16, below
    float32's own for the others), a result of hierarchical_copy differs from the exact one by at
    most ``(2.01 * u + n * 2**-23) * sum(|t|) + (n + 1) * e``, divided by n for MEAN where the wire
    is float32, and by the rounding to its own dtype where that does not hold every value of the
    wire. (GPUs flush what is subnormal in float32 to zero: e is 2**-127 there for the others.) A
    sum beyond what the wire or the dtype holds becomes infinite. NCCL rounds up to n - 1 more sums:
    ``(n + 1) * u`` instead of ``2.01 * u``. A cast of float64 to a 16-bit type goes through
    float32. The bits are the same on every placement, as without; between GPUs that are not peers,
    the sum of a group is transferred in float32. Values that are added on one device (other
    destinations, IndexedSlices), integers and complex numbers are transferred in their own dtype.

    Raises:
        ValueError: an unknown algorithm, a number that is negative or not an integer, a ``mesh``
            that is not a Mesh, ``reduction_groups`` that are neither lists nor ``"processes"``,
            leave a replica out, name one twice or are passed for NCCL, which chooses its own, or
            another ``wire_dtype``.
    """

    _elementwise = True

    def __init__(
        self,
        all_reduce_alg: AllReduceAlg = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        mesh: Mesh | None = None,
        reduction_groups: Sequence[Sequence[int]] | Processes | None = None,
        wire_dtype: str | DType | None = None,
    ) -> None:
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in ALGORITHMS:
            raise ValueError(
                f"all_reduce_alg={brief(all_reduce_alg)} is not one of {list(ALGORITHMS)}"
            )
        self.mesh = checked_mesh(mesh)
        if reduction_groups is not None and not ALGORITHMS[all_reduce_alg].has_groups:
            raise ValueError(
                f"reduction_groups={brief(reduction_groups)} is only for 'hierarchical_copy'; "
                f"{all_reduce_alg!r} chooses its own"
            )
        self.settings = Settings(
            all_reduce_alg,
            as_count("num_packs=", num_packs),
            as_count("agg_small_grads_max_bytes=", agg_small_grads_max_bytes),
            as_count("agg_small_grads_max_group=", agg_small_grads_max_group),
            None if reduction_groups is None else as_reduction_groups(reduction_groups),
            _as_wire(wire_dtype),
        )

    def _repr_fields(self) -> list[str]:
        fields = self.settings._asdict()
        if not self.agg_small_grads_max_bytes:
            del fields["agg_small_grads_max_bytes"], fields["agg_small_grads_max_group"]
        alg = fields.pop("all_reduce_alg")
        return [alg, *[f"{key}={value}" for key, value in fields.items() if value is not None]]

    @property
    def all_reduce_alg(self) -> str:
        """Name of the all-reduce algorithm."""
        return self.settings.all_reduce_alg

    @property
    def num_packs(self) -> int:
        """Number of packs of a flat buffer; 0: tensors are not packed together."""
        return self.settings.num_packs

    @property
    def agg_small_grads_max_bytes(self) -> int:
        """Largest tensor, in bytes, that is grouped with others."""
        return self.settings.agg_small_grads_max_bytes

    @property
    def agg_small_grads_max_group(self) -> int:
        """Largest number of tensors in a group."""
        return self.settings.agg_small_grads_max_group

    @property
    def reduction_groups(self) -> ReductionGroups | Processes | None:
        """The lists of replica numbers that were passed, or None."""
        return self.settings.reduction_groups

    @property
    def wire_dtype(self) -> DType | None:
        """The dtype in which real floats are transferred; None: each in its own."""
        return self.settings.wire_dtype

    @overload
    def all_reduce(
        self,
        grads: NestT,
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        output_type: None = None,
        out: None = None,
        deadline: float | None = None,
    ) -> NestT: ...
    @overload
    def all_reduce(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
    @StreamScope()
    def all_reduce(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Combines ``grads[device][tensor]`` over the devices, and returns the same nesting.

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays or
                IndexedSlices, or of more of these; all alike. A PyTorch module or its
                ``named_parameters()`` is the dict of its gradients. Host arrays lie on the device
                of their place. A tensor that is None on every device stays None.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            coalesce: add rows of the same index of IndexedSlices.
            output_type: kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays that the results are written into, nested as ``grads``, which may be
                ``grads`` itself; see ``batch_reduce``. What it holds for a tensor that is None on
                every device stays as it is.
            deadline: see ``batch_reduce``.

        Returns:
            The combined arrays, ``[device][tensor]``, nested as they came; of a module a dict. New
            memory; or ``out``. Waits for no device, unless NumPy arrays are asked for,
            ``output_type="numpy"``, of what lies on GPUs, or given as ``out``.

        Raises:
            ValueError: another number of entries than devices, entries of different length or
                keys, or a tensor that is None on some devices only.
            TypeError: an iterator that is not that of ``named_parameters()``.
            ValueError, TypeError, BackendUnavailableError, CollectiveError: what ``batch_reduce``
                raises, about ``grads[device]['layers.0.weight']``: by the path of the tensor. The
                processes of a mesh must agree in paths, too.
        """
        check_op("op", op)
        nests = self._checked_nests(grads)
        pairs = [(value, value) for value in nests.values]
        outs = None if out is None else nests.outs_of(out)
        reduced = self.batch_reduce(
            op, pairs, coalesce=coalesce, output_type=output_type, out=outs, deadline=deadline
        )
        return nests.nested([each.values for each in reduced]) if out is None else out

    def _checked_nests(self, grads: Any) -> Nests:
        """Checks ``grads[device][tensor]``, and that the devices can be reduced."""
        mesh = self.mesh or default_mesh()
        nests = Nests(grads, mesh)
        algorithm_of(self.settings, mesh.devices)
        return nests

    @StreamScope()
    def pairs(self, grads: Sequence[Any]) -> list[tuple[PerReplica, PerReplica]]:
        """Returns the pairs of value and destination of ``grads[device][tensor]``, with names.

        For ``plan``, ``profile``, ``prepare``, ``capture`` and ``batch_reduce``::

            print(ops.plan(gr.ReduceOp.MEAN, ops.pairs(models)))

        Args:
            grads: see ``all_reduce``.

        Returns:
            One pair for each tensor that is not None, in order: a ``PerReplica`` twice, on the
            arrays' own memory where they can be shared.

        Raises:
            ValueError, TypeError, BackendUnavailableError: what ``all_reduce`` raises.
        """
        return [(value, value) for value in self._checked_nests(grads).values]

    @StreamScope()
    def reduce_scatter(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Combines ``grads[device][tensor]`` over the replicas; each gets its share of the rows.

        With n replicas in all processes, of a tensor with n * k rows (its first dimension) replica
        r gets rows r * k to (r + 1) * k of the sum or mean, with the bits of ``all_reduce`` for
        ``"hierarchical_copy"``. Each row is sent to its replica alone: half the bytes of an
        all-reduce by a ring.

        Example::

            shares = ops.reduce_scatter([[np.ones((4, 3))], [np.ones((4, 3))]], gr.ReduceOp.SUM)
            shares[1][0].shape  # (2, 3): rows 2 and 3, each element 2.0

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays of the
                shape (n * k, …); all alike. A tensor that is None on every device stays None. They
                are only read.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``; see ``batch_reduce``.
            output_type: kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays of the results' shapes and dtypes that they are written into, nested as
                ``grads``, each apart from all others and from ``grads``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of the shape (k, …), ``[device][tensor]``, nested as they came, of the dtype of
            ``all_reduce``'s results. New memory, on each replica's own device; or ``out``. Waits
            for no device unless NumPy arrays of what lies on GPUs are asked for.

        Raises:
            ValueError: a tensor without rows, or whose number of rows n does not divide; and what
                ``all_reduce`` raises. Nothing was launched.
            TypeError: IndexedSlices: pass ``.to_dense()``; or a dtype that cannot be added.
            BackendUnavailableError, CollectiveError: what ``batch_reduce`` raises.
        """
        check_op("op", op)
        run = partial(reduced_shares, self.settings, op)
        return self._nested("reduce_scatter", op, grads, output_type, out, deadline, run)

    @StreamScope()
    def all_gather(
        self,
        grads: Sequence[Any],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Concatenates ``grads[device][tensor]`` of all replicas, and gives all to each.

        With n replicas in all processes, which pass k rows each, row r * k + i of a result is row i
        of replica r. Arrays are copied as they are: ``wire_dtype`` has no effect.

        Example::

            whole = ops.all_gather([[np.zeros(2)], [np.ones(2)]])
            whole[0][0]  # [0, 0, 1, 1], and so is whole[1][0]

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays of the
                shape (k, …), such as the results of ``reduce_scatter``; all alike. A tensor that is
                None on every device stays None. They are only read.
            output_type: kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays of the results' shapes and dtypes that they are written into, nested as
                ``grads``, each apart from all others and from ``grads``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of the shape (n * k, …), ``[device][tensor]``, nested as they came. New memory,
            on each replica's own device; or ``out``. Waits for no device unless NumPy arrays of
            what lies on GPUs are asked for.

        Raises:
            ValueError: a tensor without rows; and what ``all_reduce`` raises. Nothing was launched.
            TypeError: IndexedSlices: pass ``.to_dense()``; or a dtype that is not supported.
            BackendUnavailableError, CollectiveError: what ``batch_reduce`` raises.
        """
        run = partial(joined_shares, self.settings)
        return self._nested("all_gather", ReduceOp.SUM, grads, output_type, out, deadline, run)

    def _nested(
        self,
        name: str,
        op: ReduceOp,
        grads: Sequence[Any],
        output_type: str | None,
        out: Sequence[Any] | None,
        deadline: float | None,
        run: Callable[[list[Request]], list[tuple[Buffer, ...]]],
    ) -> Any:
        """Runs a call on ``grads[device][tensor]``, and nests its results likewise."""
        nests = self._checked_nests(grads)
        pairs = [(value, value) for value in nests.values]
        requests = checked_requests(pairs, ReduceOp.SUM, self.mesh)
        shapes = shapes_by_rows(requests, shared=name == "reduce_scatter")
        outs = None if out is None else nests.outs_of(out)
        call = checked_call(requests, op, output_type, outs, shapes)
        with call.running(name, deadline):
            parts = copy_to_out(call.requests, run(call.requests))
        results = call.finish(parts)
        return nests.nested([each.values for each in results]) if out is None else out

    def plan(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
    ) -> ReducePlan:
        """Returns what ``batch_reduce`` of the same arguments would do: print it.

        Nothing is launched, copied or compiled. Equal shapes, dtypes, settings and meshes give
        equal plans; so does the same place of tensors in a flat buffer.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.

        Raises:
            ValueError: what ``batch_reduce`` raises, no pair, or values of several meshes.
            BackendUnavailableError: NCCL is needed, and is missing.
        """
        from .plan import dry_run_of  # plan and profile are rarely called, and slow to import

        coalesce = as_flag("coalesce", coalesce)
        with StreamScope():
            requests = self._plannable(reduce_op, value_destination_pairs)
        return dry_run_of(self.settings, reduce_op, requests, coalesce=coalesce).plan

    @StreamScope()
    def profile(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
        deadline: float | None = None,
    ) -> Profile:
        """Measures where the time of a ``batch_reduce`` of the same arguments goes: print it.

        Shows the plan, with a lower bound for the time of each stage (its bytes over this mesh's
        copy bandwidth), beside what the journal counted. Does the reduction twice, drops the
        results, and waits for the devices; the first time on a mesh it measures the copy bandwidth
        too, for a second at most.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.
            deadline: seconds from now for all of that, else the mesh is marked as failed.

        Raises:
            ValueError, DeviceMismatchError, TypeError, BackendUnavailableError, CollectiveError:
                what ``plan`` and ``batch_reduce`` raise.
        """
        from .plan import dry_run_of
        from .profile import profile_of

        coalesce = as_flag("coalesce", coalesce)
        requests = self._plannable(reduce_op, value_destination_pairs)
        planned = dry_run_of(self.settings, reduce_op, requests, coalesce=coalesce)
        reduce = partial(self.reduce_batch, reduce_op, requests, coalesce=coalesce)
        with deadline_scope(
            "profile", as_deadline(deadline), (mesh := requests[0].value.mesh).devices
        ):
            return profile_of(planned, mesh, reduce)

    def _plannable(self, reduce_op: ReduceOp, pairs: Sequence[tuple[Any, Any]]) -> list[Request]:
        """Checks the arguments of ``plan`` and ``profile``, and the devices."""
        requests = self._checked(reduce_op, pairs).requests
        for request in requests:
            if request.is_all_reduced:
                algorithm_of(self.settings, request.devices)
        return requests

    @StreamScope()
    def prepare(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> PreparedStep:
        """Prepares a ``batch_reduce`` that is called many times, at little host time per call.

        Runs it once. See ``PreparedStep`` for what its calls read and overwrite.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one, of dense Buffers or
                arrays that are shared, not copied, all of one mesh.
            output_type: kind of the results. Default: the kind of each value's first array.
            out: the arrays that each call writes, which are the results then; see
                ``batch_reduce``. On simulated devices with ``schedule_seed=`` Buffers alone.
            deadline: of this first time; see ``batch_reduce``.

        Raises:
            ValueError: what ``batch_reduce`` raises, no pair, values of several meshes, arrays
                that had to be copied, or results that are JAX arrays, which are immutable, or
                NumPy arrays of a GPU's values.
            DeviceMismatchError, TypeError: what ``batch_reduce`` raises for an ``out``.
        """
        call = self._checked(reduce_op, value_destination_pairs, output_type, out)
        check_preparable(call)
        with call.running("prepare", deadline):
            return PreparedStep(call, partial(self.reduce_batch, reduce_op, coalesce=False))

    @StreamScope()
    def capture(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> CapturedStep:
        """Like ``prepare``, but each call launches one CUDA graph.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``prepare``.
            output_type: see ``prepare``.
            out: see ``prepare``.
            deadline: see ``prepare``.

        Raises:
            ValueError, DeviceMismatchError, TypeError: what ``prepare`` raises.
            CollectiveError: ``"nccl"`` over several physical devices of this process; not launched.
            RuntimeError: the mesh spans several processes, whose exchanges the host waits for.
            CaptureError: two physical devices are not peers: nothing was
                launched; or CUDA cannot make the graph.
        """
        call = self._checked(reduce_op, value_destination_pairs, output_type, out)
        check_preparable(call)
        for index, request in enumerate(call.requests):
            check_one_process(
                request.devices[0],
                "a captured step",
                "use prepare (a CUDA graph cannot wait for other processes)",
            )
            crosses = len(by_physical(request.devices)) > 1 and request.is_all_reduced
            if crosses and self.all_reduce_alg == "nccl":
                raise CollectiveError(f"{request.value._name_of(index)}: {NOT_CAPTURED}")
        with call.running("capture", deadline):
            return CapturedStep(call, partial(self.reduce_batch, reduce_op, coalesce=False))

    def reduce_buffers(
        self,
        gradients: Sequence[Sequence[Buffer]],
        *,
        divisor: float = 1,
        out_dtypes: Sequence[DType] | None = None,
        consume: ExitStack | None = None,
        names: Sequence[str] = (),
    ) -> list[tuple[Buffer, ...]]:
        """Sums ``gradients[tensor][replica]`` and divides the sums.

        See ``pipeline.reduce_batch``. A subclass that overrides ``reduce_batch`` uses that. Over
        several processes ``divisor`` counts the gradients of this one; each has as many for each
        of its replicas. The names of their tensors may differ.
        """
        if not is_all_reduce(self):
            return super().reduce_buffers(
                gradients, divisor=divisor, out_dtypes=out_dtypes, names=names
            )
        if not gradients:
            return []
        divisor = divisor * num_replicas_of(gradients[0]) / len(gradients[0])
        plan = plan_batch(
            self.settings,
            gradients,
            divisor=divisor,
            out_dtypes=out_dtypes,
            names=tuple(names),
        )
        return reduce_batch(plan, gradients, consume=consume)

    def compile_for(self, devices: Sequence[Device], dtype: DType, out_dtype: DType) -> None:
        """Compiles all kernels of ``reduce_buffers``; see ``pipeline.compile_for``."""
        compile_for(self.settings, devices, dtype, out_dtype)

    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Reduces checked requests; see ``CrossDeviceOps.reduce_batch``."""
        return reduce_requests(self.settings, reduce_op, requests, coalesce=coalesce)


def is_all_reduce(cross_device_ops: CrossDeviceOps) -> bool:
    """Whether ``cross_device_ops`` does not override ``reduce_batch`` of this module."""
    return type(cross_device_ops).reduce_batch is AllReduceCrossDeviceOps.reduce_batch


def _as_wire(wire_dtype: str | DType | None) -> DType | None:
    if wire_dtype is None:
        return None
    allowed = [as_dtype(name) for name in ("float16", "bfloat16", "float32")]
    with suppress(TypeError):
        if as_dtype(wire_dtype) in allowed:
            return as_dtype(wire_dtype)
    raise ValueError(f"wire_dtype={brief(wire_dtype)} is not 'float16', 'bfloat16' or 'float32'")
