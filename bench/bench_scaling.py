"""Measures how an all-reduce scales with the number of tensors, replicas and bytes."""

import gc
import os
import sys
import time
import timeit
from collections.abc import Sequence
from functools import partial

import numpy as np
from measure import stub_cupy
from measure.case import OURS, Case, Floor, counted, over
from measure.clock import Call, HostClock
from measure.in_processes import figures_of
from measure.peers import SUM_AND_COPIES, sum_and_copies
from measure.reductions import Reduction, placed
from measure.runner import Bench, Benchmark

import gradreduce as gr

TENSORS = tuple(10**power for power in range(6))
HOST_TENSORS = (1, 10, 1_000, 100_000)
REPLICAS = tuple(2**power for power in range(7))
BYTES = tuple(2**power for power in (10, 15, 20, 25, 30, 32))  # of all replicas together
NUM_DEVICES, TENSOR_SIZE, REPLICA_SIZE = 4, 16, 2**20  # sizes in elements of float32
MOST_TENSORS, MOST_BYTES = 10_000, 2**28  # of plain calls, which would take seconds
MOST_PEER_BYTES = 2**30  # of peers, which have arrays of their own
QUICK_MOST_TENSORS, QUICK_MOST_REPLICAS, QUICK_MOST_BYTES, QUICK_SIZE = 10, 2, 2**10, 2**8
ROUNDS = 5
LOOPS, CALLS = 20, 200  # of the host
PREPARED = "prepared"

LARGEST_FLOOR = "bytes, 1,073,741,824 in all"
MANY_TENSORS = f"host, {HOST_TENSORS[-1]:,} tensors"
# On an AMD EPYC virtual machine with 2 cores that others kept busy, 2026-11.
HOST_FLOORS = tuple(
    Floor(
        f"{HOST_TENSORS[-1]:,} tensors, {figure}", MANY_TENSORS, counted(figure), "<=", bound, found
    )
    for figure, bound, found in (
        ("captured step, us", 10, "4.2"),
        ("prepared step, us", 10, "3.8"),
        ("captured step, launches", 1, "1"),
        ("captured step, uploads", 0, "0"),
        ("apply_gradients, launches", 1, "1"),
        ("apply_grads, launches", 1, "1"),
    )
)
CPU_FLOORS = (
    Floor("compiled, prepared, over the copy at 1 GiB", LARGEST_FLOOR,
          over("copy", f"compiled, {PREPARED}"), "<=", 1.1, "docs/benchmarks.md"),
    *HOST_FLOORS,
)  # fmt: skip
GPU_FLOORS = HOST_FLOORS


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def up_to(bench: Bench, values: Sequence[int], most: int) -> list[int]:
    """Returns all values, or small ones with ``--quick``."""
    return [value for value in values if value <= most or not bench.quick]


def case(bench: Bench, name: str, num_devices: int, num_tensors: int, size: int) -> None:
    replica = 4 * num_tensors * size
    nbytes = num_devices * replica
    ours = OURS + ("cuda" if bench.on_gpu else "compiled")
    calls: dict[str, Call] = {}
    if bench.on_gpu:
        opened = gr.open_mesh([0] * num_devices, backend="cuda")
    else:
        opened = gr.open_mesh(num_devices, backend="sim", kernels="compiled", strict=False)
    with opened as mesh:
        reduction = Reduction(mesh, placed(mesh, [(size,)] * num_tensors, flat=True))
        if num_tensors <= MOST_TENSORS and nbytes <= MOST_BYTES:
            calls[f"{ours}, plain"] = reduction.plain()
        calls[f"{ours}, {PREPARED}"] = reduction.checked(partial(reduction.prepared, in_place=True))
        if nbytes <= MOST_PEER_BYTES and num_devices > 1 and not bench.on_gpu:
            rows = np.ones((num_tensors, num_devices, size), np.float32)
            calls[f"numpy {SUM_AND_COPIES}"] = sum_and_copies(np, np.copyto, rows)
        moved = 2 * num_devices * replica
        took = bench.clock_of(mesh).measure(calls, moved)
    words = f"{num_tensors:,} tensors, {replica / 1e6:.6g} MB of float32 each replica"
    bench.keep(Case(name, words, moved, took))


def host_figures(counts: Sequence[int]) -> list[dict[str, float]]:
    """Returns what steps over each number of tensors take, on a driver that does nothing.

    Must run in a process of its own, where ``stub_cupy`` becomes CuPy.
    """
    stub_cupy.install()
    gc.disable()  # which would look at all tensors again and again; ``capture`` pauses it anyway
    return [host_figures_of(count) for count in counts]


def host_figures_of(count: int) -> dict[str, float]:
    """Returns times and counts of one all-reduce, one update and one joint apply of all tensors.

    The tensors of the all-reduce are reduced where they lie, without packs.
    """
    mesh = gr.open_mesh([0] * NUM_DEVICES, backend="cuda")
    first, shape = mesh.devices[0], (TENSOR_SIZE,)
    values = [
        gr.PerReplica([device.empty(shape, "float32") for device in mesh], mesh)
        for _ in range(count)
    ]
    reduction = Reduction(mesh, values, 0)
    start = time.process_time()
    captured = reduction.captured()
    found = {"first plan, s": time.process_time() - start}
    captured()
    found |= logged(mesh, "captured step", captured)
    for name, step in (("captured", captured), ("prepared", reduction.prepared())):
        step()
        # The best of several loops.
        taken = timeit.repeat(step, repeat=LOOPS, number=CALLS, timer=time.process_time)
        found[f"{name} step, us"] = min(taken) / CALLS * 1e6
        found[f"{name} step, Python calls"] = python_calls(step)
    grads = [value.buffers[0] for value in values]
    variables = [gr.Variable(np.zeros(shape, np.float32), device=first) for _ in range(count)]
    sums = [gr.ConditionalAccumulator("float32", shape, device=first) for _ in range(count)]
    update = gr.GradientDescentOptimizer(0.5).apply_gradients
    pairs = list(zip(grads, variables, strict=True))
    found |= logged(mesh, "apply_gradients", partial(update, pairs))
    found |= logged(mesh, "apply_grads", partial(gr.apply_grads, sums, grads, 0))
    return found


def python_calls(call: Call) -> int:
    """Returns how many functions of Python and C a call calls."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def logged(mesh: gr.Mesh, name: str, call: Call) -> dict[str, float]:
    """Returns the launches and uploads of a call; a pointer table that is built is an upload."""
    with mesh.journal() as journal:
        call()
    return {f"{name}, launches": journal.launches, f"{name}, uploads": journal.uploads}


def cases(bench: Bench) -> None:
    for count in up_to(bench, TENSORS, QUICK_MOST_TENSORS):
        case(bench, f"tensors, {count:,}", NUM_DEVICES, count, TENSOR_SIZE)
    counts = up_to(bench, HOST_TENSORS, QUICK_MOST_TENSORS)
    found = figures_of("bench_scaling:host_figures", counts)
    for count, figures in zip(counts, found, strict=True):
        bench.note(f"host, {count:,} tensors", "", figures)
    for count in up_to(bench, REPLICAS, QUICK_MOST_REPLICAS):
        case(bench, f"replicas, {count}", count, 1, bench.pick(REPLICA_SIZE, QUICK_SIZE))
    for nbytes in up_to(bench, BYTES, QUICK_MOST_BYTES):
        name = f"bytes, {nbytes:,} in all"
        if 4 * nbytes > free_bytes() and not bench.on_gpu:
            bench.absent[name] = f"{free_bytes() / 2**30:.0f} GiB of memory are free"
            continue
        case(bench, name, NUM_DEVICES, 1, nbytes // 4 // NUM_DEVICES)


BENCHMARK = Benchmark(
    __doc__, cases, CPU_FLOORS, GPU_FLOORS,
    host_clock=partial(HostClock, copy_threads=1, rounds=ROUNDS), implementation="compiled",
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
