"""Sparse accumulators on the CUDA backend: the simulation's bits, without host waits."""

from __future__ import annotations

import numpy as np
import pytest
from support.accumulator_states import frozen
from support.exact_data import random_data, same

import gradreduce as gr
from gradreduce.device import Mesh

ROW = (5, 3)


def rows(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Unordered indices, some repeated; every fourth gradient is empty."""
    luck = np.random.default_rng(seed)
    indices = luck.integers(0, 20, seed % 4 * 5)
    return indices, random_data((len(indices), *ROW), dtype, seed=seed)


def gradient(device, seed: int, dtype: str) -> gr.IndexedSlices:
    indices, values = rows(seed, dtype)
    return gr.IndexedSlices(device.upload(values), indices)


def taken(acc) -> list[np.ndarray]:
    made = acc.take_indexed_slices_grad(1, output_type="buffer")
    parts = made.parts if isinstance(made, gr.Mirrored) else [made]
    return [array for part in parts for array in (part.indices, part.values.numpy())]


def over_a_mesh(mesh: Mesh, dtype: str) -> list[np.ndarray]:
    """Gradients of every replica, then of one, then a saved state is loaded; two periods."""
    acc, other = (gr.SparseConditionalAccumulator(dtype, device=mesh) for _ in range(2))
    found = []
    for period in range(2):
        for turn in range(3):
            given = [gradient(device, 3 * turn + place + period, dtype)
                     for place, device in enumerate(mesh)]  # fmt: skip
            acc.apply_indexed_slices_grad(gr.PerReplica(given, mesh), period)
            if turn == 1:
                other.load_state_dict(acc.state_dict())
                acc.apply_indexed_slices_grad(gradient(mesh.devices[-1], 7, dtype), period)
        found += taken(other) + taken(acc)
    return found


def on_one_device(mesh: Mesh, dtype: str) -> list[np.ndarray]:
    """Three accumulators that share launches and add to existing and new rows."""
    first, last = mesh.devices[0], mesh.devices[-1]
    accs = [
        gr.SparseConditionalAccumulator(dtype, device=last),
        gr.SparseConditionalAccumulator(dtype, reduction_type="SUM", device=first),
        gr.SparseConditionalAccumulator(dtype, sparse_mean="per_gradient", device=first),
    ]
    for turn in range(4):
        given = [gradient(mesh.devices[(turn + place) % len(mesh)], 2 + turn + place, dtype)
                 for place in range(3)]  # fmt: skip
        gr.apply_grads(accs, given)
    return [array for acc in accs for array in taken(acc)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0], marks=pytest.mark.gpu),
        pytest.param([0] * 4, marks=pytest.mark.gpu),
        pytest.param([0, 1, 1], marks=pytest.mark.multi_gpu(2)),
        pytest.param([0, 1, 1, 2, 0], marks=pytest.mark.multi_gpu(3)),
    ],
    ids=str,
)
def test_sums_are_those_of_the_simulation(placement, dtype, gpus):
    gpus(len(placement))
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        for made in (over_a_mesh, on_one_device):
            assert all(map(same, made(mesh, dtype), made(sim, dtype)))


@pytest.mark.fake_cupy
@pytest.mark.parametrize("seed", range(3))
def test_without_peer_access_too(seed, gpus):
    gpus(seed, peers=False)
    placement = [0, 1, 1, 2, 0]
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        for made in (over_a_mesh, on_one_device):
            assert all(map(same, made(mesh, "bfloat16"), made(sim, "bfloat16")))


@pytest.fixture
def waits(monkeypatch):
    """The number of host waits of a call, and its other CUDA calls."""

    def counted(machine, call):
        finish, finished, before = machine.finish, [], dict(machine.counts)
        with monkeypatch.context() as patch:
            patch.setattr(machine, "finish", lambda last: finish(finished.append(last) or last))
            call()
        return len(finished), {
            name: count - before.get(name, 0)
            for name, count in machine.counts.items()
            if count != before.get(name, 0)
        }

    return counted


@pytest.mark.fake_cupy
@pytest.mark.parametrize("seed", range(3))
def test_the_host_waits_for_indices_on_a_gpu_and_for_nothing_else(seed, gpus, waits):
    """CuPy arrays on a caller's stream, which overwrites them right after the call."""
    import cupy

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


@pytest.mark.fake_cupy
def test_stale_and_refused_gradients_make_no_cuda_call(gpus, waits):
    machine = gpus(0)
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        acc = gr.SparseConditionalAccumulator("float32", (9, 2), device=mesh)
        acc.apply_grad([1], np.ones((1, 2), "float32"))
        acc.set_global_step(1)

        def stale():
            values = np.ones((2, 2), "float32")
            assert acc.apply_grad([1, 3], values) is False
            slices = gr.IndexedSlices(values, [1, 3])
            assert acc.apply_indexed_slices_grad(slices) is False

        def refused():
            for indices, values in (([1, 9], np.ones((2, 2), "float32")), ([1], [[1.0]])):
                with pytest.raises(gr.errors.InvalidArgumentError):
                    acc.apply_grad(indices, values, None, 1)

        assert waits(machine, stale) == (0, {})
        assert waits(machine, refused) == (0, {})
        assert (acc.num_accumulated(), acc.num_dropped) == (1, 2)


@pytest.mark.fake_cupy
@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("segment_sum", "apply"),
        ("pack", "grow"),
        ("segment_sum", "grow"),
        ("pack", "take"),
        ("segment_sum", "take"),
        ("all_sum", "take"),
    ],
)
def test_a_kernel_that_does_not_compile_leaves_all_as_it_was(kernel, what, gpus, monkeypatch):
    """The kernels of the constructor are dropped, as after ``mesh.reset``."""
    from gradreduce.backends.cuda import compile

    gpus(0)
    compiled = compile._load

    def refusing(kernel_of, *rest):
        if kernel_of.name == kernel:
            raise RuntimeError(f"planted: {kernel}")
        return compiled(kernel_of, *rest)

    with gr.open_mesh([0, 0, 1], backend="cuda") as mesh:
        acc = gr.SparseConditionalAccumulator("float16", device=mesh)
        ones = gr.PerReplica([gr.IndexedSlices(np.ones((2, 3), "float16"), [5, place])
                              for place in range(3)], mesh)  # fmt: skip
        more = gr.IndexedSlices(np.ones((1, 3), "float16"), [5 if what == "apply" else 9])
        acc.apply_indexed_slices_grad(ones)
        before = frozen(acc)
        with monkeypatch.context() as patch:
            patch.setattr(compile, "_functions", {})
            patch.setattr(compile, "_load", refusing)
            with pytest.raises(RuntimeError, match="planted"):
                acc.take_grad(3) if what == "take" else acc.apply_indexed_slices_grad(more)
        assert frozen(acc) == before
        acc.apply_indexed_slices_grad(more)
        indices, values, _ = acc.take_grad(4)
        assert indices.tolist() == [0, 1, 2, 5] + [9] * (what != "apply")
        assert all((array.get() == 1).all() for array in values.values)
