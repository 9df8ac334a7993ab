"""Checks the arguments of a reduction, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import UnionType
from typing import Any, NamedTuple

from gradreduce.arrays.convert import (
    Form,
    axis_order,
    in_order,
    is_array,
    kind_of,
    to_buffer,
)
from gradreduce.arrays.convert_gpu import wait_for_inputs
from gradreduce.arrays.distributed import (
    DistributedValues,
    Mirrored,
    Part,
    PerReplica,
    ReduceOp,
    buffer_of,
    part_on,
)
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices, check_indices
from gradreduce.arrays.outputs import Out, as_out, overlaps
from gradreduce.arrays.replica_context import current_device
from gradreduce.arrays.variable import Variable
from gradreduce.backends.device_names import as_device, is_device_like
from gradreduce.comm.process_group import group_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, Mesh, PackInfo, mean_dtype
from gradreduce.errors import (
    DeviceMismatchError,
    InvalidArgumentError,
    about,
    brief,
    listed,
    repeated,
)
from gradreduce.sums.exact_terms import check_exact_term

from .algorithms import Settings, check_wire


class Request(NamedTuple):  # making a frozen dataclass takes three times as long
    """One checked value of a batch, and the devices and memory of its result.

    Attributes:
        value: the replicas, all of one shape and dtype.
        devices: the devices of the result, in order; if they are the value's devices, in the
            value's order.
        out: the memory for the result on each device; None: new memory.
        form: the order of the result's axes in memory; None for C order.
    """

    value: DistributedValues
    devices: tuple[Device, ...]
    out: tuple[Buffer, ...] | None = None
    form: Form = None

    @property
    def is_all_reduced(self) -> bool:
        """Whether the value is all-reduced: dense, and its result goes to its own devices."""
        return self.devices == self.value._devices and not self.value.is_sparse


def batches_of(
    requests: Sequence[Request], reduce_op: ReduceOp
) -> tuple[list[tuple[list[int], bool]], list[int]]:
    """Groups the requests that can be all-reduced together.

    Returns:
        The indices of each group, and whether it contains means of integers, which are in groups of
        their own because they are divided after the addition. And the indices of all other
        requests.
    """
    mean = reduce_op is ReduceOp.MEAN
    batches: dict[tuple[tuple[Device, ...], bool], list[int]] = {}
    others: list[int] = []
    for index, request in enumerate(requests):
        if not request.is_all_reduced:
            others.append(index)
            continue
        counts = mean and request.value.parts[0].dtype.kind in "iu"
        batches.setdefault((request.devices, counts), []).append(index)
    return [(indices, counts) for (_, counts), indices in batches.items()], others


def check_one_mesh(requests: Sequence[Request], what: str) -> None:
    """Raises ``ValueError`` if there is no request, or values are on several meshes."""
    num_meshes = len({request.value.mesh.mesh_state for request in requests})
    if not num_meshes:
        raise ValueError("there is no tensor to reduce; pass at least one")
    if num_meshes > 1:
        raise ValueError(f"the values of {what} must be on one mesh: these are on {num_meshes}")


def make_requests(
    pairs: Any,
    reduce_op: ReduceOp,
    mesh: Mesh | None,
    *,
    elementwise: bool = False,
    out: Any = None,
) -> list[Request]:
    """Checks all pairs of ``CrossDeviceOps.batch_reduce`` and makes a request of each.

    Args:
        pairs: ``value_destination_pairs`` of ``batch_reduce``.
        reduce_op: see ``batch_reduce``.
        mesh: see ``CrossDeviceOps``.
        elementwise: whether values may be reduced with their axes in memory order.
        out: see ``batch_reduce``; not checked here. A value is reduced in memory order only if its
            ``out`` has the same order.
    """
    check_op("reduce_op", reduce_op)
    requests: list[Request] = []
    usable: tuple[Device, ...] = ()
    for index, (entry, destination) in enumerate(validate_pairs(pairs)):
        value = _to_distributed(entry, index, reduce_op, destination, mesh)
        own = value.devices
        checked, form = _check_value(value, index, out, elementwise)
        for device in own if own != usable else ():
            device.mesh_state.check_usable(device)
        usable = own
        if destination is value:
            devices = own
        else:
            devices = destination_devices(destination, index, value.mesh)
            if set(devices) == set(own):
                devices = own
        if value is not entry:
            _check_one_replica(destination, devices, index, reduce_op)
        requests.append(Request(checked, devices, None, form))
    external = [request.value for request in requests if request.value._external]
    if external and external[0].devices[0].mesh_state.has_streams:
        wait_for_inputs([buffer_of(part) for value in external for part in value.parts])
    return requests


def requests_of(
    values: Sequence[DistributedValues], *, elementwise: bool, out: Any = None
) -> list[Request]:
    """Makes a request of each value that this call has wrapped, for a result on its own devices.

    See ``make_requests``.
    """
    for device in values[0].devices if values else ():
        device.mesh_state.check_usable(device)
    requests = []
    for index, value in enumerate(values):
        checked, form = _check_value(value, index, out, elementwise)
        requests.append(Request(checked, value._devices, None, form))
    return requests


def _check_value(
    value: DistributedValues, index: int, out: Any, elementwise: bool
) -> tuple[DistributedValues, Form]:
    """Checks the replicas of a value; returns it as it is reduced, and the result's form."""
    form: Form = None
    if value._form is not None:
        value, form = as_reduced(value, index, out, elementwise=elementwise)
    _check_replicas(value, index)
    return value, form


def _to_distributed(
    entry: Any, index: int, reduce_op: ReduceOp, destination: Any, mesh: Mesh | None
) -> DistributedValues:
    """Returns a distributed value itself, and an array as a value with one replica.

    Raises:
        ValueError: SUM would add the copies of a ``Mirrored``.
    """
    if isinstance(entry, PerReplica):
        return entry
    if not isinstance(entry, DistributedValues):
        return _wrap_one(entry, f"value {index}", mesh or find_mesh(destination))
    is_copied = len(entry.devices) * group_of(entry.devices[0]).size > 1
    if reduce_op is ReduceOp.SUM and is_copied:
        raise ValueError(
            f"{entry._name_of(index)} is a Mirrored, whose replicas are equal: SUM would add its "
            "copies; pass a PerReplica of the terms, or call broadcast to copy the value"
        )
    return entry


def _check_one_replica(
    destination: Any, devices: Sequence[Device], index: int, reduce_op: ReduceOp
) -> None:
    """Raises ``ValueError`` for a MEAN over several replicas of an array, which is one.

    A list of devices names no replicas, but places for copies.
    """
    has_replicas = isinstance(destination, DistributedValues | Variable | Mesh)
    if reduce_op is ReduceOp.MEAN and has_replicas and len(devices) > 1:
        raise ValueError(
            f"value {index} is one array, but the destination has {len(devices)} replicas to take "
            "the mean of: pass a PerReplica with an array for each, or call broadcast to copy the "
            "array"
        )


def as_reduced(
    value: DistributedValues, index: int, out: Any, *, elementwise: bool = True
) -> tuple[DistributedValues, Form]:
    """Returns the value in memory order, if ``out`` allows it, and the result's form.

    Args:
        value: a checked value.
        index: the index of its entry in ``out``.
        out: not checked; None: new memory.
        elementwise: whether the value may be reduced in memory order.
    """
    form = value._form
    value._discard_copies()
    # Another process may have the same shape with another order of axes.
    several = group_of(value.devices[0]).size > 1
    if form is None or not elementwise or several:
        return value, None
    if out is not None and not (
        isinstance(out, list | tuple) and index < len(out) and _has_order(out[index], form)
    ):
        return value, None
    return value._in_memory_order(), form


def _has_order(entry: Any, order: tuple[int, ...]) -> bool:
    if isinstance(entry, DistributedValues):
        return entry._form == order
    return isinstance(entry, list | tuple) and all(axis_order(each) == order for each in entry)


def with_outs(
    requests: Sequence[Request],
    out: Any,
    reduce_op: ReduceOp,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[list[Request], list[list[Out]]]:
    """Returns the requests with the Buffers of ``out``, and the arrays of ``out``.

    Args:
        requests: checked requests.
        out: see ``CrossDeviceOps.batch_reduce``.
        reduce_op: determines the dtypes of the results.
        shapes: the shapes of the results; default: those of the values.

    Raises:
        ValueError: the number of entries or of arrays in an entry is wrong; an array has another
            shape or dtype, is read-only or not contiguous, overlaps another array, or overlaps an
            input without being exactly a replica of its own value; or a value contains
            IndexedSlices.
        DeviceMismatchError: an array is on another device.
        TypeError: an entry is not an array, or is immutable.
    """
    if not isinstance(out, list | tuple) or len(out) != len(requests):
        count = f" of {len(out)}" if isinstance(out, list | tuple) else ""
        raise ValueError(
            f"out must be a list or tuple with one entry for each of {len(requests)} values, not "
            f"{type(out).__name__}{count}"
        )
    outs = [
        _outs_of(request, index, entry, reduce_op, shapes[index] if shapes else None)
        for index, (request, entry) in enumerate(zip(requests, out, strict=True))
    ]
    _check_overlap(requests, outs, in_place=shapes is None)
    checked = [
        Request(each.value, each.devices, tuple([made.buffer for made in row]), each.form)
        for each, row in zip(requests, outs, strict=True)
    ]
    return checked, outs


def _list_arrays(request: Request, entry: Any) -> Sequence[Any]:
    """Returns the arrays of an entry of ``out``, one for each device."""
    if isinstance(entry, DistributedValues):
        entry = entry._in_memory_order() if request.form else entry  # its order is the same
        by_device = dict(zip(entry.devices, entry.buffers, strict=True))
        if set(by_device) != set(request.devices):
            names = [listed(d.name for d in each.devices) for each in (entry, request)]
            raise ValueError(f"it is on {names[0]}, but the result is on {names[1]}")
        if entry.kind == "jax":
            raise TypeError("JAX arrays are immutable; they cannot be used as out")
        if any(buffer.array_owner == "copy" for buffer in entry.buffers):
            raise ValueError(
                "its arrays were copied when it was made (host arrays for other memory, not "
                "contiguous or not aligned), so you would not see the results: pass a list of the "
                "arrays"
            )
        return [by_device[device] for device in request.devices]
    if not isinstance(entry, list | tuple) or len(entry) != len(request.devices):
        count = len(request.devices)
        found_count = f" of {len(entry)}" if isinstance(entry, list | tuple) else ""
        raise ValueError(
            f"it must be a PerReplica, Mirrored, list or tuple of {count} arrays, not "
            f"{type(entry).__name__}{found_count}"
        )
    return entry


def _outs_of(
    request: Request, index: int, entry: Any, reduce_op: ReduceOp, shape: tuple[int, ...] | None
) -> list[Out]:
    """Returns the arrays of an entry of ``out``, checked one by one."""
    value = request.value
    if value.is_sparse:
        raise ValueError(
            f"{value._name_of(index, of='out')} is not supported: its value contains "
            "IndexedSlices, and the number of rows of their sum is not known in advance; reduce it "
            "in a call without out"
        )
    try:
        arrays = _list_arrays(request, entry)
    except (TypeError, ValueError) as error:
        raise about(value._name_of(index, of="out"), error) from None
    first = value.buffers[0]
    dtype = mean_dtype(first.dtype) if reduce_op is ReduceOp.MEAN else first.dtype
    outs = []
    for replica, (array, device) in enumerate(zip(arrays, request.devices, strict=True)):
        try:
            turned = None if isinstance(array, Buffer) else request.form
            outs.append(as_out(array, device, shape or first.shape, dtype, turned))
        except (TypeError, ValueError) as error:
            raise about(value._name_of(index, replica, "out"), error) from None
    if isinstance(entry, DistributedValues):  # its arrays have this kind
        outs = [each._replace(kind=entry.kind) for each in outs]
    return outs


def _check_overlap(
    requests: Sequence[Request], outs: Sequence[list[Out]], *, in_place: bool
) -> None:
    """Replaces an out that is an input of its own value by that input.

    Raises:
        ValueError: an out shares memory with another out, or with an input in any other way.
    """
    arrays = list(chain.from_iterable(outs))
    inputs = [request.value.buffers for request in requests]
    among_outs, with_inputs = overlaps(arrays, list(chain.from_iterable(inputs)))
    if not (among_outs or with_inputs):
        return
    places = [(index, each) for index, row in enumerate(outs) for each in range(len(row))]
    sources = [(index, each) for index, row in enumerate(inputs) for each in range(len(row))]

    def name_of(place: int) -> str:
        index, replica = places[place]
        return requests[index].value._name_of(index, replica, "out")

    for pair in among_outs:
        names = [name_of(place) for place in pair]
        raise ValueError(f"{names[0]} and {names[1]} overlap; each must have its own memory")
    for at, place in with_inputs:
        (index, replica), (owner, number), out = sources[at], places[place], arrays[place]
        part = inputs[index][replica]
        if (owner, out.address, out.buffer.nbytes) != (index, part.address, part.nbytes):
            what = f"{name_of(place)} overlaps {requests[index].value._name_of(index, replica)}"
            if not in_place:
                raise ValueError(f"{what}; it must not share memory with an input")
            raise ValueError(
                f"{what}; an out may be a replica of its own value, but must not share memory with "
                "another input"
            )
        same = part.device is out.buffer.device and part.dtype == out.buffer.dtype
        if same and out.copied is None and part.block.writable:
            outs[owner][number] = out._replace(buffer=part)


def shapes_by_rows(requests: Sequence[Request], *, shared: bool) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of a reduce-scatter or an all-gather.

    Args:
        requests: checked requests.
        shared: True for a reduce-scatter, in which the replicas of all processes share the rows of
            each value; False for an all-gather.

    Raises:
        TypeError: a value contains IndexedSlices.
        ValueError: a value is a scalar, or its number of rows is not a multiple of the number of
            replicas.
    """
    shapes = []
    for index, request in enumerate(requests):
        value = request.value
        name = value._name_of(index)
        if value.is_sparse:
            raise TypeError(f"{name} contains IndexedSlices: pass .to_dense()")
        if not value.parts[0].shape:
            raise ValueError(
                f"{name} is a scalar, which has no rows: pass an array of at least one dimension"
            )
        (num_rows, *rest), count = value.parts[0].shape, Replicas.of(value.buffers).count
        if shared and num_rows % count:
            raise ValueError(
                f"{name} has {num_rows} rows, which {count} replicas cannot share equally: pad its "
                f"first dimension to a multiple of {count}"
            )
        shapes.append((num_rows // count if shared else num_rows * count, *rest))
    return shapes


def check_exact(requests: Sequence[Request], settings: Settings) -> None:
    """Raises ``ValueError`` unless all values can be added exactly with these settings."""
    for index, request in enumerate(requests):
        value = request.value
        try:
            for part in value.parts:
                check_exact_term(part)
            check_wire(settings, value.parts[0].dtype)
        except ValueError as error:
            raise about(value._name_of(index), error) from None


def check_op(name: str, op: Any) -> None:
    """Raises ``ValueError`` unless ``op`` is a ``ReduceOp``."""
    if not isinstance(op, ReduceOp):
        hint = "; a mesh is passed by name: mesh=" if isinstance(op, Mesh) else ""
        raise ValueError(f"{name}={brief(op)} must be ReduceOp.SUM or ReduceOp.MEAN{hint}")


def validate_mesh(mesh: Any) -> Mesh | None:
    """Returns a mesh or None; raises ``ValueError`` otherwise."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={brief(mesh)} must be a Mesh; gr.open_mesh() opens one")
    return mesh


def validate_pairs(pairs: Any) -> Sequence[tuple[Any, Any]]:
    """Returns a list or tuple of pairs; raises ``ValueError`` otherwise."""
    if not isinstance(pairs, list | tuple):
        raise ValueError(
            "value_destination_pairs must be a list or a tuple of pairs, not "
            f"{type(pairs).__name__}"
        )
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"value_destination_pairs[{index}] must be a tuple of size 2: {brief(pair)}"
            )
    return pairs


def single_value(tensor: Any, what: str, mesh: Mesh | None) -> DistributedValues:
    """Returns the tensor that ``broadcast`` copies as a value with one replica on its device.

    Args:
        tensor: the argument of the caller; booleans are uint8.
        what: the name of the tensor in errors.
        mesh: see ``CrossDeviceOps``.

    Raises:
        ValueError: it is not an array, or has several replicas, which may differ.
        TypeError: its dtype cannot be added.
    """
    if isinstance(tensor, Variable):
        return PerReplica.of([tensor._current()], "native")
    if not isinstance(tensor, DistributedValues):
        return _wrap_one(tensor, what, mesh, also=int | float | complex)
    count = len(tensor.devices)
    if count > 1 and not isinstance(tensor, Mirrored):
        raise ValueError(
            f"{what} is a {type(tensor).__name__} of {count} replicas, which may differ: pass one "
            "of them, value[0]"
        )
    return tensor._first_replica()


def _wrap_one(
    value: Any, what: str, mesh: Mesh | None, *, also: type | UnionType = IndexedSlices
) -> PerReplica:
    """Wraps an array on its device; a host array goes to ``gr.replica``'s device.

    Args:
        value: the argument of the caller.
        what: its name in errors.
        mesh: see ``CrossDeviceOps``.
        also: what is allowed besides arrays and IndexedSlices.
    """
    if isinstance(value, Buffer):
        return PerReplica.of([value])
    if not isinstance(value, IndexedSlices | also) and not is_array(value):
        raise ValueError(
            f"{what} is {type(value).__name__}; pass a PerReplica, an array or IndexedSlices"
        )
    try:
        value = as_slices(value)
        if isinstance(value, IndexedSlices):
            part = part_on(value.device or current_device(mesh), value)
            return PerReplica.of([part], value.kind)
        form = axis_order(value)
        lying = value if form is None else in_order(value, form)
        return PerReplica.of([to_buffer(lying, current_device(mesh))], kind_of(value), form)
    except (TypeError, ValueError) as error:
        raise about(what, error) from None


def _check_replicas(value: DistributedValues, index: int) -> None:
    """Raises ``ValueError`` for replicas that differ in shape or dtype."""
    parts = value.parts
    first = parts[0]
    if not value.is_sparse:
        shape, dtype = first.shape, first.dtype
        for part in parts:  # faster than all() of a list
            if part.shape != shape or part.dtype is not dtype:
                break
        else:
            return
    expected = _describe_part(first, value)
    for replica, part in enumerate(parts):
        actual, name = _describe_part(part, value), value._name_of(index, replica)
        if actual != expected:
            other = value._name_of(index, 0).rpartition(": ")[2]
            raise ValueError(
                f"{name} is {actual}, {other} is {expected}; replicas must agree in shape and dtype"
            )
        if isinstance(part, IndexedSlices):
            try:
                check_indices(part.indices, first.shape)
            except InvalidArgumentError as error:
                raise about(name, error) from None


def _describe_part(part: Part, value: DistributedValues) -> str:
    """Returns dtype and shape (or row shape) as text, equal for replicas that agree."""
    if isinstance(part, Buffer):
        return f"{part.dtype}{list(part.shape)}"
    if all(isinstance(other, IndexedSlices) for other in value.parts):
        return f"{part.dtype}{list(part.values.shape[1:])} rows"
    shape = part.dense_shape if part.is_known else None
    return f"{part.dtype}[?] rows of an array" if shape is None else f"{part.dtype}{list(shape)}"


def destination_devices(destination: Any, index: int, mesh: Mesh) -> tuple[Device, ...]:
    """Returns the devices that a destination names, in its order.

    Raises:
        ValueError: it names no device, a device twice, or a device outside ``mesh``.
    """
    if isinstance(destination, DistributedValues | Variable | Mesh):
        devices = tuple(destination.devices)
    else:
        entries = destination if isinstance(destination, list | tuple) else [destination]
        if not entries or not all(is_device_like(each) and each != "" for each in entries):
            raise ValueError(
                f"destination {index} is {brief(destination)}: it must be a PerReplica, Mirrored, "
                "Variable, Mesh, device, device name, torch.device, or a non-empty list of the "
                "last three"
            )
        devices = tuple([as_device(each, f"destination {index}: ", mesh) for each in entries])
        if len(set(devices)) != len(devices):
            twice = listed(device.name for device in repeated(devices))
            raise ValueError(f"destination {index} names a device twice: {twice}")
    for device in devices:
        if device.mesh_state is not mesh.mesh_state:
            raise DeviceMismatchError(
                f"destination {index}: {device} belongs to another mesh than the value; "
                "pass devices of the value's mesh"
            )
        device.mesh_state.check_usable(device)
    return devices


def find_mesh(destination: Any) -> Mesh | None:
    """Returns the mesh of an unchecked destination; None if it has only names of devices."""
    for place in destination if isinstance(destination, list | tuple) else [destination]:
        if isinstance(place, DistributedValues | Variable | Mesh):
            return next(iter(place.devices)).mesh
        if isinstance(place, Device):
            return place.mesh
    return None


def names_of(requests: Sequence[Request], indices: Sequence[int]) -> tuple[str, ...]:
    """Returns the names (or numbers) of some values; empty if none has a name."""
    names = tuple([requests[index].value._name for index in indices])
    if not any(names):
        return ()
    return tuple([name or str(index) for name, index in zip(names, indices, strict=True)])


def label_of(requests: Sequence[Request], indices: Sequence[int]) -> PackInfo:
    """Returns the label of the work for some values."""
    return PackInfo(tuple(indices), names=names_of(requests, indices))
