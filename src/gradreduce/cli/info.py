"""``gradreduce info``: versions, devices, libnccl files, and what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import IO

import click
from rich.table import Table

from .options import json_option, table, write
from .system_info import SystemInfo, find_system_info


@click.command()
@json_option
def info(json_file: IO[str] | None) -> None:
    """Show versions, devices, loaded NCCL libraries, and what is missing.

    Imports CuPy, PyTorch and JAX if they are installed, because each loads its libnccl when it is
    imported. gr.show_versions() prints the same in Python.
    """
    system = find_system_info()
    versions = [(name, version or "not installed") for name, version in system.versions.items()]
    tables: list[Table | str] = [
        table("Versions", ("library", "version"), versions),
        *_devices(system),
    ]
    if system.nccl:
        tables.append(
            table("Loaded libnccl files", ("file (version)",), [[x] for x in system.nccl])
        )
    if system.missing:
        tables.append(table("Missing", ("what", "why and what to do"), system.missing.items()))
    warnings = [f"WARNING: {text}" for text in system.warnings]
    parts = [part for each in tables for part in (each, "")]
    write(json_file, asdict(system), *parts[:-1], *warnings)


def _devices(system: SystemInfo) -> list[Table | str]:
    if not system.gpus:
        return ["\n".join(system.device_lines())]
    rows = [
        (number, gpu.name, gpu.compute_capability, f"{gpu.nbytes / 2**30:.1f}")
        for number, gpu in enumerate(system.gpus)
    ]
    numbers = [str(number) for number in range(len(system.gpus))]
    peers = [
        (
            number,
            *[
                "self" if other == number else "yes" if is_peer else "no"
                for other, is_peer in enumerate(gpu.peers)
            ],
        )
        for number, gpu in enumerate(system.gpus)
    ]
    return [
        table("GPUs", (">GPU", "name", "compute capability", ">GiB"), rows),
        table("Peer access", (">from / to", *numbers), peers),
    ]
