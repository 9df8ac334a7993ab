"""The saved state of an accumulator; after a load, results have the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.accumulator_states import EMPTY, check_refused, frozen
from support.exact_data import FLOATS, random_data, same
from support.hanging_devices import TEST_TIMEOUT, clock, late_waits, stall

import gradreduce as gr
from gradreduce.device import accumulate_dtype
from gradreduce.errors import CollectiveError

__all__ = ["clock", "late_waits"]

LIMIT_S = 60.0  # these calls take a second


def apply_and_take(acc, values, step):
    """Adds more gradients of one step and takes, twice; returns the results as one list."""
    made = []
    for turn in range(2):
        for value in values:
            assert acc.apply_grad(value, step + turn)
        taken = acc.take_grad(1)
        made += list(taken.values) if isinstance(taken, gr.Mirrored) else [taken]
    return [np.array(array) for array in made]


# -- what it is -----------------------------------------------------------------------------------


def test_the_keys_and_their_types(accumulator, device):
    acc = accumulator("float16", (None, 2), reduction_type="SUM")
    assert acc.state_dict() == EMPTY
    acc.set_global_step(3)
    for value, step in ((60000.0, 3), (60000.0, 5), (1.0, 2)):
        acc.apply_grad([[value, 2.0**-24]], step)
    live = device._pool.live_bytes
    state = acc.state_dict()
    device.drain()
    assert device._pool.live_bytes == live
    (total,) = state.pop("partial_sums")
    counted = {"global_step": 3, "num_accumulated": 2, "num_dropped": 1}
    assert state | {"partial_sums": [None]} == EMPTY | counted | {
        "sum_shape": [1, 2],
        "kind": "native",
    }
    assert {key: type(value) for key, value in state.items()} == {
        **dict.fromkeys(("format", "dtype", "reduction_type", "kind"), str),
        **dict.fromkeys(("global_step", "num_accumulated", "num_dropped"), int),
        **dict.fromkeys(("shape", "sum_shape"), list),
    }
    assert json.loads(json.dumps(state)) == state
    assert type(total) is np.ndarray
    assert same(total, np.array([[120000.0, 2.0**-23]], "float32")), "no half would hold it"
    total[:] = 0
    assert acc.take_grad(2).tolist() == [[np.inf, 2.0**-23]], "the array is a copy"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
@pytest.mark.parametrize("shape", [(), (37,), (0, 3)], ids=str)
def test_a_restored_accumulator_continues_with_the_same_bits(
    accumulator, dtype, reduction_type, shape
):
    acc, fresh = (accumulator(dtype, reduction_type=reduction_type) for _ in range(2))
    values = [random_data(shape, dtype, seed=seed) for seed in range(6)]
    acc.set_global_step(4)
    for value in values[:2]:
        acc.apply_grad(value, 4)
    acc.apply_grad(values[2], 3)
    state = acc.state_dict()
    assert state["partial_sums"][0].dtype == accumulate_dtype(dtype)
    before = state["partial_sums"][0].copy()
    wanted = apply_and_take(acc, values[3:], 4)
    assert same(state["partial_sums"][0], before), "what came later shows in it"
    fresh.apply_grad(values[5], 0)  # replaced by the load
    fresh.load_state_dict(state)
    assert (fresh.num_accumulated(), fresh.global_step, fresh.num_dropped) == (2, 4, 1)
    found = apply_and_take(fresh, values[3:], 4)
    assert all(map(same, found, wanted))
    assert same(state["partial_sums"][0], before), "the caller's array was written"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_over_a_mesh_with_any_number_of_devices_filled(mesh, dtype):
    everyone = range(len(mesh))
    values = random_data((len(mesh), 19), dtype)
    for filled in ((), everyone[1:2], everyone[1:], everyone):
        acc, fresh = (gr.ConditionalAccumulator(dtype, (None,), device=mesh) for _ in range(2))
        for place in filled:
            with gr.replica(place):
                acc.apply_grad(values[place])
        with mesh.journal() as journal:
            state = acc.state_dict()
        assert (journal.copies, journal.launches, journal.uploads) == (len(filled), 0, 0)
        assert [total is not None for total in state["partial_sums"]] == [
            place in filled for place in everyone
        ]
        with mesh.journal() as journal:
            fresh.load_state_dict(state)
        assert (journal.copies, journal.launches, journal.uploads) == (0, 0, len(filled))
        assert frozen(fresh) == frozen(acc)
        arrivals = [gr.PerReplica(list(values[::-1]), mesh)]
        assert all(map(same, apply_and_take(fresh, arrivals, 0), apply_and_take(acc, arrivals, 0)))


# -- threads --------------------------------------------------------------------------------------


def is_free(lock):
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return free


@pytest.mark.parametrize("seed", range(4))
def test_a_state_is_a_consistent_snapshot_and_its_downloads_block_no_call(
    call_threads, monkeypatch, seed
):
    """Copies are queued under the lock; the lock is free while the host waits for them."""
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh, reduction_type="SUM")
        ones = gr.PerReplica([np.ones(5, "float32")] * 3, mesh)
        acc.apply_grad(ones)
        free = []

        def copy(self, *args, real=gr.Device.copy, **kwargs):
            free.append(call_threads.start(is_free, acc.accumulator_ref.lock).result())
            real(self, *args, **kwargs)

        def download(self, *args, real=gr.Device.download, **kwargs):
            assert call_threads.start(acc.apply_grad, ones).result()
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(gr.Device, "copy", copy)
            patch.setattr(gr.Device, "download", download)
            state = acc.state_dict()
        assert free == [False] * 3
        assert (state["num_accumulated"], acc.num_accumulated()) == (3, 12)
        assert [total.tolist() for total in state["partial_sums"]] == [[1.0] * 5] * 3
        assert acc.take_grad(12).values[0].tolist() == [12.0] * 5


def test_a_load_completes_waiting_takes(accumulator, call_threads):
    acc, other, source = accumulator(), accumulator(), accumulator()
    for value in (1.0, 3.0):
        source.apply_grad([value])
    state = source.state_dict()
    more = call_threads.waiting(acc.take_grad, 3)
    joint = call_threads.waiting(gr.take_grads, [acc, other], 2)
    last = call_threads.waiting(acc.take_grad, 2)
    acc.load_state_dict(state)
    assert [call.is_done for call in (more, joint, last)] == [False] * 3
    acc.apply_grad([5.0])
    assert more.result().tolist() == [3.0]
    other.load_state_dict(state)
    assert not joint.is_done
    acc.load_state_dict(state)
    assert joint.is_done
    assert [array.tolist() for array in joint.result()] == [[2.0], [2.0]]
    assert not last.is_done
    acc.load_state_dict(state)
    assert last.result().tolist() == [2.0]


def test_a_load_that_lowers_the_step_does_not_warn(accumulator, caplog):
    acc = accumulator()
    state = acc.state_dict()
    acc.set_global_step(7)
    acc.load_state_dict(state)
    assert acc.global_step == 0
    assert caplog.text == ""


# -- kinds ----------------------------------------------------------------------------------------


def test_a_load_restores_the_array_type_of_the_next_result(accumulator, device, monkeypatch):
    acc, fresh = accumulator(), accumulator()
    acc.apply_grad(device.put(np.ones(1, "float32")))
    state = acc.state_dict()
    fresh.load_state_dict(state)
    assert isinstance(fresh.take_grad(1), gr.Buffer)
    fresh.load_state_dict(state | {"kind": "cupy"})  # saved on a GPU
    assert type(fresh.take_grad(1)) is np.ndarray
    for kind in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, kind, raising=False)
        text = f"state['kind']: output_type='{kind}': {kind} is not imported"
        check_refused(acc, state | {"kind": kind}, ValueError, text)


# -- a mesh that fails ----------------------------------------------------------------------------


@pytest.fixture
def mesh_and_accumulator():
    """A mesh that may fail, and an accumulator over it."""
    with gr.open_mesh([0, 1, 2], backend="sim", strict=True, schedule_seed=3) as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh)
        acc.apply_grad(gr.PerReplica([[2.0]] * 3, mesh), cast=True)
        yield mesh, acc


@pytest.mark.usefixtures("late_waits")
def test_a_deadline_ends_the_wait_and_a_load_recovers_the_state(mesh_and_accumulator, call_threads):
    mesh, acc = mesh_and_accumulator
    state = acc.state_dict(deadline=TEST_TIMEOUT)
    stall(mesh.devices[2])
    with pytest.raises(CollectiveError, match="passed: sim:2 has not finished its queues"):
        call_threads.start(acc.state_dict, deadline=5).result()
    for call in (acc.state_dict, lambda: acc.load_state_dict(state)):
        with pytest.raises(CollectiveError, match="the mesh has failed"):
            call()
    mesh.reset(timeout=TEST_TIMEOUT)
    assert acc.num_accumulated() == 0
    acc.load_state_dict(state)
    assert acc.take_grad(3).values[0].tolist() == [2.0]


@pytest.mark.parametrize("method", ["download", "upload"])
def test_a_mesh_that_fails_and_is_reset_during_a_save_or_a_load(
    mesh_and_accumulator, monkeypatch, method
):
    """The memory is undefined then: it is neither returned nor loaded."""
    mesh, acc = mesh_and_accumulator
    state = acc.state_dict()

    real = getattr(gr.Device, method)

    def late(self, *args, **kwargs):
        if self is not mesh.devices[1]:
            return real(self, *args, **kwargs)
        made = real(self, *args, **kwargs) if method == "upload" else None
        mesh.mesh_state.fail("planted")
        mesh.reset(timeout=TEST_TIMEOUT)
        return real(self, *args, **kwargs) if made is None else made

    monkeypatch.setattr(gr.Device, method, late)
    with pytest.raises(CollectiveError, match="the mesh failed while the state of an accumulator"):
        acc.state_dict() if method == "download" else acc.load_state_dict(state)
    assert acc.num_accumulated() == 0


# -- a process that is killed ---------------------------------------------------------------------

RUN = """
import pickle, sys
from pathlib import Path
import numpy as np
import gradreduce as gr

mode, path = sys.argv[1], Path(sys.argv[2])
mesh = gr.open_mesh([0, 0, 1], backend="sim")
accumulators = [
    gr.ConditionalAccumulator("float16", device=mesh.devices[1]),
    gr.ConditionalAccumulator("bfloat16", (2, 50), device=mesh),
    gr.SparseConditionalAccumulator("float16", (9, 50), device=mesh),
]
data = np.random.default_rng(8).standard_normal((4, 2, 50)).astype("float32")

def apply(turn):
    with gr.replica(1 + turn % 2):
        for accumulator in accumulators[:2]:
            accumulator.apply_grad(data[turn], 5, cast=True)
        accumulators[2].apply_grad([8 - turn, turn % 2], data[turn], None, 5, cast=True)

if mode == "resume":
    for accumulator, state in zip(accumulators, pickle.loads(path.read_bytes())):
        accumulator.load_state_dict(state)
else:
    for accumulator in accumulators:
        accumulator.set_global_step(5)
    apply(0)
    apply(1)
if mode == "killed":
    path.write_bytes(pickle.dumps([accumulator.state_dict() for accumulator in accumulators]))
    apply(3)  # it is lost
    print("saved", flush=True)
    sys.stdin.read()
apply(2)
for accumulator in accumulators:
    count, step = accumulator.num_accumulated(), accumulator.global_step
    taken = accumulator.take_grad(3, output_type="numpy")
    indices, taken, shape = taken if isinstance(taken, tuple) else ("all", taken, "")
    array = taken.values[2] if isinstance(taken, gr.Mirrored) else taken
    print(count, step, array.dtype, array.tobytes().hex(), indices, shape)
"""


def started(mode, path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", RUN, mode, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(gr.__file__).parent.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_another_process_continues_from_the_state_of_a_killed_one(tmp_path, call_threads):
    path = tmp_path / "checkpoint"
    first, whole = processes = [started(mode, path) for mode in ("killed", "whole")]
    try:
        said = call_threads.start(first.stdout.readline).result()
        os.kill(first.pid, signal.SIGKILL)
        assert (said, first.wait(LIMIT_S)) == ("saved\n", -signal.SIGKILL), first.stderr.read()
        processes.append(started("resume", path))
        found, wanted = (each.communicate(timeout=LIMIT_S) for each in (processes[2], whole))
    finally:
        for process in processes:
            with process:
                process.kill()
    assert found == wanted
    counted = [line.split()[:3] for line in wanted[0].splitlines()]
    assert counted == [["3", "5", dtype] for dtype in ("float16", "bfloat16", "float16")], wanted
    assert wanted[0].endswith(" [0 1 6 7 8] (9, 50)\n"), wanted
