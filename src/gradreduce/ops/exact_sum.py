"""Adds terms as real numbers and rounds once: launcher of ``exact_sum.cu`` and NumPy reference.

On a CPU a float64 holds the sum of terms of similar magnitudes. Two or three float32 hold most
other sums: each addition leaves its error in the next one. If the last one leaves a rest, or a
number is not finite, an integer holds the sum of that element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from gradreduce.device import (
    ELEMENT_OF,
    Arrays,
    Buffer,
    Device,
    Kernel,
    Queue,
    Row,
    by_template,
    same_dtypes,
)

from .add_n import UNROLLED
from .all_sum import ALL_SUM
from .templates import FLOATS, FROM_ACC
from .words import BLOCK, MOST_WORDS, add_term, renormalise_all

# The dtypes whose terms are exact in float32, of which complex64 has two.
_NARROW = FLOATS[:3]
_DOUBLE = np.dtype("float64")
_SINGLE, _BITS, _INT64 = np.dtype("float32"), np.dtype("uint32"), np.dtype("int64")
_NUM_WORDS = 3
_LIMBS, _LIMB = 10, 32  # of an integer: their number, and the bits of each
_LARGEST, _INFINITY = 0x7F7FFFFF, 0x7F800000  # bits
_DROPPED = np.uint64(2**29 - 1)  # the bits of a float64 that a float32 has not
# Elements. Sums of 4 and 8 terms of 1M float32, ms on one core, 2026-11: 2^13 9.6 and 19, 2^14 8.0
# and 16, 2^15 7.8 and 13, 2^16 6.5 and 13; by three words 16 and 30.
_BLOCK = 1 << 15


def _exact_sum_reference(
    table: Sequence[Arrays], num_outs: int, num_inputs: int, divisor: float
) -> None:
    """``in[0] + in[1] + …`` as real numbers, rounded once, or rounded and divided, to every out.

    Of float64 the last out is the flag.
    """
    if table[0][0].dtype == _DOUBLE:
        _sum_of_words(table, num_outs - 1, divisor)
        return
    size = min(_BLOCK, max(row[0].size for row in table))
    memory = np.empty(size, _DOUBLE), np.empty((3, size), _BITS)
    for row in table:
        outs, inputs = row[:num_outs], row[num_outs:]
        odd = divisor == 1 and outs[0].itemsize < _SINGLE.itemsize
        for start in range(0, outs[0].size, _BLOCK):
            terms = [term[start : start + _BLOCK] for term in inputs]
            length = terms[0].size
            sums, inexact = _sum_in_float64(terms, *[each[..., :length] for each in memory])
            if odd:
                # To 24 bits: the last one is 1 if another one was. Shorter sums are float32.
                bits = sums.view(np.uint64)
                bits[...] = (bits | (bits & _DROPPED) + _DROPPED) & ~_DROPPED
            total = sums.astype(_SINGLE)
            if inexact.any():
                chosen = np.flatnonzero(inexact)
                total[chosen] = _sum_in_words(terms, chosen, odd=odd)
            if divisor != 1:
                total = np.true_divide(total, divisor, dtype=_SINGLE)
            for out in outs:
                out[start : start + _BLOCK] = total


def _sum_in_float64(
    terms: Arrays, sums: np.ndarray, memory: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums in float64, and where they may be inexact.

    Args:
        terms: at least one.
        sums: is returned.
        memory: three arrays of uint32.
    """
    most, least, bits = memory
    sums.fill(-0.0)
    most.fill(0)
    least.fill(0xFFFFFFFF)
    for term in terms:
        right = term.astype(_SINGLE, copy=False)
        sums += right
        np.bitwise_and(right.view(_BITS), 0x7FFFFFFF, out=bits)
        np.maximum(most, bits, out=most)
        bits -= 1  # 0 becomes the largest number
        np.minimum(least, bits, out=least)
    # A float64 has 53 bits: a term needs 24, terms with other exponents as many more as the
    # exponents differ, and the sum of 2**b terms b more.
    most -= least
    return sums, most.view(np.int32) > (29 - (len(terms) - 1).bit_length()) * 2**23


def _sum_in_words(terms: Arrays, chosen: np.ndarray, *, odd: bool) -> np.ndarray:
    """Returns the exact sums of some elements, not all of whose terms are 0, rounded once."""
    size = chosen.size
    memory = np.empty((_NUM_WORDS + 3, size), _SINGLE), np.empty((2, size), bool)
    words, inexact = _cascade(terms, chosen, *memory)
    total = _rounded_words(words, odd=odd)
    inexact |= total - total != 0
    if inexact.any():
        left = chosen[inexact]
        total[inexact] = _integer_sum((term[left] for term in terms), left.size, odd=odd)
    return total


def _sum_of_words(table: Sequence[Arrays], num_outs: int, divisor: float) -> None:
    """The sums of float64: no integer holds all of them."""
    memory = np.empty((MOST_WORDS + 4, min(BLOCK, max(row[0].size for row in table))), _DOUBLE)
    for row in table:
        outs, flag, inputs = row[:num_outs], row[num_outs], row[num_outs + 1 :]
        for start in range(0, outs[0].size, BLOCK):
            block = slice(start, start + BLOCK)
            arrays = list(memory[:, : outs[0][block].size])
            for word in arrays[:MOST_WORDS]:
                word.fill(-0.0)
            inexact = [add_term(arrays, term[block]) for term in inputs]
            first, *lower = arrays[:MOST_WORDS]
            if any(inexact) | renormalise_all([first, *lower]):
                flag[...] = 1
            total = lower.pop()
            while lower:
                total = _to_odd(*_two_sum(lower.pop(), total))
            total = first + total
            for out in outs:
                out[block] = total if divisor == 1 else np.true_divide(total, divisor)


def _cascade(
    terms: Arrays, chosen: np.ndarray, memory: np.ndarray, flags: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns float32 words, the exact sum of which is that of the terms, but where inexact.

    Args:
        terms: at least one.
        chosen: indices of the elements to add.
        memory: an array for each word, and three more.
        flags: two arrays of booleans.

    Returns:
        The words, and where they are inexact: they left a rest, or a number is not finite.
    """
    *words, added, spare, rest = memory
    inexact, differs = flags
    words[0][...] = terms[0][chosen]
    for word in words[1:]:
        word.fill(0)
    inexact.fill(False)
    last = len(words) - 1
    for term in terms[1:]:
        right = term[chosen].astype(_SINGLE, copy=False)
        for place, word in enumerate(words):
            total = np.add(word, right, out=spare)
            words[place], spare = total, word
            np.subtract(total, word, out=added)
            if place == last:
                # The rest is 0 if and only if the sum gives back both of its terms.
                inexact |= np.not_equal(added, right, out=differs)
                inexact |= np.not_equal(np.subtract(total, right, out=added), word, out=differs)
                break
            # Knuth's two-sum: word, rest = word + right, the error of this sum
            right = np.subtract(right, added, out=rest)
            np.subtract(total, added, out=added)
            word -= added
            rest += word
    return words, inexact


def _rounded_words(words: Sequence[np.ndarray], *, odd: bool) -> np.ndarray:
    """Returns the exact sum of three words, rounded once, to odd or to nearest."""
    # Source: S. Boldo, G. Melquiond, Emulation of a FMA and correctly rounded sums, 2008.
    tail, rest = _two_sum(words[1], words[2])
    middle, low = _two_sum(words[0], rest)
    first, rest = _two_sum(tail, middle)
    total, rest = _two_sum(first, _to_odd(*_two_sum(low, rest)))
    if odd:
        _to_odd(total, rest)
    return total


def _two_sum(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rounded sum, and its error (NaN if a number is not finite)."""
    total = left + right
    added = total - left
    return total, (left - (total - added)) + (right - added)


def _to_odd(total: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Rounds exact sums to odd, in place: to the neighbour with an odd last bit, or not at all.

    Another rounding, to 22 bits or fewer, then sees on which side of a tie the exact sum lies.
    """
    bits = total.view(f"u{total.itemsize}")
    is_even = ((rest > 0) | (rest < 0)) & (bits & 1 == 0)
    away = (rest > 0) == (total > 0)
    bits += is_even & away
    bits -= is_even & ~away
    return total


def _integer_sum(terms: Iterable[np.ndarray], size: int, *, odd: bool) -> np.ndarray:
    """Returns the exact sum of any floats, rounded once to float32, to odd or to nearest.

    The sum is an integer in units of 2**-149, the least float32.
    """
    limbs = np.zeros((_LIMBS, size), _INT64)  # 2**31 terms do not overflow them
    special = np.zeros(size, _SINGLE)  # the sum of what is not finite
    columns = np.arange(size)
    for term in terms:
        values = term.astype(_SINGLE, copy=False)
        finite = np.isfinite(values)
        special += np.where(finite, _SINGLE.type(0), values)
        bits = np.where(finite, values, _SINGLE.type(0)).view(_BITS).astype(_INT64)
        exponent = bits >> 23 & 255
        significand = bits & 0x7FFFFF | (exponent > 0).astype(_INT64) << 23
        shift = np.maximum(exponent - 1, 0)
        shifted = significand << (shift & 31)
        sign = np.where(bits >> 31, -1, 1)
        limbs[shift >> 5, columns] += sign * (shifted & 0xFFFFFFFF)
        limbs[(shift >> 5) + 1, columns] += sign * (shifted >> 32)
    total = _rounded_integer(limbs, odd=odd)
    return np.where(special == 0, total, special)


def _rounded_integer(limbs: np.ndarray, *, odd: bool) -> np.ndarray:
    """Returns integers times 2**-149, rounded once to float32, to odd or to nearest."""
    _carry(limbs)
    negative = limbs[-1] < 0
    limbs[:, negative] *= -1
    _carry(limbs)
    columns = np.arange(limbs.shape[1])
    # The first limb that is not 0, the one below it, and whether any other one is not 0.
    place = _LIMBS - 1 - np.argmax(limbs[::-1] != 0, axis=0)
    is_below = np.arange(_LIMBS)[:, None] < place - 1
    window = limbs[place, columns].astype(np.uint64) << np.uint64(_LIMB)
    window |= np.where(place > 0, limbs[place - 1, columns], 0).astype(np.uint64)
    window |= ((limbs != 0) & is_below).any(axis=0)
    length = _LIMB + np.frexp(limbs[place, columns].astype(np.float64))[1]  # of the window
    dropped = np.where(place > 0, length - 24, np.maximum(length - 24, 32)).astype(np.uint64)
    kept = window >> dropped
    rest, half = window << (np.uint64(64) - dropped), np.uint64(1 << 63)
    if odd:
        kept |= rest != 0
    else:
        kept += (rest > half) | (rest == half) & (kept & np.uint64(1) == 1)
    # A significand of 24 bits adds one to the exponent.
    bits = (dropped.astype(_INT64) + _LIMB * place - 32 << 23) + kept.astype(_INT64)
    bits = np.where(window == 0, 0, np.minimum(bits, _LARGEST if odd else _INFINITY))
    signs = (negative & (window != 0)).astype(_INT64) << 31
    total: np.ndarray = (bits | signs).astype(_BITS).view(_SINGLE)
    return total


def _carry(limbs: np.ndarray) -> None:
    """Makes all limbs but the last one non-negative and less than 2**32."""
    for low, high in pairwise(limbs):
        high += low >> _LIMB
        low &= 0xFFFFFFFF


EXACT_SUM = Kernel(
    name="exact_sum",
    source="exact_sum",
    reference=_exact_sum_reference,
    scalars=(("num_outs", "int64"), ("num_inputs", "int64"), ("divisor", "float64")),
    templates=(
        *((name, name, count) for name in _NARROW for count in (0, *range(2, UNROLLED + 1))),
        *((*pair, 0) for pair in FROM_ACC),
        ("float64", "float64", 0),
    ),
    writes="num_outs",
)


def exact_sum(
    outs: Sequence[Sequence[Buffer]],
    inputs: Sequence[Sequence[Buffer]],
    *,
    divisor: float = 1,
    flags: Sequence[Buffer] = (),
    device: Device,
    queue: Queue = "compute",
) -> None:
    """Sets every ``outs[t][j]`` to ``(inputs[t][0] + inputs[t][1] + …) / divisor``.

    The terms are added as real numbers: their order does not change a bit. Their sum is rounded
    once to the output's dtype; with a divisor first to the accumulate dtype, and divided there. One
    launch for all tensors with the same dtypes and numbers of outputs and inputs.

    Args:
        outs: at least one for each tensor t; overwritten. Each may be an input, but not overlap one
            partly.
        inputs: for each tensor at least one term of its size; all terms of one dtype, which is the
            outputs', or float32 if the outputs are float16 or bfloat16. Integers are added by
            ``all_sum``: modulo 2**bits any sum of them is exact.
        divisor: divides sums of floats; 1: no division.
        flags: an int32 for each tensor if one is float64 or complex128. It becomes 1 if the sum
            of such a tensor does not fit into eight floats, or overflows on the way; otherwise it
            is not written.
        device: the device that launches. Adds no stream waits.
        queue: the queue to launch on.

    The operands are not validated.
    """
    rows: dict[int, list[Row]] = {}
    for place, (written, read) in enumerate(zip(outs, inputs, strict=True)):
        is_flagged = ELEMENT_OF[read[0].dtype].name == "float64"
        own = (*written, flags[place]) if is_flagged else (*written,)
        rows.setdefault(len(own), []).append((*own, *read))
    for num_outs, found in rows.items():
        for (to, of, num_operands), table in by_template(same_dtypes(found)).items():
            num_inputs = num_operands - num_outs
            if of not in FLOATS:
                device.launch(
                    ALL_SUM, (to, of, 0), table, (num_outs, num_inputs, 0, 1.0), queue=queue
                )
                continue
            unrolled = num_inputs if to == of in _NARROW and 2 <= num_inputs <= UNROLLED else 0
            scalars = (num_outs, num_inputs, float(divisor))
            device.launch(EXACT_SUM, (to, of, unrolled), table, scalars, queue=queue)
