"""Compares DistributedDataParallel with and without our hook: bytes sent, and accuracy.

    python -m pip install ".[examples,torch]"
    torchrun --nproc-per-node 2 examples/ddp_hook.py

Trains three times on handwritten digits, with the same initial weights and images: plain DDP, DDP
with ``gr.torch.comm_hook``, and DDP with the hook and a 16-bit ``wire_dtype``. ``with_hook`` is the
part to copy.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from command_line import Parser, file, in_range, one_of
from digits import NUM_HIDDEN, Digits, load
from matplotlib.figure import Figure
from report import History, add_legends, conclude, draw_accuracies, draw_losses, print_table
from rich.progress import track
from torch.nn.parallel import DistributedDataParallel

import gradreduce as gr

BATCH_SIZE = 32  # images per process and step
EVALUATE_EVERY = 10  # steps


def with_hook(
    ddp: DistributedDataParallel, mesh: gr.Mesh, wire_dtype: str | None
) -> DistributedDataParallel:
    """Makes DDP average its buckets by our all-reduce."""
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype=wire_dtype)
    ddp.register_comm_hook(None, gr.torch.comm_hook(ops))
    return ddp


def train(
    name: str, wire_dtype: str | None, mesh: gr.Mesh, digits: Digits, options: argparse.Namespace
) -> History:
    """Trains with or without the hook; every process calls it with images of its own."""
    torch.manual_seed(options.seed)
    device = f"cuda:{mesh[0].physical}" if mesh.backend == "cuda" else "cpu"
    net = torch.nn.Sequential(
        torch.nn.Linear(64, NUM_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(NUM_HIDDEN, 10)
    ).to(device)
    ddp = DistributedDataParallel(net)
    if name != "DDP":
        ddp = with_hook(ddp, mesh, wire_dtype)
    optimizer = torch.optim.SGD(ddp.parameters(), options.learning_rate, momentum=0.9)
    rng = np.random.default_rng([options.seed, dist.get_rank()])
    train_images, train_labels, test_images, test_labels = (
        torch.from_numpy(each).to(device)
        for each in (
            digits.train_images, digits.train_labels, digits.test_images, digits.test_labels
        )
    )  # fmt: skip
    losses, accuracies = [], []
    start = time.perf_counter()
    with mesh.journal() as journal:  # counts what the hook sends
        for number in track(range(1, options.steps + 1), name, disable=dist.get_rank() > 0):
            picks = torch.from_numpy(rng.integers(len(train_images), size=BATCH_SIZE)).to(device)
            loss = torch.nn.functional.cross_entropy(ddp(train_images[picks]), train_labels[picks])
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the processes
            optimizer.step()
            losses.append(loss.item())
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                accuracies.append((number, accuracy(net, test_images, test_labels)))
    seconds = time.perf_counter() - start
    gr.assert_mirrored(net, mesh)  # the processes have the same bits
    weights = {each: value.cpu().numpy() for each, value in net.state_dict().items()}
    # gloo and NCCL do not count what they send: for plain DDP this is what a ring sends.
    ring = 2 * (1 - 1 / dist.get_world_size()) * sum(value.nbytes for value in weights.values())
    sent = ring if name == "DDP" else journal.bytes / options.steps
    return History({name: losses}, accuracies, weights, seconds, {"bytes": sent})


def accuracy(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the fraction of images that are classified correctly."""
    with torch.no_grad():
        return float((net(images).argmax(dim=1) == labels).float().mean())


def save_picture(histories: dict[str, History], path: Path) -> None:
    """Saves a figure of the loss in process 0, the test accuracy, and the bytes."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for width, (name, history) in zip((7, 4, 1), histories.items(), strict=True):
        draw_losses(left, history.losses[name], name)
        draw_accuracies(middle, history.accuracies, name)
        for line in (left.lines[-1], middle.lines[-1]):
            line.set_linewidth(width)  # they lie on each other
    add_legends(left, middle)
    right.bar(list(histories), [each.per_step["bytes"] / 1000 for each in histories.values()])
    right.set(title="Sent by a process", ylabel="kB per step")
    figure.savefig(path, dpi=120)


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--backend", "sim", *one_of("sim", "cuda"), "GPUs or simulated devices")
    flag("--wire-dtype", "bfloat16", *one_of("bfloat16", "float16"), "of the third training")
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "number of training steps")
    flag("--learning-rate", 0.1, in_range(float, 1e-6, 10), "1e-6 to 10", "learning rate")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "ddp_hook.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the goal is reached, else 1 (in the first process)."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 examples/ddp_hook.py")
    torch.set_num_threads(1)  # the matrices are small
    if options.backend == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if options.backend == "sim" else "cpu:gloo,cuda:nccl")
    group, digits = dist.group.WORLD, load()
    wire_dtypes = {"DDP": None, "hook": None, options.wire_dtype: options.wire_dtype}
    with gr.open_mesh(backend=options.backend, process_group=group, devices_per_process=1) as mesh:
        histories = {
            name: train(name, wire_dtype, mesh, digits, options)
            for name, wire_dtype in wire_dtypes.items()
        }
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if rank > 0:  # the first one reports
        return 0
    rows = {"processes": str(size)}
    for name, history in histories.items():
        rows[name] = (
            f"accuracy {history.accuracy:.4f}, {history.per_step['bytes']:.0f} bytes sent per step"
        )
    is_equal = histories["DDP"].digest == histories["hook"].digest
    rows["weights of DDP and hook"] = "the same bits" if is_equal else "other bits"
    print_table(f"{options.steps} steps on handwritten digits", rows)
    save_picture(histories, options.output)
    return conclude(min(history.accuracy for history in histories.values()), options.output)


if __name__ == "__main__":
    sys.exit(main())
