"""Decides how data moves between the GPUs of several processes, and connects them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gradreduce.device import CollectiveCall, Command, GpuMove, Mesh, Ranks, run_in_thread
from gradreduce.errors import BackendUnavailableError, CollectiveError, log_warning

from .collective import ProcessCollective
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
        ``"gpus"``: the names of the GPUs that have a rank; empty if NCCL is not used. If NCCL lets
        processes share a GPU, a name contains the rank of the process, so that no two are equal.
        ``"places"``: for each device the index of the GPU whose rank it shares. ``"nccl"``: NCCL's
        version; 0 if the mesh makes no communicator.
    """
    if mesh.mesh_state.shares_host_memory or group.gpu_library == "host":
        return {"gpus": [], "places": [], "nccl": 0}
    gpus = list(dict.fromkeys(device._hardware_name() for device in mesh.devices))
    places = [gpus.index(device._hardware_name()) for device in mesh.devices]
    if group.gpu_library == "group":  # it has one GPU in each process
        gpus, places = gpus[:1], [0] * len(places)
    if os.environ.get(_SHARED_GPU) == "1":
        gpus = [f"{name}, process {group.rank}" for name in gpus]
    version = 0
    if group.gpu_library == "nccl":
        with suppress(BackendUnavailableError):
            version = _nccl(mesh).version
    return {"gpus": gpus, "places": places, "nccl": version}


def choose_gpu_library(
    mesh: Mesh, group: ProcessGroup, notices: Sequence[Mapping[str, Any]], end: float
) -> tuple[GpuMove, ProcessCollective] | tuple[None, None]:
    """Decides how data moves; all processes decide the same.

    Args:
        mesh: the mesh of this process.
        group: all processes.
        notices: the result of ``describe_gpus`` of each process.
        end: the time until which the processes open their meshes.

    Returns:
        The function that moves GPU memory, and the collectives of the same communicator. None: it
        moves through host memory.

    Raises:
        ValueError: the group cannot send host memory, but has to.
        CollectiveError: NCCL cannot connect the processes.
    """
    obstacle = _obstacle(mesh, group, notices)
    if obstacle is None:
        ranks = Ranks.of_gpus([notice["places"] for notice in notices], group.rank)
        if group.gpu_library == "group":
            prepare = partial(_prepare_calls, group)
            return group.exchange_on_gpu, ProcessCollective(mesh.mesh_state, ranks, prepare)
        nccl = _connect_nccl(mesh, group, ranks, notices, end)
        return nccl.exchange, ProcessCollective(mesh.mesh_state, ranks, nccl.prepare_calls)
    if not group.sends_host_memory:
        raise ValueError(
            f"process_group= sends only GPU memory, but {obstacle}: make it with "
            "'cpu:gloo,cuda:nccl', or pass one of gloo"
        )
    if not mesh.mesh_state.shares_host_memory and group.size > 1 and group.rank == 0:
        log_warning(
            "gradreduce", "GPUs of several processes exchange through host memory: %s", obstacle
        )
    return None, None


def _prepare_calls(group: ProcessGroup, calls: Sequence[CollectiveCall]) -> Command:
    """Returns a command that queues calls of the library of the group."""
    device, queue = calls[0].inputs[0].device, calls[0].queue
    return partial(device._call_on_stream, queue, partial(group.queue_collectives, calls))


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
        for gpu in notice["gpus"]:
            other = owners.setdefault(gpu, rank)
            if other != rank:
                return f"processes {other} and {rank} share GPU {gpu}, which NCCL refuses"
    return None


def _connect_nccl(
    mesh: Mesh,
    group: ProcessGroup,
    ranks: Ranks,
    notices: Sequence[Mapping[str, Any]],
    end: float,
) -> NcclCollective:
    """Makes a communicator for each GPU of all processes; process 0 makes the id."""
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
    homes = [*ranks.homes(mesh.devices).values()]
    num_gpus = [len(notice["gpus"]) for notice in notices]
    collective.join_processes(homes, identity, group.rank, num_gpus, seconds)
    return collective


def connect_gpus(mesh: Mesh, group: ProcessGroup, end: float) -> None:
    """Exchanges a byte with every other process, and adds one of each GPU; the host waits.

    NCCL connects two processes at their first exchange, and all at their first collective, during
    which the host waits inside NCCL. After this call it usually does not have to.

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
            if (collective := group.collective) is not None and collective.ranks is not None:
                homes = collective.ranks.homes(mesh.devices).values()
                collective.all_reduce([home.zeros((1,), "uint8") for home in homes])
        except BaseException as error:
            failed.append(error)

    done = run_in_thread(work)
    while not done.wait(_LOOK_SECONDS):
        device.mesh_state.check_usable(device)
    if failed:
        raise failed[0]
    mesh.synchronize(deadline=max(1e-3, end - time.monotonic()))


def _nccl(mesh: Mesh) -> NcclCollective:
    """Returns the mesh's NCCL; raises ``BackendUnavailableError`` if libnccl is missing."""
    return cast("NcclCollective", mesh.collective)
