"""PerReplica and Mirrored: one array on each of several devices."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Self, SupportsIndex

from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_device
from gradreduce.device import Buffer, Device, DType, Mesh, names_of
from gradreduce.errors import (
    DeviceMismatchError,
    NotCopied,
    about,
    brief,
    listed,
    repeated,
    short_name,
)

from .caller_streams import StreamScope, SuspendedScope
from .convert import (
    PLAIN,
    Form,
    common_order,
    from_buffer,
    from_buffers,
    in_order,
    inverse,
    is_coo,
    kind_of,
    of_one_type,
    to_buffer,
    to_buffers,
)
from .convert_gpu import Kind
from .indexed_slices import IndexedSlices, as_slices
from .replica_context import current_replica

Part = Buffer | IndexedSlices  # the value on one device; IndexedSlices have a Buffer of values


class ReduceOp(enum.Enum):
    """How replicas are combined (tf.distribute.ReduceOp).

    Attributes:
        SUM: the sum of the replicas.
        MEAN: the sum divided by the number of replicas.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> grads = [[np.array([2.0])], [np.array([4.0])]]
        >>> gr.all_reduce(grads, gr.ReduceOp.SUM, mesh=mesh)[0], gr.all_reduce(grads, mesh=mesh)[0]
        ([array([6.])], [array([3.])])
    """

    SUM = "SUM"
    MEAN = "MEAN"


class DistributedValues(NotCopied):
    """One array on each of several devices; the base of ``PerReplica`` and ``Mirrored``.

    ``len``, indexing and iteration are those of ``values``. NumPy converts it to an array only if
    there is one device.

    Args:
        values: one for each device: arrays of any library, numbers, nested lists, Buffers,
            IndexedSlices, or ``torch.sparse_coo`` tensors, which become IndexedSlices. Arrays are
            shared, not copied, where possible: work that reads them runs after that of their
            library's current stream, and they may be written again when the call has returned.
            Dense arrays that all have the same axis order in memory, such as channels_last, are
            reduced in this order, and the results have it too; ``parts`` are then copies in C
            order.
        mesh: the mesh whose devices hold the values, in order. Default: the mesh of ``values`` if
            they are Buffers, else ``gr.default_mesh()``.
        devices: a part of the devices instead of all: Devices, names such as ``"gpu:1"``, or
            ``torch.device`` objects. Names are looked up in ``mesh`` or its default.
        name: the name of the tensor, such as ``"layers.0.weight"``, for errors, plans and the
            flight record.

    Raises:
        ValueError: there is no value, the numbers of values and devices differ, a device is
            repeated or not in the mesh.
        DeviceMismatchError: a Buffer is not on its device, or devices are of two meshes.
        TypeError: a value is not an array or cannot be added (the error names its replica), or
            ``devices`` contains something else than devices.
    """

    _copy_hint = "pass NumPy arrays, [buffer.numpy() for buffer in value.buffers]"
    _hint = (
        "; use AllReduceCrossDeviceOps().reduce(op, value, value) to sum the replicas, or value[0] "
        "for one of them"
    )

    _name: str = ""
    _key: str | int | None = None  # the name or number of the tensor in ``all_reduce``'s grads
    _kept: Sequence[Any] | None = None  # the arrays of ``_keep_arrays``
    _is_sparse: bool | None = None
    _external: bool = False  # whether a value may be a caller's memory
    _form: Form = None  # the axis order of ``values`` in memory; None for C order
    _values: tuple[Any, ...] = ()  # a caller's arrays, if ``_form`` is not None
    _copies: tuple[Part, ...] | None = None  # ``parts`` in that case; None: not made yet

    def __init__(
        self,
        values: Sequence[Any],
        mesh: Mesh | None = None,
        *,
        devices: Sequence[DeviceLike] | None = None,
        name: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={brief(name)} must be a string")
        self._name = short_name(name or "")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(f"mesh={brief(mesh)} must be a Mesh; gr.open_mesh() opens one")
        values = _as_tuple(values)
        if not values:
            raise ValueError("values is empty; pass one array for each device")
        self._devices = _devices(values, mesh, devices)
        if len(values) != len(self._devices):
            raise ValueError(
                f"got {len(values)} values for {len(self._devices)} devices; pass one for each"
            )
        self._own: tuple[Any, ...] = self._put_on_devices(self._in_memory(values))
        self._look_at(values)

    def _in_memory(self, values: tuple[Any, ...]) -> Sequence[Any]:
        """Returns the values with axes in memory order, and notes this order."""
        order = common_order(values)
        if order is None:
            return values
        self._form, self._values = order, values
        return [in_order(value, order) for value in values]

    def _look_at(self, values: tuple[Any, ...]) -> None:
        """Notes the kind of the values, and whether one may be a caller's memory."""
        first = values[0]
        kind: Kind = first.kind if isinstance(first, IndexedSlices) else kind_of(first)
        self._kind: Kind = "coo" if kind == "torch" and is_coo(first) else kind
        self._external = kind != "buffer" or any(
            [type(each) is not Buffer or each.array_owner is not None for each in values]
        )

    @StreamScope(reads=False)
    def _put_on_devices(self, values: Sequence[Any]) -> tuple[Part, ...]:
        parts = []
        for replica, (value, device) in enumerate(zip(values, self._devices, strict=True)):
            try:
                part = part_on(device, value)
                if part.device is not device:
                    raise DeviceMismatchError(
                        f"{buffer_of(part)} was passed as the value for {device.name}; pass one on "
                        f"{device.name}"
                    )
            except (TypeError, ValueError) as error:
                name = self._name_of(0, replica)
                if self._key is None:  # a value on its own has no position
                    name = f"{self._name}: " * bool(self._name) + f"replica {replica}"
                raise about(name, error) from None
            parts.append(part)
        return tuple(parts)

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        kind: Kind = "buffer",
        form: Form = None,
        devices: tuple[Device, ...] = (),
        name: str = "",
    ) -> Self:
        """Wraps Buffers, or IndexedSlices of Buffers, one on each device.

        Args:
            parts: the Buffers or IndexedSlices; with a ``form``, their axes are in this order.
            kind: the kind of ``values``.
            form: the order in which ``parts`` have the axes of ``values``; None: the same.
            devices: the devices of the parts, if the caller knows them.
            name: the name of the tensor.
        """
        value = cls.__new__(cls)
        if name:
            value._name = name
        value._own = tuple(parts)
        value._form = form
        value._devices = devices or tuple([part.device for part in parts])  # type: ignore[misc]
        value._kind = kind
        return value

    @classmethod
    def of_grads(
        cls, columns: Sequence[Sequence[Any]], names: Sequence[tuple[str | int, str]], mesh: Mesh
    ) -> list[Self]:
        """Wraps the tensors of an ``all_reduce``; the arrays of a device are converted together.

        Args:
            columns: ``columns[tensor][device]``, with each device of the mesh, in order.
            names: for each tensor its key and its name: errors call it ``grads[device][key]``, and
                the flight record has the name.
            mesh: the mesh.
        """
        values = []
        for key, name in names:
            value = cls.__new__(cls)
            value._devices, value._key, value._name = mesh.devices, key, name
            values.append(value)
        arrays = [value._in_memory(tuple(row)) for value, row in zip(values, columns, strict=True)]
        for value, row, own in zip(values, columns, _put_all(values, arrays, mesh), strict=True):
            value._own = own
            value._look_at(tuple(row))
        return values

    def _name_of(self, index: int, replica: int | None = None, of: str = "grads") -> str:
        """Returns the name of this value, or of one of its replicas, for error messages.

        Args:
            index: the index of this value in its batch.
            replica: the index of a replica; None: all of them.
            of: ``"grads"`` or ``"out"``: the argument that contains it.
        """
        if self._key is not None:
            key = "" if self._key == "" else f"[{self._key!r}]"  # empty: not part of a tree
            return f"{of}[{'…' if replica is None else replica}]{key}"
        name = f"{'value' if of == 'grads' else of} {index}"
        name += f" ({self._name})" if self._name else ""
        return name if replica is None else f"{name}: replica {replica}"

    def _keep_arrays(self, arrays: Sequence[Any] | None = None) -> None:
        """Makes ``values`` return these arrays from now on, without synchronizing again.

        Args:
            arrays: arrays on the Buffers' own memory; default: the present result of ``values``.
        """
        self._kept = self.values if arrays is None else arrays

    @property
    def parts(self) -> tuple[Part, ...]:
        """The Buffer, or IndexedSlices of a Buffer, on each device, in the order of ``devices``."""
        if self._form is None:
            return self._own
        copies = self._copies  # another thread's call may discard them meanwhile
        if copies is None:
            arrays: Sequence[Any] = self._values
            if not arrays:
                axes = inverse(self._form)
                with SuspendedScope():
                    arrays = [in_order(from_buffer(each, "native"), axes) for each in self._own]
            copies = self._copies = self._put_on_devices(arrays)
        return copies

    def _discard_copies(self) -> None:
        """Drops ``parts`` that are copies of ``values``; the next use copies again.

        Each call that reads ``parts`` calls this first, because the arrays may have been written.
        """
        self._copies = None

    def _in_memory_order(self) -> DistributedValues:
        """Returns the same values with axes in memory order, without copies."""
        return self._replace(_form=None, _kept=None)

    def _replace(self, **attributes: Any) -> Self:
        """Returns a value that differs in these attributes."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), **attributes)
        return made

    def _first_replica(self) -> Self:
        """Returns a value with the first replica only."""
        return type(self).of(self._own[:1], self._kind, self._form, name=self._name)

    @property
    def is_sparse(self) -> bool:
        """Whether any value is IndexedSlices."""
        if self._is_sparse is None:  # used several times in a reduction
            self._is_sparse = any([isinstance(part, IndexedSlices) for part in self._own])
        return self._is_sparse

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The Buffer on each device, in the order of ``devices``.

        Raises:
            TypeError: a value is IndexedSlices; use ``parts``.
        """
        if self.is_sparse:
            raise TypeError(f"{self} contains IndexedSlices, which are not Buffers: use .parts")
        return self.parts  # type: ignore[return-value]  # all dense: seen just now

    @property
    def devices(self) -> tuple[Device, ...]:
        """The logical devices, one for each value."""
        return self._devices

    @property
    def mesh(self) -> Mesh:
        """The whole mesh of the devices."""
        return self._devices[0].mesh

    @property
    def name(self) -> str | None:
        """The name of the tensor; None if it has none."""
        return self._name or None

    @property
    def kind(self) -> Kind:
        """The kind of the arrays in ``values``: the kind of the first value."""
        return self._kind

    @property
    def values(self) -> tuple[Any, ...]:
        """One array for each device, of the caller's kind, on the Buffers' own memory."""
        with StreamScope():
            return tuple(map(self._as_result, range(len(self._own))))

    @property
    def primary(self) -> Any:
        """The first value."""
        return self._as_result(0)

    def get(self, device: DeviceLike | None = None) -> Any:
        """Returns the value on ``device``; by default the value of the current ``gr.replica``.

        Replica i is the i-th value. Outside a ``gr.replica`` it is the first value.

        Args:
            device: a device, its name (``"gpu:1"``) or a ``torch.device``.

        Raises:
            ValueError: no value is on ``device``, or this value does not have the replica of
                ``gr.replica``.
            TypeError: ``device`` is not a device.
        """
        if device is None:
            index = current_replica()
            if index is None:
                return self.primary
            if index >= len(self._devices):
                raise ValueError(
                    f"there is no replica {index}: the value has {len(self._devices)} replicas"
                )
            return self._as_result(index)
        own_device = as_device(device, "device=", self.mesh)
        if own_device not in self._devices:
            raise ValueError(
                f"Device {own_device!r} is not one of the value's devices: "
                f"{names_of(self._devices)}"
            )
        return self._as_result(self._devices.index(own_device))

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        """Returns the value of a replica; for a slice a tuple of values."""
        if isinstance(place, slice):
            return self.values[place]
        try:
            index = range(len(self))[place]
        except IndexError:
            raise IndexError(
                f"there is no replica {place}: the value has {len(self)} replicas"
            ) from None
        except TypeError:
            raise TypeError(
                f"an index must be a replica number or a slice, not {brief(place)}; use "
                "value.get(device) for the value on a device"
            ) from None
        return self._as_result(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if len(self) > 1:
            raise TypeError(
                f"a {type(self).__name__} of {len(self)} devices is not one array: use value[0] "
                "for one replica, or value.values for all"
            )
        if copy is False:
            raise ValueError(
                f"copy=False is not possible: a {type(self).__name__} is copied to the host"
            )
        (part,) = self._own
        if isinstance(part, IndexedSlices):
            raise TypeError(f"{self} contains IndexedSlices: pass value[0].to_dense()")
        array = part.numpy()
        if self._form is not None:
            array = array.transpose(inverse(self._form))
        return array if dtype is None else array.astype(dtype)

    def _as_result(self, index: int) -> Any:
        """Returns the value of a replica as an array of the caller's kind."""
        if self._kept is not None:
            return self._kept[index]
        if self._kind == "buffer":
            return self.parts[index]
        part = self._own[index]
        if not isinstance(part, Buffer):
            return part._as_result(self._kind)
        if self._form is None:
            return from_buffer(part, self._kind)
        return in_order(from_buffer(part, self._kind), inverse(self._form))

    def __repr__(self) -> str:
        parts = []
        for part, device in zip(self._own, self._devices, strict=True):
            rows = "" if isinstance(part, Buffer) else f"{len(part.indices)} rows of "
            shape = "[?]" if part.shape is None else list(part.shape)
            if self._form is not None:
                shape = [part.shape[axis] for axis in inverse(self._form)]
            parts.append(f"{device.name}: {rows}{part.dtype}{shape}")
        return f"{type(self).__name__}({listed(parts)})"


class PerReplica(DistributedValues):
    """A value that differs from device to device, such as a gradient before the all-reduce.

    Args:
        values: one for each device, in order: arrays of any library, numbers, nested lists, Buffers
            or IndexedSlices. Arrays are shared where possible, otherwise copied.
        mesh: the mesh whose devices hold the values. Default: that of ``devices`` or of Buffers in
            ``values``, else ``gr.default_mesh()``.
        devices: some devices of the mesh instead of all: Devices or their names.
        name: the name of the tensor in errors, plans and the flight record.

    Raises:
        ValueError: the numbers of values and devices differ, or a device is repeated or unknown.
        DeviceMismatchError: a Buffer is not on its device, or devices are of two meshes.
        TypeError: a value is not an array or cannot be added, or another argument has a wrong type.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> value = gr.PerReplica([np.zeros(3), np.ones(3)], mesh, name="w")
        >>> value
        PerReplica(sim:0: float64[3], sim:1: float64[3])
        >>> value[1]
        array([1., 1., 1.])
    """


class Mirrored(DistributedValues):
    """A value that is equal on every device, such as a gradient after the all-reduce.

    The caller ensures that the values are equal; this is not checked.

    Args:
        values: one for each device, in order: arrays of any library, numbers, nested lists, Buffers
            or IndexedSlices. Arrays are shared where possible, otherwise copied.
        mesh: the mesh whose devices hold the values. Default: that of ``devices`` or of Buffers in
            ``values``, else ``gr.default_mesh()``.
        devices: some devices of the mesh instead of all: Devices or their names.
        name: the name of the tensor in errors, plans and the flight record.

    Raises:
        ValueError: the numbers of values and devices differ, or a device is repeated or unknown.
        DeviceMismatchError: a Buffer is not on its device, or devices are of two meshes.
        TypeError: a value is not an array or cannot be added, or another argument has a wrong type.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> value = gr.PerReplica([np.array([1.0]), np.array([5.0])], mesh)
        >>> total = gr.HierarchicalCopyAllReduce().reduce(gr.ReduceOp.SUM, value, mesh)
        >>> type(total).__name__, total.get("sim:1")
        ('Mirrored', array([6.]))
    """


def _as_tuple(values: Any) -> tuple[Any, ...]:
    try:
        iterator = iter(values)  # an array without axes is Iterable, but this raises
    except TypeError:
        iterator = None
    if iterator is None or isinstance(values, str):
        raise TypeError(f"values={brief(values)} must be a list with one array for each device")
    return tuple(iterator)


def _devices(
    values: tuple[Any, ...], mesh: Mesh | None, devices: Sequence[DeviceLike] | None
) -> tuple[Device, ...]:
    if devices is None and mesh is not None:
        return mesh.devices
    if isinstance(devices, str):
        raise TypeError(f"devices={brief(devices)} must be a list with a device for each value")
    own = [
        value.device
        for value in values
        if isinstance(value, Buffer | IndexedSlices) and value.device is not None
    ]
    if devices is not None:
        named_in = mesh or (own[0].mesh if own else None)
        own_devices = tuple(
            [as_device(each, f"devices[{i}]=", named_in) for i, each in enumerate(devices)]
        )
    elif len(own) == len(values):
        own_devices = tuple(own)
    else:
        own_devices = default_mesh().devices
    if len(set(own_devices)) != len(own_devices):
        twice = repeated(own_devices)
        raise ValueError(f"Duplicate devices: {names_of(twice)}; name each once")
    mesh_states = {device.mesh_state for device in (*own_devices, *(mesh or ()))}
    if len(mesh_states) > 1:
        raise DeviceMismatchError(
            f"devices {names_of(own_devices)} do not all belong to one mesh; mesh={brief(mesh)}"
        )
    return own_devices


def _put_all(
    values: Sequence[DistributedValues], arrays: Sequence[Sequence[Any]], mesh: Mesh
) -> Sequence[tuple[Part, ...]]:
    """Puts the arrays of each value on the devices, those of a device together."""
    if of_one_type([each for row in arrays for each in row]):
        pairs = zip(zip(*arrays, strict=True), mesh.devices, strict=True)
        with suppress(TypeError, ValueError):  # the error below names its value
            columns = [to_buffers(of_device, device) for of_device, device in pairs]
            homes = [set(map(attrgetter("device"), column)) for column in columns]
            if homes == [{device} for device in mesh.devices]:
                return list(zip(*columns, strict=True))
    return [value._put_on_devices(row) for value, row in zip(values, arrays, strict=True)]


def arrays_of(values: Sequence[DistributedValues]) -> Sequence[Sequence[Any]]:
    """Returns the ``values`` of each value; arrays of a device are converted together.

    Call it in a ``StreamScope``.

    Args:
        values: results of one call in new memory, all on the same devices.
    """
    parts = [value._own for value in values]
    is_turned = [1 for value in values if value._form is not None]
    several = len({value._kind for value in values}) != 1
    if is_turned or several or [1 for own in parts for part in own if type(part) is not Buffer]:
        return [value.values for value in values]
    kind = values[0]._kind
    columns = [from_buffers(of_device, kind) for of_device in zip(*parts, strict=True)]
    return list(zip(*columns, strict=True))


def buffer_of(part: Part) -> Buffer:
    """Returns a Buffer itself, or the rows of IndexedSlices of a Buffer."""
    return part if isinstance(part, Buffer) else part.values


def with_buffer(part: Part, buffer: Buffer) -> Part:
    """Returns a Buffer that takes the place of another, or of the rows of IndexedSlices."""
    return buffer if isinstance(part, Buffer) else part._with_values(buffer)


def part_on(device: Device, value: Any, *, dtype: DType | None = None) -> Part:
    """Converts a value, or the rows of IndexedSlices, to a Buffer; see ``convert.to_buffer``."""
    if type(value) not in PLAIN:
        value = as_slices(value)
        if isinstance(value, IndexedSlices):
            return value._with_values(to_buffer(value.values, device, dtype=dtype))
    return to_buffer(value, device, dtype=dtype)
