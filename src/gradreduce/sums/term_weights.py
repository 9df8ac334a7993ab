"""Checks the weights of the terms of ``aggregate`` and ``accumulate_n``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradreduce.device import DType
from gradreduce.errors import brief
from gradreduce.weights import as_weight


def validate_weights(weights: Any, count: int | None) -> tuple[float, ...]:
    """Returns the weights of terms as float64; an empty tuple if all are 1.

    Args:
        weights: the argument of a caller.
        count: the number of terms; None: it is not known yet.

    Raises:
        TypeError: ``weights`` is not a list or tuple, or a weight is not a number on the host.
        ValueError: there is not one weight for each term, a weight is negative or not finite, or
            all weights are 0.
    """
    if not isinstance(weights, list | tuple):
        raise TypeError(f"weights={brief(weights)} must be a list with one number per term")
    if count is not None and len(weights) != count:
        raise ValueError(f"weights has {len(weights)} entries; expected {count}, one per term")
    numbers = tuple([as_weight(f"weights[{index}]", each) for index, each in enumerate(weights)])
    if numbers and not any(numbers):
        raise ValueError("the sum of all weights is 0: at least one term must have a weight")
    return () if count is not None and all([each == 1 for each in numbers]) else numbers


def pairs_of(terms: Iterable[Any], weights: Sequence[float]) -> Iterator[tuple[Any, float]]:
    """Yields each term with its weight.

    Raises:
        ValueError: there are more or fewer terms than weights.
    """
    left = iter(weights)
    for term in terms:
        weight = next(left, None)
        if weight is None:
            raise ValueError(f"weights has {len(weights)} entries, but there are more terms")
        yield term, weight
        del term
    if next(left, None) is not None:
        raise ValueError(f"weights has {len(weights)} entries, but there are fewer terms")


def check_whole(weight: float, dtype: DType) -> None:
    """Raises ``ValueError`` for a weight of integers that is not a whole number below 2**63."""
    if dtype.kind in "iu" and (not weight.is_integer() or weight >= 2**63):
        raise ValueError(f"weight {weight} of {dtype} must be a whole number below 2**63")
