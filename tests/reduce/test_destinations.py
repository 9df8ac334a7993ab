"""Destinations of a reduction: every way to name devices, and sums on one device."""

import re

import numpy as np
import pytest
from support import meshes
from support.exact_data import exact_data, random_data
from support.meshes import (
    MeshCase,
    adopted,
    check_mirrored,
    hierarchical_sum,
    one_device_sum,
    owned,
    per_replica,
    refused,
    unchanged,
)

import gradreduce as gr
from gradreduce.backends.device_names import as_device

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
SHAPE = (3, 5)

mesh = meshes.mesh_of((0, 0, 1, 1), strict=True)


def data(replica: int, dtype="float32") -> np.ndarray:
    return random_data(SHAPE, dtype, seed=replica)


NAMES = ["sim:2", "SIM:2", "gpu:2", "/gpu:2", "cuda:2", "/device:GPU:2", "device:gpu:2",
         "/job:worker/replica:0/task:3/device:GPU:2", "/replica:0/task:0/gpu:2"]  # fmt: skip


def test_a_name_is_a_device(mesh):
    value = per_replica(mesh, data)
    for name in NAMES:
        assert as_device(name, "", mesh) is mesh.devices[2]
        assert as_device(name, "", mesh[0:1]) is mesh.devices[2]  # of the whole mesh
        found = gr.HierarchicalCopyAllReduce().reduce(SUM, value, name)
        assert found.devices == (mesh.devices[2],)
    # A torch.device means the first logical device of its GPU, a name a logical device.
    assert as_device(TorchDevice("cuda:1"), "", mesh) is mesh.devices[2]
    assert as_device("cuda:1", "", mesh) is mesh.devices[1]
    for wrong in map(TorchDevice, ("cpu", "cuda", "cuda:9", "mps:0")):
        text = re.escape(f"device={wrong!r} is not a device of {mesh}")
        with pytest.raises(ValueError, match=text):
            as_device(wrong, "device=", mesh)


class TorchDevice:
    """Has the attributes of a ``torch.device``."""

    def __init__(self, text: str) -> None:
        self.type, _, index = text.partition(":")
        self.index = int(index) if index else None

    def __repr__(self) -> str:
        return f"device(type={self.type!r}, index={self.index})"


TorchDevice.__module__, TorchDevice.__name__ = "torch", "device"


@pytest.fixture(params=["name", "stand-in", pytest.param("torch", marks=pytest.mark.torch)])
def spelt(request):
    """``cuda:N`` in the spelling of a caller."""
    if request.param == "torch":
        import torch

        return torch.device
    return str if request.param == "name" else TorchDevice


@pytest.fixture
def default(monkeypatch):
    """The default mesh, whose devices are not those of ``mesh``."""
    with MeshCase((0, 1, 2)).open() as opened:
        monkeypatch.setattr("gradreduce.backends._default", [opened])
        yield opened


def own(mesh, place: int) -> gr.Buffer:
    return mesh.devices[place].put(np.ones(SHAPE, np.float32))


def test_a_name_is_a_device_wherever_one_is_taken(default, spelt):
    with gr.open_mesh(4, backend="sim") as mesh:
        there, of_default = mesh.devices[1], default.devices[1]
        name = spelt("cuda:1")
        ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
        center = gr.AGNCenter(mesh)
        value = gr.PerReplica([np.ones(2)] * 4, mesh)
        for devices, wanted in [
            (gr.Variable(1.0, device=name).devices, of_default),
            (gr.Variable(own(mesh, 0), device=name).devices, there),
            (gr.ConditionalAccumulator("float32", device=name), of_default),
            (gr.SparseConditionalAccumulator("float32", device=name), of_default),
            (gr.ConditionalAccumulator("float32", device=name, cross_device_ops=ops), there),
            (gr.AGNCenter(name).devices, of_default),
            (gr.AGNCustomGetter(name, center=center).devices, there),
            (gr.AGNCustomGetter(name).devices, of_default),
            (gr.PerReplica([1.0], devices=[name]).devices, of_default),
            (gr.PerReplica([1.0], mesh, devices=[name]).devices, there),
            (gr.PerReplica([own(mesh, 1)], devices=[name]).devices, there),
            (gr.NcclAllReduce(mesh=mesh).broadcast(1 + np.zeros(1), [name]).devices, there),
            (ops.reduce(SUM, value, [name]).devices, there),
            (gr.ReductionToOneDevice(name).reduce(SUM, value, name).devices, there),
        ]:
            if isinstance(devices, gr.ConditionalAccumulatorBase):
                devices = devices.accumulator_ref.devices
            assert devices == (wanted,)
        assert gr.Mirrored([1.0, 2.0, 3.0, 4.0], mesh).get(name) == 2.0
        variable = gr.get_variable("v", 1.0, custom_getter=gr.AGNCustomGetter(name, center=center))
        assert variable.devices == (there,)


def test_a_device_that_is_none_of_the_mesh_is_named_with_its_argument(default):
    end = 'a Device, the name of one such as "gpu:1", or a torch.device'
    for label, more, call in (
        ("device=", "a Mesh, ", lambda wrong: gr.Variable(1.0, device=wrong)),
        ("device=", "", lambda wrong: gr.ConditionalAccumulator("float32", device=wrong)),
        ("worker_device=", "a Mesh, ", gr.AGNCustomGetter),
        ("mesh=", "a Mesh, ", gr.AGNCenter),
        ("devices[1]=", "", lambda wrong: gr.PerReplica([1.0] * 2, devices=["sim:0", wrong])),
        ("device=", "", gr.Mirrored([1.0] * 3, default).get),
    ):
        for wrong in ("gpu:9", "sim:3", "gpu", "", "cpu", "cuda:-1"):
            with pytest.raises(ValueError, match=re.escape(f"{label}{wrong!r}")):
                call(wrong)
        for wrong in (0, 1.0, [], b"sim:0", object(), np.int64(1)):
            text = re.escape(f"{label}{wrong!r} is not {more}")
            with pytest.raises(TypeError, match=f"^{text}.*{end}"):
                call(wrong)


DESTINATIONS = {
    "per replica": lambda mesh, places: gr.PerReplica([np.zeros(1)] * len(places), mesh[places]),
    "mirrored": lambda mesh, places: gr.Mirrored([np.zeros(1)] * len(places), mesh[places]),
    "variable": lambda mesh, places: gr.Variable(np.zeros(1), device=mesh[places]),
    "mesh": lambda mesh, places: mesh[places],
    "devices": lambda mesh, places: tuple(mesh.devices[p] for p in places),
    "names": lambda mesh, places: [f"gpu:{p}" for p in places],
    "both": lambda mesh, places: [mesh.devices[p] if p % 2 else f"sim:{p}" for p in places],
}


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("places", [[0], [3], [2, 1], [3, 1, 0], [1, 0, 3, 2], [0, 1, 2, 3]])
def test_anything_that_names_devices_is_a_destination(mesh, name, places):
    """The destination's mesh has priority over the default one; a name alone has no mesh."""
    arrays = [data(replica) for replica in range(4)]
    value = gr.PerReplica(arrays, mesh)
    destination = DESTINATIONS[name](mesh, places)
    matches = len(places) == 4
    with unchanged(*arrays):
        found = gr.HierarchicalCopyAllReduce(mesh=mesh).reduce(SUM, value, destination)
    wanted = range(4) if matches else places  # in the value's order if the devices match
    assert found.devices == tuple(mesh.devices[place] for place in wanted)
    check_mirrored(found, hierarchical_sum(arrays) if matches else one_device_sum(arrays))
    table = gr.IndexedSlices(arrays[0], [0, 1, 0], (2, 5))
    for make in (gr.NcclAllReduce, gr.HierarchicalCopyAllReduce, gr.ReductionToOneDevice):
        ops = make(mesh=mesh if name == "names" or destination == ["sim:0"] else None)
        for one in (arrays[0], table):
            for found in (ops.reduce(SUM, one, destination), ops.broadcast(one, destination)):
                assert found.devices == tuple(mesh.devices[place] for place in places)
                if one is not table:
                    check_mirrored(found, one)
                    assert not any(np.may_share_memory(each, one) for each in found.values)
    if isinstance(destination, gr.Variable):
        assert destination.numpy() == [0]


def test_the_copies_of_a_mirrored_value_have_a_mean_and_no_sum(mesh):
    arrays = [np.full(3, 2, np.float32) for _ in mesh]
    tables = [gr.IndexedSlices(array, [0, 1, 0], (2,)) for array in arrays]
    text = (
        r"^value 1 is a Mirrored, whose replicas are equal: SUM would add its copies; pass a "
        r"PerReplica of the terms, or call broadcast to copy the value$"
    )
    alone = gr.Mirrored(arrays[:1], mesh[2:3])
    for ops in (gr.NcclAllReduce(), gr.HierarchicalCopyAllReduce(), gr.ReductionToOneDevice()):
        for mirrored in (gr.Mirrored(arrays, mesh), gr.Mirrored(tables, mesh)):
            for target in (mesh, "sim:2"):
                ops.reduce(MEAN, mirrored, target)
                with refused(mesh, ValueError, text):
                    ops.batch_reduce(SUM, [(alone, alone), (mirrored, target)])
        check_mirrored(ops.reduce(MEAN, gr.Mirrored(arrays, mesh), mesh), arrays[0])
        check_mirrored(ops.reduce(SUM, alone, "sim:1"), arrays[0])


def test_the_mean_of_one_array_is_not_that_of_several_replicas(mesh):
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    array = data(0)
    text = (
        r"^value 0 is one array, but the destination has {} replicas to take the mean of: pass a "
        r"PerReplica with an array for each, or call broadcast to copy the array$"
    )
    buffer, table = mesh.devices[1].upload(array), gr.IndexedSlices(array[:1], [0])
    for value in (array, buffer, table):
        variable = gr.Variable(np.zeros(1), device=mesh[:2])
        for count, target in ((4, mesh), (2, variable), (4, gr.PerReplica([array] * 4, mesh))):
            with mesh.journal() as journal, pytest.raises(ValueError, match=text.format(count)):
                ops.reduce(MEAN, value, target)
            assert not [each for each in journal.records if each.kind == "launch"]
        ops.reduce(MEAN, value, ["sim:2", "sim:0"])
    for several in ([array] * 4, (array,)):
        with pytest.raises(ValueError, match=r"^value 0 is (list|tuple); pass a PerReplica"):
            ops.reduce(MEAN, several, mesh)
    with gr.open_mesh(1, backend="sim") as one:
        check_mirrored(gr.HierarchicalCopyAllReduce().reduce(MEAN, array, one), array)


@pytest.mark.parametrize(
    "make", [gr.NcclAllReduce, gr.HierarchicalCopyAllReduce, gr.ReductionToOneDevice]
)
def test_if_the_devices_match_the_result_has_the_order_of_the_value(mesh, make):
    """For dense and sparse values, all-reduced or added on one device."""
    backwards = mesh.devices[::-1]
    arrays = [exact_data(SHAPE, "float32", seed=replica) for replica in range(4)]
    tables = [gr.IndexedSlices(array, [0, 1, 0], (2, 5)) for array in arrays]
    for parts in (arrays, tables, [tables[0], *[array[:2] for array in arrays[1:]]]):
        value = gr.PerReplica(parts, devices=backwards)
        for destination, wanted in (
            (mesh, backwards),
            ([f"sim:{place}" for place in (2, 0, 3, 1)], backwards),
            (["sim:2", "sim:0"], [mesh.devices[2], mesh.devices[0]]),
        ):
            found = make(mesh=mesh).reduce(SUM, value, destination)
            assert list(found.devices) == list(wanted)


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "copies"])
@pytest.mark.parametrize("place", [owned, adopted])
@pytest.mark.parametrize(
    ("destination", "launches", "copies"),
    [
        (["sim:0"], 1, 0),  # two replicas cross, one launch adds
        (["sim:3"], 1, 0),
        (["sim:0", "sim:1"], 2, 0),  # and one launch copies the sum out
        (["sim:2", "sim:0", "sim:1"], 2, 1),  # one copy crosses back, one launch serves the second
    ],
)
def test_memory_of_peers_is_read_directly_and_other_memory_is_copied(
    destination, launches, copies, place, peers
):
    """The launch reads the memory of peers, users' arrays too; otherwise it is copied."""
    with MeshCase((0, 0, 1, 1), peers).open() as mesh:
        value = per_replica(mesh, data, place)
        with mesh.journal() as journal:
            found = gr.ReductionToOneDevice().reduce(MEAN, value, destination)
        check_mirrored(found, one_device_sum([data(replica) for replica in range(4)], 4))
    nbytes = data(0).nbytes
    copied = [record.nbytes for record in journal.of("copy")]
    assert copied == [nbytes] * (copies + 2 * (not peers))
    read = [record.nbytes for record in journal.of("launch")]
    assert read == [2 * nbytes * peers] + [0] * (launches - 1)
    assert not journal.of("sync")
