"""Trains a recommender with embedding tables, with sparse and with dense gradients.

A batch looks up few rows of a table, so its gradient has few rows. ``SyncStep`` adds, sends and
updates only these rows if the table is in ``sparse_variables``. The program trains the same model
twice, with ``IndexedSlices`` and with ``.to_dense()`` of them, and compares losses, tables, and the
rows and bytes of a step. ``train`` and ``gradients`` are the parts to copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
from command_line import Parser, file, in_range, on_devices, one_of
from matplotlib.figure import Figure
from report import draw_losses, per_step, where
from rich.progress import track
from rich.table import Table

import gradreduce as gr

NUM_USERS, NUM_ITEMS = 8000, 4000
WIDTH = 16  # elements of a row
BATCH_SIZE = 256  # ratings of a replica
GOAL = 0.62  # loss on held-out ratings; a model that knows nothing has 0.69
TOLERANCE = 1e-4  # between values that are equal up to rounding
OPTIMIZERS: dict[str, Callable[[], gr.Optimizer]] = {
    "sgd": lambda: gr.GradientDescentOptimizer(30.0),
    "adam": lambda: gr.AdamOptimizer(0.02, lazy=True),
}


@dataclass
class Result:
    """The results of a training.

    Attributes:
        losses: mean loss of this process's replicas in each step.
        held_out: loss on held-out ratings at the end.
        tables: the two embedding tables at the end.
        num_rows: rows of a replica's gradients of the two tables.
        num_bytes: bytes per step that this process's devices send.
    """

    losses: list[float]
    held_out: float
    tables: list[np.ndarray]
    num_rows: int
    num_bytes: float


# The data --------------------------------------------------------------------------------------


class Ratings:
    """Generates users, items, and whether the user likes the item.

    A few users and items are in most ratings. A user's taste and an item's content are vectors; a
    user likes an item more often the larger their dot product is.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        sizes = NUM_USERS, NUM_ITEMS
        self._vectors = [rng.standard_normal((size, 2)) for size in sizes]
        weights = [1 / np.arange(2, 2 + size) for size in sizes]
        self._probabilities = [each / each.sum() for each in weights]

    def draw(self, rng: np.random.Generator, shape: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Returns indices of users and items, and 1.0 or -1.0 for each pair."""
        users, items = [rng.choice(len(each), shape, p=each) for each in self._probabilities]
        scores = np.sum(self._vectors[0][users] * self._vectors[1][items], axis=-1)
        liked = rng.random(shape) < gr.autodiff.sigmoid(3 * scores)
        return users, items, np.where(liked, np.float32(1), np.float32(-1))


# The model -------------------------------------------------------------------------------------


def initial_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the weights of a tower of users and one of items."""

    def normal(num_rows: int, scale: float) -> np.ndarray:
        return (scale * rng.standard_normal((num_rows, WIDTH))).astype(np.float32)

    return {
        "user/table": normal(NUM_USERS, 0.1),
        "item/table": normal(NUM_ITEMS, 0.1),
        "user/kernel": normal(WIDTH, 0.5),
        "item/kernel": normal(WIDTH, 0.5),
    }


def mean_loss(weights: Sequence[Any], users: Any, items: Any, liked: Any) -> Any:
    """Computes the logistic loss of the dot products of the towers' outputs."""
    user_table, item_table, user_kernel, item_kernel = weights
    liked = np.asarray(liked, like=weights[0])  # on the device of the weights
    user = np.tanh(gr.embedding_lookup(user_table, users) @ user_kernel)
    item = np.tanh(gr.embedding_lookup(item_table, items) @ item_kernel)
    agreements = liked * np.sum(user * item, axis=1)  # positive if the sign of the score is right
    return np.mean(np.logaddexp(0, -agreements))


# The training ----------------------------------------------------------------------------------


def train(mesh: gr.Mesh, options: argparse.Namespace, *, sparse: bool) -> Result:
    """Trains on every device of ``mesh``; every process calls it.

    All processes draw the same ratings for all replicas, and each uses those of its own replicas.
    """
    rng = np.random.default_rng(options.seed)
    ratings = Ratings(rng)
    held_out = ratings.draw(rng, (5000,))
    variables = [
        gr.Variable(value, name, device=mesh) for name, value in initial_weights(rng).items()
    ]
    optimizer = OPTIMIZERS[options.optimizer]()
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    tables = variables[:2]
    step = gr.SyncStep(
        variables, optimizer, cross_device_ops, sparse_variables=tables if sparse else ()
    )
    first = mesh.process_index * len(mesh)  # the number of this process's first replica
    label = "sparse" if sparse else "dense"
    losses = []
    with mesh.journal() as journal:
        for _ in track(range(options.steps), label, disable=mesh.process_index > 0):
            batches = ratings.draw(rng, (mesh.num_replicas, BATCH_SIZE))
            of_replicas, terms = [], []
            for replica in range(len(mesh)):
                batch = [column[first + replica] for column in batches]
                with gr.replica(replica):  # reads this replica's copy of the weights
                    loss, found = loss_and_gradients(optimizer, variables, batch, sparse=sparse)
                of_replicas.append(loss)
                terms.append([[gradient] for gradient in found])
            step(terms)  # terms[replica][variable] is a list
            losses.append(float(np.mean([float(loss) for loss in of_replicas])))
    weights = [variable.numpy() for variable in variables]
    return Result(
        losses,
        float(mean_loss(weights, *held_out)),
        weights[:2],
        sum((each.values if sparse else each).shape[0] for each in found[:2]),
        per_step(journal, options.steps)["bytes"],
    )


def loss_and_gradients(
    optimizer: gr.Optimizer,
    variables: Sequence[gr.Variable],
    batch: Sequence[np.ndarray],
    *,
    sparse: bool,
) -> tuple[Any, list[Any]]:
    """Computes the loss of a batch and its gradients.

    The loss only looks up the tables, so their gradients are IndexedSlices.
    """
    loss, pairs = optimizer.compute_gradients(
        lambda: mean_loss(variables, *batch), variables, return_loss=True
    )
    *of_tables, user_kernel, item_kernel = [gradient for gradient, _ in pairs]
    if not sparse:
        of_tables = [slices.to_dense() for slices in of_tables]
    return loss, [*of_tables, user_kernel, item_kernel]


# The report ------------------------------------------------------------------------------------


def print_results(title: str, sparse: Result, dense: Result) -> None:
    """Prints both trainings beside each other."""
    table = Table("", "sparse", "dense", title=title)
    pair = sparse, dense
    table.add_row("loss of the first step", *[f"{each.losses[0]:.4f}" for each in pair])
    table.add_row("loss of the last step", *[f"{each.losses[-1]:.4f}" for each in pair])
    table.add_row("loss on held-out ratings", *[f"{each.held_out:.4f}" for each in pair])
    table.add_row("rows that a replica adds per step", *[f"{each.num_rows:,}" for each in pair])
    table.add_row("bytes per step", *[f"{each.num_bytes:,.0f}" for each in pair])
    rich.print(table)


def check_tables(sparse: Result, dense: Result, *, lazy: bool) -> bool:
    """Prints whether the tables are equal; returns False if they should be and are not."""
    pairs = zip(sparse.tables, dense.tables, strict=True)
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    if lazy:
        print(
            f"The tables differ by at most {difference:.2g}: Adam moves each row at each dense "
            "update, but with lazy=True only the rows of a sparse gradient."
        )
        return True
    equal = difference <= TOLERANCE
    end = "equal up to rounding" if equal else "not equal"
    print(f"The tables are {end}: they differ by at most {difference:.2g}.")
    return equal


def save_picture(results: dict[str, Result], path: Path) -> None:
    """Saves a figure of the losses over the steps."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    panel = figure.subplots()
    for name, result in results.items():
        draw_losses(panel, result.losses, name)
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"Saved the figure as {path}.")


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    parser.add_device_flags()
    flag("--optimizer", "sgd", *one_of(*OPTIMIZERS), "optimizer; adam is lazy")
    flag("--steps", 80, in_range(int, 1, 10_000), "1 to 10000", "steps of each training")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "recommender.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both trainings; returns 0 if they reach the goal and agree, else 1."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    def run(mesh: gr.Mesh) -> dict[str, Result] | None:
        results = {
            "sparse": train(mesh, options, sparse=True),
            "dense": train(mesh, options, sparse=False),
        }
        if mesh.process_index > 0:  # the first one reports
            return None
        title = f"{options.steps} steps of {options.optimizer}; devices: {where(mesh)}"
        print_results(title, **results)
        return results

    results = on_devices(parser, options, run)
    if results is None:
        return 0
    equal = check_tables(**results, lazy=options.optimizer == "adam")
    save_picture(results, options.output)
    loss = max(result.held_out for result in results.values())
    if loss > GOAL:
        print(f"The loss on held-out ratings, {loss:.4f}, is above {GOAL}.")
    return 0 if loss <= GOAL and equal else 1


if __name__ == "__main__":
    sys.exit(main())
