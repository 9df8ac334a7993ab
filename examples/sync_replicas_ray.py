"""Trains on handwritten digits with backup workers, as ``sync_replicas.py``, in processes of Ray.

The chief is this process, each worker a task of Ray. They share two actors:

* The ``Board`` has the newest weights and their step. A worker waits there for weights that it has
  not used yet, computes one gradient, and applies it with the step of the weights.
* The ``AccumulatorSet`` adds the gradients of its own step and drops older ones. The chief waits
  there for ``--replicas-to-aggregate`` gradients, takes their mean, updates the weights, and gives
  them to the board.

So no update waits for a straggler: the gradient of a late worker is dropped, and the worker
continues with the newest weights. If the process of a worker is killed, Ray starts it again.

``work``, ``lead`` and ``Board`` are the parts to copy. Records and report are those of
``sync_replicas.py``.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import ray
from agn_ray import gpus_of_a_worker
from command_line import Parser
from digits import Digits, accuracy, initial_weights, load, loss_and_gradients
from rich.progress import Progress
from sync_replicas import (
    BATCH_SIZE,
    EVALUATE_EVERY,
    MOMENTUM,
    Gradient,
    History,
    add_flags,
    read_options,
    report,
)

import gradreduce as gr

END = sys.maxsize  # the step at the end of the training
POLL_S = 1.0  # how often the chief looks for workers that have failed


@ray.remote(num_cpus=0)
class Board:
    """The newest weights and their step; each waiting call has its own thread."""

    def __init__(self) -> None:
        self._step, self._weights = -1, None
        self._changed = threading.Condition()

    def publish(self, step: int, weights: Any) -> None:
        """Replaces the weights; ``weights`` is a list with a reference to them, or empty."""
        with self._changed:
            self._step, self._weights = step, weights
            self._changed.notify_all()

    def newer_than(self, step: int) -> tuple[int, Any]:
        """Waits for weights of a later step; returns the newest, with their step."""
        with self._changed:
            self._changed.wait_for(lambda: self._step > step)
            return self._step, self._weights


def work(
    worker: int, board: Any, accumulators: gr.ray.AccumulatorSet, options: argparse.Namespace
) -> list[Gradient]:
    """Runs a worker until the end of the training; returns records of its gradients."""
    digits, rng = load(), np.random.default_rng([options.seed, worker])
    variables = [gr.Variable(each) for each in initial_weights(rng).values()]
    optimizer = gr.GradientDescentOptimizer(options.learning_rate)  # only computes gradients
    straggles = worker >= options.workers - options.stragglers
    gradients: list[Gradient] = []
    step, weights = ray.get(board.newer_than.remote(-1))
    while step < END:
        for variable, value in zip(variables, ray.get(weights[0]), strict=True):
            variable.assign(value)
        pick = rng.integers(len(digits.train_images), size=BATCH_SIZE)
        batch = digits.train_images[pick], digits.train_labels[pick]
        loss, grads = loss_and_gradients(optimizer, variables, *batch)
        held = straggles and len(gradients) % options.late_every == 0
        if held:  # until the others have made more updates
            ray.get(board.newer_than.remote(step + options.lag - 1))
        kept = accumulators.apply_grads(grads, step)
        gradients.append(Gradient(step, float(loss), held, kept))
        step, weights = ray.get(board.newer_than.remote(step))
    return gradients


def lead(
    variables: Sequence[gr.Variable],
    board: Any,
    take: Callable[[], dict[str, Any]],
    options: argparse.Namespace,
    after_step: Callable[[int], None],
) -> None:
    """Runs the chief, which makes all updates.

    Args:
        variables: the weights.
        board: gets them.
        take: waits for enough gradients; returns their means by name, in the order of variables.
        options: the flags.
        after_step: called with the number of updates, after each one.
    """
    optimizer = gr.MomentumOptimizer(options.learning_rate, MOMENTUM)
    for step in range(options.steps):
        weights = ray.put([variable.numpy() for variable in variables])
        board.publish.remote(step, [weights])  # in a list: only workers fetch the arrays
        optimizer.apply_gradients(zip(take().values(), variables, strict=True))
        after_step(step + 1)
    ray.get(board.publish.remote(END, []))


# The training ----------------------------------------------------------------------------------


def train(digits: Digits, options: argparse.Namespace) -> History:
    """Trains on a Ray cluster with ``options.workers`` tasks, and this process as the chief."""
    initial = initial_weights(np.random.default_rng(options.seed))
    variables = [gr.Variable(value, name) for name, value in initial.items()]
    specs = {name: (value.dtype, value.shape) for name, value in initial.items()}
    accuracies = []
    start = time.perf_counter()
    # A name of its own: two trainings on a cluster share nothing.
    shared_name = f"sync-replicas-{uuid.uuid4().hex[:8]}"
    with gr.ray.AccumulatorSet(specs, shared_name) as accumulators, Progress() as progress:
        bar = progress.add_task("training", total=options.steps)
        # A thread for each call that waits; a worker that was killed may have left one.
        board = Board.options(max_concurrency=4 * options.workers).remote()
        num_gpus = gpus_of_a_worker(options.workers)
        # No CPUs of their own: all workers have to start, also on a machine with fewer cores.
        remote = ray.remote(num_cpus=0, num_gpus=num_gpus, scheduling_strategy="SPREAD")(work)
        tasks = [remote.remote(i, board, accumulators, options) for i in range(options.workers)]

        def after_step(number: int) -> None:
            progress.advance(bar)
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                weights = [variable.numpy() for variable in variables]
                accuracies.append((number, accuracy(weights, digits)))

        take = partial(take_grads, accumulators, options.replicas_to_aggregate, tasks)
        lead(variables, board, take, options, after_step)
        return History(
            ray.get(tasks),
            accuracies,
            {variable.name: variable.numpy() for variable in variables},
            time.perf_counter() - start,
            accumulators.global_step,
            accumulators.num_dropped,
        )


def take_grads(
    accumulators: gr.ray.AccumulatorSet, num_required: int, tasks: Sequence[Any]
) -> dict[str, Any]:
    """Waits for enough gradients; returns their means, or raises the error of a worker."""
    while True:
        done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
        ray.get(done)
        with suppress(gr.errors.DeadlineExceededError):
            return accumulators.take_grads(num_required, timeout=POLL_S)


# The command line ------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1."""
    parser = Parser(__doc__)
    add_flags(parser, "number of processes", "sync_replicas_ray.png")
    options = read_options(parser, arguments)
    if options.replicas_to_aggregate > options.workers:
        parser.error(f"argument --replicas-to-aggregate: got {options.replicas_to_aggregate} for "
                     f"{options.workers} workers")  # fmt: skip
    was_initialized = ray.is_initialized()
    try:
        gr.ray.init(logging_level="warning")
        history = train(load(), options)
    finally:
        if not was_initialized:
            ray.shutdown()
    names = [f"process {number}" for number in range(options.workers)]
    return report(names, f"{options.workers} processes", history, options)


if __name__ == "__main__":
    sys.exit(main())
