"""AllReduceCrossDeviceOps: the public all-reduce of gradients across devices.

Source: tf.contrib.distribute.AllReduceCrossDeviceOps (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, overload

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.distributed import Part, PerReplica, ReduceOp
from gradreduce.arrays.types import AllReduceAlg, NestT, OutputType
from gradreduce.backends import default_mesh
from gradreduce.comm.process_group import check_one_process
from gradreduce.comm.replicas import Replicas
from gradreduce.device import (
    NOT_CAPTURED,
    Buffer,
    Device,
    DType,
    Mesh,
    as_count,
    as_deadline,
    as_dtype,
    as_flag,
    by_physical,
    deadline_scope,
    no_collection,
)
from gradreduce.errors import CollectiveError, brief

from .algorithm import ProcessesName, ReductionGroups, as_reduction_groups
from .algorithms import ALGORITHMS
from .arguments import (
    Request,
    check_op,
    make_requests,
    shapes_by_rows,
    validate_mesh,
)
from .cross_device_ops import CrossDeviceOps, validate_call
from .nests import Nests
from .pipeline import (
    Settings,
    algorithm_of,
    plan_batch,
    reduce_batch,
    reduce_requests,
    rehearse_reduction,
)
from .plan import ReducePlan, dry_run_of
from .prepared import CapturedStep, PreparedStep, check_preparable
from .profile import Profile, profile_of
from .requests import copy_to_out
from .shares import all_gather, reduce_scatter


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Reduction by all-reduce (tf.contrib.distribute.AllReduceCrossDeviceOps).

    Args:
        all_reduce_alg: ``"nccl"`` or ``"hierarchical_copy"``. Results of ``"hierarchical_copy"``
            have the same bits on every placement of the same number of replicas. NCCL does not
            define the order of additions, and its library is needed for two or more physical GPUs.
        num_packs: if not 0, all tensors of a dtype are placed end to end in one flat buffer, which
            is reduced in this many packs. Between GPUs a pack of 8 MiB or more (smaller packs are
            joined) is packed while the previous one is transferred.
        agg_small_grads_max_bytes: if this and the next argument are above 0 and ``num_packs`` is 0,
            tensors of at most this many bytes are reduced in groups. With packs this and the next
            argument have no effect, and ``UserWarning`` says so.
        agg_small_grads_max_group: the largest number of tensors in a group.
        mesh: the mesh of the arrays of ``all_reduce``. Default: ``gr.default_mesh()``.
        reduction_groups: for ``"hierarchical_copy"``: lists of replica numbers. Replica i is on the
            i-th device of a value. Each list is added left to right, then their sums are; put
            devices with fast links between them into one list. A list may be empty. The lists must
            contain exactly the replicas of every value that is all-reduced. Values that are added
            on one device (other destinations, IndexedSlices) are added left to right.
            ``"processes"``: one list for each process of the mesh, so that each process adds its
            replicas before it sends anything; with several processes dense values are all-reduced
            for all destinations. Default: two lists, the first n // 2 of n replicas and the rest.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: the dtype in which real floats
            are transferred between devices in an all-reduce. Packing casts to it, unpacking casts
            back. Default: each tensor's own dtype. docs/reductions.md has a bound of the error.

    Raises:
        ValueError: the algorithm or ``wire_dtype`` is unknown, a number is negative or not an
            integer, ``mesh`` is not a Mesh, or ``reduction_groups`` is neither lists nor
            ``"processes"``, leaves out or repeats a replica, or is passed for NCCL, which chooses
            its own groups.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1, mesh=mesh)
        >>> ops
        <AllReduceCrossDeviceOps hierarchical_copy, num_packs=1, mesh=<Mesh sim [0, 1]>>
        >>> ops.all_reduce([[np.array([1.0, 2.0])], [np.array([3.0, 6.0])]])
        [[array([2., 4.])], [array([2., 4.])]]
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
        reduction_groups: Sequence[Sequence[int]] | ProcessesName | None = None,
        wire_dtype: str | DType | None = None,
    ) -> None:
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in ALGORITHMS:
            raise ValueError(
                f"all_reduce_alg={brief(all_reduce_alg)} is not one of {list(ALGORITHMS)}"
            )
        self.mesh = validate_mesh(mesh)
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
        self._warn_of_no_effect()

    def _warn_of_no_effect(self) -> None:
        """Warns the caller of the constructor of arguments that ``num_packs`` overrules."""
        passed = [
            f"agg_small_grads_max_{name}={value}"
            for name, value, default in (
                ("bytes", self.agg_small_grads_max_bytes, 0),
                ("group", self.agg_small_grads_max_group, 10),
            )
            if value != default
        ]
        if passed and self.num_packs:
            verb = "has" if len(passed) == 1 else "have"
            warnings.warn(
                f"{' and '.join(passed)} {verb} no effect with num_packs={self.num_packs}: pass "
                "num_packs=0 to reduce small gradients in groups",
                stacklevel=3,
            )

    def _repr_fields(self) -> list[str]:
        fields = self.settings._asdict()
        if not self.agg_small_grads_max_bytes:
            del fields["agg_small_grads_max_bytes"], fields["agg_small_grads_max_group"]
        alg = fields.pop("all_reduce_alg")
        return [alg, *[f"{key}={value}" for key, value in fields.items() if value is not None]]

    @property
    def all_reduce_alg(self) -> str:
        """The name of the all-reduce algorithm."""
        return self.settings.all_reduce_alg

    @property
    def num_packs(self) -> int:
        """The number of packs of a flat buffer; 0: tensors are not packed together."""
        return self.settings.num_packs

    @property
    def agg_small_grads_max_bytes(self) -> int:
        """The largest tensor, in bytes, that is grouped with others."""
        return self.settings.agg_small_grads_max_bytes

    @property
    def agg_small_grads_max_group(self) -> int:
        """The largest number of tensors in a group."""
        return self.settings.agg_small_grads_max_group

    @property
    def reduction_groups(self) -> ReductionGroups | ProcessesName | None:
        """The ``reduction_groups`` that were passed, or None."""
        return self.settings.reduction_groups

    @property
    def wire_dtype(self) -> DType | None:
        """The dtype in which real floats are transferred; None: their own dtype."""
        return self.settings.wire_dtype

    @overload
    def all_reduce(
        self,
        grads: NestT,
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
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
                IndexedSlices, which may be nested; all with the same structure. A PyTorch module or
                its ``named_parameters()`` means the dict of its gradients. A host array counts as
                on the device of its entry. A tensor that is None on every device stays None.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            coalesce: add rows of IndexedSlices that have the same index.
            output_type: the kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays to write the results into, nested like ``grads``; may be ``grads`` itself;
                see ``batch_reduce``. Entries for a tensor that is None on every device are not
                changed.
            deadline: see ``batch_reduce``.

        Returns:
            The combined arrays, ``[device][tensor]``, nested like ``grads`` (a dict for a module):
            in new memory, or ``out``. The call does not wait for a device, except for results of
            GPUs in NumPy arrays (``output_type="numpy"`` or ``out``). The mean of integers is
            float32 (8 and 16 bits) or float64, although a type checker sees the type of ``grads``.

        Raises:
            ValueError: another number of entries than devices, entries of different length or
                keys, or a tensor that is None on some devices only.
            TypeError: an iterator that is not that of ``named_parameters()``.
            ValueError, TypeError: what ``batch_reduce`` raises, about
                ``grads[device]['layers.0.weight']``: by the path of the tensor. The processes of a
                mesh must agree in paths, too.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> grads = [{"w": np.ones(2), "b": np.zeros(1)}, {"w": np.ones(2), "b": np.ones(1)}]
            >>> ops.all_reduce(grads, gr.ReduceOp.SUM)[0]
            {'w': array([2., 2.]), 'b': array([1.])}
        """
        check_op("op", op)
        nests = self._validate_nests(grads)
        outs = None if out is None else nests.outs_of(out)
        reduced = self.batch_reduce(
            op, nests.pairs, coalesce=coalesce, output_type=output_type, out=outs, deadline=deadline
        )
        return nests.nest_results([each.values for each in reduced]) if out is None else out

    def _validate_nests(self, grads: Any) -> Nests:
        """Checks ``grads[device][tensor]``, and that the devices can be reduced."""
        mesh = self.mesh or default_mesh()
        nests = Nests(grads, mesh)
        algorithm_of(self.settings, mesh.devices)
        return nests

    @StreamScope()
    def pairs(self, grads: Sequence[Any]) -> list[tuple[PerReplica, PerReplica]]:
        """Returns the pairs of value and destination of ``grads[device][tensor]``, with names.

        Pass them to ``plan``, ``profile``, ``prepare``, ``capture`` or ``batch_reduce``.

        Args:
            grads: see ``all_reduce``.

        Returns:
            For each tensor that is not None, in order, a pair of twice the same ``PerReplica``. It
            shares the memory of the arrays where possible.

        Raises:
            ValueError, TypeError: what ``all_reduce`` raises.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> pairs = ops.pairs([{"w": np.ones(2)}, {"w": np.ones(2)}])
            >>> [value.name for value, _ in pairs]
            ['w']
        """
        return self._validate_nests(grads).pairs

    @overload
    def reduce_scatter(
        self, grads: NestT, op: ReduceOp = ReduceOp.MEAN, *, deadline: float | None = None
    ) -> NestT: ...
    @overload
    def reduce_scatter(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
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

        A tensor has n * k rows (its first dimension), where n is the number of replicas in all
        processes. Replica r gets the rows r * k to (r + 1) * k - 1 of the sum or mean. For
        ``"hierarchical_copy"`` they have the bits of ``all_reduce``. This transfers half the bytes
        of an all-reduce by a ring.

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays of shape
                (n * k, …); all with the same structure. A tensor that is None on every device stays
                None. The arrays are not written.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``; see ``batch_reduce``.
            output_type: kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays of the results' shapes and dtypes that they are written into, nested as
                ``grads``, none of which overlaps another or ``grads``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of shape (k, …), ``[device][tensor]``, nested like ``grads``, with the dtypes of
            ``all_reduce``: in new memory on each replica's own device, or ``out``. The call does
            not wait for a device, except for results of GPUs in NumPy arrays.

        Raises:
            ValueError: a tensor is a scalar, or its number of rows is not a multiple of n; and what
                ``all_reduce`` raises. Nothing was launched.
            TypeError: a tensor is IndexedSlices (pass ``.to_dense()``), or has a dtype that cannot
                be added.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> grads = [[np.array([1.0, 2, 3, 4])], [np.array([10.0, 20, 30, 40])]]
            >>> ops.reduce_scatter(grads, gr.ReduceOp.SUM)
            [[array([11., 22.])], [array([33., 44.])]]
        """
        check_op("op", op)
        run = partial(reduce_scatter, self.settings, op)
        return self._run_nested("reduce_scatter", op, grads, output_type, out, deadline, run)

    @overload
    def all_gather(self, grads: NestT, *, deadline: float | None = None) -> NestT: ...
    @overload
    def all_gather(
        self,
        grads: Sequence[Any],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
    @StreamScope()
    def all_gather(
        self,
        grads: Sequence[Any],
        *,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Concatenates ``grads[device][tensor]`` of all replicas on every replica.

        Each of the n replicas in all processes passes k rows; row r * k + i of a result is row i of
        replica r. Arrays are copied unchanged: ``wire_dtype`` has no effect.

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays of shape
                (k, …), such as the results of ``reduce_scatter``; all with the same structure. A
                tensor that is None on every device stays None. The arrays are not written.
            output_type: kind of the results; see ``batch_reduce``. Default: the kind of each
                tensor's first array.
            out: arrays of the results' shapes and dtypes that they are written into, nested as
                ``grads``, none of which overlaps another or ``grads``.
            deadline: see ``batch_reduce``.

        Returns:
            Arrays of shape (n * k, …), ``[device][tensor]``, nested like ``grads``: in new memory
            on each replica's own device, or ``out``. The call does not wait for a device, except
            for results of GPUs in NumPy arrays.

        Raises:
            ValueError: a tensor is a scalar; and what ``all_reduce`` raises. Nothing was launched.
            TypeError: a tensor is IndexedSlices (pass ``.to_dense()``), or has a dtype that is not
                supported.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> ops.all_gather([[np.zeros(2)], [np.ones(2)]])
            [[array([0., 0., 1., 1.])], [array([0., 0., 1., 1.])]]
        """
        run = partial(all_gather, self.settings)
        return self._run_nested("all_gather", ReduceOp.SUM, grads, output_type, out, deadline, run)

    def _run_nested(
        self,
        name: str,
        op: ReduceOp,
        grads: Sequence[Any],
        output_type: str | None,
        out: Sequence[Any] | None,
        deadline: float | None,
        run: Callable[[list[Request]], list[tuple[Buffer, ...]]],
    ) -> Any:
        """Runs a call on ``grads[device][tensor]``, and nests its results like ``grads``."""
        nests = self._validate_nests(grads)
        requests = make_requests(nests.pairs, ReduceOp.SUM, self.mesh)
        shapes = shapes_by_rows(requests, shared=name == "reduce_scatter")
        outs = None if out is None else nests.outs_of(out)
        call = validate_call(requests, op, output_type, outs, shapes)
        with call.running(name, deadline):
            parts = copy_to_out(call.requests, run(call.requests))
        results = call.finish(parts)
        return nests.nest_results([each.values for each in results]) if out is None else out

    def plan(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
    ) -> ReducePlan:
        """Returns what ``batch_reduce`` with the same arguments would do; print it.

        Nothing is launched, copied or compiled. The plan depends only on shapes, dtypes, settings
        and mesh, and on the position of tensors in a flat buffer.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.

        Raises:
            ValueError: what ``batch_reduce`` raises, there is no pair, or values are on several
                meshes.
            TypeError: a dtype cannot be added.
            BackendUnavailableError: NCCL is needed and missing.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1, mesh=mesh)
            >>> pairs = ops.pairs([{"w": np.ones(1000)}, {"w": np.ones(1000)}])
            >>> plan = ops.plan(gr.ReduceOp.MEAN, pairs)
            >>> len(plan.packs), plan.packs[0].nbytes
            (1, 8000)
        """
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
        """Measures where the time of a ``batch_reduce`` is spent; print the result.

        It shows the plan, what the journal counted, and for each stage a lower bound of its time
        (its bytes divided by this mesh's copy bandwidth). The reduction runs twice, its results are
        dropped, and the host waits for the devices. The first call on a mesh also measures the copy
        bandwidth, for at most a second.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.
            deadline: seconds from now for the whole call; if it takes longer, the mesh fails.

        Raises:
            ValueError, DeviceMismatchError, TypeError, BackendUnavailableError, CollectiveError:
                what ``plan`` and ``batch_reduce`` raise.

        Example:
            >>> mesh = gr.open_mesh([0, 0], backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> pairs = ops.pairs([{"w": np.ones(1000)}, {"w": np.ones(1000)}])
            >>> profile = ops.profile(gr.ReduceOp.MEAN, pairs)
            >>> [stage.name for stage in profile.stages]
            ['pack', 'all-reduce', 'unpack', 'copies']
        """
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
        requests = self._validate_call(reduce_op, pairs).requests
        for request in requests:
            if request.is_all_reduced:
                algorithm_of(self.settings, request.devices)
        return requests

    @no_collection
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
        """Prepares a ``batch_reduce`` that is called many times, with little host time per call.

        Runs it once, and waits like ``batch_reduce``. Returns a ``PreparedStep``: call it without
        arguments. Its class describes what each call reads, overwrites and returns.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one pair. Values must be dense,
                on one mesh, and Buffers or arrays that can be shared without a copy.
            output_type: the kind of the results. Default: the kind of each value's first array.
            out: arrays that each call writes and returns as results; see ``batch_reduce``. On
                simulated devices with ``schedule_seed=`` only Buffers.
            deadline: for this first reduction; see ``batch_reduce``.

        Raises:
            ValueError: what ``batch_reduce`` raises; there is no pair; values are on several
                meshes or contain IndexedSlices; an array had to be copied; or results would be JAX
                arrays, which are immutable, or NumPy arrays of a GPU's values.
            DeviceMismatchError, TypeError, BackendUnavailableError, CollectiveError: what
                ``batch_reduce`` raises.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> grads = [{"w": np.ones(2)}, {"w": np.ones(2)}]
            >>> step = ops.prepare(gr.ReduceOp.SUM, ops.pairs(grads))
            >>> grads[0]["w"][:] = 5.0
            >>> step()[0].values[0]
            array([6., 6.])
        """
        call = self._validate_call(reduce_op, value_destination_pairs, output_type, out)
        check_preparable(call)
        with call.running("prepare", deadline):
            return PreparedStep(call, partial(self.reduce_batch, reduce_op, coalesce=False))

    @no_collection
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
            CollectiveError: the algorithm is ``"nccl"`` over several physical devices of this
                process. Nothing was launched.
            RuntimeError: the mesh has several processes, for whose exchanges the host must wait.
            CaptureError: two physical devices are not peers (nothing was launched), or CUDA cannot
                make the graph.

        Example:
            >>> mesh = gr.open_mesh(2, backend="sim")
            >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            >>> grads = [{"w": np.ones(2)}, {"w": np.ones(2)}]
            >>> step = ops.capture(gr.ReduceOp.SUM, ops.pairs(grads))
            >>> with mesh.journal() as journal:
            ...     _ = step()
            >>> journal.launches
            1
        """
        call = self._validate_call(reduce_op, value_destination_pairs, output_type, out)
        check_preparable(call)
        for index, request in enumerate(call.requests):
            check_one_process(
                request.devices[0],
                "a captured step",
                "use prepare (a CUDA graph cannot wait for other processes)",
            )
            is_nccl = self.all_reduce_alg == "nccl" and request.is_all_reduced
            if is_nccl and len(by_physical(request.devices)) > 1:
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
        """Sums ``gradients[tensor][replica]`` on every device, for accumulators.

        Arguments and result: see ``CrossDeviceOps.reduce_buffers``; with ``consume`` the gradients
        may be overwritten. In a subclass that overrides ``reduce_batch``, it calls that method.
        With several processes ``divisor`` counts the gradients of this process; all
        processes have the same number per replica. The names of their tensors may differ.
        """
        if not is_all_reduce(self):
            return super().reduce_buffers(
                gradients, divisor=divisor, out_dtypes=out_dtypes, names=names
            )
        if not gradients:
            return []
        divisor = divisor * Replicas.of(gradients[0]).count / len(gradients[0])
        plan = plan_batch(
            self.settings,
            gradients,
            divisor=divisor,
            out_dtypes=out_dtypes,
            names=tuple(names),
        )
        return reduce_batch(plan, gradients, consume=consume)

    def _rehearse_sums(self, devices: Sequence[Device], dtype: DType, out_dtype: DType) -> None:
        """Compiles all kernels of ``reduce_buffers``; see ``CrossDeviceOps._rehearse_sums``."""
        rehearse_reduction(self.settings, devices, dtype, out_dtype)

    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Reduces checked requests; see ``CrossDeviceOps.reduce_batch``."""
        return reduce_requests(self.settings, reduce_op, requests, coalesce=coalesce)


def is_all_reduce(cross_device_ops: CrossDeviceOps) -> bool:
    """Whether ``cross_device_ops`` uses ``reduce_batch`` of this module."""
    return type(cross_device_ops).reduce_batch is AllReduceCrossDeviceOps.reduce_batch


def _as_wire(wire_dtype: str | DType | None) -> DType | None:
    if wire_dtype is None:
        return None
    with suppress(TypeError):
        if as_dtype(wire_dtype).name in ("float16", "bfloat16", "float32"):
            return as_dtype(wire_dtype)
    raise ValueError(f"wire_dtype={brief(wire_dtype)} is not 'float16', 'bfloat16' or 'float32'")
