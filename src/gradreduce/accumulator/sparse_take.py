"""How sparse sums become gradients: rows in the order of their indices, each divided, at a take.

One launch merges the rows of all sums, and divides each by the number of gradients that touched
it. Over a mesh the rows of all devices are brought together on the first one before, in mesh
order, and the results of all accumulators travel from there end to end, one copy to each GPU. A
``CrossDeviceOps`` that does not all-reduce as ours do brings them together in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradreduce.aggregate_sparse import rows_together
from gradreduce.cross_device import is_all_reduce
from gradreduce.device import Buffer, Device, DType, accumulate_dtype, flat_layout
from gradreduce.errors import brief
from gradreduce.indexed_slices import IndexedSlices, coalesced
from gradreduce.interop import Aside
from gradreduce.one_device import handed_out
from gradreduce.ops import Slots, alike, merged_slots, plan_segments
from gradreduce.reduce_arguments import Request
from gradreduce.values import Part, PerReplica, ReduceOp, buffer_of

from .state import AccumulatorState, SparseSum

__all__ = ["take_sparse"]


def take_sparse(states: Sequence[AccumulatorState]) -> list[tuple[IndexedSlices, ...]]:
    """The gradient of each state, on each of its devices, in new memory; the sums stay.

    Args:
        states: sparse ones, each with a gradient or more.
    """
    taken = {state: _reduced(state) for state in states if _has_own_way(state)}
    ours = [state for state in states if state not in taken]
    taken.update(zip(ours, _merged(ours), strict=True))
    return [taken[state] for state in states]


def _has_own_way(state: AccumulatorState) -> bool:
    """Whether a ``CrossDeviceOps`` other than an all-reduce of ours brings its sums together."""
    return state.over_mesh and not is_all_reduce(state.ops)


def _reduced(state: AccumulatorState) -> tuple[IndexedSlices, ...]:
    """By the accumulator's own ops; then sorted, divided and rounded on each device."""
    sums = [total for total in state.totals if isinstance(total, SparseSum)]
    mean = state.reduction_type == "MEAN"
    plan, divisor = merged_slots([total.slots for total in sums], mean=mean)
    rows = [_as_slices(state, place) for place in range(len(state.devices))]
    value = PerReplica.of(rows, "native")
    with Aside():  # a class of the caller's own
        (parts,) = state.ops.reduce_batch(
            ReduceOp.SUM, [Request(value, state.devices, True)], coalesce=True
        )
    slices = [part for part in parts if isinstance(part, IndexedSlices)]
    plans = [plan_segments(part.indices) for part in slices]
    wanted = [plan.indices.tolist()] * len(state.devices)
    if [each.indices.tolist() for each in plans] != wanted:
        raise ValueError(
            f"cross_device_ops={brief(state.ops)} gave other rows than those of the sums"
        )
    outs = [
        device.empty((plan.num_segments, *rows[0].values.shape[1:]), state.dtype)
        for device in state.devices
    ]
    coalesced([part.values for part in slices], plans, outs=outs, divisors=[divisor] * len(outs))
    return tuple([IndexedSlices.of(out, plan.indices, state.sum_shape) for out in outs])


def _as_slices(state: AccumulatorState, place: int) -> IndexedSlices:
    """The partial sum of a device, its rows as they lie."""
    total = state.totals[place]
    if not isinstance(total, SparseSum):
        assert state.sum_shape is not None  # it holds gradients
        shape = (0, *state.sum_shape[1:])
        none = state.devices[place].empty(shape, accumulate_dtype(state.dtype))
        return IndexedSlices.of(none, Slots.none().indices, state.sum_shape)
    return IndexedSlices.of(total.rows, total.slots.by_row, state.sum_shape)


def _merged(states: Sequence[AccumulatorState]) -> list[tuple[IndexedSlices, ...]]:
    """By one launch, on the first device of each."""
    sums = [[total for total in state.totals if isinstance(total, SparseSum)] for state in states]
    plans, divisors = [], []
    for state, totals in zip(states, sums, strict=True):
        mean = state.reduction_type == "MEAN"
        segments, by = merged_slots([total.slots for total in totals], mean=mean)
        plans.append(segments)
        divisors.append(by)
    values = _brought_together(states, sums)
    shapes = [
        (plan.num_segments, *rows.shape[1:]) for rows, plan in zip(values, plans, strict=True)
    ]
    outs, flats = _room(states, shapes)
    coalesced(values, plans, outs=outs, divisors=alike(divisors, plans))
    found: list[Sequence[Part]] = [(out,) for out in outs]
    for flat, offsets in flats:
        copies = handed_out(flat, states[next(iter(offsets))].devices)
        for place, offset in offsets.items():
            found[place] = [buffer_of(copy).view(offset, shapes[place]) for copy in copies]
    return [
        tuple([IndexedSlices.of(rows, plan.indices, state.sum_shape) for rows in here])
        for state, plan, here in zip(states, plans, found, strict=True)
    ]


def _room(
    states: Sequence[AccumulatorState], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Buffer], list[tuple[Buffer, dict[int, int]]]]:
    """Memory for each result on the first device of its accumulator.

    Returns:
        That; and the flat buffers in which results that go to the same devices lie: for the place
        of each accumulator there where its result begins.
    """
    outs: dict[int, Buffer] = {}
    groups: dict[tuple[tuple[Device, ...], DType], list[int]] = {}
    for place, state in enumerate(states):
        if state.over_mesh:
            groups.setdefault((state.devices, state.dtype), []).append(place)
        else:
            outs[place] = state.devices[0].empty(shapes[place], state.dtype)
    flats = []
    for (devices, dtype), places in groups.items():
        layout = flat_layout([math.prod(shapes[place]) for place in places], dtype.itemsize)
        flat = devices[0].empty((layout.size,), dtype)
        offsets = dict(zip(places, layout.offsets, strict=True))
        flats.append((flat, offsets))
        outs.update((place, flat.view(offset, shapes[place])) for place, offset in offsets.items())
    return [outs[place] for place in range(len(states))], flats


def _brought_together(
    states: Sequence[AccumulatorState], sums: Sequence[Sequence[SparseSum]]
) -> list[Buffer]:
    """The rows of each state's sums on its first device, one sum behind the other."""
    there: list[Buffer | None] = []
    groups: list[tuple[Device, list[Buffer]]] = []
    for state, totals in zip(states, sums, strict=True):
        rows = [total.rows for total in totals]
        if len(rows) == 1 and rows[0].device is state.devices[0]:
            there.append(rows[0])
        else:
            there.append(None)
            groups.append((state.devices[0], rows))
    brought = iter(rows_together(groups))
    return [next(brought) if rows is None else rows for rows in there]
