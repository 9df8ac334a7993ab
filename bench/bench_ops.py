"""Measures sums, packing and merging on one device, compared with a copy and peers."""

import math
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from measure.case import H100, OURS, Case, Decision, Floor, counted, over, times
from measure.clock import Call
from measure.operands import fill, normals, resnet50
from measure.peers import Peer, find_peers, peer_calls
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Device, flat_layout

NUM_TERMS = 8
MANY, MANY_SIZE = 10_000, 256  # tensors of 1 KB
ROWS, WIDTH, INDICES = 1_000_000, 64, 100_000  # of a segment_sum
CPU_SIZE, GPU_SIZE = 2**23, 2**26  # float32 elements: 32 MiB, 256 MiB
QUICK_SIZE, QUICK_MANY, QUICK_ROWS = 2**10, 10, 100

ADD_32, ADD_16 = f"add_n {NUM_TERMS} float32", f"add_n {NUM_TERMS} bfloat16"
ADD_INTO = "add_n 2 into"
ACCUMULATE, SEGMENTS, PACK = "accumulate_n", "segment_sum", "pack ResNet-50"
PACK_MANY, ADD_MANY = "pack many", f"add_n {NUM_TERMS} many"
SMALL, MEMORY = "small", "memory"

CHAIN, OF_COPY, COPIES = "numpy chain", times("copy", "cuda"), over("copy", "cuda")
AGAINST_NUMPY = (
    "it was a promise over the fastest peer, which TensorFlow's AddN is where it is installed: it "
    "reads 8 inputs in one pass too, and both are limited by memory; over NumPy's additions runs "
    "measured {}"
)
TWO_CORES = "2 cores, 2026-11"
CPU_FLOORS = (
    *(
        Floor(f"{implementation} over NumPy's additions", ADD_32, times(CHAIN, implementation),
              ">=", least, f"{measured}; {TWO_CORES}",
              decision=Decision(was, AGAINST_NUMPY.format(measured)))
        for implementation, least, measured, was in (
            ("numpy", 1.1, "1.2 to 1.69", 1.2), ("compiled", 1.35, "1.5 to 1.78", 1.6),
        )
    ),
    Floor("compiled, add_n of 2 into memory, over PyTorch", ADD_INTO,
          over("torch copy_ + add_", "compiled"), "<=", 1.1, f"0.65 to 0.70; {TWO_CORES}",
          ("torch",)),
    *(
        Floor(f"{implementation}: MiB besides the output", MEMORY,
              counted(f"{implementation} MiB"), "<=", 4, f"{measured}; {TWO_CORES}")
        for implementation, measured in (("numpy", "0.07"), ("compiled", "0.02"))
    ),
    Floor("us over the NumPy calls, 3 x 100", SMALL, counted("us over the peer"), "<=", 15,
          f"7.0; {TWO_CORES}"),
)  # fmt: skip
OLD_PACK = Decision(
    15, "it was set before there was a GPU; an H100 needs 15 to 16, and a floor leaves room"
)
GPU_FLOORS = tuple(
    Floor(name, case, figure, sign, bound, f"{measured}; {H100}", *more)
    for name, case, figure, sign, bound, measured, *more in (
        ("add_n float32, of the copy", ADD_32, OF_COPY, ">=", 0.95, "1.01"),
        ("add_n bfloat16, of the copy", ADD_16, OF_COPY, ">=", 0.90, "1.01"),
        ("add_n float32 over the CuPy chain", ADD_32, times("cupy chain", "cuda"), ">=", 2.2,
         "2.83", ("cupy",)),
        ("accumulate_n, of the copy", ACCUMULATE, OF_COPY, ">=", 0.93, "0.99"),
        ("pack ResNet-50, launches", PACK, counted("launches"), "<=", 1, "1"),
        ("pack ResNet-50, copies' time", PACK, COPIES, "<=", 1.25, "0.99"),
        ("pack 10,000 x 1 KB, GPU us", PACK_MANY, counted("us"), "<=", 20, "15.0 and 16.0", (),
         OLD_PACK),
        ("add_n 8 x (10,000 x 1 KB), copies' time", ADD_MANY, COPIES, "<=", 1.5, "1.07"),
        ("segment_sum, of the copy", SEGMENTS, OF_COPY, ">=", 0.8, "0.92"),
    )
)  # fmt: skip


def hosts(count: int, size: int, dtype: str = "float32") -> list[np.ndarray]:
    """Returns arrays of random numbers in separate memory."""
    return [normals(size, dtype) for _ in range(count)]


class Ops:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.peers: list[Peer] = find_peers(bench)

    def case(self, name: str, size: str, nbytes: int, ours: Mapping[str, Call],
             operation: str = "", *operands: Sequence[np.ndarray]) -> None:  # fmt: skip
        """Measures our candidates, the peers' and a copy of the same size, in turns.

        On a GPU also counts the launches of a call.
        """
        calls = {**ours, **peer_calls(self.peers, operation, *operands)}
        took = self.bench.clock.measure(calls, nbytes)
        figures = {}
        if self.bench.on_gpu:
            launches = self.bench.launches("cuda", ours[OURS + "cuda"])
            figures = {"launches": launches, "us": took[OURS + "cuda"].seconds * 1e6}
        self.bench.keep(Case(name, size, nbytes, took, figures))

    def add_n(self, name: str, size: int, dtype: str) -> None:
        arrays = hosts(NUM_TERMS, size, dtype)
        ours = self.bench.ours(lambda device: partial(gr.add_n, list(map(device.put, arrays))))
        nbytes = (NUM_TERMS + 1) * arrays[0].nbytes
        self.case(name, f"{NUM_TERMS} x {size} {dtype}", nbytes, ours, "add_n", arrays)

    def into(self, name: str, kernel: Callable[..., None], num_terms: int, size: int) -> None:
        """Adds terms into existing memory; three of it are read or written."""
        outs, terms = hosts(1, size), hosts(num_terms, size)

        def make(device: Device) -> Call:
            out, *mine = map(device.upload, (*outs, *terms))
            return partial(kernel, [out], [mine])

        words, nbytes = f"{num_terms} x {size} float32", 3 * outs[0].nbytes
        self.case(name, words, nbytes, self.bench.ours(make), name, outs, terms)

    def pack(self, name: str, sizes: Sequence[int]) -> None:
        """Packs many tensors into a flat buffer by one launch."""
        arrays = [hosts(1, size)[0] for size in sizes]
        layout = flat_layout(sizes, 4)

        def make(device: Device) -> Call:
            buffer = fill(device.empty((layout.size,), "float32"))
            places = zip(layout.offsets, layout.spans, strict=True)
            parts = [buffer.view(offset, (span,)) for offset, span in places]
            return partial(ops.pack, parts, list(map(device.put, arrays)))

        words = f"{len(sizes)} tensors, {sum(sizes)} float32"
        self.case(name, words, 2 * 4 * sum(sizes), self.bench.ours(make))

    def many(self, count: int) -> None:
        columns = [hosts(count, MANY_SIZE) for _ in range(NUM_TERMS)]

        def make(device: Device) -> Call:
            terms = [list(map(device.put, row)) for row in zip(*columns, strict=True)]
            outs = [device.empty((MANY_SIZE,), "float32") for _ in terms]
            return partial(ops.add_n, outs, terms)

        nbytes = (NUM_TERMS + 1) * 4 * count * MANY_SIZE
        words = f"{NUM_TERMS} x ({count} x {4 * MANY_SIZE} bytes)"
        self.case(ADD_MANY, words, nbytes, self.bench.ours(make))

    def segment_sum(self, rows: int) -> None:
        """Adds rows of the same index of a sparse gradient: the launch, and the whole call."""
        num_indices = rows * INDICES // ROWS
        values = hosts(1, rows * WIDTH)[0].reshape(rows, WIDTH)
        indices = np.random.default_rng(1).integers(0, num_indices, rows)
        segments = ops.plan_segments(indices)
        ours: dict[str, Call] = {}
        for implementation, device in self.bench.devices():
            placed = device.put(values)
            sums = device.empty((segments.num_segments, WIDTH), "float32")
            ours[OURS + implementation] = ops.segment_sum_command([sums], [placed], [segments])
            slices = gr.IndexedSlices(placed, indices, (num_indices, WIDTH))
            ours[f"{OURS}{implementation} with its plan"] = slices.coalesce
        nbytes = values.nbytes + 4 * num_indices * WIDTH + indices.nbytes
        words = f"{rows} rows of {WIDTH} float32 over {num_indices} indices"
        self.case(SEGMENTS, words, nbytes, ours)

    def small(self) -> None:
        """Measures the host time of a call with tiny arrays, on the default mesh and on ours."""
        arrays = hosts(3, 100)
        peer = self.peers[0] if self.peers else None
        calls: dict[str, Call] = peer_calls(self.peers[:1], "add_n", arrays)
        theirs = list(calls)[:1]
        calls[OURS + "arrays"] = partial(gr.add_n, list(map(peer.take, arrays)) if peer else arrays)
        for implementation, device in self.bench.devices():
            buffers = list(map(device.put, arrays))
            calls[f"{OURS}{implementation}, Buffers"] = partial(gr.add_n, buffers)
        figures = self.bench.host_us(calls, self.bench.pick(2000, 10))
        for name in theirs:
            figures["us over the peer"] = figures[f"{OURS}arrays, us"] - figures[f"{name}, us"]
        self.bench.note(SMALL, "add_n 3 x 100 float32", figures)

    def memory(self, size: int) -> None:
        """Measures the extra memory of a sum on the host, in MiB."""
        arrays = hosts(NUM_TERMS, size)
        figures = {}
        for implementation, device in self.bench.devices():
            terms = list(map(device.put, arrays))
            gr.add_n(terms)  # what is made once is made
            device.trim()
            tracemalloc.start()
            total = gr.add_n(terms, output_type="buffer")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            figures[f"{implementation} MiB"] = (peak - total.nbytes) / 2**20
        self.bench.note(MEMORY, f"add_n {NUM_TERMS} x {size} float32", figures)


def cases(bench: Bench) -> None:
    of = Ops(bench)
    large = bench.pick(CPU_SIZE, QUICK_SIZE, GPU_SIZE)
    count = bench.pick(MANY, QUICK_MANY)
    of.add_n(ADD_32, large, "float32")
    if bench.on_gpu:
        of.add_n(ADD_16, 2 * large, "bfloat16")
    of.into(ADD_INTO, ops.add_n, 2, large)
    of.into(ACCUMULATE, ops.accumulate_n, 1, large)
    of.pack(PACK, [min(math.prod(shape), large) for shape in resnet50()])
    of.pack(PACK_MANY, [MANY_SIZE] * count)
    of.many(count)
    of.segment_sum(bench.pick(ROWS, QUICK_ROWS))
    of.small()
    if not bench.on_gpu:
        of.memory(large)


BENCHMARK = Benchmark(__doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=1)

if __name__ == "__main__":
    BENCHMARK.main()
