"""Accumulates the terms of a tensor's gradient by an aggregation method.

With ADD_N, and for IndexedSlices, all terms are kept until the end and sorted in the order in which
the loss used the tensor. TREE and ACCUMULATE_N add a term when it arrives, and free it.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope, keep_alive_longer
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.device import Device
from gradreduce.sums.aggregation import aggregate, kind_of_term
from gradreduce.sums.aggregators import MultiDeviceSum
from gradreduce.sums.methods import AGGREGATORS, AggregationMethod

UseOrder = tuple[int, int]  # of a use of a tensor: the node, and which of its operands


class TermAccumulator:
    """Accumulates the terms of one tensor's gradient, which are pushed one by one.

    A term is never overwritten, because another tensor may have the same array as a term.

    Args:
        method: how dense terms are combined; see ``AggregationMethod``.
        keep_rows: whether the gradient is IndexedSlices if all terms are. Otherwise it is dense.

    Attributes:
        home: the device of the first term, and of the gradient.
    """

    __slots__ = ("_device_sum", "_held", "_keep_rows", "_kind", "_method", "home")

    def __init__(self, method: AggregationMethod, *, keep_rows: bool = False) -> None:
        self._method = method
        self._keep_rows = keep_rows
        self._held: list[tuple[UseOrder, Any, Device]] = []
        self._device_sum: MultiDeviceSum | None = None
        self._kind: Kind = "native"  # the array type of the sum, which is that of the first term
        self.home: Device | None = None

    def push(self, term: Any, order: UseOrder, device: Device) -> None:
        """Adds the next term; None is ignored.

        Args:
            term: an array or IndexedSlices.
            order: the use of the tensor that the term belongs to.
            device: the device of a term that is a host array.
        """
        if term is None:
            return
        if self.home is None:
            self.home = device
        if isinstance(term, IndexedSlices):
            term = self._to_term(term)
        if self._device_sum is not None:
            self._add(term, device)
            return
        self._held.append((order, term, device))
        if len(self._held) < 2 or self._method is AggregationMethod.ADD_N:
            return
        if not all(isinstance(held, IndexedSlices) for _, held, _ in self._held):
            self._add_held()

    def result(self) -> Any:
        """Returns the gradient: a new sum, or a single term itself; None without terms."""
        if self._device_sum is None:
            if len(self._held) < 2:
                return self._held.pop()[1] if self._held else None
            self._held.sort(key=itemgetter(0))
            rows = [term for _, term, _ in self._held if isinstance(term, IndexedSlices)]
            devices = {device for _, _, device in self._held}
            if len(rows) == len(self._held) and len(devices) == 1:
                self._held = []
                return aggregate(rows, self._method)
            self._add_held()
        device_sum, self._device_sum = self._device_sum, None
        assert device_sum is not None
        return from_buffer(device_sum.result(), self._kind)

    def _to_term(self, rows: IndexedSlices) -> Any:
        """Returns sparse rows as the term to add, dense if needed; ACCUMULATE_N becomes TREE."""
        if self._method is AggregationMethod.EXPERIMENTAL_ACCUMULATE_N:
            self._method = AggregationMethod.EXPERIMENTAL_TREE
            if self._device_sum is not None:
                self._device_sum.use_tree()
        return rows if self._keep_rows else rows.to_dense()

    def _add_held(self) -> None:
        """Adds the terms that were kept so far, and frees them."""
        self._device_sum = MultiDeviceSum(AGGREGATORS[self._method])
        self._kind = kind_of_term(self._held[0][1])
        while self._held:
            _, term, device = self._held.pop(0)
            self._add(term, device)

    def _add(self, term: Any, device: Device) -> None:
        """Adds one term. The stream of its library waits, so the term may be freed."""
        assert self._device_sum is not None
        if isinstance(term, IndexedSlices):
            term = term.to_dense()
        with StreamScope():
            buffer = to_buffer(term, device)
            self._device_sum.check(buffer.shape, buffer.dtype)
            self._device_sum.push(buffer)
            keep_alive_longer(buffer.block)  # the next push may read it
