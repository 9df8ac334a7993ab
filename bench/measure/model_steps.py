"""Steps over all variables of a model: sizes, PyTorch's optimizers, NumPy in blocks, and a check.

A local step of AGN also adds the gradients to sums: ``adds`` says whether a peer does so.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.device import Device

from .clock import Call, Calls, HostClock
from .operands import GRADIENTS, VALUES, normals, resnet50
from .peers import find_torch, in_order, on_current_stream
from .runner import Bench

SIZE, GPU_SIZE, QUICK_SIZE = 16_000_000, 64_000_000, 2_000
NUM_VARIABLES, QUICK_VARIABLES = 50, 5
TINY, TINY_SIZE = "161 tiny variables", 16
ROUNDS = 25  # on a CPU, of which the best one counts

# name -> an optimizer, and how often its step reads or writes a variable's bytes
RULES: dict[str, tuple[Callable[[], gr.Optimizer], int]] = {
    "sgd": (lambda: gr.GradientDescentOptimizer(0.1), 3),
    "momentum": (lambda: gr.MomentumOptimizer(0.1, 0.9), 5),
    "adam": (lambda: gr.AdamOptimizer(0.001), 7),
}
best_clock = partial(HostClock, of_rounds=min, rounds=ROUNDS)

BLOCKS = "numpy, blocks"
WAYS, ADDING_WAYS = ("loop", "foreach", "fused"), ("foreach", "fused")
BLOCK_SIZE = 1 << 15  # elements: 128 KiB of float32, and as much of scratch


def torch_steps(
    bench: Bench, rule: str, sizes: Sequence[int], *, adds: bool = False
) -> dict[str, Call]:
    """Returns steps of ``torch.optim``, with ``_foreach_add_`` if they add, or notes why not."""
    torch = find_torch(bench)
    if torch is None:
        return {}
    makes: dict[str, Callable[..., Any]] = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=0.001),
    }

    def tensors(seed: int) -> list[Any]:
        hosts = [normals(size, seed=seed) for size in sizes]
        return [torch.from_numpy(host).to(bench.place) for host in hosts]

    calls: dict[str, Call] = {}
    for way in ADDING_WAYS if adds else WAYS:
        parameters = list(map(torch.nn.Parameter, tensors(VALUES)))
        for parameter, gradient in zip(parameters, tensors(GRADIENTS), strict=True):
            parameter.grad = gradient
        switch = {} if way == "loop" else {way: True}
        step = makes[rule](parameters, **{"foreach": False, **switch}).step
        if adds:
            sums = [torch.zeros(size, device=bench.place) for size in sizes]
            step = partial(in_order, step, partial(torch._foreach_add_, sums, tensors(GRADIENTS)))
        name = f"torch {way} and add" if adds else f"torch {way}"
        calls[name] = partial(on_current_stream, torch, step) if bench.on_gpu else step
    return calls


def sgd_in_blocks(sizes: Sequence[int], *, adds: bool = False) -> Call:
    """Returns an update in NumPy: two passes over blocks that fit in the cache, or three."""
    scratch = np.empty(BLOCK_SIZE, np.float32)
    blocks: list[Any] = []
    for size in sizes:
        arrays = [normals(size, seed=VALUES), normals(size, seed=GRADIENTS)]
        arrays += [np.zeros(size, np.float32)] * adds
        for start in range(0, size, BLOCK_SIZE):
            blocks.append([array[start : start + BLOCK_SIZE] for array in arrays])
    return partial(_stepped, blocks, scratch, np.float32(0.1))


def _stepped(blocks: Sequence[Any], scratch: np.ndarray, rate: np.float32) -> None:
    for value, gradient, *sums in blocks:
        for total in sums:
            np.add(total, gradient, out=total)
        part = scratch[: value.size]
        np.multiply(gradient, rate, out=part)
        np.subtract(value, part, out=value)


def sizes(bench: Bench) -> list[int]:
    size = bench.pick(SIZE, QUICK_SIZE, GPU_SIZE)
    return sizes_of(size, bench.pick(NUM_VARIABLES, QUICK_VARIABLES))


def compare_steps(
    bench: Bench, rule: str, make: Callable[[Device], Any], units: int, *, adds: bool = False
) -> None:
    """Measures our steps over a whole model, which are checked, beside those of the peers."""
    of_model = sizes(bench)
    peers = torch_steps(bench, rule, of_model, adds=adds)
    if rule == "sgd" and not bench.on_gpu:
        peers[BLOCKS] = sgd_in_blocks(of_model, adds=adds)
    steps = bench.ours(make)
    check_updates(rule, [step.updated() for step in steps.values()])
    compare(bench, rule, {**steps, **peers}, units, f", {units} units" if adds else "")


def compare(bench: Bench, name: str, calls: Calls, units: int, words: str = "") -> None:
    """Measures calls that read or write all variables of a model ``units`` times."""
    size, number = sum(sizes(bench)), len(sizes(bench))
    bench.compare(name, f"{size} float32 in {number} variables{words}", units * 4 * size, calls)


def tiny_sizes(bench: Bench) -> list[int]:
    return [TINY_SIZE] * len(resnet50(bench.quick))


def sizes_of(size: int, number: int) -> list[int]:
    """Returns the unequal sizes of tensors with ``size`` elements in total."""
    shares = np.sqrt(np.arange(1, number + 1))
    ends = np.floor(np.cumsum(shares) / math.fsum(shares) * size).astype(int)
    ends[-1] = size
    return [int(each) for each in np.diff(ends, prepend=0)]


def check_updates(rule: str, found: Sequence[Sequence[np.ndarray]]) -> None:
    """Raises unless all elements of each implementation's variables have new and equal values."""
    for arrays in found:
        if not all(np.array_equal(one, two) for one, two in zip(arrays, found[0], strict=True)):
            raise AssertionError(f"{rule}: the implementations do not agree")
        if not all((array != normals(array.size, seed=VALUES)).all() for array in arrays):
            raise AssertionError(f"{rule}: not every element was moved")
