"""Measures exact sums, compared with the plain sums of the same arrays."""

from functools import partial

from measure.case import OURS, Case, Floor, counted
from measure.clock import Call
from measure.operands import normals
from measure.runner import Bench, Benchmark

import gradreduce as gr

CPU_SIZE, GPU_SIZE, QUICK_SIZE = 2**23, 2**26, 2**10  # elements
ADD_N, HALF, MANY = "add_n 8 float32", "add_n 8 bfloat16", "add_n 64 float32"
CASES = {ADD_N: (8, "float32"), HALF: (8, "bfloat16"), MANY: (64, "float32")}
TWO_CORES = "2 cores that did other work too, 2026-11"
# Nine additions or more for each term; the plain sum has one, and waits for memory.
CPU_FLOORS = tuple(
    Floor(f"{name}, over the plain add_n", ADD_N, counted(f"{name}, over plain"), "<=", bound,
          f"{measured}; {TWO_CORES}")
    for name, bound, measured in (("compiled", 3, "1.9 to 2.4"), ("numpy", 18, "10 to 14"))
)  # fmt: skip
GPU_FLOORS = (
    Floor("exact over the plain add_n", ADD_N, counted("cuda, over plain"), "<=", 1.1,
          "not yet measured on a GPU"),
)  # fmt: skip


def add_n(bench: Bench, name: str, size: int) -> None:
    """Measures both sums of each implementation in turns."""
    num_terms, dtype = CASES[name]
    arrays = [normals(size, dtype) for _ in range(num_terms)]
    calls: dict[str, Call] = {}
    for implementation, device in bench.devices():
        terms = list(map(device.put, arrays))
        calls[OURS + implementation] = partial(gr.add_n, terms, exact=True)
        calls[f"{OURS}{implementation}, plain"] = partial(gr.add_n, terms)
    nbytes = (num_terms + 1) * arrays[0].nbytes
    took = bench.clock.measure(calls, nbytes)
    figures = {
        f"{implementation}, over plain": took[OURS + implementation].seconds
        / took[f"{OURS}{implementation}, plain"].seconds
        for implementation in bench.meshes
    }
    bench.keep(Case(name, f"{num_terms} x {size} {dtype}", nbytes, took, figures))


def cases(bench: Bench) -> None:
    size = bench.pick(CPU_SIZE, QUICK_SIZE, GPU_SIZE)
    for name, (num_terms, _) in CASES.items():
        add_n(bench, name, size * 8 // num_terms)


BENCHMARK = Benchmark(__doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=1)

if __name__ == "__main__":
    BENCHMARK.main()
