"""Which GPUs there are, which reach each other, and which fault one does not survive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.errors import BackendUnavailableError

from .base import Device

__all__ = ["FATAL", "Gpu", "enable_peer_access", "visible_gpus"]


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
    """Lets GPUs read each other's memory where the hardware can; the pairs that do."""
    reached = set()
    for here in physicals:
        for there in physicals:
            if here != there and runtime.deviceCanAccessPeer(here, there):
                with cupy.cuda.Device(here):
                    try:
                        runtime.deviceEnablePeerAccess(there)
                    except runtime.CUDARuntimeError as error:
                        if "PeerAccessAlreadyEnabled" not in str(error):
                            raise
                reached.add((here, there))
    return reached


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
