"""Trains on handwritten digits with PyTorch, data-parallel, in one process or under torchrun.

    python -m pip install ".[examples,torch]"
    python examples/train_torch.py
    torchrun --nproc-per-node 2 examples/train_torch.py

The first command trains on four devices in one process, the second on two devices in each of two
processes. The weights are the same. Read ``train`` first: gradients of several micro-batches are
accumulated, averaged over all replicas while ``backward`` runs, and clipped by their global norm.
``save`` and ``resume`` store and restore a training, also in another number of processes.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import Parser, file, in_range, one_of
from digits import MICRO_BATCH_SIZE, NUM_HIDDEN, Digits, load
from report import History, per_step, train_and_report
from rich.progress import track

import gradreduce as gr

NUM_REPLICAS = 4  # in all processes together
EVALUATE_EVERY = 10  # steps
SAVE_EVERY = 100  # steps


# The training ----------------------------------------------------------------------------------


def train(mesh: gr.Mesh, digits: Digits, options: argparse.Namespace) -> History:
    """Trains on every device of ``mesh``; every process calls it."""
    torch.set_num_threads(1)  # the matrices are small
    torch.manual_seed(options.seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, NUM_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(NUM_HIDDEN, 10)
    )
    # This algorithm adds in the same order in any number of processes.
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    dp = gr.torch.DataParallel(net, mesh, ops=cross_device_ops)
    # One optimizer per replica, so that a checkpoint needs the state of one replica only.
    optimizers = [
        torch.optim.SGD(replica.parameters(), options.learning_rate, momentum=0.9)
        for replica in dp.replicas
    ]
    first = resume(options.resume, dp, optimizers)
    if first >= options.steps:
        sys.exit(f"{options.resume} is of step {first}: pass a larger --steps")
    losses, accuracies = [], []
    start = time.perf_counter()
    with mesh.journal() as journal:
        steps = range(first + 1, options.steps + 1)
        for number in track(steps, "training", disable=mesh.process_index > 0):
            losses.append(backward(dp, mesh, number, digits, options))
            for replica, optimizer in zip(dp.replicas, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(replica.parameters(), options.clip_norm)
                optimizer.step()
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                accuracies.append((number, accuracy(dp.module, digits)))
            if number % SAVE_EVERY == 0 or number == options.steps:
                save(options.checkpoint, number, dp, optimizers, mesh)
    seconds = time.perf_counter() - start
    gr.assert_mirrored(dp, mesh)  # all replicas have the same bits
    mean_losses = cross_device_ops.all_reduce([[of_replica] for of_replica in np.transpose(losses)])
    return History(
        {"all": [float(loss) for loss in mean_losses[0][0]]},
        accuracies,
        {name: value.cpu().numpy() for name, value in dp.module.state_dict().items()},
        seconds,
        per_step(journal, len(steps)),
        first_step=first + 1,
    )


def backward(
    dp: gr.torch.DataParallel,
    mesh: gr.Mesh,
    number: int,
    digits: Digits,
    options: argparse.Namespace,
) -> list[float]:
    """Computes the mean gradients of a step; returns the mean loss of each replica.

    The images depend on the seed, the step and the replica only: not on the number of processes,
    nor on what ran before in this one.
    """
    rng = np.random.default_rng([options.seed, number])
    shape = (mesh.num_replicas, options.micro_batches, MICRO_BATCH_SIZE)
    first = mesh.process_index * len(mesh)  # the number of this process's first replica
    picks = rng.integers(len(digits.train_images), size=shape)[first:]
    losses = np.zeros(len(mesh))
    dp.zero_grad()  # one fill per bucket
    for micro_batch in range(options.micro_batches):
        is_last = micro_batch == options.micro_batches - 1
        # Inside no_sync gradients are added on each replica; after the last ones they are averaged.
        with nullcontext() if is_last else dp.no_sync():
            for index, replica in enumerate(dp.replicas):
                images, labels = batch(replica, digits, picks[index, micro_batch])
                loss = torch.nn.functional.cross_entropy(replica(images), labels)
                (loss / options.micro_batches).backward()
                losses[index] += loss.item() / options.micro_batches
    return list(losses)


def batch(replica: Any, digits: Digits, pick: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images and labels on the device of a replica."""
    device = next(replica.parameters()).device
    images, labels = digits.train_images[pick], digits.train_labels[pick]
    return torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)


def accuracy(net: Any, digits: Digits) -> float:
    """Returns the fraction of test images that are classified correctly."""
    with torch.no_grad():
        images = torch.from_numpy(digits.test_images).to(next(net.parameters()).device)
        found = net(images).argmax(dim=1).cpu().numpy()
    return float((found == digits.test_labels).mean())


# Checkpoints -----------------------------------------------------------------------------------


def save(path: Path | None, number: int, dp: Any, optimizers: Sequence[Any], mesh: gr.Mesh) -> None:
    """Replaces the checkpoint; process 0 does it, whose first replica is like all others."""
    if path is not None and mesh.process_index == 0:
        temporary = path.with_name(path.name + ".tmp")  # a kill leaves a complete file
        state = {"module": dp.state_dict(), "optimizer": optimizers[0].state_dict()}
        torch.save({"step": number, **state}, temporary)
        temporary.replace(path)


def resume(path: Path | None, dp: Any, optimizers: Sequence[Any]) -> int:
    """Loads a checkpoint, in every process; returns its step."""
    if path is None:
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    dp.load_state_dict(state["module"])
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # which it keeps
    return int(state["step"])


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--devices", None, in_range(int, 1, 64), "1 to 64",
         f"number of devices of each process; none: {NUM_REPLICAS} in those of torchrun "
         "together")  # fmt: skip
    flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
    flag("--micro-batches", 2, in_range(int, 1, 64), "1 to 64", "gradients per device and step")
    flag("--clip-norm", 1.0, in_range(float, 1e-6, 1e6), "1e-6 to 1e6",
         "largest global norm of a gradient")  # fmt: skip
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000",
         "number of the last training step")  # fmt: skip
    flag("--learning-rate", 0.1, in_range(float, 1e-6, 10), "1e-6 to 10", "learning rate")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "digits.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    flag("--checkpoint", None, file(".pt"), "a .pt file in a folder that exists",
         f"file to store a checkpoint, every {SAVE_EVERY} steps and at the end")  # fmt: skip
    flag("--resume", None, existing, "a checkpoint of this program", "where to continue")
    parser.set_defaults(placement=None, kernels="numpy")
    return parser


def existing(text: str) -> Path:
    """Parses the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise ValueError
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1 (in the first process)."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.devices is None:
        options.devices = max(1, NUM_REPLICAS // int(os.environ.get("WORLD_SIZE", "1")))

    return train_and_report(
        parser,
        options,
        lambda mesh: train(mesh, load(), options),
        f"{options.steps} steps on handwritten digits with PyTorch",
    )


if __name__ == "__main__":
    sys.exit(main())
