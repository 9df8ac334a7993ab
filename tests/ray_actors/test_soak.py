"""Thousands of calls of four worker processes, and calls on two nodes, one of which is killed."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import processes
from support.libraries import ray

import gradreduce as gr

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.slow]
NUM_WORKERS, NUM_CALLS = 4, 2500  # of each worker
LIMIT_S = 300.0  # 10,000 calls with kills take 40 to 130 s on two cores


def of_worker(worker: int) -> np.ndarray:
    """A gradient of one worker: one in its place, zero elsewhere."""
    return np.eye(NUM_WORKERS)[worker]


def apply_all(shared: Any, worker: int) -> None:
    for _ in range(NUM_CALLS):
        grads = [of_worker(worker), np.float64(1.0)] if worker else [None, None]
        assert shared.apply_grads(grads, weight=worker)


def push_all(center: Any, worker: int) -> None:
    getter = gr.AGNCustomGetter(gr.default_mesh().devices[0], center=center)
    variable = gr.get_variable("v", np.zeros(NUM_WORKERS), custom_getter=getter)
    rule = gr.GradientDescentOptimizer(1.0)
    optimizer = gr.AGNOptimizer(rule, NUM_WORKERS, getter, communication_period=1)
    for _ in range(NUM_CALLS):
        optimizer.apply_gradients([(of_worker(worker), variable)])


def run_workers(function: Any, shared: Any, name: str, *, kills: bool) -> int:
    """Runs the workers to their end; returns how often the actor was killed meanwhile."""
    choose, num_kills = random.Random(0), 0
    start = ray.remote(num_cpus=1, max_retries=0)(function).remote
    tasks = [start(shared, worker) for worker in range(NUM_WORKERS)]
    while kills:
        ended, running = ray.wait(tasks, num_returns=NUM_WORKERS, timeout=choose.uniform(0.5, 4))
        ray.get(ended)
        if not running:
            break
        actor = ray.get_actor(name, namespace="gradreduce")
        pid = actor.__ray_call__.remote(lambda _: __import__("os").getpid())
        os.kill(ray.get(pid, timeout=60), signal.SIGKILL)
        num_kills += 1
    ray.get(tasks, timeout=LIMIT_S)
    return num_kills


@pytest.mark.parametrize("kills", [False, True])
def test_applies_and_takes(unique_name, tmp_path, kills):
    options = {"snapshots": tmp_path, "durability": "push"} if kills else {}
    specs = [("float64", [NUM_WORKERS]), ("float64", [])]
    with gr.ray.AccumulatorSet(specs, unique_name, "SUM", **options) as shared:
        num_kills = run_workers(apply_all, shared, unique_name, kills=kills)
        assert num_kills > 0 or not kills
        count = shared.num_accumulated()
        assert count == NUM_WORKERS * NUM_CALLS
        weights = [NUM_CALLS * worker for worker in range(NUM_WORKERS)]
        for state in shared.state_dict()["accumulators"]:
            assert state["weight"] == [sum(weights)]
        rows, one = shared.take_grads(count, timeout=60)
        assert rows.tolist() == weights
        assert one == sum(weights)


@pytest.mark.parametrize("kills", [False, True])
def test_pushes_to_a_center(unique_name, tmp_path, kills):
    options = {"snapshots": tmp_path, "durability": "push"} if kills else {}
    center = gr.ray.AGNCenter(unique_name, **options)
    try:
        num_kills = run_workers(push_all, center, unique_name, kills=kills)
        assert num_kills > 0 or not kills
        (found,) = center.variables()
        assert found.numpy().tolist() == [-NUM_CALLS] * NUM_WORKERS
    finally:
        center.close()


PROGRAM = Path(__file__).with_name("nodes_program.py")


@pytest.mark.parametrize(
    "scenario",
    [
        "exchange",
        "worker_ends",
        "second_shard_ends",
        "first_shard_ends",
        "all_shards_end",
        "without_snapshots",
    ],
)
def test_two_nodes(tmp_path, scenario):
    done = processes.run("none", 1, str(PROGRAM), scenario, str(tmp_path))
    assert done.returncode == 0, done.text
