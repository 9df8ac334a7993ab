"""Trains under torchrun, which restarts all processes when one fails or joins.

After a restart there may be another number of processes. The training continues from its last
checkpoint. The number of replicas stays the same, and each process has a share of them, so the
weights are those of a run without a failure. ``train``, ``save`` and ``load`` are the parts to
copy. ``README.md`` has the commands.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits
import numpy as np
from command_line import Parser, file, in_range, one_of
from report import History, save_picture
from rich.progress import track

import gradreduce as gr

SAVE_EVERY = 20  # updates


def train(mesh: gr.Mesh, first: int, options: argparse.Namespace) -> History:
    """Trains to the last step, from the checkpoint if there is one; returns what came after it.

    Args:
        mesh: has this process's replicas.
        first: the number of the first one of them.
        options: the flags.
    """
    data = digits.load()
    weights = digits.initial_weights(np.random.default_rng(options.seed))
    variables = [gr.Variable(value, name, device=mesh) for name, value in weights.items()]
    optimizer = gr.MomentumOptimizer(0.1, 0.9)
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    step = gr.SyncStep(variables, optimizer, cross_device_ops)
    if options.checkpoint.exists():
        step.load_state_dict(load(options.checkpoint))  # in every process
    if mesh.process_index == 0:
        layout = f"{mesh.num_replicas} replicas in {mesh.num_processes} process(es)"
        print(f"{layout}, from step {step.global_step}", flush=True)

    def evaluate() -> None:
        weights = digits.read_weights(variables, 0)
        history.accuracies.append((step.global_step, digits.accuracy(weights, data)))

    losses: list[float] = []
    labelled = {"replicas of process 0": losses}
    history = History(labelled, [], {}, 0, {}, first_step=step.global_step + 1)
    evaluate()
    numbers = range(step.global_step, options.steps)
    for number in track(numbers, "training", disable=mesh.process_index > 0):
        # The images depend on the step and the replica only: not on what ran before in this process
        rng = np.random.default_rng([options.seed, number])
        of_replicas, terms = gradients(mesh, first, optimizer, variables, data, rng)
        step(terms)
        losses.append(float(np.mean(of_replicas)))
        if step.global_step % SAVE_EVERY == 0 or step.global_step == options.steps:
            state = step.state_dict()  # in every process
            if mesh.process_index == 0:
                save(options.checkpoint, state)
            evaluate()
    return history


def gradients(
    mesh: gr.Mesh,
    first: int,
    optimizer: gr.Optimizer,
    variables: Sequence[gr.Variable],
    data: digits.Digits,
    rng: np.random.Generator,
) -> tuple[list[float], list[Any]]:
    """Returns the loss of each replica of this process, and its terms for ``SyncStep``."""
    losses, terms = [], []
    picks = rng.integers(len(data.train_images), size=(mesh.num_replicas, digits.MICRO_BATCH_SIZE))
    for replica, pick in enumerate(picks[first : first + len(mesh)]):
        batch = data.train_images[pick], data.train_labels[pick]
        with gr.replica(replica):
            loss, of_variables = digits.loss_and_gradients(optimizer, variables, *batch)
        losses.append(float(loss))
        terms.append([[gradient] for gradient in of_variables])
    return losses, terms


def save(path: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint by a complete file, or, if this process is killed, not at all."""
    arrays, metadata = gr.checkpoint.split(state)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stored:
        np.savez(stored, **arrays, **metadata)
        stored.flush()
        os.fsync(stored.fileno())
    temporary.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint."""
    with np.load(path) as stored:
        return gr.checkpoint.join(stored, stored)


def open_share(options: argparse.Namespace) -> tuple[gr.Mesh, int]:
    """Opens a mesh with this process's share of the replicas; returns the number of the first too.

    torchrun sets the two variables; without it this is the only process.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first, end = (options.replicas * each // size for each in (rank, rank + 1))
    mesh = gr.open_mesh(
        backend=options.backend,
        processes="torchrun" if size > 1 else None,
        devices_per_process=end - first,
        timeout=60,  # seconds, for a process that does not answer
    )
    return mesh, first


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, because torchrun would start a process that fails again."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--checkpoint", "elastic.ckpt", file(".ckpt"), "a .ckpt file in a folder that exists",
         "file of the checkpoint, on a file system that all nodes share")  # fmt: skip
    flag("--replicas", 4, in_range(int, 1, 1024), "1 to 1024", "replicas of all processes together")
    flag("--backend", "sim", *one_of("sim", "cuda"), "GPUs or simulated devices")
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "number of training steps")
    flag("--output", "elastic_training.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure of what came after the last start")  # fmt: skip
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    options = parser.parse_args(arguments)
    mesh, first = open_share(options)
    with mesh:
        history = train(mesh, first, options)
        if mesh.process_index == 0:
            weights = f"weights in {options.checkpoint}"
            print(f"test accuracy {history.accuracy:.4f}, {weights}", flush=True)
            save_picture(history, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
