"""``mesh.trace`` writes the operations in the Trace Event Format."""

import json
import os

import numpy as np
import pytest
from support.trace_format import check_trace

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS


@pytest.fixture
def mesh():
    with gr.open_mesh([0, 0, 1], backend="sim") as opened:
        yield opened


def reduce(mesh, algorithm="hierarchical_copy"):
    grads = [{"w": np.ones(5), "b": np.ones(3)} for _ in mesh]
    return gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh).all_reduce(grads)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trace_has_the_records_of_the_journal(mesh, tmp_path, algorithm):
    path = tmp_path / "trace.json"
    with mesh.trace(path) as traced, mesh.journal() as journal:
        reduce(mesh, algorithm)
        mesh.synchronize()
    assert traced.records == journal.records
    events = check_trace(json.loads(path.read_text()))
    assert [(each["cat"], each["pid"], each["args"]["bytes"]) for each in events] == [
        (record.kind, record.device, record.nbytes) for record in journal.records
    ]
    launches = [each for each in events if each["cat"] in ("launch", "collective")]
    assert launches
    assert all(each["dur"] > 0 for each in launches)
    assert {each["args"]["tensors"] for each in launches} == {"pack 1 of 1 (tensors w, b)"}
    ends = [each["ts"] + each["dur"] for each in events]
    assert ends == sorted(ends)


def test_devices_and_queues_have_names(mesh, tmp_path):
    with mesh[1:].trace(tmp_path / "trace.json"):
        reduce(mesh)
    content = json.loads((tmp_path / "trace.json").read_text())
    names = [each for each in content["traceEvents"] if each["ph"] == "M"]
    processes = [each["args"]["name"] for each in names if each["name"] == "process_name"]
    threads = {
        (each["tid"], each["args"]["name"]) for each in names if each["name"] == "thread_name"
    }
    assert processes == ["sim:0", "sim:1", "sim:2"]
    assert threads == {(1, "compute"), (2, "transfer")}


def test_replays_of_prepared_and_captured_steps_are_timed(mesh, tmp_path):
    value = gr.PerReplica([device.upload(np.ones(5)) for device in mesh], mesh)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    for step in (ops.prepare(gr.ReduceOp.SUM, [(value, value)]),
                 ops.capture(gr.ReduceOp.SUM, [(value, value)])):  # fmt: skip
        with mesh.trace(tmp_path / "trace.json") as journal:
            step()
        events = check_trace(json.loads((tmp_path / "trace.json").read_text()))
        assert len(events) == len(journal.records) > 0
        assert all(each["dur"] > 0 for each in events)


def test_the_trace_is_written_when_the_block_raises(mesh, tmp_path):
    with pytest.raises(ZeroDivisionError), mesh.trace(tmp_path / "trace.json"):
        reduce(mesh)
        raise ZeroDivisionError
    assert check_trace(json.loads((tmp_path / "trace.json").read_text()))
    log = mesh.mesh_state.log
    assert (log.num_traces, log._journals, log.ranges) == (0, (), None)


@pytest.mark.parametrize("name", ["", "missing/trace.json", "pipe"])
def test_a_path_that_cannot_be_a_file_is_an_error_before_the_block(mesh, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")  # replacing a FIFO would remove it
    with pytest.raises(ValueError, match="must name a regular file in an existing folder"):
        mesh.trace(tmp_path / name).__enter__()
    with pytest.raises(TypeError, match="nvtx"):
        mesh.trace(nvtx="yes").__enter__()


class Ranges:
    """Stands in for NVTX."""

    def __init__(self):
        self.calls = []

    def push(self, text):
        self.calls.append(text)

    def pop(self):
        self.calls.append("end")


def test_ranges_are_those_of_the_labels_and_are_asked_for(mesh, tmp_path, monkeypatch):
    """Without a path nothing is written."""
    monkeypatch.chdir(tmp_path)
    ranges = mesh.mesh_state.nvtx = Ranges()
    with mesh.trace():
        reduce(mesh)
    assert ranges.calls == []
    with mesh.trace(nvtx=True) as journal:
        reduce(mesh)
    assert journal.launches
    assert list(tmp_path.iterdir()) == []
    assert ranges.calls.count("end") * 2 == len(ranges.calls)
    assert ranges.calls[0] == "pack 1 of 1 (tensors w, b)"
    ranges.calls.clear()
    reduce(mesh)
    assert ranges.calls == []
