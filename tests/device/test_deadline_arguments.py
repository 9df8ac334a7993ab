"""Every call with a deadline accepts and refuses the same values."""

import re

import numpy as np
import pytest

import gradreduce as gr


@pytest.fixture
def mesh():
    with gr.open_mesh([0, 0, 1, 2], backend="sim", strict=True, schedule_seed=3) as made:
        yield made


BAD = [True, 0, -1.0, float("nan"), "5", 1j]


@pytest.mark.parametrize("deadline", BAD)
def test_a_deadline_is_a_number_above_zero(mesh, deadline):
    grads = [[device.upload(np.ones(4, np.float32))] for device in mesh]
    value = gr.PerReplica([row[0] for row in grads], mesh)
    ops = gr.NcclAllReduce(mesh=mesh)
    step = ops.prepare(gr.ReduceOp.SUM, [(value, value)])
    variable = gr.Variable(np.zeros(4, np.float32), device=mesh)
    trained = gr.SyncStep([variable], gr.MomentumOptimizer(1.0, 0.5), ops)
    accumulator = gr.ConditionalAccumulator("float32", device=mesh)
    accumulator.apply_grad(np.ones(3, np.float32))
    far = gr.PerReplica([row[0] for row in grads[:2]], mesh[0:2])
    flat = mesh.flat_buffer([(4,)], "float32")
    bad = {"deadline": deadline}
    loss = [].pop  # would raise, if it were called
    getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
    gr.get_variable("w", np.zeros(4, np.float32), custom_getter=getter)
    worker = gr.AGNOptimizer(trained.optimizer, 1, getter)
    calls = [
        lambda: trained.optimizer.minimize(loss, **bad),
        lambda: worker.minimize(loss, **bad),
        lambda: ops.reduce(gr.ReduceOp.SUM, value, value, **bad),
        lambda: ops.batch_reduce(gr.ReduceOp.SUM, [(value, value)], **bad),
        lambda: ops.broadcast(value.buffers[0], mesh, **bad),
        lambda: ops.all_reduce(grads, **bad),
        lambda: gr.all_reduce(grads, mesh=mesh, **bad),
        lambda: step(**bad),
        lambda: trained([[[np.ones(4, np.float32)]]] * 4, **bad),
        lambda: ops.prepare(gr.ReduceOp.SUM, [(value, value)], **bad),
        lambda: ops.capture(gr.ReduceOp.SUM, [(far, far)], **bad),
        lambda: ops.profile(gr.ReduceOp.SUM, [(value, value)], **bad),
        lambda: trained.optimizer.apply_gradients([(np.ones(4, np.float32), variable)], **bad),
        lambda: variable.numpy(**bad),
        lambda: flat.zero(**bad),
        lambda: flat.release(**bad),
        lambda: accumulator.take_grad(1, **bad),
        lambda: gr.take_grads([accumulator], 1, **bad),
        lambda: accumulator.state_dict(**bad),
        lambda: value.buffers[0].numpy(**bad),
        lambda: mesh.devices[0].download(value.buffers[0], **bad),
        lambda: mesh.devices[0].synchronize(**bad),
        lambda: mesh.synchronize(**bad),
    ]
    with mesh.journal() as journal:
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(f"deadline={deadline!r} must be")):
                call()
        with pytest.raises(ValueError, match=re.escape(f"timeout={deadline!r} must be")):
            mesh.reset(timeout=deadline)
    assert journal.records == []
    assert accumulator.num_accumulated() == 1
    assert mesh.mesh_state.watchdog is None


def test_minimize_has_its_update_done_by_one(mesh, monkeypatch):
    """Every optimizer's ``minimize`` passes the deadline to its own update."""
    getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
    variable = gr.get_variable("w", np.zeros(4, np.float32), custom_getter=getter)
    plain = gr.GradientDescentOptimizer(1.0)
    for optimizer in (plain, gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 1, getter)):
        given = []
        monkeypatch.setattr(
            optimizer,
            "apply_gradients",
            lambda *args, **more: given.append(more),  # noqa: B023
        )
        optimizer.minimize(lambda: np.sum(variable), deadline=30)
        assert given == [{"deadline": 30}]
