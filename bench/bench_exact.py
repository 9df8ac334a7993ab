"""Measures exact sums, compared with the plain sums of the same arrays."""

from collections.abc import Callable
from functools import partial

from measure.case import OURS, Case, Floor, counted
from measure.clock import Call
from measure.operands import normals, resnet50
from measure.reductions import placed
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Mesh

NUM_DEVICES = 4
CPU_SIZE, GPU_SIZE, QUICK_SIZE = 2**23, 2**26, 2**10  # elements
ADD_N, HALF, MANY = "add_n 8 float32", "add_n 8 bfloat16", "add_n 64 float32"
CASES = {ADD_N: (8, "float32"), HALF: (8, "bfloat16"), MANY: (64, "float32")}
ALL_REDUCE, APPLY = "all-reduce of ResNet-50", "apply"
LATE = 2**40  # a step that is never stale
TWO_CORES = "2 quiet cores, 2026-11"
# On CPUs a float64 holds most sums: an addition for each term, and a check of its magnitude.
CPU_FLOORS = tuple(
    Floor(f"{name}, over the plain {case}", case, counted(f"{name}, over plain"), "<=", bound,
          f"{measured}; {TWO_CORES}")
    for case, name, bound, measured in (
        (ADD_N, "compiled", 1.6, "1.3"), (ADD_N, "numpy", 12, "9.9 to 10.3"),
        (ALL_REDUCE, "compiled", 1.3, "1.0"), (ALL_REDUCE, "numpy", 5, "4.1 to 4.4"),
        # It moves seven arrays instead of three: 1.5 and 12 times as long as that takes.
        (APPLY, "compiled", 3.5, "2.3 to 2.5"), (APPLY, "numpy", 28, "23 to 24"),
    )
)  # fmt: skip
GPU_FLOORS = (
    Floor("exact over the plain add_n", ADD_N, counted("cuda, over plain"), "<=", 1.1,
          "not yet measured on a GPU"),
)  # fmt: skip


def measure(
    bench: Bench, name: str, what: str, nbytes: int, call_of: Callable[[Mesh, bool], Call]
) -> None:
    """Measures the exact and the plain call of each implementation in turns."""
    calls: dict[str, Call] = {}
    for implementation, mesh in bench.meshes.items():
        calls[OURS + implementation] = call_of(mesh, True)
        calls[f"{OURS}{implementation}, plain"] = call_of(mesh, False)
    took = bench.clock.measure(calls, nbytes)
    figures = {
        f"{implementation}, over plain": took[OURS + implementation].seconds
        / took[f"{OURS}{implementation}, plain"].seconds
        for implementation in bench.meshes
    }
    bench.keep(Case(name, what, nbytes, took, figures))


def add_n(bench: Bench, name: str, size: int) -> None:
    """Measures sums of arrays of one device."""
    num_terms, dtype = CASES[name]
    arrays = [normals(size, dtype) for _ in range(num_terms)]

    def call_of(mesh: Mesh, exact: bool) -> Call:
        return partial(gr.add_n, list(map(mesh.devices[0].put, arrays)), exact=exact)

    nbytes = (num_terms + 1) * arrays[0].nbytes
    measure(bench, name, f"{num_terms} x {size} {dtype}", nbytes, call_of)


def all_reduce(bench: Bench) -> None:
    """Measures sums of the gradients of several replicas, in one pack."""

    def call_of(mesh: Mesh, exact: bool) -> Call:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh, exact=exact)
        pairs = [(value, value) for value in placed(mesh, resnet50(bench.quick))]
        return partial(ops.batch_reduce, gr.ReduceOp.MEAN, pairs)

    measure(bench, ALL_REDUCE, f"on {NUM_DEVICES} devices", 0, call_of)


def apply(bench: Bench, size: int) -> None:
    """Measures the addition of a gradient to a sum."""
    gradient = normals(size)

    def call_of(mesh: Mesh, exact: bool) -> Call:
        device = mesh.devices[0]
        accumulator = gr.ConditionalAccumulator("float32", (size,), device=device, exact=exact)
        term = device.put(gradient)
        accumulator.apply_grad(term, LATE)
        return partial(accumulator.apply_grad, term, LATE)

    measure(bench, APPLY, f"{size} float32", 0, call_of)


def cases(bench: Bench) -> None:
    size = bench.pick(CPU_SIZE, QUICK_SIZE, GPU_SIZE)
    for name, (num_terms, _) in CASES.items():
        add_n(bench, name, size * 8 // num_terms)
    all_reduce(bench)
    apply(bench, size)


BENCHMARK = Benchmark(__doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=NUM_DEVICES)

if __name__ == "__main__":
    BENCHMARK.main()
