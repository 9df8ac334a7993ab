"""Faults planted in the shipped text of the updates are found by comparison with their twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exact import random_data, same
from faces import Operand, buffers, opened

from gradreduce.device import compiled
from gradreduce.device.kernel import kernel_text
from gradreduce.ops.adaptive import ADAGRAD, ADAM, RMSPROP
from gradreduce.ops.clip import CLIP
from gradreduce.ops.distance_scale import DISTANCE_SCALE
from gradreduce.ops.global_update import global_update_of
from gradreduce.ops.local_update import local_update_of
from gradreduce.ops.square_sum import SQUARE_SUM
from gradreduce.ops.take_rows import TAKE_ROWS
from gradreduce.ops.update import MOMENTUM

pytestmark = pytest.mark.host

LOCAL_MOMENTUM, GLOBAL_MOMENTUM = local_update_of(MOMENTUM), global_update_of(MOMENTUM)
HALF, SINGLE = "float16", "float32"
SIZE = 1003
# kernel -> template, dtype and size of each operand, scalars
LAUNCHES = {
    ADAM: ((HALF, SINGLE), [(HALF, SIZE), *[(SINGLE, SIZE)] * 3, (HALF, SIZE)],
           (4, 0.1, 0.2, 0.3, 0.01)),
    ADAGRAD: ((SINGLE, SINGLE), [(SINGLE, SIZE)] * 3, (2, 0.1)),
    RMSPROP: ((SINGLE, SINGLE), [(SINGLE, SIZE)] * 4, (3, 0.1, 0.2, 0.3, 0.01)),
    LOCAL_MOMENTUM: ((HALF, SINGLE), [(HALF, SIZE), *[(SINGLE, SIZE)] * 3, (HALF, SIZE)],
                     (4, 0, 0.1, 0.2)),
    GLOBAL_MOMENTUM: ((HALF, SINGLE), [(HALF, SIZE), *[(SINGLE, SIZE)] * 2, (HALF, SIZE),
                                       *[(SINGLE, SIZE)] * 2], (5, 3, 0.1, 0.2)),
    DISTANCE_SCALE: ((HALF,), [*[(SINGLE, SIZE)] * 2, *[(HALF, SIZE)] * 2], (0.3,)),
    TAKE_ROWS: (("uint32",), [("uint32", 400), ("uint32", 160), ("int64", 50)], ()),
    SQUARE_SUM: ((SINGLE,), [("float64", 32), (SINGLE, SIZE)], (1, 1)),
    CLIP: ((SINGLE,), [(SINGLE, SIZE)] * 2 + [("float64", 1)], (0.3,)),
}  # fmt: skip
# the kernel, the text, what it becomes; none leaves the operands, which could end the process
FAULTS = {
    "no master": (ADAM, "if constexpr (MASTER) {", "if constexpr (false) {"),
    "a master always": (ADAM, "if (widen(to<T>::from(master.lane[l])) == v.lane[l]) ", ""),
    "a master left as it was": (ADAM, "if constexpr (MASTER) store(state[0], i, v);", ""),
    "one slot for two": (ADAM, "slots[k].lane[l] = here[k];", "slots[k].lane[l] = here[1];"),
    "the old moment": (ADAM, "rate * moments[0] / (root", "rate * grad / (root"),
    "epsilon under the root": (ADAM, "(root(moments[1]) + epsilon)", "root(moments[1] + epsilon)"),
    "fused into one rounding": (
        ADAM, "moments[0] + rest1 * (grad - moments[0])",
        "(Acc)__builtin_fmaf(rest1, grad - moments[0], moments[0])",
    ),
    "another order": (ADAGRAD, "rate * grad / root(sum[0])", "rate * (grad / root(sum[0]))"),
    "the sum behind the step": (ADAGRAD, "root(sum[0])", "root(sum[0] - grad * grad)"),
    "no momentum": (RMSPROP, "decay * slots[1] + rate", "rate"),
    "epsilon left out": (RMSPROP, "root(slots[0] + epsilon)", "root(slots[0])"),
    "a sum always written": (LOCAL_MOMENTUM, "if (!first) {", "if (false) {"),
    "a sum of sums": (LOCAL_MOMENTUM, "add_to(total, g);", "add_to(total, total);"),
    "a sum not kept": (LOCAL_MOMENTUM, "store(sum, i, total);", ""),
    "a step by the sum": (LOCAL_MOMENTUM, "by<LANES>(i, g)", "by<LANES>(i, total)"),
    "no mean": (GLOBAL_MOMENTUM, "quotient(mean.lane[l], period)", "mean.lane[l]"),
    "a product for the mean": (
        GLOBAL_MOMENTUM, "quotient(mean.lane[l], period)", "mean.lane[l] * (Acc)(1 / period)"
    ),
    "no pull": (GLOBAL_MOMENTUM, "store(copy, i, v);", ""),
    "the mean pulled": (GLOBAL_MOMENTUM, "store(copy, i, v);", "store(copy, i, mean);"),
    "no master pulled": (GLOBAL_MOMENTUM, "if constexpr (Base::MASTER) store(master, i, v);", ""),
    "no distance": (DISTANCE_SCALE, "(away * away / gamma + (Acc)1)", "(gamma + (Acc)1)"),
    "a distance without its square": (
        DISTANCE_SCALE, "(away * away / gamma + (Acc)1)", "(away / gamma + (Acc)1)"
    ),
    "infinite near the centre": (DISTANCE_SCALE, " / gamma + (Acc)1)", " / gamma)"),
    "rows as they lie": (TAKE_ROWS, "rows[i / width] * width", "(i / width % 20) * width"),
    "the first column": (TAKE_ROWS, "width + i % width", "width"),
    "no square": (SQUARE_SUM, "squared ? term * term : term", "term"),
    "no root": (SQUARE_SUM, "if (rooted) {", "if (false) {"),
    "a stride left out": (SQUARE_SUM, "i64 k = i;", "i64 k = i + stride;"),
    "the end left out": (SQUARE_SUM, "&& k + l < end; ++l) last", "&& k + l + 1 < end; ++l) last"),
    "never larger": (CLIP, "least < most ? least : most", "most"),
    "a norm that is no number": (CLIP, " + (norm - norm)", ""),
}  # fmt: skip
CASES = [pytest.param(*fault, id=name) for name, fault in FAULTS.items()]


def launched(face, kernel, text, monkeypatch, norm=np.inf):
    """All operands, and whether nothing around them was written."""
    monkeypatch.setattr(compiled, "kernel_text", lambda stem: text)
    template, operands, scalars = LAUNCHES[kernel]
    with opened(face) as device:
        row = []
        for place, (dtype, size) in enumerate(operands):
            values = random_data((size,), dtype, seed=place)
            if dtype == "int64":
                values = np.random.default_rng(0).integers(0, 20, size)
            elif kernel is not CLIP and np.dtype(dtype).kind == "f":
                values = np.nan_to_num(np.clip(np.abs(values), 0.01, 8)).astype(dtype)
            if kernel is CLIP and size == 1:
                values = np.array([norm])
            row.append(Operand(device, values))
        if kernel in (ADAM, LOCAL_MOMENTUM, GLOBAL_MOMENTUM):
            # Every other master is its variable's.
            row[0].array[::2] = row[1].array[::2].astype(HALF)
        # A new one: builds are kept by kernel.
        device.launch(replace(kernel, templates=(template,)), template, [buffers(row)], scalars)
    return [operand.array for operand in row]


def right(face, kernel, text, monkeypatch):
    return all(
        same(found, wanted)
        for norm in (np.inf, 2.0)
        for found, wanted in zip(
            launched(face, kernel, text, monkeypatch, norm),
            launched("numpy", kernel, text, monkeypatch, norm),
            strict=True,
        )
    )


@pytest.mark.parametrize("kernel", LAUNCHES, ids=lambda kernel: kernel.name)
def test_the_sound_text_passes(kernel, monkeypatch):
    for face in ("compiled", "exact"):
        assert right(face, kernel, kernel_text(kernel.source), monkeypatch)


@pytest.mark.parametrize(("kernel", "sound", "faulty"), CASES)
def test_a_fault_shows(kernel, sound, faulty, monkeypatch):
    text = kernel_text(kernel.source)
    # Once: the header's formula, changed in its place, would change no result.
    assert text.count(sound) == 1, f"the text has changed: {sound}"
    assert not right("exact", kernel, text.replace(sound, faulty), monkeypatch)
