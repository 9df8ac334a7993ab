"""AllReduceCrossDeviceOps: the public all-reduce of gradients across devices.

Source: tf.contrib.distribute.AllReduceCrossDeviceOps (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeGuard, overload

from gradreduce.arrays.caller_streams import StreamScope, SuspendedScope
from gradreduce.arrays.distributed import Part, PerReplica, ReduceOp
from gradreduce.arrays.types import AllReduceAlg, NestT, OutputType
from gradreduce.comm.process_group import check_one_process
from gradreduce.comm.replicas import Replicas
from gradreduce.device import (
    NOT_CAPTURED,
    Buffer,
    Device,
    DType,
    Mesh,
    as_deadline,
    as_flag,
    by_physical,
    deadline_scope,
    no_collection,
)
from gradreduce.errors import CollectiveError
from gradreduce.ops import NUM_WORDS
from gradreduce.sums.exact_terms import needs_flag

from .algorithm import ProcessesName, ReductionGroups
from .algorithms import make_settings
from .arguments import Request, check_exact, check_op, validate_mesh
from .checked_call import CheckedCall
from .cross_device_ops import CrossDeviceOps
from .nested_calls import NestedCalls
from .pipeline import algorithm_of, plan_batch, reduce_batch, reduce_requests, rehearse_reduction
from .plan import DryRun, ReducePlan, dry_run_of
from .prepared import CapturedStep, PreparedStep, check_preparable
from .profile import Profile, profile_of
from .requests import copy_to_devices, with_all_reduced
from .weighting import Weighting, own_weighting, weighting_of


class AllReduceCrossDeviceOps(NestedCalls):
    """Reduction by all-reduce (tf.contrib.distribute.AllReduceCrossDeviceOps).

    Args:
        all_reduce_alg: ``"nccl"`` or ``"hierarchical_copy"``. Results of ``"hierarchical_copy"``
            have the same bits on every placement of the same number of replicas. NCCL does not
            define the order of additions, and its library is needed for two or more physical GPUs.
            Default: ``"nccl"``; with ``exact`` ``"hierarchical_copy"``.
        num_packs: if not 0, all tensors of a dtype are reduced in this many packs of one flat
            buffer; docs/several_gpus.md says how to choose it.
        agg_small_grads_max_bytes: if ``num_packs`` is 0, and this and the next argument are not,
            tensors of at most this many bytes are reduced in groups. With packs these arguments
            have no effect, and ``UserWarning`` says so.
        agg_small_grads_max_group: the largest number of tensors in a group.
        mesh: the mesh of the arrays of ``all_reduce``. Default: ``gr.default_mesh()``.
        reduction_groups: for ``"hierarchical_copy"``: lists of replica numbers, or ``"processes"``
            for a list of each process's replicas. Each list is added left to right, then their sums
            are. Default: two lists, the first n // 2 of n replicas and the rest. See
            docs/reductions.md.
        wire_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``: the dtype in which real floats
            are transferred between devices in an all-reduce. Default: each tensor's own dtype.
            docs/reductions.md has a bound of the error.
        exact: True adds the terms as real numbers and rounds their sum once, so that neither the
            order nor the number of replicas, processes or packs changes a bit; docs/same_bits.md
            defines the results. Not for IndexedSlices yet. Of float64 and complex128 eight floats
            hold each sum: ``gr.InexactSumWarning`` says that one does not fit.
        words: with ``exact``: how many floats (2 to 8) hold a sum to which terms are added one by
            one: of the micro-batches of a ``SyncStep``, and of the devices of a process, if these
            are more than ``words`` and there are other processes. ``gr.InexactSumWarning`` says
            that a sum does not fit.

    Raises:
        ValueError: the algorithm or ``wire_dtype`` is unknown, a number is negative or not an
            integer, ``mesh`` is not a Mesh, or ``reduction_groups`` is neither lists nor
            ``"processes"``, leaves out or repeats a replica, or is passed for NCCL, which chooses
            its own groups; or ``exact`` with ``"nccl"``, ``reduction_groups``, or a 16-bit
            ``wire_dtype``; or ``words`` is not from 2 to 8, or passed without ``exact``.
        TypeError: ``exact`` is not a bool.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=1, mesh=mesh)
        >>> ops
        <AllReduceCrossDeviceOps hierarchical_copy, num_packs=1, mesh=<Mesh sim [0, 1]>>
        >>> ops.all_reduce([[np.array([1.0, 2.0])], [np.array([3.0, 6.0])]])
        [[array([2., 4.])], [array([2., 4.])]]
        >>> exact = gr.AllReduceCrossDeviceOps(mesh=gr.open_mesh(3, backend="sim"), exact=True)
        >>> terms = [[np.float32([term])] for term in (1e8, 0.1, -1e8)]
        >>> exact.all_reduce(terms, gr.ReduceOp.SUM)[0]
        [array([0.1], dtype=float32)]
    """

    _elementwise = True

    def __init__(  # noqa: PLR0913  # the options of every call
        self,
        all_reduce_alg: AllReduceAlg | None = None,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        mesh: Mesh | None = None,
        reduction_groups: Sequence[Sequence[int]] | ProcessesName | None = None,
        wire_dtype: str | DType | None = None,
        exact: bool = False,
        words: int = NUM_WORDS,
    ) -> None:
        self.mesh = validate_mesh(mesh)
        self.settings = make_settings(
            all_reduce_alg,
            num_packs,
            agg_small_grads_max_bytes,
            agg_small_grads_max_group,
            reduction_groups,
            wire_dtype,
            exact,
            words,
        )

    def _repr_fields(self) -> list[str]:
        fields = self.settings._asdict()
        if not self.agg_small_grads_max_bytes:
            del fields["agg_small_grads_max_bytes"], fields["agg_small_grads_max_group"]
        if not self.exact:
            del fields["exact"]
        del fields["num_words"]
        if self.words == NUM_WORDS:
            del fields["words"]
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

    @property
    def exact(self) -> bool:
        """Whether the terms are added as real numbers."""
        return self.settings.exact

    @property
    def words(self) -> int:
        """How many floats hold an exact sum to which terms are added one by one."""
        return self.settings.words

    @overload
    def all_reduce(
        self,
        grads: NestT,
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        weights: Sequence[float] | None = None,
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
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> Any: ...
    def all_reduce(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        output_type: OutputType | None = None,
        out: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
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
            weights: for each device of the mesh the weight of its gradients, such as the number of
                its examples; see ``batch_reduce``. The entry of ``grads`` of a device with weight 0
                is not read and may be None, unless all devices of this process have weight 0.
            deadline: see ``batch_reduce``.

        Returns:
            The combined arrays, ``[device][tensor]``, nested like ``grads`` (a dict for a module):
            in new memory, or ``out``. The call waits for a device only for results of GPUs in NumPy
            arrays. The mean of integers is float32 (8 and 16 bits) or float64, although a type
            checker sees the type of ``grads``.

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
            >>> ops.all_reduce([[np.array([1.0])], [np.array([5.0])]], weights=[3, 1])[0]
            [array([2.])]
        """
        check_op("op", op)
        if coalesce is not False:
            coalesce = as_flag("coalesce", coalesce)

        def run(requests: list[Request]) -> list[tuple[Part, ...]]:
            if self.exact:
                check_exact(requests, self.settings)
            if weights is not None:
                return self._reduce_weighted(op, requests, weights, coalesce=coalesce)
            with SuspendedScope():  # may run code of a caller's subclass
                return self.reduce_batch(op, requests, coalesce=coalesce)

        return self._run_nested("batch_reduce", op, grads, output_type, out, deadline, run, weights)

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
        return [(value, value) for value in self._validate_nests(grads).values]

    def plan(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
        weights: Sequence[float] | None = None,
    ) -> ReducePlan:
        """Returns what ``batch_reduce`` with the same arguments would do; print it.

        Nothing is launched, copied or compiled. The plan depends only on shapes, dtypes, settings
        and mesh, and on the position of tensors in a flat buffer.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.
            weights: see ``batch_reduce``. Those of other processes are not asked for: the plan of a
                process whose weights are all 1 is that of a call without weights.

        Raises:
            ValueError: there is no pair, values are on several meshes, or as ``batch_reduce``.
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
        weighting = None if weights is None else own_weighting(requests, reduce_op, weights)
        return self._dry_run(reduce_op, requests, weighting, coalesce=coalesce).plan

    @StreamScope()
    def profile(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
        weights: Sequence[float] | None = None,
        deadline: float | None = None,
    ) -> Profile:
        """Measures where the time of a ``batch_reduce`` is spent; print the result.

        It shows the plan, what the journal counted, and for each stage a lower bound of its time
        (its bytes divided by this mesh's copy bandwidth). The reduction runs twice, its results are
        dropped, and the host waits for the devices. The first call on a mesh also measures the copy
        bandwidth, for at most a second.

        The arguments are those of ``plan``, and ``deadline``, for the whole call.

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
        weighting = None if weights is None else weighting_of(requests, reduce_op, weights)
        planned = self._dry_run(reduce_op, requests, weighting, coalesce=coalesce)
        reduce = partial(self.reduce_batch, reduce_op, requests, coalesce=coalesce)
        if weighting is not None:
            reduce = partial(self._reduce_by, weighting, reduce_op, requests, coalesce=coalesce)
        mesh = requests[0].value.mesh
        with deadline_scope("profile", as_deadline(deadline), mesh.devices):
            return profile_of(planned, mesh, reduce)

    def _validate_call(
        self,
        reduce_op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        output_type: OutputType | None = None,
        out: Any = None,
    ) -> CheckedCall:
        """See ``CrossDeviceOps._validate_call``. Also checks that exact sums take the terms."""
        call = super()._validate_call(reduce_op, pairs, output_type, out)
        if self.exact:
            check_exact(call.requests, self.settings)
        return call

    def _plannable(self, reduce_op: ReduceOp, pairs: Sequence[tuple[Any, Any]]) -> list[Request]:
        """Checks the arguments of ``plan`` and ``profile``, and the devices."""
        requests = self._validate_call(reduce_op, pairs).requests
        for request in requests:
            if request.is_all_reduced:
                algorithm_of(self.settings, request.devices)
        return requests

    def _dry_run(
        self,
        reduce_op: ReduceOp,
        requests: Sequence[Request],
        weighting: Weighting | None,
        *,
        coalesce: bool,
    ) -> DryRun:
        reduce: Callable[[list[Request]], object]
        if weighting is None:
            reduce = partial(reduce_requests, self.settings, reduce_op, coalesce=coalesce)
        else:
            reduce = partial(self._reduce_by, weighting, reduce_op, coalesce=coalesce)
        return dry_run_of(self.settings, reduce_op, requests, reduce, weighting)

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

        Runs it once, and waits like ``batch_reduce``, which describes the arguments. Returns a
        ``PreparedStep``: call it without arguments. Its class describes what each call reads,
        overwrites and returns.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: at least one pair. Values must be dense, on one mesh, and
                Buffers or arrays that can be shared without a copy.
            output_type: see ``batch_reduce``.
            out: arrays that each call writes and returns as results. On simulated devices with
                ``schedule_seed=`` only Buffers.
            deadline: for this first reduction.

        Raises:
            ValueError: there is no pair; values are on several meshes or contain IndexedSlices; an
                array had to be copied; or results would be JAX arrays, which are immutable, or
                NumPy arrays of a GPU's values.
            ValueError, DeviceMismatchError, TypeError, BackendUnavailableError, CollectiveError:
                what ``batch_reduce`` raises.

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
        """Like ``prepare``, with the same arguments, but each call launches one CUDA graph.

        Raises:
            ValueError, DeviceMismatchError, TypeError: what ``prepare`` raises; or ``exact`` with
                float64 or complex128, whose sums may warn in each call.
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
            dtype = request.value.buffers[0].dtype
            if self.exact and needs_flag(dtype):
                raise ValueError(
                    f"{request.value._name_of(index)} is {dtype}: a captured step cannot warn of "
                    "exact sums that do not fit into their words; use prepare"
                )
        with call.running("capture", deadline):
            return CapturedStep(call, partial(self.reduce_batch, reduce_op, coalesce=False))

    def reduce_buffers(
        self,
        gradients: Sequence[Sequence[Buffer]],
        *,
        divisor: float = 1,
        weight: float | None = None,
        out_dtypes: Sequence[DType] | None = None,
        consume: ExitStack | None = None,
        names: Sequence[str] = (),
        num_words: int = 1,
    ) -> list[tuple[Buffer, ...]]:
        """Sums ``gradients[tensor][replica]`` on every device, for accumulators.

        See ``CrossDeviceOps.reduce_buffers``; with ``consume`` the gradients may be overwritten. In
        a subclass that overrides ``reduce_batch``, it calls that method. With several processes
        ``divisor`` counts the gradients of this process; all processes have the same number per
        replica. The names of their tensors may differ.
        """
        if not is_all_reduce(self):
            return super().reduce_buffers(
                gradients, divisor=divisor, weight=weight, out_dtypes=out_dtypes, names=names
            )
        if not gradients:
            return []
        first = gradients[0][::num_words]
        divisor = divisor * Replicas.of(first).count / len(first)
        settings = self.settings if num_words == 1 else self.settings._replace(num_words=num_words)
        plan = plan_batch(
            settings,
            gradients,
            divisor=divisor if weight is None else None,
            out_dtypes=out_dtypes,
            names=tuple(names),
        )
        return reduce_batch(plan, gradients, consume=consume, divisor=weight)

    def _rehearse_sums(
        self, devices: Sequence[Device], dtype: DType, out_dtype: DType, num_words: int = 1
    ) -> None:
        """Compiles all kernels of ``reduce_buffers``; see ``CrossDeviceOps._rehearse_sums``."""
        settings = self.settings._replace(num_words=num_words)
        rehearse_reduction(settings, devices, dtype, out_dtype)

    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """Reduces checked requests; see ``CrossDeviceOps.reduce_batch``."""
        return reduce_requests(self.settings, reduce_op, requests, coalesce=coalesce)

    def _reduce_by(
        self, weighting: Weighting, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """See ``CrossDeviceOps._reduce_by``; the pack of an all-reduce multiplies."""
        # A sum of scaled 16-bit terms, which are float32, is rounded once only by the pipeline.
        alike = with_all_reduced(requests, always=self.exact)
        if alike is not requests:
            reduced = self._reduce_by(weighting, reduce_op, list(alike), coalesce=coalesce)
            return copy_to_devices(requests, reduced)
        flags = [each.is_all_reduced and is_all_reduce(self) for each in requests]
        fused, others = [
            [each for each, flag in zip(requests, flags, strict=True) if flag is wanted]
            for wanted in (True, False)
        ]
        of_fused = iter(
            reduce_requests(self.settings, reduce_op, fused, coalesce=coalesce, weighting=weighting)
        )
        of_others = iter(
            super()._reduce_by(weighting, reduce_op, others, coalesce=coalesce) if others else ()
        )
        return [next(of_fused if flag else of_others) for flag in flags]


def is_all_reduce(cross_device_ops: CrossDeviceOps) -> bool:
    """Whether ``cross_device_ops`` uses ``reduce_batch`` of this module."""
    return type(cross_device_ops).reduce_batch is AllReduceCrossDeviceOps.reduce_batch


def is_exact(cross_device_ops: CrossDeviceOps) -> TypeGuard[AllReduceCrossDeviceOps]:
    """Whether terms are added as real numbers."""
    return isinstance(cross_device_ops, AllReduceCrossDeviceOps) and cross_device_ops.exact
