"""The command line of ``bench/gpu_check.sh``."""

import argparse
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from .child import Stop
from .first import FIRST, first, step_of
from .section import FAILED, SKIPPED, STOPPED, Done, Record, Section, run_section
from .sections import bench, example, nccl, sanitize, tests
from .setting import FAKE, ROOT, Gpu, Setting, commit, find, sources

SECTIONS: Mapping[str, Section] = {
    "first": first,
    "tests": tests,
    "nccl": nccl,
    "example": example,
    "bench": bench,
    "sanitize": sanitize,
}
LIMIT_SECONDS = 480.0
FAILURE, NO_GPU, SIGNALLED = 1, 3, 128  # exit statuses; the last plus the signal's number


def stem_of(name: str) -> str:
    """Returns a name without the characters that a file name should not have."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def asked_by(word: str, benches: Path) -> list[str]:
    """Returns the sections of SECTION[:PART], with the whole name of a part; ``first`` has steps.

    Raises:
        ValueError: there is no such section, or it has no such part.
    """
    section, _, part = word.partition(":")
    if section not in SECTIONS:
        raise ValueError(f"no section {section}; there are {', '.join(SECTIONS)}")
    if not part:
        return [f"first:{step}" for step in FIRST] if section == "first" else [section]
    known = {
        "first": step_of(part),
        "tests": part if (ROOT / part).exists() else None,
        "bench": part if (benches / part).is_file() else None,
    }
    found = known.get(section)
    if found is None:
        steps = f"; its steps are {', '.join(FIRST)}" if section == "first" else ""
        raise ValueError(f"section {section} has no part {part}{steps}")
    return [f"{section}:{found}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; exits with status 2 if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu_check.sh", description="Runs everything that needs a GPU."
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION[:PART]",
        help=f"{', '.join(SECTIONS)}; all by default. A part is a step of first "
        f"({', '.join(FIRST)}; the number will do), a path of tests, or a file of bench",
    )  # fmt: skip
    flag = parser.add_argument
    flag("--fake", action="store_true", help="try this without a GPU, on the fake CuPy")
    limit = os.environ.get("GRADREDUCE_CHECK_LIMIT") or LIMIT_SECONDS
    flag("--limit", type=float, default=limit, help="seconds of each section or step")
    flag("--benches", type=Path, default=ROOT / "bench", help="whose bench_*.py bench runs")
    options = parser.parse_args(arguments)
    if not options.limit > 0:
        parser.error(f"argument --limit: {options.limit:g} is not positive")
    options.asked = []
    for word in options.sections or SECTIONS:
        try:
            options.asked += asked_by(word, options.benches)
        except ValueError as error:
            parser.error(str(error))
    return options


def opened(asked: Sequence[str], gpu: Gpu, limit: float) -> dict[str, Record]:
    """Creates a record for each section before the first one runs."""
    folder = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    stem = f"{stem_of(gpu.name.lower())}-{now:%Y-%m-%d-%H%M%S}"
    header = {
        "gpu": gpu.name,
        "num_gpus": gpu.count,
        "details": dict(gpu.details),
        "versions": dict(gpu.versions),
        "commit": commit(),
        "sources": sources(),
        "date": now.isoformat(timespec="seconds"),
        "command": ["bench/gpu_check.sh", *sys.argv[1:]],
        "limit_seconds": limit,
    }
    return {
        name: Record(folder / f"{stem}-{stem_of(name)}.json", {"section": name, **header})
        for name in asked
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections; 0 if none failed or was stopped."""
    options = parse(arguments)
    stop = Stop()
    stop.listen()
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        work = Path(scratch)
        gpu = FAKE if options.fake else find(work, stop)
        records = opened(options.asked, gpu, options.limit)
        setting = Setting(options.fake, gpu, work, options.benches.resolve(), options.limit)
        print(f"{gpu.name}: {gpu.missing or dict(gpu.versions)}", flush=True)
        done: Done = {}
        for name, record in records.items():
            print(f"\n=== {name}", flush=True)
            section, _, part = name.partition(":")
            if stop.reason:
                record.save(STOPPED, f"{stop.reason} before it began")
            elif gpu.missing:
                record.save(SKIPPED, gpu.missing)
            else:
                run_section(SECTIONS[section], record, replace(setting, part=part), stop, done)
    return summary(records.values(), gpu, stop)


def summary(records: Collection[Record], gpu: Gpu, stop: Stop) -> int:
    """Prints status and file of each section, and returns the exit status."""
    print("\n=== sections", flush=True)
    for record in records:
        print(f"{record.status:<8} {record.path}  {record.reason}".rstrip(), flush=True)
    if stop.number:
        return SIGNALLED + stop.number
    if gpu.missing:
        words = f"No section has run: {gpu.missing}. --fake tries the command itself."
        print(words, file=sys.stderr)
        return NO_GPU
    return FAILURE if {record.status for record in records} & {FAILED, STOPPED} else 0


if __name__ == "__main__":
    sys.exit(main())
