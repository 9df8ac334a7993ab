"""Memory of a device: blocks, buffers, and the layout of flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import ref

import numpy as np

from gradreduce.errors import NotCopied

from .dtypes import ELEMENT_OF

if TYPE_CHECKING:
    from .device import Device


class Attached(Protocol):
    """Parameters whose gradients share one block; made by ``FlatBuffer.attach``."""

    def replaced(self) -> list[Any]:
        """Parameters whose ``.grad`` is not its view; raises if one does not fit."""

    def attach_again(self, block: Block, replaced: list[Any]) -> None:
        """Copies these gradients to their views, and makes the views the ``.grad`` again."""


Queue = Literal["compute", "transfer"]
Stream = Any  # a caller's: a raw handle, or the backend's own object, which keeps it from its end
User = Queue | Stream
# Handles of default streams: of the GPU that is current, the second of each thread its own.
LEGACY, PER_THREAD = 1, 2
MAX_READERS = 16  # ranges of a block that are tracked separately
ALIGNMENT = 16  # bytes: one vector access of a kernel, and what NCCL wants of a buffer's start
_NO_READERS: dict[Any, Mark] = {}  # of most blocks; never written


class Block:
    """One allocation, shared by every Buffer that is a view of it.

    Attributes:
        device: the logical device it is on.
        raw: the backend's own handle; it keeps the memory alive. None once that is given back.
        address: of its first byte.
        nbytes: its size.
        owned: from our pool (True), or adopted from a caller's array (False).
        writable: False for a caller's read-only array.
        peer_mapped: whether launches of peers can access it.
        gaps: of one made by ``mesh.flat_buffer``: how many bytes behind the end of each tensor (in
            bytes from the start) are nobody's; None of any other.
        attached: of one made by ``mesh.flat_buffer``: whose gradients lie in it (``attach``).
        readers: of each range of bytes the last copy that reads it on each queue, marked; the next
            writer waits.
        touched: queues other than its home queue that used it, and callers' streams that were
            shown it; if the block is freed with any, its memory is held until they have passed.
            None where nobody asks.
        last_user: the queue that was added last.
        remains: what is left of it when it is freed; not set where nobody asks.
    """

    __slots__ = (
        "__weakref__", "address", "attached", "device", "gaps", "last_user", "nbytes", "owned",
        "peer_mapped", "raw", "readers", "remains", "touched", "writable",
    )  # fmt: skip

    remains: FreedBlock

    # Written out: a call makes one for each array, and a dataclass takes twice as long.
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
        self.readers: dict[tuple[Device, Queue, int, int], Mark] = _NO_READERS
        self.touched: set[tuple[Device, User]] | None = None
        self.last_user: tuple[Device, User] | None = None

    def record_stream(self, stream: Stream) -> None:
        """Records that a caller's stream may still use the block."""
        if self.owned and self.touched is not None:
            self.touched.add((self.device, stream))

    def record_reader(self, mark: Mark, part: Buffer) -> None:
        """Records that a copy on the mark's queue reads ``part``."""
        start = part.offset
        with self.device.mesh_state.readers_lock:
            if self.readers is _NO_READERS:
                self.readers = {}
            if len(self.readers) >= MAX_READERS:  # one for each queue: the last says it for all
                last = {(key[0], key[1]): mark for key, mark in self.readers.items()}
                self.readers = {(*key, 0, self.nbytes): mark for key, mark in last.items()}
            # Last in the order of the dictionary too, which is that of the marks of each queue.
            self.readers.pop((mark.device, mark.queue, start, start + part.nbytes), None)
            self.readers[mark.device, mark.queue, start, start + part.nbytes] = mark

    def readers_of(self, part: Buffer) -> Iterator[Mark]:
        """Yields the marks that a writer of ``part`` must wait for; removes each after the wait.

        A pack is filled while its neighbour in the same flat buffer is still being copied away.
        """
        start, stop = part.offset, part.offset + part.nbytes
        for key, mark in list(self.readers.items()):
            if key[2] < stop and start < key[3]:
                yield mark  # and keeps it if Ctrl-C ends the wait
                if self.readers.get(key) is mark:
                    self.readers.pop(key, None)

    def readers_between(self, start: int, stop: int) -> list[Mark]:
        """Returns, and keeps, the marks that a writer of these bytes must wait for."""
        readers = list(self.readers.items())
        return [mark for key, mark in readers if key[2] < stop and start < key[3]]


class FreedBlock(ref[Block]):
    """Weak reference to a block that keeps its memory after the block is collected.

    Attributes:
        raw: the backend's handle, which still keeps the memory. None for a caller's array that
            need not outlive the block.
        nbytes: its size.
        touched: queues other than its home queue that used it, and callers' streams.
        owned: from our pool, whose order is that of the device's compute queue; a caller's memory
            is in nobody's order that we know.
    """

    __slots__ = ("nbytes", "owned", "raw", "touched")

    raw: Any
    nbytes: int
    touched: set[tuple[Device, User]]
    owned: bool


class Buffer(NotCopied):
    """A contiguous array (C order, fixed shape and dtype) on one logical device.

    Never made by hand: ``Device.put``, ``empty``, ``zeros`` and ``upload`` make one, ``view``
    another one on the same memory.

    Attributes:
        device: the logical ``Device``.
        shape: of the array.
        dtype: a NumPy dtype (bfloat16 is that of ml_dtypes).
        size: number of elements.
        nbytes: number of bytes.
        address: of the first element; a device address on a GPU.
        block: the memory it looks into.
        array_owner: of a Buffer made from an argument, and of its views: the kind of array whose
            memory it is, or ``"copy"`` if it holds a copy of one; None for every other.
        array: the backend's array of this memory; None until it is used for the first time.
        flat: the same in one dimension, without a reference to the block; for backends.
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
        self.array = array  # the backend's array of this memory, made when first asked for
        self.flat: Any = None  # likewise what its work sees of pool memory, without the block

    @property
    def offset(self) -> int:
        """Of the first element in the block, in bytes."""
        return self.address - self.block.address

    def view(self, start: int, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Buffer:
        """Returns a Buffer on part of this memory, without a copy; keeps the block alive.

        Args:
            start: first element, counted in this buffer's dtype.
            shape: of the view.
            dtype: of the view; default this one's. Bytes are looked at anew, not converted.

        Raises:
            ValueError: the view would reach outside this buffer, or start between two of the
                addresses that its dtype may have.
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
            starts: first element of each.
            sizes: elements of each.
            shapes: of each; default ``(size,)``.
        """
        block, device, dtype = self.block, self.device, self.dtype
        address, itemsize, flat = self.address, dtype.itemsize, self.flat
        shapes = [(size,) for size in sizes] if shapes is None else shapes
        made, new = [], Buffer.__new__
        for start, size, shape in zip(starts, sizes, shapes, strict=True):
            # Not by `__init__`: a reduction makes two parts of each tensor on each device.
            part = new(Buffer)
            part.block, part.device, part.dtype = block, device, dtype
            part.shape, part.size, part.nbytes = shape, size, size * itemsize
            part.address = address + start * itemsize
            part.array = part.array_owner = None
            part.flat = None if flat is None else flat[start : start + size]
            made.append(part)
        return made

    def numpy(self, *, deadline: float | None = None) -> np.ndarray:
        """Returns a copy in host memory; waits for the device, at most ``deadline`` seconds.

        See ``Device.download``, which raises.
        """
        return self.device.download(self, deadline=deadline)

    def __repr__(self) -> str:
        return f"Buffer(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"


class Mark(NamedTuple):
    """A position in a device's queue that another queue can wait for.

    Attributes:
        device: whose queue.
        queue: which of its two.
        event: the backend's own token.
    """

    device: Device
    queue: Queue
    event: Any

    @property
    def passed(self) -> bool:
        """Whether the queue is known to have passed it; does not wait."""
        return self.device._reached(self.event)


Row = Sequence[Buffer]


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of tensors in a flat buffer, in elements, each aligned to a vector.

    Attributes:
        offsets: first element of each tensor.
        sizes: elements of each tensor.
        spans: elements from each tensor's start to the next one's (its size and the gap).
        size: elements of the flat buffer; a multiple of the unit.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    spans: tuple[int, ...]
    size: int


def as_elements(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Views buffers as elements of the kernels: complex as pairs, signed integers as unsigned."""
    viewed = []
    for buffer in buffers:
        element = ELEMENT_OF[buffer.dtype]
        if element.viewed is not None:
            buffer = buffer.view(0, (buffer.size * element.lanes,), element.viewed)
        viewed.append(buffer)
    return viewed


def same_dtypes(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows by the dtypes of their first and last operand and the number of operands."""
    groups: dict[tuple[int, int, int], list[Row]] = {}  # by id: hashing a dtype is slow
    for row in rows:
        groups.setdefault((id(row[0].dtype), id(row[-1].dtype), len(row)), []).append(row)
    return list(groups.values())


def by_template(groups: Iterable[Sequence[Row]]) -> dict[tuple[str, str, int], list[Row]]:
    """Views rows as elements, and joins those of one launch.

    Args:
        groups: see ``same_dtypes``.

    Returns:
        Keyed by the element of the outputs, that of the inputs, and the number of operands.
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
    """Whether two Buffers share a byte, whichever device each belongs to."""
    return (
        buffer.address < other.address + other.nbytes
        and other.address < buffer.address + buffer.nbytes
        and buffer.nbytes > 0 < other.nbytes  # an empty one inside the other shares none
    )


def compatible(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Whether ``shape`` matches ``wanted``, where None fits any dimension."""
    return len(shape) == len(wanted) and all(
        known is None or extent == known for extent, known in zip(shape, wanted, strict=True)
    )


def flat_layout(sizes: Sequence[int], itemsize: int) -> FlatLayout:
    """Lays out tensors of ``sizes`` elements one after another, aligned to 16 bytes.

    Args:
        sizes: elements of each tensor, in order; zero is allowed and takes no space.
        itemsize: bytes of an element. Give the *narrower* of two dtypes to get offsets in
            elements that are 16-byte boundaries in both.
    """
    unit = max(1, ALIGNMENT // itemsize)
    spans = tuple(-(-size // unit) * unit for size in sizes)
    offsets = []
    end = 0
    for span in spans:
        offsets.append(end)
        end += span
    return FlatLayout(tuple(offsets), tuple(sizes), spans, end)
