"""Peers of an optimizer's update: PyTorch's optimizers, and NumPy in blocks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .clock import Call

__all__ = [
    "BLOCKS", "BLOCK_SIZE", "WAYS", "find_optim_peers", "on_our_stream", "sgd_in_blocks",
    "sizes_of",
]  # fmt: skip

BLOCKS = "numpy, blocks"
WAYS = ("loop", "foreach", "fused")
BLOCK_SIZE = 1 << 15  # elements: 128 KiB of float32, and as much of scratch


def find_optim_peers(
    rule: str, values: Sequence[np.ndarray], gradients: Sequence[np.ndarray], *, place: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the ``torch.optim`` steps of a rule, and the reasons for missing ones.

    Args:
        rule: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        values: of the parameters.
        gradients: of each.
        place: ``"cpu"`` or ``"cuda"``.
    """
    if importlib.util.find_spec("torch") is None:
        return {}, {"torch": "not installed"}
    torch = importlib.import_module("torch")
    if place == "cuda" and not torch.cuda.is_available():
        return {}, {"torch": "built without CUDA"}
    makes: dict[str, Callable[..., Any]] = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=0.001),
    }
    calls: dict[str, Call] = {}
    for way in WAYS:
        parameters = []
        for value, gradient in zip(values, gradients, strict=True):
            parameter = torch.nn.Parameter(torch.from_numpy(value.copy()).to(place))
            parameter.grad = torch.from_numpy(gradient.copy()).to(place)
            parameters.append(parameter)
        switch = {} if way == "loop" else {way: True}
        optimizer = makes[rule](parameters, **{"foreach": False, **switch})
        calls[f"torch {way}"] = partial(on_our_stream, torch, place, optimizer.step)
    return calls, {}


def on_our_stream(torch: Any, place: str, step: Call) -> None:
    """Returns a call that runs on CuPy's current stream on a GPU."""
    with contextlib.ExitStack() as stack:
        if place == "cuda":
            current = importlib.import_module("cupy").cuda.get_current_stream()
            stream = torch.cuda.ExternalStream(current.ptr) if current.ptr else None
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
        step()


def sgd_in_blocks(values: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> Call:
    """Returns an update in NumPy: two passes over blocks that fit in the cache."""
    scratch = np.empty(BLOCK_SIZE, np.float32)
    rate = np.float32(0.1)
    blocks = [
        (value[start : start + BLOCK_SIZE], gradient[start : start + BLOCK_SIZE])
        for value, gradient in zip(values, gradients, strict=True)
        for start in range(0, value.size, BLOCK_SIZE)
    ]

    def step() -> None:
        for value, gradient in blocks:
            part = scratch[: value.size]
            np.multiply(gradient, rate, out=part)
            np.subtract(value, part, out=value)

    return step


def sizes_of(size: int, number: int) -> list[int]:
    """Returns the unequal sizes of tensors with ``size`` elements in total."""
    shares = np.sqrt(np.arange(1, number + 1))
    ends = np.floor(np.cumsum(shares) / math.fsum(shares) * size).astype(int)
    ends[-1] = size
    return [int(each) for each in np.diff(ends, prepend=0)]
