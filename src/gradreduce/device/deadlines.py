"""Deadlines of calls that work on one or more meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from .device import Device
from .failure.pending_calls import PendingCall
from .grouping import group_by


def deadline_scope(
    call: str, deadline: float | None, devices: Iterable[Device]
) -> AbstractContextManager[object]:
    """Context manager: if the submitted work misses the deadline, its mesh fails.

    Args:
        call: the name of the call in errors.
        deadline: seconds from now, from ``as_deadline``; None for no deadline.
        devices: all devices that the work uses; usually of one mesh.
    """
    return nullcontext() if deadline is None else _deadline_scope(call, deadline, devices)


@contextmanager
def _deadline_scope(call: str, deadline: float, devices: Iterable[Device]) -> Iterator[None]:
    with ExitStack() as stack:
        for mesh_state, of_mesh in group_by([(each.mesh_state, each) for each in devices]).items():
            pending_call = PendingCall(call, deadline, of_mesh, mesh_state.generation)
            stack.enter_context(mesh_state.enforce_deadline(pending_call))
        yield
