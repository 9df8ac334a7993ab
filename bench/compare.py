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
from pathlib import Path
from typing import Any

OURS = "gradreduce "

LIMIT = 1.1
Times = dict[tuple[str, str, str], float]


def times(report: Mapping[str, Any]) -> Times:
    """Returns the time of each of our candidates, by case, candidate and unit."""
    found: Times = {}
    for case in report["cases"]:
        seconds = {name: took["seconds"] for name, took in case["took"].items()}
        copy = seconds.get("copy")
        unit = "of the copy" if copy else "seconds"
        for name, taken in seconds.items():
            if name.startswith(OURS):
                found[case["name"], name, unit] = taken / (copy or 1.0)
    return found


def only_in_one(before: Times, now: Times) -> Iterator[str]:
    """Yields what cannot be compared, because one of the reports lacks it."""
    for name, ours, others in (("old", before, now), ("new", now, before)):
        for key in ours:
            if key not in others:
                yield f"only in the {name} report: {', '.join(key)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT, help="the ratio that is too slow")
    options = parser.parse_args(arguments)
    before, now = (
        times(json.loads(path.read_text("utf-8"))) for path in (options.old, options.new)
    )
    slower = 0
    for case, candidate, unit in (key for key in now if key in before):
        old, new = before[case, candidate, unit], now[case, candidate, unit]
        word = "SLOWER" if new / old > options.limit else ""
        slower += bool(word)
        words = f"{new / old:6.2f}  {old:10.4g} -> {new:10.4g} {unit:11} {case}: {candidate} {word}"
        print(words.rstrip())
    for line in only_in_one(before, now):
        print(line)
    if slower:
        sys.exit(f"{slower} slower by more than {options.limit:g} times")


if __name__ == "__main__":
    main()
