"""``gradreduce plan``: which tensors are reduced together, in how many launches and bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from gradreduce.arrays.distributed import PerReplica, ReduceOp
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.backends import CUDA, MOST
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import DType, Ranks, as_dtype, group_by
from gradreduce.errors import counted
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.plan import ReducePlan, tensor_ranges

from .models import MODELS
from .options import devices_option, json_option, one_line, table, write
from .tensor_files import Header, read_headers, validate_shape

_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")


def parse_tensors(value: str) -> list[Header]:
    """Returns name, shape and dtype of the tensors that an argument means."""
    if value in MODELS:
        return [(name, shape, "float32") for name, shape in MODELS[value]().items()]
    if _SHAPE.fullmatch(value):
        return [("", validate_shape(map(int, value.split("x"))), "float32")]
    if Path(value).suffix not in (".safetensors", ".npz"):
        raise click.BadParameter(
            f"{value!r} is not a shape such as 64x3x7x7, a .safetensors or .npz file, or "
            f"one of the models {', '.join(MODELS)}"
        )
    try:
        return read_headers(Path(value))
    except FileNotFoundError as error:
        raise click.BadParameter(str(error)) from error
    except (OSError, ValueError) as error:
        raise click.ClickException(one_line(str(error))) from error


@click.command()
@click.argument("tensors", nargs=-1, required=True, type=parse_tensors, metavar="TENSORS...")
@devices_option
@click.option(
    "--algorithm", type=click.Choice(list(ALGORITHMS)), default="nccl", show_default=True,
    help="How packs are added across devices.",
)  # fmt: skip
@click.option(
    "--num-packs", type=click.IntRange(0), default=1, show_default=True,
    help="The number of packs for all tensors of a dtype; 0: each tensor is reduced alone.",
)  # fmt: skip
@click.option("--dtype", help="The dtype of all tensors. Default: that in the file; else float32.")
@click.option(
    "--wire-dtype", type=click.Choice(["float16", "bfloat16", "float32"]),
    help="The dtype in which floats travel between devices.",
)  # fmt: skip
@click.option(
    "--op", type=click.Choice(["mean", "sum"]), default="mean", show_default=True,
    help="The reduction.",
)  # fmt: skip
@click.option("--no-peer-access", is_flag=True, help="Plan for GPUs without peer access.")
@click.option(
    "--processes", type=click.IntRange(1, MOST), default=1, show_default=True,
    help="The number of processes; each has the devices of --devices.",
)  # fmt: skip
@json_option
def plan(
    tensors: Sequence[Sequence[Header]],
    devices: Sequence[int],
    dtype: str | None,
    algorithm: AllReduceAlg,
    processes: int,
    json_file: IO[str] | None,
    **settings: Any,
) -> None:
    """Show what an all-reduce of these TENSORS would do; nothing is allocated.

    TENSORS are shapes such as 64x3x7x7, .safetensors or .npz files (only their headers are read),
    or models: resnet50, gpt2, llama-7b. All algorithms are compared with each other, and with a
    ring, in which each of n devices sends 2 (n - 1) / n of the bytes. The packs are those of
    --algorithm. In Python, print(ops.plan(...)) shows the plan of one process.
    """
    named = [header for each in tensors for header in each]
    try:
        typed = [(name, shape, _dtype_of((name, shape, own), dtype)) for name, shape, own in named]
        plans = {
            name: [
                _plan_of(typed, devices, (rank, (len(devices),) * processes), name, **settings)
                for rank in range(processes)
            ]
            for name in ALGORITHMS
        }
    except (TypeError, ValueError) as error:
        raise click.UsageError(one_line(f"{error}")) from error
    first_plan, *_ = plans[algorithm]
    num_elements = sum(math.prod(shape) for _, shape, _ in typed)
    nbytes = sum(math.prod(shape) * each.itemsize for _, shape, each in typed)
    totals: dict[str, Any] = {name: _totals(of_ranks) for name, of_ranks in plans.items()}
    content = {
        "num_tensors": len(named),
        "num_elements": num_elements,
        "nbytes": nbytes,
        **json.loads(json.dumps(asdict(first_plan), default=str)),
        "algorithms": totals,
    }
    num_devices = processes * len(devices)
    summary = (
        f"{counted(len(named), 'tensor')}, {counted(num_elements, 'element')}, "
        f"{counted(nbytes, 'byte')} on {'each of ' if num_devices > 1 else ''}"
        f"{counted(num_devices, 'device')}{_of_processes(processes)}"
    )
    write(json_file, content, summary, "", _comparison(totals), "", _packs(algorithm, first_plan))


def _plan_of(
    tensors: Sequence[tuple[str, tuple[int, ...], DType]],
    devices: Sequence[int],
    processes: tuple[int, tuple[int, ...]],
    algorithm: AllReduceAlg,
    *,
    op: str,
    no_peer_access: bool,
    **settings: Any,
) -> ReducePlan:
    """Plans the part of one process; ``processes``: its rank, and the devices of each process."""
    rank, counts = processes
    ranks = Ranks.of_gpus([devices] * len(counts), rank) if len(counts) > 1 else None
    mesh = DryRunMesh(devices, CUDA, not no_peer_access, processes, ranks).mesh
    values = [
        PerReplica([device.empty(shape, dtype) for device in mesh], mesh, name=name or f"{index}")
        for index, (name, shape, dtype) in enumerate(tensors)
    ]
    ops = AllReduceCrossDeviceOps(algorithm, mesh=mesh, **settings)
    return ops.plan(ReduceOp[op.upper()], [(value, value) for value in values])


def _of_processes(number: int) -> str:
    return f" of {counted(number, 'process', 'processes')}" if number > 1 else ""


_COUNTS = {
    "launches": "launches", "copies": "copies", "collectives": "collective ranks",
    "exchanges": "exchanges",
}  # fmt: skip


def _totals(plans: Sequence[ReducePlan]) -> dict[str, Any]:
    """Returns the counts of all processes, and the bytes of each device and in all."""
    sent = [dict(each.sent) for each in plans]
    return {
        **{name: sum(getattr(each, name) for each in plans) for name in _COUNTS},
        "sent": sent,
        "sent_in_all": sum(sum(each.values()) for each in sent),
        "ring_bytes": plans[0].ring_bytes,
        "ring_bytes_in_all": sum(each.ring_bytes * len(each.sent) for each in plans),
    }


def _comparison(totals: Mapping[str, Mapping[str, Any]]) -> Any:
    """Makes a table with a column for each algorithm and for a ring, all processes together."""
    first, *_ = of_algorithms = list(totals.values())
    rows = [[what, *[each[name] for each in of_algorithms]] for name, what in _COUNTS.items()]
    places: dict[tuple[int, ...], dict[int, list[int]]] = {}  # bytes -> process -> devices
    for rank, sent in enumerate(first["sent"]):
        for device in sent:
            nbytes = tuple([each["sent"][rank][device] for each in of_algorithms])
            places.setdefault(nbytes, {}).setdefault(rank, []).append(device)
    several = len(first["sent"]) > 1
    for nbytes, found in places.items():
        rows.append([f"bytes sent by {_place(found, several)}", *nbytes, first["ring_bytes"]])
    in_all = [each["sent_in_all"] for each in of_algorithms]
    rows.append(["bytes sent by all devices", *in_all, first["ring_bytes_in_all"]])
    cells = [[what, *[f"{each:,}" for each in row]] for what, *row in rows]
    width = len(of_algorithms) + 2
    return table(
        f"Algorithms{', all processes together' if several else ''}",
        ("", *[f">{name}" for name in totals], ">a ring"),
        [[*row, *[""] * (width - len(row))] for row in cells],
    )


def _place(devices: Mapping[int, Sequence[int]], several: bool) -> str:
    """Formats devices that send as many bytes, by process."""
    ranks = group_by([(tuple(numbers), rank) for rank, numbers in devices.items()])
    places = [
        f"device {tensor_ranges(numbers, ())}"
        f"{f' of process {tensor_ranges(of_numbers, ())}' if several else ''}"
        for numbers, of_numbers in ranks.items()
    ]
    count = sum(map(len, devices.values()))
    return f"{'; '.join(places)}{', each' if count > 1 else ''}"


def _dtype_of(header: Header, dtype: str | None) -> DType:
    """Returns the dtype of ``--dtype``, or that in the file."""
    name, _, own = header
    try:
        return as_dtype(dtype or own)
    except (TypeError, ValueError) as error:
        if dtype:
            raise
        raise click.ClickException(one_line(f"{name}: {error}")) from error


def _packs(algorithm: str, reduce_plan: ReducePlan) -> Any:
    rows = [
        (
            number,
            pack.way,
            pack.dtype if pack.wire == pack.dtype else f"{pack.dtype} as {pack.wire}",
            f"{pack.nbytes:,}",
            len(pack.tensors),
            tensor_ranges(pack.tensors, reduce_plan.names),
            pack.crossing,
        )
        for number, pack in enumerate(reduce_plan.packs)
    ]
    columns = (">pack", "algorithm", "dtype", ">bytes", ">count", "tensors", "transfer")
    return table(f"Packs of {algorithm}", columns, rows)
