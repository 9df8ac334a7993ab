"""The methods of aggregation: how the terms of a gradient are combined."""

from __future__ import annotations

import enum

from gradreduce.errors import brief

from .aggregators import AddN, Aggregator, OneBuffer, Tree


class AggregationMethod(enum.IntEnum):
    """How the terms of a gradient are combined (tf.AggregationMethod).

    Attributes:
        ADD_N: adds all terms in one operation, and keeps all of them until it runs.
        DEFAULT: the same as ``ADD_N``.
        EXPERIMENTAL_TREE: adds pairs, then pairs of pairs. Error and memory grow with log n instead
            of n: at most ⌈log2 n⌉ + 1 buffers are alive at a time (for two terms: both and their
            sum).
        EXPERIMENTAL_ACCUMULATE_N: adds each term into a single buffer, in the order of arrival, and
            then drops the term. If there are IndexedSlices among arrays, the same as
            ``EXPERIMENTAL_TREE``; terms of a generator before the first IndexedSlices then count as
            one sum.

    Example:
        >>> terms = [np.ones(2), np.full(2, 3.0)]
        >>> gr.aggregate(terms, gr.AggregationMethod.EXPERIMENTAL_TREE)
        array([4., 4.])
    """

    ADD_N = 0
    DEFAULT = 0
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


def as_aggregation_method(method: AggregationMethod | int | None) -> AggregationMethod:
    """Returns the member for a member, for 0, 1 or 2, or for None (DEFAULT).

    Raises:
        ValueError: anything else.
    """
    if method is None:
        return AggregationMethod.DEFAULT
    try:
        return AggregationMethod(method)
    except ValueError:
        raise ValueError(
            f"Invalid aggregation_method specified: {brief(method)}; allowed: 0, 1, 2 or a member "
            "of AggregationMethod"
        ) from None


# The class that adds the terms of one device by each method.
AGGREGATORS: dict[AggregationMethod, type[Aggregator]] = {
    AggregationMethod.ADD_N: AddN,
    AggregationMethod.EXPERIMENTAL_TREE: Tree,
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: OneBuffer,
}
