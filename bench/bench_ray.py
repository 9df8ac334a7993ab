"""Measures gr.ray on one machine: AGN centers in actors, beside actors of Ray."""

import operator
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import numpy as np
from bench_agn import push_sums
from measure.case import OURS, Floor, counted
from measure.clock import Turn, each, garbage_kept, in_turns, timed
from measure.operands import Shapes
from measure.runner import Bench, Benchmark

import gradreduce as gr

STORE_BYTES = 500_000_000
MB, QUICK_MB = 64, 1  # of a large array
NUM_SMALL, SMALL_SIZE = 161, 64
ROUNDS, QUICK_ROUNDS, WARM_UPS = 15, 2, 6
PAUSE_SECONDS = 0.01  # before each call with large arrays: the store frees those of the last one
# Small variables: calls to one actor in a row, without a pause. An actor that has to wake up takes
# half a millisecond more.
IN_A_ROW = 5

BIG, SMALL = "AGN, 64 MB", "AGN, 161 small variables"
COMPILED = "AGN, 64 MB, compiled kernels"
ACTOR, ASYNC, TRIP = "actor that adds", "async actor that adds", "round trip of Ray"
EXCHANGE, PUSH = f"{OURS}exchange", f"{OURS}push and pull"
RATIO, OVER = "exchange over the actor", "exchange over a round trip, ms"

# On an AMD EPYC virtual machine with 2 cores, 2026-11.
FLOORS = tuple(
    Floor(f"{case}: {figure}", case, counted(figure), "<=", most, measured, ("ray",))
    for case, figure, most, measured in (
        (COMPILED, RATIO, 1.25, "1.04 to 1.12"),
        (BIG, RATIO, 1.5, "1.22 to 1.35"),
        (SMALL, OVER, 1.5, "1.15 to 1.48"),
    )
)


def median_of(turn: Turn, number: int) -> Turn:
    """Returns what measures several calls in a row, of which the median counts."""

    def run() -> dict[str, float]:
        found = [turn() for _ in range(number)]
        return {name: median([each[name] for each in found]) for name in found[0]}

    return run


def ones(shapes: Shapes) -> list[np.ndarray]:
    return [np.ones(shape, np.float32) for shape in shapes]


class Worker:
    """A worker of an AGN center in actors, with a sum of gradients that it can push again."""

    def __init__(self, shapes: Shapes, **options: Any) -> None:
        self.center = gr.ray.AGNCenter(f"bench-{uuid.uuid4().hex}", **options)
        getter = gr.AGNCustomGetter(gr.default_mesh().devices[0], center=self.center)
        self._variables = [
            gr.get_variable(f"v{place}", np.zeros(shape, np.float32), custom_getter=getter)
            for place, shape in enumerate(shapes)
        ]
        self._optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 1, getter, 2)
        self._optimizer.apply_gradients(list(zip(ones(shapes), self._variables, strict=True)))
        self._num_pushes, self._exchanged = 0, 0.0
        self._write = self.center._shared._write
        setattr(self.center._shared, "_write", self._note_and_write)  # noqa: B010  # mypy

    def _note_and_write(self, *arguments: Any) -> int:
        self._exchanged = time.perf_counter()
        clock: int = self._write(*arguments)
        return clock

    def push(self) -> Mapping[str, float]:
        """Measures what a step that communicates adds to a local step.

        The exchange ends when the new values are here as arrays; then the variables are written.
        """
        start = time.perf_counter()
        push_sums(self._optimizer)
        end = time.perf_counter()
        self._num_pushes += 1
        return {EXCHANGE: self._exchanged - start, PUSH: end - start}

    def check(self) -> None:
        """Raises ``AssertionError`` unless each push has moved every variable."""
        for variable in self._variables:
            if not (variable.numpy() == -0.25 * self._num_pushes).all():
                raise AssertionError(f"{variable} is not what {self._num_pushes} pushes make")


class Cases:
    def __init__(self, bench: Bench) -> None:
        import ray

        class Adder:
            """Adds arrays in place and returns the sums."""

            def reset(self, shapes: Shapes) -> None:
                self.values = [np.zeros(shape, np.float32) for shape in shapes]

            def push(self, gradients: Any) -> Any:
                if len(self.values) == 1:
                    self.values[0] += gradients
                    return self.values[0]
                for value, gradient in zip(self.values, gradients, strict=True):
                    value += gradient
                return self.values

            def trip(self, argument: Any) -> Any:
                return argument

        class AsyncAdder(Adder):
            async def push(self, gradients: Any) -> Any:
                return super().push(gradients)

        kinds = {ACTOR: Adder, ASYNC: AsyncAdder}
        self._actors = {name: ray.remote(num_cpus=0)(kind).remote() for name, kind in kinds.items()}
        self._get = ray.get
        self.bench = bench
        self.big = bench.pick(MB, QUICK_MB) * 250_000  # elements
        self.small = [(SMALL_SIZE,)] * bench.pick(NUM_SMALL, 5)

    def run(self) -> None:
        self.agn(COMPILED, [(self.big,)], kernels="compiled")
        self.agn(BIG, [(self.big,)])
        self.agn(SMALL, self.small)

    def agn(self, name: str, shapes: Shapes, **options: Any) -> None:
        """Measures pushes of all variables to a center, each with the pull behind it."""
        worker = Worker(shapes, **options)
        with closing(worker.center):
            taken = self._taken(worker.push, shapes)
            worker.check()
        fastest = min(taken[ACTOR], taken[ASYNC], key=median)
        figures = {  # medians of the turns
            RATIO: median(map(operator.truediv, taken[EXCHANGE], fastest)),
            OVER: median(map(operator.sub, taken[EXCHANGE], taken[TRIP])) * 1e3,
        }
        self.bench.note(name, f"{len(shapes)} float32 tensors", figures, each(median, taken))

    def _taken(self, ours: Turn, shapes: Shapes) -> Mapping[str, Sequence[float]]:
        """Returns the seconds of ours and of the peers in each turn, for tensors of some shapes."""
        is_small, gradients = shapes == self.small, ones(shapes)
        given = gradients[0] if len(shapes) == 1 else gradients
        self._get([actor.reset.remote(shapes) for actor in self._actors.values()])

        def turn_of(name: str, method: Any, argument: Any) -> Turn:
            return timed(name, lambda: self._get(method.remote(argument)))

        turns = [ours, *(turn_of(name, each.push, given) for name, each in self._actors.items())]
        turns.append(turn_of(TRIP, self._actors[ACTOR].trip, 1))
        if is_small and not self.bench.quick:
            turns = [median_of(turn, IN_A_ROW) for turn in turns]
        pause = 0.0 if is_small or self.bench.quick else PAUSE_SECONDS
        with garbage_kept():
            rounds = self.bench.pick(ROUNDS, QUICK_ROUNDS)
            return in_turns(turns, rounds, pause=pause, warm_ups=WARM_UPS)


def cases(bench: Bench) -> None:
    """Runs all cases if Ray is installed, on the cluster of this process or a new one."""
    if not bench.has("ray"):
        return
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            gr.ray.init("local", num_cpus=4, object_store_memory=STORE_BYTES)
        Cases(bench).run()


BENCHMARK = Benchmark(__doc__, cases, FLOORS)

if __name__ == "__main__":
    BENCHMARK.main()
