"""Template arguments of kernels: which dtypes they are compiled for."""

from __future__ import annotations

import numpy as np

from gradreduce.device import ELEMENTS, Template, mean_dtype

FLOATS = ("float16", "bfloat16", "float32", "float64")
# <T, T>
SAME: tuple[Template, ...] = tuple((element, element) for element in ELEMENTS)
# A gradient that is added to a sum of a wider dtype (with cast=True: of another float dtype).
TO_ACC: tuple[Template, ...] = tuple(
    (total, term) for total in ("float32", "float64") for term in FLOATS if term != total
)
# A float32 sum rounded to a 16-bit float.
FROM_ACC: tuple[Template, ...] = (("float16", "float32"), ("bfloat16", "float32"))
# Every float dtype into every other: a tensor's dtype and the wire dtype are independent.
CASTS: tuple[Template, ...] = tuple((out, term) for out in FLOATS for term in FLOATS if out != term)
# The dtypes of a variable and its slots; slots are float32 if there is a master.
UPDATES: tuple[Template, ...] = (
    *((element, element) for element in FLOATS),
    *((half, "float32") for half in FLOATS[:2]),
)
# Integers and their mean; only these templates distinguish signed and unsigned.
MEAN: tuple[Template, ...] = tuple(
    (mean_dtype(np.dtype(name)).name, name)
    for name in (f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
)
