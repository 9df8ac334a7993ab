"""Trains a small network on handwritten digits, data-parallel, with gradreduce.

Read ``train`` first: it shows every call that a training script needs. Each device computes the
gradients of its own images, on a GPU with CuPy. Under torchrun, mpiexec or srun each process has
its own devices. With ``--mode agn`` the devices train asynchronously: see ``agn_threads.py``, and
for ``--engine ray`` ``agn_ray.py``. ``digits.py`` has the network and its loss, in NumPy,
``report.py`` the report, and ``command_line.py`` the command line
(``python examples/train_digits.py --help``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import agn_threads
import numpy as np
from command_line import Parser, file, in_range, on_devices, one_of, placement
from digits import (
    MICRO_BATCH_SIZE,
    Digits,
    accuracy,
    initial_weights,
    load,
    loss_and_gradients,
    read_weights,
)
from report import History, conclude, per_step, print_table, save_picture, where
from rich.progress import track

import gradreduce as gr

# name -> a function from learning rate to optimizer, and its default learning rate
OPTIMIZERS: dict[str, tuple[Callable[[float], gr.Optimizer], float]] = {
    "sgd": (gr.GradientDescentOptimizer, 0.5),
    "momentum": (lambda lr: gr.MomentumOptimizer(lr, 0.9), 0.1),
    "adam": (gr.AdamOptimizer, 0.005),
}
EVALUATE_EVERY = 10  # steps
AGGREGATION = {
    "add_n": gr.AggregationMethod.ADD_N,
    "tree": gr.AggregationMethod.EXPERIMENTAL_TREE,
    "accumulate_n": gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
}


# The training ----------------------------------------------------------------------------------


def train(mesh: gr.Mesh, digits: Digits, options: argparse.Namespace) -> History:
    """Trains on every device of ``mesh``, with several micro-batches per device and step.

    Every process calls it. All processes draw the same images for all replicas, and each uses those
    of its own replicas. So the weights do not depend on the number of processes.
    """
    rng = np.random.default_rng(options.seed)
    variables = [
        gr.Variable(value, name, device=mesh)  # one copy on each device
        for name, value in initial_weights(rng).items()
    ]
    optimizer = make_optimizer(options)
    cross_device_ops = gr.AllReduceCrossDeviceOps(
        options.all_reduce, num_packs=options.num_packs, mesh=mesh
    )
    step = gr.SyncStep(
        variables,
        optimizer,
        cross_device_ops,
        aggregation_method=AGGREGATION[options.aggregation],
    )
    losses, accuracies = [], []
    shape = (mesh.num_replicas, options.micro_batches, MICRO_BATCH_SIZE)
    first = mesh.process_index * len(mesh)  # the number of this process's first replica
    start = time.perf_counter()
    with mesh.journal() as journal:
        for number in steps_of(options, mesh):
            picks = rng.integers(len(digits.train_images), size=shape)[first:]
            replicas = [
                replica_terms(i, optimizer, variables, digits, picks[i]) for i in range(len(mesh))
            ]
            # terms[replica][variable] is a list of micro-batch gradients. One call aggregates,
            # accumulates, packs, all-reduces and applies them.
            step([terms for _, terms in replicas])
            losses.append([np.mean([float(loss) for loss in of]) for of, _ in replicas])
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                accuracies.append((number, accuracy(read_weights(variables, 0), digits)))
    seconds = time.perf_counter() - start
    mean_losses = cross_device_ops.all_reduce([[of_replica] for of_replica in np.transpose(losses)])
    return History(
        {"all replicas": [float(loss) for loss in mean_losses[0][0]]},
        accuracies,
        {variable.name: variable.numpy() for variable in variables},
        seconds,
        per_step(journal, options.steps),
    )


def steps_of(options: argparse.Namespace, mesh: gr.Mesh) -> Iterable[int]:
    """Counts the steps, with a progress bar in the first process."""
    return track(range(1, options.steps + 1), "training", disable=mesh.process_index > 0)


def make_optimizer(options: argparse.Namespace) -> gr.Optimizer:
    """Creates the chosen optimizer, with its default learning rate if none was given."""
    make, default_lr = OPTIMIZERS[options.optimizer]
    return make(default_lr if options.learning_rate is None else options.learning_rate)


def replica_terms(
    replica: int,
    optimizer: gr.Optimizer,
    variables: Sequence[gr.Variable],
    digits: Digits,
    picks: np.ndarray,
) -> tuple[list[Any], list[list[Any]]]:
    """Computes one replica's losses, and its list of gradients for each variable.

    ``SyncStep`` sums the terms of a list, so each is divided by their number; it takes the mean
    over the replicas.

    Args:
        replica: its index.
        optimizer: computes the gradients.
        variables: the weights.
        digits: the data.
        picks: indices of training images, one row per micro-batch.
    """
    losses, rows = [], []
    with gr.replica(replica):  # reads this replica's copy of the weights
        for pick in picks:
            batch = digits.train_images[pick], digits.train_labels[pick]
            loss, gradients = loss_and_gradients(optimizer, variables, *batch, scale=1 / len(picks))
            losses.append(loss)
            rows.append(gradients)
    return losses, [list(terms) for terms in zip(*rows, strict=True)]


# The report ------------------------------------------------------------------------------------


def table_rows(mesh: gr.Mesh, history: History, options: argparse.Namespace) -> dict[str, str]:
    """Returns the rows of the result table."""
    num_steps = options.steps * len(history.losses)
    rows = {
        "devices": where(mesh),
        "aggregation": options.aggregation,
        "all-reduce": f"{options.all_reduce}, num_packs {options.num_packs}",
        "test accuracy": f"{history.accuracy:.4f}",
        "steps/s": f"{num_steps / history.seconds:.1f}",
        **{f"{name} per step": f"{count:.10g}" for name, count in history.per_step.items()},
    }
    if options.mode == "agn":  # the digest depends on the timing of the threads
        replicas = f"{options.workers}, each of {options.replicas} replicas"
        if options.engine == "ray":
            rows["devices"] += f", in each of {options.workers} processes"
        if options.replicas == 1:  # nothing is reduced
            del rows["all-reduce"]
        return {"workers": replicas, **rows, "pushes": str(history.num_pushes)}
    return {**rows, "digest of the weights": history.digest}


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--mode", "sync", *one_of("sync", "agn"), "synchronous training, or asynchronous "
         "workers that push once per period (AGN)")  # fmt: skip
    flag("--workers", 4, in_range(int, 1, 64), "1 to 64", "AGN: number of workers")
    flag("--engine", "threads", *one_of("threads", "ray"), "AGN: a worker is a thread, or a "
         "process that Ray starts")  # fmt: skip
    flag("--period", 10, in_range(int, 1, 10_000), "1 to 10000", "AGN: steps between two pushes")
    flag("--rule", "agn", *one_of("agn", *agn_threads.RULES), "AGN: how a push changes the center; "
         "agn: the mean gradient of its steps, by the optimizer")  # fmt: skip
    flag("--replicas", 1, in_range(int, 1, 64), "1 to 64", "AGN: devices per worker")
    flag("--devices", None, in_range(int, 1, 64), "1 to 64",
         "number of devices of each process; none: 4, or those of all AGN workers")  # fmt: skip
    flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
    flag("--placement", None, placement, "a number from 0 to 63 for each device, as 0,0,1,1",
         "the physical device of each device")  # fmt: skip
    flag("--kernels", "numpy", *one_of("numpy", "compiled"), "implementation for simulated devices")
    flag("--micro-batches", 4, in_range(int, 1, 64), "1 to 64", "gradients per device and step")
    flag("--aggregation", "add_n", *one_of(*AGGREGATION), "how micro-batch gradients are summed")
    flag("--all-reduce", "hierarchical_copy", *one_of("hierarchical_copy", "nccl"),
         "all-reduce algorithm")  # fmt: skip
    flag("--num-packs", 1, in_range(int, 0, 1000), "0 to 1000", "number of packs per all-reduce")
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "number of training steps")
    flag("--optimizer", "momentum", *one_of(*OPTIMIZERS), "optimizer")
    defaults = ", ".join(f"{lr} for {name}" for name, (_, lr) in OPTIMIZERS.items())
    flag("--learning-rate", None, in_range(float, 1e-6, 10), "1e-6 to 10",
         f"learning rate; none: {defaults}")  # fmt: skip
    flag(
        "--seed",
        0,
        in_range(int, 0, 2**32 - 1),
        "0 to 4294967295",
        "random seed; the same seed gives the same weights",
    )
    flag("--output", "train_digits.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    flag("--save-weights", None, file(".npz"), "a .npz file in a folder that exists",
         "file for the final weights")  # fmt: skip
    return parser


def read_options(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags and checks that they are consistent."""
    options = parser.parse_args(arguments)
    needed = options.workers * options.replicas if options.mode == "agn" else None
    if options.engine == "ray":  # each worker opens the devices of its own process
        needed = options.replicas
        if options.mode != "agn":
            parser.error("argument --engine: got 'ray' without --mode agn")
    if options.devices is None:
        options.devices = 4 if needed is None else needed
    if needed is not None and options.devices != needed:
        parser.error(f"argument --devices: got {options.devices} for {options.workers} workers of "
                     f"{options.replicas} replicas")  # fmt: skip
    if options.devices > 64:
        parser.error(f"argument --replicas: got {options.replicas} for each of {options.workers} "
                     "workers")  # fmt: skip
    return options


def train_agn_of(parser: Parser, options: argparse.Namespace) -> Callable[..., History]:
    """Returns the function that trains the workers of the chosen engine."""
    if options.engine == "threads":
        return agn_threads.train_agn
    try:
        import agn_ray
    except ModuleNotFoundError as error:
        hint = "pip install 'gradreduce[ray]' (in a clone: pip install '.[ray]')"
        parser.error(f"argument --engine: {error}: {hint}")
    return agn_ray.train_agn


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1 (in the first process)."""
    parser = make_parser()
    options = read_options(parser, arguments)

    train_agn = train_agn_of(parser, options)

    def run(mesh: gr.Mesh) -> History | None:
        if options.mode == "agn":
            if mesh.num_processes > 1:
                parser.error(f"argument --mode: got 'agn' in {mesh.num_processes} processes")
            make, method = partial(make_optimizer, options), AGGREGATION[options.aggregation]
            history = train_agn(mesh, load(), options, make, method)
        else:
            history = train(mesh, load(), options)
        if mesh.process_index > 0:  # the first one reports
            return None
        title = f"{options.steps} steps on handwritten digits"
        print_table(title, table_rows(mesh, history, options))
        return history

    history = on_devices(parser, options, run)
    if history is None:
        return 0
    save_picture(history, options.output)
    if options.save_weights is not None:
        np.savez(options.save_weights, **history.weights)
    return conclude(history.accuracy, options.output)


if __name__ == "__main__":
    sys.exit(main())
