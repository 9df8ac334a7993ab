"""Faults that hard use once showed: threads, aliases, closing, iterators, partial failures."""

import re
import threading
from functools import partial

import numpy as np
import pytest
from support.signal_injection import SignalInjection
from support.threads import in_threads

import gradreduce as gr
from gradreduce.backends.sim.device import SimDevice
from gradreduce.backends.sim.scheduler import Scheduler
from gradreduce.errors import brief

DEADLINE = 60.0


def test_one_piece_of_work_at_a_time_in_a_queue():
    scheduler = Scheduler()
    started, ran, ran_elsewhere = threading.Event(), threading.Event(), threading.Event()

    def first():
        started.set()
        assert ran_elsewhere.wait(DEADLINE)  # another queue continues
        assert not ran.wait(0.2)  # this queue does not, though its next work was queued long ago

    def second():
        assert started.wait(DEADLINE)
        scheduler.submit("b", ran_elsewhere.set)
        scheduler.submit("a", ran.set)

    in_threads(lambda: scheduler.submit("a", first), second)
    assert ran.is_set()


def test_copies_of_a_variable_stay_equal(monkeypatch):
    """Two threads assign; one does not write between the copies of the other."""
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable([0.0], device=mesh)
        copy, first, done = SimDevice._copy, threading.Event(), threading.Event()

        def copied(device, dst, src, *rest):
            copy(device, dst, src, *rest)
            if not first.is_set():
                first.set()
                assert not done.wait(0.05)

        def other():
            assert first.wait(DEADLINE)
            variable.assign([2.0])
            done.set()

        monkeypatch.setattr(SimDevice, "_copy", copied)
        in_threads(lambda: variable.assign([1.0]), other)
        assert [buffer.numpy().tolist() for buffer in variable.buffers] == [[2.0]] * 2


def test_a_host_alias_of_a_copy_is_added_to_all_copies_alike():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable([1.0, 1.0], device=mesh)
        variable.assign_add(mesh.devices[0].release(variable.buffers[0]))
        assert [buffer.numpy().tolist() for buffer in variable.buffers] == [[2.0, 2.0]] * 2
        alias = mesh.devices[0].release(variable.buffers[0])
        with pytest.raises(ValueError, match="memory with a variable"):
            gr.GradientDescentOptimizer(1.0).apply_gradients([(alias, variable)])


def test_closing_a_mesh_cancels_waiting_takes():
    mesh = gr.open_mesh(2, backend="sim")
    accumulator = gr.ConditionalAccumulator("float32", device=mesh)
    waiting = threading.Event()

    def take():
        waiting.set()
        with pytest.raises(gr.errors.CancelledError):
            accumulator.take_grad(1)

    def close():
        assert waiting.wait(DEADLINE)
        while not accumulator.accumulator_ref.queue:
            pass
        mesh.close()

    in_threads(take, close)
    with pytest.raises(gr.errors.BackendUnavailableError, match="was closed"):
        accumulator.take_grad(1, timeout=DEADLINE)


def test_a_closed_mesh_keeps_no_free_memory():
    ops = gr.HierarchicalCopyAllReduce()
    mesh = gr.open_mesh(2, backend="sim")
    value = gr.PerReplica([np.ones(10_000, np.float32)] * 2, mesh)
    reduced = ops.reduce(gr.ReduceOp.SUM, value, value)
    assert (reduced.primary == 2).all()
    del reduced
    mesh.close()
    for device in mesh.devices:
        assert (device._pool.live_bytes, device._pool.free_bytes, len(device.freed)) == (0, 0, 0)


def test_a_step_whose_optimizer_cannot_work_takes_nothing():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable([1.0, 1.0], device=mesh)
        optimizer = gr.MomentumOptimizer(0.5, 0.9)
        step = gr.SyncStep([variable], optimizer, gr.HierarchicalCopyAllReduce(mesh=mesh))
        terms = [[[np.ones(2, np.float32)]]] * 2
        optimizer.learning_rate = "x"
        with pytest.raises(ValueError, match=r"^learning_rate='x' must be a number$"):
            step(terms)
        assert step.global_step == step.accumulators[0].num_accumulated() == 0
        optimizer.learning_rate = 0.5
        assert step(terms)
        assert variable.numpy().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "wrong", [np.array([True]), np.array([True, False]), np.array(True), "no", None, 1], ids=repr
)
def test_an_option_that_is_no_boolean_is_named(wrong):
    """Arrays of one element were taken as a boolean, and arrays of two raised NumPy's error."""
    with gr.open_mesh(2, backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        ones = gr.PerReplica([np.ones(3, np.float32)] * 2, mesh)
        pairs = [(ones, ones)]
        getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
        agn = partial(gr.AGNOptimizer, gr.GradientDescentOptimizer(0.1), 1, getter)
        sum_up = gr.ReduceOp.SUM
        calls = {
            "peer_access": [lambda: gr.open_mesh(2, backend="sim", peer_access=wrong)],
            "strict": [lambda: gr.open_mesh(2, backend="sim", strict=wrong)],
            "trainable": [
                lambda: gr.Variable([1.0], trainable=wrong, device=mesh),
                lambda: gr.get_variable("flagged", [1.0], trainable=wrong),
            ],
            "reuse": [lambda: gr.get_variable("flagged", [1.0], reuse=wrong)],
            "use_nesterov": [lambda: gr.MomentumOptimizer(0.1, 0.9, use_nesterov=wrong)],
            "lazy": [lambda: gr.AdamOptimizer(0.1, lazy=wrong)],
            "centered": [lambda: gr.RMSPropOptimizer(0.1, centered=wrong)],
            "use_locking": [lambda: agn(use_locking=wrong)],
            "reset_momentum": [lambda: agn(reset_momentum=wrong)],
            "coalesce": [
                lambda: ops.batch_reduce(sum_up, pairs, coalesce=wrong),
                lambda: ops.reduce(sum_up, ones, ones, coalesce=wrong),
                lambda: ops.plan(sum_up, pairs, coalesce=wrong),
                lambda: ops.profile(sum_up, pairs, coalesce=wrong),
                lambda: gr.all_reduce([[np.ones(3)]] * 2, mesh=mesh, coalesce=wrong),
                lambda: gr.ReductionToOneDevice().batch_reduce(sum_up, pairs, coalesce=wrong),
            ],
        }
        if wrong is None:
            del calls["strict"]  # the default
        for name, told in calls.items():
            text = re.escape(f"{name}={brief(wrong)} must be True or False")
            for call in told:
                with pytest.raises(TypeError, match=f"^{text}$"):
                    call()


def test_a_mesh_iterates_over_its_accumulators_while_others_are_made():
    """While a mesh is closed, reset or loses a device; a plain weak dictionary would raise."""
    mesh_state = gr.open_mesh(1, backend="sim").mesh_state
    kept, threads = [Key(), Key()], []

    def make():
        kept.append(Key())
        mesh_state.add_listener(kept[-1], print, print)

    def make_beside():  # at once, or after the mesh has visited them
        threads.append(threading.Thread(target=make, daemon=True))
        threads[-1].start()
        threads[-1].join(0.002)

    for key in list(kept):
        mesh_state.add_listener(key, print, print)
    with SignalInjection(1, make_beside, every=2):
        assert len(mesh_state.listeners()) >= 2
    for thread in threads:
        thread.join(DEADLINE)
    assert len(mesh_state.listeners()) == len(kept) > 5


class Key:
    """A weakly referenced key."""

    devices = ()
