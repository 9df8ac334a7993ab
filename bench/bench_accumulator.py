"""Measures an accumulator's apply, take and drop.

On a GPU if CuPy finds one, otherwise with both implementations of a simulated device. Compares
large gradients with NumPy's pass over as many bytes and with a copy, small ones with TensorFlow's
eager accumulator, sparse ones with np.add.at, in the same rounds. Reports libraries that are not
installed. Exit status 1 if a floor is violated.

    python bench/bench_accumulator.py [--json FILE] [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from measure.accumulator_peers import CYCLE, DROP, find_accumulator_peer
from measure.case import OURS, Case
from measure.clock import After, Call, Clock, HostClock, clock_of, host_seconds
from measure.floors import Decision, Floor, counted, of_the_copy, over_the_peer, times_the_peer
from measure.peers import find_peers
from measure.random_values import integers
from measure.report import finish, options_of, report_of
from measure.resnet50 import resnet50
from measure.setting import IMPLEMENTATIONS, one_device

import gradreduce as gr
from gradreduce.device import Device, Mesh

SIZE, GPU_SIZE, QUICK_SIZE = 2**24, 2**26, 2**10  # float32 elements: 64 MiB, 256 MiB
MANY_SIZE, QUICK_MANY = 16, 12
ROWS, WIDTH, INDICES, QUICK_ROWS = 20_000, 64, 100_000, 100  # of a sparse gradient
ROUNDS = 60  # on a CPU, of which the best one counts
LOOPS = 4  # of one round, where a call is microseconds: the first finds its caches cold
# Calls of one loop, where a call takes microseconds: the loop fits in one time slice.
NUMBER, QUICK_NUMBER = 50, 10
LATE = 2**40  # a step that is never stale

APPLY, FIRST, TAKE, SMALL = "apply", "first apply", "take, MEAN", "one element"
MANY, SPARSE, SPARSE_TAKE = "161 accumulators", "sparse apply", "sparse take, MEAN"
IN_PLACE, COPYTO, SCALED = "numpy +=", "numpy copyto", "numpy /="
ADD_AT, SORTED = "numpy add.at", "numpy sort, add.reduceat"

H100 = "H100, 2026-11"
# On an AMD EPYC virtual machine with 2 cores, 2026-11, load average 1.2 to 5.7: of four runs.
MEASURED = {
    (APPLY, "numpy"): "0.77 to 1.08", (APPLY, "compiled"): "0.81 to 1.25",
    (TAKE, "numpy"): "0.88 to 1.04", (TAKE, "compiled"): "1.04 to 1.07",
    ("drop, us", "numpy"): "3.5", ("drop, us", "compiled"): "3.5",
    ("apply + take, us", "numpy"): "49.9 to 56.6", ("apply + take, us", "compiled"): "52.9 to 60.9",
    (SPARSE, "numpy"): "2.7 to 4.1", (SPARSE, "compiled"): "4.1 to 6.4",
}  # fmt: skip
CPU_FLOORS = (
    *(
        Floor(f"{implementation}, {name}, over {peer}", name, over_the_peer(peer, implementation),
        "<=", most,
              MEASURED[name, implementation])
        for name, peer, bounds in (
            (APPLY, IN_PLACE, (1.1, 1.25)),
            (TAKE, SCALED, (1.2, 1.2)),
        )
        for implementation, most in zip(IMPLEMENTATIONS, bounds, strict=True)
    ),
    *(
        Floor(f"{implementation}, {what}", SMALL, counted(f"{implementation}, {what}"), "<=", most,
              MEASURED[what, implementation])
        for implementation in IMPLEMENTATIONS
        for what, most in (("drop, us", 5), ("apply + take, us", 75))
    ),
    Floor("numpy, apply + take, over tf's", SMALL, counted("times tf apply + take"), ">=", 1.1,
          "1.26 to 1.5", ("tensorflow",)),
    *(
        Floor(f"{implementation}, launches of a joint apply", MANY,
              counted(f"{implementation}, launches"), "<=", 1, "1")
        for implementation in IMPLEMENTATIONS
    ),
    *(
        Floor(f"{implementation}, sparse apply over add.at", SPARSE, times_the_peer(ADD_AT,
        implementation), ">=", 1,
              MEASURED[SPARSE, implementation])
        for implementation in IMPLEMENTATIONS
    ),
)  # fmt: skip
SLOWER_HOST = (
    "the commit before the measured one took as long, in turns on one machine (55.8 and 56.2 us); "
    "runs on machines of this kind took 49.9 to 66.3 us"
)
DECISIONS = {
    f"compiled, {APPLY}, over {IN_PLACE}": Decision(
        1.0, "both are limited by memory; runs measured 0.81 to 1.25"
    ),
    **{f"{each}, apply + take, us": Decision(60, SLOWER_HOST) for each in IMPLEMENTATIONS},
    "numpy, apply + take, over tf's": Decision(
        5,
        "TensorFlow's two calls cost 35 us each in C++; ours are about 300 calls of Python that "
        "validate, lock, launch and log, and were 1.26 to 1.5 times as fast",
    ),
}
GPU_FLOORS = (
    Floor("apply, of a copy of 3 units", APPLY, of_the_copy("cuda"), ">=", 1 / 1.1,
          f"0.99; {H100}"),
    Floor("first apply, of a copy of 2 units", FIRST, of_the_copy("cuda"), ">=", 1 / 1.1,
          f"0.99; {H100}"),
    Floor("two applies and a take, of a copy of 7 units", TAKE, of_the_copy("cuda"), ">=", 1 / 1.1,
          f"0.98; {H100}"),
    Floor("launches of a joint apply", MANY, counted("cuda, launches"), "<=", 1, f"1; {H100}"),
    Floor("satisfied take, host us", SMALL, counted("cuda, satisfied take, us"), "<=", 30,
          f"27.2; {H100}"),
)  # fmt: skip


def check(name: str, found: Any, wanted: np.ndarray) -> None:
    """Raises if a result is wrong."""
    if not np.array_equal(found.numpy() if hasattr(found, "numpy") else found, wanted):
        raise AssertionError(f"{name} is not what NumPy makes it")


class Bench:
    """One device, its implementations, its peers, and the measurements on it."""

    def __init__(self, meshes: dict[str, Mesh], *, quick: bool) -> None:
        self.meshes = meshes
        self.on_gpu = "cuda" in meshes
        self.quick = quick
        (*_, mesh) = meshes.values()
        best = HostClock(quick, of_rounds=min, rounds=ROUNDS)
        self.clock: Clock = clock_of(mesh, quick=quick) if self.on_gpu else best
        self.peers, self.absent = find_peers(on_gpu=self.on_gpu)
        self.number = QUICK_NUMBER if quick else NUMBER
        self.cases: dict[str, Case] = {}

    def implementations(self) -> Iterator[tuple[str, Device]]:
        """Maps the name of each implementation to its device."""
        for implementation, mesh in self.meshes.items():
            yield implementation, mesh.devices[0]

    def operand(self, device: Device, array: np.ndarray) -> Any:
        """Returns a gradient for a device: a NumPy array, or a Buffer on a GPU."""
        return device.put(array) if self.on_gpu else array

    def after(self, before: Call, call: Call) -> Call:
        """Returns a call with a preparation, which a GPU clock measures too."""
        return partial(both, before, call) if self.on_gpu else After(before, call)

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    def large(
        self, name: str, size: int, units: int, ours: Mapping[str, Call], peers: Mapping[str, Call]
    ) -> None:
        """Measures candidates and a copy that moves a multiple of the gradient's bytes."""
        calls = {OURS + implementation: call for implementation, call in ours.items()}
        calls |= peers
        nbytes = units * 4 * size
        self.keep(Case(name, f"{size} float32", nbytes, self.clock.measure(calls, nbytes)))

    def peer_calls(self, operation: str, *operands: Sequence[np.ndarray]) -> dict[str, Call]:
        """Returns the candidates of all peers for an operation."""
        calls: dict[str, Call] = {}
        for peer in self.peers:
            calls |= peer.calls(operation, *operands)
        return calls

    # -- large gradients --------------------------------------------------------------------------

    def apply(self, size: int) -> None:
        """Adds a gradient to an existing sum: two reads, one write."""
        gradient = integers(size)
        ours: dict[str, Call] = {}
        for implementation, device in self.implementations():
            accumulator = gr.ConditionalAccumulator("float32", (size,), device=device)
            mine = self.operand(device, gradient)
            accumulator.apply_grad(mine, LATE)
            ours[implementation] = partial(accumulator.apply_grad, mine, LATE)
        self.large(APPLY, size, 3, ours, self.peer_calls("accumulate", [integers(size), gradient]))

    def first_apply(self, size: int) -> None:
        """Adds the first gradient after a take, which copies it to new memory."""
        gradient, out = integers(size), np.empty(size, np.float32)
        ours: dict[str, Call] = {}
        for implementation, device in self.implementations():
            accumulator = gr.ConditionalAccumulator(
                "float32", (size,), reduction_type="SUM", device=device
            )
            apply = partial(accumulator.apply_grad, self.operand(device, gradient), LATE)
            take = partial(accumulator.take_grad, 1)  # a SUM of this dtype: launches nothing
            apply()
            check(f"{implementation}, {FIRST}", take(output_type="buffer"), gradient)
            apply()
            ours[implementation] = self.after(take, apply)
        peers = {} if self.on_gpu else {COPYTO: partial(np.copyto, out, gradient)}
        self.large(FIRST, size, 2, ours, peers)

    def take(self, size: int) -> None:
        """Takes the mean of two gradients in place; GPU times include the applies."""
        gradient = integers(size)
        ours: dict[str, Call] = {}
        for implementation, device in self.implementations():
            accumulator = gr.ConditionalAccumulator("float32", (size,), device=device)
            mine = self.operand(device, gradient)
            applies = partial(repeated, partial(accumulator.apply_grad, mine, LATE), 2)
            take = partial(accumulator.take_grad, 2)
            applies()
            check(f"{implementation}, {TAKE}", take(output_type="buffer"), gradient)
            ours[implementation] = self.after(applies, take)
        peers = {} if self.on_gpu else {SCALED: self.scaled(gradient)}
        self.large(TAKE, size, 7 if self.on_gpu else 2, ours, peers)

    def scaled(self, gradient: np.ndarray) -> Call:
        """Returns NumPy's division of a new sum of two arrays."""
        total = np.empty_like(gradient)
        sums = [partial(np.copyto, total, gradient), partial(np.add, total, gradient, total)]
        return After(partial(both, *sums), partial(np.true_divide, total, np.float32(2), total))

    # -- the host's time --------------------------------------------------------------------------

    def small(self) -> None:
        """Measures the host time of a call with tiny arrays."""
        gradient = integers(1)
        calls: dict[str, Call] = {}
        if not self.on_gpu:
            theirs, absent = find_accumulator_peer(gradient)
            calls, self.absent = theirs, {**self.absent, **absent}
        for implementation, device in self.implementations():
            accumulator = gr.ConditionalAccumulator("float32", (1,), device=device)
            mine = self.operand(device, gradient)
            apply = partial(apply_next, accumulator, mine, count())
            take = partial(accumulator.take_grad, 1)
            calls[f"{implementation}, apply + take"] = partial(both, apply, take)
            calls[f"{implementation}, satisfied take"] = After(apply, take)
            kept_sum = gr.ConditionalAccumulator("float32", (1,), device=device)
            kept_sum.apply_grad(mine)
            calls[f"{implementation}, later apply"] = partial(kept_sum.apply_grad, mine)
            calls[f"{implementation}, drop"] = partial(kept_sum.apply_grad, mine, -1)
        seconds = host_seconds(calls, self.number, quick=self.quick, rounds=ROUNDS, loops=LOOPS)
        self.settle()
        figures = {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
        for theirs_, mine_ in ((CYCLE, "numpy, apply + take"), (DROP, "numpy, drop")):
            if theirs_ in seconds:
                figures[f"times {theirs_}"] = seconds[theirs_] / seconds[mine_]
        self.keep(Case(SMALL, "1 float32, host us of a call", figures=figures))

    def many(self) -> None:
        """Adds all gradients of a model in one call."""
        number = QUICK_MANY if self.quick else len(resnet50())
        gradients = [integers(MANY_SIZE) for _ in range(number)]
        calls: dict[str, Call] = {}
        figures: dict[str, float] = {}
        for implementation, device in self.implementations():
            accumulators = [
                gr.ConditionalAccumulator("float32", (MANY_SIZE,), device=device) for _ in gradients
            ]
            mine = [self.operand(device, gradient) for gradient in gradients]
            calls[f"{implementation}, apply"] = partial(gr.apply_grads, accumulators, mine, LATE)
            joint = partial(gr.take_grads, accumulators, 1)
            calls[f"{implementation}, apply + take"] = partial(
                both, calls[f"{implementation}, apply"], joint
            )
            with self.meshes[implementation].journal() as journal:
                gr.apply_grads(accumulators, mine, LATE)
            figures[f"{implementation}, launches"] = journal.launches
        seconds = host_seconds(calls, 1, quick=self.quick, rounds=ROUNDS, loops=LOOPS)
        self.settle()
        figures |= {f"{name}, us a tensor": took / number * 1e6 for name, took in seconds.items()}
        self.keep(Case(MANY, f"{number} x {MANY_SIZE} float32 in one call", figures=figures))

    def settle(self) -> None:
        """Waits until a GPU has done its queued work."""
        if self.on_gpu:
            self.meshes["cuda"].synchronize()

    # -- sparse gradients -------------------------------------------------------------------------

    def sparse(self, rows: int) -> None:
        """Adds rows to existing rows, and takes their means in index order."""
        num_indices = rows * INDICES // ROWS
        values = integers(rows * WIDTH).reshape(rows, WIDTH)
        indices = np.random.default_rng(1).integers(0, num_indices, rows)
        applies: dict[str, Call] = {}
        takes: dict[str, Call] = {}
        for implementation, device in self.implementations():
            slices = gr.IndexedSlices(device.put(values), indices, (num_indices, WIDTH))
            adding, taking = (
                gr.SparseConditionalAccumulator("float32", (num_indices, WIDTH), device=device)
                for _ in range(2)
            )
            applies[implementation] = partial(adding.apply_indexed_slices_grad, slices, LATE)
            before = partial(taking.apply_indexed_slices_grad, slices, LATE)
            take = partial(taking.take_indexed_slices_grad, 1)
            applies[implementation]()
            before()
            check(f"{implementation}, {SPARSE}", take().values, by_sorting(indices, values)[1])
            takes[implementation] = self.after(before, take)
        total = np.zeros((num_indices, WIDTH), np.float32)
        peers: dict[str, Call] = {}
        if not self.on_gpu:
            peers[ADD_AT] = partial(np.add.at, total, indices, values)
            peers[SORTED] = partial(add_sorted, total, indices, values)
        size = rows * WIDTH
        self.large(SPARSE, size, 3, applies, peers)
        self.large(SPARSE_TAKE, size, 5 if self.on_gpu else 2, takes, {})


def both(first: Call, second: Call) -> None:
    """Calls functions one after the other."""
    first()
    second()


def repeated(call: Call, times: int) -> None:
    """Calls a function a number of times."""
    for _ in range(times):
        call()


def apply_next(accumulator: gr.ConditionalAccumulator, gradient: Any, steps: Iterator[int]) -> None:
    """Applies with increasing steps, like a loop that takes after each gradient."""
    accumulator.apply_grad(gradient, next(steps))


def by_sorting(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted unique indices and the sums of their rows."""
    order = np.argsort(indices, kind="stable")
    ranked = indices[order]
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    return ranked[starts], np.add.reduceat(values[order], starts, axis=0)


def add_sorted(total: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
    """Adds rows by sorting, NumPy's faster alternative to ``np.add.at``."""
    places, rows = by_sorting(indices, values)
    total[places] += rows


def all_cases(bench: Bench) -> list[Callable[[], None]]:
    """Returns the cases in order; each frees its arrays when it ends."""
    size = QUICK_SIZE if bench.quick else GPU_SIZE if bench.on_gpu else SIZE
    return [
        partial(bench.apply, size),
        partial(bench.first_apply, size),
        partial(bench.take, size),
        bench.small,
        bench.many,
        partial(bench.sparse, QUICK_ROWS if bench.quick else ROWS),
    ]


# -- the run ---------------------------------------------------------------------------------------


def measured(found: dict[str, Mesh], *, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    bench = Bench(found, quick=quick)
    print(f"{', '.join(found)}; load average {load:.2f}")
    for case in all_cases(bench):
        case()
    if not bench.on_gpu:
        print("no GPU: what is promised of one is not measured")
    floors = GPU_FLOORS if bench.on_gpu else CPU_FLOORS
    return report_of(list(found), load, bench, floors, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    with ExitStack() as stack:
        found = one_device()
        for mesh in found.values():
            stack.enter_context(mesh)
        report = measured(found, quick=options.quick)
    finish(report, options.json)


if __name__ == "__main__":
    main()
