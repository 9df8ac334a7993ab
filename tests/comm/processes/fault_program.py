"""The program of the fault tests: ``fault_program.py LAUNCHER FAULT CALL DEADLINE``.

Process 1 makes the fault, at the call of number ``FAULTY`` (process 0, if only one can open the
mesh). Each process says which error it meets, and after how long.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import gradreduce as gr

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
HEALTHY = 30.0  # seconds for calls without a fault, also on a machine that is busy
NUM_CALLS = 6
FAULTY = 3
PARTIAL = "a sum of some replicas only"
LATE_SECONDS = 8.0
# Faults that appear while the mesh is opened.
AT_OPENING = ("late", "version", "no_devices", "port_taken", "no_host")
# Faults that only the timeout of the mesh ends: their calls have no earlier deadline.
BY_TIMEOUT = ("stopped_at_end", "stopped_without_deadline")
SHORT_TIMEOUT = ("late", "port_taken", "no_host", *BY_TIMEOUT)

# Makes the call of a number, within a deadline; checks the result.
Call = Callable[[int, float | None], None]


# -- calls -----------------------------------------------------------------------------------------


def ops_of(mesh: Any, **options: Any) -> Any:
    return gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh, **options)


def terms_of(size: int) -> list[np.ndarray]:
    return [np.full(3 * size, 1.0, np.float32), np.full(40000 * size, 2.0)]


def check(found: Any, wanted: Any) -> None:
    assert (np.asarray(found) == wanted).all(), PARTIAL


def step(mesh: Any, terms: list[np.ndarray], deadline: float | None, **options: Any) -> None:
    rows = ops_of(mesh, **options).all_reduce([terms, terms], SUM, deadline=deadline)
    for row in rows:
        for each, term in zip(row, terms, strict=True):
            check(each, term * mesh.num_replicas)


def reduce(mesh: Any) -> Call:
    return lambda number, deadline: step(mesh, terms_of(1 + number % 2), deadline)


def prepared(mesh: Any) -> Call:
    made = []
    for size in (1, 2):
        values = [
            gr.PerReplica([device.upload(term) for device in mesh], mesh) for term in terms_of(size)
        ]
        made.append(ops_of(mesh).prepare(MEAN, [(value, value) for value in values]))

    def run(number: int, deadline: float | None) -> None:
        results = made[number % 2](deadline=deadline)
        for result, term in zip(results, terms_of(1 + number % 2), strict=True):
            for each in result.values:
                check(each.numpy(), term)

    return run


def sync_step(mesh: Any) -> Call:
    variables = [gr.Variable(np.zeros(size, np.float32), device=mesh) for size in (3, 80000)]
    train = gr.SyncStep(variables, gr.GradientDescentOptimizer(1.0), ops_of(mesh))
    grads = [[np.ones(variable.shape, np.float32)] for variable in variables]

    def run(number: int, deadline: float | None) -> None:
        assert train([grads for _ in mesh], deadline=deadline)
        for variable in variables:
            check(variable.numpy(), -float(number + 1))

    return run


def broadcast(mesh: Any) -> Call:
    def run(number: int, deadline: float | None) -> None:
        mine = np.full(50000, float(number if mesh.process_index == 1 else -1))
        copies = ops_of(mesh).broadcast(mine, mesh, process=1, deadline=deadline)
        for each in copies.values:
            check(each, number)

    return run


def slices(mesh: Any) -> Call:
    num_rows = 1 + mesh.process_index
    rows = gr.IndexedSlices(np.ones((num_rows, 5)), np.arange(num_rows))
    value = gr.PerReplica([rows, rows], mesh)

    def run(number: int, deadline: float | None) -> None:
        total = ops_of(mesh).reduce(SUM, value, value, coalesce=True, deadline=deadline)
        size = mesh.num_processes
        for each in total.values:
            check(each.values, np.arange(2.0 * size, 0.0, -2.0)[:, None])

    return run


CALLS: dict[str, Callable[[Any], Call]] = {
    each.__name__: each for each in (reduce, prepared, sync_step, broadcast, slices)
}


# -- faults ----------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed_inside(mesh: Any) -> None:
    threading.Timer(0.0, kill).start()
    for number in itertools.count(FAULTY):
        step(mesh, terms_of(1 + number % 2), None)


def told(mesh: Any) -> None:
    """The process leaves its mesh by an error, and continues to run."""
    mesh.__exit__(ValueError, ValueError("an error of the user's code"), None)
    time.sleep(LATE_SECONDS)
    sys.exit(3)


def user_error(mesh: Any) -> None:
    raise RuntimeError("an error of the user's code")


def in_exchange(mesh: Any, index: int, act: Callable[[], None]) -> None:
    """Acts before an exchange of the next call, by its index."""
    group = mesh.mesh_state.processes
    exchange, numbers = group.exchange, itertools.count()

    def act_or_exchange(*arguments: Any) -> None:
        if next(numbers) == index:
            act()
        exchange(*arguments)

    group.exchange = act_or_exchange


def interrupt() -> None:
    raise KeyboardInterrupt


TERMS = terms_of(1 + FAULTY % 2)  # of the faulty call
FAULTS: dict[str, Callable[[Any], object]] = {
    "killed_before": lambda mesh: kill(),
    "killed_inside": killed_inside,
    "killed_after": lambda mesh: (step(mesh, TERMS, None), kill()),
    "stopped": lambda mesh: stop(),
    "shape": lambda mesh: step(mesh, terms_of(7), None),
    # The plan of this process is new; the others already know their plans.
    "new_plan": lambda mesh: step(mesh, TERMS, None, num_packs=2),
    "dtype": lambda mesh: step(mesh, [TERMS[0], TERMS[1].astype(np.float32)], None),
    "order": lambda mesh: step(mesh, TERMS[::-1], None),
    # All processes know both plans, and use them in different orders.
    "known_plan": lambda mesh: step(mesh, terms_of(2 - FAULTY % 2), None),
    "fewer_steps": lambda mesh: (mesh.close(), sys.exit(0)),
    "left_early": lambda mesh: sys.exit(0),
    "ended": lambda mesh: os._exit(0),
    "user_error": user_error,
    "told": told,
    # Another process, which waits for this one, is interrupted.
    "busy": lambda mesh: time.sleep(LATE_SECONDS),
    **{
        f"{act.__name__}_in_exchange_{index}": partial(in_exchange, index=index, act=act)
        for act in (stop, kill, interrupt)
        for index in range(4)
    },
    **dict.fromkeys(BY_TIMEOUT, lambda mesh: stop()),
}
# What a process does instead of closing its mesh. With srun process 0 has the store.
AT_END = {
    ("stopped_at_end", 1): stop,
    ("killed_at_end", 1): kill,
    ("ended_at_end", 1): partial(os._exit, 0),
    ("store_ended_at_end", 0): partial(os._exit, 0),
}


# -- the run ---------------------------------------------------------------------------------------


def main(launcher: str, name: str, kind: str, deadline: float) -> int:
    import_library(launcher)
    rank = next(
        int(os.environ[each])
        for each in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
        if each in os.environ
    )
    options = prepare_opening(name, rank)
    limit = deadline if name in SHORT_TIMEOUT else HEALTHY
    meshes: list[Any] = []
    if not reports(limit, lambda: meshes.extend(open_meshes(launcher, kind, limit, options))):
        return 3
    if kind != "threads":
        mesh, others = meshes[0], meshes[1:]
        return 0 if runs(mesh, others, name, kind, deadline, rank) else 3
    with ThreadPoolExecutor(len(meshes)) as pool:
        done = pool.map(lambda mesh: runs(mesh, [], name, "reduce", deadline, rank), meshes)
        return 0 if all(list(done)) else 3


def import_library(launcher: str) -> None:
    """Imports what takes seconds, and waits for the other processes under MPI."""
    if launcher == "mpi":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    else:
        import torch.distributed

        assert torch.distributed.is_available()


def prepare_opening(name: str, rank: int) -> dict[str, Any]:
    """Makes faults that show while the mesh is opened; returns options of ``open_mesh``."""
    if name == "late" and rank == 1:
        time.sleep(LATE_SECONDS)
    if name == "version" and rank == 1:
        gr.__version__ = "0.0.1"
    if name == "port_taken":  # torchrun's own store uses it
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if name == "no_host":
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    return {"devices_per_process": 0 if name == "no_devices" and rank == 0 else 2}


def open_meshes(launcher: str, kind: str, limit: float, options: dict[str, Any]) -> list[Any]:
    """Opens the meshes of a kind of call: the first is the one with the fault."""
    open_mesh = partial(gr.open_mesh, backend="sim", timeout=limit, **options)
    if kind == "subgroups":
        return [open_mesh(**half_of(launcher))]
    num_meshes = 2 if kind in ("two_meshes", "threads") else 1
    return [open_mesh(processes=launcher) for _ in range(num_meshes)]


def half_of(launcher: str) -> dict[str, Any]:
    """Returns the half of the processes to which this one belongs."""
    if launcher == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
        return {"communicator": MPI.COMM_WORLD.Split(rank % 2, rank)}
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    return {"process_group": parts[rank % 2]}


def runs(mesh: Any, others: list[Any], name: str, kind: str, deadline: float, rank: int) -> bool:
    """Makes the calls, with the fault; returns whether all went well."""
    calls = [CALLS.get(kind, reduce)(each) for each in (mesh, *others)]
    for number in range(NUM_CALLS):
        is_faulty = number >= FAULTY and name not in AT_OPENING
        seconds = None if is_faulty and name in BY_TIMEOUT else deadline if is_faulty else HEALTHY
        if is_faulty and number == FAULTY and not make_fault(mesh, name, rank, deadline):
            return False
        for each in calls:
            if not reports(seconds or deadline, partial(each, number, seconds)):
                return False
    AT_END.get((name, rank), lambda: None)()
    return all([reports(deadline, each.close) for each in (mesh, *others)])


def make_fault(mesh: Any, name: str, rank: int, deadline: float) -> bool:
    """Makes the fault, if this process makes it; returns whether it met no error."""
    if rank == 1 and name == "user_error":
        FAULTS[name](mesh)
    elif rank == 0 and name == "store_stopped":
        # Like srun when another process has failed.
        subprocess.Popen(["sh", "-c", f"sleep {3 * deadline}; kill -9 {os.getpid()}"])
        stop()
    elif rank == 1 and not name.endswith("_at_end") and name != "store_stopped":
        return reports(deadline, partial(FAULTS[name], mesh))
    elif rank == 0 and name == "busy":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return True


def reports(deadline: float, run: Callable[[], Any]) -> bool:
    """Runs something; prints the error and how long it took, and returns whether all went well."""
    begin = time.monotonic()
    try:
        run()
    except (Exception, KeyboardInterrupt) as error:
        seconds = time.monotonic() - begin
        text = f"survived {seconds:.1f} of {deadline:.1f} s: {type(error).__name__}: {error}"
        # By one write: another process may write at the same time.
        sys.stdout.write(text.replace("\n", " ") + "\n")
        sys.stdout.flush()
        time.sleep(0.5)  # both launchers end the others when one fails: let them say it first
        return False
    return True


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
    print("done" if status == 0 else "failed", flush=True)
    sys.exit(status)
