"""Public calls of all kinds, for tests of what no call may do, or what each must do first."""

from collections.abc import Callable
from typing import Any

import numpy as np
from device.contract import SIZE
from device.test_contract_lifetime import every_call

import gradreduce as gr

Calls = dict[str, Callable[[], Any]]
SUM = gr.ReduceOp.SUM
LATER = 9  # a local step that no accumulator has passed
# Calls after which others raise; and calls before each of the others that takes.
ENDING = ("lose", "reset", "close accumulator", "close")
FILLING = ("apply", "apply sparse")


def public_calls(mesh: gr.Mesh, name: str) -> Calls:
    """Makes objects of all kinds on a mesh, and uses them; returns calls on each.

    Args:
        mesh: two devices.
        name: the shared name of an accumulator.
    """
    buffer = mesh.devices[0].upload(np.ones(SIZE, np.float32))
    value = gr.PerReplica([each.upload(np.ones(4, np.float32)) for each in mesh.devices], mesh)
    calls = _of_the_mesh(mesh, buffer)
    calls |= _of_reductions(mesh, value) | _of_arrays(mesh, buffer)
    return calls | _of_accumulators(mesh, name) | _of_optimizers(mesh) | _of_agn(mesh)


def _of_the_mesh(mesh: gr.Mesh, buffer: gr.Buffer) -> Calls:
    return every_call(mesh, buffer) | {
        "journal": lambda: mesh.journal().__enter__(),
        "flight_record": mesh.flight_record,
        "lose": lambda: mesh.devices[0].mark_failed("for no reason"),
        "reset": mesh.reset,
        "collective": lambda: mesh.collective,
        "close": mesh.close,
    }


def _of_arrays(mesh: gr.Mesh, buffer: gr.Buffer) -> Calls:
    w = gr.Variable(np.ones(4), dtype="float32", device=mesh)
    rows = gr.IndexedSlices(buffer.view(0, (2, 2)), [0, 1])
    return {
        "read": w.numpy,
        "array": w.array,
        "assign": lambda: w.assign(np.zeros(4, np.float32)),
        "assign_add": lambda: w.assign_add([0.0] * 4),
        "variable": lambda: gr.Variable(np.ones(4), device=mesh),
        "assert_mirrored": lambda: gr.assert_mirrored([w]),
        "add_n": lambda: gr.add_n([buffer, buffer]),
        "accumulate_n": lambda: gr.accumulate_n([buffer, buffer]),
        "aggregate": lambda: gr.aggregate([rows, rows]),
        "clip": lambda: gr.clip_by_global_norm([buffer], 1.0),
    }


def _of_reductions(mesh: gr.Mesh, value: gr.PerReplica) -> Calls:
    ops, pairs = gr.HierarchicalCopyAllReduce(mesh=mesh), [(value, value)]
    steps = ops.prepare(SUM, pairs), ops.capture(SUM, pairs)
    for step in steps:
        step()
    grads = [{"w": np.ones(4, np.float32)}] * 2
    return {
        "reduce": lambda: ops.reduce(SUM, value, value),
        "batch_reduce": lambda: ops.batch_reduce(SUM, pairs),
        "broadcast": lambda: ops.broadcast(value.values[0], mesh),
        "all_reduce": lambda: ops.all_reduce(grads),
        "plan": lambda: ops.plan(SUM, pairs),
        "profile": lambda: ops.profile(SUM, pairs),
        "prepare a step": lambda: ops.prepare(SUM, pairs),
        "capture a step": lambda: ops.capture(SUM, pairs),
        "play": steps[0],
        "play with a deadline": lambda: steps[0](deadline=5),
        "captured": steps[1],
    }


def _of_accumulators(mesh: gr.Mesh, name: str) -> Calls:
    dense = gr.ConditionalAccumulator("float32", device=mesh, shared_name=name)
    sparse = gr.SparseConditionalAccumulator("float32", device=mesh.devices[0])
    gradient, rows = np.ones(4, np.float32), gr.IndexedSlices(np.ones((1, 2), np.float32), [3])
    dense.apply_grad([gradient] * len(mesh))
    assert dense.num_accumulated() == 1
    assert dense.take_grad(1)
    state = dense.state_dict()
    return {
        "apply": lambda: dense.apply_grad(gradient, LATER),
        "apply everywhere": lambda: gr.apply_grads([dense], [gradient], LATER),
        "apply sparse": lambda: sparse.apply_indexed_slices_grad(rows, LATER),
        "take": lambda: dense.take_grad(1),
        "take with a deadline": lambda: dense.take_grad(1, deadline=5),
        "take sparse": lambda: sparse.take_grad(1),
        "take joint": lambda: gr.take_grads([dense, sparse], num_required=1),
        "num_accumulated": dense.num_accumulated,
        "num_dropped": lambda: dense.num_dropped,
        "global_step": lambda: dense.global_step,
        "set_global_step": lambda: dense.set_global_step(3),
        "apply a stale one": lambda: dense.apply_grad(gradient),
        "state_dict": dense.state_dict,
        "load_state_dict": lambda: dense.load_state_dict(state),
        "close accumulator": dense.close,
    }


def _of_optimizers(mesh: gr.Mesh) -> Calls:
    w = gr.Variable(np.ones(4), dtype="float32", device=mesh)
    optimizer = gr.MomentumOptimizer(0.1, 0.9)
    optimizer.minimize(lambda: np.sum(w * w), var_list=[w])
    kept = optimizer.state_dict()
    step = gr.SyncStep([w], optimizer, gr.HierarchicalCopyAllReduce(mesh=mesh))
    terms = [[[np.ones(4, np.float32)]]] * len(mesh)
    step(terms)
    of_step = step.state_dict()
    return {
        "minimize": lambda: optimizer.minimize(lambda: np.sum(w * w), var_list=[w]),
        "apply_gradients": lambda: optimizer.apply_gradients([(np.ones(4, np.float32), w)]),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(kept, [w]),
        "step": lambda: step(terms),
        "step.state_dict": step.state_dict,
        "step.load_state_dict": lambda: step.load_state_dict(of_step),
    }


def _of_agn(mesh: gr.Mesh) -> Calls:
    center = gr.AGNCenter(mesh)
    getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
    v = gr.get_variable("v", np.zeros(2), custom_getter=getter)
    agn = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.1), 1, getter, 1)
    agn.minimize(lambda: np.sum(v * v), var_list=[v])
    of_center, kept = center.state_dict(), agn.state_dict()
    return {
        "center.state_dict": center.state_dict,
        "center.load_state_dict": lambda: center.load_state_dict(of_center),
        "center.variables": center.variables,
        "center.values": center.values,
        "center.failed_workers": lambda: center.failed_workers,
        "center.start_worker": lambda: center.start_worker(0, list),
        "AGN": lambda: agn.minimize(lambda: np.sum(v * v), var_list=[v]),
        "agn.state_dict": agn.state_dict,
        "agn.load_state_dict": lambda: agn.load_state_dict(kept),
        "get_variable": lambda: gr.get_variable("u", np.zeros(2), custom_getter=getter),
    }
