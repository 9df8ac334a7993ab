"""Finds the processes that a launcher has started: torchrun, mpiexec or srun."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from gradreduce.device import Mesh, MeshState, run_in_thread
from gradreduce.errors import BackendUnavailableError, CollectiveError, brief, install_hint

from .gpu_exchange import choose_gpu_library, connect_gpus, describe_gpus
from .process_group import LocalGroup, ProcessGroup

# The range of ports, of which a SLURM job's number selects one: above the ports of services.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_FOREVER = 365.0 * 24 * 3600  # seconds
# Limit of the time in which a process that cannot open a mesh tells the others why.
_TELL_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_REPORT_SECONDS = 1.0
LAUNCHERS = ("auto", "none", "torchrun", "mpi", "slurm")
# The variables in which launchers set the number of processes. A launcher that may be started by
# another one comes first.
_NUM_PROCESSES = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMI_SIZE": "mpi",
    "SLURM_STEP_NUM_TASKS": "slurm",
}
# The groups of open meshes -> id of the process that has opened them.
_open_groups: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
# The values on which the processes of a mesh must agree.
_ALIKE = {
    "backend": "the backend of gradreduce",
    "version": "the version of gradreduce",
    "nccl": "the version of NCCL",
}


def check_processes(processes: Any, process_group: Any, communicator: Any) -> None:
    """Checks the arguments of ``open_mesh`` that name the processes of the mesh.

    Raises:
        ValueError: several of them are passed, or the launcher is unknown.
        RuntimeError: none is passed, but a launcher has started several processes.
    """
    named = {
        "processes": processes, "process_group": process_group, "communicator": communicator
    }  # fmt: skip
    passed = [name for name, value in named.items() if value is not None]
    if len(passed) > 1:
        raise ValueError(f"pass only one of {', '.join(passed)}")
    if processes is not None and not (isinstance(processes, str) and processes in LAUNCHERS):
        raise ValueError(f"processes={brief(processes)} must be None or one of {LAUNCHERS}")
    found = first_number(os.environ, _NUM_PROCESSES, 2)
    if found is not None and not passed:
        name, number = found
        raise RuntimeError(
            f"{name}={number}: this is one of {number} processes. To sum the replicas of all of "
            "them, call open_mesh(processes='auto'), or pass process_group= or communicator=. To "
            "sum inside each process only, call open_mesh(processes='none'). The first mesh that "
            "is opened so is the default mesh."
        )


def join_processes(
    mesh: Mesh, processes: str | None, process_group: Any, communicator: Any, timeout: float | None
) -> None:
    """Gives a new mesh the process group that the arguments of ``open_mesh`` name, and connects it.

    Raises:
        BackendUnavailableError: the launcher has not started this process, or a library is missing.
        CollectiveError: another process does not open the mesh in time, or opens it with another
            backend, or another version of gradreduce or NCCL.
    """
    on_gpus = not mesh.mesh_state.shares_host_memory
    group = _open_group(processes, process_group, communicator, timeout, on_gpus=on_gpus)
    try:
        _meet(mesh, group)
    except BaseException as error:
        group.leave_unopened(_reason_of(error))
        raise
    _open_groups[group] = os.getpid()


def _leave_at_exit() -> None:
    """Tells other processes that this one ends without closing its mesh."""
    error = getattr(sys, "last_value", None)
    how = f"ended by {error!r}" if error is not None else "ended without closing its mesh"
    for group, process in list(_open_groups.items()):
        if process == os.getpid():  # a forked process has a copy
            with suppress(Exception):
                group.tell_end(how)


atexit.register(_leave_at_exit)


@contextmanager
def telling_processes(
    processes: str | None, process_group: Any, communicator: Any, timeout: float | None
) -> Iterator[None]:
    """Context manager: tells the other processes, which would wait, about an error inside.

    Args:
        processes: see ``open_mesh``.
        process_group: see there.
        communicator: see there.
        timeout: see there.
    """
    try:
        yield
    except Exception as error:
        seconds = _TELL_SECONDS if timeout is None else min(timeout, _TELL_SECONDS)
        with suppress(Exception):  # raise the first error
            group = _open_group(processes, process_group, communicator, seconds, on_gpus=False)
            group.leave_unopened(_reason_of(error))
        raise


def _reason_of(error: BaseException) -> str:
    return f"opens no mesh: {type(error).__name__}: {error}"


def _meet(mesh: Mesh, group: ProcessGroup) -> None:
    """Compares the settings of this process with those of the others, and connects GPUs."""
    here = {
        "devices": len(mesh.devices),
        "backend": mesh.backend,
        "version": sys.modules["gradreduce"].__version__,  # which imports this module
        **describe_gpus(mesh, group),
    }
    own = json.dumps(here)
    group.post("open", own)
    end = time.monotonic() + group.timeout
    notices = []
    missing = []
    for rank in range(group.size):
        text = own if rank == group.rank else _notice(group, rank, end)
        if text is None:
            missing.append(rank)
            continue
        there = json.loads(text)
        for name, what in _ALIKE.items():
            if here[name] != there[name]:
                raise CollectiveError(
                    f"{what} is {here[name]} in process {group.rank}, {there[name]} in process "
                    f"{rank}; it must be equal in all processes"
                )
        notices.append(there)
    if missing:
        raise CollectiveError(group.describe_missing(missing, "open_mesh", group.timeout))
    group.counts = tuple([there["devices"] for there in notices])
    group.move_on_gpu, collective = choose_gpu_library(mesh, group, notices, end)
    if group.size > 1:  # else the mesh has collectives of its own
        group.collective = collective
    mesh.mesh_state.processes = group
    if group.move_on_gpu is not None:
        mesh.mesh_state.on_failure.append(partial(_tell_failure, mesh.mesh_state, group))
        connect_gpus(mesh, group, end)


def _tell_failure(mesh_state: MeshState, group: ProcessGroup) -> None:
    """Tells the other processes what the watchdog has found, without a long wait."""
    done = run_in_thread(partial(group.tell_failure, str(mesh_state.reason)))
    done.wait(_REPORT_SECONDS)


def _notice(group: ProcessGroup, rank: int, end: float) -> str | None:
    """Returns the notice of a process that opens its mesh; None without one."""
    while True:
        is_last = group.departure_reason(rank) is not None or time.monotonic() >= end
        text = group.read(rank, "open", 0.0 if is_last else _LOOK_SECONDS)
        if text is not None or is_last:
            return text


def detect(environment: Mapping[str, str]) -> str | None:
    """Returns the launcher that has started several processes, this one included; or None."""
    found = first_number(environment, _NUM_PROCESSES, 2)
    return None if found is None else _NUM_PROCESSES[found[0]]


def first_number(
    environment: Mapping[str, str], variables: Iterable[str], minimum: int
) -> tuple[str, int] | None:
    """Returns the first of these variables whose value is an integer of at least ``minimum``."""
    for name in variables:
        number = _number(environment.get(name, ""))
        if number is not None and number >= minimum:
            return name, number
    return None


def _number(text: str) -> int | None:
    """Returns the number that a launcher has set; None: the text is none."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _open_group(
    processes: str | None,
    process_group: Any,
    communicator: Any,
    seconds: float | None,
    *,
    on_gpus: bool,
) -> ProcessGroup:
    """Returns the group of a launcher or library, or one of this process only."""
    launcher = detect(os.environ) if processes == "auto" else processes
    timeout = _FOREVER if seconds is None else seconds
    if isinstance(process_group, ProcessGroup):
        return process_group
    group: ProcessGroup = LocalGroup()
    if process_group is not None:
        group = _import("torch_group", "torch").TorchGroup(process_group, timeout)
    elif communicator is not None:
        group = _import("mpi_group", "mpi").MpiGroup(communicator, timeout)
    elif launcher == "mpi":
        mpi = _import("mpi_group", "mpi")
        group = mpi.MpiGroup(mpi.MPI.COMM_WORLD, timeout)
    elif launcher == "torchrun":
        group = _import("torch_group", "torch").open_torchrun(timeout, on_gpus=on_gpus)
    elif launcher == "slurm":
        address = slurm_address(os.environ)
        group = _import("torch_group", "torch").open_slurm(address, timeout, on_gpus=on_gpus)
    return group


def _import(module: str, extra: str) -> Any:
    """Imports a module of this package that needs another library."""
    try:
        return import_module(f".{module}", __package__)
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI
        raise BackendUnavailableError(
            f"{module} cannot be imported ({error}); {install_hint(extra)}"
        ) from error


def slurm_address(environment: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Returns rank, number of processes, first host and port of a SLURM step.

    Steps of one job may run at the same time, so each has its own port.

    Raises:
        BackendUnavailableError: srun has not started this process, or has started only a part of
            the processes.
    """
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    missing = [name for name in names if name not in environment]
    if missing:
        raise BackendUnavailableError(
            f"processes='slurm': {', '.join(missing)} is not set: start this script by srun"
        )
    nodes, job = environment[names[2]], environment[names[3]]
    rank, size = [_number(environment[name]) for name in names[:2]]
    if rank is None or size is None:
        texts = " and ".join(f"{name}={brief(environment[name])}" for name in names[:2])
        raise BackendUnavailableError(f"processes='slurm': {texts} must be numbers")
    if rank >= size:  # each part of a heterogeneous step counts its own tasks
        raise BackendUnavailableError(
            f"processes='slurm': SLURM_PROCID={rank}, but SLURM_STEP_NUM_TASKS={size}: in a "
            "heterogeneous step pass process_group="
        )
    step = f"{job}.{environment.get('SLURM_STEP_ID', '')}"
    return rank, size, _first_host(nodes), _FIRST_PORT + crc32(step.encode()) % _NUM_PORTS


def _first_host(nodes: str) -> str:
    """Returns the first host of ``"rack1-node[003-008,12]-ib,other"``."""
    found = re.match(r"(?:[^,\[]|\[.*?\])*", nodes)
    assert found is not None
    return re.sub(r"\[([0-9]*).*?\]", r"\1", found[0])
