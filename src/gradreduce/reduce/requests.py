"""Requests of a batch: rehearses one alone, and copies results to devices and ``out``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gradreduce.arrays.distributed import Part, PerReplica, buffer_of
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.comm.process_group import group_of
from gradreduce.device import Buffer, Device
from gradreduce.sums.slices import dry_run_parts, rehearse_parts, with_dense

from .arguments import Request, label_of
from .one_device import copy_to_each
from .pack_buffers import ONE, PackMove, move


def rehearse_alone(
    request: Request,
    key: Hashable,
    reduce: Callable[[Request, Device], tuple[Part, ...]],
    home: Device | None = None,
) -> None:
    """Compiles the kernels that reduce one value that is not all-reduced.

    Args:
        request: the request of the value.
        key: what the kernels depend on besides the request.
        reduce: reduces a dry-run copy of the request on a dry-run copy of ``home``.
        home: the device that adds. Default: the first device of the result.
    """

    def work(dry_run: DryRunMesh) -> None:
        dry = dry_run_request(dry_run, request)
        copy_to_out([dry], [reduce(dry, *dry_run.devices_like([home or request.devices[0]]))])

    key = ("alone", key, request.out is not None)
    rehearse_parts(key, request.value.parts, work, request.devices)


def dry_run_request(dry_run: DryRunMesh, request: Request) -> Request:
    """Makes a copy of a request on dry-run devices."""
    parts = dry_run_parts(dry_run, request.value.parts)
    out = None if request.out is None else tuple(map(dry_run.buffer, request.out))
    return Request(PerReplica.of(parts), dry_run.devices_like(request.devices), out)


def copy_to_out(
    requests: Sequence[Request], reduced: Sequence[tuple[Part, ...]]
) -> list[tuple[Part, ...]]:
    """Copies results that are not in the requests' ``out`` yet into it."""
    moves: list[PackMove] = []
    copied = []
    for index, (request, parts) in enumerate(zip(requests, reduced, strict=True)):
        for out, part in zip(request.out or (), parts, strict=bool(request.out)):
            if out is not part:
                assert isinstance(part, Buffer), "IndexedSlices were rejected"
                moves.append((out.device, ONE, [out], [part]))
                copied.append(index)
    if moves:
        mesh_state = moves[0][0].mesh_state
        with mesh_state.pack_scope(label_of(requests, list(dict.fromkeys(copied)))):
            mesh_state.thread.phase = "unpack"
            move(moves)
    return [request.out or parts for request, parts in zip(requests, reduced, strict=True)]


def with_all_reduced(requests: Sequence[Request], *, always: bool = False) -> Sequence[Request]:
    """With several processes, returns requests whose dense results go to the value's devices.

    Otherwise the destinations would decide which values are reduced together, and processes might
    differ: one device may be all devices of one process, but a part of those of another. With
    ``always`` it does so in one process, too.
    """
    dense = [_is_dense(request) and not request.is_all_reduced for request in requests]
    if not any(dense) or (group_of(requests[0].devices[0]).size == 1 and not always):
        return requests
    values = [
        request.value._replace(
            _own=tuple(with_dense(request.value.parts)), _form=None, _is_sparse=False
        )
        if _is_dense(request)
        else request.value
        for request in requests
    ]
    return [Request(value, value.devices) for value in values]


def _is_dense(request: Request) -> bool:
    """Whether any replica is dense, so that the sum is dense."""
    return any([isinstance(part, Buffer) for part in request.value.parts])


def copy_to_devices(
    requests: Sequence[Request], reduced: Sequence[tuple[Part, ...]]
) -> list[tuple[Part, ...]]:
    """Copies results to the devices of their requests."""
    copied = []
    for index, (request, parts) in enumerate(zip(requests, reduced, strict=True)):
        home = request.devices[0]
        here = next((part for part in parts if buffer_of(part).device is home), parts[0])
        with home.mesh_state.pack_scope(label_of(requests, [index])):
            home.mesh_state.thread.phase = "unpack"
            copied.append(copy_to_each(here, request.devices, keep=True))
    return copied
