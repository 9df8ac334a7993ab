"""Reads NVIDIA's counters of eight kernels with ``ncu``.

A process launches each kernel three times at a size that fills a GPU; its last launch counts.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from measure.operands import fill, resnet50

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Buffer, Mesh

from .section import Check, Result, function, skipped
from .setting import Setting, find_tool

NCU = "ncu"
# our name -> ncu's: percent of the memory's peak rate, percent of the warps that fit a
# multiprocessor, registers, blocks that fit by registers alone, time
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers_per_thread": "launch__registers_per_thread",
    "blocks_by_registers": "launch__occupancy_limit_registers",
    "duration": "gpu__time_duration.sum",
}
# What ncu prints -> why the counters cannot be read.
REFUSED = {
    "ERR_NVGPUCTRPERM": "the driver lets only administrators read the counters",
    "Failed to prepare kernel for profiling": "ncu cannot profile on this machine",
    "Profiling is not supported on device": "ncu does not support this device",
}
LAUNCHES = ("add_n", "accumulate_n", "pack", "all_sum", "square_sum", "segment_sum", "take_rows",
            "local_sgd")  # fmt: skip
SIZE, QUICK_SIZE = 2**24, 2**8  # float32 elements: 64 MiB
NUM_TERMS, SPLIT = 8, 4
NUM_LAUNCHES = 3  # of each kernel
WIDTH, LANES = 64, 32  # of a row of an embedding; partial sums of a block of squares


def prepare(mesh: Mesh, size: int) -> dict[str, Callable[[], object]]:
    """Returns a launch of each kernel, by the kernel's name."""
    device, rows = mesh.devices[0], size // WIDTH

    def operands(count: int, *shape: int) -> list[Buffer]:
        return [fill(device.empty(shape, "float32")) for _ in range(count)]

    terms, outs = operands(NUM_TERMS, size), operands(NUM_TERMS, size)
    tensors = [operands(1, min(size, math.prod(shape)))[0] for shape in resnet50()]
    (parts,) = mesh.flat_buffer([tensor.shape for tensor in tensors], "float32").views
    squares = device.empty((LANES * ops.num_blocks(size),), "float64")
    square_sum = partial(ops.square_sum, lanes=LANES, terms=ops.BLOCK // LANES)
    values = terms[0].view(0, (rows, WIDTH))
    random = np.random.default_rng(1)
    segments = ops.plan_segments(random.integers(0, max(1, rows // 10), rows))
    half = random.permutation(rows)[: rows // 2]
    sums, taken = (device.empty((count, WIDTH), "float32")
                   for count in (segments.num_segments, len(half)))  # fmt: skip
    sgd = ops.RULE_KERNELS[ops.RULES["sgd"], "local"]
    return {
        "add_n": partial(ops.add_n, outs[:1], [terms]),
        "accumulate_n": partial(ops.accumulate_n, outs[:1], [terms[:1]]),
        "pack": partial(ops.pack, parts, tensors),
        "all_sum": partial(ops.all_sum, [outs], [terms], SPLIT),
        "square_sum": partial(square_sum, [squares], terms[:1]),
        "segment_sum": ops.segment_sum_command([sums], [values], [segments]),
        "take_rows": ops.take_rows_command([taken], [values], [half]),
        "local_sgd": partial(ops.update_rows, sgd, [outs[:3]], (0, 0.1), device),
    }


def launched(quick: bool) -> dict[str, int]:
    """Launches the kernels, and counts the launches."""
    with gr.open_mesh(1, backend="cuda") as mesh:
        launches = prepare(mesh, QUICK_SIZE if quick else SIZE)
        with mesh.journal() as journal:
            for name in LAUNCHES:
                for _ in range(NUM_LAUNCHES):
                    launches[name]()
        mesh.synchronize()
    return {"launches": journal.launches}


def functions() -> dict[str, str]:
    """Returns the name of each kernel's function in its ``.cu`` file, which ncu shows."""
    kernels = {kernel.name: kernel for kernel in ops.KERNELS}
    expressions = {name: kernels[name].expression(kernels[name].templates[0]) for name in LAUNCHES}
    return {name: expression.partition("<")[0] for name, expression in expressions.items()}


def counters(setting: Setting, seconds: float) -> Check | Result:
    """Profiles all launches; on the fake only launches."""
    # LC_ALL: numbers have a decimal point.
    plain = function(setting, NCU, "counters:launched", seconds, LC_ALL="C")
    if setting.fake:
        return plain
    tool = find_tool(NCU)
    if tool is None:
        return skipped(NCU, f"{NCU} is not installed")
    names = "|".join(functions().values())
    command = (
        tool, "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values()),
        "--kernel-name-base", "function", "--kernel-name", f"regex:^({names})$", *plain.command,
    )  # fmt: skip
    return replace(plain, command=command, read=metrics_of, skips=REFUSED)


def metrics_of(output: str) -> Mapping[str, Mapping[str, float | str]]:
    """Parses ncu's table in its output; returns the figures of each kernel's last launch."""
    rows = list(csv.DictReader(line for line in output.splitlines() if line.startswith('"')))
    figures: dict[str, dict[str, float | str]] = {}
    for name, kernel in functions().items():
        mine = [row for row in rows if re.search(rf"\b{kernel}\b", row["Kernel Name"])]
        cells = {row["Metric Name"]: row for row in mine}
        missing = [metric for metric in METRICS.values() if metric not in cells]
        if missing:
            raise ValueError(f"ncu printed no {', '.join(missing)} of {kernel}")
        figures[name] = {"duration_unit": cells[METRICS["duration"]]["Metric Unit"]}
        for ours, metric in METRICS.items():
            figures[name][ours] = float(cells[metric]["Metric Value"].replace(",", ""))
    return figures
