"""Traffic of a launch: every element is read once and written once, for any geometry.

g++ -fsanitize=thread puts a call before every access to memory. Here those calls add up the bytes
of each operand, in the place of the ThreadSanitizer that would answer them.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.exact_data import finite_data, random_data
from support.implementations import (
    Operand,
    blank,
    buffers,
    opened,
    operands,
    random_terms,
    start_patterns,
)
from support.update_formulas import FORMULAS
from support.update_operands import all_scalars, layout, rule_of

from gradreduce.backends.sim import host_compile
from gradreduce.device import Device
from gradreduce.device.run.kernel import Kernel
from gradreduce.ops import KERNELS, RuleKernel, plan_segments
from gradreduce.ops.add_words import ADD_WORDS
from gradreduce.ops.all_sum import ALL_SUM, UNROLLED
from gradreduce.ops.exact_sum import EXACT_SUM
from gradreduce.ops.segment_sum import SEGMENT_SUM

pytestmark = pytest.mark.host

MOST = 32  # operands
COUNTER = """
struct Operand { unsigned long start, end, read, written; };
extern "C" { Operand counted[MOST]; int num_counted = 0; }
#define PLAIN __attribute__((no_sanitize("thread")))
PLAIN static void count(void* at, unsigned long size, bool written) {
    const unsigned long address = (unsigned long)at;
    for (int k = 0; k < num_counted; ++k)
        if (counted[k].start <= address && address < counted[k].end)
            (written ? counted[k].written : counted[k].read) += size;
}
#define ACCESS(size) \\
    PLAIN void __tsan_read##size(void* at) { count(at, size, false); } \\
    PLAIN void __tsan_write##size(void* at) { count(at, size, true); } \\
    PLAIN void __tsan_unaligned_read##size(void* at) { count(at, size, false); } \\
    PLAIN void __tsan_unaligned_write##size(void* at) { count(at, size, true); }
extern "C" {
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
PLAIN void __tsan_read_range(void* at, unsigned long size) { count(at, size, false); }
PLAIN void __tsan_write_range(void* at, unsigned long size) { count(at, size, true); }
PLAIN void __tsan_init() {}
}
""".replace("MOST", str(MOST))
FLAGS = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-nostdlib")
SIZE = 40_003  # more than a chunk, vectors and a tail


class _Counted(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulong) for name in ("start", "end", "read", "written"))


@dataclass(frozen=True)
class Counter:
    device: Device
    built: list[ctypes.CDLL]

    def moved(self, kernel: Kernel, template, row: list[Operand], scalars) -> list[tuple[int, int]]:
        """How often one launch read and wrote each byte of each operand."""
        planted = replace(kernel, templates=(template,))  # a new one: builds are cached by kernel
        self.device.compile_kernel(planted, template)
        library = self.built[-1]
        counted = (_Counted * MOST).in_dll(library, "counted")
        for place, operand in enumerate(row):
            start = operand.buffer.address
            counted[place] = _Counted(start, start + operand.buffer.nbytes, 0, 0)
        ctypes.c_int.in_dll(library, "num_counted").value = len(row)
        self.device.launch(planted, template, [buffers(row)], scalars)
        sizes = [operand.buffer.nbytes for operand in row]
        found = zip(counted, sizes, strict=False)
        return [(one.read / size, one.written / size) for one, size in found]


@pytest.fixture
def counter(monkeypatch) -> Iterator[Counter]:
    text, load, built = host_compile._host_text, host_compile._load, []

    def kept(*arguments):
        built.append(load(*arguments))
        return built[-1]

    flags = (*host_compile.BUILDS["exact"], *FLAGS)
    monkeypatch.setitem(host_compile.BUILDS, "exact", flags)
    monkeypatch.setattr(host_compile, "_host_text", lambda kernel: text(kernel) + COUNTER)
    monkeypatch.setattr(host_compile, "_load", kept)
    with opened("exact") as device:
        yield Counter(device, built)


READ, WRITTEN, BOTH = (1, 0), (0, 1), (1, 1)
# kernel -> template, scalars, dtypes of the operands, how often each is read and written
MOVED = {
    "add_n": (("bfloat16", "bfloat16", 3), (3,), ["bfloat16"] * 4, [WRITTEN, READ, READ, READ]),
    "exact_sum": (
        ("bfloat16", "bfloat16", 3), (2, 3, 3.0), ["bfloat16"] * 5, [WRITTEN] * 2 + [READ] * 3
    ),
    "add_words": (
        ("float32", "bfloat16", 3), (4, 2, 0), [*["float32"] * 3, "int32", *["bfloat16"] * 2],
        [BOTH] * 3 + [(0, 0)] + [READ] * 2,
    ),
    "accumulate_n": (
        ("float32", "bfloat16"), (2,), ["float32", *["bfloat16"] * 2], [BOTH, READ, READ]
    ),
    "all_sum": (
        ("bfloat16", "float32", 0), (2, 3, 1, 3.0), [*["bfloat16"] * 2, *["float32"] * 3],
        [WRITTEN] * 2 + [READ] * 3,
    ),
    "pack": (("float32", "bfloat16"), (0.5,), ["float32", "bfloat16"], [WRITTEN, READ]),
    "scale": (("float32", "bfloat16"), (3.0, 0.5), ["float32", "bfloat16"], [WRITTEN, READ]),
    "add_scaled": (("float32", "bfloat16"), (3.0,), ["float32", "bfloat16"], [BOTH, READ]),
    "divide": (("float32", "int8"), (3.0,), ["float32", "int8"], [WRITTEN, READ]),
    "distance_scale": (
        ("bfloat16",), (0.3,), [*["float32"] * 2, *["bfloat16"] * 2], [WRITTEN, READ, READ, READ]
    ),
}  # fmt: skip
# rule -> the template of its kernels, if it is not that of float32
TEMPLATES = {
    "nesterov": ("bfloat16", "bfloat16"),
    "adam": ("bfloat16", "float32"),  # a master
    "adagrad": ("float64", "float64"),
}


def of_a_rule(kernel: RuleKernel, *, first: int = 0):
    rule = rule_of(kernel)
    template = TEMPLATES.get(rule, ("float32", "float32"))
    kinds, dtypes = zip(*layout(kernel, template), strict=True)
    moved = dict.fromkeys(("var", "master", "slot"), BOTH) | {"grad": READ, "copy": WRITTEN}
    moved["sum"] = READ if kernel.variant == "global" else WRITTEN if first else BOTH
    scalars = all_scalars(kernel, template, FORMULAS[rule][2], first=first)
    return template, scalars, dtypes, [moved[kind] for kind in kinds]


UPDATES = [kernel for kernel in KERNELS if isinstance(kernel, RuleKernel)]
MOVED |= {kernel.name: of_a_rule(kernel) for kernel in UPDATES}


def test_every_elementwise_kernel_is_here():
    assert MOVED.keys() == {kernel.name for kernel in KERNELS if kernel.items is None}


# The rules share the bodies of their variants: a plain run builds one of each.
IN_PLAIN_RUNS = {*MOVED.keys() - {kernel.name for kernel in UPDATES}}
IN_PLAIN_RUNS |= {"adam", "local_nesterov", "global_momentum"}
CASES = [
    pytest.param(
        kernel, id=kernel.name, marks=[] if kernel.name in IN_PLAIN_RUNS else pytest.mark.exhaustive
    )
    for kernel in KERNELS
    if kernel.items is None
]


@pytest.mark.parametrize("kernel", CASES)
def test_every_element_is_moved_once(counter, kernel):
    check(counter, kernel, *MOVED[kernel.name])


def test_the_first_gradient_of_a_period_does_not_read_the_sum(counter):
    """With a master and without."""
    for kernel in UPDATES:
        if kernel.variant == "local" and rule_of(kernel) in ("sgd", "adam"):
            check(counter, kernel, *of_a_rule(kernel, first=1))


def check(counter, kernel, template, scalars, dtypes, expected):
    """With numbers of similar magnitudes: exact_sum reads others again."""
    for starts in start_patterns(len(expected))[:3]:
        row = [
            Operand(counter.device, finite_data((SIZE,), dtype, seed=place), start)
            for place, (dtype, start) in enumerate(zip(dtypes, starts, strict=True))
        ]
        assert counter.moved(kernel, template, row, scalars) == expected


def test_words_that_are_replaced_are_not_read(counter):
    template, scalars, dtypes, moved = MOVED["add_words"]
    check(counter, ADD_WORDS, template, (*scalars[:2], 1), dtypes, [WRITTEN] * 3 + moved[3:])


@pytest.mark.parametrize("num_inputs", [1, 3, 4, 9])
def test_n_replicas_are_read_once_and_n_written_once(counter, num_inputs):
    """For any split, into other memory and in place."""
    template = ("float32", "float32", num_inputs if num_inputs in UNROLLED else 0)
    terms = random_terms(num_inputs, 1003, "float32")
    for split in range(num_inputs):
        scalars = (num_inputs, num_inputs, split, 1.0)
        outs = [blank(counter.device, 1003, "float32") for _ in terms]
        row = [*outs, *operands(counter.device, terms)]
        expected = [WRITTEN] * num_inputs + [READ] * num_inputs
        assert counter.moved(ALL_SUM, template, row, scalars) == expected
    inputs = operands(counter.device, terms)
    in_place = counter.moved(ALL_SUM, template, [*inputs, *inputs], scalars)
    assert in_place == [BOTH] * 2 * num_inputs


def test_three_words_hold_the_sum_of_more_than_eight_terms(counter):
    """So these are not read again for an integer."""
    terms = [np.full(1003, 2.0**-power, np.float32) for power in (0, 30, 60, *[30] * 6)]
    row = [blank(counter.device, 1003, "float32"), *operands(counter.device, terms)]
    moved = counter.moved(EXACT_SUM, ("float32", "float32", 0), row, (1, 9, 1.0))
    assert moved == [WRITTEN] + [READ] * 9


@pytest.mark.parametrize("width", [7, 8])
def test_every_row_of_a_segment_is_read_once(counter, width):
    plan = plan_segments(np.random.default_rng(0).integers(0, 300, 2000))
    values = Operand(counter.device, random_data((2000 * width,), "float32"))
    out = blank(counter.device, plan.num_segments * width, "float32")
    rest = [Operand(counter.device, part) for part in (plan.order, plan.bounds)]
    moved = counter.moved(SEGMENT_SUM, ("float32", "float32"), [out, values, *rest], (0, 0, 1.0))
    assert moved[:2] == [WRITTEN, READ]
    assert [written for _, written in moved[2:]] == [0, 0]
