"""Weights of gradients: numbers on the host, whose sums are exact.

The weighted mean of gradients is the sum of w * g, divided by the sum of w. All processes must
divide by the same number, in whatever order they add the weights. So weights are added as integers
times 2**-1074, of which every float64 is a multiple, and the sum is rounded once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from gradreduce.device import is_number
from gradreduce.errors import brief

_UNIT = 1074  # the smallest float64 is 2**-1074
ONE = 1 << _UNIT  # the weight 1
# Integers of 62 bits: more than the sum of 2**64 weights has, as a multiple of 2**-1074.
NUM_NUMBERS = 35


def as_weight(name: str, weight: Any) -> float:
    """Returns a weight as float64.

    Args:
        name: the argument, or the place of the term, for errors.
        weight: a real number of Python or NumPy that is finite and at least 0.

    Raises:
        TypeError: it is not a number in host memory; a tensor and a boolean are none.
        ValueError: it is negative, infinite or NaN, or exceeds the largest float64.
    """
    if not is_number(weight):
        raise TypeError(f"{name}={brief(weight)} must be a number on the host, of at least 0")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={brief(weight)} must be a finite number of at least 0")
    return number


def to_units(weight: float) -> int:
    """Returns a weight as a multiple of 2**-1074."""
    numerator, denominator = weight.as_integer_ratio()
    return (numerator << _UNIT) // denominator


def sum_weights(weights: Iterable[float]) -> int:
    """Returns the exact sum of weights, as a multiple of 2**-1074."""
    return sum(map(to_units, weights))


def parts_of(total: int) -> list[float]:
    """Returns the fewest numbers whose exact sum is a sum of weights, the largest first."""
    parts = []
    while total:
        parts.append(from_units(total))
        total -= to_units(parts[-1])
    return parts


def is_too_large(total: int) -> bool:
    """Whether a sum of weights exceeds the largest float64."""
    return total >= ONE << 1024


def from_units(total: int) -> float:
    """Returns an exact sum, rounded once to float64.

    Raises:
        OverflowError: it exceeds the largest float64.
    """
    return total / ONE


def bits_of(number: float) -> int:
    """Returns the bits of a float64 as an int64, which processes exchange."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def from_bits(bits: int) -> float:
    """Returns the float64 of ``bits_of``."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def to_numbers(total: int) -> list[int]:
    """Returns an exact sum as ``NUM_NUMBERS`` integers, which processes exchange."""
    return [total >> 62 * place & (1 << 62) - 1 for place in range(NUM_NUMBERS)]


def from_numbers(numbers: Sequence[int]) -> int:
    """Returns the exact sum of ``to_numbers``."""
    return sum([number << 62 * place for place, number in enumerate(numbers)])
