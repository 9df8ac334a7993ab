"""How replicas of a gradient become one value on every device: plan, pack, all-reduce, unpack.

Source: tf.contrib.distribute.AllReduceCrossDeviceOps (all_reduce_cross_device_ops.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.allreduce import ALGORITHMS, Job
from gradreduce.device import Buffer, Device, DType, Mesh, default_mesh
from gradreduce.interop import as_result_kind
from gradreduce.packing import Flats, pack, plan_packing, unpack
from gradreduce.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, ReduceOp
from gradreduce.variables import Variable

__all__ = [
    "AllReduceCrossDeviceOps",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "all_reduce",
]


class CrossDeviceOps:
    """Base of what combines values across devices (tf.distribute.CrossDeviceOps).

    Checks arguments; a subclass implements ``_reduce_batch``.
    """

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        *,
        as_kind: str | None = None,
    ) -> Mirrored:
        """Combines the replicas of one value; see ``batch_reduce``."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce(reduce_op, pairs, as_kind=as_kind)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        *,
        as_kind: str | None = None,
    ) -> list[Mirrored]:
        """Combines the replicas of each value, all values of the same devices in one batch.

        Args:
            reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.MEAN``.
            value_destination_pairs: list or tuple of pairs. A value is a ``PerReplica`` whose
                replicas agree in shape and dtype, or a Buffer, which is its own only replica. A
                destination names devices: a ``PerReplica``, ``Mirrored``, ``Variable``, ``Mesh``,
                device or list of devices; it must be the value's, in any order.
            as_kind: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"buffer"``: what the
                arrays of the results are instead of the kind of the value's.

        Returns:
            One ``Mirrored`` for each pair, in order, on the value's devices in the value's
            order. Its memory is new and the caller's; no input is written.

        Raises:
            ValueError: a wrong operation, pair or destination, or replicas that differ in shape
                or dtype (named). Nothing was launched.
            NotImplementedError: destinations other than the value's devices, device strings,
                IndexedSlices, MEAN of integers.
        """
        if not isinstance(reduce_op, ReduceOp):
            raise ValueError(f"reduce_op={reduce_op!r} must be ReduceOp.SUM or ReduceOp.MEAN")
        values = []
        for place, pair in enumerate(_checked_pairs(value_destination_pairs)):
            value = _as_per_replica(pair[0], place)
            _check_replicas(value, place, reduce_op)
            _check_destination(value, pair[1], place)
            values.append(value)
        kinds = [as_result_kind(as_kind, value.kind) for value in values]
        reduced = self._reduce_batch(reduce_op, values)
        return [Mirrored.of(*each) for each in zip(reduced, kinds, strict=True)]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies ``tensor`` to every destination.

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError("broadcast is not implemented yet")

    def _reduce_batch(
        self, reduce_op: ReduceOp, values: list[PerReplica]
    ) -> list[tuple[Buffer, ...]]:
        raise NotImplementedError(f"{type(self).__name__} does not reduce")


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Reduction by all-reduce (tf.contrib.distribute.AllReduceCrossDeviceOps).

    Args:
        all_reduce_alg: ``"nccl"`` or ``"hierarchical_copy"``. The second gives the same bits on
            every placement of the same number of replicas; NCCL promises no order of additions.
        num_packs: if not 0, all tensors of a dtype lie end to end in one flat buffer that is
            reduced in this many packs.
        agg_small_grads_max_bytes: if this and the next are above 0 and ``num_packs`` is 0, tensors
            of at most this many bytes are reduced in groups.
        agg_small_grads_max_group: how many tensors a group has at most.
        mesh: where ``all_reduce`` puts its arrays. Default: ``gr.default_mesh()``.

    Raises:
        ValueError: an unknown algorithm, or a number that is negative or no integer.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        if all_reduce_alg not in ALGORITHMS:
            raise ValueError(f"all_reduce_alg={all_reduce_alg!r} is not one of {list(ALGORITHMS)}")
        numbers = {
            "num_packs": num_packs,
            "agg_small_grads_max_bytes": agg_small_grads_max_bytes,
            "agg_small_grads_max_group": agg_small_grads_max_group,
        }
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name}={number!r} must be an integer from 0 up")
        self.all_reduce_alg = all_reduce_alg
        self.num_packs = num_packs
        self.agg_small_grads_max_bytes = agg_small_grads_max_bytes
        self.agg_small_grads_max_group = agg_small_grads_max_group
        self.mesh = mesh

    def all_reduce(
        self,
        grads: Sequence[Any],
        op: ReduceOp = ReduceOp.MEAN,
        *,
        as_kind: str | None = None,
    ) -> Any:
        """Combines ``grads[device][tensor]``, one batch for all; the same nesting comes back.

        Args:
            grads: for each device of the mesh, in order, a list, tuple or dict of arrays; all
                alike. Arrays that are no Buffers lie on their device's logical device.
            op: ``ReduceOp.MEAN`` or ``ReduceOp.SUM``.
            as_kind: what the results are instead of the kind of each tensor's first array; see
                ``batch_reduce``.

        Returns:
            The combined arrays, ``[device][tensor]``, nested as they came. New memory.

        Raises:
            ValueError: another number of entries than devices, entries of different length or
                keys, or what ``batch_reduce`` raises.
        """
        mesh = self.mesh or default_mesh()
        keys = _checked_nest(grads, mesh)
        values = [PerReplica([entry[key] for entry in grads], mesh) for key in keys]
        pairs = [(value, value) for value in values]
        reduced = self.batch_reduce(op, pairs, as_kind=as_kind)
        by_key = dict(zip(keys, (value.values for value in reduced), strict=True))
        return _nested(
            grads,
            [
                _nested(entry, [by_key[key][replica] for key in _keys(entry, replica)])
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
    ) -> list[tuple[Buffer, ...]]:
        """The flow itself: ``gradients[tensor][replica]`` become their sum, divided.

        Args:
            gradients: of each tensor one Buffer for each replica, on the same devices in the
                same order for every tensor; replicas of one shape and dtype.
            divisor: of every sum.
            out_dtypes: of the results; default those of the gradients.
            consume: the gradients may be overwritten and become the results' memory.

        Returns:
            ``[tensor][replica]``, all replicas of a tensor equal.
        """
        if not gradients:
            return []
        shapes = [replicas[0].shape for replicas in gradients]
        dtypes = [replicas[0].dtype for replicas in gradients]
        devices = [buffer.device for buffer in gradients[0]]
        plans = plan_packing(
            tuple(replicas[0].size for replicas in gradients),
            tuple(zip(dtypes, out_dtypes or dtypes, strict=True)),
            self.num_packs,
            self.agg_small_grads_max_bytes,
            self.agg_small_grads_max_group,
        )
        flats = pack(plans, gradients, devices, consume=consume)
        ALGORITHMS[self.all_reduce_alg](_jobs(flats, divisor))
        return unpack(flats, shapes)

    def _reduce_batch(
        self, reduce_op: ReduceOp, values: list[PerReplica]
    ) -> list[tuple[Buffer, ...]]:
        results: list[tuple[Buffer, ...]] = [()] * len(values)
        by_devices: dict[tuple[Device, ...], list[int]] = {}
        for place, value in enumerate(values):
            by_devices.setdefault(value.devices, []).append(place)
        for devices, places in by_devices.items():
            divisor = len(devices) if reduce_op is ReduceOp.MEAN else 1
            gradients = [values[place].buffers for place in places]
            reduced = self.reduce_buffers(gradients, divisor=divisor)
            for place, buffers in zip(places, reduced, strict=True):
                results[place] = buffers
        return results


class NcclAllReduce(AllReduceCrossDeviceOps):
    """``AllReduceCrossDeviceOps`` by NCCL, with ``num_packs`` packs (at least 0)."""

    def __init__(self, num_packs: int = 1, *, mesh: Mesh | None = None) -> None:
        super().__init__("nccl", num_packs, mesh=mesh)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """``AllReduceCrossDeviceOps`` by hierarchical copy, with ``num_packs`` packs (at least 0)."""

    def __init__(self, num_packs: int = 1, *, mesh: Mesh | None = None) -> None:
        super().__init__("hierarchical_copy", num_packs, mesh=mesh)


class ReductionToOneDevice(CrossDeviceOps):
    """Adds all replicas on one device and copies the result out (tf.distribute's of that name).

    Args:
        reduce_to_device: where to add; default the first destination.
        accumulation_fn: how; default ``gr.add_n``.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(self, reduce_to_device: Any = None, accumulation_fn: Any = None) -> None:
        raise NotImplementedError("ReductionToOneDevice is not implemented yet")


def all_reduce(
    grads: Sequence[Any],
    op: ReduceOp = ReduceOp.MEAN,
    *,
    mesh: Mesh | None = None,
    as_kind: str | None = None,
) -> Any:
    """``AllReduceCrossDeviceOps(mesh=mesh).all_reduce(grads, op)``, in one line."""
    return AllReduceCrossDeviceOps(mesh=mesh).all_reduce(grads, op, as_kind=as_kind)


def _jobs(flats: Sequence[Flats], divisor: float) -> list[Job]:
    """One job for each pack."""
    return [
        Job(flat.inputs, flat.outs, divisor).part(start, stop)
        for flat in flats
        for start, stop in flat.plan.packs
    ]


def _checked_pairs(pairs: Any) -> Sequence[tuple[Any, Any]]:
    if not isinstance(pairs, list | tuple):
        kind = type(pairs).__name__
        raise ValueError(f"value_destination_pairs must be a list or a tuple of pairs, not {kind}")
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"value_destination_pairs[{place}] must be a tuple of size 2: {pair!r}"
            )
    return pairs


def _as_per_replica(value: Any, place: int) -> PerReplica:
    if isinstance(value, IndexedSlices):
        raise NotImplementedError("IndexedSlices (sparse gradients) are not implemented yet")
    if isinstance(value, Buffer):
        return PerReplica([value])
    if not isinstance(value, PerReplica):
        raise ValueError(
            f"value {place} is {type(value).__name__}, neither a PerReplica nor a Buffer"
        )
    return value


def _check_replicas(value: PerReplica, place: int, reduce_op: ReduceOp) -> None:
    first = value.buffers[0]
    if reduce_op is ReduceOp.MEAN and first.dtype.kind in "iu":
        raise NotImplementedError(f"value {place}: MEAN of integers ({first.dtype})")
    for replica, buffer in enumerate(value.buffers):
        if (buffer.shape, buffer.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"value {place}: replica {replica} is {buffer.dtype}{list(buffer.shape)}, replica "
                f"0 is {first.dtype}{list(first.shape)}"
            )
        buffer.device.fabric.check_open()


def _check_destination(value: PerReplica, destination: Any, place: int) -> None:
    devices = _destination_devices(destination, place)
    if set(devices) != set(value.devices):
        raise NotImplementedError(
            f"value {place} lies on {value.devices}, its destination is {devices}: only reducing "
            "to the value's own devices is implemented"
        )


def _destination_devices(destination: Any, place: int) -> Sequence[Device]:
    if isinstance(destination, DistributedValues | Variable | Mesh):
        return destination.devices
    if isinstance(destination, Device):
        return (destination,)
    if isinstance(destination, str) and destination:
        raise NotImplementedError(f"destination {place} is a device string ({destination!r})")
    listed = isinstance(destination, list | tuple) and len(destination) > 0
    if listed and all(isinstance(device, Device) for device in destination):
        return tuple(destination)
    raise ValueError(
        f"destination {place} is {destination!r}: it must be a PerReplica, Mirrored, Variable, "
        "Mesh, device, or list of devices, and not empty"
    )


def _checked_nest(grads: Any, mesh: Mesh) -> list[Any]:
    """The keys (or places) of the tensors, equal for every device."""
    if not isinstance(grads, list | tuple) or len(grads) != len(mesh.devices):
        raise ValueError(
            f"grads must be a list or tuple with one entry for each of {len(mesh.devices)} devices"
        )
    keys = [_keys(entry, replica) for replica, entry in enumerate(grads)]
    for replica, found in enumerate(keys):
        if type(grads[replica]) is not type(grads[0]) or set(found) != set(keys[0]):
            raise ValueError(f"grads[{replica}] has other tensors than grads[0]")
    return keys[0]


def _nested(like: Any, parts: list[Any]) -> Any:
    """``parts`` in a list, tuple, named tuple or dict like ``like``, by its own order of keys."""
    if isinstance(like, dict):
        return dict(zip(like, parts, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    return type(like)(parts)


def _keys(entry: Any, replica: int) -> list[Any]:
    if isinstance(entry, dict):
        return list(entry)
    if isinstance(entry, list | tuple):
        return list(range(len(entry)))
    raise ValueError(f"grads[{replica}] must be a list, tuple or dict of arrays")
