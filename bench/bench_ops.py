"""How fast many arrays are added and packed on one device, beside a copy and beside the peers.

On a GPU where CuPy sees one, else on both faces of a simulated device. Every line says how many
bytes the operation must move, what it took, and which part of the rate of a plain copy (bytes read
and written alike, measured in the same rounds) that is. All candidates of a case are called in
turns, and the medians are compared. Peers that are not installed are left out, visibly.

    python bench/bench_ops.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Mesh, as_dtype, flat_layout

Calls = dict[str, Callable[[], Any]]
NUM_TERMS = 8
ROUNDS = 15


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of its 161 gradients, 25.6 million elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            convolutions = [
                (planes, width, 1, 1),
                (planes, planes, 3, 3),
                (4 * planes, planes, 1, 1),
            ]
            if block == 0:
                convolutions.append((4 * planes, width, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def seconds(calls: Calls, wait: Callable[[], None], rounds: int) -> dict[str, float]:
    """The median of each candidate, all called in turns after a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if turn >= 2:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def report(case: str, nbytes: int, took: dict[str, float], line: float) -> dict[str, Any]:
    """Prints a case and gives it back as data; ``line`` is the copy's rate in bytes a second."""
    print(f"\n{case}: {nbytes / 1e6:.1f} MB to move; copy {line / 1e9:.1f} GB/s")
    for name, duration in sorted(took.items(), key=lambda item: item[1]):
        print(f"  {name:28} {duration * 1e3:9.3f} ms {nbytes / duration / 1e9:8.1f} GB/s "
              f"{nbytes / duration / line:6.2f} of the copy")  # fmt: skip
    return {"case": case, "bytes": nbytes, "copy_bytes_per_second": line, "seconds": took}


class Bench:
    """One device, its faces, and what is measured on it."""

    def __init__(self, meshes: dict[str, Mesh], *, quick: bool) -> None:
        self.meshes = meshes
        self.on_gpu = any(mesh.backend == "cuda" for mesh in meshes.values())
        self.quick = quick
        self.found: list[dict[str, Any]] = []

    def wait(self) -> None:
        """Until the device has done what it was given, by whichever library."""
        if self.on_gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    def case(
        self, name: str, nbytes: int, calls: Calls, copy: tuple[Callable[[], Any], int]
    ) -> None:
        """Measures the candidates and, in the same rounds, a copy of so many bytes."""
        took = seconds({**calls, "copy": copy[0]}, self.wait, 3 if self.quick else ROUNDS)
        line = copy[1] / took.pop("copy")
        self.found.append(report(name, nbytes, took, line))

    def arrays(self, count: int, size: int, dtype: str) -> list[Any]:
        """Of the device's own library."""
        rng = np.random.default_rng(0)
        made = [rng.standard_normal(size, np.float32).astype(as_dtype(dtype)) for _ in range(count)]
        if not self.on_gpu:
            return made
        import cupy

        return [cupy.asarray(array) for array in made]

    def copy(self, size: int, dtype: str) -> tuple[Callable[[], Any], int]:
        """A copy of one array by the device's own library, and its bytes read and written."""
        source, target = self.arrays(2, size, dtype)
        if not self.on_gpu:
            return lambda: np.copyto(target, source), 2 * source.nbytes
        return lambda: target.data.copy_from_device_async(source.data, source.nbytes), (
            2 * source.nbytes
        )

    # -- cases ------------------------------------------------------------------------------------

    def add_n(self, size: int, dtype: str = "float32") -> None:
        """One large sum, inputs left as they are."""
        arrays = self.arrays(NUM_TERMS, size, dtype)
        calls: Calls = {}
        for face, mesh in self.meshes.items():
            terms = [mesh.devices[0].put(array) for array in arrays]
            calls[f"gradreduce {face}"] = lambda terms=terms: gr.add_n(terms)  # type: ignore[misc]
        if dtype != "bfloat16":
            calls["array chain"] = lambda: chain(arrays)
            if self.on_gpu:
                calls["array stack-sum"] = lambda: stack_sum(arrays)
        calls |= torch_calls(arrays, dtype, self.on_gpu)
        if not self.on_gpu:
            calls |= tensorflow_calls(arrays)
        nbytes = (NUM_TERMS + 1) * arrays[0].nbytes
        self.case(f"add_n {NUM_TERMS} x {size} {dtype}", nbytes, calls, self.copy(size, dtype))

    def accumulate_n(self, size: int) -> None:
        """One term into a sum, in place."""
        total, term = self.arrays(2, size, "float32")
        calls: Calls = {}
        for face, mesh in self.meshes.items():
            into, taken = (mesh.devices[0].put(array) for array in (total, term))
            calls[f"gradreduce {face}"] = lambda into=into, taken=taken: ops.accumulate_n(  # type: ignore[misc]
                [into], [[taken]]
            )
        calls["array +="] = lambda: total.__iadd__(term)
        copy = self.copy(size, "float32")
        self.case(f"accumulate_n {size} float32", 3 * total.nbytes, calls, copy)

    def pack(self, name: str, sizes: Sequence[int]) -> None:
        """Many tensors into one flat buffer, by one launch."""
        arrays = [self.arrays(1, size, "float32")[0] for size in sizes]
        layout = flat_layout(sizes, 4)
        calls: Calls = {}
        for face, mesh in self.meshes.items():
            device = mesh.devices[0]
            flat = device.zeros((layout.size,), "float32")
            outs = [flat.view(offset, (span,)) for offset, span
                    in zip(layout.offsets, layout.spans, strict=True)]  # fmt: skip
            terms = [device.put(array) for array in arrays]
            calls[f"gradreduce {face}"] = lambda outs=outs, terms=terms: ops.pack(outs, terms)  # type: ignore[misc]
        calls["array concatenate"] = lambda: concatenate(arrays)
        nbytes = 2 * 4 * sum(sizes)
        self.case(f"pack {name}", nbytes, calls, self.copy(layout.size, "float32"))

    def many(self, count: int, size: int) -> None:
        """Many small sums, by one launch."""
        columns = [self.arrays(count, size, "float32") for _ in range(NUM_TERMS)]
        calls: Calls = {}
        for face, mesh in self.meshes.items():
            device = mesh.devices[0]
            terms = [[device.put(array) for array in row] for row in zip(*columns, strict=True)]
            outs = [device.empty((size,), "float32") for _ in terms]
            calls[f"gradreduce {face}"] = lambda outs=outs, terms=terms: ops.add_n(outs, terms)  # type: ignore[misc]
        calls["array chains"] = lambda: [chain(row) for row in zip(*columns, strict=True)]
        nbytes = (NUM_TERMS + 1) * 4 * count * size
        name = f"add_n {NUM_TERMS} x ({count} x {4 * size} bytes)"
        self.case(name, nbytes, calls, self.copy(count * size, "float32"))

    def small(self) -> None:
        """What a call costs the host when there is next to nothing to add."""
        arrays = self.arrays(3, 100, "float32")
        mesh = next(iter(self.meshes.values()))
        number = 10 if self.quick else 2000
        calls: Calls = {
            "gradreduce": lambda: [gr.add_n([mesh.devices[0].put(array) for array in arrays])
                                   for _ in range(number)],
            "array chain": lambda: [chain(arrays) for _ in range(number)],
        }  # fmt: skip
        took = seconds(calls, self.wait, 3 if self.quick else 9)
        each = {name: duration / number * 1e6 for name, duration in took.items()}
        print("\nadd_n 3 x 100 float32, host time of a call")
        for name, microseconds in each.items():
            print(f"  {name:28} {microseconds:9.2f} us")
        self.found.append({"case": "small", "microseconds": each})

    def memory(self, size: int) -> None:
        """What a sum on the host takes beside its output."""
        arrays = self.arrays(NUM_TERMS, size, "float32")
        for face, mesh in self.meshes.items():
            terms = [mesh.devices[0].put(array) for array in arrays]
            gr.add_n(terms)  # compiled, and the pool warm
            mesh.devices[0].trim()
            tracemalloc.start()
            total = gr.add_n(terms, as_kind="buffer")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            extra = peak - total.nbytes
            print(f"\nmemory beside the output, {face}: {extra / 2**20:.2f} MiB")
            self.found.append({"case": f"memory {face}", "extra_bytes": extra})


# -- peers -----------------------------------------------------------------------------------------


def chain(arrays: Sequence[Any]) -> Any:
    """One addition after the other, the first into a new array."""
    total = arrays[0] + arrays[1]
    for array in arrays[2:]:
        total += array
    return total


def stack_sum(arrays: Sequence[Any]) -> Any:
    """CuPy's other way: one array of all, summed over its first axis."""
    import cupy

    return cupy.stack(arrays).sum(axis=0)


def concatenate(arrays: Sequence[Any]) -> Any:
    """By the arrays' own library."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import cupy

    return cupy.concatenate(arrays)


def torch_calls(arrays: Sequence[Any], dtype: str, on_gpu: bool) -> Calls:
    """PyTorch's two ways that leave the inputs as they are."""
    if not importlib.util.find_spec("torch"):
        print("torch    not installed")
        return {}
    import torch

    wanted = getattr(torch, dtype)
    place = "cuda" if on_gpu else "cpu"
    tensors = [torch.empty(array.size, dtype=wanted, device=place).normal_() for array in arrays]

    def in_place() -> Any:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return total

    calls: Calls = {"torch copy + add_": in_place}
    if on_gpu:

        def foreach() -> Any:
            totals = [tensors[0].clone()]
            for tensor in tensors[1:]:
                torch._foreach_add_(totals, [tensor])
            return totals

        calls["torch._foreach_add_"] = foreach
    return calls


def tensorflow_calls(arrays: Sequence[Any]) -> Calls:
    """TensorFlow's own AddN."""
    if not importlib.util.find_spec("tensorflow"):
        print("tensorflow not installed")
        return {}
    import tensorflow as tf

    tensors = [tf.constant(array) for array in arrays]
    return {"tf.add_n": lambda: tf.add_n(tensors).numpy()}


# -- the run ---------------------------------------------------------------------------------------


def meshes() -> dict[str, Mesh]:
    """The GPU, or both faces of a simulated device.

    A CuPy that cannot do arithmetic is the stand-in of the tests: there is no peer to compare with.
    """
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        if hasattr(cupy, "concatenate") and cupy.cuda.is_available():
            return {"cuda": gr.open_mesh(1, backend="cuda")}
    return {
        "numpy": gr.open_mesh(1, backend="sim", strict=False),
        "compiled": gr.open_mesh(1, backend="sim", kernels="compiled", strict=False),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args(arguments)
    bench = Bench(meshes(), quick=options.quick)
    large = 2**26 if bench.on_gpu else 2**23
    if options.quick:
        large = 2**10
    bench.add_n(large)
    if bench.on_gpu:
        bench.add_n(2 * large, "bfloat16")
    bench.accumulate_n(large)
    sizes = [int(np.prod(shape)) for shape in resnet50()]
    bench.pack("ResNet-50", [min(size, large) for size in sizes])
    count = 10 if options.quick else 10_000
    bench.pack(f"{count} x 1 KB", [256] * count)
    bench.many(count // 10 if not bench.on_gpu else count, 256)
    bench.small()
    if not bench.on_gpu:
        bench.memory(large)
    if options.json is not None:
        options.json.write_text(json.dumps(bench.found), encoding="utf-8")


if __name__ == "__main__":
    main()
