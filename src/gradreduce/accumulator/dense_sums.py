"""How dense gradients get into partial sums: as few launches as there are GPUs.

The first gradient after a take is a cast copy into new memory, later ones are added in place:
nothing is zeroed and nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    by_physical,
    fetch,
    flat_layout,
    gather,
    scatter,
)

from .state import AccumulatorState, Arrival

__all__ = ["add_dense", "prepare_arrivals"]


def prepare_arrivals(devices: Sequence[Device], dtype: DType, gradient: DType) -> None:
    """Compiles what gradients of one dtype launch: locks are never held while compiling.

    Args:
        devices: of the partial sums.
        dtype: of the accumulator.
        gradient: of the gradients.
    """
    wide = accumulate_dtype(dtype)
    for device in devices:
        ops.prepare_add_n(device, wide, gradient, 1)
        ops.prepare_accumulate_n(device, wide, gradient)


@dataclass(slots=True)
class _Addition:
    """One gradient on its way into one partial sum.

    Attributes:
        state: the accumulator.
        place: of the device in ``state.devices``.
        device: that device.
        gradient: within its reach.
        total: the partial sum; None until there is one.
    """

    state: AccumulatorState
    place: int
    device: Device
    gradient: Buffer
    total: Buffer | None


def add_dense(arrivals: Sequence[Arrival]) -> None:
    """First arrivals are copied, later ones added; co-located devices share launches."""
    additions = []
    for arrival in arrivals:
        state = arrival.state
        for place, gradient in arrival.parts:
            device = state.devices[place]
            near = fetch(device, gradient)
            additions.append(_Addition(state, place, device, near, state.totals[place]))
    fresh = [addition for addition in additions if addition.total is None]
    later = [addition for addition in additions if addition.total is not None]
    _make_room(fresh)
    _add(ops.cast_fitted, fresh)
    if later:
        devices = [addition.device for addition in later]
        with devices[0].fabric.whole_or_lost(devices):
            _add(ops.accumulate_fitted, later)
    for addition in fresh:
        addition.state.totals[addition.place] = addition.total


def _add(kernel: Callable[..., None], additions: Sequence[_Addition]) -> None:
    """One launch for each physical device; sums are ours alone and were made to fit."""
    for places in by_physical([addition.device for addition in additions]).values():
        sharing = [additions[place] for place in places]
        involved = [addition.device for addition in sharing]
        involved += [addition.gradient.device for addition in sharing]
        gather(involved[0], involved)
        totals = [addition.total for addition in sharing]
        kernel(totals, [addition.gradient for addition in sharing], device=involved[0])
        scatter(involved[0], involved)


def _make_room(fresh: Sequence[_Addition]) -> None:
    """New sums, end to end in flat buffers: at a joint take they need not be packed again."""
    together: dict[tuple[Device, DType], list[_Addition]] = {}
    for addition in fresh:
        together.setdefault((addition.device, addition.state.dtype), []).append(addition)
    for (device, dtype), additions in together.items():
        if len(additions) == 1 and not additions[0].state.over_mesh:  # no take packs it
            shape = additions[0].gradient.shape
            additions[0].total = device.empty(shape, accumulate_dtype(dtype))
            continue
        layout = flat_layout([each.gradient.size for each in additions], dtype.itemsize)
        flat = device.empty((layout.size,), accumulate_dtype(dtype))
        for offset, addition in zip(layout.offsets, additions, strict=True):
            addition.total = flat.view(offset, addition.gradient.shape)
