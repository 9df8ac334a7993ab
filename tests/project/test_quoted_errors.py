"""The errors in the tables of docs/ are raised, with the text that the page quotes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ray_cluster import in_actor

import gradreduce as gr

pytestmark = pytest.mark.repo
DOCS = Path(__file__).resolve().parents[2] / "docs"
ONES = np.ones(3, np.float32)
# Raised by processes, late devices, signal handlers or what is not installed: tests of these quote
# them.
ELSEWHERE = (
    "CollectiveError", "BackendUnavailableError: backend=", "opened by process 4711",
    "TakeGrad operation was cancelled", "CaptureError",
)  # fmt: skip
# In errors of actors, on a page with other errors.
OF_ACTORS = ("actor 'bias'", " of 'bias'", ": 'bias'", "Ray")


def quotes(page: str) -> list[str]:
    """The errors in the first column of a page's tables."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^\| (?:`(\w+Error: [^`]*)`|``(\w+Error: .*?)``) \|", text, re.MULTILINE)
    return ["".join(pair) for pair in found if not any(e in "".join(pair) for e in ELSEWHERE)]


def without_seconds(text: str) -> str:
    return re.sub(r"\b[\d.]+ s\b", "60 s", text)


def raised(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError, KeyError, TimeoutError)) as caught:
        call()
    return without_seconds(f"{caught.type.__name__}: {caught.value.args[0]}")


def fits(message: str, quote: str) -> bool:
    """Whether a page quotes this message; ``…`` stands for any text."""
    parts = [re.escape(part.strip()) for part in without_seconds(quote).split("…")]
    return re.fullmatch(".*".join(parts), message, re.DOTALL) is not None


def check(page: str, calls: list[Callable[[], object]]) -> None:
    """Each call raises an error that the page quotes, and each quote is raised by a call."""
    compare(
        [raised(call) for call in calls],
        [quote for quote in quotes(page) if not any(text in quote for text in OF_ACTORS)],
    )


def compare(messages: list[str], wanted: list[str]) -> None:
    assert wanted
    assert [one for one in messages if not any(fits(one, quote) for quote in wanted)] == []
    assert [quote for quote in wanted if not any(fits(one, quote) for one in messages)] == []


def several_gpus() -> list[Callable[[], object]]:
    mesh, other = (gr.open_mesh(4, backend="sim") for _ in range(2))
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
    value, elsewhere = (gr.PerReplica([ONES] * 4, each) for each in (mesh, other))
    w = gr.Variable(ONES, "w", device=mesh)
    step = gr.SyncStep([w], gr.GradientDescentOptimizer(0.5), ops)
    wide = ONES.astype(np.float64)
    return [
        lambda: ops.all_reduce([[ONES]]),
        lambda: ops.all_reduce([[wide], [wide], [wide], [ONES]]),
        lambda: step([[ONES]] * 4),
        lambda: step([[[wide]]] * 4),
        lambda: ops.reduce(gr.ReduceOp.SUM, value, elsewhere),
    ]


def simulation() -> list[Callable[[], object]]:
    def without_threads() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRADREDUCE_SIM_THREADS", "0")
            gr.open_mesh(1, backend="sim")

    return [lambda: gr.open_mesh(0, backend="sim"), without_threads]


def accumulators() -> list[Callable[[], object]]:
    mesh = gr.open_mesh(1, backend="sim")
    late, fixed, free, closed, shared = (
        gr.ConditionalAccumulator("float32", shape, name, device=mesh[0])
        for shape, name in (([3], ""), ([3], ""), (None, ""), ([3], ""), ([3], "w"))
    )
    late.apply_grad(ONES)
    late.take_grad(1)
    late.apply_grad(ONES, local_step=0)
    free.apply_grad(ONES)
    closed.close()
    sparse = partial(gr.SparseConditionalAccumulator, "float32", device=mesh[0])
    per_row = sparse().state_dict()
    return [
        lambda: late.take_grad(1, timeout=1e-3),
        lambda: fixed.apply_grad(ONES.astype(np.float64)),
        lambda: fixed.apply_grad(ONES[:2]),
        lambda: free.apply_grad(ONES[:2]),
        lambda: (shared, gr.ConditionalAccumulator("float32", [2], "w", device=mesh[0])),
        lambda: closed.apply_grad(ONES),
        lambda: sparse(sparse_mean="per_gradient").load_state_dict(per_row),
        lambda: sparse(reduction_type="SUM", sparse_mean="per_gradient"),
    ]


def agn() -> list[Callable[[], object]]:
    mesh, other = (gr.open_mesh(2, backend="sim") for _ in range(2))
    center = gr.AGNCenter(mesh)
    getter, second = (gr.AGNCustomGetter(device, center=center) for device in mesh)
    gr.get_variable("w", np.zeros(2), custom_getter=getter)
    optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, getter)
    foreign = gr.Variable(np.zeros(2), device=mesh[0])

    def start_alone() -> None:
        with optimizer.make_session_run_hook(True, 0, wait_timeout=1e-3):
            pass

    return [
        lambda: gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, getter),
        lambda: gr.get_variable("w", np.zeros(3), custom_getter=second),
        lambda: gr.AGNOptimizer(gr.AdamOptimizer(), 2, second),
        lambda: optimizer.apply_gradients([(np.ones(2), foreign)]),
        start_alone,
        lambda: gr.AGNCustomGetter(other[0], center=center),
    ]


def debugging() -> list[Callable[[], object]]:
    mesh, failing = (gr.open_mesh(1, backend="sim") for _ in range(2))
    mesh.close()
    failing.mesh_state.mark_failed(0, "an error of the driver")
    accumulator = gr.ConditionalAccumulator("float32", [3], name="w")
    accumulator.close()
    return [
        lambda: gr.all_reduce([[ONES]], mesh=mesh),
        lambda: gr.all_reduce([[ONES]], mesh=failing),
        lambda: accumulator.take_grad(1),
    ]


def gradients() -> list[Callable[[], object]]:
    loss: Any = 3.0
    return [lambda: gr.GradientDescentOptimizer(0.5).minimize(loss)]


@pytest.mark.parametrize(
    "calls", [several_gpus, simulation, accumulators, agn, debugging, gradients]
)
def test_quoted_errors_are_raised(calls: Callable[[], list[Callable[[], object]]]) -> None:
    check(f"{calls.__name__}.md", calls())


@pytest.mark.torch
def test_quoted_errors_of_modules_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh = gr.open_mesh(2, backend="sim")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh[:1]))
    x = torch.ones(4, 8)
    first, second = (gr.torch.DataParallel(torch.nn.Linear(8, 1), mesh) for _ in range(2))
    rows = gr.torch.DataParallel(torch.nn.Linear(2, 4, bias=False), mesh[:1])
    sparse = torch.nn.functional.embedding
    moved, partly = ([torch.nn.Linear(8, 1) for _ in mesh] for _ in range(2))
    weight, _ = gr.torch.variables(moved, mesh)
    moved[0].to(torch.float64)
    for net in partly:
        net(x).sum().backward()
    partly[0].bias.grad = None
    group = {"params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": 0.5}
    third = gr.torch.DataParallel(torch.nn.Linear(8, 1), mesh)
    third.module.load_state_dict(torch.nn.Linear(8, 1).state_dict())
    getter = gr.AGNCustomGetter(mesh[0], center=gr.AGNCenter(mesh))
    gr.torch.functional(net, getter)

    def backward(*replicas: Any, x: Any = x) -> None:
        for replica in replicas:
            replica(x).sum().backward()

    def compiled() -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(backward, backend="eager")(second.replicas[0])

    def faked() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            gr.torch.DataParallel(torch.nn.Linear(8, 1), mesh)

    check(
        "pytorch.md",
        [
            compiled,
            faked,
            lambda: hook(None, (x, x)),
            lambda: backward(first.replicas[0], first.replicas[0]),
            lambda: second(x),
            lambda: backward(*third.replicas, *third.replicas),
            lambda: setattr(second.replicas[0], "weight", torch.nn.Parameter(torch.zeros(1, 8))),
            weight.numpy,
            lambda: sparse(torch.tensor([1]), rows.module.weight, sparse=True).sum().backward(),
            lambda: gr.torch.Optimizer(gr.MomentumOptimizer(0.1, 0.9), [group]),
            lambda: gr.AllReduceCrossDeviceOps(mesh=mesh).all_reduce(torch.nn.ModuleList(partly)),
            lambda: gr.torch.functional(net, getter),
        ],
    )


def shared(name: str, dtype: str = "float32", **options: Any) -> Any:
    return gr.ray.ConditionalAccumulator(dtype, [3], name, **options)


def sharded(name: str, **options: Any) -> Any:
    return gr.ray.AccumulatorSet([("float32", [3])] * 2, name, num_shards=2, **options)


def pid_of(name: str) -> int:
    return in_actor(name, lambda _: os.getpid())


def actors(name: str, patch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Calls that raise errors of actors; the last ones make Ray unusable until ``patch`` ends."""
    import ray

    first, closed = shared(f"{name}-1"), shared(f"{name}-2")
    closed.close()

    def without_ray() -> None:
        patch.setattr(ray, "is_initialized", lambda: False)
        first.num_accumulated()

    def without_token() -> None:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        gr.ray.init("local")

    def forked() -> None:
        patch.setattr("gradreduce.ray.cluster._was_forked", True)
        first.num_accumulated()

    return [
        lambda: shared(f"{name}-1", "float64"),
        lambda: first.take_grad(1, timeout=1e-3),
        closed.num_accumulated,
        without_ray,
        without_token,
        forked,
    ]


def failing_actors(name: str, folder: Path) -> list[Callable[[], object]]:
    """Calls of actors that were stopped or killed, or cannot start."""
    late, ended, half = shared(f"{name}-3"), shared(f"{name}-4"), sharded(f"{name}-5")
    half.apply_grads([ONES, ONES])
    for each in (ended.name, f"{half.name}#1"):
        os.kill(pid_of(each), signal.SIGKILL)
    (folder / "file").touch()
    (folder / f"{name}-7#1.1.snapshot").write_bytes(b"damaged")

    def without_answer() -> None:
        process, late._client._timeout = pid_of(late.name), 0.1
        os.kill(process, signal.SIGSTOP)
        try:
            late.apply_grad(ONES)
        finally:
            os.kill(process, signal.SIGCONT)
            late.close()

    return [
        without_answer,
        ended.num_accumulated,
        lambda: half.apply_grads([ONES, ONES]),
        lambda: shared(f"{name}-6", snapshots=folder / "file"),
        lambda: sharded(f"{name}-7", snapshots=folder),
    ]


@pytest.mark.ray
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_quoted_errors_of_actors_are_raised(fails: bool, unique_name: str, tmp_path: Path) -> None:
    of_meshes = [raised(call) for call in debugging()]
    wanted = {quote for page in ("ray.md", "debugging.md") for quote in quotes(page)}
    wanted = {one for one in wanted if not any(fits(mesh, one) for mesh in of_meshes)}
    calls = failing_actors(unique_name, tmp_path) if fails else []
    with pytest.MonkeyPatch.context() as patch:
        messages = [raised(call) for call in (*calls, *actors(unique_name, patch))]
    shared(f"{unique_name}-1").close()
    messages = [re.sub(rf"'{unique_name}-\d'", "'bias'", message) for message in messages]
    if not fails:
        wanted = {one for one in wanted if any(fits(message, one) for message in messages)}
    compare(messages, sorted(wanted))


def test_other_texts_do_not_fit() -> None:
    assert fits("ValueError: a is float32[3], not b", "ValueError: … is float32[3], not b")
    assert not fits("ValueError: a is float32[3], not c", "ValueError: … is float32[3], not b")
    assert not fits("TypeError: a", "ValueError: …")
    assert not fits("ValueError: a and more", "ValueError: a")
