"""A repeated call needs nothing new: no memory, no upload, no wait."""

import numpy as np
import pytest
from support.meshes import num_grown

import gradreduce as gr
from gradreduce.backends.sim import device as sim
from gradreduce.reduce import pipeline
from gradreduce.reduce.algorithms import ALGORITHMS

SUM = gr.ReduceOp.SUM
SHAPES = [(60,), (5, 3), (), (200,)] * 3  # on eight devices too many for an inline table
# name -> arguments of the operation, bytes of a stage, whether the gradients lie in flat buffers
SETTINGS = {
    "each alone": ({"num_packs": 0}, None, False),
    "one pack": ({"num_packs": 1}, None, False),
    "a half wire": ({"num_packs": 2, "wire_dtype": "bfloat16"}, None, False),
    "several stages": ({"num_packs": 4}, 900, False),
    "flat buffers": ({"num_packs": 1}, None, True),
}


def plain(ops, pairs, outs):
    return lambda: ops.batch_reduce(SUM, pairs)


def into(ops, pairs, outs):
    return lambda: ops.batch_reduce(SUM, pairs, out=outs)


def prepared(ops, pairs, outs):
    return ops.prepare(SUM, pairs)


def prepared_into(ops, pairs, outs):
    return ops.prepare(SUM, pairs, out=outs)


def captured(ops, pairs, outs):
    return ops.capture(SUM, pairs)


FORMS = [plain, into, prepared, prepared_into, captured]


def buffers(mesh, flat):
    """``[tensor][replica]``, full of ones."""
    if flat:
        rows = [list(row) for row in zip(*mesh.flat_buffer(SHAPES, "float32").views, strict=True)]
    else:
        rows = [[device.empty(shape, "float32") for device in mesh] for shape in SHAPES]
    for buffer in [each for row in rows for each in row]:
        buffer.device.upload(np.ones(buffer.shape, np.float32), out=buffer)
    return rows


def ready(mesh, algorithm, setting, form, monkeypatch):
    """Returns the call after two calls; the first result is kept like those of the test."""
    options, stage_bytes, flat = SETTINGS[setting]
    if stage_bytes is not None:
        monkeypatch.setattr(pipeline, "STAGE_BYTES", stage_bytes)
    ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh, **options)
    pairs = [(value, value) for value in (gr.PerReplica(r, mesh) for r in buffers(mesh, flat))]
    call = form(ops, pairs, buffers(mesh, flat))
    for _ in range(2):
        kept = call()
    del kept
    return call


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_steady_state_allocates_nothing(algorithm, setting, form, monkeypatch):
    # NCCL over several GPUs is not captured.
    placement = [0, 0] if (form, algorithm) == (captured, "nccl") else [0, 0, 1]
    with gr.open_mesh(placement, backend="sim", strict=True) as mesh:
        call = ready(mesh, algorithm, setting, form, monkeypatch)
        asked, tables = [], []
        allocate, place = sim.SimDevice._allocate, sim.Tables.find
        monkeypatch.setattr(
            sim.SimDevice, "_allocate", lambda *given: asked.append(given) or allocate(*given)
        )
        monkeypatch.setattr(
            sim.Tables, "find", lambda *given: tables.append(given) or place(*given)
        )
        grown = num_grown(mesh)
        with mesh.journal() as journal:
            for _ in range(3):
                found = call()
        assert num_grown(mesh) == grown
        assert (journal.uploads, journal.syncs, len(journal.of("download"))) == (0, 0, 0)
        assert len(journal.records) % 3 == 0
        if form not in (plain, into):
            assert not asked
            assert not tables
        for result in found:
            assert all((each.numpy() == len(mesh)).all() for each in result.buffers)


@pytest.mark.fake_cupy
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [[0] * 8, [0, 0, 1, 1]], ids=str)
def test_a_steady_state_makes_no_cuda_calls(placement, algorithm, setting, form, gpus, monkeypatch):
    """If the GPUs have finished at the next call; a GPU that is behind needs more memory."""
    if (form, algorithm) == (captured, "nccl") and 1 in placement:
        placement = [0, 0]  # NCCL over several GPUs is not captured
    machine = gpus(1)
    with gr.open_mesh(placement, backend="cuda") as mesh:
        call = ready(mesh, algorithm, setting, form, monkeypatch)
        for _ in range(4):  # two alternating results, each with its tables
            held = call()
        before, slots = dict(machine.counts), sum(map(len, machine.heap._slots.values()))
        with mesh.journal() as journal:
            for _ in range(3):
                held = call()
        more = {name: count - before.get(name, 0) for name, count in machine.counts.items()}
        assert sum(map(len, machine.heap._slots.values())) == slots, "cudaMalloc"
        assert (more.get("synchronize", 0), journal.syncs, journal.uploads) == (0, 0, 0)
        assert more.get("memcpy", 0) + more.get("memcpyPeer", 0) == journal.copies
        assert not more["malloc"] or form in (plain, into)
        # Another algorithm may use the queues of several devices of a GPU.
        if len(mesh.by_physical) == 1 and algorithm in ("nccl", "hierarchical_copy"):
            assert not more.get("record") and not more.get("wait")
        assert all((each.numpy() == len(mesh)).all() for one in held for each in one.buffers)
