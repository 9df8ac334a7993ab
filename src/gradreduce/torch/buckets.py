"""Plans which parameters are reduced together, as a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any


def plan_buckets(
    parameters: Sequence[Any], order: Sequence[int], most_bytes: float
) -> list[list[int]]:
    """Returns the parameters of each bucket, in the order in which the buckets become ready.

    If a parameter would make a bucket larger than ``most_bytes``, it begins a new bucket. A
    parameter larger than that has a bucket of its own.

    Args:
        parameters: all parameters; all in a bucket have the same dtype.
        order: the parameters in the order in which their gradients become ready.
        most_bytes: the largest size of a bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in order:
        dtype, nbytes = parameters[index].dtype, parameters[index].nbytes
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if bucket and filled + nbytes > most_bytes:
            buckets.append(bucket)
            bucket, filled = [], 0
        bucket.append(index)
        open_buckets[dtype] = bucket, filled + nbytes
    buckets += [bucket for bucket, _ in open_buckets.values()]
    when_ready = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: when_ready[bucket[-1]])
