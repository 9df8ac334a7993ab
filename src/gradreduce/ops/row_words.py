"""Adds rows to sums of words, as real numbers: gathers rows, ``add_words``, and scatters words.

It needs no kernel of its own: if all rows of a gradient have different indices, one launch of
``add_words`` adds them. Otherwise there is one for each number of rows that an index has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, zip_longest
from typing import NamedTuple

import numpy as np

from gradreduce.device import Buffer, Device, DType, by_physical

from .add_n import UNROLLED
from .add_words import add_words
from .exact_sum import exact_sum
from .pack import pack
from .segment_sum import Divisor, segment_sum_command
from .segments import Segments, plan_segments, single_row_segments
from .take_rows import take_rows_command

# Rows of an index that one launch adds: it has an operand for each.
MOST_ROWS = 64
_WordAddition = tuple[list[Buffer], Buffer, list[Buffer]]  # words, flag and terms


class _RowAddition(NamedTuple):
    """Rows that are added to sums of words; see ``add_rows_command``."""

    words: Sequence[Buffer]
    flag: Buffer
    values: Buffer
    segments: Segments
    into: np.ndarray


def negate_zeros(buffers: Sequence[Buffer]) -> None:
    """Makes arrays of zeros -0.0, which changes no sum."""
    for places in by_physical([buffer.device for buffer in buffers]).values():
        here = [buffers[place] for place in places]
        pack(here, here, divisor=-1, device=here[0].device)


def add_rows_command(
    words: Sequence[Sequence[Buffer]],
    flags: Sequence[Buffer],
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    into: Sequence[np.ndarray],
    *,
    device: Device,
) -> Callable[[], None]:
    """Uploads plans, and returns a function that adds rows to rows of words.

    The function adds the rows in segment s of ``values[t]`` to the row ``into[t][s]`` of the sum of
    ``words[t]``, as real numbers, for every tensor t. It launches a gather, ``add_words`` for each
    number of rows that segments have, and a scatter; and again if some have more than
    ``MOST_ROWS``.

    Args:
        words: for each tensor two to eight arrays, ``(rows, …)``.
        flags: see ``add_words``.
        values: one per tensor, ``(num_rows, …)``, of a dtype that ``add_words`` takes as a term.
        segments: one per tensor, with as many rows as ``values``.
        into: for each tensor the row of each segment, int64, without duplicates; ``~row`` means
            the same row: words of a row to which nothing was added are already -0.0.
        device: the device that launches, and that holds the plans. Adds no stream waits.
    """
    tensors = zip(words, flags, values, segments, into, strict=True)
    parts = [_row_additions(_RowAddition(*tensor)) for tensor in tensors if tensor[2].size]
    commands = [
        command
        for wave in zip_longest(*parts)
        for command in _commands([part for part in wave if part], device)
    ]

    def launch() -> None:
        for each in commands:
            each()

    return launch


def _row_additions(whole: _RowAddition) -> Iterator[_RowAddition]:
    """Splits segments of many rows: their sums are added to words of their own, and then these.

    So the time of an addition does not depend on one index that almost all rows have.
    """
    words, flag, values, plan, into = whole
    counts = np.diff(plan.bounds)
    is_long = counts > MOST_ROWS
    if not is_long.any():
        yield whole
        return
    segment = np.repeat(np.arange(counts.size), counts)
    place = np.arange(plan.num_rows) - np.repeat(plan.bounds[:-1], counts)
    rows_of_long, span = is_long[segment], int(counts.max())
    if not is_long.all():
        short = _regrouped(plan, ~rows_of_long, segment)
        yield _RowAddition(words, flag, values, short, into[~is_long])
    pieces = _regrouped(plan, rows_of_long, segment * span + place // MOST_ROWS)
    num_words, num_pieces = len(words), pieces.num_segments
    device, row_shape = words[0].device, values.shape[1:]
    sums = device.zeros((num_words * num_pieces, *row_shape), words[0].dtype)
    negate_zeros([sums])
    own = split_rows(sums, num_words)
    yield _RowAddition(own, flag, values, pieces, np.arange(num_pieces))
    of_pieces = plan_segments(np.tile(pieces.indices // span, num_words))
    yield from _row_additions(_RowAddition(words, flag, sums, of_pieces, into[is_long]))


def _regrouped(plan: Segments, chosen: np.ndarray, labels: np.ndarray) -> Segments:
    """Returns segments of the chosen rows that have the same label."""
    made = plan_segments(labels[chosen])
    return Segments(made.indices, plan.order[chosen][made.order], made.bounds)


def split_rows(rows: Buffer, num_words: int) -> list[Buffer]:
    """Returns the words of rows of which all first words come first, then the second ones."""
    shape, size = (rows.shape[0] // num_words, *rows.shape[1:]), rows.size // num_words
    return [rows.view(word * size, shape) for word in range(num_words)]


def _commands(parts: Sequence[_RowAddition], device: Device) -> list[Callable[[], None]]:
    """Prepares a gather, additions, and a scatter, for one part of each of several tensors."""
    taken: list[tuple[Buffer, Buffer, np.ndarray]] = []  # out, array and the rows to take
    put: list[tuple[Buffer, Buffer, Segments, np.ndarray]] = []  # array, values and their rows
    additions: list[list[_WordAddition]] = []
    for words, flag, rows, plan, into in parts:
        by_count, order, levels = _levels(plan, rows.shape[0])
        targets = np.where(into < 0, ~into, into)[by_count]
        each_once, row_shape = single_row_segments(plan.num_segments), rows.shape[1:]
        held = [device.empty((plan.num_segments, *row_shape), word.dtype) for word in words]
        terms = rows
        taken += [(part, word, targets) for part, word in zip(held, words, strict=True)]
        if order is not None:
            terms = device.empty((plan.num_rows, *row_shape), rows.dtype)
            taken.append((terms, rows, order))
        put += [(word, part, each_once, targets) for part, word in zip(held, words, strict=True)]
        start, width, of_tensor = 0, terms.size // plan.num_rows, list[_WordAddition]()
        for num_segments, num_levels in levels:
            shape, size = (num_segments, *row_shape), num_segments * width
            starts = range(start, start + num_levels * size, size)
            inputs = terms.parts(starts, [size] * num_levels, [shape] * num_levels)
            of_tensor.append(([part.view(0, shape) for part in held], flag, inputs))
            start += num_levels * size
        additions.append(of_tensor)
    take = take_rows_command(*zip(*taken, strict=True), device=device)
    outs, sources, plans, rows_of = zip(*put, strict=True)
    write = segment_sum_command(outs, sources, plans, into=rows_of, device=device)
    adds = [
        partial(add_words, *zip(*[each for each in wave if each], strict=True), device=device)
        for wave in zip_longest(*additions)
    ]
    return [take, *adds, write]


def _levels(
    plan: Segments, num_rows: int
) -> tuple[np.ndarray, np.ndarray | None, list[tuple[int, int]]]:
    """Groups the rows of segments by their place in the segment, their level.

    Args:
        plan: the segments, of all rows of an array or of some.
        num_rows: the number of rows of the array.

    Returns:
        The segments, those with the most rows first; the rows, level by level, each in this order
        of segments, or None for all rows in their own order; and the number of segments that have
        rows of each level, and of how many levels it is the number.
    """
    if plan.num_segments == plan.num_rows == num_rows:
        segment = np.empty_like(plan.order)
        segment[plan.order] = np.arange(plan.num_rows)
        return segment, None, [(plan.num_rows, 1)]
    counts = np.diff(plan.bounds)
    by_count = np.argsort(-counts, kind="stable")
    ranked, starts = counts[by_count], plan.bounds[:-1][by_count]
    firsts = np.cumsum(ranked) - ranked
    level = np.arange(plan.num_rows) - np.repeat(firsts, ranked)
    rows = plan.order[np.repeat(starts, ranked) + level]
    tops = np.unique(counts)
    num_segments = np.searchsorted(-ranked, -tops, side="right")
    groups = zip(num_segments.tolist(), np.diff(tops, prepend=0).tolist(), strict=True)
    return by_count, rows[np.argsort(level, kind="stable")], list(groups)


def sum_rows(
    out: Buffer,
    rows: Sequence[Buffer],
    segments: Segments,
    divisor: Divisor,
    flag: Buffer | None = None,
) -> None:
    """Adds rows of words as real numbers, rounds each sum once, and divides it.

    A sum that is not divided by 1 is rounded to the accumulate dtype, and divided there, before it
    is rounded to the output's dtype. Launches a gather unless all segments have one row,
    ``exact_sum`` for each number of rows that segments have, and a scatter; a few more if rows have
    different divisors.

    Args:
        out: ``(num_segments, …)``; overwritten. Its device launches.
        rows: the words of the rows, ``(num_rows, …)`` each.
        segments: the rows that are added.
        divisor: see ``segment_sum_command``.
        flag: for rows of float64; see ``exact_sum``.
    """
    if not out.size:
        return
    home, dtype = out.device, rows[0].dtype
    by_count, order, levels = _levels(segments, rows[0].shape[0])
    words = rows
    if order is not None:
        words = [home.empty((segments.num_rows, *out.shape[1:]), dtype) for _ in rows]
        take_rows_command(words, rows, [order] * len(rows), device=home)()
    each_once = single_row_segments(segments.num_segments)
    by = 1.0 if isinstance(divisor, np.ndarray) else divisor
    rounded = partial(_rounded, words, levels, out, flag)
    sums = rounded(out.dtype, by)
    segment_sum_command([out], [sums], [each_once], into=[by_count], device=home)()
    if isinstance(divisor, np.ndarray):
        if sums.dtype != dtype:
            sums = rounded(dtype)
        divisors = divisor[by_count]
        divided = np.flatnonzero(divisors != 1)
        places = np.concatenate([divided, np.flatnonzero(divisors == 1)])
        plan = Segments(divided, places, np.arange(divided.size + 1))
        segment_sum_command(
            [out], [sums], [plan], into=[by_count[divided]], divisor=[divisors[divided]],
            device=home,
        )()  # fmt: skip


def segments_for_all_kernels(num_words: int) -> Segments:
    """Returns segments of so few and so many rows that all kernels of this module add them."""
    sizes = [*range(1, UNROLLED // num_words + 2), MOST_ROWS + 1]
    return plan_segments(np.repeat(np.arange(len(sizes)), sizes))


def _rounded(
    words: Sequence[Buffer],
    levels: Sequence[tuple[int, int]],
    like: Buffer,
    flag: Buffer | None,
    dtype: DType,
    divisor: float = 1,
) -> Buffer:
    """Returns the sum of each segment, rounded and divided, in the order of ``_levels``.

    Args:
        words: the words of the rows, in the order of ``_levels``.
        levels: from ``_levels``.
        like: has the shape of the result, and its device.
        flag: see ``sum_rows``.
        dtype: the dtype of the result.
        divisor: divides all sums.
    """
    sums, width = like.device.empty(like.shape, dtype), like.size // like.shape[0]
    sizes = [num_segments for num_segments, count in levels for _ in range(count)]
    starts = [0, *accumulate(sizes)]
    outs, inputs = [], []
    for level, (size, after) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
        if size > after:  # these segments have no row of a later level
            shape = (size - after, *like.shape[1:])
            outs.append([sums.view(after * width, shape)])
            inputs.append(
                [word.view((start + after) * width, shape)
                 for start in starts[: level + 1] for word in words]
            )  # fmt: skip
    flags = () if flag is None else [flag] * len(outs)
    exact_sum(outs, inputs, divisor=divisor, flags=flags, device=like.device)
    return sums
