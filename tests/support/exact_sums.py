"""Correctly rounded sums by Python's integers, the oracle of exact sums, and terms for them."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from gradreduce.device import as_dtype

LEAST = 149  # floats of at most 32 bits are multiples of 2**-149


def integers_of(values: np.ndarray) -> np.ndarray:
    """Finite floats as Python's integers, in units of 2**-149, or of 2**-1074 if of 64 bits."""
    bits, least = (53, 1074) if values.itemsize == 8 else (24, LEAST)
    significands, exponents = np.frexp(values.astype(np.float64))
    whole = np.ldexp(significands, bits).astype(np.int64)
    shift = exponents.astype(np.int64) - bits + least
    whole >>= np.maximum(-shift, 0)  # of subnormal numbers, whose last bits are 0
    return whole.astype(object) << np.maximum(shift, 0).astype(object)


def _quotient(total: int) -> float:
    try:
        return total / 2**1074  # Python rounds quotients of integers once
    except OverflowError:
        return np.inf if total > 0 else -np.inf


def rounding_to(dtype: np.dtype) -> Callable[[int], float]:
    """A function that rounds units of 2**-149 to a dtype: to nearest, ties to even.

    To float64: units of 2**-1074.
    """
    if dtype == np.float64:
        return _quotient
    info = ml_dtypes.finfo(dtype)
    precision, least = int(info.nmant) + 1, int(info.minexp) - int(info.nmant) + LEAST
    largest = float(info.max)

    def rounded(total: int) -> float:
        size = abs(total)
        dropped = max(size.bit_length() - precision, least)
        kept = size >> dropped
        rest = size - (kept << dropped) << 1
        kept += rest > 1 << dropped or (rest == 1 << dropped and kept & 1)
        value = kept * 2.0 ** (dropped - LEAST)
        value = value if value <= largest else np.inf
        return -value if total < 0 else value

    return rounded


def exact_sums(terms: Sequence[np.ndarray], out: DTypeLike | None = None) -> np.ndarray:
    """The sums of terms as real numbers, rounded once to ``out``, by default their dtype."""
    first, out = terms[0], as_dtype(out or terms[0].dtype)
    if first.dtype.kind == "c":
        return exact_sums([term.view(first.real.dtype) for term in terms]).view(first.dtype)
    total, special = np.zeros(first.shape, object), np.zeros(first.shape)
    minus_zero = np.ones(first.shape, bool)
    with np.errstate(invalid="ignore"):
        for term in terms:
            wide = term.astype(np.float64 if term.itemsize == 8 else np.float32)
            finite = np.isfinite(wide)
            total += integers_of(np.where(finite, wide, 0))
            special += np.where(finite, 0, wide)
            minus_zero &= (wide == 0) & np.signbit(wide)
    sums = np.frompyfunc(rounding_to(out), 1, 1)(total).astype(np.float64)
    sums[minus_zero] = -0.0
    return np.where(special == 0, sums, special).astype(out)


def added_in(dtype: DTypeLike) -> np.dtype:
    """The floats in which terms of this dtype are added and divided: of 32 or 64 bits."""
    return np.dtype(np.float64 if as_dtype(dtype).name in ("float64", "complex128") else np.float32)


def weighted(term: np.ndarray, weight: float) -> np.ndarray:
    """The product, rounded to the floats that add; a complex number is two of them."""
    adds = added_in(term.dtype)
    parts = term.view(adds) if term.dtype.kind == "c" else term.astype(adds)
    with np.errstate(all="ignore"):
        made = (parts.astype(np.float64) * weight).astype(adds)
    return made.view(term.dtype) if term.dtype.kind == "c" else made


def exact_means(
    terms: Sequence[np.ndarray], divisor: float, out: DTypeLike | None = None
) -> np.ndarray:
    """The sums of terms, rounded once to the dtype that adds, divided there, then to ``out``."""
    out = as_dtype(out or terms[0].dtype)
    is_complex, adds = terms[0].dtype.kind == "c", added_in(terms[0].dtype)
    sums = exact_sums(terms, terms[0].dtype if is_complex else adds).view(adds)
    with np.errstate(all="ignore"):
        means = np.true_divide(sums, divisor, dtype=adds)
        return means.view(out) if is_complex else means.astype(out)


def exact_reduction(
    terms: Sequence[np.ndarray],
    weights: Sequence[float] | None = None,
    *,
    mean: bool,
    divisor: float | None = None,
    out: DTypeLike | None = None,
) -> np.ndarray:
    """The sums of products of terms and weights, or their means, from the definition.

    Those of integers are sums modulo their size, which a mean divides in float32.

    Args:
        divisor: of the mean; by default the sum of the weights.
        out: the dtype of the result, by default that of the terms.
    """
    weights = weights or [1] * len(terms)
    divisor, out = sum(weights) if divisor is None else divisor, as_dtype(out or terms[0].dtype)
    if terms[0].dtype.kind == "i":
        pairs = zip(terms, weights, strict=True)
        total = np.array(sum(term.astype(np.int64) * weight for term, weight in pairs), out)
        return total / np.float32(divisor) if mean else total
    products = [weighted(*pair) for pair in zip(terms, weights, strict=True) if pair[1]]
    if mean and divisor != 1:
        return exact_means(products, divisor, out)
    return exact_sums(products, out)


def fit_into(num_words: int, terms: Sequence[np.ndarray]) -> np.ndarray:
    """Whether a bit more than the bits from the least to the largest sum are those of the words."""
    wide = [term.astype(np.float64 if term.itemsize == 8 else np.float32) for term in terms]
    finite = np.logical_and.reduce([np.isfinite(term) for term in wide])
    integers = [integers_of(np.where(finite, term, 0)) for term in wide]
    bits = reduce(or_, map(abs, integers))
    unit = np.maximum(bits & -bits, 1)
    largest = np.max(np.abs(np.cumsum(integers, 0)), 0)
    info = np.finfo(wide[0].dtype)
    held = unit << (info.nmant + 1) * num_words - 1
    return (largest < held) & (largest < 1 << info.maxexp - 1 + info.nmant - int(info.minexp))


def may_warn(terms: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> bool:
    """Whether a sum of these products, in one call, may not fit into the words of float64."""
    if terms[0].dtype.kind == "i" or added_in(terms[0].dtype) != np.float64:
        return False
    pairs = zip(terms, weights or [1] * len(terms), strict=True)
    products = [weighted(*pair).reshape(-1).view(np.float64) for pair in pairs if pair[1]]
    return not fit_into(8, products).all()


# ---- terms --------------------------------------------------------------------------------------


def _any(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, _: int) -> np.ndarray:
    """Numbers of similar magnitudes, some of which are 0, infinite or NaN."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    values = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), values)
    special = rng.choice([np.inf, -np.inf, np.nan], shape)
    return np.where(rng.random(shape) < 0.02, special, values)


def _mixed(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, _: int) -> np.ndarray:
    """Numbers of all magnitudes."""
    info = ml_dtypes.finfo(dtype)
    exponents = rng.integers(int(info.minexp), int(info.maxexp) - 1, shape)
    return rng.standard_normal(shape) * np.exp2(exponents - 1.0)


def _cancelled(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype,
               _: int) -> np.ndarray:  # fmt: skip
    """Pairs of opposite numbers, some of which differ in the last bit, and one that is left."""
    values = _mixed(rng, shape, dtype, 0).astype(dtype)
    half = shape[0] // 2
    near = np.nextafter(values[:half].astype(np.float32), 0)
    values[half : 2 * half] = -np.where(rng.random(near.shape) < 0.7, values[:half], near)
    return values.astype(np.float64)


def _halfway(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype,
             precision: int) -> np.ndarray:  # fmt: skip
    """Sums in the middle between two results, and beside it by a number of any magnitude."""
    info, size = ml_dtypes.finfo(dtype), shape[1]
    least, most = int(info.minexp) - int(info.nmant), int(info.maxexp)
    unit = rng.integers(least + 1, most - precision + 1, size).astype(np.float64)
    values = np.zeros(shape)
    values[0] = np.ldexp(rng.integers(2 ** (precision - 1), 2**precision, size), unit.astype(int))
    if shape[0] > 1:
        values[1] = np.exp2(unit - 1)
    if shape[0] > 2:
        values[2] = np.exp2(rng.integers(least, np.maximum(unit - 1, least + 1).astype(int)))
        values[2] *= rng.choice([1, -1, 0], size)
    return values * rng.choice([1.0, -1.0], size)


def _tiny(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, _: int) -> np.ndarray:
    """Subnormal numbers, zeros and the numbers around them; some elements are all -0."""
    info = ml_dtypes.finfo(dtype)
    whole = rng.integers(-(2 ** (int(info.nmant) + 1)), 2 ** (int(info.nmant) + 1), shape)
    whole = np.where(rng.random(shape) < 0.3, rng.integers(-2, 3, shape), whole)
    values = whole * float(info.smallest_subnormal)
    return np.where(rng.random(shape[1]) < 0.2, -0.0, values)


def _largest(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype,
             _: int) -> np.ndarray:  # fmt: skip
    """Sums that overflow on the way, and some at the end."""
    info = ml_dtypes.finfo(dtype)
    step = 2.0 ** (int(info.maxexp) - int(info.nmant) - 2)  # the largest plus this is a tie
    chosen = [float(info.max), float(info.max) / 2, step, step / 2, 1.0, 0.0]
    return rng.choice(chosen, shape) * rng.choice([1.0, -1.0], shape)


KINDS = (_any, _mixed, _cancelled, _halfway, _tiny, _largest)


def adversarial_terms(
    num_terms: int, size: int, dtype: DTypeLike, seed: int, out: DTypeLike | None = None
) -> list[np.ndarray]:
    """Terms of each of ``KINDS``, in random order, for sums that are rounded to ``out``."""
    dtype, rng = as_dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "c":
        parts = adversarial_terms(num_terms, 2 * size, added_in(dtype), seed)
        return [part.view(dtype) for part in parts]
    precision = int(ml_dtypes.finfo(as_dtype(out or dtype)).nmant) + 1
    shape = (num_terms, -(-size // len(KINDS)))
    with np.errstate(all="ignore"):
        values = np.concatenate([kind(rng, shape, dtype, precision) for kind in KINDS], 1)
        made = rng.permuted(values, axis=0).astype(dtype)
    return [np.ascontiguousarray(term[:size]) for term in made]


# Numbers of terms, and how many of 100,000 elements have each.
COUNTS = {1: 1000, **dict.fromkeys(range(2, 9), 12_000), 9: 8000, 17: 4000, 64: 2900, 1024: 100}


def exact_terms(
    num_terms: int,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    seed: int,
    out: DTypeLike | None = None,
    *,
    rounded: bool = False,
) -> list[np.ndarray]:
    """Terms whose sums are exact: adversarial ones, or small whole numbers if sums are rounded.

    Integers are of 16 bits, and any of these.
    """
    dtype, size = as_dtype(dtype), int(np.prod(shape))
    if dtype.kind == "i" or rounded:
        limit = 2**15 if dtype.kind == "i" else 9
        rng = np.random.default_rng(seed)
        return [each.astype(dtype) for each in rng.integers(-limit, limit, (num_terms, *shape))]
    return [term.reshape(shape) for term in adversarial_terms(num_terms, size, dtype, seed, out)]


def adversarial_rows(
    dtype: DTypeLike, seed: int, share: int = 1, out: DTypeLike | None = None
) -> list[list[np.ndarray]]:
    """Terms of 100,000 elements divided by ``share``, a list for each of ``COUNTS``."""
    return [
        adversarial_terms(count, max(size // share, 6), dtype, seed * 2000 + count, out)
        for count, size in COUNTS.items()
    ]
