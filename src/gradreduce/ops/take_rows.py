"""Gathers rows of arrays: launcher of ``take_rows.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradreduce.device import Arrays, Buffer, Device, Kernel

from .segments import Indices, upload_together


def _take_rows_reference(table: Sequence[Arrays]) -> None:
    """``out[k] = values[rows[k]]``."""
    for out, values, rows in table:
        width = out.size // rows.size
        np.take(values.reshape(-1, width), rows, axis=0, out=out.reshape(-1, width), mode="clip")


# The kernel copies words of this size: complex128 as two words.
_WORDS = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}

TAKE_ROWS = Kernel(
    name="take_rows",
    source="take_rows",
    reference=_take_rows_reference,
    scalars=(),
    templates=tuple((word.name,) for word in _WORDS.values()),
    items=lambda sizes: sizes[0],
)


def take_rows_command(
    outs: Sequence[Buffer],
    values: Sequence[Buffer],
    rows: Sequence[Indices],
    *,
    device: Device | None = None,
) -> Callable[[], None]:
    """Uploads row numbers and returns a function that launches.

    The launch writes ``outs[t][k] = values[t][rows[t][k]]`` for every tensor t. One upload for all
    row numbers; one launch for all tensors whose elements have the same size.

    Args:
        outs: one per tensor, ``(num_taken, …)``; overwritten. Shares no memory with ``values``.
        values: one per tensor, ``(num_rows, …)``, of the out's dtype; only read.
        rows: for each tensor the numbers of the rows to take: int64, ``(num_taken,)``, from 0 to
            ``num_rows - 1``, in any order.
        device: the device whose compute queue launches, and that holds the row numbers; default:
            that of ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    chosen = [each for each in zip(outs, values, rows, strict=True) if each[0].size]
    if not chosen:
        return lambda: None
    home = device or outs[0].device
    # Tensors of one variable take the same rows, which are uploaded once.
    own = {id(numbers): numbers for _, _, numbers in chosen}
    uploaded = upload_together([[numbers] for numbers in own.values()], home)
    views = dict(zip(own, uploaded, strict=True))
    launches: dict[str, list[list[Buffer]]] = {}
    for out, term, numbers in chosen:
        word = _WORDS[min(out.dtype.itemsize, 8)]
        size = word.itemsize
        operands = [each.view(0, (each.nbytes // size,), word) for each in (out, term)]
        launches.setdefault(word.name, []).append([*operands, *views[id(numbers)]])

    def launch() -> None:
        for name, table in launches.items():
            home.launch(TAKE_ROWS, (name,), table, ())

    return launch
