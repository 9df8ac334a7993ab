"""Test data whose results can be compared with ``==``, and the comparison."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np

from gradreduce.device import as_dtype

FLOATS = tuple(as_dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))
COMPLEX = tuple(as_dtype(name) for name in ("complex64", "complex128"))
INTEGERS = tuple(as_dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = FLOATS + COMPLEX + INTEGERS

SCALE = 2.0**-3  # exact in every float type; the data are not integers
KEPT_BYTES = 8 << 20  # size of the cache: implementations, offsets and meshes use the same data


def exact_data(shape, dtype, *, num_terms: int = 32, seed: int = 0) -> np.ndarray:
    """Values such that ``num_terms`` of them have the same sum in any order and any grouping.

    Floats are small integers times a power of two, so that no partial sum is rounded, even in the
    dtype itself and in 16 bits. Integers have the full range; their sums wrap.
    """
    dtype, rng = as_dtype(dtype), np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return _pairs(exact_data, shape, dtype, seed, num_terms=num_terms)
    limit = 2 ** _precision(dtype) // num_terms
    if limit < 1:
        raise ValueError(f"no exact {dtype} data for num_terms={num_terms}")
    return (rng.integers(-limit, limit, shape, endpoint=True) * SCALE).astype(dtype)


def _kept(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Caches the results of ``make``; without it, drawing took a third of the tests' time."""
    made: dict[tuple, np.ndarray] = {}
    num_bytes = 0

    @wraps(make)
    def copied(shape, dtype, *, seed: int = 0) -> np.ndarray:
        nonlocal num_bytes
        key = (tuple(shape) if np.iterable(shape) else int(shape), as_dtype(dtype), seed)
        values = made.get(key)
        if values is None:
            values = make(shape, dtype, seed=seed)
            if num_bytes + values.nbytes > KEPT_BYTES:
                made.clear()
                num_bytes = 0
            made[key] = values
            num_bytes += values.nbytes
        return values.copy()

    return copied


@_kept
def random_data(shape, dtype, *, seed: int = 0) -> np.ndarray:
    """Values whose sum depends on the order; use them for results with a fixed order.

    One in eight is special: a zero of either sign, a subnormal number, or a number whose sums lie
    halfway between two floats, also at the overflow. One in eight is so large that a sum with it
    loses most other numbers, also in the accumulate type, until its opposite is added. One in a
    hundred is infinite or NaN, with an empty payload or with all payload bits set.
    """
    dtype, rng = as_dtype(dtype), np.random.default_rng(seed)
    if dtype.kind in "iu":
        return exact_data(shape, dtype, seed=seed)
    if dtype.kind == "c":
        return _pairs(random_data, shape, dtype, seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    luck = rng.random(shape)
    values = np.where(luck < 2 / 8, rng.choice([1, -1], shape) * _large(dtype), values)
    values = np.where(luck < 1 / 8, rng.choice(specials(dtype), shape), values)
    values = np.where(luck < 1 / 100, rng.choice([np.nan, np.inf, -np.inf], shape), values)
    with np.errstate(all="ignore"):
        values = values.astype(dtype)
    bits = values.view(f"u{dtype.itemsize}")
    bits[np.isnan(values) & (luck < 1 / 200)] = np.iinfo(bits.dtype).max
    return values


@_kept
def finite_data(shape, dtype, *, seed: int = 0) -> np.ndarray:
    """Finite random values for sums of a thousand terms; infinities would make these NaN.

    Their magnitudes differ so much that the order of additions changes the sum.
    """
    dtype, rng = as_dtype(dtype), np.random.default_rng(seed)
    if dtype.kind in "iu":
        return exact_data(shape, dtype, seed=seed)
    if dtype.kind == "c":
        return _pairs(finite_data, shape, dtype, seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(dtype)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether dtypes, shapes and all bits are equal. All NaNs are equal.

    ``-0.0`` is not ``0.0``.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = _real(left), _real(right)
    bits = np.dtype(f"u{left.itemsize}")
    equal = left.view(bits) == right.view(bits)
    if left.dtype.kind not in "iu":
        equal |= np.isnan(left) & np.isnan(right)
    return bool(equal.all())


def _real(array: np.ndarray) -> np.ndarray:
    """All numbers of the array in one dimension; a complex number becomes two."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _pairs(make, shape, dtype: np.dtype, seed: int, **options) -> np.ndarray:
    real = np.empty(0, dtype).real.dtype
    made = np.empty(shape, dtype)
    made.real = make(shape, real, seed=2 * seed, **options)
    made.imag = make(shape, real, seed=2 * seed + 1, **options)
    return made


def _precision(dtype: np.dtype) -> int:
    """Bits of the significand: every integer up to 2 ** precision is exact."""
    return int(ml_dtypes.finfo(dtype).nmant) + 1


def _large(dtype: np.dtype) -> float:
    """A number so large that a sum with it loses most others, also in the accumulate type."""
    if dtype == np.float16:
        return 2.0**15
    return 2.0**57 if dtype == np.float64 else 2.0**28


def specials(dtype: np.dtype) -> np.ndarray:
    """Finite values that test rounding, signs and small exponents, as float64."""
    info, precision = ml_dtypes.finfo(dtype), _precision(dtype)
    least, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    halfway = 2.0**precision  # its neighbours are 2 apart: halfway + 1 and + 3 are ties
    largest = float(info.max)
    half_step = 2.0 ** (int(info.maxexp) - precision - 1)  # largest + this is a tie with infinity
    positive = [0.0, least, 3 * least, normal, normal - least, halfway, halfway + 2, 1.0, 3.0]
    positive += [largest, half_step]
    return np.array([sign * value for value in positive for sign in (1.0, -1.0)])


def same_copies(variable: Any, wanted: Any) -> bool:
    """Whether every copy of a Variable is ``same`` as ``wanted``."""
    return all(same(buffer.numpy(), np.asarray(wanted)) for buffer in variable.buffers)
