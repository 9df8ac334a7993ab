"""Every wrong argument of a reduction raises, with its name, before any device is used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
from support.meshes import MeshCase, owned, per_replica, refused, unchanged

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.errors import BackendUnavailableError, DeviceMismatchError, about
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


@pytest.fixture
def mesh():
    with MeshCase((0, 0, 1)).open() as opened:
        yield opened


@pytest.fixture(params=ALGORITHMS)
def ops(request, mesh):
    return gr.AllReduceCrossDeviceOps(request.param, mesh=mesh)


@pytest.fixture
def value(mesh):
    return per_replica(mesh, lambda replica: np.full(4, replica, np.float32))


@pytest.mark.parametrize("name", ["NCCL", "", "ring", None, 0])
def test_an_unknown_algorithm(name):
    with pytest.raises(ValueError, match=r"all_reduce_alg=.* is not one of \['nccl', 'hierarch"):
        gr.AllReduceCrossDeviceOps(name)


@pytest.mark.parametrize("number", [-1, True, np.True_, False, 1.0, "1", None])
@pytest.mark.parametrize(
    "name", ["num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"]
)
def test_a_number_that_is_not_a_non_negative_integer(name, number):
    with pytest.raises(ValueError, match=f"{name}={number!r} must be a non-negative integer"):
        gr.AllReduceCrossDeviceOps(**{name: number})


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1, 64), "agg_small_grads_max_bytes=64 has no effect with num_packs=1"),
        ((3, 0, 2), "agg_small_grads_max_group=2 has no effect with num_packs=3"),
        ((2, 64, 2), "agg_small_grads_max_bytes=64 and agg_small_grads_max_group=2 have no effect "
         "with num_packs=2"),
    ],
)  # fmt: skip
def test_what_packs_overrule_is_warned_of_where_it_is_passed(numbers, text):
    with pytest.warns(UserWarning) as warned:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", *numbers)
        with gr.open_mesh(2, backend="sim") as mesh:  # a reduction does not warn again
            value = gr.PerReplica([np.ones(2)] * 2, mesh)
            assert ops.reduce(SUM, value, value).primary.tolist() == [2, 2]
    (warning,) = warned
    assert str(warning.message) == f"{text}: pass num_packs=0 to reduce small gradients in groups"
    assert warning.filename == __file__
    for silent in ((), (0, 64, 2), (0, 0, 2), (2, 0, 10)):
        gr.AllReduceCrossDeviceOps("hierarchical_copy", *silent)  # a warning would be an error


@pytest.mark.parametrize("preset", [gr.NcclAllReduce, gr.HierarchicalCopyAllReduce])
def test_presets_check_their_number_too(preset, value):
    with pytest.raises(ValueError, match="num_packs=-2"):
        preset(-2)
    assert preset().num_packs == 1
    assert preset(0).num_packs == 0
    assert preset(3).reduce(SUM, value, value).values[1][0] == 3


def test_the_type_of_the_argument_names_all_algorithms():
    assert get_args(AllReduceAlg) == tuple(ALGORITHMS)


def test_presets_choose_the_algorithm():
    assert gr.NcclAllReduce().all_reduce_alg == "nccl"
    assert gr.HierarchicalCopyAllReduce().all_reduce_alg == "hierarchical_copy"
    assert gr.AllReduceCrossDeviceOps().all_reduce_alg == "nccl"
    assert isinstance(gr.NcclAllReduce(), gr.CrossDeviceOps)


@pytest.mark.parametrize("given", [3, "sim:0", [0, 1], "device"], ids=repr)
def test_an_invalid_mesh(mesh, given):
    wrong = mesh.devices[0] if given == "device" else given
    for make in (
        gr.AllReduceCrossDeviceOps,
        gr.NcclAllReduce,
        gr.HierarchicalCopyAllReduce,
        gr.ReductionToOneDevice,
        lambda mesh: gr.all_reduce([[1.0]] * 3, mesh=mesh),
    ):
        with refused(mesh, ValueError, "^mesh=.* must be a Mesh; gr.open_mesh"):
            make(mesh=wrong)


@pytest.mark.parametrize("op", ["sum", "SUM", "MEAN", None, 0, gr.ReduceOp])
def test_a_wrong_operation(mesh, ops, value, op):
    with refused(mesh, ValueError, r"reduce_op=.* must be ReduceOp\.SUM or ReduceOp\.MEAN"):
        ops.reduce(op, value, value)
    with refused(mesh, ValueError, "reduce_op="):
        ops.batch_reduce(op, [])
    with refused(mesh, ValueError, "^op="):
        ops.all_reduce([[np.ones(2)]] * 3, op)


def test_a_mesh_in_the_place_of_the_operation(mesh, ops):
    for call in (ops.all_reduce, gr.all_reduce):
        with refused(mesh, ValueError, r"^op=<Mesh .* must be ReduceOp\..*by name: mesh="):
            call([[np.ones(2)]] * 3, mesh)


@pytest.mark.parametrize("wrong", ["list", "three", "one", "no tuple", "none"])
def test_a_wrong_pair(mesh, ops, value, wrong):
    pair = {
        "list": [value, value], "three": (value, value, value), "one": (value,),
        "no tuple": value, "none": None,
    }[wrong]  # fmt: skip
    with refused(mesh, ValueError, r"value_destination_pairs\[1\] must be a tuple of size 2"):
        ops.batch_reduce(SUM, [(value, value), pair])


@pytest.mark.parametrize("wrong", ["none", "value", "dict", "generator"])
def test_pairs_are_a_list_or_a_tuple(mesh, ops, value, wrong):
    given = {"none": None, "value": value, "dict": {value: value}, "generator": iter([])}[wrong]
    with refused(mesh, ValueError, "must be a list or a tuple of pairs, not"):
        ops.batch_reduce(SUM, given)


@pytest.mark.parametrize(
    "destination", [None, "", [], (), 0, np.zeros(3), [None], ["sim:0", ""], [["sim:0"]]], ids=repr
)
def test_a_destination_that_names_no_device(mesh, ops, value, destination):
    with refused(mesh, ValueError, "destination 0 is .* non-empty list"):
        ops.reduce(SUM, value, destination)
    with refused(mesh, ValueError, "destination 1 is "):
        ops.batch_reduce(SUM, [(value, value), (value, destination)])


@pytest.mark.parametrize(
    "name",
    ["sim:3", "gpu:3", "/device:GPU:99", "cpu:0", "gpu", "gpu:-1", "sim:0 ", "sim:x",
     "/task:0gpu:1", "/job:workergpu:1", "//gpu:1", "/device:/gpu:1"],
)  # fmt: skip
@pytest.mark.parametrize("listed", [False, True])
def test_a_name_of_no_device(mesh, ops, value, name, listed):
    destination = ["sim:0", name] if listed else name
    with refused(mesh, ValueError, f"destination 1: '{name}' is not (the name of )?a device"):
        ops.batch_reduce(SUM, [(value, value), (value, destination)])
    with refused(mesh, ValueError, "destination 0: "):
        ops.broadcast(value.parts[0], destination)


def test_a_destination_that_names_a_device_twice(mesh, ops, value):
    for twice in (["sim:1", "/gpu:1"], [mesh.devices[1], "sim:1"], [mesh.devices[1]] * 2):
        with refused(mesh, ValueError, "destination 0 names a device twice"):
            ops.reduce(SUM, value, twice)


def test_a_destination_on_another_mesh(mesh, ops, value):
    with (
        MeshCase((0, 1)).open() as other,
        refused(mesh, DeviceMismatchError, "destination 0: .* belongs to another mesh"),
    ):
        ops.reduce(SUM, value, other)


@pytest.mark.parametrize("wrong", [None, 1.0, "sim:0", [np.ones(4)] * 3, object()], ids=repr)
def test_an_invalid_value(mesh, ops, value, wrong):
    text = r" is \w+; pass a PerReplica, an array or IndexedSlices"
    with refused(mesh, ValueError, "value 1" + text):
        ops.batch_reduce(SUM, [(value, value), (wrong, value)])
    if isinstance(wrong, float):
        return  # can be broadcast
    many = isinstance(wrong, list)  # arrays to broadcast; here one of them is no array
    with refused(mesh, ValueError, (r"tensor\[3\]" if many else "tensor") + text):
        ops.broadcast([*wrong, None] if many else wrong, mesh)


def test_several_replicas_are_not_broadcast(mesh, ops, value):
    with refused(
        mesh, ValueError, "tensor is a PerReplica of 3 replicas, which may differ: pass one"
    ):
        ops.broadcast(value, mesh)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((4, 1), "float32", r"float32\[4, 1\]"),
        ((5,), "float32", r"float32\[5\]"),
        ((), "float32", r"float32\[\]"),
        ((4,), "float16", r"float16\[4\]"),
        ((4,), "int32", r"int32\[4\]"),
    ],
)
def test_replicas_that_differ(mesh, ops, value, shape, dtype, text):
    arrays = [np.ones(4, np.float32), np.ones(4, np.float32), np.ones(shape, dtype)]
    odd = gr.PerReplica(arrays, mesh)
    with (
        unchanged(*arrays),
        refused(mesh, ValueError, rf"value 1: replica 2 is {text}, replica 0 is float32\[4\]"),
    ):
        ops.batch_reduce(SUM, [(value, value), (odd, value)])
    with refused(mesh, ValueError, rf"grads\[2\]\[0\] is {text}, grads\[0\]\[0\] is float32\[4\]"):
        ops.all_reduce([[array] for array in arrays])


UNFIT = {
    "truth values": (np.ones(4, bool), TypeError, "dtype bool cannot be added"),
    "objects": (np.array([None]), TypeError, "dtype object cannot be added"),
    "another byte order": (np.ones(4, ">f4"), TypeError, "dtype >f4 cannot be added"),
    "none": (None, TypeError, "NoneType is not an array"),
    "text": ("1", TypeError, "str is not an array"),
    "a masked array": (np.ma.masked_array(np.ones(4)), TypeError, "would lose its mask"),
    "a ragged list": ([1.0, [2.0]], ValueError, "inhomogeneous"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("replica", range(3))
def test_what_cannot_be_reduced_is_named_by_replica_and_position(mesh, ops, name, replica):
    odd, error, text = UNFIT[name]
    good = np.ones(4, np.float32)
    grads = [{"a": good, "b": good} for _ in mesh]
    grads[replica]["b"] = odd
    missing = r"\['b'\] is None, but grads.* is not: pass zeros"
    wanted, kind = (missing, ValueError) if odd is None else (rf"\['b'\]: .*{text}", error)
    with refused(mesh, kind, rf"^grads\[{replica}\]{wanted}"):
        ops.all_reduce(grads)
    with refused(mesh, error, f"^replica {replica}: .*{text}"):
        gr.PerReplica([entry["b"] for entry in grads], mesh)


@pytest.mark.parametrize("name", ["truth values", "objects", "another byte order"])
def test_an_array_that_cannot_be_reduced_is_named_by_its_position(mesh, ops, value, name):
    odd, error, text = UNFIT[name]
    with refused(mesh, error, f"^value 1: {text}"):
        ops.batch_reduce(SUM, [(value, value), (odd, value)])
    if name != "truth values":  # which are copied, but not added
        with refused(mesh, error, f"^tensor: {text}"):
            ops.broadcast(odd, mesh)


def test_an_error_of_a_class_that_is_not_ours_keeps_its_text():
    """The exception class of another library may need other arguments than a text."""

    class ForeignError(TypeError):
        def __init__(self, tracer, context):
            super().__init__(f"{tracer} {context}")

    foreign = ForeignError("a", "b")
    assert about("value 1", foreign) is foreign
    named = about("value 1", DeviceMismatchError("elsewhere"))
    assert (type(named), str(named)) == (DeviceMismatchError, "value 1: elsewhere")


def test_replicas_are_compared_with_the_first(mesh, ops):
    odd = gr.PerReplica([np.ones(3), np.ones(4), np.ones(4)], mesh)
    with refused(mesh, ValueError, r"replica 1 is float64\[4\], replica 0 is float64\[3\]"):
        ops.reduce(SUM, odd, odd)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_as_many_entries_as_devices(mesh, ops, count):
    with refused(mesh, ValueError, f"grads has {count} entries; .* one entry for each of 3 dev"):
        ops.all_reduce([[np.ones(2)]] * count)


@pytest.mark.parametrize("grads", [None, {0: [1.0]}, 3, np.ones((3, 2)), "abc"], ids=repr)
def test_entries_in_a_list_or_tuple(mesh, ops, grads):
    with refused(mesh, ValueError, "grads must be a list or tuple"):
        ops.all_reduce(grads)


@pytest.mark.parametrize(
    "odd",
    [[np.ones(2)], [np.ones(2)] * 3, (np.ones(2),) * 2, {0: np.ones(2), 1: np.ones(2)}],
    ids=["short", "long", "tuple", "dict"],
)
def test_entries_that_differ(mesh, ops, odd):
    grads = [[np.ones(2)] * 2, [np.ones(2)] * 2, odd]
    how = {tuple: "is a tuple, not a list", dict: "is a dict, not a list"}.get(
        type(odd), rf"has {len(odd)}, grads\[0\] has 2"
    )
    with refused(mesh, ValueError, rf"grads\[2\] has other tensors than grads\[0\]: it {how}"):
        ops.all_reduce(grads)


def test_dicts_that_differ(mesh, ops):
    ones, many = np.ones(2), {name: np.ones(2) for name in "abcdefghijkl"}
    for first, second, how in (
        ({"a": ones}, {"b": ones}, "it lacks 'a' and it has also 'b'"),
        ({"a": ones}, {"a": ones, "b": ones}, "it has also 'b'"),
        (many, {"b": ones, "c": ones}, "it lacks 'a', 'd', 'e', 'f', 'g' and 5 more"),
    ):
        text = rf"grads\[1\] has other tensors than grads\[0\]: {how}$"
        with refused(mesh, ValueError, text):
            ops.all_reduce([first, second, first])
    zeros = [[np.zeros(2), np.zeros(3)] for _ in mesh]
    with refused(mesh, ValueError, r"out\[1\] has other tensors than grads\[0\]: it has 1, grads"):
        ops.all_reduce(zeros, out=[zeros[0], zeros[1][:1], zeros[2]])
    with refused(mesh, ValueError, "out has 2 entries; .* each of 3 devices, as grads has"):
        ops.all_reduce(zeros, out=zeros[:2])
    with refused(mesh, ValueError, r"^out\[2\]\[1\]: out is float64\[2\]"):
        ops.all_reduce(zeros, out=[zeros[0], zeros[1], [np.zeros(2), np.zeros(2)]])
    shared = [[np.zeros(2), np.zeros(2)] for _ in mesh]
    with refused(mesh, ValueError, r"out\[1\]\[1\] overlaps grads\[1\]\[0\]; an out may be"):
        ops.all_reduce(shared, out=[shared[0], shared[1][::-1], shared[2]])


@pytest.mark.parametrize("entry", [None, 1.0, np.ones(2), {1.0}], ids=repr)
def test_an_entry_that_is_no_nest(mesh, ops, entry):
    with refused(
        mesh, ValueError, r"grads\[1\] must be a list, tuple or dict of arrays, or .*, not"
    ):
        ops.all_reduce([[np.ones(2)], entry, [np.ones(2)]])


def test_buffers_on_the_wrong_device(mesh, ops):
    buffers = [owned(device, np.ones(2)) for device in mesh]
    with refused(
        mesh, DeviceMismatchError, r"^grads\[0\]\[0\]: .* was passed as the value for sim:0"
    ):
        ops.all_reduce([[buffer] for buffer in buffers[::-1]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_closed_mesh(algorithm):
    with MeshCase((0, 1)).open() as mesh:
        value = per_replica(mesh, lambda replica: np.ones(2, np.float32))
        ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
    for call in (
        lambda: ops.reduce(SUM, value, value),
        lambda: ops.reduce(SUM, value, "sim:1"),
        lambda: ops.all_reduce([[np.ones(2)]] * 2),
        lambda: ops.plan(SUM, [(value, value)]),
        lambda: ops.broadcast(value.parts[0], mesh),
        lambda: ops.broadcast(np.ones(2), "sim:1"),
        lambda: gr.ReductionToOneDevice().reduce(SUM, value, value),
    ):
        with refused(mesh, BackendUnavailableError, "was closed"):
            call()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_failed_device_stops_a_batch_before_the_others_are_asked(mesh, ops, lost):
    """Whether the failed device has a replica or should get a result."""
    value = per_replica(mesh, lambda replica: np.ones(4, np.float32), owned)
    near = gr.PerReplica([value.buffers[2 - lost]])
    mesh.synchronize()
    mesh.devices[lost].mark_failed("tested")
    one = gr.ReductionToOneDevice()
    for call in (
        lambda: ops.batch_reduce(SUM, [(near, near), (value, near)]),
        lambda: ops.batch_reduce(SUM, [(near, near), (near, mesh)]),
        lambda: ops.batch_reduce(SUM, [(near, near), (value, value)]),
        lambda: one.batch_reduce(SUM, [(near, near), (value, near)]),
        lambda: one.batch_reduce(SUM, [(near, near), (near, mesh.devices[lost])]),
        lambda: ops.broadcast(near.parts[0], mesh),
        lambda: ops.broadcast(value.parts[lost], near),
        lambda: ops.plan(SUM, [(near, near), (value, near)]),
    ):
        with refused(mesh, BackendUnavailableError, f"sim:{lost} failed: tested"):
            call()
    assert (ops.reduce(SUM, near, near).buffers[0].numpy() == 1).all()


def test_a_closed_mesh_stops_a_batch_before_an_open_one_is_used(mesh, ops, value):
    with MeshCase((0, 1)).open() as other:
        late = per_replica(other, lambda replica: np.ones(2, np.float32))
    with refused(mesh, BackendUnavailableError, "was closed"):
        ops.batch_reduce(SUM, [(value, value), (late, late)])


@pytest.mark.parametrize("name", ["tensor", "", 3, "cupy"])
def test_an_unavailable_output_type(mesh, ops, value, name, monkeypatch):
    if name == "cupy":  # also if it is installed: simulated devices are host memory
        monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    for call in (
        lambda: ops.reduce(SUM, value, value, output_type=name),
        lambda: ops.batch_reduce(SUM, [(value, value), (value, "sim:1")], output_type=name),
        lambda: ops.all_reduce([[np.ones(2)]] * 3, output_type=name),
        lambda: ops.broadcast(value.parts[0], mesh, output_type=name),
        lambda: gr.ReductionToOneDevice().reduce(SUM, value, value, output_type=name),
    ):
        with refused(mesh, ValueError, f"output_type={name!r}"):
            call()


def test_the_base_class_reduces_nothing():
    with pytest.raises(TypeError, match="abstract"):
        gr.CrossDeviceOps()
