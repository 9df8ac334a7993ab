"""Whether the arguments of a reduction fit, before anything is launched; never reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.device import Buffer, Device, Mesh
from gradreduce.indexed_slices import IndexedSlices
from gradreduce.interop import is_array
from gradreduce.values import DistributedValues, PerReplica, ReduceOp
from gradreduce.variables import Variable

__all__ = [
    "as_per_replica",
    "check_destination",
    "check_replicas",
    "checked_nest",
    "checked_pairs",
    "keys_of",
    "nested",
]


def checked_pairs(pairs: Any) -> Sequence[tuple[Any, Any]]:
    """A list or tuple of 2-tuples; anything else is a ``ValueError``."""
    if not isinstance(pairs, list | tuple):
        kind = type(pairs).__name__
        raise ValueError(f"value_destination_pairs must be a list or a tuple of pairs, not {kind}")
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"value_destination_pairs[{place}] must be a tuple of size 2: {pair!r}"
            )
    return pairs


def as_per_replica(value: Any, place: int) -> PerReplica:
    """The value of a pair; a Buffer is its own only replica, anything else a ``ValueError``."""
    if isinstance(value, IndexedSlices):
        raise NotImplementedError("IndexedSlices (sparse gradients) are not implemented yet")
    if isinstance(value, Buffer):
        return PerReplica([value])
    if not isinstance(value, PerReplica):
        raise ValueError(
            f"value {place} is {type(value).__name__}, neither a PerReplica nor a Buffer"
        )
    return value


def check_replicas(value: PerReplica, place: int, reduce_op: ReduceOp) -> None:
    """Raises ``ValueError`` for replicas that differ, naming value and replica."""
    first = value.buffers[0]
    if reduce_op is ReduceOp.MEAN and first.dtype.kind in "iu":
        raise NotImplementedError(f"value {place}: MEAN of integers ({first.dtype})")
    for replica, buffer in enumerate(value.buffers):
        if (buffer.shape, buffer.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"value {place}: replica {replica} is {buffer.dtype}{list(buffer.shape)}, replica "
                f"0 is {first.dtype}{list(first.shape)}"
            )
        buffer.device.fabric.check_usable(buffer.device)


def check_destination(value: PerReplica, destination: Any, place: int) -> None:
    """Raises unless the destination names the value's devices, in any order."""
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
        if len(set(destination)) == len(destination):
            return tuple(destination)
        raise ValueError(f"destination {place} names a device twice: {destination}")
    raise ValueError(
        f"destination {place} is {destination!r}: it must be a PerReplica, Mirrored, Variable, "
        "Mesh, device, or list of devices, and not empty"
    )


def checked_nest(grads: Any, mesh: Mesh) -> list[Any]:
    """The keys (or places) of the tensors, equal for every device."""
    if not isinstance(grads, list | tuple) or len(grads) != len(mesh.devices):
        raise ValueError(
            f"grads must be a list or tuple with one entry for each of {len(mesh.devices)} devices"
        )
    keys = [keys_of(entry, replica) for replica, entry in enumerate(grads)]
    for replica, found in enumerate(keys):
        if type(grads[replica]) is not type(grads[0]) or set(found) != set(keys[0]):
            raise ValueError(f"grads[{replica}] has other tensors than grads[0]")
    return keys[0]


def _is_nest(value: Any) -> bool:
    """Whether this is a container of arrays; a list of numbers is an array."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list | tuple) and any(is_array(each) for each in value)


def nested(like: Any, parts: list[Any]) -> Any:
    """``parts`` in a list, tuple, named tuple or dict like ``like``, by its own order of keys."""
    if isinstance(like, dict):
        return dict(zip(like, parts, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    return type(like)(parts)


def keys_of(entry: Any, replica: int) -> list[Any]:
    """The keys of a dict, or the places of a list or tuple, each of one array."""
    if isinstance(entry, list | tuple | dict):
        keys = list(entry) if isinstance(entry, dict) else list(range(len(entry)))
        for key in keys:
            if _is_nest(entry[key]):
                raise ValueError(f"grads[{replica}][{key!r}] is a nest of arrays, not an array")
        return keys
    raise ValueError(f"grads[{replica}] must be a list, tuple or dict of arrays")
