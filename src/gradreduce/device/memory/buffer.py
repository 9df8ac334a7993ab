"""Memory of a device: blocks, buffers, and the layout of flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import ref

import numpy as np

from gradreduce.errors import NotCopied

from .dtypes import ELEMENT_OF

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.order.uses import DeviceQueue, Uses


class Attached(Protocol):
    """Parameters whose gradients share one block; made by ``FlatBuffer.attach``."""

    def find_replaced(self) -> list[Any]:
        """Returns parameters whose ``.grad`` is not their view; raises if one does not fit."""

    def attach_again(self, block: Block, replaced: list[Any]) -> None:
        """Copies these gradients into their views, and sets ``.grad`` to the views again."""


Queue = Literal["compute", "transfer"]
Stream = Any  # of a caller: a raw handle, or the backend's object, which keeps the stream alive
User = Queue | Stream
# Handles of the current GPU's default streams: the legacy one, and the one of each thread.
LEGACY, PER_THREAD = 1, 2
ALIGNMENT = 16  # bytes: one vector access of a kernel; NCCL wants it for buffers too


class Block:
    """One allocation, shared by every Buffer that is a view of it.

    Attributes:
        device: the logical device that the memory is on.
        raw: the backend's handle, which keeps the memory alive. None if only ``remains`` keeps it,
            and after the memory is returned.
        address: the address of the first byte.
        nbytes: the size in bytes.
        owned: True for memory of our pool, False for a caller's array.
        writable: False for a caller's read-only array.
        peer_mapped: whether launches on peer devices can access the memory.
        gaps: for a flat buffer: maps the end of each tensor (in bytes from the start) to the number
            of unused bytes after it. None for other blocks.
        attached: for a flat buffer: the parameters whose gradients are in it (``attach``).
        shared: whether a caller may read and write the memory: a caller's array, or memory that was
            passed to a caller.
        uses: the last uses by all queues. It is the home (the compute queue of the physical device)
            if only the home has used the block, or if it runs behind all other uses. Changed under
            the lock of ``Order``.
        remains: keeps the memory after the block is freed; not set if the backend does not need it.
    """

    __slots__ = (
        "__weakref__", "address", "attached", "device", "gaps", "nbytes", "owned", "peer_mapped",
        "raw", "remains", "shared", "uses", "writable",
    )  # fmt: skip

    remains: FreedBlock

    # Not a dataclass, which takes twice as long: a call makes a block for each array.
    def __init__(
        self, device: Device, raw: Any, address: int, nbytes: int, owned: bool, writable: bool
    ) -> None:
        self.device = device
        self.raw = raw
        self.address = address
        self.nbytes = nbytes
        self.owned = owned
        self.writable = writable
        self.peer_mapped = True
        self.gaps: dict[int, int] | None = None
        self.attached: Attached | None = None
        self.shared = not owned
        self.uses: Uses | DeviceQueue = device.compute

    def record_stream(self, stream: Stream) -> None:
        """Records that a caller's stream may still use the block."""
        if self.owned and hasattr(self, "remains"):
            self.remains.streams.add((self.device, stream))


class FreedBlock(ref[Block]):
    """Weak reference to a block that keeps its memory after the block is collected.

    Attributes:
        raw: the backend's handle, which keeps the memory alive. None for a caller's array that need
            not outlive the block.
        nbytes: the size in bytes.
        uses: see ``Block``.
        streams: callers' streams that may still use it, each with a device of its GPU.
        owned: True for memory of our pool, which is reused in the order of the device's compute
            queue. False for a caller's memory: its next use is in an unknown order.
    """

    __slots__ = ("nbytes", "owned", "raw", "streams", "uses")

    raw: Any
    nbytes: int
    uses: Uses | DeviceQueue
    streams: set[tuple[Device, Stream]]
    owned: bool


class Buffer(NotCopied):
    """A contiguous array (C order, fixed shape and dtype) on one logical device.

    Made by ``Device.put``, ``empty``, ``zeros`` and ``upload``, not by its constructor. ``view``
    makes another Buffer on the same memory.

    Attributes:
        device: the logical ``Device``.
        shape: the shape of the array.
        dtype: a NumPy dtype (bfloat16 is that of ml_dtypes).
        size: number of elements.
        nbytes: number of bytes.
        address: the address of the first element; on a GPU a device address.
        block: the memory that contains the array.
        array_owner: for the Buffers of a ``PerReplica`` of a caller's arrays, and for their views:
            the kind of array (``"native"`` for NumPy, ``"torch"``, …), or ``"copy"`` if the Buffer
            holds a copy. Else None.
        array: the backend's array of this memory; None until its first use.
        flat: a 1-D array of the same memory, which does not keep the block alive; for backends.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> buffer = mesh[0].upload(np.arange(4, dtype="float32"))
        >>> buffer
        Buffer(shape=(4,), dtype=float32, device='sim:0')
        >>> buffer.view(2, (2,)).numpy()
        array([2., 3.], dtype=float32)
    """

    _copy_hint = "pass buffer.numpy(), and upload it with device.put(array)"

    __slots__ = (
        "__weakref__", "address", "array", "array_owner", "block", "device", "dtype", "flat",
        "nbytes", "shape", "size",
    )  # fmt: skip

    def __init__(
        self, block: Block, offset: int, shape: tuple[int, ...], dtype: np.dtype, array: Any = None
    ) -> None:
        self.block = block
        self.device = block.device
        self.shape = shape
        self.dtype = dtype
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self.address = block.address + offset
        self.array_owner: str | None = None
        self.array = array  # the backend's array of this memory, made at its first use
        self.flat: Any = None  # the array that queued work uses; it does not keep the block

    @property
    def offset(self) -> int:
        """The position of the first element in the block, in bytes."""
        return self.address - self.block.address

    def view(self, start: int, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Buffer:
        """Returns a Buffer on part of this memory, without a copy; keeps the block alive.

        Args:
            start: the first element, counted in this buffer's dtype.
            shape: the shape of the view.
            dtype: the dtype of the view, which reinterprets the bytes. Default: this buffer's.

        Raises:
            ValueError: the view exceeds this buffer, or its start is not aligned for its dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        offset = start * self.dtype.itemsize
        outside = start < 0 or offset + math.prod(shape) * dtype.itemsize > self.nbytes
        if outside or min(shape, default=0) < 0:
            raise ValueError(
                f"view of shape {shape} and dtype {dtype} at element {start} exceeds a buffer of "
                f"{self.size} elements of {self.dtype}"
            )
        if (self.address + offset) % dtype.alignment:
            raise ValueError(f"view of dtype {dtype} at element {start} of {self} is misaligned")
        made = Buffer(self.block, self.offset + offset, shape, dtype)
        made.array_owner = self.array_owner
        return made

    def parts(
        self,
        starts: Sequence[int],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Buffer]:
        """Makes one view of this dtype for each part, without the checks of ``view``.

        Args:
            starts: the first element of each part.
            sizes: the number of elements of each part.
            shapes: the shape of each part; default ``(size,)``.
        """
        block, device, dtype = self.block, self.device, self.dtype
        address, itemsize, flat = self.address, dtype.itemsize, self.flat
        shapes = [(size,) for size in sizes] if shapes is None else shapes
        parts, new = [], Buffer.__new__
        for start, size, shape in zip(starts, sizes, shapes, strict=True):
            # Without `__init__`, which is slower: a reduction makes two parts per tensor and
            # device.
            part = new(Buffer)
            part.block, part.device, part.dtype = block, device, dtype
            part.shape, part.size, part.nbytes = shape, size, size * itemsize
            part.address = address + start * itemsize
            part.array = part.array_owner = None
            part.flat = None if flat is None else flat[start : start + size]
            parts.append(part)
        return parts

    def numpy(self, *, deadline: float | None = None) -> np.ndarray:
        """Returns a copy in host memory; waits for the device, at most ``deadline`` seconds.

        Raises what ``Device.download`` raises.
        """
        host = self.device.download(self, deadline=deadline)
        self.device.mesh_state.inexact.warn()
        return host

    def __repr__(self) -> str:
        return f"Buffer(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"


class Mark(NamedTuple):
    """A position in a device's queue that another queue can wait for.

    Attributes:
        device: the device of the queue.
        queue: ``compute`` or ``transfer``.
        event: the backend's event.
    """

    device: Device
    queue: Queue
    event: Any

    @property
    def passed(self) -> bool:
        """Whether the queue is known to have passed this position; does not wait."""
        return self.device._is_done(self.event)


Row = Sequence[Buffer]


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of tensors in a flat buffer, in elements, each aligned to a vector.

    Attributes:
        offsets: the first element of each tensor.
        sizes: the number of elements of each tensor.
        spans: the number of elements from each tensor's start to the next (size and gap).
        size: the number of elements of the flat buffer, a multiple of the alignment.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    spans: tuple[int, ...]
    size: int


def as_elements(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Views buffers with the kernels' dtypes: complex as pairs, signed integers as unsigned."""
    viewed = []
    for buffer in buffers:
        element = ELEMENT_OF[buffer.dtype]
        if element.viewed is not None:
            buffer = buffer.view(0, (buffer.size * element.lanes,), element.viewed)
        viewed.append(buffer)
    return viewed


def same_dtypes(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows by dtypes of first and last operand and number of operands."""
    groups: dict[tuple[int, int, int], list[Row]] = {}  # by id: hashing a dtype is slow
    for row in rows:
        groups.setdefault((id(row[0].dtype), id(row[-1].dtype), len(row)), []).append(row)
    return list(groups.values())


def by_template(groups: Iterable[Sequence[Row]]) -> dict[tuple[str, str, int], list[Row]]:
    """Views rows as ``as_elements`` does, and joins the groups of one launch.

    Args:
        groups: the result of ``same_dtypes``.

    Returns:
        Rows by the element type of the outputs, that of the inputs, and the number of operands.
    """
    launches: dict[tuple[str, str, int], list[Row]] = {}
    for rows in groups:
        to, of = ELEMENT_OF[rows[0][0].dtype], ELEMENT_OF[rows[0][-1].dtype]
        key = (to.name, of.name, len(rows[0]))
        if to.viewed is not None:
            rows = [as_elements(row) for row in rows]
        launches.setdefault(key, []).extend(rows)
    return launches


def handle_of(stream: Stream) -> int:
    """Returns the raw handle of a caller's stream."""
    return stream if isinstance(stream, int) else int(stream.ptr)


def overlap(buffer: Buffer, other: Buffer) -> bool:
    """Whether two Buffers share a byte, also if they belong to different devices."""
    return (
        buffer.address < other.address + other.nbytes
        and other.address < buffer.address + buffer.nbytes
        and buffer.nbytes > 0 < other.nbytes  # an empty Buffer inside the other shares no byte
    )


def compatible(shape: Sequence[int], pattern: Sequence[int | None]) -> bool:
    """Whether ``shape`` matches ``pattern``, in which None matches any extent."""
    return len(shape) == len(pattern) and all(
        known is None or extent == known for extent, known in zip(shape, pattern, strict=True)
    )


def flat_layout(sizes: Sequence[int], itemsize: int) -> FlatLayout:
    """Lays out tensors of ``sizes`` elements one after another, aligned to 16 bytes.

    Args:
        sizes: the number of elements of each tensor, in order; 0 takes no space.
        itemsize: the size of an element in bytes. For two dtypes pass the smaller size: then the
            offsets are multiples of 16 bytes in both.
    """
    unit = max(1, ALIGNMENT // itemsize)
    spans = tuple(-(-size // unit) * unit for size in sizes)
    *offsets, end = accumulate(spans, initial=0)
    return FlatLayout(tuple(offsets), tuple(sizes), spans, end)
