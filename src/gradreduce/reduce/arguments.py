"""Whether the arguments of a reduction fit, before anything is launched; never reduces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import Form, axis_order, in_order, is_array, kind_of, to_buffer
from gradreduce.arrays.convert_gpu import reading
from gradreduce.arrays.distributed import (
    DistributedValues,
    Mirrored,
    Part,
    PerReplica,
    ReduceOp,
    buffer_of,
)
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices, check_indices
from gradreduce.arrays.replica_context import current_device
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import as_device, is_device_like
from gradreduce.device import Buffer, Device, DType, Mesh, as_index
from gradreduce.errors import (
    DeviceMismatchError,
    InvalidArgumentError,
    about,
    brief,
    listed,
    repeated,
)

__all__ = [
    "Request",
    "as_count",
    "as_reduced",
    "batches_of",
    "check_op",
    "checked_mesh",
    "checked_nest",
    "checked_requests",
    "destination_devices",
    "devices_of",
    "keys_of",
    "keys_of_arrays",
    "named_mesh",
    "nests",
    "outs_of",
    "single_value",
]


_CONTAINERS = (list, tuple, dict)


class Request(NamedTuple):  # a frozen dataclass takes three times as long to make
    """One value of a batch and where its result goes, checked.

    Attributes:
        value: its replicas, alike.
        devices: of the result, in its order.
        matches: whether these are the value's own devices.
        out: where the result goes, on each of the devices; None: into new memory.
        form: how the arrays of the result differ from Buffers of the shapes of ``value``.
    """

    value: DistributedValues
    devices: tuple[Device, ...]
    matches: bool
    out: tuple[Buffer, ...] | None = None
    form: Form = None

    @property
    def is_all_reduced(self) -> bool:
        """Whether it can be: IndexedSlices have no common place for a row."""
        return self.matches and not self.value.is_sparse


def devices_of(requests: Sequence[Request]) -> list[Device]:
    """Of all values and results; once each."""
    found: dict[Device, None] = {}
    for request in requests:
        found.update(dict.fromkeys(request.value.devices))
        found.update(dict.fromkeys(request.devices))
    return list(found)


def batches_of(requests: Sequence[Request], reduce_op: ReduceOp) -> list[list[int]]:
    """Places of the requests that are all-reduced, those together that can be.

    They have the same devices; and the means of integers are apart, since they are divided after
    their addition, not in it.
    """
    batches: dict[tuple[tuple[Device, ...], bool], list[int]] = {}
    for index, request in enumerate(requests):
        if request.is_all_reduced:
            counts = reduce_op is ReduceOp.MEAN and request.value.parts[0].dtype.kind in "iu"
            batches.setdefault((request.devices, counts), []).append(index)
    return list(batches.values())


def checked_requests(
    pairs: Any,
    reduce_op: ReduceOp,
    mesh: Mesh | None,
    *,
    elementwise: bool = False,
    out: Any = None,
) -> list[Request]:
    """Every pair, after all of them have been checked; see ``CrossDeviceOps.batch_reduce``.

    Args:
        pairs: see there.
        reduce_op: see there.
        mesh: see there.
        elementwise: whether values may be reduced with their axes in the order of their memory.
        out: see there; not checked. What it names must lie in the same order then.
    """
    check_op("reduce_op", reduce_op)
    requests: list[Request] = []
    usable: set[Device] = set()
    last: tuple[Any, DistributedValues] | None = None
    with StreamScope():
        for index, pair in enumerate(checked_pairs(pairs)):
            value, destination = pair
            if not isinstance(value, DistributedValues):
                value = _as_distributed(value, index, mesh or named_mesh(destination))
            value.forget_copies()
            matches = destination is value
            value, form = as_reduced(value, index, out) if elementwise else (value, None)
            _check_replicas(value, index)
            _check_usable(value, usable)
            devices = value.devices
            if last is not None and destination is last[0] and devices == last[1].devices:
                _, devices, matches, *_ = requests[-1]  # one mesh for all, as a rule
            elif not matches:
                devices = destination_devices(destination, index, value.mesh)
                matches = set(devices) == set(value.devices)
            last = (destination, value)
            named = value.devices if matches else devices
            requests.append(Request(value, named, matches, None, form))
        lent = [request.value for request in requests if request.value.lent]
        reading(buffer_of(part) for value in lent for part in value.parts)
    return requests


def as_reduced(
    value: DistributedValues, place: int, out: Any = None
) -> tuple[DistributedValues, Form]:
    """The value as it lies, if what ``out`` names for it lies so too; and the form of the result.

    Args:
        value: checked.
        place: of its array in ``out``.
        out: not checked; None: new memory.
    """
    form = value.form
    if form is None:
        return value, form
    if out is not None and not (
        isinstance(out, list | tuple) and place < len(out) and _lies_so(out[place], form)
    ):
        return value, None
    return value.as_it_lies(), form


def _lies_so(entry: Any, order: tuple[int, ...]) -> bool:
    if isinstance(entry, DistributedValues):
        return entry.form == order
    return isinstance(entry, list | tuple) and all(axis_order(each) == order for each in entry)


def check_op(name: str, op: Any) -> None:
    """Raises ``ValueError`` unless it is a ``ReduceOp``."""
    if not isinstance(op, ReduceOp):
        hint = "; a mesh is passed by name: mesh=" if isinstance(op, Mesh) else ""
        raise ValueError(f"{name}={brief(op)} must be ReduceOp.SUM or ReduceOp.MEAN{hint}")


def as_count(name: str, number: Any) -> int:
    """An integer from 0 up, of any library; anything else is a ``ValueError``."""
    with suppress(TypeError):
        if as_index(number) >= 0:
            return as_index(number)
    raise ValueError(f"{name}={brief(number)} must be an integer from 0 up")


def checked_mesh(mesh: Any) -> Mesh | None:
    """A mesh, or None where it is left open."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={brief(mesh)} is no mesh of devices")
    return mesh


def checked_pairs(pairs: Any) -> Sequence[tuple[Any, Any]]:
    """A list or tuple of 2-tuples; anything else is a ``ValueError``."""
    if not isinstance(pairs, list | tuple):
        kind = type(pairs).__name__
        raise ValueError(f"value_destination_pairs must be a list or a tuple of pairs, not {kind}")
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"value_destination_pairs[{index}] must be a tuple of size 2: {brief(pair)}"
            )
    return pairs


def _as_distributed(value: Any, place: int, mesh: Mesh | None) -> DistributedValues:
    """The value of a pair; an array is its own only replica, anything else a ``ValueError``."""
    if isinstance(value, DistributedValues):
        return value
    return _alone(value, f"value {place}", mesh)


def single_value(tensor: Any, what: str, mesh: Mesh | None) -> DistributedValues:
    """What ``broadcast`` copies, as a value of one replica where it lies now.

    Args:
        tensor: as it came.
        what: its name in errors.
        mesh: see ``CrossDeviceOps``.

    Raises:
        ValueError: no array, or several replicas that may differ.
        TypeError: a dtype that cannot be added.
    """
    if isinstance(tensor, Mirrored) or (
        isinstance(tensor, DistributedValues) and len(tensor.devices) == 1
    ):
        return tensor.alone()
    if isinstance(tensor, DistributedValues):
        count = len(tensor.devices)
        raise ValueError(
            f"{what} is a {type(tensor).__name__} of {count} replicas, which may differ: pass one "
            "of them, value[0]"
        )
    return _alone(tensor, what, mesh)


def _alone(value: Any, what: str, mesh: Mesh | None) -> PerReplica:
    """An array on its own device: a host array on that of ``gr.replica``, else the first."""
    if isinstance(value, Buffer):
        return PerReplica.of([value])
    if not isinstance(value, IndexedSlices) and not is_array(value):
        raise ValueError(
            f"{what} is {type(value).__name__}, neither a PerReplica, an array nor IndexedSlices"
        )
    try:
        return _placed_alone(value, mesh)
    except (TypeError, ValueError) as error:
        raise about(what, error) from None


def _placed_alone(value: Any, mesh: Mesh | None) -> PerReplica:
    value = as_slices(value)
    if isinstance(value, IndexedSlices):
        rows = value.values
        if not isinstance(rows, Buffer):
            rows = to_buffer(rows, current_device(mesh))
        part = IndexedSlices.of(rows, value.indices, value.dense_shape)
        return PerReplica.of([part], value.kind)
    form = axis_order(value)
    lying = value if form is None else in_order(value, form)
    return PerReplica.of([to_buffer(lying, current_device(mesh))], kind_of(value), form)


def _check_replicas(value: DistributedValues, place: int) -> None:
    """Raises ``ValueError`` for replicas that differ, naming value and replica."""
    parts = value.parts
    first = parts[0]
    shape, dtype = first.shape, first.dtype
    if not value.is_sparse and all(
        [part.shape == shape and part.dtype is dtype for part in parts]  # no generator: its pace
    ):
        return
    wanted = _signature(first, value)
    for replica, part in enumerate(parts):
        found = _signature(part, value)
        if found != wanted:
            name = value.name_of(place, replica)
            other = value.name_of(place, 0).rpartition(": ")[2]
            raise ValueError(
                f"{name} is {_written(found)}, {other} is {_written(wanted)}; replicas must agree "
                "in shape and dtype"
            )
        if isinstance(part, IndexedSlices):
            _check_indices(part, first, value.name_of(place, replica))


def _check_usable(value: DistributedValues, usable: set[Device]) -> None:
    """Raises ``BackendUnavailableError`` for a device that is lost; ``usable`` are not asked."""
    for device in value.devices:
        if device not in usable:
            device.mesh_state.check_usable(device)
            usable.add(device)


def _check_indices(part: IndexedSlices, first: Part, what: str) -> None:
    try:
        check_indices(part.indices, first.shape)
    except InvalidArgumentError as error:
        raise about(what, error) from None


def _signature(part: Part, value: DistributedValues) -> tuple[DType, tuple[int, ...] | None, str]:
    """In what all replicas must agree: of IndexedSlices alone, in the shape of a row."""
    if isinstance(part, Buffer):
        return part.dtype, part.shape, ""
    if all(isinstance(other, IndexedSlices) for other in value.parts):
        return part.dtype, part.values.shape[1:], " rows"
    if not part.is_known:
        return part.dtype, None, " rows of an array"
    return part.dtype, part.dense_shape, ""


def _written(outline: tuple[DType, tuple[int, ...] | None, str]) -> str:
    dtype, shape, rows = outline
    return f"{dtype}{'[?]' if shape is None else list(shape)}{rows}"


def destination_devices(destination: Any, place: int, mesh: Mesh) -> tuple[Device, ...]:
    """The devices that a destination names, in its order.

    Raises:
        ValueError: it names none, one twice, or one that ``mesh`` has not.
    """
    if isinstance(destination, DistributedValues | Variable | Mesh):
        devices = tuple(destination.devices)
    else:
        given = destination if isinstance(destination, list | tuple) else [destination]
        if not given or not all(is_device_like(each) and each != "" for each in given):
            raise ValueError(
                f"destination {place} is {brief(destination)}: it must be a PerReplica, Mirrored, "
                "Variable, Mesh, device, name of a device, torch.device, or list of these three, "
                "and not empty"
            )
        devices = tuple([as_device(each, f"destination {place}: ", mesh) for each in given])
        if len(set(devices)) != len(devices):
            twice = listed(device.name for device in repeated(devices))
            raise ValueError(f"destination {place} names a device twice: {twice}")
    for device in devices:
        if device.mesh_state is not mesh.mesh_state:
            raise DeviceMismatchError(f"destination {place}: {device} is of another mesh")
        device.mesh_state.check_usable(device)
    return devices


def named_mesh(destination: Any) -> Mesh | None:
    """Whose devices it names, before it is checked; None for names alone."""
    listed = destination if isinstance(destination, list | tuple) else [destination]
    for each in listed:
        if isinstance(each, DistributedValues | Variable | Mesh):
            return next(iter(each.devices)).mesh
        if isinstance(each, Device):
            return each.mesh
    return None


def checked_nest(grads: Any, mesh: Mesh) -> list[Any]:
    """The keys (or places) of the tensors, equal for every device."""
    _check_entries("grads", grads, len(mesh.devices), f" of {mesh}")
    keys = [keys_of(entry, replica) for replica, entry in enumerate(grads)]
    for replica, found in enumerate(keys):
        _check_alike(f"grads[{replica}]", grads[replica], found, "grads[0]", grads[0], keys[0])
    return keys[0]


def keys_of_arrays(grads: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    """The keys of those that are not None on every device.

    Raises:
        ValueError: one is None on some devices only.
    """
    found = []
    for key in keys:
        missing = [replica for replica, entry in enumerate(grads) if entry[key] is None]
        if 0 < len(missing) < len(grads):
            there = next(replica for replica in range(len(grads)) if replica not in missing)
            raise ValueError(
                f"grads[{listed(missing)}][{brief(key)}] is None, grads[{there}][{brief(key)}] is "
                "not: pass zeros where a replica has no gradient, or None on every replica"
            )
        if not missing:
            found.append(key)
    return found


def outs_of(out: Any, grads: Sequence[Any], keys: Sequence[Any]) -> list[list[Any]]:
    """Of each key the arrays of a nest like ``grads``; anything else is a ``ValueError``."""
    _check_entries("out", out, len(grads), ", as grads has")
    for replica, (entry, like) in enumerate(zip(out, grads, strict=True)):
        found = keys_of(entry, replica, "out")
        _check_alike(f"out[{replica}]", entry, found, f"grads[{replica}]", like, list(like))
    return [[entry[key] for entry in out] for key in keys]


def _check_entries(name: str, given: Any, count: int, why: str) -> None:
    if not isinstance(given, list | tuple):
        hint = getattr(given, "_instead", "") if name == "grads" else ""
        raise ValueError(
            f"{name} must be a list or tuple with one entry for each of {count} devices, not "
            f"{type(given).__name__}{hint}"
        )
    if len(given) != count:
        raise ValueError(
            f"{name} has {len(given)} entries; it must have one entry for each of {count} "
            f"devices{why}"
        )


def _check_alike(
    name: str, entry: Any, keys: Sequence[Any], other: str, like: Any, wanted: Sequence[Any]
) -> None:
    """Raises ``ValueError`` unless two entries are of one type and have the same keys."""
    differs = f"{name} has other tensors than {other}"
    if type(entry) is not type(like):
        raise ValueError(f"{differs}: it is a {type(entry).__name__}, not a {type(like).__name__}")
    if isinstance(entry, dict):
        missing = [repr(key) for key in wanted if key not in entry]
        extra = [repr(key) for key in keys if key not in like]
        how = [f"it lacks {listed(missing)}"] * bool(missing)
        how += [f"it has also {listed(extra)}"] * bool(extra)
        if how:
            raise ValueError(f"{differs}: {' and '.join(how)}")
    elif len(keys) != len(wanted):
        raise ValueError(f"{differs}: it has {len(keys)}, {other} has {len(wanted)}")


def _is_nest(value: Any) -> bool:
    """Whether this is a container of arrays; a list of numbers is an array."""
    if isinstance(value, _CONTAINERS):
        return isinstance(value, dict) or any(is_array(each) for each in value)
    return False


def nests(like: Sequence[Any], keys: Sequence[Any], values: Sequence[Sequence[Any]]) -> Any:
    """``values[key][replica]`` nested as ``like[replica][key]``, each in its own order of keys."""
    if not isinstance(like[0], dict):
        rows = zip(*values, strict=True) if keys else [()] * len(like)
        made = [nested(entry, list(row)) for entry, row in zip(like, rows, strict=True)]
        return nested(like, made)
    by_key = dict(zip(keys, values, strict=True))
    return nested(
        like,
        [
            nested(entry, [by_key[key][replica] for key in entry])
            for replica, entry in enumerate(like)
        ],
    )


def nested(like: Any, parts: list[Any]) -> Any:
    """``parts`` in a list, tuple, named tuple or dict like ``like``, by its own order of keys."""
    if isinstance(like, dict):
        return dict(zip(like, parts, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    return type(like)(parts)


def keys_of(entry: Any, replica: int, name: str = "grads") -> list[Any]:
    """The keys of a dict, or the places of a list or tuple, each of one array."""
    if isinstance(entry, _CONTAINERS):
        keys = list(entry) if isinstance(entry, dict) else list(range(len(entry)))
        for key in keys:
            if _is_nest(entry[key]):
                raise ValueError(
                    f"{name}[{replica}][{brief(key)}] is a nest of arrays, not an array; put all "
                    "arrays of a device into one list or dict"
                )
        return keys
    raise ValueError(
        f"{name}[{replica}] must be a list, tuple or dict of arrays, not {type(entry).__name__}"
    )
