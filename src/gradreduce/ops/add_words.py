"""Adds terms to sums of words, as real numbers: launcher of ``add_words.cu`` and NumPy reference.

A sum is the exact sum of two to eight floats, its *words*: each addition leaves its error in the
next word. ``exact_sum`` of the words is the sum of all terms, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradreduce.device import (
    Arrays,
    Buffer,
    Device,
    Kernel,
    Queue,
    Row,
    as_count,
    by_template,
    same_dtypes,
)

from .exact_sum import _exact_sum_reference
from .templates import FLOATS
from .words import BLOCK, MOST_WORDS, add_term


def _add_words_reference(
    table: Sequence[Arrays], num_outs: int, num_inputs: int, fresh: int
) -> None:
    """``word[0] + word[1] + … += in[0] + in[1] + …`` as real numbers; the last out is the flag."""
    dtype, size = table[0][0].dtype, min(BLOCK, max(row[0].size for row in table))
    memory = np.empty((num_outs + 3, size), dtype)
    with np.errstate(all="ignore"):
        for row in table:
            *outs, flag = row[:num_outs]
            for start in range(0, outs[0].size, BLOCK):
                block = [out[start : start + BLOCK] for out in outs]
                arrays = list(memory[:, : block[0].size])
                # Into other memory: an input may be a word.
                for word, out in zip(arrays, block, strict=False):
                    word[...] = -0.0 if fresh else out
                for term in row[num_outs:]:
                    if add_term(arrays, term[start : start + BLOCK]):
                        flag[...] = 1
                for out, word in zip(block, arrays, strict=False):
                    out[...] = word


def canonical_words(words: Sequence[np.ndarray]) -> np.ndarray:
    """Returns words that are the same for equal sums, ``[word, …]``.

    Each word is the rest of the sum after the words before it, rounded.

    Args:
        words: float32 or float64 arrays of one shape.
    """
    left, made = [word.reshape(-1) for word in words], np.empty_like(words)
    flags = [np.zeros(1, np.int32)] if made.dtype == np.float64 else []
    flat = made.reshape(len(words), -1)
    with np.errstate(all="ignore"):
        for word in flat:
            _exact_sum_reference([[word, *flags, *left]], 1 + len(flags), len(left), 1.0)
            left.append(-word)
    # Nothing is left of what is not finite; all words of -0 are -0.
    flat[1:, ~np.isfinite(flat[0])] = 0
    flat[1:, flat[0] == 0] = flat[0][flat[0] == 0]
    return made


def as_num_words(words: Any) -> int:
    """Validates the number of words of a sum; ``ValueError`` unless it is 2 to 8."""
    number = as_count("words=", words)
    if not 2 <= number <= MOST_WORDS:
        raise ValueError(f"words={number} must be at least 2, and at most {MOST_WORDS}")
    return number


ADD_WORDS = Kernel(
    name="add_words",
    source="add_words",
    reference=_add_words_reference,
    scalars=(("num_outs", "int64"), ("num_inputs", "int64"), ("fresh", "int64")),
    templates=tuple(
        (words, term, count)
        for words, term in (*[("float32", name) for name in FLOATS[:3]], ("float64", "float64"))
        for count in (0, 3)
    ),
    writes="num_outs",
)


def add_words(
    words: Sequence[Sequence[Buffer]],
    flags: Sequence[Buffer],
    inputs: Sequence[Sequence[Buffer]],
    *,
    fresh: bool = False,
    device: Device,
    queue: Queue = "compute",
) -> None:
    """Adds ``inputs[t][0] + inputs[t][1] + …`` to the sum of ``words[t]``, for every tensor t.

    The sum stays exact if it fits into the words; ``exact_sum`` of the words rounds it. One launch
    for all tensors with the same dtypes and numbers of words and inputs.

    Args:
        words: for each tensor two to eight float32 or float64 words, the largest first;
            overwritten.
        flags: an int32 for each tensor. It becomes 1 if a finite sum did not fit; otherwise it is
            not written.
        inputs: for each tensor at least one term of the words' size; all terms of one dtype: that
            of the words, or float16 or bfloat16 for float32. An input may be a word, but not
            overlap one partly.
        fresh: whether the words are not read: the sum of the inputs replaces their sum.
        device: the device that launches. Adds no stream waits.
        queue: the queue to launch on.

    The operands are not validated.
    """
    rows: dict[int, list[Row]] = {}
    for written, flag, read in zip(words, flags, inputs, strict=True):
        rows.setdefault(len(written), []).append((*written, flag, *read))
    for num_words, found in rows.items():
        for (to, of, num_operands), table in by_template(same_dtypes(found)).items():
            scalars = (num_words + 1, num_operands - num_words - 1, int(fresh))
            known = num_words if num_words == 3 else 0
            device.launch(ADD_WORDS, (to, of, known), table, scalars, queue=queue)
