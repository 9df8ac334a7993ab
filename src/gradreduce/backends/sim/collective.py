"""Collectives over simulated devices, summed in mesh order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gradreduce.device import Collective, CollectiveCall, Mark, accumulate_dtype

from .device import memory_of
from .fp_warnings import without_warnings

_HostArrays = list[np.ndarray]


def _sum(inputs: _HostArrays) -> np.ndarray:
    total = inputs[0].astype(accumulate_dtype(inputs[0].dtype))
    for term in inputs[1:]:
        total += term
    return total


def _all_reduce(inputs: _HostArrays, outputs: _HostArrays, _: None) -> None:
    total = _sum(inputs)
    for array in outputs:
        array[...] = total


def _reduce(inputs: _HostArrays, outputs: _HostArrays, root: int) -> None:
    outputs[root][...] = _sum(inputs)


def _broadcast(inputs: _HostArrays, outputs: _HostArrays, root: int) -> None:
    for array in outputs[:root] + outputs[root + 1 :]:
        array[...] = inputs[root]


def _all_gather(inputs: _HostArrays, outputs: _HostArrays, _: None) -> None:
    gathered = np.concatenate(inputs)
    for array in outputs:
        array[...] = gathered


def _reduce_scatter(inputs: _HostArrays, outputs: _HostArrays, _: None) -> None:
    for array, part in zip(outputs, np.split(_sum(inputs), len(outputs)), strict=True):
        array[...] = part


_WORK: dict[str, Callable[[_HostArrays, _HostArrays, Any], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


class SimCollective(Collective):
    """Collectives that sum in the accumulate dtype, in mesh order, and round once."""

    def _call(self, call: CollectiveCall) -> None:
        """Runs a call when all devices' queues have reached it; they wait for it."""
        inputs, outputs = list(map(memory_of, call.inputs)), list(map(memory_of, call.outputs))
        work = partial(without_warnings, _WORK[call.name], inputs, outputs, call.root)
        devices: list[Any] = [buffer.device for buffer in call.inputs]
        first, queue = devices[0], call.queue
        others = devices[1:] if first.defers else []  # else all their work is done

        def command() -> None:
            for device in others:
                first._wait(Mark(device, queue, device._mark(queue)), queue)
            first.submit(queue, work)
            done = Mark(first, queue, first._mark(queue))
            for device in others:
                device._wait(done, queue)

        self._submit(command, [call])
