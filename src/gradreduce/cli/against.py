"""Compares the times of ``gradreduce bench`` with those in an earlier JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gradreduce.errors import brief, counted

from .options import one_line

_MOST_TIME = 1e15  # microseconds: 30 years
_KEY = ("benchmark", "size", "type", "redop")
_TIMES = ("time", "time_min", "time_max")
# What times depend on, besides the machine.
_SETTINGS = ("devices", "processes", "algorithm", "iterations", "rounds")


@dataclass(frozen=True)
class Earlier:
    """An earlier file.

    Attributes:
        content: its content.
        times: the median, the shortest and the longest time of each of its rows.
    """

    content: Mapping[str, Any]
    times: Mapping[tuple[Any, ...], tuple[float, float, float]]

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """Reads a file.

        Raises:
            click.ClickException: the file cannot be read, or is not one of ``gradreduce bench``.
        """
        try:
            content = json.loads(path.read_text("utf-8"))
            times = {tuple([row[key] for key in _KEY]): _times(row) for row in content["rows"]}
            _flat(content)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise click.ClickException(
                one_line(f"{path} is not a JSON file of gradreduce bench: {why}")
            ) from error
        return cls(content, times)

    def compare(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields for each row the time before, the time now as a multiple of it, and a verdict.

        The verdict is ``slower`` or ``faster`` if all rounds of one file took longer than all
        rounds of the other; else ``alike``.
        """
        for row in rows:
            key = tuple([row[name] for name in _KEY])
            if key in self.times:
                before, least, most = self.times[key]
                verdict = "slower" if row["time_min"] > most else "alike"
                verdict = "faster" if row["time_max"] < least else verdict
                yield {
                    **dict(zip(_KEY, key, strict=True)),
                    "before": before, "time": row["time"], "ratio": row["time"] / before,
                    "verdict": verdict,
                }  # fmt: skip

    def differences(self, content: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line for each difference in settings and machine, and for rows of one file."""
        before, now = _flat(self.content), _flat(content)
        for name in dict.fromkeys([*before, *now]):
            then, new = before.get(name), now.get(name)
            if then != new:
                yield f"{name} was {brief(then)}, and is {brief(new)}"
        rows = {tuple([row[name] for name in _KEY]) for row in content["rows"]}
        for where, count in (
            ("in the earlier file", len(self.times.keys() - rows)),
            ("here", len(rows - self.times.keys())),
        ):
            if count:
                yield f"{counted(count, 'row is', 'rows are')} only {where}"


def _times(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the times of a row; raises ``ValueError`` unless they are times."""
    median, least, most = times = [row[name] for name in _TIMES]
    is_number = [type(each) in (int, float) and 0 < each < _MOST_TIME for each in times]
    if not all(is_number) or not least <= median <= most:
        raise ValueError(f"{', '.join(_TIMES)} {brief(times)} are not times in microseconds")
    return median, least, most


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings and the machine of a file; versions by the name of the library."""
    machine = dict(content["machine"])
    versions = dict(machine.pop("versions"))
    return {**{name: content[name] for name in _SETTINGS}, **machine, **versions}
