"""GPUs, peer access and fatal errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from threading import get_ident
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvtx, runtime

from gradreduce.device import Device, ProfilerRanges, Stream, handle_of
from gradreduce.errors import INSTALL_CUDA, BackendUnavailableError, CaptureError, log_warning

from .libcuda import has_context

# CUDA errors. Without an NVSwitch a GPU has at most eight peers.
_ALREADY_ENABLED, _TOO_MANY_PEERS = 704, 711


NVTX = ProfilerRanges(nvtx.RangePush, nvtx.RangePop)  # Nsight Systems shows them
OLDEST_CUPY = (14, 2)  # older ones take no bfloat16


def visible_gpus() -> int:
    """Returns the number of GPUs that CuPy sees.

    Raises:
        BackendUnavailableError: CuPy is too old, or built for AMD GPUs; there is no driver or no
            GPU.
    """
    _check_cupy()
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(f"CuPy sees no GPU: {error}") from error
    if not count:
        raise BackendUnavailableError("CuPy sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return count


def _check_cupy() -> None:
    version = str(cupy.__version__)
    if runtime.is_hip:
        raise BackendUnavailableError(
            f"CuPy {version} is built for AMD GPUs (HIP): uninstall it, then {INSTALL_CUDA}"
        )
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_CUPY:
        oldest = ".".join(map(str, OLDEST_CUPY))
        raise BackendUnavailableError(
            f"CuPy {version} is too old: gradreduce needs {oldest} or later; {INSTALL_CUDA}"
        )


def enable_peer_access(physicals: Sequence[int]) -> set[tuple[int, int]]:
    """Enables peer access where it works; returns the pairs of GPUs that have it."""
    pairs = permutations(physicals, 2)
    return {(here, there) for here, there in pairs if _is_peer(here, there)}


def _is_peer(here: int, there: int) -> bool:
    if not runtime.deviceCanAccessPeer(here, there):
        return False
    with CurrentGpu(here):
        try:
            runtime.deviceEnablePeerAccess(there)
        except runtime.CUDARuntimeError as error:
            if error.status == _TOO_MANY_PEERS:
                return False
            if error.status != _ALREADY_ENABLED:
                raise
        if _is_intact(here, there):
            return True
        runtime.deviceDisablePeerAccess(there)  # copies between the two then go through the host
    log_warning(
        "gradreduce",
        "copies between GPUs %d and %d corrupt data, so their peer access is not used. An IOMMU "
        "causes this: turn it off, or set NCCL_P2P_DISABLE=1 for NCCL too",
        here,
        there,
    )
    return False


@cache
def _is_intact(here: int, there: int) -> bool:
    """Whether a page copied to a peer and back is unchanged."""
    pool, page = cupy.cuda.MemoryPool(), np.arange(1024, dtype=np.uint32)
    back, nbytes = np.zeros_like(page), page.nbytes
    with CurrentGpu(there):
        far, ready = pool.malloc(nbytes), cupy.cuda.Event(disable_timing=True)
        ready.record()
    with CurrentGpu(here):
        local, stream = pool.malloc(nbytes), cupy.cuda.get_current_stream()
        stream.wait_event(ready)
        queue, kinds = stream.ptr, (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)
        runtime.memcpyAsync(local.ptr, page.ctypes.data, nbytes, kinds[0], queue)
        runtime.memcpyPeerAsync(far.ptr, there, local.ptr, here, nbytes, queue)
        runtime.memsetAsync(local.ptr, 0, nbytes, queue)
        runtime.memcpyPeerAsync(local.ptr, here, far.ptr, there, nbytes, queue)
        runtime.memcpyAsync(back.ctypes.data, local.ptr, nbytes, kinds[1], queue)
        stream.synchronize()
    return bool((back == page).all())


# After one of these errors the device is unusable, or every later CUDA call of the process returns
# the same error. The runtime (``CUDARuntimeError``) and the driver (``CUDADriverError``, for
# launches) use the same numbers.
FATAL = frozenset({
    4,  # the driver shuts down
    214, 220,  # an uncorrectable error of memory or NVLink
    226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721,  # a kernel failed; 710: its assert
    709,  # the context is destroyed
    810,  # the MPS server ended this process's context
    911,  # a device outside of CUDA failed
    999,  # unknown
})  # fmt: skip


# Errors of stream captures: they invalidate the capture; the device stays usable.
_CAPTURE = frozenset(range(900, 909))
# CUDA's error for a default stream while a blocking stream of its GPU is capturing.
_CAPTURE_IMPLICIT = 906


# GPUs that have contexts, because we use them. Asking the driver takes a microsecond.
_OURS: set[int] = set()


class CurrentGpu:
    """Context manager: makes a GPU current, and makes no context on any other.

    ``cudaSetDevice`` makes a context of some 500 MB, and so does ``cupy.cuda.Device`` at the end of
    its block, on the GPU that was current before: on GPU 0 in every process that never used it.
    Therefore this block returns to the earlier GPU only if that has a context already. Else the
    thread stays on this one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        # For each thread that came from another GPU: what was current before each of its blocks.
        self._before: dict[int, list[int]] = {}
        _OURS.add(number)

    def __enter__(self) -> None:
        current = runtime.getDevice()
        if current != self._number or self._before:
            self._before.setdefault(get_ident(), []).append(current)
        try:
            # Also if it is current: a launch is a call of the driver, which needs a context that is
            # bound to the thread.
            runtime.setDevice(self._number)
        except runtime.CUDARuntimeError as error:
            if error.status not in FATAL:  # of a failed GPU: the calls in the block say so
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before:
            self._return(error)
        if error is not None:
            self._translate(error)

    def _return(self, error: BaseException | None) -> None:
        thread = get_ident()
        stack = self._before.get(thread)
        if stack is None:  # another thread came from another GPU
            return
        before = stack.pop()
        if not stack:
            del self._before[thread]
        if before != self._number and (before in _OURS or has_context(before)):
            try:
                runtime.setDevice(before)
            except runtime.CUDARuntimeError:  # on a failed GPU
                if error is None:
                    raise

    def _translate(self, error: BaseException) -> None:
        """Raises a better error for one that ended the block, if there is one."""


class GpuScope(CurrentGpu):
    """Makes a device's GPU current; marks it as failed on a fatal error.

    Every CUDA call of this package is made inside of one, or of a ``CurrentGpu``.

    Attributes:
        device: CuPy's device.
    """

    def __init__(self, owner: Device) -> None:
        super().__init__(owner.physical)
        self._owner = owner
        self.device = cupy.cuda.Device(owner.physical)

    def event(self, stream: Stream) -> Any:
        """Records an event at the end of a stream of this GPU."""
        with self:  # the GPU of the event, and of the default streams' handles
            event = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(event.ptr, handle_of(stream))
        return event

    def is_capturing(self, stream: Stream) -> bool:
        """Whether a stream of this GPU is capturing, or must wait for one that is."""
        with self:  # handles of default streams mean the current GPU
            try:
                return bool(runtime.streamIsCapturing(handle_of(stream)))
            except RuntimeError as error:  # has no status if the capture is invalid
                if getattr(error, "status", _CAPTURE_IMPLICIT) != _CAPTURE_IMPLICIT:
                    raise
                return True

    def _translate(self, error: BaseException) -> None:
        if getattr(error, "status", 0) in FATAL:
            self._owner.mark_failed(str(error))
            text = f"device {self._owner.name} failed: {error}"
            raise BackendUnavailableError(text) from error
        if getattr(error, "status", 0) in _CAPTURE:
            raise CaptureError(
                f"{self._owner.name}: CUDA rejects this call, or ended a capture, because a CUDA "
                f"graph is being captured: {error}. While a stream of a GPU captures, no thread "
                "may synchronize that GPU. While one captures in global mode, torch.cuda.graph's "
                "default, no thread may allocate or free GPU memory or query events: capture with "
                'capture_error_mode="thread_local". Then capture again'
            ) from error
