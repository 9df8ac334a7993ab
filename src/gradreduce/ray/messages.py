"""The arrays of a message to an actor: small tensors are packed, large ones are sent alone.

Small tensors are packed because Ray needs several microseconds for each array of a message. Large
tensors are sent alone because Ray puts large arrays into its object store, whose shared memory the
receiver reads without a copy. All arrays are sent as bytes, because Ray does not support bfloat16;
the message also has the shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from gradreduce import ops
from gradreduce.arrays.convert import from_buffer
from gradreduce.arrays.variable import Variable
from gradreduce.backends.compile_ahead import compile_rows
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    FlatLayout,
    accumulate_dtype,
    as_dtype,
    by_template,
    can_access,
    flat_layout,
    same_dtypes,
)

Spec = tuple[tuple[int, ...], DType]  # shape and dtype
BIG = 1 << 16  # a tensor of so many bytes or more is sent alone


class TensorMessage(NamedTuple):
    """The arrays of a message.

    Attributes:
        form: shape and dtype of each tensor, as one string, because Ray needs 0.1 ms for a list of
            161 shapes.
        packed: the bytes of all small tensors of a dtype, for each dtype. They are ``bytes`` if
            there are fewer than ``BIG``, because Ray needs 0.1 ms more for an array.
        bigs: for each large tensor its bytes; in the answer of an actor, a reference to this list.
        value: a small value that is sent with the tensors.
    """

    form: str
    packed: Sequence[bytes | np.ndarray]
    bigs: Any
    value: Any = None


class Layout:
    """The layout of the tensors in a message: which are packed, and where.

    Args:
        specs: shape and dtype of each tensor.

    Attributes:
        specs: see above.
        form: see ``TensorMessage``.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = specs
        dtypes = {id(dtype): dtype for _, dtype in specs}
        names = {key: dtype.name for key, dtype in dtypes.items()}  # a name takes NumPy 2 us
        self.form = " ".join(
            [f"{names[id(dtype)]}:{','.join(map(str, shape))}" for shape, dtype in specs]
        )
        self._bigs: list[int] = []
        small: dict[DType, list[int]] = {}
        for index, (shape, dtype) in enumerate(specs):
            is_big = math.prod(shape) * dtype.itemsize >= BIG
            (self._bigs if is_big else small.setdefault(dtype, [])).append(index)
        # Of the small tensors, for each dtype: index and shape of each, and its place when packed.
        self._packed: list[tuple[DType, list[int], list[tuple[int, ...]], FlatLayout]] = []
        for dtype, indices in small.items():
            shapes = [specs[index][0] for index in indices]
            layout = flat_layout([math.prod(shape) for shape in shapes], dtype.itemsize)
            self._packed.append((dtype, indices, shapes, layout))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(form: str) -> Layout:
        """Returns the layout of a message with this ``form``."""
        pairs = [text.split(":") for text in form.split()]
        return Layout([(_extents_of(shape), as_dtype(dtype)) for dtype, shape in pairs])

    # -- host arrays ------------------------------------------------------------------------------

    def message(self, arrays: Sequence[np.ndarray]) -> TensorMessage:
        """Returns a message of host arrays.

        Small arrays, and arrays that are not contiguous, are copied. The message shares the memory
        of all others.
        """
        packed = []
        for dtype, indices, _, layout in self._packed:
            flat = np.zeros(layout.size, dtype)
            for start, size, index in zip(layout.offsets, layout.sizes, indices, strict=True):
                flat[start : start + size] = arrays[index].reshape(-1)
            packed.append(_encode(flat))
        return TensorMessage(self.form, packed, [_as_bytes(arrays[index]) for index in self._bigs])

    def arrays(self, message: TensorMessage) -> list[np.ndarray]:
        """Returns the arrays of a message, as views of its memory."""
        by_index = self._big_arrays(message)
        for (dtype, indices, shapes, layout), flat in zip(
            self._packed, message.packed, strict=True
        ):
            values = np.frombuffer(flat, dtype)
            parts = zip(layout.offsets, layout.sizes, indices, shapes, strict=True)
            for start, size, index, shape in parts:
                by_index[index] = values[start : start + size].reshape(shape)
        return [by_index[index] for index in range(len(self.specs))]

    def _big_arrays(self, message: TensorMessage) -> dict[int, np.ndarray]:
        """Returns the large arrays of a message by index, as views of its memory."""
        pairs = zip(self._bigs, message.bigs, strict=True)
        specs = [(index, big, *self.specs[index]) for index, big in pairs]
        return {index: big.view(dtype).reshape(shape) for index, big, shape, dtype in specs}

    # -- Buffers ----------------------------------------------------------------------------------

    def pack(self, device: Device, buffers: Sequence[Buffer]) -> TensorMessage:
        """Returns a message of Buffers; waits for the device.

        Small tensors are packed by one launch for each dtype. Large tensors of a simulated device
        are not copied: send the message before they change.

        Args:
            device: the device that packs; it is of the same mesh as the Buffers.
            buffers: one Buffer for each tensor.
        """
        return self.packer(device, buffers)()

    def packer(self, device: Device, buffers: Sequence[Buffer]) -> Callable[[], TensorMessage]:
        """Returns a function that does what ``pack`` does, and can be called many times."""
        outs: list[Buffer] = []
        terms: list[Buffer] = []
        packs = self.packs(device)
        rehearse_packing([], device, *[flat.dtype for flat in packs])
        for (_, indices, _, layout), flat in zip(self._packed, packs, strict=True):
            outs += flat.parts(layout.offsets, layout.spans)
            terms += [buffers[index] for index in indices]
        away = [term for term in terms if not can_access(device, term)]
        copies = {id(term): device.empty(term.shape, term.dtype) for term in away}
        accessible = [copies.get(id(term), term) for term in terms]
        launches = [
            partial(device.launch, ops.PACK, (to, of), rows)
            for (to, of, _), rows in by_template(
                same_dtypes(zip(outs, accessible, strict=True))
            ).items()
        ]

        def pack() -> TensorMessage:
            for term in away:
                device.copy(copies[id(term)], term)
            for launch in launches:
                launch((1.0,))
            return self.message_of(packs, buffers)

        return pack

    def message_of(
        self, packs: Sequence[Buffer], buffers: Sequence[Buffer] | Mapping[int, Buffer]
    ) -> TensorMessage:
        """Returns a message of packed flat Buffers and of the large tensors; waits for the device.

        See ``pack`` for what is not copied.

        Args:
            packs: the flat Buffers, one for each dtype; see ``packs``.
            buffers: the Buffers of the large tensors, by index.
        """
        packed = [_encode(flat.numpy()) for flat in packs]
        bigs = [_as_bytes(from_buffer(buffers[index], "numpy")) for index in self._bigs]
        return TensorMessage(self.form, packed, bigs)

    def unpack(self, device: Device, message: TensorMessage) -> list[Buffer]:
        """Returns the tensors of a message as Buffers of a device.

        Small tensors are uploaded together. On a simulated device, large tensors are views of the
        memory of the message, and are read-only if that memory is.
        """
        packs = self.packs(device)
        self.upload(packs, message)
        found = self.small(packs) | self.alone(device, message)
        return [found[index] for index in range(len(self.specs))]

    def packs(self, device: Device) -> list[Buffer]:
        """Returns a new, uninitialized flat Buffer for the small tensors of each dtype."""
        return [device.empty((layout.size,), dtype) for dtype, _, _, layout in self._packed]

    def move(self, device: Device, variables: Sequence[Variable]) -> list[Buffer]:
        """Moves the small variables to new flat Buffers, and returns these Buffers."""
        packs = [device.zeros((layout.size,), dtype) for dtype, _, _, layout in self._packed]
        for index, part in self.small(packs).items():
            device.copy(part, variables[index].buffers[0])
            variables[index]._buffers = (part,)
        return packs

    def small(self, packs: Sequence[Buffer]) -> dict[int, Buffer]:
        """Returns the small tensors by index, as views of the flat Buffers."""
        by_index: dict[int, Buffer] = {}
        for (_, indices, shapes, layout), flat in zip(self._packed, packs, strict=True):
            by_index |= zip(indices, flat.parts(layout.offsets, layout.sizes, shapes), strict=True)
        return by_index

    def alone(self, device: Device, message: TensorMessage) -> dict[int, Buffer]:
        """Returns the large tensors of a message by index; see ``unpack``."""
        return {index: device.put(array) for index, array in self._big_arrays(message).items()}

    def upload(self, packs: Sequence[Buffer], message: TensorMessage) -> None:
        """Copies the small tensors of a message to the flat Buffers."""
        for flat, array in zip(packs, message.packed, strict=True):
            flat.device.upload(np.frombuffer(array, flat.dtype), out=flat)


def rehearse_packing(variables: Sequence[Variable], device: Device, *others: DType) -> None:
    """Compiles the kernels that pack variables, masters, sums, and tensors of other dtypes."""
    dtypes = {each for var in variables for each in (var.dtype, accumulate_dtype(var.dtype))}
    pairs = {(each, each) for each in (*dtypes, *others)}
    compile_rows("pack", ops.pack_to_rows, pairs, device)


def specs_of(tensors: Sequence[np.ndarray] | Sequence[Buffer]) -> list[Spec]:
    """Returns shape and dtype of each tensor."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _extents_of(text: str) -> tuple[int, ...]:
    return tuple([int(extent) for extent in text.split(",") if extent])


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _encode(flat: np.ndarray) -> bytes | np.ndarray:
    return flat.tobytes() if flat.nbytes < BIG else _as_bytes(flat)
