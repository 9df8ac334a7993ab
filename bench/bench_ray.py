"""Measures gr.ray on one machine: AGN centers and accumulators in actors, beside actors of Ray.

Starts a cluster with a small object store, so that the warm-up uses all of its pages. The peer is
an actor that adds an array in place and returns it, synchronous or asynchronous; for small
variables it is a round trip of Ray with a small argument. All candidates run in turns. Exit status
1 if a floor is violated.

    python bench/bench_ray.py [--json FILE] [--quick]
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from measure.case import OURS, Case
from measure.clock import Took
from measure.floors import Floor, counted
from measure.report import finish, options_of, report_of
from measure.resnet50 import resnet50

import gradreduce as gr

STORE_BYTES = 500_000_000
MB, QUICK_MB = 64, 1  # of a large array
NUM_SMALL, SMALL_SIZE = 161, 64
ROUNDS, QUICK_ROUNDS, WARM_UPS = 15, 2, 6
PAUSE_SECONDS = 0.01  # before each call with large arrays: the store frees those of the last one
# Small variables: calls to one actor in a row, without a pause. An actor that has to wake up takes
# half a millisecond more.
IN_A_ROW = 5

BIG, SMALL, RESNET = "AGN, 64 MB", "AGN, 161 small variables", "AGN, ResNet-50"
COMPILED = "AGN, 64 MB, compiled kernels"
SHARDS, DURABLE = "AGN, 64 MB in two actors", 'AGN, 64 MB, durability="push"'
SUM, SUMS, PARTS = "accumulator, 64 MB", "161 small accumulators", "two accumulators in two actors"
ACTOR, ASYNC, TRIP = "actor that adds", "async actor that adds", "round trip of Ray"
EXCHANGE, PUSH = f"{OURS}exchange", f"{OURS}push and pull"
APPLY, TAKE = f"{OURS}apply_grads", f"{OURS}take_grads"
RATIO, EXCHANGE_RATIO = "push and pull over the actor", "exchange over the actor"
OVER, EXCHANGE_OVER = "push and pull over a round trip, ms", "exchange over a round trip, ms"
SUM_OVER = "apply_grads and take_grads over two round trips, ms"
SUM_RATIO = "apply_grads and take_grads over the actor"

# On an AMD EPYC virtual machine with 2 cores, 2026-11.
FLOORS = (
    Floor(
        f"{COMPILED}: {EXCHANGE_RATIO}",
        COMPILED,
        counted(EXCHANGE_RATIO),
        "<=",
        1.25,
        "1.04 to 1.12",
        ("ray",),
    ),
    Floor(
        f"{BIG}: {EXCHANGE_RATIO}",
        BIG,
        counted(EXCHANGE_RATIO),
        "<=",
        1.5,
        "1.22 to 1.35",
        ("ray",),
    ),
    Floor(
        f"{SMALL}: {EXCHANGE_OVER}",
        SMALL,
        counted(EXCHANGE_OVER),
        "<=",
        1.5,
        "1.15 to 1.48",
        ("ray",),
    ),
)

Timed = Callable[[], Mapping[str, float]]  # runs once; returns seconds by name


def in_turns(
    calls: Sequence[Timed], rounds: int, pause: float, in_a_row: int
) -> dict[str, list[float]]:
    """Returns the seconds of all calls, in turns.

    Args:
        calls: the candidates.
        rounds: how many turns count.
        pause: seconds before each turn of a call.
        in_a_row: how often a call is made in its turn, of which the median counts.
    """
    taken: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()
    for turn in range(WARM_UPS + rounds):
        for call in calls:
            time.sleep(pause)
            found = [call() for _ in range(in_a_row)]
            for name in found[0] if turn >= WARM_UPS else ():
                taken.setdefault(name, []).append(statistics.median([each[name] for each in found]))
    gc.enable()
    return taken


def timed(name: str, call: Callable[[], Any]) -> Timed:
    """Returns a call that measures another one, without dropping its result."""

    def run() -> Mapping[str, float]:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        del result
        return {name: seconds}

    return run


def median_of_pairs(
    ours: Sequence[float], theirs: Sequence[float], relate: Callable[[float, float], float]
) -> float:
    """Returns the median of what relates each time of ours to the peer's of the same turn."""
    return statistics.median(map(relate, ours, theirs))


def over(ours: float, theirs: float) -> float:
    """Returns a ratio."""
    return ours / theirs


def more_ms(ours: float, theirs: float) -> float:
    """Returns a difference in milliseconds."""
    return (ours - theirs) * 1e3


class Worker:
    """A worker of an AGN center in actors, with a sum of gradients that it can push again."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], **options: Any) -> None:
        self.center = gr.ray.AGNCenter(f"bench-{uuid.uuid4().hex}", **options)
        getter = gr.AGNCustomGetter(gr.default_mesh().devices[0], center=self.center)
        variables = [
            gr.get_variable(f"v{place}", np.zeros(shape, np.float32), custom_getter=getter)
            for place, shape in enumerate(shapes)
        ]
        self._optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 1, getter, 2)
        gradients = [np.ones(shape, np.float32) for shape in shapes]
        self._optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        self._variables, self._num_pushes = variables, 0
        self._write, self._exchanged = self.center._remote._write, 0.0
        setattr(self.center._remote, "_write", self._note_and_write)  # noqa: B010  # mypy

    def _note_and_write(self, *arguments: Any) -> int:
        self._exchanged = time.perf_counter()
        clock: int = self._write(*arguments)
        return clock

    def push(self) -> Mapping[str, float]:
        """Measures what a step that communicates adds to a local step.

        The exchange ends when the new values are here as arrays; then the variables are written.
        """
        worker = self._optimizer._worker
        sums = worker.variables.sums
        start = time.perf_counter()
        worker._ready_push(worker.inner._slots.powers, (), None)()
        end = time.perf_counter()
        worker.variables.sums = sums
        self._num_pushes += 1
        return {EXCHANGE: self._exchanged - start, PUSH: end - start}

    def check(self) -> None:
        """Raises ``AssertionError`` unless each push has moved every variable."""
        for variable in self._variables:
            if not (variable.numpy() == -0.25 * self._num_pushes).all():
                raise AssertionError(f"{variable} is not what {self._num_pushes} pushes make")


class Peers:
    """Two actors that add arrays in place and return the sums, one of them asynchronous."""

    def __init__(self) -> None:
        import ray

        class Adder:
            def reset(self, shapes: Sequence[tuple[int, ...]]) -> None:
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

    def calls(self, shapes: Sequence[tuple[int, ...]]) -> list[Timed]:
        """Returns calls that push gradients and get the sums, and one that does nothing."""
        gradients = [np.ones(shape, np.float32) for shape in shapes]
        given = gradients[0] if len(shapes) == 1 else gradients
        self._get([actor.reset.remote(shapes) for actor in self._actors.values()])

        def call_of(method: Any, argument: Any) -> Callable[[], Any]:
            return lambda: self._get(method.remote(argument))

        calls = [timed(name, call_of(actor.push, given)) for name, actor in self._actors.items()]
        return [*calls, timed(TRIP, call_of(self._actors[ACTOR].trip, 1))]


def fastest(taken: Mapping[str, Sequence[float]], names: Sequence[str]) -> Sequence[float]:
    """Returns the times of the candidate with the lowest median."""
    return min([taken[name] for name in names], key=statistics.median)


class Bench:
    """Runs all cases, if Ray is installed."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.absent: dict[str, str] = {}
        self.cases: dict[str, Case] = {}
        self._big = (QUICK_MB if quick else MB) * 250_000  # elements
        self._small = [(SMALL_SIZE,)] * (5 if quick else NUM_SMALL)

    @cached_property
    def peers(self) -> Peers:
        """The peers, of the cluster of this process."""
        return Peers()

    def run(self) -> None:
        """Runs all cases, on the cluster of this process or a new one."""
        if importlib.util.find_spec("ray") is None:
            self.absent["ray"] = "not installed"
            return
        with cluster():
            self.with_floors()
            self.agn(RESNET, self._small if self.quick else resnet50())
            self.agn(SHARDS, [(self._big // 2,)] * 2, num_shards=2)
            with tempfile.TemporaryDirectory() as folder:
                self.agn(DURABLE, [(self._big,)], snapshots=folder, durability="push")
            self.accumulators(SUM, [(self._big,)])
            self.accumulators(SUMS, self._small)
            self.accumulators(PARTS, [(self._big // 2,)] * 2, num_shards=2)

    def with_floors(self) -> None:
        """Runs the cases that have floors."""
        self.agn(COMPILED, [(self._big,)], kernels="compiled")
        self.agn(BIG, [(self._big,)])
        self.agn(SMALL, self._small)

    def agn(self, name: str, shapes: Sequence[tuple[int, ...]], **options: Any) -> None:
        """Measures pushes of all variables to a center, each with the pull behind it."""
        worker = Worker(shapes, **options)
        with closing(worker.center):
            taken = self._taken([worker.push, *self.peers.calls(shapes)], shapes)
            worker.check()
        peer = fastest(taken, [ACTOR, ASYNC])
        relations = {
            RATIO: (PUSH, peer, over), EXCHANGE_RATIO: (EXCHANGE, peer, over),
            OVER: (PUSH, taken[TRIP], more_ms), EXCHANGE_OVER: (EXCHANGE, taken[TRIP], more_ms),
        }  # fmt: skip
        figures = {
            figure: median_of_pairs(taken[ours], theirs, relate)
            for figure, (ours, theirs, relate) in relations.items()
        }
        self._keep(name, shapes, taken, figures)

    def accumulators(self, name: str, shapes: Sequence[tuple[int, ...]], **options: Any) -> None:
        """Measures that all accumulators of a set get a gradient, and give it."""
        specs = [("float32", list(shape)) for shape in shapes]
        gradients = [np.ones(shape, np.float32) for shape in shapes]
        with gr.ray.AccumulatorSet(specs, f"bench-{uuid.uuid4().hex}", **options) as shared:

            def apply() -> None:
                shared.apply_grads(gradients, local_step=2**40)

            def take() -> None:
                for taken in shared.take_grads(1):
                    if taken[0] != 1:
                        raise AssertionError("a gradient is not the mean")

            def both() -> Mapping[str, float]:
                return {**timed(APPLY, apply)(), **timed(TAKE, take)()}

            taken = self._taken([both, *self.peers.calls(shapes)], shapes)
        sums = [sum(times) for times in zip(taken[APPLY], taken[TAKE], strict=True)]
        two_trips = [2 * seconds for seconds in taken[TRIP]]
        figures = {
            SUM_RATIO: median_of_pairs(sums, fastest(taken, [ACTOR, ASYNC]), over),
            SUM_OVER: median_of_pairs(sums, two_trips, more_ms),
        }
        self._keep(name, shapes, taken, figures)

    def _taken(
        self, calls: Sequence[Timed], shapes: Sequence[tuple[int, ...]]
    ) -> dict[str, list[float]]:
        """Returns the seconds of calls with tensors of some shapes."""
        if self.quick:
            return in_turns(calls, QUICK_ROUNDS, 0.0, 1)
        if shapes == self._small:
            return in_turns(calls, ROUNDS, 0.0, IN_A_ROW)
        return in_turns(calls, ROUNDS, PAUSE_SECONDS, 1)

    def _keep(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]],
        taken: Mapping[str, Sequence[float]],
        figures: Mapping[str, float],
    ) -> None:
        """Prints and stores a case."""
        medians = {candidate: statistics.median(times) for candidate, times in taken.items()}
        took = {candidate: Took(each, each) for candidate, each in medians.items()}
        least = {f"{candidate}, least, ms": min(times) * 1e3 for candidate, times in taken.items()}
        size = f"{len(shapes)} float32 tensors"
        self.cases[name] = Case(name, size, 0, took, {**figures, **least})
        self.cases[name].show()


@contextmanager
def cluster() -> Iterator[None]:
    """Starts a cluster and ends it, unless this process has one."""
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            gr.ray.init("local", num_cpus=4, object_store_memory=STORE_BYTES)
        yield


def measured(*, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    print(f"load average {load:.2f}")
    bench = Bench(quick=quick)
    bench.run()
    return report_of(["numpy"], load, bench, FLOORS, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes a report; exits with 1 if a floor is broken."""
    options = options_of(__doc__, arguments)
    finish(measured(quick=options.quick), options.json)


if __name__ == "__main__":
    main()
