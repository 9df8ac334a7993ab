"""Global norm of tensors: launcher of ``square_sum.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from gradreduce.device import Arrays, Buffer, Device, Kernel, by_template, same_dtypes

from .templates import FLOATS

BLOCK = 2048  # elements whose squares are added in one block
_LANES = 32  # partial sums of a block
_SERIAL = 256  # terms in a sum of partial sums
_DOUBLE = np.dtype(np.float64)


def _square_sum_reference(
    table: Sequence[Arrays], lanes: int, terms: int, squared: int, rooted: int
) -> None:
    """``out[b * lanes + p]`` is the sum of every ``lanes``-th element of block b, in float64."""
    block = lanes * terms
    for out, source in table:
        totals = out.reshape(-1, lanes)
        whole = min(len(totals), source.size // block)
        rest = source[whole * block : (whole + 1) * block]
        last = np.zeros((1, -(-rest.size // lanes), lanes), source.dtype)
        last.reshape(-1)[: rest.size] = rest
        blocks = source[: whole * block].reshape(whole, terms, lanes)
        totals[...] = 0
        for some, values in ((totals[:whole], blocks), (totals[whole : whole + 1], last)):
            scratch = np.empty(some.shape)
            for each in np.moveaxis(values, 1, 0) if some.size else ():
                np.copyto(scratch, each)
                if squared:
                    np.multiply(scratch, scratch, out=scratch)
                np.add(some, scratch, out=some)
        if rooted:
            np.sqrt(out, out=out)


SQUARE_SUM = Kernel(
    name="square_sum",
    source="square_sum",
    reference=_square_sum_reference,
    scalars=(("lanes", "int64"), ("terms", "int64"), ("squared", "int64"), ("rooted", "int64")),
    templates=tuple((element,) for element in FLOATS),
    items=lambda sizes: sizes[0],
)


def square_sum(
    outs: Sequence[Buffer],
    inputs: Sequence[Buffer],
    *,
    lanes: int,
    terms: int,
    squared: bool = True,
    rooted: bool = False,
    device: Device | None = None,
) -> None:
    """Sets ``outs[t][b * lanes + p]`` to a sum of squares in block b: every lanes-th, from p.

    A block is ``lanes * terms`` elements; the last one may be shorter. The order is fixed, so the
    result does not depend on the launch. One launch for all inputs of the same dtype.

    Args:
        outs: float64, one per tensor; overwritten. Shares no memory with its input.
        inputs: floats, one per tensor.
        lanes: the number of sums of each block.
        terms: the number of terms of each sum.
        squared: False adds the elements instead of their squares.
        rooted: take the square root of each sum.
        device: launches on its compute queue; default that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    table = zip(outs, inputs, strict=True)
    for (_, name, _), rows in by_template(same_dtypes(table)).items():
        scalars = (lanes, terms, int(squared), int(rooted))
        (device or outs[0].device).launch(SQUARE_SUM, (name,), rows, scalars)


def block_sums(inputs: Sequence[Buffer], device: Device) -> Buffer:
    """Returns the sums of the squares of each block of each tensor, a new float64 Buffer.

    There are ``num_blocks(size)`` sums for each tensor, one tensor after the other. The sum of a
    block depends only on its elements. Makes two launches for each dtype on ``device``.
    """
    counts = [num_blocks(source.size) for source in inputs]
    starts = [0, *accumulate(counts)]
    lanes = device.empty((starts[-1] * _LANES,), _DOUBLE)
    outs = lanes.parts([start * _LANES for start in starts[:-1]], [n * _LANES for n in counts])
    found = device.empty((starts[-1],), _DOUBLE)
    square_sum(outs, inputs, lanes=_LANES, terms=BLOCK // _LANES, device=device)
    square_sum([found], [lanes], lanes=1, terms=_LANES, squared=False, device=device)
    return found


def norm_of(sums: Buffer) -> Buffer:
    """Returns the square root of the total of ``block_sums``, a new float64 Buffer ``(1,)``.

    Makes a few launches on the device of ``sums``, each over fewer elements; the host does not
    wait.
    """
    device = sums.device
    while True:
        last = sums.size <= _SERIAL
        lanes = 1 if last else -(-sums.size // _SERIAL)
        fewer = device.empty((lanes,), _DOUBLE)
        square_sum([fewer], [sums], lanes=lanes, terms=_SERIAL, squared=False, rooted=last)
        if last:
            return fewer
        sums = fewer


def num_blocks(size: int) -> int:
    """Returns the number of blocks of a tensor with ``size`` elements."""
    return -(-size // BLOCK)
