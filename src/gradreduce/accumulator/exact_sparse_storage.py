"""Partial sums of sparse gradients as real numbers: rows of words whose exact sum a take rounds.

It is to ``sparse_storage`` what ``exact_storage`` is to ``dense_storage``. A take adds the words of
all devices on the first one, with all terms at hand: no sum of devices can fail to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from gradreduce import ops
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, DType, accumulate_dtype
from gradreduce.ops import (
    Divisor,
    Indices,
    RowIndex,
    Segments,
    concatenate_indices,
    merge_row_index,
    plan_segments,
)
from gradreduce.reduce.process_values import slices_of_all
from gradreduce.sums.exact_terms import new_flags, sum_rows_exactly
from gradreduce.sums.slices import concatenate_rows
from gradreduce.weights import from_units

from .exact_storage import as_term, rehearse_rows
from .sparse_storage import SparseStorage, rows_in_use
from .state import AccumulatorState, Addition


@dataclass(frozen=True, eq=False)
class SparseWordSum:
    """The partial sum of sparse gradients on one device.

    Attributes:
        slots: the index of each row, and how many gradients touched it.
        arrays: words, ``(capacity, …)``, of the accumulate dtype; a row is their exact sum. Rows
            from ``slots.num_rows`` on are -0.0.
        flag: an int32, which is not 0 if a row did not fit into the words.
    """

    slots: RowIndex
    arrays: tuple[Buffer, ...]
    flag: Buffer


class ExactSparseStorage(SparseStorage):
    """Stores each partial sum as a ``SparseWordSum`` of this many words."""

    format = "gradreduce exact sparse accumulator 1"

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words

    def rehearse(self, state: AccumulatorState, dtype: DType, weight: float = 1) -> None:
        """See ``Storage``. Any number of rows and of devices may have the same index."""
        super().rehearse(state, dtype, weight)
        rehearse_rows(self.num_words, state, dtype)
        work = partial(_sum_rows, self.num_words, state)
        compile_ahead(state.devices, (self, state.dtype, "sums of words"), work)

    def _scaled(self, addition: Addition, values: Buffer, weight: float) -> tuple[Buffer, float]:
        """Returns rows that can be added to words, and the weight 1."""
        dtype = accumulate_dtype(addition.owner.dtype)
        return (as_term(values, weight, dtype) if values.size else values), 1.0

    def _new_sum(
        self, addition: Addition, slots: RowIndex, shape: tuple[int, ...]
    ) -> SparseWordSum:
        """See ``SparseStorage``."""
        device, dtype = addition.device, accumulate_dtype(addition.owner.dtype)
        words = tuple([device.zeros(shape, dtype) for _ in range(self.num_words)])
        ops.negate_zeros(words)
        flag = new_flags([device])[0] if addition.total is None else addition.total.flag
        return SparseWordSum(slots, words, flag)

    def command(self, steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
        """See ``Storage``."""
        sums = [addition.total for addition, _ in steps]
        _, segments, into, terms = zip(*[step for _, step in steps], strict=True)
        return ops.add_rows_command(
            [total.arrays for total in sums], [total.flag for total in sums],
            [term for term, _ in terms], segments, into, device=steps[0][0].device,
        )  # fmt: skip

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``. The sums are unchanged."""
        taken = super().take(states, guard)
        self.report_inexact(states)
        return taken

    def _merged(self, state: AccumulatorState) -> IndexedSlices:
        """See ``SparseStorage``."""
        totals, home = [total for total in state.totals if total is not None], state.devices[0]
        per_gradient = state.sparse_mean == "per_gradient"
        if state.over_mesh and Replicas(state.devices).group.size > 1:  # see ``SparseStorage``
            plan, words = self._words_of_all(state, totals)
            divisor: Divisor = 1.0
        else:
            words = list(map(rows_in_use, totals))
            plan, divisor = merge_row_index(
                [total.slots for total in totals],
                mean=state.reduction_type == "MEAN" and not per_gradient,
            )
        if per_gradient:
            divisor = from_units(state.weight())
        rows = words[0]
        if len(words) > 1 or rows[0].device is not home:
            in_order = [word for of_place in zip(*words, strict=True) for word in of_place]
            rows = ops.split_rows(concatenate_rows(home, in_order), self.num_words)
        out = home.empty((plan.num_segments, *rows[0].shape[1:]), state.dtype)
        sum_rows_exactly(out, rows, plan, divisor, state.label)
        return IndexedSlices.of(out, plan.indices, state.sum_shape)

    def _words_of_all(
        self, state: AccumulatorState, totals: Sequence[SparseWordSum]
    ) -> tuple[Segments, list[list[Buffer]]]:
        """Exchanges words; returns those of all replicas, and a plan of their rows."""
        sums = [
            IndexedSlices.of(
                concatenate_rows(total.flag.device, rows_in_use(total)),
                concatenate_indices([total.slots.by_row()] * self.num_words),
                state.sum_shape,
            )
            for total in totals
        ]
        home = state.devices[0]
        parts = slices_of_all(home, sums, mean=True, coalesce=True, names=[state.tensor])
        words = [ops.split_rows(part.values, self.num_words) for part in parts]
        indices = [each.indices[: of[0].shape[0]] for each, of in zip(parts, words, strict=True)]
        return plan_segments(concatenate_indices(indices)), words

    def _to_save(self, arrays: Sequence[Any], rows: Indices) -> Any:
        """See ``SparseStorage``. Equal sums are saved as equal words, in ``[row, word, …]``."""
        return ops.canonical_words(arrays)[:, rows].swapaxes(0, 1).copy()

    def _saved_shape(self, num_rows: int, *row_shape: int) -> tuple[int, ...]:
        """See ``SparseStorage``."""
        return num_rows, self.num_words, *row_shape

    def _upload(self, device: Device, slots: RowIndex, saved: Any) -> SparseWordSum:
        """See ``SparseStorage``."""
        words = tuple([device.upload(word.copy()) for word in saved.swapaxes(0, 1)])
        return SparseWordSum(slots, words, new_flags([device])[0])


@cache
def exact_sparse_storage(num_words: int) -> ExactSparseStorage:
    """Returns the storage of all exact sums of sparse gradients of this many words."""
    return ExactSparseStorage(num_words)


def _sum_rows(num_words: int, state: AccumulatorState, dry_run: DryRunMesh) -> None:
    """Compiles the kernels that add the words of any number of devices."""
    plan = ops.segments_for_all_kernels(num_words)
    for home in dry_run.devices_like(state.devices):
        shape = (num_words * plan.num_rows, 2)
        words = ops.split_rows(home.empty(shape, accumulate_dtype(state.dtype)), num_words)
        out = home.empty((plan.num_segments, 2), state.dtype)
        sum_rows_exactly(out, words, plan, 1.0, state.label)
