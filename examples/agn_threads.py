"""Trains with accumulated gradient normalization (AGN), with one thread per worker.

Workers do not wait for each other: every ``--period`` steps a worker pushes the mean of its
gradients to the center and continues with the center's weights. A worker has one device, or several
replicas, whose gradients are all-reduced first. ``AGNWorker`` is the part to copy. ``agn_ray.py``
runs the same workers in processes of Ray.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from digits import (
    MICRO_BATCH_SIZE,
    Digits,
    accuracy,
    initial_weights,
    mean_loss,
    read_weights,
)
from report import History, per_step
from rich.progress import Progress

import gradreduce as gr

WAIT_S = 60  # for the other workers, at the start
# name -> a function from the number of workers to the rule of the center, for deltas
RULES: dict[str, Callable[[int], gr.center_rules.CenterRule]] = {
    "mean": lambda num_workers: gr.center_rules.Mean(1 / num_workers),
    "staleness-scaled": lambda num_workers: gr.center_rules.StalenessScaled(0.5, 0.1),
    "delayed-nesterov": lambda num_workers: gr.center_rules.DelayedNesterov(num_workers, 0.7, 0.6),
}


def rule_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of an ``AGNCenter`` for ``--rule``; none for AGN's own."""
    if options.rule == "agn":
        return {}
    return {"center_rule": RULES[options.rule](options.workers), "push": "delta"}


class AGNWorker:
    """A worker, with its own getter, inner optimizer and ``AGNOptimizer``.

    Args:
        index: of the worker.
        devices: of its replicas.
        center: shared by all workers, like ``global_step``.
        global_step: counts the pushes.
        inner: the optimizer for its own weights and the center's.
        options: the flags.
    """

    def __init__(
        self,
        index: int,
        devices: gr.Mesh,
        center: gr.AGNCenter,
        global_step: gr.Variable,
        inner: gr.Optimizer,
        options: argparse.Namespace,
    ) -> None:
        self.index, self.devices, self.global_step = index, devices, global_step
        self.options = options
        getter = gr.AGNCustomGetter(devices, center=center)
        initial = initial_weights(np.random.default_rng(options.seed))
        self.variables = [
            gr.get_variable(name, value, custom_getter=getter) for name, value in initial.items()
        ]
        self.center_variables = [getter.center_variable(variable) for variable in self.variables]
        self.optimizer = gr.AGNOptimizer(inner, options.workers, getter, options.period)
        self.optimizer.cross_device_ops = gr.AllReduceCrossDeviceOps(
            options.all_reduce, num_packs=options.num_packs, mesh=devices
        )
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []  # of the center; only for the first worker

    def train(
        self,
        digits: Digits,
        method: gr.AggregationMethod,
        advance: Callable[[], object] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains; runs in the worker's thread or process.

        Args:
            digits: the data.
            method: how the terms of a gradient are summed.
            advance: called after each step.
            is_over: called before each step; ends the training early if it returns True.
        """
        rng = np.random.default_rng([self.options.seed, self.index])
        shape = (len(self.devices), self.options.micro_batches, MICRO_BATCH_SIZE)
        hook = self.optimizer.make_session_run_hook(
            self.index == 0, self.index, wait_timeout=WAIT_S
        )
        with hook:  # waits for the other workers, and copies the center
            for number in range(1, self.options.steps + 1):
                if is_over():
                    return
                picks = rng.integers(len(digits.train_images), size=shape)
                replicas = [self.gradients(i, digits, pick, method) for i, pick in enumerate(picks)]
                self.losses.append(float(np.mean([loss for loss, _ in replicas])))
                gradients = [
                    gr.PerReplica(each, devices=self.devices.devices)
                    for each in zip(*(gradients for _, gradients in replicas), strict=True)
                ]
                pairs = zip(gradients, self.variables, strict=True)
                if self.optimizer.apply_gradients(pairs, self.global_step) and self.index == 0:
                    # The worker's weights are those of the center after its push.
                    pulled = read_weights(self.variables, 0)
                    self.accuracies.append((number, accuracy(pulled, digits)))
                advance()

    def gradients(
        self, replica: int, digits: Digits, picks: np.ndarray, method: gr.AggregationMethod
    ) -> tuple[float, list[Any]]:
        """Computes one replica's mean loss over its micro-batches, and the gradients."""
        found = []

        def losses() -> Iterator[Any]:  # each is differentiated before the next is computed
            for pick in picks:
                batch = digits.train_images[pick], digits.train_labels[pick]
                value = mean_loss(self.variables, *batch)
                found.append(gr.autodiff.stop_gradient(value))
                yield value

        with gr.replica(replica):  # reads this replica's copy of the weights
            pairs = self.optimizer.compute_gradients(
                losses, self.variables, aggregation_method=method, grad_loss=1 / len(picks)
            )
        return float(np.mean([float(loss) for loss in found])), [each for each, _ in pairs]


def train_agn(
    mesh: gr.Mesh,
    digits: Digits,
    options: argparse.Namespace,
    make_optimizer: Callable[[], gr.Optimizer],
    method: gr.AggregationMethod,
) -> History:
    """Trains with ``options.workers`` threads of ``options.replicas`` devices each."""
    # Its variables are distributed over all devices.
    center = gr.AGNCenter(mesh, **rule_of(options))
    global_step = gr.Variable(0, "global_step", trainable=False, device=mesh.devices[0])
    size, over = options.replicas, threading.Event()
    workers = [
        AGNWorker(
            i, mesh[i * size : (i + 1) * size], center, global_step, make_optimizer(), options
        )
        for i in range(options.workers)
    ]
    start = time.perf_counter()
    with mesh.journal() as journal, Progress() as progress:
        bars = [progress.add_task(f"worker {i}", total=options.steps) for i in range(len(workers))]
        threads = []
        try:
            for worker, bar in zip(workers, bars, strict=True):
                advance = partial(progress.advance, bar)
                work = partial(worker.train, digits, method, advance, over.is_set)
                threads.append(center.start_worker(worker.index, work))
            for thread in threads:
                thread.join()  # raises the exception that ended the worker
        finally:
            over.set()
            for thread in threads:
                with suppress(Exception):  # the first one is raised already
                    thread.join()
    weights = [variable.numpy() for variable in workers[0].center_variables]
    names = [variable.name for variable in workers[0].variables]
    last = options.steps, accuracy(weights, digits)
    return History(
        {f"worker {worker.index}": worker.losses for worker in workers},
        [*workers[0].accuracies, last],
        dict(zip(names, weights, strict=True)),
        time.perf_counter() - start,
        per_step(journal, options.steps * options.workers),
        int(global_step),
    )
