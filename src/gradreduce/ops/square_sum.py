"""Global norm of tensors: launcher of ``square_sum.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel
from gradreduce.device.buffer import by_template, same_dtypes
from gradreduce.device.kernel import Arrays

from .validate import FLOATS

STRIDES = 256  # elements per sum
_DOUBLE = np.dtype(np.float64)


def _square_sum_reference(table: Sequence[Arrays], squared: int, rooted: int) -> None:
    """``out[p] = in[p]² + in[p + P]² + …``, from zero, in float64."""
    for out, source in table:
        out[...] = 0
        scratch = np.empty(out.size)
        for start in range(0, source.size, out.size):
            part = source[start : start + out.size]
            terms = scratch[: part.size]
            np.copyto(terms, part)
            if squared:
                np.multiply(terms, terms, out=terms)
            np.add(out[: part.size], terms, out=out[: part.size])
        if rooted:
            np.sqrt(out, out=out)


SQUARE_SUM = Kernel(
    name="square_sum",
    source="square_sum",
    reference=_square_sum_reference,
    scalars=(("squared", "int64"), ("rooted", "int64")),
    templates=tuple((element,) for element in FLOATS),
    items=lambda sizes: sizes[0],
)


def square_sum(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    *,
    squared: bool = True,
    rooted: bool = False,
    device: Device | None = None,
) -> None:
    """``outs[t][p]`` becomes the sum of the squares of every P-th element of ``inputs[t]``, from p.

    P is the size of the output. The order is fixed, so the result does not depend on the launch.
    One launch for all inputs of the same dtype.

    Args:
        outs: float64, one per tensor; overwritten. Shares no memory with its input.
        inputs: floats, one per tensor.
        squared: False adds the elements themselves.
        rooted: take the square root of each sum.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    groups = same_dtypes(zip(outs, inputs, strict=True))
    for (_, name, _), rows in by_template(groups).items():
        scalars = (int(squared), int(rooted))
        (device or outs[0].device).launch(SQUARE_SUM, (name,), rows, scalars)


def norm_of(inputs: Sequence[Buffer], device: Device) -> Buffer:
    """Returns the norm of all elements of all tensors, a new float64 Buffer ``(1,)``.

    A few launches on ``device``, each over fewer elements; the host does not wait.
    """
    sizes = [_num_sums(source.size) for source in inputs]
    flat = device.empty((sum(sizes),), _DOUBLE)
    starts = np.cumsum([0, *sizes])
    outs = [flat.view(int(start), (size,)) for start, size in zip(starts[:-1], sizes, strict=True)]
    square_sum(outs, inputs, device=device)
    while True:
        last = flat.size <= STRIDES
        fewer = device.empty((1 if last else _num_sums(flat.size),), _DOUBLE)
        square_sum([fewer], [flat], squared=False, rooted=last, device=device)
        if last:
            return fewer
        flat = fewer


def prepare_norm_of(device: Device, dtype: np.dtype) -> None:
    """Compiles the kernels of ``norm_of`` for a dtype."""
    for each in (dtype, _DOUBLE):
        device.prepare(SQUARE_SUM, (each.name,))


def _num_sums(size: int) -> int:
    """The number of partial sums; a multiple of 16, so that vectors stay aligned."""
    sums = (size + STRIDES - 1) // STRIDES
    return (sums + 15) // 16 * 16
