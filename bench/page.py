"""Writes docs/benchmarks.md, its pictures and benchmarks_tables.md from bench/results.

Figures of CPUs are in ``bench/results/cpu``, of GPUs in ``bench/results/gpu``; see ``record.py``.
The floors are those of the benchmarks' source. ``--check`` writes nothing, and exits with 1 if a
page is not that of the figures, or if the figures miss a floor.

    python bench/page.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from measure.case import OURS, Case
from measure.clock import took_of
from measure.floors import Figure, Floor, counted, over_the_copy, over_the_peer
from measure.runner import IMPLEMENTATIONS, Benchmark

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
PAGE = BENCH.parent / "docs" / "benchmarks.md"
TABLES = "benchmarks_tables.md"
PICTURE = "benchmarks_{}.svg"
NOT_MEASURED = "not measured"
SWEEPS = {"tensors": "tensors", "replicas": "replicas", "bytes": "bytes of all replicas together"}

HEAD = """# Benchmarks

{machines} A time of *1.1 of* something is 1.1 times as long.
"""
CHANGED = """## Changed floors

A *floor* is a promise about one figure, which the benchmark checks. {verdict}
[The tables](benchmarks_tables.md) have all floors. The bounds of these were changed, for the reason
beside them. A new bound leaves about a tenth of room to what was measured.
"""
ALL_HOLD = "All hold that could be checked."
AGAIN = """## Measure again

Written by `python bench/page.py` from the figures in `bench/results`; do not edit. To measure
again, on a machine that does nothing else:

    python -m pip install -e ".[torch,jax,mpi,ray,examples]"
    python bench/record.py

What each benchmark measures, and how, is in [bench/README.md](../bench/README.md).
"""
TABLES_HEAD = """# Tables of the benchmarks

Written by `python bench/page.py` from the figures in `bench/results`; do not edit.
[Benchmarks](benchmarks.md) has the summary.

Times are in milliseconds. *Copy* is a plain copy that reads and writes as many bytes as the
operation must; *of the copy* is its time divided by ours, so that 1 is the speed of memory. Peers
ran in the same process, in turns with ours. A *floor* is a promise; *reached* is what was measured
as a fraction of it: it holds from 1 on.
"""

Report = Mapping[str, Any]


# A line about each benchmark, with a figure of a case for each {}.
SUMMARY: dict[str, tuple[str, list[tuple[str, Figure]]]] = {
    "accumulator": (
        "**Accumulators**: an apply of 64 MiB takes {} of the time of NumPy's `+=`; a dropped "
        "gradient takes {} us.",
        [
            ("apply", over_the_peer("numpy +=", "numpy")),
            ("one element", counted("numpy, drop, us")),
        ],
    ),
    "agn": (
        "**AGN**: a local step of SGD over 16 M parameters takes {} (compiled kernels) of the time "
        "of PyTorch's fused SGD and an addition.",
        [("sgd", over_the_peer("torch fused and add", "compiled"))],
    ),
    "all_reduce": (
        "**All-reduce**: the mean of ResNet-50's gradients on 4 devices takes {} (NumPy) and {} "
        "(compiled kernels) of the time of a copy of the bytes.",
        [("ResNet-50, MEAN", over_the_copy(f"{each}, num_packs=0")) for each in IMPLEMENTATIONS],
    ),
    "interop": (
        "**Arrays**: a small array becomes a Buffer, and a Buffer an array, in {} us for NumPy and "
        "{} us for PyTorch.",
        [(library, counted("us in and out")) for library in ("numpy", "torch")],
    ),
    "ops": (
        "**Sums**: `add_n` of 8 arrays of 32 MiB takes {} (NumPy) and {} (compiled kernels) of the "
        "time of NumPy's additions.",
        [("add_n 8 float32", over_the_peer("numpy chain", each)) for each in IMPLEMENTATIONS],
    ),
    "optim": (
        "**Optimizers**: a step over 16 M parameters by compiled kernels takes {} (Adam) and {} "
        "(SGD) of the time of PyTorch's fused optimizers.",
        [(rule, over_the_peer("torch fused", "compiled")) for rule in ("adam", "sgd")],
    ),
    "processes": (
        "**Processes**: an all-reduce of ResNet-50's gradients over two processes takes {} of the "
        "time of gloo's own, and {} of that of MPI's.",
        [
            (f"ResNet-50, 2 processes, {each}", over_the_peer("raw all-reduce", "flat, prepared"))
            for each in ("torchrun", "mpi")
        ],
    ),
    "ray": (
        "**Ray**: an AGN worker exchanges 64 MB in {} (NumPy) and {} (compiled kernels) of the "
        "time of an actor that adds an array.",
        [
            (f"AGN, 64 MB{kernels}", counted("exchange over the actor"))
            for kernels in ("", ", compiled kernels")
        ],
    ),
    "scaling": (
        "**Scaling**: replicas of 1 GiB together are reduced in {} of the time of a copy; a "
        "prepared step over 100,000 tensors takes the host {} us.",
        [
            ("bytes, 1,073,741,824 in all", over_the_copy("compiled, prepared")),
            ("host, 100,000 tensors", counted("prepared step, us")),
        ],
    ),
    "torch": (
        "**PyTorch**: a backward of DDP with our hook takes {} of the time of a plain one; "
        "`DataParallel` adds {} of the time that a loop of PyTorch adds.",
        [
            ("hook of DDP, ResNet-50", counted("comm_hook over plain DDP, median of pairs")),
            ("tiny gradients, 8 replicas", counted("DataParallel adds, over a loop of torch")),
        ],
    ),
}


def reports(kind: str) -> dict[str, Report]:
    """Returns the results of a kind of machine, by benchmark."""
    paths = sorted((RESULTS / kind).glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths}


def names() -> list[str]:
    """Returns the names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py"))


def summary_page() -> str:
    """Returns the page with the summary."""
    found = reports("cpu")
    lines = [summary(name, report) for name, report in found.items() if name in SUMMARY]
    parts = [HEAD.format(machines=machines(found)), "\n".join(lines), ""]
    if "scaling" in found:
        parts += [
            f"![time by {words}]({PICTURE.format(sweep)})\n" for sweep, words in SWEEPS.items()
        ]
    left = f"These are missed: {'; '.join(missed())}." if missed() else ALL_HOLD
    return "\n".join([*parts, CHANGED.format(verdict=left), *decisions(), AGAIN])


def machines(found: Mapping[str, Report]) -> str:
    """Returns a sentence about machines and dates, which is true for all reports."""
    places = {
        f"{each['machine']['processor']}, {each['machine']['cores']} cores, {each['date']}"
        for each in found.values()
    }
    kind = "Measured on CPUs, as fractions of the time of a peer or of a plain copy"
    gpus = sorted({each["machine"]["gpu"] for each in reports("gpu").values()})
    gpu = (
        f"figures of {' and '.join(gpus)} are in the tables, each of the version of its date"
        if gpus
        else "no GPU was available"
    )
    return f"{kind} ({'; '.join(sorted(places))}); {gpu}."


def summary(name: str, report: Report) -> str:
    """Returns the line about one benchmark."""
    words, figures = SUMMARY[name]
    found = cases_of(report)
    values = [of_case(found[case]) if case in found else None for case, of_case in figures]
    return f"- {words.format(*[NOT_MEASURED if x is None else figure(x) for x in values])}"


def decisions() -> Iterator[str]:
    """Yields the table of the floors whose bounds were changed."""
    rows = []
    for name, floor, found in every_floor():
        if floor.decision is not None:
            shown = NOT_MEASURED if found["figure"] is None else figure(found["figure"])
            bounds = f"{floor.sign} {floor.decision.was:g}", f"{floor.sign} {floor.bound:g}"
            rows.append([f"{name}: {floor.name}", *bounds, shown, floor.decision.why])
    yield from table(("floor", "before", "now", "measured", "why"), rows)


def tables_page() -> str:
    """Returns the page with the tables."""
    cpu, gpu = reports("cpu"), reports("gpu")
    sections = ["\n".join(section(name, cpu.get(name), gpu.get(name))) for name in names()]
    return "\n".join([TABLES_HEAD, *sections])


def cases_of(report: Report) -> dict[str, Case]:
    """Returns the cases of a report, by name."""
    return {
        each["name"]: Case(
            each["name"],
            took=took_of({name: took["seconds"] for name, took in each["took"].items()}),
            figures=each["figures"],
        )
        for each in report["cases"]
    }


def floors_of(name: str, *, on_gpu: bool) -> Sequence[Floor]:
    """Returns the floors of a benchmark for a kind of machine."""
    benchmark: Benchmark = import_module(f"bench_{name}").BENCHMARK
    return benchmark.floors_of(on_gpu=on_gpu)


def section(name: str, cpu: Report | None, gpu: Report | None) -> Iterator[str]:
    """Yields the lines about one benchmark."""
    script = f"bench_{name}.py"
    doc = ast.get_docstring(ast.parse((BENCH / script).read_text("utf-8"))) or ""
    yield f"## {script}\n"
    yield doc.splitlines()[0] + "\n"
    if cpu is None:
        yield f"CPU: {NOT_MEASURED}.\n"
    for report in (cpu, gpu):
        if report is not None:
            yield about(report) + "\n"
            yield from cases(report)
            yield from counts(report)
            of_kind = floors_of(name, on_gpu=report is gpu)
            checked = [floor.check(cases_of(report), report["absent"]) for floor in of_kind]
            yield from floors(checked)
            left_out = [f"{what} ({why})" for what, why in report["absent"].items()]
            if left_out:
                yield f"Left out: {'; '.join(left_out)}.\n"


def about(report: Report) -> str:
    """Returns machine, versions, command and date of a report."""
    machine = report["machine"]
    gpu = f"**{machine['gpu']}**; " if "gpu" in machine else ""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    busy = "**the machine was busy with other work**" if report["busy"] else "nothing else ran"
    note = f"; {report['note']}" if "note" in report else ""
    load = f"; load average {report['load_average']:.1f}" if "load_average" in report else ""
    return (
        f"{gpu}`{report['command']}`, {report['date']}; {machine['processor']}, {machine['cores']} "
        f"cores, {machine['memory_gib']} GiB; Python {machine['python']}, {versions}; {busy}{load}"
        f"{note}."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def cases(report: Report) -> Iterator[str]:
    """Yields the table of the times: ours and the peers' of each case."""
    rows = []
    for case in report["cases"]:
        seconds = {name: took["seconds"] for name, took in case["took"].items()}
        if not seconds:
            continue
        copy = seconds.pop("copy", None)
        words = [each for each in (case["name"], case["size"]) if each]
        rows.append([
            ": ".join(words),
            "" if copy is None else figure(copy * 1e3),
            listed(seconds, copy, ours=True),
            listed(seconds, None, ours=False),
        ])  # fmt: skip
    if rows:
        yield from table(("case", "copy", "ours (of the copy)", "peers"), rows)


def listed(seconds: Mapping[str, float], copy: float | None, *, ours: bool) -> str:
    """Returns candidates with their times, fastest first."""
    chosen = [each for each in seconds.items() if each[0].startswith(OURS) is ours]
    words = []
    for name, taken in sorted(chosen, key=lambda item: item[1]):
        part = "" if copy is None else f" ({copy / taken:.2g})"
        words.append(f"{name.removeprefix(OURS)} {figure(taken * 1e3)}{part}")
    return "<br>".join(words)


def figure(value: float) -> str:
    """Returns a number with three digits, never in exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counts(report: Report) -> Iterator[str]:
    """Yields the table of what was counted besides times."""
    rows = [
        [f"{case['name']}: {name}", figure(value)]
        for case in report["cases"]
        for name, value in case["figures"].items()
    ]
    if rows:
        head = ("figure", "GPU" if "gpu" in report["machine"] else "CPU")
        yield from table(head, rows)


def floors(checked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table of the floors, with the fraction that was reached."""
    rows = []
    for each in checked:
        holds = {True: "holds", False: "**missed**", None: "not checked"}[each["holds"]]
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


def missed() -> list[str]:
    """Returns the floors that are not met."""
    return [
        f"{name}: {floor.name}" for name, floor, found in every_floor() if found["holds"] is False
    ]


def every_floor() -> Iterator[tuple[str, Floor, dict[str, Any]]]:
    """Yields each floor for which there are figures, its benchmark's name, and its check."""
    for kind in ("cpu", "gpu"):
        for name, report in reports(kind).items():
            found = cases_of(report)
            for floor in floors_of(name, on_gpu=kind == "gpu"):
                yield name, floor, floor.check(found, report["absent"])


def write() -> None:
    """Writes the pages and their pictures."""
    PAGE.write_text(summary_page(), "utf-8")
    PAGE.with_name(TABLES).write_text(tables_page(), "utf-8")
    scaling = reports("cpu").get("scaling")
    for sweep, picture in plots(scaling) if scaling is not None else ():
        picture.savefig(PAGE.with_name(PICTURE.format(sweep)), metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        write()
        return
    for path, wanted in ((PAGE, summary_page()), (PAGE.with_name(TABLES), tables_page())):
        if path.read_text("utf-8") != wanted:
            sys.exit(f"{path} is not that of {RESULTS}: run python bench/page.py")
    if found := missed():
        sys.exit(f"missed floors: {'; '.join(found)}: meet them, or change them by a Decision")


if __name__ == "__main__":
    main()
