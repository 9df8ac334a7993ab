"""Sums of several floats, their words, as NumPy arrays: for the references of kernels.

The exact sum of the words is that of the terms: each addition leaves its error in the next word.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

MOST_WORDS, NUM_WORDS = 8, 3  # of a sum; by default
BLOCK = 1 << 14  # elements; the words and what an addition needs stay in the cache


def add_term(arrays: list[np.ndarray], term: np.ndarray) -> bool:
    """Adds one term to words; returns whether a sum did not fit.

    Args:
        arrays: the words, and four more arrays of their dtype; their order changes.
        term: the term, of any float dtype that the words hold.
    """
    *words, before, error, added, total = arrays
    before[...] = words[0]
    error[...] = term
    np.negative(error, out=error)
    for place, word in enumerate(words):
        # Knuth's two-sum of word and -error; the error of the sum has the opposite sign, so that it
        # is +0 if the sum is exact: a word of -0 minus +0 is -0.
        np.subtract(word, error, out=total)
        np.subtract(total, word, out=added)
        error += added
        np.subtract(total, added, out=added)
        added -= word
        error += added
        arrays[place], total = total, word
        if place and not error.any():  # NaN counts
            break
    arrays[-1] = total
    if not error.any():
        return False
    words = arrays[: len(words)]
    chosen = np.flatnonzero(error)
    parts = np.array([*[word[chosen] for word in words], -error[chosen]])
    inexact = renormalise(parts, before[chosen], term[chosen])
    for word, values in zip(words, parts, strict=False):
        word[chosen] = values
    return inexact


def renormalise(words: np.ndarray, before: np.ndarray, term: np.ndarray) -> bool:
    """Puts what did not fit, the last row, into the words; returns whether some is left.

    Args:
        words: ``[word][element]``; changed in place.
        before: the first word before the addition.
        term: the term that was added.
    """
    not_finite = np.isnan(words[-1])
    overflows = not_finite & np.isfinite(before) & np.isfinite(term)
    words[1:, not_finite] = 0
    # No pass changes the exact sum, so the limit of their number only bounds the time.
    for _ in range(len(words) + 1):
        moves = False
        for low in range(len(words) - 1, 0, -1):
            left, right = words[low - 1], words[low]
            total = left + right
            added = total - left
            rest = (left - (total - added)) + (right - added)
            not_finite = np.isnan(rest)
            overflows |= not_finite & np.isfinite(left)
            moves |= bool(np.any((total != left) & ~not_finite))
            words[low - 1], words[low] = total, rest
            words[0, not_finite] = total[not_finite]
            words[1:, not_finite] = 0
        if not moves:
            break
    return bool(overflows.any() or words[-1].any())


def renormalise_all(words: list[np.ndarray]) -> bool:
    """Makes each word the rounded sum of itself and the next one, or says that a sum overflows."""
    moves = np.zeros(words[0].size, bool)
    for word, lower in pairwise(words):
        moves |= word + lower != word
    chosen = np.flatnonzero(moves & np.isfinite(words[0]))
    if not chosen.size:
        return False
    zero = np.zeros(chosen.size, words[0].dtype)
    parts = np.array([*[word[chosen] for word in words], zero])
    overflows = renormalise(parts, zero, zero)
    for word, values in zip(words, parts, strict=False):
        word[chosen] = values
    return overflows
