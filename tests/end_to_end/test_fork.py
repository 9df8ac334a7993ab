"""In a forked child every inherited object raises at once, whatever lock the parent held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradreduce as gr

# Run with gradreduce and tests on the path; the kind of kernels is in argv. SIGALRM ends a child
# that hangs.
FORKED = """
import gc, os, signal, sys, threading
import numpy as np
import gradreduce as gr
from gradreduce.backends.sim import host_compile
from device.test_contract_lifetime import every_call

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
SUM = gr.ReduceOp.SUM


def locks():
    found = {}
    for owner in gc.get_objects():
        names = str(type(owner).__module__), str(getattr(owner, "__name__", ""))
        if any(name.startswith("gradreduce") for name in names):
            kept = dict(getattr(owner, "__dict__", {})).values()
            found |= {id(each): each for each in kept if isinstance(each, LOCKS)}
    return list(found.values())


def use(mesh, name):
    '''Something of everything; with the calls on it.'''
    w = gr.Variable(np.ones(4), dtype="float32", device=mesh)
    value = gr.PerReplica([each.upload(np.ones(4, np.float32)) for each in mesh.devices], mesh)
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    steps = ops.prepare(SUM, [(value, value)]), ops.capture(SUM, [(value, value)])
    optimizer = gr.MomentumOptimizer(0.1, 0.9)
    dense = gr.ConditionalAccumulator("float32", device=mesh, shared_name=name)
    sparse = gr.SparseConditionalAccumulator("float32", device=mesh.devices[0])
    rows = gr.IndexedSlices(np.ones((1, 2), np.float32), [3])
    center = gr.AGNCenter(mesh)
    getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
    v = gr.get_variable("v", np.zeros(2), custom_getter=getter)
    agn = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.1), 1, getter, 1)
    flat = mesh.flat_buffer([(3,)], "float32")
    buffer = mesh.devices[0].upload(np.ones(3, np.float32))
    gradient = [np.ones(4, np.float32)] * len(mesh)
    state, kept, agn_kept = dense.state_dict(), optimizer.state_dict, agn.state_dict
    of_center = center.state_dict()
    calls = every_call(mesh, buffer) | {
        "journal": lambda: mesh.journal().__enter__(),
        "flight_record": mesh.flight_record,
        "lose": lambda: mesh.devices[0].mark_failed("for no reason"),
        "reset": mesh.reset,
        "collective": lambda: mesh.collective,
        "read": w.numpy,
        "assign": lambda: w.assign(np.zeros(4, np.float32)),
        "assign_add": lambda: w.assign_add(np.zeros(4, np.float32)),
        "reduce": lambda: ops.reduce(SUM, value, value),
        "explain": lambda: ops.profile(SUM, [(value, value)]),
        "play": steps[0],
        "play with a deadline": lambda: steps[0](deadline=5),
        "captured": steps[1],
        "minimize": lambda: optimizer.minimize(lambda: np.sum(w * w), var_list=[w]),
        "apply": lambda: dense.apply_grad(gradient[0]),
        "apply everywhere": lambda: gr.apply_grads([dense], [gradient[0]], 0),
        "apply sparse": lambda: sparse.apply_indexed_slices_grad(rows),
        "take": lambda: dense.take_grad(1),
        "take with a deadline": lambda: dense.take_grad(1, deadline=5),
        "take sparse": lambda: sparse.take_grad(1),
        "take joint": lambda: gr.take_grads([dense, sparse], num_required=1),
        "num_accumulated": dense.num_accumulated,
        "num_dropped": lambda: dense.num_dropped,
        "global_step": lambda: dense.global_step,
        "set_global_step": lambda: dense.set_global_step(3),
        "state_dict": dense.state_dict,
        "load_state_dict": lambda: dense.load_state_dict(state),
        "close accumulator": dense.close,
        "center.state_dict": center.state_dict,
        "center.load_state_dict": lambda: center.load_state_dict(of_center),
        "center.variables": center.variables,
        "center.failed_workers": lambda: center.failed_workers,
        "center.start_worker": lambda: center.start_worker(0, print),
        "get_variable": lambda: gr.get_variable("u", np.zeros(2), custom_getter=getter),
        "AGN": lambda: agn.minimize(lambda: np.sum(v * v), var_list=[v]),
        "agn.state_dict": agn_kept,
        "close": mesh.close,
    }
    for step in steps:
        step()
    calls["minimize"]()
    calls["AGN"]()
    dense.apply_grad(gradient[0])
    assert dense.num_accumulated() == 1
    assert dense.take_grad(1)
    calls["agn.load_state_dict"] = lambda kept=agn_kept(): agn.load_state_dict(kept)
    calls["optimizer.state_dict"] = kept
    return calls


def in_the_child(calls):
    signal.alarm(40)
    for name, call in calls.items():
        print(name, flush=True)
        try:
            call()
        except gr.errors.BackendUnavailableError as error:
            assert f"process {os.getppid()}, before a fork" in str(error), (name, error)
        else:
            raise AssertionError(f"{name} works")
    with mesh:
        pass
    host_compile.host_kernel.cache_clear()
    with gr.open_mesh(2, backend="sim", kernels=sys.argv[1], schedule_seed=seed) as new:
        use(new, "shared")
    assert gr.default_mesh() is not old
    getter = gr.AGNCustomGetter(gr.default_mesh().devices[0])  # of a center of this process
    gr.get_variable("own", np.zeros(2), custom_getter=getter)


seed = {"numpy": 1, "compiled": None}[sys.argv[1]]
mesh = gr.open_mesh(2, backend="sim", kernels=sys.argv[1], schedule_seed=seed)
old = gr.default_mesh()
calls = use(mesh, "shared")
gr.get_variable("own", np.zeros(2), custom_getter=(first := gr.AGNCustomGetter(old.devices[0])))
held, done = threading.Event(), threading.Event()


def hold():
    print(len([lock.acquire(timeout=10) for lock in locks()]), "locks")
    held.set()
    done.wait()


threading.Thread(target=hold, daemon=True).start()
assert held.wait(20)
child = os.fork()
if child == 0:
    code = 1
    try:
        in_the_child(calls)
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("exit code", code)
sys.exit(code != 0)
"""


@pytest.mark.parametrize("kernels", ["numpy", pytest.param("compiled", marks=pytest.mark.host)])
def test_inherited_objects_raise_in_a_child_and_new_ones_work(kernels):
    path = os.pathsep.join([str(Path(gr.__file__).parent.parent), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c",
         FORKED, kernels],
        env={**os.environ, "PYTHONPATH": path, "GRADREDUCE_BACKEND": "sim"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
