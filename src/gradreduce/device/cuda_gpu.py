"""Which GPUs there are, which reach each other, and which fault one does not survive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import permutations
from types import TracebackType
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gradreduce.errors import BackendUnavailableError, CaptureError

from .base import Device

__all__ = ["FATAL", "Gpu", "enable_peer_access", "visible_gpus"]

_log = logging.getLogger("gradreduce")
# A GPU has at most eight peers where no NVSwitch connects them.
_ALREADY_ENABLED, _TOO_MANY_PEERS = 704, 711


def visible_gpus() -> int:
    """How many GPUs CuPy sees.

    Raises:
        BackendUnavailableError: no driver, or no GPU.
    """
    try:
        found = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(f"CuPy sees no GPU: {error}") from error
    if not found:
        raise BackendUnavailableError(
            "CuPy sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return found


def enable_peer_access(physicals: Sequence[int]) -> set[tuple[int, int]]:
    """Lets GPUs read each other's memory where that works; the pairs that do."""
    pairs = permutations(physicals, 2)
    return {(here, there) for here, there in pairs if _is_peer(here, there)}


def _is_peer(here: int, there: int) -> bool:
    if not runtime.deviceCanAccessPeer(here, there):
        return False
    with cupy.cuda.Device(here):
        try:
            runtime.deviceEnablePeerAccess(there)
        except runtime.CUDARuntimeError as error:
            if error.status == _TOO_MANY_PEERS:
                return False
            if error.status != _ALREADY_ENABLED:
                raise
        if _is_intact(here, there):
            return True
        runtime.deviceDisablePeerAccess(there)  # copies between the two go through the host then
    _log.warning(
        "copies between GPUs %d and %d change the data, so their peer access is not used. An IOMMU "
        "does this: turn it off, or set NCCL_P2P_DISABLE=1 for NCCL too",
        here,
        there,
    )
    return False


@cache
def _is_intact(here: int, there: int) -> bool:
    """Whether a page that is copied to a peer and back is what it was."""
    pool, page = cupy.cuda.MemoryPool(), np.arange(1024, dtype=np.uint32)
    back, nbytes = np.zeros_like(page), page.nbytes
    with cupy.cuda.Device(there):
        far, ready = pool.malloc(nbytes), cupy.cuda.Event(disable_timing=True)
        ready.record()
    with cupy.cuda.Device(here):
        near, stream = pool.malloc(nbytes), cupy.cuda.get_current_stream()
        stream.wait_event(ready)
        queue, kinds = stream.ptr, (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)
        runtime.memcpyAsync(near.ptr, page.ctypes.data, nbytes, kinds[0], queue)
        runtime.memcpyPeerAsync(far.ptr, there, near.ptr, here, nbytes, queue)
        runtime.memsetAsync(near.ptr, 0, nbytes, queue)
        runtime.memcpyPeerAsync(near.ptr, here, far.ptr, there, nbytes, queue)
        runtime.memcpyAsync(back.ctypes.data, near.ptr, nbytes, kinds[1], queue)
        stream.synchronize()
    return bool((back == page).all())


# After these CUDA answers every later call of the process with the same error, or the device is
# gone. The runtime (``CUDARuntimeError``) and the driver (``CUDADriverError``, of launches) share
# the numbers.
FATAL = frozenset({
    4,  # the driver shuts down
    214, 220,  # an uncorrectable error of memory or NVLink
    226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721,  # a kernel failed; 710: its assert
    709,  # the context is destroyed
    810,  # the MPS server ended this process's context
    911,  # a device outside of CUDA failed
    999,  # unknown
})  # fmt: skip


# Errors of stream captures: the capture is invalid then, the device stays usable.
_CAPTURE = frozenset(range(900, 909))


class Gpu:
    """Makes a GPU the current one while inside; a fault that it does not survive loses it.

    Every driver call of ours is inside of one.
    """

    def __init__(self, owner: Device) -> None:
        self._owner = owner
        self._device = cupy.cuda.Device(owner.physical)

    @property
    def attributes(self) -> Any:
        """See ``cupy.cuda.Device``."""
        return self._device.attributes

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._device.__exit__()
            return
        with suppress(runtime.CUDARuntimeError):  # a dead device is not left, either
            self._device.__exit__()
        if getattr(error, "status", 0) in FATAL:
            self._owner.lose(str(error))
            text = f"device {self._owner.name} was lost: {error}"
            raise BackendUnavailableError(text) from error
        if getattr(error, "status", 0) in _CAPTURE:
            raise CaptureError(
                f"{self._owner.name}: CUDA refuses this, or has ended a capture, because a CUDA "
                f"graph is being captured: {error}. While a stream of a GPU captures, no thread "
                "may synchronize that GPU. While one captures in global mode, torch.cuda.graph's "
                "default, no thread may allocate or free GPU memory or query events: capture with "
                'capture_error_mode="thread_local". Then capture again'
            ) from error
