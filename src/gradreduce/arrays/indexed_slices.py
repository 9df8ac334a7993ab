"""IndexedSlices: rows of a larger array with their indices, the form of a sparse gradient.

Indices are host data: they are checked, sorted and merged on the host, and only the plan of an
addition is copied to a device. Source: tf.IndexedSlices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    as_index,
    by_physical,
)
from gradreduce.errors import InvalidArgumentError, brief
from gradreduce.ops import Divisor, Indices, Segments, plan_segments

from .caller_streams import StreamScope
from .convert import (
    as_result_kind,
    from_buffer,
    host_array,
    is_array,
    is_coo,
    kind_of,
    shape_and_dtype,
)
from .convert_gpu import Kind
from .replica_context import on_current_devices
from .types import OutputType

UNKNOWN = -1  # the first entry of a dense_shape whose number of rows is unknown


class IndexedSlices:
    """Rows of a larger array: ``values[k]`` belongs to row ``indices[k]`` (tf.IndexedSlices).

    Rows with the same index are added; rows without an index are zero.

    Args:
        values: the rows, shape ``(num_rows, …)``: an array of any library, a Buffer, or a nested
            list. Not copied and not written. May be IndexedSlices too, as in TensorFlow: then its
            indices are positions in ``indices``.
        indices: the row number of each row, shape ``(num_rows,)``: integers of any dtype and
            library, in any order; may be repeated. Copied to the host, which waits for indices on a
            GPU.
        dense_shape: the shape of the whole array, ``(rows, …)``. None if unknown; the first entry
            is -1 if only the number of rows is unknown.

    Raises:
        TypeError: ``values`` is not an array or cannot be added, or indices or an entry of
            ``dense_shape`` are not integers (booleans are not).
        InvalidArgumentError: (a ``ValueError``) ``values`` is a scalar, ``indices`` is not a vector
            with one entry for each row, an index is negative or not below ``dense_shape[0]``, or
            the shape of a row is not ``dense_shape[1:]``.

    Example:
        >>> gr.IndexedSlices(np.array([[1.0], [2.0], [4.0]]), [5, 0, 5], dense_shape=(8, 1))
        IndexedSlices(indices=[5, 0, 5], values=float64[3, 1], dense_shape=(8, 1))
    """

    _was_coo = False  # whether these are the rows of a torch.sparse_coo tensor

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        rows = _as_indices(indices)
        if isinstance(values, IndexedSlices):
            values, rows = values.values, _look_up_indices(values, rows)
        if kind_of(values) == "native" and not is_array(values):
            values = host_array(values)
        shape, self._dtype = shape_and_dtype(values)
        if not shape:
            raise InvalidArgumentError(
                "values must have at least one dimension: indices are row numbers"
            )
        if len(rows) != shape[0]:
            raise InvalidArgumentError(
                f"got {len(rows)} indices for {shape[0]} rows of values; pass one for each row"
            )
        self._dense_shape = _as_dense_shape(dense_shape, shape)
        check_indices(rows, self._dense_shape)
        self._values = values
        self._indices = rows

    @classmethod
    def of(
        cls, values: Any, indices: Indices, dense_shape: tuple[int, ...] | None
    ) -> IndexedSlices:
        """Makes IndexedSlices like the constructor, but checks and copies nothing.

        Args:
            values: an array or a Buffer.
            indices: a NumPy array of int64, which is made read-only.
            dense_shape: a tuple or None.
        """
        slices = cls.__new__(cls)
        indices.flags.writeable = False
        slices._values, slices._indices, slices._dense_shape = values, indices, dense_shape
        _, slices._dtype = shape_and_dtype(values)
        return slices

    def _with_values(self, values: Any) -> IndexedSlices:
        """Returns the same rows in another array or Buffer."""
        return IndexedSlices.of(values, self._indices, self._dense_shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError(
            "IndexedSlices are rows, not one array: use .to_dense() for the whole array, or "
            ".values for the rows"
        )

    @property
    def values(self) -> Any:
        """The rows, as passed to the constructor."""
        return self._values

    @property
    def indices(self) -> Indices:
        """The row number of each row of ``values``: a read-only int64 NumPy array."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array; None, or -1 as first entry, if unknown."""
        return self._dense_shape

    shape = dense_shape  # IndexedSlices represent the whole array

    @property
    def is_known(self) -> bool:
        """Whether the shape of the whole array is known."""
        return self._dense_shape is not None and UNKNOWN not in self._dense_shape

    @property
    def dtype(self) -> DType:
        """The NumPy dtype of the values."""
        return self._dtype

    @property
    def device(self) -> Device | None:
        """The logical device of ``values`` if they are a Buffer, else None."""
        return self._values.device if isinstance(self._values, Buffer) else None

    @property
    def kind(self) -> Kind:
        """The kind of array of the values."""
        return "coo" if self._was_coo else kind_of(self._values)

    @StreamScope()
    def coalesce(self, *, output_type: OutputType | None = None) -> IndexedSlices:
        """Adds rows with the same index; the result has each index once, in ascending order.

        Rows are added in their order, so the bits are reproducible. float16 and bfloat16 are added
        in float32 and rounded once.

        Args:
            output_type: the kind of the result's values: ``"numpy"``, ``"cupy"``, ``"torch"``,
                ``"jax"`` or ``"buffer"``. Default: the kind of ``values``.

        Returns:
            New IndexedSlices in new memory on the values' device. Host arrays are put on the device
            of ``gr.replica``, else the first.

        Raises:
            ValueError: ``output_type`` is unknown, or its library is not imported.

        Example:
            >>> merged = gr.IndexedSlices(np.array([[1.0], [2.0], [4.0]]), [5, 0, 5]).coalesce()
            >>> merged.indices.tolist(), merged.values.tolist()
            ([0, 5], [[2.0], [5.0]])
        """
        kind = as_result_kind(output_type, self.kind)
        segments = plan_segments(self._indices)
        (rows,) = coalesce_n([self._in_buffer().values], [segments])
        return IndexedSlices.of(from_buffer(rows, kind), segments.indices, self._dense_shape)

    @StreamScope()
    def to_dense(self, *, output_type: OutputType | None = None) -> Any:
        """Returns the whole array: adds rows with the same index; other rows are zero.

        Args:
            output_type: see ``coalesce``.

        Returns:
            A new array of shape ``dense_shape`` with the values' dtype, on the device that
            ``coalesce`` uses.

        Raises:
            ValueError: ``dense_shape`` or its first entry is unknown, ``output_type`` is unknown,
                or its library is not imported.

        Example:
            >>> gr.IndexedSlices(np.array([1.0, 2.0, 4.0]), [2, 0, 2], dense_shape=(4,)).to_dense()
            array([2., 0., 5., 0.])
        """
        kind = as_result_kind(output_type, self.kind)
        return from_buffer(to_dense_n([self._in_buffer()])[0], kind)

    def _in_buffer(self) -> IndexedSlices:
        """Puts the rows into a Buffer, on the device of ``gr.replica``, else the first."""
        return self._with_values(*on_current_devices([self._values]))

    def _as_result(self, kind: Kind) -> Any:
        """Converts rows in a Buffer to ``kind``; "coo" means a ``torch.sparse_coo`` tensor."""
        made = self._with_values(from_buffer(self._values, kind))
        return made._as_coo() if kind == "coo" else made

    def _as_coo(self) -> Any:
        """Converts rows that are a tensor to ``torch.sparse_coo``, on the same memory.

        The tensor is marked as coalesced if every index occurs once, in ascending order. If
        ``dense_shape`` is unknown, returns these IndexedSlices.
        """
        if not self.is_known:
            return self
        torch, rows = sys.modules["torch"], self._indices
        # PyTorch 2.11's and 2.12's ``sparse_coo_tensor`` warns, even with check_invariants=False.
        return torch.ops.aten._sparse_coo_tensor_unsafe(
            torch.from_numpy(rows.copy())[None].to(self._values.device),
            self._values,
            self._dense_shape,
            is_coalesced=bool((rows[1:] > rows[:-1]).all()),
        )

    def __repr__(self) -> str:
        indices = ", ".join(map(str, self._indices[:6].tolist()))
        more = ", …" if len(self._indices) > 6 else ""
        shape, _ = shape_and_dtype(self._values)
        return (
            f"IndexedSlices(indices=[{indices}{more}], values={self.dtype}"
            f"{list(shape)}, dense_shape={self._dense_shape})"
        )


def as_slices(tensor: Any) -> Any:
    """Converts a ``torch.sparse_coo`` tensor to IndexedSlices; returns anything else unchanged.

    Raises:
        ValueError: the tensor's ``sparse_dim`` is not 1, or it requires grad.
    """
    if not is_coo(tensor):
        return tensor
    if tensor.sparse_dim() != 1:
        raise ValueError(
            f"a sparse tensor with sparse_dim {tensor.sparse_dim()} has no rows; pass one with "
            "sparse_dim 1, or .to_dense()"
        )
    if tensor.requires_grad:
        raise ValueError("the tensor requires grad: pass tensor.detach()")
    made = IndexedSlices(tensor._values(), tensor._indices()[0], tuple(tensor.shape))
    made._was_coo = True
    return made


def coalesce_n(
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    *,
    outs: Sequence[Buffer] | None = None,
    into: Sequence[Indices | None] | None = None,
    divisors: Sequence[Divisor] | None = None,
) -> list[Buffer]:
    """Adds the rows of each segment, for many tensors: ``(num_segments, …)``.

    One upload on each physical device, and one launch per dtype.

    Args:
        values: the rows of each tensor.
        segments: the rows of each that are added, from ``plan_segments``.
        outs: Buffers for the results, on the devices of the values; default: new Buffers of their
            dtypes.
        into: for each tensor the row of each segment in its result; default: one after the other.
        divisors: for each tensor a number, or a float64 array with one for each segment.
    """
    if outs is None:
        outs = [
            rows.device.empty((plan.num_segments, *rows.shape[1:]), rows.dtype)
            for rows, plan in zip(values, segments, strict=True)
        ]
    into = into or [None] * len(outs)
    rows = list(zip(outs, values, segments, into, divisors or [1.0] * len(outs), strict=True))
    for here in by_physical([out.device for out in outs]).values():
        *terms, some_into, by = zip(*[rows[index] for index in here], strict=True)
        ops.segment_sum_command(*terms, into=some_into, divisor=by, device=terms[0][0].device)()
    return list(outs)


def to_dense_n(slices: Sequence[IndexedSlices]) -> list[Buffer]:
    """Makes the whole arrays of many IndexedSlices of Buffers, in new Buffers.

    Raises:
        ValueError: a ``dense_shape`` is unknown.
    """
    for each in slices:
        if not each.is_known:
            raise ValueError(
                f"dense_shape of {each} is unknown, but the dense array needs it: pass dense_shape "
                "to IndexedSlices"
            )
    outs = [each.values.device.zeros(each.dense_shape, each.dtype) for each in slices]
    segments = [plan_segments(each.indices) for each in slices]
    return coalesce_n(
        [each.values for each in slices],
        segments,
        outs=outs,
        into=[plan.indices for plan in segments],
    )


def check_indices(indices: Indices, dense_shape: tuple[int, ...] | None) -> None:
    """Raises ``InvalidArgumentError`` if an index is not below a known ``dense_shape[0]``."""
    if dense_shape is None or dense_shape[0] == UNKNOWN or not len(indices):
        return
    index = int(indices.argmax())
    if indices[index] >= dense_shape[0]:
        raise InvalidArgumentError(
            f"indices[{index}] = {indices[index]} is not below dense_shape[0] = {dense_shape[0]}"
        )


def _as_indices(value: Any) -> Indices:
    """Copies row numbers to a read-only int64 array on the host, and checks them."""
    indices = host_array(value)
    if isinstance(value, list | tuple) and not value:  # an empty list has no dtype
        indices = indices.astype("int64")
    if indices.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got {indices.dtype}")
    if indices.ndim != 1:
        raise InvalidArgumentError(f"indices must be a vector, got shape {list(indices.shape)}")
    numbers = indices.astype("int64")
    if len(numbers) and numbers.min() < 0:  # uint64 above int64 has become negative
        index = int(numbers.argmin())
        raise InvalidArgumentError(
            f"indices[{index}] = {indices[index]} is negative, or too large for int64"
        )
    numbers.flags.writeable = False
    return numbers


def _look_up_indices(inner: IndexedSlices, outer: Indices) -> Indices:
    """Returns the row numbers of nested IndexedSlices: their indices are positions in ``outer``."""
    if inner.dense_shape is not None and inner.dense_shape[0] not in (UNKNOWN, len(outer)):
        raise InvalidArgumentError(
            f"got {len(outer)} indices for values of dense_shape {inner.dense_shape}; pass one for "
            "each row"
        )
    check_indices(inner.indices, (len(outer),))
    found: Indices = outer[inner.indices]
    found.flags.writeable = False
    return found


def _as_dense_shape(value: Any, values_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns ``dense_shape`` as a tuple, checked against the shape of the values."""
    if value is None:
        return None
    entries = value if isinstance(value, list | tuple) else host_array(value).tolist()
    try:
        shape = tuple(as_index(entry) for entry in entries)
    except TypeError:
        raise TypeError(f"dense_shape={brief(value)} must be a list of integers, or None") from None
    if not shape or min(shape[1:], default=0) < 0 or shape[0] < UNKNOWN:
        raise InvalidArgumentError(
            f"dense_shape={shape} must have at least one dimension, none negative except -1 as the "
            "first"
        )
    if shape[1:] != values_shape[1:]:
        raise InvalidArgumentError(
            f"values of shape {list(values_shape)} are not rows of an array of shape "
            f"{brief(list(shape))}"
        )
    return shape
