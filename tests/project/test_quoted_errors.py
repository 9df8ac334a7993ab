"""The errors in the tables of docs/ are those of the library."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradreduce as gr

pytestmark = pytest.mark.repo
DOCS = Path(__file__).resolve().parents[2] / "docs"
ONES = np.ones(3, np.float32)
# Raised by processes, actors, late devices, signal handlers or what is not installed.
ELSEWHERE = (
    "CollectiveError", "BackendUnavailableError: backend=", "opened by process 4711",
    "TakeGrad operation was cancelled", "CaptureError",
    "actor 'bias'", " of 'bias'", ": 'bias'", "Ray",
)  # fmt: skip


def quotes(page: str) -> list[str]:
    """The errors in the first column of a page's tables."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^\| (?:`(\w+Error: [^`]*)`|``(\w+Error: .*?)``) \|", text, re.MULTILINE)
    return ["".join(pair) for pair in found]


def without_seconds(text: str) -> str:
    return re.sub(r"\b[\d.]+ s\b", "60 s", text)


def raised(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError, TimeoutError)) as caught:
        call()
    return without_seconds(f"{caught.type.__name__}: {caught.value.args[0]}")


def fits(message: str, quote: str) -> bool:
    """Whether a page quotes this message; ``…`` stands for any text."""
    parts = [re.escape(part.strip()) for part in without_seconds(quote).split("…")]
    return re.fullmatch(".*".join(parts), message, re.DOTALL) is not None


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
        lambda: step([[[gr.IndexedSlices(ONES, [0, 1, 2])]]] * 4),
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
    """Each call raises an error that the page quotes, and each quote is raised by a call."""
    messages = [raised(call) for call in calls()]
    found = quotes(f"{calls.__name__}.md")
    wanted = [quote for quote in found if not any(text in quote for text in ELSEWHERE)]
    assert wanted
    assert [one for one in messages if not any(fits(one, quote) for quote in wanted)] == []
    assert [quote for quote in wanted if not any(fits(one, quote) for one in messages)] == []
