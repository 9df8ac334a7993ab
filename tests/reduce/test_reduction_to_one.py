"""ReductionToOneDevice: the device that adds, and a caller's function instead of add_n."""

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.meshes import (
    MeshCase,
    check_mirrored,
    one_device_sum,
    owned,
    per_replica,
    refused,
    unchanged,
)

import gradreduce as gr
from gradreduce.device import Buffer

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


@pytest.fixture(params=[True, False], ids=["peers", "copies"])
def mesh(request):
    with MeshCase((0, 1, 1, 2), peer_access=request.param).open() as opened:
        yield opened


@pytest.fixture
def arrays():
    return [random_data((4, 3), "float16", seed=replica) for replica in range(4)]


@pytest.fixture
def value(mesh, arrays):
    return gr.PerReplica(arrays, mesh)


@pytest.mark.parametrize("op", [SUM, MEAN])
@pytest.mark.parametrize("where", [None, 0, 2, "sim:3", "/gpu:1"])
@pytest.mark.parametrize("destination", [["sim:2"], ["sim:1", "sim:3"], None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int8", "uint64"])
def test_the_device_that_adds_does_not_change_the_bits(mesh, where, destination, op, dtype):
    """It adds from left to right and rounds once."""
    op = SUM if "int" in dtype else op
    arrays = [random_data((4, 3), dtype, seed=replica) for replica in range(4)]
    value = gr.PerReplica(arrays, mesh)
    ops = gr.ReductionToOneDevice(mesh.devices[where] if isinstance(where, int) else where)
    with mesh.journal() as journal, unchanged(*arrays):
        found = ops.reduce(op, value, mesh if destination is None else destination)
    check_mirrored(found, one_device_sum(arrays, 4 if op is MEAN else 1))
    adds = [record for record in journal.of("launch") if record.name == "all_sum"]
    index = {0: 0, 2: 2, "sim:3": 3, "/gpu:1": 1}.get(where, found.devices[0].index)
    assert adds[0].device == index
    assert not journal.of("collective")


@pytest.mark.parametrize("as_buffers", [False, True])
def test_a_function_of_the_callers_adds(mesh, arrays, value, as_buffers):
    seen = []

    def add(terms):
        seen.extend(terms)
        return gr.add_n(terms) if as_buffers else np.maximum.reduce(terms)

    given = gr.PerReplica(list(map(owned, mesh, arrays))) if as_buffers else value
    with unchanged(*arrays):
        found = gr.ReductionToOneDevice("sim:1", add).reduce(SUM, given, "sim:0")
    assert [type(term) for term in seen] == [Buffer if as_buffers else np.ndarray] * 4
    assert not as_buffers or {term.device.physical for term in seen} == {1}
    check_mirrored(found, one_device_sum(arrays) if as_buffers else np.maximum.reduce(arrays))


def test_the_function_adds_what_is_dense_and_never_rows_alone(mesh):
    seen = []

    def add(terms):
        seen.append([term.tolist() for term in terms])
        return np.sum(terms, axis=0)

    table = gr.IndexedSlices(np.array([[1.0], [2.0]]), [1, 1], (2, 1))
    ones = np.ones((2, 1))
    ops = gr.ReductionToOneDevice("sim:1", add)
    rows = ops.reduce(SUM, gr.PerReplica([table] * 4, mesh), mesh, coalesce=True)
    assert [part.values.numpy().tolist() for part in rows.parts] == [[[12.0]]] * 4
    assert seen == []
    found = ops.reduce(MEAN, gr.PerReplica([ones, table, ones, ones], mesh), "sim:0")
    check_mirrored(found, np.array([[3.0], [6.0]]) / 4)
    assert seen == [[[[1.0], [1.0]], [[0.0], [3.0]], [[1.0], [1.0]], [[1.0], [1.0]]]]


def test_a_function_that_gives_something_else_or_fails(mesh, value, arrays):
    def failing(terms):
        raise OSError("tested")

    text = "accumulation_fn returned|is not an array|tested"
    for made, error in (
        (lambda terms: terms[0][:2], ValueError),
        (lambda terms: terms[0].astype(np.float32), ValueError),
        (lambda terms: None, TypeError),
        (lambda terms: [1, 2], ValueError),
        (failing, OSError),
    ):
        with pytest.raises(error, match=text), unchanged(*arrays):
            gr.ReductionToOneDevice(accumulation_fn=made).reduce(SUM, value, mesh)


def test_an_invalid_device_or_function(mesh, value):
    for wrong in (3, 1.0, ["sim:0"], b"sim:0"):
        with pytest.raises(ValueError, match="must be a device or a device name"):
            gr.ReductionToOneDevice(wrong)
    for wrong in (3, "add_n"):
        with pytest.raises(ValueError, match="is not callable"):
            gr.ReductionToOneDevice(accumulation_fn=wrong)
    with MeshCase((0,)).open() as other:
        alone = per_replica(other, lambda replica: np.ones(3, np.float32))
        for device, second, text in (
            ("sim:9", value, "'sim:9' is not a device of"),
            (other.devices[0], value, "belongs to another mesh"),
            ("sim:2", alone, "value 1: reduce_to_device='sim:2' is not a device of"),
        ):  # before the first is added
            with refused(mesh, ValueError, text):
                gr.ReductionToOneDevice(device).batch_reduce(
                    SUM, [(value, value), (second, second)]
                )


@pytest.mark.parametrize("place", [owned, None], ids=["buffers", "arrays"])
def test_mirrored_values_and_values_on_one_device_are_broadcast(mesh, place):
    array = random_data((2, 3), "float32")
    value = per_replica(mesh, lambda replica: array, place)
    for given in (gr.Mirrored(value.values, mesh), gr.PerReplica(value.values[2:3], mesh[2:3]),
                  gr.Mirrored(value.values[2:3], mesh[2:3])):  # fmt: skip
        found = gr.NcclAllReduce().broadcast(given, ["sim:3", "sim:0"])
        assert [device.index for device in found.devices] == [3, 0]
        assert isinstance(found.primary, np.ndarray if place is None else Buffer)
        check_mirrored(found, array)
        blocks = {id(buffer.block) for buffer in given.buffers}
        assert not blocks & {id(buffer.block) for buffer in found.buffers}


@pytest.mark.parametrize("places", [[2], [3, 0, 2], [0, 1, 2, 3]], ids=str)
def test_many_tensors_are_broadcast_where_a_caller_wants_them(mesh, places):
    target = mesh if len(places) == 4 else [f"sim:{place}" for place in places]
    ops = gr.NcclAllReduce(mesh=mesh)
    arrays = [random_data((2, 3), "float32"), random_data((), "int8"), random_data((0, 4), "f2")]
    found = ops.broadcast(tuple(arrays), target)
    assert type(found) is list
    for array, result in zip(arrays, found, strict=True):
        check_mirrored(result, array)
    out = [[np.empty_like(array) for _ in places] for array in arrays]
    if 0 in places:  # the source itself
        out[0][places.index(0)] = arrays[0]
    with mesh.journal() as journal:
        found = ops.broadcast(arrays, target, out=out)
    assert len(journal.of("copy")) <= 2 * len({mesh.devices[k].physical for k in places} - {0})
    assert not [record for record in journal.of("launch") if record.num_rows > 2]
    for array, row, result in zip(arrays, out, found, strict=True):
        assert all(given is one for given, one in zip(row, result.values, strict=True))
        assert all(same(one, array) for one in row)
    assert ops.broadcast(arrays[0], target, out=out[0]).values[0] is out[0][0]
    assert ops.broadcast([], target) == []


def test_numbers_booleans_and_variables_are_broadcast(mesh):
    ops = gr.NcclAllReduce(mesh=mesh)
    mask = np.array([[True, False, True]]).T[::2]
    mirrored = gr.Variable(np.float32([1, 2]), "w", device=mesh)
    alone = gr.Variable(3, trainable=False, dtype="int64", device=mesh[2])
    given = [2, 1.5, 2j, True, np.bool_(False), mask, mirrored, alone]
    wanted = [np.asarray(each) for each in [*given[:6], np.float32([1, 2]), np.int64(3)]]
    for found in (ops.broadcast(given, mesh), [ops.broadcast(each, mesh) for each in given]):
        for result, array in zip(found, wanted, strict=True):
            assert result.devices == mesh.devices
            assert all(same(one, array) for one in result.values)
            assert all(type(one) is np.ndarray for one in result.values)
    mirrored.assign([5.0, 6.0])  # the results are copies
    assert found[6].primary.tolist() == [1, 2]
    out = [[np.ones((2, 1), bool) for _ in mesh], [np.zeros(2, np.float32) for _ in mesh]]
    ops.broadcast([mask, mirrored], mesh, out=out)
    assert all(same(one, mask) for one in out[0])
    assert [one.tolist() for one in out[1]] == [[5, 6]] * len(mesh)
    (buffer,) = ops.broadcast(mask, "sim:1", output_type="buffer").values
    assert same(buffer.numpy(), mask.view("uint8"))
    with gr.replica(1):
        assert ops.broadcast(mirrored, "sim:3").primary.tolist() == [5, 6]


def test_what_cannot_be_broadcast_is_named(mesh):
    ops, ones = gr.NcclAllReduce(mesh=mesh), np.ones(3, np.float32)
    rows = gr.IndexedSlices(np.ones((1, 2), np.float32), [0])
    value = per_replica(mesh, lambda replica: ones)
    for wrong, text in (
        ({"tensor": [ones, value]}, r"tensor\[1\] is a PerReplica of 4 replicas, .* value\[0\]"),
        ({"tensor": [ones, [1.0]]}, r"tensor\[1\] is list; pass a PerReplica, an array"),
        ({"tensor": [ones, ones], "out": [[ones] * 4]}, "one entry for each of 2 values, not li"),
        ({"tensor": True, "out": [ones] * 4}, "out 0: replica 0: out is float32"),
        ({"tensor": True, "out": [True] * 3}, "out 0: it must be .* of 4 arrays, not list of 3"),
        ({"tensor": ones, "out": [ones] * 3}, "out 0: it must be .* of 4 arrays, not list of 3"),
        ({"tensor": rows, "out": [ones] * 4}, "out 0 is not supported: its value contains Ind"),
        ({"tensor": ones, "out": [np.ones(2, "f4")] * 4}, "out 0: replica 0: out is float32"),
        (
            {"tensor": ones, "out": [ones] * 4},
            "out 0: replica 0 and out 0: replica 1 overlap; each",
        ),
        ({"tensor": ones, "out": [ones] * 4, "output_type": "numpy"}, "'numpy' cannot be combined"),
    ):
        with refused(mesh, ValueError, text):
            ops.broadcast(destinations=mesh, **wrong)
