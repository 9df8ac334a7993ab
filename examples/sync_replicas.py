"""Trains on handwritten digits with backup workers, as TensorFlow's SyncReplicasOptimizer did.

Synchronous training is as fast as its slowest worker: each update waits for the gradients of all
workers. With backup workers it waits only for the first ``replicas_to_aggregate`` gradients. Later
gradients are stale and dropped, and their workers continue with the new weights.

The protocol:

* Each variable has a ``ConditionalAccumulator``, whose step is the global step. It sums the
  gradients whose local step is not below its own, and drops the others.
* A worker reads the weights, applies its gradients with its local step, and waits for a token. The
  token's number is its next local step; the first is the global step at the start.
* The chief waits for enough gradients, takes their mean, which increments the step of the
  accumulators, updates the variables, and puts tokens with the new global step in a queue: one per
  worker, or one per gradient of an update if that is more.

So a gradient is used at the step at which it was computed, or dropped. As in TensorFlow, gradients
of workers that are on time are dropped too, if enough others came first, or if the worker's token
waited in the queue until its step was over. In TensorFlow each variable drops gradients separately;
here all gradients of a worker are accepted or dropped together.

The workers are threads, each with its own logical device. A straggler delays some of its gradients
until the others have made ``--lag`` more updates (an event, not a clock), so all of them are stale.

Read ``SyncReplicas``, ``work`` and ``lead`` first. ``sync_replicas_ray.py`` has workers in
processes, with a simpler protocol. The network is in ``digits.py``, the report in
``report.py``, the command line in ``command_line.py``.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
from command_line import Parser, file, in_range, on_devices, one_of, placement
from digits import Digits, accuracy, initial_weights, load, loss_and_gradients, read_weights
from matplotlib.figure import Figure
from report import add_legends, conclude, draw_accuracies, draw_losses, print_table, where
from rich.progress import Progress
from rich.table import Table

import gradreduce as gr

MOMENTUM = 0.9
EVALUATE_EVERY = 10  # steps
BATCH_SIZE = 32  # images of one gradient


# The protocol ----------------------------------------------------------------------------------


def grad_accumulators(
    variables: Sequence[gr.Variable], cross_device_ops: gr.AllReduceCrossDeviceOps
) -> list[gr.ConditionalAccumulator]:
    """Returns an accumulator per variable, shared by all workers.

    As in TensorFlow, each worker creates them, and equal names refer to the same accumulator.
    """
    return [
        gr.ConditionalAccumulator(
            variable.dtype,
            variable.shape,
            shared_name=f"{variable.name}/grad_accum",
            device=variable.devices[0].mesh,
            cross_device_ops=cross_device_ops,
        )
        for variable in variables
    ]


class SyncReplicas:
    """State shared by the chief and the workers; leaving the context ends all of them.

    Args:
        variables: mirrored, on the devices of one mesh.
        optimizer: applies the mean gradients.
        global_step: a Variable that counts the updates; its value is the first step.
        replicas_to_aggregate: gradients in an update.
        total_num_replicas: workers; those beyond ``replicas_to_aggregate`` are the backup.
    """

    def __init__(
        self,
        variables: Sequence[gr.Variable],
        optimizer: gr.Optimizer,
        global_step: gr.Variable,
        replicas_to_aggregate: int,
        total_num_replicas: int,
    ) -> None:
        self.variables = variables
        self.optimizer = optimizer
        self.global_step = global_step
        self.replicas_to_aggregate = replicas_to_aggregate
        self.total_num_replicas = total_num_replicas
        self.first_step = self.step = int(global_step)
        self.over = False
        self._moved = threading.Condition()
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # Shared by all accumulators, so that their sums are reduced together.
        self.cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy")
        self.accumulators = grad_accumulators(variables, self.cross_device_ops)
        for accumulator in self.accumulators:
            accumulator.set_global_step(global_step)
        # The first gradients of each worker need no token; if more are required, add tokens.
        self.hand_out_tokens(replicas_to_aggregate - total_num_replicas)

    def update(self) -> None:
        """Waits for enough gradients and updates the variables by their mean."""
        means = gr.take_grads(self.accumulators, self.replicas_to_aggregate)
        pairs = zip(means, self.variables, strict=True)
        with self._moved:
            self.optimizer.apply_gradients(pairs, self.global_step)
            self.step = int(self.global_step)
            self._moved.notify_all()

    def pull(self, local: Sequence[gr.Variable]) -> None:
        """Copies the weights to a worker's variables, not during an update."""
        with self._moved:
            for own, variable in zip(local, self.variables, strict=True):
                own.assign(variable)

    def hand_out_tokens(self, num_tokens: int) -> None:
        """Puts tokens of the current step in the queue."""
        for _ in range(num_tokens):
            self._tokens.put(self.step)

    def next_step(self) -> int | None:
        """Waits for a token; returns the next local step, or None after the training."""
        token = self._tokens.get()
        return None if self.over else token

    def await_step(self, step: int) -> None:
        """Waits until the global step reaches ``step``, or the training is over."""
        with self._moved:
            self._moved.wait_for(lambda: self.over or self.step >= step)

    def end(self) -> None:
        """Ends the training and wakes all waiting threads."""
        with self._moved:
            self.over = True
            self._moved.notify_all()
        for _ in range(self.total_num_replicas):
            self._tokens.put(None)

    def __enter__(self) -> SyncReplicas:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        for accumulator in self.accumulators:
            accumulator.close()  # raises CancelledError in a waiting chief


@dataclass(frozen=True)
class Gradient:
    """Record of a worker's gradient: its step, loss, and whether it was accepted."""

    local_step: int
    loss: float
    held: bool
    kept: bool


def work(
    worker: int, sync: SyncReplicas, digits: Digits, options: argparse.Namespace
) -> list[Gradient]:
    """Runs a worker until there are no more tokens; returns records of its gradients.

    Each worker has its own random generator, so its batches do not depend on other threads.
    """
    accumulators = grad_accumulators(sync.variables, sync.cross_device_ops)
    local = [
        gr.Variable(np.zeros(each.shape), dtype=each.dtype, device=each.devices[worker])
        for each in sync.variables
    ]
    rng = np.random.default_rng([options.seed, worker])
    straggles = worker >= options.workers - options.stragglers
    gradients: list[Gradient] = []
    for local_step in itertools.chain([sync.first_step], iter(sync.next_step, None)):
        # If the weights are of a later step, this gradient is stale and will be dropped.
        sync.pull(local)
        pick = rng.integers(len(digits.train_images), size=BATCH_SIZE)
        batch = digits.train_images[pick], digits.train_labels[pick]
        loss, grads = loss_and_gradients(sync.optimizer, local, *batch)
        held = straggles and len(gradients) % options.late_every == 0
        if held:
            sync.await_step(local_step + options.lag)
        with gr.replica(worker):  # the arrays are added on this worker's device
            kept = gr.apply_grads(accumulators, grads, local_step)
        gradients.append(Gradient(local_step, float(loss), held, kept))
    return gradients


def lead(
    sync: SyncReplicas, digits: Digits, num_steps: int, advance: Callable[[], None]
) -> list[tuple[int, float]]:
    """Runs the chief, which makes all updates; returns pairs of step and test accuracy."""
    accuracies = []
    num_tokens = max(sync.total_num_replicas, sync.replicas_to_aggregate)
    try:
        for number in range(1, num_steps + 1):
            sync.update()
            if number < num_steps:
                sync.hand_out_tokens(num_tokens)
            if number % EVALUATE_EVERY == 0 or number == num_steps:
                accuracies.append((number, accuracy(read_weights(sync.variables, 0), digits)))
            advance()
    finally:
        sync.end()
    return accuracies


# The training ----------------------------------------------------------------------------------


@dataclass
class History:
    """The results of a training run.

    Attributes:
        gradients: records of each worker's gradients, in order.
        accuracies: pairs of a step and the test accuracy after it.
        weights: the final ones, by name.
        seconds: of the whole training.
        global_step: at the end.
        num_dropped: stale gradients, counted by the accumulators.
    """

    gradients: list[list[Gradient]]
    accuracies: list[tuple[int, float]]
    weights: dict[str, np.ndarray]
    seconds: float
    global_step: int
    num_dropped: int

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step over the accepted gradients."""
        totals = np.zeros((2, self.global_step))
        for each in itertools.chain(*self.gradients):
            totals[:, each.local_step] += each.kept * each.loss, each.kept
        return list(totals[0] / totals[1])


def train(mesh: gr.Mesh, digits: Digits, options: argparse.Namespace) -> History:
    """Trains with one worker on each device of ``mesh``, and a chief."""
    initial = initial_weights(np.random.default_rng(options.seed))
    variables = [gr.Variable(value, name, device=mesh) for name, value in initial.items()]
    global_step = gr.Variable(0, "global_step", trainable=False, device=mesh.devices[0])
    optimizer = gr.MomentumOptimizer(options.learning_rate, MOMENTUM)
    replicas = options.replicas_to_aggregate, options.workers
    sync = SyncReplicas(variables, optimizer, global_step, *replicas)
    start = time.perf_counter()
    # On any exit, Ctrl-C too: first wake all waiting threads, then join them.
    with Progress() as progress, ThreadPoolExecutor(options.workers + 1) as pool, sync:
        bar = progress.add_task("training", total=options.steps)
        workers = [pool.submit(work, i, sync, digits, options) for i in range(options.workers)]
        chief = pool.submit(lead, sync, digits, options.steps, lambda: progress.advance(bar))
        join([chief, *workers])
    return History(
        [worker.result() for worker in workers],
        chief.result(),
        {variable.name: variable.numpy() for variable in variables},
        time.perf_counter() - start,
        int(global_step),
        sync.accumulators[0].num_dropped,
    )


def join(threads: Sequence[Future[Any]]) -> None:
    """Waits for all threads; raises the first error at once."""
    pending = set(threads)
    while pending:
        # With a timeout: Python may miss a Ctrl-C that comes just before the wait.
        done, pending = wait(pending, 0.5, FIRST_EXCEPTION)
        for thread in done:
            thread.result()


# The report ------------------------------------------------------------------------------------


def report(
    names: Sequence[str], workers: str, history: History, options: argparse.Namespace
) -> int:
    """Prints the results and saves the figure; returns the exit status.

    Args:
        names: where each worker has run.
        workers: where all of them have, in words.
        history: the results.
        options: the flags.
    """
    print_workers(names, history)
    print_table(f"{options.steps} steps on handwritten digits", {
        "workers": workers,
        **table_rows(history, options),
    })  # fmt: skip
    save_picture(history, options.output)
    return conclude(history.accuracies[-1][1], options.output)


def print_workers(names: Sequence[str], history: History) -> None:
    """Prints the number of accepted and dropped gradients of each worker."""
    table = Table(title="Gradients of each worker")
    for title in ("worker", "device", "accepted", "dropped", "delayed"):
        table.add_column(title, justify="right")
    for number, (name, gradients) in enumerate(zip(names, history.gradients, strict=True)):
        kept, held = sum(each.kept for each in gradients), sum(each.held for each in gradients)
        table.add_row(*map(str, (number, name, kept, len(gradients) - kept, held)))
    rich.print(table)


def table_rows(history: History, options: argparse.Namespace) -> dict[str, str]:
    """Returns the rows of the result table."""
    gradients = list(itertools.chain(*history.gradients))
    held = sum(each.held for each in gradients)
    return {
        "gradients per update": f"{options.replicas_to_aggregate} or more",
        "global step": str(history.global_step),
        "accepted": str(sum(each.kept for each in gradients)),
        "dropped": f"{history.num_dropped}, {held} of them delayed",
        "test accuracy": f"{history.accuracies[-1][1]:.4f}",
        "steps/s": f"{options.steps / history.seconds:.1f}",
    }


def save_picture(history: History, path: Path) -> None:
    """Saves a figure of loss, test accuracy, and each worker's gradients."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_losses(left, history.losses, "mean of an update")
    draw_accuracies(middle, history.accuracies, "chief")
    add_legends(left, middle)
    names = [str(number) for number in range(len(history.gradients))]
    bottom = np.zeros(len(names))
    outcomes = {
        "accepted": lambda each: each.kept,
        "dropped": lambda each: not each.kept and not each.held,
        "delayed, dropped": lambda each: not each.kept and each.held,
    }
    for label, is_one in outcomes.items():
        counts = [sum(map(is_one, worker)) for worker in history.gradients]
        right.bar(names, counts, bottom=bottom, label=label)
        bottom += counts
    right.set(title="Gradients", xlabel="worker", ylabel="number", ylim=(0, 1.4 * bottom.max()))
    right.legend()
    figure.savefig(path, dpi=120)


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    add_flags(parser, "number of threads, each with its own device", "sync_replicas.png")
    flag = parser.flag
    flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
    flag("--placement", None, placement, "a number from 0 to 63 for each worker, as 0,0,1,1,2",
         "the physical device of each worker")  # fmt: skip
    flag("--kernels", "numpy", *one_of("numpy", "compiled"), "implementation for simulated devices")
    return parser


def add_flags(parser: Parser, workers: str, output: str) -> None:
    """Adds the flags of workers in threads and in processes.

    Args:
        parser: gets the flags.
        workers: describes the number of workers.
        output: the name of the figure's file.
    """
    flag = parser.flag
    flag("--workers", 5, in_range(int, 1, 64), "1 to 64", workers)
    flag("--replicas-to-aggregate", None, in_range(int, 1, 64), "1 to 64",
         "gradients per update; none: one less than workers")  # fmt: skip
    flag("--stragglers", None, in_range(int, 0, 63), "0 to the number of backup workers",
         "workers that are sometimes late; none: one, if there is a backup")  # fmt: skip
    flag("--late-every", 4, in_range(int, 1, 10_000), "1 to 10000",
         "a straggler delays every n-th gradient")  # fmt: skip
    flag("--lag", 2, in_range(int, 1, 10_000), "1 to 10000",
         "updates by the others during a delay")  # fmt: skip
    flag("--steps", 400, in_range(int, 1, 10_000), "1 to 10000", "number of training steps")
    flag("--learning-rate", 0.1, in_range(float, 1e-6, 10), "1e-6 to 10", "learning rate")
    flag(
        "--seed",
        0,
        in_range(int, 0, 2**32 - 1),
        "0 to 4294967295",
        "random seed of weights and batches",
    )
    flag("--output", output, file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip


def read_options(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags, computes defaults, and checks that they are consistent."""
    options = parser.parse_args(arguments)
    options.devices = options.workers
    if options.replicas_to_aggregate is None:
        options.replicas_to_aggregate = max(1, options.workers - 1)
    backup = max(0, options.workers - options.replicas_to_aggregate)
    if options.stragglers is None:
        options.stragglers = min(1, backup)
    if options.stragglers > backup:
        parser.error(f"argument --stragglers: got {options.stragglers} for {backup} backup "
                     "workers; each straggler needs a backup worker")  # fmt: skip
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1."""
    parser = make_parser()
    options = read_options(parser, arguments)

    def run(mesh: gr.Mesh) -> tuple[list[str], str, History]:
        history = train(mesh, load(), options)
        return [device.name for device in mesh.devices], where(mesh), history

    return report(*on_devices(parser, options, run), options)


if __name__ == "__main__":
    sys.exit(main())
