"""Decides how data moves between the GPUs of several processes, and connects them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from gradreduce.device import GpuMove, Mesh, run_in_thread
from gradreduce.errors import BackendUnavailableError, CollectiveError, log_warning

from .process_group import ProcessGroup
from .replicas import Replicas

if TYPE_CHECKING:
    from gradreduce.backends.cuda.nccl import NcclCollective

_LOOK_SECONDS = 5e-3
# From NCCL 2.30 on, ranks may share a GPU if this variable is 1.
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


def describe_gpus(mesh: Mesh, group: ProcessGroup) -> dict[str, Any]:
    """Returns what other processes must know about this one's GPUs, as JSON values.

    Returns:
        ``"gpus"``: the names of its GPUs; empty if NCCL is not used. If NCCL lets processes share a
        GPU, a name contains the rank, so that no two are equal. ``"nccl"``: NCCL's version; 0 if
        the mesh makes no communicator.
    """
    if mesh.mesh_state.shares_host_memory or group.gpu_library == "host":
        return {"gpus": [], "nccl": 0}
    gpus = list(dict.fromkeys(device._hardware_name() for device in mesh.devices))
    if os.environ.get(_SHARED_GPU) == "1":
        gpus = [f"{name}, process {group.rank}" for name in gpus]
    version = 0
    if group.gpu_library == "nccl":
        with suppress(BackendUnavailableError):
            version = _nccl(mesh).version
    return {"gpus": gpus, "nccl": version}


def choose_gpu_move(
    mesh: Mesh, group: ProcessGroup, notices: Sequence[Mapping[str, Any]], end: float
) -> GpuMove | None:
    """Decides how data moves; all processes decide the same.

    Args:
        mesh: the mesh of this process.
        group: all processes.
        notices: the result of ``describe_gpus`` of each process.
        end: the time until which the processes open their meshes.

    Returns:
        The function that moves GPU memory; None: it moves through host memory.

    Raises:
        ValueError: the group cannot send host memory, but has to.
        CollectiveError: NCCL cannot connect the processes.
    """
    obstacle = _obstacle(mesh, group, notices)
    if obstacle is None:
        if group.gpu_library == "group":
            return group.exchange_on_gpu
        return _communicator(mesh, group, end)
    if not group.sends_host_memory:
        raise ValueError(
            f"process_group= sends only GPU memory, but {obstacle}: make it with "
            "'cpu:gloo,cuda:nccl', or pass one of gloo"
        )
    if group.gpu_library != "host" and not mesh.mesh_state.shares_host_memory and group.rank == 0:
        log_warning(
            "gradreduce", "GPUs of several processes exchange through host memory: %s", obstacle
        )
    return None


def _obstacle(mesh: Mesh, group: ProcessGroup, notices: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why NCCL cannot move the data; None if it can."""
    if mesh.mesh_state.shares_host_memory:
        return "the devices of the mesh are simulated"
    if group.gpu_library == "host":
        return "the group has no NCCL"
    if group.gpu_library == "nccl" and not notices[0]["nccl"]:
        return "CuPy finds no libnccl; pip install nvidia-nccl-cu12 (or -cu13, as for your CuPy)"
    owners: dict[str, int] = {}
    for rank, notice in enumerate(notices):
        gpus = notice["gpus"]
        if len(gpus) > 1:
            return f"process {rank} has {len(gpus)} GPUs, and NCCL takes one of each process"
        other = owners.setdefault(gpus[0], rank)
        if other != rank:
            return f"processes {other} and {rank} share GPU {gpus[0]}, which NCCL refuses"
    return None


def _communicator(mesh: Mesh, group: ProcessGroup, end: float) -> GpuMove:
    """Makes a communicator of all processes; process 0 makes the id."""
    collective = _nccl(mesh)
    if group.rank == 0:
        try:
            notice = (True, collective.make_id().hex())
        except Exception as error:
            notice = (False, str(error))
        group.post("nccl", json.dumps(notice))
    text = group.read(0, "nccl", max(0.0, end - time.monotonic()))
    if text is None:
        raise CollectiveError(group.describe_missing([0], "the id of NCCL", group.timeout))
    is_made, text_or_error = json.loads(text)
    if not is_made:
        raise CollectiveError(f"process 0 cannot make an NCCL id: {text_or_error}")
    seconds = max(0.0, end - time.monotonic())
    identity = bytes.fromhex(text_or_error)
    collective.join_processes(mesh.devices[0], identity, group.rank, group.size, seconds)
    return collective.exchange


def connect_gpus(mesh: Mesh, group: ProcessGroup, end: float) -> None:
    """Exchanges a byte with every other process; the host waits.

    NCCL connects two processes at their first exchange, during which the host waits inside NCCL.
    After this call no exchange has to.

    Raises:
        CollectiveError: another process is late. The mesh has failed.
    """
    device = mesh.devices[0]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with device._activate():
                Replicas([device]).exchange_all(
                    [device.zeros((1,), "uint8")], [[(1,)]] * group.size
                )
        except BaseException as error:
            failed.append(error)

    done = run_in_thread(work)
    while not done.wait(_LOOK_SECONDS):
        device.mesh_state.check_usable(device)
    if failed:
        raise failed[0]
    device.synchronize(deadline=max(1e-3, end - time.monotonic()))


def _nccl(mesh: Mesh) -> NcclCollective:
    """Returns the mesh's NCCL; raises ``BackendUnavailableError`` if libnccl is missing."""
    return cast("NcclCollective", mesh.collective)
