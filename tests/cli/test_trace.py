"""``gradreduce trace``: of the files that the library writes."""

import errno
import json
import os
import resource

import numpy as np
import pytest
from click.testing import CliRunner
from support.trace_format import check_trace

import gradreduce as gr
from gradreduce.cli.app import command


def run(*arguments: object):
    return CliRunner().invoke(command, ["trace", *map(str, arguments)])


def reduce(mesh):
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 2, mesh=mesh)
    return ops.all_reduce([[np.ones(5), np.ones(3)] for _ in mesh], output_type="buffer")


@pytest.fixture
def flight(tmp_path, monkeypatch):
    """The flight record of a mesh that failed with work in its queues."""
    monkeypatch.setenv("GRADREDUCE_FLIGHT_RECORD", str(tmp_path / "flight.json"))
    with gr.open_mesh(2, backend="sim", schedule_seed=0) as mesh:
        with mesh.journal() as journal:
            reduce(mesh)
        mesh.mesh_state.fail("a test ended it")
    (path,) = tmp_path.glob("flight.*.json")
    return path, journal.records


def test_a_flight_record_becomes_trace_events_and_a_summary(flight, tmp_path):
    path, records = flight
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "a test ended it" in result.output
    events = check_trace(json.loads(path.with_suffix(".trace.json").read_text()))
    assert [each["ts"] for each in events] == list(range(len(records)))
    assert [(each["cat"], each["pid"], each["args"]["sequence"]) for each in events] == [
        (record.kind, record.device, number) for number, record in enumerate(records, 1)
    ]
    assert [each["args"]["done"] for each in events] == [False] * len(records)
    assert events[-1]["args"]["tensors"] == str(records[-1].label)
    found = json.loads(run(path, "--json", "-", "-o", tmp_path / "out.json").output)["operations"]
    assert check_trace(json.loads((tmp_path / "out.json").read_text())) == events
    for name, wanted in (
        ("count", len(records)),
        ("not done", len(records)),
        ("bytes", sum(record.nbytes for record in records)),
    ):
        assert sum(row[name] for row in found) == wanted


def test_an_output_that_cannot_be_written_is_an_error(flight, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing/out.json"):
        result = run(flight[0], "--output", tmp_path / name)
        assert result.exit_code == 1, result.output
        assert "cannot be written" in result.output
    assert (tmp_path / "pipe").is_fifo()


def test_a_trace_of_a_mesh_is_summed_up_and_drawn(tmp_path):
    path = tmp_path / "step.json"
    with gr.open_mesh(2, backend="sim") as mesh, mesh.trace(path) as journal:
        reduce(mesh)
    before = path.read_bytes()
    result = run(path, "--plot", tmp_path / "step.svg")
    assert result.exit_code == 0, result.output
    assert f"{len(journal.records)} operations" in result.output
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step.json", "step.svg"]
    assert "<svg" in (tmp_path / "step.svg").read_text()
    path.write_text(json.dumps({"mesh": "sim", "reason": "none", "entries": []}))
    assert run(path, "--plot", tmp_path / "empty.png").exit_code == 0


EVENT = {
    "ph": "X", "name": "copy", "cat": "copy", "ts": 0, "dur": 1, "pid": 0, "tid": 1, "args": {}
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{}", '{"traceEvents": 3}', '{"entries": [{}]}', "[" * 20_000,
     *[json.dumps({"traceEvents": [EVENT | wrong]})
       for wrong in ({"name": "\ud800"}, {"name": [1]}, {"tid": 3}, {"tid": 0}, {"pid": "0"},
                     {"dur": 10**400}, {"ts": float("nan")}, {"args": {"nbytes": "1"}},
                     {"args": 3})]],
)  # fmt: skip
def test_another_file_is_one_line(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    result = run(path, "--plot", tmp_path / "step.svg")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert result.output.count("\n") == 1
    assert f"Error: {path} is neither a flight record nor a trace of mesh.trace: " in result.output
    assert list(tmp_path.iterdir()) == [path]


def test_control_characters_are_escaped(tmp_path):
    """They could change the terminal, or hide what was printed before."""
    trace, flight, hostile = tmp_path / "step.json", tmp_path / "flight.json", "\x1b[2J\u202e\x07"
    trace.write_text(json.dumps({"traceEvents": [EVENT | {"name": hostile}]}))
    flight.write_text(json.dumps({"mesh": f"a{hostile}\nb", "reason": "none", "entries": []}))
    for path, shown in ((trace, ""), (flight, r"a\x1b[2J\u202e\x07\nb: none")):
        result = run(path)
        assert result.exit_code == 0, result.output
        assert shown in result.output
        assert not set(hostile) & set("\x1b\u202e\x07") & set(result.output)
    assert r"\x1b[2J\u202e\x07" in run(trace).output


def test_a_name_that_is_not_text_is_printed(flight, tmp_path):
    result = run(flight[0], "-o", tmp_path / os.fsdecode(b"\xff.json"))
    assert result.exit_code == 0, result.output
    assert "\\udcff.json" in result.output


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, number):
    path, picture = tmp_path / "step.json", tmp_path / "step.svg"
    path.write_text(json.dumps({"traceEvents": [EVENT]}))
    picture.write_text("before")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync" if number == errno.ENOSPC else "fdopen", fail)
    result = run(path, "--plot", picture)
    text = f"Error: the picture cannot be written: [Errno {number}] {os.strerror(number)}\n"
    assert (result.exit_code, result.output) == (1, text)
    assert picture.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [path, picture]


def test_json_that_cannot_be_written_is_one_line(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"traceEvents": [EVENT]}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as if the disk was full
    try:
        result = run(path, "--json", tmp_path / "out.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = f"Error: --json cannot be written: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}\n"
    assert (result.exit_code, result.output) == (1, text)
