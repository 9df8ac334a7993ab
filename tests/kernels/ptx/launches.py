"""Small launches of every kernel: tails, empty rows, rows off a 16-byte boundary, shared memory.

Values have subnormal numbers, infinities, NaNs and ties. Each instantiation is launched with one
row that crosses item 2**32; with two rows, of which the first one is huge and only its end exists;
with many rows in the parameters; and with many rows in memory and their map. Of many rows, the last
one is after the end of the launch.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import ml_dtypes
import numpy as np
from support.exact_data import finite_data, random_data, same, specials
from support.exact_sums import adversarial_terms
from support.implementations import accumulate_dtype_of, start_patterns
from support.update_formulas import FORMULAS
from support.update_operands import all_scalars, layout, rule_of

from gradreduce.device import Kernel, Template, as_dtype
from gradreduce.device.run.table import INLINE_WORDS, row_map, row_words, struct
from gradreduce.ops import RuleKernel, plan_segments

from .machine import MOST, Machine, Memory

CHUNK = 112  # items: seven vectors of bytes
FAR = 1 << 33  # is added to the numbers of rows, before which nothing exists
# The items of the rows of a launch.
ROWS = (224, 13, 0, 1, 16, 4, 80, 20, 112, 111, 224, 113, 229, 0, 108, 12, 73, 337, 56, 8, 28)
ROWS += (0, 68, 5)


class Operand(NamedTuple):
    """An operand; those with the same ``memory`` share it."""

    memory: np.ndarray  # its bytes
    dtype: np.dtype  # its dtype
    start: int = 0  # the bytes by which its address misses a 16-byte boundary
    before: int = 0  # its elements that do not exist, before those in ``memory``
    more: int = 0  # is added to its integers, but not for the reference
    several: bool = False  # whether several threads may write it, and none reads it

    @property
    def content(self) -> np.ndarray:
        """The bytes in the memory of the launch."""
        return (
            (self.memory.view(self.dtype) + self.more).view(np.uint8) if self.more else self.memory
        )

    @property
    def size(self) -> int:
        return self.before + self.memory.size // self.dtype.itemsize


Row = list[Operand]


class Geometry(NamedTuple):
    """How a launch is made."""

    inline: bool  # whether the rows are in the parameters, or in memory with their map
    threads: int  # of a block
    skipped: int = 0  # items of the first row that do not exist, a multiple of ``CHUNK``
    # The number of blocks, of which only those that have a chunk are run. 0: two chunks for each
    # block, or one if the rows are in memory.
    blocks: int = 0
    after: int = 0  # the number of last rows that belong to the table, but not to the launch


CROSSING = Geometry(True, 4, 2**32 // CHUNK * CHUNK, 2**17 + 1)
HUGE = Geometry(True, 4, (CHUNK << 32) + (CHUNK << 22), 2**17 + 1)  # sizes of 2**39
INLINE = Geometry(True, 2, CHUNK << 14, after=1)
MAPPED = Geometry(False, 32, CHUNK << 14, after=1)


class Launch:
    """A launch of a kernel with a table of rows.

    Args:
        kernel: the kernel.
        rows: its operands. A row without items is one that the kernel must skip.
        scalars: the arguments after the table.
        geometry: how it is launched.
    """

    def __init__(self, kernel: Kernel, rows: Sequence[Row], scalars: Sequence[float],
                 geometry: Geometry) -> None:  # fmt: skip
        self.kernel, self.rows, self.scalars, self.geometry = kernel, rows, scalars, geometry

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """The operands of all rows after the launch, by the NumPy reference."""
        copies = {id(each.memory): each.memory.copy() for row in self.rows for each in row}
        table = [[copies[id(each.memory)].view(each.dtype) for each in row] for row in self.rows]
        launched = table[: len(table) - self.geometry.after]
        with np.errstate(all="ignore"):
            self.kernel.reference([row for row in launched if row[0].size], *self.scalars)
        return [operand for row in table for operand in row]

    def problem(self, machine: Machine, most: int = MOST) -> str:
        """Runs an entry; returns how its results differ from the reference, or nothing.

        Raises:
            PtxError: the entry does what no kernel may do, or runs more than ``most`` blocks.
        """
        memory, places = self._placed()
        self._run(machine, memory, places, most)
        operands = [each for row in self.rows for each in row]
        # A written operand comes first: its dtype is that of the results, some of which are NaN.
        first = {id(each.memory): each for each in reversed(operands)}
        for number, (each, expected) in enumerate(zip(operands, self.expected, strict=True)):
            if each is not first[id(each.memory)]:
                continue
            found = memory.content(places[id(each.memory)]).view(each.dtype)
            with np.errstate(invalid="ignore"):
                if not same(found - found.dtype.type(each.more) if each.more else found, expected):
                    row, operand = divmod(number, len(self.rows[0]))
                    return f"operand {operand} of row {row} differs from the reference"
        return ""

    def _placed(self) -> tuple[Memory, dict[int, int]]:
        num_written = self.kernel.num_written(self.scalars)
        written = {id(each.memory) for row in self.rows for each in row[:num_written]}
        memory, places = Memory(), dict[int, int]()
        for row in self.rows:
            for each in row:
                key = id(each.memory)
                if key not in places:
                    writes = (key in written) * (2 if each.several else 1)
                    places[key] = memory.add(each.content, writes=writes, start=each.start)
        return memory, places

    def _run(self, machine: Machine, memory: Memory, places: dict[int, int], most: int) -> None:
        inline, threads, skipped, blocks, after = self.geometry
        addresses = [
            [places[id(each.memory)] - each.before * each.dtype.itemsize for each in row]
            for row in self.rows
        ]
        items = [self.kernel.num_items([row])[0] if row[0].size else 0 for row in self.rows]
        # Other elementwise kernels have no use for the sizes of their last operands.
        unused = self.kernel.items is None and self.kernel.name not in PADDED
        sizes = [-1 if unused else row[-1].size for row in self.rows]
        words, num_chunks = row_words(*map(np.array, (items, sizes, addresses)), CHUNK)
        address = 0
        if not inline:
            mapped = np.append(words, row_map(words, num_chunks))
            address = memory.add(mapped.view(np.uint8))
        table = struct(words, num_chunks, address=address, chunk_size=CHUNK)
        table["end_chunk"] = end = words[-after, 0] if after else num_chunks
        num_chunks = int(end) - skipped // CHUNK
        grid = blocks or (num_chunks // 2 if inline else num_chunks + 1)
        first_block = blocks and blocks - num_chunks
        table["first_chunk"] = skipped // CHUNK - first_block
        num_unused = INLINE_WORDS - words.size * inline
        kinds = {"int64": np.int64, "float64": np.float64}
        scalars = [
            np.array([value], kinds[kind]).view(np.uint8)
            for (_, kind), value in zip(self.kernel.scalars, self.scalars, strict=True)
        ]
        parameters = [table.view(np.uint8)[: table.nbytes - 8 * num_unused], *scalars]
        machine.run(memory, parameters, grid, threads, first_block, most)


def values(size: int, dtype: str | np.dtype, number: int) -> np.ndarray:
    """Every third row is finite; the others are ``random_data`` with more special values."""
    dtype, rng = as_dtype(dtype), np.random.default_rng(number)
    if dtype.kind in "iu" or number % 3 == 0:
        return finite_data((size,), dtype, seed=number)
    made = random_data((size,), dtype, seed=number)
    chosen = rng.choice([*specials(dtype), 1, 3, np.inf, -np.inf, np.inf, np.nan], size)
    with np.errstate(all="ignore"):
        made = np.where(rng.random(size) < 0.4, chosen.astype(dtype), made)
    bits = made.view(f"u{dtype.itemsize}")
    if dtype.itemsize == 4:  # halfway between two numbers of bfloat16, and beside it
        ties = (bits & 0xFFFF0000) + rng.integers(0x7FFF, 0x8002, size).astype(np.uint32)
        bits[...] = np.where(rng.random(size) < 0.2, ties, bits)
    bits[7::17] = np.array(np.inf, dtype).view(bits.dtype) + 1  # a NaN with the least payload
    return made


def operand(made: np.ndarray, start: int = 0, before: int = 0, more: int = 0) -> Operand:
    """An operand that starts so many elements after a 16-byte boundary."""
    content = np.ascontiguousarray(made).view(np.uint8)
    return Operand(content, made.dtype, start * made.itemsize, before, more)


# ---- elementwise kernels ------------------------------------------------------------------------


PADDED = ("pack", "scale")  # their input may be shorter than their output
# kernel, except those of rules -> operands, scalars
LAUNCHES = {
    "add_n": (4, (3,)),
    "exact_sum": (5, (2, 3, 1.0)),
    "add_words": (7, (4, 3, 0)),
    "accumulate_n": (4, (3,)),
    "all_sum": (5, (2, 3, 1, 1.0)),
    "pack": (2, (1.0,)),
    "scale": (2, (3.0, 1.0)),
    "add_scaled": (2, (3.0,)),
    "divide": (2, (0.5,)),
    "segment_sum": (4, (0, 0, 1.0)),
    "take_rows": (3, ()),
    "square_sum": (2, (17, 59, 1, 0)),
    "clip": (3, (1000.0,)),
    "distance_scale": (4, (0.5,)),
}


def dtypes_of(kernel, template, num_operands, num_written):
    names = [name for name in template if isinstance(name, str)]
    if isinstance(kernel, RuleKernel):
        found = [dtype for _, dtype in layout(kernel, template)]
    elif kernel.name == "distance_scale":
        found = [accumulate_dtype_of(as_dtype(names[0]))] * 2 + [names[0]] * 2
    else:
        found = [names[0]] * num_written + [names[-1]] * (num_operands - num_written)
    return [as_dtype(name) for name in found]


def launch_of(kernel, template):
    if isinstance(kernel, RuleKernel):
        scalars = all_scalars(kernel, template, FORMULAS[rule_of(kernel)][2], divisor=1.0)
        return len(layout(kernel, template)), scalars
    if kernel.name == "add_n" and template[2]:
        return 1 + template[2], (template[2],)
    if kernel.name == "exact_sum" and is_flagged(kernel, template):
        return 5, (3, 2, 1.0)
    if kernel.name == "exact_sum" and template[2]:
        return 2 + template[2], (2, template[2], 1.0)
    if kernel.name == "all_sum" and template[2]:
        return 2 + template[2], (2, template[2], template[2] // 2, 1.0)
    return LAUNCHES[kernel.name]


def shared(kernel: Kernel, template: Template, scalars: Sequence[float]) -> dict[int, int]:
    """Operands that may be another one exactly: the written one -> the other."""
    if isinstance(kernel, RuleKernel):
        kinds = [kind for kind, _ in layout(kernel, template)]
        copies = [place for place, kind in enumerate(kinds) if kind == "copy"]
        return {place: number for number, place in enumerate(copies)}
    if kernel.name in ("all_sum", "exact_sum"):
        num_outs, num_inputs = map(int, scalars[:2])
        return {place: num_outs + place for place in range(min(num_outs, num_inputs))}
    return {0: 1}


def elementwise(kernel: Kernel, template: Template, scalars: Sequence[float], number: int,
                size: int, before: int) -> Row:  # fmt: skip
    """A row; its number decides where its operands start, and whether two share memory."""
    num_operands, num_written = launch_of(kernel, template)[0], kernel.num_written(scalars)
    if kernel.name in ("add_n", "exact_sum", "accumulate_n", "all_sum"):
        num_operands = num_written + int(scalars[kernel.name in ("all_sum", "exact_sum")])
    dtypes = dtypes_of(kernel, template, num_operands, num_written)
    sizes, skipped = [size] * num_operands, [before] * num_operands
    if kernel.name in PADDED:
        sizes[1] = max(0, size - (0, 5, 40, 100)[number // 2 % 4])
    made = [values(sizes[k], dtype, number + 300 * k) for k, dtype in enumerate(dtypes)]
    _prepare_results(kernel, scalars, made, number)
    if kernel.name == "exact_sum" and number % 2:
        num_inputs = num_operands - num_written
        made[num_written:] = (
            terms_apart(num_inputs, size, dtypes[-1], number)
            if number % 4 == 3
            else adversarial_terms(num_inputs, size, dtypes[-1], number, dtypes[0])
        )
    if kernel.name == "clip":
        made[2], skipped[2] = np.array([(2.0, np.inf, 30.0, np.nan, 7.0)[number % 5]]), 0
    if isinstance(kernel, RuleKernel):
        _prepare_state(made, [kind for kind, _ in layout(kernel, template)], number)
    starts = start_patterns(num_operands)[number % 4 if number % 2 else 0]
    row = list(map(operand, made, starts, skipped))
    for place, other in shared(kernel, template, scalars).items() if number % 5 == 2 else ():
        if row[place].memory.size == row[other].memory.size:
            row[place] = row[other]._replace(dtype=row[place].dtype)
    return row


def terms_apart(count: int, size: int, dtype: np.dtype, number: int) -> list[np.ndarray]:
    """Sums with every exponent, of terms so far apart that two words do not hold them."""
    info, rng = ml_dtypes.finfo(dtype), np.random.default_rng(number)
    apart = int(info.nmant) + 7
    exponents = int(info.maxexp) - 2 - np.arange(size) % (int(info.maxexp) - int(info.minexp))
    signs = rng.choice([1.0, -1.0], (count, size)) * (1 + rng.random((count, size)))
    return [
        np.ldexp(each, exponents - apart * place).astype(dtype) for place, each in enumerate(signs)
    ]


def _prepare_results(kernel: Kernel, scalars: Sequence[float], made: list[np.ndarray],
                     number: int) -> None:  # fmt: skip
    """Some sums are -0.0 or infinite; some quotients are beside ties of bfloat16, rounded to them.

    Those above even numbers tell one rounding from two, those below odd numbers how it rounds.
    """
    for each in made if number % 3 else ():
        if each.dtype.kind not in "iu":
            each[3::17], each[5::17] = -0.0, np.inf
    if kernel.name == "pack" and made[1].dtype == np.float32 and scalars[0] != 1:
        some = made[1][np.arange(made[1].size) % 3 > 0]
        odd = np.arange(some.size) % 2
        ties = (some.view(np.uint32) & 0xFFFE0000 | 0x8000 | odd << 16).astype(np.uint32)
        with np.errstate(all="ignore"):
            beside = np.where(odd, 0, np.copysign(np.inf, ties.view(np.float32)))
            products = ties.view(np.float32) * np.float32(scalars[0])
            made[1][np.arange(made[1].size) % 3 > 0] = np.nextafter(products, beside.astype("f4"))


def _prepare_state(made: list[np.ndarray], kinds: list[str], number: int) -> None:
    """Every third master rounds to its variable, one of nine is a tie that no gradient changes.

    Some variables are infinite, with other finite operands. The roots of many slots are numbers.
    """
    with np.errstate(all="ignore"):
        for kind, array in zip(kinds, made, strict=True):
            if kind == "slot" and number % 2:
                array[...] = np.abs(array)
        for array in made[1:]:
            array[2::9], array[6::9] = 1.0, 0.0
        made[0][2::9] = np.inf
        if kinds[1] == "master":
            narrow, master = made[0], made[1]
            between = narrow[6::9].astype(master.dtype) + np.nextafter(narrow[6::9], np.inf)
            master[2::9], master[6::9] = np.inf, between / 2
            narrow[6::9] = master[6::9]
            narrow[::3] = master.astype(narrow.dtype)[::3]


# ---- other kernels ------------------------------------------------------------------------------


def segments(template: Template, scalars: Sequence[float], number: int, before: int) -> Row:
    """A third of the sums is added to rows of the output; the sums of one column are -0.0.

    A huge row has many rows before those of the sums.
    """
    width, start = (16, 7, 1, 112)[number % 4], number // 4 % 3
    plan = plan_segments(np.random.default_rng(number).integers(0, 9, 14 + number))
    places = np.where(np.arange(plan.num_segments) % 3, plan.indices, ~plan.indices)
    has_into, has_divisors, _ = scalars
    num_rows, skipped = 9 if has_into else plan.num_segments, before // width
    added = values(plan.order.size * width, str(template[1]), number + 300)
    added[number % width :: width] = -0.0
    row = [operand(values(num_rows * width, str(template[0]), number), start,
                   0 if has_into else before),
           operand(added, start, FAR * width + before),
           operand(plan.order, 0, FAR + skipped, FAR + skipped)]  # fmt: skip
    if has_into:
        row.append(operand(places, 0, skipped))
    if has_divisors:
        row.append(operand(1 + np.arange(plan.num_segments) % 4 * 0.7, 0, skipped))
    return [*row, operand(plan.bounds, 0, skipped, FAR + skipped)]


def taken(template: Template, _: Sequence[float], number: int, before: int) -> Row:
    """A huge row is the end of one wide row of the values, the sixth one."""
    width, start, num_taken = (16, 7, 1, 112)[number % 4], number // 4 % 3, 3 + number
    rows, more, skipped = np.random.default_rng(number).integers(0, 6, num_taken), FAR, FAR * width
    if before:
        rows, num_taken, width, more = np.zeros(1, np.int64), 1, 16 * width + 5, 5
        skipped = 5 * (before + width) + before
    return [
        operand(values(num_taken * width, str(template[0]), number), start, before),
        operand(
            values((1 if before else 6) * width, str(template[0]), number + 300), start, skipped
        ),
        operand(rows, more=more),
    ]


def squares(template: Template, scalars: Sequence[float], number: int, before: int) -> Row:
    """Some sums are zero."""
    lanes, terms, start = int(scalars[0]), int(scalars[1]), (0, 1, 0, 2)[number // 5 % 4]
    block = lanes * terms
    size = (5 * block, 1, lanes, 7 * block - 1, 2 * block + lanes + 3)[number % 5]
    num_blocks = -(-size // block)
    terms_of = values(size, str(template[0]), number + 300)
    if number % 2 == 0:  # rising squares: the last bits of each one count
        rising = np.exp2(np.arange(size) // lanes % terms / 2)
        terms_of[...] = rising * (1 + np.random.default_rng(number).random(size))
    terms_of[number % lanes :: lanes] = -0.0
    return [
        operand(values(lanes * num_blocks, "float64", number), start, before),
        operand(terms_of, start, before * terms),
    ]


def with_flag(template: Template, scalars: Sequence[float], number: int, before: int) -> Row:
    """Words and sums are any numbers before, and some of them are inputs.

    Every sixth row sets no flag: its finite sums fit.
    """
    num_outs, num_inputs, _ = map(int, scalars)
    size = (224, 13, 0, 49, 113)[number % 5]
    # Only the first word can be infinite or NaN.
    made = [values(size, str(template[0]), number + 300 * k) for k in range(num_outs - 1)]
    made[1:] = [np.where(np.isfinite(word), word, number).astype(word.dtype) for word in made[1:]]
    terms = adversarial_terms(num_inputs, size, str(template[1]), number)
    if number % 6 == 0:
        terms = [values(size, str(template[1]), number + 300 * k) for k in range(9, 9 + num_inputs)]
        made[0][3::17] = terms[0][4::17] = np.inf
    starts = start_patterns(num_outs + num_inputs)[number % 4 if number % 2 else 0]
    row = [
        operand(each, start, before) for each, start in zip([*made, *terms], starts, strict=False)
    ]
    for k in range(min(num_outs - 1, num_inputs) if number % 4 == 2 else 0):
        if terms[k].dtype == made[k].dtype:
            row[num_outs - 1 + k] = row[k]
    flag = operand(np.full(1, number, np.int32), starts[-1])._replace(several=True)
    return [*row[: num_outs - 1], flag, *row[num_outs - 1 :]]


# Makes a row of a kernel that is not elementwise.
OTHERS: dict[str, Callable[[Template, Sequence[float], int, int], Row]] = {
    "segment_sum": segments, "take_rows": taken, "square_sum": squares,
}  # fmt: skip


def is_flagged(kernel: Kernel, template: Template) -> bool:
    """Whether the last operand that is written is a flag, of one element."""
    return kernel.name == "add_words" or (kernel.name == "exact_sum" and template[0] == "float64")


# ---- all of them --------------------------------------------------------------------------------


def row_of(kernel: Kernel, template: Template, scalars: Sequence[float], number: int, size: int,
           before: int) -> Row:  # fmt: skip
    if is_flagged(kernel, template):
        return with_flag(template, scalars, number, before)
    if kernel.name in OTHERS:
        return OTHERS[kernel.name](template, scalars, number, before)
    return elementwise(kernel, template, scalars, number, size, before)


def small_row(kernel: Kernel, template: Template, scalars: Sequence[float], number: int,
              size: int) -> list[np.ndarray]:  # fmt: skip
    """The arrays of a row all of which exists."""
    return [
        each.memory.view(each.dtype) for each in row_of(kernel, template, scalars, number, size, 0)
    ]


def scalars_of(kernel: Kernel, template: Template) -> list[tuple[float, ...]]:
    """The scalars of at least four launches.

    Loops over operands are unrolled by four: all remainders occur.
    """
    name, made = kernel.name, launch_of(kernel, template)[1]
    if name == "exact_sum" and is_flagged(kernel, template):
        return [made, (2, 9, 1.0), (2, 3, 7.0), (4, 2, 1.0), (2, 1, 0.1)]
    divides = all("float" in part for part in template if isinstance(part, str))
    if isinstance(kernel, RuleKernel):
        numbers = FORMULAS[rule_of(kernel)][2]
        return [all_scalars(kernel, template, numbers, first=k % 2, divisor=(3.5, 2.0, 1.0)[k % 3])
                for k in range(4)]  # fmt: skip
    if name == "all_sum":
        by, n = (10.1, 7.3) if divides else (1.0, 1.0), template[2]
        if n:
            return [made, (2, n, 0, by[0]), (1, n, min(1, n - 1), by[1]), made]
        return [(2, 5, 0, by[0]), (2, 4, 2, by[0]), (2, 13, 1, by[1]), (2, 3, 2, 1.0),
                (1, 8, 3, 1.0), (1, 6, 3, 1.0), (1, 8, 4, by[0]), (2, 1, 0, by[1])]  # fmt: skip
    several: dict[str, list[tuple[float, ...]]] = {
        "pack": [(10.1,), (1.0,), (7.3,), (1.0,)] if divides else [(1.0,)] * 4,
        "scale": [(0.1, 1.0), (3.0, 10.0), (1e-3, 3.0), (7.0, 1.0)] if divides
        else [(3.0, 1.0), (2.0, 1.0), (5.0, 1.0), (300.0, 1.0)],
        "add_scaled": [(0.1,), (3.0,), (1e-3,), (7.0,)] if divides
        else [(3.0,), (2.0,), (5.0,), (300.0,)],
        "segment_sum": [(0, 0, 10.1), (1, 0, 1.0), (1, 1, 1.0), (0, 0, 1.0)] if divides
        else [(0, 0, 1.0), (1, 0, 1.0), (1, 0, 1.0), (0, 0, 1.0)],
        "add_n": [made] * 4 if template[-1] else [(3,), (9,), (4,), (1,), (2,)],
        "exact_sum": [made, (1, template[-1], 3.0), made, (3, template[-1], 0.1)] if template[-1]
        else [(2, 9, 1.0), (1, 3, 7.0), (3, 10, 1.0), (2, 1, 1.0), (1, 2, 3.0)],
        "add_words": [made, (4, 1, 1), (4, 2, 0), (4, 5, 1)] if template[-1]
        else [(6, 2, 0), (9, 1, 1), (3, 3, 0), (5, 1, 0)],
        "accumulate_n": [(3,), (9,), (4,), (1,), (2,)],
        "divide": [(3.0,), (0.1,), (7.0,), (3.0,)],
        "clip": [(0.3,), (4.0,), (0.07,), (0.3,)],
        "square_sum": [(7, 15, 1, 1), (8, 17, 1, 0), (16, 16, 0, 1), (7, 31, 0, 0)],
        "distance_scale": [(0.1,), (3.0,), (0.7,), (0.1,)],
    }  # fmt: skip
    return several.get(name, [made] * 4)


def launches(kernel: Kernel, template: Template) -> list[Launch]:
    """The launches of an instantiation, the quickest ones first."""
    all_of_them = huge, many, mapped, *_ = scalars_of(kernel, template)
    crossing = [
        _launch(kernel, template, scalars, CROSSING, (49, 21)[: 1 + k], first=3 + 5 * k)
        for k, scalars in enumerate(dict.fromkeys(all_of_them))
    ]
    return [
        *crossing,
        _launch(kernel, template, huge, HUGE, (224, 21)),
        _launch(kernel, template, many, INLINE, ROWS, first=2),
        _launch(kernel, template, mapped, MAPPED, ROWS, first=4),
    ]


def _launch(kernel: Kernel, template: Template, scalars: tuple[float, ...], geometry: Geometry,
            sizes: Sequence[int], first: int = 0) -> Launch:  # fmt: skip
    rows = []
    few = kernel.name in OTHERS or is_flagged(kernel, template)
    for number, size in enumerate(sizes[:10] if few else sizes, first):
        before = geometry.skipped if number == first else 0
        rows.append(row_of(kernel, template, scalars, number, size, before))
    return Launch(kernel, rows, scalars, geometry)
