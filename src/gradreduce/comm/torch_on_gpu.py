"""Collectives of a ``torch.distributed`` group on memory of a GPU that PyTorch does not own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from gradreduce.device import ELEMENT_OF, Buffer, CollectiveCall
from gradreduce.errors import CollectiveError

# element -> PyTorch's dtype for a sum; its NCCL knows no unsigned integers above 8 bits
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "uint8": torch.uint8,
    "uint32": torch.int32,
    "uint64": torch.int64,
}

# PyTorch 2.13 warns of the names of earlier versions.
_OUT_OF_PLACE = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}


@contextmanager
def on_stream(gpu: int, stream: int) -> Iterator[None]:
    """Context manager: makes our stream PyTorch's current one.

    Raises:
        CollectiveError: PyTorch has raised an error.
    """
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, torch.device("cuda", gpu))):
            yield
    except RuntimeError as error:
        raise CollectiveError(f"torch.distributed: {error}") from error


def tensor_of(buffer: Buffer, gpu: int, *, as_bytes: bool = True) -> torch.Tensor:
    """Returns a flat tensor on GPU memory, without a copy: bytes, or elements that can be added."""
    data = (buffer.address, False)  # not read-only
    interface = {"shape": (buffer.nbytes,), "typestr": "|u1", "data": data, "version": 2}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    tensor = torch.as_tensor(array, device=torch.device("cuda", gpu))
    return tensor if as_bytes else tensor.view(_DTYPES[ELEMENT_OF[buffer.dtype].name])


def start_collective(
    call: CollectiveCall, group: Any, global_ranks: Sequence[int], gpu: int
) -> Any:
    """Starts a collective behind the current stream; returns its work.

    Args:
        call: the call, with the buffer of this process's only rank.
        group: the group.
        global_ranks: the rank in the default group of each of its processes.
        gpu: the number of the GPU.
    """
    (source,), (out,) = call.inputs, call.outputs
    is_sum = call.name in ("all_reduce", "reduce", "reduce_scatter")
    read, written = [tensor_of(each, gpu, as_bytes=not is_sum) for each in (source, out)]
    options: dict[str, Any] = {"group": group, "async_op": True}
    if call.name in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[call.name](written, read, **options)
    if out.address != source.address:  # PyTorch's others are in place
        written.copy_(read)
    if call.root is None:
        return dist.all_reduce(written, **options)
    run = dist.broadcast if call.name == "broadcast" else dist.reduce
    return run(written, global_ranks[call.root], **options)
