"""How fast a mesh copies, inside a device and between two, measured once; never decides a way."""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

from .base import Device
from .fabric import Fabric
from .memory import Buffer
from .mesh import Mesh

__all__ = ["CopyRates", "copy_rates"]

# Bytes of a copy: more than a cache holds, and on a GPU so many that the host has queued the next
# copy before one is over.
HOST_BYTES, GPU_BYTES = 64 << 20, 256 << 20
ROUNDS = 5  # of which the fastest counts: the rates are for floors


class CopyRates:
    """Rates of one mesh in bytes per second, each measured when it is first asked for.

    To ask may take a second, waits for the devices, and is in the journals that are open. On the
    simulation all devices share the host's memory: one rate, np.copyto's by one thread, is that of
    all of them and of the links between.
    """

    def __init__(self) -> None:
        self._memory: dict[int, float] = {}
        self._links: dict[tuple[int, int], float] = {}
        self._lock = threading.RLock()

    def memory(self, device: Device) -> float:
        """Bytes read and written, together, by copies inside a physical device."""
        key = 0 if device.fabric.backend == "sim" else device.physical
        with self._lock:
            if key not in self._memory:
                self._memory[key] = 2 * _copied_bytes_per_second(device, device)
            return self._memory[key]

    def link(self, device: Device, source: Device) -> float:
        """Bytes that cross from one physical device to another, by copies that ``device`` makes."""
        if device.fabric.backend == "sim":
            return self.memory(device) / 2
        key = (source.physical, device.physical)
        with self._lock:
            if key not in self._links:
                self._links[key] = _copied_bytes_per_second(device, source)
            return self._links[key]


_found: WeakKeyDictionary[Fabric, CopyRates] = WeakKeyDictionary()


def copy_rates(mesh: Mesh) -> CopyRates:
    """Those of a mesh and all its parts."""
    return _found.setdefault(mesh.fabric, CopyRates())


def _copied_bytes_per_second(device: Device, source: Device) -> float:
    nbytes = HOST_BYTES if device.fabric.backend == "sim" else GPU_BYTES
    # Zeros, not empty: host memory that was never written is one page, and read from a cache.
    src, dst = source.zeros((nbytes,), "uint8"), device.zeros((nbytes,), "uint8")
    seconds = [_copy_seconds(device, dst, src) for _ in range(ROUNDS + 1)]
    return nbytes / min(seconds[1:])


def _copy_seconds(device: Device, dst: Buffer, src: Buffer) -> float:
    for each in (src.device, device):
        each.synchronize()
    start = time.perf_counter()
    device.copy(dst, src)
    device.synchronize()
    return time.perf_counter() - start
