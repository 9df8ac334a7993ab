"""The replica that a thread works for (``gr.replica``), and the device of its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from gradreduce.backends import default_mesh
from gradreduce.device import Buffer, Device, Mesh, as_count
from gradreduce.errors import about

from .convert import kind_of, to_buffer
from .convert_gpu import wait_for_inputs
from .trace_context import current_reader

# For each thread, or asyncio task in a thread.
_current: ContextVar[tuple[int | None, Device | None]] = ContextVar(
    "gradreduce_replica", default=(None, None)
)


def replica(index: int) -> AbstractContextManager[None]:
    """Context manager: this thread works for replica ``index`` and reads its copies.

    Mirrored values and Variables are read from the copy of this replica, and host arrays are put on
    its device. Contexts nest; other threads are not affected.

    Args:
        index: the index of the device in the mesh, from 0.

    Raises:
        ValueError: ``index`` is not a non-negative integer.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> value = gr.Mirrored([np.zeros(1), np.zeros(1)], mesh)
        >>> with gr.replica(1):
        ...     value.get() is value[1]
        True
    """
    return replica_on(None, as_count("replica index ", index))


@contextmanager
def replica_on(device: Device | None, index: int) -> Iterator[None]:
    """Like ``replica``, for a worker whose devices are a part of a mesh.

    Args:
        device: the device of this replica; None: the device with this index in the mesh.
        index: the index of the device among the worker's devices, and of its copy in a mirrored
            value.
    """
    before = _current.get()
    _current.set((index, device))
    try:
        yield
    finally:
        _current.set(before)


def current_replica() -> int | None:
    """Returns the index of this thread's innermost ``gr.replica``; None without one."""
    return _current.get()[0]


def on_current_devices(values: Sequence[Any]) -> list[Buffer]:
    """Puts values on the device of the enclosing ``gr.replica``, else on device 0.

    Used for values that are only read. Buffers stay on their device, and GPU arrays on their GPU,
    see ``convert.to_buffer``. The mesh is ``gr.default_mesh()``.

    Raises:
        TypeError: a value is not an array.
        ValueError: the mesh has fewer replicas.
    """
    device: Device | None = None
    placed = []
    for index, value in enumerate(values):
        if not isinstance(value, Buffer):
            try:
                kind_of(value)  # raises before a mesh is opened
                device = current_device() if device is None else device
                value = to_buffer(value, device)
            except (TypeError, ValueError) as error:
                raise (about(f"input {index}", error) if len(values) > 1 else error) from None
        placed.append(value)
    wait_for_inputs(placed)
    return placed


def current_device(mesh: Mesh | None = None) -> Device:
    """Returns the device of the enclosing ``gr.replica`` in ``mesh``, else its first.

    Args:
        mesh: the mesh. Default: ``gr.default_mesh()``; inside a loss the mesh of the first Variable
            that the loss has read, and that Variable's device instead of the first.

    Raises:
        ValueError: the mesh has fewer replicas.
    """
    index, own = _current.get()
    if mesh is None and own is not None:
        return own
    reader = current_reader()
    if mesh is None and reader is not None and reader.home is not None:
        if not index:
            return reader.home
        mesh = reader.home.mesh
    devices = (mesh or default_mesh()).devices
    if (index or 0) >= len(devices):
        raise ValueError(f"there is no replica {index}: the mesh has {len(devices)} devices")
    return devices[index or 0]
