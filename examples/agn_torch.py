"""Trains a PyTorch module with accumulated gradient normalization (AGN), in threads or with Ray.

    python -m pip install ".[examples,torch,ray]"
    python examples/agn_torch.py
    python examples/agn_torch.py --engine ray

Workers do not wait for each other: every ``--period`` steps a worker pushes the mean of its
gradients to the center and continues with the center's weights. A worker is a thread, or a process
that Ray starts. ``work`` is the part to copy: ``gr.torch.functional`` calls the module with the
worker's variables, and PyTorch differentiates the loss.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from command_line import Parser, file, in_range, on_devices, one_of, open_devices
from digits import Digits, load
from report import History, conclude, per_step, print_table, save_picture, where
from rich.progress import Progress
from torch.nn.functional import cross_entropy

import gradreduce as gr

BATCH_SIZE = 32  # images
WAIT_S = 60  # for the other workers, at the start
REFRESH_S = 0.25  # seconds between two looks at Ray's workers


def make_net() -> torch.nn.Module:
    """Returns a convolutional network for images of 8 by 8 pixels."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16 * 4 * 4, 10),
    )


# A worker --------------------------------------------------------------------------------------


def work(
    index: int,
    net: torch.nn.Module,
    center: Any,
    devices: gr.Mesh,
    options: argparse.Namespace,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Trains one worker; runs in its thread or process.

    Args:
        index: of the worker.
        net: the module; workers in threads pass the same one.
        center: a ``gr.AGNCenter`` or ``gr.ray.AGNCenter``, shared by all workers.
        devices: of the worker.
        options: the flags.
        advance: called after each step.

    Returns:
        The losses, the accuracies (of the first worker), and the state of the module.
    """
    torch.set_num_threads(1)  # the matrices are small
    digits = load()
    getter = gr.AGNCustomGetter(devices, center=center)
    model = gr.torch.functional(net, getter)
    rule = gr.AdamOptimizer(options.learning_rate)
    optimizer = gr.AGNOptimizer(rule, options.workers, getter, options.period)
    place = "cpu" if devices.backend == "sim" else f"cuda:{devices[0].physical}"
    rng = np.random.default_rng([options.seed, index])
    losses, accuracies = [], []
    hook = optimizer.make_session_run_hook(index == 0, index, wait_timeout=WAIT_S)
    with hook:  # waits for the other workers, and copies the center
        for number in range(1, options.steps + 1):
            picks = rng.integers(len(digits.train_images), size=BATCH_SIZE)
            images, labels = as_tensors(digits.train_images[picks], digits.train_labels[picks])
            images, labels = images.to(place), labels.to(place)
            value, pairs = optimizer.compute_gradients(
                lambda images=images, labels=labels: cross_entropy(model(images), labels),
                model.variables,
                return_loss=True,
            )
            losses.append(value)
            if optimizer.apply_gradients(pairs) and index == 0:
                # The worker's weights are those of the center after its push.
                accuracies.append((number, accuracy(model.eval(), digits, place)))
                model.train()
            advance()
    losses = [float(loss) for loss in losses]
    return {"losses": losses, "accuracies": accuracies, "state": model.state_dict()}


def as_tensors(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images with one channel, and their labels."""
    return torch.from_numpy(images).view(-1, 1, 8, 8), torch.from_numpy(labels)


def accuracy(net: Callable[[Any], Any], digits: Digits, place: str = "cpu") -> float:
    """Returns the fraction of test images that are classified correctly."""
    images, labels = as_tensors(digits.test_images, digits.test_labels)
    with torch.no_grad():
        return float((net(images.to(place)).argmax(dim=1).cpu() == labels).float().mean())


# All workers -----------------------------------------------------------------------------------


def in_threads(mesh: gr.Mesh, options: argparse.Namespace) -> History:
    """Trains with a thread for each device of the mesh."""
    torch.manual_seed(options.seed)
    net, center = make_net(), gr.AGNCenter(mesh)
    found: dict[int, dict[str, Any]] = {}
    start = time.perf_counter()
    with mesh.journal() as journal, Progress() as progress:

        def run(index: int, bar: Any) -> None:
            advance = partial(progress.advance, bar)
            found[index] = work(index, net, center, mesh[index : index + 1], options, advance)

        bars = [progress.add_task(f"worker {i}", total=options.steps) for i in range(len(mesh))]
        threads = [center.start_worker(i, partial(run, i, bar)) for i, bar in enumerate(bars)]
        for thread in threads:
            thread.join()  # raises the exception that ended the worker
    seconds = time.perf_counter() - start
    results = [found[index] for index in range(len(mesh))]
    counts = per_step(journal, options.steps * options.workers)
    return history_of(net, center.values(), results, seconds, counts, options)


def in_processes(mesh: gr.Mesh, options: argparse.Namespace) -> History:
    """Trains with a process of Ray for each worker.

    Joins a Ray cluster if there is one, or starts one, which ends with the training.
    """
    import ray

    options = argparse.Namespace(**{**vars(options), "backend": mesh.backend, "devices": 1})
    was_initialized = ray.is_initialized()
    try:
        gr.ray.init(logging_level="warning")
        name = f"agn-torch-{uuid.uuid4().hex[:8]}"  # two trainings on a cluster share no center
        # At the end, also after an error, workers that still train get a CancelledError.
        with closing(gr.ray.AGNCenter(name, mesh=mesh)) as center:
            start = time.perf_counter()
            gpus = ray.cluster_resources().get("GPU", 0) if mesh.backend == "cuda" else 0
            # No CPUs of their own: all workers have to start, also on a machine with fewer cores.
            remote = ray.remote(num_cpus=0, num_gpus=min(1.0, gpus / options.workers))(process)
            tasks = [remote.remote(index, name, options) for index in range(options.workers)]
            watch(center, tasks, options)
            results = ray.get(tasks)
            seconds = time.perf_counter() - start
            return history_of(make_net(), center.values(), results, seconds, {}, options)
    finally:
        if not was_initialized:
            ray.shutdown()


def process(index: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a worker in a process of Ray."""
    torch.manual_seed(options.seed + index)  # the center has the values of the first worker
    with open_devices(options) as mesh:
        center = gr.ray.AGNCenter(name, mesh=mesh, worker=f"worker {index}")
        return work(index, make_net(), center, mesh, options)


def watch(center: Any, tasks: Sequence[Any], options: argparse.Namespace) -> None:
    """Shows the progress of processes until all have ended; raises the error of one that fails."""
    import ray

    pending = list(tasks)
    with Progress() as progress:
        names = [f"worker {index}" for index in range(len(tasks))]
        bars = {name: progress.add_task(name, total=options.steps) for name in names}
        while pending:
            done, pending = ray.wait(pending, timeout=REFRESH_S)
            ray.get(done)
            for worker in center.workers():
                progress.update(bars[worker.name], completed=worker.step)


def history_of(
    net: torch.nn.Module,
    values: dict[str, np.ndarray],
    results: Sequence[dict[str, Any]],
    seconds: float,
    counts: dict[str, float],
    options: argparse.Namespace,
) -> History:
    """Loads the center's weights and the first worker's buffers into the module; evaluates it."""
    net.load_state_dict(results[0]["state"])
    weights = {name: torch.tensor(value) for name, value in values.items()}
    net.load_state_dict(weights, strict=False)  # without buffers
    last = len(results[0]["losses"]), accuracy(net.eval(), load())
    num_pushes = options.workers * (options.steps // options.period)
    losses = {f"worker {index}": each["losses"] for index, each in enumerate(results)}
    return History(losses, [*results[0]["accuracies"], last], values, seconds, counts, num_pushes)


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--workers", 4, in_range(int, 1, 64), "1 to 64", "number of workers, each of one device")
    flag("--engine", "threads", *one_of("threads", "ray"), "a worker is a thread, or a "
         "process that Ray starts")  # fmt: skip
    flag("--period", 10, in_range(int, 1, 10_000), "1 to 10000", "steps between two pushes")
    flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
    flag("--steps", 200, in_range(int, 1, 100_000), "1 to 100000", "steps of each worker")
    flag("--learning-rate", 0.002, in_range(float, 1e-6, 10), "1e-6 to 10", "learning rate")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "agn_torch.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    parser.set_defaults(placement=None, kernels="numpy")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.devices = options.workers if options.engine == "threads" else 1
    if options.engine == "ray":
        try:
            import ray  # noqa: F401
        except ModuleNotFoundError as error:
            parser.error(f"argument --engine: {error}: pip install 'gradreduce[ray]'")

    def run(mesh: gr.Mesh) -> History:
        history = (in_threads if options.engine == "threads" else in_processes)(mesh, options)
        processes = f", in each of {options.workers} processes" if options.engine == "ray" else ""
        rows = {
            "workers": str(options.workers),
            "devices": where(mesh) + processes,
            "test accuracy": f"{history.accuracy:.4f}",
            "steps/s": f"{options.steps * options.workers / history.seconds:.1f}",
            **{f"{name} per step": f"{count:.10g}" for name, count in history.per_step.items()},
            "pushes": str(history.num_pushes),
        }
        print_table(f"{options.steps} steps of a PyTorch module by AGN", rows)
        return history

    history: History = on_devices(parser, options, run)
    save_picture(history, options.output)
    return conclude(history.accuracy, options.output)


if __name__ == "__main__":
    sys.exit(main())
