"""Journal, flight record, plan, prepared and captured steps are views of one log."""

from operator import attrgetter

import numpy as np
import pytest
from support.meshes import MeshCase, owned, per_replica

import gradreduce as gr
from gradreduce.reduce import all_reduce_ops
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPES = [((3, 2), "float32"), ((5,), "float32"), ((7,), "int32"), ((4,), "float32")]


@pytest.fixture(params=[True, False], ids=["peers", "no peers"])
def mesh(request):
    with MeshCase((0, 0, 1), request.param).open() as opened:
        yield opened


@pytest.fixture
def pairs(mesh):
    """The last value is added on one device; integers are divided after the sum."""
    values = [
        per_replica(mesh, lambda replica, shape=shape, dtype=dtype: np.ones(shape, dtype), owned)
        for shape, dtype in SHAPES
    ]
    return [*((value, value) for value in values[:-1]), (values[-1], ["sim:1", "sim:2"])]


def records_of_dry_run(monkeypatch, ops, reduce_op, pairs):
    """The records of the dry run that a profile of this call compares with its journal."""
    runs = []
    monkeypatch.setattr(all_reduce_ops, "profile_of", lambda run, mesh, reduce: runs.append(run))
    ops.profile(reduce_op, pairs)
    return [record for each in runs[0].operations for record in each.records]


def told(records):
    return [(record, str(record.label), record.phase) for record in records]


fields_of = attrgetter("kind", "name", "device", "source", "nbytes", "num_rows", "queue")


def noted(records):
    return [(*fields_of(each), str(each.label)) for each in records]


def entries_since(mesh, count):
    new = [each for each in mesh.flight_record() if each.sequence > count]
    return [(*fields_of(each), each.tensors) for each in new]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_view_has_the_same_operations_and_labels(monkeypatch, mesh, pairs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2, mesh=mesh)
    ops.batch_reduce(MEAN, pairs)
    count = mesh.flight_record()[-1].sequence
    with mesh.journal() as journal:
        ops.batch_reduce(MEAN, pairs)
    done = [record for record in journal.records if record.kind != "sync"]
    assert told(done) == told(records_of_dry_run(monkeypatch, ops, MEAN, pairs))
    assert entries_since(mesh, count) == noted(journal.records)
    tensors = {tensor for record in done for tensor in record.label.tensors}
    assert tensors == set(range(len(SHAPES)))
    assert {record.phase for record in done} == {"pack", "all-reduce", "unpack"}
    assert {record.phase for record in done if record.kind == "collective"} <= {"all-reduce"}


def test_a_prepared_and_a_captured_step_repeat_them(monkeypatch, mesh, pairs):
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 2, mesh=mesh)
    planned = told(records_of_dry_run(monkeypatch, ops, SUM, pairs))
    for make in (ops.prepare, ops.capture) if mesh.mesh_state.peer_access else (ops.prepare,):
        step = make(SUM, pairs)
        count = mesh.flight_record()[-1].sequence
        with mesh.journal() as journal:
            step()
        assert told(journal.records) == planned
        found = entries_since(mesh, count)
        if make == ops.prepare:
            assert found == noted(journal.records)
        else:
            (entry,) = found
            assert entry[1:3] == ("captured step", 0)
            assert entry[5] == len(planned)
            assert entry[-1] == "packs 1 to 4 of 4 (tensors 0 to 2), tensor 3"


def test_what_is_copied_to_out_names_its_tensors(mesh):
    """Writing zeros again is in the flight record too."""
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    grads = [[np.ones(3, np.int32), np.ones(2, np.float32)] for _ in mesh]
    outs = [[np.ones(3, np.float64), np.ones(2, np.float32)] for _ in mesh]
    with mesh.journal() as journal:
        ops.all_reduce(grads, MEAN, out=outs)
    assert all(record.label is not None for record in journal.of("launch"))
    *_, last = [record for record in journal.of("launch") if record.phase == "unpack"]
    assert (last.name, str(last.label)) == ("pack", "tensor 0")
    count = mesh.flight_record()[-1].sequence
    buffer = mesh.devices[1].zeros((4,), "float32")
    mesh.devices[1].fill_zero(buffer)
    assert [entry[:3] for entry in entries_since(mesh, count)] == [("fill", "", 1)] * 2
