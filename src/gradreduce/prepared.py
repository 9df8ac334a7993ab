"""A reduction that is worked out once and done many times; never decides how it is done.

Once, the flow runs with a tape in the devices (``device/tape.py``): which tensors travel together,
the pointer tables, the kernels, the memory in between and that of the results are settled then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gradreduce.device import Tape, as_deadline, due, gather, scatter
from gradreduce.reduce_arguments import Request, devices_of
from gradreduce.values import Mirrored, Part

__all__ = ["PreparedStep", "check_preparable"]


class PreparedStep:
    """Does the same reduction of the same arrays again, whatever they hold by then.

    Made by ``AllReduceCrossDeviceOps.prepare``. A call asks for no memory, checks no argument and
    does no work for each tensor; what it launches and copies is what ``batch_reduce`` does.

    The arrays that were given are read anew by each call: fill them in place. So are the results
    written: **each call returns the same arrays**, and what an earlier call returned is
    overwritten. Any thread may call; calls come one after the other.

    Attributes:
        results: one ``Mirrored`` for each pair, of Buffers.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        reduce: Callable[[], Sequence[Sequence[Part]]],
    ) -> None:
        self._fabric = requests[0].value.mesh.fabric
        self._devices = devices_of(requests)
        self._tape = Tape()
        self._lock = threading.Lock()
        self._held = [request.value for request in requests]  # what is read stays alive
        with self._fabric.taped(self._tape):
            reduced = reduce()
            # A play comes behind the one before it: its copies read what this one writes.
            gather(self._devices[0], self._devices)
            scatter(self._devices[0], self._devices)
        self._tape.close()
        self.results: list[Mirrored] = [Mirrored.of(parts) for parts in reduced]

    def __call__(self, *, deadline: float | None = None) -> list[Mirrored]:
        """Reduces again; does not wait for the devices.

        Args:
            deadline: seconds from now in which the devices must be done, or the mesh dies.

        Returns:
            ``results``, whose memory is overwritten in the order of their devices' queues.

        Raises:
            BackendUnavailableError: the mesh is closed, or one of its devices is lost.
            CollectiveError: the mesh is dead; after ``mesh.reset()`` the step works again.
            ValueError: ``deadline`` is no number above 0.
        """
        seconds = as_deadline(deadline)
        for device in self._devices:
            self._fabric.check_usable(device)
        with due("a prepared step", seconds, self._devices), self._lock, self._fabric.launch_lock:
            self._tape.play(self._fabric.recorder)
        return self.results


def check_preparable(requests: Sequence[Request]) -> None:
    """Raises ``ValueError`` for what a later call could not read again, and for several meshes."""
    fabrics = {request.value.mesh.fabric for request in requests}
    if len(fabrics) != 1:
        raise ValueError(f"a step is of values of one mesh: these are of {len(fabrics)}")
    for place, request in enumerate(requests):
        if request.value.is_sparse:
            raise ValueError(
                f"value {place} holds IndexedSlices: which rows there are is known each time anew"
            )
        if request.value.kind != "buffer":
            raise ValueError(
                f"value {place} is of arrays of kind {request.value.kind!r}; a prepared step reads "
                "Buffers, such as the views of mesh.flat_buffer"
            )
