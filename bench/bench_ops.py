"""Measures sums, packing and merging on one device, compared with a copy and peers.

On a GPU if CuPy finds one, otherwise with both implementations of a simulated device. Every line
gives the time of the operation and its rate relative to a plain copy (bytes read plus bytes
written, measured in the same rounds). Reports peers that are not installed. Exit status 1 if a
floor is violated.

    python bench/bench_ops.py [--json FILE] [--quick]
"""

from __future__ import annotations

import importlib.util
import os
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from measure.case import OURS, Case
from measure.clock import Call, clock_of, host_seconds
from measure.floors import (
    Decision,
    Floor,
    counted,
    kept,
    of_the_copy,
    over_the_copy,
    over_the_peer,
    times_the_peer,
)
from measure.peers import SPLIT, find_peers
from measure.random_values import fill, normals
from measure.report import finish, options_of
from measure.resnet50 import resnet50

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Buffer, Device, Mesh, flat_layout

NUM_TERMS = 8
MANY, MANY_SIZE = 10_000, 256  # tensors of 1 KB
ROWS, WIDTH, INDICES = 1_000_000, 64, 100_000  # of a segment_sum
CPU_SIZE, GPU_SIZE = 2**23, 2**26  # float32 elements: 32 MiB, 256 MiB
QUICK_SIZE, QUICK_MANY, QUICK_ROWS = 2**10, 10, 100

ADD_32, ADD_16 = f"add_n {NUM_TERMS} float32", f"add_n {NUM_TERMS} bfloat16"
ADD_INTO = "add_n 2 into"
ACCUMULATE, ALL_SUM, SEGMENTS = "accumulate_n", "all_sum", "segment_sum"
PACK, UNPACK, SCALE = "pack ResNet-50", "unpack ResNet-50", "scale ResNet-50"
PACK_OFF, ADD_OFF = "pack, unaligned", "add_n 2, unaligned"
PACK_MANY, ADD_MANY = "pack many", f"add_n {NUM_TERMS} many"
SMALL, MEMORY = "small", "memory"

CHAIN = "numpy chain"
H100 = "H100, 2026-11"
CPU_FLOORS = (
    Floor("numpy over NumPy's additions", ADD_32, times_the_peer(CHAIN, "numpy"), ">=", 1.1,
          "1.2 to 1.69; 2 cores, 2026-11"),
    Floor("compiled over NumPy's additions", ADD_32, times_the_peer(CHAIN, "compiled"), ">=", 1.35,
          "1.5 to 1.78; 2 cores, 2026-11"),
    Floor("compiled, add_n of 2 into memory, over PyTorch", ADD_INTO,
          over_the_peer("torch copy_ + add_", "compiled"), "<=", 1.1,
          "0.65 to 0.70; 2 cores, 2026-11", ("torch",)),
    Floor("numpy: MiB besides the output", MEMORY, counted("numpy MiB"), "<=", 4,
          "0.07; 2 cores, 2026-11"),
    Floor("compiled: MiB besides the output", MEMORY, counted("compiled MiB"), "<=", 4,
          "0.02; 2 cores, 2026-11"),
    Floor("us over the NumPy calls, 3 x 100", SMALL, counted("us over the peer"), "<=", 15,
          "7.0; 2 cores, 2026-11"),
)  # fmt: skip
AGAINST_NUMPY = (
    "it was a promise over the fastest peer, which TensorFlow's AddN is where it is installed: it "
    "reads 8 inputs in one pass too, and both are limited by memory; over NumPy's additions runs "
    "measured {}"
)
DECISIONS = {
    "numpy over NumPy's additions": Decision(1.2, AGAINST_NUMPY.format("1.2 to 1.69")),
    "compiled over NumPy's additions": Decision(1.6, AGAINST_NUMPY.format("1.5 to 1.78")),
    "pack 10,000 x 1 KB, GPU us": Decision(
        15, "it was set before there was a GPU; an H100 needs 15 to 16, and a floor leaves room"
    ),
}
GPU_FLOORS = (
    Floor("add_n float32, of the copy", ADD_32, of_the_copy("cuda"), ">=", 0.95, f"1.01; {H100}"),
    Floor("add_n bfloat16, of the copy", ADD_16, of_the_copy("cuda"), ">=", 0.90, f"1.01; {H100}"),
    Floor("add_n float32 over the CuPy chain", ADD_32, times_the_peer("cupy chain", "cuda"),
          ">=", 2.2, f"2.83; {H100}", ("cupy",)),
    Floor("accumulate_n, of the copy", ACCUMULATE, of_the_copy("cuda"), ">=", 0.93,
          f"0.99; {H100}"),
    Floor("pack ResNet-50, launches", PACK, counted("launches"), "<=", 1, f"1; {H100}"),
    Floor("pack ResNet-50, copies' time", PACK, over_the_copy("cuda"), "<=", 1.25,
          f"0.99; {H100}"),
    Floor("pack 10,000 x 1 KB, GPU us", PACK_MANY, counted("us"), "<=", 20,
          f"15.0 and 16.0; {H100}"),
    Floor("add_n 8 x (10,000 x 1 KB), copies' time", ADD_MANY, over_the_copy("cuda"),
          "<=", 1.5, f"1.07; {H100}"),
    Floor("segment_sum, of the copy", SEGMENTS, of_the_copy("cuda"), ">=", 0.8,
          f"0.92; {H100}"),
)  # fmt: skip


def hosts(count: int, size: int, dtype: str = "float32") -> list[np.ndarray]:
    """Returns arrays of random numbers in separate memory."""
    return [normals(size, dtype) for _ in range(count)]


class Bench:
    """One device, its implementations, its peers, and the measurements on it."""

    def __init__(self, meshes: dict[str, Mesh], *, quick: bool) -> None:
        self.meshes = meshes
        self.on_gpu = "cuda" in meshes
        self.quick = quick
        self.clock = clock_of(next(iter(meshes.values())), quick=quick)
        self.peers, self.absent = find_peers(on_gpu=self.on_gpu)
        self.cases: dict[str, Case] = {}

    def devices(self) -> Iterator[tuple[str, Device]]:
        """Maps the name of each implementation to its device."""
        for implementation, mesh in self.meshes.items():
            yield OURS + implementation, mesh.devices[0]

    def case(self, name: str, size: str, nbytes: int, ours: dict[str, Call],
             operation: str, *operands: Sequence[np.ndarray]) -> None:  # fmt: skip
        """Measures our candidates, the peers' and a copy of the same size, in turns."""
        calls = dict(ours)
        for peer in self.peers:
            calls |= peer.calls(operation, *operands)
        took = self.clock.measure(calls, nbytes)
        figures = {}
        if self.on_gpu:
            (mesh,) = self.meshes.values()
            with mesh.journal() as journal:
                ours[OURS + "cuda"]()
            figures = {"launches": journal.launches, "us": took[OURS + "cuda"].seconds * 1e6}
        self.keep(Case(name, size, nbytes, took, figures))

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    # -- cases ------------------------------------------------------------------------------------

    def add_n(self, name: str, size: int, dtype: str) -> None:
        """Adds large arrays out of place."""
        arrays = hosts(NUM_TERMS, size, dtype)
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            ours[implementation] = partial(gr.add_n, [device.put(array) for array in arrays])
        nbytes = (NUM_TERMS + 1) * arrays[0].nbytes
        self.case(name, f"{NUM_TERMS} x {size} {dtype}", nbytes, ours, "add_n", arrays)

    def add_into(self, size: int) -> None:
        """Adds two large arrays into existing memory."""
        terms, outs = hosts(2, size), hosts(1, size)
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            mine = [device.upload(term) for term in terms]
            ours[implementation] = partial(ops.add_n, [device.upload(outs[0])], [mine])
        nbytes = 3 * outs[0].nbytes
        self.case(ADD_INTO, f"2 x {size} float32", nbytes, ours, "add_into", outs, terms)

    def unaligned(self, size: int, dtype: str) -> None:
        """Packs and adds arrays that begin an element after a vector; the output begins at one.

        Views of a flat buffer are such arrays, such as those in the buckets of PyTorch's DDP.
        """
        arrays = hosts(2, size, dtype)
        packs: dict[str, Call] = {}
        adds: dict[str, Call] = {}
        for implementation, device in self.devices():
            off = []
            for array in arrays:
                whole = device.upload(np.append(array[:1], array))
                off.append(whole.view(1, array.shape))
            out = device.empty(arrays[0].shape, arrays[0].dtype)
            packs[implementation] = partial(ops.pack, [out], off[:1])
            adds[implementation] = partial(ops.add_n, [out], [off])
        nbytes, words = arrays[0].nbytes, f"{size} {dtype}, off by {arrays[0].itemsize} bytes"
        self.case(f"{PACK_OFF} {dtype}", words, 2 * nbytes, packs, "unaligned", arrays)
        self.case(f"{ADD_OFF} {dtype}", f"2 x {words}", 3 * nbytes, adds, "unaligned", arrays)

    def accumulate_n(self, size: int) -> None:
        """Adds one term to a sum in place."""
        arrays = hosts(2, size)
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            total, term = (device.put(array) for array in arrays)
            ours[implementation] = partial(ops.accumulate_n, [total], [[term]])
        nbytes = 3 * arrays[0].nbytes
        self.case(ACCUMULATE, f"{size} float32", nbytes, ours, "accumulate", arrays)

    def all_sum(self, size: int) -> None:
        """Adds all inputs into all outputs, in two groups."""
        inputs, outs = hosts(NUM_TERMS, size), hosts(NUM_TERMS, size)
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            mine = [[device.put(array) for array in arrays] for arrays in (outs, inputs)]
            ours[implementation] = partial(ops.all_sum, mine[:1], mine[1:], SPLIT)
        nbytes = 2 * NUM_TERMS * inputs[0].nbytes
        words = f"{NUM_TERMS} x {size} float32, split {SPLIT}"
        self.case(ALL_SUM, words, nbytes, ours, "all_sum", outs, inputs)

    def pack(self, name: str, sizes: Sequence[int]) -> None:
        """Packs many tensors into a flat buffer by one launch."""
        arrays = [hosts(1, size)[0] for size in sizes]
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            parts, tensors = self._flat(device, arrays)
            ours[implementation] = partial(ops.pack, parts, tensors)
        flat = hosts(1, sum(sizes))
        self.case(name, *self._moved(sizes), ours, "pack", flat, arrays)

    def unpack(self, sizes: Sequence[int]) -> None:
        """Unpacks a flat buffer into tensors by one launch."""
        arrays = [hosts(1, size)[0] for size in sizes]
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            parts, tensors = self._flat(device, arrays)
            inputs = [part.view(0, (size,)) for part, size in zip(parts, sizes, strict=True)]
            ours[implementation] = partial(ops.pack, tensors, inputs)
        flat = hosts(1, sum(sizes))
        self.case(UNPACK, *self._moved(sizes), ours, "unpack", flat, arrays)

    def scale(self, sizes: Sequence[int]) -> None:
        """Scales every tensor in place by one launch."""
        arrays = [hosts(1, size)[0] for size in sizes]
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            tensors = [device.put(array) for array in arrays]
            ours[implementation] = partial(ops.pack, tensors, tensors, divisor=-1.0)
        self.case(SCALE, *self._moved(sizes), ours, "scale", arrays)

    def _moved(self, sizes: Sequence[int]) -> tuple[str, int]:
        """Describes float32 tensors, and returns the bytes to read and write them once."""
        return f"{len(sizes)} tensors, {sum(sizes)} float32", 2 * 4 * sum(sizes)

    def _flat(self, device: Device, arrays: Sequence[np.ndarray]) -> tuple[list[Buffer], ...]:
        """Returns the views of a flat buffer, and the tensors for them."""
        layout = flat_layout([array.size for array in arrays], 4)
        flat = fill(device.empty((layout.size,), "float32"))
        places = zip(layout.offsets, layout.spans, strict=True)
        parts = [flat.view(offset, (span,)) for offset, span in places]
        return parts, [device.put(array) for array in arrays]

    def many(self, count: int) -> None:
        """Adds many small tensors by one launch."""
        columns = [hosts(count, MANY_SIZE) for _ in range(NUM_TERMS)]
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            terms = [[device.put(array) for array in row] for row in zip(*columns, strict=True)]
            outs = [device.empty((MANY_SIZE,), "float32") for _ in terms]
            ours[implementation] = partial(ops.add_n, outs, terms)
        nbytes = (NUM_TERMS + 1) * 4 * count * MANY_SIZE
        words = f"{NUM_TERMS} x ({count} x {4 * MANY_SIZE} bytes)"
        self.case(ADD_MANY, words, nbytes, ours, "many", *columns)

    def segment_sum(self, rows: int) -> None:
        """Adds rows of the same index of a sparse gradient: the launch, and the whole call."""
        num_indices = rows * INDICES // ROWS
        values = hosts(1, rows * WIDTH)[0].reshape(rows, WIDTH)
        indices = np.random.default_rng(1).integers(0, num_indices, rows)
        out = np.zeros((num_indices, WIDTH), np.float32)
        segments = ops.plan_segments(indices)
        ours: dict[str, Call] = {}
        for implementation, device in self.devices():
            placed = device.put(values)
            shape = (segments.num_segments, WIDTH)
            operands = [device.empty(shape, "float32")], [placed], [segments]
            ours[implementation] = ops.segment_sum_command(*operands)
            slices = gr.IndexedSlices(placed, indices, out.shape)
            ours[f"{implementation} with its plan"] = slices.coalesce
        nbytes = values.nbytes + out.nbytes + indices.nbytes
        words = f"{rows} rows of {WIDTH} float32 over {num_indices} indices"
        self.case(SEGMENTS, words, nbytes, ours, "segment_sum", [values], [indices], [out])

    def small(self) -> None:
        """Measures the host time of a call with tiny arrays."""
        arrays = hosts(3, 100)
        peer = self.peers[0] if self.peers else None
        calls: dict[str, Call] = peer.calls("add_n", arrays) if peer else {}
        theirs = list(calls)[:1]
        mine = [peer.take(array) for array in arrays] if peer else arrays
        calls[OURS + "arrays"] = partial(gr.add_n, mine)  # on the default mesh
        for implementation, device in self.devices():
            calls[f"{implementation}, Buffers"] = partial(
                gr.add_n, [device.put(array) for array in arrays]
            )
        seconds = host_seconds(calls, 10 if self.quick else 2000, quick=self.quick)
        if self.on_gpu:
            self.meshes["cuda"].synchronize()
        figures = {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
        for name in theirs:
            figures["us over the peer"] = (seconds[OURS + "arrays"] - seconds[name]) * 1e6
        self.keep(Case(SMALL, "add_n 3 x 100 float32", figures=figures))

    def memory(self, size: int) -> None:
        """Measures the extra memory of a sum on the host, in MiB."""
        arrays = hosts(NUM_TERMS, size)
        figures = {}
        for implementation, mesh in self.meshes.items():
            terms = [mesh.devices[0].put(array) for array in arrays]
            gr.add_n(terms)  # what is made once is made
            mesh.devices[0].trim()
            tracemalloc.start()
            total = gr.add_n(terms, output_type="buffer")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            figures[f"{implementation} MiB"] = (peak - total.nbytes) / 2**20
        self.keep(Case(MEMORY, f"add_n {NUM_TERMS} x {size} float32", figures=figures))


def all_cases(bench: Bench) -> list[Callable[[], None]]:
    """Returns the cases in order; each frees its arrays when it ends."""
    large = GPU_SIZE if bench.on_gpu else CPU_SIZE
    half, count, rows = CPU_SIZE, MANY, ROWS
    if bench.quick:
        large = half = QUICK_SIZE
        count, rows = QUICK_MANY, QUICK_ROWS
    sizes = [min(int(np.prod(shape)), large) for shape in resnet50()]
    cases = [partial(bench.add_n, ADD_32, large, "float32")]
    if bench.on_gpu:
        cases.append(partial(bench.add_n, ADD_16, 2 * large, "bfloat16"))
        cases.append(partial(bench.unaligned, 2 * large, "bfloat16"))
    cases += [
        partial(bench.add_into, large),
        partial(bench.unaligned, large, "float32"),
        partial(bench.accumulate_n, large),
        partial(bench.all_sum, half),
        partial(bench.pack, PACK, sizes),
        partial(bench.unpack, sizes),
        partial(bench.scale, sizes),
        partial(bench.pack, PACK_MANY, [MANY_SIZE] * count),
        partial(bench.many, count),
        partial(bench.segment_sum, rows),
    ]
    host = [bench.small] if bench.on_gpu else [bench.small, partial(bench.memory, large)]
    return [*cases, *host]


# -- the run ---------------------------------------------------------------------------------------


def meshes() -> dict[str, Mesh]:
    """Opens the GPU, or a simulated device with both implementations."""
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        if cupy.cuda.is_available():
            return {"cuda": gr.open_mesh(1, backend="cuda")}
    os.environ.setdefault("GRADREDUCE_BACKEND", "sim")  # of the default mesh, without a warning
    return {
        "numpy": gr.open_mesh(1, backend="sim", strict=False),
        "compiled": gr.open_mesh(1, backend="sim", kernels="compiled", strict=False),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    with ExitStack() as stack:
        found = meshes()
        for mesh in found.values():
            stack.enter_context(mesh)
        report = measured(found, quick=options.quick)
    finish(report, options.json)


def measured(found: dict[str, Mesh], *, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    bench = Bench(found, quick=quick)
    print(f"{', '.join(found)}; load average {load:.2f}")
    for library, why in bench.absent.items():
        print(f"{library}: {why}")
    for case in all_cases(bench):
        case()
    floors = GPU_FLOORS if bench.on_gpu else CPU_FLOORS
    return {
        "implementations": list(found),
        "load_average": load,
        "absent": bench.absent,
        "cases": [case.as_json() for case in bench.cases.values()],
        "floors": [] if quick else kept(floors, bench.cases, bench.absent),
    }


if __name__ == "__main__":
    main()
