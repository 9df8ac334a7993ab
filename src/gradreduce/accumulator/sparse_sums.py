"""How sparse gradients get into partial sums: one launch each, whatever rows they touch.

A sum holds the rows that any gradient touched, and no others. They lie in the order in which they
came (``ops/_slots.py``), so a launch adds to those that are there and lays down new ones behind
them. When there is no room left, the rows are copied into twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    by_physical,
    fetch,
    gather,
    scatter,
)
from gradreduce.ops import Indices, Segments, Slots

from .state import AccumulatorState, Arrival, SparseGradient, SparseSum

__all__ = ["SparseAdditions", "prepare_gradient", "prepare_sparse"]


def prepare_sparse(state: AccumulatorState) -> None:
    """Compiles what gradients of the accumulator's dtype launch, and its takes."""
    wide = accumulate_dtype(state.dtype)
    prepare_gradient(state, state.dtype)
    for device in state.devices:
        ops.prepare_pack(device, wide, wide)
        ops.prepare_all_sum(device, state.dtype, state.dtype)
        ops.prepare_segment_sum(device, state.dtype, wide)


def prepare_gradient(state: AccumulatorState, gradient: DType) -> None:
    """Compiles what gradients of a dtype launch: locks are never held while compiling."""
    for device in state.devices:
        ops.prepare_segment_sum(device, accumulate_dtype(state.dtype), gradient)


@dataclass(eq=False)
class _Growing:
    """One partial sum that gradients of a call are added to.

    Attributes:
        state: the accumulator.
        place: of the device in ``state.devices``.
        device: that device.
        total: what is there; None without.
        slots: where its rows lie after the gradients.
        steps: for each gradient its rows, within reach, which of them have the same index, and
            where their sums go.
        values: the memory of the sum after the call.
    """

    state: AccumulatorState
    place: int
    device: Device
    total: SparseSum | None
    slots: Slots
    steps: list[tuple[Buffer, Segments, Indices]] = field(default_factory=list)
    values: Buffer | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether memory is written that holds the sum of before."""
        return self.total is not None and self.values is self.total.values


class SparseAdditions:
    """Gradients on their way into partial sums: with memory and plans, but not added yet.

    What makes it may fail and has changed nothing; then ``launch_apart``, ``launch_in_place`` and
    what ``totals`` gives.

    Args:
        arrivals: of sparse accumulators; all locks are held.

    Attributes:
        kept: devices of the sums that ``launch_in_place`` writes over; none where it has nothing
            to do.
    """

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._sums: dict[tuple[AccumulatorState, int], _Growing] = {}
        for arrival in arrivals:
            for place, gradient in arrival.parts:
                assert isinstance(gradient, SparseGradient)
                self._plan(arrival.state, place, gradient)
        growing = list(self._sums.values())
        _make_room(growing)
        launches: list[tuple[bool, Callable[[], None]]] = []
        for wave in range(max((len(each.steps) for each in growing), default=0)):
            made = _additions([each for each in growing if wave < len(each.steps)], wave)
            launches += sorted(made, key=lambda launch: launch[0])
        # A new sum may share a launch with one in place; then its next gradient comes behind that.
        apart = next((at for at, (writes, _) in enumerate(launches) if writes), len(launches))
        self._apart = [launch for _, launch in launches[:apart]]
        self._in_place = [launch for _, launch in launches[apart:]]
        self.kept = [each.device for each in growing] if self._in_place else []

    def _plan(self, state: AccumulatorState, place: int, gradient: SparseGradient) -> None:
        device = state.devices[place]
        growing = self._sums.get((state, place))
        if growing is None:
            device.fabric.check_usable(device)  # where there are no rows nothing else asks
            total = state.totals[place]
            assert not isinstance(total, Buffer)
            slots = Slots.none() if total is None else total.slots
            growing = self._sums[state, place] = _Growing(state, place, device, total, slots)
        near = fetch(device, gradient.values)
        growing.slots, into = growing.slots.touched(gradient.segments.indices)
        growing.steps.append((near, gradient.segments, into))

    def launch_apart(self) -> None:
        """Adds into new memory, where a failure harms nothing."""
        for launch in self._apart:
            launch()

    def launch_in_place(self) -> None:
        """Adds the rest; what fails half way leaves no sum that anybody may use."""
        for launch in self._in_place:
            launch()

    def totals(self) -> list[tuple[AccumulatorState, int, Buffer | SparseSum | None]]:
        """The sum of each accumulator at each place that got something."""
        return [
            (each.state, each.place, SparseSum(each.slots, each.values))
            for each in self._sums.values()
            if each.values is not None
        ]


def _make_room(growing: Sequence[_Growing]) -> None:
    """Memory for the rows to come; where what is there grows, its rows are copied."""
    moved: list[tuple[Device, Buffer, Buffer]] = []
    for each in growing:
        total, needed = each.total, each.slots.num_rows
        if total is not None and needed <= total.values.shape[0]:
            each.values = total.values
            continue
        row = each.steps[0][0].shape[1:]
        capacity = needed if total is None else max(needed, 2 * total.values.shape[0])
        limit = each.state.shape[0] if each.state.shape else None
        if limit is not None:
            capacity = min(capacity, limit)
        each.values = each.device.empty((capacity, *row), accumulate_dtype(each.state.dtype))
        if total is not None and total.slots.num_rows:
            rows = total.rows
            moved.append((each.device, each.values.view(0, rows.shape), rows))
    for places in by_physical([device for device, _, _ in moved]).values():
        sharing = [moved[place] for place in places]
        devices = [device for device, _, _ in sharing]
        gather(devices[0], devices)
        ops.pack(
            [out for _, out, _ in sharing], [rows for _, _, rows in sharing], device=devices[0]
        )
        scatter(devices[0], devices)


def _additions(growing: Sequence[_Growing], wave: int) -> list[tuple[bool, Callable[[], None]]]:
    """One launch for each physical device: whether it writes in place, and what launches it."""
    launches = []
    for places in by_physical([each.device for each in growing]).values():
        sharing = [growing[place] for place in places]
        steps = [each.steps[wave] for each in sharing]
        devices = [each.device for each in sharing] + [rows.device for rows, _, _ in steps]
        add = ops.ready_segment_sum(
            [each.values for each in sharing if each.values is not None],
            [rows for rows, _, _ in steps],
            [segments for _, segments, _ in steps],
            into=[into for _, _, into in steps],
            device=devices[0],
        )
        launches.append((any(each.is_in_place for each in sharing), _fenced(devices, add)))
    return launches


def _fenced(devices: Sequence[Device], add: Callable[[], None]) -> Callable[[], None]:
    def launch() -> None:
        gather(devices[0], devices)
        add()
        scatter(devices[0], devices)

    return launch
