"""How replicas of a gradient become one value on every device: plan, pack, all-reduce, unpack.

Source: tf.contrib.distribute.AllReduceCrossDeviceOps (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from gradreduce import ops
from gradreduce.allreduce import (
    ALGORITHMS,
    Halves,
    Job,
    as_topology,
    check_library,
    connect,
    halves_of,
    works_in_place,
)
from gradreduce.cross_device_ops import CrossDeviceOps, reduce_to_one
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    Mesh,
    Travel,
    accumulate_dtype,
    as_deadline,
    default_mesh,
)
from gradreduce.errors import about
from gradreduce.interop import OneCall
from gradreduce.one_device import quotients
from gradreduce.packing import FlatPlan, Flats, pack, plan_packing, unpack
from gradreduce.prepared import PreparedStep, check_preparable
from gradreduce.reduce_arguments import (
    Request,
    as_count,
    batches_of,
    checked_mesh,
    checked_nest,
    checked_requests,
    keys_of,
    nested,
)
from gradreduce.reduce_plan import ReducePlan, plan_of
from gradreduce.values import Part, PerReplica, ReduceOp

__all__ = ["AllReduceCrossDeviceOps"]


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Reduction by all-reduce (tf.contrib.distribute.AllReduceCrossDeviceOps).

    Args:
        all_reduce_alg: ``"nccl"`` or ``"hierarchical_copy"``. The second gives the same bits on
            every placement of the same number of replicas; NCCL promises no order of additions,
            and is needed on two physical GPUs or more.
        num_packs: if not 0, all tensors of a dtype lie end to end in one flat buffer that is
            reduced in this many packs.
        agg_small_grads_max_bytes: if this and the next are above 0 and ``num_packs`` is 0, tensors
            of at most this many bytes are reduced in groups.
        agg_small_grads_max_group: how many tensors a group has at most.
        mesh: where ``all_reduce`` puts its arrays. Default: ``gr.default_mesh()``.
        topology: of ``"hierarchical_copy"``: two lists of replica numbers, in place of its
            halves. Replica i lies on the i-th of a value's devices. The first list is added left
            to right, the second likewise, then the two sums; islands of devices with fast links
            inside make good lists. One of them may be empty. Every value that is all-reduced must
            have exactly the replicas named; what is added on one device, for other destinations
            or IndexedSlices, is added left to right. Default: the first n // 2 of n, and the rest.

    Raises:
        ValueError: an unknown algorithm, a number that is negative or no integer, a ``mesh`` that
            is none, or a topology that is none, leaves a replica out, names one twice or is meant
            for NCCL, which chooses its own.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        mesh: Mesh | None = None,
        topology: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in ALGORITHMS:
            raise ValueError(f"all_reduce_alg={all_reduce_alg!r} is not one of {list(ALGORITHMS)}")
        self.all_reduce_alg = all_reduce_alg
        self.num_packs = as_count("num_packs", num_packs)
        self.agg_small_grads_max_bytes = as_count(
            "agg_small_grads_max_bytes", agg_small_grads_max_bytes
        )
        self.agg_small_grads_max_group = as_count(
            "agg_small_grads_max_group", agg_small_grads_max_group
        )
        self.mesh = checked_mesh(mesh)
        if topology is not None and all_reduce_alg != "hierarchical_copy":
            raise ValueError(
                f"topology={topology!r} is for 'hierarchical_copy': {all_reduce_alg!r} chooses its "
                "own"
            )
        self.topology = None if topology is None else as_topology(topology)

    def all_reduce(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        coalesce: bool = False,
        as_kind: str | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Combines ``grads[device][tensor]``, one batch for all; the same nesting comes back.

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays or
                IndexedSlices; all alike. Host arrays lie on the device of their place.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            coalesce: add rows of the same index of IndexedSlices.
            as_kind: what the results are instead of the kind of each tensor's first array; see
                ``batch_reduce``.
            deadline: see ``batch_reduce``.

        Returns:
            The combined arrays, ``[device][tensor]``, nested as they came. New memory. Waits for
            no device, unless NumPy arrays are asked for, ``as_kind="numpy"``, of what lies on
            GPUs.

        Raises:
            ValueError: another number of entries than devices, or entries of different length or
                keys.
            ValueError, TypeError, BackendUnavailableError, CollectiveError: what ``batch_reduce``
                raises; "value" is the place of the tensor in ``grads[0]``.
        """
        seconds = as_deadline(deadline)
        mesh = self.mesh or default_mesh()
        keys = checked_nest(grads, mesh)
        self._check_devices(mesh.devices)
        values = []
        with OneCall():
            for place, key in enumerate(keys):
                try:
                    values.append(PerReplica([entry[key] for entry in grads], mesh))
                except (TypeError, ValueError) as error:
                    raise about(f"value {place}", error) from None
        pairs = [(value, value) for value in values]
        reduced = self.batch_reduce(op, pairs, coalesce=coalesce, as_kind=as_kind, deadline=seconds)
        with OneCall():
            by_key = dict(zip(keys, [value.values for value in reduced], strict=True))
        return nested(
            grads,
            [
                nested(entry, [by_key[key][replica] for key in keys_of(entry, replica)])
                for replica, entry in enumerate(grads)
            ],
        )

    def reduce_buffers(
        self,
        gradients: Sequence[Sequence[Buffer]],
        *,
        divisor: float = 1,
        out_dtypes: Sequence[DType] | None = None,
        consume: bool = False,
        places: Sequence[int] | None = None,
    ) -> list[tuple[Buffer, ...]]:
        """The flow itself: ``gradients[tensor][replica]`` become their sum, divided.

        Args:
            gradients: of each tensor one Buffer for each replica, on the same devices in the
                same order for every tensor; replicas of one shape and dtype.
            divisor: of every sum.
            out_dtypes: of the results; default those of the gradients.
            consume: the gradients may be overwritten and become the results' memory.
            places: what the tensors are called in errors and in the flight record; default
                their places here.

        Returns:
            ``[tensor][replica]``, all replicas of a tensor equal.

        Raises:
            ValueError, BackendUnavailableError: what ``compile_for`` raises, before any launch.
        """
        if not gradients:
            return []
        shapes = [replicas[0].shape for replicas in gradients]
        devices = [buffer.device for buffer in gradients[0]]
        plans = self.flat_plans(gradients, out_dtypes)
        for plan in plans:
            self.compile_for(devices, plan.dtype, plan.out_dtype)
        staged = self.all_reduce_alg == "hierarchical_copy" and not works_in_place(devices)
        flats = pack(plans, gradients, devices, consume=consume and not staged)
        options = {} if self.topology is None else {"topology": self.topology}
        with devices[0].fabric.watched_pack(_travel(plans, places or range(len(gradients)))):
            ALGORITHMS[self.all_reduce_alg](_jobs(flats, divisor), **options)
        return unpack(flats, shapes)

    def plan(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        coalesce: bool = False,
    ) -> ReducePlan:
        """What ``batch_reduce`` of the same arguments would do: print it, or count with it.

        Nothing is launched, copied or compiled. Equal shapes, dtypes, settings and meshes give
        the same plan, which is remembered; so does the same place of tensors in a flat buffer.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one.
            coalesce: see ``batch_reduce``.

        Raises:
            ValueError: what ``batch_reduce`` raises, no pair, or values of several meshes.
            BackendUnavailableError: NCCL is needed, and is missing.
        """
        requests = checked_requests(value_destination_pairs, reduce_op, self.mesh)
        for request in requests:
            if request.is_all_reduced:
                self._check_devices(request.devices)
        limits = (self.agg_small_grads_max_bytes, self.agg_small_grads_max_group)
        settings = (self.all_reduce_alg, self.num_packs, *limits, self.topology)
        return plan_of(_with_settings, settings, reduce_op, requests, coalesce=coalesce)

    def flat_plans(
        self,
        gradients: Sequence[Sequence[Buffer]],
        out_dtypes: Sequence[DType] | None = None,
    ) -> tuple[FlatPlan, ...]:
        """Which tensors of one batch share a flat buffer, and its packs; see ``plan_packing``."""
        dtypes = [replicas[0].dtype for replicas in gradients]
        return plan_packing(
            tuple(replicas[0].size for replicas in gradients),
            tuple(zip(dtypes, out_dtypes or dtypes, strict=True)),
            self.num_packs,
            self.agg_small_grads_max_bytes,
            self.agg_small_grads_max_group,
        )

    def prepare(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> PreparedStep:
        """Works a ``batch_reduce`` out once, to be done many times at little cost to the host.

        Does it once, too. See ``PreparedStep`` for what its calls read and overwrite.

        Args:
            reduce_op: see ``batch_reduce``.
            value_destination_pairs: see ``batch_reduce``; at least one, of dense Buffers, all of
                one mesh.

        Raises:
            ValueError: what ``batch_reduce`` raises, no pair, values of several meshes, or what
                is no Buffer.
        """
        requests = checked_requests(value_destination_pairs, reduce_op, self.mesh)
        check_preparable(requests)
        return PreparedStep(
            requests, lambda: self.reduce_batch(reduce_op, requests, coalesce=False)
        )

    def compile_for(self, devices: Sequence[Device], dtype: DType, out_dtype: DType) -> None:
        """Compiles all that ``reduce_buffers`` may launch, and connects the devices for NCCL.

        Not done while a lock is held; and what fails here has launched nothing.

        Args:
            devices: of the replicas.
            dtype: of the gradients.
            out_dtype: of the results.

        Raises:
            ValueError: the topology is one of another number of replicas.
            BackendUnavailableError: NCCL is needed, on two physical GPUs or more, and missing.
            CollectiveError: NCCL cannot connect them.
        """
        prepared = devices[0].fabric.prepared
        places = tuple(device.index for device in devices)
        key = ("reduce", self.all_reduce_alg, places, dtype, out_dtype, self.topology)
        if key in prepared:
            return
        self._check_devices(devices)
        wide = accumulate_dtype(dtype)
        counts = {len(half) for half in halves_of(len(devices), self.topology)} - {0}
        if self.all_reduce_alg == "nccl":
            counts = set()
            connect(devices)
        for device in devices:
            ops.prepare_pack(device, dtype, dtype)
            for out, term in ((out_dtype, dtype), (dtype, dtype), (out_dtype, wide)):
                ops.prepare_all_sum(device, out, term)
            for count in counts:
                ops.prepare_add_n(device, wide, dtype, count)
        prepared.add(key)

    def _check_devices(self, devices: Sequence[Device]) -> None:
        """Raises unless the replicas on these devices can be reduced; launches nothing."""
        halves_of(len(devices), self.topology)
        if self.all_reduce_alg == "nccl":
            check_library(devices)

    def reduce_batch(
        self, reduce_op: ReduceOp, requests: list[Request], *, coalesce: bool
    ) -> list[tuple[Part, ...]]:
        """All dense values of the same devices in one batch; one by one what goes elsewhere."""
        results: list[tuple[Part, ...]] = [()] * len(requests)
        batches = batches_of(requests, reduce_op)
        for places in batches:  # all of them, before the first is launched
            self._check_devices(requests[places[0]].devices)
        for places in batches:
            gradients = [requests[place].value.buffers for place in places]
            reduced = self._reduce_dense(reduce_op, gradients, places)
            for place, buffers in zip(places, reduced, strict=True):
                results[place] = buffers
        for place, request in enumerate(requests):
            if not request.is_all_reduced:
                home = request.devices[0]
                with home.fabric.watched_pack(Travel((place,))):
                    results[place] = reduce_to_one(reduce_op, request, home, coalesce=coalesce)
        return results

    def _reduce_dense(
        self,
        reduce_op: ReduceOp,
        gradients: list[tuple[Buffer, ...]],
        places: Sequence[int],
    ) -> list[tuple[Buffer, ...]]:
        """One batch. The means of integers are floats: they are added, then divided."""
        num_replicas = len(gradients[0])
        mean = reduce_op is ReduceOp.MEAN
        counts = mean and gradients[0][0].dtype.kind in "iu"
        divisor = num_replicas if mean and not counts else 1
        reduced = self.reduce_buffers(gradients, divisor=divisor, places=places)
        if not counts:
            return reduced
        means = iter(quotients([total for totals in reduced for total in totals], num_replicas))
        return [tuple(islice(means, num_replicas)) for _ in reduced]


def _with_settings(
    alg: str, num_packs: int, max_bytes: int, max_group: int, topology: Halves | None
) -> AllReduceCrossDeviceOps:
    return AllReduceCrossDeviceOps(alg, num_packs, max_bytes, max_group, topology=topology)


def _travel(plans: Sequence[FlatPlan], places: Sequence[int]) -> Travel:
    """All packs, by the names of their tensors."""
    num_packs = sum(len(plan.packs) for plan in plans)
    return Travel(places, range(1, num_packs + 1), num_packs)


def _jobs(flats: Sequence[Flats], divisor: float) -> list[Job]:
    """One job for each pack."""
    return [
        Job(flat.inputs, flat.outs, divisor).part(start, stop)
        for flat in flats
        for start, stop in flat.plan.packs
    ]
