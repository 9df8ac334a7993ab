"""Accumulates the terms of a tensor's gradient by an aggregation method.

ADD_N and IndexedSlices are held until the end and sorted in the order of the forward uses; TREE and
ACCUMULATE_N add a term when it arrives, and release it.
"""

from __future__ import annotations

from typing import Any

from gradreduce.arrays.caller_streams import StreamScope, keep_alive_longer
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.trace_context import Traceable
from gradreduce.device import Device
from gradreduce.reduce.aggregation import AggregationMethod, aggregate, aggregator_of, kind_of_term
from gradreduce.reduce.aggregators import MultiDeviceSum

Order = tuple[int, int]  # of the use: which node, and which of its operands


class TermAccumulator:
    """Accumulates the terms of one tensor's gradient, pushed one by one.

    A term is only read: another tensor may have the same term.

    Args:
        method: how dense terms are combined; see ``AggregationMethod``.
        keep_rows: whether the gradient is IndexedSlices if all terms are; else it is dense.

    Attributes:
        home: the device of the first term, and of the gradient.
    """

    __slots__ = ("_device_sum", "_held", "_keep_rows", "_kind", "_method", "home")

    def __init__(self, method: AggregationMethod, *, keep_rows: bool = False) -> None:
        self._method = method
        self._keep_rows = keep_rows
        self._held: list[tuple[Order, Any, Device]] = []
        self._device_sum: MultiDeviceSum | None = None
        self._kind: Kind = "native"  # of the sum: that of the first term
        self.home: Device | None = None

    def push(self, term: Any, order: Order, device: Device) -> None:
        """Adds the next term; None is ignored.

        Args:
            term: an array, a traced value, or IndexedSlices.
            order: of the use that it comes from.
            device: the term's device, if the term does not have one itself.
        """
        if term is None:
            return
        if self.home is None:
            self.home = device
        if isinstance(term, IndexedSlices):
            term = self._taken(term)
        if self._device_sum is not None and isinstance(term, Traceable):
            self._held = [((-1, -1), self.result(), device)]  # traced terms are added all at once
        if self._device_sum is None:
            self._held.append((order, term, device))
            if len(self._held) > 1 and self._streams():
                self._device_sum = MultiDeviceSum(aggregator_of(self._method))
                self._kind = kind_of_term(self._held[0][1])
                while self._held:
                    _, first, its_device = self._held.pop(0)
                    self._add(first, its_device)
        else:
            self._add(term, device)

    def result(self) -> Any:
        """Returns the gradient: a single term itself, or a new sum; None without terms."""
        if self._device_sum is not None:
            device_sum, self._device_sum = self._device_sum, None
            with StreamScope():
                return from_buffer(device_sum.result(), self._kind)
        held, self._held = sorted(self._held, key=lambda each: each[0]), []
        if len(held) < 2:
            return held[0][1] if held else None
        if any(isinstance(term, Traceable) for _, term, _ in held):
            return aggregate([_dense(term) for _, term, _ in held], self._method)
        rows = [term for _, term, _ in held if isinstance(term, IndexedSlices)]
        if len(rows) == len(held) and len({device for _, _, device in held}) == 1:
            return aggregate(rows, self._method)
        held = [(order, _dense(term), device) for order, term, device in held]  # before the scope
        with StreamScope():
            device_sum = MultiDeviceSum(aggregator_of(self._method))
            buffers = [to_buffer(term, device) for _, term, device in held]
            for buffer in buffers:
                device_sum.check(buffer.shape, buffer.dtype)
                device_sum.push(buffer)
            return from_buffer(device_sum.result(), kind_of_term(held[0][1]))

    def _taken(self, rows: IndexedSlices) -> Any:
        """Keeps rows as a term or converts them to dense; ACCUMULATE_N becomes TREE."""
        if self._method is AggregationMethod.EXPERIMENTAL_ACCUMULATE_N:
            self._method = AggregationMethod.EXPERIMENTAL_TREE
            if self._device_sum is not None:
                self._device_sum.use_tree()
        return rows if self._keep_rows else rows.to_dense()

    def _streams(self) -> bool:
        """Whether terms are added as they arrive."""
        if self._method is AggregationMethod.ADD_N:
            return False
        terms = [term for _, term, _ in self._held]
        if any(isinstance(term, Traceable) for term in terms):
            return False
        return not all(isinstance(term, IndexedSlices) for term in terms)

    def _add(self, term: Any, device: Device) -> None:
        """Adds one term; its library's stream then waits for that, so it may be freed."""
        assert self._device_sum is not None
        with StreamScope():
            buffer = to_buffer(_dense(term), device)
            self._device_sum.check(buffer.shape, buffer.dtype)
            self._device_sum.push(buffer)
            keep_alive_longer(buffer.block)  # possibly by the next push


def _dense(term: Any) -> Any:
    return term.to_dense() if isinstance(term, IndexedSlices) else term
