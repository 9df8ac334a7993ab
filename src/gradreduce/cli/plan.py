"""``gradreduce plan``: which tensors are reduced together, in how many launches and bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from gradreduce.arrays.distributed import PerReplica, ReduceOp
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.device import DType, as_dtype
from gradreduce.errors import counted
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps
from gradreduce.reduce.plan import ReducePlan, tensor_ranges

from .models import MODELS
from .options import devices_option, json_option, one_line, table, write
from .tensor_files import Header, checked_shape, read_headers

_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")


def parse_tensors(value: str) -> list[Header]:
    """Returns name, shape and dtype of the tensors that an argument means."""
    if value in MODELS:
        return [(name, shape, "float32") for name, shape in MODELS[value]().items()]
    if _SHAPE.fullmatch(value):
        return [("", checked_shape(map(int, value.split("x"))), "float32")]
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
@json_option
def plan(
    tensors: Sequence[Sequence[Header]],
    devices: Sequence[int],
    dtype: str | None,
    op: str,
    no_peer_access: bool,
    json_file: IO[str] | None,
    **settings: Any,
) -> None:
    """Show what an all-reduce of these TENSORS would do; nothing is allocated.

    TENSORS are shapes such as 64x3x7x7, .safetensors or .npz files (only their headers are read),
    or models: resnet50, gpt2, llama-7b. In Python, print(ops.plan(...)) shows the same.
    """
    named = [header for each in tensors for header in each]
    alg = settings.pop("algorithm")
    try:
        dry_run_mesh = DryRunMesh(devices, "cuda", not no_peer_access)
        mesh = dry_run_mesh.mesh
        wanted = [_dtype_of(header, dtype) for header in named]
        values = [
            PerReplica(
                [device.empty(shape, each) for device in mesh], mesh, name=name or f"{index}"
            )
            for index, ((name, shape, _), each) in enumerate(zip(named, wanted, strict=True))
        ]
        ops = AllReduceCrossDeviceOps(alg, mesh=mesh, **settings)
        found = ops.plan(ReduceOp[op.upper()], [(value, value) for value in values])
    except (TypeError, ValueError) as error:
        raise click.UsageError(one_line(f"{error}")) from error
    nbytes = sum(
        math.prod(shape) * each.itemsize for (_, shape, _), each in zip(named, wanted, strict=True)
    )
    num_elements = sum(math.prod(shape) for _, shape, _ in named)
    content = {"num_tensors": len(named), "num_elements": num_elements, "nbytes": nbytes}
    content |= json.loads(json.dumps(asdict(found), default=str))
    summary = (
        f"{counted(len(named), 'tensor')}, {counted(num_elements, 'element')}, "
        f"{counted(nbytes, 'byte')} on {'each of ' if len(devices) > 1 else ''}"
        f"{counted(len(devices), 'device')}\n{str(found).splitlines()[0]}"
    )
    write(json_file, content, summary, "", _packs(found))


def _dtype_of(header: Header, dtype: str | None) -> DType:
    """Returns the dtype of ``--dtype``, or that in the file."""
    name, _, own = header
    try:
        return as_dtype(dtype or own)
    except (TypeError, ValueError) as error:
        if dtype:
            raise
        raise click.ClickException(one_line(f"{name}: {error}")) from error


def _packs(found: ReducePlan) -> Any:
    rows = [
        (
            number,
            pack.way,
            pack.dtype if pack.wire == pack.dtype else f"{pack.dtype} as {pack.wire}",
            f"{pack.nbytes:,}",
            len(pack.tensors),
            tensor_ranges(pack.tensors, found.names),
            pack.crossing,
        )
        for number, pack in enumerate(found.packs)
    ]
    columns = (">pack", "algorithm", "dtype", ">bytes", ">count", "tensors", "transfer")
    return table("Packs", columns, rows)
