"""A mesh one of whose queues is stuck, from the deadline to the reset; what it must do is fixed.

For faults planted in what watches and aborts; ``programs`` never hang.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gradreduce as gr
from gradreduce.device import Mesh
from gradreduce.errors import CollectiveError

from .machine import Machine
from .plugin import fresh

__all__ = ["run"]

SECONDS = 0.1  # of a deadline that passes; giving a reduction takes a part of it
MINUTE = 60.0
SIZE = 300


def run(seed: int, num_steps: int = 0) -> int:
    """Raises ``AssertionError`` where something is not as it must be; ``num_steps`` is ignored."""
    machine = fresh(seed)
    with gr.open_mesh([0, 1, 2], backend="cuda") as mesh:
        _reduce(mesh)
        near = mesh.devices[0].upload(np.ones(SIZE, np.float32))
        for wait in (mesh.devices[0].synchronize, near.numpy):  # an abort lets these go on
            _hang(machine, mesh, wait)
            _revive(machine, mesh)
        kept = mesh.devices[1].upload(np.ones(SIZE, np.float32))
        _hang(machine, mesh, kept.numpy)
        held = list(mesh.devices[1]._staging)
        assert held, "the memory that a copy may still write is given away"
        _revive(machine, mesh)
        staged = [id(pinned) for pinned, _ in mesh.devices[1]._staging]
        assert not any(id(pinned) in staged for pinned, _ in held), "memory of before stays"
        mesh.synchronize(deadline=MINUTE)
        _hang(machine, mesh, mesh.devices[2].synchronize)  # and is closed so
    machine.settle()
    return 1


def _reduce(mesh: Mesh, **options: float) -> list:
    grads = [[device.upload(np.ones(SIZE, np.float32))] for device in mesh.devices]
    return gr.NcclAllReduce(2, mesh=mesh).all_reduce(grads, gr.ReduceOp.SUM, **options)


def _right(results: list) -> None:
    for row in results:
        assert (row[0].numpy(deadline=MINUTE) == len(results)).all(), "wrong values"


def _hang(machine: Machine, mesh: Mesh, wait: Callable[[], object]) -> None:
    """The second GPU is stuck; a reduction is late, and so is what waits without a deadline."""
    _right(_reduce(mesh, deadline=MINUTE))
    mesh.synchronize()
    communicators = mesh.collective._cliques.communicators()
    with machine.lock:
        machine.stuck.add(machine.queues[mesh.devices[1].stream().ptr])
    results = _reduce(mesh, deadline=SECONDS)
    for use in (wait, results[0][0].numpy, mesh.devices[2].mark):
        try:
            use()
        except CollectiveError as error:
            assert "cuda:1 has not joined packs 1 to 2 of 2 (tensor 0)" in str(error), str(error)
        else:
            raise AssertionError("a dead mesh was used")
    try:
        mesh.reset(timeout=SECONDS)
    except CollectiveError as error:
        assert "cuda:1" in str(error), str(error)
    else:
        raise AssertionError("a queue that is stuck was not waited for")
    ended = [communicator._ended for communicator in communicators]
    assert ended == ["abort"] * 3, f"not aborted: {ended}"


def _revive(machine: Machine, mesh: Mesh) -> None:
    with machine.lock:
        machine.stuck.clear()
    mesh.reset(timeout=MINUTE)
    _right(_reduce(mesh, deadline=MINUTE))
