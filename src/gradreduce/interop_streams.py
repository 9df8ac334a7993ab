"""Work of ours that is done many times between a caller's streams: fenced each time, both ways.

Never looks at an array: one fence for each library, device and stream serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradreduce.device import Buffer, Device, follow, precede
from gradreduce.interop_gpu import current_of

__all__ = ["Border"]

_LENDING = ("torch", "cupy")  # JAX's arrays never change: those that came in are ready for good
_ON_HOST = ("native", "numpy", "torch")
_ON_GPU = ("native", "torch", "cupy", "cuda")


class Border:
    """Which libraries lend memory to a piece of work, and which are given its results.

    Args:
        lenders: kind of the lending library and device, of every array; Buffers are nobody's.
        takers: likewise of the results. The work ends with every one of its devices behind all
            of it: so one of them speaks for its GPU. Lenders are fenced like takers, because they
            may write their arrays again.
    """

    def __init__(
        self, lenders: Iterable[tuple[str, Device]], takers: Iterable[tuple[str, Device]]
    ) -> None:
        self._lenders = [
            (kind, device)
            for kind, device in dict.fromkeys(lenders)
            if kind in _LENDING and device.fabric.backend == "cuda"
        ]
        self._given: list[tuple[str, Device]] = []  # on GPUs
        self._shown: list[Device] = []  # in host memory
        self._takers: dict[tuple[str, Device], object] = {}  # the stream of the last call
        places: set[tuple[bool, int]] = set()
        for kind, device in dict.fromkeys((*takers, *self._lenders)):
            if device.fabric.backend != "cuda":
                if kind in _ON_HOST and device not in self._shown:
                    self._shown.append(device)
            elif kind in _ON_GPU and (kind == "torch", device.physical) not in places:
                places.add((kind == "torch", device.physical))
                self._given.append((kind, device))

    def enter(self) -> None:
        """Our compute queues wait for what the callers' streams that are current now hold.

        Raises:
            CaptureError: one of these, or of those that will wait for us, is capturing a CUDA
                graph. Nothing was changed.
        """
        for kind, device in self._given:
            device.check_stream(current_of(device, kind))
        for kind, device in self._lenders:
            follow(device, current_of(device, kind), checked=True)

    def leave(self, results: Iterable[Buffer] = ()) -> None:
        """Those streams wait for our compute queues; for arrays in host memory the host does.

        Args:
            results: whose arrays are read there from here on, and may be dropped meanwhile.
        """
        for kind, device in self._given:
            taker = current_of(device, kind)
            precede(device, taker)
            if self._takers.get((kind, device)) != taker:  # not again at each call
                self._takers[kind, device] = taker
                for result in results:
                    if result.device.physical == device.physical:
                        result.block.is_shown(taker)
        for device in self._shown:
            precede(device, None)
