"""Each kernel with one template, which builds in a second, compared with its reference.

``tests/ops`` compares every template in a plain run; these are for ``tests/planted_faults``, which
builds them again for every fault in the shipped text. A launch writes to its operands only:
AddressSanitizer tells of a read beyond them, which no value shows.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
from kernels.ptx.launches import small_row
from support.background_runs import environment
from support.exact_data import same
from support.implementations import Operand, buffers, opened

from gradreduce.ops import RULE_KERNELS, RULES
from gradreduce.ops.add_n import ADD_N
from gradreduce.ops.add_words import ADD_WORDS
from gradreduce.ops.all_sum import ALL_SUM
from gradreduce.ops.clip import CLIP
from gradreduce.ops.distance_scale import DISTANCE_SCALE
from gradreduce.ops.exact_sum import EXACT_SUM
from gradreduce.ops.pack import PACK
from gradreduce.ops.segment_sum import SEGMENT_SUM
from gradreduce.ops.square_sum import SQUARE_SUM
from gradreduce.ops.take_rows import TAKE_ROWS

pytestmark = [pytest.mark.host, pytest.mark.exhaustive]

SIZE, NUM_ROWS = 1003, 6
HALF, SINGLE, DOUBLE = "float16", "float32", "float64"
ADAM, ADAMW, LION, ADAGRAD, RMSPROP = (
    RULE_KERNELS[RULES[name], "plain"] for name in ("adam", "adamw", "lion", "adagrad", "rmsprop")
)
LOCAL, GLOBAL = (RULE_KERNELS[RULES["momentum"], variant] for variant in ("local", "global"))
# case -> kernel, template, scalars
CASES = {
    "add_n of 3": (ADD_N, (SINGLE, SINGLE, 3), (3,)),
    "add_n of any": (ADD_N, (SINGLE, SINGLE, 0), (3,)),
    "all_sum of 4": (ALL_SUM, (SINGLE, SINGLE, 4), (4, 4, 1, 3.0)),
    "exact_sum of 3": (EXACT_SUM, (SINGLE, SINGLE, 3), (2, 3, 1.0)),
    "exact_sum of any": (EXACT_SUM, (SINGLE, SINGLE, 0), (2, 9, 1.0)),
    "exact_sum to half": (EXACT_SUM, (HALF, SINGLE, 0), (1, 3, 1.0)),
    "exact_sum of doubles": (EXACT_SUM, (DOUBLE, DOUBLE, 0), (2, 9, 1.0)),
    "exact_sum, divided": (EXACT_SUM, (HALF, SINGLE, 0), (3, 3, 3.0)),
    "add_words of 3": (ADD_WORDS, (SINGLE, SINGLE, 3), (4, 2, 0)),
    "add_words of any": (ADD_WORDS, (SINGLE, HALF, 0), (6, 2, 0)),
    "add_words, fresh": (ADD_WORDS, (SINGLE, SINGLE, 3), (4, 3, 1)),
    "pack": (PACK, (SINGLE, SINGLE), (3.0,)),
    "segment_sum": (SEGMENT_SUM, (SINGLE, SINGLE), (1, 1, 1.0)),
    "adam": (ADAM, (HALF, SINGLE), (4, 0.1, 0.2, 0.3, 0.01)),
    "adamw": (ADAMW, (SINGLE, SINGLE), (3, 0.1, 0.2, 0.3, 0.01, 0.9)),
    "lion": (LION, (SINGLE, SINGLE), (2, 0.1, 0.75, 0.25, 0.5, 0.5, 0.9)),
    "adagrad": (ADAGRAD, (SINGLE, SINGLE), (2, 0.1)),
    "rmsprop": (RMSPROP, (SINGLE, SINGLE), (3, 0.1, 0.2, 0.3, 0.01, 0.02)),
    "local_momentum": (LOCAL, (HALF, SINGLE), (4, 0, 0.1, 0.2)),
    "global_momentum": (GLOBAL, (HALF, SINGLE), (5, 3.3, 0.1, 0.2)),
    "distance_scale": (DISTANCE_SCALE, (HALF,), (0.3,)),
    "take_rows": (TAKE_ROWS, ("uint32",), ()),
    "square_sum": (SQUARE_SUM, (SINGLE,), (32, 20, 1, 1)),
    "clip": (CLIP, (SINGLE,), (0.3,)),
}
# The fast build leaves out the loops over vectors.
PLACES = [("exact", case) for case in CASES]
PLACES += [
    ("compiled", case)
    for case in ("add_n of 3", "segment_sum", "exact_sum of any", "add_words of 3")
]


def launched(implementation, kernel, template, scalars):
    """All operands after launches at a vector boundary and one element after it."""
    rows = [small_row(kernel, template, scalars, number, SIZE) for number in range(NUM_ROWS)]
    kernel = replace(kernel, templates=(template,))
    with opened(implementation) as device:
        given = [
            [Operand(device, values, start) for values in row] for row in rows for start in (0, 1)
        ]
        for row in given:
            device.launch(kernel, template, [buffers(row)], scalars)
    operands = [operand for row in given for operand in row]
    assert all(operand.contained() for operand in operands)
    return [operand.array for operand in operands]


@pytest.mark.parametrize(("implementation", "case"), PLACES)
def test_a_launch_equals_the_reference(implementation, case):
    found, wanted = launched(implementation, *CASES[case]), launched("numpy", *CASES[case])
    assert all(map(same, found, wanted))


LAUNCH = """
from dataclasses import replace
import numpy as np
from gradreduce.backends import open_mesh
from gradreduce.ops.add_n import ADD_N

template = ("float32", "float32", 3)
kernel = replace(ADD_N, templates=(template,))
with open_mesh(1, backend="sim", kernels="sanitized") as mesh:
    for size in (1003, 1024):  # the tail ends there, or the last vector does
        row = [mesh.devices[0].adopt(np.ones(size, np.float32)) for _ in range(4)]
        mesh.devices[0].launch(kernel, template, [row], (3,))
        print("sums are", set(row[0].numpy().tolist()))
"""


def test_a_launch_stays_inside_of_its_operands():
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    changed = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        env=environment(**changed), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sums are {3.0}\n" * 2
