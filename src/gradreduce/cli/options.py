"""Shared parts of the commands: options for devices and output, tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import click
from rich.console import Console
from rich.table import Table

from gradreduce.backends import MOST, BackendName, open_mesh
from gradreduce.comm.process_group import group_of
from gradreduce.device import Mesh

_PICTURES = (".png", ".pdf", ".svg")
_WIDTH = 110  # columns of a table that is written to a file or a pipe


def parse_placement(value: str) -> list[int]:
    """Returns the physical device of each logical device."""
    words = value.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 5 for word in words):
        raise click.BadParameter(f"{value!r} must be a number such as 4, or a list such as 0,0,1,1")
    numbers = [int(word) for word in words]
    placement = list(range(numbers[0])) if len(numbers) == 1 else numbers
    if not 0 < len(placement) <= MOST:
        raise click.BadParameter(f"{value!r} must name 1 to {MOST} devices")
    return placement


devices_option = click.option(
    "--devices",
    type=parse_placement,
    metavar="DEVICES",
    default="4",
    show_default=True,
    help="The number of devices; or the physical device of each logical one, such as 0,0,1,1.",
)
optional_devices_option = click.option(
    "--devices",
    type=parse_placement,
    metavar="DEVICES",
    help="Such as 4 or 0,0,1,1. Default: all GPUs; without a GPU 4 simulated devices.",
)
backend_option = click.option(
    "--backend",
    type=click.Choice(["sim", "cuda"]),
    help="sim: simulated devices. Default: GPUs if CuPy sees any, else sim.",
)
json_option = click.option(
    "--json",
    "json_file",
    type=click.File("w", encoding="utf-8", lazy=True),
    help='Also write the result to this file as JSON; "-" prints JSON instead of tables.',
)


def parse_picture(value: str) -> Path:
    """Returns the path of a picture."""
    path = Path(value)
    if path.suffix not in _PICTURES or not path.absolute().parent.is_dir():
        raise click.BadParameter(
            f"{value!r} must end in {', '.join(_PICTURES)} and lie in an existing folder"
        )
    return path


plot_option = click.option(
    "--plot",
    type=parse_picture,
    metavar="PICTURE",
    help=f"Also draw a picture: a file that ends in {', '.join(_PICTURES)}.",
)


def open_chosen(
    devices: Sequence[int] | None, backend: BackendName | None, timeout: float = 1800.0
) -> Mesh:
    """Opens the mesh of ``--devices`` and ``--backend``, over all processes of a launcher.

    Args:
        devices: the physical device of each logical device of this process; or None.
        backend: see ``open_mesh``.
        timeout: seconds that a call waits for other processes.

    Raises:
        click.ClickException: the mesh cannot be opened here; exit status 1.
    """
    try:
        return open_mesh(devices, backend=backend, processes="auto", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def open_alone(mesh: Mesh) -> Mesh:
    """Opens a mesh of the same devices that other processes do not share."""
    backend = cast(BackendName, mesh.backend)
    return open_mesh([device.physical for device in mesh], backend=backend, processes="none")


def of_all_processes(mesh: Mesh, name: str, value: Any) -> list[Any]:
    """Returns a JSON value of each process of a mesh, by rank; every process calls it.

    Raises:
        click.ClickException: a process has not called it in time.
    """
    group = group_of(mesh[0])
    group.post(f"gradreduce {name}", json.dumps(value))
    texts = [group.read(rank, f"gradreduce {name}", group.timeout) for rank in range(group.size)]
    missing = [rank for rank, text in enumerate(texts) if text is None]
    if missing:
        raise click.ClickException(group.describe_missing(missing, "gradreduce", group.timeout))
    return [json.loads(text) for text in texts if text is not None]


def progress_console(mesh: Mesh) -> Console:
    """Returns the console of standard error; it prints on a terminal, in process 0 of a mesh."""
    found = Console(stderr=True)
    found.quiet = not found.is_terminal or mesh.process_index > 0
    return found


def console() -> Console:
    """Returns the console of standard output, without colors on a pipe."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, emoji=False, width=_WIDTH)


def printable(text: str) -> str:
    """Returns a text in which control characters and lone surrogates are escaped."""
    return "".join(
        [each if each.isprintable() else each.encode("unicode_escape").decode() for each in text]
    )


def one_line(text: str) -> str:
    """Returns a text as one line that can be printed."""
    return printable(" ".join(text.split()))


def write(file: IO[str] | None, content: Any, *tables: Table | str) -> None:
    """Prints tables and lines of text, and writes JSON if a file was passed.

    Args:
        file: the file of ``--json``, or None. If it is standard output, the tables are not printed.
        content: the content for JSON.
        tables: the tables and lines, in order.

    Raises:
        click.ClickException: the JSON cannot be written, because the disk is full, for example.
    """
    if file is not None:
        try:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            with suppress(OSError):  # it writes again
                file.close()
            raise click.ClickException(f"--json cannot be written: {error}") from error
        if file.name == "-":
            return
    screen = console()
    for part in tables:
        if isinstance(part, str):  # the name of a file need not be text
            part = "\n".join(map(printable, part.split("\n")))
        screen.print(part, markup=False, soft_wrap=isinstance(part, str))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Makes a table; columns whose names begin with ``>`` are aligned to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        result.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        result.add_row(*[printable(str(cell)) for cell in row])
    return result
