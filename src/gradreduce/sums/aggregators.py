"""Aggregators: sum terms pushed one by one, or the terms of many gradients at once.

The order of additions depends only on the method: ADD_N and ACCUMULATE_N add left to right, TREE
adds pairs and pairs of pairs, like a binary counter: after 6 terms it holds the sums of t0 to t3
and of t4 and t5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from gradreduce import ops
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    ensure_accessible,
)
from gradreduce.errors import MixedDtypesError


class Aggregator(ABC):
    """Base class: sums terms on one device that are pushed one by one.

    A term is not written, and is dropped as soon as it is added. Sums have the accumulate dtype
    until the end.

    Attributes:
        dtype_error: the error class for terms of different dtypes.
    """

    dtype_error: ClassVar[type[Exception]] = TypeError

    @abstractmethod
    def push(self, term: Buffer) -> None:
        """Adds the next term."""

    def add_weighted(self, term: Buffer, weight: float) -> None:
        """Adds the next term times its weight; all terms of a sum have weights, or none."""
        self.push(scaled(term, weight))

    @abstractmethod
    def total(self, dtype: DType) -> Buffer:
        """Returns the sum in ``dtype``, rounded once; may be a single term itself."""


class AddN(Aggregator):
    """Sums all terms in one launch; keeps them until then."""

    def __init__(self) -> None:
        self._terms: list[Buffer] = []

    def push(self, term: Buffer) -> None:
        """See ``Aggregator.push``; keeps the term until the end."""
        self._terms.append(term)

    def total(self, dtype: DType) -> Buffer:
        """See ``Aggregator.total``."""
        if len(self._terms) == 1:
            return round_to(self._terms[0], dtype)
        return ops.add_into_new(self._terms, dtype)


class Tree(Aggregator):
    """Sums in pairs, and pairs of pairs: error and memory grow with log n.

    With n > 2 terms at most ⌈log2 n⌉ + 1 buffers of the accumulate dtype are alive, including the
    last term: the sum of a pair is added into the sum of the pair before it, if there is one.
    """

    def __init__(self) -> None:
        # [0]: a term that waits for the next one; [k]: the sum of 2**k terms, in our own memory
        self._sums: list[Buffer | None] = [None, None]

    def push(self, term: Buffer) -> None:
        """See ``Aggregator.push``; every second term is kept until the next one comes."""
        sums = self._sums
        if sums[0] is None:
            sums[0] = term
            return
        left, sums[0] = sums[0], None
        carried = sums[1]
        if carried is not None and term.dtype == carried.dtype:
            ops.all_sum([[carried]], [[carried, left, term]], split=1)
            sums[1] = None
            level = 2
        else:
            carried = _sum_of_pair(left, term)
            level = 1
        while level < len(sums) and (older := sums[level]) is not None:
            ops.accumulate_n([older], [[carried]])
            carried, sums[level] = older, None
            level += 1
        if level == len(sums):
            sums.append(None)
        sums[level] = carried

    def total(self, dtype: DType) -> Buffer:
        """See ``Aggregator.total``; adds the remaining sums, the smallest first."""
        left = [held for held in self._sums if held is not None]
        total = left[0]
        for older in left[1:]:
            ops.accumulate_n([older], [[total]])
            total = older
        return round_to(total, dtype)


class OneBuffer(Tree):
    """Sums into a single buffer; at most three buffers are alive at a time."""

    dtype_error = MixedDtypesError

    def push(self, term: Buffer) -> None:
        """See ``Aggregator.push``; keeps the first term until the second one comes."""
        first, total = self._sums
        if total is not None:
            ops.accumulate_n([total], [[term]])
        elif first is None:
            self._sums[0] = term
        else:
            self._sums[:] = None, _sum_of_pair(first, term)

    def add_weighted(self, term: Buffer, weight: float) -> None:
        """See ``Aggregator.add_weighted``; one launch multiplies and adds."""
        total = self._sums[1]
        if total is None:
            self._sums[1] = scaled(term, weight)
        else:
            ops.add_scaled([total], [term], weight, device=total.device)


class MultiDeviceSum:
    """Sums the terms of one gradient on any number of devices.

    Terms on one device are added there. The partial sums are added on the device of the first term,
    in the order in which their devices appeared; those that it cannot read are copied to it.

    Args:
        aggregator: the class that adds the terms of one device.

    Attributes:
        count: the number of terms that were checked so far.
    """

    def __init__(self, aggregator: type[Aggregator]) -> None:
        self.count = 0
        self._aggregator = aggregator
        self._dtype_error = aggregator.dtype_error
        self._like: tuple[tuple[int, ...], DType] | None = None
        self._parts: dict[Device, Aggregator] = {}

    def check(self, shape: tuple[int, ...], dtype: DType) -> None:
        """Raises unless the shape and dtype are those of the first term."""
        if self._like is None:
            self._like = (shape, dtype)
        wanted_shape, wanted_dtype = self._like
        if dtype != wanted_dtype:
            raise self._dtype_error(
                f"inputs have dtypes that don't all match: input 0 is {wanted_dtype}, input "
                f"{self.count} is {dtype}"
            )
        if shape != wanted_shape:
            raise ValueError(
                "inputs must have the same size and shape (nothing is broadcast). Input 0: "
                f"{list(wanted_shape)} != input {self.count}: {list(shape)}"
            )
        self.count += 1

    def use_tree(self) -> None:
        """Adds later terms in pairs, if the method is ``OneBuffer``."""
        if self._aggregator is OneBuffer:
            self._aggregator = Tree
            for device, part in self._parts.items():
                assert isinstance(part, OneBuffer)
                tree = self._parts[device] = Tree()
                tree._sums = part._sums  # the sum so far counts as one pair

    def push(self, term: Buffer, weight: float | None = None) -> None:
        """Adds a term on its own device; times its weight, if all terms have weights."""
        part = self._parts.get(term.device)
        if part is None:
            part = self._parts[term.device] = self._aggregator()
        if weight is None:
            part.push(term)
        else:
            part.add_weighted(term, weight)

    def result(self) -> Buffer:
        """Returns the sum, on the device of the first term."""
        assert self._like is not None
        dtype = self._like[1]
        home, first = next(iter(self._parts.items()))
        if len(self._parts) == 1:
            return first.total(dtype)
        partial_sums = [part.total(accumulate_dtype(dtype)) for part in self._parts.values()]
        read = [ensure_accessible(home, partial_sum) for partial_sum in partial_sums]
        total = home.empty(*self._like)
        ops.all_sum([[total]], [read], device=home)
        return total


def aggregate_buffers(
    gradients: Sequence[Sequence[Buffer]], device: Device, *, tree: bool = False
) -> list[Buffer]:
    """Sums each list of terms, with the same launches for all lists.

    All terms are known, so ADD_N and ACCUMULATE_N both add left to right in one pass.

    Args:
        gradients: the terms of each gradient: at least one, all of one shape and dtype.
        device: the device that launches. It can access all terms.
        tree: add pairs instead of left to right.

    Returns:
        One Buffer for each gradient, on the device of its first term: a new one, or the term itself
        if there is only one.
    """
    sums = [terms[0] for terms in gradients]
    direct, folded = [], []
    for index, terms in enumerate(gradients):
        if len(terms) > 2 and tree:
            folded.append(index)
        elif len(terms) > 1:
            direct.append(index)
            sums[index] = _empty_like(sums[index], sums[index].dtype)
    ops.add_n(
        [sums[index] for index in direct], [gradients[index] for index in direct], device=device
    )
    rounded = []
    totals = _sum_tree([gradients[index] for index in folded], device) if folded else []
    for index, total in zip(folded, totals, strict=True):
        sums[index] = total
        if total.dtype != gradients[index][0].dtype:
            sums[index] = _empty_like(total, gradients[index][0].dtype)
            rounded.append((sums[index], total))
    ops.pack([out for out, _ in rounded], [total for _, total in rounded], device=device)
    return sums


def _sum_tree(gradients: Sequence[Sequence[Buffer]], device: Device) -> list[Buffer]:
    """Sums pairs, then pairs of pairs; the launches of a level serve all gradients.

    The sum of two terms is a new buffer; the sum of two sums is written into the left one. The
    additions are those of ``Tree``, level by level, in the accumulate dtype.
    """
    levels = [list(terms) for terms in gradients]
    first = True
    while any(len(level) > 1 for level in levels):
        pairs = [pair for level in levels for pair in zip(level[::2], level[1::2], strict=False)]
        if first:
            sums = [_empty_like(left, accumulate_dtype(left.dtype)) for left, _ in pairs]
            ops.add_n(sums, pairs, device=device)
        else:
            sums = [left for left, _ in pairs]
            ops.accumulate_n(sums, [[right] for _, right in pairs], device=device)
        first = False
        remaining = iter(sums)
        levels = [
            [next(remaining) for _ in range(len(level) // 2)] + level[len(level) // 2 * 2 :]
            for level in levels
        ]
    return [level[0] for level in levels]


def _sum_of_pair(left: Buffer, right: Buffer) -> Buffer:
    """Adds two terms in new memory, in the accumulate dtype."""
    total = _empty_like(left, accumulate_dtype(left.dtype))
    ops.add_n([total], [[left, right]])
    return total


def scaled(term: Buffer, weight: float) -> Buffer:
    """Returns a term times its weight, in the accumulate dtype and new memory on its device."""
    out = _empty_like(term, accumulate_dtype(term.dtype))
    if term.size:
        ops.scale([out], [term], weight, device=term.device)
    return out


def round_to(total: Buffer, dtype: DType) -> Buffer:
    """Returns a sum in another dtype, in new memory; itself if it has the dtype."""
    if total.dtype == dtype:
        return total
    made = _empty_like(total, dtype)
    ops.pack([made], [total])
    return made


def _empty_like(buffer: Buffer, dtype: DType) -> Buffer:
    return buffer.device.empty(buffer.shape, dtype)
