"""add_words in every implementation: its bits, and the exact sums of its words by integers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import finite_data, same
from support.exact_sums import (
    adversarial_rows,
    adversarial_terms,
    exact_sums,
    fit_into,
    integers_of,
)
from support.exhaustive import examples
from support.implementations import (
    SPLIT_SIZE,
    Operand,
    accumulate_dtype_of,
    blank,
    buffers,
    operands,
    random_terms,
    start_patterns,
)
from support.row_body import RowBody

from gradreduce.device import as_dtype
from gradreduce.ops import add_words, exact_sum
from gradreduce.ops.add_words import ADD_WORDS, MOST_WORDS

MAX, LEAST = float(np.finfo(np.float32).max), 2.0**-149
INF, NAN = np.inf, np.nan
DTYPES = tuple(map(as_dtype, ("float32", "float16", "bfloat16", "float64")))  # of terms
BEFORE = -1515870811  # of a flag that must not be written
PIECE = 37  # elements of a tensor


def expected(row, num_words, num_inputs, fresh):
    """What a launch writes, by the NumPy reference."""
    written = [values.copy() for values in row[: num_words + 1]]
    ADD_WORDS.reference([[*written, *row[num_words + 1 :]]], num_words + 1, num_inputs, int(fresh))
    return written


class TestAddWords(RowBody):
    """The bits of the words, which are any numbers before, are those of the reference."""

    name = "add_words"
    cases = DTYPES
    few = DTYPES[1:3]
    groups = ({"case": "float32"}, {"case": "float32", "num_words": 2}, {"case": "bfloat16"},
              {"case": "float32", "num_inputs": 3}, {"case": "float64"})  # fmt: skip

    def row(self, case, size, seed=0, num_words=3, num_inputs=2):
        dtype = accumulate_dtype_of(as_dtype(case))
        # Only the first word can be infinite or NaN.
        words = random_terms(1, size, dtype, seed + 1)
        words += list(finite_data((num_words - 1, size), dtype, seed=seed + 2))
        flag = np.full(1, BEFORE, np.int32)
        return [*words, flag, *random_terms(num_inputs, size, case, seed)]

    def launch(self, device, rows, *, fresh=False):
        places = [[part.dtype for part in row].index(np.int32) for row in rows]
        words, flags, inputs = (
            [row[:place] for row, place in zip(rows, places, strict=True)],
            [row[place] for row, place in zip(rows, places, strict=True)],
            [row[place + 1 :] for row, place in zip(rows, places, strict=True)],
        )
        add_words(words, flags, inputs, fresh=fresh, device=device)

    def reference(self, case, row, *, fresh=False):
        num_words = [part.dtype for part in row].index(np.int32)
        return expected(row, num_words, len(row) - num_words - 1, fresh)

    @pytest.mark.parametrize("fresh", [False, True])
    def test_every_number_of_words_and_inputs(self, device, case, fresh):
        for num_words in range(2, MOST_WORDS + 1):
            for num_inputs in (1, 2, 5):
                row = self.row(case, 1003, num_words, num_words, num_inputs)
                self.check(device, case, [row], fresh=fresh)

    def test_in_place(self, device):
        """Inputs that are words are read before a word is written."""
        for num_words in (2, 3, 8):
            *words, flag, term = self.row("float32", 17_003, num_words=num_words, num_inputs=1)
            (made,) = operands(device, [flag])
            written = operands(device, words)
            terms = [Operand(device, term, writable=False), *written, written[1]]
            add_words([buffers(written)], [made.buffer], [buffers(terms)], device=device)
            row = [*words, flag, term, *words, words[1]]
            for operand, values in zip(
                [*written, made], expected(row, num_words, num_words + 2, False), strict=True
            ):
                assert same(operand.array, values)
                assert operand.contained()


# ---- exact sums ---------------------------------------------------------------------------------


def check_sum(device, words, terms):
    """The exact sum of the words is that of the terms, or the same infinity or NaN."""
    wide = [term.astype(words[0].dtype) for term in terms]
    finite = np.logical_and.reduce([np.isfinite(term) for term in wide])
    assert total_of(words, finite) == total_of(wide, finite)
    with np.errstate(invalid="ignore"):
        special = sum(np.where(np.isfinite(term), 0, term) for term in wide)
    assert same(words[0][~finite], special[~finite].astype(words[0].dtype))
    assert all(same(word[~finite], np.zeros_like(word[~finite])) for word in words[1:])
    is_minus_zero = [(term == 0) & np.signbit(term) for term in (*wide, *words)]
    assert np.array_equal(
        np.logical_and.reduce(is_minus_zero[: len(wide)]),
        np.logical_and.reduce(is_minus_zero[len(wide) :]),
    )
    if words[0].dtype == np.float32:
        out = blank(device, words[0].size, "float32")
        exact_sum([[out.buffer]], [list(map(device.adopt, words))], device=device)
        assert same(out.array, exact_sums(wide))


def total_of(terms, chosen):
    return sum(integers_of(term[chosen]) for term in terms).tolist()


def check_pieces(device, terms, num_words):
    """Each piece is a tensor. Without a flag its sums are exact; if they fit, it has none."""
    size = terms[0].size
    words = [np.empty(size, accumulate_dtype_of(terms[0].dtype)) for _ in range(num_words)]
    starts = np.arange(0, size, PIECE)
    flags = np.full(starts.size, BEFORE, np.int32)

    def pieces(arrays):
        given = list(map(device.adopt, arrays))
        return [[each.view(at, (min(PIECE, size - at),)) for each in given] for at in starts]

    one_each = device.adopt(flags)
    views = [one_each.view(number, (1,)) for number in range(flags.size)]
    add_words(pieces(words), views, pieces(terms), fresh=True, device=device)
    assert set(flags.tolist()) <= {BEFORE, 1}
    kept = np.repeat(flags == BEFORE, PIECE)[:size]
    check_sum(device, [word[kept] for word in words], [term[kept] for term in terms])
    assert not np.logical_and.reduceat(fit_into(num_words, terms), starts)[flags == 1].any()


def check_many(device, seed, share=1):
    """100,000 elements, or a share of them, of 1 to 1,024 terms."""
    for number, terms in enumerate(adversarial_rows(DTYPES[seed % 4], seed, share)):
        check_pieces(device, terms, (3, 2, 3, 8, 5)[(seed + number) % 5])


@pytest.mark.parametrize("seed", range(4))
def test_adversarial_terms(device, seed):
    check_many(device, seed, share=4)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_million_adversarial_elements(device, part):
    if device.options.build == "exact":  # one thread of a GPU after the other
        check_many(device, part)
        return
    for seed in range(10 * part, 10 * part + 10):
        check_many(device, seed)


@pytest.mark.parametrize("template", ADD_WORDS.templates, ids=ADD_WORDS.expression)
def test_every_template_and_its_cast(device, template):
    to, of, known = template
    for num_words in [known] if known else [2, 8]:
        terms = adversarial_terms(3, 1003, of, num_words)
        words = [np.zeros(1003, to) for _ in range(num_words)]
        row = [*words, np.zeros(1, np.int32), *terms]
        for fresh in (0, 1):
            wanted = expected(row, num_words, 3, fresh)
            for starts in start_patterns(num_words + 4):
                made = operands(device, row, starts)
                device.launch(ADD_WORDS, template, [buffers(made)], (num_words + 1, 3, fresh))
                assert all(map(same, [each.array for each in made], wanted))
                assert all(each.contained() for each in made)
                assert all(each.unchanged() for each in made[num_words + 1 :])


# number of words, terms, whether the flag is set, and word 0 if it is known
SUMS = [
    (3, [MAX, LEAST, -MAX], False, None), (2, [MAX, LEAST, -MAX], False, None),
    (3, [1.0, 2.0**-40, 2.0**-80], False, 1.0), (2, [1.0, 2.0**-40, 2.0**-80], True, None),
    (3, [1.0, 2.0**-40, 2.0**-80, 2.0**-120], True, None),
    (4, [1.0, 2.0**-40, 2.0**-80, 2.0**-120], False, 1.0),
    # The second word is the largest one before the last term.
    (2, [2.0**40, 1.0, -(2.0**40), 2.0**-20, 2.0**-46], False, 1 + 2.0**-20),
    (3, [MAX, MAX], True, INF), (3, [MAX, MAX, -MAX], True, INF),
    (3, [-MAX, -(2.0**103)], True, -INF), (3, [-MAX, -(2.0**102), -(2.0**102)], False, -MAX),
    (3, [MAX, -MAX, MAX], False, MAX), (2, [MAX, 2.0**102, 2.0**79], False, MAX),
    (2, [MAX, 2.0**102, 2.0**60], True, None),
    (3, [INF, MAX, MAX], False, INF), (3, [1.0, -INF, 2.0], False, -INF),
    (2, [INF, 1.0, -INF], False, NAN), (5, [NAN, 1.0], False, NAN),
    (3, [-0.0, -0.0], False, -0.0), (3, [-0.0, 0.0], False, 0.0),
    (2, [1.0, -1.0, -0.0], False, 0.0), (3, [LEAST, LEAST, -2 * LEAST], False, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("num_words", "terms", "flagged", "first"), SUMS)
def test_sums_known_beforehand(device, num_words, terms, flagged, first):
    """Of a tensor between others, at once and term by term."""
    values = [[np.full(PIECE, term, np.float32) for term in each]
              for each in ([1.0] * len(terms), terms, [-0.0] * len(terms))]  # fmt: skip
    calls = [[row[k : k + 1] for row in values] for k in range(len(terms))]
    for parts in ([values], calls):
        words = [[blank(device, PIECE, "float32") for _ in range(num_words)] for _ in values]
        flags = Operand(device, np.full(3, BEFORE, np.int32))
        for number, inputs in enumerate(parts):
            add_words(
                list(map(buffers, words)), [flags.buffer.view(k, (1,)) for k in range(3)],
                [list(map(device.adopt, row)) for row in inputs],
                fresh=number == 0, device=device,
            )  # fmt: skip
        assert flags.array.tolist() == [BEFORE, 1 if flagged else BEFORE, BEFORE]
        assert flags.contained()
        for row, made in zip(values, words, strict=True):
            assert all(word.contained() for word in made)
            if not flagged or row is not values[1]:
                check_sum(device, [word.array for word in made], row)
        if first is not None:
            assert same(words[1][0].array, np.full(PIECE, first, np.float32))
        if first in (INF, -INF) or first != first:
            assert all(same(word.array, np.zeros(PIECE, np.float32)) for word in words[1][1:])


@pytest.mark.parametrize("place", [0, SPLIT_SIZE // 2, SPLIT_SIZE - 1])
def test_one_sum_of_a_large_tensor_does_not_fit(device, place):
    terms = [np.full(SPLIT_SIZE, term, np.float32) for term in (1.0, 2.0**-40, 0.0)]
    words, flag = [device.empty((SPLIT_SIZE,), "float32") for _ in range(2)], np.zeros(1, np.int32)
    for wanted in (0, 1):
        inputs = [list(map(device.adopt, terms))]
        add_words([words], [device.adopt(flag)], inputs, fresh=True, device=device)
        assert flag == wanted
        terms[2][place] = 2.0**-80


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_order_split_and_grouping_has_the_same_sum(device, data):
    """Terms are added by several calls to several sums, which are then added to each other."""
    dtype = data.draw(st.sampled_from(["float32", "float64"]), "dtype")
    num_words, count = data.draw(st.integers(2, 8), "words"), data.draw(st.integers(1, 40), "terms")
    bits = 24 if dtype == "float32" else 53
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6), "seed"))
    # 40 of them have two bits less than the words.
    exponents = rng.integers(0, bits * (num_words - 1) - 7, (count, PIECE))
    exponents -= bits * num_words // 2
    values = np.ldexp(rng.integers(-(2**bits), 2**bits, (count, PIECE)).astype(dtype), exponents)
    order = data.draw(st.permutations(range(count)), "order")
    groups = data.draw(
        st.lists(st.lists(st.integers(0, count), max_size=5), min_size=1, max_size=4)
    )
    sums, flag = [], Operand(device, np.full(1, BEFORE, np.int32))

    def add(words, terms, *, fresh):
        inputs = [list(map(device.adopt, terms))]
        add_words([buffers(words)], [flag.buffer], inputs, fresh=fresh, device=device)

    ends = np.linspace(0, count, len(groups) + 1).astype(int)
    for cuts, first, end in zip(groups, ends, ends[1:], strict=False):
        bounds = sorted({first, end, *(cut for cut in cuts if first < cut < end)})
        words = operands(device, [np.full(PIECE, -0.0, dtype)] * num_words)
        for begin, stop in pairwise(bounds):
            add(words, [values[order[k]] for k in range(begin, stop)], fresh=begin == first)
        sums.append(words)
    total, *others = sums
    for words in others:
        add(total, [word.array for word in words], fresh=False)
    assert flag.unchanged()
    check_sum(device, [word.array for word in total], list(values))
