"""Actors and workers on two nodes: ``python nodes_program.py SCENARIO FOLDER``.

Each node is a raylet of its own with its own object store, as on two machines. One of them may be
killed.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

scenario, FOLDER = sys.argv[1:]
for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
    os.environ.pop(name, None)
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    "RAY_worker_niceness": "0",
    "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
}

import numpy as np  # noqa: E402
import ray  # noqa: E402 - reads the variables
from ray.cluster_utils import Cluster  # noqa: E402

import gradreduce as gr  # noqa: E402
from gradreduce.errors import BackendUnavailableError  # noqa: E402

LIMIT_S = 60.0
SPECS = {"w": ("float64", [1_000_000]), "b": ("float64", [3]), "rows": ("float32", [1000, 8], True)}
NODE = {"num_cpus": 2, "object_store_memory": 150_000_000, "include_dashboard": False}
HEALTH = {  # a node that does not answer for five seconds has failed; default: 15 to 20
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 10,
}


def node_of(actor_name: str) -> str:
    actor = ray.get_actor(actor_name, namespace="gradreduce")
    ask = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(ask, timeout=LIMIT_S))


def placed(make: Callable[[str], Any], nodes: Sequence[str]) -> Any:
    """Makes actors until the shards are on these nodes: Ray chooses a node at random."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        made = make(f"nodes-{uuid.uuid4().hex[:8]}")
        names = [made.name, *(f"{made.name}#{shard}" for shard in range(1, len(nodes)))]
        if [node_of(each) for each in names] == list(nodes):
            return made
        made.close()
    raise AssertionError("no such placement")


def grads(value: float) -> list[Any]:
    rows = gr.IndexedSlices(np.full((2, 8), value, np.float32), [3, 7])
    return [np.full(1_000_000, value), np.full(3, value), rows]


def check(taken: dict[str, Any], value: float) -> None:
    found = [taken["w"], taken["b"], taken["rows"].values]
    assert [np.unique(each).tolist() for each in found] == [[value]] * 3, found
    assert taken["rows"].indices.tolist() == [3, 7]


def apply(shared: Any, value: float, count: int) -> str:
    for _ in range(count):
        assert shared.apply_grads(grads(value))
    return str(ray.get_runtime_context().get_node_id())


def push(center: Any, value: float, count: int) -> str:
    getter = gr.AGNCustomGetter(gr.default_mesh().devices[0], center=center)
    variables = [
        gr.get_variable(name, np.zeros(size), custom_getter=getter)
        for name, size in (("w", 200_000), ("b", 3))
    ]
    rule = gr.GradientDescentOptimizer(1.0)
    optimizer = gr.AGNOptimizer(rule, 2, getter, communication_period=1)
    for _ in range(count):
        optimizer.apply_gradients([(np.full(each.shape, value), each) for each in variables])
    return str(ray.get_runtime_context().get_node_id())


def center_values(center: Any) -> list[list[float]]:
    return [np.unique(each.numpy()).tolist() for each in center.variables()]


def on_nodes(function: Any, *arguments: Any) -> list[str]:
    """Runs a function with the driver's node and with the other, at the same time."""
    tasks = [ray.remote(resources={where: 1})(function).remote(*arguments) for where in ("a", "b")]
    return [str(each) for each in ray.get(tasks, timeout=LIMIT_S)]


def exchange(cluster: Cluster, a: str, b: str) -> None:
    """Workers on both nodes, actors on one or both: arrays cross between the object stores."""
    for nodes in ([a, b], [b, a]):
        make = partial(gr.ray.AccumulatorSet, SPECS, reduction_type="SUM", num_shards=len(nodes))
        with placed(make, nodes) as shared:
            assert on_nodes(apply, shared, 2.0, 5) == [a, b]
            check(shared.take_grads(10, timeout=LIMIT_S), 20.0)
        with placed(partial(gr.ray.AGNCenter, num_shards=len(nodes)), nodes) as center:
            assert on_nodes(push, center, 1.0, 5) == [a, b]
            assert center_values(center) == [[-10.0], [-10.0]]
            assert sorted(each.step for each in center.workers()) == [5, 5]


def worker_ends(cluster: Cluster, a: str, b: str) -> None:
    """The node of a worker ends while it applies and waits in a take: nobody else is affected."""

    def wait(shared: Any) -> None:
        shared.take_grads(10**6)

    make = partial(gr.ray.AccumulatorSet, SPECS, reduction_type="SUM", num_shards=2)
    with placed(make, [a, a]) as shared:
        there = ray.remote(resources={"b": 1}, max_retries=0)
        tasks = [there(apply).remote(shared, 1.0, 10**6), there(wait).remote(shared)]
        end = time.monotonic() + LIMIT_S
        while shared.num_accumulated() < 5:
            assert time.monotonic() < end
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        apply(shared, 1.0, 5)
        for task in tasks:
            with suppress(ray.exceptions.RayError):
                ray.get(task, timeout=LIMIT_S)
                raise AssertionError("the task goes on")
        count = shared.num_accumulated()
        check(shared.take_grads(count, timeout=LIMIT_S), count)
        for name in (shared.name, f"{shared.name}#1"):
            actor = ray.get_actor(name, namespace="gradreduce")
            held = actor.__ray_call__.remote(lambda shard: len(shard._staged))
            assert ray.get(held, timeout=LIMIT_S) == 0


def shard_ends(cluster: Cluster, a: str, b: str, *nodes: str) -> None:
    """The node of a shard ends: it continues on the other one, with all that was acknowledged."""
    options = {"num_shards": 2, "snapshots": FOLDER, "durability": "push"}
    make = partial(gr.ray.AccumulatorSet, SPECS, reduction_type="SUM", **options)
    with (
        placed(make, nodes) as shared,
        placed(partial(gr.ray.AGNCenter, **options), nodes) as center,
    ):
        apply(shared, 1.0, 5)
        push(center, 1.0, 5)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        start = time.monotonic()
        apply(shared, 1.0, 5)
        sys.stdout.write(f"continued after {time.monotonic() - start:.1f} s\n")
        push(center, 1.0, 5)
        check(shared.take_grads(10, timeout=LIMIT_S), 10.0)
        assert center_values(center) == [[-10.0], [-10.0]]
        assert node_of(shared.name) == node_of(f"{center.name}#1") == a
    assert list(Path(FOLDER).iterdir()) == []


def without_snapshots(cluster: Cluster, a: str, b: str) -> None:
    """Without snapshots it is an error for everybody, and a new set can be made."""
    make = partial(gr.ray.AccumulatorSet, SPECS, num_shards=2)
    shared = placed(make, [a, b])
    apply(shared, 1.0, 1)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    start = time.monotonic()
    try:
        apply(shared, 1.0, 1)
    except BackendUnavailableError as error:
        assert "pass snapshots= to survive" in str(error)
    else:
        raise AssertionError("the call was made")
    sys.stdout.write(f"raised after {time.monotonic() - start:.1f} s\n")
    shared.close()
    with make(shared.name) as again:
        apply(again, 1.0, 1)
        check(again.take_grads(1, timeout=LIMIT_S), 1.0)


SCENARIOS: dict[str, Callable[[Cluster, str, str], None]] = {
    "exchange": exchange,
    "worker_ends": worker_ends,
    "second_shard_ends": lambda cluster, a, b: shard_ends(cluster, a, b, a, b),
    "first_shard_ends": lambda cluster, a, b: shard_ends(cluster, a, b, b, a),
    "all_shards_end": lambda cluster, a, b: shard_ends(cluster, a, b, b, b),
    "without_snapshots": without_snapshots,
}


def main() -> None:
    head = {**NODE, "resources": {"a": 100}, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**{**NODE, "resources": {"b": 100}})
        cluster.wait_for_nodes(timeout=LIMIT_S)
        gr.ray.init(cluster.address)
        where = {
            name: each["NodeID"]
            for each in ray.nodes()
            for name in "ab"
            if name in each["Resources"]
        }
        SCENARIOS[scenario](cluster, where["a"], where["b"])
        sys.stdout.write("done\n")
        sys.stdout.flush()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
