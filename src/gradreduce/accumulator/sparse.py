"""Arrivals of one sparse gradient: names and signatures; the arithmetic is still missing.

Source: tf.SparseConditionalAccumulator (conditional_accumulator.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.device import Device, Mesh
from gradreduce.indexed_slices import IndexedSlices

from .base import ConditionalAccumulatorBase

__all__ = ["SparseConditionalAccumulator"]

_MISSING = "SparseConditionalAccumulator is not implemented yet"


class SparseConditionalAccumulator(ConditionalAccumulatorBase):
    """A conditional accumulator of sparse gradients (tf.SparseConditionalAccumulator).

    Args:
        dtype: of the values.
        shape: of the dense gradient; None entries fit any extent.
        shared_name: as for ``ConditionalAccumulator``.
        name: of the accumulator.
        reduction_type: ``"MEAN"``, which divides each row by the number of gradients that
            touched it, or ``"SUM"``.
        device: as for ``ConditionalAccumulator``.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        device: Device | Mesh | None = None,
    ) -> None:
        raise NotImplementedError(_MISSING)

    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Any = None,
        local_step: int = 0,
        name: str | None = None,
    ) -> bool:
        """Adds rows, unless they are stale.

        Args:
            grad_indices: row numbers, ``(num_rows,)``.
            grad_values: the rows, ``(num_rows, …)``.
            grad_shape: of the dense gradient, if known.
            local_step: the step at which they were computed.
            name: ignored; TensorFlow's name of the operation.

        Returns:
            True if they were added, False if dropped.
        """
        raise NotImplementedError(_MISSING)

    def apply_indexed_slices_grad(
        self, grad: IndexedSlices, local_step: int = 0, name: str | None = None
    ) -> bool:
        """As ``apply_grad``, with the rows in one object.

        Args:
            grad: the rows.
            local_step: the step at which they were computed.
            name: ignored; TensorFlow's name of the operation.
        """
        raise NotImplementedError(_MISSING)

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> tuple[Any, Any, Any]:
        """Blocks until enough came; then ``(indices, values, shape)``, indices sorted.

        Args:
            num_required: at least 1.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait; None for ever.
        """
        raise NotImplementedError(_MISSING)

    def take_indexed_slices_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> IndexedSlices:
        """As ``take_grad``, in one object.

        Args:
            num_required: at least 1.
            name: ignored; TensorFlow's name of the operation.
            timeout: seconds to wait; None for ever.
        """
        raise NotImplementedError(_MISSING)
