"""Which parameters are reduced together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Size(NamedTuple):
    """What decides about the bucket of a parameter.

    Attributes:
        dtype: of its gradient; a bucket has one.
        nbytes: of its gradient.
    """

    dtype: Hashable
    nbytes: int


def plan_buckets(sizes: Sequence[Size], order: Sequence[int], most_bytes: float) -> list[list[int]]:
    """Returns the parameters of each bucket, in the order in which the buckets become ready.

    A bucket is closed by the parameter with which it would exceed ``most_bytes``; a larger one has
    its own.

    Args:
        sizes: of all parameters.
        order: the parameters in the order in which their gradients become ready.
        most_bytes: of a bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in order:
        dtype, nbytes = sizes[index]
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if bucket and filled + nbytes > most_bytes:
            buckets.append(bucket)
            bucket, filled = [], 0
        bucket.append(index)
        open_buckets[dtype] = bucket, filled + nbytes
    buckets += [bucket for bucket, _ in open_buckets.values()]
    when_ready = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: when_ready[bucket[-1]])
