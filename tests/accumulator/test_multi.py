"""Several accumulators in one call: all or none, and one launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from accumulator.kinds import counters, slices
from support.exact_data import same

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError


def queues(*accumulators):
    return [len(acc.accumulator_ref.queue) for acc in accumulators]


@pytest.fixture
def several(accumulator):
    """Makes accumulators on one device."""
    return lambda count, **options: [accumulator(**options) for _ in range(count)]


# -- apply ----------------------------------------------------------------------------------------


def test_all_gradients_are_added_or_all_are_dropped(several):
    accumulators = several(3)
    assert gr.apply_grads(accumulators, [[1.0], [2.0, 2.0], 3.0]) is True
    accumulators[1].set_global_step(1)
    assert gr.apply_grads(accumulators, [[1.0], [2.0, 2.0], 3.0]) is False
    assert counters(*accumulators) == [(1, 0, 1), (1, 1, 1), (1, 0, 1)]
    assert gr.apply_grads(accumulators, [[3.0], [4.0, 4.0], 5.0], local_step=1) is True
    assert [acc.take_grad(2).tolist() for acc in accumulators] == [[2.0], [3.0, 3.0], 4.0]


def test_one_incompatible_gradient_rejects_the_whole_call(accumulator, sparse, device):
    accumulators = [accumulator(), sparse("float32", (4, 1)), sparse()]
    good = [np.ones((1, 1), "float32"), slices([3], 1), slices([9], 1)]
    gr.apply_grads(accumulators, good)
    wide = gr.IndexedSlices(np.ones((1, 2), "float32"), [0])
    with device.mesh.journal() as journal:
        for place, wrong, error in [
            (0, np.ones((2, 1), "float32"), InvalidArgumentError),
            (0, np.ones((1, 1)), ValueError),
            (0, None, TypeError),
            (1, slices([4], 1), InvalidArgumentError),
            (2, wide, InvalidArgumentError),
            (2, good[0], TypeError),
        ]:
            grads = [*good[:place], wrong, *good[place + 1 :]]
            with pytest.raises(error):
                gr.apply_grads(accumulators, grads)
        for grads in (good[:2], [*good, good[0]]):
            with pytest.raises(ValueError, match=r"^grads has"):
                gr.apply_grads(accumulators, grads)
    assert counters(*accumulators) == [(1, 0, 0)] * 3
    assert journal.launches == 0


def test_wrong_lists_of_accumulators(several):
    first, second = several(2)
    for accumulators in ([], [first, first], [first, second, first]):
        why = r"empty|accumulators\[[12]\] is the same as accumulators\[0\]"
        with pytest.raises(ValueError, match=why):
            gr.apply_grads(accumulators, [[1.0]] * len(accumulators))
        with pytest.raises(ValueError, match=why):
            gr.take_grads(accumulators, 1)
    reference = gr.ConditionalAccumulator(
        "float32", device=first.accumulator_ref.devices[0], shared_name="twice"
    )
    again = gr.ConditionalAccumulator(
        "float32", device=first.accumulator_ref.devices[0], shared_name="twice"
    )
    with pytest.raises(ValueError, match=r"accumulators\[1\] is the same as accumulators\[0\]"):
        gr.apply_grads([reference, again], [[1.0], [1.0]])
    with gr.open_mesh([0, 1, 0], backend="sim") as other:
        stranger = gr.ConditionalAccumulator("float32", device=other.devices[1])
        for call in (
            lambda: gr.apply_grads([first, stranger], [[1.0], [1.0]]),
            lambda: gr.take_grads([first, stranger], 1, timeout=0),
        ):
            with pytest.raises(
                gr.errors.DeviceMismatchError, match=r"accumulators\[1\] is on another"
            ):
                call()
    assert counters(first, second, reference) == [(0, 0, 0)] * 3
    assert queues(first, second) == [0, 0]


def test_errors_name_the_accumulator_and_its_gradient(device):
    accs = [
        gr.ConditionalAccumulator("float32", name=f"acc{place}", device=device)
        for place in range(300)
    ]
    good = [np.ones(3, np.float32)] * 300
    gr.apply_grads(accs, good)
    where = r"^grads\[217\], for accumulator 'acc217': "
    for wrong, error, text in [
        (np.ones(3), ValueError, "the gradient is float64"),
        ("x", TypeError, "str is not an array"),
        (np.ones(4, np.float32), InvalidArgumentError, "Shape mismatch"),
    ]:
        grads = [*good[:217], wrong, *good[218:]]
        with pytest.raises(error, match=where + text):
            gr.apply_grads(accs, grads)
        with pytest.raises(error, match=f"^accumulator 'acc217': {text}"):
            accs[217].apply_grad(wrong)
    with pytest.raises(ValueError, match=where + "the gradient is float64"):  # a stale one too
        gr.apply_grads(accs, [*good[:217], np.ones(3), *good[218:]], -1)
    with pytest.raises(ValueError, match=r"^grads has 299 entries, accumulators has 300; pass one"):
        gr.apply_grads(accs, good[1:])
    with pytest.raises(ValueError, match=r"accumulators\[300\] is the same as accumulators\[7\]"):
        gr.apply_grads([*accs, accs[7]], [*good, good[0]])
    with pytest.raises(TypeError, match=r"^accumulators\[2\]=3 must be an accumulator of this "):
        gr.apply_grads([*accs[:2], 3], good[:3])
    assert accs[217].num_accumulated() == 1


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
            gr.apply_grads(accumulators, grads)
        names.append([(record.name, record.num_rows) for record in journal.records])
    assert names == [[("add_n", 2)] * 2, [("accumulate_n", 2)] * 2, [("accumulate_n", 2)] * 2]
    accumulators[0].apply_grad(grads[0])
    accumulators[0].set_global_step(0)
    with device.mesh.journal() as journal:
        taken = gr.take_grads(accumulators, 3)
    # float16: one for both; float32, in place: the sum of four and the sum of three.
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("all_sum", 2), ("all_sum", 1), ("all_sum", 1),
    ]  # fmt: skip
    assert all(same(left, right) for left, right in zip(taken, grads, strict=True))
    assert counters(*accumulators) == [(0, 1, 0)] * 4


# -- take -----------------------------------------------------------------------------------------


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


def test_a_take_that_waits_at_the_last_step_ends_with_the_error(mesh):
    acc = gr.ConditionalAccumulator("float32", name="acc", device=mesh.devices[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acc.take_grad, 1, timeout=30)
        while not queues(acc)[0]:
            assert not waiting.done()
        acc.set_global_step(2**63 - 1)
        acc.apply_grad([1.0], 2**63 - 1)
        with pytest.raises(InvalidArgumentError, match=r"^the accumulator 'acc' is at step 922"):
            waiting.result(30)
    assert counters(acc) == [(1, 2**63 - 1, 0)]
