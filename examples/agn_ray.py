"""Trains with accumulated gradient normalization (AGN), with one process of Ray per worker.

A worker is the ``AGNWorker`` of ``agn_threads.py``. The center is an actor of Ray, which workers on
any machine of the cluster find by its name. ``work`` is the part to copy.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import rich
from agn_threads import AGNWorker, rule_of
from command_line import open_devices
from digits import Digits, accuracy, initial_weights, load
from report import History, per_step
from rich.live import Live
from rich.table import Table

import gradreduce as gr

REFRESH_S = 0.25


@dataclass(frozen=True)
class Result:
    """What a worker returns: see ``AGNWorker`` and ``History``."""

    losses: list[float]
    accuracies: list[tuple[int, float]]
    num_pushes: int
    per_step: dict[str, float]


def work(
    index: int,
    options: argparse.Namespace,
    name: str,
    make_optimizer: Callable[[], gr.Optimizer],
    method: gr.AggregationMethod,
) -> Result:
    """Runs a worker, in a process of its own.

    Args:
        index: of the worker.
        options: the flags.
        name: of the center.
        make_optimizer: returns the optimizer for its own weights and the center's.
        method: how the terms of a gradient are summed.
    """
    with open_devices(options) as mesh:
        worker_name = f"worker {index}"
        center = gr.ray.AGNCenter(name, mesh=mesh, worker=worker_name, **rule_of(options))
        num_pushes = gr.Variable(0, "global_step", trainable=False, device=mesh.devices[0])
        worker = AGNWorker(index, mesh, center, num_pushes, make_optimizer(), options)
        with mesh.journal() as journal:
            worker.train(load(), method)
        counts = per_step(journal, options.steps * options.workers)
        return Result(worker.losses, worker.accuracies, int(num_pushes), counts)


def train_agn(
    mesh: gr.Mesh,
    digits: Digits,
    options: argparse.Namespace,
    make_optimizer: Callable[[], gr.Optimizer],
    method: gr.AggregationMethod,
) -> History:
    """Trains with ``options.workers`` processes of ``options.replicas`` devices each.

    Joins a Ray cluster if there is one, or starts one, which ends with the training.
    """
    options = argparse.Namespace(**{**vars(options), "backend": mesh.backend})
    was_initialized = ray.is_initialized()
    try:
        gr.ray.init(logging_level="warning")
        name = f"digits-{uuid.uuid4().hex[:8]}"  # two trainings on a cluster share no center
        # At the end, also after an error, workers that still train get a CancelledError.
        with closing(gr.ray.AGNCenter(name, mesh=mesh, **rule_of(options))) as center:
            return train_on(center, digits, options, (name, make_optimizer, method))
    finally:
        if not was_initialized:
            ray.shutdown()


def train_on(
    center: gr.ray.AGNCenter,
    digits: Digits,
    options: argparse.Namespace,
    arguments: tuple[Any, ...],
) -> History:
    """Starts the workers of a center and waits for them; ``arguments`` are those of ``work``."""
    start = time.perf_counter()
    # No CPUs of their own: all workers have to start, also on a machine with fewer cores.
    num_gpus = 0 if options.backend == "sim" else gpus_of_a_worker(options.workers)
    remote = ray.remote(num_cpus=0, num_gpus=num_gpus, scheduling_strategy="SPREAD")(work)
    tasks = [remote.remote(i, options, *arguments) for i in range(options.workers)]
    watch(center, tasks, options.period)
    results = ray.get(tasks)
    seconds = time.perf_counter() - start
    state = center.state_dict()["variables"]
    weights = {name: state[name] for name in initial_weights(np.random.default_rng(0))}
    totals: Counter[str] = Counter()
    for each in results:
        totals.update(each.per_step)
    return History(
        {f"worker {index}": each.losses for index, each in enumerate(results)},
        [*results[0].accuracies, (options.steps, accuracy([*weights.values()], digits))],
        weights,
        seconds,
        dict(totals),
        sum(each.num_pushes for each in results),
    )


def gpus_of_a_worker(num_workers: int) -> float:
    """Returns the GPUs of each worker: one, or a part of one if there are fewer than workers."""
    return min(1.0, ray.cluster_resources().get("GPU", 0) / num_workers)


def watch(center: gr.ray.AGNCenter, tasks: Sequence[Any], period: int) -> None:
    """Shows the workers until all have ended; raises the error of one that fails."""
    start, pending = time.perf_counter(), list(tasks)
    with Live(refresh_per_second=1 / REFRESH_S, transient=True) as live:
        while pending:
            done, pending = ray.wait(pending, timeout=REFRESH_S)
            ray.get(done)
            live.update(table_of(center.workers(), period, time.perf_counter() - start))
    rich.print(live.renderable)


def table_of(workers: Sequence[gr.ray.WorkerInfo], period: int, seconds: float) -> Table:
    """Returns a table of workers, with the number of their pushes."""
    num_pushes = sum(worker.step // period for worker in workers)
    caption = f"{num_pushes} pushes, {num_pushes / seconds:.1f} per second"
    table = Table(title="AGN workers", caption=caption)
    for name in ("worker", "step", "staleness", "last contact"):
        table.add_column(name, justify="right", min_width=12)
    for name, step, staleness, last_contact in workers:
        table.add_row(name, str(step), str(staleness), f"{last_contact:.1f} s")
    return table
