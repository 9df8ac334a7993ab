"""Trains on handwritten digits with JAX and optax, data-parallel, in one process or several.

    python -m pip install ".[examples,jax]" optax
    python examples/train_jax.py
    mpiexec -n 2 python examples/train_jax.py --devices 2

The first command trains on four devices in one process (JAX simulates four devices on a CPU), the
second on two devices in each of two processes. The weights are the same. Read ``train`` first:
jitted functions compute loss and gradients on every device, one call averages the gradients, and
optax updates each replica.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import Parser, file, in_range
from digits import MICRO_BATCH_SIZE, Digits, accuracy, initial_weights, load
from report import History, per_step, train_and_report
from rich.progress import track

import gradreduce as gr

EVALUATE_EVERY = 10  # steps


# The training ----------------------------------------------------------------------------------


def loss(params: Any, images: Any, labels: Any) -> Any:
    """Computes the mean cross-entropy of a batch."""
    hidden = jnp.tanh(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = hidden @ params["output"]["kernel"] + params["output"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(mesh: gr.Mesh, digits: Digits, options: argparse.Namespace) -> History:
    """Trains on every device of ``mesh``; every process calls it.

    All processes draw the same images for all replicas; each uses those of its own replicas.
    """
    rng = np.random.default_rng(options.seed)
    optimizer = optax.sgd(options.learning_rate, momentum=0.9)
    loss_and_gradients = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    weights = initial_weights(rng)
    devices = [jax.local_devices()[index] for index in jax_indices(mesh)]
    replicas = [jax.device_put(nested(weights), device) for device in devices]
    states = [optimizer.init(params) for params in replicas]
    # This algorithm adds in the same order in any number of processes.
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    losses, accuracies = [], []
    shape = (mesh.num_replicas, MICRO_BATCH_SIZE * options.micro_batches)
    first = mesh.process_index * len(mesh)  # the number of this process's first replica
    start = time.perf_counter()
    with mesh.journal() as journal:
        steps = range(1, options.steps + 1)
        for number in track(steps, "training", disable=mesh.process_index > 0):
            picks = rng.integers(len(digits.train_images), size=shape)[first:]
            # JAX computes on a device while the next call is made. Each entry is a pytree, on its
            # own device: the loss, and the gradients.
            found = [
                loss_and_gradients(params, digits.train_images[pick], digits.train_labels[pick])
                for params, pick in zip(replicas, picks, strict=False)
            ]
            means = gr.jax.all_reduce(found, cross_device_ops=cross_device_ops)
            for index, (_, gradients) in enumerate(means):
                replicas[index], states[index] = update(replicas[index], states[index], gradients)
            losses.append(float(means[0][0]))
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                accuracies.append((number, accuracy(flat(replicas[0]), digits)))
    seconds = time.perf_counter() - start
    values = dict(zip(weights, flat(replicas[0]), strict=True))
    return History(
        {"all replicas": losses}, accuracies, values, seconds, per_step(journal, options.steps)
    )


def jax_indices(mesh: gr.Mesh) -> Sequence[int]:
    """Returns the numbers of the JAX devices of this process: GPUs, or those that JAX simulates."""
    if mesh.backend == "cuda":
        return [device.physical for device in mesh]
    return range(len(mesh))


def nested(weights: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Returns weights as a tree, by layer."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    for name, value in weights.items():
        layer, kind = name.split("/")
        tree.setdefault(layer, {})[kind] = value
    return tree


def flat(params: Any) -> list[np.ndarray]:
    """Returns the weights of a tree as NumPy arrays, in the order of ``initial_weights``."""
    return [np.asarray(params[layer][kind]) for layer in ("hidden", "output")
            for kind in ("kernel", "bias")]  # fmt: skip


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--devices", 4, in_range(int, 1, 64), "1 to 64", "number of devices of each process")
    flag("--micro-batches", 2, in_range(int, 1, 64), "1 to 64",
         f"batches of {MICRO_BATCH_SIZE} images per device and step")  # fmt: skip
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "number of training steps")
    flag("--learning-rate", 0.1, in_range(float, 1e-6, 10), "1e-6 to 10", "learning rate")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "train_jax.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    parser.set_defaults(placement=None, kernels="numpy")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1 (in the first process)."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    # JAX reads this at its first use, and takes the last number that is set.
    count = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{count} {os.environ.get('XLA_FLAGS', '')}"
    devices = jax.local_devices()
    options.backend = "sim" if devices[0].platform == "cpu" else "cuda"
    if options.backend == "sim" and len(devices) < options.devices:
        parser.error(f"argument --devices: got {options.devices}, but JAX has {len(devices)}")

    return train_and_report(
        parser,
        options,
        lambda mesh: train(mesh, load(), options),
        f"{options.steps} steps on handwritten digits with JAX",
    )


if __name__ == "__main__":
    sys.exit(main())
