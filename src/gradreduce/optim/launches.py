"""How a rule reaches the copies of all variables on one physical device; knows no rule.

A sparse gradient is merged first, row by row, and what it touches is taken out of the variable and
its slots: those rows are an update like any other, in the same launch, and are put back. So a rule
needs no second face, and rows of the gradient get the bits that a dense update gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce import ops
from gradreduce.device import Buffer, Device, Writer, gather, scatter
from gradreduce.indexed_slices import IndexedSlices
from gradreduce.ops import Update
from gradreduce.values import Part, device_of

__all__ = ["Job", "Rule", "by_kernel"]

Rule = Callable[[Sequence[Update], Device], None]


def by_kernel(
    kernel: ops.RuleKernel, scalars: Sequence[float], writer: Writer | None = None
) -> Rule:
    """A rule that is a kernel, with all that it takes behind ``num_written``."""
    return lambda rows, at: ops.update_fitted(kernel, rows, scalars, at, writer=writer)


class Job:
    """One update of the copies on one physical device: has all its memory, and every plan there.

    Args:
        written: for each copy of a variable what an update of it writes, the variable first.
        gradients: of each copy, on the same physical device.

    Attributes:
        leader: whose compute queue launches: that of the first copy.
        updates: what a rule is given.
        is_dense: whether these are all of ``written``, in its order.
    """

    def __init__(self, written: Sequence[list[Buffer]], gradients: Sequence[Part]) -> None:
        self.leader = written[0][0].device
        pairs = list(zip(written, gradients, strict=True))
        self.updates: list[Update] = [
            [*operands, part] for operands, part in pairs if type(part) is Buffer
        ]
        leader = self.leader
        self._devices = dict.fromkeys([leader])
        for place in (0, -1):
            others = [row[place].device for row in self.updates if row[place].device is not leader]
            self._devices |= dict.fromkeys(others)
        self._take, self._put_back = _nothing, _nothing
        self.is_dense = len(self.updates) == len(pairs)
        if not self.is_dense:
            self._add_sparse(
                [(operands, part) for operands, part in pairs if isinstance(part, IndexedSlices)]
            )

    def _add_sparse(self, pairs: Sequence[tuple[list[Buffer], IndexedSlices]]) -> None:
        self._devices |= dict.fromkeys([row[0].device for row, _ in pairs])
        self._devices |= dict.fromkeys([device_of(part) for _, part in pairs])
        rows = [_Rows(operands, part, self.leader) for operands, part in pairs if part.values.size]
        self.updates += [row.update for row in rows]
        if rows:
            self._take, self._put_back = _ready(rows, self.leader)

    def begin(self) -> None:
        """Comes behind all other devices, and takes out the rows that sparse gradients touch."""
        gather(self.leader, self._devices)
        self._take()

    def end(self, rule: Rule) -> None:
        """Launches the rule, puts rows back, and lets the other devices come behind."""
        rule(self.updates, self.leader)
        self._put_back()
        scatter(self.leader, self._devices)

    def run(self, rule: Rule) -> None:
        """Both; launches, and only that."""
        self.begin()
        self.end(rule)


class _Rows:
    """The rows that a sparse gradient touches: of itself, and of the variable and its slots.

    Attributes:
        written: whole: the variable, its master, its slots.
        segments: of the gradient's rows.
        merged: new memory for its rows, each index once.
        taken: new memory for those rows of what is written.
    """

    def __init__(self, written: list[Buffer], slices: IndexedSlices, leader: Device) -> None:
        self.written, self.given = written, slices.values
        self.segments = ops.plan_segments(slices.indices)
        shape = (self.segments.num_segments, *written[0].shape[1:])
        self.merged = leader.empty(shape, self.given.dtype)
        self.taken = [leader.empty(shape, operand.dtype) for operand in written]

    @property
    def update(self) -> Update:
        """The rows as a rule takes them."""
        return [*self.taken, self.merged]


def _ready(rows: Sequence[_Rows], leader: Device) -> tuple[Callable[[], None], Callable[[], None]]:
    """What takes rows out, and what puts them back."""
    for dtype in {buffer.dtype for row in rows for buffer in row.update}:
        ops.prepare_segment_sum(leader, dtype, dtype)
        ops.prepare_take_rows(leader, dtype)
    merge = ops.ready_segment_sum(
        [row.merged for row in rows],
        [row.given for row in rows],
        [row.segments for row in rows],
        device=leader,
    )
    pairs = [
        (row, whole, part)
        for row in rows
        for whole, part in zip(row.written, row.taken, strict=True)
    ]
    take = ops.ready_take_rows(
        [part for _, _, part in pairs],
        [whole for _, whole, _ in pairs],
        [row.segments.indices for row, _, _ in pairs],
        device=leader,
    )
    put_back = ops.ready_segment_sum(
        [whole for _, whole, _ in pairs],
        [part for _, _, part in pairs],
        [ops.each_row(row.segments.num_segments) for row, _, _ in pairs],
        into=[row.segments.indices for row, _, _ in pairs],
        device=leader,
    )

    def begin() -> None:
        merge()
        take()

    return begin, put_back


def _nothing() -> None:
    """No gradient is sparse."""
