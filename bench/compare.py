"""Compares two reports of a benchmark: which of our candidates became slower or faster.

Times are compared as multiples of the plain copy of the same run, where the case has one, because
such a ratio depends little on the machine and its load; otherwise as they are. Peers are not
compared. Exit status 1 if a candidate became slower by more than the limit.

    python bench/compare.py old.json new.json [--limit 1.1]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "gradreduce "
LIMIT = 1.1


@dataclass(frozen=True)
class Change:
    """One candidate in two reports.

    Attributes:
        case: the name of the case.
        candidate: its name.
        unit: ``"of the copy"`` or ``"seconds"``.
        old: its time before, in that unit.
        new: its time now.
    """

    case: str
    candidate: str
    unit: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        """The new time divided by the old one."""
        return self.new / self.old


def times(report: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Returns the time of each of our candidates, by case, candidate and unit."""
    found = {}
    for case in report["cases"]:
        seconds = {name: took["seconds"] for name, took in case["took"].items()}
        copy = seconds.get("copy")
        unit = "of the copy" if copy else "seconds"
        for name, taken in seconds.items():
            if name.startswith(OURS):
                found[case["name"], name, unit] = taken / (copy or 1.0)
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the candidates that both reports have, in the order of the new one."""
    before = times(old)
    for key, taken in times(new).items():
        if key in before:
            yield Change(*key, before[key], taken)


def only_in_one(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns what cannot be compared, because one of the reports lacks it."""
    before, now = times(old), times(new)
    missing = [f"only in the old report: {', '.join(key)}" for key in before if key not in now]
    return missing + [
        f"only in the new report: {', '.join(key)}" for key in now if key not in before
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT, help="the ratio that is too slow")
    options = parser.parse_args(arguments)
    old, new = (json.loads(path.read_text("utf-8")) for path in (options.old, options.new))
    slower = 0
    for change in changes(old, new):
        word = "SLOWER" if change.ratio > options.limit else ""
        slower += bool(word)
        print(
            f"{change.ratio:6.2f}  {change.old:10.4g} -> {change.new:10.4g} {change.unit:11} "
            f"{change.case}: {change.candidate} {word}".rstrip()
        )
    for line in only_in_one(old, new):
        print(line)
    if slower:
        sys.exit(f"{slower} slower by more than {options.limit:g} times")


if __name__ == "__main__":
    main()
