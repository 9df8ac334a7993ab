"""What crosses rooms: one Buffer on each device of several; never adds or moves one."""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradreduce.device import Buffer, Device, Mesh, default_mesh
from gradreduce.errors import DeviceMismatchError
from gradreduce.interop import Kind, OneCall, from_buffer, kind_of, to_buffer

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "current_device",
    "current_replica",
    "on_current_devices",
    "replica",
]


class ReduceOp(enum.Enum):
    """How replicas are combined (tf.distribute.ReduceOp).

    Attributes:
        SUM: their sum.
        MEAN: their sum, divided by how many there are.
    """

    SUM = "SUM"
    MEAN = "MEAN"


class DistributedValues:
    """One array on each of several devices; the base of ``PerReplica`` and ``Mirrored``.

    Args:
        values: one array for each device: NumPy arrays, numbers, nested lists, or Buffers. Shared,
            not copied, where they can be.
        mesh: whose devices, in order. Default: that of ``values`` if they are Buffers, else
            ``gr.default_mesh()``.
        devices: on these devices of the mesh instead of all.

    Raises:
        ValueError: no value, another number of values than devices, or a device named twice.
        DeviceMismatchError: a Buffer that does not lie on its device, or devices of two meshes.
        TypeError: a value that is no array, or a device that is none.
    """

    def __init__(
        self,
        values: Sequence[Any],
        mesh: Mesh | None = None,
        *,
        devices: Sequence[Device] | None = None,
    ) -> None:
        values = tuple(values)
        if not values:
            raise ValueError("values is empty; one array for each device is needed")
        self._devices = _devices(values, mesh, devices)
        if len(values) != len(self._devices):
            raise ValueError(f"{len(values)} values for {len(self._devices)} devices")
        self._kind = kind_of(values[0])
        with OneCall():
            self._buffers = tuple(
                _placed(value, device) for value, device in zip(values, self._devices, strict=True)
            )

    @classmethod
    def of(cls, buffers: Sequence[Buffer], kind: Kind = "buffer") -> Any:
        """Wraps Buffers that already lie on one device each."""
        made = cls.__new__(cls)
        made._buffers = tuple(buffers)
        made._devices = tuple(buffer.device for buffer in buffers)
        made._kind = kind
        return made

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The Buffer on each device, in the order of ``devices``."""
        return self._buffers

    @property
    def devices(self) -> tuple[Device, ...]:
        """The logical devices, one for each value."""
        return self._devices

    @property
    def mesh(self) -> Mesh:
        """The whole mesh of the devices."""
        return self._devices[0].mesh

    @property
    def kind(self) -> Kind:
        """Which kind of array ``values`` holds: that of the first value given."""
        return self._kind

    @property
    def values(self) -> tuple[Any, ...]:
        """One array for each device, of the caller's kind, on the Buffers' own memory."""
        with OneCall():
            return tuple(from_buffer(buffer, self._kind) for buffer in self._buffers)

    @property
    def primary(self) -> Any:
        """The first value."""
        return from_buffer(self._buffers[0], self._kind)

    def get(self, device: Device | None = None) -> Any:
        """The value on ``device``; without one, that of the replica ``gr.replica`` names.

        Replica i is the i-th value. Outside a ``gr.replica`` the first value.

        Raises:
            ValueError: no value lies on ``device``, or there are not so many replicas.
        """
        if device is None:
            index = current_replica()
            if index is None:
                return self.primary
            if index >= len(self._devices):
                raise ValueError(f"replica {index} of {len(self._devices)} devices")
            device = self._devices[index]
        if device not in self._devices:
            raise ValueError(f"Device {device!r} not found in {self._devices}")
        return from_buffer(self._buffers[self._devices.index(device)], self._kind)

    def __repr__(self) -> str:
        parts = ", ".join(f"{b.device.name}: {b.dtype}{list(b.shape)}" for b in self._buffers)
        return f"{type(self).__name__}({parts})"


class PerReplica(DistributedValues):
    """A value that differs from device to device, such as a gradient before the all-reduce."""


class Mirrored(DistributedValues):
    """A value that is the same on every device, such as a gradient after the all-reduce."""


_replica = threading.local()


@contextmanager
def replica(index: int) -> Iterator[None]:
    """Inside, this thread works for replica ``index``: reads of mirrored values give its copy.

    An array that is no Buffer lies on this replica's device. Nests; other threads are not
    affected.

    Args:
        index: place of the device in the mesh, from 0.

    Raises:
        ValueError: ``index`` is not an integer from 0 up.
    """
    if isinstance(index, bool) or not hasattr(index, "__index__") or index < 0:
        raise ValueError(f"replica index {index!r} must be an integer from 0 up")
    before = current_replica()
    _replica.index = operator.index(index)
    try:
        yield
    finally:
        _replica.index = before


def current_replica() -> int | None:
    """The index of the innermost ``gr.replica`` of this thread; None outside any."""
    index: int | None = getattr(_replica, "index", None)
    return index


def on_current_devices(values: Sequence[Any]) -> list[Buffer]:
    """Each on the device of the enclosing ``gr.replica``, else on device 0; Buffers stay.

    Of ``gr.default_mesh()``; a GPU array stays on its GPU, see ``interop.to_buffer``.

    Raises:
        TypeError: one is no array.
        ValueError: the mesh has not so many replicas.
    """
    device: Device | None = None
    placed = []
    for value in values:
        if not isinstance(value, Buffer):
            if device is None:
                kind_of(value)  # before a mesh is opened for what is no array
                device = current_device()
            value = to_buffer(value, device)
        placed.append(value)
    return placed


def current_device() -> Device:
    """That of the enclosing ``gr.replica`` in ``gr.default_mesh()``, else its first.

    Raises:
        ValueError: the mesh has not so many replicas.
    """
    devices = default_mesh().devices
    index = current_replica() or 0
    if index >= len(devices):
        raise ValueError(f"replica {index} of a mesh of {len(devices)} devices")
    return devices[index]


def _devices(
    values: tuple[Any, ...], mesh: Mesh | None, devices: Sequence[Device] | None
) -> tuple[Device, ...]:
    if devices is not None:
        found = tuple(devices)
        if not all(isinstance(device, Device) for device in found):
            raise TypeError(f"devices={devices!r} must be devices of a mesh")
    elif mesh is not None:
        found = mesh.devices
    elif all(isinstance(value, Buffer) for value in values):
        found = tuple(value.device for value in values)
    else:
        found = default_mesh().devices
    if len(set(found)) != len(found):
        raise ValueError(f"Duplicate devices in {found}")
    fabrics = {device.fabric for device in (*found, *(mesh or ()))}
    if len(fabrics) > 1:
        raise DeviceMismatchError(f"devices {found} are not all of one mesh, mesh={mesh!r}")
    return found


def _placed(value: Any, device: Device) -> Buffer:
    buffer = to_buffer(value, device)
    if buffer.device is not device:
        raise DeviceMismatchError(f"{buffer} is the value for {device.name}")
    return buffer
