"""reduce and batch_reduce: the right values in the right order on every device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import meshes
from support.exact_data import COMPLEX, FLOATS, INTEGERS, exact_data, random_data, same
from support.meshes import (
    MeshCase,
    check_mirrored,
    expected_of,
    hierarchical_sum,
    num_grown,
    owned,
    per_replica,
    placement_of,
    unchanged,
)

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.reduce.algorithms import ALGORITHMS

mesh = meshes.mesh
numpy_mesh = meshes.numpy_mesh

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN

# num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group
SETTINGS = [(0,), (1,), (2,), (3,), (7,), (1000,), (0, 64, 2), (0, 10**6, 10), (1, 64, 2)]
BATCH = [
    ((3,), "float32"), ((), "float16"), ((0, 4), "float32"), ((5, 7), "bfloat16"),
    ((70,), "float32"), ((2, 2), "complex64"), ((9,), "float64"), ((4,), "float16"),
    ((), "float32"),
]  # fmt: skip


def random_batch(mesh, batch=BATCH, seed=0):
    """PerReplicas of random data, and the arrays in them."""
    arrays = [
        [random_data(shape, as_dtype(dtype), seed=seed + 100 * place + replica)
         for replica in range(len(mesh))]
        for place, (shape, dtype) in enumerate(batch)
    ]  # fmt: skip
    return [gr.PerReplica(replicas, mesh) for replicas in arrays], arrays


def pairs(values):
    return [(value, value) for value in values]


def held(results):
    """The bits of the results, to compare later."""
    return [[np.array(array) for array in result.values] for result in results]


def equal(left, right) -> bool:
    return all(
        len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", [SUM, MEAN], ids=str)
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_reduce_on_exact_data(mesh, dtype, op, algorithm):
    arrays = [exact_data((3, 7), dtype, seed=replica) for replica in range(len(mesh))]
    value = gr.PerReplica(arrays, mesh)
    with unchanged(*arrays):
        result = gr.AllReduceCrossDeviceOps(algorithm).reduce(op, value, value)
    total = np.sum(arrays, axis=0, dtype=dtype)  # exact in any order and in any float dtype
    check_mirrored(gr.AllReduceCrossDeviceOps(algorithm).reduce(SUM, value, value), total)
    divisor = len(mesh) if op is MEAN else 1
    check_mirrored(result, expected_of(algorithm, arrays, placement_of(mesh), divisor))
    assert isinstance(result, gr.Mirrored)
    assert result.devices == mesh.devices


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sums_of_integers_wrap(mesh, dtype, algorithm):
    value = per_replica(mesh, lambda replica: exact_data((3, 7), dtype, seed=replica))
    total = np.sum([np.array(array) for array in value.values], axis=0, dtype=dtype)
    check_mirrored(gr.AllReduceCrossDeviceOps(algorithm).reduce(SUM, value, value), total)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_means_of_integers_are_floats_in_one_batch_with_floats(mesh, algorithm):
    """Sums of integers wrap before the division, as in TensorFlow."""
    dtypes = ("float32", *INTEGERS)
    arrays = [
        [exact_data((3, 7), dtype, seed=10 * place + replica) for replica in range(len(mesh))]
        for place, dtype in enumerate(dtypes)
    ]
    values = [gr.PerReplica(replicas, mesh) for replicas in arrays]
    with unchanged(*(array for replicas in arrays for array in replicas)):
        found = gr.AllReduceCrossDeviceOps(algorithm).batch_reduce(MEAN, pairs(values))
    for result, replicas, dtype in zip(found, arrays, dtypes, strict=True):
        small = np.dtype(dtype).itemsize < 4 or dtype == "float32"
        wide = np.float32 if small else np.float64
        total = np.sum(replicas, axis=0, dtype=dtype)
        check_mirrored(result, total.astype(wide) / wide(len(mesh)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:agg_small_grads")  # in the last of the settings
@pytest.mark.parametrize("packing", SETTINGS, ids=str)
def test_a_mixed_batch_on_random_data_has_the_same_bits_however_packed(mesh, packing, algorithm):
    values, arrays = random_batch(mesh)
    op = (SUM, MEAN)[(SETTINGS.index(packing) + list(ALGORITHMS).index(algorithm)) % 2]
    ops = gr.AllReduceCrossDeviceOps(algorithm, *packing)
    with unchanged(*(array for replicas in arrays for array in replicas)):
        results = ops.batch_reduce(op, pairs(values))
    divisor = len(mesh) if op is MEAN else 1
    for result, replicas in zip(results, arrays, strict=True):
        check_mirrored(result, expected_of(algorithm, replicas, placement_of(mesh), divisor))


@pytest.mark.parametrize(
    "num_packs", [0, 1, 7, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3, 1000))]
)
def test_every_placement_gives_the_same_bits_however_packed_and_sliced(num_packs):
    batch = [((5,), "float32"), ((16_401,), "float32"), ((40_000,), "float16"), ((3,), "float16")]
    bits = None
    for placement in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 2, 3), (2, 1, 1, 0)):
        for peer_access in (True, False):
            with MeshCase(placement, peer_access).open() as mesh:
                values, arrays = random_batch(mesh, batch)
                ops = gr.HierarchicalCopyAllReduce(num_packs)
                found = [result.values[-1] for result in ops.batch_reduce(MEAN, pairs(values))]
                bits = bits or [hierarchical_sum(replicas, 4) for replicas in arrays]
                assert all(same(x, y) for x, y in zip(found, bits, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_have_the_array_type_of_the_values(mesh, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm)
    arrays = per_replica(mesh, lambda replica: np.full(3, replica, np.float32))
    buffers = per_replica(mesh, lambda replica: np.full(3, replica, np.float32), owned)
    from_arrays, from_buffers = ops.batch_reduce(SUM, pairs([arrays, buffers]))
    total = np.full(3, sum(range(len(mesh))), np.float32)
    assert all(isinstance(a, np.ndarray) and same(a, total) for a in from_arrays.values)
    assert all(isinstance(b, gr.device.Buffer) for b in from_buffers.values)
    assert [b.device for b in from_buffers.values] == list(mesh.devices)
    check_mirrored(from_buffers, total)


def test_a_buffer_is_its_own_only_replica(numpy_mesh):
    device = numpy_mesh.devices[-1]
    buffer = owned(device, np.arange(5, dtype=np.float32))
    for algorithm in ALGORITHMS:
        result = gr.AllReduceCrossDeviceOps(algorithm).reduce(MEAN, buffer, device)
        assert result.devices == (device,)
        check_mirrored(result, np.arange(5, dtype=np.float32))
        assert result.primary.block is not buffer.block


def test_the_order_of_devices_is_the_values_own(numpy_mesh):
    ops = gr.HierarchicalCopyAllReduce()
    devices = numpy_mesh.devices
    forwards = per_replica(numpy_mesh, lambda replica: np.full(2, replica, np.float32))
    backwards = gr.PerReplica(forwards.values[::-1], numpy_mesh, devices=devices[::-1])
    for value, destination in (
        (forwards, backwards),
        (forwards, devices[::-1]),
        (backwards, devices),
        (backwards, numpy_mesh),
    ):
        result = ops.reduce(SUM, value, destination)
        assert result.devices == value.devices
        check_mirrored(result, np.full(2, sum(range(len(devices))), np.float32))
    both = ops.batch_reduce(SUM, pairs([forwards, backwards, forwards]))
    assert [result.devices for result in both] == [devices, devices[::-1], devices]


def test_every_way_to_name_the_destination(numpy_mesh):
    ops = gr.HierarchicalCopyAllReduce()
    value = per_replica(numpy_mesh, lambda replica: np.ones(2, np.float32))
    total = np.full(2, len(numpy_mesh), np.float32)
    variable = gr.Variable(np.zeros(7, np.float32), device=numpy_mesh)
    destinations = [
        value, gr.Mirrored(value.values, numpy_mesh), variable, numpy_mesh,
        numpy_mesh[:], numpy_mesh.devices, list(numpy_mesh.devices),
    ]  # fmt: skip
    results = ops.batch_reduce(SUM, [(value, destination) for destination in destinations])
    for result in results:
        check_mirrored(result, total)
    assert not variable.numpy().any()  # a destination only selects devices


def test_values_of_several_parts_of_a_mesh_in_one_batch(numpy_mesh):
    count = len(numpy_mesh)
    parts = [numpy_mesh[:1], numpy_mesh, numpy_mesh[-1:], numpy_mesh[count // 2 :]]
    values = [per_replica(part, lambda replica: np.ones(2, np.float32)) for part in parts]
    for algorithm in ALGORITHMS:
        results = gr.AllReduceCrossDeviceOps(algorithm).batch_reduce(SUM, pairs(values))
        for part, result in zip(parts, results, strict=True):
            assert result.devices == part.devices
            check_mirrored(result, np.full(2, len(part), np.float32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 1, 3])
def test_results_of_a_call_survive_the_next_ones(mesh, num_packs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    values, _ = random_batch(mesh)
    first = ops.batch_reduce(MEAN, pairs(values))
    before = held(first)
    for seed in (1000, 2000):
        ops.batch_reduce(MEAN, pairs(random_batch(mesh, seed=seed)[0]))
        assert equal(held(first), before)
    second = ops.batch_reduce(MEAN, pairs(values))
    for result in first:  # the caller may write results
        for array in result.values:
            array[...] = 0
    assert equal(held(second), before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 1, 3])
def test_inputs_of_every_kind_are_never_written(mesh, num_packs, algorithm):
    shapes = [(4,), (3,), (5, 2)]
    flat = mesh.flat_buffer(shapes, "float32")
    for replica, buffer in enumerate(flat.buffers):
        buffer.device.upload(random_data((buffer.size,), "float32", seed=replica), out=buffer)
    owned_ones = [gr.PerReplica(views) for views in zip(*flat.views, strict=True)]
    arrays = [random_data((4, 6), "float32", seed=replica) for replica in range(len(mesh))]
    for array in arrays:
        array.flags.writeable = False
    adopted_ones = [
        gr.PerReplica(arrays, mesh),
        gr.PerReplica([array[:, ::2] for array in arrays], mesh),
        gr.PerReplica([array[1] for array in arrays], mesh),
    ]
    watched = [buffer.device._array_of(buffer) for buffer in flat.buffers]
    for values in (owned_ones, adopted_ones, owned_ones + adopted_ones):
        with unchanged(*watched, *arrays):
            results = gr.AllReduceCrossDeviceOps(algorithm, num_packs).batch_reduce(
                MEAN, pairs(values)
            )
        for result in results:
            for array in map(np.asarray, gr.Mirrored.of(result.buffers, "numpy").values):
                assert array.flags.writeable
                assert not any(np.shares_memory(array, other) for other in (*watched, *arrays))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 1, 2])
def test_the_same_memory_may_be_given_many_times(mesh, num_packs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    block = random_data((64,), "float32", seed=5)
    with unchanged(block):
        everywhere = gr.PerReplica([block] * len(mesh), mesh)  # replicas in the same memory
        shifted = gr.PerReplica([block[r : r + 8] for r in range(len(mesh))], mesh)  # overlapping
        buffers = per_replica(mesh, lambda replica: block, owned)
        parts = gr.PerReplica([buffer.view(8, (8,)) for buffer in buffers.buffers])
        values = [everywhere, shifted, everywhere, buffers, parts, buffers]
        results = ops.batch_reduce(SUM, pairs(values))
    for value, result in zip(values, results, strict=True):
        arrays = [buffer.numpy() for buffer in value.buffers]
        check_mirrored(result, expected_of(algorithm, arrays, placement_of(mesh), 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("packing", [(0,), (1,), (4,), (0, 100, 10)], ids=str)
def test_batches_of_odd_sizes(numpy_mesh, packing, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, *packing)
    assert ops.batch_reduce(SUM, []) == []
    assert ops.batch_reduce(MEAN, ()) == []
    for shapes in ([(0,)], [(0, 3), (2, 0), (0,)], [()], [(0,), (), (0, 2), (1,)]):
        values, arrays = random_batch(numpy_mesh, [(shape, "float32") for shape in shapes])
        with numpy_mesh.journal() as journal:
            results = ops.batch_reduce(MEAN, pairs(values))
        assert bool(journal.records) == any(of_one[0].size for of_one in arrays)
        for result, replicas in zip(results, arrays, strict=True):
            divisor = len(numpy_mesh)
            check_mirrored(
                result, expected_of(algorithm, replicas, placement_of(numpy_mesh), divisor)
            )


@pytest.mark.parametrize(
    ("packing", "algorithm"), [((3,), "nccl"), ((0, 12, 10), "hierarchical_copy")], ids=str
)
def test_three_hundred_tensors(mesh, packing, algorithm):
    ends = np.cumsum([place % 5 for place in range(300)])
    blocks = [random_data((int(ends[-1]),), "float32", seed=r) for r in range(len(mesh))]
    split = [np.split(block, ends[:-1]) for block in blocks]
    values = [gr.PerReplica(replicas, mesh) for replicas in zip(*split, strict=True)]
    results = gr.AllReduceCrossDeviceOps(algorithm, *packing).batch_reduce(SUM, pairs(values))
    wanted = np.split(expected_of(algorithm, blocks, placement_of(mesh), 1), ends[:-1])
    for replica in range(len(mesh)):
        with gr.replica(replica):
            found = [result.get() for result in results]
        assert all(same(array, other) for array, other in zip(found, wanted, strict=True))


def test_nan_and_infinity_pass_through(mesh):
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    value = per_replica(mesh, lambda replica: array)
    turned = per_replica(mesh, lambda replica: array if replica else -array)
    for algorithm in ALGORITHMS:
        ops = gr.AllReduceCrossDeviceOps(algorithm)
        check_mirrored(ops.reduce(MEAN, value, value), array)
        (first, *_) = ops.reduce(SUM, turned, turned).values
        assert np.isnan(first[:3]).all() == (len(mesh) > 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 2])
def test_a_steady_state_grows_no_pool(numpy_mesh, num_packs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    values, _ = random_batch(numpy_mesh, [((40, 500), "float32"), *BATCH])
    kept = None
    for turn in range(23):
        if turn == 3:
            grown = num_grown(numpy_mesh)
        kept = ops.batch_reduce(MEAN, pairs(values))  # results stay valid during the next call
    assert num_grown(numpy_mesh) == grown
    assert len(kept) == len(values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_share_a_mesh(numpy_mesh, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2)
    together, wrong = threading.Barrier(4, timeout=10), []

    def work(seed):
        values, arrays = random_batch(numpy_mesh, seed=10_000 * seed)
        wanted = [
            expected_of(algorithm, replicas, placement_of(numpy_mesh), len(numpy_mesh))
            for replicas in arrays
        ]
        together.wait()
        for _ in range(5):
            for result, array in zip(ops.batch_reduce(MEAN, pairs(values)), wanted, strict=True):
                wrong.extend(found for found in result.values if not same(found, array))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
