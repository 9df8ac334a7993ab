"""Which instantiations of a kernel exist; never launches."""

from __future__ import annotations

import numpy as np

from gradreduce.device import Template, mean_dtype
from gradreduce.device.dtypes import ELEMENTS

__all__ = ["CASTS", "FLOATS", "FROM_WIDE", "MEAN", "SAME", "TO_WIDE", "UPDATES"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
# <T, T>
SAME: tuple[Template, ...] = tuple((element, element) for element in ELEMENTS)
# A gradient into a sum of a wider type (or, with cast=True, of another float).
TO_WIDE: tuple[Template, ...] = tuple(
    (total, term) for total in ("float32", "float64") for term in FLOATS if term != total
)
# A float32 sum into the halves it stands for.
FROM_WIDE: tuple[Template, ...] = (("float16", "float32"), ("bfloat16", "float32"))
# Every float into every other: what a tensor is and what a link carries are two choices.
CASTS: tuple[Template, ...] = tuple((out, term) for out in FLOATS for term in FLOATS if out != term)
# Of an update: a variable, and its slots; of another type where there is a master of that type.
UPDATES: tuple[Template, ...] = (
    *((element, element) for element in FLOATS),
    *((half, "float32") for half in FLOATS[:2]),
)
# Integers into their mean; the only templates that tell signed from unsigned.
MEAN: tuple[Template, ...] = tuple(
    (mean_dtype(np.dtype(name)).name, name)
    for name in (f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
)
