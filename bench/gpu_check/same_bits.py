"""Compares exact and weighted sums on one GPU with the bits of the simulation."""

from collections.abc import Iterator
from itertools import product

import numpy as np

import gradreduce as gr
from gradreduce.backends import BackendName, open_mesh
from gradreduce.device import as_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")
WEIGHTS = (3.0, 0.3, 5.0)  # one is no float32
SIZE, QUICK_SIZE = 2**18 + 3, 2**8 + 3


def terms_of(dtype: str, size: int) -> list[np.ndarray]:
    """Returns one term for each weight; sums depend on the order in which they are rounded."""
    random = np.random.default_rng(1)
    scales = np.exp2(random.integers(-6, 7, (len(WEIGHTS), size)))
    return [*(random.standard_normal(scales.shape) * scales).astype(as_dtype(dtype))]


def results(backend: BackendName, size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Computes on three logical devices of one GPU; yields each result with its name."""
    with open_mesh([0] * len(WEIGHTS), backend=backend) as mesh:
        for dtype in DTYPES:
            terms = terms_of(dtype, size)
            grads = [[term] for term in terms]
            for exact, weights in product((False, True), (None, WEIGHTS)):
                means = gr.all_reduce(
                    grads, mesh=mesh, output_type="numpy", exact=exact, weights=weights
                )
                for replica, (mean,) in enumerate(means):
                    yield f"mean of {dtype}, {exact=}, {weights=}, replica {replica}", mean
            for exact in (False, True):
                total = gr.ConditionalAccumulator(dtype, (size,), device=mesh[0], exact=exact)
                for term, weight in zip(terms, WEIGHTS, strict=True):
                    total.apply_grad(term, weight=weight)
                taken = total.take_grad(len(terms), output_type="numpy")
                yield f"taken mean of {dtype}, {exact=}", taken


def compared(quick: bool) -> dict[str, int]:
    """Compares all results; returns how many."""
    size, count = QUICK_SIZE if quick else SIZE, 0
    pairs = zip(results("cuda", size), results("sim", size), strict=True)
    for (name, found), (_, wanted) in pairs:
        if found.tobytes() != wanted.tobytes():
            raise AssertionError(f"{name}: the GPU has other bits than the simulation")
        count += 1
    return {"compared": count}
