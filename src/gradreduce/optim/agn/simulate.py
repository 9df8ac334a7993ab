"""Simulates the workers of a center, their failures and their network, on a virtual clock.

One thread runs events in the order of their virtual times. The center is the real one
(``CenterState``, its rounds and rules); workers and messages are simulated:

    worker:   pull -> compute a period -> push -> wait for the answer -> compute ...
    message:  may be lost, repeated, late, or cut off by a partition; the worker sends again
    center:   applies each push once; answers a repeated one again
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from gradreduce.arrays.variable import Variable
from gradreduce.backends import open_mesh
from gradreduce.device import as_positive
from gradreduce.optim.hyperparameters import as_integer
from gradreduce.optim.optimizer import Optimizer
from gradreduce.optim.rules import GradientDescentOptimizer

from .center_interface import WorkerVariables
from .center_rules import CenterRule
from .center_state import CenterState
from .push import PushConfig
from .rounds import PushKind, Round, as_options

Values = dict[str, np.ndarray]
GradientFunction = Callable[[Values, int, Any], Mapping[str, Any]]  # Any: numpy.random.Generator
_CONFIG = PushConfig(None, "a simulated worker")


@dataclass(frozen=True)
class CenterFaults:
    """What goes wrong in ``gr.simulate_center``.

    Attributes:
        slowest: the step time of the slowest worker over that of the fastest; those of the others
            are between them, on a logarithmic scale.
        crashes: the probability that a worker crashes in a period. It loses its variables and what
            it has not pushed, and pulls after ``restart_seconds``.
        restart_seconds: virtual seconds from a crash to the pull.
        lost: the probability that a message is lost.
        repeated: the probability that a message arrives twice.
        late: the probability that a message arrives ``late_seconds`` later.
        late_seconds: virtual seconds.
        partitions: tuples of begin, end (virtual seconds) and share: between them no message of
            this share of the workers arrives.

    Example:
        >>> gr.CenterFaults(crashes=0.02, partitions=[(100, 200, 0.25)]).restart_seconds
        10.0
    """

    slowest: float = 1.0
    crashes: float = 0.0
    restart_seconds: float = 10.0
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    late_seconds: float = 10.0
    partitions: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class CenterRun:
    """The result of ``gr.simulate_center``.

    Attributes:
        values: the center variables at the end, by name.
        seconds: the virtual time of the end.
        num_steps: the number of local steps in the pushes that the center has applied.
        num_pushes: the number of these pushes.
        num_dropped: the number of pushes that were dropped because they were too old.
        num_updates: how often the rule was applied; without a rule ``num_pushes``.
        applied: for each worker the number of its pushes that were applied.
        acknowledged: for each worker the number of those whose answer it got.
        digest: SHA-256 of all events and values; equal for equal arguments.
    """

    values: Values
    seconds: float
    num_steps: int
    num_pushes: int
    num_dropped: int
    num_updates: int
    applied: list[int]
    acknowledged: list[int]
    digest: str


def simulate_center(  # noqa: PLR0913  # options of one call
    start: Mapping[str, Any],
    gradient: GradientFunction,
    *,
    num_workers: int,
    num_pushes: int | None = None,
    seconds: float | None = None,
    period: int = 10,
    learning_rate: float = 0.1,
    center_rule: CenterRule | None = None,
    push: PushKind = "gradient_mean",
    num_required: int | None = None,
    grace: float = 0.0,
    max_staleness: int | None = None,
    faults: CenterFaults = CenterFaults(),
    step_seconds: float = 1.0,
    latency: float = 0.01,
    seed: int = 0,
) -> CenterRun:
    """Simulates a training with a center, with many workers in one thread.

    It shows what quorums, grace periods and rules do when workers are slow or crash and when
    messages are lost, in seconds instead of hours. The center and its rule are those of
    ``gr.AGNCenter``, on a simulated device; all times are virtual. Equal arguments give equal bits.

    Args:
        start: the initial variables by name, arrays of float32 or float64.
        gradient: ``gradient(values, worker, random)`` returns the gradients of one local step by
            name. ``values`` are the worker's variables, which it must not change; ``random`` is a
            generator of the worker.
        num_workers: the number of workers.
        num_pushes: each worker ends after this many answers to its pushes. None: no limit.
        seconds: the simulation ends at this virtual time. None: no limit.
        period: local steps between two pushes.
        learning_rate: of the local steps, which are gradient descent.
        center_rule: see ``gr.AGNCenter``; None: gradient descent, as AGN with this optimizer.
        push: see ``gr.AGNCenter``.
        num_required: see ``gr.AGNCenter``.
        grace: see ``gr.AGNCenter``; virtual seconds.
        max_staleness: see ``gr.AGNCenter``.
        faults: what goes wrong.
        step_seconds: virtual seconds of a local step of the fastest worker.
        latency: the mean travel time of a message, in virtual seconds. A worker without an answer
            sends again after 100 times the latency and one step time.
        seed: of all random numbers.

    Raises:
        ValueError: both ``num_pushes`` and ``seconds`` are None, or see ``gr.AGNCenter``.
        TypeError: see ``gr.AGNCenter``.

    Example:
        >>> def gradient(values, worker, random):
        ...     return {"w": values["w"] - random.normal(3.0, 1.0, 1)}
        >>> run = gr.simulate_center(
        ...     {"w": np.zeros(1)}, gradient, num_workers=20, num_pushes=20,
        ...     center_rule=gr.center_rules.Mean(1.0), push="delta", num_required=15,
        ...     faults=gr.CenterFaults(crashes=0.1, lost=0.1, repeated=0.1))
        >>> run.values["w"].round()
        array([3.])
        >>> min(run.acknowledged)
        20
    """
    options = as_options(center_rule, push, num_required, grace, max_staleness)
    if num_pushes is None and seconds is None:
        raise ValueError("num_pushes=None needs seconds=: the simulation would not end")
    with open_mesh(1, backend="sim") as mesh:
        state = CenterState(mesh.devices, options)
        simulation = _Simulation(
            state,
            {name: np.array(value) for name, value in start.items()},
            gradient,
            _Timing(
                as_positive("step_seconds", step_seconds), as_positive("latency", latency), faults
            ),
            as_integer("num_workers", num_workers, least=1),
            as_integer("period", period, least=1),
            learning_rate,
            as_integer("seed", seed, least=0),
        )
        limit = None if num_pushes is None else as_integer("num_pushes", num_pushes, least=1)
        return simulation.run(limit, None if seconds is None else as_positive("seconds", seconds))


class _Timing(NamedTuple):
    step_seconds: float
    latency: float
    faults: CenterFaults


@dataclass(eq=False)
class _SimulatedWorker:
    """A simulated worker.

    Attributes:
        task: its number.
        step_seconds: virtual seconds of its local steps.
        random: generator of its gradients.
        request: the number of its last request; requests after a crash have new numbers.
        waits: whether it has no answer yet.
        kept: what it sends again: the message, None for a pull.
        values: its variables; after the last pull they are those of the center.
        pulled_at: pushes of the center at the last pull.
        num_answers: answers to pushes that were applied.
    """

    task: int
    step_seconds: float
    random: np.random.Generator
    request: int = 0
    waits: bool = False
    kept: Values | None = None
    values: Values = field(default_factory=dict)
    pulled_at: int = 0
    num_answers: int = 0


class _Simulation:
    """The events of a simulation; see ``simulate_center``."""

    def __init__(  # noqa: PLR0913  # those of simulate_center
        self,
        state: CenterState,
        start: Values,
        gradient: GradientFunction,
        timing: _Timing,
        num_workers: int,
        period: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._state, self._gradient, self._timing = state, gradient, timing
        self._period, self._lr = period, as_positive("learning_rate", learning_rate)
        self._inner: Optimizer = GradientDescentOptimizer(learning_rate)
        self._random = np.random.default_rng(seed)  # of faults and the network
        self._now, self._numbers = 0.0, count()
        self._events: list[tuple[float, int, str, int, Callable[[], None]]] = []
        from hashlib import sha256  # as numpy.random, it takes 20 ms to import

        self._log = sha256()
        shares = np.linspace(0, 1, num_workers)
        self._workers = [
            _SimulatedWorker(
                task,
                timing.step_seconds * timing.faults.slowest ** float(share),
                np.random.default_rng([seed, task]),
            )
            for task, share in enumerate(shares)
        ]
        device = state.devices[0]
        self._locals = {name: Variable(value, name, device=device) for name, value in start.items()}
        self._centers = {var: state.variable_for(name, var) for name, var in self._locals.items()}
        # All pushes use this memory in turn.
        self._sums = {var: (device.empty(var.shape, var.dtype),) for var in self._centers}
        # Task -> the number of its last push, and whether it was applied; None: it waits.
        self._answers: dict[int, tuple[int, bool | None]] = {}
        self._last_push: Any = None  # its plan, which the next push uses again
        # The present round, and a push that waits for it.
        self._waiting: list[tuple[Round, Callable[[], object]]] = []
        self._applied = Counter[int]()
        self._num_dropped = 0
        state.clock = lambda: self._now
        state.expect(num_workers)
        state.join(self._inner)

    def run(self, num_pushes: int | None, seconds: float | None) -> CenterRun:
        """Runs all events until the limits are reached."""
        self._limit, self._num_left = num_pushes, len(self._workers)
        registry = self._state.registry
        for worker in self._workers:
            registry.begin(worker.task)
            self._ask(worker, None)
        while self._events:
            when, _, what, task, call = heapq.heappop(self._events)
            if seconds is not None and when > seconds:
                self._now = seconds
                break
            if not self._num_left:
                break
            self._now = when
            self._log.update(f"{when!r} {what} {task};".encode())
            call()
        values = {name: var.numpy() for name, var in self._state.variables.items()}
        for value in values.values():
            self._log.update(value.tobytes())
        of_workers = range(len(self._workers))
        progress, total = self._state.progress, self._applied.total()
        return CenterRun(
            values,
            self._now,
            total * self._period,
            total,
            self._num_dropped,
            total if self._state.options.rule is None else progress.num_updates,
            [self._applied[task] for task in of_workers],
            [worker.num_answers for worker in self._workers],
            self._log.hexdigest(),
        )

    def _after(self, seconds: float, what: str, task: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), what, task, call))

    # -- the network ------------------------------------------------------------------------------

    def _send(self, what: str, task: int, call: Callable[[], None]) -> None:
        """Delivers a message from or to a worker: once, twice, late or never."""
        faults, latency = self._timing.faults, self._timing.latency
        lost, late, repeated, *delays = self._random.random(5).tolist()
        share = (task + 0.5) / len(self._workers)
        for begin, end, cut in faults.partitions:
            if begin <= self._now < end and share < cut:
                return
        if lost < faults.lost:
            return
        delay = 2 * latency * delays[0] + faults.late_seconds * (late < faults.late)
        self._after(delay, what, task, call)
        if repeated < faults.repeated:
            self._after(delay + 2 * latency * delays[1], f"{what} again", task, call)

    # -- a worker ---------------------------------------------------------------------------------

    def _ask(self, worker: _SimulatedWorker, message: Values | None) -> None:
        """Sends a push, or a pull if there is no message, until an answer arrives."""
        worker.request += 1
        worker.waits, worker.kept = True, message
        self._try(worker, worker.request)

    def _try(self, worker: _SimulatedWorker, request: int) -> None:
        if not worker.waits or worker.request != request:
            return
        arguments = worker, request, worker.kept, worker.pulled_at
        self._send("request", worker.task, partial(self._serve, *arguments))
        again = 100 * self._timing.latency + worker.step_seconds
        self._after(again, "timeout", worker.task, partial(self._try, worker, request))

    def _receive(
        self, worker: _SimulatedWorker, request: int, values: Values, pulled_at: int, is_push: bool
    ) -> None:
        """Handles an answer: begins the next period."""
        if not worker.waits or worker.request != request:
            return
        worker.waits = False
        worker.values, worker.pulled_at = values, pulled_at
        worker.num_answers += is_push
        if worker.num_answers == self._limit:
            self._num_left -= 1
            self._state.registry.end(worker.task)
            self._look_at_round()
            return
        seconds = self._period * worker.step_seconds
        crashes, moment = self._random.random(2).tolist()
        if crashes < self._timing.faults.crashes:  # in the period, or while it waits
            crash = partial(self._crash, worker, worker.num_answers, request)
            self._after(1.5 * seconds * moment, "crash", worker.task, crash)
        compute = partial(self._compute, worker, request)
        self._after(seconds, "period", worker.task, compute)

    def _crash(self, worker: _SimulatedWorker, num_answers: int, request: int) -> None:
        if worker.num_answers != num_answers or worker.request > request + 1:
            return  # it has ended its period already
        worker.request += 1  # answers to the old request are ignored
        worker.waits = False
        restart = self._timing.faults.restart_seconds
        self._after(restart, "restart", worker.task, partial(self._ask, worker, None))

    def _compute(self, worker: _SimulatedWorker, request: int) -> None:
        """Makes the local steps of a period, and pushes."""
        if worker.waits or worker.request != request:
            return
        values = {name: value.copy() for name, value in worker.values.items()}
        sums = {name: np.zeros_like(value) for name, value in values.items()}
        for _ in range(self._period):
            for name, grad in self._gradient(values, worker.task, worker.random).items():
                sums[name] += grad
                values[name] -= self._lr * np.asarray(grad, values[name].dtype)
        if self._state.options.push == "delta":
            sums = {name: worker.values[name] - value for name, value in values.items()}
        self._ask(worker, sums)

    # -- the center -------------------------------------------------------------------------------

    def _serve(
        self, worker: _SimulatedWorker, request: int, message: Values | None, pulled_at: int
    ) -> None:
        """Handles a request at the center; a repeated push is not applied again."""
        last, is_applied = self._answers.get(worker.task, (0, False))
        if request < last or (request == last and is_applied is None):
            return
        if message is None or request == last:
            self._answer(worker, request, is_push=message is not None and bool(is_applied))
            return
        self._answers[worker.task] = request, None
        variables = WorkerVariables()
        variables.centers, variables.pulled_at = self._centers, pulled_at
        variables.sums, variables.last_push = self._sums, self._last_push
        for var, (total,) in self._sums.items():
            total.device.upload(np.asarray(message[var.name], var.dtype), out=total)
        then = partial(self._end_push, worker, request)
        scalars = self._inner._next_update(())[0]
        push = partial(
            self._state.try_push,
            self._inner, variables, _CONFIG, scalars, float(self._period), then,
        )  # fmt: skip
        if (known := push()) is not None:
            self._waiting.append((known, push))
            self._look_at_round()
        self._last_push = variables.last_push

    def _end_push(self, worker: _SimulatedWorker, request: int, is_applied: bool) -> None:
        self._applied[worker.task] += is_applied
        self._num_dropped += not is_applied
        if self._answers[worker.task][0] == request:  # else it has pushed again
            self._answers[worker.task] = request, is_applied
        self._log.update(f"{'applied' if is_applied else 'dropped'} {worker.task};".encode())
        self._answer(worker, request, is_push=is_applied)

    def _answer(self, worker: _SimulatedWorker, request: int, *, is_push: bool) -> None:
        values = {name: var.numpy() for name, var in self._state.variables.items()}
        pulled_at = self._state.progress.num_pushes
        receive = partial(self._receive, worker, request, values, pulled_at, is_push)
        self._send("answer", worker.task, receive)

    def _look_at_round(self) -> None:
        """Applies the round if it is due; otherwise looks again when its grace has passed."""
        if not self._waiting:
            return
        (known, _), *_ = self._waiting
        seconds = self._state.seconds_left(known)
        if seconds is None:
            return
        if seconds > 0:
            self._after(seconds, "grace", -1, self._look_at_round)
            return
        self._state.ready_round(known, self._inner, _CONFIG)()
        waiting, self._waiting = self._waiting, []
        for _, push in waiting:
            push()
