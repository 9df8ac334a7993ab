"""Writes docs/benchmarks.md and its pictures from the figures in bench/results.

Figures of CPUs are in ``bench/results/cpu``, of GPUs in ``bench/results/gpu``; see ``record.py``.
``--check`` writes nothing, and exits with 1 if the page is not that of the figures.

    python bench/page.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
PAGE = BENCH.parent / "docs" / "benchmarks.md"
PICTURE = "benchmarks_{}.svg"
OURS = "gradreduce "
NOT_MEASURED = "not measured"
SWEEPS = {"tensors": "tensors", "replicas": "replicas", "bytes": "bytes of all replicas together"}

HEAD = """# Benchmarks

Written by `python bench/page.py` from the figures in `bench/results`; do not edit. To measure
again, on a machine that does nothing else:

    python -m pip install -e ".[torch,jax,mpi,ray,examples]"
    python bench/record.py

What each benchmark measures, and how, is in [bench/README.md](../bench/README.md). Times are in
milliseconds. *Copy* is a plain copy that reads and writes as many bytes as the operation must; *of
the copy* is its time divided by ours, so that 1 is the speed of memory. Peers ran in the same
process, in turns with ours. A *floor* is a promise; *reached* is what was measured as a fraction of
it: it holds from 1 on.
"""

Report = Mapping[str, Any]


def reports(kind: str) -> dict[str, Report]:
    """Returns the results of a kind of machine, by benchmark."""
    paths = sorted((RESULTS / kind).glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths}


def names() -> list[str]:
    """Returns the names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py"))


def text() -> str:
    """Returns the page."""
    cpu, gpu = reports("cpu"), reports("gpu")
    parts = [HEAD]
    for name in names():
        parts.append("\n".join(section(name, cpu.get(name), gpu.get(name))))
    return "\n".join(parts)


def section(name: str, cpu: Report | None, gpu: Report | None) -> Iterator[str]:
    """Yields the lines about one benchmark."""
    script = f"bench_{name}.py"
    doc = ast.get_docstring(ast.parse((BENCH / script).read_text("utf-8"))) or ""
    yield f"## {script}\n"
    yield doc.splitlines()[0] + "\n"
    if cpu is None:
        yield f"CPU: {NOT_MEASURED}. GPU: {NOT_MEASURED}.\n"
        return
    yield about(cpu) + "\n"
    yield from cases(cpu, gpu)
    yield from counts(cpu, gpu)
    yield from floors(cpu)
    yield from [f"GPU: {about(gpu)}\n", *floors(gpu)] if gpu is not None else []
    if name == "scaling":
        yield from (f"![{words}]({PICTURE.format(sweep)})\n" for sweep, words in SWEEPS.items())
    left_out = [f"{what} ({why})" for what, why in cpu["absent"].items()]
    if left_out:
        yield f"Left out: {'; '.join(left_out)}.\n"


def about(report: Report) -> str:
    """Returns machine, versions, command and date of a report."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    busy = "**the machine was busy with other work**" if report["busy"] else "nothing else ran"
    load = f"; load average {report['load_average']:.1f}" if "load_average" in report else ""
    return (
        f"`{report['command']}`, {report['date']}; {machine['processor']}, {machine['cores']} "
        f"cores, {machine['memory_gib']} GiB; Python {machine['python']}, {versions}; {busy}{load}."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def cases(report: Report, gpu: Report | None) -> Iterator[str]:
    """Yields the table of the times: ours and the peers' of each case."""
    on_gpu = {} if gpu is None else {case["name"]: case for case in gpu["cases"]}
    rows = []
    for case in report["cases"]:
        seconds = {name: took["seconds"] for name, took in case["took"].items()}
        if not seconds:
            continue
        copy = seconds.pop("copy", None)
        words = [each for each in (case["name"], case["size"]) if each]
        rows.append([
            ": ".join(words),
            "" if copy is None else milliseconds(copy),
            listed(seconds, copy, ours=True),
            listed(seconds, None, ours=False),
            gpu_times(on_gpu.get(case["name"])),
        ])  # fmt: skip
    if rows:
        yield from table(("case", "copy", "ours (of the copy)", "peers", "GPU"), rows)


def listed(seconds: Mapping[str, float], copy: float | None, *, ours: bool) -> str:
    """Returns candidates with their times, fastest first."""
    chosen = [each for each in seconds.items() if each[0].startswith(OURS) is ours]
    words = []
    for name, taken in sorted(chosen, key=lambda item: item[1]):
        part = "" if copy is None else f" ({copy / taken:.2g})"
        words.append(f"{name.removeprefix(OURS)} {milliseconds(taken)}{part}")
    return "<br>".join(words)


def gpu_times(case: Mapping[str, Any] | None) -> str:
    """Returns our times on a GPU."""
    if case is None:
        return NOT_MEASURED
    seconds = {name: took["seconds"] for name, took in case["took"].items()}
    return listed(seconds, seconds.get("copy"), ours=True)


def milliseconds(seconds: float) -> str:
    """Returns a time with three digits."""
    return figure(seconds * 1e3)


def figure(value: float) -> str:
    """Returns a number with three digits, never in exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(report: Report | None) -> dict[str, float]:
    """Returns what was counted besides times, by case and name."""
    return {
        f"{case['name']}: {name}": value
        for case in (report or {"cases": []})["cases"]
        for name, value in case["figures"].items()
    }


def counts(report: Report, gpu: Report | None) -> Iterator[str]:
    """Yields the table of what was counted."""
    on_gpu = counted(gpu)
    rows = [
        [name, figure(value), figure(on_gpu[name]) if name in on_gpu else NOT_MEASURED]
        for name, value in counted(report).items()
    ]
    if rows:
        yield from table(("figure", "CPU", "GPU"), rows)


def floors(report: Report) -> Iterator[str]:
    """Yields the table of the floors, with the fraction that was reached."""
    rows = []
    for each in report["floors"]:
        holds = {True: "holds", False: "**violated**", None: "not checked"}[each["holds"]]
        without = "".join(f" (without {why})" for why in each["without"])
        bound = f"{each['sign']} {each['bound']:g}"
        found = each["figure"]
        shown = "" if found is None else figure(found)
        rows.append([each["floor"], bound, shown, reached(each), holds + without])
    if rows:
        yield from table(("floor", "bound", "measured", "reached", ""), rows)


def reached(floor: Mapping[str, Any]) -> str:
    """Returns the fraction of a floor that was reached: 1 or more holds."""
    found, bound = floor["figure"], floor["bound"]
    if not found or not bound:
        return ""
    return f"{found / bound if floor['sign'] == '>=' else bound / found:.2g}"


def plots(report: Report) -> Iterator[tuple[str, Any]]:
    """Yields the name and figure of each sweep: time by number of tensors, replicas and bytes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"], rcParams["svg.hashsalt"] = "none", "gradreduce"
    for sweep, words in SWEEPS.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in report["cases"]:
            what, _, size = case["name"].partition(", ")
            if what == sweep:
                x = float(size.removesuffix(" in all").replace(",", ""))
                for name, took in case["took"].items():
                    lines.setdefault(name, []).append((x, took["seconds"] * 1e3))
        picture = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = picture.subplots()
        for name, points in lines.items():
            style = "--" if name == "copy" else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel=words, ylabel="ms (CPU)")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
        yield sweep, picture


def write() -> None:
    """Writes the page and its pictures."""
    PAGE.write_text(text(), "utf-8")
    scaling = reports("cpu").get("scaling")
    for sweep, picture in plots(scaling) if scaling is not None else ():
        picture.savefig(PAGE.with_name(PICTURE.format(sweep)), metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        write()
    elif PAGE.read_text("utf-8") != text():
        sys.exit(f"{PAGE} is not that of {RESULTS}: run python bench/page.py")


if __name__ == "__main__":
    main()
