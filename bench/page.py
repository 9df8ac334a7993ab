"""Writes docs/benchmarks.md, its pictures and benchmarks_tables.md from bench/results.

Figures of CPUs are in ``bench/results/cpu``, of GPUs in ``bench/results/gpu``; see ``record.py``.
The floors are those of the benchmarks' source. ``--check`` writes nothing, and exits with 1 if a
page is not that of the figures, or if the figures miss a floor.

    python bench/page.py [--check]
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from measure.case import OURS, Case, Figure, Floor, counted, over
from measure.clock import took_of
from measure.runner import Benchmark

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

# A line about each benchmark, and a figure of a case for each {}.
SUMMARY: dict[str, tuple[str, *tuple[tuple[str, Figure], ...]]] = {
    "accumulator": (
        "**Accumulators**: an apply of 64 MiB takes {} of the time of NumPy's `+=`; a dropped "
        "gradient takes {} us.",
        ("apply", over("numpy +=", "numpy")),
        ("one element", counted("numpy, drop, us")),
    ),
    "agn": (
        "**AGN**: a local step of SGD over 16 M parameters takes {} (compiled kernels) of the time "
        "of PyTorch's fused SGD and an addition.",
        ("sgd", over("torch fused and add", "compiled")),
    ),
    "all_reduce": (
        "**All-reduce**: the mean of ResNet-50's gradients on 4 devices takes {} (NumPy) and {} "
        "(compiled kernels) of the time of a copy of the bytes.",
        ("ResNet-50, MEAN", over("copy", "numpy, num_packs=0")),
        ("ResNet-50, MEAN", over("copy", "compiled, num_packs=0")),
    ),
    "backend": (
        "**Backend of torch.distributed**: a step of DDP with ResNet-18 takes {} of the time over "
        "gloo; an all-reduce of 1 kB takes {} us more than gloo's.",
        ("DDP step, ResNet-18", counted("time over gloo's, median of pairs")),
        ("all-reduce of 1 kB", counted("us above gloo")),
    ),
    "exact": (
        "**Exact sums**: `add_n` of 8 arrays of 32 MiB with `exact=True` takes {} (compiled "
        "kernels) and {} (NumPy) of the time of the plain sum.",
        ("add_n 8 float32", counted("compiled, over plain")),
        ("add_n 8 float32", counted("numpy, over plain")),
    ),
    "interop": (
        "**Arrays**: a small array becomes a Buffer, and a Buffer an array, in {} us for NumPy and "
        "{} us for PyTorch.",
        ("numpy", counted("us in and out")),
        ("torch", counted("us in and out")),
    ),
    "weights": (
        "**Weights**: an all-reduce of ResNet-50's gradients with whole weights takes {} (NumPy) "
        "and {} (compiled kernels) of the time without, an apply {} and {}.",
        ("all-reduce", counted("numpy, whole numbers")),
        ("all-reduce", counted("compiled, whole numbers")),
        ("apply", counted("numpy, whole numbers")),
        ("apply", counted("compiled, whole numbers")),
    ),
    "ops": (
        "**Sums**: `add_n` of 8 arrays of 32 MiB takes {} (NumPy) and {} (compiled kernels) of the "
        "time of NumPy's additions.",
        ("add_n 8 float32", over("numpy chain", "numpy")),
        ("add_n 8 float32", over("numpy chain", "compiled")),
    ),
    "optim": (
        "**Optimizers**: a step over 16 M parameters by compiled kernels takes {} (Adam) and {} "
        "(SGD) of the time of PyTorch's fused optimizers.",
        ("adam", over("torch fused", "compiled")),
        ("sgd", over("torch fused", "compiled")),
    ),
    "processes": (
        "**Processes**: an all-reduce of ResNet-50's gradients over two processes takes {} of the "
        "time of gloo's own, and {} of that of MPI's.",
        ("ResNet-50, 2 processes, torchrun", over("raw all-reduce", "flat, prepared")),
        ("ResNet-50, 2 processes, mpi", over("raw all-reduce", "flat, prepared")),
    ),
    "ray": (
        "**Ray**: an AGN worker exchanges 64 MB in {} (NumPy) and {} (compiled kernels) of the "
        "time of an actor that adds an array.",
        ("AGN, 64 MB", counted("exchange over the actor")),
        ("AGN, 64 MB, compiled kernels", counted("exchange over the actor")),
    ),
    "scaling": (
        "**Scaling**: replicas of 1 GiB together are reduced in {} of the time of a copy; a "
        "prepared step over 100,000 tensors takes the host {} us.",
        ("bytes, 1,073,741,824 in all", over("copy", "compiled, prepared")),
        ("host, 100,000 tensors", counted("prepared step, us")),
    ),
    "torch": (
        "**PyTorch**: a backward of DDP with our hook takes {} of the time of a plain one; "
        "`DataParallel` adds {} of the time that a loop of PyTorch adds.",
        ("hook of DDP, ResNet-50", counted("comm_hook over plain DDP, median of pairs")),
        ("tiny gradients, 8 replicas", counted("DataParallel adds, over a loop of torch")),
    ),
}


def reports(kind: str) -> dict[str, Report]:
    paths = sorted((RESULTS / kind).glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths}


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py"))


def cases_of(report: Report) -> dict[str, Case]:
    found = {}
    for each in report["cases"]:
        seconds = {name: took["seconds"] for name, took in each["took"].items()}
        found[each["name"]] = Case(
            each["name"], each["size"], took=took_of(seconds), figures=each["figures"]
        )
    return found


def every_floor(
    chosen: str = "", kinds: Sequence[str] = ("cpu", "gpu")
) -> Iterator[tuple[str, Floor, dict[str, Any]]]:
    """Yields each floor for which there are figures, its benchmark's name, and its check."""
    for kind in kinds:
        for name, report in reports(kind).items():
            if chosen in ("", name):
                benchmark: Benchmark = import_module(f"bench_{name}").BENCHMARK
                for floor in benchmark.floors_of(on_gpu=kind == "gpu"):
                    yield name, floor, floor.check(cases_of(report), report["absent"])


def missed() -> list[str]:
    return [
        f"{name}: {floor.name}" for name, floor, found in every_floor() if found["holds"] is False
    ]


def figure(value: float | None) -> str:
    """Returns a number with three digits, never in exponents."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, whose head has words between bars; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if lines:
        yield from (f"| {head} |", f"|{' --- |' * (1 + head.count('|'))}", *lines, "")


def summary_page() -> str:
    found = reports("cpu")
    parts = [HEAD.format(machines=machines(found))]
    lines = []
    for name, report in found.items():
        words, *figures = SUMMARY[name]
        cases = cases_of(report)
        values = [of_case(cases[case]) if case in cases else None for case, of_case in figures]
        lines.append(f"- {words.format(*map(figure, values))}")
    parts += ["\n".join(lines), ""]
    if "scaling" in found:
        parts += [
            f"![time by {words}]({PICTURE.format(sweep)})\n" for sweep, words in SWEEPS.items()
        ]
    left = f"These are missed: {'; '.join(missed())}." if missed() else ALL_HOLD
    rows = [
        (f"{name}: {floor.name}", f"{floor.sign} {floor.decision.was:g}",
         f"{floor.sign} {floor.bound:g}", figure(found["figure"]), floor.decision.why)
        for name, floor, found in every_floor() if floor.decision is not None
    ]  # fmt: skip
    decisions = table("floor | before | now | measured | why", rows)
    return "\n".join([*parts, CHANGED.format(verdict=left), *decisions, AGAIN])


def machines(found: Mapping[str, Report]) -> str:
    """Returns a sentence about machines and dates, which is true for all reports."""
    places = {
        f"{each['machine']['processor']}, {each['machine']['cores']} cores, {each['date']}"
        for each in found.values()
    }
    kind = "Measured on CPUs, as fractions of the time of a peer or of a plain copy"
    gpus = sorted({each["machine"]["gpu"] for each in reports("gpu").values()})
    gpu = "no GPU was available"
    if gpus:
        gpu = f"figures of {' and '.join(gpus)} are in the tables, each of the version of its date"
    return f"{kind} ({'; '.join(sorted(places))}); {gpu}."


def tables_page() -> str:
    return "\n".join([TABLES_HEAD, *("\n".join(section(name)) for name in names())])


def section(name: str) -> Iterator[str]:
    text = (BENCH / f"bench_{name}.py").read_text("utf-8")
    yield f"## bench_{name}.py\n"
    yield (ast.get_docstring(ast.parse(text)) or "").splitlines()[0] + "\n"
    for kind in ("cpu", "gpu"):
        report = reports(kind).get(name)
        if report is not None:
            cases = cases_of(report).values()
            yield about(report) + "\n"
            timed = [row_of(case) for case in cases if case.took]
            yield from table("case | copy | ours (of the copy) | peers", timed)
            yield from table(f"figure | {kind.upper()}", (
                (f"{case.name}: {what}", figure(value))
                for case in cases for what, value in case.figures.items()
            ))  # fmt: skip
            checked = (found for _, _, found in every_floor(name, [kind]))
            yield from table("floor | bound | measured | reached | ", map(reached, checked))
            left_out = [f"{what} ({why})" for what, why in report["absent"].items()]
            if left_out:
                yield f"Left out: {'; '.join(left_out)}.\n"
        elif kind == "cpu":
            yield f"CPU: {NOT_MEASURED}.\n"


def about(report: Report) -> str:
    """Returns machine, versions, command and date of a report."""
    machine = report["machine"]
    gpu = f"**{machine['gpu']}**; " if "gpu" in machine else ""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    busy = "**the machine was busy with other work**" if report["busy"] else "nothing else ran"
    load = f"; load average {report['load_average']:.1f}" if "load_average" in report else ""
    return (
        f"{gpu}`{report['command']}`, {report['date']}; {machine['processor']}, {machine['cores']} "
        f"cores, {machine['memory_gib']} GiB; Python {machine['python']}, {versions}; {busy}{load}."
    )


def row_of(case: Case) -> tuple[str, str, str, str]:
    """Returns the row of a case: the time of the copy, ours and the peers', fastest first."""
    copy = case.seconds("copy")
    ours, peers = [], []
    for name, took in sorted(case.took.items(), key=lambda each: each[1].seconds):
        words = f"{name.removeprefix(OURS)} {figure(took.seconds * 1e3)}"
        if name.startswith(OURS):
            ours.append(f"{words} ({copy / took.seconds:.2g})" if copy else words)
        elif name != "copy":
            peers.append(words)
    name = ": ".join(each for each in (case.name, case.size) if each)
    return name, figure(copy * 1e3) if copy else "", "<br>".join(ours), "<br>".join(peers)


def reached(floor: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the row of a floor, with the fraction that was reached: 1 or more holds."""
    found, bound = floor["figure"], floor["bound"]
    fraction = ""
    if found and bound:
        fraction = f"{found / bound if floor['sign'] == '>=' else bound / found:.2g}"
    holds = {True: "holds", False: "**missed**", None: "not checked"}[floor["holds"]]
    holds += "".join(f" (without {why})" for why in floor["without"])
    shown = "" if found is None else figure(found)
    return floor["floor"], f"{floor['sign']} {bound:g}", shown, fraction, holds


def draw(cases: Iterable[Case], sweep: str, path: Path) -> None:
    """Draws the time by number of tensors, replicas or bytes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"], rcParams["svg.hashsalt"] = "none", "gradreduce"
    lines: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        what, _, size = case.name.partition(", ")
        for name, took in case.took.items() if what == sweep else ():
            x = float(size.removesuffix(" in all").replace(",", ""))
            lines.setdefault(name, []).append((x, took.seconds * 1e3))
    picture = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = picture.subplots()
    for name, points in lines.items():
        style = "--" if name == "copy" else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel=SWEEPS[sweep], ylabel="ms (CPU)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    picture.savefig(path, metadata={"Date": None})


def write() -> None:
    PAGE.write_text(summary_page(), "utf-8")
    PAGE.with_name(TABLES).write_text(tables_page(), "utf-8")
    if scaling := reports("cpu").get("scaling"):
        for sweep in SWEEPS:
            draw(cases_of(scaling).values(), sweep, PAGE.with_name(PICTURE.format(sweep)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args(arguments).check:
        write()
        return
    for path, wanted in ((PAGE, summary_page()), (PAGE.with_name(TABLES), tables_page())):
        if path.read_text("utf-8") != wanted:
            sys.exit(f"{path} is not that of {RESULTS}: run python bench/page.py")
    if found := missed():
        sys.exit(f"missed floors: {'; '.join(found)}: meet them, or change them by a Decision")


if __name__ == "__main__":
    main()
