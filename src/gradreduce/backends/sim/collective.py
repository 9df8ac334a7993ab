"""Collectives over simulated devices, summed in mesh order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from gradreduce.device import Buffer, Collective, Queue, accumulate_dtype

from .device import SimDevice, memory_of, sim_device
from .fp_warnings import without_warnings


class SimCollective(Collective):
    """Collectives that sum in the accumulate dtype, in mesh order, and round once."""

    def all_reduce(
        self,
        buffers: Sequence[Buffer],
        op: str = "sum",
        *,
        sources: Sequence[Buffer] | None = None,
        queue: Queue = "compute",
    ) -> None:
        """See ``Collective.all_reduce``."""
        if op != "sum":
            raise NotImplementedError(
                f"all_reduce with op={op!r}: simulated devices support only 'sum'"
            )
        terms = [memory_of(each) for each in self._check_sources("all_reduce", buffers, sources)]
        arrays = [memory_of(buffer) for buffer in buffers]
        acc_dtype = accumulate_dtype(buffers[0].dtype)

        def work() -> None:
            total = terms[0].astype(acc_dtype)
            for term in terms[1:]:
                total += term
            for array in arrays:
                array[...] = total

        silent = partial(without_warnings, work)
        self._run_after_all("all_reduce", buffers, silent, queue, sources or ())

    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """See ``Collective.broadcast``."""
        self._check_broadcast(buffers, root)
        arrays = [memory_of(buffer) for buffer in buffers]

        def work() -> None:
            for array in arrays[:root] + arrays[root + 1 :]:
                array[...] = arrays[root]

        self._run_after_all("broadcast", buffers, work, queue)

    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """See ``Collective.all_gather``."""
        self._check_gather(outputs, inputs)
        sources = [memory_of(buffer) for buffer in inputs]
        targets = [memory_of(out) for out in outputs]

        def work() -> None:
            gathered = np.concatenate(sources)
            for target in targets:
                target[...] = gathered

        self._run_after_all("all_gather", inputs, work, queue, outputs)

    def _run_after_all(
        self,
        name: str,
        buffers: Sequence[Buffer],
        work: Callable[[], None],
        queue: Queue,
        kept: Sequence[Buffer] = (),
    ) -> None:
        """Runs work once when all devices' queues have reached it; they wait for its end."""
        devices: list[SimDevice] = [sim_device(buffer) for buffer in buffers]
        first = devices[0]

        def command() -> None:
            for device in devices[1:]:
                first.wait(device.mark(queue), queue=queue)
            first.submit(queue, work)
            done = first.mark(queue)
            for device in devices[1:]:
                device.wait(done, queue=queue)

        self._submit(command, [(name, buffers, queue)], kept)
