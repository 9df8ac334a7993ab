"""Trains the same 64 micro-batches on many layouts: with ``exact=True`` all weights are the same.

A layout is the number of replicas and processes, the number of packs, the implementation of the
kernels, the order in which gradients arrive, and what adds them: ``SyncStep``, accumulators, or
``gr.torch.DataParallel``. Floating-point addition rounds, so the sums of each layout differ, and
after some steps so do the weights. With ``exact=True`` the gradients of a step are added as real
numbers, and their sum is rounded once. The program prints a digest of the final weights of each
layout, without and with ``exact=True``. It starts other processes by torchrun and mpiexec, and
actors of Ray, if PyTorch, mpi4py and Ray are installed.

Every layout computes the gradient of a micro-batch by the same code, in one thread, so that only
sums can differ. ``sync_step``, ``accumulators`` and ``data_parallel`` are the parts to copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from shutil import which
from typing import Any

import numpy as np
import rich
from command_line import Parser, in_range
from digits import MICRO_BATCH_SIZE, Digits, initial_weights, load, loss_and_gradients
from rich.progress import track
from rich.table import Table
from threadpoolctl import threadpool_limits

import gradreduce as gr

NUM_TERMS = 64  # micro-batches of a step
LEARNING_RATE = 0.5  # a power of two, whose products are exact in NumPy and in PyTorch


@dataclass(frozen=True)
class Layout:
    """Where and how the gradients of a step are added.

    Attributes:
        way: what adds them: a key of ``WAYS``.
        devices: the number of replicas of each process.
        processes: the number of processes.
        launcher: what starts them.
        packs: the number of packs; 0: each tensor is reduced alone.
        kernels: the implementation of the kernels.
        order: the seed of the order in which the gradients of a step arrive; 0: as they are drawn.
    """

    way: str = "SyncStep"
    devices: int = 1
    processes: int = 1
    launcher: str = ""
    packs: int = 1
    kernels: str = "numpy"
    order: int = 0

    def __str__(self) -> str:
        parts = [f"{self.way} on {self.devices} replica{'s' * (self.devices > 1)}"]
        if self.processes > 1:
            parts.append(f"in each of {self.processes} processes of {self.launcher}")
        if self.packs != 1:
            parts.append(f"{self.packs} packs" if self.packs else "no packs")
        if self.kernels != "numpy":
            parts.append(f"{self.kernels} kernels")
        if self.order:
            parts.append(f"order {self.order}")
        return ", ".join(parts)


# The training ----------------------------------------------------------------------------------


class Training:
    """The data, the weights, and the gradients of micro-batches.

    Args:
        mesh: the devices of this process.
        digits: the data set.
        layout: see above.
        exact: whether the gradients of a step are added as real numbers.
    """

    def __init__(self, mesh: gr.Mesh, digits: Digits, layout: Layout, exact: bool) -> None:
        self.mesh, self.exact, self._digits = mesh, exact, digits
        self._rng, self._order = np.random.default_rng(0), np.random.default_rng(layout.order)
        self._is_shuffled = layout.order > 0
        self.variables = [
            gr.Variable(value, name, device=mesh)
            for name, value in initial_weights(self._rng).items()
        ]
        self.optimizer = gr.GradientDescentOptimizer(LEARNING_RATE)
        self.ops = gr.AllReduceCrossDeviceOps(
            "hierarchical_copy", num_packs=layout.packs, mesh=mesh, exact=exact
        )

    def draw(self) -> np.ndarray:
        """Draws the images of a step, a row for each micro-batch."""
        shape = NUM_TERMS, MICRO_BATCH_SIZE
        picks = self._rng.integers(len(self._digits.train_images), size=shape)
        return self._order.permutation(picks) if self._is_shuffled else picks

    def of_replica(self, picks: np.ndarray, replica: int) -> np.ndarray:
        """Returns the micro-batches of a replica of this process."""
        number = self.mesh.process_index * len(self.mesh) + replica
        return np.split(picks, self.mesh.num_replicas)[number]

    def gradients(self, pick: np.ndarray, variables: Sequence[gr.Variable] = ()) -> list[Any]:
        """Computes the gradients of a micro-batch for the enclosing ``gr.replica``."""
        batch = self._digits.train_images[pick], self._digits.train_labels[pick]
        _, gradients = loss_and_gradients(self.optimizer, variables or self.variables, *batch)
        return gradients


def sync_step(training: Training, steps: int) -> Iterator[Sequence[np.ndarray]]:
    """Adds the micro-batches of each replica, and then the replicas; yields the weights."""
    step = gr.SyncStep(training.variables, training.optimizer, training.ops)
    for _ in range(steps):
        picks, terms = training.draw(), []
        for replica in range(len(training.mesh)):
            with gr.replica(replica):
                rows = [training.gradients(pick) for pick in training.of_replica(picks, replica)]
            terms.append(list(map(list, zip(*rows, strict=True))))  # terms[replica][variable]
        # A weight for each micro-batch: the mean is over all of them, wherever they are.
        step(terms, weights=[[1.0] * len(row[0]) for row in terms])
        yield [variable.numpy() for variable in training.variables]


def accumulators(training: Training, steps: int) -> Iterator[Sequence[np.ndarray]]:
    """Adds one micro-batch after the other, each to the sum of some replica; yields the weights."""
    sums = [
        gr.ConditionalAccumulator(
            variable.dtype, variable.shape, device=training.mesh, cross_device_ops=training.ops,
            exact=training.exact,
        )
        for variable in training.variables
    ]  # fmt: skip
    for step in range(steps):
        for number, pick in enumerate(training.draw()):
            with gr.replica(number % len(training.mesh)):
                gr.apply_grads(sums, training.gradients(pick), local_step=step)
        means = gr.take_grads(sums, NUM_TERMS)
        training.optimizer.apply_gradients(zip(means, training.variables, strict=True))
        yield [variable.numpy() for variable in training.variables]


def shared_accumulators(training: Training, steps: int) -> Iterator[Sequence[np.ndarray]]:
    """Does what ``accumulators`` does, with sums in an actor of Ray; yields the weights."""
    gr.ray.init(logging_level="warning")
    specs = {each.name: (each.dtype.name, each.shape) for each in training.variables}
    sums = gr.ray.AccumulatorSet(specs, f"same-bits-{uuid.uuid4()}", exact=training.exact)
    for step in range(steps):
        for pick in training.draw():
            sums.apply_grads(dict(zip(specs, training.gradients(pick), strict=True)), step)
        means = sums.take_grads(NUM_TERMS)
        pairs = [(means[variable.name], variable) for variable in training.variables]
        training.optimizer.apply_gradients(pairs)
        yield [variable.numpy() for variable in training.variables]
    sums.close()


def data_parallel(training: Training, steps: int) -> Iterator[Sequence[np.ndarray]]:
    """Adds the gradients of all ``backward`` calls of a step; yields the weights."""
    import torch

    torch.set_num_threads(1)
    computing = gr.open_mesh(1, backend="sim", processes="none")
    variables = [gr.Variable(each.numpy(), device=computing) for each in training.variables]

    class Loss(torch.autograd.Function):  # its gradients are those of the other layouts
        @staticmethod
        def forward(context: Any, pick: np.ndarray, *weights: torch.Tensor) -> torch.Tensor:
            for variable, weight in zip(variables, weights, strict=True):
                variable.assign(weight.numpy())
            context.gradients = training.gradients(pick, variables)
            return torch.zeros(())

        @staticmethod
        def backward(context: Any, *_: torch.Tensor) -> tuple[Any, ...]:
            return None, *map(torch.from_numpy, context.gradients)

    module = torch.nn.ParameterList([torch.from_numpy(each.numpy()) for each in variables])
    module.forward = lambda: None
    dp = gr.torch.DataParallel(module, training.mesh, ops=training.ops)
    optimizer = torch.optim.SGD(dp.parameters(), LEARNING_RATE)
    for _ in range(steps):
        picks = training.draw()
        of_replicas = [training.of_replica(picks, each) for each in range(len(training.mesh))]
        optimizer.zero_grad()
        for number, row in enumerate(zip(*of_replicas, strict=True)):
            is_last = number == len(of_replicas[0]) - 1
            # A weight for each micro-batch: the mean is over all of them, wherever they are.
            with dp.weight(1), nullcontext() if is_last else dp.no_sync():
                for replica, pick in zip(dp.replicas, row, strict=True):
                    Loss.apply(pick, *replica).backward()
        optimizer.step()
        yield [each.detach().numpy() for each in dp.module]


WAYS: dict[str, Callable[[Training, int], Iterator[Sequence[np.ndarray]]]] = {
    "SyncStep": sync_step,
    "accumulators": accumulators,
    "accumulators of Ray": shared_accumulators,
    "DataParallel": data_parallel,
}


def digest(layout: Layout, steps: int, *, exact: bool) -> str:
    """Trains and returns a hash of the final weights; each process of the layout calls it."""
    processes = "auto" if layout.processes > 1 else "none"
    devices, kernels = layout.devices, layout.kernels
    with (
        threadpool_limits(1),
        gr.open_mesh(devices, backend="sim", kernels=kernels, processes=processes) as mesh,
    ):
        *_, weights = WAYS[layout.way](Training(mesh, load(), layout, exact), steps)
        return hashlib.sha256(b"".join([each.tobytes() for each in weights])).hexdigest()


# The layouts -----------------------------------------------------------------------------------


def layouts() -> list[Layout]:
    """Returns the layouts that can run with the installed libraries."""
    found = [Layout(devices=devices) for devices in (1, 2, 4, 8, NUM_TERMS)]
    found += [Layout(devices=4, packs=packs) for packs in (0, 3)]
    found += [Layout(devices=devices, kernels="compiled") for devices in (1, 4)]
    found += [
        Layout("accumulators", devices, order=order) for devices in (1, 2, 8) for order in (1, 2)
    ]
    if find_spec("torch"):
        found += [Layout("DataParallel", devices) for devices in (1, 4, NUM_TERMS)]
        found += [Layout(way, 64 // processes // 8, processes, "torchrun")
                  for way in ("SyncStep", "DataParallel") for processes in (2, 4)]  # fmt: skip
    if find_spec("ray"):  # each step has an order of its own
        found += [Layout("accumulators of Ray", order=order) for order in range(1, 6)]
    if find_spec("mpi4py") and which("mpiexec"):
        found.append(Layout("SyncStep", 2, 2, "mpiexec"))
    return found


def digests(layout: Layout, steps: int) -> list[str]:
    """Returns the digests without and with ``exact=True``; starts the processes of the layout."""
    if layout.processes == 1:
        return [digest(layout, steps, exact=exact) for exact in (False, True)]
    count = str(layout.processes)
    launch = ["mpiexec", "-n", count, sys.executable]
    if layout.launcher == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launch, __file__, "--steps", str(steps), "--layout", json.dumps(asdict(layout))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{layout} failed:\n{done.stderr}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(of_layouts: dict[Layout, list[str]], steps: int) -> int:
    """Prints the digests; returns 0 if all with ``exact=True`` are the same."""
    table = Table("layout", "rounded sums", "exact=True", title=f"weights after {steps} steps")
    for layout, found in of_layouts.items():
        table.add_row(str(layout), *[each[:12] for each in found])
    rich.print(table)
    rounded, exact = [{*column} for column in zip(*of_layouts.values(), strict=True)]
    print(f"{len(of_layouts)} layouts: {len(rounded)} different results of rounded sums, "
          f"{len(exact)} of exact ones.")  # fmt: skip
    return 0 if len(exact) == 1 else 1


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    parser.flag("--steps", 20, in_range(int, 1, 1000), "1 to 1000", "steps of each training")
    parser.add_argument("--layout", help=argparse.SUPPRESS)  # what a started process runs
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all layouts; returns 0 if the weights of all with ``exact=True`` are the same."""
    options = make_parser().parse_args(arguments)
    if options.layout:
        layout = Layout(**json.loads(options.layout))
        found = [digest(layout, options.steps, exact=exact) for exact in (False, True)]
        print(json.dumps(found))
        return 0
    of_layouts = {layout: digests(layout, options.steps) for layout in track(layouts(), "training")}
    return report(of_layouts, options.steps)


if __name__ == "__main__":
    sys.exit(main())
