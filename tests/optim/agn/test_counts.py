"""Launches, copies and memory of a step and of a push."""

import gc
from collections import Counter

import numpy as np
import pytest
from optim.agn.team import KINDS, Own, pair

import gradreduce as gr
from gradreduce.optim.agn.push import PushPlan

STARTS = {f"v{place}": np.zeros(3 + place, dtype)
          for place, dtype in enumerate(["float32", "float64"] * 6)}  # fmt: skip


def on_device(worker):
    """Gradients that need no upload."""
    return {name: worker.getter.devices[0].upload(np.ones_like(value))
            for name, value in STARTS.items()}  # fmt: skip


def names(journal):
    return Counter(record.name or record.kind for record in journal.records)


@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adam", "adamw", "lion"])
def test_launches_of_a_step_and_of_a_push(mesh, kind, gamma):
    """One for each GPU and dtype, labelled with the variables.

    Without peer access, sums and pulled values are copied in addition.
    """
    (worker,) = pair(mesh, 2, KINDS[kind][1], STARTS, num=1, distance_scale=gamma)
    grads, getter = on_device(worker), worker.getter
    centers = [getter.center_variable(var) for var in worker.variables.values()]
    homes = [var.devices[0].physical for var in centers]
    num_launches = len({(home, var.dtype) for home, var in zip(homes, centers, strict=True)})
    far = sum(home != 0 and not mesh.mesh_state.peers(0, home) for home in homes)
    for turn in range(8):
        with mesh.journal() as journal:
            worker.step(grads)
        if turn < 4:  # the first write the sums, and make the slots
            continue
        assert all(record.label.names == list(STARTS) for record in journal.of("launch"))
        found = names(journal)
        assert found.pop(f"local_{kind}") == 2
        assert {record.num_rows for record in journal.of("launch")[:2]} == {6}
        if turn % 2 == 0:
            assert not found
            continue
        assert found.pop(f"global_{kind}") == num_launches
        copies = 2 * far
        if gamma is not None:
            assert found.pop("distance_scale") == num_launches
            copies += far + len(STARTS)
        assert found == ({"copy": copies} if copies else {})


@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("make", [KINDS["momentum"][1], KINDS["lazy adam"][1], Own],
                         ids=["momentum", "lazy adam", "own"])  # fmt: skip
def test_memory_of_a_steady_state_does_not_grow(mesh, make, is_sparse, gamma):
    """And it does not depend on the garbage collector."""
    starts, live = {"v": np.zeros((100, 3), "float32")}, []
    team = pair(mesh, 2, make, starts, 3, distance_scale=gamma)
    rows = np.ones((2, 3), "float32")
    gc.collect()
    gc.disable()
    try:
        for turn in range(8):
            for worker in team:
                grad = gr.IndexedSlices(rows, [3, 5]) if is_sparse else np.ones_like(starts["v"])
                worker.step({"v": grad})
            if turn % 2:
                live.append(sum(device._pool.live_bytes for device in mesh))
    finally:
        gc.enable()
    assert live[1] == live[2] == live[3]


def test_a_communication_is_planned_once_if_it_holds_no_memory(mesh, monkeypatch):
    """A push that cannot access the worker's memory needs temporary memory; others do not."""
    planned, home = [], mesh.devices[1]

    def plan(*given):
        planned.append(len(planned))
        return PushPlan(*given)

    monkeypatch.setattr("gradreduce.optim.agn.center_state.PushPlan", plan)
    starts, live = {"v": np.zeros(1 << 14, "float32")}, []
    (worker,) = pair(mesh, 2, KINDS["momentum"][1], starts, num=1, center=gr.AGNCenter(home))
    for _ in range(3):
        assert [worker.step(starts) for _ in range(2)] == [False, True]
        home.trim()
        live.append(home._pool.live_bytes)
    reaches = home.mesh_state.peers(home.physical, worker.getter.devices[0].physical)
    assert len(planned) == (1 if reaches else 3)
    assert max(live) < 3 * starts["v"].nbytes  # the variable and its momentum


def test_sparse_sums_stay_sparse(mesh):
    """No array of the size of the table is allocated for the period, its push or its mean."""
    shape = (4096, 64)
    rows = np.ones((3, 64), "float32")
    for make in (KINDS["momentum"][1], KINDS["sgd"][1], Own):
        (worker,) = pair(mesh, 3, make, {"t": np.zeros(shape, "float32")}, num=1)
        home = worker.variables["t"].devices[0]
        live = []
        for turn in range(6):
            worker.step({"t": gr.IndexedSlices(rows, [7, turn, 7], shape)})
            assert not isinstance(worker.getter._shared.sums.get(worker.variables["t"]), tuple)
            live.append(sum(device._pool.live_bytes for device in mesh))
        whole = 1 << 20
        num_kept = 2 * (1 if make is KINDS["sgd"][1] else 2)  # and a copy of what is pulled
        assert max(live) < (num_kept + 1) * whole, home
