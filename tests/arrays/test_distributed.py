"""PerReplica, Mirrored and gr.replica: the device of each array, and a thread's replica."""

import asyncio

import numpy as np
import pytest
from support.meshes import MeshCase, mesh_of, owned, unchanged

import gradreduce as gr
from gradreduce.arrays.distributed import DistributedValues
from gradreduce.arrays.replica_context import current_replica
from gradreduce.errors import DeviceMismatchError

BOTH = pytest.mark.parametrize("make", [gr.PerReplica, gr.Mirrored])


mesh = mesh_of([0, 0, 1], strict=True)


def arrays(count=3, shape=(2,)):
    return [np.full(shape, replica, np.float32) for replica in range(count)]


@BOTH
def test_one_array_on_each_device_in_mesh_order(mesh, make):
    given = arrays()
    value = make(given, mesh)
    assert isinstance(value, DistributedValues)
    assert value.devices == mesh.devices
    assert [buffer.device for buffer in value.buffers] == list(mesh.devices)
    assert (value.mesh, value.kind) == (mesh, "native")
    for replica, (found, array) in enumerate(zip(value.values, given, strict=True)):
        assert np.array_equal(found, array) and np.shares_memory(found, array)  # not copied
        assert value.get(mesh.devices[replica])[0] == replica
    assert np.shares_memory(value.primary, given[0])
    with pytest.raises(ValueError, match="sim:2 on physical 1> is not one of the value"):
        make(arrays(2), mesh[:2]).get(mesh.devices[2])
    listed = [mesh.devices[2], mesh.devices[0]]
    value = make(arrays(2), mesh, devices=listed)
    assert (value.devices, value.mesh) == (tuple(listed), mesh)
    assert [value.get(device)[0] for device in listed] == [0, 1]
    buffers = [owned(device, array) for device, array in zip(listed, arrays(2), strict=True)]
    value = make(buffers)
    assert (value.devices, value.kind) == (tuple(listed), "buffer")
    assert all(found is buffer for found, buffer in zip(value.values, buffers, strict=True))
    assert value.primary is value.get() is buffers[0]


def test_without_a_mesh_the_default_one(monkeypatch):
    with MeshCase((0, 0)).open() as default:
        monkeypatch.setattr("gradreduce.backends._default", [default])
        assert gr.PerReplica(arrays(2)).devices == default.devices
        assert gr.PerReplica([1.0, 2.0]).devices == default.devices


def test_the_array_type_is_that_of_the_first_value(mesh):
    value = gr.PerReplica([1.5, [1, 2], np.arange(6, dtype=np.int8)[::2]], mesh)
    assert value.kind == "native"
    assert [(b.shape, str(b.dtype)) for b in value.buffers] == [
        ((), "float64"), ((2,), "int64"), ((3,), "int8"),
    ]  # fmt: skip
    assert np.array_equal(value.values[2], [0, 2, 4])
    given = arrays()
    for values in (iter(given), np.arange(3.0), [given[0], owned(mesh.devices[1], given[1]), 2.0]):
        value = gr.PerReplica(values, mesh)
        assert value.kind == "native"
        assert all(isinstance(found, np.ndarray) for found in value.values)
        assert (value.values[2] == 2).all()
    assert gr.PerReplica([owned(mesh.devices[0], given[0]), *given[1:]], mesh).kind == "buffer"


@BOTH
def test_get_means_the_replica_of_the_thread(mesh, make):
    value = make(arrays(), mesh)
    assert value.get()[0] == 0
    for index in range(3):
        with gr.replica(index):
            assert value.get()[0] == index
            assert value.get(mesh.devices[1])[0] == 1  # an explicit device has priority
            assert value.primary[0] == 0
    part = make(arrays(2), mesh[1:])
    with gr.replica(1):
        assert part.get()[0] == 1  # the replica's number, not the device's
    with (
        gr.replica(2),
        pytest.raises(ValueError, match=r"^there is no replica 2: the value has 2 replicas$"),
    ):
        part.get()


@BOTH
def test_values_are_a_sequence_of_arrays_in_the_order_of_devices(mesh, make):
    given = arrays()
    value = make(given, mesh)
    assert len(value) == 3
    for place, found in enumerate(value):
        for index in (place, place - 3, np.int64(place)):
            assert value[index] is not value and np.shares_memory(value[index], given[place])
        assert np.shares_memory(found, given[place])
    assert [found[0] for found in value[1:]] == [1, 2]
    with pytest.raises(IndexError, match=r"^there is no replica 3: the value has 3 replicas$"):
        value[3]
    with pytest.raises(TypeError, match=r"^an index must be .*; use value\.get\("):
        value[mesh.devices[0]]
    rows = gr.IndexedSlices(np.ones((1, 2), np.float32), [3], (5, 2))
    sparse = make([rows] * 3, mesh)
    assert [found.indices.tolist() for found in (*sparse, sparse[-1])] == [[3]] * 4


def test_cached_copies_may_be_cleared_while_they_are_made(mesh):
    """As if another thread called at the same time."""
    value = gr.PerReplica([np.ones((4, 5), order="F") for _ in mesh], mesh)

    class ClearsCopies(type(value)):
        def __setattr__(self, name, found):
            super().__setattr__(name, None if name == "_parts" else found)

    value.__class__ = ClearsCopies
    assert [buffer.shape for buffer in value.buffers] == [(4, 5)] * len(mesh)


def test_arrays_of_another_memory_order_are_read_again_by_each_call(mesh):
    """Their C-order Buffers are copies, because the arrays may change between two calls."""
    for order in "CF":
        given = [np.ones((4, 5), order=order) for _ in mesh]
        value, mirrored = gr.PerReplica(given, mesh), gr.Mirrored(given, mesh)
        accumulator = gr.ConditionalAccumulator("float64", (4, 5), device=mesh)
        variable = gr.Variable(np.zeros((4, 5)), device=mesh)
        ops, optimizer = gr.HierarchicalCopyAllReduce(mesh=mesh), gr.GradientDescentOptimizer(1.0)
        adding = gr.ReductionToOneDevice(accumulation_fn=lambda terms: sum(terms[1:], terms[0]))
        for scale in (1, 10):
            for array in given:
                array[...] = scale
            accumulator.apply_grad(value)
            optimizer.apply_gradients([(value, variable)])
            total = ops.reduce(gr.ReduceOp.SUM, value, value)
            assert total[0].flags.f_contiguous == (order == "F")
            assert (total[0] == 3 * scale).all()
            assert (adding.reduce(gr.ReduceOp.SUM, value, value)[0] == 3 * scale).all()
            clipped = gr.clip_by_global_norm([mirrored], 1.0)[1][0]
            assert float(clipped) == pytest.approx(np.sqrt(20) * scale)
        assert (accumulator.take_grad(6).primary == 5.5).all()
        assert (variable.numpy() == -11).all()


@BOTH
def test_one_value_converts_to_an_array_and_several_do_not(mesh, make):
    one = make([np.arange(3)], devices=mesh.devices[2:])
    assert np.array_equal(np.asarray(one), [0, 1, 2])
    assert np.asarray(one, np.float32).dtype == np.float32
    assert np.array(one) is not np.array(one)
    several = make(arrays(), mesh)
    for convert in (np.asarray, np.mean, lambda value: np.stack([value, value])):
        with pytest.raises(TypeError, match=rf"a {make.__name__} of 3 devices .*\.values"):
            convert(several)
    rows = gr.IndexedSlices(np.ones((1, 2), np.float32), [3], (5, 2))
    with pytest.raises(TypeError, match="to_dense"):
        np.asarray(make([rows], devices=mesh.devices[:1]))


def test_replicas_nest_and_end():
    assert current_replica() is None
    with gr.replica(1):
        with gr.replica(0):
            assert current_replica() == 0
        assert current_replica() == 1
        with pytest.raises(KeyError), gr.replica(2):
            raise KeyError
        assert current_replica() == 1
    for index in (-1, 1.0, "0", None, True, np.True_):
        with pytest.raises(ValueError, match="must be a non-negative integer"), gr.replica(index):
            pass
        assert current_replica() is None


@BOTH
def test_values_that_do_not_fit_the_devices_are_refused(mesh, make):
    first, _, last = mesh.devices
    two, three = arrays(2), arrays()
    ours = [owned(device, array) for device, array in zip(mesh.devices, three, strict=True)]
    with MeshCase((0, 1)).open() as other:
        strangers = [first, other.devices[1]]
        foreign = [owned(device, three[0]) for device in strangers]
        stranger = owned(other.devices[0], three[0])
        for values, options, error, text in [
            *[(arrays(count), {}, ValueError, f"{count} values for 3 dev") for count in (1, 2, 4)],
            (two, {"devices": []}, ValueError, "2 values for 0 devices"),
            ([], {}, ValueError, "empty"),
            (None, {}, TypeError, "values=None must be a list with one array"),
            (two, {"devices": [last, last]}, ValueError, "Duplicate devices: sim:"),
            ([owned(first, array) for array in two], {"mesh": None}, ValueError, "Duplicate dev"),
            (ours[::-1], {}, DeviceMismatchError, "was passed as the value for sim:0"),
            ([three[0], ours[0], three[2]], {}, DeviceMismatchError, "as the value for sim:1"),
            (two, {"mesh": None, "devices": strangers}, DeviceMismatchError, "all belong to one"),
            (two, {"devices": other.devices}, DeviceMismatchError, "do not all belong to one mesh"),
            (foreign, {"mesh": None}, DeviceMismatchError, "do not all belong to one mesh"),
            ([stranger, *two], {}, DeviceMismatchError, "to another mesh"),
            ([[[1.0], [1.0, 2.0]], 0.0, 0.0], {}, ValueError, "inhomogeneous"),
        ]:
            with pytest.raises(error, match=text):
                make(values, **{"mesh": mesh, **options})
    for value, text in [
        (None, "NoneType"), ("text", "str"), ({}, "dict"), (np.array([True]), "bool"),
        (np.array(["a"]), "cannot be added"), (True, "bool"),
    ]:  # fmt: skip
        for values in ([*two, value], [value, *two]):
            with pytest.raises(TypeError, match=text):
                make(values, mesh)


def test_reading_writes_nothing(mesh):
    given = arrays(shape=(4, 2))
    for array in given:
        array.flags.writeable = False
    with unchanged(*given):
        value = gr.PerReplica(given, mesh)
        assert not any(found.flags.writeable for found in value.values)
        assert not value.buffers[0].block.writable
    assert repr(gr.Mirrored(given, mesh)) == (
        "Mirrored(sim:0: float32[4, 2], sim:1: float32[4, 2], sim:2: float32[4, 2])"
    )


def test_tasks_of_one_thread_each_have_their_replica():
    seen = []

    async def task(index):
        with gr.replica(index):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append((index, current_replica()))

    async def together():
        await asyncio.gather(*map(task, range(3)))

    asyncio.run(together())
    assert len(seen) == 9
    assert all(index == found for index, found in seen)
    assert current_replica() is None


def test_buffers_of_a_callers_arrays_are_external_however_they_come():
    with gr.open_mesh(2, backend="sim") as mesh:
        external = gr.PerReplica([np.ones(3, np.float32) for _ in mesh], mesh)
        ours = [device.zeros((3,), "float32") for device in mesh]
        for options in ({"mesh": mesh}, {"devices": mesh.devices}):
            assert gr.PerReplica(external.buffers, **options)._external
            assert not gr.PerReplica(ours, **options)._external
