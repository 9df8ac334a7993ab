"""Faults planted in the shipped text of segment_sum are found by the comparison with its twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exact import random_data, same
from faces import Operand, buffers, opened

from gradreduce.device import compiled
from gradreduce.device.kernel import kernel_text
from gradreduce.ops import plan_segments
from gradreduce.ops.segment_sum import SEGMENT_SUM

pytestmark = pytest.mark.host

KERNEL = replace(SEGMENT_SUM, templates=(("float32", "float32"),))
NUM_ROWS = 200
INDICES = np.random.default_rng(0).integers(0, 60, NUM_ROWS)
PLAN = plan_segments(INDICES)
INTO = np.where(np.arange(PLAN.num_segments) % 3, PLAN.indices, ~PLAN.indices)  # a third added to
DIVISORS = 1.0 + np.arange(PLAN.num_segments)
ROWS, VECTORS = 7, 8  # widths: rows that end inside a vector, and whole vectors

LATER = "add_to(total, load<Acc, LANES>(values, order[k]"
# what -> (the text, what it becomes); none leaves the operands, which could end the process
FAULTS = {
    "the last rows first": (LATER, LATER.replace("[k]", "[end + bounds[segment] - k]")),
    "the last row again and again": (LATER, LATER.replace("[k]", "[end - 1]")),
    "rows in the order in which they lie": (LATER, LATER.replace("order[k]", "k")),
    "a row left out": ("while (++k < end) add_to", "while (++k < end - 1) add_to"),
    "the first row twice": ("while (++k < end) add_to", "for (; k < end; ++k) add_to"),
    "every column the first": ("column = i % width", "column = 0"),
    "every sum into its own row": ("into ? into[segment] : segment", "segment"),
    "one divisor for all": ("divisors ? divisors[segment] : divisor", "divisor"),
    "the divisor of the first": ("divisors[segment]", "divisors[0]"),
    "into read for the divisors": ("row.operand<const double>(3 + has_into)",
                                   "row.operand<const double>(3)"),
    "what is there overwritten": ("add<Sum>(sum.lane[l], to<Sum>::from(total.lane[l]))",
                                  "to<Sum>::from(total.lane[l])"),
    "what is there kept": ("store(out, ~row * width + column, sum);", ""),
    "added to the first row": ("load<Sum, LANES>(out, ~row * width + column)",
                               "load<Sum, LANES>(out, column)"),
    "a product with the reciprocal": ("quotient(total.lane[l], by)",
                                      "total.lane[l] * (Acc)(1 / by)"),
}  # fmt: skip
# Seen where rows end inside a vector or group.
ACROSS = ("if (LANES > 1 && width % LANES) {", "if (false) {")


def launched(face, width, text, monkeypatch):
    """The whole array, and whether nothing around it was written."""
    monkeypatch.setattr(compiled, "kernel_text", lambda stem: text)
    values = random_data((NUM_ROWS, width), "float32").reshape(-1)
    with opened(face) as device:
        out = Operand(device, random_data((60 * width,), "float32", seed=1))
        plan = (values, PLAN.order, INTO, DIVISORS, PLAN.bounds)
        row = [out, *(Operand(device, part) for part in plan)]
        kernel = replace(KERNEL)  # a new one: builds are kept by kernel
        device.launch(kernel, kernel.templates[0], [buffers(row)], (1, 1, 1.0))
    return out.array, out.contained()


def right(face, width, text, monkeypatch):
    found, contained = launched(face, width, text, monkeypatch)
    return contained and same(found, launched("numpy", width, text, monkeypatch)[0])


def planted(fault):
    sound, faulty = fault
    text = kernel_text("segment_sum")
    assert text.count(sound) == 1, f"the text has changed: {sound}"
    return text.replace(sound, faulty)


@pytest.fixture(params=["compiled", "exact"])
def host_face(request):
    """Not the sanitized one: it ends the process at the first wild access."""
    return request.param


@pytest.mark.parametrize("width", [ROWS, VECTORS])
def test_the_sound_text_passes(host_face, width, monkeypatch):
    assert right(host_face, width, kernel_text("segment_sum"), monkeypatch)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_shows(host_face, fault, monkeypatch):
    for width in (ROWS, VECTORS):
        assert not right(host_face, width, planted(fault), monkeypatch)


def test_a_vector_across_two_rows_shows(host_face, monkeypatch):
    """The fast build's groups are wider than a vector."""
    shown = [not right(host_face, width, planted(ACROSS), monkeypatch) for width in (ROWS, VECTORS)]
    assert shown == [True, host_face == "compiled"]
