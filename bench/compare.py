"""Compares two reports of a benchmark: which of our candidates became slower or faster.

Times are compared as multiples of the plain copy of the same run, where the case has one, because
such a ratio depends little on the machine and its load; otherwise as they are. Peers are not
compared. Exit status 1 if a candidate became slower by more than the limit.

    python bench/compare.py old.json new.json [--limit 1.1]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure.case import OURS
from page import cases_of

Times = dict[tuple[str, str, str], float]


def times(path: str) -> Times:
    """Returns the time of each of our candidates, by case, candidate and unit."""
    found: Times = {}
    for case in cases_of(json.loads(Path(path).read_text("utf-8"))).values():
        copy = case.seconds("copy")
        unit = "of the copy" if copy else "seconds"
        for name, took in case.took.items():
            if name.startswith(OURS):
                found[case.name, name, unit] = took.seconds / (copy or 1.0)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=times)
    parser.add_argument("new", type=times)
    parser.add_argument("--limit", type=float, default=1.1, help="the ratio that is too slow")
    options = parser.parse_args(arguments)
    before, now = options.old, options.new
    slower = 0
    for key in (key for key in now if key in before):
        case, candidate, unit = key
        ratio = now[key] / before[key]
        word = " SLOWER" if ratio > options.limit else ""
        slower += bool(word)
        change = f"{before[key]:10.4g} -> {now[key]:10.4g} {unit:11}"
        print(f"{ratio:6.2f}  {change} {case}: {candidate}{word}")
    for name, ours, others in (("old", before, now), ("new", now, before)):
        for key in (key for key in ours if key not in others):
            print(f"only in the {name} report: {', '.join(key)}")
    if slower:
        sys.exit(f"{slower} slower by more than {options.limit:g} times")


if __name__ == "__main__":
    main()
