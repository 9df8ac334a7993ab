"""The saved state of an accumulator; after a load, results have the same bits."""

import json
import sys

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse, bits, contents
from support.accumulator_states import EMPTY, EMPTY_SPARSE, check_refused, frozen
from support.exact_data import FLOATS, same
from support.hanging_devices import TEST_TIMEOUT, clock, late_waits

import gradreduce as gr
from gradreduce.errors import CollectiveError

__all__ = ["clock", "late_waits"]


def apply_and_take(acc, gradients, step):
    """Adds more gradients of one step and takes, twice; returns the bits of the results."""
    made = []
    for turn in range(2):
        for each in gradients:
            assert gr.apply_grads([acc], [each], step + turn)
        made.append(bits(gr.take_grads([acc], 1, output_type="numpy")))
    return made


# -- what it is -----------------------------------------------------------------------------------


def saved(acc, device):
    """The state without its sum, and the sum; the state keeps no memory of the device."""
    device.drain()
    live = device._pool.live_bytes
    state = acc.state_dict()
    device.drain()
    assert device._pool.live_bytes == live
    (total,) = state.pop("partial_sums")
    assert json.loads(json.dumps(state)) == state
    return state | {"partial_sums": [None]}, total


TINY = np.full((1, 2), 2.0**-24, "float16")
LARGE = np.full((1, 2), 60000, "float16")
# Gradients, the last of which is stale; the sum, which no half would hold; and the result.
STATES = {
    Dense: (
        EMPTY, [LARGE, LARGE, TINY], [1, 2], {None: np.full((1, 2), 120000, "float32")},
        [[np.inf] * 2],
    ),
    Sparse: (
        EMPTY_SPARSE,
        [
            gr.IndexedSlices(LARGE, [7], (9, 2)),
            gr.IndexedSlices(np.concatenate([TINY, LARGE]), [4, 7]),
            gr.IndexedSlices(TINY, [4]),
        ],
        [9, 2],
        {
            "indices": np.array([4, 7]),
            "num_touches": np.array([1, 2]),
            "values": np.array([[2.0**-24] * 2, [120000] * 2], "float32"),
        },
        ([4, 7], [[2.0**-24] * 2, [np.inf] * 2], (9, 2)),
    ),
}  # fmt: skip


def test_a_state_without_its_device(device, kind):
    """Rows are in the order of their indices, in whatever order they were added."""
    empty, given, sum_shape, sums, result = STATES[kind]
    acc = kind.make("float16", (None, 2), reduction_type="SUM", device=device)
    assert acc.state_dict() == empty
    acc.set_global_step(3)
    for grad, step in zip(given, (3, 5, 2), strict=True):
        gr.apply_grads([acc], [grad], step)
    state, total = saved(acc, device)
    counted = {"global_step": 3, "num_accumulated": 2, "num_dropped": 1}
    assert state == empty | counted | {"sum_shape": sum_shape, "kind": "native"}
    found = total if kind is Sparse else {None: total}
    assert found.keys() == sums.keys()
    for name, array in found.items():
        assert same(array, sums[name]), name
        array[:] = 0
    assert contents(gr.take_grads([acc], 2)) == [result], "the arrays are copies"


# -- what continues -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sparse_mean", "wanted"),
    [("per_row", [[3.0], [1.0], [1.0], [4.0]]), ("per_gradient", [[2.25], [0.25], [0.5], [2.0]])],
)
def test_the_restored_mean_has_the_same_divisor(sparse, sparse_mean, wanted):
    """More gradients than are counted together, before the save and after the load."""
    acc, fresh = (sparse(sparse_mean=sparse_mean) for _ in range(2))
    for turn in range(70):
        acc.apply_grad([turn % 2, 2], np.ones((2, 1), "float32"))
    state = acc.state_dict()
    assert state["sparse_mean"] == sparse_mean
    assert state["partial_sums"][0]["num_touches"].tolist() == [35, 35, 70]
    fresh.load_state_dict(state)
    assert frozen(fresh) == frozen(acc)
    for _ in range(70):
        fresh.apply_grad([0, 3], np.full((2, 1), 4, "float32"))
    indices, values, _ = fresh.take_grad(140)
    assert (indices.tolist(), values.tolist()) == ([0, 1, 2, 3], wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
@pytest.mark.parametrize("shape", [(), (37,), (0, 3)], ids=str)
def test_any_number_of_devices_may_be_filled(mesh, kind, dtype, reduction_type, shape):
    everyone, options = range(len(mesh)), {"reduction_type": reduction_type, "device": mesh}
    given = [kind.random(seed, dtype, shape) for seed in range(1, 1 + 2 * len(mesh))]
    for filled in ((), everyone[1:2], everyone[1:], everyone):
        acc, fresh = (kind.make(dtype, **options) for _ in range(2))
        for place in filled:
            with gr.replica(place):
                gr.apply_grads([acc], [given[place]])
        arrays = [getattr(given[place], "values", given[place]) for place in filled]
        num_copies = sum(array.size > 0 for array in arrays)
        num_uploads = sum(kind is Dense or len(array) > 0 for array in arrays)
        with mesh.journal() as journal:
            state = acc.state_dict()
        assert (journal.copies, journal.launches, journal.uploads) == (num_copies, 0, 0)
        assert [total is not None for total in state["partial_sums"]] == [
            place in filled for place in everyone
        ]
        with mesh.journal() as journal:
            fresh.load_state_dict(state)
        assert (journal.copies, journal.launches, journal.uploads) == (0, 0, num_uploads)
        assert frozen(fresh) == frozen(acc)
        arrivals = [gr.PerReplica(given[len(mesh) :], mesh)]
        assert apply_and_take(fresh, arrivals, 0) == apply_and_take(acc, arrivals, 0)


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
