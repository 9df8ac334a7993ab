"""``shared_name``: one accumulator in the process, checked, and freed with its last handle."""

import gc
import threading
import weakref

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.errors import CancelledError


def test_another_definition_is_refused(device):
    """Two CrossDeviceOps of the same settings are one; without an argument any is accepted."""
    mesh, ops = device.mesh, gr.AllReduceCrossDeviceOps
    dense, sparse = gr.ConditionalAccumulator, gr.SparseConditionalAccumulator
    plain = {"dtype": "float32", "shape": (3, 2), "device": device}
    over = plain | {"device": mesh, "cross_device_ops": ops("hierarchical_copy", 1)}
    for make, first, others in [
        (dense, plain, [
            ({"dtype": "float64"}, "dtype float32, not float64"),
            ({"shape": None}, "shape"),
            ({"shape": (None, 2)}, "shape"),
            ({"reduction_type": "SUM"}, "reduction_type MEAN, not SUM"),
            ({"device": mesh.devices[0]}, "device sim:1, not sim:0"),
            ({"device": mesh}, "device sim:1, not mesh of sim:0, sim:1"),
            ({"device": mesh[1:]}, "device sim:1, not mesh of sim:1"),
        ]),
        (sparse, plain, [({"sparse_mean": "per_gradient"},
                          "sparse_mean per_row, not per_gradient")]),
        (dense, over, [({"cross_device_ops": ops(*how)}, "cross_device_ops <All")
                       for how in (("nccl", 1), ("hierarchical_copy", 2))]),
    ]:  # fmt: skip
        one = make(**first, shared_name="defined")
        for changed, text in others:
            with pytest.raises(ValueError, match=f"^shared_name='defined' has {text}"):
                make(**first | changed, shared_name="defined")
        for same in ({"shape": [3, 2]}, {"cross_device_ops": None}):
            again = make(**first | same, shared_name="defined", name="other")
            assert again.accumulator_ref is one.accumulator_ref
            assert again.name == "other"
        for empty in (None, ""):
            assert make(**first, shared_name=empty).accumulator_ref is not one.accumulator_ref
        if first is over:
            again = make(**over | {"cross_device_ops": ops("hierarchical_copy", 1)},
                         shared_name="defined")  # fmt: skip
            assert again.accumulator_ref is one.accumulator_ref
        assert one.num_accumulated() == 0
        one.close()


@pytest.mark.parametrize("make", [gr.ConditionalAccumulator, gr.SparseConditionalAccumulator])
def test_a_second_handle_needs_no_device(device, make):
    for place in (device, device.mesh, device.mesh[1:]):
        first = make("float32", shared_name="found", device=place)
        assert make("float32", shared_name="found").accumulator_ref is first.accumulator_ref
        with pytest.raises(ValueError, match=r"^shared_name='found' has device (mesh of )?sim:\d"):
            make("float32", shared_name="found", device="sim:0")  # of the mesh that it is on
        first.close()
    with gr.open_mesh(1, backend="sim") as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradreduce.backends._default", [other])
        again = make("float32", shared_name="found")  # the first of the name
        assert again.accumulator_ref.devices == other.devices


def test_the_last_handle_frees_the_memory_and_the_name(accumulator, device):
    gc.disable()  # freed by reference counting alone
    try:
        device.drain()
        before = device._pool.live_bytes
        one, two = (accumulator(shared_name="freed") for _ in range(2))
        one.apply_grad(np.ones(100_000, "float32"))
        state = weakref.ref(one.accumulator_ref)
        with pytest.raises(TimeoutError):
            two.take_grad(2, timeout=0)
        del one
        assert state() is not None
        del two
        assert state() is None
        device.drain()
        assert device._pool.live_bytes == before
        fresh = accumulator("float16", shared_name="freed")
        assert fresh.num_accumulated() == 0
    finally:
        gc.enable()


def test_a_take_that_waits_keeps_it_alive(accumulator, call_threads):
    acc = accumulator(shared_name="waited for")
    take = call_threads.waiting(acc.take_grad, 1)
    del acc
    accumulator(shared_name="waited for").apply_grad([4.0])
    assert take.result().tolist() == [4.0]


def test_threads_that_come_first_together_get_the_same_one(accumulator, call_threads):
    start = threading.Barrier(16)

    def handle():
        start.wait(30)
        made = accumulator(shared_name="raced for")
        made.apply_grad([1.0])
        return made

    handles = [call.result() for call in [call_threads.start(handle) for _ in range(16)]]
    assert len({made.accumulator_ref for made in handles}) == 1
    assert handles[0].num_accumulated() == 16


def test_a_closed_accumulator_releases_its_name(accumulator):
    """Even if a handle or a traceback still refers to it; a new one may have other arguments."""
    first = accumulator("float32", (2,), shared_name="given up")
    first.close()
    second = accumulator("float64", shared_name="given up")
    assert second.accumulator_ref is not first.accumulator_ref
    assert second.apply_grad([1.0])
    assert accumulator("float64", shared_name="given up").num_accumulated() == 1
    with pytest.raises(CancelledError):
        first.apply_grad([1.0, 1.0])
