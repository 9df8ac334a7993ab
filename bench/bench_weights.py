"""Measures calls with weights, compared with the same calls without.

The figure of a case is the median over pairs of calls, of which each takes its turn. A call is
measured by the processor time of all threads, because other work on the machine does not change it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from measure.case import OURS, Case, Decision, Floor, counted
from measure.clock import WARM_UPS, Call, each, garbage_kept, in_turns, timed, took_of
from measure.operands import integers, resnet50
from measure.reductions import placed
from measure.runner import IMPLEMENTATIONS, Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Mesh

NUM_DEVICES = 4
SIZE, QUICK_SIZE = 2**24, 2**10  # float32 elements of an apply
ROUNDS, QUICK_ROUNDS = 21, 3
LATE = 2**40  # a step that is never stale
Weights = Sequence[float] | None
WHOLE, FRACTION = "whole numbers", "fractions"
WEIGHTS: dict[str, Weights] = {WHOLE: [3, 1, 4, 2], FRACTION: [0.3, 0.1, 0.4, 0.2]}
ALL_REDUCE, APPLY, STEP = "all-reduce", "apply", "SyncStep"

VARIES = Decision(1.05, "the medians of several runs on a busy machine were 0.93 to 1.07")
TWO_PASSES = Decision(
    1.05, "NumPy multiplies in a pass of its own; compiled kernels and GPUs multiply while they add"
)
IN_DOUBLE = Decision(
    1.05,
    "a product with a weight that is no float32 is computed in float64, and once more where that "
    "could round twice",
)
# On an AMD EPYC virtual machine with 2 cores that others kept busy, 2026-11.
FLOORS = tuple(
    Floor(f"{implementation}, {kind}, {case}, over no weights", case,
          counted(f"{implementation}, {kind}"), "<=", most, measured, decision=decision)
    for case, implementation, kind, most, measured, decision in (
        (ALL_REDUCE, "numpy", WHOLE, 1.1, "1.05 to 1.07", VARIES),
        (ALL_REDUCE, "compiled", WHOLE, 1.1, "1.0", VARIES),
        (STEP, "numpy", WHOLE, 1.1, "1.06", VARIES),
        (STEP, "compiled", WHOLE, 1.1, "1.04", VARIES),
        (APPLY, "numpy", WHOLE, 1.8, "1.5 to 1.66", TWO_PASSES),
        (APPLY, "compiled", WHOLE, 1.1, "0.9 to 1.0", VARIES),
        (APPLY, "compiled", FRACTION, 6, "3.5 to 5.3", IN_DOUBLE),
    )
)  # fmt: skip


def all_reduce(mesh: Mesh, quick: bool) -> Callable[[Weights], Call]:
    """Returns reductions of ResNet-50's gradients in one pack."""
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    pairs = [(value, value) for value in placed(mesh, resnet50(quick))]
    return lambda weights: partial(ops.batch_reduce, gr.ReduceOp.MEAN, pairs, weights=weights)


def sync_step(mesh: Mesh, quick: bool) -> Callable[[Weights], Call]:
    """Returns steps over ResNet-50's gradients in one pack."""
    values = placed(mesh, resnet50(quick))
    variables = [gr.Variable(value.buffers[0].numpy(), device=mesh) for value in values]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(1e-3), ops)
    terms = [[[value.buffers[replica]] for value in values] for replica in range(len(mesh))]
    return lambda weights: partial(step, terms, weights=weights)


def apply(mesh: Mesh, quick: bool) -> Callable[[Weights], Call]:
    """Returns applies to an existing sum on one device."""
    size = QUICK_SIZE if quick else SIZE
    accumulator = gr.ConditionalAccumulator("float32", (size,), device=mesh.devices[0])
    gradient = integers(size)
    accumulator.apply_grad(gradient, LATE)

    def call_of(weights: Weights) -> Call:
        weight = 1.0 if weights is None else weights[0]
        return partial(accumulator.apply_grad, gradient, LATE, weight=weight)

    return call_of


MAKERS: dict[str, Callable[[Mesh, bool], Callable[[Weights], Call]]] = {
    ALL_REDUCE: all_reduce,
    APPLY: apply,
    STEP: sync_step,
}


def cases(bench: Bench) -> None:
    for name, make in MAKERS.items():
        calls: dict[str, Call] = {}
        for implementation, mesh in bench.meshes.items():
            call_of = make(mesh, bench.quick)
            calls[f"{implementation}, none"] = call_of(None)
            for kind in WEIGHTS:
                calls[f"{implementation}, {kind}"] = call_of(WEIGHTS[kind])
        turns = [timed(each, call, now=time.process_time) for each, call in calls.items()]
        rounds = QUICK_ROUNDS if bench.quick else ROUNDS
        with garbage_kept():
            taken = in_turns(turns, rounds, warm_ups=WARM_UPS)
        figures = {}
        for implementation in IMPLEMENTATIONS:
            without = taken[f"{implementation}, none"]
            for kind in WEIGHTS:
                pairs = zip(taken[f"{implementation}, {kind}"], without, strict=True)
                ratios = [ours / plain for ours, plain in pairs]
                figures[f"{implementation}, {kind}"] = statistics.median(ratios)
        seconds = {OURS + candidate: value for candidate, value in each(min, taken).items()}
        bench.keep(Case(name, "with and without weights", 0, took_of(seconds), figures))


BENCHMARK = Benchmark(__doc__, cases, FLOORS, num_devices=NUM_DEVICES)

if __name__ == "__main__":
    BENCHMARK.main()
