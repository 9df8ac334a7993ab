"""How many arrays become their sum, in one pass: ``kernels/add_n.cu`` and its twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, Template, accumulate_dtype, element_of
from gradreduce.device.kernel import Arrays

from ._check import by_dtype
from ._templates import SAME, TO_WIDE

__all__ = ["ADD_N", "add_n", "prepare_add_n"]

# Input counts that are compiled in, so that all loads of a vector are in flight together.
UNROLLED = 8


def _add_n_twin(table: Sequence[Arrays], num_inputs: int) -> None:
    """``out = in[0] + in[1] + …``, left to right, in the accumulate type of the inputs."""
    for out, *inputs in table:
        if num_inputs == 1:
            out[...] = inputs[0]
            continue
        wide = accumulate_dtype(inputs[0].dtype)
        # `out` may be an input that is still to be read; the first two are read by then.
        late = False
        for term in inputs[2:]:
            late = late or np.may_share_memory(out, term)
        total = out if out.dtype == wide and not late else np.empty(out.shape, wide)
        np.add(inputs[0], inputs[1], out=total, dtype=wide)
        for term in inputs[2:]:
            np.add(total, term, out=total, dtype=wide)
        if total is not out:
            out[...] = total


ADD_N = Kernel(
    name="add_n",
    source="add_n",
    twin=_add_n_twin,
    scalars=(("num_inputs", "int64"),),
    templates=tuple(
        (*pair, count)
        for pairs, counts in ((SAME, range(UNROLLED + 1)), (TO_WIDE, range(2)))
        for pair in pairs
        for count in counts
    ),
)


def _template(out: str, term: str, num_inputs: int) -> Template:
    unrolled = num_inputs <= (UNROLLED if out == term else 1)
    return (out, term, num_inputs if unrolled else 0)


def add_n(
    outs: Sequence[Buffer],
    inputs: Sequence[Sequence[Buffer]],
    *,
    device: Device | None = None,
    queue: Queue = "compute",
    fresh: bool = False,
) -> None:
    """``outs[t] = inputs[t][0] + inputs[t][1] + …`` for every tensor t, left to right.

    One launch for all tensors with the same dtypes and number of inputs. Halves are added in
    float32 and rounded once. With a single input this is a copy, or a cast.

    Args:
        outs: one per tensor; overwritten. May be one of its inputs exactly.
        inputs: for each tensor at least one term of its size; all terms of one dtype, which is
            the out's or one that it accumulates.
        device: whose queue launches; default that of ``outs[0]``. Fences nothing.
        queue: which of its queues.
        fresh: the caller has just made the outs after terms that agree: nothing is checked.

    Raises:
        ValueError: sizes or dtypes do not fit, or an out overlaps an input partly.
    """
    rows = zip(zip(outs), inputs, strict=True)
    launches = by_dtype(ADD_N, rows, fresh=fresh)
    for (to, of, _, num_inputs), operands in launches.items():
        device = device or outs[0].device
        device.launch(ADD_N, _template(to, of, num_inputs), operands, (num_inputs,), queue=queue)


def prepare_add_n(device: Device, out: np.dtype, term: np.dtype, num_inputs: int) -> None:
    """Compiles what ``add_n`` with these dtypes and this many inputs launches."""
    template = _template(element_of(out).name, element_of(term).name, num_inputs)
    device.prepare(ADD_N, template)
