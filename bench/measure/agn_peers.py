"""Peers of AGN's local step: PyTorch's optimizers plus an addition, and NumPy in blocks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .clock import Call
from .optim_peers import BLOCK_SIZE, find_optim_peers, on_our_stream
from .random_values import GRADIENTS, VALUES, normals

__all__ = ["BLOCKS", "WAYS", "find_agn_peers", "local_sgd_in_blocks"]

BLOCKS = "numpy, blocks"
# The optimizer's way -> its name here.
WAYS = {way: f"torch {way} and add" for way in ("foreach", "fused")}


def find_agn_peers(
    rule: str, sizes: Sequence[int], *, place: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns ``torch.optim`` steps plus ``_foreach_add_``, and the reasons for missing ones.

    Args:
        rule: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        sizes: of the parameters, float32.
        place: ``"cpu"`` or ``"cuda"``.
    """
    values = [normals(size, seed=VALUES) for size in sizes]
    gradients = [normals(size, seed=GRADIENTS) for size in sizes]
    steps, absent = find_optim_peers(rule, values, gradients, place=place)
    calls: dict[str, Call] = {}
    for way, name in WAYS.items() if steps else ():
        torch = importlib.import_module("torch")
        sums = [torch.zeros(size, device=place) for size in sizes]
        given = [torch.from_numpy(each.copy()).to(place) for each in gradients]
        add = partial(on_our_stream, torch, place, partial(torch._foreach_add_, sums, given))
        calls[name] = partial(_both, steps[f"torch {way}"], add)
    return calls, absent


def _both(step: Call, add: Call) -> None:
    step()
    add()


def local_sgd_in_blocks(sizes: Sequence[int]) -> Call:
    """Returns a local step in NumPy: three passes over blocks that fit in the cache."""
    scratch = np.empty(BLOCK_SIZE, np.float32)
    rate = np.float32(0.1)
    blocks: list[Any] = []
    for size in sizes:
        arrays = [normals(size, seed=VALUES), np.zeros(size, np.float32)]
        arrays.append(normals(size, seed=GRADIENTS))
        for start in range(0, size, BLOCK_SIZE):
            blocks.append([array[start : start + BLOCK_SIZE] for array in arrays])
    return partial(_stepped, blocks, scratch, rate)


def _stepped(blocks: Sequence[Any], scratch: np.ndarray, rate: np.float32) -> None:
    for value, total, gradient in blocks:
        part = scratch[: value.size]
        np.add(total, gradient, out=total)
        np.multiply(gradient, rate, out=part)
        np.subtract(value, part, out=value)
