"""Plans which tensors share a flat buffer, its packs, and the stages of their transfer.

A plan depends on sizes, dtypes and settings, but not on data or devices. A *flat buffer* contains
tensors of one dtype end to end. A *pack* is a range of it that is reduced as one (in DDP: a
bucket). A tensor may be divided between two packs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gradreduce.device import (
    ALIGNMENT,
    DType,
    FlatLayout,
    accumulate_dtype,
    cached_property,
    flat_layout,
    group_by,
)

# Packs that are moved are added to a stage until it has at least this many bytes of one replica. A
# stage costs the host two launches and a few waits on each device: about 100 us for eight GPUs, at
# 5 us for a launch. 8 MiB take 35 us at 400 GB/s. Computed, not measured on GPUs.
STAGE_BYTES = 8 * 1024 * 1024


class Share(NamedTuple):
    """The devices that send and receive a flat buffer.

    Attributes:
        owner: in a reduce-scatter or all-gather, the number of the replica that owns it, counted
            over all processes. None: an all-reduce.
        senders: the devices of this process that have the input.
        receivers: the devices of this process that get the output.
    """

    owner: int | None = None
    senders: slice = slice(None)
    receivers: slice = slice(None)


EVERYONE = Share()


@dataclass(frozen=True)
class FlatPlan:
    """Layout of one flat buffer: its tensors, dtypes and packs.

    Attributes:
        tensors: the positions of its tensors in the batch, in order.
        dtype: the dtype of the gradients.
        wire: the dtype in which they are transferred.
        out_dtype: the dtype of the results.
        layout: the position of each tensor, in elements; on vector boundaries in all dtypes.
        packs: ``(start, stop)`` elements of each pack, in order, none empty; on vector boundaries
            in all dtypes.
        together: False for a tensor that is reduced alone and need not be copied to a flat buffer.
        divides_early: whether the tensors are divided when they are moved into the flat buffer,
            and not their sums. All tensors are moved.
        is_weighted: whether the tensors are multiplied by the weights of their replicas when they
            are moved into the flat buffer. All tensors are moved.
        share: the senders and receivers.
    """

    tensors: tuple[int, ...]
    dtype: DType
    wire: DType
    out_dtype: DType
    layout: FlatLayout
    packs: tuple[tuple[int, int], ...]
    together: bool
    divides_early: bool = False
    is_weighted: bool = False
    share: Share = EVERYONE

    @cached_property
    def sum_dtype(self) -> DType:
        """The dtype in which a sum is written: the narrower of wire and result.

        A sum for a narrower result is rounded once, by the kernel; a wider result is cast on its
        own device.
        """
        return self.out_dtype if self.out_dtype.itemsize < self.wire.itemsize else self.wire

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some bytes of the flat buffer belong to no tensor."""
        return self.layout.size != sum(self.layout.sizes)

    @cached_property
    def pieces(self) -> dict[tuple[int, int], Pieces]:
        """For each pack, and for the whole, the tensors or parts of tensors in it."""
        ranges = dict.fromkeys([*self.packs, (0, self.layout.size)])
        return {each: _pieces(self.layout, *each) for each in ranges}


class Pieces(NamedTuple):
    """The tensors, or parts of them, in a range of a flat buffer.

    Attributes:
        tensors: indices into the plan's ``tensors``.
        begins: the first element of each in the flat buffer.
        spans: the number of elements of each in the flat buffer, with the gap after it.
        sizes: the number of elements without gaps.
        cut: for parts of a tensor: the index in ``tensors``, and the first element in the tensor.
    """

    tensors: list[int]
    begins: list[int]
    spans: list[int]
    sizes: list[int]
    cut: list[tuple[int, int]]


def _pieces(layout: FlatLayout, start: int, stop: int) -> Pieces:
    pieces = Pieces([], [], [], [], [])
    first = bisect_right(layout.offsets, start) - 1
    for index in range(first, bisect_left(layout.offsets, stop)):
        offset, size = layout.offsets[index], layout.sizes[index]
        begin, end = max(offset, start), min(offset + layout.spans[index], stop)
        if begin < end:
            part = min(end - offset, size) - (begin - offset)
            if part != size:
                pieces.cut.append((len(pieces.tensors), begin - offset))
            pieces.tensors.append(index)
            pieces.begins.append(begin)
            pieces.spans.append(end - begin)
            pieces.sizes.append(part)
    return pieces


def is_real_float(dtype: DType) -> bool:
    """Whether this is a real floating-point dtype (bfloat16 has kind ``V``)."""
    return dtype.kind not in "iuc"


def is_half(dtype: DType) -> bool:
    """Whether this is a 16-bit float, whose sums may overflow or lose precision."""
    return dtype.itemsize == 2 and is_real_float(dtype)


def plan_packing(  # noqa: PLR0913  # all of it determines the layout
    sizes: Sequence[int],
    dtypes: Sequence[tuple[DType, DType]],
    num_packs: int,
    small_max_bytes: int,
    small_max_group: int,
    wire: DType | None = None,
    *,
    divides: bool = False,
    is_weighted: bool = False,
    share: Share = EVERYONE,
    num_before: int = 0,
) -> tuple[FlatPlan, ...]:
    """Plans which tensors of a batch share a flat buffer, and its packs.

    1. ``num_packs`` above 0: one flat buffer for each dtype, tensors in batch order, cut into
       that many packs that are equal to within 16 bytes; fewer if there are fewer 16-byte units.
    2. Otherwise, with both ``small`` limits above 0: tensors of at most ``small_max_bytes`` are
       grouped by dtype, in batch order, at most ``small_max_group`` to a group.
    3. All other tensors are reduced alone, and so is the only member of a group.

    Args:
        sizes: the number of elements of each tensor of the batch.
        dtypes: for each tensor the dtype of the gradient and of the result.
        num_packs: see above.
        small_max_bytes: see above.
        small_max_group: see above.
        wire: the dtype in which real floats are transferred; default: their own dtype, or the
            accumulate dtype if they are weighted.
        divides: whether the sums are divided; on a 16-bit wire, where a sum may overflow, the terms
            are.
        is_weighted: whether the replicas have weights.
        share: the senders and receivers of the tensors.
        num_before: the number of tensors of other shares before these in the batch.

    Returns:
        The plans; every tensor of the batch is in exactly one.
    """
    plans = []
    for pair, tensors in group_by([(pair, tensor) for tensor, pair in enumerate(dtypes)]).items():
        groups = [tensors]
        if num_packs == 0:
            groups = _small_groups(tensors, sizes, pair[0], small_max_bytes, small_max_group)
        for group in groups:
            carried = accumulate_dtype(pair[0]) if is_weighted else pair[0]
            if wire is not None and is_real_float(pair[0]):
                carried = wire
            narrowest = min(dtype.itemsize for dtype in (*pair, carried))
            together = num_packs > 0 or len(group) > 1
            if together:
                layout = flat_layout([sizes[tensor] for tensor in group], narrowest)
                cuts = _cut(layout.size, narrowest, num_packs)
            else:  # no gap after a tensor that is not moved
                size = sizes[group[0]]
                layout = FlatLayout((0,), (size,), (size,), size)
                cuts = ((0, size),) if size else ()
            early = divides and wire is not None and carried == wire and is_half(wire)
            places = tuple([num_before + tensor for tensor in group])
            plans.append(
                FlatPlan(
                    places, pair[0], carried, pair[1], layout, cuts, together,
                    divides_early=early, is_weighted=is_weighted, share=share,
                )
            )  # fmt: skip
    return tuple(plans)


def _small_groups(
    tensors: list[int], sizes: Sequence[int], dtype: DType, max_bytes: int, max_group: int
) -> list[list[int]]:
    """Groups small tensors, in the order of their first members; the others stay alone."""
    groups: list[list[int]] = []
    open_group: list[int] | None = None
    for tensor in tensors:
        small = 0 < sizes[tensor] * dtype.itemsize <= max_bytes
        if small and open_group is not None and len(open_group) < max_group:
            open_group.append(tensor)
            continue
        groups.append([tensor])
        if small:
            open_group = groups[-1]
    return groups


def _cut(size: int, itemsize: int, num_packs: int) -> tuple[tuple[int, int], ...]:
    """Cuts ``size`` elements into 1 to ``num_packs`` ranges of whole 16-byte units."""
    unit = ALIGNMENT // itemsize
    units = -(-size // unit)
    count = min(max(1, num_packs), units)
    ends = [units * pack // count * unit for pack in range(count)] + [size] if units else []
    return tuple(pairwise(ends))


def plan_stages(packs: Sequence[tuple[int, bool]], stage_bytes: int) -> list[list[int]]:
    """Plans the stages: one is packed while the one before it is transferred.

    Args:
        packs: for each pack the bytes of one replica, and whether it must be moved.
        stage_bytes: packs that are moved are added to a stage until it has this many bytes.

    Returns:
        The indices of the packs of each stage. Packs that are not moved are in the first.
    """
    stages: list[list[int]] = [[]]
    filled = 0
    for index, (nbytes, moved) in enumerate(packs):
        if not moved:
            stages[0].append(index)
            continue
        if filled >= stage_bytes:
            stages.append([])
            filled = 0
        stages[-1].append(index)
        filled += nbytes
    return stages
