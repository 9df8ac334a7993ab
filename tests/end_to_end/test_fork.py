"""In a forked child every inherited object raises at once, whatever its parent was doing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.public_calls import public_calls

import gradreduce as gr
from gradreduce.arrays import convert

# The start of each program. SIGALRM ends a child that hangs.
FORK = """
import functools, gc, os, signal, sys, threading, traceback
import numpy as np
import gradreduce as gr


def fork(function, *args):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(40)
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def codes_of(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""
# The kind of kernels is in argv.
FORKED = """
from gradreduce.backends.sim import host_compile
from support.public_calls import public_calls

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


def locks():
    found = {}
    for owner in gc.get_objects():
        names = str(type(owner).__module__), str(getattr(owner, "__name__", ""))
        if isinstance(owner, functools.cached_property):
            names = (owner.func.__module__,)
        if any(name.startswith("gradreduce") for name in names):
            kept = dict(getattr(owner, "__dict__", {})).values()
            found |= {id(each): each for each in kept if isinstance(each, LOCKS)}
    return list(found.values())


def in_the_child(calls):
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
        public_calls(new, "shared")
    assert gr.default_mesh() is not old
    getter = gr.AGNCustomGetter(gr.default_mesh().devices[0])  # of a center of this process
    gr.get_variable("own", np.zeros(2), custom_getter=getter)


seed = {"numpy": 1, "compiled": None}[sys.argv[1]]
mesh = gr.open_mesh(2, backend="sim", kernels=sys.argv[1], schedule_seed=seed)
old = gr.default_mesh()
calls = public_calls(mesh, "shared")
gr.get_variable("own", np.zeros(2), custom_getter=(first := gr.AGNCustomGetter(old.devices[0])))
held, done = threading.Event(), threading.Event()


def hold():
    print(len([lock.acquire(timeout=10) for lock in locks()]), "locks")
    held.set()
    done.wait()


threading.Thread(target=hold, daemon=True).start()
assert held.wait(20)
assert codes_of([fork(in_the_child, calls)]) == [0]
"""


# The number of processes is in argv. Each is new, because only the first call of a kind may import
# something, and forks five children while three threads make their first calls.
BESIDE = """
ONES = np.ones(4, np.float32)


def first_calls(mesh):
    w = gr.Variable(ONES, device=mesh)
    gr.ConditionalAccumulator("float32", device=mesh.devices[0]).apply_grad(ONES)
    gr.MomentumOptimizer(0.1, 0.9).minimize(lambda: np.sum(w * w), var_list=[w])
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    assert (ops.all_reduce([[ONES], [ONES * 3]])[1][0] == 2).all()
    ops.plan(gr.ReduceOp.SUM, ops.pairs([[ONES], [ONES]]))


def in_the_child(inherited):
    try:
        inherited.apply_grad(ONES)
    except gr.BackendUnavailableError:
        with gr.open_mesh(2, backend="sim", kernels="numpy") as mesh:
            return first_calls(mesh)
    raise AssertionError("the inherited accumulator works")


def fork_beside_first_calls():
    mesh = gr.open_mesh(2, backend="sim", kernels="numpy")
    inherited = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
    start = threading.Barrier(4)
    threads = [
        threading.Thread(target=lambda: (start.wait(20), first_calls(mesh))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    start.wait(20)
    children = [fork(in_the_child, inherited) for _ in range(5)]
    for thread in threads:
        thread.join(20)
    codes = codes_of(children)
    assert codes == [0] * 5, codes


with gr.open_mesh(1, backend="sim", kernels="numpy"):
    pass
for _ in range(int(sys.argv[1])):
    assert codes_of([fork(fork_beside_first_calls)]) == [0]
"""


def run(program: str, argument: str, *, timeout: float) -> None:
    """Runs a program in a new Python, with gradreduce and tests on the path."""
    path = os.pathsep.join([str(Path(gr.__file__).parent.parent), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c",
         FORK + program, argument],
        env={**os.environ, "PYTHONPATH": path, "GRADREDUCE_BACKEND": "sim"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kernels", ["numpy", pytest.param("compiled", marks=pytest.mark.host)])
def test_inherited_objects_raise_in_a_child_and_new_ones_work(kernels):
    with gr.open_mesh(2, backend="sim", kernels=kernels) as mesh:
        public_calls(mesh, "built")  # g++ may take long, and the program has a deadline
    run(FORKED, kernels, timeout=60)


@pytest.mark.parametrize("num_processes", [1, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_a_fork_beside_first_calls_leaves_a_child_that_works(num_processes):
    run(BESIDE, str(num_processes), timeout=240)


# Functions of arrays/convert.py that look at arrays. In the calls below the arrays have the mesh.
CONVERSIONS = {
    *("common_order", "converted", "from_buffer", "host_array", "is_coo", "kind_of", "numbers"),
    *("shape_and_dtype", "to_buffer"),
}
FROM_ARRAYS = {"assert_mirrored", "add_n", "accumulate_n", "aggregate", "clip"}


def test_the_process_is_checked_before_any_argument_is_converted(monkeypatch):
    """Conversions call other libraries, whose threads and locks do not survive a fork."""
    converted = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name == "check_process":
            sys.setprofile(None)
        elif event == "return" and code.co_filename == convert.__file__:
            converted.extend({code.co_name} & CONVERSIONS)

    with gr.open_mesh(2, backend="sim") as mesh:
        calls = public_calls(mesh, "inherited")
        early = {}
        with monkeypatch.context() as patch:
            patch.setattr(mesh.mesh_state, "_forks", -1)  # as in a forked child
            for name, call in calls.items():
                sys.setprofile(profile)
                with pytest.raises(gr.BackendUnavailableError, match="before a fork"):
                    call()
                if converted and name not in FROM_ARRAYS:
                    early[name] = converted[:]
                converted.clear()
    assert early == {}
