"""How tensors get into one flat buffer, and back: ``kernels/pack.cu`` and its twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, accumulate_dtype, element_of
from gradreduce.device.kernel import Arrays

from ._check import by_dtype, check_divisor
from ._templates import FROM_WIDE, SAME, TO_WIDE

__all__ = ["PACK", "pack", "prepare_pack"]


def _pack_twin(table: Sequence[Arrays], scale: float) -> None:
    """``out = in * scale``, and zero where ``in`` has ended."""
    for out, term in table:
        filled = out[: term.size]
        if scale == 1:
            filled[...] = term
        else:
            wide = accumulate_dtype(term.dtype)
            filled[...] = np.multiply(term, wide.type(scale), dtype=wide)
        out[term.size :] = 0


PACK = Kernel(
    name="pack",
    source="pack",
    twin=_pack_twin,
    scalars=(("scale", "float64"),),
    templates=(*SAME, *TO_WIDE, *FROM_WIDE),
)


def pack(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    *,
    scale: float = 1,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``outs[t] = inputs[t] * scale`` for every tensor t, cast to the out's dtype.

    One launch for all tensors with the same dtypes.

    Args:
        outs: one per tensor, in a flat buffer as a rule; overwritten. One that is longer than its
            input gets zeros behind it.
        inputs: one per tensor.
        scale: a factor, in the accumulate type of the input; 1 leaves every bit as it is.
        device: whose queue launches; default that of ``outs[0]``. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: an out is shorter than its input, overlaps it partly, or integers would be
            scaled.
    """
    check_divisor("pack", scale, inputs)
    rows = zip(zip(outs), zip(inputs), strict=True)
    for (to, of, _, _), operands in by_dtype(PACK, rows, padded=True).items():
        device = device or outs[0].device
        device.launch(PACK, (to, of), operands, (float(scale),), queue=queue)


def prepare_pack(device: Device, out: np.dtype, term: np.dtype) -> None:
    """Compiles what ``pack`` with these dtypes launches."""
    device.prepare(PACK, (element_of(out).name, element_of(term).name))
