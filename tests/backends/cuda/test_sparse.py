"""Rows with indices on the CUDA backend: the host waits for indices alone."""

import cupy
import numpy as np
import pytest
from support.exact_data import random_data, same

import gradreduce as gr

pytestmark = pytest.mark.fake_cupy


@pytest.fixture
def waits(monkeypatch):
    """The number of host waits of a call, and its other CUDA calls."""

    def counted(machine, call):
        finish, finished = machine.finish, []
        with monkeypatch.context() as patch:
            patch.setattr(machine, "finish", lambda last: finish(finished.append(last) or last))
            found = machine.counted(call)
        return len(finished), found

    return counted


@pytest.mark.parametrize("seed", range(3))
def test_the_host_waits_for_indices_on_a_gpu_and_for_nothing_else(seed, gpus, waits):
    """CuPy arrays on a caller's stream, which overwrites them right after the call."""
    machine, luck = gpus(seed), np.random.default_rng(seed)
    wanted = np.zeros((9, 2), "float32")
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        acc = gr.SparseConditionalAccumulator(
            "float32", (9, 2), reduction_type="SUM", device=mesh.devices[1]
        )
        theirs = cupy.cuda.Stream(non_blocking=True)
        for turn in range(4):
            indices, values = luck.integers(0, 9, 6), luck.integers(1, 9, (6, 2)).astype("float32")
            np.add.at(wanted, indices, values)
            with theirs:
                array, where = cupy.asarray(values), cupy.asarray(indices.astype(np.int32))
                given = where if turn % 2 else indices

                def apply(given=given, array=array):
                    acc.apply_grad(given, array)

                assert waits(machine, apply)[0] == turn % 2
                array[...] = -1
                where[...] = 0
        results = []
        with theirs:
            num_waits, asked = waits(machine, lambda: results.append(acc.take_grad(4)))
            assert (num_waits, asked["launch"]) == (0, 1)
            ((found, values, _),) = results
            assert isinstance(values, cupy.ndarray)
            assert same(values.get(), wanted[found])
            assert wanted.any(axis=1).sum() == len(found)


def test_the_host_waits_for_the_indices_of_rows_once(gpus, waits):
    """``coalesce`` and ``to_dense`` use what it has read."""
    machine, values = gpus(5), random_data((6, 5), "float32")
    with gr.open_mesh([0, 1], backend="cuda") as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradreduce.backends._default", [mesh])
        with cupy.cuda.Device(1):
            theirs = cupy.asarray(values)
            indices = cupy.asarray(np.array([3, 1, 3, 0, 1, 3], np.int32))
        slices = gr.IndexedSlices(theirs, indices, (4, 5))
        assert (slices.kind, slices.values, slices.device) == ("cupy", theirs, None)
        made = []
        num_waits, _ = waits(machine, lambda: made.extend([slices.coalesce(), slices.to_dense()]))
        assert num_waits == 0
        merged, dense = made
        assert isinstance(merged.values, cupy.ndarray)
        assert merged.indices.tolist() == [0, 1, 3]
        wanted = gr.IndexedSlices(values, [3, 1, 3, 0, 1, 3], (4, 5)).to_dense(output_type="numpy")
        for found, rows in ((merged.values, wanted[[0, 1, 3]]), (dense, wanted)):
            assert found.device.id == 1
            with found.device:
                assert same(found.get(), rows)
