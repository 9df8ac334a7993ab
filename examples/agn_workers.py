"""Workers of the AGN study, simulated without threads by an event queue.

AGN is the library's. The methods to compare with are ``SumWorker`` and ``ElasticWorker``. With the
same seed all methods have the same initial weights, batches and schedule, so that they differ only
in what they push.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from digits import Digits, accuracy, initial_weights, mean_loss

import gradreduce as gr

LEARNING_RATE = 0.3  # of plain descent, for which TensorFlow's rule is the paper's
BATCH_SIZE = 16  # images
EVALUATE_EVERY = 100  # steps of all workers together
STEP_TIME = 0.5, 1.5  # shortest and longest time of a step
NUM_DEVICES = 4  # simulated; workers and center variables are spread over them


@dataclass(frozen=True)
class Case:
    """The settings of a training.

    Attributes:
        method: a key of ``METHODS``.
        num_workers: number of workers.
        period: steps of a worker between two pushes.
        num_steps: of all workers together.
        distance_scale: see ``gr.AGNOptimizer``.
        seed: of weights, batches and schedule.
    """

    method: str
    num_workers: int
    period: int
    num_steps: int
    distance_scale: float | None = None
    seed: int = 0


@dataclass
class Outcome:
    """The results of a training.

    Attributes:
        accuracies: pairs of a step and the center's test accuracy after it.
        staleness: for each push but a worker's first, the number of pushes by others since that
            worker's last pull.
        weights: the center's final weights.
    """

    accuracies: list[tuple[int, float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end."""
        return self.accuracies[-1][1]


class Worker(Protocol):
    """A worker that trains its own weights, and pushes to the center once per period."""

    def step(self, images: np.ndarray, labels: np.ndarray) -> bool:
        """Trains on one batch; returns whether it communicated."""


class Center(Protocol):
    """The weights that all workers share.

    Attributes:
        global_step: counts the communications.
    """

    global_step: gr.Variable

    def worker(self, index: int, device: gr.Device) -> Worker:
        """Creates a worker."""

    def weights(self) -> list[np.ndarray]:
        """Returns the current weights."""


# AGN, by the library -----------------------------------------------------------------------------


class AGN:
    """Worker: ``a += g; w -= rate * g``. Center: ``c -= rate * a / period``; pull."""

    def __init__(self, mesh: gr.Mesh, initial: dict[str, np.ndarray], case: Case) -> None:
        self._center, self._initial, self._case = gr.AGNCenter(mesh), initial, case
        self.global_step = new_counter(mesh)

    def worker(self, index: int, device: gr.Device) -> Worker:
        case, getter = self._case, gr.AGNCustomGetter(device, center=self._center)
        variables = [
            gr.get_variable(name, value, custom_getter=getter)
            for name, value in self._initial.items()
        ]
        optimizer = gr.AGNOptimizer(
            gr.GradientDescentOptimizer(LEARNING_RATE), case.num_workers, getter, case.period,
            distance_scale=case.distance_scale,
        )  # fmt: skip
        optimizer.get_init_op(index)()
        return AGNWorker(optimizer, variables, self.global_step)

    def weights(self) -> list[np.ndarray]:
        found = self._center.values()
        return [found[name] for name in self._initial]


class AGNWorker:
    def __init__(
        self, optimizer: gr.AGNOptimizer, variables: Sequence[gr.Variable], global_step: gr.Variable
    ) -> None:
        self._optimizer, self._variables, self._global_step = optimizer, variables, global_step

    def step(self, images: np.ndarray, labels: np.ndarray) -> bool:
        return self._optimizer.minimize(
            lambda: mean_loss(self._variables, images, labels), self._global_step, self._variables
        )


# What it is compared with ------------------------------------------------------------------------


class ParameterServer:
    """The center for the other methods."""

    def __init__(
        self,
        mesh: gr.Mesh,
        initial: dict[str, np.ndarray],
        case: Case,
        make_worker: Callable[[ParameterServer, gr.Device], Worker],
    ) -> None:
        self.case, self._make_worker = case, make_worker
        self.variables = [gr.Variable(each, device=mesh.devices[0]) for each in initial.values()]
        self.global_step = new_counter(mesh)

    def worker(self, index: int, device: gr.Device) -> Worker:
        return self._make_worker(self, device)

    def weights(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]


class SteppingWorker:
    """``w -= rate * g``, with weights of its own; calls ``communicate`` once per period."""

    def __init__(self, server: ParameterServer, device: gr.Device) -> None:
        self.server, self.num_steps = server, 0
        self.variables = [gr.Variable(each.numpy(), device=device) for each in server.variables]
        self.optimizer = gr.GradientDescentOptimizer(LEARNING_RATE)

    def step(self, images: np.ndarray, labels: np.ndarray) -> bool:
        pairs = self.optimizer.compute_gradients(
            lambda: mean_loss(self.variables, images, labels), self.variables
        )
        self.optimizer.apply_gradients(pairs)
        self.add([gradient for gradient, _ in pairs])
        self.num_steps += 1
        if self.num_steps % self.server.case.period:
            return False
        self.communicate()
        self.server.global_step.assign_add(1)
        return True

    def add(self, gradients: Sequence[Any]) -> None:
        """Called with the gradients of each step."""

    def communicate(self) -> None:
        raise NotImplementedError


class SumWorker(SteppingWorker):
    """Pushes the scaled sum of a period's gradients: ``c -= rate * a / divisor``; pull.

    Args:
        divisor: computed from the period and the staleness of a push.
    """

    def __init__(
        self, server: ParameterServer, device: gr.Device, divisor: Callable[[int, int], int]
    ) -> None:
        super().__init__(server, device)
        self._divisor = divisor
        self._sums: list[np.ndarray] | None = None
        self._pulled_at = int(server.global_step)

    def add(self, gradients: Sequence[Any]) -> None:
        arrays = [np.asarray(each) for each in gradients]
        if self._sums is None:
            self._sums = arrays
        else:
            self._sums = [total + each for total, each in zip(self._sums, arrays, strict=True)]

    def communicate(self) -> None:
        now = int(self.server.global_step)
        divisor = self._divisor(self.server.case.period, now - self._pulled_at)
        pushed = [total / np.float32(divisor) for total in self._sums or []]
        self.optimizer.apply_gradients(zip(pushed, self.server.variables, strict=True))
        for own, center in zip(self.variables, self.server.variables, strict=True):
            own.assign(center)
        self._sums, self._pulled_at = None, now + 1


class ElasticWorker(SteppingWorker):
    """AEASGD (arXiv 1412.6651): ``e = alpha * (w - c); w -= e; c += e``."""

    def communicate(self) -> None:
        alpha = np.float32(0.9 / self.server.case.num_workers)
        for own, center in zip(self.variables, self.server.variables, strict=True):
            moved = alpha * (own.numpy() - center.numpy())
            center.assign_add(moved)
            own.assign(own.numpy() - moved)


def new_counter(mesh: gr.Mesh) -> gr.Variable:
    return gr.Variable(0, "global_step", trainable=False, device=mesh.devices[0])


def _pushing(divisor: Callable[[int, int], int]) -> Callable[..., Center]:
    return partial(ParameterServer, make_worker=partial(SumWorker, divisor=divisor))


METHODS: dict[str, Callable[[gr.Mesh, dict[str, np.ndarray], Case], Center]] = {
    "agn": AGN,
    # DOWNPOUR pushes after every step; with a longer period it is accumulation, not normalised.
    "downpour": _pushing(lambda period, staleness: 1),
    "dynsgd": _pushing(lambda period, staleness: staleness + 1),  # arXiv 1511.05950
    "by hand": _pushing(lambda period, staleness: period),  # AGN again, for the tests
    "aeasgd": partial(ParameterServer, make_worker=ElasticWorker),
}


# The schedule ------------------------------------------------------------------------------------


def schedule(case: Case) -> Iterator[int]:
    """Yields the worker whose step ends next; steps take random times."""
    rng = np.random.default_rng([case.seed, 1])
    ends = [(rng.uniform(*STEP_TIME), worker) for worker in range(case.num_workers)]
    heapq.heapify(ends)
    while True:
        now, worker = ends[0]
        yield worker
        heapq.heapreplace(ends, (now + rng.uniform(*STEP_TIME), worker))


def run(case: Case, digits: Digits) -> Outcome:
    """Trains on simulated devices; equal cases give bit-identical outcomes."""
    outcome = Outcome()
    batches = np.random.default_rng([case.seed, 2])
    initial = initial_weights(np.random.default_rng(case.seed))
    with gr.open_mesh(NUM_DEVICES, backend="sim") as mesh:
        center = METHODS[case.method](mesh, initial, case)
        workers = [center.worker(i, mesh.devices[i % len(mesh)]) for i in range(case.num_workers)]
        pulled_at: dict[int, int] = {}  # what the global step was after a worker's last push
        for number, index in zip(range(1, case.num_steps + 1), schedule(case), strict=False):
            pick = batches.integers(len(digits.train_images), size=BATCH_SIZE)
            if workers[index].step(digits.train_images[pick], digits.train_labels[pick]):
                now = int(center.global_step)
                if index in pulled_at:
                    outcome.staleness.append(now - 1 - pulled_at[index])
                pulled_at[index] = now
            if number % EVALUATE_EVERY == 0 or number == case.num_steps:
                outcome.accuracies.append((number, accuracy(center.weights(), digits)))
        outcome.weights = center.weights()
    return outcome
