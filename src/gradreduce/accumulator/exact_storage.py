"""Partial sums of dense gradients as real numbers: words whose exact sum a take rounds.

Each gradient is added to the words of its device; ``ops.add_words`` describes them. A take adds the
words of all devices, rounds their sum once, and divides it. So neither the order of the gradients
nor their devices change a bit. The devices note which sums did not fit into their words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

from gradreduce import checkpoint, ops
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
)
from gradreduce.ops import Segments, plan_segments
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.sums.aggregators import round_to, scaled
from gradreduce.sums.exact_terms import new_flags, sum_exactly
from gradreduce.weights import from_units

from .dense_storage import (
    DenseStorage,
    SumForm,
    accessible_gradients,
    allocate_flat,
    names_of,
    steps_of,
)
from .state import AccumulatorState, Addend, Addition, launch_all
from .validate import to_sum_device


class WordSum(NamedTuple):
    """A partial sum.

    Attributes:
        words: arrays of the accumulate dtype; it is their exact sum.
        flag: an int32, which is not 0 if it did not fit into the words.
    """

    words: tuple[Buffer, ...]
    flag: Buffer


class _Rows(NamedTuple):
    """Rows that are added to words, and those that have the same index."""

    segments: Segments
    values: Buffer
    weight: float


class ExactStorage(DenseStorage):
    """Stores each partial sum as a ``WordSum`` of this many words."""

    format = "gradreduce exact accumulator 1"
    overwrites = False

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words

    def to_addend(self, state: AccumulatorState, grad: Any) -> Addend:
        """See ``Storage``. Each row of IndexedSlices is a term: equal rows are not added here."""
        if not isinstance(grad, IndexedSlices):
            return super().to_addend(state, grad)
        index, rows = to_sum_device(state, grad.values)
        rehearse_rows(self.num_words, state, rows.dtype)
        assert grad.dense_shape is not None, "validate has checked it"
        return Addend(index, rows, grad.dense_shape, plan_segments(grad.indices))

    def allocate(self, additions: Sequence[Addition]) -> None:
        """See ``Storage``. New sums are allocated back to back; a take need not pack them.

        Rows are added after arrays, and a zero to all elements: so each has a term, however the
        rows are distributed over gradients.
        """
        fresh = [addition for addition in additions if addition.total is None]
        for addition, gradients in zip(additions, accessible_gradients(additions), strict=True):
            addition.in_place = addition.total is not None
            pairs = list(zip(addition.gradients, gradients, strict=True))
            arrays = [each for part, each in pairs if part.segments is None]
            rows = [_Rows(part.segments, *each) for part, each in pairs if part.segments]
            if rows:
                shape, dtype = addition.gradients[0].shape, addition.owner.dtype
                arrays.append((addition.device.zeros(shape, dtype), 1.0))
            addition.steps = [*steps_of(arrays), *rows]
        if not fresh:
            return
        sums = [(each.device, each.owner.dtype, each.gradients[0].shape) for each in fresh]
        # A pack is added with its gaps, where uninitialised numbers could set a flag. Sums in packs
        # have flags if processes send words, and if they are float64.
        zeros = fresh[0].device.mesh_state.processes.size > 1 or any(
            [dtype.name == "float64" for _, dtype, _ in sums]
        )
        words = zip(*[allocate_flat(sums, zeros=zeros) for _ in range(self.num_words)], strict=True)
        flags = new_flags([each.device for each in fresh])
        for addition, own, flag in zip(fresh, words, flags, strict=True):
            addition.total = WordSum(own, flag)

    def command(self, steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
        """See ``Storage``."""
        of_rows = [isinstance(step, _Rows) for _, step in steps]
        prepared = [
            prepare([each for each, is_rows in zip(steps, of_rows, strict=True) if is_rows is kind])
            for kind, prepare in ((False, _array_command), (True, _row_command))
            if kind in of_rows
        ]
        return prepared[0] if len(prepared) == 1 else partial(launch_all, prepared)

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``. Sums are only read."""
        taken: dict[AccumulatorState, tuple[Part, ...]] = {}
        together: dict[tuple[Any, CrossDeviceOps, float], list[AccumulatorState]] = {}
        alone: dict[tuple[float, int], list[AccumulatorState]] = {}
        for state in states:
            divisor = from_units(state.weight()) if state.reduction_type == "MEAN" else 1.0
            if state.over_mesh:
                of_mesh = (state.devices, state.cross_device_ops, divisor)
                together.setdefault(of_mesh, []).append(state)
            else:
                alone.setdefault((divisor, state.devices[0].physical), []).append(state)
        for (_, reducer, divisor), batch in together.items():
            reduced = reducer.reduce_buffers(
                self.partial_sums(batch), weight=divisor, num_words=self.num_words,
                out_dtypes=[state.dtype for state in batch], names=names_of(batch),
            )  # fmt: skip
            taken.update(zip(batch, reduced, strict=True))
        for (divisor, _), batch in alone.items():
            sums = [state.totals[0] for state in batch]
            outs = [[state.devices[0].allocate(total.words[0].shape, state.dtype)]
                    for state, total in zip(batch, sums, strict=True)]  # fmt: skip
            words = [total.words for total in sums]
            sum_exactly(outs, words, divisor=divisor, device=batch[0].devices[0],
                        names=[state.label for state in batch])  # fmt: skip
            taken.update(zip(batch, map(tuple, outs), strict=True))
        self.report_inexact(states)
        return taken

    def partial_sums(self, states: Sequence[AccumulatorState]) -> list[list[Buffer]]:
        """See ``DenseStorage``; the words of a device are neighbours."""
        rows = super().partial_sums(states)
        return [[word for total in row for word in total.words] for row in rows]

    def _zeros(self, sums: Sequence[SumForm]) -> list[WordSum]:
        """Returns words of -0.0, which changes no sum."""
        words = [allocate_flat(sums, zeros=True) for _ in range(self.num_words)]
        ops.negate_zeros([each for zeros in words for each in zeros])
        flags = new_flags([device for device, *_ in sums])
        return list(map(WordSum, zip(*words, strict=True), flags))

    def save(self, total: Any) -> Any:
        """See ``Storage``. Equal sums are saved as equal words, in ``[word, …]``."""
        copies = [checkpoint.queue_copy(word) for word in total.words]

        def read(download: Callable[[Buffer], Any]) -> Any:
            return ops.canonical_words([download(copy) for copy in copies])

        return read

    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Any]:
        """See ``Storage``."""
        host = checkpoint.array((self.num_words, *shape), dtype)(name, saved)

        def upload(device: Device) -> WordSum:
            words = tuple([device.upload(word) for word in host])
            return WordSum(words, new_flags([device])[0])

        return upload


def _array_command(steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
    """Prepares a launch that adds arrays to words."""
    first, of_first = steps[0]
    sums = [addition.total for addition, _ in steps]
    dtypes = [total.words[0].dtype for total in sums]
    terms = [
        [as_term(gradient, weight, dtype) for gradient, weight in step]
        for (_, step), dtype in zip(steps, dtypes, strict=True)
    ]
    return partial(
        ops.add_words, [total.words for total in sums], [total.flag for total in sums], terms,
        fresh=not first.in_place and of_first is first.steps[0], device=first.device,
    )  # fmt: skip


def _row_command(steps: Sequence[tuple[Addition, _Rows]]) -> Callable[[], None]:
    """Prepares launches that add rows to words."""
    sums = [addition.total for addition, _ in steps]
    plans = [rows.segments for _, rows in steps]
    terms = [
        as_term(rows.values, rows.weight, total.words[0].dtype) if rows.values.size else rows.values
        for (_, rows), total in zip(steps, sums, strict=True)
    ]
    return ops.add_rows_command(
        [total.words for total in sums], [total.flag for total in sums], terms, plans,
        [plan.indices for plan in plans], device=steps[0][0].device,
    )  # fmt: skip


def rehearse_rows(num_words: int, state: AccumulatorState, dtype: DType) -> None:
    """Compiles the kernels that add any number of rows of a dtype with the same index."""
    work = partial(_add_rows, num_words, state, dtype)
    compile_ahead(state.devices, ("rows of words", num_words, state.dtype, dtype), work)


def _add_rows(num_words: int, state: AccumulatorState, dtype: DType, dry_run: DryRunMesh) -> None:
    plan = ops.segments_for_all_kernels(num_words)
    shape, into = (num_words * plan.num_rows, 2), plan.indices
    for home in dry_run.devices_like(state.devices):
        words = ops.split_rows(home.empty(shape, accumulate_dtype(state.dtype)), num_words)
        terms = [as_term(home.empty((plan.num_rows, 2), dtype), 1, words[0].dtype)]
        ops.add_rows_command([words], new_flags([home]), terms, [plan], [into], device=home)()


@cache
def exact_storage(num_words: int) -> ExactStorage:
    """Returns the storage of all exact sums of this many words."""
    return ExactStorage(num_words)


def as_term(gradient: Buffer, weight: float, dtype: DType) -> Buffer:
    """Returns a term that ``ops.add_words`` can add to words of a dtype."""
    if accumulate_dtype(gradient.dtype) != dtype:
        gradient = round_to(gradient, dtype)
    return gradient if weight == 1 else scaled(gradient, weight)
