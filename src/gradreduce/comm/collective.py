"""Collectives of a library over the GPUs of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import CollectiveCall, Command, GroupedCollective, MeshState, Ranks

from .exchange import watched

# Returns a command that queues calls as one group of the library.
Prepare = Callable[[Sequence[CollectiveCall]], Command]


class ProcessCollective(GroupedCollective):
    """Collectives in which each process has one or several ranks.

    A collective has the deadline and the checks of an exchange, also in a step that is repeated.

    Args:
        mesh_state: the state of the mesh.
        ranks: the ranks of all processes.
        prepare: see ``Prepare``.
    """

    def __init__(self, mesh_state: MeshState, ranks: Ranks, prepare: Prepare) -> None:
        super().__init__(mesh_state, ranks)
        self._prepare = prepare

    def _send(self, calls: Sequence[CollectiveCall]) -> None:
        """See ``GroupedCollective._send``."""
        queue_calls, label = self._prepare(calls), self._mesh_state.thread.label
        devices = [buffer.device for buffer in calls[0].inputs]

        def command() -> None:
            with watched(devices, label):
                queue_calls()

        self._submit(command, calls)
