"""Requests of a batch: rehearses one alone, and writes results to ``out``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gradreduce.arrays.distributed import Part, PerReplica
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import Buffer, Device
from gradreduce.sums.slices import dry_run_parts, rehearse_parts

from .arguments import Request, label_of
from .pack_buffers import PackMove, move


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
                moves.append((out.device, 1, [out], [part]))
                copied.append(index)
    if moves:
        mesh_state = moves[0][0].mesh_state
        with mesh_state.pack_scope(label_of(requests, list(dict.fromkeys(copied)))):
            mesh_state.thread.phase = "unpack"
            move(moves)
    return [request.out or parts for request, parts in zip(requests, reduced, strict=True)]
