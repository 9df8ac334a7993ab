"""Compares our Python's time per CUDA call in two checkouts, on a driver that does nothing.

    python bench/cuda_host_time.py OLD [NEW]

OLD and NEW (default: this one) are checkouts. Each runs in its own process, with
``measure/stub_cupy.py`` instead of CuPy. The two take turns, so that load affects both, and are
compared by processor time. Needs neither a GPU nor CuPy.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_LOGICAL, ROUNDS = 8, 25
# Case -> calls in a round.
CASES = {
    "plain": 4,
    "plain, one tensor": 100,
    "prepared": 2000,
    "captured": 2000,
    "prepared, CuPy arrays": 400,
    "captured, CuPy arrays": 1000,
    "plain, CuPy arrays": 3,
    "gr.all_reduce, CuPy arrays": 2,
    "SyncStep, CuPy arrays": 1,
}


def calls_of(mesh: Any) -> dict[str, Callable[[], object]]:
    """Returns the calls of the cases."""
    import cupy
    from measure.operands import resnet50
    from measure.reductions import Reduction

    import gradreduce as gr

    own, of_cupy = [], []
    for shape in resnet50():
        own.append(gr.PerReplica([device.zeros(shape, "float32") for device in mesh], mesh))
        of_cupy.append(gr.PerReplica([cupy.ndarray(shape, "float32") for _ in mesh], mesh))
    calls: dict[str, Callable[[], object]] = {"plain, one tensor": Reduction(mesh, own[:1]).plain()}
    for kind, values in (("", own), (", CuPy arrays", of_cupy)):
        reduction = Reduction(mesh, values)
        calls[f"plain{kind}"] = reduction.plain()
        calls[f"prepared{kind}"] = reduction.prepared()
        calls[f"captured{kind}"] = reduction.captured()
    grads = [[cupy.ndarray(shape, "float32") for shape in resnet50()] for _ in mesh]
    calls["gr.all_reduce, CuPy arrays"] = lambda: gr.all_reduce(grads, mesh=mesh)
    variables = [gr.Variable(mesh[0].zeros(shape, "float32"), device=mesh) for shape in resnet50()]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(0.1), ops)
    terms = [[[grad] for grad in of_device] for of_device in grads]
    calls["SyncStep, CuPy arrays"] = lambda: step(terms)
    return calls


def work() -> None:
    """Measures the checkout whose ``src`` comes first in ``sys.path``.

    Reads lines with a case and a number of calls from the parent.
    """
    from measure import stub_cupy

    stub_cupy.install()
    import gradreduce as gr

    mesh = gr.open_mesh([0] * NUM_LOGICAL, backend="cuda")
    calls = calls_of(mesh)
    for call in calls.values():
        for _ in range(3):  # fills caches
            call()
    gc.collect()
    gc.freeze()  # so that no case pays for what the others keep
    for line in sys.stdin:
        name, number = json.loads(line)
        call = calls[name]
        for device in mesh:  # memory that another case has freed
            device.drain()
        start = time.process_time()
        for _ in range(number):
            call()
        print((time.process_time() - start) / number, flush=True)


def started(checkout: Path) -> subprocess.Popen[str]:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import cuda_host_time; cuda_host_time.work()"
    paths = [str(checkout.resolve() / "src"), str(Path(__file__).resolve().parent)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *paths],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def seconds_of(process: subprocess.Popen[str], name: str, number: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([name, number]) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    options = parser.parse_args()
    workers = [started(options.old), started(options.new)]
    for name, number in CASES.items():
        pairs: list[list[float]] = []
        for index in range(ROUNDS):
            turn = 1 if index % 2 else -1  # who is first
            pairs.append([seconds_of(each, name, number) for each in workers[::turn]][::turn])
        before, after = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
        ratio = statistics.median(new / old for old, new in pairs)
        print(f"{name:24} old {before:9.2f} us   new {after:9.2f} us   ratio {ratio:5.3f}")
    for worker in workers:
        worker.communicate()
