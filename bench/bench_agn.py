"""Measures AGN: a worker's local step, and the push once per period."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from measure import model_steps as model
from measure.case import BESIDE, H100, Floor, counted, over, times
from measure.clock import Call
from measure.operands import GRADIENTS, VALUES, normals
from measure.runner import IMPLEMENTATIONS, Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Device

NEVER = 1 << 40  # a period that no run comes to the end of
PUSH = "a communication, sgd"
# Ten workers push 100 MB each to a center on four devices.
SPREAD, WORKERS, SPLIT_SIZE, CENTER_DEVICES = "ten workers push", 10, 25_000_000, 4

ADDED_UNITS, PUSH_UNITS = 2, 4  # of the addition of a local step; of a push
FUSED = "torch fused and add"
CPU_FLOORS = (
    Floor("numpy, local sgd over NumPy in blocks", "sgd", over(model.BLOCKS, "numpy"), "<=", 1.2,
          BESIDE),
    Floor(f"compiled, local sgd, times {FUSED}", "sgd", times(FUSED, "compiled"), ">=", 1, BESIDE,
          ("torch",)),
    Floor("bytes of the busiest device of the center", SPREAD, counted("share of the busiest"),
          "<=", 0.3, "0.25"),
    *(
        Floor(f"{implementation}, launches of a {what}", model.TINY,
              counted(f"{implementation}, launches of a {what}"), "<=", 1, "1")
        for implementation in IMPLEMENTATIONS
        for what in ("step", "communication")
    ),
)  # fmt: skip
GPU_FLOORS = (
    *(
        Floor(f"local {rule}, of the copy", rule, times("copy", "cuda"), ">=", 0.9,
              f"{measured}; {H100}")
        for rule, measured in (("sgd", "0.97"), ("momentum", "0.97"), ("adam", "0.96"))
    ),
    *(
        Floor(f"local {rule}, times {FUSED}", rule, times(FUSED, "cuda"), ">=", least,
              f"{measured}; {H100}", ("torch",))
        for rule, least, measured in (
            ("sgd", 1.1, "1.44"), ("momentum", 1.08, "1.32"), ("adam", 1.05, "1.33"),
        )
    ),
    Floor("a communication over its copy", PUSH, over("copy", "cuda"), "<=", 1.2, f"1.03; {H100}"),
    *(
        Floor(f"launches of a {what}", model.TINY, counted(f"cuda, launches of a {what}"), "<=", 1,
              f"1; {H100}")
        for what in ("step", "communication")
    ),
)  # fmt: skip


class Worker:
    """A worker on one device, with a center on it or elsewhere, and its inputs."""

    def __init__(self, make: Callable[[], gr.Optimizer], device: Device, sizes: Sequence[int],
                 period: int, *, center: gr.AGNCenter | None = None):  # fmt: skip
        self.getter = gr.AGNCustomGetter(device, center=center or gr.AGNCenter(device))
        self.optimizer = gr.AGNOptimizer(make(), 1, self.getter, period)
        self.variables = [
            gr.get_variable(f"v{place}", normals(size, seed=VALUES), custom_getter=self.getter)
            for place, size in enumerate(sizes)
        ]
        self.given = [device.put(normals(size, seed=GRADIENTS)) for size in sizes]
        self.pairs = list(zip(self.given, self.variables, strict=True))

    def __call__(self) -> None:
        self.optimizer.apply_gradients(self.pairs)

    def updated(self) -> list[np.ndarray]:
        """Returns the values of the variables after two steps, of which it checks the sums."""
        self()
        self()
        for variable in self.variables:
            summed = self.getter.accumulation(variable).numpy()
            if (summed != 2 * normals(summed.size, seed=GRADIENTS)).any():
                raise AssertionError("the sum of two gradients is wrong")
        return [variable.numpy() for variable in self.variables]


def push_sums(optimizer: gr.AGNOptimizer) -> None:
    """Pushes the accumulated sums, without a local step, and keeps them for the next push."""
    worker = optimizer._worker
    sums = worker.variables.sums
    worker._ready_push(worker.inner._slots.powers, (), None)()
    worker.variables.sums = sums


def push(bench: Bench) -> None:
    """Measures a push: normalize, update the center, pull."""

    def make(device: Device) -> Call:
        worker = Worker(model.RULES["sgd"][0], device, model.sizes(bench), NEVER)
        worker()
        return partial(push_sums, worker.optimizer)

    model.compare(bench, PUSH, bench.ours(make), PUSH_UNITS, f", {PUSH_UNITS} units")


def tiny(bench: Bench) -> None:
    sizes = model.tiny_sizes(bench)
    figures: dict[str, float] = {}
    for implementation, device in bench.devices():
        launches = []
        for period in (NEVER, 1):
            worker = Worker(model.RULES["sgd"][0], device, sizes, period)
            worker()
            launches.append(bench.launches(implementation, worker))
        figures[f"{implementation}, launches of a step"] = launches[0]
        figures[f"{implementation}, launches of a communication"] = launches[1] - launches[0]
    bench.note(model.TINY, f"{len(sizes)} x {model.TINY_SIZE} float32", figures)


def spread(bench: Bench) -> None:
    """Counts the bytes of concurrent pushes on a simulated mesh without peer access."""
    size = bench.pick(SPLIT_SIZE, 2_000)
    sizes = model.sizes_of(size, bench.pick(len(model.sizes(bench)), 20))
    places = CENTER_DEVICES + WORKERS
    with gr.open_mesh(places, backend="sim", peer_access=False, strict=False) as mesh:
        center = gr.AGNCenter(mesh[0:CENTER_DEVICES])
        workers = [
            Worker(model.RULES["sgd"][0], device, sizes, 2, center=center)
            for device in mesh.devices[CENTER_DEVICES:]
        ]
        for worker in workers:
            worker()  # the first of the period, which sends nothing
        with mesh.journal() as journal, ThreadPoolExecutor(WORKERS) as pool:
            for pushing in [pool.submit(worker) for worker in workers]:
                pushing.result()
            mesh.synchronize()
    carried = dict.fromkeys(range(CENTER_DEVICES), 0)
    for record in journal.of("copy"):
        for end in {record.device, record.source} & carried.keys():
            carried[end] += record.nbytes
    total = 2 * 4 * size * WORKERS
    assert sum(carried.values()) == total, "each sum goes there once, and each variable back"
    text = f"{WORKERS} threads, {4 * size} bytes each, to {CENTER_DEVICES} devices"
    bench.note(SPREAD, text, {"share of the busiest": max(carried.values()) / total})


def cases(bench: Bench) -> None:
    for rule in model.RULES:
        make, units = model.RULES[rule]
        worker = partial(Worker, make, sizes=model.sizes(bench), period=NEVER)
        model.compare_steps(bench, rule, worker, units + ADDED_UNITS, adds=True)
    push(bench)
    tiny(bench)
    if not bench.on_gpu:
        spread(bench)


BENCHMARK = Benchmark(
    __doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=1, host_clock=model.best_clock
)

if __name__ == "__main__":
    BENCHMARK.main()
