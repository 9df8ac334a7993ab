"""``gradreduce bench``: times all-reduce, sums, accumulators and optimizers."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
from rich.progress import Progress
from rich.table import Table

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.backends import BackendName
from gradreduce.backends.sim.device import SimDevice
from gradreduce.device import as_dtype
from gradreduce.errors import counted
from gradreduce.reduce.algorithms import ALGORITHMS

from .against import Earlier
from .options import (
    backend_option,
    json_option,
    of_all_processes,
    open_alone,
    open_chosen,
    optional_devices_option,
    plot_option,
    progress_console,
    table,
    write,
)
from .pictures import plot_times
from .system_info import find_machine

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LR = 2**-6  # large enough to change a bfloat16 of 2
_NUM_TERMS = 8  # terms of add_n
_OPTIMIZERS: dict[str, tuple[Callable[[], gr.Optimizer], int]] = {
    # the number of arrays that an update reads or writes: gradient, variable twice, each slot twice
    "sgd": (lambda: gr.GradientDescentOptimizer(_LR), 3),
    "momentum": (lambda: gr.MomentumOptimizer(_LR, 0.9), 5),
    "adam": (lambda: gr.AdamOptimizer(_LR), 7),
}


@dataclass(frozen=True)
class Timed:
    """Work to time.

    Attributes:
        call: does the work once, without waiting for the devices.
        moved: the bytes that it reads and writes; for an all-reduce the bytes of one replica.
        num_wrong: returns the number of wrong elements in the result.
    """

    call: Callable[[], Any]
    moved: int
    num_wrong: Callable[[], int]


TableRow = dict[str, Any]  # a line of a table by the names of its columns; see ``_row``


def parse_bytes(value: str) -> int:
    """Returns the bytes of a text such as ``4096`` or ``64M``."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)B?", str(value).upper())
    if match is None or not int(match[1]):
        raise click.BadParameter(f"{value!r} must be a number above 0, such as 4096, 64K or 1G")
    return int(match[1]) * _UNITS[match[2]]


@click.command()
@click.argument(
    "benchmarks",
    nargs=-1,
    type=click.Choice(["all-reduce", "add_n", "accumulator", "optimizers"]),
    metavar="[BENCHMARKS]...",
)
@optional_devices_option
@backend_option
@click.option(
    "--algorithm",
    type=click.Choice(list(ALGORITHMS)),
    default="nccl",
    show_default=True,
    help="Of the all-reduce.",
)
@click.option(
    "--op",
    type=click.Choice(["sum", "mean"]),
    default="sum",
    show_default=True,
    help="Of the all-reduce.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of all arrays.",
)
@click.option(
    "--min-bytes",
    type=parse_bytes,
    default="1K",
    show_default=True,
    metavar="BYTES",
    help="Smallest size, such as 1K.",
)
@click.option(
    "--max-bytes",
    type=parse_bytes,
    default="16M",
    show_default=True,
    metavar="BYTES",
    help="Largest size.",
)
@click.option(
    "--factor",
    type=click.IntRange(2),
    default=4,
    show_default=True,
    help="Factor from one size to the next.",
)
@click.option(
    "--iterations",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of calls of a round.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of rounds for each size.",
)
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare with the times in this file, which an earlier --json has written.",
)
@json_option
@plot_option
def bench(
    benchmarks: Sequence[str],
    devices: Sequence[int] | None,
    backend: BackendName | None,
    against: Path | None,
    json_file: IO[str] | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Time all-reduce, add_n, accumulators and optimizers, in the columns of nccl-tests.

    BENCHMARKS are all-reduce, add_n, accumulator and optimizers; default: all. Times are measured
    on the host, from the first call of a round until all devices have finished; the table shows
    their median, minimum and maximum over the rounds. On simulated devices they are the times of
    NumPy on this machine's CPU. Under torchrun, mpiexec or srun the all-reduce runs over all
    processes, and process 0 prints.
    """
    earlier = None if against is None else Earlier.read(against)
    sizes = _sizes(options.pop("min_bytes"), options.pop("max_bytes"), options.pop("factor"))
    cases = [(name, size) for name in benchmarks or tuple(_CASES) for size in sizes]
    with open_chosen(devices, backend) as mesh, open_alone(mesh) as alone:
        settings = BenchSettings(mesh, alone, **options)
        rows = _measure_all(settings, cases)
        wrong = of_all_processes(mesh, "wrong", [row["wrong"] for row in rows])
        place = f"{mesh.backend} {[device.physical for device in mesh]}"
        content = {"devices": place, "processes": mesh.num_processes, **options}
        content["machine"] = _machine(mesh)
        rank = mesh.process_index
    if rank > 0:
        return
    for row, counts in zip(rows, zip(*wrong, strict=True), strict=True):
        row["wrong"] = sum(counts)
    title = f"{settings.algorithm} on {place}"
    if content["processes"] > 1:
        title += f" of each of {content['processes']} processes"
    content["rows"] = rows
    tables = [*_tables(title, rows), _machine_line(content["machine"])]
    if place.startswith("sim"):
        tables.append("Simulated devices: times of NumPy on this machine's CPU.")
    if earlier is not None:
        content["against"] = list(earlier.compare(content["rows"]))
        tables += ["", f"Compared with {against}", _comparison(content["against"])]
        tables += earlier.differences(content)
    if plot is not None:
        plot_times(plot, title, rows)
    write(json_file, content, *tables)


def _machine(mesh: gr.Mesh) -> dict[str, Any]:
    """Returns what times depend on: processor, cores, threads or GPUs, and versions."""
    device = mesh[0]
    machine = find_machine(gpus=[] if isinstance(device, SimDevice) else [x.physical for x in mesh])
    if isinstance(device, SimDevice):
        machine["threads"] = device.options.workers.num_threads
    return machine


def _machine_line(machine: Mapping[str, Any]) -> str:
    parts = [machine["processor"], counted(machine["cores"], "core")]
    if "threads" in machine:
        parts.append(f"{counted(machine['threads'], 'thread')} in each process")
    parts += machine.get("gpus", [])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{', '.join(parts)}; {versions}."


def _sizes(least: int, most: int, factor: int) -> list[int]:
    if least > most:
        raise click.UsageError("--min-bytes must not be above --max-bytes")
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


@dataclass(frozen=True)
class BenchSettings:
    """The settings of all rows; see the options of ``bench``.

    ``mesh`` spans all processes, ``alone`` has the same devices of this process.
    """

    mesh: gr.Mesh
    alone: gr.Mesh
    algorithm: AllReduceAlg
    op: str
    dtype: str
    iterations: int
    rounds: int


def _measure_all(settings: BenchSettings, cases: Sequence[tuple[str, int]]) -> list[TableRow]:
    """Measures all cases; the rows of a benchmark come together."""
    rows = []
    with Progress(console=progress_console(settings.mesh), transient=True) as progress:
        for name, size in progress.track(cases, description="bench"):
            count = max(size // as_dtype(settings.dtype).itemsize, 1)
            for label, redop, timed in _CASES[name](settings, count):
                rows.append(_row(settings, label, redop, count, timed))
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    return sorted(rows, key=lambda row: names.index(row["benchmark"]))


def _row(settings: BenchSettings, label: str, redop: str, count: int, timed: Timed) -> TableRow:
    """Measures a line of a table; ``docs/command_line.md`` describes the columns."""
    rounds = [seconds * 1e6 for seconds in _seconds(settings, timed.call)]
    median = statistics.median(rounds)
    algbw = timed.moved / median / 1e3
    num_replicas = settings.mesh.num_replicas
    ring = 2 * (num_replicas - 1) / num_replicas if label == "all-reduce" else 1
    return {
        "benchmark": label,
        "size": count * as_dtype(settings.dtype).itemsize,
        "count": count,
        "type": settings.dtype,
        "redop": redop,
        "time": median,
        "time_min": min(rounds),
        "time_max": max(rounds),
        "algbw": algbw,
        "busbw": algbw * ring,
        "wrong": timed.num_wrong(),
    }


def _seconds(settings: BenchSettings, call: Callable[[], Any]) -> Iterator[float]:
    """Yields the mean time of a call in each round; the first call, which compiles, is in none."""
    call()
    for _ in range(settings.rounds):
        _synchronize(settings)
        start = time.perf_counter()
        for _ in range(settings.iterations):
            call()
        _synchronize(settings)
        yield (time.perf_counter() - start) / settings.iterations


def _synchronize(settings: BenchSettings) -> None:
    for mesh in (settings.mesh, settings.alone):
        mesh.synchronize()


def _full(settings: BenchSettings, device: gr.Device, count: int, value: float) -> gr.Buffer:
    return device.upload(np.full(count, value, as_dtype(settings.dtype)))


def _num_wrong(found: Any, wanted: float) -> int:
    return int((np.asarray(found) != wanted).sum())


def _all_reduce(settings: BenchSettings, count: int) -> Iterator[tuple[str, str, Timed]]:
    mesh = settings.mesh
    counts = of_all_processes(mesh, f"devices {count}", len(mesh))
    first, total = sum(counts[: mesh.process_index]), sum(counts) // 2
    values = [
        _full(settings, device, count, (first + index) % 2) for index, device in enumerate(mesh)
    ]
    value = gr.PerReplica(values, mesh)
    ops = gr.AllReduceCrossDeviceOps(settings.algorithm, mesh=mesh)
    op = gr.ReduceOp[settings.op.upper()]

    def call() -> Any:
        return ops.batch_reduce(op, [(value, value)])

    def num_wrong() -> int:
        results = [buffer.numpy() for buffer in call()[0].values]
        divisor = mesh.num_replicas if settings.op == "mean" else 1
        expected = results[0].dtype.type(total / divisor)
        return sum(_num_wrong(each, expected) for each in results)

    yield "all-reduce", settings.op, Timed(call, values[0].nbytes, num_wrong)


def _add_n(settings: BenchSettings, count: int) -> Iterator[tuple[str, str, Timed]]:
    terms = [_full(settings, settings.alone[0], count, index) for index in range(_NUM_TERMS)]

    def num_wrong() -> int:
        return _num_wrong(gr.add_n(terms).numpy(), sum(range(_NUM_TERMS)))

    moved = (_NUM_TERMS + 1) * terms[0].nbytes
    yield "add_n", "sum", Timed(lambda: gr.add_n(terms), moved, num_wrong)


def _accumulator(settings: BenchSettings, count: int) -> Iterator[tuple[str, str, Timed]]:
    gradient = _full(settings, settings.alone[0], count, 3)
    accumulator = gr.ConditionalAccumulator(settings.dtype, (count,), device=settings.alone[0])

    def call() -> Any:
        for _ in range(2):
            accumulator.apply_grad(gradient, accumulator.global_step)
        return accumulator.take_grad(2)

    def num_wrong() -> int:
        return _num_wrong(call().numpy(), 3)

    # The first gradient is copied, the second is added, the sum is divided.
    yield "accumulator", "mean", Timed(call, 7 * gradient.nbytes, num_wrong)


def _optimizers(settings: BenchSettings, count: int) -> Iterator[tuple[str, str, Timed]]:
    for name, (make, num_arrays) in _OPTIMIZERS.items():
        yield name, "", _optimizer(settings, make(), count, num_arrays)


def _optimizer(
    settings: BenchSettings, optimizer: gr.Optimizer, count: int, num_arrays: int
) -> Timed:
    """Times updates of one variable by ones, which lower all elements by the same amount."""
    gradient = _full(settings, settings.alone[0], count, 1)
    variable = gr.Variable(np.full(count, 2, gradient.dtype), device=settings.alone[:1])

    def call() -> Any:
        optimizer.apply_gradients([(gradient, variable)])

    def num_wrong() -> int:
        values = variable.numpy()
        return _num_wrong(values, values[0]) + int(not values[0] < 2)

    return Timed(call, num_arrays * gradient.nbytes, num_wrong)


_CASES: dict[str, Callable[[BenchSettings, int], Iterator[tuple[str, str, Timed]]]] = {
    "all-reduce": _all_reduce,
    "add_n": _add_n,
    "accumulator": _accumulator,
    "optimizers": _optimizers,
}


def _tables(title: str, rows: Sequence[TableRow]) -> Iterator[Table | str]:
    columns = (
        ">size (B)", ">count", "type", "redop", ">time (us)", ">min (us)", ">max (us)",
        ">algbw (GB/s)", ">busbw (GB/s)", ">#wrong",
    )  # fmt: skip
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        cells = [_cells(list(row.values())[1:]) for row in rows if row["benchmark"] == name]
        yield table(f"{name}: {title}" if name == "all-reduce" else name, columns, cells)
        yield ""


def _comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        "benchmark", ">size (B)", "type", "redop", ">before (us)", ">time (us)", ">ratio", "verdict"
    )  # fmt: skip
    return table("", columns, [_cells(row.values()) for row in rows])


def _cells(values: Iterable[Any]) -> list[str]:
    return [f"{each:.2f}" if isinstance(each, float) else str(each) for each in values]
