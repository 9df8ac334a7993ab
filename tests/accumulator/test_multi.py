"""Several accumulators in one call: all or none, and one launch."""

import re

import numpy as np
import pytest
from accumulator.kinds import counters
from support.exact_data import same

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError


def queues(*accumulators):
    return [len(acc.accumulator_ref.queue) for acc in accumulators]


def test_wrong_lists_change_nothing(accumulator, device):
    acc, other = accumulator(), accumulator()
    twice = [accumulator(shared_name="twice") for _ in range(2)]
    many = [accumulator() for _ in range(12)]
    same = "accumulators[{}] is the same as accumulators[0]; pass each at most once"
    with gr.open_mesh([0, 1, 0], backend="sim") as mesh:
        stranger = gr.ConditionalAccumulator("float32", device=mesh.devices[1])
        for accumulators, error, text in [
            ([], ValueError, "accumulators is empty"),
            ([acc, acc], ValueError, same.format(1)),
            ([acc, other, acc], ValueError, same.format(2)),
            (twice, ValueError, same.format(1)),
            ([*many, many[0]], ValueError, same.format(12)),
            ([acc, other, 3], TypeError, "accumulators[2]=3 must be an accumulator of this "),
            ([acc, stranger], gr.errors.DeviceMismatchError, "accumulators[1] is on another mesh"),
        ]:
            for call in (
                lambda each: gr.apply_grads(each, [[1.0]] * len(each)),
                lambda each: gr.take_grads(each, 1, timeout=0),
            ):
                with pytest.raises(error, match=f"^{re.escape(text)}"):
                    call(accumulators)
    for grads in ([[1.0]] * 11, [[1.0]] * 13):
        text = f"^grads has {len(grads)} entries, accumulators has 12; pass one"
        with pytest.raises(ValueError, match=text):
            gr.apply_grads(many, grads)
    assert counters(acc, other, *twice, *many) == [(0, 0, 0)] * 16
    assert queues(acc, other) == [0, 0]


def test_one_launch_for_all_of_a_dtype(device):
    accumulators = [
        gr.ConditionalAccumulator(dtype, device=each)
        for dtype in ("float32", "float16")
        for each in device.mesh.devices  # two logical devices of one physical
    ]
    grads = [np.full(3 + place, place, acc.dtype) for place, acc in enumerate(accumulators)]
    names = []
    for _ in range(3):
        with device.mesh.journal() as journal:
            gr.apply_grads(iter(accumulators), iter(grads))
        names.append([(record.name, record.num_rows) for record in journal.records])
    assert names == [[("add_n", 2)] * 2, [("accumulate_n", 2)] * 2, [("accumulate_n", 2)] * 2]
    accumulators[0].apply_grad(grads[0])
    accumulators[0].set_global_step(0)
    with device.mesh.journal() as journal:
        taken = gr.take_grads(iter(accumulators), 3)
    # float16: one for both; float32, in place: the sum of four and the sum of three.
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("all_sum", 2), ("all_sum", 1), ("all_sum", 1),
    ]  # fmt: skip
    assert all(same(left, right) for left, right in zip(taken, grads, strict=True))
    assert counters(*accumulators) == [(0, 1, 0)] * 4


def test_a_take_at_the_last_step_is_refused_and_changes_nothing(mesh):
    accumulators = [
        gr.ConditionalAccumulator("float32", name="first", device=mesh),
        gr.ConditionalAccumulator("float32", name="last", device=mesh.devices[0]),
        gr.SparseConditionalAccumulator("float32", device=mesh.devices[0]),
    ]
    table = gr.IndexedSlices(np.ones((1, 2), "float32"), [0])
    gr.apply_grads(accumulators, [[1.0], [2.0], table])
    text = (
        r"^the accumulator '{}' is at step 9223372036854775807, and the step after a take would "
        r"not fit in int64: call set_global_step with a smaller step$"
    )
    first, last, rows = accumulators
    last.set_global_step(2**63 - 1)
    rows.set_global_step(2**63 - 1)
    before = counters(*accumulators)
    for take, name in (
        (lambda: last.take_grad(1), "last"),
        (lambda: last.take_grad(7), "last"),  # does not wait
        (lambda: gr.take_grads(accumulators, 1), "last"),
        (lambda: rows.take_indexed_slices_grad(1), "sparse_conditional_accumulator"),
    ):
        with (
            mesh.journal() as journal,
            pytest.raises(InvalidArgumentError, match=text.format(name)),
        ):
            take()
        assert not journal.records
        assert queues(*accumulators) == [0, 0, 0]
    assert counters(*accumulators) == before
    last.set_global_step(2**63 - 2)
    rows.set_global_step(0)
    results = gr.take_grads(accumulators, 1)
    assert (results[1].tolist(), last.global_step) == ([2.0], 2**63 - 1)
    assert first.global_step == rows.global_step == 1


def test_a_take_that_waits_at_the_last_step_ends_with_the_error(mesh, call_threads):
    acc = gr.ConditionalAccumulator("float32", name="acc", device=mesh.devices[0])
    waiting = call_threads.waiting(acc.take_grad, 1)
    acc.set_global_step(2**63 - 1)
    acc.apply_grad([1.0], 2**63 - 1)
    with pytest.raises(InvalidArgumentError, match=r"^the accumulator 'acc' is at step 922"):
        waiting.result()
    assert counters(acc) == [(1, 2**63 - 1, 0)]
