"""Command line of the examples: flags, their errors, and the devices to open."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gradreduce as gr


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line: flag, value and allowed values."""

    def __init__(self, text: str | None) -> None:
        super().__init__(description=(text or "").splitlines()[0], allow_abbrev=False)
        self.allowed: dict[str, str] = {}

    def flag(
        self, name: str, default: Any, read: Callable[[str], Any], allowed: str, meaning: str
    ) -> None:
        """Adds a flag; ``read`` parses its text and may raise ``ValueError``."""

        def checked(text: str) -> Any:
            try:
                return read(text)
            except (ValueError, OSError):
                raise argparse.ArgumentTypeError(f"got {text!r}") from None

        shown = "none" if default is None else default
        text = f"{meaning} (allowed: {allowed}; default: {shown})"
        self.add_argument(name, default=default, type=checked, metavar="VALUE", help=text)
        self.allowed[name] = allowed

    def add_device_flags(self) -> None:
        """Adds the flags that ``open_devices`` reads."""
        flag, devices = self.flag, "number of devices of each process"
        flag("--devices", 4, in_range(int, 1, 64), "1 to 64", devices)
        flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
        flag("--placement", None, placement, "a number from 0 to 63 for each device, as 0,0,1,1",
             "the physical device of each device")  # fmt: skip
        kernels = one_of("numpy", "compiled")
        flag("--kernels", "numpy", *kernels, "implementation for simulated devices")

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2; argparse calls it too."""
        found = re.match(r"argument (--[a-z-]+): ", message)
        if found and found[1] in self.allowed:
            message = f"{message.removeprefix('argument ')}; allowed: {self.allowed[found[1]]}"
        elif message.startswith("unrecognized"):
            message += f"; allowed: {', '.join(['--help', *self.allowed])}"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def in_range(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """Returns a parser of numbers from ``low`` to ``high``."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def one_of(*names: str) -> tuple[Callable[[str], str], str]:
    """Returns a parser of one of ``names``, and the list of names."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return read, ", ".join(names)


def file(suffix: str) -> Callable[[str], Path]:
    """Returns a parser of paths of writable files with a suffix."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
            raise ValueError
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError
        return path

    return read


def placement(text: str) -> list[int]:
    """Parses the physical device of each logical device."""
    return [in_range(int, 0, 63)(part) for part in text.split(",")]


def open_devices(options: argparse.Namespace) -> gr.Mesh:
    """Opens the mesh of the flags; distributes the devices evenly if there are fewer GPUs.

    One of several processes uses the GPU of its local rank.
    """
    backend = None if options.backend == "auto" else options.backend
    devices: int | list[int] = options.placement or options.devices
    if options.placement is None and backend != "sim":
        with gr.open_mesh(backend=backend, processes="none") as seen:
            backend, gpus = seen.backend, [device.physical for device in seen.devices]
        if backend == "cuda":
            num_gpus = min(len(gpus), options.devices)
            devices = [gpus[i * num_gpus // options.devices] for i in range(options.devices)]
    return gr.open_mesh(devices, backend=backend, processes="auto", kernels=options.kernels)


def on_devices(parser: Parser, options: argparse.Namespace, run: Callable[[gr.Mesh], Any]) -> Any:
    """Opens the mesh of the flags and returns the result of ``run`` on it.

    Missing devices, or a missing compiler for their kernels, are reported as a bad flag.
    """
    if options.placement is not None and len(options.placement) != options.devices:
        parser.error(f"argument --placement: got {len(options.placement)} numbers for "
                     f"{options.devices} devices")  # fmt: skip
    try:
        mesh = open_devices(options)
    except (gr.errors.BackendUnavailableError, ValueError) as error:
        parser.error(f"argument --backend: {error}")
    with mesh:
        try:
            return run(mesh)
        except gr.errors.BackendUnavailableError as error:  # no compiler for the kernels
            flag = "--kernels" if mesh.backend == "sim" else "--backend"
            parser.error(f"argument {flag}: {error}")
