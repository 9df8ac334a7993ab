"""``gradreduce trace``: a flight record as a trace for Perfetto, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from gradreduce.device import (
    QUEUES,
    TraceEvent,
    event_of,
    group_by,
    replace_file,
    trace_path,
    trace_text,
)
from gradreduce.errors import brief, counted

from .options import json_option, one_line, plot_option, printable, table, write
from .pictures import plot_timeline

_MOST_TIME = 1e15  # microseconds: 30 years
_FIELDS = ("kind", "name", "device", "queue")
_DETAILS = ("sequence", "source", "nbytes", "num_rows", "tensors", "done")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path),
    help="The trace to write. Default: FILE with the suffix .trace.json.",
)  # fmt: skip
@json_option
@plot_option
def trace(file: Path, output: Path | None, json_file: IO[str] | None, plot: Path | None) -> None:
    """Convert a flight record to a trace that Perfetto and chrome://tracing show.

    FILE is a flight record (see GRADREDUCE_FLIGHT_RECORD), or a trace written by mesh.trace(path);
    for a trace only the summary and the picture are made. A flight record contains no times: each
    operation is drawn one microsecond long, in the order of submission.
    """
    events, head, text = _read(file)
    lines = []
    if head is not None:
        output = output or file.with_suffix(".trace.json")
        try:
            replace_file(trace_path(output), text, mode=0o666)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{output} cannot be written: {error}") from error
        lines = [head, f"Trace: {output}"]
    if plot is not None:
        unit = "microseconds on the host" if head is None else "operations, in the order submitted"
        plot_timeline(plot, file.name, events, unit)
    rows = _summary(events)
    columns = (">device", "queue", "operation", ">count", ">bytes", ">not done")
    keys = [column.lstrip(">") for column in columns]
    write(
        json_file,
        {"operations": [dict(zip(keys, row, strict=True)) for row in rows]},
        *lines,
        table(counted(len(events), "operation"), columns, rows),
    )


def _read(file: Path) -> tuple[list[TraceEvent], str | None, bytes]:
    """Reads a trace or a flight record.

    Returns:
        The events. For a flight record also its first line, and the content of its trace.

    Raises:
        click.ClickException: it is neither; or the file cannot be read.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        is_trace = "traceEvents" in content
        events = _of_trace(content) if is_trace else _of_flight(content)
        for each in events:
            _check(each)
        if is_trace:
            return events, None, b""
        names = {device: f"device {device}" for device in sorted({each["pid"] for each in events})}
        head = printable(_text(f"{content['mesh']}: {content['reason']}"))
        return events, head, trace_text(events, names)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise click.ClickException(
            one_line(f"{file} is neither a flight record nor a trace of mesh.trace: {why}")
        ) from error


def _check(event: TraceEvent) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless an event can be counted, shown and drawn."""
    details, device, queue = event["args"], event["pid"], event["tid"]
    numbers = [device, queue, details.get("nbytes", details.get("bytes", 0))]
    if any(type(each) is not int for each in numbers) or not 1 <= queue <= len(QUEUES):
        raise ValueError(f"pid, tid and bytes {brief(numbers)} are not integers of an operation")
    times = [event["ts"], event["dur"]]
    if any(type(each) not in (int, float) or not abs(each) < _MOST_TIME for each in times):
        raise ValueError(f"ts and dur {brief(times)} are not times in microseconds")
    _text(event["name"])
    _text(event["cat"])


def _text(value: str) -> str:
    """Returns a text; raises ``ValueError`` if it has a lone surrogate, which cannot be printed."""
    return value.encode().decode()


def _of_flight(content: dict[str, Any]) -> list[TraceEvent]:
    """Returns the events of a flight record; one microsecond each."""
    return [
        event_of(
            **{name: entry[name] for name in _FIELDS},
            start=number,
            duration=1,
            details={name: entry[name] for name in _DETAILS},
        )
        for number, entry in enumerate(content["entries"])
    ]


def _of_trace(content: dict[str, Any]) -> list[TraceEvent]:
    """Returns the complete events of a trace."""
    return [each for each in content["traceEvents"] if each["ph"] == "X"]


def _summary(events: Sequence[TraceEvent]) -> list[tuple[object, ...]]:
    """Counts the operations of each device, queue and name."""
    details_of = group_by(
        [((each["pid"], each["tid"], each["name"]), each["args"]) for each in events]
    )
    return [
        (
            device,
            QUEUES[tid - 1],
            name,
            len(details),
            sum(each.get("nbytes", each.get("bytes", 0)) for each in details),
            sum(not each.get("done", True) for each in details),
        )
        for (device, tid, name), details in sorted(details_of.items())
    ]
