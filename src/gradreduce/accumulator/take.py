"""What a take hands out: each sum divided, on its device or, over a mesh, on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from gradreduce import ops
from gradreduce.cross_device_ops import CrossDeviceOps
from gradreduce.device import Buffer, Device, DType, gather, scatter
from gradreduce.values import Part

from .dense_sums import lie_together
from .sparse_take import take_sparse
from .state import AccumulatorState

__all__ = ["take_held"]

# Mesh accumulators that travel together: devices, divisor, what reduces them.
_Batch = tuple[tuple[Device, ...], float, CrossDeviceOps]


def take_held(states: Sequence[AccumulatorState]) -> list[tuple[Part, ...]]:
    """Takes the gradient of each state, all locks held; then its count is 0, its step one on.

    What is reduced or divided in place is no sum any more: if anything fails between that and the
    count, the devices are lost.

    Returns:
        For each state its gradient on each of its devices; empty for one that holds none.
    """
    for state in states:  # a take without a launch must notice too
        state.check_devices()
    taken: dict[AccumulatorState, tuple[Part, ...]] = {}
    held = [state for state in states if state.count]
    dense = [state for state in held if not state.sparse]
    alone = {state: _room(state) for state in dense if not state.over_mesh}
    if len(dense) < len(held):  # first, because it writes no sum
        sparse = [state for state in held if state.sparse]
        taken.update(zip(sparse, take_sparse(sparse), strict=True))
    batches: dict[_Batch, list[AccumulatorState]] = {}
    for state in dense:
        if state.over_mesh:
            key = (state.devices, _divisor(state), state.ops)
            batches.setdefault(key, []).append(state)
    with ExitStack() as guard:
        for place, ((_, divisor, reducer), together) in enumerate(batches.items(), 1):
            # A batch asks for its memory before its first launch; but a later one may get none, and
            # then the sums of those before it must be there still. So must those of all batches
            # where sums are divided on one device afterwards.
            last = place == len(batches) and not alone
            reduced = reducer.reduce_buffers(
                _partials(together),
                divisor=divisor,
                out_dtypes=[state.dtype for state in together],
                consume=guard if last else None,
            )
            taken.update(zip(together, reduced, strict=True))
        for state, (_, out) in alone.items():
            taken[state] = (out,)
        _divide(alone, guard)
        for state in states:
            state.emptied()
    return [taken.get(state, ()) for state in states]


def _divisor(state: AccumulatorState) -> float:
    return float(state.count if state.reduction_type == "MEAN" else 1)


def _partials(states: Sequence[AccumulatorState]) -> list[list[Buffer]]:
    """The partial sum of each device; zeros where nothing came, the one place that zeroes.

    The zeros of a device lie together, as sums do that came together: so what is packed, and in
    which order, is a matter of the accumulators and not of who has brought something.
    """
    zeros: dict[tuple[AccumulatorState, int], Buffer] = {}
    for place, device in enumerate(states[0].devices):
        empty: dict[DType, list[AccumulatorState]] = {}
        for state in states:
            if state.totals[place] is None:
                empty.setdefault(state.dtype, []).append(state)
        for dtype, found in empty.items():
            made = lie_together(device.zeros, dtype, [state.sum_shape or () for state in found])
            zeros.update(zip([(state, place) for state in found], made, strict=True))
    return [
        [
            total if isinstance(total, Buffer) else zeros[state, place]
            for place, total in enumerate(state.totals)
        ]
        for state in states
    ]


def _room(state: AccumulatorState) -> tuple[Buffer, Buffer]:
    """The sum on the one device and where its result goes: the sum itself if of its type."""
    (total,) = state.totals
    assert isinstance(total, Buffer), "it holds gradients"
    same = total.dtype == state.dtype
    return total, total if same else total.device.empty(total.shape, state.dtype)


def _divide(alone: dict[AccumulatorState, tuple[Buffer, Buffer]], guard: ExitStack) -> None:
    """``out = total / divisor`` for each sum.

    Co-located devices share a launch. Sums that go elsewhere come first.

    Args:
        alone: for each state the sum, and where its result goes.
        guard: gets what loses the devices of sums that are divided in place, if anything fails.
    """
    apart: list[tuple[float, Buffer, Buffer]] = []
    in_place: list[tuple[float, Buffer, Buffer]] = []
    for state, (total, out) in alone.items():
        divisor = _divisor(state)
        if out is not total:
            apart.append((divisor, total, out))
        elif divisor != 1:
            in_place.append((divisor, total, out))
    if apart:
        _launch(apart)
    if in_place:
        kept = [total.device for _, total, _ in in_place]
        guard.enter_context(kept[0].fabric.whole_or_lost(kept))
        _launch(in_place)


def _launch(divisions: list[tuple[float, Buffer, Buffer]]) -> None:
    """One launch for each physical device, divisor and dtype."""
    launches: dict[tuple[int, float], list[tuple[Buffer, Buffer]]] = {}
    for divisor, total, out in divisions:
        launches.setdefault((total.device.physical, divisor), []).append((total, out))
    for (_, divisor), pairs in launches.items():
        devices = [total.device for total, _ in pairs]
        gather(devices[0], devices)
        ops.all_sum(
            [[out] for _, out in pairs],
            [[total] for total, _ in pairs],
            divisor=divisor,
            device=devices[0],
        )
        scatter(devices[0], devices)
