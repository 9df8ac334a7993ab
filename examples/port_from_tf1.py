"""Ports four trainings from TensorFlow 1; comments show its calls above ours.

    python -m pip install ".[examples]"
    python examples/port_from_tf1.py

``mirrored``, ``conditional_accumulators``, ``sync_replicas`` and ``agn`` train the same network on
handwritten digits, on four devices. There is no graph and no session: each call runs at once, and a
loss is a function.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from command_line import Parser, file, in_range, on_devices
from digits import Digits, accuracy, initial_weights, load, mean_loss, read_weights
from matplotlib.figure import Figure
from report import add_legends, conclude, draw_accuracies, draw_losses, print_table, where
from rich.progress import Progress

import gradreduce as gr

NUM_DEVICES = 4
BATCH_SIZE = 32  # images of one gradient
EVALUATE_EVERY = 10  # steps


class Training:
    """The data of one training, and what it reports.

    Attributes:
        initial: the first weights, by name.
        steps: the numbers of the steps.
        losses: of replica 0, in each step.
        accuracies: pairs of a step and the test accuracy after it.
    """

    def __init__(
        self, digits: Digits, options: argparse.Namespace, advance: Callable[[], None]
    ) -> None:
        self.initial = initial_weights(np.random.default_rng(options.seed))
        self.steps = range(1, options.steps + 1)
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self._digits = digits
        self._rngs = [np.random.default_rng([options.seed, each]) for each in range(NUM_DEVICES)]
        self._advance = advance
        self._last: Any = None

    def loss(self, variables: Sequence[gr.Variable], replica: int) -> Callable[[], Any]:
        """Returns a function that computes the mean loss of some images."""
        picks = self._rngs[replica].integers(len(self._digits.train_images), size=BATCH_SIZE)
        images, labels = self._digits.train_images[picks], self._digits.train_labels[picks]

        def compute() -> Any:
            value = mean_loss(variables, images, labels)
            if replica == 0:
                self._last = gr.autodiff.stop_gradient(value)
            return value

        return compute

    def report(self, number: int, variables: Sequence[gr.Variable]) -> None:
        """Notes the last loss of replica 0, and the test accuracy after some steps."""
        self.losses.append(float(self._last))
        if number % EVALUATE_EVERY == 0 or number == self.steps[-1]:
            weights = read_weights(variables, 0)
            self.accuracies.append((number, accuracy(weights, self._digits)))
        self._advance()


# The ports -------------------------------------------------------------------------------------


def mirrored(mesh: gr.Mesh, training: Training) -> None:
    """Trains variables that are on all devices, with an all-reduce."""
    # tf: w = tf.get_variable(name, initializer=value), in MirroredStrategy().scope()
    variables = [gr.Variable(value, name, device=mesh) for name, value in training.initial.items()]
    # tf: global_step = tf.train.get_or_create_global_step()
    global_step = gr.Variable(0, "global_step", trainable=False, device=mesh[0])
    # tf: opt = tf.train.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    opt = gr.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    # tf: ops = tf.contrib.distribute.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=2)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=2)
    # tf: method = tf.AggregationMethod.EXPERIMENTAL_TREE
    method = gr.AggregationMethod.EXPERIMENTAL_TREE
    for number in training.steps:
        grads = []
        for replica in range(len(mesh)):
            losses = [training.loss(variables, replica) for _ in range(2)]  # two micro-batches
            # tf: with tf.device("/gpu:%d" % replica):
            with gr.replica(replica):
                # tf: pairs = opt.compute_gradients(losses, var_list, aggregation_method=method)
                pairs = opt.compute_gradients(
                    lambda losses=losses: (loss() for loss in losses),
                    variables,
                    aggregation_method=method,
                    grad_loss=1 / len(losses),
                )
            grads.append([grad for grad, _ in pairs])
        # tf: values = PerReplica(device_map, values)
        values = [gr.PerReplica(each, mesh) for each in zip(*grads, strict=True)]
        # tf: means = ops.batch_reduce(tf.distribute.ReduceOp.MEAN, value_destination_pairs)
        means = ops.batch_reduce(gr.ReduceOp.MEAN, list(zip(values, variables, strict=True)))
        # tf: sess.run(opt.apply_gradients(zip(means, variables), global_step))
        opt.apply_gradients(zip(means, variables, strict=True), global_step)
        training.report(number, variables)
    gr.assert_mirrored(variables)  # all copies have the same bits


def conditional_accumulators(mesh: gr.Mesh, training: Training) -> None:
    """Trains by the gradients of all workers but the last, whose gradients are too late."""
    variables = [gr.Variable(value, name, device=mesh) for name, value in training.initial.items()]
    # tf: global_step = tf.train.get_or_create_global_step()
    global_step = gr.Variable(0, "global_step", trainable=False, device=mesh[0])
    opt = gr.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    # tf: accumulator = tf.ConditionalAccumulator(dtype=tf.float32, shape=w.shape)
    accumulators = [
        gr.ConditionalAccumulator(dtype="float32", shape=w.shape, device=mesh) for w in variables
    ]
    for accumulator in accumulators:
        # tf: sess.run(accumulator.set_global_step(global_step))
        accumulator.set_global_step(global_step)
    *in_time, last = range(len(mesh))
    for number in training.steps:
        # tf: local_step = sess.run(global_step)
        local_step = int(global_step)
        for worker in [*in_time, last]:  # in threads: see sync_replicas.py
            # tf: with tf.device("/job:worker/task:%d" % worker):
            with gr.replica(worker):
                losses = [training.loss(variables, worker) for _ in range(2)]
                # tf: terms = [tf.gradients(loss, var_list) for loss in losses]
                pairs = [opt.compute_gradients(loss, variables, grad_loss=0.5) for loss in losses]
                for accumulator, of_variable in zip(
                    accumulators, zip(*pairs, strict=True), strict=True
                ):
                    # tf: grad = tf.add_n(terms)
                    grad = gr.add_n([term for term, _ in of_variable])
                    # tf: sess.run(accumulator.apply_grad(grad, local_step))
                    accumulator.apply_grad(grad, local_step)
            if worker == in_time[-1]:
                # tf: mean = accumulator.take_grad(num_required)
                means = [accumulator.take_grad(len(in_time)) for accumulator in accumulators]
                # tf: sess.run(opt.apply_gradients(zip(means, variables), global_step))
                opt.apply_gradients(zip(means, variables, strict=True), global_step)
        training.report(number, variables)
    # tf: sess.run(accumulator.num_accumulated())
    assert accumulators[0].num_accumulated() == 0
    assert accumulators[0].num_dropped == len(training.steps)


def sync_replicas(mesh: gr.Mesh, training: Training) -> None:
    """Trains synchronously, by one call per step."""
    variables = [gr.Variable(value, name, device=mesh) for name, value in training.initial.items()]
    opt = gr.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    # tf: opt = tf.train.SyncReplicasOptimizer(opt, replicas_to_aggregate, total_num_replicas)
    step = gr.SyncStep(variables, opt, gr.AllReduceCrossDeviceOps(), num_required=len(mesh))
    for number in training.steps:
        terms = []
        for replica in range(len(mesh)):
            with gr.replica(replica):
                # tf: pairs = opt.compute_gradients(loss, var_list)
                pairs = opt.compute_gradients(training.loss(variables, replica), variables)
            terms.append([[grad] for grad, _ in pairs])
        # tf: sess.run(opt.apply_gradients(pairs, global_step))
        step(terms)
        training.report(number, variables)


def agn(mesh: gr.Mesh, training: Training) -> None:
    """Trains without waiting for each other: a thread per worker."""
    center = gr.AGNCenter(mesh)  # TensorFlow's parameter servers
    # tf: global_step = tf.train.get_or_create_global_step()
    global_step = gr.Variable(0, "global_step", trainable=False, device=mesh[0])

    def work(task_index: int) -> None:
        # tf: getter = tf.contrib.opt.AGNCustomGetter(worker_device)
        getter = gr.AGNCustomGetter(mesh[task_index], center=center)
        # tf: w = tf.get_variable(name, initializer=value), in variable_scope(custom_getter=getter)
        variables = [
            gr.get_variable(name, value, custom_getter=getter)
            for name, value in training.initial.items()
        ]
        # tf: opt = tf.train.GradientDescentOptimizer(learning_rate=1.0)
        opt = gr.GradientDescentOptimizer(learning_rate=1.0)
        # tf: opt = tf.contrib.opt.AGNOptimizer(opt, num_worker, getter, communication_period=10)
        opt = gr.AGNOptimizer(opt, len(mesh), getter, communication_period=10)
        # tf: hook = opt.make_session_run_hook(is_chief, task_index)
        hook = opt.make_session_run_hook(task_index == 0, task_index, wait_timeout=60)
        # tf: with tf.train.MonitoredTrainingSession(is_chief=is_chief, hooks=[hook]) as sess:
        with hook:
            for number in training.steps:
                # tf: sess.run(opt.minimize(loss, global_step, var_list))
                opt.minimize(training.loss(variables, task_index), global_step, variables)
                if task_index == 0:
                    training.report(number, variables)

    workers = [center.start_worker(each, partial(work, each)) for each in range(len(mesh))]
    for worker in workers:
        worker.join()


# The report ------------------------------------------------------------------------------------


def save_picture(trainings: dict[str, Training], path: Path) -> None:
    """Saves a figure of loss and test accuracy over the steps."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, training in trainings.items():
        draw_losses(left, training.losses, name)
        draw_accuracies(right, training.accuracies, name)
    add_legends(left, right)
    figure.savefig(path, dpi=120)


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "steps of each training")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "port_from_tf1.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    # As in gr.default_mesh(), which add_n uses: GRADREDUCE_BACKEND=sim selects simulated devices.
    parser.set_defaults(devices=NUM_DEVICES, backend="auto", placement=None, kernels="numpy")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the four trainings; returns 0 if all reach the goal, else 1."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    digits = load()

    def run(mesh: gr.Mesh) -> dict[str, Training]:
        trainings = {}
        with Progress() as progress:
            for train in (mirrored, conditional_accumulators, sync_replicas, agn):
                bar = progress.add_task(train.__name__, total=options.steps)
                training = Training(digits, options, partial(progress.advance, bar))
                train(mesh, training)
                trainings[train.__name__] = training
        rows = {name: f"{each.accuracies[-1][1]:.4f}" for name, each in trainings.items()}
        print_table("Test accuracies", {"devices": where(mesh), **rows})
        return trainings

    trainings = on_devices(parser, options, run)
    save_picture(trainings, options.output)
    return conclude(min(each.accuracies[-1][1] for each in trainings.values()), options.output)


if __name__ == "__main__":
    sys.exit(main())
