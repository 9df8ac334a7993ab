"""Measures an accumulator's apply, take and drop."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from measure.case import H100, Decision, Floor, counted, over, times
from measure.clock import After, Call, HostClock
from measure.operands import integers, resnet50
from measure.peers import find_peers, in_order, peer_calls, tensorflow
from measure.runner import IMPLEMENTATIONS, Bench, Benchmark

import gradreduce as gr
from gradreduce.arrays.types import ReductionType
from gradreduce.device import Device

SIZE, GPU_SIZE, QUICK_SIZE = 2**24, 2**26, 2**10  # float32 elements: 64 MiB, 256 MiB
MANY_SIZE = 16
ROWS, WIDTH, INDICES, QUICK_ROWS = 20_000, 64, 100_000, 100  # of a sparse gradient
ROUNDS = 60  # on a CPU, of which the best one counts
LOOPS = 4  # of one round, where a call is microseconds: the first finds its caches cold
# Calls of one loop, where a call takes microseconds: the loop fits in one time slice.
NUMBER, QUICK_NUMBER = 50, 10
LATE = 2**40  # a step that is never stale

APPLY, FIRST, TAKE, SMALL = "apply", "first apply", "take, MEAN", "one element"
MANY, SPARSE = "161 accumulators", "sparse apply"
CYCLE = "tf apply + take"
IN_PLACE, SCALED, ADD_AT = "numpy +=", "numpy /=", "numpy add.at"

SLOWER_HOST = Decision(
    60,
    "the commit before the measured one took as long, in turns on one machine (55.8 and 56.2 us); "
    "runs on machines of this kind took 49.9 to 66.3 us",
)
COMPILED_APPLY = Decision(1.0, "both are limited by memory; runs measured 0.81 to 1.25")
OVER_TENSORFLOW = Decision(
    5,
    "TensorFlow's two calls cost 35 us each in C++; ours are about 300 calls of Python that "
    "validate, lock, launch and log, and were 1.26 to 1.5 times as fast",
)
# On an AMD EPYC virtual machine with 2 cores, 2026-11, load average 1.2 to 5.7: of four runs.
CPU_FLOORS = (
    Floor("numpy, apply, over numpy +=", APPLY, over(IN_PLACE, "numpy"), "<=", 1.1, "0.77 to 1.08"),
    Floor("compiled, apply, over numpy +=", APPLY, over(IN_PLACE, "compiled"), "<=", 1.25,
          "0.81 to 1.25", decision=COMPILED_APPLY),
    Floor("numpy, take, MEAN, over numpy /=", TAKE, over(SCALED, "numpy"), "<=", 1.2,
          "0.88 to 1.04"),
    Floor("compiled, take, MEAN, over numpy /=", TAKE, over(SCALED, "compiled"), "<=", 1.2,
          "1.04 to 1.07"),
    *(
        Floor(f"{what}, us", SMALL, counted(f"{what}, us"), "<=", most, measured, decision=decision)
        for what, most, measured, decision in (
            ("numpy, drop", 5, "3.5", None),
            ("numpy, apply + take", 75, "49.9 to 56.6", SLOWER_HOST),
            ("compiled, drop", 5, "3.5", None),
            ("compiled, apply + take", 75, "52.9 to 60.9", SLOWER_HOST),
        )
    ),
    Floor("numpy, apply + take, over tf's", SMALL, counted(f"times {CYCLE}"), ">=", 1.1,
          "1.26 to 1.5", ("tensorflow",), OVER_TENSORFLOW),
    *(
        Floor(f"{implementation}, launches of a joint apply", MANY,
              counted(f"{implementation}, launches"), "<=", 1, "1")
        for implementation in IMPLEMENTATIONS
    ),
    Floor("numpy, sparse apply over add.at", SPARSE, times(ADD_AT, "numpy"), ">=", 1, "2.7 to 4.1"),
    Floor("compiled, sparse apply over add.at", SPARSE, times(ADD_AT, "compiled"), ">=", 1,
          "4.1 to 6.4"),
)  # fmt: skip
OF_COPY = times("copy", "cuda")
GPU_FLOORS = (
    Floor("apply, of a copy of 3 units", APPLY, OF_COPY, ">=", 1 / 1.1, f"0.99; {H100}"),
    Floor("first apply, of a copy of 2 units", FIRST, OF_COPY, ">=", 1 / 1.1, f"0.99; {H100}"),
    Floor("two applies and a take, of a copy of 7 units", TAKE, OF_COPY, ">=", 1 / 1.1,
          f"0.98; {H100}"),
    Floor("launches of a joint apply", MANY, counted("cuda, launches"), "<=", 1, f"1; {H100}"),
    Floor("satisfied take, host us", SMALL, counted("cuda, satisfied take, us"), "<=", 30,
          f"27.2; {H100}"),
)  # fmt: skip


def check(name: str, found: Any, wanted: np.ndarray) -> None:
    if not np.array_equal(found.numpy() if hasattr(found, "numpy") else found, wanted):
        raise AssertionError(f"{name} is not what NumPy makes it")


def after(bench: Bench, before: Call, call: Call) -> Call:
    """Returns a call with a preparation, which a GPU clock measures too."""
    return partial(in_order, before, call) if bench.on_gpu else After(before, call)


def operand(bench: Bench, device: Device, array: np.ndarray) -> Any:
    """Returns a gradient for a device: a NumPy array, or a Buffer on a GPU."""
    return device.put(array) if bench.on_gpu else array


def compare(bench: Bench, name: str, size: int, units: int, make: Callable[[Device], Call],
            peers: Mapping[str, Call]) -> None:  # fmt: skip
    """Measures candidates and a copy that moves a multiple of the gradient's bytes."""
    bench.compare(name, f"{size} float32", units * 4 * size, {**bench.ours(make), **peers})


def large(bench: Bench, size: int) -> None:
    """Measures applies to an existing sum, first applies, and takes of a mean.

    An apply reads twice and writes once. A first one, after a take, copies to new memory. A take
    divides in place; GPU times of it include two applies.
    """
    gradient, out = integers(size), np.empty(size, np.float32)

    def calls_of(device: Device, reduction_type: ReductionType, number: int) -> tuple[Call, Call]:
        """Returns an apply, and a take of so many gradients that was checked."""
        accumulator = gr.ConditionalAccumulator(
            "float32", (size,), reduction_type=reduction_type, device=device
        )
        apply = partial(accumulator.apply_grad, operand(bench, device, gradient), LATE)
        take = partial(accumulator.take_grad, number)
        in_order(*[apply] * number)
        check(f"the take of a {reduction_type}", take(output_type="buffer"), gradient)
        apply()
        return apply, take

    def first(device: Device) -> Call:
        apply, take = calls_of(device, "SUM", 1)  # a SUM of this dtype: launches nothing
        return after(bench, take, apply)

    def take(device: Device) -> Call:
        apply, take = calls_of(device, "MEAN", 2)
        return after(bench, partial(in_order, apply, apply), take)

    peers = peer_calls(find_peers(bench), "accumulate_n", [integers(size)], [gradient])
    compare(bench, APPLY, size, 3, lambda device: calls_of(device, "MEAN", 1)[0], peers)
    compare(bench, FIRST, size, 2, first, {})
    sums = [partial(np.copyto, out, gradient), partial(np.add, out, gradient, out)]
    divide = partial(np.true_divide, out, np.float32(2), out)
    peers = {} if bench.on_gpu else {SCALED: After(partial(in_order, *sums), divide)}
    compare(bench, TAKE, size, 7 if bench.on_gpu else 2, take, peers)


def find_tensorflow_calls(bench: Bench, gradient: np.ndarray) -> dict[str, Call]:
    """Returns the cycle of TensorFlow's conditional accumulator, called eagerly, for a gradient.

    Steps and counts are Python integers, as in a training loop; the gradient is a tensor.
    """
    if bench.on_gpu or (tf := tensorflow(bench)) is None:
        return {}
    accumulator = tf.compat.v1.ConditionalAccumulator(
        tf.as_dtype(gradient.dtype), shape=gradient.shape
    )
    apply = applies(accumulator, tf.constant(gradient))
    return {CYCLE: partial(in_order, apply, partial(accumulator.take_grad, 1))}


def applies(accumulator: Any, gradient: Any) -> Call:
    """Returns an apply with increasing steps, like a loop that takes after each gradient."""
    steps = count()
    return lambda: accumulator.apply_grad(gradient, next(steps))


def small(bench: Bench) -> None:
    gradient = integers(1)
    calls = find_tensorflow_calls(bench, gradient)
    for implementation, device in bench.devices():
        accumulator = gr.ConditionalAccumulator("float32", (1,), device=device)
        mine = operand(bench, device, gradient)
        apply, take = applies(accumulator, mine), partial(accumulator.take_grad, 1)
        calls[f"{implementation}, apply + take"] = partial(in_order, apply, take)
        calls[f"{implementation}, satisfied take"] = After(apply, take)
        calls[f"{implementation}, drop"] = partial(accumulator.apply_grad, mine, -1)
    number = bench.pick(NUMBER, QUICK_NUMBER)
    figures = bench.host_us(calls, number, rounds=ROUNDS, loops=LOOPS)
    if CYCLE in calls:
        ratio = figures[f"{CYCLE}, us"] / figures["numpy, apply + take, us"]
        figures[f"times {CYCLE}"] = ratio
    bench.note(SMALL, "1 float32, host us of a call", figures)


def many(bench: Bench) -> None:
    number = len(resnet50(bench.quick))
    figures: dict[str, float] = {}
    for implementation, device in bench.devices():
        accumulators = [
            gr.ConditionalAccumulator("float32", (MANY_SIZE,), device=device) for _ in range(number)
        ]
        mine = [operand(bench, device, integers(MANY_SIZE)) for _ in accumulators]
        apply = partial(gr.apply_grads, accumulators, mine, LATE)
        figures[f"{implementation}, launches"] = bench.launches(implementation, apply)
    bench.note(MANY, f"{number} x {MANY_SIZE} float32 in one call", figures)


def sparse(bench: Bench, rows: int) -> None:
    shape = (rows * INDICES // ROWS, WIDTH)
    values = integers(rows * WIDTH).reshape(rows, WIDTH)
    indices = np.random.default_rng(1).integers(0, shape[0], rows)
    total = np.zeros(shape, np.float32)
    np.add.at(total, indices, values)

    def make(device: Device) -> Call:
        accumulator = gr.SparseConditionalAccumulator("float32", shape, device=device)
        slices = gr.IndexedSlices(device.put(values), indices, shape)
        apply = partial(accumulator.apply_indexed_slices_grad, slices, LATE)
        apply()
        check(SPARSE, accumulator.take_indexed_slices_grad(1).values, total[np.unique(indices)])
        apply()
        return apply

    peers: dict[str, Call] = {}
    if not bench.on_gpu:
        peers[ADD_AT] = partial(np.add.at, total.copy(), indices, values)
    compare(bench, SPARSE, rows * WIDTH, 3, make, peers)


def cases(bench: Bench) -> None:
    large(bench, bench.pick(SIZE, QUICK_SIZE, GPU_SIZE))
    small(bench)
    many(bench)
    sparse(bench, bench.pick(ROWS, QUICK_ROWS))


BENCHMARK = Benchmark(
    __doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=1,
    host_clock=partial(HostClock, of_rounds=min, rounds=ROUNDS),
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
