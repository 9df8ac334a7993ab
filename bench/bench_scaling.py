"""Measures how an all-reduce scales with the number of tensors, replicas and bytes.

Mean of replicas in flat buffers by ``hierarchical_copy``, prepared in place and as a plain call: on
logical devices of GPU 0 if CuPy finds one, otherwise on simulated devices with compiled kernels.
The copy reads and writes as many bytes as the all-reduce must, on a CPU in one thread. A size that
needs more than a quarter of the free memory is left out, and the report says so. Our Python's time
is measured separately, with a driver that does nothing (``measure/many_tensors.py``).

    python bench/bench_scaling.py [--json FILE] [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
from measure import many_tensors
from measure.all_reduce_peers import NUMPY, numpy_sum_and_copies
from measure.case import OURS, Case
from measure.clock import Call, Clock, HostClock, clock_of
from measure.floors import Floor, counted, over_the_copy
from measure.random_values import fill, integers
from measure.reduced import Reduced
from measure.report import finish, options_of, report_of
from measure.setting import has_gpu

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
PREPARED, PLAIN = "prepared", "plain"

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
          over_the_copy(f"compiled, {PREPARED}"), "<=", 1.1, "docs/benchmarks.md"),
    *HOST_FLOORS,
)  # fmt: skip
GPU_FLOORS = HOST_FLOORS


def free_bytes() -> int:
    """Returns how much memory of the host is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Bench:
    """The sweeps."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.on_gpu = has_gpu()
        self.implementation = "cuda" if self.on_gpu else "compiled"
        self.cases: dict[str, Case] = {}
        self.absent: dict[str, str] = {}

    def run(self) -> None:
        """Runs all cases; each frees its memory when it ends."""
        for count in self._up_to(TENSORS, QUICK_MOST_TENSORS):
            self.case(f"tensors, {count:,}", NUM_DEVICES, count, TENSOR_SIZE)
        self.host_cases(self._up_to(HOST_TENSORS, QUICK_MOST_TENSORS))
        for count in self._up_to(REPLICAS, QUICK_MOST_REPLICAS):
            self.case(f"replicas, {count}", count, 1, QUICK_SIZE if self.quick else REPLICA_SIZE)
        for nbytes in self._up_to(BYTES, QUICK_MOST_BYTES):
            name = f"bytes, {nbytes:,} in all"
            if 4 * nbytes > free_bytes() and not self.on_gpu:
                self.absent[name] = f"{free_bytes() / 2**30:.0f} GiB of memory are free"
                continue
            self.case(name, NUM_DEVICES, 1, nbytes // 4 // NUM_DEVICES)

    def _up_to(self, values: Sequence[int], most: int) -> list[int]:
        return [value for value in values if value <= most or not self.quick]

    def case(self, name: str, num_devices: int, num_tensors: int, size: int) -> None:
        """Reduces tensors of one size on some devices."""
        calls: dict[str, Call] = {}
        with self._mesh(num_devices) as mesh:
            replica = 4 * num_tensors * size
            nbytes = num_devices * replica
            is_small = num_tensors <= MOST_TENSORS and nbytes <= MOST_BYTES
            for way, make in ((PREPARED, prepared), (PLAIN, plain)):
                if way == PREPARED or is_small:
                    calls[f"{OURS}{self.implementation}, {way}"] = make(mesh, num_tensors, size)
            if nbytes <= MOST_PEER_BYTES and num_devices > 1 and not self.on_gpu:
                rows = np.ones((num_tensors, num_devices, size), np.float32)
                calls[NUMPY] = numpy_sum_and_copies([list(row) for row in rows])
            moved = 2 * num_devices * replica
            took = self._clock(mesh).measure(calls, moved)
        words = f"{num_tensors:,} tensors, {replica / 1e6:.6g} MB of float32 each replica"
        case = Reduced(name, words, moved, took, {}, replica, num_devices)
        case.show()
        self.cases[name] = case

    def host_cases(self, counts: Sequence[int]) -> None:
        """Measures our Python alone, for each number of tensors."""
        for count, figures in zip(counts, many_tensors.measured(counts), strict=True):
            name = f"host, {count:,} tensors"
            self.cases[name] = Case(name, figures=figures)
            self.cases[name].show()

    def _mesh(self, num_devices: int) -> gr.Mesh:
        if self.on_gpu:
            return gr.open_mesh([0] * num_devices, backend="cuda")
        return gr.open_mesh(num_devices, backend="sim", kernels="compiled", strict=False)

    def _clock(self, mesh: gr.Mesh) -> Clock:
        if self.on_gpu:
            return clock_of(mesh, quick=self.quick)
        return HostClock(self.quick, copy_threads=1, rounds=ROUNDS)


def pairs_of(
    mesh: gr.Mesh, num_tensors: int, size: int
) -> list[tuple[gr.PerReplica, gr.PerReplica]]:
    """Returns values in flat buffers; the first tensor has small integers."""
    flat = mesh.flat_buffer([(size,)] * num_tensors, "float32")
    views = flat.views
    for replica, device in enumerate(mesh):
        fill(flat.buffers[replica])
        device.upload(integers(size) + np.float32(replica), out=views[replica][0])
    values = [gr.PerReplica(list(column), mesh) for column in zip(*views, strict=True)]
    return [(value, value) for value in values]


def prepared(mesh: gr.Mesh, num_tensors: int, size: int) -> Call:
    """Returns a prepared step in place, after a first one that is checked."""
    pairs = pairs_of(mesh, num_tensors, size)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    step = ops.prepare(gr.ReduceOp.MEAN, pairs, out=[value for value, _ in pairs])
    step()
    for buffer in pairs[0][0].buffers:
        if not np.array_equal(buffer.numpy(), integers(size) + np.float32((len(mesh) - 1) / 2)):
            raise AssertionError("the result is not the mean")
    return step


def plain(mesh: gr.Mesh, num_tensors: int, size: int) -> Call:
    """Returns a plain call, whose results are new."""
    pairs = pairs_of(mesh, num_tensors, size)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    return partial(ops.batch_reduce, gr.ReduceOp.MEAN, pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    load = os.getloadavg()[0]
    bench = Bench(quick=options.quick)
    print(f"{bench.implementation}; load average {load:.2f}")
    bench.run()
    floors = GPU_FLOORS if bench.on_gpu else CPU_FLOORS
    report = report_of([bench.implementation], load, bench, floors, quick=options.quick)
    finish(report, options.json)


if __name__ == "__main__":
    main()
