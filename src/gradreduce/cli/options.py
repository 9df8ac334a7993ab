"""What several commands share: the options for devices and output, tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

_WIDTH = 110  # columns of a table that goes to a file or a pipe

json_option = click.option(
    "--json",
    "json_file",
    type=click.File("w", encoding="utf-8", lazy=True),
    help='Also write the result to this file as JSON; "-" prints JSON instead of tables.',
)


def console() -> Console:
    """Returns the console of standard output; never breaks words into colors on a pipe."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, emoji=False, width=_WIDTH)


def write(file: IO[str] | None, content: Any, *tables: Table | str) -> None:
    """Prints tables and lines of text, and writes JSON if a file was named.

    Args:
        file: of ``--json``; standard output: the tables are not printed.
        content: for JSON.
        tables: in order.
    """
    if file is not None:
        file.write(json.dumps(content, indent=1) + "\n")
        if file.name == "-":
            return
    screen = console()
    for each in tables:
        screen.print(each, markup=False, soft_wrap=isinstance(each, str))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Makes a table; columns whose name begins with a ``>`` are aligned to the right."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    return made
