"""Measures an optimizer's step over all variables of a model, compared with PyTorch's optimizers.

Also the host's time of a step whose variables are tiny.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from measure import model_steps as model
from measure.case import BESIDE, H100, NOT_YET, Decision, Floor, counted, over, times
from measure.clock import Call
from measure.operands import GRADIENTS, VALUES, normals
from measure.runner import IMPLEMENTATIONS, Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Device

NUMBER, QUICK_NUMBER = 20, 2  # calls of one loop over tiny variables
IN_PLACE = (
    "both are limited by memory and faster than a copy of the bytes; C++ loops with AVX2 or "
    "AVX-512, prefetching or huge pages took 0.95 to 1.1 of the time (bench/README.md); runs "
    "measured {}"
)
CPU_FLOORS = (
    Floor("numpy, sgd over NumPy in blocks", "sgd", over(model.BLOCKS, "numpy"), "<=", 1.2, BESIDE),
    Floor("numpy, adam, times torch foreach", "adam", times("torch foreach", "numpy"), ">=", 2,
          BESIDE, ("torch",)),
    Floor("compiled, adam, times torch fused", "adam", times("torch fused", "compiled"), ">=",
          0.85, BESIDE, ("torch",), Decision(1, IN_PLACE.format("0.95 to 1.03"))),
    Floor("compiled, sgd, over torch fused", "sgd", over("torch fused", "compiled"), "<=", 1.25,
          BESIDE, ("torch",), Decision(1.1, IN_PLACE.format("1.13 to 1.15"))),
    Floor("compiled, momentum, over torch fused", "momentum", over("torch fused", "compiled"),
          "<=", 1.1, BESIDE, ("torch",)),
    *(
        Floor(f"{implementation}, sgd{of}, us of a step", model.TINY,
              counted(f"{implementation}, sgd{of}, us"), "<=", 400, BESIDE)
        for implementation in IMPLEMENTATIONS
        for of in ("", " of NumPy arrays")
    ),
    *(
        Floor(f"{implementation}, launches of a step", model.TINY,
              counted(f"{implementation}, launches"), "<=", 1, "1")
        for implementation in IMPLEMENTATIONS
    ),
)  # fmt: skip
BEFORE_THE_GPU = "it was set before there was a GPU; PyTorch's loop moves {}"
SGD_LOOP = BEFORE_THE_GPU.format("as many bytes, and loses only time between its 50 launches")
MOMENTUM_LOOP = BEFORE_THE_GPU.format(
    "8 units instead of 5, 1.6 times as many; the rest was the time of the H100's host"
)
GPU_FLOORS = (
    *(
        Floor(f"{rule}, of the copy", rule, times("copy", "cuda"), ">=", 0.9, f"{measured}; {H100}")
        for rule, measured in (("sgd", "0.98"), ("momentum", "0.98"), ("adam", "0.97"))
    ),
    *(
        Floor(f"{rule}, times torch {way}", rule, times(f"torch {way}", "cuda"), ">=", least,
              f"{measured}; {H100}", ("torch",), Decision(2, why) if why else None)
        for rule, way, least, measured, why in (
            ("sgd", "fused", 1, "1.25", ""), ("sgd", "loop", 1.4, "1.56", SGD_LOOP),
            ("momentum", "fused", 1, "1.17", ""),
            ("momentum", "loop", 1.6, "1.99", MOMENTUM_LOOP),
            ("adam", "fused", 1, "1.22", ""), ("adam", "loop", 2, "5.2", ""),
        )
    ),
    Floor("launches of a step", model.TINY, counted("cuda, launches"), "<=", 1, NOT_YET),
)  # fmt: skip


class Step:
    """An optimizer with variables and gradients on one device."""

    def __init__(self, make: Callable[[], gr.Optimizer], sizes: Sequence[int], device: Device,
                 *, on_host: bool = False):  # fmt: skip
        self._optimizer = make()
        hosts = [normals(size, seed=GRADIENTS) for size in sizes]
        self.variables = [gr.Variable(normals(size, seed=VALUES), device=device) for size in sizes]
        gradients = hosts if on_host else list(map(device.put, hosts))
        self._pairs = list(zip(gradients, self.variables, strict=True))

    def __call__(self) -> None:
        self._optimizer.apply_gradients(self._pairs)

    def updated(self) -> list[np.ndarray]:
        self()
        return [variable.numpy() for variable in self.variables]


def tiny(bench: Bench) -> None:
    sizes = model.tiny_sizes(bench)
    calls: dict[str, Call] = {}
    launches: dict[str, float] = {}
    for implementation, device in bench.devices():
        for rule in model.RULES:
            calls[f"{implementation}, {rule}"] = step = Step(model.RULES[rule][0], sizes, device)
            step()
        arrays = Step(model.RULES["sgd"][0], sizes, device, on_host=True)
        arrays()
        calls[f"{implementation}, sgd of NumPy arrays"] = arrays
        launches[f"{implementation}, launches"] = bench.launches(implementation, step)
    us = bench.host_us(calls, bench.pick(NUMBER, QUICK_NUMBER), rounds=model.ROUNDS)
    words = f"{len(sizes)} x {model.TINY_SIZE} float32, host us of a step"
    bench.note(model.TINY, words, {**launches, **us})


def cases(bench: Bench) -> None:
    for rule, (make, units) in model.RULES.items():
        model.compare_steps(bench, rule, partial(Step, make, model.sizes(bench)), units)
    tiny(bench)


BENCHMARK = Benchmark(
    __doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=1, host_clock=model.best_clock
)

if __name__ == "__main__":
    BENCHMARK.main()
