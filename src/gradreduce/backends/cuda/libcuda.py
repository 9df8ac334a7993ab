"""Asks the CUDA driver what CuPy does not offer: about memory, contexts and GPUs."""

from __future__ import annotations

import ctypes
import uuid
from functools import cache

_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # a CUpointer_attribute: cudaIpcGetMemHandle accepts the memory


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def is_of_cuda_malloc(address: int) -> bool:
    """Whether memory is from cudaMalloc, so mapped for all peers; False if unknown.

    False for memory from cudaMallocAsync or virtual memory management, and for managed memory. The
    test: only memory from cudaMalloc can be shared by legacy CUDA IPC. Untested on GPU hardware.
    """
    library, answer = _library(), ctypes.c_int(0)
    if library is None:
        return False
    status = library.cuPointerGetAttribute(
        ctypes.byref(answer), _IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address)
    )
    return status == 0 and bool(answer.value)


def has_context(gpu: int) -> bool:
    """Whether this process has a context on a GPU (its primary context); True if unknown."""
    library, flags, is_active = _library(), ctypes.c_uint(0), ctypes.c_int(0)
    if library is None:
        return True
    status = library.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(is_active))
    return status != 0 or bool(is_active.value)


def uuid_of(gpu: int) -> str | None:
    """Returns a GPU's UUID as nvidia-smi writes it; None if unknown.

    MIG slices have that of their GPU. ``cuDeviceGetUuid_v2`` would tell them apart, but NCCL does
    not: it refuses two ranks on one GPU also if they use different slices (NVIDIA/nccl#1716).
    CuPy's ``getDeviceProperties`` ends the UUID at its first byte of 0.
    """
    found, ask = (ctypes.c_ubyte * 16)(), getattr(_library(), "cuDeviceGetUuid", None)
    if ask is None or ask(ctypes.byref(found), gpu) != 0:
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"
