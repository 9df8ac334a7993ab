"""Like ``tests/end_to_end/test_steady_state.py``, counted in CUDA calls."""

from __future__ import annotations

import pytest
from end_to_end.test_steady_state import FORMS, SETTINGS, captured, into, plain, ready

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

pytestmark = pytest.mark.fake_cupy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [[0] * 8, [0, 0, 1, 1]], ids=str)
def test_a_steady_state_allocates_nothing(placement, algorithm, setting, form, gpus, monkeypatch):
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
