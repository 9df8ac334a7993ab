"""Tensors end to end in one memory on each device, for callers to fill; never reduces them."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from numpy.typing import DTypeLike

from .dtypes import as_dtype
from .due import due
from .journal import Record
from .lent import Lent
from .memory import Buffer, flat_layout
from .watch import as_deadline

if TYPE_CHECKING:
    from .base import Device

__all__ = ["Door", "FlatBuffer", "clear"]

_first = threading.Lock()  # of those who make the first flat buffer of a device


class Door(Protocol):
    """What a flat buffer asks of the room that knows other array libraries."""

    def shared(self, buffers: Sequence[Sequence[Buffer]], as_kind: str | None) -> list[list[Any]]:
        """Arrays on the Buffers' own memory, nested as they are, that their owner may write."""
        ...

    def come_in(self, buffers: Sequence[Buffer], as_kind: str | None) -> None:
        """Our queues wait for what the library's current streams hold."""
        ...

    def go_out(self, buffers: Sequence[Buffer], as_kind: str | None) -> None:
        """The library's current streams wait for our queues; for a host array the host does."""
        ...


@dataclass(frozen=True)
class FlatBuffer:
    """The same tensors on every device of a mesh, end to end in one memory each.

    Made by ``mesh.flat_buffer``. Gradients that lie in it are not packed again by an all-reduce of
    all of them, or of a run of them in this order (with others of the same dtype between or beside
    them the batch needs another layout, and is packed), and other GPUs may read them where they
    are: as ``views``, or as ``arrays`` of any library,
    which are known by their memory when they come back, however they were viewed since. An array
    lives as long as anything that shares its memory; the flat buffer object need not be kept.

    Attributes:
        buffers: the flat buffer of each device, in mesh order; gaps are zero.
        views: ``views[device][tensor]``, the tensors in it.
    """

    buffers: tuple[Buffer, ...]
    views: tuple[tuple[Buffer, ...], ...]
    _kinds: set[str | None] = field(default_factory=set, repr=False, compare=False)

    # ``interop.py`` puts itself here: this room may not import it.
    door: ClassVar[Door]

    @classmethod
    def on(
        cls, devices: Sequence[Device], shapes: Sequence[Sequence[int]], dtype: DTypeLike
    ) -> Self:
        """Zeros; see ``Mesh.flat_buffer``."""
        found = as_dtype(dtype)
        inside = [_as_shape(shape, place) for place, shape in enumerate(shapes)]
        sizes, itemsize = [math.prod(shape) for shape in inside], found.itemsize
        layout = flat_layout(sizes, itemsize)
        gaps = {
            (start + size) * itemsize: (span - size) * itemsize
            for start, size, span in zip(layout.offsets, sizes, layout.spans, strict=True)
            if size
        }
        buffers = tuple(device.zeros((layout.size,), found) for device in devices)
        views = tuple(tuple(map(flat.view, layout.offsets, inside)) for flat in buffers)
        for flat in buffers:
            device = flat.device
            with _first:
                if device.lent is None:
                    device.lent = Lent()
            device.lent.add(flat.block)
            flat.block.gaps = gaps
        return cls(buffers, views)

    def arrays(self, as_kind: str | None = None) -> list[list[Any]]:
        """``arrays[device][tensor]``: the tensors as arrays of a library, on the same memory.

        Fill them, or let others do: ``parameter.grad = array`` makes PyTorch's ``backward()`` add
        into it, as long as nobody sets ``.grad`` to another tensor or None (what
        ``optimizer.zero_grad()`` does; call ``zero()`` instead).

        Args:
            as_kind: ``"numpy"``, ``"cupy"``, ``"torch"`` or ``"buffer"``. Default: NumPy on the
                simulation, CuPy on GPUs.

        Raises:
            ValueError: JAX, whose arrays are never written; NumPy of a GPU's memory, or CuPy of
                the simulation's; a library that is not imported, or an unknown name.
        """
        made = self.door.shared(self.views, as_kind)
        self._kinds.add(as_kind)
        return made

    def zero(self, *, deadline: float | None = None) -> None:
        """Makes every element zero, with one fill on each device.

        In order with the libraries of ``arrays``: adopts before, releases after.

        Args:
            deadline: seconds from now in which the devices must be done, or the mesh dies.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device lost. Nothing was cleared.
            CollectiveError: the mesh is dead, or died while the host waited.
            ValueError: ``deadline`` is no number above 0.
        """
        seconds = as_deadline(deadline)
        with due("zero", seconds, [buffer.device for buffer in self.buffers]):
            self.adopt()
            for buffer in self.buffers:
                clear(buffer)
            self.release()

    def adopt(self) -> None:
        """Our queues wait for what the current streams of the libraries of ``arrays`` hold.

        Say it when the arrays are filled and their ``views`` are to be read. Whoever gives the
        arrays themselves to a call need not: it does it by itself, as does a prepared step.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device lost.
        """
        for buffer in self.buffers:
            buffer.device.fabric.check_usable(buffer.device)
        for kind in self._kinds:
            self.door.come_in(self.buffers, kind)

    def release(self, *, deadline: float | None = None) -> None:
        """The current streams of the libraries of ``arrays`` wait for what our queues hold.

        Say it when work on the ``views`` is queued, before the arrays are read or filled again.
        On the simulation, where a host array has no stream, the host waits.

        Args:
            deadline: seconds from now in which the devices must be done, or the mesh dies.

        Raises:
            BackendUnavailableError: the mesh is closed, or a device lost.
            CollectiveError: the mesh is dead, or died while the host waited.
            ValueError: ``deadline`` is no number above 0.
        """
        seconds = as_deadline(deadline)
        with due("release", seconds, [buffer.device for buffer in self.buffers]):
            for kind in self._kinds:
                self.door.go_out(self.buffers, kind)


def _as_shape(shape: Sequence[int], place: int) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise ValueError(f"shapes[{place}]={shape!r} is no shape: integers from 0 up")
    return extents


def clear(buffer: Buffer) -> None:
    """Zeros, in the order of the compute queue."""
    if not buffer.size:
        return
    device = buffer.device
    device._before_write(buffer, "compute")
    device._fill_zero(buffer)
    record = Record("fill", "", device.index, nbytes=buffer.nbytes)
    device._noted(record, partial(device._fill_zero, buffer), [buffer])
